"""The only sender of signals: pidfd, verify, SIGTERM, grace, SIGKILL.

Whom to end is decided by the judge and asked of it again before every signal, because between two looks a process may
have been replaced, moved to another cgroup, or found an owner. What happens is told to a witness as it happens, so that
nothing is lost when the run is cut short.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Callable, NamedTuple, Protocol

from .host import pidfd
from .model import Decision, Fate, Wait

#: Which of these are still to be ended, each as it is now, after another look at the process and its owner. What is
#: looked at last is looked at as each is taken, which is right before its signal.
StillStale = Callable[[Sequence[Decision]], Iterable[Decision]]

#: Which of these are still to be ended after the grace, by another look at everything: somebody may have come in that
#: time for whom the start is refused, and then nobody is ended any more.
StillDue = Callable[[Sequence[Decision]], Sequence[Decision]]

#: Runs what is to be run before the first signal to a holder, once its pidfd is open; whether that took any time.
Prepare = Callable[[Decision], bool]


class Witness(Protocol):
    """Is told what happens to holders, at once."""

    def signalled(self, decision: Decision, name: str) -> None: ...

    def refused(self, decision: Decision, name: str) -> None: ...

    def ended(self, decision: Decision, fate: Fate) -> None: ...


class Target(NamedTuple):
    decision: Decision
    pidfd: int


def evict(
    decisions: Sequence[Decision],
    *,
    still_stale: StillStale,
    still_due: StillDue,
    prepare: Prepare = lambda decision: False,
    witness: Witness,
    wait: Wait,
    clock: Callable[[], float],
    grace: float,
    deadline: float,
) -> None:
    """End these holders: SIGTERM, ``grace`` seconds, SIGKILL, and wait until they are dead or the deadline has come.

    A holder whose whole thread group is dead is told to the witness as ended; one that is told neither as ended nor as
    refused is still there, or was not touched because it is no longer the holder that was judged.
    """
    with _opened(decisions, witness) as targets:
        # All of them are prepared, so that none waits for the programs of others once it is verified.
        if any([prepare(target.decision) for target in targets]):
            targets = _due(targets, still_due)
        told = _signal(targets, signal.SIGTERM, still_stale, witness)
        left = _await(told, min(clock() + grace, deadline), Fate.TERMINATED, witness, wait, clock)
        if left and clock() < deadline:
            told = _signal(_due(left, still_due), signal.SIGKILL, still_stale, witness)
            _await(told, deadline, Fate.KILLED, witness, wait, clock)


@contextmanager
def _opened(decisions: Sequence[Decision], witness: Witness) -> Iterator[list[Target]]:
    """A pidfd for each. Opening comes before any other check, so that all checks are about whom the pidfd holds."""
    with ExitStack() as stack:
        targets: list[Target] = []
        # Where there are more than descriptors, the rest are found again in the next round.
        for decision in decisions[: pidfd.room()]:
            descriptor = pidfd.open_pidfd(decision.holder.process.pid)
            if descriptor is None:
                witness.ended(decision, Fate.GONE)
                continue
            stack.callback(pidfd.close, descriptor)
            targets.append(Target(decision=decision, pidfd=descriptor))
        yield targets


def _signal(
    targets: Sequence[Target], number: signal.Signals, still_stale: StillStale, witness: Witness
) -> list[Target]:
    """Send a signal to those that are still stale, and return those that got it."""
    descriptors = {target.decision.holder.process.identity: target.pidfd for target in targets}
    told = []
    for decision in still_stale([target.decision for target in targets]):
        target = Target(decision=decision, pidfd=descriptors[decision.holder.process.identity])
        if _send(target, number, witness):
            told.append(target)
            # A stopped process keeps SIGTERM pending until it is continued; without this the whole grace is wasted.
            if number is signal.SIGTERM and decision.holder.process.state == "T":
                _send(target, signal.SIGCONT, witness)
    return told


def _due(targets: Sequence[Target], still_due: StillDue) -> list[Target]:
    due = {each.holder.process.identity for each in still_due([target.decision for target in targets])}
    return [target for target in targets if target.decision.holder.process.identity in due]


def _send(target: Target, number: signal.Signals, witness: Witness) -> bool:
    """Whether it is still to be waited for."""
    try:
        delivered = pidfd.send(target.pidfd, number)
    except PermissionError:
        witness.refused(target.decision, number.name)
        return False
    if delivered:
        witness.signalled(target.decision, number.name)
    elif number is not signal.SIGCONT:
        # It went in the meantime: by itself, unless it had been sent SIGTERM before.
        witness.ended(target.decision, Fate.GONE if number is signal.SIGTERM else Fate.TERMINATED)
        return False
    return True


def _await(
    targets: Collection[Target],
    until: float,
    fate: Fate,
    witness: Witness,
    wait: Wait,
    clock: Callable[[], float],
) -> list[Target]:
    """Wait for deaths; returns those alive at ``until``. A pidfd is readable once the whole thread group is dead."""
    alive = {target.pidfd: target for target in targets}
    while alive:
        dead = wait(alive, max(0.0, until - clock()))
        for descriptor in dead:
            witness.ended(alive.pop(descriptor).decision, fate)
        if not dead and clock() >= until:
            break
    return list(alive.values())
