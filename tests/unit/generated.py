"""Whole machines, generated: processes and where they live, units, GPUs, policies, and what changes meanwhile.

Everything here is written down and does nothing; ``simulated`` brings it to life. Places carry the truth about
themselves, so that nobody who checks the program has to guess it from a path as the program does. What stands first in
a list is the plainest, because that is what hypothesis shrinks to. Amounts are MiB, times are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional, TypeVar, Union

from hypothesis import strategies as st

from gpuprestart.model import Unit

from . import machines

T = TypeVar("T")

#: CLOCK_BOOTTIME when a run begins, and the tick at which the present start of our own unit began.
BEGAN = 10_000.0
BOUNDARY = 990_000

#: The supporting cast: init, the shell that our unit's line runs in, this program and its two children, what the shell
#: started beside it, and what runs containers and jobs. The machine's own processes are numbered from ``FIRST`` on.
INIT, SHELL, US, ASKER, ANSWERER, TEE, SHIM, STEPD, FIRST = 1, 400, 401, 402, 403, 404, 500, 501, 3000

#: Inodes of PID namespaces.
OURS, THEIRS = 4026531836, 4026532000
USERS = {0: "root", 990: "model", 1000: "alice"}
ID = "0123456789abcdef" * 4

#: Device number of nvidia-uvm.
UVM = 900


def node(minor: int) -> int:
    """Device number of a GPU."""
    return 100 + minor


def capability(minor: int, gi: int) -> int:
    """Device number of what opens an instance."""
    return 800 + 10 * minor + gi


# Places --------------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """A cgroup. ``names`` are the units that its path names, outermost first. ``root`` is the cgroup of the container
    or job that it is in, which is called ``engine`` and ``name``; ``name`` is a session's number as well."""

    path: str
    kind: str = "nobody"
    names: tuple[str, ...] = ()
    root: str = ""
    engine: str = ""
    name: str = ""


OWN, CARRIER = "sglang.service", "jupyterhub.service"
HOMES: Mapping[str, str] = {
    OWN: f"/system.slice/{OWN}",
    "old.service": "/system.slice/old.service",
    "inner.service": "/system.slice/old.service/inner.service",
    "ollama.service": "/system.slice/ollama.service",
    "vllm@a.service": "/system.slice/system-vllm.slice/vllm@a.service",
    "cron.service": "/system.slice/cron.service",
    "run-u7.scope": "/system.slice/run-u7.scope",
    "session-7.scope": "/user.slice/user-1000.slice/session-7.scope",
    "session-9.scope": "/user.slice/user-1000.slice/session-9.scope",
    "user@1000.service": "/user.slice/user-1000.slice/user@1000.service",
    f"docker-{ID}.scope": f"/system.slice/docker-{ID}.scope",
}


def _unit(name: str, below: str = "", *more: str) -> Place:
    return Place(HOMES[name] + below, "unit", (name, *more))


def _container(root: str, engine: str, name: str, below: str = "", *units: str) -> Place:
    return Place(root + below, "container", units, root, engine, name)


def _job(root: str, name: str, below: str = "") -> Place:
    return Place(root + below, "job", (), root, "slurm", name)


