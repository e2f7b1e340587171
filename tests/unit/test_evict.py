"""Signals, sent to real processes: who gets which, when, and who never does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Sequence
from typing import Optional

import pytest

from gpuprestart import evict
from gpuprestart.faults import Interrupted
from gpuprestart.host import pidfd, procfs
from gpuprestart.model import Decision, Fate, Wait

from . import machines
from .processes import PATIENCE, await_death, is_running, stop, wait, waiting

TERM, KILL, CONT = "SIGTERM", "SIGKILL", "SIGCONT"


class Witness:
    """What was told, in order: (PID, word)."""

    def __init__(self) -> None:
        self.told: list[tuple[int, str]] = []

    def signalled(self, decision: Decision, name: str) -> None:
        self.told.append((decision.holder.process.pid, name))

    def refused(self, decision: Decision, name: str) -> None:
        self.told.append((decision.holder.process.pid, f"refused {name}"))

    def ended(self, decision: Decision, fate: Fate) -> None:
        self.told.append((decision.holder.process.pid, fate.value))


def stale(pid: int) -> Decision:
    """A decision on a process as it is now."""
    process = procfs.read(pid)
    assert process is not None
    return machines.decision(machines.holder()._replace(process=process))


def as_they_are(decisions: Sequence[Decision]) -> list[Decision]:
    """Still stale are all that are still the same process."""
    now = [(each, procfs.read(each.holder.process.pid)) for each in decisions]
    return [
        each._replace(holder=each.holder._replace(process=process))
        for each, process in now
        if process is not None and process.identity == each.holder.process.identity
    ]


def run(
    *decisions: Decision,
    still_stale: evict.StillStale = as_they_are,
    still_due: evict.StillDue = lambda decisions: decisions,
    grace: float = PATIENCE,
    within: float = 2 * PATIENCE,
    waits: Wait = wait,
    witness: Optional[Witness] = None,
) -> list[tuple[int, str]]:
    witness = witness or Witness()
    evict.evict(
        decisions,
        still_stale=still_stale,
        still_due=still_due,
        witness=witness,
        wait=waits,
        clock=time.monotonic,
        grace=grace,
        deadline=time.monotonic() + within,
    )
    return witness.told


def test_who_obeys_sigterm_gets_nothing_else() -> None:
    with waiting() as one, waiting() as other:
        told = run(stale(one.pid), stale(other.pid))
        assert told[:2] == [(one.pid, TERM), (other.pid, TERM)]
        assert sorted(told[2:]) == sorted([(one.pid, "terminated"), (other.pid, "terminated")])
        assert (one.wait(), other.wait()) == (-signal.SIGTERM, -signal.SIGTERM)


@pytest.mark.case("A15")
def test_who_ignores_sigterm_is_killed_after_the_grace_and_not_before() -> None:
    began = time.monotonic()
    with waiting(ignoring=[signal.SIGTERM]) as child:
        assert run(stale(child.pid), grace=0.1) == [(child.pid, TERM), (child.pid, KILL), (child.pid, "killed")]
        assert child.wait() == -signal.SIGKILL
    assert time.monotonic() - began >= 0.1


@pytest.mark.case("A16")
def test_only_those_that_are_left_after_the_grace_are_killed() -> None:
    with waiting() as obeys, waiting(ignoring=[signal.SIGTERM]) as ignores:
        told = run(stale(obeys.pid), stale(ignores.pid), grace=0.1)
        assert [word for pid, word in told if pid == obeys.pid] == [TERM, "terminated"]
        assert [word for pid, word in told if pid == ignores.pid] == [TERM, KILL, "killed"]


@pytest.mark.case("A15")
def test_a_stopped_holder_is_continued_and_no_grace_is_wasted() -> None:
    with waiting() as child:
        stop(child.pid)
        assert run(stale(child.pid)) == [(child.pid, TERM), (child.pid, CONT), (child.pid, "terminated")]


def test_who_is_no_longer_stale_is_never_signalled() -> None:
    with waiting() as child:
        assert run(stale(child.pid), still_stale=lambda decisions: []) == []
        assert is_running(child)


@pytest.mark.case("D4")
@pytest.mark.case("D12")
def test_who_is_replaced_or_found_an_owner_in_the_grace_is_not_killed() -> None:
    looks = iter([True])
    with waiting(ignoring=[signal.SIGTERM]) as child:

        def once(decisions: Sequence[Decision]) -> Sequence[Decision]:
            return decisions if next(looks, False) else []

        assert run(stale(child.pid), still_stale=once, grace=0.01) == [(child.pid, TERM)]
        assert is_running(child)


@pytest.mark.case("D4")
def test_the_pidfd_is_opened_before_the_holder_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that whoever is verified is whoever the descriptor holds."""
    order: list[str] = []
    opening = pidfd.open_pidfd

    def opens(pid: int) -> Optional[int]:
        order.append("open")
        return opening(pid)

    def looks(decisions: Sequence[Decision]) -> Sequence[Decision]:
        order.append("look")
        return decisions

    monkeypatch.setattr(pidfd, "open_pidfd", opens)
    with waiting() as child:
        run(stale(child.pid), still_stale=looks)
    assert order == ["open", "look"]


