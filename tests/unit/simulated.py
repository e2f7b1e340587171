"""A generated machine, brought to life: it answers what the program asks, and changes while it is asked.

It stands in where the program meets the machine: the handles of ``Neighbours``, and the few functions of ``host`` that
read /proc, cgroups and files or send signals. Everything above them is the program itself. The clock moves only while
somebody waits. What a signal does to a process happens no sooner than at the next wait or look, because between a last
look and a signal there is always a moment in which nobody can be stopped.
"""

from __future__ import annotations

import heapq
import itertools
import os
import re
import signal
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Callable, NamedTuple, Optional, Protocol

import pytest

from gpuprestart import hook, loop, settings, survey
from gpuprestart.commandline import Options
from gpuprestart.events import Record
from gpuprestart.faults import Died, Interrupted
from gpuprestart.host import cgroupfs, files, nvidia, nvml, opened, pidfd, procfs
from gpuprestart.host.library import INTERVAL
from gpuprestart.host.systemd import Systemd, SystemdError
from gpuprestart.model import MIB, Process, Unit, Verdict
from gpuprestart.neighbours import Neighbours

from . import machines
from .generated import (
    ANSWERER,
    ASKER,
    BEGAN,
    FIRST,
    HOMES,
    INIT,
    OURS,
    SHELL,
    SHIM,
    STEPD,
    TEE,
    US,
    USERS,
    UVM,
    Actor,
    Card,
    Change,
    Look,
    Machine,
    Place,
    Rule,
    Share,
    capability,
    node,
)
from .machines import TOTAL

#: What the driver keeps for itself, and the time that a sample takes it.
RESERVED, SAMPLE = 500, 0.001


class Signal(NamedTuple):
    at: float
    identity: tuple[int, int]
    name: str
    #: How many times everything had been looked at.
    look: int
    delivered: bool


class State(NamedTuple):
    """All that decides who is wanted, at one moment."""

    processes: Mapping[int, Actor]
    units: Mapping[str, Unit]
    silent: bool


class Lingering(NamedTuple):
    """Memory that was a dead process's and is not back before ``until``, if ever."""

    uuid: str
    share: Share
    until: Optional[float]
    pid: int


class Watcher(Protocol):
    """Is told of every look at everything, and of every signal before it takes effect."""

    def looked(self, world: World) -> None: ...

    def signalled(self, world: World, actor: Actor, name: str) -> None: ...