UNITS = [
    _unit("old.service"),
    _unit("old.service", "/child"),
    _unit("ollama.service"),
    _unit("vllm@a.service"),
    _unit("cron.service"),
    _unit("run-u7.scope"),
    _unit("old.service", "/inner.service", "inner.service"),
    _unit("old.service", "/ollama.service", "ollama.service"),
    Place("/custom.slice/old.service", "unit", ("old.service",)),
    Place("/system.slice/_old.service", "unit", ("old.service",)),
    Place("/system.slice/old.service2/old.service", "unit", ("old.service",)),
]
#: Below our own unit, be it the unit whose start this is or not.
OWNS = [
    Place(HOMES[OWN], "own", (OWN,)),
    Place(HOMES[OWN] + "/child", "own", (OWN,)),
    Place(f"{HOMES[OWN]}/libpod-{ID}", "own", (OWN,), f"{HOMES[OWN]}/libpod-{ID}", "podman", ID),
]
CONTAINERS = [
    _container(HOMES[f"docker-{ID}.scope"], "docker", ID, "", f"docker-{ID}.scope"),
    _container(f"/docker/{ID}", "docker", ID),
    _container(f"/machine.slice/libpod-{ID}.scope", "podman", ID, "/container"),
    _job("/system.slice/slurmstepd.scope/job_42", "42", "/step_0/task_0"),
    _job("/slurm/uid_1000/job_43", "43"),
    _container(f"/kubepods.slice/kubepods-pod1.slice/cri-containerd-{ID}.scope", "cri-containerd", ID),
    _container(f"/kubepods/burstable/pod1/{ID}", "kubernetes", ID),
    _container(f"{HOMES['old.service']}/docker-{ID}.scope", "docker", ID, "", "old.service"),
    _container(f"{HOMES['user@1000.service']}/user.slice/libpod-{ID}.scope", "podman", ID, "", "user@1000.service"),
    _container("/lxc.payload.web", "lxc", "web", "/system.slice/old.service", "old.service"),
]
SESSIONS = [
    Place(HOMES["session-7.scope"], "session", ("session-7.scope",), name="7"),
    Place(HOMES["session-9.scope"], "session", ("session-9.scope",), name="9"),
    Place(f"{HOMES['user@1000.service']}/app.slice/old.service", "manager", ("user@1000.service", "old.service")),
]
ELSEWHERE = [
    Place("/"),
    Place("/custom"),
    Place("/system.slice/old.service2"),
    Place("/user.slice/user-1000.slice"),
    Place(HOMES[OWN] + "2"),
    Place("/../system.slice/old.service", "outside"),
    Place("/..", "outside"),
    Place("?", "outside"),
]
#: One of each of these is as likely as one of any other.
GROUPS = [UNITS, UNITS, SESSIONS, CONTAINERS, ELSEWHERE, OWNS]


# What a machine is made of -------------------------------------------------------------------------------------------


class Look(NamedTuple):
    comm: str = "python3"
    exe: Optional[str] = "/usr/bin/python3.11"
    #: The executable is root's, and nobody else can write it.
    trusted: bool = True


class Share(NamedTuple):
    """What a process has on one GPU. ``listed``: in NVML's lists ``kinds``; ``told``: with the amount."""

    amount: int
    listed: bool = True
    told: bool = True
    kinds: tuple[str, ...] = ("compute",)


class Manners(NamedTuple):
    """How a process ends: so many seconds after SIGTERM and SIGKILL, never where that is None; so many seconds later
    its memory is back, or never."""

    term: Optional[float] = 0.0
    kill: Optional[float] = 0.0
    back: Optional[float] = 0.0
    #: When it is sent SIGTERM another one like it appears, so many times.
    forks: int = 0
    #: What it had is charged to another process then.
    heir: bool = False
    #: The kernel refuses us signals to it.
    denied: bool = False


class Actor(NamedTuple):
    """A process as it truly is. ``fds`` and ``maps`` are device numbers."""

    pid: int
    place: Place
    look: Look = Look()
    uid: int = 990
    started: int = BOUNDARY - 1000
    ppid: int = INIT
    #: As in /proc; ``z`` is a leader that has exited and whose threads live on.
    state: str = "S"
    namespace: int = OURS
    shares: Mapping[str, Share] = {}
    fds: frozenset[int] = frozenset()
    maps: frozenset[int] = frozenset()
    manners: Manners = Manners()
    #: What of it cannot be read: ``fds``, ``maps``, ``cmdline``, or ``wedged`` where asking for the latter two hangs.
    hides: str = ""
    cmdline: str = "python3 -m sglang.launch_server"

    @property
    def identity(self) -> tuple[int, int]:
        return (self.pid, self.started)

    @property
    def corpse(self) -> bool:
        """A true zombie."""
        return self.state == "Z"


