"""Programs that the policy names, run for real: their ends, their limits, and what is left of them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from gpuprestart.faults import Interrupted
from gpuprestart.host.program import KEPT, Ended, Programs

from .processes import PATIENCE, wait

SHELL = "/bin/sh"


def run(script: str, *words: str, programs: Any = None, **options: Any) -> Ended:
    made = programs or Programs(wait=wait, at_fork=lambda: None)
    options = {"environ": {}, "timeout": PATIENCE, "check": lambda path: None, "keep": True, **options}
    ended: Ended = made([SHELL, "-c", script, "sh", *words], **options)
    assert made.pids == set()
    return ended


def gone(pid: int) -> bool:
    """Whether a process is not there, or dead and waits for whoever has adopted it to notice."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        wait([], 0.01)
    return False


@pytest.mark.parametrize(
    ("script", "fault"),
    [("exit 0", ""), ("exit 3", "exited with status 3"), ("kill -KILL $$", "was ended by SIGKILL")],
)
def test_how_it_ended(script: str, fault: str) -> None:
    assert run(script) == Ended(fault=fault)


def test_what_it_printed_is_kept_up_to_a_limit() -> None:
    assert run("echo one; echo two >&2").said == "one\ntwo\n"
    assert len(run("head -c 1000000 /dev/zero | tr '\\0' x").said) == KEPT


def test_its_words_are_no_shell_s_and_its_environment_is_what_it_is_given() -> None:
    said = run('echo "$1|$2"; env', "$(id)", "a b;c", environ={"GPU": "1,2"}).said.splitlines()
    assert said[0] == "$(id)|a b;c"
    names = {line.partition("=")[0] for line in said[1:]}
    assert {"GPU", "PATH", "LC_ALL"} <= names <= {"GPU", "PATH", "LC_ALL", "PWD", "OLDPWD", "SHLVL", "_"}


def test_it_reads_nothing_and_inherits_no_descriptor() -> None:
    """Not even one that was left open to us on purpose."""
    with open("/dev/null", "rb") as marker:
        os.set_inheritable(marker.fileno(), True)
        said = run(
            f"cat; [ -e /proc/$$/fd/0 ] && echo seen; [ ! -e /proc/$$/fd/{marker.fileno()} ] && echo closed"
        ).said
    assert said == "seen\nclosed\n"


def test_it_is_killed_at_its_limit_with_all_its_children() -> None:
    began = time.monotonic()
    ended = run("trap '' TERM; sleep 1000 & echo $!; echo $$; sleep 1000", timeout=0.5)
    assert ended.timed_out and ended.fault == "was not done after 0.5 s"
    assert time.monotonic() - began < PATIENCE
    assert all(gone(int(pid)) for pid in ended.said.split())


def test_the_children_of_one_that_has_ended_are_not_left_and_not_waited_for() -> None:
    began = time.monotonic()
    ended = run("sleep 1000 & echo $!")
    assert ended.fault == "" and time.monotonic() - began < PATIENCE / 2
    assert gone(int(ended.said))


def test_one_that_is_not_there_or_no_program(tmp_path: Path) -> None:
    programs = Programs(wait=wait, at_fork=lambda: None)
    text = tmp_path / "text"
    text.write_text("text")
    for mode, said in ((0o644, "Permission denied"), (0o755, "Exec format error")):
        text.chmod(mode)
        ended = programs([str(text)], environ={}, timeout=PATIENCE, check=lambda path: None)
        assert ended == Ended(fault=f"was not run: {text}: {said}")
    missing = programs(["/nowhere"], environ={}, timeout=PATIENCE, check=lambda path: None)
    assert missing.fault == "was not run: /nowhere: No such file or directory"


def test_one_that_is_not_trusted_is_not_run(tmp_path: Path) -> None:
    def check(path: str) -> None:
        raise ValueError(f"{path} is not to be trusted")

    assert run(f"touch {tmp_path}/ran", check=check).fault == f"was not run: {SHELL} is not to be trusted"
    assert not (tmp_path / "ran").exists()


def test_a_check_that_hangs_is_cut_short_too() -> None:
    """As on a mount whose server is gone."""
    ended = run("exit 0", check=lambda path: wait([], 1000) and None, timeout=0.3)
    assert ended.timed_out


def test_it_is_ended_when_we_are_asked_to_end(tmp_path: Path) -> None:
    def asked(descriptors: Iterable[int], seconds: float) -> set[int]:
        until = time.monotonic() + PATIENCE
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
            assert time.monotonic() < until
            wait([], 0.01)
        raise Interrupted("SIGTERM")

    programs = Programs(wait=asked, at_fork=lambda: None)
    with pytest.raises(Interrupted):
        run(f"echo $$ > {tmp_path}/pid; sleep 1000", programs=programs)
    assert programs.pids == set()
    assert gone(int((tmp_path / "pid").read_text()))


def test_nothing_of_ours_is_left_open() -> None:
    before = os.listdir("/proc/self/fd")
    for script, options in (("exit 0", {}), ("sleep 1000", {"timeout": 0.1}), ("exit 0", {"keep": False})):
        run(script, **options)
    assert os.listdir("/proc/self/fd") == before
