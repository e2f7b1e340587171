"""The journal and standard error, by way of systemd-python; nothing happens at import.

Knows how a record reaches journald and what to do where it cannot. Refuses to raise, and to keep anybody waiting: a
start that is right must neither fail nor hang because of logging. Refuses to know what a record means.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterable, Mapping
from typing import Callable, Optional, Union

#: With LogNamespace= this is the socket of that namespace's journald: systemd mounts its directory over this one.
SOCKET = "/run/systemd/journal/socket"

#: A pipe that polls writable takes this much without blocking.
_LINE = 4000

#: A tuple is a field with several values.
Fields = Mapping[str, Union[str, tuple[str, ...]]]


class Journal:
    """Records to journald, or as lines to standard error.

    ``journal_stream`` is the variable JOURNAL_STREAM, by which systemd says which socket it connected; ``patience`` is
    how many seconds, all told, a reader that does not read is waited for.
    """

    def __init__(
        self,
        *,
        sendv: Optional[Callable[..., object]] = None,
        journal_stream: str = "",
        stderr: int = 2,
        socket_path: str = SOCKET,
        patience: float = 1.0,
    ) -> None:
        self._sendv = sendv
        self._stream = journal_stream
        self._stderr = stderr
        self._socket_path = socket_path
        self._patience = patience
        self._gate: Optional[int] = None
        self._last = ""

    def open(self) -> bool:
        """Load the library and find journald; whether records will go there. Until then they go to standard error.

        The library calls it success when there is no journald, and blocks when there is one that does not read. So a
        connected socket of our own stands beside the library's: it tells the one now, and the other before each record.
        """
        if self._gate is not None:
            return True
        try:
            # What the module socket wraps: it also loads selectors and enumerations, for which a server would wait.
            import _socket

            if self._sendv is None:
                self._sendv = _load_sendv()
            gate = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM)
            try:
                gate.connect(self._socket_path)
                self._gate = gate.detach()
            finally:
                gate.close()
        except (ImportError, OSError):
            return False
        return True

    def close(self) -> None:
        if self._gate is not None:
            os.close(self._gate)
            self._gate = None

    def send(self, message: str, message_id: str, priority: int, fields: Fields) -> bool:
        """One record, which goes to standard error where journald does not take it; whether journald did."""
        if self._gate is not None and self._sendv is not None and self._writable(self._gate):
            with contextlib.suppress(OSError, ValueError, MemoryError):
                # Not the library's send(), which reads its caller's source to fill in CODE_FILE= and CODE_LINE=.
                self._sendv(*_framed(message, message_id, priority, fields))
                return True
        self._write(message, "" if _is_terminal(self._stderr) else f"<{priority}>")
        return False

    def say(self, line: str, priority: int) -> None:
        """One line on standard error; journald, if that is what reads it, is told the priority.

        A record that journald did not take has been said already.
        """
        if line != self._last:
            self._write(line, f"<{priority}>" if self._is_journal_stream() else "")

    def _write(self, line: str, prefix: str) -> None:
        self._last = line
        text = prefix + " ".join(line.splitlines())
        if self._writable(self._stderr):
            with contextlib.suppress(OSError):
                os.write(self._stderr, text.encode("utf-8", "backslashreplace")[:_LINE] + b"\n")

    def _writable(self, descriptor: int) -> bool:
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        began = time.monotonic()
        ready = poll.poll(self._patience * 1000)
        self._patience = max(0.0, self._patience - (time.monotonic() - began))
        return any(events & select.POLLOUT for _, events in ready)

    def _is_journal_stream(self) -> bool:
        try:
            stat = os.fstat(self._stderr)
        except OSError:
            return False
        return self._stream == f"{stat.st_dev}:{stat.st_ino}"


def _load_sendv() -> Callable[..., object]:
    """The library's call. Its module systemd.journal only hands this function on, and loads logging, uuid and traceback
    for other purposes, which takes as long as loading half of this program."""
    try:
        from systemd._journal import sendv
    except ImportError:
        from systemd.journal import sendv
    found: Callable[..., object] = sendv
    return found


def _framed(message: str, message_id: str, priority: int, fields: Fields) -> Iterable[bytes]:
    """``NAME=value`` for every field that has a value.

    The library sends a value with a line end in it with its length in front, so no value can forge another field.
    """
    own = {
        "MESSAGE": message,
        "MESSAGE_ID": message_id,
        "PRIORITY": str(priority),
        "SYSLOG_IDENTIFIER": "gpuprestart",
    }
    for name, value in {**fields, **own}.items():
        for each in (value,) if isinstance(value, str) else value:
            if each:
                yield f"{name}={each}".encode("utf-8", "backslashreplace")


def _is_terminal(descriptor: int) -> bool:
    try:
        return os.isatty(descriptor)
    except OSError:
        return False
