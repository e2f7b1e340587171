"""Which line of a unit's files says a thing."""

from __future__ import annotations

from textwrap import dedent

import pytest

from gpuprestart import unitlines

MAIN = ("/etc/systemd/system/s.service", "[Service]\nExecStartPre=/bin/a\nExecStartPre = -+/bin/b  x ; /bin/c\n")


def of(text: str, *more: str) -> tuple[unitlines.Line, ...]:
    return unitlines.read([(f"/{number}", dedent(each)) for number, each in enumerate((text, *more))])


def test_a_line_is_shown_with_its_place() -> None:
    _, line = unitlines.read([MAIN])
    assert (line.file, line.number, line.key, line.prefix) == (MAIN[0], 3, "Service.ExecStartPre", "-+")
    assert str(line) == f"{MAIN[0]}:3: ExecStartPre=-+/bin/b x ; /bin/c"


@pytest.mark.parametrize("prefix", ["", "-", "+", "-+", "@-!!", ":|-"])
def test_what_stands_before_a_command(prefix: str) -> None:
    assert of(f"[Service]\nExecStart={prefix}/bin/a -b\n")[0].prefix == prefix


def test_a_secret_is_not_shown() -> None:
    (line,) = of("[Service]\nEnvironment=A=1 HF_TOKEN=hf_abcdefgh1234 X=y\n")
    assert str(line) == "/0:2: Environment=A=1 HF_TOKEN=[redacted] X=y"


def test_a_long_line_is_cut_and_one_from_a_stranger_escaped() -> None:
    (line,) = of(f"[Service]\nExecStart=/bin/a \x1b[31m{'x' * 900}\n")
    assert len(str(line)) < 230 and "\\x1b[31m" in str(line)


def test_an_assignment_over_several_lines_begins_at_the_first() -> None:
    lines = of(
        """\
        # nothing
        [Unit]
        Description=a \\
          b=c \\
        # in between
        ; and another
          d

        [Service]
        ExecStart=/bin/x
        no assignment
        """
    )
    assert [(line.number, line.key, " ".join(line.value.split())) for line in lines] == [
        (3, "Unit.Description", "a b=c d"),
        (10, "Service.ExecStart", "/bin/x"),
    ]


def test_an_empty_line_ends_an_assignment() -> None:
    assert [line.value for line in of("[Unit]\nA=a \\\n\nB=b\n")] == ["a", "b"]


def test_what_stands_after_the_last_line_that_resets() -> None:
    lines = of("[Service]\nA=1\nA=2\nB=1\nA=\nA=3\n", "[Service]\nA=4\n[Unit]\nA=5\n")
    assert [line.value for line in unitlines.standing(lines, "Service.A")] == ["3", "4"]
    last = unitlines.last(lines, "Service.A", "Service.B")
    assert last is not None and (last.file, last.value) == ("/1", "4")
    third = unitlines.last(lines, "Service.A", fits=lambda line: line.value < "4")
    assert third is not None and third.value == "3"
    assert unitlines.last(lines, "Service.A", fits=lambda line: line.value == "1") is None


def test_each_command_has_its_line() -> None:
    lines = unitlines.read([MAIN])
    assert [line.number if line else None for line in unitlines.commands(lines, "Service.ExecStartPre", 3)] == [2, 3, 3]


def test_where_systemd_has_another_number_of_commands_none_has_a_line() -> None:
    assert unitlines.commands(unitlines.read([MAIN]), "Service.ExecStartPre", 2) == (None, None)


def test_what_a_later_line_undoes() -> None:
    def ours(line: unitlines.Line) -> bool:
        return "hook" in line.value

    lines = of("[Service]\nA=\nA=hook\nB=\n", "[Service]\nA=x\nA=\nA=y\nA=\n")
    undone = unitlines.undone(lines, "Service.A", ours)
    assert undone is not None and [(line.file, line.number) for line in undone] == [("/0", 3), ("/1", 5)]
    assert unitlines.undone(lines[:2], "Service.A", ours) is None
    assert unitlines.undone(lines, "Service.B", ours) is None
