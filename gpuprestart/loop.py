"""Survey, judge, evict, drain, and again: until everything is clean, somebody stands in the way, or time is up.

It puts the stages one behind the other and keeps the time; what should be done is the judge's word, and what became of
it goes to the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Optional

from . import drain, evict, findings, judge, table
from .host.nvml import DriverError
from .ledger import Ledger
from .model import Action, Decision, GpuState, Plan, Reading, Survey
from .neighbours import Neighbours, clock
from .policy import Policy
from .survey import Surveyor

if TYPE_CHECKING:
    from .before_kill import BeforeKill
    from .reset import LastResort

#: Seconds after which everything is looked at again while memory is awaited, what they grow to while every look finds
#: the same, and how much of the time that may take.
LOOK_AGAIN = 2.0
LOOK_RARELY = 16.0
LOOK_SHARE = 10

#: Rounds of new stale holders after which they are said to come back as fast as they are ended.
MOST_ROUNDS = 10


def look(
    surveyor: Surveyor, policy: Policy, history: judge.History, ledger: Ledger, *, within: float = float("inf")
) -> tuple[Survey, Plan, judge.History]:
    """``within`` so many seconds the driver has to answer, if that is less than it may take anyway."""
    with ledger.phase("survey"):
        survey = surveyor.look(within)
    history = judge.remember(history, policy, survey)
    plan = judge.plan(policy, survey, history)
    ledger.planned(survey, plan)
    return survey, plan, history


def clean(
    policy: Policy,
    surveyor: Surveyor,
    host: Neighbours,
    ledger: Ledger,
    *,
    deadline: float,
    protected_until: float,
    before_kill: Optional[BeforeKill] = None,
    last_resort: Optional[LastResort] = None,
) -> bool:
    """End what is stale and wait until everything is clean; whether that was proved. The ledger knows the rest.

    ``before_kill`` and ``last_resort`` are there where the policy asks for them.
    """
    history = judge.History()
    settled = False
    rounds = 0
    patience, before = LOOK_AGAIN, None
    while True:
        began = clock()
        survey, plan, history = look(surveyor, policy, history, ledger)
        now = clock()
        if plan.clean and (settled or not ledger.dirty):
            return True
        if _over(plan, ledger, now, deadline=deadline, protected_until=protected_until):
            return False
        if plan.evict:
            rounds += 1
            if rounds > MOST_ROUNDS:
                return False
            ledger.note(rounds=rounds)
            _evict(policy, survey, plan, history, surveyor, host, ledger, before_kill, deadline=deadline)
            history = judge.ended(history, attributed=ledger.ended_attributed)
            settled = False
            continue
        if last_resort is not None and last_resort.due(plan):
            with ledger.phase("reset"):
                last_resort(survey, plan)
            settled = False
            continue
        patience = min(2 * patience, LOOK_RARELY) if before is not None and _idle(before, plan) else LOOK_AGAIN
        before = plan
        # Memory that is low from the first sample on must have the time to settle before the next look.
        again = now + max(patience, LOOK_SHARE * (now - began), policy.memory.settle + 1.0)
        reset = float("inf") if last_resort is None else last_resort.moment(plan)
        until = min(deadline, again, reset, *_moments(policy, plan, history, protected_until))
        settled = _drain(policy, plan, surveyor, host, ledger, until=until)


def _over(plan: Plan, ledger: Ledger, now: float, *, deadline: float, protected_until: float) -> bool:
    """Whether nothing more can come of this run."""
    return _hopeless(plan, ledger) or now >= deadline or bool(plan.refused and now >= protected_until)


def _hopeless(plan: Plan, ledger: Ledger) -> bool:
    """Whether time changes nothing."""
    return ledger.denied or any(state.unknown for state in plan.gpus)


def _idle(before: Plan, plan: Plan) -> bool:
    """Whether nothing has come or gone since the last look, and nobody is waited for: memory alone is, of which every
    sample tells."""
    seen, now = ([(each.holder.process.identity, each.action) for each in one.decisions] for one in (before, plan))
    return seen == now and not (plan.awaited or plan.refused or plan.later)


def _moments(policy: Policy, plan: Plan, history: judge.History, protected_until: float) -> list[float]:
    """When something falls due before the next regular look."""
    moments = [protected_until] if plan.refused else []
    if plan.later:
        moments += [since + policy.deadline.term for since in history.unexplained_since.values()]
    return moments


def _evict(
    policy: Policy,
    survey: Survey,
    plan: Plan,
    history: judge.History,
    surveyor: Surveyor,
    host: Neighbours,
    ledger: Ledger,
    before_kill: Optional[BeforeKill],
    *,
    deadline: float,
) -> None:
    # What is run before the first signals may use up half of the time; the rest is for ending and for the memory.
    half = clock() + (deadline - clock()) / 2

    def prepare(decision: Decision) -> bool:
        if before_kill is None or not before_kill.due(decision) or not surveyor.unchanged(decision.holder.process):
            return False
        before_kill(decision, plan.gpus, until=half)
        return True

    def still_due(decisions: Sequence[Decision]) -> Sequence[Decision]:
        nonlocal survey
        try:
            survey, now, _ = look(surveyor, policy, history, ledger, within=(deadline - clock()) / 2)
        except DriverError:
            # Who has the memory is not told any more. Whose they are is, and is asked again right before the signal.
            return decisions
        due = {each.holder.process.identity for each in now.evict}
        return [] if _hopeless(now, ledger) else [each for each in decisions if each.holder.process.identity in due]

    def still_stale(decisions: Sequence[Decision]) -> Iterator[Decision]:
        fresh = surveyor.again(survey, [decision.holder for decision in decisions])
        judged = [table.decide(policy, fresh, holder) for holder in fresh.holders]
        # systemd takes its time to answer, and signals for many follow one another; so the last look at each is now.
        return (each for each in judged if each.action is Action.KILL and surveyor.unchanged(each.holder.process))

    with ledger.phase("evict"):
        host.say_status(findings.ending(plan))
        evict.evict(
            surveyor.holding(plan.evict),
            still_stale=still_stale,
            still_due=still_due,
            prepare=prepare,
            witness=ledger,
            wait=host.wait,
            clock=clock,
            grace=policy.deadline.term,
            deadline=deadline,
        )


def _drain(policy: Policy, plan: Plan, surveyor: Surveyor, host: Neighbours, ledger: Ledger, *, until: float) -> bool:
    """Wait for memory; while somebody is awaited too, low memory alone ends nothing."""

    readings: dict[str, Reading] = {}
    high: list[GpuState] = []

    def watch(seconds: float) -> Mapping[str, Reading]:
        """Those that were high, and once there are none left, all of them."""
        if high:
            readings.update(surveyor.watch(seconds, [state.gpu for state in high]))
            high[:] = are_high(high)
            seconds = 0.0
        if not high:
            readings.update(surveyor.watch(seconds))
            high[:] = are_high(plan.gpus)
        ledger.sampled(readings, policy)
        return readings

    def are_high(states: Iterable[GpuState]) -> list[GpuState]:
        return [state for state in states if not judge.is_low(policy, state, readings[state.gpu.uuid])]

    def low(_: Mapping[str, Reading]) -> bool:
        return not (plan.awaited or plan.refused or high)

    with ledger.phase("drain"):
        host.say_status(findings.waiting(plan))
        return drain.drain(watch=watch, low=low, clock=clock, settle=policy.memory.settle, until=until)
