"""Every case has a test."""

from __future__ import annotations

import pytest

from tests.cases import CASES


def test_every_case_has_a_test(marked_cases: set[str], request: pytest.FixtureRequest) -> None:
    if request.config.args != list(request.config.getini("testpaths")) or request.config.option.markexpr:
        pytest.skip("only a run of all tests knows them all")
    assert sorted(set(CASES) - marked_cases) == []


def test_every_marked_case_is_listed(marked_cases: set[str]) -> None:
    assert sorted(marked_cases - set(CASES)) == []