class World:
    """``backwards`` is the same machine, listed the other way round."""

    def __init__(self, machine: Machine, watcher: Watcher, *, backwards: bool = False) -> None:
        self.machine = machine
        self.now = BEGAN
        self.processes = {actor.pid: actor for actor in (*_cast(machine), *machine.actors)}
        #: Who was there when the run began, and who ever was.
        self.first, self.seen = dict(self.processes), {each.identity: each for each in self.processes.values()}
        home = HOMES["session-9.scope"]
        ours = machines.unit("session-9.scope", "active", control_group=home, user="")
        self.units = {**machine.units, machine.own.name: machine.own}
        if machine.mode in ("shell", "named"):
            self.units["session-9.scope"] = ours
        self.silent = False
        self.cards = {card.uuid: card for card in machine.layout.cards}
        self.selected = [machine.layout.cards[number] for number in machine.layout.selected]
        self.claims = dict(machine.claims)
        #: Everything since the last look began, and when that was.
        self.window: list[State] = []
        self.looked_at = BEGAN
        #: When the last look was over, which is when ages are taken.
        self.judged_at = BEGAN
        self.looks = 0
        #: What the driver last said of each GPU and how well it was then, and all that it said, with the time.
        self.given: dict[str, Mapping[str, Any]] = {}
        self.samples: list[tuple[float, Mapping[str, Mapping[str, Any]]]] = []
        #: What was told: PIDs whose command line was the last time, uids with a name, names with a uid.
        self.cmdlines: dict[int, bool] = {}
        self.names_told: set[int] = set()
        self.uids_told: set[str] = set()
        self.signals: list[Signal] = []
        self.records: list[Record] = []
        self.interrupted = False
        #: Seconds in which nobody answered.
        self.hung = 0.0
        self._watcher = watcher
        self._backwards = backwards
        self._patience = 3
        self._recent: list[State] = []
        self._lingering: list[Lingering] = []
        self._told: dict[str, Any] = {}
        self._pidfds: dict[int, Actor] = {}
        self._descriptors, self._fresh, self._order = (itertools.count(first) for first in (100_000, FIRST + 200, 0))
        #: Stopped, and sent SIGTERM.
        self._pending: set[tuple[int, int]] = set()
        self._questions: list[tuple[Any, ...]] = [("init",)]
        self._counts: Counter[str] = Counter()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._deaf = False
        for change in machine.changes:
            if change.on == "time":
                self._schedule(change.nth, lambda change=change: self._change(change))  # type: ignore[misc]
        if machine.interrupted is not None:
            self._schedule(machine.interrupted, self._interrupt)
        self.changed()

    def run(self, *, checking: bool = False) -> Verdict:
        """The whole program on this machine; the verdict is without the time of day."""
        named = self.machine.own.name[: -len(".service")] if self.machine.mode == "named" else None
        with pytest.MonkeyPatch.context() as patch:
            for module in (hook, loop):
                patch.setattr(module, "clock", lambda: self.now)
            patch.setattr(survey, "clock", self._judged)
            for name in ("pids", "read", "lineage", "commands", "own_cgroup"):
                patch.setattr(procfs, name, getattr(self, f"_{name}"))
            for name in ("sweep", "device_number"):
                patch.setattr(opened, name, getattr(self, f"_{name}"))
            patch.setattr(procfs, "own_pid_namespace", lambda: OURS)
            patch.setattr(procfs, "wchan", lambda pid: "uvm_spin_loop")
            patch.setattr(cgroupfs, "pids", self._in_cgroup)
            patch.setattr(nvidia, "capability", lambda minor, gi: f"/dev/nvidia-caps/{minor}-{gi}")
            patch.setattr(nvml, "_pid_max", lambda: 1 << 22)
            patch.setattr(pidfd, "open_pidfd", self._open)
            patch.setattr(pidfd, "send", self._send)
            patch.setattr(pidfd, "close", self._pidfds.pop)
            patch.setattr(pidfd, "room", lambda: self.machine.room)
            written = _files(self.machine, self.selected, for_unit=self.machine.mode not in ("shell", "reload"))
            patch.setattr(files, "find_first", lambda name, folders: name if name in written else None)
            patch.setattr(files, "read_safely", lambda path, trusted_owner: written[path].encode())
            patch.setattr(settings, "time", self._clocks())
            patch.setattr(os, "getpid", lambda: US)
            return hook.run(Options(unit=named), self._neighbours(), checking=checking)._replace(time=0.0)

    def _judged(self) -> float:
        self.judged_at = self.now
        return self.now

    def _neighbours(self) -> Neighbours:
        machine = self.machine
        locks: Any = SimpleNamespace(take=self._lock, release=lambda: None)
        claims: Any = SimpleNamespace(
            read=lambda: dict(self.claims), write=self.claims.__setitem__, remove=self.claims.pop
        )
        nothing: Any = SimpleNamespace(read=dict)
        first = US if machine.mode == "certain" else SHELL
        environ = {"INVOCATION_ID": "0123", "SYSTEMD_EXEC_PID": str(first), "CUDA_VISIBLE_DEVICES": self.visible}
        return Neighbours(
            wait=self.wait,
            deafen=self._deafen,
            driver=nvml.Driver(self),
            systemd=Bus(self),
            ask=self._ask,
            ask_files=self._ask,
            children=lambda: {ASKER, ANSWERER},
            write=self.records.append,
            say_status=lambda text: None,
            extend_timeout=lambda seconds: machine.extends,
            environ=environ,
            locks=locks,
            claims=claims,
            bypasses=nothing,
            run_program=nothing,
        )

    def _clocks(self) -> Any:
        """The two clocks of the kernel, which are apart by the time that the machine has slept."""
        ahead = {"boot": self.machine.ahead, "monotonic": 0.0}
        return SimpleNamespace(
            CLOCK_BOOTTIME="boot", CLOCK_MONOTONIC="monotonic", clock_gettime=lambda which: BEGAN + ahead[which]
        )

    def _lock(self, uuids: Iterable[str], holder: str) -> Optional[str]:
        return "other.service (PID 77)" if self.now < BEGAN + self.machine.locked_until else None

    # Time ------------------------------------------------------------------------------------------------------------

    def wait(self, descriptors: Iterable[int], seconds: float) -> set[int]:
        watched = list(descriptors)
        until = self.now + max(0.0, seconds)
        while True:
            self._happen()
            dead = {each for each in watched if not self.lives(self._pidfds[each].identity)}
            if dead or self.now >= until:
                return dead
            self.now = min(until, self._due[0][0]) if self._due else until

    def _schedule(self, after: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + after, next(self._order), what))

    def _happen(self) -> None:
        while self._due and self._due[0][0] <= self.now:
            heapq.heappop(self._due)[2]()

    def _interrupt(self) -> None:
        if not self._deaf:
            self._deaf = self.interrupted = True
            raise Interrupted("SIGTERM")

    def _deafen(self) -> None:
        self._deaf = True

    # What changes ----------------------------------------------------------------------------------------------------

    def fire(self, on: str) -> None:
        """Something is asked for the next time."""
        self._counts[on] += 1
        for change in self.machine.changes:
            if change.on == on and change.nth == self._counts[on]:
                self._change(change)

    def changed(self) -> None:
        state = State(dict(self.processes), dict(self.units), self.silent)
        self.window.append(state)
        if self._recent is not self.window:
            self._recent.append(state)

    def lives(self, identity: tuple[int, int]) -> bool:
        actor = self.processes.get(identity[0])
        return actor is not None and actor.identity == identity and not actor.corpse

    def _change(self, change: Change) -> None:
        what, to = change.what, change.to
        names, cards = sorted(self.machine.units), self.machine.layout.cards
        actor, card = self.processes.get(FIRST + change.who), cards[change.who % len(cards)].uuid
        if what == "unit" and names:
            name = names[change.who % len(names)]
            active = "active" if to == "abandoned" else to
            self.units[name] = self.units[name]._replace(active_state=active, sub_state=to)
        elif what == "silent":
            self.silent = not self.silent
        elif what == "lost":
            self.cards[card] = self.cards[card]._replace(strange="lost")
        elif what == "memory":
            self.cards[card] = self.cards[card]._replace(base=to)
        elif what == "arrives":
            self._arrive(to)
        elif actor is not None:
            self._change_of(actor, what, to)
        self.changed()

    def _change_of(self, actor: Actor, what: str, to: Any) -> None:
        if what in ("exits", "replaced"):
            self._die(actor)
        if what == "replaced":
            self._arrive(to._replace(pid=actor.pid))
        elif what == "moves":
            self.processes[actor.pid] = actor._replace(place=to)
        elif what == "execs":
            self.processes[actor.pid] = actor._replace(look=to)
        elif what == "lets go":
            self._give_back(actor)
            self.processes[actor.pid] = actor._replace(shares={}, fds=frozenset(), maps=frozenset())

    def _arrive(self, actor: Actor) -> None:
        arrived = actor._replace(started=int(self.now * procfs.TICKS))
        self.processes[arrived.pid] = self.seen[arrived.identity] = arrived
        self.changed()

    def _die(self, actor: Actor) -> None:
        if actor.pid not in self.processes or self.processes[actor.pid].identity != actor.identity:
            return
        now = self.processes.pop(actor.pid)
        for pid, child in self.processes.items():
            if child.ppid == actor.pid:
                self.processes[pid] = child._replace(ppid=INIT)
        self._give_back(now)
        self.changed()

    def _give_back(self, actor: Actor) -> None:
        heir = next((each for each in self.processes.values() if each.pid >= FIRST and each.pid != actor.pid), None)
        if actor.manners.heir and heir is not None:
            more = {uuid: share.amount + _amount(heir, uuid) for uuid, share in actor.shares.items()}
            shares = {**heir.shares, **{uuid: Share(amount) for uuid, amount in more.items()}}
            self.processes[heir.pid] = heir._replace(shares=shares)
        elif actor.manners.back != 0:
            until = None if actor.manners.back is None else self.now + actor.manners.back
            self._lingering += [Lingering(uuid, share, until, actor.pid) for uuid, share in actor.shares.items()]

    # Signals ---------------------------------------------------------------------------------------------------------

    def _open(self, pid: int) -> Optional[int]:
        self.fire("open")
        if pid not in self.processes:
            return None
        descriptor = next(self._descriptors)
        self._pidfds[descriptor] = self.processes[pid]
        self.fire("opened")
        return descriptor

    def _send(self, descriptor: int, number: signal.Signals) -> bool:
        if not self.lives(self._pidfds[descriptor].identity):
            return False
        actor = self.processes[self._pidfds[descriptor].pid]
        self._watcher.signalled(self, actor, number.name)
        refused = actor.manners.denied
        self.signals.append(Signal(self.now, actor.identity, number.name, self.looks, delivered=not refused))
        if refused:
            raise PermissionError
        if number is signal.SIGTERM and actor.state == "T":
            self._pending.add(actor.identity)
        elif number is signal.SIGTERM or (number is signal.SIGCONT and actor.identity in self._pending):
            self._pending.discard(actor.identity)
            self._terminate(actor)
        elif number is signal.SIGKILL:
            self._end(actor, actor.manners.kill)
        return True

    def _terminate(self, actor: Actor) -> None:
        manners = actor.manners
        if manners.forks:
            fewer = manners._replace(forks=manners.forks - 1)
            another = actor._replace(pid=next(self._fresh), state="S", manners=fewer)
            self._schedule(0.0, lambda: self._arrive(another))
        self._end(actor, manners.term)

    def _end(self, actor: Actor, after: Optional[float]) -> None:
        if after is not None:
            self._schedule(after, lambda: self._die(actor))

    # /proc and cgroups -----------------------------------------------------------------------------------------------

    def _pids(self) -> list[int]:
        self._happen()
        self.fire("pids")
        # The look began with the sample before.
        self.window = self._recent
        self.looked_at = self.now
        self.looks += 1
        self._watcher.looked(self)
        return sorted(self.processes, reverse=self._backwards)

    def _read(self, pid: int) -> Optional[Process]:
        actor = self.processes.get(pid)
        if actor is None or actor.corpse:
            return None
        return Process(
            pid=pid,
            started=actor.started,
            began=actor.started / procfs.TICKS,
            ppid=actor.ppid,
            comm=actor.look.comm,
            state=actor.state.upper(),
            uid=actor.uid,
            cgroup=actor.place.path,
            exe=actor.look.exe,
            exe_trusted=actor.look.trusted,
            pid_namespace=actor.namespace,
        )

    def _lineage(self, pid: int) -> list[int]:
        line: list[int] = []
        while pid in self.processes:
            line.append(pid)
            pid = self.processes[pid].ppid
        return line

    def _commands(self, pid: int) -> list[str]:
        return [f"{self.processes[each].look.comm}[{each}]" for each in self._lineage(pid)]

    def _own_cgroup(self) -> str:
        return self.processes[US].place.path

    def _sweep(self, devices: Iterable[int], candidates: Iterable[int]) -> opened.Sweep:
        self.fire("sweep")
        wanted, found, unreadable = frozenset(devices), {}, []
        for pid in candidates:
            actor = self.processes.get(pid)
            if actor is not None and actor.hides == "fds":
                unreadable.append(pid)
            elif actor is not None and not actor.corpse and actor.fds & wanted:
                found[pid] = actor.fds & wanted
        return opened.Sweep(found, tuple(unreadable))

    def _device_number(self, path: str) -> Optional[int]:
        if path == "/dev/nvidia-uvm":
            return UVM if self.machine.has_uvm else None
        if path.startswith("/dev/nvidia-caps/"):
            minor, gi = path.rpartition("/")[2].split("-")
            return capability(int(minor), int(gi))
        return node(int(path[len("/dev/nvidia") :]))

    def _in_cgroup(self, cgroup: str) -> set[int]:
        living = [actor for actor in self.processes.values() if not actor.corpse]
        return {actor.pid for actor in living if (actor.place.path + "/").startswith(cgroup + "/")}

    @property
    def unanswered(self) -> bool:
        """So many children have hung that nobody is asked any more."""
        return not self._patience

    def _ask(self, request: Any, timeout: float) -> Any:
        """As ``child.Questions``: after three children that hang, nobody is asked any more."""
        verb, argument = request
        if verb == "maps":
            self.fire("maps")
        answer = self._answer(verb, argument) if self._patience else None
        if answer == "hangs":
            self._patience -= 1
            self.now += timeout
            self.hung += timeout
            answer = None
        if verb == "cmdline":
            self.cmdlines[argument] = answer is not None
        elif verb == "user" and answer is not None:
            self.names_told.add(argument)
        elif verb == "uid" and answer is not None:
            self.uids_told.add(argument)
        return answer

    def _answer(self, verb: str, argument: Any) -> Any:
        if verb == "user":
            return USERS.get(argument, "") if self.machine.named else None
        if verb == "uid":
            return next((uid for uid, name in USERS.items() if name == argument and self.machine.named), None)
        if verb == "search":
            return re.search(*argument) is not None
        pids, devices = argument if verb == "maps" else ([argument], [])
        asked = [self.processes[pid] for pid in pids if pid in self.processes]
        if any(actor.hides == "wedged" for actor in asked):
            return "hangs"
        if verb == "cmdline":
            return asked[0].cmdline.split() if asked and asked[0].hides != "cmdline" else None
        mapped: dict[int, Optional[list[int]]] = {pid: [] for pid in pids}
        for actor in asked:
            mapped[actor.pid] = None if actor.hides == "maps" else sorted(actor.maps.intersection(devices))
        return mapped

    # The driver (nvml.Answers) ---------------------------------------------------------------------------------------

    def send(self, request: tuple[Any, ...]) -> None:
        self._questions.append(request)

    def receive(self, timeout: float) -> Any:
        verb, *asked = self._questions.pop(0)
        self._counts["driver"] += 1
        if 0 < self.machine.driver_dies <= self._counts["driver"]:
            raise Died("was ended by SIGKILL")
        if verb == "init":
            gpus = [_gpu(card) for card in self.machine.layout.cards]
            return {"driver": "570.1", "path": "/usr/lib/libnvidia-ml.so.1", "gpus": gpus}
        if verb == "watch":
            return self._watch(*asked)
        answers = self._answers(*asked)
        self.given.update({uuid: {**said, "strange": self.cards[uuid].strange} for uuid, said in answers.items()})
        self.samples.append((self.now, answers))
        return answers

    def _watch(self, uuids: Sequence[str], seconds: float) -> Any:
        """Memory on its way back, by which nothing is decided but when to look at everything again."""
        until = self.now + seconds
        while True:
            self.now = max(self.now, min(until, self.now + INTERVAL))
            answers = {uuid: {**said, "listed": [], "unlisted": None} for uuid, said in self._answers(uuids).items()}
            if answers != self._told or self.now >= until:
                break
        self._told = answers
        if len(uuids) == len(self.selected):
            self.samples.append((self.now, answers))
        return answers

    def _answers(self, uuids: Sequence[str]) -> dict[str, dict[str, Any]]:
        self.now += SAMPLE
        self._happen()
        self._recent = []
        self.fire("sample")
        self.changed()
        return {uuid: self._reading(self.cards[uuid]) for uuid in uuids}

    def _reading(self, card: Card) -> dict[str, Any]:
        if card.strange == "lost":
            return {"memory": None, "fault": "memory: GPU is lost", "listed": [], "unlisted": None}
        unlisted = "Function Not Found" if card.strange == "unlisted" else None
        listed = [] if unlisted else self._list(card)
        memory = None if card.strange == "unified" else self._memory(card)
        return {"memory": memory, "fault": None, "listed": listed, "unlisted": unlisted}

    def _memory(self, card: Card) -> tuple[int, int, int, Optional[int], str]:
        used = self._used(card)
        free = TOTAL - used - RESERVED
        if card.strange == "insane":
            return (used * MIB, 2**64 - 1, TOTAL * MIB, RESERVED * MIB, "v2")
        if card.strange == "v1":
            return ((used + RESERVED) * MIB, free * MIB, TOTAL * MIB, None, "v1")
        return (used * MIB, free * MIB, TOTAL * MIB, RESERVED * MIB, "v2")

    def _used(self, card: Card) -> int:
        """Of a whole GPU with what its instances have."""
        inside = {each.uuid: each.base for each in self.cards.values() if card.uuid in (each.uuid, each.parent)}
        self._lingering = [each for each in self._lingering if each.until is None or each.until > self.now]
        amounts = [*inside.values(), *(each.share.amount for each in self._lingering if each.uuid in inside)]
        for actor in self.processes.values():
            amounts += [share.amount for uuid, share in actor.shares.items() if uuid in inside and not actor.corpse]
        return min(sum(amounts), TOTAL - RESERVED)

    def _list(self, card: Card) -> list[tuple[int, Optional[int], str]]:
        """Who is on a GPU, by the numbers of another PID namespace where the driver counts there."""
        actors = [actor for actor in self.processes.values() if card.uuid in actor.shares]
        shares = [(actor.pid, actor.shares[card.uuid]) for actor in actors]
        # Some drivers list the dead for as long as their memory is not back.
        shares += [(each.pid, each.share) for each in self._lingering if each.uuid == card.uuid and each.until is None]
        away = 1 if self.machine.terms.pids == "foreign" else 0
        found = [
            (pid + away, share.amount * MIB if share.told else None, kind)
            for pid, share in shares
            for kind in share.kinds
            if share.listed
        ]
        found += [(pid, amount * MIB, "compute") for pid, amount in card.ghosts]
        found += [(0, 5, "compute")] if card.strange == "scrambled" else []
        return found[::-1] if self._backwards else found

    @property
    def visible(self) -> str:
        """CUDA_VISIBLE_DEVICES= of our own unit."""
        return ",".join(card.uuid for card in self.selected)


