"""Runs one command on many machines at once, by the system's ssh, and hears what each has to say.

Knows how ssh is called, how long and how much it is listened to, and how it is ended: none outlives a run. Refuses to
know what is asked and what an answer means. The user's configuration of ssh, agent and known hosts apply; nobody is
asked for anything.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import time
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from typing import NamedTuple, Optional

from ..faults import scarce
from ..model import Wait

#: Not whichever a PATH has first.
PROGRAM = "/usr/bin/ssh"

#: Seconds for a connection, whose other side may also be silent, and until one that is dead is noticed to be.
CONNECT, ALIVE, ALIVE_COUNT = 10, 5, 3

#: What the user has configured holds but for this: there is nobody to be asked and nothing to be forwarded, what the
#: user has run there in every session is not what is to be run, no connection is kept for later in the background, and
#: banners are no answer.
OPTIONS = (
    "BatchMode=yes",
    f"ConnectTimeout={CONNECT}",
    f"ServerAliveInterval={ALIVE}",
    f"ServerAliveCountMax={ALIVE_COUNT}",
    "ClearAllForwardings=yes",
    "RemoteCommand=none",
    "ControlMaster=no",
    "LogLevel=ERROR",
)

#: Bytes of an answer, and those of what is said beside it that are kept.
MOST, MOST_SAID = 16 << 20, 64 << 10

#: So many are asked at the same time.
AT_ONCE = 32

#: Seconds that a process which was sent SIGKILL may take before it is left behind as stuck in the kernel.
REAP = 0.5


class Reply(NamedTuple):
    """``status`` is that of ssh: the command's own, or 255 where ssh failed; a negative one names a signal. ``fault``
    says why there is none."""

    host: str
    status: Optional[int] = None
    out: bytes = b""
    err: bytes = b""
    fault: str = ""
    seconds: float = 0.0


def ask(
    hosts: Iterable[str],
    command: Sequence[str],
    *,
    limit: float,
    wait: Wait,
    program: str = PROGRAM,
    most: int = MOST,
    at_once: int = AT_ONCE,
) -> Generator[Reply, None, None]:
    """A reply of each, in the order in which they come. Raises Interrupted, and has ended every ssh then too."""
    line = shlex.join(command)
    waiting, asked = deque(hosts), list[_Asked]()
    try:
        while waiting or asked:
            while waiting and len(asked) < at_once:
                try:
                    asked.append(_Asked(waiting[0], line, program, limit, most))
                except OSError as error:
                    if asked and scarce(error):
                        # There is enough again when one of these is through.
                        break
                    yield Reply(waiting[0], fault=f"{program} cannot be run: {error.strerror}")
                waiting.popleft()
            if not asked:
                continue
            listening = set[int]().union(*(each.listening for each in asked))
            ready = wait(listening, min(each.until for each in asked) - time.monotonic())
            for each in list(asked):
                reply = each.hear(ready)
                if reply is not None:
                    asked.remove(each)
                    yield reply
    finally:
        for each in asked:
            each.kill()
        until = time.monotonic() + REAP
        for each in asked:
            each.close(until)


class _Asked:
    """One ssh, with whatever it has started itself (ProxyCommand=) in one group."""

    def __init__(self, host: str, line: str, program: str, limit: float, most: int) -> None:
        import subprocess

        options = [word for option in OPTIONS for word in ("-o", option)]
        self._host, self._limit, self._most = host, limit, most
        self._began = time.monotonic()
        self.until = self._began + limit
        self._process = subprocess.Popen(
            [program, *options, "-T", "-x", "-a", "--", host, line],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            # No terminal, on which something might be asked all the same; and Ctrl-C is for us alone.
            start_new_session=True,
        )
        assert self._process.stdout and self._process.stderr
        self._out, self._err = self._process.stdout.fileno(), self._process.stderr.fileno()
        self._said = {self._out: bytearray(), self._err: bytearray()}
        self._amount = 0
        self._pidfd = -1
        try:
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError:
            self.kill()
            self.close(time.monotonic() + REAP)
            raise
        self.listening = {self._pidfd, self._out, self._err}

    def hear(self, ready: set[int]) -> Optional[Reply]:
        """The reply, once there is one; nothing is left of it then."""
        for descriptor in ready & self.listening - {self._pidfd}:
            self._read(descriptor)
        if self._amount > self._most:
            return self._give_up(f"the answer is longer than {self._most >> 20} MiB")
        if self._pidfd in ready:
            return self._over()
        if time.monotonic() >= self.until:
            return self._give_up(f"no answer within {self._limit:.3g} s")
        return None

    def _read(self, descriptor: int) -> bool:
        """Whether there may be more."""
        part = os.read(descriptor, 65536)
        self._amount += len(part)
        room = self._most if descriptor == self._out else MOST_SAID
        self._said[descriptor] += part[: max(0, room - len(self._said[descriptor]))]
        if not part:
            self.listening.discard(descriptor)
        return bool(part)

    def _over(self) -> Reply:
        """It has ended, and what it said is in the pipes; somebody else may have them open for ever."""
        self.kill()
        for descriptor in self.listening - {self._pidfd}:
            os.set_blocking(descriptor, False)
            with contextlib.suppress(BlockingIOError):
                while self._amount <= self._most and self._read(descriptor):
                    pass
        if self._amount > self._most:
            return self._give_up(f"the answer is longer than {self._most >> 20} MiB")
        return self._reply(self.close(time.monotonic() + REAP))

    def _give_up(self, fault: str) -> Reply:
        self.kill()
        self.close(time.monotonic() + REAP)
        return self._reply(None, fault)

    def _reply(self, status: Optional[int], fault: str = "") -> Reply:
        seconds = time.monotonic() - self._began
        return Reply(self._host, status, bytes(self._said[self._out]), bytes(self._said[self._err]), fault, seconds)

    def kill(self) -> None:
        """Until it is reaped its number is nobody else's, be it as a process or as a group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self, until: float) -> Optional[int]:
        """Reap it, if it is dead by then. Nothing interrupts this."""
        poll = select.poll()
        if self._pidfd >= 0:
            poll.register(self._pidfd, select.POLLIN)
        poll.poll(max(0.0, until - time.monotonic()) * 1000)
        status: Optional[int] = self._process.poll()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream
            stream.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
        return status
