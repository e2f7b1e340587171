"""Survey, judge, evict, drain, and again: on a machine that is written down, and a clock that only the wait moves."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Callable, Optional

import pytest

from gpuprestart import loop
from gpuprestart.host import pidfd
from gpuprestart.host.library import INTERVAL
from gpuprestart.host.nvml import DriverError
from gpuprestart.ledger import Ledger
from gpuprestart.model import Decision, Fate, Holder, OwnerKind, Process, Reading, Survey
from gpuprestart.story import Story

from .machines import holder, owner, policy, reading, survey, unit, uuid

ACTIVE = owner(of=unit("ollama.service", "active"))


class Machine:
    """One GPU: ``used`` at each moment, and who is there at each moment until somebody is ended."""

    def __init__(self, used: Callable[[float], int], holders: Callable[[float], Sequence[Holder]]) -> None:
        self.now = 0.0
        self.used = used
        self.holders = holders
        self.ended: dict[int, float] = {}
        self.pidfds: dict[int, int] = {}
        self.looked: list[float] = []
        #: How many GPUs were watched each time; None is all.
        self.watched: list[Optional[int]] = []
        #: They are others at the last moment.
        self.changed: set[int] = set()
        #: From then on the driver says nothing.
        self.silent_from = float("inf")
        #: They do not obey SIGTERM.
        self.stubborn: set[int] = set()

    def look(self, within: float) -> Survey:
        if self.now >= self.silent_from:
            raise DriverError("the driver did not answer")
        self.looked.append(self.now)
        left = [each for each in self.holders(self.now) if each.process.pid not in self.ended]
        return survey(*left, used=(self.used(self.now),), at=self.now)

    def again(self, of: Survey, holders: Iterable[Holder]) -> Survey:
        return of._replace(holders=tuple(holders))

    def unchanged(self, process: Process) -> bool:
        return process.pid not in self.changed

    def holding(self, decisions: Sequence[Decision]) -> Sequence[Decision]:
        return decisions

    def watch(self, seconds: float, gpus: Any = None) -> dict[str, Reading]:
        until, told = self.now + seconds, self.used(self.now)
        while self.now < until and self.used(self.now) == told:
            self.now = min(until, self.now + INTERVAL)
        self.watched.append(None if gpus is None else len(gpus))
        return {uuid(0): reading(0, self.used(self.now))}

    def wait(self, descriptors: Iterable[int], seconds: float) -> set[int]:
        dead = {each for each in descriptors if self.pidfds[each] in self.ended}
        if not dead:
            self.now += max(seconds, 0.001)
        return dead


class Run:
    def __init__(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.machine = machine
        self.ledger = Ledger(
            Story(run="0123", time=0.0),
            write=lambda record: None,
            clock=lambda: machine.now,
            wchan=lambda pid: "",
            still_there=lambda process: False,
        )
        monkeypatch.setattr(loop, "clock", lambda: machine.now)

        def opened(pid: int) -> int:
            machine.pidfds[pid + 100_000] = pid
            return pid + 100_000

        self.signals: list[tuple[int, str]] = []

        def send(descriptor: int, number: signal.Signals) -> bool:
            pid = machine.pidfds[descriptor]
            self.signals.append((pid, number.name))
            if number is signal.SIGKILL or pid not in machine.stubborn:
                machine.ended.setdefault(pid, machine.now)
            return True

        monkeypatch.setattr(pidfd, "open_pidfd", opened)
        monkeypatch.setattr(pidfd, "send", send)
        monkeypatch.setattr(pidfd, "close", lambda descriptor: None)

    def clean(self, text: str = "", deadline: float = 120.0, protected_until: float = 0.0, **stages: Any) -> bool:
        host: Any = SimpleNamespace(wait=self.machine.wait, say_status=lambda said: None)
        surveyor: Any = self.machine
        stages.update(deadline=deadline, protected_until=protected_until)
        return loop.clean(policy(text), surveyor, host, self.ledger, **stages)

    def fates(self) -> dict[int, Fate]:
        return {pid: fate for (pid, _), fate in self.ledger.story().fates.items()}


Begin = Callable[..., Run]


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Begin:
    def make(used: Callable[[float], int], holders: Callable[[float], Sequence[Holder]] = lambda now: ()) -> Run:
        return Run(Machine(used, holders), monkeypatch)

    return make


def stale(pid: int = 10, share: Optional[int] = 1520) -> Holder:
    return holder(pid, listed={} if share is None else {0: share})


@pytest.mark.case("B8")
def test_what_is_clean_at_first_sight_needs_no_second(begin: Begin) -> None:
    run: Run = begin(lambda now: 3)
    assert run.clean() and run.machine.looked == [0.0]


@pytest.mark.case("A3")
def test_a_stale_holder_is_ended_and_the_memory_settles(begin: Begin) -> None:
    run: Run = begin(lambda now: 3 if run.machine.ended else 1523, lambda now: [stale()])
    assert run.clean() and run.fates() == {10: Fate.TERMINATED}
    assert run.machine.now >= 0.5 and len(run.machine.looked) >= 3


@pytest.mark.case("D12")
def test_who_is_another_at_the_last_moment_gets_no_signal(begin: Begin) -> None:
    run: Run = begin(lambda now: 1523, lambda now: [stale(10), stale(11)])
    run.machine.changed = {10}
    assert not run.clean(deadline=1.0)
    assert run.machine.ended.keys() == {11}


@pytest.mark.case("A8")
def test_who_ignores_sigterm_is_spared_the_rest_when_somebody_alive_comes_in_the_grace(begin: Begin) -> None:
    """The start is refused then, and nobody is ended any more."""

    def there(now: float) -> list[Holder]:
        return [stale(10), *([holder(9, ACTIVE, listed={0: 500})] if now > 3 else [])]

    run: Run = begin(lambda now: 1523, there)
    run.machine.stubborn = {10}
    assert not run.clean() and run.signals == [(10, "SIGTERM")]
    alone: Run = begin(lambda now: 3 if alone.machine.ended else 1523, lambda now: [stale(10)])
    alone.machine.stubborn = {10}
    assert alone.clean() and alone.signals == [(10, "SIGTERM"), (10, "SIGKILL")]


@pytest.mark.case("C4")
def test_who_ignores_sigterm_is_ended_though_the_driver_has_fallen_silent(begin: Begin) -> None:
    """Whose it is can still be told; and what only hangs on a dead driver would be there for ever."""
    run: Run = begin(lambda now: 1523, lambda now: [stale(10)])
    run.machine.stubborn, run.machine.silent_from = {10}, 3.0
    with pytest.raises(DriverError):
        run.clean()
    assert run.signals == [(10, "SIGTERM"), (10, "SIGKILL")]


@pytest.mark.case("B1")
@pytest.mark.parametrize(("deadline", "proved"), [(120.0, True), (30.0, False)])
def test_memory_that_comes_back_late(begin: Begin, deadline: float, proved: bool) -> None:
    run: Run = begin(lambda now: 3 if now > 45 else 1523, lambda now: [stale()])
    assert run.clean(deadline=deadline) is proved
    assert run.machine.now >= 45 if proved else run.machine.now == pytest.approx(30.0, abs=0.2)


def test_while_memory_alone_is_awaited_looks_grow_rare(begin: Begin) -> None:
    """What a minute of it costs us: a handful of walks over /proc, and an answer a second of the GPU that is high."""
    run: Run = begin(lambda now: 1523 if now < 60 else 3, lambda now: [stale()] if not run.machine.ended else [])
    assert run.clean()
    waited = [later - earlier for earlier, later in zip(run.machine.looked, run.machine.looked[1:])]
    assert len(run.machine.looked) < 12 and max(waited) <= loop.LOOK_RARELY + 0.1
    assert 50 < run.machine.watched.count(1) < 80
    # The end is proved on all of them.
    assert run.machine.watched[-2:] == [None, None] and run.machine.now < 61


def test_who_is_waited_for_is_looked_at_often(begin: Begin) -> None:
    leaving = holder(10, owner(of=unit(active="deactivating")), listed={0: 1520})
    run: Run = begin(lambda now: 1523 if now < 31 else 3, lambda now: [leaving] if now < 31 else [])
    assert run.clean() and run.machine.now < 35


@pytest.mark.case("B2")
def test_a_new_holder_starts_the_settling_anew(begin: Begin) -> None:
    """It came while the first one's memory settled, and was ended; what counts is the time since then."""
    came = 0.3

    def there(now: float) -> list[Holder]:
        return [stale(10), *([stale(11, None)._replace(owner=owner(OwnerKind.OWN_PREVIOUS))] if now > came else [])]

    run: Run = begin(lambda now: 3 if 10 in run.machine.ended else 1523, there)
    assert run.clean('[memory]\nsettle = "500 ms"\n')
    assert run.machine.now - run.machine.ended[11] >= 0.5


