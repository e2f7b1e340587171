"""The straight line of a run: settings, measure, survey, judge, evict, drain, verdict.

Whose start it is and what its policy says is read while the driver initialises. Then the machine is surveyed and
judged; what is stale is ended, what is awaited is waited for, and everything is looked at again, until every selected
GPU is proved clean and stays so, until somebody alive stands in the way, or until the deadline.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Callable, Optional

from . import __version__, drain, events, evict, judge, owners, selection, settings
from .host import cgroupfs, procfs
from .host.nvml import Driver, DriverError, traces
from .host.systemd import Systemd
from .ledger import Ledger
from .model import Action, Decision, Gpu, Interrupted, Inventory, Outcome, Plan, Reading, Refusal, Survey, Verdict, Wait
from .policy import Policy
from .story import Story
from .survey import Ask, Surveyor, Unseen
from .verdict import conclude

#: Seconds after which everything is looked at again while memory is awaited, and how much of the time that may take.
LOOK_AGAIN = 2.0
LOOK_SHARE = 10

#: Rounds of new stale holders after which they are said to come back as fast as they are ended.
MOST_ROUNDS = 10


@dataclass(frozen=True)
class Options:
    """The command line of ``clean`` and ``check``."""

    unit: Optional[str] = None
    policy: Optional[str] = None
    gpus: Optional[tuple[str, ...]] = None
    deadline: Optional[str] = None


@dataclass(frozen=True)
class Start:
    """Whose start this is and what holds for it; ``environ`` is None where no unit's environment selects GPUs."""

    unit: Optional[str]
    own: Optional[owners.Own]
    environ: Optional[Mapping[str, str]]
    policy: Policy


@dataclass(frozen=True)
class Host:
    """The neighbours of a run."""

    wait: Wait
    driver: Driver
    systemd: Systemd
    ask: Ask
    children: Callable[[], Iterable[int]]
    write: Callable[[events.Record], None]
    say_status: Callable[[str], object]
    environ: Mapping[str, str]


def clock() -> float:
    """Seconds of CLOCK_BOOTTIME, on which /proc counts when a process started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def clean(options: Options, host: Host) -> Verdict:
    """The hook: judge, evict what is stale, wait until the memory is back, give a verdict."""
    return _run(options, host, checking=False)


def check(options: Options, host: Host) -> Verdict:
    """Judge as of now and touch nothing."""
    return _run(options, host, checking=True)


def _run(options: Options, host: Host, *, checking: bool) -> Verdict:
    run = host.environ.get("INVOCATION_ID") or os.urandom(16).hex()
    story = Story(run=run, time=time.time(), boot_id=_boot_id(), checking=checking)
    write = _silent if checking else host.write
    ledger = Ledger(story, write=write, clock=clock, wchan=procfs.wchan)
    try:
        _straight_line(options, host, ledger, checking=checking)
        return conclude(ledger.story())
    except Refusal as refusal:
        return conclude(ledger.story(refusal=refusal))
    except (DriverError, Unseen) as error:
        hints = [error.remedy] if isinstance(error, DriverError) and error.remedy else []
        return conclude(ledger.story(refusal=Refusal(Outcome.UNKNOWN, str(error), hints)))
    except Interrupted as interrupted:
        return conclude(ledger.story(interrupted=interrupted))


def _silent(record: events.Record) -> None:
    """``check`` leaves no record of what it looked at."""


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip().replace("-", "")


def _straight_line(options: Options, host: Host, ledger: Ledger, *, checking: bool) -> None:
    began = clock()
    cgroup = procfs.own_cgroup()
    lineage = procfs.lineage(os.getpid())
    certain = None if options.unit else settings.certain_unit(host.environ, cgroup, lineage)
    if certain is not None:
        start = Start(unit=certain, own=None, environ=host.environ, policy=_policy(options, certain, ledger))
        _, gpus = _measure(start, options, host, ledger, began)
        if _quick(start, gpus, host, ledger, cgroup):
            return
    start = _start(options, host, ledger, cgroup, lineage)
    inventory, gpus = _measure(start, options, host, ledger, began)
    policy, deadline = start.policy, began + start.policy.deadline.total
    surveyor = Surveyor(
        driver=host.driver,
        systemd=host.systemd,
        ask=host.ask,
        inventory=inventory,
        gpus=gpus,
        own=start.own,
        children=host.children,
        pids_ours=_pids_ours(policy),
        timeout=lambda: _left(policy.deadline.nvml, deadline),
        clock=clock,
        wait=host.wait,
    )
    _announce(start, inventory, gpus, ledger)
    if checking:
        _, plan, _ = _look(surveyor, policy, judge.History(), ledger)
        ledger.note(proved=plan.clean)
    else:
        _clean(policy, surveyor, host, ledger, deadline=deadline, protected_until=began + policy.deadline.protected)


# Whose start, which GPUs ---------------------------------------------------------------------------------------------


def _start(options: Options, host: Host, ledger: Ledger, cgroup: str, lineage: Sequence[int]) -> Start:
    """By systemd's word. A unit that was named chooses policy and GPUs only: its processes are not ours to end."""
    if options.unit:
        unit = settings.full_name(options.unit)
        environ: Optional[Mapping[str, str]] = settings.environment_of(host.systemd, unit)
        return Start(unit=unit, own=None, environ=environ, policy=_policy(options, unit, ledger))
    own = settings.own_unit(host.systemd, cgroup, lineage)
    if own is None:
        return Start(unit=None, own=None, environ=None, policy=_policy(options, None, ledger))
    name = own.unit.name
    return Start(unit=name, own=own, environ=host.environ, policy=_policy(options, name, ledger))


