"""Texts of every kind: what was written is read as it was meant, anything else is the fault that is documented for it,
and nothing takes long."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Callable, Optional

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpuprestart import claims, owners, registry, selection, table
from gpuprestart.envfile import assignments
from gpuprestart.host import procfs, slow
from gpuprestart.host.child import Child, Questions
from gpuprestart.model import Action, Claim, Gpu, Inventory, Owner, Refusal
from gpuprestart.places import Places
from gpuprestart.policy import Layer, parse
from gpuprestart.quantities import BYTES, SECONDS, Size, duration, size
from gpuprestart.redaction import redacted
from gpuprestart.text import printable

from .machines import holder, policy, process, rule, survey
from .processes import PATIENCE, wait, within

MACHINE = Inventory(
    driver="570.1",
    nvml_path="/x",
    gpus=tuple(
        Gpu(n, f"GPU-{n:x}0{n:06x}-5f60-7182-93a4-b5c6d7e8f900", "NVIDIA H200", f"00000000:{n + 26:02X}:00.0", n)
        for n in reversed(range(12))
    ),
)
CUDA, NVIDIA = "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"


def chosen(words: Any, environment: Optional[Mapping[str, str]] = None) -> list[int]:
    return sorted(gpu.index for gpu in selection.select(words, MACHINE, environment).gpus)


def owned(cgroup: str, above: Sequence[str] = ()) -> Owner:
    names = owners.Names(users={}, uids={})
    return owners.owner_of(process(cgroup=cgroup), units={}, names=names, own=None, namespace=0, above=above)


#: What reads a text, and what it may raise.
PARSERS: Mapping[str, tuple[Callable[[str], object], tuple[type[Exception], ...]]] = {
    "stat": (lambda text: procfs.parse_stat(text.encode("utf-8", "replace")), (ValueError,)),
    "cgroup": (lambda text: procfs.parse_cgroup(text.encode("utf-8", "replace")), ()),
    "owner": (lambda text: owned("/" + text, [text, text]), ()),
    "claim": (lambda text: claims.parse("GPU-0", text), ()),
    "duration": (duration, (ValueError,)),
    "size": (size, (ValueError,)),
    "environment": (lambda text: list(assignments(text)), ()),
    "select": (lambda text: chosen([text, *text.split(",")]), (Refusal,)),
    "cuda": (lambda text: chosen("unit", {CUDA: text}), (Refusal,)),
    "nvidia": (lambda text: chosen("unit", {NVIDIA: text}), (Refusal,)),
    "policy": (lambda text: parse([Layer("/p", text)]), (Refusal,)),
    # As where brackets are nested too deeply for the parser, so that nobody has accepted the text.
    "places": (lambda text: Places(text).deepest, ()),
    "printable": (printable, ()),
    "command line": (lambda text: redacted([text, text]), ()),
}
PIECES = (
    *" ()[]{}:=,.'\"\\#;/-_@*%09²٣\t\n\r\0\xa0\u202e\udcff\ufeff", "\x1b[m", "\"\"", "''", '\\"', "\\'",
    '"""', "'''", "[[", "]]", "//", "://", "\\\n", "a=", "ab", "s", "MiB", "-1", "all", "none", "GPU-", "MIG-", "0::/",
    "name=systemd:", "unit=", "pid=", "key", "token", "/kubepods/", "/lxc/", "docker-", ".scope",
)  # fmt: skip


