"""Believable nights on a machine with GPUs, told by the program itself: what a run says of holders and of memory.

Values of the model go through the real functions; what comes out is what a person sees, line by line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Callable, NamedTuple, Optional

from gpuprestart import (
    events,
    judge,
    owners,
    refusing,
    report,
)
from gpuprestart.claims import NOBODY
from gpuprestart.events import Record
from gpuprestart.faults import Died, Interrupted, Silent
from gpuprestart.host import nvml
from gpuprestart.judge import History
from gpuprestart.ledger import Ledger
from gpuprestart.model import (
    MIB,
    Claim,
    Decision,
    Fate,
    Holder,
    Outcome,
    Owner,
    OwnerKind,
    Plan,
    Refusal,
    Verdict,
)
from gpuprestart.story import Story
from gpuprestart.verdict import conclude

from .machines import gpu, holder, memory, owner, policy, process, reading, rule, session, survey, unit, uuid

UNIT = "sglang-qwen.service"
WHEN = "2026-12-01 03:12:40 UTC"
PRIORITIES = {2: "crit", 3: "err", 4: "warning", 5: "notice", 6: "info", 7: "debug"}

OLLAMA = owner(of=unit("ollama.service", "active"), user="ollama")
FAILED = owner(of=unit("vllm-old.service"))
OURS = owner(OwnerKind.OWN_PREVIOUS, unit(UNIT))
ALICE = session("active", "running")


class Scene(NamedTuple):
    title: str
    lines: Sequence[str]


def of_record(record: Record) -> str:
    return f"{PRIORITIES[record.priority]:<8} {record.message}"


def of_refusal(refusal: Refusal) -> list[str]:
    return [f"{refusal.outcome.value:<8} {refusal.message}", *(f"    hint: {hint}" for hint in refusal.hints)]


class Night:
    """One run as the journal has it: looks, signals and what came of them, on a clock that is told."""

    def __init__(self, text: str = "", *, unit: Optional[str] = UNIT, checking: bool = False) -> None:
        self.now = 0.0
        self.lines: list[str] = []
        self.wchan = "uvm_spin_loop"
        self.alive: set[tuple[int, int]] = set()
        self.policy = policy(text)
        self.ledger = Ledger(
            Story(run="0123", time=0.0, unit=unit, checking=checking),
            write=(lambda record: None) if checking else (lambda record: self.lines.append(of_record(record))),
            clock=lambda: self.now,
            wchan=lambda pid: self.wchan,
            still_there=lambda process: process.identity in self.alive,
        )
        self.checking = checking

    def look(self, *holders: Holder, used: Sequence[Optional[int]] = (3,), at: float = 0.0, **facts: Any) -> Plan:
        self.now = at
        machine = survey(*holders, used=used, at=1000.0 + at)._replace(**facts)
        self.alive = {each.process.identity for each in holders}
        plan = judge.plan(self.policy, machine, History())
        self.ledger.planned(machine, plan)
        return plan

    def signal(self, decision: Decision, name: str, *, at: float) -> None:
        self.now = at
        self.ledger.signalled(decision, name)

    def gone(self, decision: Decision, fate: Fate, *, at: float) -> None:
        self.now = at
        self.alive.discard(decision.holder.process.identity)
        self.ledger.ended(decision, fate)

    def verdict(
        self,
        *,
        at: float = 120.0,
        refusal: Optional[Refusal] = None,
        interrupted: str = "",
        listed: frozenset[str] = frozenset(),
        **facts: Any,
    ) -> list[str]:
        """What is left in the end: the journal, and below it STATUS= with all the hints that JSON has."""
        self.now = at
        self.ledger.note(**facts)
        came = Interrupted(interrupted) if interrupted else None
        found = conclude(self.ledger.story(refusal=refusal, interrupted=came))
        return [*self.lines, *of_verdict(refusing.against(found, UNIT, listed), checking=self.checking)]


def of_verdict(verdict: Verdict, *, checking: bool = False) -> list[str]:
    context = events.Context(unit=verdict.unit, run=verdict.run)
    quiet = checking or verdict.outcome in (Outcome.CLEAN, Outcome.NONE)
    states = [] if quiet else [of_record(events.gpu_verdict(context, state)) for state in verdict.gpus]
    hints = [f"    hint: {hint}" for hint in verdict.hints]
    status = [] if checking else [f"    STATUS={report.status_line(verdict, WHEN)}"]
    return [*states, of_record(events.verdict(verdict, "{}")), *hints, *status]


def ended(text: str = "", *, checking: bool = False, **facts: Any) -> list[str]:
    """A run that ended before anything was looked at."""
    return Night(text, checking=checking).verdict(**facts)


# Scenes: starts that may go on ---------------------------------------------------------------------------------------


def proved() -> Iterator[Scene]:
    night = Night()
    night.look(used=(3,) * 8)
    yield Scene("eight H100, all clean at first sight", night.verdict(proved=True, at=0.4))

    night = Night()
    night.look(used=(3,))
    yield Scene("one GPU, clean", night.verdict(proved=True, at=0.4))

    night = Night()
    orphan = holder(4711, FAILED, listed={0: 71_302}, comm="VLLM::Worker_TP0")
    (decision,) = night.look(orphan, used=(71_305, 3)).evict
    night.signal(decision, "SIGTERM", at=0.2)
    night.gone(decision, Fate.TERMINATED, at=3.1)
    night.now = 47.3
    night.ledger.sampled({uuid(0): reading(0, 3), uuid(1): reading(1, 3)}, night.policy)
    night.look(used=(3, 3), at=47.9)
    yield Scene("an orphan of a failed unit, whose memory takes its time", night.verdict(proved=True, at=47.9))

    night = Night()
    workers = [holder(pid, OURS, listed={pid - 4711: 70_000}, comm="sglang::schedul") for pid in range(4711, 4717)]
    stopped = workers[0]._replace(process=workers[0].process._replace(state="T"))
    plan = night.look(stopped, *workers[1:], used=(70_003,) * 6)
    night.signal(plan.evict[0], "SIGTERM", at=0.2)
    night.signal(plan.evict[0], "SIGCONT", at=0.2)
    night.signal(plan.evict[1], "SIGKILL", at=10.2)
    for number, each in enumerate(plan.evict):
        fate = (Fate.TERMINATED, Fate.KILLED, Fate.GONE, Fate.EXITED)[min(number, 3)]
        night.gone(each, fate, at=10.5)
    night.look(used=(3,) * 6, at=11.0)
    yield Scene("six schedulers of our own last run, one of them stopped", night.verdict(proved=True, at=11.0))

    night = Night()
    xorg = holder(900, owner(OwnerKind.USER, unit("user@1000.service", "active")), listed={0: 207}, comm="Xorg")
    draws = xorg._replace(kinds={uuid(0): frozenset({"graphics"})})
    shell = holder(901, ALICE, listed={0: 164}, comm="gnome-shell")._replace(kinds={uuid(0): frozenset({"graphics"})})
    (decision,) = night.look(draws, shell, holder(4711, FAILED, listed={0: 20_000}), used=(20_374,)).evict
    night.signal(decision, "SIGTERM", at=0.2)
    night.gone(decision, Fate.TERMINATED, at=1.0)
    night.look(draws, shell, used=(374,), at=2.0)
    yield Scene("a desktop beside an orphan", night.verdict(proved=True, at=2.0))

    night = Night()
    stale = holder(4711, OURS, opened=(), comm="tokenizer")
    (decision,) = night.look(stale, used=(3,)).evict
    night.signal(decision, "SIGTERM", at=0.1)
    night.gone(decision, Fate.TERMINATED, at=0.3)
    night.look(used=(3,), at=0.9)
    yield Scene("a child of our last run without a GPU", night.verdict(proved=True, at=0.9))

    night = Night()
    night.look(used=(1523,))
    night.now = 61.0
    night.ledger.was_reset(gpu(0))
    night.look(used=(3,), at=66.0)
    yield Scene("a reset was the last resort, and it helped", night.verdict(proved=True, at=66.0))


# Scenes: somebody alive ----------------------------------------------------------------------------------------------


def protected() -> Iterator[Scene]:
    night = Night()
    stale = holder(4711, FAILED, listed={0: 1520})
    night.look(holder(812, OLLAMA, listed={0: 21_760}, comm="ollama", user="ollama"), stale, used=(23_283, 3))
    yield Scene("ollama is active on GPU 0, and a stale process beside it", night.verdict(at=0.3))

    seen = night.ledger.last[1].decisions if night.ledger.last else ()
    rows = [f"{each.action.value:<8} {each.holder.process} {each.reason}" for each in seen]
    yield Scene("the same, as check has it in its rows", rows)

    night = Night()
    night.look(*[holder(pid, ALICE, listed={0: 9_000}, user="alice") for pid in range(10, 16)], used=(54_003,))
    yield Scene("alice works on it", night.verdict(at=0.3))

    night = Night()
    night.look(*[holder(pid, OLLAMA, listed={pid: 9_000}, comm="ollama") for pid in range(8)], used=(9_003,) * 8)
    yield Scene("ollama is active on all eight", night.verdict(at=0.3))

    night = Night()
    night.look(holder(812, OLLAMA, listed=dict.fromkeys(range(8), 9_000), comm="ollama"), used=(9_003,) * 8)
    yield Scene("one process of ollama on all eight", night.verdict(at=0.3))

    night = Night()
    night.look(holder(812, owner(of=unit("ollama.service", "deactivating")), listed={0: 21_760}), used=(21_763,))
    yield Scene("ollama is stopping and was not gone by the deadline", night.verdict())

    night = Night()
    night.look(holder(812, owner(of=unit(UNIT, "active")), listed={0: 70_000}), used=(70_003,))
    yield Scene("the server that is asked about runs", night.verdict(at=0.3))

    night = Night()
    ours = gpu(0, uuid="MIG-0-1", parent=uuid(0), gi=1, ci=0)
    other = ours._replace(uuid="MIG-0-2", gi=2)
    readings = {each.uuid: reading(0, 9_003)._replace(uuid=each.uuid) for each in (ours, other)}
    jupyter = holder(812, owner(of=unit("jupyter.service", "active")), opened=())
    on_both = jupyter._replace(listed={"MIG-0-1": 9_000 * MIB, "MIG-0-2": 9_000 * MIB})
    night.look(on_both, gpus=(ours, other), readings=readings)
    yield Scene("jupyter has both of our MIG instances", night.verdict(at=0.3))

    night = Night()
    night.look(claims=((Claim(uuid(0), "ollama.service", "abcd", 77), unit("ollama.service", "activating")),))
    yield Scene("another unit was just given the GPU", night.verdict(at=0.3))

    night = Night()
    night.look(
        used=(3, 3, 3),
        claims=tuple((Claim(uuid(i), "vllm@b.service", "abcd", 77), unit("vllm@b.service", "active")) for i in (0, 1)),
    )
    yield Scene("another unit was just given two of them", night.verdict(at=0.3))

    night = Night()
    night.look(claims=((Claim(uuid(0), NOBODY, "", 0), unit(NOBODY, "unknown")),))
    yield Scene("a claim that cannot be read", night.verdict(at=0.3))

    night = Night()
    mps = {uuid(1): frozenset({"mps"})}
    alive = holder(10, OLLAMA, opened=())._replace(kinds=mps)
    night.look(alive, holder(11, OURS, opened=())._replace(kinds=mps), used=(3, 3))
    yield Scene("a client of an MPS server that others use, on another GPU", night.verdict(at=0.3))

    night = Night()
    xorg = holder(900, owner(OwnerKind.USER, unit("user@1000.service", "active")), listed={0: 30_000}, comm="Xorg")
    night.look(xorg._replace(kinds={uuid(0): frozenset({"graphics"})}), used=(30_003,))
    yield Scene("a display server that has more than is spared", night.verdict(at=0.3))

    night = Night()
    readings = {uuid(0): reading(used=None, listed={812: 1520})._replace(unified=True, fault=None)}
    night.look(holder(812, OLLAMA, listed={0: 1520}), readings=readings)
    yield Scene("unified memory: ollama is on it", night.verdict(at=0.3))

    night = Night()
    night.look(*[holder(pid, FAILED, opened=(), listed={0: 1520}) for pid in (4711,)], used=(1523,))
    yield Scene("a process that NVML alone names", night.verdict(at=0.3))


# Scenes: what every kind of owner comes to ---------------------------------------------------------------------------


def _units() -> Iterator[tuple[str, Owner]]:
    for active in ("active", "activating", "reloading", "deactivating", "failed", "inactive", "odd"):
        yield f"a unit that is {active}", owner(of=unit("vllm.service", active))
    yield (
        "a unit that does not tell how long it may take to stop",
        owner(of=unit("vllm.service", "deactivating", timeout_stop="")),
    )
    yield "a failed unit, as another user", owner(of=unit("vllm.service"), as_unit_user=False)
    yield "a failed unit of root's, as another user", owner(of=unit("vllm.service", user=""), as_unit_user=False)
    yield "an ended scope", owner(of=unit("run-u7.scope", "inactive"))
    yield "an ended unit that carries other people's work", owner(of=unit("cron.service", "inactive"))
    yield "an ended oneshot", owner(of=unit("warmup.service", "inactive", type="oneshot"))
    yield "set aside by an earlier start", owner(of=unit(owners.unkillable_scope(4711), "active"))


def _others() -> Iterator[tuple[str, Owner]]:
    yield "our own last run", OURS
    yield "our own last run, where we are a carrier", owner(OwnerKind.OWN_PREVIOUS, unit("slurmd.service"))
    yield "our own present start", owner(OwnerKind.OWN_CURRENT, unit(UNIT, "activating"))
    yield "a live session", ALICE
    yield "a session that is over", session("active", "abandoned")
    yield "a session that logind is set to end", session("active", "abandoned")._replace(doomed=True)
    yield "a live user manager", owner(OwnerKind.USER, unit("user@1000.service", "active"))
    yield "a user manager that is gone", owner(OwnerKind.USER, unit("user@1000.service", "failed"))
    identifier = "5f3c0a9be2d1" * 5 + "5f3c"
    for engine in ("docker", "podman", "cri-containerd", "crio", "kubernetes", "lxc", "nspawn"):
        name = "qwen" if engine in ("lxc", "nspawn") else identifier
        made = owner(OwnerKind.CONTAINER, word=f"container:{engine}:{name}", cgroup=f"/{engine}")
        yield f"a container of {engine} that runs", made._replace(runtime="containerd-shim[700]")
    yield "a container that nothing runs any more", made
    yield (
        "a container whose name is none for a shell",
        made._replace(word="container:lxc:x; reboot", runtime="lxc-start[700]"),
    )
    yield "a container with its own PID namespace", made._replace(cgroup="", runtime="its own PID namespace")
    elsewhere = owner(OwnerKind.CONTAINER, word="container:pidns:4026532901", runtime="its own PID namespace")
    yield "another PID namespace", elsewhere
    shim = owner(OwnerKind.CONTAINER, word="container:containerd-shim:unknown", runtime="containerd-shim[700]")
    yield "a container by its runtime alone", shim
    job = owner(OwnerKind.SLURM, cgroup="/slurm/job_42")
    yield "a Slurm job that runs", job._replace(runtime="slurmstepd[700]")
    yield "a Slurm job that is over", job
    yield "a Slurm job without a cgroup", owner(OwnerKind.SLURM, word="slurm:unknown", runtime="slurmstepd[700]")
    yield "nobody, and its parent lives", owner(OwnerKind.NONE)
    yield "nobody, and its parent is gone", owner(OwnerKind.NONE, orphan=True)
    for doubt in _doubts():
        yield "an owner that cannot be told", doubt


def _doubts() -> Iterator[Owner]:
    known = owners.Names(users={}, uids={})
    changes: dict[str, Any]
    for changes in ({"cgroup": "/../../x"}, {"pid_namespace": 0}, {"pid_namespace": 7}):
        one = process()._replace(pid_namespace=7)._replace(**changes)
        found = owners.owner_of(one, units={}, names=known, own=None, namespace=7)
        yield found
    yield owners.unanswered("systemctl gave no answer within 5 s")


def _python3_of(whose: Owner) -> Holder:
    return holder(4711, whose, listed={0: 1520})


def table() -> Iterator[Scene]:
    for title, whose in (*_units(), *_others()):
        yield Scene(title, _hinted(Night(), _python3_of(whose)))
        if whose.kind in (OwnerKind.UNIT, OwnerKind.SESSION, OwnerKind.NONE):
            dedicated = _hinted(Night("[owners]\ndedicated = true\n"), _python3_of(whose))
            if dedicated != _hinted(Night(), _python3_of(whose)):
                yield Scene(f"{title}, on a dedicated machine", dedicated)
    night = Night()
    night.look(
        holder(900, owner(of=unit("cache.service", "active"))), holder(901, FAILED, listed={1: 9}), used=(540, 3)
    )
    yield Scene("a suspect, and one whose memory is elsewhere", night.lines)
    night = Night()
    monitor = holder(900, owner(of=unit("nvitop.service", "active")), listed={9: 1}, opened=(0, 9))
    night.look(monitor, used=(540,))
    (idle,) = night.ledger.last[1].decisions if night.ledger.last else ()
    left = events.holder_found(night.ledger.context, idle, night.ledger._gpus)
    yield Scene("somebody whose memory is on another GPU", [of_record(left)])
    night = Night()
    powerd = holder(900, OLLAMA, listed={0: 9}, comm="nvidia-persiste", exe="/usr/bin/nvidia-persistenced", user="root")
    night.look(powerd, used=(540,))
    yield Scene("infrastructure", night.lines)
    night = Night()
    night.look(holder(1, FAILED, listed={0: 9}, comm="systemd"), used=(540,), kin=frozenset({1}))
    yield Scene("PID 1", night.lines + [f"    hint: {each.hint}" for each in _blocking(night)])


def _blocking(night: Night) -> Sequence[Decision]:
    last = night.ledger.last
    return () if last is None else last[1].blocking


def rules_of_the_site() -> Iterator[Scene]:
    texts: dict[str, tuple[str, Owner, dict[str, Any]]] = {
        "a rule ends it": (rule("kill", comm="python3"), FAILED, {}),
        "a rule spares it, but not so much": (rule("spare", unit="ollama"), OLLAMA, {}),
        "a rule refuses it": (rule("refuse", user="model"), FAILED, {}),
        "a rule that would end the living": (rule("kill", comm="python3"), ALICE, {}),
        "a rule by a user whose name nobody tells": (rule("kill", user="bench"), FAILED, {"user": ""}),
        "a rule by a command line that cannot be read": (rule("kill", cmdline="vllm"), FAILED, {"cmdline": None}),
        "a rule by an executable that cannot be read": (rule("kill", exe="vllm"), FAILED, {"exe": None}),
        "a rule by the unit of one whose owner is unknown": (
            rule("spare", unit="ollama"),
            owners.unanswered("systemctl gave no answer within 5 s"),
            {},
        ),
    }
    for title, (text, whose, changes) in texts.items():
        yield Scene(title, _hinted(Night(text), holder(4711, whose, listed={0: 1520}, **changes)))
    night = Night(rule("kill", cmdline="(a+)+$"))
    night.policy = night.policy._replace(search=lambda pattern, text: None)
    yield Scene("a rule whose pattern takes too long", _hinted(night, holder(4711, FAILED, listed={0: 1520})))


def _hinted(night: Night, one: Holder) -> list[str]:
    """The record of this holder on GPU 0, where all but a little is in use, and the hint that a verdict would give."""
    night.look(one, used=(3_523,))
    last = night.ledger.last
    assert last is not None
    return [*night.lines, *(f"    hint: {each.hint}" for each in last[1].decisions if each.hint)]


# Scenes: what could not be proved ------------------------------------------------------------------------------------


def refused() -> Iterator[Scene]:
    stale = holder(4711, FAILED, listed={0: 71_302}, comm="VLLM::Worker_TP0")

    night = Night()
    (decision,) = night.look(stale, used=(71_305, 3)).evict
    night.signal(decision, "SIGKILL", at=10.2)
    night.gone(decision, Fate.KILLED, at=10.4)
    night.look(used=(71_305, 3), at=119.0)
    yield Scene("the holder is gone, its memory is not back", night.verdict())

    night = Night()
    plan = night.look(*[holder(pid, FAILED, listed={0: 9_000}) for pid in range(4711, 4716)], used=(45_003,))
    for decision in plan.evict:
        night.signal(decision, "SIGTERM", at=0.2)
        night.gone(decision, Fate.TERMINATED, at=1.0)
    night.look(used=(45_003,), at=119.0)
    yield Scene("five holders are gone, their memory is not back", night.verdict())

    night = Night()
    night.look(holder(4711, OURS, opened=(), comm="tokenizer"), used=(3,))
    yield Scene("the deadline came before a child of the last run was ended", night.verdict(at=5.0))

    night = Night()
    night.look(stale, used=(71_305,))
    yield Scene("the deadline came before the holder was ended", night.verdict(at=5.0))

    night = Night()
    night.look(used=(3, 3))
    yield Scene("the deadline came before the memory had settled", night.verdict())

    night = Night('[memory]\nmin_free = "79 GiB"\n')
    night.look(used=(1_000,), readings={uuid(0): reading(used=60)._replace(memory=memory(60, reserved=2_000))})
    yield Scene("not enough is free for the server", night.verdict(at=0.3))

    for checking, title in ((True, "check: "), (False, "")):
        night = Night(checking=checking)
        night.look(holder(900, owner(of=unit("nvitop.service", "active"))), used=(540, 3), dead={uuid(0): (812_345,)})
        yield Scene(f"{title}memory that nobody holds, a dead PID, and a monitor", night.verdict())
    night = Night()
    night.look(used=(540, 3, 540), dead={uuid(0): (7, 8)})
    yield Scene("memory that nobody holds, on two GPUs", night.verdict())

    night = Night()
    night.look(readings={uuid(0): reading()._replace(memory=memory(912, reserved=None, call="v1"))})
    yield Scene("a driver with the old memory call", night.verdict())

    night = Night()
    night.look(readings={uuid(0): reading(used=1523)._replace(distrust="NVML lists PID 0, which cannot be")})
    yield Scene("a scrambled list of processes", night.verdict())

    night = Night()
    night.look(readings={uuid(0): reading(used=1523)._replace(unlisted="compute: Function Not Found")})
    yield Scene("a driver that lists no processes", night.verdict())

    night = Night()
    night.look(stale._replace(process=stale.process._replace(state="D")), used=(71_305,))
    (decision,) = _evicted(night)
    night.signal(decision, "SIGTERM", at=0.2)
    night.signal(decision, "SIGKILL", at=10.2)
    yield Scene("a holder survives SIGKILL", night.verdict())

    night = Night()
    ppid: dict[str, Any] = {"ppid": 812, "parent": "supervisord[812]", "began": 1_090.0}
    night.look(holder(4711, FAILED, listed={0: 1520}, **ppid), used=(1523,))
    yield Scene("a supervisor restarts the holder for ever", night.verdict(rounds=10))
    night = Night()
    night.look(holder(4711, FAILED, listed={0: 1520}, began=1_090.0, ppid=812), used=(1523,))
    yield Scene("something unnamed restarts the holder for ever", night.verdict(rounds=10))

    night = Night()
    (decision,) = night.look(stale, used=(71_305,)).evict
    night.ledger.refused(decision, "SIGTERM")
    yield Scene("a signal is refused", night.verdict(at=0.3))

    night = Night()
    night.look(used=(1523,), unreadable=(10, 11, 12, 13))
    yield Scene("a hook without its +", night.verdict(at=0.3))
    night = Night()
    night.look(holder(4711, FAILED, listed={0: 1520}, opened=()), used=(1523,), unreadable=(4711,))
    yield Scene("a hook without its +, and NVML names somebody", night.verdict(at=0.3))

    night = Night()
    night.look(used=(3, 3, 3, None))
    yield Scene("GPU 3 is lost", night.verdict(at=0.3))
    night = Night()
    night.look(stale, used=(None, 3))
    yield Scene("GPU 0 is lost, and somebody has it", night.verdict(at=0.3))
    night = Night()
    night.look(used=(None,))
    night.ledger.dirty = True
    before, after = night.ledger._gpus[0], survey().readings[uuid(0)]
    freed = events.memory_freed(
        night.ledger.context, before, before._replace(reading=after, limit=64 * MIB), seconds=3.0
    )
    yield Scene("a GPU that could not be read is free again", [of_record(freed)])
    changes: dict[str, Any]
    unified: Sequence[tuple[str, str, dict[str, Any]]] = (
        ("its policy refuses it", '[memory]\nunified = "refuse"\n', {}),
        ("min_free cannot be proved", '[memory]\nmin_free = "8 GiB"\n', {}),
        ("its list cannot be believed", "", {"distrust": "NVML lists PID 0, which cannot be"}),
    )
    for title, text, changes in unified:
        night = Night(text)
        night.look(readings={uuid(0): reading(used=None)._replace(fault=None, unified=True, **changes)})
        yield Scene(f"unified memory: {title}", night.verdict(at=0.3))
    night = Night()
    night.look(pids_ours=False, readings={uuid(0): reading(used=None)._replace(fault=None, unified=True)})
    yield Scene("unified memory: PIDs of another namespace", night.verdict(at=0.3))

    def silent(left: float) -> Any:
        raise Silent

    def dead(left: float) -> Any:
        raise Died("was ended by SIGSEGV")

    def driver(receive: Callable[[float], Any]) -> nvml.Driver:
        child: Any = SimpleNamespace(receive=receive, send=lambda request: None)
        return nvml.Driver(child)

    def unknown(title: str, ask: Callable[[], object]) -> Scene:
        try:
            ask()
        except nvml.DriverError as error:
            return Scene(title, ended(refusal=Refusal(Outcome.UNKNOWN, str(error), [error.remedy]), at=0.3))
        raise AssertionError("the driver has answered")

    yield unknown("the driver hangs when it is initialised", lambda: driver(silent).inventory(60))
    yield unknown("the driver hangs when it is asked", lambda: driver(silent).sample([gpu()], 15))
    yield unknown("the library crashes", lambda: driver(dead).inventory(60))
    yield unknown("the library babbles", lambda: driver(lambda left: {"gpus": 7}).inventory(60))
    for code, text in {
        4: "Insufficient Permissions",
        9: "Driver Not Loaded",
        12: "NVML Shared Library Not Found",
        15: "GPU is lost",
        17: "The operating system has blocked the request",
        18: "Driver/library version mismatch",
        999: "Unknown Error",
        0: "No module named 'pynvml'",
    }.items():
        answer = {"error": code or None, "text": text}
        answering = driver(lambda left, said=answer: said)  # type: ignore[misc]
        yield unknown(f"NVML does not initialise: {text}", partial(answering.inventory, 60))

    yield Scene("stopped before anything was looked at", ended(interrupted="SIGINT", at=0.3))
    night = Night(unit=None)
    night.look(used=(71_305, 3))
    yield Scene("stopped by hand, without a unit", night.verdict(interrupted="SIGINT", at=3.0))
    night = Night()
    night.look(used=(71_305,))
    yield Scene("stopped while it waited", night.verdict(interrupted="SIGTERM", at=3.0))
    night = Night()
    (decision,) = night.look(stale, used=(71_305, 3)).evict
    night.signal(decision, "SIGTERM", at=0.2)
    night.gone(decision, Fate.TERMINATED, at=1.0)
    night.look(used=(71_305, 3), at=1.0)
    yield Scene("stopped while it waited for memory", night.verdict(interrupted="SIGTERM", at=3.0))

    yield Scene("a bug: no proof and no reason", ended(at=0.3))
    for listed in (frozenset({"75"}), frozenset({"TERM"}), frozenset({"75", "78", "70"})):
        night = Night()
        night.look(holder(812, OLLAMA, listed={0: 21_760}, comm="ollama", user="ollama"), used=(21_763,))
        yield Scene(f"SuccessExitStatus={' '.join(sorted(listed))}", night.verdict(at=0.3, listed=listed))

    for holders, used in (((stale,), (71_305, 3)), ((holder(4711, OURS, opened=()),), (3,))):
        night = Night(checking=True)
        night.look(*holders, used=used)
        yield Scene("check: what clean would do", night.verdict(at=0.3))
    night = Night(checking=True, unit=None)
    night.look(*[holder(pid, FAILED, listed={0: 9_000}) for pid in range(4711, 4716)], used=(45_003,))
    yield Scene("check: what clean would do, without a unit", night.verdict(at=0.3))


def _evicted(night: Night) -> Sequence[Decision]:
    last = night.ledger.last
    return () if last is None else last[1].evict