@pytest.mark.case("D4")
def test_a_reused_pid_is_not_signalled() -> None:
    """The number is in use, by a process that began at another time than the one that was judged."""
    with waiting() as child:
        judged = stale(child.pid)
        earlier = judged.holder.process._replace(started=judged.holder.process.started - 1)
        assert run(judged._replace(holder=judged.holder._replace(process=earlier))) == []
        assert is_running(child)


@pytest.mark.case("D9")
def test_a_refused_signal_is_told_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(descriptor: int, number: signal.Signals) -> bool:
        raise PermissionError

    monkeypatch.setattr(pidfd, "send", refuses)
    with waiting() as child:
        assert run(stale(child.pid), grace=0.01) == [(child.pid, "refused SIGTERM")]
        assert is_running(child)


def test_who_is_gone_already_is_told_so() -> None:
    with waiting() as child:
        judged = stale(child.pid)
        child.kill()
    assert run(judged) == [(child.pid, "gone")]


@pytest.mark.case("B7")
def test_a_zombie_is_not_signalled() -> None:
    with waiting() as child:
        judged = stale(child.pid)
        child.kill()
        await_death(child.pid)
        assert KILL not in [word for _, word in run(judged)]


def test_who_dies_between_the_look_and_the_signal_was_ended_by_nobody() -> None:
    with waiting() as child:

        def dies(decisions: Sequence[Decision]) -> Sequence[Decision]:
            child.kill()
            child.wait()
            return decisions

        assert run(stale(child.pid), still_stale=dies) == [(child.pid, "gone")]


def test_the_deadline_cuts_the_grace_and_then_nobody_is_killed() -> None:
    with waiting(ignoring=[signal.SIGTERM]) as child:
        assert run(stale(child.pid), grace=PATIENCE, within=0.05) == [(child.pid, TERM)]
        assert is_running(child)


@pytest.mark.case("B5")
def test_a_survivor_is_neither_told_as_ended_nor_waited_for_beyond_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pidfd, "send", lambda descriptor, number: True)
    with waiting() as child:
        assert run(stale(child.pid), grace=0.02, within=0.05) == [(child.pid, TERM), (child.pid, KILL)]
        assert is_running(child)


@pytest.mark.case("D3")
@pytest.mark.parametrize("nth", [1, 2])
def test_an_interruption_leaves_no_descriptor_and_no_doubt_about_what_was_done(nth: int) -> None:
    """That no pidfd is left open is held by the fixture of all tests here."""
    calls = []

    def interrupted(descriptors: Iterable[int], seconds: float) -> set[int]:
        calls.append(seconds)
        if len(calls) == nth:
            raise Interrupted(TERM)
        return set()

    witness = Witness()
    with waiting(ignoring=[signal.SIGTERM]) as child:
        with pytest.raises(Interrupted):
            run(stale(child.pid), grace=0, waits=interrupted, witness=witness)
        assert witness.told == [(child.pid, TERM), (child.pid, KILL)][:nth]


def test_nobody_is_asked_about_when_nobody_is_to_be_ended() -> None:
    asked: list[int] = []

    def looks(decisions: Sequence[Decision]) -> Sequence[Decision]:
        asked.append(len(decisions))
        return decisions

    assert run(still_stale=looks) == []
    assert sum(asked) == 0


def test_a_pidfd_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with waiting() as child:
        descriptor = pidfd.open_pidfd(child.pid)
        assert descriptor is not None
        child.kill()
    assert pidfd.send(descriptor, signal.SIGTERM) is False
    pidfd.close(descriptor)
    assert pidfd.open_pidfd(child.pid) is None

    def exiting(pid: int) -> int:
        raise OSError(22, "Invalid argument")

    def forbidden(pid: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", exiting)
    assert pidfd.open_pidfd(1) is None
    monkeypatch.setattr(os, "pidfd_open", forbidden)
    with pytest.raises(PermissionError):
        pidfd.open_pidfd(1)
