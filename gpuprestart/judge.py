"""(Policy, Survey) -> Plan: who is to be ended now, who stands in the way, which GPU is clean. Pure.

The table says what becomes of a holder; here that meets the evidence of what it holds, and what has been tried so far.
A GPU is clean only with figures that say so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import NamedTuple

from . import rules, table
from .model import Action, Decision, Gpu, GpuState, Holder, OwnerKind, Plan, Reading, Survey
from .policy import Policy, Size
from .text import amounts, mib


class History(NamedTuple):
    """What the run has been through so far, as far as the next decision hangs on it."""

    #: A holder to which NVML attributed memory has been ended; what remains may still be its memory on its way back.
    ended_attributed: bool = False
    #: UUID -> since when, on the survey's clock, that GPU has had memory that no living holder explains.
    unexplained_since: Mapping[str, float] = {}


def remember(history: History, policy: Policy, survey: Survey) -> History:
    """The history with what this survey adds to it."""
    since = {
        gpu.uuid: history.unexplained_since.get(gpu.uuid, survey.at)
        for gpu in survey.gpus
        if _is_unexplained(policy, survey, gpu)
    }
    return history._replace(unexplained_since=since)


def ended(history: History, *, attributed: bool) -> History:
    """The history after an eviction; ``attributed`` says that NVML had put memory to somebody whom this run ended."""
    return history._replace(ended_attributed=attributed)


def is_low(policy: Policy, state: GpuState, reading: Reading) -> bool:
    """Whether a later reading of a GPU is within what it was last judged by."""
    memory = reading.memory
    if reading.unified:
        return state.clean
    if memory is None:
        return False
    return memory.used <= state.limit and memory.free >= policy.memory.min_free.of(memory.total)


def plan(policy: Policy, survey: Survey, history: History) -> Plan:
    """What should be done now. The same survey and history always give the same plan."""
    unexplained = frozenset(gpu.uuid for gpu in survey.gpus if _is_unexplained(policy, survey, gpu))
    rows = [table.decide(policy, survey, holder) for holder in survey.holders]
    # Two generations never coexist, so these go whatever they hold, or the start is refused.
    previous = {row.holder.process.pid for row in rows if row.action is Action.KILL and _is_previous(row.holder)}
    decided = _with_shared_servers(rows)
    placed = [(_role(policy, survey, history, each, previous, unexplained), each) for each in decided]
    blocking = [each for role, each in placed if role is Role.BLOCKING] + _too_much_spared(policy, survey, decided)
    claims = tuple((claim, unit) for claim, unit in survey.claims if not rules.spare_unit(policy, claim.unit))
    if blocking or claims:
        # The server will not start anyway, so nobody is ended for it, however stale.
        placed = [(Role.RESPITED if role in (Role.EVICT, Role.LATER) else role, each) for role, each in placed]

    def having(role: Role) -> tuple[Decision, ...]:
        return tuple(each for found, each in placed if found is role)

    return Plan(
        gpus=tuple(_state(policy, survey, gpu, decided) for gpu in survey.gpus),
        decisions=tuple(_shown(role, each) for role, each in placed),
        blocking=tuple(blocking),
        evict=having(Role.EVICT),
        later=having(Role.LATER),
        awaited=having(Role.AWAITED) + having(Role.LEAVING),
        suspects=having(Role.SUSPECT),
        respited=having(Role.RESPITED),
        unexplained=unexplained,
        claims=claims,
        occupants=tuple(each for role, each in placed if role in (Role.OCCUPANT, Role.LEAVING)),
    )


def _with_shared_servers(decided: list[Decision]) -> list[Decision]:
    """The same, but that no MPS client is ended while one that stays shares its server: a client that is killed can
    take the server, and with it all others, down (NVIDIA's MPS guide, "Client early termination")."""
    staying: set[str] = set()
    for decision in decided:
        if decision.action is not Action.KILL:
            staying |= _mps(decision.holder)
    reason = "is a client of an MPS server that somebody else uses too"
    hint = "stop all clients of that server: nvidia-smi shows them with type M+C"
    return [
        decision._replace(action=Action.REFUSE, reason=f"{decision.reason}, but {reason}", hint=hint)
        if decision.action is Action.KILL and _mps(decision.holder) & staying
        else decision
        for decision in decided
    ]


def _mps(holder: Holder) -> frozenset[str]:
    return frozenset(uuid for uuid, kinds in holder.kinds.items() if "mps" in kinds)


class Role(Enum):
    """What a holder is to this run, once its owner's row and its evidence are put together."""

    BLOCKING = "wanted, and has memory on a selected GPU"
    EVICT = "stale, to be ended now"
    LATER = "stale, but it may not be what the memory is about: to be ended if the memory stays"
    AWAITED = "has memory on a selected GPU and is going by itself"
    OCCUPANT = "wanted, and has what the policy asks to be free"
    LEAVING = "has what the policy asks to be free, and is going by itself"
    SUSPECT = "may hold memory that nobody explains, and is nobody's to end"
    RESPITED = "stale, but the start is refused anyway"
    SPARED = "left alone, and its memory not counted"
    IDLE = "has nothing on a selected GPU that counts"


_ATTRIBUTED = {Action.KILL: Role.EVICT, Action.REFUSE: Role.BLOCKING, Action.WAIT: Role.AWAITED}
_OCCUPYING = {Action.KILL: Role.EVICT, Action.REFUSE: Role.OCCUPANT, Action.WAIT: Role.LEAVING}


def _is_previous(holder: Holder) -> bool:
    return holder.owner.kind is OwnerKind.OWN_PREVIOUS


def _role(
    policy: Policy,
    survey: Survey,
    history: History,
    decision: Decision,
    previous: Collection[int],
    unexplained: frozenset[str],
) -> Role:
    holder, action = decision.holder, decision.action
    if action is Action.SPARE:
        return Role.SPARED
    if holder.process.pid in previous or any(gpu.uuid in holder.listed for gpu in survey.gpus):
        return _ATTRIBUTED[action]
    if holder.occupies:
        return _OCCUPYING[action]
    # Whose memory NVML puts somewhere is no suspect for memory that it puts to nobody.
    where = (holder.opened | holder.mapped) & unexplained
    if holder.listed or not where or not holder.cuda:
        return Role.IDLE
    if action is not Action.KILL:
        return Role.SUSPECT
    waited = max(survey.at - history.unexplained_since.get(uuid, survey.at) for uuid in where)
    return Role.LATER if history.ended_attributed and waited < policy.deadline.term else Role.EVICT


def _shown(role: Role, decision: Decision) -> Decision:
    """The decision as it is told: what is in nobody's way is left alone, whatever its owner's row says."""
    if role is Role.RESPITED:
        reason = f"{decision.reason}, and is not ended because the start is refused anyway"
    elif role is Role.IDLE:
        reason = f"has no memory here that counts, and {decision.reason}"
    elif role is Role.SUSPECT:
        # No proof that it holds anything: it is told, and stands in nobody's way.
        return decision._replace(reason=f"may hold memory that nobody explains, and {decision.reason}")
    else:
        return decision
    return decision._replace(action=Action.NONE, reason=reason, hint="")


# One GPU -------------------------------------------------------------------------------------------------------------


def unexplained(survey: Survey, gpu: Gpu) -> int:
    """Bytes used less what living listed holders have; one whose bytes NVML does not tell explains all of it."""
    memory = survey.readings[gpu.uuid].memory
    if memory is None:
        return 0
    shares = [holder.listed[gpu.uuid] for holder in survey.holders if gpu.uuid in holder.listed]
    if any(share is None for share in shares):
        return 0
    return max(0, memory.used - sum(share or 0 for share in shares))


def _is_unexplained(policy: Policy, survey: Survey, gpu: Gpu) -> bool:
    memory = survey.readings[gpu.uuid].memory
    return memory is not None and unexplained(survey, gpu) > policy.memory.max_used.of(memory.total)


def _spared(gpu: Gpu, decisions: list[Decision]) -> list[Decision]:
    return [each for each in decisions if each.action is Action.SPARE and gpu.uuid in each.holder.listed]


def _state(policy: Policy, survey: Survey, gpu: Gpu, decisions: list[Decision]) -> GpuState:
    reading = survey.readings[gpu.uuid]
    memory = reading.memory
    if reading.unified:
        return _unified_state(policy, survey, gpu, decisions)
    if memory is None:
        return GpuState(
            gpu=gpu, reading=reading, limit=0, unattributed=0, clean=False, fault=f"cannot be measured: {reading.fault}"
        )
    spared = sum(each.holder.listed[gpu.uuid] or 0 for each in _spared(gpu, decisions))
    limit = policy.memory.max_used.of(memory.total) + min(spared, policy.memory.spared_max.of(memory.total))
    needed = policy.memory.min_free.of(memory.total)
    fault = ""
    if memory.used > limit:
        fault = "{} used, limit {}".format(*amounts(memory.used, limit))
    elif memory.free < needed:
        fault = "{1} free, {0} needed (memory.min_free)".format(*amounts(needed, memory.free))
    return GpuState(
        gpu=gpu, reading=reading, limit=limit, unattributed=unexplained(survey, gpu), clean=not fault, fault=fault
    )


def _unified_state(policy: Policy, survey: Survey, gpu: Gpu, decisions: list[Decision]) -> GpuState:
    """A GPU that shares the machine's memory is clean when nobody is on it that is not spared."""
    reading = survey.readings[gpu.uuid]
    others = [each for each in decisions if gpu.uuid in each.holder.listed and each.action is not Action.SPARE]
    fault = ""
    if policy.memory.unified == "refuse":
        fault = "shares the machine's memory and cannot say how much of it is used (memory.unified)"
    elif policy.memory.min_free != Size(0):
        fault = "shares the machine's memory, so memory.min_free cannot be proved"
    elif reading.distrust or reading.unlisted or not survey.pids_ours:
        why = reading.distrust or reading.unlisted or "NVML lists PIDs of another namespace (nvml.pids)"
        fault = f"shares the machine's memory, and its holders cannot be told: {why}"
    elif others:
        return GpuState(gpu, reading, limit=0, unattributed=0, clean=False, fault="still in use", held=True)
    return GpuState(gpu, reading, limit=0, unattributed=0, clean=not fault, fault=fault)


def _too_much_spared(policy: Policy, survey: Survey, decisions: list[Decision]) -> list[Decision]:
    """Spared holders that together have more than may be left out of account: they are in the server's way."""
    found: dict[int, Decision] = {}
    for gpu in survey.gpus:
        memory = survey.readings[gpu.uuid].memory
        spared = _spared(gpu, decisions)
        most = policy.memory.spared_max.of(memory.total if memory else 0)
        shares = [each.holder.listed[gpu.uuid] for each in spared]
        # One whose bytes NVML does not tell may have all that is used.
        total = (memory.used if memory else 0) if None in shares else sum(share or 0 for share in shares)
        if total > most:
            limit = f"memory.spared_max of {mib(most)}"
            reason = f"is spared, but spared holders may have {mib(total)} on {gpu}, more than {limit}"
            for each in spared:
                hint = (
                    f"systemctl status {each.holder.process.pid} shows what it is: stop it, or raise memory.spared_max"
                )
                found[each.holder.process.pid] = each._replace(reason=reason, hint=hint)
    return list(found.values())