class Bus(Systemd):
    """systemd and logind as they answer on this machine."""

    def __init__(self, world: World) -> None:
        super().__init__(world.wait)
        self._world = world

    def units(self, names: Sequence[str]) -> dict[str, Unit]:
        self._asked()
        return {name: self._world.units.get(name) or _unknown(name) for name in names}

    def properties(self, name: str, wanted: Sequence[str]) -> dict[str, str]:
        self._asked()
        return {"LoadState": "loaded", "Environment": f"CUDA_VISIBLE_DEVICES={self._world.visible}"}

    def kill_user_processes(self) -> tuple[bool, list[str], list[str]]:
        if self._world.machine.logind is None:
            raise SystemdError("logind did not answer in time")
        kill, only, exclude = self._world.machine.logind
        return kill, [*only], [*exclude]

    def _asked(self) -> None:
        self._world.fire("units")
        if self._world.silent:
            raise SystemdError("systemd did not answer in time")


def _unknown(name: str) -> Unit:
    return machines.unit(name, "inactive", load_state="not-found", control_group="", user="")


def _amount(actor: Actor, uuid: str) -> int:
    return actor.shares[uuid].amount if uuid in actor.shares else 0


def _gpu(card: Card) -> dict[str, Any]:
    instance = {} if card.gi is None else {"parent": card.parent, "gi": card.gi, "ci": 0}
    named = {"index": card.number, "uuid": card.uuid, "name": "NVIDIA H200", "minor": card.minor}
    return {**named, "pci": f"00000000:{card.number:02x}:00.0", "fault": None, **instance}


