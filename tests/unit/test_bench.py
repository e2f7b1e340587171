"""How figures become ratios, and what is said of them; what is measured is not repeated here."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

if sys.version_info < (3, 11):
    pytest.skip("what runs the node is for newer Pythons", allow_module_level=True)

from tests.bench.__main__ import document, growth, table
from tests.bench.scenes import Measure


def measure(scene: str = "clean start", ours: float = 40.0, **more: Any) -> Measure:
    return Measure(scene, "wall", "ms", ours, **more)


@pytest.mark.parametrize(
    ("one", "ratio", "reached"),
    [
        (measure(peer="floor", theirs=30.0, most=1.4), 40 / 30, True),
        (measure(peer="floor", theirs=20.0, most=1.4), 2.0, False),
        (measure(peer="fuser", theirs=160.0, least=4.0), 4.0, True),
        (measure(peer="fuser", theirs=150.0, least=4.0), 3.75, False),
        (measure(peer="nvitop", theirs=80.0), 0.5, None),
        (measure(most=60.0), None, True),
        (measure(most=30.0), None, False),
    ],
)
def test_a_figure_is_judged_by_its_peer_or_by_itself(one: Measure, ratio: float | None, reached: bool | None) -> None:
    assert (one.ratio, one.reached) == (ratio, reached)


def test_growth_is_that_of_the_time_by_that_of_the_crowd() -> None:
    few = measure("holders among 500 processes × 60 files", 100.0, peer="fuser", theirs=200.0)
    many = measure("holders among 4000 processes × 60 files", 400.0, peer="fuser", theirs=3200.0)
    ours, theirs = growth([many, few, few._replace(peer="lsof")])
    assert (ours.ours, ours.reached, theirs.ours) == (0.5, True, 2.0)
    assert growth([few]) == []


def test_what_is_not_reached_is_said() -> None:
    text = table([measure(peer="floor", theirs=30.0, most=1.4), measure(peer="fuser", theirs=40.0, least=4.0)])
    _, first, second = text.splitlines()
    assert first.split()[-4:] == ["1.33", "≤", "1.4", "reached"]
    assert second.endswith("1.00 × as fast  ≥ 4 × faster  NOT REACHED")


def test_a_ratio_that_is_the_other_way_round_says_so() -> None:
    """Without it, 0.65 beside 2.32 would look better, and is not: the one is theirs by ours."""
    few = measure(ours=178.0, peer="fuser", theirs=77.0)
    many = measure(ours=874.0, peer="fuser", theirs=565.0, least=4.0)
    _, first, second = table([few, many]).splitlines()
    assert first.split()[-1] == "2.31" and "0.65 × as fast" in second


def test_the_figures_are_json() -> None:
    found = json.loads(json.dumps(document([measure(peer="floor", theirs=30.0, most=1.4, values=(39.0, 40.0, 41.0))])))
    assert found["measures"][0]["values"] == [39.0, 40.0, 41.0] and found["measures"][0]["reached"]
