"""What a run writes down: every holder once, what became of each, and never without bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import pytest

from gpuprestart import events, judge
from gpuprestart.faults import Interrupted
from gpuprestart.judge import History
from gpuprestart.ledger import LEAST_SAMPLES, MOST_FIGURES, MOST_FOUND, MOST_KEPT, Ledger
from gpuprestart.model import MIB, Decision, Fate, Holder, Outcome, OwnerKind, Refusal
from gpuprestart.story import Story

from .machines import holder, owner, policy, reading, survey, unit, uuid


class Book:
    """A ledger on a clock that stands until it is moved, and the records that it wrote."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.records: list[events.Record] = []
        self.ledger = Ledger(
            Story(run="0123", time=0.0, unit="sglang.service"),
            write=self.records.append,
            clock=lambda: self.now,
            wchan=lambda pid: f"wchan_{pid}",
            still_there=lambda process: process.pid in self.lingering,
        )
        #: PIDs that are alive although they hold nothing any more.
        self.lingering: set[int] = set()

    def look(self, *holders: Holder, used: Sequence[Optional[int]] = (1523,)) -> None:
        machine = survey(*holders, used=used)
        self.ledger.planned(machine, judge.plan(policy(), machine, History()))

    def told(self, event: str) -> list[events.Record]:
        return [record for record in self.records if record.fields["GPUPRESTART_EVENT"] == event]

    def fates(self) -> dict[int, Fate]:
        return {pid: fate for (pid, _), fate in self.ledger.story().fates.items()}


@pytest.fixture
def book() -> Book:
    return Book()


def decision(book: Book, pid: int = 4711) -> Decision:
    return next(each for each in book.ledger.story().seen if each.holder.process.pid == pid)


def test_a_holder_is_recorded_when_it_is_found_and_when_it_is_judged_anew(book: Book) -> None:
    stale = holder(listed={0: 1520})
    book.look(stale)
    book.look(stale)
    assert len(book.told("holder-found")) == 1
    book.look(stale._replace(owner=owner(of=unit(active="active"))))
    assert [record.fields["GPUPRESTART_ACTION"] for record in book.told("holder-found")] == ["kill", "refuse"]


def test_who_holds_nothing_that_counts_is_not_recorded(book: Book) -> None:
    book.look(holder(), used=(3,))
    assert book.told("holder-found") == [] and book.ledger.dirty is False
    assert [each.holder.process.pid for each in book.ledger.story().seen] == [4711]


@pytest.mark.case("A17")
def test_records_of_holders_are_bounded(book: Book) -> None:
    many = [holder(pid=pid, listed={0: 10}) for pid in range(100, 100 + MOST_FOUND + 36)]
    book.look(*many)
    assert len(book.told("holder-found")) == MOST_FOUND
    assert len(book.ledger.story().seen) == MOST_FOUND + 36


def test_everybody_who_went_by_themselves_has_a_fate(book: Book) -> None:
    """Also those beyond the bound on records: whose memory may be on its way back hangs on it."""
    many = [holder(pid=pid, listed={0: 10}) for pid in range(100, 100 + MOST_FOUND + 36)]
    book.look(*many)
    book.look()
    assert set(book.fates().values()) == {Fate.EXITED} and len(book.fates()) == len(many)


def test_who_died_of_sigkill_after_the_last_look_has_not_survived(book: Book) -> None:
    book.look(holder(listed={0: 1520}))
    book.ledger.signalled(decision(book), "SIGKILL")
    assert book.ledger.story().fates == {(4711, 90_000): Fate.KILLED}
    assert book.told("holder-survived") == []


def test_who_only_let_go_is_not_gone(book: Book) -> None:
    book.lingering = {4711}
    book.look(holder(listed={0: 10}))
    book.look()
    assert book.fates() == {} and book.told("holder-gone") == []
    book.lingering = set()
    book.look()
    assert book.fates() == {4711: Fate.EXITED}


def test_dirty_once_is_dirty_for_the_run(book: Book) -> None:
    book.look(used=(3,))
    assert not book.ledger.dirty
    book.look()
    book.look(used=(3,))
    assert book.ledger.dirty


def test_what_was_done_is_told_at_once_with_the_time_it_took(book: Book) -> None:
    book.look(holder(listed={0: 1520}))
    judged = decision(book)
    book.ledger.signalled(judged, "SIGTERM")
    book.now += 2.5
    book.ledger.signalled(judged, "SIGKILL")
    book.now += 0.5
    book.ledger.ended(judged, Fate.KILLED)
    assert [record.fields["GPUPRESTART_SIGNAL"] for record in book.told("holder-signalled")] == ["SIGTERM", "SIGKILL"]
    assert "after 3.00 s" in book.told("holder-gone")[0].message
    book.look(used=(3,))
    assert book.fates() == {4711: Fate.KILLED}
    assert len(book.told("holder-gone")) == 1


