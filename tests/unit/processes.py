"""Real processes for tests to look at, and a wait that heeds no signals."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Optional

#: Far longer than anything here takes; a test that waits so long has failed.
PATIENCE = 10.0


def wait(descriptors: Iterable[int], seconds: float) -> set[int]:
    """``model.Wait``, without the waiter's hold on the signals of the process that runs the tests."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(max(0.0, seconds) * 1000)}


@contextmanager
def python(code: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that has come as far as printing a line; killed and reaped at the end."""
    command = [sys.executable, "-I", "-S", "-c", code, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout and wait([child.stdout.fileno()], PATIENCE)
            assert child.stdout.readline() == b"ready\n"
            yield child
        finally:
            child.kill()


@contextmanager
def waiting(*, ignoring: Iterable[signal.Signals] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for its input to end, ignoring these signals from its first instruction on."""

    def ignore() -> None:
        for number in ignoring:
            signal.signal(number, signal.SIG_IGN)

    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, preexec_fn=ignore) as child:  # noqa: PLW1509
        try:
            yield child
        finally:
            child.kill()


class Hangs(Exception):
    """It was not through in time."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Cut short what takes more of the processor's time, be it in the middle of a regular expression. That it counts
    the time of no other process makes it fit for a machine that has much else to do."""

    def cut(number: int, frame: Optional[FrameType]) -> None:
        raise Hangs

    before = signal.signal(signal.SIGPROF, cut)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def is_running(child: subprocess.Popen[bytes]) -> bool:
    return child.poll() is None


def stop(pid: int) -> None:
    """Stop a child of ours and come back when it is stopped."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def await_death(pid: int) -> None:
    """Come back when a child of ours is dead, and leave it unreaped: a zombie."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
