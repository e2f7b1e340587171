"""What /proc says of processes: who they are, which cgroup they are in, which device nodes they have open.

A process that vanished is None or simply absent, never an exception. Only files that cannot block are read here, but
for ``slow``, which runs in a child: cmdline, maps and name services can hang for ever (leptonai/gpud, pkg/process).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import struct
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Callable, NamedTuple, TypeVar

from ..model import Process

#: So much of a command line is enough to know a process by. A program may have a quarter of a million words, and can
#: have its command line lead to any of its memory, gigabytes of it (prctl(2), PR_SET_MM).
CMDLINE_WORDS = 512
CMDLINE_BYTES = 1 << 16

#: So much is read of maps for one question. A library's user has 100 KiB, and nobody is kept from having gigabytes.
MAPS_BYTES = 1 << 25

#: Inode of the initial PID namespace (PROC_PID_INIT_INO in the kernel's include/linux/proc_ns.h).
INITIAL_PID_NAMESPACE = 4026531836

TICKS = os.sysconf("SC_CLK_TCK")


class Sweep(NamedTuple):
    """One pass over all descriptors: PID -> device numbers of interest that it has open, in any thread."""

    opened: Mapping[int, frozenset[int]]
    #: Processes that refused to be looked at. They may hold anything.
    unreadable: tuple[int, ...]


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def login_name() -> str:
    """Who logged in, and became root only then, as the kernel keeps it (/proc/PID/loginuid, see proc(5))."""
    import pwd

    try:
        with open("/proc/self/loginuid", encoding="ascii") as file:
            uid = int(file.read())
    except (OSError, ValueError):
        uid = os.getuid()
    if uid == 2**32 - 1:
        # Nobody logged in: a service, or a container's shell.
        uid = os.getuid()
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def read(pid: int) -> Process | None:
    """Who a process is now, or None if there is no such process or only its corpse: a true zombie holds nothing.

    A zombie leader with a live thread also shows state Z; it still has threads, and it is alive.
    """
    try:
        directory = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # Everything is read below one descriptor of the directory, so it is all of the same process.
        comm, fields = parse_stat(_bytes(directory, "stat"))
        state = fields[0]
        if state in ("Z", "X") and int(fields[17]) <= 1:
            return None
        return Process(
            pid=pid,
            started=int(fields[19]),
            began=int(fields[19]) / TICKS,
            ppid=int(fields[1]),
            comm=comm,
            state=state,
            uid=_effective_uid(_bytes(directory, "status")),
            cgroup=_cgroup(directory),
            exe=_exe(directory),
            exe_trusted=_exe_trusted(directory),
            pid_namespace=_pid_namespace(directory),
            image=int(fields[25]),
        )
    except (FileNotFoundError, ProcessLookupError):
        return None
    finally:
        os.close(directory)


def still_there(process: Process) -> bool:
    """Whether this very process is alive."""
    now = read(process.pid)
    return now is not None and now.identity == process.identity


def unchanged(process: Process) -> bool:
    """Whether it is this very process still, of the same user, in the same cgroup, and running the same program."""
    now = read(process.pid)
    return now is not None and _who(now) == _who(process)


def _who(process: Process) -> tuple[object, ...]:
    return process.identity, process.uid, process.cgroup, process.exe, process.image


def lineage(pid: int) -> list[int]:
    """The process and its ancestors, nearest first. It ends early where one of them is just going."""
    line: list[int] = []
    while pid > 0 and pid not in line:
        line.append(pid)
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                pid = int(parse_stat(file.read())[1][1])
        except (FileNotFoundError, ProcessLookupError):
            break
    return line


def commands(pid: int) -> list[str]:
    """The comm of a process and of its ancestors, as ``comm[pid]``, nearest first."""
    found = []
    for one in lineage(pid):
        try:
            with open(f"/proc/{one}/comm", "rb") as file:
                found.append(f"{os.fsdecode(file.read()[:-1])}[{one}]")
        except OSError:
            break
    return found


def parse_stat(text: bytes) -> tuple[str, list[str]]:
    """(comm, the fields from state on). A comm may hold spaces, brackets and newlines: it ends at the last ``)``."""
    opening, closing = text.index(b"("), text.rindex(b")")
    return os.fsdecode(text[opening + 1 : closing]), text[closing + 2 :].decode("ascii").split()


def parse_cgroup(text: bytes) -> str:
    """The cgroup path that systemd manages, or ``?`` where /proc shows none.

    On a hybrid machine it stands on the ``name=systemd`` line while ``0::`` is at the root, as it does on cgroup v1.
    """
    unified = named = None
    for line in text.split(b"\n"):
        hierarchy, _, rest = line.partition(b":")
        controllers, _, path = rest.partition(b":")
        if hierarchy == b"0" and not controllers:
            unified = path
        elif controllers == b"name=systemd":
            named = path
    chosen = named if unified in (None, b"/") and named is not None else unified
    return "?" if chosen is None else os.fsdecode(chosen)


def _cgroup(directory: int) -> str:
    """Older kernels refuse to tell a path of more than 4,095 bytes, newer ones tell its beginning; anybody can make one
    below a cgroup of their own."""
    try:
        return parse_cgroup(_bytes(directory, "cgroup"))
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return "?"


def inner_pids() -> frozenset[int]:
    """The PIDs that processes have in the PID namespaces below ours, as those of containers (NSpid in proc(5))."""
    found: set[int] = set()
    for pid in pids():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:
            said = next((line for line in file if line.startswith(b"NSpid:")), b"")
            inner = [int(word) for word in said.split()[2:]]
            if inner and read(pid) is not None:
                found.update(inner)
    return frozenset(found)


def own_cgroup() -> str:
    """The cgroup that we are in, as ``parse_cgroup`` has it."""
    with open("/proc/self/cgroup", "rb") as file:
        return parse_cgroup(file.read())


def _effective_uid(status: bytes) -> int:
    for line in status.split(b"\n"):
        if line.startswith(b"Uid:"):
            return int(line.split()[2])
    return -1


def _exe(directory: int) -> str | None:
    """The executable's path; None for kernel threads and for processes that we may not look into."""
    try:
        return os.readlink("exe", dir_fd=directory)
    except OSError:
        return None


