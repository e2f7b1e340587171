"""Files that decide what root does: read only if nobody but their owner could have written them, folders included.

Knows paths, owners and modes, and nothing of what the files say. Every check is made on a descriptor that is already
open, one component after the other, so nothing can be exchanged between the check and the reading.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from typing import Optional

_LINKS = 40
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


class UnsafeFile(Exception):
    """The file is there, or may be, and must not be used; ``str()`` names it, its line if one is at fault, and why."""

    def __init__(self, path: str, reason: str, line: Optional[int] = None) -> None:
        super().__init__(f"{path}: {reason}" if line is None else f"{path}:{line}: {reason}")
        self.path = path
        self.reason = reason
        self.line = line


def read_safely(path: str, *, limit: int = 65536, trusted_owner: Optional[int]) -> Optional[bytes]:
    """The content of a regular file of at most ``limit`` bytes, or None where there is no such file.

    With ``trusted_owner``, the file, every folder on the way from / and every link belong to that user or to root, and
    neither group nor others may write there, not even in a sticky folder such as /tmp. (An access list that lets
    somebody else write shows as the group's write bit, so it is caught as well.) Links are followed by hand: one that
    lies in a trusted folder was made by whom we trust, and what it leads to is checked the same way. A link that leads
    nowhere is a fault and not an absence: somebody meant a file to be there.
    """
    walk = _Walk(path, trusted_owner)
    try:
        found = walk.open()
        return None if found is None else _content(path, found, limit, trusted_owner)
    except OSError as error:
        raise UnsafeFile(path, f"cannot be read: {os.strerror(error.errno or 0)}") from None
    finally:
        walk.close()


def trust_program(path: str, *, trusted_owner: int) -> None:
    """Raise UnsafeFile unless this is a file that only the trusted owner or root could have put there."""
    walk = _Walk(path, trusted_owner)
    try:
        if walk.open() is None:
            raise UnsafeFile(path, "is not there")
    except OSError as error:
        raise UnsafeFile(path, f"cannot be looked at: {os.strerror(error.errno or 0)}") from None
    finally:
        walk.close()


def as_text(path: str, content: bytes) -> str:
    """The content as UTF-8; an UnsafeFile with the line where it is not."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UnsafeFile(path, f"byte 0x{content[error.start]:02x} is not UTF-8 (text in UTF-8)", line) from None


def find_first(name: str, folders: Sequence[str]) -> Optional[str]:
    """The path of ``name`` in the first of the folders that has anything of that name, be it usable or not."""
    for folder in folders:
        path = os.path.join(folder, name)
        try:
            os.lstat(path)
        except OSError as error:
            # No file can have a name that is too long. Anything else, such as a folder that may not be searched, could
            # hide the very file that forbids what the next one allows.
            if error.errno in (errno.ENOENT, errno.ENAMETOOLONG):
                continue
            raise UnsafeFile(path, f"cannot be looked for: {os.strerror(error.errno or 0)}") from None
        return path
    return None


def as_it_is(path: str, *, limit: int) -> Optional[str]:
    """The text of a file that is only shown or compared, whoever has written it and whatever bytes are in it; None
    where there is none that can be read."""
    try:
        content = read_safely(path, limit=limit, trusted_owner=None)
    except UnsafeFile:
        return None
    return None if content is None else content.decode("utf-8", "surrogateescape")


def put(path: str, content: bytes) -> None:
    """Write a file that anybody may read, in one step for whoever reads it, and also for a machine that loses power.

    Its folder has to be there. Raises OSError, and leaves nothing then.
    """
    folder, name = os.path.split(path)
    aside = os.path.join(folder, f".{name}.{os.getpid()}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o644)
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.rename(aside, path)
    except BaseException:
        os.unlink(aside)
        raise
    keep(folder)


def keep(folder: str) -> None:
    """Have what was made, renamed or removed in a folder outlive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _content(path: str, fd: int, limit: int, trusted_owner: Optional[int]) -> bytes:
    status = os.fstat(fd)
    # Asked again of the descriptor that is read: without a trusted owner the file may have been exchanged since.
    if not stat.S_ISREG(status.st_mode):
        raise UnsafeFile(path, "is not a regular file")
    _trust(path, path, status, trusted_owner)
    content = b""
    while len(content) <= limit:
        piece = os.read(fd, limit + 1 - len(content))
        if not piece:
            return content
        content += piece
    raise UnsafeFile(path, f"is too big (at most {limit} bytes)")


def _trust(path: str, part: str, status: os.stat_result, trusted_owner: Optional[int]) -> None:
    if trusted_owner is None:
        return
    whose = "" if part == path else f"{part} "
    # The mode of a link means nothing; who may replace it is a matter of its folder.
    if not stat.S_ISLNK(status.st_mode) and status.st_mode & 0o022:
        mode = stat.S_IMODE(status.st_mode)
        raise UnsafeFile(path, f"{whose}can be written by others, mode {mode:04o} (chmod go-w {part})")
    if status.st_uid not in (0, trusted_owner):
        wanted = "root" if trusted_owner == 0 else f"root or uid {trusted_owner}"
        raise UnsafeFile(path, f"{whose}belongs to uid {status.st_uid} (must be {wanted})")


class _Walk:
    """Goes along a path without letting the kernel follow a link, and keeps open what it stands on."""

    def __init__(self, path: str, trusted_owner: Optional[int]) -> None:
        self._path = path
        self._trusted_owner = trusted_owner
        #: The folders from / to here, each by name and descriptor. Links never stay in it, so ".." is its last but one.
        self._stack: list[tuple[str, int]] = []
        self._links = 0

    def close(self) -> None:
        self._leave(0)

    def open(self) -> Optional[int]:
        """A descriptor to read from, closed with the walk; None where the path ends in nothing."""
        self._enter("/", os.open("/", os.O_PATH | os.O_DIRECTORY | _FLAGS))
        todo = os.path.join(os.getcwd(), self._path).split("/")[::-1]
        while todo:
            name = todo.pop()
            if name == "..":
                self._leave(max(1, len(self._stack) - 1))
            elif name not in ("", "."):
                try:
                    # O_PATH: to look at a device or a pipe must not be to open it.
                    fd = os.open(name, os.O_PATH | _FLAGS, dir_fd=self._stack[-1][1])
                except FileNotFoundError:
                    if self._links:
                        missing = self._here(name)
                        raise UnsafeFile(self._path, f"leads over a link to {missing}, which is not there") from None
                    return None
                mode = self._enter(name, fd)
                if stat.S_ISLNK(mode):
                    todo.extend(self._followed().split("/")[::-1])
                elif todo and not stat.S_ISDIR(mode):
                    raise UnsafeFile(self._path, f"{self._here()} is not a folder")
        name, fd = self._stack[-1]
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise UnsafeFile(self._path, "is not a regular file")
        self._stack.append((name, os.open(name, os.O_RDONLY | os.O_NONBLOCK | _FLAGS, dir_fd=self._stack[-2][1])))
        return self._stack[-1][1]

    def _enter(self, name: str, fd: int) -> int:
        self._stack.append((name, fd))
        status = os.fstat(fd)
        _trust(self._path, self._here(), status, self._trusted_owner)
        return status.st_mode

    def _leave(self, length: int) -> None:
        while len(self._stack) > length:
            os.close(self._stack.pop()[1])

    def _followed(self) -> str:
        """Where the link that we stand on leads; we stand in its folder then, or at / if it says so."""
        self._links += 1
        if self._links > _LINKS:
            raise UnsafeFile(self._path, "leads over too many links")
        target = os.readlink("", dir_fd=self._stack[-1][1])
        self._leave(1 if target.startswith("/") else len(self._stack) - 1)
        return target

    def _here(self, *more: str) -> str:
        return os.path.join(*(name for name, _ in self._stack), *more)