@given(st.lists(st.sampled_from(PIECES) | st.characters(exclude_categories=()), max_size=9).map("".join))
def test_any_text_is_read_or_is_the_fault_that_is_meant_for_it(text: str) -> None:
    for read, faults in PARSERS.values():
        try:
            read(text)
        except faults as error:
            assert printable(str(error), 5000)


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=30)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=4), st.sampled_from(PIECES))
def test_no_text_takes_long_to_read(name: str, pieces: list[str], end: str) -> None:
    read, faults = PARSERS[name]
    piece = "".join(pieces)
    with within(1.0), suppress(*faults):
        read("x=" + piece * (16_384 // len(piece)) + end)


#: Too deep for the parser, and closed again.
DEEP = f"a={'[' * 3000}{']' * 3000}\n"


@pytest.mark.parametrize(
    ("name", "before", "piece", "after"),
    [
        ("environment", "A=x", " ", "y"),
        ("environment", "A=", "\\", ""),
        ("environment", "", "A='", ""),
        ("policy", DEEP + "[", '""', ""),
        ("policy", DEEP + "[", "''", "'"),
        ("policy", DEEP, "[", ""),
        ("policy", DEEP, 'x\\"""\n', ""),
        ("policy", DEEP + '"', '\\"', ""),
        ("policy", "", f"[[{'a.' * 990}b]]\n", ""),
        ("owner", "", "kubepods/", ""),
        ("owner", "slurm", "/job_", ""),
        ("owner", "a", "@", ".service"),
        ("nvidia", "", "0,", "0"),
        ("cuda", "", "GPU-", ""),
        ("select", "", "9", ""),
        ("duration", "", "9", " s"),
        ("duration", "1", " ", ""),
        ("claim", "pid=", "9", ""),
        ("claim", "pid=", "²", ""),
        ("stat", "", "(", ")"),
        ("cgroup", "", "0:", ""),
        ("command line", "", "--key ", ""),
        ("command line", "", "'key=\\ ", ""),
        ("printable", "", "\x1b", ""),
    ],
    ids=lambda text: repr(text[-12:]),
)
def test_a_text_that_was_written_to_take_long_does_not(name: str, before: str, piece: str, after: str) -> None:
    """As long as each may be: a policy is 64 KiB, the path of a cgroup 4 KiB, anything else an argument of 128."""
    read, faults = PARSERS[name]
    longest = {"policy": 1 << 16, "owner": 1 << 12}.get(name, 1 << 17)
    with within(3.0), suppress(*faults):
        read(before + piece * ((longest - len(before + after)) // len(piece)) + after)


# What was written is what is read ------------------------------------------------------------------------------------


@given(
    st.integers(0, 999_999), st.sampled_from(["", ".5", ".25"]), st.sampled_from([*SECONDS, *BYTES]), st.integers(0, 3)
)
def test_a_quantity_that_was_written_is_the_one_that_is_read(whole: int, part: str, unit: str, spaces: int) -> None:
    text, number = f"{whole}{part}{' ' * spaces}{unit}", float(f"{whole}{part}")
    read, units = (duration, SECONDS) if unit in SECONDS else (size, BYTES)
    try:
        assert read(text) == (
            pytest.approx(number * SECONDS[unit]) if units is SECONDS else Size(int(number * BYTES[unit]))
        )
    except ValueError as error:
        assert "at most" in str(error)
        assert number * units[unit] > (1 << 50 if units is BYTES else 365 * 24 * 3600)


CASES: Sequence[Callable[[str], str]] = (str, str.upper, str.lower, str.swapcase)
#: Ways to name a GPU; how much of its name, from which end.
FORMS: Sequence[Callable[[Gpu, int], str]] = (
    lambda gpu, cut: str(gpu.index),
    lambda gpu, cut: gpu.uuid,
    lambda gpu, cut: gpu.uuid[: 6 + cut],
    lambda gpu, cut: gpu.pci[(0, 4, 9)[cut % 3] :],
    lambda gpu, cut: f"\t{gpu.uuid} ",
)
NAMED = st.tuples(
    st.sampled_from(MACHINE.gpus), st.sampled_from(FORMS), st.integers(0, 34), st.sampled_from(CASES)
)  # fmt: skip


@given(st.lists(NAMED, min_size=1, max_size=4))
def test_gpus_that_were_named_in_any_way_are_those_that_are_meant(
    named: list[tuple[Gpu, Callable[[Gpu, int], str], int, Callable[[str], str]]],
) -> None:
    words = [case(form(gpu, cut)) for gpu, form, cut, case in named]
    meant = sorted({gpu.index for gpu, *_ in named})
    assert chosen(words) == chosen("unit", {NVIDIA: ",".join(words)}) == meant
    if len(meant) == len(named) and not any(":" in word for word in words):
        assert chosen("unit", {CUDA: ",".join([*words, "-1", "x"])}) == meant


LETTERS = st.text("aZ09:_.\\@-=²", min_size=1, max_size=20)


@given(LETTERS, LETTERS | st.just(""), st.integers(0, 1 << 22), LETTERS | st.none())
def test_a_claim_that_was_written_is_the_one_that_is_read(
    unit: str, invocation: str, pid: int, parent: Optional[str]
) -> None:
    claim = Claim(gpu="GPU-0", unit=unit, invocation=invocation, pid=pid, parent=parent)
    assert claims.parse("GPU-0", claims.text(claim)) == claim


def by_systemd(text: str) -> Iterator[tuple[str, str]]:
    """The automaton of systemd's parse_env_file_internal() (src/basic/env-file.c), for texts whose comments do not end
    in a backslash, which its versions read differently."""
    key = value = ""
    state, kept = "before", 0
    for char in text:
        if state == "before":
            state, key = ("comment", key) if char in "#;" else (state, key) if char in " \t\r\n" else ("key", char)
        elif state == "comment":
            state = "before" if char in "\r\n" else state
        elif state == "key":
            if char == "=":
                state, value, kept = "start", "", 0
            else:
                state, key = ("before" if char in "\r\n" else state), key + char
        elif state in ("start", "plain") and char in "\r\n":
            yield key.rstrip(" \t"), value[:kept] if state == "plain" else value
            state = "before"
        elif state == "start" and char in "'\"":
            state = char
        elif state in ("start", "plain") and char == "\\":
            state = "escaped"
        elif state == "start":
            if char not in " \t":
                state, value, kept = "plain", value + char, len(value) + 1
        elif state == "plain":
            value += char
            kept = kept if char in " \t" else len(value)
        elif state == "escaped":
            value += "" if char in "\r\n" else char
            state, kept = "plain", len(value)
        elif state == "'":
            state, value = ("start", value) if char == "'" else (state, value + char)
        elif state == '"':
            state, value = (
                ("start", value) if char == '"' else ('"\\', value) if char == "\\" else (state, value + char)
            )
        else:
            value += char if char in '"\\`$' else "" if char == "\n" else "\\" + char
            state = '"'
    if state not in ("before", "comment", "key"):
        yield key.rstrip(" \t"), value[:kept] if state == "plain" else value


MARKS = [*"AB=='\"\\ \t\n\n\r#;$`x", "A=", "CUDA=0", "# c", "\\\n", "\\ ", "é", "\x0b"]


@example("A=A \\")
@given(st.lists(st.sampled_from(MARKS), max_size=24).map("".join))
def test_a_file_of_settings_says_what_it_says_to_systemd(text: str) -> None:
    text = re.sub(r"([#;][^\r\n]*?)\\+(?=[\r\n]|\Z)", r"\1", text)
    assert list(assignments(text)) == list(by_systemd(text))


# A site's own patterns -----------------------------------------------------------------------------------------------


def test_a_pattern_that_takes_for_ever_on_a_holder_cannot_be_told_to_match() -> None:
    """The holder is refused as one that has no readable name is; the others are judged, and nobody waits twice."""
    site = policy(rule("kill", cmdline="(a+)+$") + rule("spare", comm="^spare"))
    hangs = holder(1, cmdline="a" * 60 + "!", listed={0: 900})
    others = [holder(2, cmdline="b"), holder(3, cmdline="b", comm="spared"), holder(4, cmdline=None)]
    asked = Questions(lambda: Child(answer=slow.answer, wait=wait, at_fork=lambda: None))
    machine = survey(hangs, *others)
    try:
        searched = site._replace(search=registry.searching(asked))
        with within(PATIENCE):
            found = [table.decide(searched, machine, each) for each in (hangs, *others)]
        began = time.monotonic()
        assert table.decide(searched, machine, hangs) == found[0]
        assert time.monotonic() - began < registry.SLOW / 2
    finally:
        asked.end()
    assert [each.action for each in found] == [Action.REFUSE, Action.KILL, Action.SPARE, Action.REFUSE]
    assert found[0].reason.startswith("has a command line that the pattern takes too long for, so it cannot be told")
    assert found[3].reason.startswith("has no readable command line, so it cannot be told")
