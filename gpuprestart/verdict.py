"""What happened -> Verdict. Pure: the outcome, the sentence that tells it, and the hints of what to do.

Every 0 is a proof, so the words of success come last: they are reached only when nothing stands against them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Optional

from .judge import mib
from .model import EXIT_STATUS, Decision, Fate, GpuState, Outcome, Plan, Refusal, Survey, Verdict

_ORDER = list(Outcome)


@dataclass(frozen=True)
class Story:
    """All that a run can tell when it ends, wherever it ends."""

    run: str
    time: float
    boot_id: str = ""
    unit: Optional[str] = None
    checking: bool = False
    driver: str = ""
    nvml_path: str = ""
    policy_files: tuple[str, ...] = ()
    duration: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    plan: Optional[Plan] = None
    survey: Optional[Survey] = None
    #: Every holder that was seen, in PID order, as it was last judged.
    seen: tuple[Decision, ...] = ()
    fates: Mapping[tuple[int, int], Fate] = field(default_factory=dict)
    #: Holders to which a signal was refused.
    denied: tuple[Decision, ...] = ()
    #: Holders that got SIGKILL and are not dead, each with the kernel function in which it is stuck.
    survivors: Mapping[tuple[int, int], str] = field(default_factory=dict)
    rounds: int = 0
    respawning: bool = False
    refusal: Optional[Refusal] = None
    interrupted: str = ""


@dataclass(frozen=True)
class Finding:
    """One thing that stands against a start, or for it."""

    outcome: Outcome
    message: str
    hints: tuple[str, ...] = ()


def conclude(story: Story) -> Verdict:
    """The verdict on a run."""
    findings = sorted(_findings(story), key=lambda finding: _ORDER.index(finding.outcome))
    outcomes = tuple(dict.fromkeys(finding.outcome for finding in findings))
    plan = story.plan
    return Verdict(
        outcomes=outcomes,
        exit=EXIT_STATUS[outcomes[0]],
        unit=story.unit,
        message="; ".join(finding.message for finding in findings if finding.outcome is outcomes[0]),
        hints=tuple(dict.fromkeys(hint for finding in findings for hint in finding.hints if hint)),
        time=story.time,
        run=story.run,
        boot_id=story.boot_id,
        driver=story.driver,
        nvml_path=story.nvml_path,
        policy_files=story.policy_files,
        duration=story.duration,
        phases=story.phases,
        gpus=plan.gpus if plan else (),
        decisions=story.seen,
        fates=story.fates,
    )


def _findings(story: Story) -> list[Finding]:
    found = []
    if story.refusal is not None:
        found.append(Finding(story.refusal.outcome, story.refusal.message, story.refusal.hints))
    if story.interrupted:
        found.append(_interrupted(story))
    plan, survey = story.plan, story.survey
    if plan is not None and survey is not None:
        found += _denied(story, plan, survey)
        found += _unmeasured(plan)
        found += _protected(plan)
        found += _stubborn(story, plan)
        explained = {finding.outcome for finding in found}
        found += _dirty(story, plan, survey, explained)
    return found or [_success(story)]


def _interrupted(story: Story) -> Finding:
    ended = _ended(story)
    done = (
        f"; {_count(len(ended), 'stale holder')} had been ended by then"
        if ended
        else "; nothing had been ended by then"
    )
    hints = ("start the unit again: what was not finished is done then",)
    return Finding(Outcome.INTERRUPTED, f"{story.interrupted} came before the GPUs were proved clean{done}", hints)


def _denied(story: Story, plan: Plan, survey: Survey) -> list[Finding]:
    root = "run it as root: the unit's line needs the + of ExecStartPre=+/usr/bin/gpuprestart clean"
    found = [
        Finding(Outcome.DENIED, f"the kernel refuses to let us signal {_who(decision)}", (root,))
        for decision in story.denied
    ]
    dirty = [state for state in plan.gpus if not state.clean and state.unattributed > 0]
    if dirty and survey.unreadable:
        pids = _pids(survey.unreadable)
        message = f"{_gpus(dirty)}, and {_count(len(survey.unreadable), 'process', 'processes')} may not be looked into ({pids})"
        found.append(Finding(Outcome.DENIED, message, (root,)))
    return found


def _unmeasured(plan: Plan) -> list[Finding]:
    return [
        Finding(
            Outcome.UNKNOWN,
            f"{_named(state)} {state.fault}",
            ("nvidia-smi and dmesg (Xid) tell more; a lost GPU needs a reset or a reboot",),
        )
        for state in plan.gpus
        if state.reading.memory is None
    ]


def _protected(plan: Plan) -> list[Finding]:
    """Refused because of somebody alive: one sentence for the first, the rest counted."""
    in_the_way = [*plan.blocking, *plan.awaited]
    if not in_the_way:
        return []
    first = in_the_way[0]
    held = [state for state in plan.gpus if state.gpu.uuid in first.holder.listed]
    figures = "; ".join(f"{_named(state)}: {_figures(state)}" for state in held)
    message = f"{_who(first)} holds {_list(str(state.gpu) for state in held)} and {first.reason} ({figures})"
    others = len(in_the_way) - 1
    if others:
        message += f", and {_count(others, 'other holder')} likewise: {_list(_brief(each) for each in in_the_way[1:4])}"
    return [Finding(Outcome.PROTECTED, message, tuple(each.hint for each in in_the_way))]


def _stubborn(story: Story, plan: Plan) -> list[Finding]:
    found = []
    by_identity = {decision.holder.process.identity: decision for decision in story.seen}
    for identity, where in story.survivors.items():
        process = by_identity[identity].holder.process
        stuck = f"state {process.state}" + (f", in {where}" if where else "")
        found.append(
            Finding(
                Outcome.UNKILLABLE,
                f"{_who(by_identity[identity])} survived SIGKILL ({stuck})",
                ("it is stuck in the kernel: look at dmesg and at what it waits for; a reboot always ends it",),
            )
        )
    if story.respawning:
        first = (plan.evict or story.seen)[0]
        found.append(
            Finding(
                Outcome.RESPAWNING,
                f"stale holders came back {story.rounds} times; the last was {_who(first)}, started by PID {first.holder.process.ppid}",
                (f"stop what starts it: systemctl status {first.holder.process.ppid}",),
            )
        )
    return found


def _dirty(story: Story, plan: Plan, survey: Survey, explained: set[Outcome]) -> list[Finding]:
    """GPUs that are not clean for no reason already given."""
    if story.checking and plan.evict:
        names = _list(_brief(decision) for decision in plan.evict[:3])
        message = f"{_count(len(plan.evict), 'stale holder')} would be ended by clean ({names})"
        dirty = [state for state in plan.gpus if not state.clean]
        where = f"{_gpus(dirty)}: " if dirty else ""
        return [
            Finding(
                Outcome.NOT_FREED, where + message, ("gpuprestart clean would do it: it runs before the unit starts",)
            )
        ]
    if explained & {Outcome.PROTECTED, Outcome.RESPAWNING, Outcome.UNKILLABLE}:
        return []
    found = []
    for state in plan.gpus:
        if state.clean or state.reading.memory is None:
            continue
        outcome = (
            Outcome.UNATTRIBUTED
            if _nobody_seen(story, state) and state.reading.memory.used > state.limit
            else Outcome.NOT_FREED
        )
        describe = _unattributed if outcome is Outcome.UNATTRIBUTED else _not_freed
        found.append(describe(story, plan, survey, state))
    return found


def _nobody_seen(story: Story, state: GpuState) -> bool:
    """Whether no holder that this run saw on the GPU has gone, so that nobody's memory can be on its way back."""
    uuid = state.gpu.uuid
    return not any(
        uuid in decision.holder.listed or uuid in decision.holder.opened or uuid in decision.holder.mapped
        for decision in story.seen
        if decision.holder.process.identity in story.fates
    )


