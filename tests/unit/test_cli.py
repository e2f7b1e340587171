"""How the process ends: with the status of its verdict, whenever a signal comes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpuprestart import commandline

from .processes import PATIENCE

ROOT = Path(__file__).parents[2]

#: The run is over and its verdict is known; then comes what is told by the argument, and the process ends.
ENDING = """
import os, signal, sys
from gpuprestart import cli, hook
from gpuprestart.model import Outcome, Refusal
from gpuprestart.story import Story
from gpuprestart.verdict import conclude

def run(options, host, *, checking):
    host.ask(("user", 0), 5.0)
    if sys.argv[1] == "interrupted":
        os.kill(os.getpid(), signal.SIGTERM)
    refusal = Refusal(Outcome.UNKNOWN, "no answer", ["do this"])
    return conclude(Story(run="0123", time=0.0, refusal=refusal))

hook.run = run
sys.exit(cli.main(["check"]))
"""


@pytest.mark.parametrize("how", ["quietly", "interrupted"])
@pytest.mark.case("D3")
def test_a_signal_after_the_verdict_does_not_take_it_away(how: str) -> None:
    """There is no exit status but those of the contract, and what was judged is told."""
    command = [sys.executable, "-c", ENDING, how]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert (answer.returncode, answer.stderr) == (69, "")
    assert "unknown, exit status 69: no answer" in answer.stdout


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("check sglang-qwen", "gpuprestart check --unit sglang-qwen"),
        ("clean sglang-qwen", "gpuprestart clean --unit sglang-qwen"),
        ("status sglang-qwen", "gpuprestart check --unit sglang-qwen"),
        ("doctor --unit sglang-qwen", "gpuprestart doctor UNIT, without --unit"),
        ("enable --unit=sglang-qwen", ""),
        ("check --fast", ""),
    ],
)
def test_a_unit_in_the_wrong_place(line: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        commandline.parse(line.split())
    said = capsys.readouterr().err.splitlines()[-1]
    assert caught.value.code == 64
    assert said.endswith(f"; hint: {hint}") if hint else "hint" not in said


@pytest.mark.parametrize(
    ("word", "allowed"),
    [
        *((f"--watch={text}", "0.1 to 3600 seconds") for text in ("0", "0.09", "3601", "nan", "soon")),
        *((f"--host={text}", "HOST or USER@HOST") for text in ("", "-oProxyCommand=x", "a b", "a\n")),
    ],
)
def test_what_cannot_be_meant_is_told_with_what_can(
    word: str, allowed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        commandline.parse(["status", word])
    said = capsys.readouterr().err.splitlines()[-1]
    assert caught.value.code == 64 and said.endswith(f"(allowed: {allowed})") and said.isprintable()


@pytest.mark.parametrize("text", ["0", "-1", "some"])
def test_a_number_of_runs(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        commandline.parse(["history", f"--number={text}"])
    assert f"'{text}' is no number of runs (allowed: 1 and more)" in capsys.readouterr().err
    assert commandline.parse(["history", "-n", "1"]).most == 1
    # More than there can be is all of them.
    assert (commandline.parse(["history", "-n", "9" * 30]).most or 0) <= sys.maxsize


@pytest.mark.parametrize("words", [("--svg", ""), ("--since", ""), ("show", "")])
def test_what_a_script_forgot_to_fill_in_is_not_left_out(words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        commandline.parse(["history", *words])
    assert caught.value.code == 64
