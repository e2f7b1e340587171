"""The failure modes in docs/failure-modes.md: no empty cell, outcomes with their statuses, tests that are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from gpuprestart.commandline import EX_USAGE
from gpuprestart.model import EX_NOINPUT, EXIT_STATUS, Outcome

REPOSITORY = Path(__file__).parents[2]
TEXT = (REPOSITORY / "docs" / "failure-modes.md").read_text(encoding="utf-8")

HEAD = "| what happens | outcome | exit | what to do | tests |"
#: The cells of every row below the head of a table.
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in TEXT.splitlines()
    if line.startswith("| ") and line != HEAD
]
#: What is told elsewhere, because an operator has asked for it.
ELSEWHERE = {Outcome.BYPASSED}


@cache
def _tests(path: str) -> frozenset[str]:
    tree = ast.parse((REPOSITORY / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_every_row_has_all_its_cells() -> None:
    assert len(ROWS) >= 60
    assert [row for row in ROWS if len(row) != 5 or not all(row)] == []
    assert len({row[0] for row in ROWS}) == len(ROWS)
    assert TEXT.count(f"{HEAD}\n|---|---|---|---|---|\n| ") == TEXT.count("\n## ")


def test_every_outcome_is_there_with_its_status() -> None:
    told = {(row[1], row[2]) for row in ROWS}
    assert {(f"`{each.value}`", str(EXIT_STATUS[each])) for each in set(Outcome) - ELSEWHERE} <= told
    # Beside them there is what ends without a verdict: by a signal, or by a command line that is wrong.
    others = told - {(f"`{each.value}`", str(EXIT_STATUS[each])) for each in Outcome}
    about_files = ("`precondition`", str(EX_NOINPUT))
    assert others == {("no verdict", "signal"), ("no verdict", str(EX_USAGE)), about_files}


def test_an_outcome_stands_below_the_heading_that_names_it() -> None:
    for part in TEXT.split("\n## ")[1:]:
        heading, _, rest = part.partition("\n")
        named = set(re.findall(r"`[a-z-]+`|no verdict", heading))
        assert {row[1] for row in ROWS if f"| {row[0]} |" in rest} == named, heading


def test_every_row_has_a_test_and_every_test_is_there() -> None:
    one = r"`tests/\w+/test_\w+\.py::test_\w+`"
    assert [row for row in ROWS if re.fullmatch(rf"{one}(<br>{one})*", row[4]) is None] == []
    named = [test.partition("::") for test in sorted(set(re.findall(r"`(tests/[^`]+)`", TEXT)))]
    assert [f"{path}::{name}" for path, _, name in named if name not in _tests(path)] == []


def test_who_is_woken_is_told_what_to_do() -> None:
    """Nothing is to be done only where the server starts."""
    assert [row[0] for row in ROWS if row[3] == "nothing" and row[2] != "0"] == []
