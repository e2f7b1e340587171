"""A forked process that answers questions, so that an answer that never comes can be abandoned together with it.

A thread stuck in a driver call keeps its whole process from being reaped; a child can be left behind. It knows nothing
of what it is asked: requests and answers are plain values (numbers, strings, tuples, lists, dicts) carried by marshal,
which costs no import. Both ends are the same program on the same machine, so marshal's version cannot differ.
"""

from __future__ import annotations

import marshal
import os
import time

from ..faults import Died, Silent

# Whatever is loaded before the fork keeps the driver waiting, so here it is next to nothing.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    from ..model import Wait

#: Bytes before an answer: its length and its seal. And the most that an answer can have, many times over.
HEAD = 12
LONGEST = 1 << 26

#: How long a child that was sent SIGKILL may take before it is left behind as stuck in the kernel.
REAP = 0.2


class Child:
    """``answer`` runs in the child, once for every request, and must return a plain value.

    ``at_fork`` runs first in the child. Forking is done here and now: construct it before the heavy imports.
    """

    def __init__(self, *, answer: Callable[[Any], Any], wait: Wait, at_fork: Callable[[], None]) -> None:
        self._answer = answer
        self._wait = wait
        self.at_fork = at_fork
        self.start()

    def start(self) -> None:
        """Fork it: at first, and again after its end."""
        child_reads, self._requests = os.pipe2(os.O_CLOEXEC)
        self._answers, child_writes = os.pipe2(os.O_CLOEXEC)
        self._arrived = b""
        self._reaped = False
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(self._requests)
                os.close(self._answers)
                _mute()
                self.at_fork()
                _die_with(parent)
                _serve(self._answer, child_reads, child_writes)
                status = 0
            finally:
                os._exit(status)
        os.close(child_reads)
        os.close(child_writes)

    def send(self, request: Any) -> None:
        """Ask without waiting. Requests are small: a pipe takes them whole even when nobody reads."""
        # Where nobody is left to read, receive() finds the end of the file and says how the child ended.
        try:  # noqa: SIM105  What would suppress it is not loaded yet when the driver is asked first.
            os.write(self._requests, _framed(request))
        except BrokenPipeError:
            pass

    def receive(self, timeout: float) -> Any:
        """The answer to the oldest open request. Raises Silent after ``timeout`` seconds, Died, Interrupted."""
        deadline = time.monotonic() + timeout
        # What has come of an answer is kept, so that one that was too slow can still be waited for.
        self._fill(HEAD, deadline)
        size, seal = _head(self._arrived)
        if size > LONGEST:
            raise Died("gave an answer that cannot be one")
        self._fill(HEAD + size, deadline)
        body, self._arrived = self._arrived[HEAD : HEAD + size], self._arrived[HEAD + size :]
        if seal != _seal(body):
            raise Died("gave an answer that cannot be one")
        return marshal.loads(body)

    def ask(self, request: Any, timeout: float) -> Any:
        self.send(request)
        return self.receive(timeout)

    def _fill(self, size: int, deadline: float) -> None:
        while len(self._arrived) < size:
            if not self._wait([self._answers], deadline - time.monotonic()):
                raise Silent
            part = os.read(self._answers, 65536)
            if not part:
                raise Died(self._end())
            self._arrived += part

    def _end(self) -> str:
        status = self._reap(1.0)
        if status is None:
            return "closed its answers and hangs"
        if os.WIFSIGNALED(status):
            return f"was ended by {_signal_name(os.WTERMSIG(status))}"
        return f"exited with status {os.waitstatus_to_exitcode(status)}"

    def _reap(self, timeout: float) -> int | None:
        """Wait status of the child, or None if it is not dead within ``timeout`` seconds."""
        pidfd = os.pidfd_open(self.pid)
        try:
            if not self._wait([pidfd], timeout):
                return None
        finally:
            os.close(pidfd)
        _, status = os.waitpid(self.pid, 0)
        self._reaped = True
        return status

    def end(self) -> bool:
        """End the child. False if SIGKILL did not: then it is stuck in the kernel, and ``pid`` names it."""
        for descriptor in (self._requests, self._answers):
            if descriptor >= 0:
                os.close(descriptor)
        self._requests = self._answers = -1
        if self._reaped:
            return True
        import signal

        os.kill(self.pid, signal.SIGKILL)  # Our own unreaped child: its PID cannot have been given to another.
        return self._reap(REAP) is not None


def _signal_name(number: int) -> str:
    import signal

    # Most real-time signals have no name.
    return signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"


def _mute() -> None:
    """Let go of our standard streams: who reads what we print waits until nobody can write to it any more, and a child
    that hangs in a driver would keep it waiting long after we have ended."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    if null > 2:
        os.close(null)


def _die_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends, also while it hangs in a driver (prctl(2))."""
    import ctypes
    import signal

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # It was already too late to be told.


_PR_SET_PDEATHSIG = 1


def _framed(value: Any) -> bytes:
    body = marshal.dumps(value)
    return len(body).to_bytes(4, "little") + _seal(body) + body


def _head(frame: bytes) -> tuple[int, bytes]:
    return int.from_bytes(frame[:4], "little"), frame[4:HEAD]


def _seal(body: bytes) -> bytes:
    """What tells a whole frame from anything else that a driver gone wild may have written into the pipe: marshal takes
    gigabytes for some of that, or crashes. A fork has its parent's secret, so both ends find the same hash."""
    return hash(body).to_bytes(8, "little", signed=True)


def _serve(answer: Callable[[Any], Any], requests: int, answers: int) -> None:
    """Answer until the parent closes its end, which it also does by dying."""
    with open(requests, "rb") as source, open(answers, "wb", buffering=0) as sink:
        while head := source.read(HEAD):
            sink.write(_framed(answer(marshal.loads(source.read(_head(head)[0])))))


class Questions:
    """Puts questions to a child and starts another one when it hangs or dies; None is an answer that never came.

    After ``patience`` such children it gives up asking, so that a machine full of wedged processes costs seconds, not
    minutes. ``pids`` are those of all children that may still be there.
    """

    def __init__(self, start: Callable[[], Child], *, patience: int = 3) -> None:
        self._start = start
        self._patience = patience
        self._child: Child | None = None
        self.pids: set[int] = set()

    def __call__(self, request: Any, timeout: float) -> Any:
        if not self._patience:
            return None
        if self._child is None:
            self._child = self._start()
            self.pids.add(self._child.pid)
        try:
            return self._child.ask(request, timeout)
        except (Silent, Died):
            self._patience -= 1
            self.end()
            return None

    def end(self) -> None:
        if self._child is not None:
            pid = self._child.pid
            if self._child.end():
                self.pids.discard(pid)
            self._child = None
