"""The one place where the program waits: poll() over descriptors, which a signal cuts short.

A signal that asks us to end never interrupts a step half-way. It is noted, and raised as ``Interrupted`` from the next
wait (or from the one it arrives in), once; what is still to be waited for after that is part of ending in good order.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterable

from ..faults import Interrupted

#: What asks a process to end: a unit's KillSignal= and SendSIGHUP=, systemctl kill, a shell, a terminal that is closed.
ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Waiter:
    """A callable ``wait(descriptors, seconds)``, as ``model.Wait`` has it. There is one per process."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._deaf = False
        # Python writes the number of every caught signal to this descriptor, even one that arrives between the check
        # and the poll(), so that no signal can be slept through.
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in ENDING:
            # Under nohup(1) a terminal that is closed is to end nothing.
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*ENDING, signal.SIGCHLD))
        # Where whoever started us ignores it, and we with it, the kernel reaps children unasked: how they ended is
        # lost, and their PIDs may be somebody else's by the time that we end them.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def __call__(self, descriptors: Iterable[int], seconds: float) -> set[int]:
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        until = time.monotonic() + seconds
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(max(0.0, until - time.monotonic()) * 1000)}
            if self._read not in ready:
                return ready
            caught = os.read(self._read, 64)
            if not self._deaf:
                self._deaf = True
                raise Interrupted(signal.Signals(caught[0]).name)
            # It changes nothing any more, neither what is waited for nor for how long.
            ready.discard(self._read)
            if ready:
                return ready

    def deafen(self) -> None:
        """From here on no signal is raised: the verdict is reached, and what is left is to tell it."""
        self._deaf = True

    def forget(self) -> None:
        """What a forked child calls for before anything else."""
        signal.set_wakeup_fd(-1)
        obey_sigterm_alone()
        os.close(self._read)
        os.close(self._write)


def obey_sigterm_alone() -> None:
    """Have a forked child end by SIGTERM alone. The others go to the whole group or unit too, and what they mean is its
    parent's to decide, who ends it then."""
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL if number is signal.SIGTERM else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*ENDING, signal.SIGCHLD))
