"""What processes have open: device nodes, sockets, files, in the descriptors of all their threads.

A process that vanished has nothing open, and is never an exception. Nothing here can block: a descriptor's file is not
asked for what only its server knows.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection, Iterable, Mapping
from typing import Callable, NamedTuple, TypeVar

from . import libc


class Sweep(NamedTuple):
    """One pass over all descriptors: PID -> device numbers of interest that it has open, in any thread."""

    opened: Mapping[int, frozenset[int]]
    #: Processes that refused to be looked at. They may hold anything.
    unreadable: tuple[int, ...]


def sweep(devices: Iterable[int], candidates: Iterable[int]) -> Sweep:
    """Which of the candidates have which of these character devices open, matched by device number.

    The number, not the path or the inode: container runtimes make nodes of their own for the same device. A descriptor
    that is in flight in a socket is in no table and is not found.
    """
    wanted = frozenset(devices)
    opened: dict[int, frozenset[int]] = {}
    unreadable = []
    for pid in candidates:
        try:
            found = _devices_of(pid, wanted)
        except PermissionError:
            unreadable.append(pid)
            continue
        if found:
            opened[pid] = found
    return Sweep(opened=opened, unreadable=tuple(unreadable))


def sockets_of(pids: Iterable[int], inodes: Collection[int]) -> dict[int, frozenset[int]]:
    """Which of these sockets each process has open, in any thread, by the inodes of the sockets; who may not be looked
    into is seen to have none."""
    wanted = {f"socket:[{inode}]": inode for inode in inodes}

    def among(table: int, names: list[str]) -> set[int]:
        seen = set()
        for name in names:
            # A link of /proc is read without asking anybody else.
            with contextlib.suppress(OSError):
                seen.add(wanted.get(os.readlink(name, dir_fd=table)))
        return {inode for inode in seen if inode is not None}

    found = {}
    for pid in pids:
        with contextlib.suppress(PermissionError):
            found[pid] = _open_in(pid, among)
    return {pid: inodes for pid, inodes in found.items() if inodes}


def files_of(pid: int, devices: Collection[int]) -> frozenset[tuple[int, int]]:
    """The files on these file systems that any thread of the process has open, each by the numbers of its device and
    inode. Raises PermissionError where it may not be looked into."""

    def among(table: int, names: list[str]) -> set[tuple[int, int]]:
        seen = set()
        for name in names:
            file = libc.identity(table, name.encode())
            if file is None:
                # It is closed by now; or the list may be read and not what is on it, and this says so.
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    os.readlink(name, dir_fd=table)
            elif file[0] in devices:
                seen.add(file)
        return seen

    return _open_in(pid, among)


def _devices_of(pid: int, wanted: frozenset[int]) -> frozenset[int]:
    """Device numbers that any thread of the process has open."""
    statx = libc.library().statx
    # Of a machine's descriptors there may be millions, so as little as can be is done for each of them.
    told, how, what = libc.told, libc.AT_STATX_DONT_SYNC, libc.STATX_TYPE
    halves, words = memoryview(told).cast("B").cast("H"), memoryview(told).cast("B").cast("I")

    def among(table: int, names: list[str]) -> set[int]:
        seen = set()
        for name in names:
            found = statx(table, name.encode(), how, what, told) == 0
            if found and halves[14] & 0o170000 == stat.S_IFCHR:
                seen.add(os.makedev(words[32], words[33]))
        return seen & wanted

    return _open_in(pid, among)


#: What is looked for among descriptors: the number of a device or a socket, or a file.
Seen = TypeVar("Seen", int, "tuple[int, int]")


def _open_in(pid: int, among: Callable[[int, list[str]], set[Seen]]) -> frozenset[Seen]:
    """What is looked for among the descriptors of all threads of a process.

    Threads nearly always share one table, but they need not, and a leader that has exited shows an empty one while its
    threads live on; so each table is looked at once.
    """
    try:
        threads = sorted(int(name) for name in os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError):
        return frozenset()
    found: set[Seen] = set()
    scanned: list[int] = []
    for thread in threads:
        # In doubt two threads share nothing, which only costs a second look.
        if any(libc.kcmp_files(other, thread) == 0 for other in scanned):
            continue
        numbers = _found_in(f"/proc/{pid}/task/{thread}/fd", among)
        if numbers is not None:
            scanned.append(thread)
            found |= numbers
    return frozenset(found)


def _found_in(path: str, among: Callable[[int, list[str]], set[Seen]]) -> set[Seen] | None:
    """What is looked for in one fd directory; None if there is nothing to see, as for an exited leader."""
    try:
        table = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return None
    try:
        names = os.listdir(table)
        return among(table, names) if names else None
    except (FileNotFoundError, ProcessLookupError):
        return None
    finally:
        os.close(table)


def device_number(path: str) -> int | None:
    """The device number of a character device node, or None if there is no such node."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_rdev if stat.S_ISCHR(status.st_mode) else None
