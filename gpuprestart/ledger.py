"""What a run has seen and done so far, written down as it happens: the records in the journal and the Story at the end.

It is told things and keeps them; it decides nothing, and it is the one mutable value of a run, so that a run that is
cut short anywhere still has a whole story to tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Callable, Optional

from . import events, judge
from .faults import Interrupted
from .model import (
    MIB,
    Action,
    Decision,
    Fate,
    Gpu,
    GpuState,
    Leftover,
    Plan,
    Process,
    Reading,
    Refusal,
    Survey,
    Timeline,
    Unmet,
)
from .policy import Policy
from .report import doubts, who
from .story import Story

#: Holders that get a record of their own when they are found; the verdict counts the rest.
MOST_FOUND = 64

#: Of the timeline, so many stretches, signals of each kind and samples are kept; fewer samples of many GPUs, so that
#: there are not more figures than this, but some in any case.
MOST_KEPT = 64
MOST_FIGURES, LEAST_SAMPLES = 1024, 16

#: Bytes by which what is used must differ for a sample to tell anything new.
NOTABLE = MIB

Identity = tuple[int, int]


class Ledger:
    """``write`` sends a record to the journal, ``clock`` is in seconds of CLOCK_BOOTTIME."""

    def __init__(
        self,
        story: Story,
        *,
        write: Callable[[events.Record], None],
        clock: Callable[[], float],
        wchan: Callable[[int], str],
        still_there: Callable[[Process], bool],
    ) -> None:
        self._story = story
        self._write = write
        self._clock = clock
        self._wchan = wchan
        self._still_there = still_there
        self._began = clock()
        self._seen: dict[Identity, Decision] = {}
        self._fates: dict[Identity, Fate] = {}
        self._denied: dict[Identity, Decision] = {}
        self._killed: dict[Identity, float] = {}
        self._signalled: dict[Identity, float] = {}
        self._freed: set[str] = set()
        #: What was last recorded of each holder.
        self._recorded: dict[Identity, tuple[Action, str]] = {}
        self._doubted: set[str] = set()
        self._opening: Optional[events.Record] = None
        self._phases: dict[str, float] = {}
        self._stretches: list[tuple[str, float, float]] = []
        self._signals: list[tuple[float, int, str]] = []
        self._memory: list[tuple[float, tuple[Optional[int], ...]]] = []
        #: Anything stood against a start at any time in this run.
        self.dirty = False

    # What is found ---------------------------------------------------------------------------------------------------

    def note(self, **facts: object) -> None:
        """Add facts to the story, by the names of its fields."""
        self._story = self._story._replace(**facts)  # type: ignore[arg-type]

    def write(self, record: events.Record) -> None:
        self._write(record)

    def open_with(self, record: events.Record) -> None:
        """Write this first, once there is anything to tell: a run on clean GPUs needs no beginning."""
        self._opening = record

    def begin(self) -> bool:
        """There is something to tell: a GPU is not clean, or this run has to wait. Whether this was the first of it."""
        if self._opening is None:
            return False
        self._write(self._opening)
        self._opening = None
        return True

    def lacks(self, unmet: Iterable[Unmet]) -> None:
        """Requirements of the policy that are not met; each is recorded once."""
        new = [each for each in unmet if each not in self._story.unmet]
        if new:
            self.begin()
        self.note(unmet=(*self._story.unmet, *new))
        for each in new:
            self._write(events.precondition_failed(self.context, each))

    def left(self, residue: Iterable[Leftover]) -> None:
        """What was found in shared memory, in one record."""
        found = tuple(residue)
        self.note(residue=found)
        if found:
            self._write(events.residue(self.context, found))

    def warned(self, text: str, gpus: Sequence[Gpu]) -> None:
        """Something that does not decide: a record, and a hint wherever hints are shown anyway."""
        self.note(advice=(*self._story.advice, text))
        self._write(events.warning(self.context, text, gpus=gpus))

    def was_reset(self, gpu: Gpu) -> None:
        """A hint tells it wherever hints are shown: that the memory is still not back is then worth a reboot."""
        told = f"{gpu} was reset in this run, after {self._clock() - self._began:.0f} s of it"
        self.note(was_reset=(*self._story.was_reset, gpu), advice=(*self._story.advice, told))
        self._write(events.gpu_reset(self.context, gpu))

    @property
    def proved(self) -> bool:
        return self._story.proved

    @property
    def unmet(self) -> tuple[Unmet, ...]:
        return self._story.unmet

    @property
    def last(self) -> Optional[tuple[Survey, Plan]]:
        """The last look, and what was decided on it."""
        survey, plan = self._story.survey, self._story.plan
        return None if survey is None or plan is None else (survey, plan)

    @property
    def context(self) -> events.Context:
        return events.Context(unit=self._story.unit, run=self._story.run)

    def planned(self, survey: Survey, plan: Plan) -> None:
        """A look and what was decided on it. A holder is recorded when it is first seen, or judged anew."""
        self.note(survey=survey, plan=plan)
        self._sample({state.gpu.uuid: state.reading for state in plan.gpus})
        self.dirty = self.dirty or not plan.clean
        if self.dirty:
            self.begin()
            self._doubt(plan)
        alive = {decision.holder.process.identity for decision in plan.decisions}
        for decision in plan.decisions:
            identity = decision.holder.process.identity
            self._seen[identity] = decision
            judged = (decision.action, decision.reason)
            changed = self._recorded.get(identity) != judged
            # A clean run writes its verdict and hardly more, whoever is spared on its GPUs.
            if self.dirty and changed and decision.action is not Action.NONE and len(self._recorded) < MOST_FOUND:
                self._recorded[identity] = judged
                self._write(events.holder_found(self.context, decision, plan.gpus))
        for identity, decision in self._seen.items():
            if identity in alive or identity in self._fates or decision.action is Action.NONE:
                continue
            # One that only let go of the GPU has no fate, and may come back.
            if not self._still_there(decision.holder.process):
                self.ended(decision, self._fate(identity))

    def _fate(self, identity: Identity) -> Fate:
        """Of one that is gone. One that was let live, as its owner is up again, may go by what it had been sent."""
        if identity in self._killed:
            return Fate.KILLED
        return Fate.TERMINATED if identity in self._signalled else Fate.EXITED

    def _doubt(self, plan: Plan) -> None:
        """Say once of each GPU that its holders had to be found without the driver's list."""
        for state in plan.gpus:
            for text in doubts(state.reading) if state.gpu.uuid not in self._doubted else ():
                self._doubted.add(state.gpu.uuid)
                self._write(
                    events.warning(
                        self.context, f"{state.gpu}: {text}; its holders are found by /proc alone", gpus=[state.gpu]
                    )
                )

    def sampled(self, readings: Mapping[str, Reading], policy: Policy) -> None:
        """A sample of the selected GPUs between two looks: memory that is back is recorded once, when it is seen."""
        self._sample(readings)
        for state in self._gpus:
            reading = readings[state.gpu.uuid]
            if not state.clean and state.gpu.uuid not in self._freed and judge.is_low(policy, state, reading):
                self._freed.add(state.gpu.uuid)
                after = state._replace(reading=reading, clean=True, fault="")
                self._write(events.memory_freed(self.context, state, after, seconds=self._clock() - self._began))

    def _sample(self, readings: Mapping[str, Reading]) -> None:
        """Keep what is used now, if that is news. When there is too much of it, the smallest is forgotten, and not the
        oldest: of a run that takes long, what matters may have come first."""
        memories = [readings[state.gpu.uuid].memory for state in self._gpus]
        used = tuple(None if memory is None else memory.used for memory in memories)
        kept = self._memory
        # The one before last tells whether the last was only the end of a level stretch.
        if len(kept) > 1 and _alike(kept[-1][1], used) and _alike(kept[-2][1], used):
            kept.pop()
        kept.append((self._clock() - self._began, used))
        if len(kept) > max(LEAST_SAMPLES, min(MOST_KEPT, MOST_FIGURES // max(1, len(used)))):
            # A figure holds until the next, so one that is as the one before it tells nothing that would be missed.
            del kept[min(range(1, len(kept) - 1), key=lambda at: _apart(kept[at - 1][1], kept[at][1]))]

    @property
    def _gpus(self) -> tuple[GpuState, ...]:
        return self._story.plan.gpus if self._story.plan else ()

    # What is done (evict.Witness) ------------------------------------------------------------------------------------

    def signalled(self, decision: Decision, name: str) -> None:
        identity = decision.holder.process.identity
        self._seen[identity] = decision
        self._signalled.setdefault(identity, self._clock())
        # Many SIGTERM leave room for the SIGKILL after them.
        if sum(sent == name for _, _, sent in self._signals) < MOST_KEPT:
            self._signals.append((self._clock() - self._began, identity[0], name))
        if name == "SIGKILL":
            self._killed[identity] = self._clock()
        self._write(events.holder_signalled(self.context, decision, self._gpus, signal_name=name))

    def refused(self, decision: Decision, name: str) -> None:
        self._denied[decision.holder.process.identity] = decision
        text = f"the kernel refuses {name} to {who(decision, self._gpus)}; it {decision.reason}"
        self._write(events.warning(self.context, text))

    def ended(self, decision: Decision, fate: Fate) -> None:
        identity = decision.holder.process.identity
        self._fates[identity] = fate
        since = self._signalled.get(identity)
        seconds = None if since is None else self._clock() - since
        if identity in self._recorded or since is not None:
            self._write(events.holder_gone(self.context, decision, self._gpus, fate=fate, seconds=seconds))

    @property
    def denied(self) -> bool:
        return bool(self._denied)

    @property
    def ended_attributed(self) -> bool:
        return any(self._seen[identity].holder.listed for identity in self._fates if identity in self._signalled)

    # How it ends -----------------------------------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to this phase of the run, but for what is another phase's within it."""
        began, others = self._clock(), sum(self._phases.values())
        try:
            yield
        finally:
            others = sum(self._phases.values()) - others
            ended = self._clock()
            self._phases[name] = self._phases.get(name, 0.0) + ended - began - others
            self._stretch(name, began - self._began, ended - self._began)

    def _stretch(self, name: str, began: float, ended: float) -> None:
        """One more stretch of a phase; when there are too many, the two of one phase that are closest become one."""
        kept = self._stretches
        kept.append((name, began, ended))
        if len(kept) <= MOST_KEPT:
            return
        last: dict[str, int] = {}
        gaps = []
        for number, (each, start, _) in enumerate(kept):
            if each in last:
                gaps.append((start - kept[last[each]][2], last[each], number))
            last[each] = number
        _, one, other = min(gaps)
        kept[one] = (kept[one][0], kept[one][1], max(kept[one][2], kept[other][2]))
        del kept[other]

    def story(self, *, refusal: Optional[Refusal] = None, interrupted: Optional[Interrupted] = None) -> Story:
        """The whole story, told once, at the end of the run."""
        survivors = {}
        for identity, since in self._killed.items():
            if identity in self._fates:
                continue
            decision = self._seen[identity]
            if not self._still_there(decision.holder.process):
                # It died after the last time that anybody looked.
                self.ended(decision, Fate.KILLED)
                continue
            survivors[identity] = self._wchan(identity[0])
            self._fates[identity] = Fate.SURVIVED
            self._write(
                events.holder_survived(
                    self.context,
                    decision,
                    self._gpus,
                    seconds=self._clock() - since,
                    state=decision.holder.process.state,
                    wchan=survivors[identity],
                )
            )
        return self._story._replace(
            began=self._began,
            duration=self._clock() - self._began,
            phases=dict(self._phases),
            seen=tuple(self._seen[identity] for identity in sorted(self._seen)),
            fates=dict(self._fates),
            denied=tuple(self._denied.values()),
            survivors=survivors,
            timeline=Timeline(tuple(self._stretches), tuple(self._signals), tuple(self._memory)),
            refusal=refusal,
            interrupted=interrupted.signal_name if interrupted else "",
        )


def _alike(before: Sequence[Optional[int]], after: Sequence[Optional[int]]) -> bool:
    return _apart(before, after) < NOTABLE


def _apart(before: Sequence[Optional[int]], after: Sequence[Optional[int]]) -> float:
    """How far any GPU's figure is from what it was; beyond all measure where one of them is not known."""
    if len(before) != len(after):
        return math.inf
    pairs = [(one, other) for one, other in zip(before, after) if one != other]
    return max((math.inf if one is None or other is None else abs(one - other) for one, other in pairs), default=0)
