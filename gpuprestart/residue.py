"""What dead servers leave in shared memory, and which of it may go.

Something is residue only if nobody has it open or mapped and nobody alive is known to want it; in doubt it stays, and
that is told. What somebody has is his, and not a word is lost on it. A name may be handed over minutes before who gets
it opens the file, as while a model is loaded: so of a name that carries a PID, that process must be gone, here and in
the PID namespaces of containers; and of any other name, all who were there and may have been told it. A memfd has no
name here, and the IPC namespace of a unit with PrivateIPC= is another one.
"""

from __future__ import annotations

import fnmatch
import functools
import glob
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, Optional

from . import crowd, infrastructure
from .host import ipc, opened, procfs
from .host.ipc import File, Removal, Segment
from .model import Account, Leftover, Process
from .neighbours import Neighbours
from .policy import Residue
from .registry import SLOW
from .text import numbered, printable

#: Seconds for which what was made or used last may yet be wanted by somebody of whom nothing is known. Handing over a
#: name takes milliseconds; and a server that dies while it starts, again and again, is not started again for seconds.
YOUNG = 10.0

SHM = "/dev/shm"

#: Nodes of GPUs, and those that lead to all of them: who has one open may be a server.
NODES = "/dev/nvidia*"

#: A start is told in ticks of /proc, and a file's time in those of the kernel, which are no longer; in doubt by one of
#: them, the process was there first.
TICK = 1 / procfs.TICKS

#: Where programs that are known for it put their PID into a name: PyTorch (NewProcessWideShmHandle), CUDA (in hex),
#: SGLang (make_shm_name), loky (SemLock). Other names of theirs, as NCCL's and Python's, are random.
_PID_IN_NAME = (
    (re.compile(r"torch_([0-9]+)_"), 10),
    (re.compile(r"cuda\.shm\.[^.]+\.([0-9a-f]+)\."), 16),
    (re.compile(r"sgl_shm_.*_([0-9]+)_[0-9a-f]{8}$"), 10),
    (re.compile(r"sem\.loky-([0-9]+)-"), 10),
)
#: In any other name each number by itself may be one. That it is none is nothing to go by: of Python's random names one
#: in forty has digits alone.
_NUMBER = re.compile(r"(?<![0-9A-Za-z])[0-9]{1,10}(?![0-9A-Za-z])")


class Users(NamedTuple):
    """Which files any process has open or mapped, by device and inode; ``doubt`` says who could not be asked.

    ``sharers`` are those who may be told a name: of each user, who was there first among all that share memory by name
    or have a GPU. Where that one came too late for a file, so did the others.
    """

    files: frozenset[tuple[int, int]] = frozenset()
    doubt: str = ""
    sharers: tuple[Process, ...] = ()


class Terms(NamedTuple):
    """What the judgement goes by besides the thing itself. ``uids`` is None where anybody's may go, ``alive`` tells of
    a PID whether it is a process that is no thread of the kernel's; ``now``, and ``booted``, which is where
    CLOCK_BOOTTIME began, are seconds since the epoch."""

    uids: Optional[frozenset[int]]
    alive: Callable[[int], bool]
    now: float
    booted: float


# Judgement -----------------------------------------------------------------------------------------------------------


def of_file(file: File, users: Users, terms: Terms) -> Optional[str]:
    """Why a file stays, as a clause after "it"; empty where it may go, None where somebody has it."""
    if not stat.S_ISREG(file.mode):
        return f"is {_KINDS.get(stat.S_IFMT(file.mode), 'a special file')}, which no server's memory is"
    if (file.device, file.inode) in users.files:
        return None
    if users.doubt:
        return f"may be in use: {users.doubt}"
    if file.links != 1:
        return f"has {file.links} names, and another one may be wanted"
    alive = next(filter(terms.alive, pids_in(file.name)), None)
    if alive is not None:
        return f"has the number {alive} in its name, which is the PID of a process that is alive"
    return _not_theirs(file.uid, terms) or _young(file.changed, terms) or _awaited(file, users, terms)


_KINDS = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a directory"}


def pids_in(name: str) -> Iterator[int]:
    """The PIDs that a name carries, or may carry."""
    known = _pid_in(name)
    # A server is not PID 1, and counters begin there.
    guessed = (number for number in map(int, _NUMBER.findall(name)) if number > 1)
    yield from guessed if known is None else (known,)


def _pid_in(name: str) -> Optional[int]:
    """The PID that a name is known to carry."""
    found = ((pattern.match(name), base) for pattern, base in _PID_IN_NAME)
    return next((int(match[1], base) for match, base in found if match), None)