class Card(NamedTuple):
    """A GPU or an instance of one, and what is strange about it: it is ``lost``, has ``insane`` figures, a
    ``scrambled`` list or none (``unlisted``), is ``unified`` with the machine's memory, or has only the ``v1`` call."""

    uuid: str
    number: int
    minor: int
    parent: Optional[str] = None
    gi: Optional[int] = None
    strange: str = ""
    #: Memory that nobody has, and entries of the list that are nobody.
    base: int = 3
    ghosts: tuple[tuple[int, int], ...] = ()

    @property
    def needed(self) -> frozenset[int]:
        """What a process must have open to have this GPU."""
        return frozenset({node(self.minor)} | ({capability(self.minor, self.gi)} if self.gi is not None else set()))


class Layout(NamedTuple):
    """The GPUs of a machine, and which of them the server is to use."""

    cards: tuple[Card, ...]
    selected: tuple[int, ...]


class Rule(NamedTuple):
    action: str
    match: tuple[tuple[str, Union[str, int]], ...]
    infrastructure: bool = False
    overlay: bool = False


class Terms(NamedTuple):
    """A policy."""

    max_used: int = 64
    spared_max: int = 2048
    min_free: int = 0
    settle: float = 0.5
    unified: str = "holders"
    total: float = 5.0
    term: float = 1.0
    protected: float = 0.0
    dedicated: bool = False
    pids: str = "ours"
    rules: tuple[Rule, ...] = ()


class Change(NamedTuple):
    """Something that happens when the clock has come so far (``time``), or when something is asked the ``nth`` time: of
    systemd about ``units``, of /proc (``pids``, ``sweep``, ``maps``), of the driver (``sample``), or for a pidfd,
    before and after it is ``open``-ed. ``who`` counts processes, units or GPUs."""

    on: str
    nth: float
    what: str
    who: int = 0
    to: Any = None


class Machine(NamedTuple):
    """``mode``: ``certain`` and ``start`` are starts of our own unit, where systemd's command is us or a shell around
    us; ``named`` is ``--unit`` typed in a shell, ``shell`` the same without; ``reload`` is no start of the unit."""

    mode: str
    own: Unit
    layout: Layout
    terms: Terms = Terms()
    actors: tuple[Actor, ...] = ()
    units: Mapping[str, Unit] = {}
    changes: tuple[Change, ...] = ()
    #: The text of claims by UUID.
    claims: Mapping[str, str] = {}
    #: CLOCK_BOOTTIME less CLOCK_MONOTONIC: how long the machine has slept.
    ahead: float = 0.0
    #: KillUserProcesses=, KillOnlyUsers=, KillExcludeUsers=; None is a logind that does not answer.
    logind: Optional[tuple[bool, tuple[str, ...], tuple[str, ...]]] = (False, (), ())
    has_uvm: bool = True
    #: The name services answer.
    named: bool = True
    #: systemd lets the start take longer.
    extends: bool = True
    interrupted: Optional[float] = None
    locked_until: float = 0.0
    #: The question that the driver's child dies of.
    driver_dies: int = 0
    #: Most pidfds at once.
    room: int = 1000
    #: A rule that is not in force, for the question what it would change.
    extra: Optional[Rule] = None


# What there is to choose from ----------------------------------------------------------------------------------------

STATES = ["failed", "inactive", "active", "activating", "reloading", "deactivating", "maintenance", "imagined"]
ENDED = ["failed", "inactive"]
#: ActiveState and SubState of a session's scope.
SCOPES = [("active", "abandoned"), ("active", "running"), ("inactive", "dead"), ("failed", "failed"), ("gone", "")]
#: What is odd about a unit, if anything is.
ODDITIES: Sequence[Mapping[str, Any]] = [
    *[{}] * 8,
    {"user": ""},
    {"user": "990"},
    {"user": "stranger"},
    {"type": "oneshot"},
    {"load_state": "not-found", "control_group": ""},
    {"load_state": "not-found"},
    {"control_group": "/system.slice/elsewhere.slice/old.service"},
]

