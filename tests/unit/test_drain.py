"""Waiting for memory, on a clock that only the wait moves."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from gpuprestart import drain
from gpuprestart.host.library import INTERVAL
from gpuprestart.model import Reading

from .machines import reading, uuid


class Machine:
    """A clock, and a GPU with this much memory in use from these moments on."""

    def __init__(self, *course: tuple[float, int]) -> None:
        self.now = 0.0
        self.course = course
        self.samples: list[float] = []

    def used(self) -> int:
        return [used for since, used in self.course if since <= self.now][-1]

    def watch(self, seconds: float) -> Mapping[str, Reading]:
        assert seconds > 0 or not self.samples
        until, told = self.now + seconds, self.used()
        while self.now < until and self.used() == told:
            self.now = min(until, self.now + INTERVAL)
        self.samples.append(self.now)
        return {uuid(0): reading(used=self.used())}

    def drain(self, settle: float = 0.5, until: float = 120.0) -> bool:
        def low(readings: Mapping[str, Reading]) -> bool:
            memory = readings[uuid(0)].memory
            return memory is not None and memory.used <= 64 << 20

        return drain.drain(watch=self.watch, low=low, clock=lambda: self.now, settle=settle, until=until)


def test_what_is_low_must_stay_low_for_the_settle_time() -> None:
    machine = Machine((0, 3))
    assert machine.drain()
    assert machine.now == 0.5 and len(machine.samples) >= 2


@pytest.mark.parametrize("settle", [0.0, 0.0001])
def test_two_samples_at_least(settle: float) -> None:
    machine = Machine((0, 3))
    assert machine.drain(settle=settle)
    assert len(machine.samples) == 2


@pytest.mark.case("B1")
def test_a_figure_that_does_not_move_says_nothing() -> None:
    machine = Machine((0, 61_440), (45, 3))
    assert machine.drain()
    assert 45.5 <= machine.now <= 45.5 + 2 * INTERVAL


@pytest.mark.case("B1")
def test_the_deadline_is_kept() -> None:
    machine = Machine((0, 61_440))
    assert not machine.drain(until=30.0)
    assert machine.now == pytest.approx(30.0)


@pytest.mark.case("B2")
@pytest.mark.parametrize("back_at", [0.1, 0.3, 0.5])
def test_memory_that_drops_and_comes_back_is_not_low(back_at: float) -> None:
    machine = Machine((0, 3), (back_at, 1523))
    assert not machine.drain(until=5.0)


@pytest.mark.case("B2")
def test_settling_begins_anew_with_every_rise() -> None:
    machine = Machine((0, 3), (0.4, 1523), (2.0, 3))
    # The samples stand a settle time apart while it is low, so make it long enough to be seen.
    assert machine.drain(settle=0.45)
    assert machine.now >= 2.45


def test_a_deadline_in_the_middle_of_settling_proves_nothing() -> None:
    machine = Machine((0, 3))
    assert not machine.drain(settle=0.5, until=0.3)
    assert machine.now == pytest.approx(0.3)


def test_a_deadline_that_has_passed_still_takes_one_sample() -> None:
    machine = Machine((0, 3))
    assert not machine.drain(until=-1.0)
    assert len(machine.samples) == 1
