"""The straight line of a run: settings, measure, survey, judge, evict, drain, verdict.

Whose start it is and what its policy says is read while the driver initialises. Then the machine is surveyed and
judged; what is stale is ended, what is awaited is waited for, and everything is looked at again, until every selected
GPU is proved clean and stays so, until somebody alive stands in the way, or until the deadline.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional

from . import __version__, events, judge, owners, selection, settings
from .commandline import Options
from .faults import Interrupted
from .host import cgroupfs, procfs
from .host.nvml import DriverError, traces
from .ledger import Ledger
from .model import Gpu, Inventory, Outcome, Refusal, Survey, Verdict
from .neighbours import Neighbours, clock
from .policy import Policy
from .story import Story
from .verdict import conclude


class Start(NamedTuple):
    """Whose start this is and what holds for it; ``environ`` is None where no unit's environment selects GPUs."""

    unit: Optional[str]
    own: Optional[owners.Own]
    environ: Optional[Mapping[str, str]]
    policy: Policy


def run(options: Options, host: Neighbours, *, checking: bool) -> Verdict:
    """The hook: judge, evict what is stale, wait until the memory is back, give a verdict.

    With ``checking``: judge as of now and touch nothing, not even the journal.
    """
    story = Story(run=_run_id(host), time=time.time(), boot_id=_boot_id(), checking=checking)
    ledger = Ledger(story, write=_silent if checking else host.write, clock=clock, wchan=procfs.wchan)
    try:
        _straight_line(options, host, ledger, checking=checking)
        return conclude(ledger.story())
    except Refusal as refusal:
        return conclude(ledger.story(refusal=refusal))
    except DriverError as error:
        hints = [error.remedy] if error.remedy else []
        return conclude(ledger.story(refusal=Refusal(Outcome.UNKNOWN, str(error), hints)))
    except Interrupted as interrupted:
        return conclude(ledger.story(interrupted=interrupted))


def failed(error: Exception, host: Neighbours) -> Verdict:
    """The verdict on a run that a fault of this program ended."""
    message = f"a fault in gpuprestart itself: {type(error).__name__}: {error}"
    refusal = Refusal(Outcome.INTERNAL, message, ["report it, with the traceback above"])
    return conclude(Story(run=_run_id(host), time=time.time(), boot_id=_boot_id(), refusal=refusal))


def _silent(record: events.Record) -> None:
    """``check`` leaves no record of what it looked at."""


def _run_id(host: Neighbours) -> str:
    return host.environ.get("INVOCATION_ID") or os.urandom(16).hex()


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip().replace("-", "")


def _straight_line(options: Options, host: Neighbours, ledger: Ledger, *, checking: bool) -> None:
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
    _announce(start, inventory, gpus, ledger)
    _long_way(start, inventory, gpus, host, ledger, began, checking=checking)


def _long_way(
    start: Start,
    inventory: Inventory,
    gpus: Sequence[Gpu],
    host: Neighbours,
    ledger: Ledger,
    began: float,
    *,
    checking: bool,
) -> None:
    """Everything is looked at. A start on clean GPUs never comes here, and does not wait until this is loaded."""
    from . import loop
    from .survey import Surveyor

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
    if checking:
        _, plan, _ = loop.look(surveyor, policy, judge.History(), ledger)
        ledger.note(proved=plan.clean)
    else:
        loop.clean(policy, surveyor, host, ledger, deadline=deadline, protected_until=began + policy.deadline.protected)


# Whose start, which GPUs ---------------------------------------------------------------------------------------------


def _start(options: Options, host: Neighbours, ledger: Ledger, cgroup: str, lineage: Sequence[int]) -> Start:
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
    start: Start, options: Options, host: Neighbours, ledger: Ledger, began: float
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


def _quick(start: Start, gpus: Sequence[Gpu], host: Neighbours, ledger: Ledger, cgroup: str) -> bool:
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