PYTHON, XORG = Look(), Look("Xorg", "/usr/lib/xorg/Xorg")
LOOKS = [
    PYTHON,
    PYTHON,
    PYTHON,
    Look("VLLM::Worker_TP0"),
    Look("Xorg", "/home/alice/Xorg", trusted=False),
    Look("Xorg", "/usr/bin/python3.11"),
    Look("nvidia-persiste", "/usr/bin/nvidia-persistenced"),
    XORG,
    Look("nvidia-cuda-mps", "/usr/bin/nvidia-cuda-mps-server"),
    Look("nv-hostengine", "/opt/nv-hostengine", trusted=False),
    Look("conmon", "/usr/bin/conmon"),
    Look("kworker/0:1", None, trusted=False),
    Look("a) S 1 (b\n"),
]
UIDS = [990, 990, 990, 0, 1000, 1234]
STARTS = [BOUNDARY - 1000, BOUNDARY - 1000, BOUNDARY - 1, BOUNDARY, BOUNDARY + 1, BOUNDARY + 900]
PARENTS = [INIT, INIT, INIT, FIRST, FIRST + 1, SHELL, SHIM, STEPD]
NAMESPACES = [*[OURS] * 6, THEIRS, 0]
HIDES = [*[""] * 8, "fds", "maps", "cmdline", "wedged"]
CMDLINES = ["python3 -m sglang.launch_server", "python3 train.py --api-key hunter2"]
SHARES: Sequence[Optional[Share]] = [
    Share(1520),
    Share(1520),
    Share(1520),
    Share(40),
    Share(1520, told=False),
    Share(300, kinds=("graphics",)),
    Share(300, kinds=("compute", "graphics")),
    Share(1520, kinds=("mps",)),
    Share(1520, kinds=("mps",)),
    Share(3000),
]
UNLISTED: Sequence[Optional[Share]] = [Share(1520, listed=False), None]
#: Which nodes a process has.
NODES = ["its", "its", "its", "all", "all", "mapped", "none", "no uvm", "no capability", "other"]
MANNERS = [
    Manners(),
    Manners(),
    Manners(),
    Manners(back=0.4),
    Manners(back=1.5),
    Manners(back=None),
    Manners(term=0.3),
    Manners(term=1.5),
    Manners(term=None),
    Manners(term=None, kill=0.5),
    Manners(term=None, kill=None),
    Manners(forks=1),
    Manners(forks=99),
    Manners(term=None, forks=99),
    Manners(heir=True),
    Manners(denied=True),
]

_GPUS = tuple(Card(machines.uuid(number), number, number) for number in range(2))
_SWAPPED = tuple(card._replace(minor=1 - card.minor) for card in _GPUS)
_SLICED = (_GPUS[0], *(Card(f"MIG-{gi:08x}", 0, 0, machines.uuid(0), gi) for gi in (1, 2)))
LAYOUTS = [
    Layout(_GPUS[:1], (0,)),
    Layout(_GPUS[:1], (0,)),
    Layout(_GPUS, (0, 1)),
    Layout(_GPUS, (0,)),
    Layout(_SWAPPED, (1,)),
    Layout(_SLICED, (1,)),
    Layout(_SLICED, (1, 2)),
]
STRANGE = [*[""] * 6, "v1", "v1", "lost", "insane", "scrambled", "scrambled", "unlisted", "unified", "unified"]
BASES = [3, 3, 3, 60, 65, 1500]
GHOSTS: Sequence[tuple[tuple[int, int], ...]] = [(), (), (), (), ((9999, 1520),), ((9998, 0),)]

TERMS = [
    Terms(),
    Terms(),
    Terms(settle=0.0),
    Terms(term=0.5),
    Terms(total=2.0),
    Terms(total=12.0, term=3.0),
    Terms(protected=2.0),
    Terms(protected=2.0, total=4.0),
    Terms(spared_max=256),
    Terms(max_used=1024, settle=1.0),
    Terms(max_used=0, spared_max=0),
    Terms(min_free=80_000),
    Terms(unified="refuse"),
]
MATCHES: Sequence[tuple[str, Union[str, int]]] = [
    ("comm", "."),
    ("user", "model"),
    ("user", 990),
    ("user", "alice"),
    ("user", "0"),
    ("comm", "^python3$"),
    ("comm", "Xorg"),
    ("exe", "."),
    ("exe", "python3"),
    ("exe", "/nv"),
    ("cmdline", "sglang"),
    ("unit", "old"),
    ("unit", "*"),
    ("unit", "ollama.service"),
    ("unit", "sglang.*"),
    ("session", "7"),
    ("session", "*"),
    ("container", "docker"),
    ("container", ID[:12]),
    ("age", "10 s"),
    ("age", "100 s"),
    ("age", "2 h"),
]