@pytest.mark.case("A8")
def test_somebody_alive_ends_the_run_at_once_and_nobody_else(begin: Begin) -> None:
    run: Run = begin(lambda now: 1523, lambda now: [holder(9, ACTIVE, listed={0: 500}), stale()])
    assert not run.clean() and run.machine.now == 0.0 and run.machine.ended == {}


def test_somebody_alive_is_waited_for_as_long_as_the_policy_says(begin: Begin) -> None:
    run: Run = begin(
        lambda now: 503 if now < 4 else 3, lambda now: [holder(9, ACTIVE, listed={0: 500})] if now < 4 else []
    )
    assert run.clean(protected_until=10.0) and 4 <= run.machine.now < 10
    never = begin(lambda now: 503, lambda now: [holder(9, ACTIVE, listed={0: 500})])
    assert not never.clean(protected_until=10.0) and never.machine.now == pytest.approx(10.0, abs=0.2)


@pytest.mark.case("A17")
def test_holders_that_come_back_are_given_up(begin: Begin) -> None:
    def another(now: float) -> list[Holder]:
        return [stale(10 + len(run.machine.ended))]

    run: Run = begin(lambda now: 1523, another)
    assert not run.clean() and len(run.machine.ended) == loop.MOST_ROUNDS
    assert run.ledger.story().rounds == loop.MOST_ROUNDS


