"""What can hang for ever when it is asked, for a child to ask: command lines, maps, and the names of users.

A process that is wedged hangs whoever reads its cmdline or maps (leptonai/gpud, pkg/process), and so does a name
service whose server is gone.
"""

from __future__ import annotations

import os
import re
import stat
from typing import Any, Callable

from . import libc

#: So much of a command line is enough to know a process by. A program may have a quarter of a million words, and can
#: have its command line lead to any of its memory, gigabytes of it (prctl(2), PR_SET_MM).
CMDLINE_WORDS = 512
CMDLINE_BYTES = 1 << 16

#: So much is read of maps for one question. A library's user has 100 KiB, and nobody is kept from having gigabytes.
MAPS_BYTES = 1 << 25


def answer(request: tuple[str, Any]) -> Any:
    """Answers that can hang, for a child to give: ``("cmdline", pid)``, ``("maps", ([pid, …], [device number, …]))``,
    ``("files", ([pid, …], device))``, which are the inodes of those that are mapped,
    ``("matching", ([pid, …], [pattern, …]))``, ``("user", uid)``, ``("uid", name)``, ``("search", (pattern, text))``.
    """
    verb, argument = request
    if verb == "matching":
        return _matching(*argument)
    if verb == "maps":
        return _mapped(argument[0], lambda thread, text: _devices_among(thread, text, argument[1]))
    if verb == "files":
        return _mapped(argument[0], lambda thread, text: _inodes_among(text, argument[1]))
    if verb == "cmdline":
        return _cmdline(argument)
    if verb == "search":
        return _found(*argument)
    import pwd

    try:
        return pwd.getpwuid(argument).pw_name if verb == "user" else pwd.getpwnam(argument).pw_uid
    except KeyError:
        # A number without a name is an answer too, and no answer is None.
        return "" if verb == "user" else None


def _cmdline(pid: int, *, most: int = CMDLINE_BYTES, words: int = CMDLINE_WORDS) -> list[str] | None:
    """The first words of a command line; None where there is nothing to read it from any more. -1 words are all."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            text = file.read(most)
        if not text:
            with open(f"/proc/{pid}/stat", "rb") as file:
                state = file.read().rpartition(b")")[2].split()[0]
                return None if state in (b"Z", b"X") else []
    except OSError:
        return None
    found = os.fsdecode(text[:-1] if text.endswith(b"\0") else text).split("\0")
    return found if words < 0 else found[:words]


def _found(pattern: str, text: str) -> bool:
    import warnings

    # The policy was read without them, too.
    warnings.simplefilter("ignore")
    return re.search(pattern, text) is not None


def _matching(pids: list[int], patterns: list[str]) -> dict[int, list[int]]:
    """Which of these patterns are found in each process's command line, by their numbers; who matches none, or has
    none, is left out."""
    found = {}
    for pid in pids:
        text = " ".join(_cmdline(pid, most=MAPS_BYTES, words=-1) or [])
        numbers = [number for number, pattern in enumerate(patterns) if text and _found(pattern, text)]
        if numbers:
            found[pid] = numbers
    return found


#: A line of a maps file that may be a device: its address range, device and inode, and path. What lies where programs
#: and libraries do is none, and there is so much of it that it is passed over.
_MAPPING = rb"(?m)^([0-9a-f]+-[0-9a-f]+) \S+ \S+ (\S+ \d+) +(/(?!usr/|lib|bin/|sbin/)(?!.*\.so\b).*)$"


def _mapped(pids: list[int], among: Callable[[int, bytes], list[int]]) -> dict[int, list[int] | None]:
    """What each process has mapped of what is looked for; None for one that may not be asked, or has more maps than can
    be read. Who is left out has to be asked again: the others had too many."""
    left = MAPS_BYTES
    found: dict[int, list[int] | None] = {}
    for pid in pids:
        try:
            thread, text = _maps(pid, left)
        except PermissionError:
            found[pid] = None
            continue
        except (FileNotFoundError, ProcessLookupError):
            # It is gone.
            found[pid] = []
            continue
        if len(text) == left:
            if not found:
                found[pid] = None
            break
        left -= len(text)
        found[pid] = among(thread, text)
    return found


def _maps(pid: int, most: int) -> tuple[int, bytes]:
    """The maps of a process, and a thread that has them: a leader that has exited has none, its threads live on."""
    for thread in (pid, *(int(name) for name in os.listdir(f"/proc/{pid}/task"))):
        with open(f"/proc/{thread}/maps", "rb") as file:
            text = file.read(most)
        if text:
            return thread, text
    return pid, b""


def _devices_among(pid: int, maps: bytes, devices: list[int]) -> list[int]:
    """Device numbers in the text of a maps file.

    The device and inode there are those of the file system that the node lies in, so the mapping itself is looked at,
    which leads to the node whatever became of its path.
    """
    found = set()
    known = set()
    for span, inode, path in re.findall(_MAPPING, maps):
        # One file may be mapped in tens of thousands of pieces.
        if inode in known:
            continue
        known.add(inode)
        # Without CAP_SYS_ADMIN the mapping may not be followed; its path is the next best.
        for look in (b"/proc/%d/map_files/%s" % (pid, span), b"/proc/%d/root%s" % (pid, path)):
            kind, number = libc.kind(libc.AT_FDCWD, look)
            if kind is not None:
                found |= {number} if stat.S_ISCHR(kind) else set()
                break
    return sorted(found.intersection(devices))


def _inodes_among(maps: bytes, device: int) -> list[int]:
    """Inodes of the files on this device in the text of a maps file. On tmpfs the device of a mapping is that of the
    file (unlike on btrfs or overlayfs)."""
    mapping = re.compile(b" %02x:%02x ([0-9]+) " % (os.major(device), os.minor(device)))
    return sorted({int(inode) for inode in mapping.findall(maps)})