MODES = ["start", "start", "start", "start", "certain", "certain", "shell", "named", "reload"]
SUCCESSES = [*[frozenset[str]()] * 12, frozenset({"75"}), frozenset({"75", "78", "70"}), frozenset({"TERM"})]
LOGINDS: Sequence[Optional[tuple[bool, tuple[str, ...], tuple[str, ...]]]] = [
    (False, (), ()),
    (True, (), ()),
    (True, ("alice",), ()),
    (True, (), ("alice",)),
    (True, ("bob",), ()),
    None,
]
CLAIMS = [*[""] * 5, "unit=ollama.service invocation=aa pid=77", "unit=ollama.service invocation=bb pid=77", "odd"]
#: What is odd about a run, if anything is.
RUNS: Sequence[Mapping[str, Any]] = [
    *[{}] * 6,
    {"interrupted": 0.7},
    {"locked_until": 0.5},
    {"locked_until": 1e9},
    {"driver_dies": 1},
    {"driver_dies": 3},
    {"room": 1},
    {"named": False},
    {"has_uvm": False},
    {"has_uvm": False},
    {"extends": False},
]

#: Whoever goes elsewhere between the last look at it and the signal is beyond anybody's reach. Who dies there is not,
#: and what systemd is asked it answers as it is then.
_AT_ANY_TIME = ["unit", "exits", "replaced", "silent"]
CHANGES = [*_AT_ANY_TIME, "moves", "execs", "arrives", "lets go", "lost", "memory", *_AT_ANY_TIME]
LOOKING: Sequence[tuple[str, float]] = [
    ("time", 0.3),
    ("open", 1),
    ("maps", 1),
    ("time", 1.0),
    ("sweep", 1),
    ("pids", 1),
    ("opened", 1),
    ("time", 2.5),
    ("open", 2),
    ("maps", 2),
    ("sample", 3),
]
ASKING: Sequence[tuple[str, float]] = [*LOOKING, *(("units", nth) for nth in (3, 2, 4, 5, 3, 2))]

# The choice ----------------------------------------------------------------------------------------------------------


class Dice:
    """Picks from lists by the bytes of one drawn string, a byte for each pick. A machine of a few strings costs
    hypothesis a tenth of what a draw for every pick does, and every byte still shrinks to the first of its list."""

    def __init__(self, thrown: bytes) -> None:
        self._thrown = iter(thrown)

    def of(self, pool: Sequence[T]) -> T:
        return pool[next(self._thrown) % len(pool)]

    def often(self) -> bool:
        return next(self._thrown) % 2 == 1

    def rarely(self) -> bool:
        return next(self._thrown) % 6 == 5

    def number(self, most: int) -> int:
        return next(self._thrown) % (most + 1)


class Theme(NamedTuple):
    """What the processes of one machine are drawn from. Where anybody may be, somebody alive is soon in the way, and
    nobody is ended; so there are machines of the stale alone, of one process, and of several that have much in common.
    """

    groups: Sequence[Sequence[Place]]
    counts: Sequence[int] = (2, 1, 3, 4)
    states: Sequence[str] = ENDED
    shares: Sequence[Optional[Share]] = (*SHARES[:4], *UNLISTED)
    ppids: Sequence[int] = (INIT, INIT, FIRST)
    looks: Sequence[Look] = (PYTHON, PYTHON, PYTHON, XORG)
    alike: bool = False


_STALE = Theme([UNITS[:4], OWNS, CONTAINERS])
_ANYBODY = Theme(GROUPS, [2, 1, 3, 0], [*ENDED, *STATES], [*SHARES, *UNLISTED, None], PARENTS, LOOKS)
_ONE = _ANYBODY._replace(counts=[1], shares=SHARES)
_TWINS = _ANYBODY._replace(counts=[2, 2, 3], alike=True)
_SUSPECTS = _STALE._replace(shares=UNLISTED)
_OF_OUR_UNIT = Theme([OWNS, OWNS, UNITS[:2]], shares=[None, None, Share(1520), *UNLISTED], ppids=[INIT, FIRST, SHELL])
THEMES = [_STALE, _ONE, _TWINS, _ANYBODY, _ONE, _SUSPECTS, _ONE, _OF_OUR_UNIT, _TWINS, _ONE]