@pytest.mark.case("B5")
def test_who_was_killed_and_is_not_gone_has_survived(book: Book) -> None:
    book.look(holder(listed={0: 1520}))
    book.ledger.signalled(decision(book), "SIGTERM")
    assert book.fates() == {}
    book.ledger.signalled(decision(book), "SIGKILL")
    book.lingering = {4711}
    story = book.ledger.story()
    assert story.fates == {(4711, 90_000): Fate.SURVIVED}
    assert story.survivors == {(4711, 90_000): "wchan_4711"}
    assert len(book.told("holder-survived")) == 1


@pytest.mark.parametrize(("listed", "attributed"), [({0: 1520}, True), ({}, False)])
@pytest.mark.case("B15")
def test_whether_somebody_with_attributed_memory_was_ended(
    book: Book, listed: dict[int, Optional[int]], attributed: bool
) -> None:
    book.look(holder(listed=listed))
    judged = decision(book)
    assert not book.ledger.ended_attributed
    book.ledger.signalled(judged, "SIGTERM")
    assert not book.ledger.ended_attributed
    book.ledger.ended(judged, Fate.TERMINATED)
    assert book.ledger.ended_attributed is attributed


@pytest.mark.parametrize(("sent", "fate"), [("SIGTERM", Fate.TERMINATED), ("SIGKILL", Fate.KILLED)])
def test_who_goes_late_by_what_it_was_sent_was_ended_by_us(book: Book, sent: str, fate: Fate) -> None:
    """Its owner came up again in the grace, so it was not waited for."""
    book.look(holder(listed={0: 1520}))
    book.ledger.signalled(decision(book), sent)
    book.look()
    assert book.fates() == {4711: fate} and book.ledger.ended_attributed


def test_who_went_by_themselves_was_not_ended_by_us(book: Book) -> None:
    book.look(holder(listed={0: 1520}))
    book.look()
    assert not book.ledger.ended_attributed
    assert book.fates() == {4711: Fate.EXITED}


@pytest.mark.case("D9")
def test_a_refused_signal_is_told(book: Book) -> None:
    book.look(holder(listed={0: 1520}))
    book.ledger.refused(decision(book), "SIGTERM")
    assert book.ledger.denied and [each.holder.process.pid for each in book.ledger.story().denied] == [4711]
    assert "refuses SIGTERM to python3[4711]" in book.records[-1].message


def test_memory_that_is_back_is_told_once(book: Book) -> None:
    book.look(holder(listed={0: 1520}), used=(1523, 3))
    for used in (1523, 3, 3):
        book.now += 1
        book.ledger.sampled({uuid(0): reading(0, used), uuid(1): reading(1, 3)}, policy())
    assert len(book.told("memory-freed")) == 1
    assert book.told("memory-freed")[0].fields["GPU_UUID"] == uuid(0)


def test_phases_add_up_also_when_they_fail(book: Book) -> None:
    for seconds in (1.0, 2.0):
        with pytest.raises(Interrupted), book.ledger.phase("drain"):
            book.now += seconds
            raise Interrupted("SIGTERM")
    story = book.ledger.story(interrupted=Interrupted("SIGTERM"))
    assert (story.phases, story.duration, story.interrupted) == ({"drain": 3.0}, 3.0, "SIGTERM")


def test_the_story_has_what_was_noted_and_how_it_ended(book: Book) -> None:
    book.ledger.note(driver="570.1", rounds=2)
    refusal = Refusal(Outcome.CONFIG, "wrong")
    story = book.ledger.story(refusal=refusal)
    assert (story.driver, story.rounds, story.refusal, story.proved) == ("570.1", 2, refusal, False)


def test_a_holder_of_our_own_unit_is_dirt_even_on_clean_gpus(book: Book) -> None:
    book.look(holder(of=owner(OwnerKind.OWN_PREVIOUS), opened=()), used=(3,))
    assert book.ledger.dirty


# The timeline --------------------------------------------------------------------------------------------------------


def sample(book: Book, *used: Optional[int], after: float = 0.1) -> None:
    """The next sample of GPUs that have been looked at before, in MiB."""
    book.now += after
    book.ledger.sampled({uuid(index): reading(index, amount) for index, amount in enumerate(used)}, policy())


