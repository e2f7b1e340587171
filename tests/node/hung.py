"""A file system whose server has read a request and never answers: what is stuck there is in state D, also for SIGKILL.

It serves one file over /dev/fuse by hand, from this process. What it answers until then is just enough to have the file
opened, read and executed. It knows nothing of the node but the mount namespace of its PID 1.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from types import TracebackType

PATH = "/run/hung"

_LOOKUP, _GETATTR, _OPEN, _READ, _OPENDIR = 1, 3, 14, 15, 27
_INIT, _STATX = 26, 52
#: Nobody waits for an answer to these: FORGET, INTERRUPT, BATCH_FORGET.
_SILENT = (2, 36, 42)
_ENOSYS = -38
_CLONE_NEWNS = 0x20000


class Hung:
    """``file`` is the path on the node; once ``hang`` is called, its server answers nothing about it any more."""

    file = f"{PATH}/file"

    def __init__(self, leader: int, content: bytes = b"", *, size: int = 4096) -> None:
        self._content = content
        self._size = len(content) or size
        self._leader = leader
        self._hangs = threading.Event()
        self._server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)

    def hang(self) -> None:
        self._hangs.set()

    def __enter__(self) -> Hung:
        _in_mount_namespace(self._leader, self._mount)
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The last descriptor of the connection ends every request that is still waiting, with ENOTCONN.
        _in_mount_namespace(self._leader, lambda: _libc().umount2(PATH.encode(), 3))

    def _mount(self) -> int:
        os.makedirs(PATH, exist_ok=True)
        options = f"fd={self._server},rootmode=40755,user_id=0,group_id=0,allow_other,default_permissions"
        return int(_libc().mount(b"hung", PATH.encode(), b"fuse", 0, options.encode()))

    def _serve(self) -> None:
        try:
            while True:
                request = os.read(self._server, 1 << 17)
                _, opcode, unique, node = struct.unpack_from("<IIQQ", request)
                answer = self._answer(opcode, node, request[40:])
                if answer is not None:
                    error = 0 if isinstance(answer, bytes) else answer
                    body = answer if isinstance(answer, bytes) else b""
                    os.write(self._server, struct.pack("<IiQ", 16 + len(body), error, unique) + body)
        except OSError:
            os.close(self._server)

    def _answer(self, opcode: int, node: int, body: bytes) -> bytes | int | None:
        if opcode == _INIT:
            return struct.pack("<IIIIHHIIHHII24x", 7, 31, 0, 0, 8, 8, 1 << 16, 1, 0, 0, 0, 0)
        if opcode in _SILENT or (self._hangs.is_set() and node != 1):
            return None
        if opcode == _LOOKUP:
            return struct.pack("<QQQQII", 2, 0, 3600, 0, 0, 0) + self._attributes(2)
        if opcode == _GETATTR:
            return struct.pack("<QII", 0, 0, 0) + self._attributes(node)
        if opcode in (_OPEN, _OPENDIR):
            return struct.pack("<QII", 0, 0, 0)
        if opcode == _READ and self._content:
            _, offset, size = struct.unpack_from("<QQI", body)
            return self._content[offset : offset + size]
        return None if opcode == _READ else _ENOSYS

    def _attributes(self, node: int) -> bytes:
        mode, size = (0o040755, 0) if node == 1 else (0o100755, self._size)
        return struct.pack("<QQQQQQIIIIIIIIII", node, size, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _in_mount_namespace(leader: int, what: object) -> None:
    """Call it in a child that has gone over; this process has threads, and stays where it is."""
    namespace = os.open(f"/proc/{leader}/ns/mnt", os.O_RDONLY)
    pid = os.fork()
    if pid == 0:
        try:
            failed = _libc().setns(namespace, _CLONE_NEWNS) or (callable(what) and what())
            os._exit(1 if failed else 0)
        finally:
            os._exit(2)
    os.close(namespace)
    _, status = os.waitpid(pid, 0)
    if status:
        raise OSError(f"cannot do this in the node's mount namespace: status {status}")