def _actor(dice: Dice, pid: int, theme: Theme, cards: Sequence[Card]) -> Actor:
    card = cards[dice.number(2) % len(cards)]
    share = dice.of(theme.shares)
    shares = {} if share is None else {card.uuid: share}
    if share is not None and dice.rarely():
        shares[cards[-1].uuid] = share
    fds, maps = _nodes(dice.of(NODES), card, cards)
    ppid, odd = dice.of(theme.ppids), dice.often()
    return Actor(
        pid=pid,
        place=dice.of(dice.of(theme.groups)),
        look=dice.of(theme.looks) if odd else PYTHON,
        uid=dice.of(UIDS) if odd else 990,
        started=dice.of(STARTS),
        ppid=ppid if ppid < pid else INIT,
        state=dice.of("SSSSSSRDTzZ") if odd else "S",
        namespace=dice.of(NAMESPACES) if odd else OURS,
        shares=shares,
        fds=fds,
        maps=maps,
        manners=dice.of(MANNERS),
        hides=dice.of(HIDES) if odd else "",
        cmdline=dice.of(CMDLINES),
    )


def _alike(dice: Dice, first: Actor, other: Actor) -> Actor:
    """The other with something that the first has."""
    if dice.often():
        other = other._replace(place=first.place)
    if dice.often():
        other = other._replace(shares=first.shares, fds=first.fds, maps=first.maps)
    return other


def _nodes(which: str, card: Card, cards: Sequence[Card]) -> tuple[frozenset[int], frozenset[int]]:
    """Descriptors and mappings of a process that uses this GPU."""
    nothing: frozenset[int] = frozenset()
    found = {
        "its": (card.needed | {UVM}, nothing),
        "all": (nothing.union({UVM}, *(each.needed for each in cards)), nothing),
        "mapped": (nothing, card.needed | {UVM}),
        "none": (nothing, nothing),
        "no uvm": (card.needed, nothing),
        "no capability": (frozenset({node(card.minor), UVM}), nothing),
        "other": (cards[-1].needed | {UVM}, nothing),
    }
    return found[which]


def _described(dice: Dice, name: str, states: Sequence[str]) -> Unit:
    """What systemd says of one of the units that have a home."""
    if name.startswith("session-"):
        active, sub = dice.of(SCOPES)
        if active == "gone":
            return machines.unit(name, "inactive", load_state="not-found", control_group="")
        return machines.unit(name, active, sub, control_group=HOMES[name], user="", type="")
    if name.startswith("user@"):
        return machines.unit(name, dice.of(["active", "active", "failed"]), control_group=HOMES[name], user="1000")
    made = machines.unit(name, dice.of(states), control_group=HOMES[name], invocation="aa")
    if name.endswith(".scope"):
        return made._replace(user=dice.of(["", "model"]), type="")
    return made._replace(**dice.of(ODDITIES))


def _rule(dice: Dice, actions: Sequence[str] = ("refuse", "spare", "kill", "kill")) -> Rule:
    keys = [dice.of(MATCHES), dice.of(MATCHES)][: 1 + dice.number(1)]
    return Rule(dice.of(actions), tuple(dict(keys).items()), infrastructure=dice.rarely(), overlay=dice.often())


def _change(dice: Dice, theme: Theme, cards: Sequence[Card]) -> Change:
    what = dice.of(CHANGES)
    on, nth = dice.of(ASKING if what in _AT_ANY_TIME else LOOKING)
    who = dice.number(2)
    to: Any = None
    if what == "unit":
        to = dice.of(["active", *STATES, "abandoned"])
    elif what in ("replaced", "arrives"):
        to = _actor(dice, FIRST + 100, theme, cards)
        # It may come to bear the PID of what it says has started it.
        to = to._replace(ppid=INIT) if to.ppid >= FIRST else to
    elif what == "moves":
        to = dice.of(dice.of(GROUPS))
    elif what == "execs":
        to = dice.of(LOOKS)
    elif what == "memory":
        to = dice.of([1500, 3])
    return Change(on, nth, what, who, to)


