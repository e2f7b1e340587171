"""The values that one stage hands to the next: frozen, and without behaviour beyond naming themselves.

They are NamedTuples because forty frozen dataclasses, with the module that makes them, took as long to load as all the
rest of the program, and a server waits for that. For the same reason the annotations here, and in the other modules of
which every start loads many values, are no strings: each of those would be compiled again. Nothing here reads the
machine, the clock or the policy. Sizes are bytes, times are seconds, and GPUs are known by their UUID, because NVML
indices, device minors and CUDA ordinals may all differ on one machine.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Callable, NamedTuple, Optional

#: Waits until one of the descriptors is readable or so many seconds have passed, and returns those that are.
Wait = Callable[[Iterable[int], float], "set[int]"]

MIB = 1024 * 1024


class Outcome(str, Enum):
    """The one word of a verdict. When several apply, the first in this order decides the exit status."""

    CONFIG = "config"
    INTERRUPTED = "interrupted"
    DENIED = "denied"
    UNKNOWN = "unknown"
    PROTECTED = "protected"
    RESPAWNING = "respawning"
    UNKILLABLE = "unkillable"
    NOT_FREED = "not-freed"
    UNATTRIBUTED = "unattributed"
    PRECONDITION = "precondition"
    INTERNAL = "internal"
    CLEANED = "cleaned"
    CLEAN = "clean"
    BYPASSED = "bypassed"
    NONE = "none"


#: The exit status of each outcome, after sysexits(3). That of ``precondition`` is EX_NOINPUT where all is about files.
EXIT_STATUS: Mapping[Outcome, int] = {
    Outcome.CONFIG: 78,
    Outcome.INTERRUPTED: 75,
    Outcome.DENIED: 77,
    Outcome.UNKNOWN: 69,
    Outcome.PROTECTED: 75,
    Outcome.RESPAWNING: 75,
    Outcome.UNKILLABLE: 75,
    Outcome.NOT_FREED: 75,
    Outcome.UNATTRIBUTED: 75,
    Outcome.PRECONDITION: 75,
    Outcome.INTERNAL: 70,
    Outcome.CLEANED: 0,
    Outcome.CLEAN: 0,
    Outcome.BYPASSED: 0,
    Outcome.NONE: 0,
}


EX_NOINPUT = 66


class Refusal(Exception):
    """The run ends here with this outcome; ``hints`` say what to do, the most useful first."""

    def __init__(self, outcome: Outcome, message: str, hints: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.message = message
        self.hints = tuple(hints)


# What the driver says ------------------------------------------------------------------------------------------------


class Gpu(NamedTuple):
    """One GPU of the inventory. ``fault`` is set, and the UUID may be empty, where NVML cannot reach it."""

    index: int  # type: ignore[assignment]  # A tuple's own index() is of no use here.
    uuid: str
    name: str = ""
    pci: str = ""
    minor: Optional[int] = None
    #: For an instance of MIG: its GPU's UUID, and the numbers of its GPU instance and compute instance.
    parent: Optional[str] = None
    gi: Optional[int] = None
    ci: Optional[int] = None
    fault: Optional[str] = None

    def __str__(self) -> str:
        return f"GPU {self.index}" if self.parent is None else f"GPU {self.index} instance {self.gi}/{self.ci}"


class Inventory(NamedTuple):
    """What NVML said when it started: every GPU by NVML index, the driver's version, the library's path."""

    driver: str
    nvml_path: str
    gpus: tuple[Gpu, ...]


class Memory(NamedTuple):
    """Memory of one GPU in bytes. ``used`` includes what the driver reserves only where ``call`` is ``v1``."""

    used: int
    free: int
    total: int
    reserved: Optional[int]
    call: str


class Listed(NamedTuple):
    """One process that NVML lists on one GPU, in however many lists; ``bytes`` is None where NVML does not tell."""

    pid: int
    bytes: Optional[int]
    kinds: frozenset[str]


class Reading(NamedTuple):
    """One sample of one GPU: its memory and its list, or the reason why there is none.

    ``distrust`` says why ``listed`` may not be believed; ``unlisted`` says why the driver gave no list at all.
    ``unified`` is a GPU that shares the memory of the machine and cannot say how much of it is in use.
    """

    uuid: str
    memory: Optional[Memory] = None
    fault: Optional[str] = None
    listed: tuple[Listed, ...] = ()
    distrust: Optional[str] = None
    unlisted: Optional[str] = None
    unified: bool = False


# What /proc and systemd say ------------------------------------------------------------------------------------------


class Process(NamedTuple):
    """One process, known by its PID and its start time in clock ticks since boot.

    ``began`` is the same start in seconds of CLOCK_BOOTTIME.
    """

    pid: int
    started: int
    began: float
    ppid: int
    comm: str
    state: str
    uid: int
    cgroup: str
    #: Its name, or the uid where it has none; empty where nobody told.
    user: str = ""
    #: Redacted and printable; None where it could not be read.
    cmdline: Optional[str] = None
    exe: Optional[str] = None
    #: The executable is root's and nobody else can write it, so its path may be believed.
    exe_trusted: bool = False
    #: Inode of its PID namespace; 0 where that could not be read.
    pid_namespace: int = 0
    #: Who started it or has adopted it, by comm and PID, if that could be read.
    parent: str = ""
    #: Where its stack begins: somewhere else with each program that it executes; 0 where that could not be read.
    image: int = 0

    @property
    def identity(self) -> tuple[int, int]:
        return (self.pid, self.started)

    def __str__(self) -> str:
        return f"{self.comm}[{self.pid}]"


class Unit(NamedTuple):
    """A unit as systemd describes it. Timestamps are microseconds of CLOCK_MONOTONIC, as systemd gives them."""

    name: str
    load_state: str
    active_state: str
    sub_state: str
    control_group: str
    type: str = ""
    user: str = ""
    control_pid: int = 0
    main_pid: int = 0
    condition_usec: int = 0
    timeout_stop: str = ""
    #: Seconds; None is no limit.
    timeout_start: Optional[float] = None
    notify_access: str = ""
    #: Numbers, and signals without their SIG, that systemd takes for success.
    success_statuses: frozenset[str] = frozenset()
    invocation: str = ""

    @property
    def up(self) -> bool:
        """Its processes are wanted, or are about to be."""
        return self.active_state in ("active", "activating", "reloading", "refreshing", "maintenance")


class Account(NamedTuple):
    """As whom a service runs its commands: User=, Group=, SupplementaryGroups= as systemd has them. Empty is root."""

    user: str = ""
    group: str = ""
    supplementary: tuple[str, ...] = ()


class Claim(NamedTuple):
    """A GPU that a unit was just given, and may not have used yet. ``pid`` is the control process of the hook."""

    gpu: str
    unit: str
    invocation: str
    pid: int
    #: The GPU that ``gpu`` is an instance of, if it is one.
    parent: Optional[str] = None


class OwnerKind(Enum):
    OWN_PREVIOUS = "a process of our own unit's last run"
    OWN_CURRENT = "a process of our own unit's present start"
    UNIT = "a unit of the system's service manager"
    SESSION = "a login session"
    USER = "a user's service manager"
    CONTAINER = "a container"
    SLURM = "a Slurm job"
    NONE = "nobody"
    UNKNOWN = "nobody that could be named"


class Owner(NamedTuple):
    """Who wants a process, as far as systemd can tell. ``word`` is the stable form that programs read."""

    kind: OwnerKind
    word: str
    unit: Optional[Unit] = None
    user: str = ""
    #: The process runs as the user that its unit names in User=.
    as_unit_user: bool = False
    #: For NONE: init has adopted the process, so whoever started it is gone.
    orphan: bool = False
    #: For a container or a job: the cgroup that bears its id, and what runs it, if that is still there.
    cgroup: str = ""
    runtime: str = ""
    #: For a session that is over: logind is set to end what it left (KillUserProcesses=).
    doomed: bool = False
    #: For UNKNOWN: what could not be established, and whether that is because we may not look into the process.
    doubt: str = ""
    hidden: bool = False


# What they make together ---------------------------------------------------------------------------------------------


class Holder(NamedTuple):
    """A process with what ties it to GPUs: ``listed`` maps the UUIDs where NVML lists it to bytes or None,
    ``opened`` and ``mapped`` are the UUIDs of the nodes that it has open or mapped."""

    process: Process
    owner: Owner
    listed: Mapping[str, Optional[int]] = {}
    opened: frozenset[str] = frozenset()
    mapped: frozenset[str] = frozenset()
    #: In which of NVML's lists it is, by UUID: compute, graphics, mps.
    kinds: Mapping[str, frozenset[str]] = {}
    #: It has everything open that CUDA opens, which a mere client of NVML has not.
    cuda: bool = True
    #: What it has besides that the policy asks to be free, as clauses: ``port 30000``.
    occupies: tuple[str, ...] = ()

    @property
    def graphics_only(self) -> bool:
        return bool(self.kinds) and all(kinds == {"graphics"} for kinds in self.kinds.values())

    @property
    def evidence(self) -> tuple[str, ...]:
        kinds = (("nvml", self.listed), ("fd", self.opened), ("map", self.mapped))
        return tuple(word for word, seen in kinds if seen)

    def bytes_on(self, uuids: Iterable[str]) -> Optional[int]:
        """Bytes on these GPUs together, or None where NVML puts none there or does not tell how many."""
        shares = [self.listed[uuid] for uuid in uuids if uuid in self.listed]
        known = [share for share in shares if share is not None]
        return sum(known) if known and len(known) == len(shares) else None


class Survey(NamedTuple):
    """The machine at one moment: a reading of every GPU and everybody who may hold a selected one.

    ``at`` is in seconds of CLOCK_BOOTTIME, as is ``Process.began``.
    """

    at: float
    gpus: tuple[Gpu, ...]
    readings: Mapping[str, Reading]
    holders: tuple[Holder, ...] = ()
    #: UUID -> PIDs that NVML lists there but that are in no /proc.
    dead: Mapping[str, tuple[int, ...]] = {}
    #: PIDs whose descriptors could not be read.
    unreadable: tuple[int, ...] = ()
    #: The PIDs that NVML lists are numbers of our own PID namespace.
    pids_ours: bool = True
    #: PID 1, ourselves, our ancestors and our descendants: never to be signalled.
    kin: frozenset[int] = frozenset()
    #: Claims of other units on the selected GPUs that hold, each with its unit as systemd describes it.
    claims: tuple[tuple[Claim, Unit], ...] = ()
    #: What the policy asks to be free and is not, by the same clauses, with the PIDs that are seen to have it.
    occupied: Mapping[str, tuple[int, ...]] = {}


# What is decided -----------------------------------------------------------------------------------------------------


class Action(str, Enum):
    KILL = "kill"
    SPARE = "spare"
    REFUSE = "refuse"
    WAIT = "wait"
    NONE = "none"


class Decision(NamedTuple):
    """What becomes of one holder, and why; ``reason`` completes the sentence "the process ..."."""

    holder: Holder
    action: Action
    reason: str
    rule: Optional[str] = None
    hint: str = ""
    #: It is refused because we may not look into it, whatever would have been seen.
    blind: bool = False


class GpuState(NamedTuple):
    """One selected GPU as judged: ``unattributed`` is what no living holder explains."""

    gpu: Gpu
    reading: Reading
    limit: int
    unattributed: int
    clean: bool
    #: Why it is not clean, as a clause; empty where it is.
    fault: str = ""
    #: It shares the machine's memory and is judged by its holders, of which there still are some.
    held: bool = False

    @property
    def unknown(self) -> bool:
        """Nothing can be proved of it, now or by waiting."""
        return self.reading.memory is None and not (self.clean or self.held)


class Plan(NamedTuple):
    """What is to be done now. Decisions stand in PID order; the tuples below name some of them."""

    gpus: tuple[GpuState, ...]
    decisions: tuple[Decision, ...]
    #: Alive, wanted by somebody, and in the way: the run must refuse.
    blocking: tuple[Decision, ...]
    #: Stale: to be ended now.
    evict: tuple[Decision, ...]
    #: Stale suspects whose turn has not come: ended once memory has stayed unexplained long enough.
    later: tuple[Decision, ...]
    #: On their way out by somebody else's hand.
    awaited: tuple[Decision, ...]
    #: May hold unexplained memory, but are nobody's to end.
    suspects: tuple[Decision, ...]
    #: Stale, and not ended because the start is refused anyway.
    respited: tuple[Decision, ...] = ()
    #: UUIDs of the GPUs on which no living holder explains more than may be used.
    unexplained: frozenset[str] = frozenset()
    #: GPUs that another unit was given and may be about to use.
    claims: tuple[tuple[Claim, Unit], ...] = ()
    #: Wanted by somebody, and have what the policy asks to be free, such as a port.
    occupants: tuple[Decision, ...] = ()

    @property
    def refused(self) -> bool:
        """Somebody alive stands in the way."""
        return bool(self.blocking or self.claims)

    @property
    def clean(self) -> bool:
        return all(state.clean for state in self.gpus) and not (self.refused or self.evict or self.awaited)


class Unmet(NamedTuple):
    """A requirement of the policy that is not met.

    ``check`` is its key in ``[require]``, ``subject`` the entry that it is about, ``message`` a clause that says what
    is so and what is asked for. ``file`` tells a requirement of a file that the server reads from one of the machine.
    """

    check: str
    subject: str
    message: str
    hint: str = ""
    file: bool = False


class Leftover(NamedTuple):
    """Something in shared memory that a dead server has left, or that looks like it.

    ``kind`` is ``shm``, ``sysv``, ``mqueue`` or ``mps``; ``fate`` is ``removed``, ``kept`` (the policy only reports, or
    it is somebody's) or ``failed``; ``reason`` completes the sentence "it ...".
    """

    kind: str
    name: str
    bytes: int
    fate: str
    reason: str


class Timeline(NamedTuple):
    """How a run went, in seconds since it began; only so much of each is kept, however long it takes.

    ``phases`` are stretches of its phases as (name, from, to), ``signals`` are (when, PID, name), ``memory`` is (when,
    used bytes of each GPU of the verdict in their order, None where they could not be read); a figure holds until the
    next.
    """

    phases: tuple[tuple[str, float, float], ...] = ()
    signals: tuple[tuple[float, int, str], ...] = ()
    memory: tuple[tuple[float, tuple[Optional[int], ...]], ...] = ()


class Fate(str, Enum):
    EXITED = "exited"
    TERMINATED = "terminated"
    KILLED = "killed"
    SURVIVED = "survived"
    GONE = "gone"


class Verdict(NamedTuple):
    """The end of a run; journal, JSON, STATUS= and the exit status are all rendered from it."""

    outcomes: tuple[Outcome, ...]
    exit: int
    unit: Optional[str]
    message: str
    hints: tuple[str, ...]
    time: float
    run: str
    boot_id: str
    driver: str
    nvml_path: str
    policy_files: tuple[str, ...]
    duration: float
    phases: Mapping[str, float]
    gpus: tuple[GpuState, ...] = ()
    decisions: tuple[Decision, ...] = ()
    fates: Mapping[tuple[int, int], Fate] = {}
    unmet: tuple[Unmet, ...] = ()
    residue: tuple[Leftover, ...] = ()
    timeline: Timeline = Timeline()
    #: The file of metrics that the policy asks for.
    textfile: str = ""

    @property
    def outcome(self) -> Outcome:
        return self.outcomes[0]