def _policy(options: Options, unit: Optional[str], ledger: Ledger) -> Policy:
    ledger.note(unit=unit)
    policy = settings.load(unit, file=options.policy, deadline=options.deadline)
    ledger.note(policy_files=policy.files)
    return policy


def _measure(
    start: Start, options: Options, host: Host, ledger: Ledger, began: float
) -> tuple[Inventory, tuple[Gpu, ...]]:
    """What the driver has, and which of it this start uses. Where that is no GPU at all, the run ends."""
    policy = start.policy
    with ledger.phase("measure"):
        try:
            inventory = host.driver.inventory(_left(policy.deadline.nvml_init, began + policy.deadline.total))
        except DriverError as error:
            if policy.nvml.missing == "pass" and error.missing and not traces():
                raise Refusal(Outcome.NONE, "this machine has no NVIDIA device, module, node or library") from error
            raise
    ledger.note(driver=inventory.driver, nvml_path=inventory.nvml_path)
    chosen = selection.select(policy.gpus.select, inventory, start.environ, options.gpus, origin=policy.gpus.origin)
    if chosen.empty:
        raise Refusal(Outcome.NONE, f"{start.unit or 'this start'} uses no GPU ({chosen.source})")
    return inventory, chosen.gpus


def _quick(start: Start, gpus: Sequence[Gpu], host: Host, ledger: Ledger, cgroup: str) -> bool:
    """Whether one sample proves everything: nobody is listed, all is under the limit, and our cgroup holds only us."""
    control = int(host.environ["SYSTEMD_EXEC_PID"])
    ours = cgroup[: cgroup.index(f"/{start.unit}") + len(f"/{start.unit}")]
    if any(control not in procfs.lineage(pid) for pid in cgroupfs.pids(ours)):
        return False
    with ledger.phase("measure"):
        readings = host.driver.sample(gpus, start.policy.deadline.nvml)
    if any(reading.listed or reading.distrust or reading.unlisted for reading in readings.values()):
        return False
    survey = Survey(at=clock(), gpus=tuple(gpus), readings=readings)
    plan = judge.plan(start.policy, survey, judge.History())
    if plan.clean:
        ledger.planned(survey, plan)
        ledger.note(proved=True)
    return plan.clean


def _pids_ours(policy: Policy) -> bool:
    if policy.nvml.pids == "auto":
        return procfs.own_pid_namespace() == procfs.INITIAL_PID_NAMESPACE
    return policy.nvml.pids == "ours"


def _left(most: float, deadline: float) -> float:
    """A timeout for one call inside the deadline. At the end there is still a second for the last look."""
    return max(1.0, min(most, deadline - clock()))


def _announce(start: Start, inventory: Inventory, gpus: Sequence[Gpu], ledger: Ledger) -> None:
    ledger.write(
        events.run_started(
            ledger.context,
            gpus=gpus,
            policy_files=start.policy.files,
            deadline=start.policy.deadline.total,
            version=__version__,
        )
    )
    for gpu in inventory.gpus:
        if gpu.fault and gpu not in gpus:
            text = f"{gpu} is not selected, but NVML cannot reach it: {gpu.fault}"
            ledger.write(events.warning(ledger.context, text, gpu=gpu))


