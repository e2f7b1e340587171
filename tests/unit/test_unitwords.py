"""Words of commands in unit files. That systemd reads them the same way is shown on the node, in test_enable.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprestart.unitwords import expands_to, literal, quoted, split


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("/bin/true", ["/bin/true"]),
        ("  a \t b  ", ["a", "b"]),
        ("\"a b\" 'c d'", ["a b", "c d"]),
        ("--name='x y'z", ["--name=x yz"]),
        ('"" a', ["", "a"]),
        (r"a\ b \x41\u00e9\101\sz", [r"a\ b", "AéA z"]),
        (r"'it\'s' \"q\"", ["it's", '"q"']),
        (r"a\d", [r"a\d"]),
        ("sglang-%i %%", ["sglang-%i", "%%"]),
    ],
)
def test_words_as_systemd_splits_them(value: str, expected: list[str]) -> None:
    assert split(value) == expected


@pytest.mark.parametrize("value", ["'a", 'a "b', "a\\"])
def test_what_systemd_would_not_take(value: str) -> None:
    with pytest.raises(ValueError):
        split(value)


@pytest.mark.parametrize(
    ("word", "written"),
    [
        ("sglang-%i", "sglang-%i"),
        ("/usr/bin/docker", "/usr/bin/docker"),
        ("${NAME}", "${NAME}"),
        ("", '""'),
        (";", '";"'),
        ("a b", '"a b"'),
        ('say "it"', r'"say \"it\""'),
        ("back\\slash", r'"back\\slash"'),
        ("a\nb", r'"a\x0ab"'),
        ("\u202e", r'"\xe2\x80\xae"'),
    ],
)
def test_a_word_is_quoted_where_it_has_to_be(word: str, written: str) -> None:
    assert quoted(word) == written


@given(st.lists(st.text(st.characters(codec="ascii"))))
def test_what_is_quoted_is_split_into_the_same_words(words: list[str]) -> None:
    assert split(" ".join(map(quoted, words))) == words


@pytest.mark.parametrize(
    ("written", "value", "so"),
    [
        ("sglang-%i", "sglang-a", True),
        ("sglang-%i", "vllm-a", False),
        ("100%%", "100%", True),
        ("100%%", "100%%", False),
        ("a.c", "abc", False),
        ("%p-%i\n", "x-y\n", True),
    ],
)
def test_a_word_with_specifiers_may_have_become_another(written: str, value: str, so: bool) -> None:
    assert expands_to(written, value) is so


@given(st.text())
def test_a_word_made_literal_stands_for_itself_alone(word: str) -> None:
    assert expands_to(literal(word), word)
    assert not expands_to(literal(word), word + "x")
