"""A file that somebody asked for by name, put in its place at once or not at all.

Knows that the folder may be everybody's to write: nothing is ever written through a link, and nothing that is no plain
file is replaced.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat


class Unwritable(Exception):
    """It was not written; the text says why."""


def put(path: str, text: str) -> None:
    """Write it beside its place and move it there, so that whoever looks finds a whole file. Raises Unwritable."""
    folder, name = os.path.split(path)
    if not name or name in (".", ".."):
        raise Unwritable("it is no name of a file")
    try:
        directory = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise Unwritable(_why(error)) from error
    try:
        _put(directory, name, text)
    except (OSError, ValueError) as error:
        raise Unwritable(_why(error)) from error
    finally:
        os.close(directory)


def _put(directory: int, name: str, text: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        kind = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
        if stat.S_ISLNK(kind):
            raise Unwritable("it is a symbolic link; name the file itself")
        if not stat.S_ISREG(kind):
            raise Unwritable("it is there and no plain file; - is standard output")
    aside = f".{name[:200]}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(aside, flags, 0o644, dir_fd=directory)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.rename(aside, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside, dir_fd=directory)
        raise


def _why(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
