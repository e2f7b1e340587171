"""What people see of earlier runs, and a file that is put in its place; the journal itself is read on the node."""

from __future__ import annotations

import builtins
import io
import os
import re
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuprestart import commandline, filing, history, proof

from .test_past import document, gpu, holder


class Terminal(io.StringIO):
    """As wide as COLUMNS says."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def shown(*runs: dict[str, Any]) -> list[str]:
    out, err = io.StringIO(), io.StringIO()
    history.show(runs, out=out, err=err)
    assert err.getvalue() == ""
    return out.getvalue().splitlines()


def columns(line: str) -> list[str]:
    return [each.strip() for each in line.split("  ") if each.strip()]


def test_a_row_for_each_run() -> None:
    head, line = shown(document())
    assert columns(head) == ["TIME", "UNIT", "OUTCOME", "TOOK", "PHASES", "ENDED", "FREED", "RUN"]
    when, *rest = columns(line)
    assert len(when) == len("2026-12-01 06:30:00")
    assert rest == [
        "sglang-qwen.service",
        "cleaned",
        "3.90 s",
        "measure 0.3, evict 1, drain 2.5",
        "1: python3",
        "1520 MiB",
        "3f2a3f2a",
    ]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"verb": "check"}, "cleaned (check)"),
        ({"recorded_by": 990}, "cleaned (said by uid 990)"),
        ({"verb": "check", "recorded_by": 990}, "cleaned (check, said by uid 990)"),
        ({"recorded_by": 0}, "cleaned"),
    ],
)
def test_what_is_no_start_of_root_s_is_marked(changes: dict[str, Any], word: str) -> None:
    assert columns(shown(document(**changes))[1])[2] == word


def test_what_is_not_known_is_a_dash() -> None:
    line = shown({"outcome": "cleaned", "unit": "x.service"})[1]
    assert columns(line) == ["-", "x.service", "cleaned", "-", "-", "-", "-", "-"]


def test_other_machines_are_named_if_there_is_one() -> None:
    head, first, second = shown(document(host="node7"), document())
    assert columns(head)[0] == "HOST"
    assert (columns(first)[0], columns(second)[0]) == ("node7", "-")


def test_columns_stand_below_one_another() -> None:
    lines = shown(document(unit="a.service"), document(unit="a-much-longer-name.service", duration_s=120.0))
    assert len({line.index("cleaned") for line in lines[1:]}) == 1
    assert len({line.index(" s  ") for line in lines[1:]}) == 1


def test_what_others_wrote_moves_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = document(unit="\x1b[2J[red]x", outcome="[bold]\n", host="\x07", holders=[holder(comm="\x9b31m[/]")])
    assert all(line.isprintable() for line in shown(hostile))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    history.show([hostile], out=out, err=out)
    assert "\x1b[2J" not in out.getvalue() and "\x07" not in out.getvalue() and "\x9b" not in out.getvalue()
    assert "[red]x" in out.getvalue() and "[bold]" in out.getvalue()


@pytest.mark.parametrize("width", [200, 120, 100, 80, 60, 40])
def test_narrow_terminals_get_fewer_columns_and_no_line_is_too_long(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    history.show([document(unit="sglang-a-long-name@qwen3.service")], out=out, err=out)
    lines = re.sub("\x1b\\[[0-9;]*m", "", out.getvalue()).splitlines()
    assert max(map(len, lines)) <= width
    for name, least in history._WIDTHS.items():
        assert (name in lines[0]) == (width >= least)
    assert "3f2a3f2a" in out.getvalue()


def test_colour_is_for_terminals_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    history.show([document(outcome="protected")], out=out, err=out)
    assert "\x1b[31m" in out.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    out = Terminal()
    history.show([document(outcome="protected")], out=out, err=out)
    assert "\x1b[31m" not in out.getvalue()


def test_without_rich_columns_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def none(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("rich"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", none)
    out = Terminal()
    history.show([document()], out=out, err=out)
    assert "\x1b" not in out.getvalue() and "sglang-qwen.service  cleaned" in out.getvalue()


def test_the_drain_of_each_gpu_is_a_sparkline() -> None:
    lines = [each.lead + each.text for each in history._memory(document(gpus=[gpu(3)]), True)]
    assert lines[1] == "memory in use, over 3.900 s"
    assert lines[2].startswith("  GPU 3   GPU-00000003  ████") and "▁" in lines[2]
    assert lines[2].endswith("1523 MiB at most, 3 MiB at the end, limit 64 MiB, clean")
    plain = history._memory(document(), False)[2].lead
    assert plain.isascii() and "####" in plain


def test_a_long_line_of_a_story_goes_on_behind_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    history._print([history.Styled("word " * 20, lead="   +0.042 s  "), history.Styled("")], out=out, err=out)
    first, *rest = out.getvalue().splitlines()
    assert first.startswith("   +0.042 s  word") and len(rest) > 2
    assert all(line.startswith(" " * 13 + "word") or not line.strip() for line in rest)


# Command lines and what is missing -----------------------------------------------------------------------------------


def performed(*words: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    verb = proof if words[0] == "proof" else history
    status = verb.perform(commandline.parse(words), out=out, err=err)
    return status, out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("history", "--since", "12 parsecs"), "yesterday"),
        (("history", "../x"), "no name of a unit"),
        (("proof", "../x"), "no name of a unit"),
        (("history", "show", "xyz"), "no id of a run"),
        (("history", "show", "f" * 33), "no id of a run"),
        (("history", "show", "\x1b[31m"), "no id of a run"),
    ],
)
def test_what_cannot_be_meant_is_a_bad_command_line(words: tuple[str, ...], said: str) -> None:
    status, out, err = performed(*words)
    assert (status, out) == (64, "") and said in err and err.startswith("gpuprestart: ")
    assert err.rstrip("\n").isprintable()


@pytest.mark.parametrize("words", [("history",), ("history", "x"), ("history", "show", "abc"), ("proof",)])
def test_without_the_library_a_sentence_names_the_package(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "systemd", None)
    status, out, err = performed(*words)
    assert (status, out) == (69, "") and "python3-systemd" in err


# A file in its place -------------------------------------------------------------------------------------------------


def test_a_file_is_put_in_its_place_and_replaced(tmp_path: Path) -> None:
    place = tmp_path / "run.svg"
    filing.put(str(place), "first")
    filing.put(str(place), "zweite ä")
    assert place.read_text(encoding="utf-8") == "zweite ä"
    assert os.listdir(tmp_path) == ["run.svg"]
    assert stat.S_IMODE(place.stat().st_mode) & 0o133 == 0


@pytest.mark.parametrize("kind", ["link", "dangling", "folder", "fifo"])
def test_nothing_but_a_plain_file_is_replaced(tmp_path: Path, kind: str) -> None:
    victim, place = tmp_path / "victim", tmp_path / "run.svg"
    if kind == "link":
        victim.write_text("precious")
    if kind in ("link", "dangling"):
        place.symlink_to(victim)
    elif kind == "folder":
        place.mkdir()
    else:
        os.mkfifo(place)
    with pytest.raises(filing.Unwritable, match="symbolic link" if place.is_symlink() else "no plain file"):
        filing.put(str(place), "x")
    assert not victim.exists() if kind != "link" else victim.read_text() == "precious"
    assert len(os.listdir(tmp_path)) == (2 if kind == "link" else 1)


def test_what_could_not_be_written_whole_leaves_nothing(tmp_path: Path) -> None:
    place = tmp_path / "run.svg"
    filing.put(str(place), "before")
    with pytest.raises(filing.Unwritable):
        filing.put(str(place), "after \ud800")
    assert os.listdir(tmp_path) == ["run.svg"] and place.read_text() == "before"


@pytest.mark.parametrize("path", ["", "/", "/nowhere/x.svg", "/proc/self/x.svg", "x\0y", "..", "/etc/passwd/x"])
def test_where_nothing_can_be_written_is_a_sentence(path: str) -> None:
    with pytest.raises(filing.Unwritable) as caught:
        filing.put(path, "x")
    assert str(caught.value)
