"""What stands against a start, in sentences: pure.

Each finding is one outcome with the GPU, the process and its owner, the figure against the limit, and what to do. They
are read by somebody who was woken for them, so the most useful hint comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Optional

from .claims import FOLDER, NOBODY
from .model import Decision, Fate, GpuState, Outcome, OwnerKind, Plan, Survey
from .report import doubts, held, indices, usage, who
from .story import Story
from .text import numbered

#: So many names stand in a sentence; the rest is counted. The records and the JSON have them all.
MOST_NAMED = 3

#: The kernel tells when a process began in clock ticks, of which there are a hundred to a second (proc(5)).
TICK = 0.01

ROOT = (
    "run it as root: the unit's line needs the + of ExecStartPre=+/usr/bin/gpuprestart clean"
    " (or ! with CAP_KILL, CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH)"
)


class Finding(NamedTuple):
    outcome: Outcome
    message: str
    hints: tuple[str, ...] = ()


def against(story: Story) -> list[Finding]:
    """Everything that stands against a start. Empty does not yet mean that anything was proved."""
    found = []
    if story.refusal is not None:
        found.append(Finding(story.refusal.outcome, story.refusal.message, story.refusal.hints))
    if story.interrupted:
        found.append(_interrupted(story))
    found += [Finding(Outcome.PRECONDITION, each.message, (each.hint,)) for each in story.unmet]
    plan, survey = story.plan, story.survey
    if plan is None or survey is None:
        return found
    found += _denied(story, plan, survey)
    found += _unmeasured(plan)
    found += _protected(plan, story.unit) + _claimed(plan)
    found += _unkillable(story)
    found += _respawning(story, plan)
    dirty = [state for state in plan.gpus if not state.clean and not state.unknown]
    if plan.refused or any(finding.outcome in _EXPLAIN for finding in found):
        # Where nobody that was named or would have been ended has anything, somebody or something else is the reason.
        told = _told(story, plan)
        return found + [
            _dirty(story, plan, survey, state) for state in dirty if not told & {state.gpu.uuid, state.gpu.parent}
        ]
    if story.checking and plan.evict:
        found.append(_to_be_cleaned(plan))
        dirty = [state for state in dirty if not any(state.gpu.uuid in held(each.holder) for each in plan.evict)]
        plan = plan._replace(evict=())
    found += [_dirty(story, plan, survey, state) for state in dirty]
    if plan.evict and not found:
        found.append(_unended(story, plan))
    if plan.clean and not story.proved and not found:
        found.append(_unsettled(story, plan))
    return found


#: Where one of these is found, GPUs that are not clean need no other reason.
_EXPLAIN = (Outcome.PROTECTED, Outcome.RESPAWNING, Outcome.UNKILLABLE)


def _told(story: Story, plan: Plan) -> set[Optional[str]]:
    """UUIDs of the GPUs that somebody has who is in the way, would be ended, or cannot be ended."""
    survived = [each for each in story.seen if story.fates.get(each.holder.process.identity) is Fate.SURVIVED]
    some = (*plan.blocking, *plan.awaited, *plan.evict, *plan.later, *plan.respited, *survived)
    claimed = {uuid for claim, _ in plan.claims for uuid in (claim.gpu, claim.parent)}
    return {uuid for each in some for uuid in held(each.holder)} | claimed - {None}


def _interrupted(story: Story) -> Finding:
    ended = by_us(story)
    done = f"{count(len(ended), 'stale holder')} had been ended" if ended else "nobody had been ended"
    message = f"{story.interrupted} came before the GPUs were proved clean; {done} by then"
    return Finding(Outcome.INTERRUPTED, message, ("start the unit again, and what was not finished is done then",))


def _denied(story: Story, plan: Plan, survey: Survey) -> list[Finding]:
    found = [
        Finding(Outcome.DENIED, f"the kernel refuses us signals to {who(each, plan.gpus)}; it {each.reason}", (ROOT,))
        for each in story.denied
    ]
    blind = [each for each in plan.blocking if each.blind]
    if blind:
        found.append(Finding(Outcome.DENIED, _held(plan, blind), (ROOT,)))
    unexplained = [state for state in plan.gpus if state.gpu.uuid in plan.unexplained]
    if unexplained and survey.unreadable:
        unseen = f"{count(len(survey.unreadable), 'process', 'processes')} may not be looked into"
        pids = numbered(survey.unreadable, MOST_NAMED)
        message = f"{_where(unexplained)}: nobody is seen to hold it, but {unseen} ({pids})"
        found.append(Finding(Outcome.DENIED, message, (ROOT,)))
    return found


def _unmeasured(plan: Plan) -> list[Finding]:
    hints = ("nvidia-smi and dmesg (Xid) tell more; a lost GPU needs a reset or a reboot",)
    return [Finding(Outcome.UNKNOWN, f"{_named(state)} {state.fault}", hints) for state in plan.gpus if state.unknown]


def _protected(plan: Plan, asked: Optional[str]) -> list[Finding]:
    """Refused because of somebody alive. The server that was asked about comes last: it is no reason to stop it."""

    def itself(decision: Decision) -> bool:
        owner = decision.holder.owner
        return owner.kind is OwnerKind.UNIT and owner.unit is not None and owner.unit.name == asked and owner.unit.up

    # Of those that have no GPU but a port, the requirement tells.
    in_the_way = [each for each in (*plan.blocking, *plan.awaited) if not each.blind and each not in plan.occupants]
    in_the_way.sort(key=itself)
    if not in_the_way:
        return []
    running = f"nothing is wrong with that: {asked} is up and has its GPUs; a restart stops it before it judges them"
    hints = tuple(running if itself(decision) else decision.hint for decision in in_the_way)
    return [Finding(Outcome.PROTECTED, _held(plan, in_the_way), hints)]


def _held(plan: Plan, decisions: Sequence[Decision]) -> str:
    """One sentence for the first of them, the rest counted."""
    first, *others = decisions
    theirs = [state for state in plan.gpus if state.gpu.uuid in held(first.holder)]
    where = f"{_where(theirs)} is held by" if theirs else "in the way is"
    message = f"{where} {who(first, plan.gpus)}: it {first.reason}"
    if others:
        message += f"; and by {count(len(others), 'other', 'others')}: {_names(others)}"
    return message


def _claimed(plan: Plan) -> list[Finding]:
    """GPUs that look free, and are promised to a unit whose server has not come to use them yet."""
    found = []
    named = {decision.holder.owner.word for decision in plan.blocking}
    for unit in dict.fromkeys(unit for _, unit in plan.claims):
        if f"unit:{unit.name}" in named:
            continue  # It has come, and is named as a holder already.
        theirs = {uuid for claim, other in plan.claims if other == unit for uuid in (claim.gpu, claim.parent) if uuid}
        gpus = [state.gpu.index for state in plan.gpus if theirs & {state.gpu.uuid, state.gpu.parent}]
        plural = "s" if len(gpus) > 1 else ""
        message = f"GPU{plural} {indices(gpus)} had been proved clean for {unit.name}, which is {unit.active_state}"
        hints = (f"systemctl stop {unit.name}, or give each unit GPUs of its own",)
        if unit.name == NOBODY:
            paths = " ".join(f"{FOLDER}/{claim.gpu}" for claim, other in plan.claims if other == unit)
            hints = (f"the claim cannot be read: remove {paths} once no server is about to use these GPUs",)
        found.append(Finding(Outcome.PROTECTED, f"{message} and may not have allocated yet", hints))
    return found


def _unkillable(story: Story) -> list[Finding]:
    hints = ("it is stuck in the kernel: dmesg may tell on what; only that, or a reboot, ends it",)
    found = []
    for decision in story.seen:
        process = decision.holder.process
        if story.fates.get(process.identity) is Fate.SURVIVED:
            place = story.survivors.get(process.identity)
            stuck = f"state {process.state}" + (f", in {place}" if place else "")
            message = f"{who(decision, story.gpus)} survived SIGKILL ({stuck}); it {decision.reason}"
            found.append(Finding(Outcome.UNKILLABLE, message, hints))
    return found


def _respawning(story: Story, plan: Plan) -> list[Finding]:
    """Holders that were not there when the run began have come in the place of those that it ended."""
    came = [each for each in plan.evict if each.holder.process.began >= story.began - TICK]
    if story.checking or not came or story.rounds < 2:
        return []
    last = came[0]
    ppid, parent = last.holder.process.ppid, last.holder.process.parent
    message = (
        f"stale holders came back {story.rounds} times; the last is {who(last, plan.gpus)}, started by"
        f" {parent or f'PID {ppid}'}; it {last.reason}"
    )
    return [Finding(Outcome.RESPAWNING, message, (f"stop what starts it: systemctl status {ppid}",))]


# Memory --------------------------------------------------------------------------------------------------------------


def _to_be_cleaned(plan: Plan) -> Finding:
    theirs = {uuid for each in plan.evict for uuid in held(each.holder)}
    dirty = [state for state in plan.gpus if not state.clean and state.gpu.uuid in theirs]
    where = f"{_where(dirty)}: " if dirty else ""
    message = f"{where}clean would end {count(len(plan.evict), 'stale holder')}: {_names(plan.evict)}"
    return Finding(Outcome.NOT_FREED, message, ("gpuprestart clean does it, and so does the start of the unit",))


def _dirty(story: Story, plan: Plan, survey: Survey, state: GpuState) -> Finding:
    """One GPU that is not clean, and nobody to be named for it who is still there."""
    gone = [decision for decision in story.seen if _had_memory_on(story, decision, state.gpu.uuid)]
    memory = state.reading.memory
    if memory is None or memory.used <= state.limit or plan.evict or gone:
        return _not_freed(story, plan, state, gone)
    return _unattributed(story, plan, survey, state)


def _had_memory_on(story: Story, decision: Decision, uuid: str) -> bool:
    """Whether the memory on a GPU may be that of this holder, which is gone, on its way back.

    To have had the node open is not enough for one that went by itself: monitors come and go.
    """
    holder = decision.holder
    fate = story.fates.get(holder.process.identity)
    if fate in (Fate.TERMINATED, Fate.KILLED):
        return uuid in held(holder)
    return fate is not None and uuid in holder.listed


def _not_freed(story: Story, plan: Plan, state: GpuState, gone: Sequence[Decision]) -> Finding:
    message = f"{_named(state)}: {state.fault}"
    if plan.evict:
        message += f", and {_names(plan.evict)} could not be ended before the deadline"
        return Finding(Outcome.NOT_FREED, message, ("allow more time (deadline.total)",))
    if not gone:
        return Finding(Outcome.NOT_FREED, message, ("gpuprestart status shows what else runs on it",))
    verb = "is" if len(gone) == 1 else "are"
    message += f", {story.duration:.0f} s into this run, though {_names(gone)} {verb} gone"
    hint = f"allow more time (deadline.total), else nvidia-smi --gpu-reset -i {state.gpu.uuid}, else reboot"
    return Finding(Outcome.NOT_FREED, message, (hint,))


def _unattributed(story: Story, plan: Plan, survey: Survey, state: GpuState) -> Finding:
    message = f"{_named(state)}: {usage(state)}, and nobody was seen to hold it"
    dead = survey.dead.get(state.gpu.uuid, ())
    if dead:
        verb = "is" if len(dead) == 1 else "are"
        message += f"; NVML still lists {numbered(dead, MOST_NAMED)}, which {verb} in no /proc"
    hints = [f"nvidia-smi --gpu-reset -i {state.gpu.uuid} once nothing uses that GPU, else reboot"]
    if story.checking:
        hints.insert(0, "memory can come back minutes after its holder has ended: clean would wait for it")
    memory = state.reading.memory
    if memory is not None and memory.call == "v1":
        why = "this driver has only the v1 memory call, which counts what the driver reserves as used"
        hints.insert(0, f"{why}: set memory.max_used above that")
    hints += doubts(state.reading)
    suspects = [each for each in plan.suspects if state.gpu.uuid in each.holder.opened | each.holder.mapped]
    hints += [f"{who(each, plan.gpus)} has its node open; it {each.reason}" for each in suspects[:8]]
    return Finding(Outcome.UNATTRIBUTED, message, tuple(hints))


def _unended(story: Story, plan: Plan) -> Finding:
    message = f"the deadline came {story.duration:.0f} s into this run, before {_names(plan.evict)} could be ended"
    return Finding(Outcome.NOT_FREED, message, ("allow more time (deadline.total)",))


def _unsettled(story: Story, plan: Plan) -> Finding:
    gpus = count(len(plan.gpus), "GPU")
    message = f"the deadline came {story.duration:.0f} s into this run, before {gpus} had stayed clean"
    return Finding(Outcome.NOT_FREED, message, ("allow more time (deadline.total)",))


# Words ---------------------------------------------------------------------------------------------------------------


def proof(story: Story) -> Finding:
    """The sentence of a start that may go on."""
    states = story.gpus
    most = max(states, key=lambda state: state.reading.memory.used if state.reading.memory else 0)
    proved = f"{'all ' if len(states) > 1 else ''}{count(len(states), 'GPU')} proved clean (at most {usage(most)})"
    ended = by_us(story)
    if story.was_reset:
        proved = f"{', '.join(map(str, story.was_reset))} reset, {proved}"
    if not ended:
        return Finding(Outcome.CLEANED if story.was_reset else Outcome.CLEAN, proved)
    return Finding(Outcome.CLEANED, f"{count(len(ended), 'stale holder')} ended ({_names(ended)}), {proved}")


def by_us(story: Story) -> list[Decision]:
    """Holders that this run ended."""
    fates = (Fate.TERMINATED, Fate.KILLED)
    return [decision for decision in story.seen if story.fates.get(decision.holder.process.identity) in fates]


def count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _named(state: GpuState) -> str:
    return f"{state.gpu} ({state.gpu.uuid[:12]})" if state.gpu.uuid else str(state.gpu)


def _where(states: Sequence[GpuState]) -> str:
    """The GPUs with what is used of each against the limit."""
    if len(states) == 1:
        return f"{states[0].gpu} ({usage(states[0])})"
    figures = ", ".join(f"{state.gpu.index}: {usage(state)}" for state in states[:MOST_NAMED])
    more = ", …" if len(states) > MOST_NAMED else ""
    return f"GPUs {indices(state.gpu.index for state in states)} ({figures}{more})"


def _names(decisions: Sequence[Decision]) -> str:
    shown = ", ".join(str(decision.holder.process) for decision in decisions[:MOST_NAMED])
    return shown + (f" and {len(decisions) - MOST_NAMED} more" if len(decisions) > MOST_NAMED else "")
