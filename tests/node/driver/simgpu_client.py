# SPDX-License-Identifier: Apache-2.0
"""How programs talk to the bookkeeper of the simulated GPUs: one JSON object a line, one reply to each.

Knows the socket, the framing and the way a refusal comes back; what may be asked is simgpu.py's business.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any

CONTROL = "/run/simgpu/control"
MIB = 1 << 20


class Refused(Exception):
    """The bookkeeper would not do it; code is a word for programs, such as out_of_memory."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class Client:
    """One connection, made when the first request is and again after the bookkeeper was restarted.

    From outside the node, path is /proc/LEADER/root/run/simgpu/control.  The bookkeeper then cannot tell who
    is asking, so that memory can only be allocated for a process by naming its pid as the node numbers it.
    """

    def __init__(self, path: str | None = None, *, timeout: float = 30.0) -> None:
        self.path = path or os.environ.get("SIMGPU_CONTROL") or CONTROL
        self.timeout = timeout
        self._socket: socket.socket | None = None
        self._pid = 0
        self._pending = b""

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._pending = b""

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """Sends one request; returns the reply, or raises Refused."""
        # The kernel tells the bookkeeper who connected, not who is writing now: a forked child needs its own.
        if self._pid != os.getpid():
            self.close()
        patience = self.timeout + float(fields.get("timeout", 0))
        line = json.dumps({"op": op, **fields}).encode() + b"\n"
        try:
            reply = self._exchange(line, patience)
        except (ConnectionError, BrokenPipeError):
            self.close()
            reply = self._exchange(line, patience)
        except OSError:
            self.close()
            raise
        if not reply.pop("ok"):
            raise Refused(reply["error"], reply["message"])
        return reply

    def _exchange(self, line: bytes, patience: float) -> dict[str, Any]:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.settimeout(self.timeout)
            self._socket.connect(self.path)
            self._pid = os.getpid()
        self._socket.settimeout(patience)
        self._socket.sendall(line)
        while b"\n" not in self._pending:
            more = self._socket.recv(65536)
            if not more:
                raise ConnectionError("the bookkeeper closed the connection")
            self._pending += more
        answer, self._pending = self._pending.split(b"\n", 1)
        reply: dict[str, Any] = json.loads(answer)
        return reply