def _cast(machine: Machine) -> list[Actor]:
    """Who is on every machine. One of our own two children has the nodes open, as the driver's library opens them."""
    ours = Place(HOMES["session-9.scope"], "session", ("session-9.scope",), name="9")
    if machine.mode not in ("shell", "named"):
        below = "" if machine.mode == "certain" else "/.control"
        ours = Place(machine.own.control_group + below, "own", (machine.own.name,))
    nodes = frozenset({UVM}).union(*(card.needed for card in machine.layout.cards))
    runtimes = Place("/system.slice/containerd.service", "unit", ("containerd.service",))
    first = INIT if machine.mode == "certain" else SHELL
    early: Any = {"uid": 0, "started": 1}
    late: Any = {"uid": 0, "started": int(BEGAN * procfs.TICKS) - 5}
    cast = [
        Actor(INIT, Place("/init.scope"), Look("systemd", "/usr/lib/systemd/systemd"), ppid=0, **early),
        Actor(SHIM, runtimes, Look("containerd-shim", "/usr/bin/containerd-shim"), **early),
        Actor(STEPD, runtimes, Look("slurmstepd", "/usr/sbin/slurmstepd"), **early),
        Actor(US, ours, Look("gpuprestart"), ppid=first, **late),
        Actor(ASKER, ours, Look("gpuprestart"), ppid=US, fds=nodes, **late),
        Actor(ANSWERER, ours, Look("gpuprestart"), ppid=US, **late),
    ]
    if first == SHELL:
        cast.append(Actor(SHELL, ours, Look("sh", "/bin/dash"), **late))
        cast.append(Actor(TEE, ours, Look("tee", "/usr/bin/tee"), ppid=SHELL, fds=nodes, **late))
    return cast


