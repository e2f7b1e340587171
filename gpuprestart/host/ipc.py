"""What processes leave behind by name in shared memory: files in /dev/shm, SysV segments, POSIX queues, sockets of MPS.

It reads and removes, and knows nothing of what may go. Nothing is followed through a link, and nothing outside the one
directory is touched. A file is removed only while the kernel itself says that nobody has it open.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import struct
from collections.abc import Iterable
from enum import Enum
from types import TracebackType
from typing import Callable, NamedTuple

#: So many names of a directory are looked at. Anybody may make names there.
MOST_NAMES = 100_000

#: Bits of a segment's mode (include/linux/shm.h): it goes with its last user; it may not be swapped out.
SHM_DEST, SHM_LOCKED = 0o1000, 0o2000


class File(NamedTuple):
    """A name in a directory of shared memory, and what it stands for. ``changed`` is the latest of its times."""

    name: str
    device: int
    inode: int
    mode: int
    links: int
    uid: int
    bytes: int
    changed: float


class Segment(NamedTuple):
    """A SysV segment as /proc/sysvipc/shm has it. A PID of 0 is none, or that of a process of another namespace."""

    key: int
    id: int
    mode: int
    bytes: int
    creator: int
    last: int
    attached: int
    uid: int
    atime: int
    dtime: int
    ctime: int


class Removal(Enum):
    REMOVED = "removed"
    #: It is not there any more, or no longer what was judged.
    GONE = "gone"
    #: Somebody has it open.
    IN_USE = "in use"


# Files ---------------------------------------------------------------------------------------------------------------


class Directory:
    """A directory of shared memory, opened once. Raises OSError where it is none, or a link."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self.device = os.fstat(self._directory).st_dev

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._directory)

    def files(self, wanted: Callable[[str], bool]) -> list[File]:
        """What has a name that is wanted, in the order of names; who is gone meanwhile is left out."""
        names = [name for name in sorted(os.listdir(self._directory)) if wanted(name)]
        found = (self._look(name) for name in names[:MOST_NAMES])
        return [file for file in found if file is not None]

    def _look(self, name: str) -> File | None:
        try:
            return _described(name, os.stat(name, dir_fd=self._directory, follow_symlinks=False))
        except FileNotFoundError:
            return None

    def remove(self, file: File) -> Removal:
        """Remove it if it is still what it was, and nobody has it open or mapped anywhere. Raises OSError.

        The proof is a write lease (fcntl(2)): the kernel grants it only if ours is the one open description of the
        file. A mapping and a descriptor in flight in a socket keep theirs, and it counts those of processes that
        cannot be seen from here, too. Who opens the file from then on waits until it is gone.
        """
        try:
            descriptor = os.open(
                file.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._directory
            )
        except FileNotFoundError:
            return Removal.GONE
        except OSError as error:
            # A link by now; or under the lease of another run, which is just removing it.
            if error.errno in (errno.ELOOP, errno.EAGAIN):
                return Removal.GONE if error.errno == errno.ELOOP else Removal.IN_USE
            raise
        try:
            if _described(file.name, os.fstat(descriptor)) != file:
                return Removal.GONE
            if not _leased(descriptor):
                return Removal.IN_USE
            if self._look(file.name) != file:
                return Removal.GONE
            os.unlink(file.name, dir_fd=self._directory)
        except FileNotFoundError:
            return Removal.GONE
        finally:
            os.close(descriptor)
        return Removal.REMOVED


def _described(name: str, status: os.stat_result) -> File:
    changed = max(status.st_atime, status.st_mtime, status.st_ctime)
    size = 512 * status.st_blocks
    return File(name, status.st_dev, status.st_ino, status.st_mode, status.st_nlink, status.st_uid, size, changed)


def _leased(descriptor: int) -> bool:
    """Whether this is the only open description of its file. The lease ends with the descriptor."""
    # Whoever opens the file then has the kernel send a signal, and SIGIO, which it would be, ends who does not expect
    # it. SIGURG does nothing.
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return False
    return True


def queues() -> str | None:
    """Where the POSIX queues are mounted, if they are (mq_overview(7))."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            fields, _, rest = line.partition(" - ")
            if rest.startswith("mqueue ") and fields.split()[4] == "/dev/mqueue":
                return "/dev/mqueue"
    return None


# SysV segments -------------------------------------------------------------------------------------------------------


def segments() -> list[Segment]:
    """Those of our IPC namespace (proc(5)); none where the kernel has no such thing."""
    try:
        with open("/proc/sysvipc/shm", encoding="ascii") as file:
            return parse_segments(file.read())
    except FileNotFoundError:
        return []


def parse_segments(text: str) -> list[Segment]:
    head, *rows = (line.split() for line in text.splitlines())
    found = []
    for row in rows:
        said = dict(zip(head, row))
        names = ("key", "shmid", "size", "cpid", "lpid", "nattch", "uid", "atime", "dtime", "ctime")
        key, number, size, creator, last, attached, uid, atime, dtime, ctime = (int(said[name]) for name in names)
        mode = int(said["perms"], 8)
        found.append(Segment(key, number, mode, size, creator, last, attached, uid, atime, dtime, ctime))
    return found


def remove_segment(segment: Segment) -> Removal:
    """Remove it if it is still just as it was. Raises OSError."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    said = ctypes.create_string_buffer(256)
    for command in (_IPC_STAT, _IPC_RMID):
        if libc.shmctl(segment.id, command, said) != 0:
            number = ctypes.get_errno()
            if number in (errno.EINVAL, errno.EIDRM):
                return Removal.GONE
            raise OSError(number, os.strerror(number))
        if command == _IPC_STAT and _parse_status(said.raw, segment.id) != segment:
            return Removal.GONE
    return Removal.REMOVED


_IPC_RMID, _IPC_STAT = 0, 2

#: struct shmid64_ds of 64-bit machines (include/uapi/asm-generic/shmbuf.h), which begins with a struct ipc64_perm. On a
#: machine that has another one nothing is what it was, and nothing is removed.
_STATUS = struct.Struct("=iI12xI24xQqqqiiQ")


def _parse_status(raw: bytes, number: int) -> Segment:
    key, uid, mode, size, atime, dtime, ctime, creator, last, attached = _STATUS.unpack_from(raw)
    return Segment(key, number, mode, size, creator, last, attached, uid, atime, dtime, ctime)


# MPS -----------------------------------------------------------------------------------------------------------------

#: Where the daemon has its sockets unless CUDA_MPS_PIPE_DIRECTORY says otherwise, and the file with its PID.
MPS = "/tmp/nvidia-mps"
MPS_PID = "nvidia-cuda-mps-control.pid"


def mps_sockets() -> list[str]:
    """Control sockets of MPS on which nobody listens, as far as our network namespace tells."""
    found = [path for path in (f"{MPS}/control", f"{MPS}/control_privileged") if _is_socket(path)]
    return [path for path in found if path not in _listening()] if found else []


def mps_pid() -> int:
    """The PID that the daemon has written down; 0 if there is none."""
    try:
        descriptor = os.open(f"{MPS}/{MPS_PID}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            return int(file.read(32))
    except (OSError, ValueError):
        return 0


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        return False


def _listening() -> set[str]:
    """Paths of the Unix sockets that are listened on (proc(5)): their flags have __SO_ACCEPTCON."""
    with open("/proc/self/net/unix", encoding="utf-8", errors="surrogateescape") as file:
        rows: Iterable[list[str]] = (line.rstrip("\n").split(None, 7) for line in file)
        return {row[7] for row in rows if len(row) == 8 and row[3] == "00010000"}