def _unattributed(story: Story, plan: Plan, survey: Survey, state: GpuState) -> Finding:
    message = f"{_named(state)}: {_figures(state)}, and no process was seen that holds it"
    dead = survey.dead.get(state.gpu.uuid, ())
    if dead:
        message += f" (NVML still lists {_pids(dead)}, which is dead)"
    hints = [f"nvidia-smi --gpu-reset -i {state.gpu.uuid} when nothing uses that GPU, or reboot"]
    suspects = [each for each in plan.suspects if state.gpu.uuid in each.holder.opened | each.holder.mapped]
    hints += [f"{_who(each)} has the node of {state.gpu} open and {each.reason}" for each in suspects[:8]]
    memory = state.reading.memory
    if memory is not None and memory.call == "v1":
        hints.append(
            "this driver has only the v1 memory call, which counts what the driver reserves as used: raise memory.max_used"
        )
    if state.reading.distrust:
        hints.append(f"the process list is not believed: {state.reading.distrust}")
    if state.reading.unlisted:
        hints.append(f"the driver gave no process list: {state.reading.unlisted}")
    return Finding(Outcome.UNATTRIBUTED, message, tuple(hints))


def _not_freed(story: Story, plan: Plan, survey: Survey, state: GpuState) -> Finding:
    ended = [decision for decision in story.seen if decision.holder.process.identity in story.fates]
    if ended:
        names = _list(_brief(decision) for decision in ended[:3])
        message = f"{_named(state)}: {state.fault} {story.duration:.0f} s after the start, though {names} is gone"
        hint = f"give it longer (deadline.total), or nvidia-smi --gpu-reset -i {state.gpu.uuid}, or reboot"
    else:
        message = f"{_named(state)}: {state.fault}"
        hint = "see what else runs on it with gpuprestart status"
    return Finding(Outcome.NOT_FREED, message, (hint,))


