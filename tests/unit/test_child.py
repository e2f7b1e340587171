"""The child that may hang or crash: every way in which an answer does not come, and that nothing is left of it."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable

import pytest

from gpuprestart.faults import Died, Interrupted, Silent
from gpuprestart.host.child import Child, Questions
from gpuprestart.model import Wait

from .processes import PATIENCE, wait


def nothing() -> None:
    """What a child does first, where there are no signals to give back."""


def hang(request: Any) -> Any:
    while True:
        signal.pause()


def crash(request: Any) -> None:
    faulthandler.disable()
    os.kill(os.getpid(), signal.SIGSEGV)


def leave(request: Any) -> Any:
    os._exit(3)


def fail(request: Any) -> None:
    raise ValueError("nobody reads this")


@contextmanager
def child(answer: Callable[[Any], Any], waits: Wait = wait) -> Iterator[Child]:
    made = Child(answer=answer, wait=waits, at_fork=nothing)
    try:
        yield made
    finally:
        assert made.end()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_who_reads_what_we_print_does_not_wait_for_a_child_that_hangs() -> None:
    streams = [os.dup(number) for number in (1, 2)]
    reads, writes = os.pipe()
    try:
        for number in (1, 2):
            os.dup2(writes, number)
        os.close(writes)
        try:
            made = Child(answer=hang, wait=wait, at_fork=nothing)
        finally:
            for number, stream in zip((1, 2), streams):
                os.dup2(stream, number)
        try:
            made.send("anything")
            ready, _, _ = select.select([reads], [], [], PATIENCE)
            assert ready and os.read(reads, 1) == b""
            assert alive(made.pid)
        finally:
            assert made.end()
    finally:
        for number in (reads, *streams):
            os.close(number)


def test_answers_come_in_the_order_of_the_requests() -> None:
    with child(lambda request: [request, os.getpid()]) as asked:
        pid = asked.pid
        assert pid != os.getpid()
        asked.send(("init",))
        asked.send({"a": None})
        assert asked.receive(PATIENCE) == [("init",), pid]
        assert asked.receive(PATIENCE) == [{"a": None}, pid]
        assert asked.ask([1.5, "ä", b"\xff", True], PATIENCE) == [[1.5, "ä", b"\xff", True], pid]
    assert not alive(pid)


def test_an_answer_that_was_too_slow_can_still_be_waited_for() -> None:
    gate, release = os.pipe()
    try:
        with child(lambda request: (os.read(gate, 1), request)) as asked:
            asked.send(1)
            with pytest.raises(Silent):
                asked.receive(0.02)
            os.write(release, b"x")
            assert asked.receive(PATIENCE) == (b"x", 1)
    finally:
        os.close(gate)
        os.close(release)


def test_a_large_answer_arrives_whole() -> None:
    with child(lambda size: b"x" * size) as asked:
        assert asked.ask(5_000_000, PATIENCE) == b"x" * 5_000_000


@pytest.mark.case("C4")
def test_no_answer_in_time() -> None:
    began = time.monotonic()
    with child(hang) as asked:
        pid = asked.pid
        with pytest.raises(Silent):
            asked.ask(None, 0.05)
    assert 0.05 <= time.monotonic() - began < PATIENCE
    assert not alive(pid)


@pytest.mark.parametrize(
    ("answer", "words"),
    [(crash, "was ended by SIGSEGV"), (leave, "exited with status 3"), (fail, "exited with status 1")],
)
def test_a_death_is_told_in_words_and_at_once(answer: Callable[[Any], Any], words: str) -> None:
    with child(answer) as asked:
        for _ in range(2):
            with pytest.raises(Died) as caught:
                asked.ask(None, PATIENCE)
            assert str(caught.value) == words
            break


def test_a_request_to_a_dead_child_fails_only_where_the_answer_is_awaited() -> None:
    with child(hang) as asked:
        os.kill(asked.pid, signal.SIGKILL)
        os.waitid(os.P_PID, asked.pid, os.WEXITED | os.WNOWAIT)
        asked.send(("init",))
        with pytest.raises(Died, match="was ended by SIGKILL"):
            asked.receive(PATIENCE)


def test_the_end_is_twice_as_good() -> None:
    with child(lambda request: request) as asked:
        assert asked.end()


def test_a_child_that_sigkill_does_not_end_is_left_and_named() -> None:
    made = Child(answer=hang, wait=lambda descriptors, seconds: set(), at_fork=nothing)
    assert not made.end()
    assert made.pid
    os.waitpid(made.pid, 0)


@pytest.mark.case("D3")
def test_an_interruption_reaches_who_waits_and_the_child_can_still_be_ended() -> None:
    raised: list[bool] = []

    def once(descriptors: Any, seconds: float) -> set[int]:
        if not raised:
            raised.append(True)
            raise Interrupted("SIGTERM")
        return wait(descriptors, seconds)

    with child(hang, once) as asked, pytest.raises(Interrupted):
        asked.ask(None, PATIENCE)


def test_the_child_does_first_what_it_is_told_to() -> None:
    made = Child(answer=lambda request: os.environ.get("FORKED"), wait=wait, at_fork=_mark)
    try:
        assert made.ask(None, PATIENCE) == "yes"
        assert "FORKED" not in os.environ
    finally:
        made.end()


def _mark() -> None:
    os.environ["FORKED"] = "yes"


@pytest.mark.parametrize("children", [1, 2])
def test_the_death_of_the_parent_ends_the_children(children: int) -> None:
    told, tell = os.pipe()
    parent = os.fork()
    if parent == 0:
        made = [Child(answer=lambda request: request, wait=wait, at_fork=nothing) for _ in range(children)]
        os.write(tell, b"".join(each.pid.to_bytes(4, "little") for each in made))
        hang(None)
    pids = os.read(told, 4 * children)
    pidfds = [os.pidfd_open(int.from_bytes(pids[at : at + 4], "little")) for at in range(0, len(pids), 4)]
    try:
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        for pidfd in pidfds:
            assert wait([pidfd], PATIENCE) == {pidfd}
    finally:
        for descriptor in (*pidfds, told, tell):
            os.close(descriptor)


# Questions -----------------------------------------------------------------------------------------------------------


def answers(request: tuple[str, Any]) -> Any:
    verb, argument = request
    if verb == "echo":
        return argument
    return hang(argument) if verb == "hang" else leave(argument)


@contextmanager
def questions(patience: int = 3) -> Iterator[tuple[Questions, list[Child]]]:
    started: list[Child] = []

    def start() -> Child:
        started.append(Child(answer=answers, wait=wait, at_fork=nothing))
        return started[-1]

    asking = Questions(start, patience=patience)
    try:
        yield asking, started
    finally:
        asking.end()


def test_no_child_is_started_before_there_is_a_question() -> None:
    with questions() as (ask, started):
        assert (started, ask.pids) == ([], set())
        assert [ask(("echo", number), PATIENCE) for number in range(3)] == [0, 1, 2]
        assert len(started) == 1 and ask.pids == {started[0].pid}
    assert ask.pids == set()


def test_a_question_that_hangs_or_kills_is_unknown_and_the_next_is_answered() -> None:
    with questions() as (ask, started):
        assert ask(("hang", None), 0.02) is None
        assert ask(("echo", 1), PATIENCE) == 1
        assert ask(("crash", None), PATIENCE) is None
        assert ask(("echo", 2), PATIENCE) == 2
        assert len(started) == 3 and ask.pids == {started[2].pid}


def test_after_so_many_children_nothing_is_asked_any_more() -> None:
    with questions(patience=2) as (ask, started):
        for verb in ("hang", "hang", "echo", "echo"):
            assert ask((verb, 1), 0.02) is None
        assert len(started) == 2 and ask.pids == set()