def _own(dice: Dice, mode: str, ahead: float) -> Unit:
    """The unit around us, or beside us where we are in a shell."""
    active, sub = {"reload": ("reloading", "reload")}.get(mode, ("activating", "start-pre"))
    if mode in ("shell", "named"):
        active, sub = dice.of([("active", "running"), ("failed", "failed")])
    return machines.unit(
        OWN,
        active,
        sub,
        control_group=HOMES[OWN],
        control_pid=US if mode == "certain" else SHELL,
        # Not every moment of systemd's clock is a tick of the kernel's.
        condition_usec=BOUNDARY * 10_000 + dice.of([0, 4_000]) - int(ahead * 1_000_000),
        success_statuses=dice.of(SUCCESSES),
        timeout_start=dice.of([None, None, None, None, 4.0]),
        invocation="0123",
    )


def _carrying(machine: Machine) -> Machine:
    """The same machine, but that our own unit carries other people's work."""
    home = f"/system.slice/{CARRIER}"

    def moved(place: Place) -> Place:
        if place.kind != "own":
            return place
        path, root = place.path.replace(HOMES[OWN], home), place.root.replace(HOMES[OWN], home)
        return place._replace(path=path, root=root, names=(CARRIER,))

    def settled(to: Any) -> Any:
        if isinstance(to, Actor):
            return to._replace(place=moved(to.place))
        return moved(to) if isinstance(to, Place) else to

    return machine._replace(
        own=machine.own._replace(name=CARRIER, control_group=home),
        actors=tuple(settled(actor) for actor in machine.actors),
        changes=tuple(change._replace(to=settled(change.to)) for change in machine.changes),
    )


_HEAD, _PART = st.binary(min_size=40, max_size=40), st.binary(min_size=24, max_size=24)


@st.composite
def whole_machines(draw: st.DrawFn) -> Machine:
    dice = Dice(draw(_HEAD))
    theme, mode, layout, calm = dice.of(THEMES), dice.of(MODES), dice.of(LAYOUTS), dice.often()
    cards = tuple(
        card._replace(strange=dice.of(STRANGE), base=dice.of(BASES), ghosts=dice.of(GHOSTS)) for card in layout.cards
    )
    cards = layout.cards if calm else cards
    claim, ahead, run = dice.of(CLAIMS), dice.of([0.0, 0.0, 3600.0]), dice.of(RUNS)
    changing, ruled = dice.number(3), dice.of([0, 0, 1, 2, 3])
    actors = [_actor(Dice(draw(_PART)), FIRST + number, theme, cards) for number in range(dice.of(theme.counts))]
    if theme.alike:
        actors[1:] = [_alike(dice, actors[0], other) for other in actors[1:]]
    changes = tuple(_change(Dice(draw(_PART)), theme, cards) for _ in range(0 if calm else changing))
    rules = tuple(_rule(Dice(draw(_PART))) for _ in range(ruled))
    moved = [change.to for change in changes if isinstance(change.to, (Actor, Place))]
    places = [each.place if isinstance(each, Actor) else each for each in (*actors, *moved)]
    names = {name for place in places for name in place.names if name != OWN} | {"ollama.service"}
    said = Dice(draw(_HEAD))
    machine = Machine(
        mode=mode,
        own=_own(dice, mode, ahead),
        layout=layout._replace(cards=cards),
        terms=dice.of(TERMS)._replace(
            dedicated=dice.number(2) == 2, pids=dice.of([*["ours"] * 5, "foreign"]), rules=rules
        ),
        actors=tuple(actors),
        units={name: _described(said, name, theme.states) for name in sorted(names)},
        changes=changes,
        claims={cards[layout.selected[0]].uuid: claim} if claim and not calm else {},
        ahead=ahead,
        logind=dice.of(LOGINDS),
        extra=_rule(dice, ("refuse", "spare")) if dice.often() else None,
        **({} if calm else run),
    )
    return _carrying(machine) if dice.rarely() else machine