def _success(story: Story) -> Finding:
    states = story.plan.gpus if story.plan else ()
    count = _count(len(states), "GPU")
    proof = f"{'all ' if len(states) > 1 else ''}{count} proved clean" + (f" ({_most(states)})" if states else "")
    ended = _ended(story)
    if ended:
        names = _list(_brief(decision) for decision in ended[:3])
        more = f" and {len(ended) - 3} more" if len(ended) > 3 else ""
        return Finding(Outcome.CLEANED, f"{_count(len(ended), 'stale holder')} ended ({names}{more}), {proof}")
    return Finding(Outcome.CLEAN, proof)


# Words -----------------------------------------------------------------------------------------------------------------


def _ended(story: Story) -> list[Decision]:
    by_us = (Fate.TERMINATED, Fate.KILLED)
    return [decision for decision in story.seen if story.fates.get(decision.holder.process.identity) in by_us]


def _who(decision: Decision) -> str:
    holder = decision.holder
    return (
        f"{_brief(decision)} of {holder.owner.word}"
        if holder.owner.word not in ("none", "unknown")
        else _brief(decision)
    )


def _brief(decision: Decision) -> str:
    return str(decision.holder.process)


def _named(state: GpuState) -> str:
    return f"{state.gpu} ({state.gpu.uuid[:12]})" if state.gpu.uuid else str(state.gpu)


def _figures(state: GpuState) -> str:
    memory = state.reading.memory
    return f"{mib(memory.used)} used, limit {mib(state.limit)}" if memory else state.fault


def _gpus(states: list[GpuState]) -> str:
    return "; ".join(f"{_named(state)}: {state.fault}" for state in states)


def _most(states: tuple[GpuState, ...]) -> str:
    used = [(state.reading.memory.used if state.reading.memory else 0, state.limit) for state in states]
    most, limit = max(used)
    return f"at most {mib(most)} used, limit {mib(limit)}"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _list(words: object) -> str:
    return ", ".join(words)  # type: ignore[arg-type]


def _pids(pids: tuple[int, ...]) -> str:
    shown = ", ".join(str(pid) for pid in pids[:5])
    return f"PID {shown}" + (f" and {len(pids) - 5} more" if len(pids) > 5 else "")
