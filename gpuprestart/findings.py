"""What stands against a start, in sentences: pure.

Each finding is one outcome with the GPU, the process and its owner, the figure against the limit, and what to do. They
are read by somebody who was woken for them, so the most useful hint comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Optional

from .claims import FOLDER, NOBODY
from .model import Action, Decision, Fate, GpuState, Outcome, OwnerKind, Plan, Survey
from .report import doubts, held, indices, usage, who
from .story import Story
from .text import mib, numbered

#: So many names stand in a sentence; the rest is counted. The records and the JSON have them all.
MOST_NAMED = 3

#: So many instances of MIG, each by its own name.
MOST_GPUS = 4

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
        found.append(_to_be_cleaned(story, plan))
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
    done = f"{count(len(ended), 'stale holder')} had been ended ({_names(ended)})" if ended else "nobody had been ended"
    # Those are named that it waited for; where all were under their limits, all had yet to stay there.
    some = [state for state in story.gpus if not state.clean] or list(story.gpus)
    where = where_of(some) if some else "the GPUs"
    message = (
        f"{story.interrupted} came before {where} {'was' if len(some) == 1 else 'were'} proved clean; {done} by then"
    )
    again = f"systemctl start {story.unit}" if story.unit else "start it again"
    return Finding(Outcome.INTERRUPTED, message, (f"{again}: what was not finished is done then",))


def _denied(story: Story, plan: Plan, survey: Survey) -> list[Finding]:
    found = [
        Finding(
            Outcome.DENIED,
            f"{_on(plan.gpus, each)}the kernel refuses us signals to {who(each, plan.gpus)}; it {each.reason}",
            (ROOT,),
        )
        for each in story.denied
    ]
    blind = [each for each in plan.blocking if each.blind]
    if blind:
        found.append(Finding(Outcome.DENIED, _held(plan, blind), (ROOT,)))
    unexplained = [state for state in plan.gpus if state.gpu.uuid in plan.unexplained]
    if unexplained and survey.unreadable:
        unseen = f"{count(len(survey.unreadable), 'process', 'processes')} may not be looked into"
        pids = numbered(survey.unreadable, MOST_NAMED)
        message = f"{where_of(unexplained)}: nobody is seen to hold it, but {unseen} ({pids})"
        found.append(Finding(Outcome.DENIED, message, (ROOT,)))
    return found


def _unmeasured(plan: Plan) -> list[Finding]:
    return [
        Finding(Outcome.UNKNOWN, f"{_named(state)} {state.fault}", (_measure_again(state),))
        for state in plan.gpus
        if state.unknown
    ]


def _measure_again(state: GpuState) -> str:
    if state.reading.distrust or state.reading.unlisted:
        return "update the driver, which gives no list of processes that could be believed"
    if state.reading.unified:
        return "nothing is wrong with the GPU: correct that key of the policy, or give the unit other GPUs"
    reset = f"nvidia-smi --gpu-reset -i {state.gpu.uuid}, else reboot" if state.gpu.uuid else "reboot"
    return f"look for NVRM and Xid in dmesg; a GPU that is lost needs {reset}"


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
    theirs = _theirs(plan.gpus, first)
    name = who(first, plan.gpus)
    if theirs:
        message = f"{where_of(theirs)} {'is' if len(theirs) == 1 else 'are'} held by {name}: it {first.reason}"
    else:
        message = f"{name} is in the way: it {first.reason}"
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
        gpus = [state for state in plan.gpus if theirs & {state.gpu.uuid, state.gpu.parent}]
        claimed = f"{where_of(gpus)} {'is' if len(gpus) == 1 else 'are'} claimed by"
        allocated = "proved clean for its start, and its server may not have allocated yet"
        message = f"{claimed} {unit.name}, which is {unit.active_state}: {allocated}"
        hints = (f"systemctl stop {unit.name}, or give each unit GPUs of its own",)
        if unit.name == NOBODY:
            paths = " ".join(f"{FOLDER}/{claim.gpu}" for claim, other in plan.claims if other == unit)
            message = f"{claimed} a start that cannot be told, for its claim cannot be read"
            hints = (f"once no server is about to use it: rm {paths}",)
        found.append(Finding(Outcome.PROTECTED, message, hints))
    return found


def _unkillable(story: Story) -> list[Finding]:
    found = []
    for decision in story.seen:
        process = decision.holder.process
        if story.fates.get(process.identity) is Fate.SURVIVED:
            place = story.survivors.get(process.identity)
            stuck = f"state {process.state}" + (f", in {place}" if place else "")
            name = who(decision, story.gpus)
            message = f"{_on(story.gpus, decision)}{name} survived SIGKILL ({stuck}); it {decision.reason}"
            hint = f"cat /proc/{process.pid}/stack and dmesg tell on what it hangs in the kernel: end that, or reboot"
            found.append(Finding(Outcome.UNKILLABLE, message, (hint,)))
    return found


def _respawning(story: Story, plan: Plan) -> list[Finding]:
    """Holders that were not there when the run began have come in the place of those that it ended."""
    came = [each for each in plan.evict if each.holder.process.began >= story.began - TICK]
    if story.checking or not came or story.rounds < 2:
        return []
    last = came[0]
    ppid, parent = last.holder.process.ppid, last.holder.process.parent
    message = (
        f"{_on(plan.gpus, last)}stale holders came back {story.rounds} times; the last is {who(last, plan.gpus)},"
        f" started by {parent or f'PID {ppid}'}; it {last.reason}"
    )
    return [Finding(Outcome.RESPAWNING, message, (f"systemctl status {ppid} shows what starts it: stop that",))]


# Memory --------------------------------------------------------------------------------------------------------------


def _to_be_cleaned(story: Story, plan: Plan) -> Finding:
    theirs = {uuid for each in plan.evict for uuid in held(each.holder)}
    dirty = [state for state in plan.gpus if not state.clean and state.gpu.uuid in theirs]
    where = f"{where_of(dirty)}: " if dirty else ""
    message = f"{where}gpuprestart clean would end {count(len(plan.evict), 'stale holder')}: {_names(plan.evict)}"
    hint = "gpuprestart clean does it now"
    if story.unit:
        hint = f"systemctl start {story.unit} does it first"
        # Typed by hand it is no start of the unit, and does not end what that unit's own last run has left.
        if not any(each.holder.owner.kind is OwnerKind.OWN_PREVIOUS for each in plan.evict):
            hint += f", and gpuprestart clean --unit {story.unit} does it now"
    return Finding(Outcome.NOT_FREED, message, (hint,))


def _dirty(story: Story, plan: Plan, survey: Survey, state: GpuState) -> Finding:
    """One GPU that is not clean, and nobody to be named for it who is still there."""
    gone = [decision for decision in story.seen if _had_memory_on(story, decision, state.gpu.uuid)]
    memory = state.reading.memory
    if memory is None or memory.used <= state.limit or plan.evict or gone:
        found = _not_freed(story, plan, state, gone)
    else:
        found = _unattributed(story, plan, survey, state)
    # To reset a GPU, or to wait for it, is no advice where a run was cut off, or could not see or end who has it.
    cut = story.interrupted or story.denied or (plan.unexplained and survey.unreadable)
    return found._replace(hints=()) if cut else found


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
        hints.insert(0, f"{why}: set memory.max_used above what this GPU shows when idle (now {mib(memory.used)})")
    hints += doubts(state.reading)
    # A reset is refused while anybody has the node open, if only a monitor that is spared.
    spared = [each for each in plan.decisions if each.action is Action.SPARE]
    having = [each for each in (*plan.suspects, *spared) if state.gpu.uuid in each.holder.opened | each.holder.mapped]
    hints += [f"{who(each, plan.gpus)} has the node of {state.gpu} open; it {each.reason}" for each in having[:8]]
    return Finding(Outcome.UNATTRIBUTED, message, tuple(hints))


def _unended(story: Story, plan: Plan) -> Finding:
    first, *others = plan.evict
    name = who(first, plan.gpus) + (f" and {count(len(others), 'other', 'others')}" if others else "")
    message = f"the deadline came {story.duration:.0f} s into this run, before {name} could be ended; it {first.reason}"
    return Finding(Outcome.NOT_FREED, message, ("allow more time (deadline.total)",))


def _unsettled(story: Story, plan: Plan) -> Finding:
    clean = f"before {where_of(plan.gpus)} had stayed clean for as long as memory.settle asks"
    message = f"the deadline came {story.duration:.0f} s into this run, {clean}"
    return Finding(Outcome.NOT_FREED, message, ("allow more time (deadline.total)",))


# Words ---------------------------------------------------------------------------------------------------------------


def proof(story: Story) -> Finding:
    """The sentence of a start that may go on."""
    states = story.gpus
    figures = f"{'at most ' if len(states) > 1 else ''}{usage(_fullest(states))}"
    proved = f"{_gpus(states)} proved clean ({figures})"
    ended = by_us(story)
    if story.was_reset:
        were = "was" if len(story.was_reset) == 1 else "were"
        proved = f"{', '.join(map(str, story.was_reset))} {were} reset, {proved}"
    if not ended:
        return Finding(Outcome.CLEANED if story.was_reset else Outcome.CLEAN, proved)
    return Finding(Outcome.CLEANED, f"{count(len(ended), 'stale holder')} ended ({_names(ended)}), {proved}")


def ending(plan: Plan) -> str:
    """What a run says while it ends the stale."""
    return f"Ending {count(len(plan.evict), 'stale holder')}: {_names(plan.evict)}"


def waiting(plan: Plan) -> str:
    """What a run says while it waits: for whom, or for which memory."""
    some = (*plan.awaited, *plan.blocking)
    if some:
        return f"Waiting for {who(some[0], plan.gpus)} to go: it {some[0].reason}"
    for _, unit in plan.claims:
        return f"Waiting for {unit.name}, which is {unit.active_state} and has claimed the same GPUs"
    dirty = [f"{state.gpu}: {state.fault}" for state in plan.gpus if not state.clean]
    more = f" and {len(dirty) - MOST_NAMED} more" if len(dirty) > MOST_NAMED else ""
    return (
        f"Waiting for memory: {', '.join(dirty[:MOST_NAMED])}{more}"
        if dirty
        else "Waiting until memory has stayed free (memory.settle)"
    )


def by_us(story: Story) -> list[Decision]:
    """Holders that this run ended."""
    fates = (Fate.TERMINATED, Fate.KILLED)
    return [decision for decision in story.seen if story.fates.get(decision.holder.process.identity) in fates]


def count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _named(state: GpuState) -> str:
    return f"{state.gpu} ({state.gpu.uuid[:12]})" if state.gpu.uuid else str(state.gpu)


def where_of(states: Sequence[GpuState]) -> str:
    """The GPUs with what is used of them against the limit: of many, that of the fullest; each has its own record."""
    if not states:
        return "no GPU"
    return f"{_gpus(states)} ({'at most ' if len(states) > 1 else ''}{usage(_fullest(states))})"


def _gpus(states: Sequence[GpuState]) -> str:
    """Short for many, as a sentence has to be; but an instance's number is that of its GPU, which may have more."""
    if len(states) == 1 or any(state.gpu.parent for state in states):
        more = [f"{len(states) - MOST_GPUS} more"] if len(states) > MOST_GPUS else []
        return ", ".join([*(str(state.gpu) for state in states[:MOST_GPUS]), *more])
    return f"GPUs {indices(state.gpu.index for state in states)}"


def _fullest(states: Sequence[GpuState]) -> GpuState:
    """The one that is furthest above its limit, or nearest to it."""

    def above(state: GpuState) -> int:
        return state.reading.memory.used - state.limit if state.reading.memory else -1

    return max(states, key=above)


def _theirs(gpus: Sequence[GpuState], decision: Decision) -> list[GpuState]:
    """Those of the GPUs that a holder is tied to."""
    return [state for state in gpus if state.gpu.uuid in held(decision.holder)]


def _on(gpus: Sequence[GpuState], decision: Decision) -> str:
    """The beginning of a sentence about a holder: on which GPUs it is, if on any."""
    theirs = _theirs(gpus, decision)
    return f"{where_of(theirs)}: " if theirs else ""


def _names(decisions: Sequence[Decision]) -> str:
    shown = ", ".join(str(decision.holder.process) for decision in decisions[:MOST_NAMED])
    return shown + (f" and {len(decisions) - MOST_NAMED} more" if len(decisions) > MOST_NAMED else "")