def _exe_trusted(directory: int) -> bool:
    """Whether the program on disk is root's and nobody else can write it; the link is followed to the open file.

    Like a descriptor, it may lie on a network mount whose server is gone, and is not asked for.
    """
    libc = _load_libc()
    if libc.statx(directory, b"exe", _AT_STATX_DONT_SYNC, _STATX_TYPE | _STATX_MODE | _STATX_UID, _statx) != 0:
        return False
    (uid,), (mode,) = _UID.unpack_from(_statx, 20), _MODE.unpack_from(_statx, 28)
    return uid == 0 and not mode & 0o022


def _pid_namespace(directory: int) -> int:
    """The inode of its PID namespace; 0 where we may not look into it."""
    try:
        return os.stat("ns/pid", dir_fd=directory).st_ino
    except PermissionError:
        # The kernel says so of a process that has just gone, too; but that one has no stat any more.
        _bytes(directory, "stat")
        return 0


def _bytes(directory: int, name: str) -> bytes:
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        parts = []
        while part := os.read(descriptor, 65536):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


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
    libc = _load_libc()

    def among(table: int, names: list[str]) -> set[tuple[int, int]]:
        seen = set()
        for name in names:
            if libc.statx(table, name.encode(), _AT_STATX_DONT_SYNC, _STATX_INO, _statx) != 0:
                # It is closed by now; or the list may be read and not what is on it, and this says so.
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    os.readlink(name, dir_fd=table)
                continue
            device = os.makedev(*_DEV.unpack_from(_statx, 136))
            if device in devices:
                seen.add((device, *_INO.unpack_from(_statx, 32)))
        return seen

    return _open_in(pid, among)


