"""Many machines asked at once: what comes back of each, whatever it is, by a real process in place of ssh."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Optional

import pytest

from gpuprestart import fleet, remote
from gpuprestart.commandline import parse
from gpuprestart.faults import Interrupted
from gpuprestart.host import ssh

from .test_report import state, verdict

#: Answers as its host is called; the last words of its command line are the host and the line for the other side.
SSH = r"""#!/bin/sh
while [ "$1" != -- ]; do shift; done
case $2 in
    up) printf '%s\n' "$ANSWER"; exit 0 ;;
    echo) printf '%s' "$3"; exit 0 ;;
    garbage) printf 'hello \033[31m\n'; exit 0 ;;
    missing) echo 'sh: 1: gpuprestart: not found' >&2; exit 127 ;;
    refused) echo 'ssh: connect to host refused port 22: Connection refused' >&2; exit 255 ;;
    flood) exec cat /dev/zero ;;
    hang) exec sleep 1000 ;;
esac
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    from gpuprestart import report

    path = tmp_path / "ssh"
    path.write_text(SSH, encoding="utf-8")
    path.chmod(0o755)
    document = report.document(verdict(gpus=(state(0, 3 << 20),)), booted=0.0, verb="status")
    monkeypatch.setenv("ANSWER", json.dumps(document))
    return str(path)


def wait(descriptors: Iterable[int], seconds: float) -> set[int]:
    import select

    poll = select.poll()
    for each in descriptors:
        poll.register(each, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(max(0.0, seconds) * 1000)}


def replies(program: str, *hosts: str, limit: float = 60.0, most: int = 1 << 20) -> dict[str, ssh.Reply]:
    found = ssh.ask(hosts, ["gpuprestart", "status", "--json"], limit=limit, wait=wait, program=program, most=most)
    return {reply.host: reply for reply in found}


def answer(program: str, host: str, verb: str = "status") -> fleet.Answer:
    of = replies(program, host)[host]
    return fleet.answer(host, verb, status=of.status, out=of.out, err=of.err, fault=of.fault, seconds=of.seconds)


def test_an_answer_is_that_of_the_other_machine_and_bears_its_name(program: str) -> None:
    found = answer(program, "up")
    assert (found.exit, found.fault, found.found["host"], len(found.found["gpus"])) == (0, "", "up", 1)


def test_the_line_reaches_the_shell_there_as_it_was_meant(program: str) -> None:
    words = ["gpuprestart", "check", "--unit=a b'; reboot"]
    (reply,) = ssh.ask(["echo"], words, limit=60.0, wait=wait, program=program)
    import shlex

    assert shlex.split(reply.out.decode()) == words


@pytest.mark.parametrize(
    ("host", "fault"),
    [("missing", "not installed"), ("refused", "Connection refused"), ("garbage", "hello \\x1b[31m")],
)
def test_what_is_no_answer_is_told_and_cannot_colour_a_terminal(program: str, host: str, fault: str) -> None:
    found = answer(program, host)
    assert fault in found.fault and found.fault.isprintable() and found.found is None


def test_one_that_hangs_and_one_that_never_stops_keep_nobody_waiting(program: str) -> None:
    found = replies(program, "flood", "up", limit=30.0, most=1 << 16)
    assert "longer than" in found["flood"].fault and found["up"].status == 0
    began = time.monotonic()
    assert "no answer within 0.5 s" in replies(program, "hang", limit=0.5)["hang"].fault
    assert time.monotonic() - began < 20


def test_a_signal_ends_all_of_them_and_leaves_no_child(program: str) -> None:
    def interrupted(descriptors: Iterable[int], seconds: float) -> set[int]:
        raise Interrupted("SIGINT")

    with pytest.raises(Interrupted):
        list(ssh.ask(["hang", "hang2"], ["x"], limit=60.0, wait=interrupted, program=program))
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_what_cannot_be_run_is_a_fault_of_each(tmp_path: Path) -> None:
    found = replies(str(tmp_path / "no-ssh"), "a", "b")
    assert all("cannot be run: No such file" in each.fault for each in found.values()) and len(found) == 2


@pytest.mark.parametrize(
    ("line", "typed"),
    [
        ("status -H x", ["gpuprestart", "status", "--json"]),
        ("check --unit a -H x --journal", ["gpuprestart", "check", "--unit=a", "--journal", "--json"]),
        ("doctor a -H x", ["gpuprestart", "doctor", "--json", "--", "a"]),
        ("history a -n 3 -H x", ["gpuprestart", "history", "--number=3", "--json", "--", "a"]),
        ("status --watch -H x", None),
        ("history --svg f -H x", None),
    ],
)
def test_what_is_typed_there(line: str, typed: Optional[list[str]]) -> None:
    command = parse(line.split())
    if typed is None:
        with pytest.raises(ValueError, match="for this machine alone"):
            remote.words(command, now=0.0)
    else:
        assert remote.words(command, now=0.0) == typed


def test_nothing_is_ended_from_afar() -> None:
    with pytest.raises(ValueError, match="for this machine alone"):
        remote.perform(parse(["clean"])._replace(hosts=("x",)), wait, out=None, err=None)  # type: ignore[arg-type]
