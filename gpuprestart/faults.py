"""How waiting can fail: exceptions that carry no values of the model.

They stand apart because the child that talks to the driver is forked before the model is loaded.
"""

from __future__ import annotations


class Interrupted(BaseException):
    """SIGTERM or SIGINT arrived while we waited. Not an ``Exception``: nothing on the way may swallow it."""

    def __init__(self, signal_name: str) -> None:
        super().__init__(signal_name)
        self.signal_name = signal_name


class Silent(Exception):
    """A child gave no answer in time. It is still there and may be stuck in the kernel."""


class Died(Exception):
    """A child ended without an answer; the text says how."""