def of_segment(segment: Segment, terms: Terms) -> Optional[str]:
    """The same of a SysV segment."""
    if segment.attached or segment.mode & ipc.SHM_DEST:
        return None
    if segment.mode & ipc.SHM_LOCKED:
        return "is locked into memory"
    if not segment.creator or (segment.atime and not segment.last):
        return "was made or used in another PID namespace, where its users may be alive"
    for pid, what in ((segment.creator, "made"), (segment.last, "last used")):
        if pid and terms.alive(pid):
            return f"is attached nowhere, but PID {pid}, which {what} it, is alive"
    # The end of a server is its last detachment, so that dtime says nothing.
    return _not_theirs(segment.uid, terms) or _young(max(segment.ctime, segment.atime), terms)


def _not_theirs(uid: int, terms: Terms) -> str:
    if terms.uids is None or uid in terms.uids:
        return ""
    return f"belongs to uid {uid}, neither the unit's user nor root (residue.owner)"


def _young(changed: float, terms: Terms) -> str:
    """A time that is yet to come is none that proves anything."""
    return "" if changed <= terms.now - YOUNG else f"was made or used less than {YOUNG:g} s ago"


def _awaited(file: File, users: Users, terms: Terms) -> str:
    """A program hands over a name of its own choice, and closes the file itself, long before the other opens it."""
    if _pid_in(file.name) is not None:
        return ""
    first = next((each for each in users.sharers if each.uid == file.uid and _was_there(each, file, terms)), None)
    if first is None:
        return ""
    return f"may yet be opened by {printable(str(first), 64)}, which is alive and was there before it was last used"


def _was_there(process: Process, file: File, terms: Terms) -> bool:
    return terms.booted + process.began <= file.changed + TICK


# What is done --------------------------------------------------------------------------------------------------------


def clear(policy: Residue, host: Neighbours, *, account: Account, touch: bool) -> list[Leftover]:
    """Remove what may go, or with ``touch`` false tell what would; all that was found, each with its fate."""
    uids = None if policy.owner == "any" else _uids(account, host)
    now = time.time()
    booted = now - time.clock_gettime(time.CLOCK_BOOTTIME)
    inner = functools.lru_cache(maxsize=None)(procfs.inner_pids)
    alive = functools.lru_cache(maxsize=None)(lambda pid: _alive(pid) or pid in inner())
    terms = Terms(uids=uids, alive=alive, now=now, booted=booted)
    found: list[Leftover] = []
    for look in (_shm, _mqueue, _sysv, _mps):
        try:
            found += look(policy, host, terms, touch)
        except OSError as error:
            found.append(Leftover(look.__name__[1:], "", 0, "failed", f"could not be looked at: {error.strerror}"))
    return found


def _shm(policy: Residue, host: Neighbours, terms: Terms, touch: bool) -> list[Leftover]:
    def wanted(name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in policy.shm_patterns)

    return [] if policy.shm == "off" else _files("shm", SHM, policy.shm, wanted, host, terms, touch)


def _mqueue(policy: Residue, host: Neighbours, terms: Terms, touch: bool) -> list[Leftover]:
    path = None if policy.mqueue == "off" else ipc.queues()
    return [] if path is None else _files("mqueue", path, policy.mqueue, bool, host, terms, touch)


def _files(
    kind: str, path: str, mode: str, wanted: Callable[[str], bool], host: Neighbours, terms: Terms, touch: bool
) -> list[Leftover]:
    with ipc.Directory(path) as directory:
        files = directory.files(wanted)
        users = _users(host, directory.device, files, terms, mappable=kind == "shm") if files else Users()
        judged = ((file, of_file(file, users, terms)) for file in files)
        fates = (
            (file, _fate(kind, mode, touch, functools.partial(directory.remove, file), why)) for file, why in judged
        )
        # A queue is no memory that a server would miss.
        return [
            Leftover(kind, file.name, file.bytes if kind == "shm" else 0, *fate)
            for file, fate in fates
            if fate is not None
        ]


def _sysv(policy: Residue, host: Neighbours, terms: Terms, touch: bool) -> list[Leftover]:
    found = []
    for segment in ipc.segments() if policy.sysv != "off" else []:
        remove = functools.partial(ipc.remove_segment, segment)
        fate = _fate("sysv", policy.sysv, touch, remove, of_segment(segment, terms))
        if fate is not None:
            found.append(Leftover("sysv", str(segment.id), segment.bytes, *fate))
    return found


