"""An operator's word for one start: how it is written down, and when it holds."""

from __future__ import annotations

import pytest

from gpuprestart import bypass
from gpuprestart.bypass import Bypass


def test_what_is_written_is_read_back() -> None:
    given = Bypass(until=1234.5, by="alice")
    assert bypass.parse(bypass.text(given)) == given
    assert bypass.text(given) == "until=1234.500 by=alice\n"


@pytest.mark.parametrize("line", ["", "junk", "until=x by=a", "until=1", "by=a", "until= by=a"])
def test_what_cannot_be_read_is_nobody_s_word(line: str) -> None:
    assert bypass.parse(line) is None


@pytest.mark.parametrize(
    ("until", "holds"),
    [(1000.0, False), (1000.1, True), (1600.0, True), (1600.1, False), (float("inf"), False), (float("nan"), False)],
)
def test_it_holds_for_ten_minutes(until: float, holds: bool) -> None:
    assert bypass.holds(Bypass(until=until, by="alice"), now=1000.0) is holds
