"""Text for whoever reads standard output, who may be gone, or may not read on: nobody is kept waiting, nothing is lost.

Knows nothing of what it says.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import time
from typing import TextIO

#: Seconds for which a reader of standard output that does not read is waited for, whatever else there is to be done.
PATIENCE = 2.0

#: A pipe that polls writable takes this much without blocking (PIPE_BUF).
_PIECE = 4096


def show(text: str, *, out: TextIO, err: TextIO, waiting: bool = True) -> None:
    """Print it. A reader that has gone, or a full disk, changes nothing of what was found. One that does not read for
    long, as a pager does not until somebody turns the page, is waited for unless a server waits for us.
    """
    try:
        write(out, text, waiting=waiting)
    except OSError as error:
        # Whoever has gone, as head(1) does, has what it wanted.
        if error.errno != errno.EPIPE:
            complain(f"gpuprestart: cannot write to standard output: {error.strerror}", err)
        # The interpreter tries once more when it ends, and would end with a status of its own.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, out.fileno())
        os.close(null)


def complain(line: str, err: TextIO) -> None:
    with contextlib.suppress(OSError):
        print(line, file=err)


def write(out: TextIO, text: str, *, waiting: bool = False) -> None:
    """Write in pieces, so that nobody who does not read keeps a start waiting, and what the locale cannot say escaped,
    since a process may call itself anything. Raises OSError."""
    try:
        descriptor = out.fileno()
    except (OSError, ValueError):
        out.write(text)
        return
    out.flush()
    left = memoryview(text.encode(out.encoding or "utf-8", "backslashreplace"))
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    until = time.monotonic() + PATIENCE
    while left:
        if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
            if not waiting:
                raise TimeoutError(errno.ETIMEDOUT, "nobody reads it")
            _await(poll)
            until = time.monotonic() + PATIENCE
        left = left[os.write(descriptor, left[:_PIECE]) :]


def _await(poll: select.poll) -> None:
    """Until it is read on, or until a signal comes: what is not written by then is given up, and the exit status stays
    what it was to be."""
    import signal

    def give_up(*_: object) -> None:
        raise InterruptedError(errno.EINTR, "a signal came before it was read")

    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    # Where nobody wants to hear of it, it ends us or it does not, as ever.
    before = {number: signal.signal(number, give_up) for number in numbers if callable(signal.getsignal(number))}
    try:
        poll.poll()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
