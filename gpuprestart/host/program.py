"""Runs programs that the policy names: by absolute path and argument list, no shell, with a time limit of their own.

Each has a process group of its own, which is ended with it, and an environment that holds what it is given and nothing
else. Until it executes it is a fork of ours that may hang on a dead mount; then it is killed, or left behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Callable, NamedTuple

from ..model import Wait

#: Where programs look for others, which is where systemd would have them look (systemd.exec(5)).
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

#: How long a program that was sent SIGKILL may take before it is left behind as stuck in the kernel.
REAP = 0.5

#: Bytes of its output that are kept, and those of why it could not be executed.
KEPT, REASON = 4096, 512


class Ended(NamedTuple):
    """How it went: ``fault`` completes the sentence "the program ...", and is empty where it exited with 0; ``said`` is
    the beginning of its output, where that was to be kept."""

    fault: str = ""
    timed_out: bool = False
    said: str = ""


class Programs:
    """``at_fork`` runs first in every fork; ``pids`` are those of programs that not even SIGKILL has ended."""

    def __init__(self, *, wait: Wait, at_fork: Callable[[], None], pids: set[int] | None = None) -> None:
        self._wait = wait
        self._at_fork = at_fork
        self.pids = set() if pids is None else pids

    def __call__(
        self,
        command: Sequence[str],
        *,
        environ: Mapping[str, str],
        timeout: float,
        check: Callable[[str], None],
        keep: bool = False,
    ) -> Ended:
        """Run it to its end, or for ``timeout`` seconds. Raises Interrupted, and has ended the program then too.

        ``check`` is given its path in the fork, right before it is executed; what it raises is why that is not done.
        The output goes where our own messages go, unless it is to be kept. Raises OSError where nothing can be forked.
        """
        refusal, refused = os.pipe2(os.O_CLOEXEC)
        output, written = os.pipe2(os.O_CLOEXEC) if keep else (-1, -1)
        pid = os.fork()
        if pid == 0:
            try:
                self._become(command, environ, check, refused, written)
            finally:
                os._exit(127)
        for descriptor in (refused, written):
            if descriptor >= 0:
                os.close(descriptor)
        # Done here as well as there, so that the group is there for us to end, whoever comes first.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        self.pids.add(pid)
        pidfd = os.pidfd_open(pid)
        said = b""
        dead = False
        try:
            until = time.monotonic() + timeout
            listening = {pidfd, output} - {-1}
            while not dead and (left := until - time.monotonic()) > 0:
                ready = self._wait(listening, left)
                if output in ready:
                    part = os.read(output, 65536)
                    said = (said + part)[:KEPT]
                    listening -= set() if part else {output}
                elif pidfd in ready:
                    dead = True
            timed_out = not dead
        finally:
            # Before it is reaped: until then its number is nobody else's, be it as a process or as a group.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            status = self._reap(pid, pidfd)
            os.set_blocking(refusal, False)
            reason = b""
            with contextlib.suppress(BlockingIOError):
                reason = os.read(refusal, REASON)
            for descriptor in (pidfd, refusal, output):
                if descriptor >= 0:
                    os.close(descriptor)
        told = said.decode("utf-8", "replace")
        if timed_out:
            stuck = ", and SIGKILL did not end it" if status is None else ""
            return Ended(f"was not done after {timeout:.3g} s{stuck}", timed_out=True, said=told)
        if reason:
            return Ended(f"was not run: {reason.decode('utf-8', 'replace')}", said=told)
        return Ended(_fault(status or 0), said=told)

    def _reap(self, pid: int, pidfd: int) -> int | None:
        """The wait status, or None where it does not die. Nothing interrupts this: it takes half a second at most."""
        import select

        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(REAP * 1000):
            return None
        _, status = os.waitpid(pid, 0)
        self.pids.discard(pid)
        return status

    def _become(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        check: Callable[[str], None],
        refused: int,
        written: int,
    ) -> None:
        """In the fork: become the program, or write down why not."""
        try:
            os.setpgid(0, 0)
            self._at_fork()
            for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                with contextlib.suppress(OSError):
                    signal.signal(number, signal.SIG_DFL)
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.dup2(written if written >= 0 else 2, 1)
            if written >= 0:
                os.dup2(written, 2)
            os.chdir("/")
            # Those of ours close by themselves; others may have been left to us by whoever started us.
            for name in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    os.set_inheritable(int(name), int(name) <= 2)
            check(command[0])
            os.execve(command[0], list(command), {"PATH": PATH, "LC_ALL": "C", **environ})
        except OSError as error:
            os.write(refused, f"{command[0]}: {error.strerror}".encode()[:REASON])
        except Exception as error:  # noqa: BLE001  Whatever it is, our parent has to hear of it.
            os.write(refused, str(error).encode("utf-8", "replace")[:REASON])


def _fault(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited with status {code}" if code else ""
    name = signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"
    return f"was ended by {name}"
