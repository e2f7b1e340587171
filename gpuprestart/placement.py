"""The drop-ins that lie among an administrator's units: which there are, putting some there, taking one away.

It knows files and folders, and no unit. Links are never followed: what they lead to is somebody else's.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from typing import NamedTuple, Optional

from . import dropin
from .dropin import State
from .host import files
from .model import Outcome, Refusal

#: Where an administrator's units and drop-ins are; what comes with packages lies elsewhere.
FOLDER = "/etc/systemd/system"

#: No unit file or drop-in is longer than that.
_LIMIT = 1 << 20


class Found(NamedTuple):
    """A drop-in by our name. ``text`` is empty where it is no plain file in a plain folder."""

    unit: str
    path: str
    text: str

    @property
    def state(self) -> State:
        return dropin.state_of(self.text)


def path_of(unit: str) -> str:
    return f"{FOLDER}/{unit}.d/{dropin.NAME}"


def enabled() -> tuple[Found, ...]:
    """Every drop-in of our name, whoever has written it."""
    try:
        folders = sorted(name for name in os.listdir(FOLDER) if name.endswith(".d"))
    except FileNotFoundError:
        return ()
    return tuple(found for name in folders if (found := look(name[: -len(".d")])) is not None)


def look(unit: str) -> Optional[Found]:
    """The drop-in of that unit."""
    path = path_of(unit)
    try:
        folder, file = os.lstat(os.path.dirname(path)), os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    plain = stat.S_ISDIR(folder.st_mode) and stat.S_ISREG(file.st_mode)
    return Found(unit, path, read(path) if plain else "")


def read(path: str) -> str:
    """The text of a file, which may have gone since somebody told of it."""
    return files.as_it_is(path, limit=_LIMIT) or ""


def lacks_folder(unit: str) -> bool:
    """Whether a folder has to be made for the drop-in of that unit. Raises Refusal where none can be."""
    folder = os.path.dirname(path_of(unit))
    try:
        mode = os.lstat(folder).st_mode
    except FileNotFoundError:
        return True
    if not stat.S_ISDIR(mode):
        raise Refusal(Outcome.CONFIG, f"{folder} is a link, or no folder at all", ["move it away"])
    return False


def put(texts: Mapping[str, str]) -> None:
    """Write drop-ins, each by its path and where there is none yet: all of them or none. Raises Refusal."""
    made: list[str] = []
    written: list[str] = []
    try:
        for path, text in texts.items():
            folder = os.path.dirname(path)
            if not os.path.isdir(folder):
                os.mkdir(folder, 0o755)
                made.append(folder)
                files.keep(FOLDER)
            files.put(path, text.encode("utf-8", "surrogateescape"))
            written.append(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            for path in written:
                os.unlink(path)
            for folder in made:
                os.rmdir(folder)
        if isinstance(error, OSError):
            raise _unwritable(error) from error
        raise


def remove(found: Found) -> None:
    """Take one away, and its folder if that was made for it and nothing else has come to lie there. Raises Refusal."""
    folder = os.path.dirname(found.path)
    try:
        os.unlink(found.path)
        files.keep(folder)
        if dropin.made_folder(found.text):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
                files.keep(FOLDER)
    except OSError as error:
        raise _unwritable(error) from error


def set_aside(found: Found) -> str:
    """Rename one so that systemd no longer reads it, to a name that nobody has. Raises Refusal."""
    number, aside = 0, f"{found.path}.disabled"
    while os.path.lexists(aside):
        number += 1
        aside = f"{found.path}.disabled.{number}"
    try:
        os.rename(found.path, aside)
        files.keep(os.path.dirname(aside))
    except OSError as error:
        raise _unwritable(error) from error
    return aside


def _unwritable(error: OSError) -> Refusal:
    return Refusal(Outcome.DENIED, f"{error.filename or FOLDER} cannot be changed: {error.strerror}")