@pytest.mark.case("B15")
def test_a_suspect_beside_an_ended_holder_has_its_term(begin: Begin) -> None:
    """Its memory is back after the other's term, not with the other's end."""
    run: Run = begin(lambda now: 3 if 11 in run.machine.ended else 1523, lambda now: [stale(10), stale(11, None)])
    assert run.clean('[deadline]\nterm = "11 s"\n')
    assert run.machine.ended[10] == 0.0 and 11.0 <= run.machine.ended[11] < 11.2


@pytest.mark.case("B15")
def test_a_suspect_is_left_alone_where_the_memory_comes_back(begin: Begin) -> None:
    run: Run = begin(lambda now: 3 if now > 8 else 1523, lambda now: [stale(10), stale(11, None)])
    assert run.clean('[deadline]\nterm = "10 s"\n') and list(run.machine.ended) == [10]


def test_what_is_run_before_the_first_signal_is_run_once_for_whom_it_is_about(begin: Begin) -> None:
    """It takes its time, so everything is looked at again before the signal; it has half of the time there is."""
    told: list[tuple[int, list[tuple[int, str]], float]] = []
    run: Run = begin(lambda now: 3 if run.machine.ended else 1523, lambda now: [stale(10), stale(11)])
    run.machine.changed = {11}

    class Hook:
        def due(self, decision: Decision) -> bool:
            return decision.holder.process.pid not in {pid for pid, _, _ in told}

        def __call__(self, decision: Decision, gpus: object, *, until: float) -> None:
            told.append((decision.holder.process.pid, [*run.signals], until))
            run.machine.now += 7.0

    assert not run.clean(deadline=100.0, before_kill=Hook())
    assert told == [(10, [], 50.0)] and run.signals == [(10, "SIGTERM")]
    told.clear()
    came: Run = begin(
        lambda now: 1523, lambda now: [stale(10), *([holder(9, ACTIVE, listed={0: 500})] if now > 3 else [])]
    )
    run = came
    assert not came.clean(before_kill=Hook()) and len(told) == 1 and came.signals == []


def test_the_last_resort_is_taken_when_it_falls_due_and_its_result_is_looked_at(begin: Begin) -> None:
    taken: list[float] = []
    run: Run = begin(lambda now: 3 if taken else 1523)

    class Resort:
        def moment(self, plan: object) -> float:
            return float("inf") if taken else 33.3

        def due(self, plan: object) -> bool:
            return run.machine.now >= self.moment(plan)

        def __call__(self, survey: object, plan: object) -> None:
            taken.append(run.machine.now)

    assert run.clean(last_resort=Resort())
    assert taken == [pytest.approx(33.3, abs=0.2)] and run.machine.now >= taken[0] + 0.5