def _devices_of(pid: int, wanted: frozenset[int]) -> frozenset[int]:
    """Device numbers that any thread of the process has open."""
    statx = _load_libc().statx
    # Of a machine's descriptors there may be millions, so as little as can be is done for each of them.
    halves, words = memoryview(_statx).cast("B").cast("H"), memoryview(_statx).cast("B").cast("I")

    def among(table: int, names: list[str]) -> set[int]:
        seen = set()
        for name in names:
            found = statx(table, name.encode(), _AT_STATX_DONT_SYNC, _STATX_TYPE, _statx) == 0
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
        if any(kcmp_files(other, thread) == 0 for other in scanned):
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


def _kind(directory: int, path: bytes) -> tuple[int | None, int]:
    """The mode of a file and the device number that it stands for; None for one that is not there.

    statx(2) is told not to ask whoever serves the file system: a file on a network mount whose server is gone would
    hang the whole run, and what kind of file it is the kernel knows without asking.
    """
    libc = _load_libc()
    if libc.statx(directory, path, _AT_STATX_DONT_SYNC, _STATX_TYPE, _statx) != 0:
        return None, 0
    (mode,) = _MODE.unpack_from(_statx, 28)
    return mode, os.makedev(*_RDEV.unpack_from(_statx, 128))


#: struct statx is 256 bytes: stx_uid is at 20, stx_mode at 28, stx_ino at 32, stx_rdev_major and _minor at 128,
#: stx_dev_major and _minor at 136 (include/uapi/linux/stat.h).
_statx: Any = None
_MODE = struct.Struct("H")
_UID = struct.Struct("I")
_INO = struct.Struct("Q")
_RDEV = _DEV = struct.Struct("II")
_AT_FDCWD = -100
_AT_STATX_DONT_SYNC = 0x4000
_STATX_TYPE, _STATX_MODE, _STATX_UID, _STATX_INO = 1, 2, 8, 0x100

_libc: Any = None
#: SYS_kcmp by machine, from the kernel's system call tables.
_KCMP = {"x86_64": 312, "aarch64": 272, "ppc64le": 354, "s390x": 343}
_KCMP_FILES = 2


def kcmp_files(one: int, other: int) -> int:
    """kcmp(one, other, KCMP_FILES): 0 if both tasks have one descriptor table, -1 if the kernel does not tell."""
    number = _KCMP.get(os.uname().machine)
    if number is None:
        return -1
    return int(_load_libc().syscall(number, one, other, _KCMP_FILES, 0, 0))


def _load_libc() -> Any:
    """The C library, loaded at the first use, with its calls as they are used here."""
    global _libc, _statx
    if _libc is None:
        import ctypes

        _libc = ctypes.CDLL(None)
        _libc.syscall.restype = ctypes.c_long
        _statx = (ctypes.c_char * 256)()
    return _libc


def device_number(path: str) -> int | None:
    """The device number of a character device node, or None if there is no such node."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_rdev if stat.S_ISCHR(status.st_mode) else None


def own_pid_namespace() -> int:
    """Inode of our PID namespace."""
    return os.stat("/proc/self/ns/pid").st_ino


def wchan(pid: int) -> str:
    """The kernel function in which a process sleeps, or empty where the kernel does not tell."""
    try:
        with open(f"/proc/{pid}/wchan", "rb") as file:
            name = file.read(128).decode("ascii", "replace")
    except OSError:
        return ""
    return "" if name == "0" else name


def slow(request: tuple[str, Any]) -> Any:
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
                return None if parse_stat(file.read())[1][0] in ("Z", "X") else []
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
            kind, number = _kind(_AT_FDCWD, look)
            if kind is not None:
                found |= {number} if stat.S_ISCHR(kind) else set()
                break
    return sorted(found.intersection(devices))


def _inodes_among(maps: bytes, device: int) -> list[int]:
    """Inodes of the files on this device in the text of a maps file. On tmpfs the device of a mapping is that of the
    file (unlike on btrfs or overlayfs)."""
    mapping = re.compile(b" %02x:%02x ([0-9]+) " % (os.major(device), os.minor(device)))
    return sorted({int(inode) for inode in mapping.findall(maps)})
