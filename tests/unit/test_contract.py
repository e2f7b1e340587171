"""The list of the contract's lines in docs/contract.md: every line has a test, and every test named there is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
TEXT = (REPOSITORY / "docs" / "contract.md").read_text(encoding="utf-8")

#: The headings of the contract; none may be left out.
HEADINGS = [
    "Commands", "Outcomes and exit statuses", "The policy", "Who is stale", "Evidence", "Refuse or kill first",
    "Signals", "Claims", "The quick way", "Selection", "The journal", "Words that programs read",
]  # fmt: skip
ROWS = re.findall(r"^\| (?!line \|)(.+) \| (.*) \|$", TEXT, flags=re.MULTILINE)
TESTS = sorted(set(re.findall(r"`(tests/[^`]+)`", TEXT)))


@cache
def _tests(path: str) -> frozenset[str]:
    tree = ast.parse((REPOSITORY / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_every_heading_has_its_lines() -> None:
    assert re.findall(r"^## (.+)$", TEXT, flags=re.MULTILINE) == HEADINGS
    assert all(re.search(r"^\|---\|---\|\n\|", part, re.MULTILINE) for part in TEXT.split("\n## ")[1:])
    # Not one line of a table that is read as something else.
    assert len(ROWS) == len(re.findall(r"^\| (?!line \|)", TEXT, flags=re.MULTILINE)) > 100
    assert len({line for line, _ in ROWS}) == len(ROWS)


def test_every_line_has_a_test() -> None:
    one = r"`tests/\w+/test_\w+\.py::test_\w+`"
    assert [line for line, tests in ROWS if re.fullmatch(rf"{one}(<br>{one})*", tests) is None] == []


def test_every_test_is_there() -> None:
    named = [test.partition("::") for test in TESTS]
    assert [f"{path}::{name}" for path, _, name in named if name not in _tests(path)] == []
