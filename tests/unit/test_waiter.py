"""Waiting, and the signals that cut it short: once, at once, and never in the middle of a step."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from gpuprestart.faults import Interrupted
from gpuprestart.host.waiter import ENDING, Waiter

from .processes import PATIENCE

AWAIT_SLEEP = "until grep -q '^State:.S' /proc/$PPID/status; do :; done\n"
#: Sends a signal to its parent as soon as that sleeps.
SENDER = AWAIT_SLEEP + "kill -TERM $PPID\n"


@pytest.fixture
def waiter() -> Iterator[Waiter]:
    before = {number: signal.getsignal(number) for number in ENDING}
    # Who runs the tests may have been told to ignore it (nohup).
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    made = Waiter()
    yield made
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        made.forget()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_those_that_are_ready_are_told(waiter: Waiter) -> None:
    (quiet, other), (read, write) = os.pipe(), os.pipe()
    try:
        assert waiter([quiet, read], 0) == set()
        os.write(write, b"x")
        assert waiter([quiet, read], PATIENCE) == {read}
        os.close(write)
        os.read(read, 1)
        # The end of a file is something to read as well.
        assert waiter([quiet, read], PATIENCE) == {read}
    finally:
        for descriptor in (quiet, other, read):
            os.close(descriptor)


def test_the_time_is_waited_out_and_never_less(waiter: Waiter) -> None:
    began = time.monotonic()
    assert waiter((), 0.0214) == set()
    assert 0.0214 <= time.monotonic() - began < PATIENCE
    assert waiter((), -1.0) == set()


@pytest.mark.parametrize("number", ENDING)
@pytest.mark.case("D3")
def test_a_signal_that_came_before_the_wait_is_not_slept_through(waiter: Waiter, number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    began = time.monotonic()
    with pytest.raises(Interrupted) as caught:
        waiter((), PATIENCE)
    assert caught.value.signal_name == number.name
    assert time.monotonic() - began < PATIENCE / 2


@pytest.mark.case("D3")
def test_a_signal_ends_the_wait_at_once(waiter: Waiter) -> None:
    began = time.monotonic()
    with subprocess.Popen(["/bin/sh", "-c", SENDER]), pytest.raises(Interrupted):
        waiter((), PATIENCE)
    assert time.monotonic() - began < PATIENCE / 2


def test_only_the_first_signal_is_raised(waiter: Waiter) -> None:
    """What comes after it would interrupt ending in good order."""
    for number in ENDING:
        os.kill(os.getpid(), number)
    with pytest.raises(Interrupted):
        waiter((), 0)
    os.kill(os.getpid(), signal.SIGTERM)
    read, write = os.pipe()
    try:
        os.write(write, b"x")
        assert waiter([read], PATIENCE) == {read}
        assert waiter((), 0) == set()
    finally:
        os.close(read)
        os.close(write)


@pytest.mark.case("D3")
def test_who_is_deaf_waits_as_long_as_ever(waiter: Waiter) -> None:
    """A child that is being ended would else be taken for one that hangs, and be left behind."""
    waiter.deafen()
    read, write = os.pipe()
    try:
        with subprocess.Popen(["/bin/sh", "-c", f"{SENDER}sleep 0.2\n{AWAIT_SLEEP}echo"], stdout=write):
            assert waiter([read], PATIENCE) == {read}
        os.kill(os.getpid(), signal.SIGTERM)
        began = time.monotonic()
        assert waiter((), 0.05) == set() and time.monotonic() - began >= 0.05
    finally:
        os.close(read)
        os.close(write)


def test_a_signal_changes_nothing_between_two_waits(waiter: Waiter) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    assert sum(range(1000)) == 499_500
    with pytest.raises(Interrupted):
        waiter((), 0)


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_that_whoever_started_us_ignores(number: signal.Signals) -> None:
    """Under nohup(1) a terminal that is closed ends nothing; what else a shell ignores for its jobs is meant for us."""
    before = {each: signal.getsignal(each) for each in ENDING}
    try:
        signal.signal(number, signal.SIG_IGN)
        waiter = Waiter()
        os.kill(os.getpid(), number)
        if number is signal.SIGHUP:
            assert waiter((), 0) == set()
        else:
            with pytest.raises(Interrupted):
                waiter((), 0)
        waiter.forget()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_a_child_gets_its_signals_back(waiter: Waiter) -> None:
    """The others go to a whole group or unit; the child leaves what they mean to its parent."""
    descriptors = len(os.listdir("/proc/self/fd"))
    waiter.forget()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert {signal.getsignal(number) for number in ENDING if number is not signal.SIGTERM} == {signal.SIG_IGN}
    assert signal.set_wakeup_fd(-1) == -1
    assert len(os.listdir("/proc/self/fd")) == descriptors - 2
