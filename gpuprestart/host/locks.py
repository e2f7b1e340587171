"""One lock per GPU among all runs on this machine, and the notes that lie beside them: claims, and bypasses.

A lock is an flock(2) on a file: the kernel takes it back when its holder dies, however it dies. Its file is never
removed, because somebody may be waiting for a lock on that very file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterable

RUN = "/run/gpuprestart"


def _make(folder: str, name: str) -> None:
    """Have a folder of ours in it. Raises OSError, and Denied where somebody else could exchange what lies there."""
    for path in (folder, os.path.join(folder, name)):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o755)
        _trust(path)


def _trust(path: str) -> None:
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
        mode = stat.S_IMODE(status.st_mode)
        raise Denied(f"{path}: others than root can write it (uid {status.st_uid}, mode {mode:04o}): remove it")


class Denied(Exception):
    """The folder cannot be used; the text says why, and ``number`` is the kernel's errno, or 0."""

    def __init__(self, message: str, number: int = 0) -> None:
        super().__init__(message)
        self.number = number


def _denied(error: OSError, path: str) -> Denied:
    return Denied(f"{error.filename or path}: {error.strerror}", error.errno or 0)


class Locks:
    """Locks by UUID, taken in UUID order so that two runs cannot wait for each other."""

    def __init__(self, folder: str = RUN) -> None:
        self._folder = folder
        self._held: dict[str, int] = {}

    def take(self, uuids: Iterable[str], holder: str) -> str | None:
        """Try to take the next locks that are missing; None when all are held, else who holds the first other one.

        ``holder`` is written into the files, for those who wait. Raises Denied.
        """
        wanted = sorted(set(uuids))
        if not self._held.keys() <= set(wanted):
            # Taken out of order they could make two runs wait for each other.
            self.release()
        for uuid in wanted:
            if uuid not in self._held:
                other = self._take(uuid, holder)
                if other is not None:
                    return other
        return None

    def _take(self, uuid: str, holder: str) -> str | None:
        path = f"{self._folder}/locks/{_file(uuid)}"
        try:
            _make(self._folder, "locks")
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _denied(error, path) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            name = os.pread(descriptor, 300, 0).decode("utf-8", "replace")
            os.close(descriptor)
            return name or "another run"
        except OSError as error:
            os.close(descriptor)
            raise Denied(f"{path} cannot be locked: {error.strerror}", error.errno or 0) from error
        self._held[uuid] = descriptor
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, holder.encode("utf-8", "replace"), 0)
        except OSError as error:
            raise _denied(error, path) from error
        return None

    def release(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()


def _file(name: str) -> str:
    """Before R470 the UUID of an instance of MIG was MIG-GPU-<UUID>/<gi>/<ci>, which is no name of a file."""
    return name.replace("/", "%2F")


def _plain(file: str) -> str:
    return file.replace("%2F", "/")


class Notes:
    """Small files in a folder of their own, each one line of text: ``claims`` by UUID, ``bypass`` by unit."""

    def __init__(self, kind: str, folder: str = RUN) -> None:
        self._folder = f"{folder}/{kind}"

    def read(self) -> dict[str, str]:
        """All that there are. Raises Denied where they are there and cannot be read."""
        try:
            _trust(os.path.dirname(self._folder))
            _trust(self._folder)
            names = os.listdir(self._folder)
            shown = [name for name in names if not name.startswith(".")]
            return {_plain(name): text for name in shown if (text := self._text(name)) is not None}
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise _denied(error, self._folder) from error

    def _text(self, name: str) -> str | None:
        path = f"{self._folder}/{name}"
        try:
            # Nothing but a plain file is ours, and a pipe would keep us waiting for its writer.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise Denied(f"{path}: is not a regular file")
            return os.read(descriptor, 4096).decode("utf-8", "replace")
        finally:
            os.close(descriptor)

    def write(self, name: str, text: str) -> None:
        """Put one there in one step. Raises Denied."""
        aside = f"{self._folder}/.{_file(name)}.{os.getpid()}"
        try:
            _make(*os.path.split(self._folder))
            with open(aside, "w", encoding="utf-8") as file:
                file.write(text)
            os.rename(aside, f"{self._folder}/{_file(name)}")
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(aside)
            raise _denied(error, aside) from error

    def remove(self, name: str) -> bool:
        """Take one away; whether it was us who did. One that stays is judged again by everybody who reads it."""
        try:
            os.unlink(f"{self._folder}/{_file(name)}")
        except OSError:
            return False
        return True