# The policy ----------------------------------------------------------------------------------------------------------


def _files(machine: Machine, selected: Sequence[Card], *, for_unit: bool) -> dict[str, str]:
    """Policy files by name. Where no unit's environment selects GPUs, the policy does."""
    terms = machine.terms
    chosen = "" if for_unit else f"[gpus]\nselect = {[card.uuid for card in selected]}\n"
    rules = [(rule.overlay, _rule_text(rule, number)) for number, rule in enumerate(terms.rules)]
    overlay = "".join(text for over, text in rules if over)
    site = f"""{chosen}[memory]
max_used = "{terms.max_used} MiB"
spared_max = "{terms.spared_max} MiB"
min_free = "{terms.min_free} MiB"
settle = "{terms.settle} s"
unified = "{terms.unified}"
[deadline]
total = "{terms.total} s"
term = "{terms.term} s"
protected = "{terms.protected} s"
[owners]
dedicated = {str(terms.dedicated).lower()}
[nvml]
pids = "{terms.pids}"
{"".join(text for over, text in rules if not over)}"""
    return {"policy.toml": site, **({f"{machine.own.name}.toml": overlay} if overlay else {})}


def _rule_text(rule: Rule, number: int) -> str:
    said = [f"{key} = {value}" if isinstance(value, int) else f"{key} = '{value}'" for key, value in rule.match]
    lines = ["[[rule]]", f'name = "rule {number}"', f"match = {{ {', '.join(said)} }}", f'action = "{rule.action}"']
    return "\n".join([*lines, "infrastructure = true" if rule.infrastructure else "", ""])
