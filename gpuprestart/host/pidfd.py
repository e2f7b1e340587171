"""Processes held by pidfd: the descriptor stays with the process that it was opened for, whatever becomes of its PID.

It knows how to open, signal and ask for death; whom to signal is decided elsewhere.
"""

from __future__ import annotations

import errno
import os
import signal

#: So many descriptors are enough, whatever the limit, and so many are kept free for others than pidfds.
MOST, HEADROOM = 16384, 48


def open_pidfd(pid: int) -> int | None:
    """A pidfd for the process, or None if it is gone or just going.

    pidfd_open(2) answers ESRCH for a process that is gone, and EINVAL for one that is exiting or a mere thread.
    """
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL):
            return None
        raise


def room() -> int:
    """How many pidfds may be open at once, with enough descriptors left for all that has to be asked meanwhile."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, MOST), hard))
    return max(1, min(hard, MOST) - HEADROOM)


def send(pidfd: int, number: signal.Signals) -> bool:
    """Send a signal; False if the process is gone. PermissionError where the kernel or a security module refuses."""
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    return True


def close(pidfd: int) -> None:
    os.close(pidfd)
