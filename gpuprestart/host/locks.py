"""One lock per GPU among all runs on this machine, and the claims that lie beside them.

A lock is an flock(2) on a file: the kernel takes it back when its holder dies, however it dies. Its file is never
removed, because somebody may be waiting for a lock on that very file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable

RUN = "/run/gpuprestart"


class Denied(Exception):
    """The folder cannot be used; the text says why."""


def _make(*folders: str) -> None:
    """Make these folders, which root writes and everybody reads, whatever UMask= the unit has."""
    for folder in folders:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
            os.chmod(folder, 0o755)


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
        try:
            _make(self._folder, self._folder + "/locks")
            descriptor = os.open(
                f"{self._folder}/locks/{uuid}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
        except OSError as error:
            raise Denied(f"{error.filename}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            name = os.pread(descriptor, 300, 0).decode("utf-8", "replace")
            os.close(descriptor)
            return name or "another run"
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode("utf-8", "replace"), 0)
        self._held[uuid] = descriptor
        return None

    def release(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()


class Claims:
    """Small files by UUID, each one line of text."""

    def __init__(self, folder: str = RUN) -> None:
        self._run = folder
        self._folder = folder + "/claims"

    def read(self) -> dict[str, str]:
        """All that there are. Raises Denied where they are there and cannot be read."""
        try:
            names = os.listdir(self._folder)
            return {name: text for name in names if not name.startswith(".") and (text := self._text(name)) is not None}
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise Denied(f"{error.filename}: {error.strerror}") from error

    def _text(self, name: str) -> str | None:
        with (
            contextlib.suppress(FileNotFoundError),
            open(f"{self._folder}/{name}", encoding="utf-8", errors="replace") as file,
        ):
            return file.read(4096)
        return None

    def write(self, uuid: str, text: str) -> None:
        """Put one there in one step. Raises Denied."""
        aside = f"{self._folder}/.{uuid}.{os.getpid()}"
        try:
            _make(self._run, self._folder)
            with open(aside, "w", encoding="utf-8") as file:
                os.fchmod(file.fileno(), 0o644)
                file.write(text)
            os.rename(aside, f"{self._folder}/{uuid}")
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(aside)
            raise Denied(f"{error.filename}: {error.strerror}") from error

    def remove(self, uuid: str) -> None:
        """Take one away that no longer holds. Should it stay, it is judged again by everybody who reads it."""
        with contextlib.suppress(OSError):
            os.unlink(f"{self._folder}/{uuid}")
