"""What a run writes down: every holder once, what became of each, and never without bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import pytest

from gpuprestart import events, judge
from gpuprestart.faults import Interrupted
from gpuprestart.judge import History
from gpuprestart.ledger import MOST_FOUND, Ledger
from gpuprestart.model import Decision, Fate, Holder, Outcome, OwnerKind, Refusal
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
