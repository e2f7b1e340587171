"""Whether a program can be executed by somebody else: the kernel is asked in that account's place.

Modes, access lists, the folders on the way and the mount all count, and only the kernel knows them all. Users are
looked up by name services, which may hang; so this is asked in a child. It tells facts, as a word and what it is about.
"""

from __future__ import annotations

import grp
import os
import pwd
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: As much of a script as the kernel looks at, and as many interpreters of interpreters (execve(2)).
_HEAD = 256
_MOST_INTERPRETERS = 5

#: Where systemd keeps the users that it makes up for as long as a unit runs; not every machine has them in its name
#: services (nss-systemd(8)).
_DYNAMIC = "/run/systemd/dynamic-uid/direct:"

Fault = tuple[Any, ...]


def slow(request: tuple[str, Any]) -> Any:
    """``("file:executable", (path, user, group, supplementary, folders))`` is why it cannot be executed: a word, the
    path of what is wrong, and facts; () if it can be; or a text that says why that cannot be told. ``folders`` are
    where env(1) looks for an interpreter."""
    _, (path, user, group, supplementary, folders) = request
    try:
        account = _account(user, group, supplementary)
    except KeyError as error:
        return ("unknown", path, *error.args)
    try:
        with _as(*account):
            return _why_not(path, folders, _MOST_INTERPRETERS)
    except OSError as error:
        return os.strerror(error.errno or 0)


# Accounts ------------------------------------------------------------------------------------------------------------


def _account(user: str, group: str, supplementary: list[str]) -> tuple[int, int, list[int]]:
    """The IDs that systemd gives the unit's commands. Raises KeyError, of what is not known."""
    groups = [_gid(name) for name in supplementary]
    if not user:
        return 0, _gid(group) if group else 0, groups
    try:
        entry = pwd.getpwuid(int(user)) if user.isdecimal() else pwd.getpwnam(user)
    except KeyError:
        try:
            dynamic = int(os.readlink(_DYNAMIC + user))
        except (OSError, ValueError):
            raise KeyError("User=", user) from None
        return dynamic, dynamic, groups
    gid = _gid(group) if group else entry.pw_gid
    return entry.pw_uid, gid, sorted({*os.getgrouplist(entry.pw_name, gid), *groups})


def _gid(name: str) -> int:
    if name.isdecimal():
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise KeyError("Group=", name) from None


@contextmanager
def _as(uid: int, gid: int, groups: list[int]) -> Iterator[None]:
    """Have access(2) answered for these: it goes by the real IDs. The effective ones stay, and lead back."""
    uids, gids, had = os.getresuid(), os.getresgid(), os.getgroups()
    if (uid, gid) == (uids[0], gids[0]) and set(groups) <= {*had, gid}:
        yield
        return
    try:
        os.setgroups(groups)
        os.setresgid(gid, -1, -1)
        os.setresuid(uid, -1, -1)
        yield
    finally:
        os.setresuid(uids[0], -1, -1)
        os.setresgid(gids[0], -1, -1)
        if os.getgroups() != had:
            os.setgroups(had)


# Programs ------------------------------------------------------------------------------------------------------------


def _why_not(path: str, folders: list[str], depth: int) -> Fault:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return ("dangling", path, os.readlink(path)) if os.path.islink(path) else ("missing", path)
    except OSError as error:
        return ("unreadable", path, os.strerror(error.errno or 0))
    if stat.S_ISDIR(status.st_mode):
        return ("folder", path)
    if not stat.S_ISREG(status.st_mode):
        return ("irregular", path)
    if not status.st_size:
        return ("empty", path)
    if os.statvfs(path).f_flag & os.ST_NOEXEC:
        return ("noexec", path)
    if not os.access(path, os.X_OK):
        closed = _closed(path)
        return ("closed", path, closed) if closed else ("rights", path, f"{stat.S_IMODE(status.st_mode):04o}")
    return _interpreted(path, folders, depth)


def _closed(path: str) -> str:
    """The first folder on the way, as it is written, that may not be searched; empty if it is none of them."""
    parts = path.split("/")[:-1]
    ways = ["/".join(parts[:number]) or "/" for number in range(1, len(parts) + 1)]
    return next((way for way in ways if not os.access(way, os.X_OK)), "")


def _interpreted(path: str, folders: list[str], depth: int) -> Fault:
    """What is wrong with the interpreter that a script names."""
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD)
    except PermissionError:
        # Only programs that are no scripts can be executed by who may not read them; we are not who will.
        return ()
    except OSError as error:
        return ("unreadable", path, os.strerror(error.errno or 0))
    if not head.startswith(b"#!"):
        return ()
    line = os.fsdecode(head[2:].split(b"\n", 1)[0]).strip(" \t")
    interpreter, _, argument = line.replace("\t", " ").partition(" ")
    if not interpreter:
        return ("nameless", path)
    if not depth:
        return ("nested", path)
    fault = _why_not(interpreter, folders, depth - 1)
    if not fault and os.path.basename(interpreter) == "env":
        return _by_env(path, argument.strip(" "), folders, depth - 1)
    return fault


def _by_env(path: str, argument: str, folders: list[str], depth: int) -> Fault:
    """The kernel hands env all that follows as one word, which it takes apart only after ``-S``."""
    split = re.match(r"(?:-S|--split-string[= ])\s*", argument)
    words = argument[split.end() :].split() if split else [argument]
    name = next((word for word in words if not (split and "=" in word)), "")
    # Of its other options there are many, and some take a word of their own.
    if not name or name.startswith("-"):
        return ()
    if "/" in name:
        return _why_not(name, folders, depth)
    found = [f"{folder}/{name}" for folder in folders if os.path.exists(f"{folder}/{name}")]
    faults = [_why_not(candidate, folders, depth) for candidate in found]
    if not found:
        return ("unfound", path, name)
    return () if () in faults else faults[0]