# Survey, judge, evict, drain -----------------------------------------------------------------------------------------


def _look(
    surveyor: Surveyor, policy: Policy, history: judge.History, ledger: Ledger
) -> tuple[Survey, Plan, judge.History]:
    with ledger.phase("survey"):
        survey = surveyor.look()
    history = judge.remember(history, policy, survey)
    plan = judge.plan(policy, survey, history)
    ledger.planned(survey, plan)
    return survey, plan, history


def _clean(
    policy: Policy, surveyor: Surveyor, host: Host, ledger: Ledger, *, deadline: float, protected_until: float
) -> None:
    history = judge.History()
    settled = False
    rounds = 0
    while True:
        began = clock()
        survey, plan, history = _look(surveyor, policy, history, ledger)
        now = clock()
        if plan.clean and (settled or not ledger.dirty):
            ledger.note(proved=True)
            return
        if _over(plan, ledger, now, deadline=deadline, protected_until=protected_until):
            return
        if plan.evict and not plan.blocking:
            rounds += 1
            if rounds > MOST_ROUNDS:
                return
            ledger.note(rounds=rounds)
            _evict(policy, survey, plan, surveyor, host, ledger, deadline=deadline)
            history = judge.ended(history, attributed=ledger.ended_attributed)
            continue
        again = now + max(LOOK_AGAIN, LOOK_SHARE * (now - began))
        until = min(deadline, again, *_moments(policy, plan, history, protected_until))
        settled = _drain(policy, plan, surveyor, host, ledger, until=until)


def _over(plan: Plan, ledger: Ledger, now: float, *, deadline: float, protected_until: float) -> bool:
    """Whether nothing more can come of this run."""
    unread = any(state.reading.memory is None for state in plan.gpus)
    return unread or ledger.denied or now >= deadline or bool(plan.blocking and now >= protected_until)


def _moments(policy: Policy, plan: Plan, history: judge.History, protected_until: float) -> list[float]:
    """When something falls due before the next regular look."""
    moments = [protected_until] if plan.blocking else []
    if plan.later:
        moments += [since + policy.deadline.term for since in history.unexplained_since.values()]
    return moments


def _evict(
    policy: Policy, survey: Survey, plan: Plan, surveyor: Surveyor, host: Host, ledger: Ledger, *, deadline: float
) -> None:
    def still_stale(decisions: Sequence[Decision]) -> Sequence[Decision]:
        fresh = surveyor.again(survey, [decision.holder for decision in decisions])
        judged = [judge.decide(policy, fresh, holder) for holder in fresh.holders]
        return [decision for decision in judged if decision.action is Action.KILL]

    with ledger.phase("evict"):
        host.say_status(f"Ending {len(plan.evict)} stale GPU holders")
        evict.evict(
            plan.evict,
            still_stale=still_stale,
            witness=ledger,
            wait=host.wait,
            clock=clock,
            grace=policy.deadline.term,
            deadline=deadline,
        )


def _drain(policy: Policy, plan: Plan, surveyor: Surveyor, host: Host, ledger: Ledger, *, until: float) -> bool:
    """Wait for memory; while somebody is awaited too, low memory alone ends nothing."""

    def sample() -> Mapping[str, Reading]:
        readings = surveyor.sample()
        ledger.sampled(readings, policy)
        return readings

    def low(readings: Mapping[str, Reading]) -> bool:
        somebody = plan.awaited or plan.blocking
        return not somebody and all(judge.is_low(policy, state, readings[state.gpu.uuid]) for state in plan.gpus)

    with ledger.phase("drain"):
        dirty = [state for state in plan.gpus if not state.clean]
        host.say_status(
            f"Waiting for {', '.join(f'{state.gpu}: {state.fault}' for state in dirty[:4])}" if dirty else "Settling"
        )
        return drain.drain(
            sample=sample, low=low, wait=host.wait, clock=clock, settle=policy.memory.settle, until=until
        )


def failed(error: Exception, host: Host) -> Verdict:
    """The verdict on a run that a fault of this program ended."""
    message = f"a fault in gpuprestart itself: {type(error).__name__}: {error}"
    refusal = Refusal(
        Outcome.INTERNAL, message, ["report it with the traceback above; gpuprestart check may tell more"]
    )
    run = host.environ.get("INVOCATION_ID") or os.urandom(16).hex()
    return conclude(Story(run=run, time=time.time(), boot_id=_boot_id(), refusal=refusal))
