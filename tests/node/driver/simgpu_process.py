# SPDX-License-Identifier: Apache-2.0
"""What the programs that hold simulated GPUs do to themselves: fork, rename, lead a session, tell systemd.

Knows Linux only; nothing here has heard of GPUs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import traceback
from typing import Callable


def start_child(function: Callable[[], object]) -> int:
    """Forks.  The child runs the function and ends, whatever happens: it never returns to our code."""
    # A signal that arrived between the fork and the child's own arrangements would find the parent's handler,
    # which tells nobody here.  It has to wait, and then means what it means to any program.
    ending = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ending)
        return pid
    try:
        signal.set_wakeup_fd(-1)
        for number in ending:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ending)
        function()
    finally:
        error = sys.exc_info()[1]
        code = error.code if isinstance(error, SystemExit) else None if error is None else 1
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
        elif error is not None and not isinstance(error, SystemExit):
            traceback.print_exception(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


def rename(comm: str) -> None:
    """Sets the thread's name.  The kernel keeps 15 bytes and takes newlines and all; so do we."""
    with open("/proc/self/comm", "wb", buffering=0) as file:
        file.write(comm.encode(errors="surrogateescape")[:15])


def new_session() -> None:
    """A process that leads a group, as systemd's children do, already leads a session or cannot."""
    with contextlib.suppress(PermissionError):
        os.setsid()


def notify(message: str) -> bool:
    """Sends a line such as READY=1 to the service manager; False where there is none to send it to."""
    where = os.environ.get("NOTIFY_SOCKET")
    if not where:
        return False
    address = "\0" + where[1:] if where.startswith("@") else where
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to:
        to.connect(address)
        to.sendall(message.encode())
    return True
