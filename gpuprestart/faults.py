"""How waiting can fail, and what is no fault of ours: without values of the model.

They stand apart because the child that talks to the driver is forked before the model is loaded.
"""

from __future__ import annotations

import errno

#: What is to be said where ``scarce``.
SCARCE = "this machine, or the unit, gives us no more processes, memory or open files"


def scarce(error: BaseException) -> bool:
    """Whether it is no fault of ours that something failed, but of what we are given."""
    shortages = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in shortages)


class Interrupted(BaseException):
    """A signal that asks us to end arrived while we waited. Not an ``Exception``: nothing on the way may swallow it."""

    def __init__(self, signal_name: str) -> None:
        super().__init__(signal_name)
        self.signal_name = signal_name


class Silent(Exception):
    """A child gave no answer in time. It is still there and may be stuck in the kernel."""


class Died(Exception):
    """A child ended without an answer; the text says how."""