def _mps(policy: Residue, host: Neighbours, terms: Terms, touch: bool) -> list[Leftover]:
    """Only told, never removed: a daemon that starts makes them anew."""
    gone = [] if terms.alive(ipc.mps_pid()) else ipc.mps_sockets()
    return [Leftover("mps", path, 0, "kept", "is a control socket of an MPS daemon that is gone") for path in gone]


def _fate(
    kind: str, mode: str, touch: bool, remove: Callable[[], Removal], why: Optional[str]
) -> Optional[tuple[str, str]]:
    """What becomes of something, and why; None for what is somebody's, or gone by itself."""
    if why is None:
        return None
    if why:
        return "kept", why
    if mode == "report":
        return "kept", f'is nobody\'s any more, and residue.{kind} = "report" leaves it'
    if not touch:
        return "kept", "would be removed"
    try:
        done = remove()
    except OSError as error:
        return "failed", f"could not be removed: {error.strerror}"
    if done is Removal.GONE:
        return None
    if done is Removal.IN_USE:
        return "kept", "is in use by a process that cannot be seen from here or has just come"
    return "removed", "was nobody's any more"


# Who has what --------------------------------------------------------------------------------------------------------


def _users(host: Neighbours, device: int, files: Sequence[File], terms: Terms, *, mappable: bool) -> Users:
    """One look at all processes, for all files of a file system. Other mount namespaces may show the same files under
    other names, so device and inode tell; a descriptor in flight is seen by the kernel alone, when a file is to go."""
    found: set[tuple[int, int]] = set()
    sharing: set[int] = set()
    hidden = []
    pids = procfs.pids()
    for pid in crowd.breathing(pids, host.wait):
        try:
            having = opened.files_of(pid, {device})
        except PermissionError:
            hidden.append(pid)
            continue
        found |= having
        sharing |= {pid} if having else set()
    if mappable:
        mapped, silent = crowd.answers(host.ask, "files", pids, device)
        found |= {(device, inode) for inodes in mapped.values() for inode in inodes}
        sharing |= mapped.keys()
        hidden += silent
    hidden = sorted({pid for pid in hidden if procfs.read(pid) is not None})
    doubt = f"{numbered(hidden, 4)} may not be looked into, or does not answer" if hidden else ""
    return Users(frozenset(found), doubt, () if doubt else _sharers(host, pids, sharing, files, terms))


def _sharers(
    host: Neighbours, pids: Iterable[int], sharing: Collection[int], files: Sequence[File], terms: Terms
) -> tuple[Process, ...]:
    """``Users.sharers``, as far as these files are concerned: ``sharing`` have something on the same file system."""
    last: dict[int, File] = {}
    for file in files:
        if _pid_in(file.name) is None:
            last[file.uid] = max(file, last.get(file.uid, file), key=lambda each: each.changed)
    if not last:
        return ()
    # Our children have the driver open, and ourselves the directory.
    ours = {os.getpid(), *host.children()}
    read = (procfs.read(pid) for pid in crowd.breathing(pids, host.wait) if pid not in ours)
    there = [each for each in read if each and each.uid in last and _was_there(each, last[each.uid], terms)]
    serving = _serving(host, [each.pid for each in there if each.pid not in sharing])
    first: dict[int, Process] = {}
    for process in sorted(there, key=lambda each: each.began):
        # A daemon or a display has a GPU to look after it, and not for a server's memory.
        if process.pid in sharing or (process.pid in serving and not infrastructure.recognise(process)):
            first.setdefault(process.uid, process)
    return tuple(first.values())


def _serving(host: Neighbours, pids: Sequence[int]) -> set[int]:
    """Which of these processes have the node of any GPU open or mapped, or do not tell."""
    numbers = (opened.device_number(path) for path in glob.glob(NODES))
    nodes = {number for number in numbers if number is not None}
    if not nodes:
        return set()
    having, silent = crowd.having(host, nodes, pids)
    return having | silent


def _alive(pid: int) -> bool:
    """Whether that is a process, and no thread of the kernel's: those have neither a program nor a stack."""
    process = procfs.read(pid) if 0 < pid < 1 << 31 else None
    return process is not None and (process.exe is not None or process.image != 0 or os.geteuid() != 0)


def _uids(account: Account, host: Neighbours) -> frozenset[int]:
    """The unit's user and root; root alone where nobody says who the user is."""
    user = account.user
    number = int(user) if user.isascii() and user.isdigit() else host.ask(("uid", user), SLOW) if user else None
    return frozenset({0} if number is None else {0, number})