def course(book: Book, gpu: int = 0) -> list[tuple[float, Optional[int]]]:
    """What the timeline tells of one GPU, in seconds of the run and MiB."""
    memory = book.ledger.story().timeline.memory
    return [(round(at, 3), None if used[gpu] is None else used[gpu] // MIB) for at, used in memory]  # type: ignore[operator]


def test_memory_is_told_as_it_changes_and_a_level_stretch_by_its_ends(book: Book) -> None:
    book.look(holder(listed={0: 1520}))
    for used in (1523, 1523, 1523, 1523, 800, 800, 800, 3):
        sample(book, used)
    assert course(book) == [(0.0, 1523), (0.4, 1523), (0.5, 800), (0.7, 800), (0.8, 3)]


def test_a_look_is_a_sample_too(book: Book) -> None:
    book.look(holder(listed={0: 1520}))
    book.now += 1.5
    book.look(used=(3,))
    assert course(book) == [(0.0, 1523), (1.5, 3)]


def test_less_than_a_mebibyte_is_no_news_however_often_it_comes(book: Book) -> None:
    """It is held against where the stretch began: what creeps away is told once it has got somewhere."""
    book.look(used=(100,))
    level = reading(0, 100)
    assert level.memory is not None
    for step in range(1, 25):
        book.now += 0.1
        crept = level.memory._replace(used=level.memory.used + step * MIB // 8)
        book.ledger.sampled({uuid(0): level._replace(memory=crept)}, policy())
    told = [amount for _, amount in course(book)]
    assert set(told) == {100, 101, 102, 103} and len(told) <= 7


def test_what_could_not_be_read_is_told_as_unknown(book: Book) -> None:
    book.look(used=(1523, 3))
    sample(book, None, 3)
    sample(book, None, 3)
    sample(book, 1523, 3)
    assert course(book) == [(0.0, 1523), (0.1, None), (0.2, None), (0.3, 1523)]
    assert {amount for _, amount in course(book, 1)} == {3}


def test_one_gpu_s_news_is_told_with_all_others(book: Book) -> None:
    book.look(used=(1523, 700))
    sample(book, 1523, 700)
    sample(book, 1523, 3)
    assert course(book, 0) == [(0.0, 1523), (0.1, 1523), (0.2, 1523)]
    assert course(book, 1) == [(0.0, 700), (0.1, 700), (0.2, 3)]


@pytest.mark.parametrize(("gpus", "most"), [(1, MOST_KEPT), (32, MOST_FIGURES // 32), (112, LEAST_SAMPLES)])
def test_samples_are_bounded_however_long_it_takes_and_however_many_gpus(book: Book, gpus: int, most: int) -> None:
    book.look(used=(40_000,) * gpus)
    for number in range(5 * most):
        sample(book, *(40_000 - 10 * number,) * gpus)
        assert len(book.ledger.story().timeline.memory) <= most
    told = course(book)
    assert len(told) == most
    assert told[0] == (0.0, 40_000) and told[-1] == (round(0.1 * 5 * most, 3), 40_000 - 10 * (5 * most - 1))


def test_what_happened_early_is_not_forgotten_for_noise_that_comes_after(book: Book) -> None:
    """Memory is back after three seconds; then somebody's small comings and goings fill two minutes."""
    book.look(used=(120_000,))
    for _ in range(30):
        sample(book, 120_000)
    sample(book, 61_000)
    for number in range(1200):
        sample(book, 3 + number % 5 * 2)
    told = course(book)
    assert len(told) == MOST_KEPT
    assert [each for each in told if each[1] is not None and each[1] > 100] == [(0.0, 120_000), (3.1, 61_000)]
    assert told[2][0] == 3.2


def test_the_highest_that_was_seen_stays(book: Book) -> None:
    book.look(used=(1000,))
    for number in range(20 * MOST_KEPT):
        sample(book, 90_000 if number == 77 else 1000 + number % 7)
    assert max(amount for _, amount in course(book) if amount is not None) == 90_000


def test_phases_are_told_by_their_stretches(book: Book) -> None:
    book.now += 0.5
    for name, seconds in (("survey", 0.1), ("evict", 1.0), ("survey", 0.2)):
        with book.ledger.phase(name):
            book.now += seconds
    told = [(name, round(began, 3), round(ended, 3)) for name, began, ended in book.ledger.story().timeline.phases]
    assert told == [("survey", 0.5, 0.6), ("evict", 0.6, 1.6), ("survey", 1.6, 1.8)]


def test_stretches_are_bounded_and_those_become_one_that_are_closest(book: Book) -> None:
    """Nothing is lost of a phase that comes late, and a long pause between two stretches stays a pause."""
    with book.ledger.phase("measure"):
        book.now += 1
    for number in range(2 * MOST_KEPT):
        book.now += 30 if number == 50 else 0.5
        with book.ledger.phase("survey"):
            book.now += 0.1
    with book.ledger.phase("reset"):
        book.now += 2
    told = book.ledger.story().timeline.phases
    assert len(told) == MOST_KEPT
    assert told[0] == ("measure", 0.0, 1.0)
    assert told[-1][0] == "reset" and told[-1][2] - told[-1][1] == pytest.approx(2)
    surveys = [(began, ended) for name, began, ended in told if name == "survey"]
    assert max(later[0] - before[1] for before, later in zip(surveys, surveys[1:])) == pytest.approx(30)
    assert book.ledger.story().phases["survey"] == pytest.approx(0.1 * 2 * MOST_KEPT)


def test_signals_are_told_and_bounded_by_their_kind(book: Book) -> None:
    """Two hundred SIGTERM do not hide that SIGKILL came after them."""
    many = [holder(pid=pid, listed={0: 10}) for pid in range(100, 300)]
    book.look(*many)
    judged = {each.holder.process.pid: each for each in book.ledger.story().seen}
    for pid in range(100, 300):
        book.ledger.signalled(judged[pid], "SIGTERM")
    book.now += 10
    book.ledger.signalled(judged[107], "SIGKILL")
    told = book.ledger.story().timeline.signals
    assert told[0] == (0.0, 100, "SIGTERM") and told[-1] == (10.0, 107, "SIGKILL")
    assert [name for _, _, name in told].count("SIGTERM") == MOST_KEPT
