"""What /proc says of processes: who they are, who started them, and which cgroup they are in.

A process that vanished is None or simply absent, never an exception. Only files that cannot block are read here; what
can is host.slow's, and what a process has open is host.opened's.
"""

from __future__ import annotations

import contextlib
import errno
import os

from ..model import Process

#: Inode of the initial PID namespace (PROC_PID_INIT_INO in the kernel's include/linux/proc_ns.h).
INITIAL_PID_NAMESPACE = 4026531836

TICKS = os.sysconf("SC_CLK_TCK")


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
    from . import libc

    uid, mode = libc.owner(directory, b"exe") or (None, 0)
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
