"""The picture of docs/how-it-decides.md: it is what the script draws, and its words are the program's."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from gpuprestart.model import EXIT_STATUS, Action, Outcome
from tests.picture_of_decisions import HEIGHT, PICTURE, TABLE, WIDTH, draw

SVG = "{http://www.w3.org/2000/svg}"


def words() -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(draw()).iter(f"{SVG}text")]


def test_the_picture_is_what_the_script_draws() -> None:
    assert PICTURE.read_text(encoding="utf-8") == draw(), "python -m tests.picture_of_decisions draws it anew"


def test_every_action_that_decides_has_its_box() -> None:
    assert set(TABLE) == {action for action in Action if action is not Action.NONE}
    assert {action.value for action in TABLE} <= set(words())


def test_outcomes_stand_below_their_statuses() -> None:
    said = words()
    for number, word in enumerate(said):
        statuses = re.fullmatch(r"exit (\d+(?:, \d+)*)", word)
        if statuses is None:
            continue
        below = " ".join(said[number + 1 : number + 3])
        named = [outcome for outcome in Outcome if re.search(rf"\b{outcome.value}\b", below)]
        # "clean" is in "cleaned" too, and both are 0.
        assert {EXIT_STATUS[each] for each in named} == {int(each) for each in statuses[1].split(", ")}


def test_it_fetches_nothing_and_fits_a_page() -> None:
    text = draw()
    assert "http" not in text.replace('xmlns="http://www.w3.org/2000/svg"', "") and "<script" not in text
    assert WIDTH <= 1000 and f'viewBox="0 0 {WIDTH} {HEIGHT}"' in text
