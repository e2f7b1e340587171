"""Never the wrong process: whole runs of the program on generated machines, held against what the contract says.

A machine is run as it is, and once more listed the other way round; half of them again with one rule more, and the
rest are checked first, which must touch nothing.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import event, given

from gpuprestart.model import Verdict

from .generated import Machine, whole_machines
from .oracle import Oracle
from .simulated import World


def run(machine: Machine, *, backwards: bool = False) -> tuple[World, Verdict]:
    """The whole program on this machine; what the contract forbids fails the test."""
    oracle = Oracle(machine)
    world = World(machine, oracle, backwards=backwards)
    verdict = world.run()
    oracle.concluded(world, verdict)
    assert not oracle.violations, "\n".join(oracle.violations)
    return world, verdict


def check(machine: Machine) -> None:
    oracle = Oracle(machine)
    world = World(machine, oracle)
    oracle.checked(world, world.run(checking=True))
    assert not oracle.violations, "\n".join(oracle.violations)


def ended_first(world: World) -> set[tuple[int, int]]:
    """Who was signalled in the first round, when nothing had happened yet."""
    return {signal.identity for signal in world.signals if signal.look == 1 and signal.name == "SIGTERM"}


@pytest.fixture(scope="module")
def tally() -> Counter[str]:
    """How many machines of each kind were run."""
    return Counter()


@given(machine=whole_machines())
def test_never_the_wrong_process(tally: Counter[str], machine: Machine) -> None:
    world, verdict = run(machine)
    if not any(actor.hides == "wedged" for actor in world.seen.values()):
        # Of processes that hang whoever asks, the first to be asked decide who is asked no more.
        assert run(machine, backwards=True)[1] == verdict
    if machine.extra is None:
        check(machine)
    else:
        rules = (machine.extra, *machine.terms.rules)
        ruled, _ = run(machine._replace(terms=machine.terms._replace(rules=rules)))
        # With fewer descriptors than holders, one that is refused leaves room for another who would have been next.
        roomy = machine.room > len(machine.actors)
        if machine.extra.action == "refuse" and roomy and all(change.on == "time" for change in machine.changes):
            assert ended_first(ruled) <= ended_first(world)
    for kind in {verdict.outcome.value, *(["somebody is ended"] if world.signals else [])}:
        event(kind)
        tally[kind] += 1
    tally["machines"] += 1


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        ("somebody is ended", 0.2),
        ("protected", 0.1),
        ("cleaned", 0.1),
        ("clean", 0.05),
        ("unattributed", 0.03),
        ("not-freed", 0.01),
        ("denied", 0.02),
        ("unknown", 0.02),
        ("respawning", 0.003),
        ("unkillable", 0.001),
    ],
)
def test_there_are_enough_machines_of_every_kind(tally: Counter[str], kind: str, share: float) -> None:
    """Far below what there are of them, for no two runs try the same machines."""
    if tally["machines"] < 1000:
        pytest.skip("too few machines were run to tell")
    assert tally[kind] >= share * tally["machines"]
