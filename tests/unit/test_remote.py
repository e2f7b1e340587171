"""Many machines asked at once: what comes back of each, whatever it is, by a real process in place of ssh."""

from __future__ import annotations

import io
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as some

from gpuprestart import checks, columns, documents, fleet, remote
from gpuprestart.commandline import Command, parse
from gpuprestart.faults import Interrupted
from gpuprestart.host import ssh
from gpuprestart.policy import Policy

from .processes import PATIENCE
from .test_past import document
from .test_program import gone
from .test_report import state, verdict

ROOT = Path(__file__).parents[2]

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
    # What a test has put down under that name.
    *) cd "$(dirname "$0")" && . ./"$2" ;;
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


# How they are asked --------------------------------------------------------------------------------------------------

Put = Callable[..., None]


@pytest.fixture
def put(program: str) -> Put:
    """What a host does, in shell."""

    def down(host: str, script: str) -> None:
        (Path(program).parent / host).write_text(script, encoding="utf-8")

    return down


class Shown(NamedTuple):
    exit: int
    out: str
    err: str


def perform(line: str, program: str, monkeypatch: pytest.MonkeyPatch, waiting: Any = wait) -> Shown:
    monkeypatch.setattr(ssh, "PROGRAM", program)
    out, err = io.StringIO(), io.StringIO()
    status = remote.perform(parse(line.split()), waiting, out=out, err=err)
    return Shown(status, out.getvalue(), err.getvalue())


def test_nobody_is_asked_anything_and_nothing_is_forwarded_or_kept(program: str, put: Put) -> None:
    put("given", "tr '\\0' '\\n' < /proc/$$/cmdline; cat; exec cat /proc/self/stat")
    found = replies(program, "given")["given"].out.decode().split("\n")
    assert {"BatchMode=yes", "ConnectTimeout=10", "ControlMaster=no", "RemoteCommand=none"} <= set(found)
    assert {"ClearAllForwardings=yes", "-T", "-x", "-a"} <= set(found)
    assert found[found.index("--") :][:3] == ["--", "given", "gpuprestart status --json"]
    pid, group, session, terminal = (int(found[-2].split()[place]) for place in (0, 4, 5, 6))
    assert (group, session, terminal) == (pid, pid, 0)


def test_all_are_asked_side_by_side_but_so_many_at_most(program: str, put: Put) -> None:
    """Each of three waits until all three are there, and none sees a fourth."""
    for host in "abcdef":
        others = {"abc": "abc", "def": "def"}["abc" if host in "abc" else "def"]
        waits = "; ".join(f"until [ -e up.{each} ]; do sleep 0.01; done" for each in others)
        put(host, f"touch up.{host} now.{host}; {waits}; ls now.* | wc -l; rm now.{host}")
    found = list(ssh.ask("abcdef", ["x"], limit=PATIENCE, wait=wait, program=program, at_once=3))
    assert sorted(reply.host for reply in found) == list("abcdef")
    assert all(reply.status == 0 and 1 <= int(reply.out) <= 3 for reply in found)


def test_they_are_told_once_in_the_order_in_which_they_were_typed(
    program: str, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("first", "until [ -e second.was ]; do sleep 0.01; done; echo x >> first.was; printf '%s' \"$ANSWER\"")
    put("second", "touch second.was; printf '%s' \"$ANSWER\"")
    done = perform("status -H first -H second -H first", program, monkeypatch)
    rows = done.out.split("\n\n")[0].splitlines()
    assert done.exit == 0 and [row.split()[0] for row in rows] == ["HOST", "first", "second"]
    assert done.out.index("\nfirst:\n") < done.out.index("\nsecond:\n")
    assert (Path(program).parent / "first.was").read_text() == "x\n"


def test_what_ssh_has_started_itself_ends_with_it(program: str, put: Put) -> None:
    """As a ProxyCommand that hangs; on its own it would stay for as long as it likes."""
    put("slow", "sleep 1000 & echo $! $$; sleep 1000")
    put("quick", "sleep 1000 & echo $!")
    found = replies(program, "slow", "quick", limit=2.0)
    assert found["slow"].fault == "no answer within 2 s" and found["quick"].status == 0
    pids = (found["slow"].out + found["quick"].out).split()
    assert len(pids) == 3 and all(gone(int(pid)) for pid in pids)


def test_nobody_is_waited_for_who_only_has_the_pipe_open(program: str, put: Put) -> None:
    """As a connection that is kept in the background for later has, in a session of its own."""
    put("kept", "setsid sh -c 'echo $$ > pid; exec sleep 1000' & until [ -s pid ]; do sleep 0.01; done; echo answer")
    try:
        assert replies(program, "kept", limit=PATIENCE)["kept"]._replace(seconds=0.0) == ssh.Reply(
            "kept", status=0, out=b"answer\n"
        )
    finally:
        os.kill(int((Path(program).parent / "pid").read_text()), signal.SIGKILL)


@pytest.mark.parametrize("where", ["", " >&2"])
def test_what_never_ends_is_cut_off_whichever_way_it_comes(program: str, put: Put, where: str) -> None:
    put("never", f"exec yes{where}")
    assert replies(program, "never", most=4 << 20)["never"].fault == "the answer is longer than 4 MiB"
    put("never", f"yes{where} & sleep 1000 & exec head -c 20000000 /dev/zero{where}")
    reply = replies(program, "never", most=4 << 20)["never"]
    assert reply.fault == "the answer is longer than 4 MiB" and len(reply.out) <= 4 << 20 and len(reply.err) <= 64 << 10


def test_where_descriptors_lack_they_are_asked_one_after_the_other(program: str, put: Put) -> None:
    for host in "abcdefgh":
        put(host, "echo here")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + 12
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        found = list(ssh.ask("abcdefgh", ["x"], limit=PATIENCE, wait=wait, program=program))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert sorted((reply.host, reply.out, reply.fault) for reply in found) == [(h, b"here\n", "") for h in "abcdefgh"]


def test_a_driver_that_hangs_there_is_told_by_that_machine_and_not_taken_for_its_silence() -> None:
    assert ssh.CONNECT + Policy().deadline.nvml_init + 10 < remote.GETTING_THERE + remote.LOOKING
    assert ssh.CONNECT + ssh.ALIVE * ssh.ALIVE_COUNT < remote.GETTING_THERE


def test_the_deadline_of_a_check_is_given_to_it(program: str, put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    put("slow", "exec sleep 1000")
    monkeypatch.setattr(remote, "GETTING_THERE", 0.25)
    done = perform("check --deadline 250ms -H slow", program, monkeypatch)
    assert (done.exit, done.out, done.err) == (69, "", "gpuprestart: slow: no answer within 0.5 s\n")


def test_what_was_answered_before_a_signal_is_shown(program: str, put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    put("slow", "echo $$ > pid; exec sleep 1000")
    asked = 0

    def until_up(descriptors: Iterable[int], seconds: float) -> set[int]:
        nonlocal asked
        asked += 1
        # All three descriptors of one are gone when it is through.
        if len(set(descriptors)) <= 3 and (Path(program).parent / "pid").exists():
            raise Interrupted("SIGINT")
        return wait(descriptors, min(seconds, 0.05))

    done = perform("status -H up -H slow", program, monkeypatch, until_up)
    assert done.exit == 75 and "SIGINT came before it had answered" in done.out and "\nup:\n" in done.out
    assert gone(int((Path(program).parent / "pid").read_text()))


#: The program as it is started, with another ssh.
STARTED = """
import sys
from gpuprestart import cli
from gpuprestart.host import ssh
ssh.PROGRAM = sys.argv.pop(1)
cli.run()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_real_signal_ends_the_program_and_every_ssh(program: str, put: Put, number: signal.Signals) -> None:
    for host in "ab":
        put(host, f"trap '' INT TERM; sleep 1000 & echo $! > child.{host}; echo $$ > pid.{host}; wait")
    command = [sys.executable, "-c", STARTED, program, "status", "-H", "a", "-H", "b"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            until = time.monotonic() + PATIENCE
            names = [Path(program).parent / f"{what}.{host}" for what in ("pid", "child") for host in "ab"]
            while not all(name.exists() and name.read_text().strip() for name in names):
                assert time.monotonic() < until
                wait([], 0.01)
            process.send_signal(number)
            out, err = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert (process.returncode, err) == (75, "") and out.count(f"{number.name} came before it had answered") == 2
    assert all(gone(int(name.read_text())) for name in names)


# What is typed there -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        ["status"],
        ["check", "--unit", "a b;$(id)", "--policy", "/x 'y'", "--gpus", "0,GPU-1", "--deadline", "3s", "--journal"],
        ["check", "--unit=-x", "--gpus="],
        ["doctor"],
        ["doctor", "--", "-x"],
        ["history", "-n", "5", "sho"],
        ["history", "show", "3f2a"],
        ["history"],
    ],
)
def test_it_is_understood_there_as_it_was_meant_here(line: list[str]) -> None:
    meant = parse([line[0], "--json", *line[1:]])
    typed = shlex.split(shlex.join(remote.words(meant, now=0.0)))
    assert parse(typed[1:]) == meant


def test_a_moment_is_the_same_on_every_machine() -> None:
    now = 1_796_106_600.5
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now - 90))

    def since(text: str) -> list[str]:
        return [word for word in remote.words(Command("history", since=text), now=now) if "since" in word]

    assert since("2h") == since("2 h ago") == ["--since=7200s"]
    # The moment itself is not to be missed.
    assert since(moment) in (["--since=90s"], ["--since=91s"])
    assert since("800d") == ["--since=800d"]
    assert since("") == []


@pytest.mark.parametrize("line", ["history --since soon", "status --watch", "history --svg /x"])
def test_what_is_not_to_be_had_is_said_and_nobody_is_asked(
    line: str, program: str, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("never", "touch asked")
    done = perform(f"{line} -H never", program, monkeypatch)
    assert (done.exit, done.out) == (64, "") and done.err.startswith("gpuprestart: ")
    assert not (Path(program).parent / "asked").exists()


# What is made of it --------------------------------------------------------------------------------------------------

CHANGED = b"@@@@@@\n@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\n@@@@\nHost key verification failed.\n"
MANY_DIGITS = b'{"version": 1, "outcome": "clean", "x": ' + b"9" * 4_000_000 + b"}"
#: No Python has a limit of its own for these.
FEWER_DIGITS = b'{"version": 1, "outcome": "clean", "x": ' + b"9" * 300 + b"}"
MANY_BRACKETS = b"[" * 1_000_000


@pytest.mark.parametrize(
    ("status", "out", "err", "fault"),
    [
        (
            255,
            b"",
            b"ssh: connect to host x port 22: No route to host\r\n",
            "not reachable: connect to host x port 22: ",
        ),
        (255, b"", b"Host key verification failed.\r\n", "is not known here; ssh node7 once"),
        (255, b"", CHANGED, "is not the one that is known"),
        (255, b"", b"x: Permission denied (publickey).\n", "it takes a key or an agent"),
        (255, b"", b"", "the connection broke"),
        (255, b'{"version": 1}', b"", "the connection broke"),
        (-9, b"", b"", "ssh was ended by signal 9"),
        (127, b"", b"bash: gpuprestart: command not found\n", "not installed there (bash: "),
        (127, b"", b"", "gpuprestart is not installed there"),
        (126, b"", b"sh: 1: gpuprestart: Permission denied\n", "may not be run there"),
        (
            64,
            b"",
            b"usage: x\ngpuprestart check: unrecognized arguments: --journal\n",
            "older one: gpuprestart check: ",
        ),
        (64, b"", b"usage: x\ngpuprestart: argument VERB: invalid choice: 'history' (choose)\n", "older one"),
        (64, b"", b"gpuprestart: 'a b' is no name of a unit\n", "'a b' is no name of a unit (status 64)"),
        (69, b"", b"x\ngpuprestart: the journal cannot be read\n", "the journal cannot be read (status 69)"),
        (1, b"", b"", "it did not say why (status 1)"),
        (1, b"This account is currently not available.\n", b"", "something else: This account is currently"),
        (0, b"", b"", "answered nothing"),
        (0, b"[]", b"", "something else: []"),
        (0, b"null", b"", "something else: null"),
        (0, b'"x"', b"", 'something else: "x"'),
        (0, b'{"version": 1}', b"", "something else"),
        (0, b'{"version": 2, "outcome": "clean"}', b"", "of one version here and there"),
        (0, b'{"version": true, "outcome": "clean"}', b"", "of one version here and there"),
        (0, b'{"outcome": "clean"}', b"", "of one version here and there"),
        (0, b'{"version": 1, "outcome": "clean", "x": NaN}', b"", "something else"),
        (0, b'{"version": 1, "outcome": "clean", "x": 1e999}', b"", "something else"),
        (0, MANY_DIGITS, b"", "something else"),
        (0, FEWER_DIGITS, b"", "something else"),
        (0, MANY_BRACKETS, b"", "something else"),
        (0, b"\xff\xfe", b"", "something else: \\xff\\xfe"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_why_there_is_no_answer(status: int, out: bytes, err: bytes, fault: str) -> None:
    found = fleet.answer("node7", "status", status=status, out=out, err=err)
    assert fault in found.fault and found.found is None and found.fault.isprintable() and len(found.fault) < 400


def said(**changes: Any) -> bytes:
    return json.dumps(document(**changes)).encode()


def test_a_shell_that_greets_does_not_hide_the_answer() -> None:
    found = fleet.answer("node7", "check", status=0, out=b"Welcome to node7\n" + said() + b"\n", err=b"")
    assert (found.fault, found.found) == ("", {**document(), "host": "node7"})


def test_the_name_of_a_machine_is_the_one_that_was_typed() -> None:
    found = fleet.answer("node7", "history", status=0, out=b"[" + said(host="node8") + b"]", err=b"")
    assert [run["host"] for run in found.found] == ["node7"]


@pytest.mark.parametrize(
    ("verb", "ends", "status"),
    [
        ("status", [(0, "clean"), (0, "not-freed")], 0),
        ("status", [(0, "clean"), (69, "unknown")], 69),
        ("status", [(0, "clean"), (75, "protected")], 69),
        ("status", [(0, "clean"), None], 69),
        ("check", [(75, "protected")], 75),
        ("check", [(0, "clean"), (75, "protected"), (70, "internal")], 75),
        ("check", [(70, "internal"), (66, "precondition")], 66),
        ("check", [(75, "protected"), None], 69),
        ("check", [(77, "denied"), None], 77),
        ("check", [(75, "interrupted"), (77, "denied")], 75),
        ("check", [None, (78, "config")], 78),
        ("check", [(0, "clean"), (0, "none")], 0),
        ("check", [(33, "clean")], 69),
        ("doctor", [(0, ""), (75, ""), (69, "")], 69),
        ("doctor", [(75, ""), (0, "")], 75),
        ("history", [(0, ""), (0, "")], 0),
    ],
)
def test_what_all_of_them_come_to(verb: str, ends: list[Optional[tuple[int, str]]], status: int) -> None:
    answers = [
        fleet.Answer(str(place), fault="down") if end is None else fleet.Answer(str(place), end[0], {"outcome": end[1]})
        for place, end in enumerate(ends)
    ]
    assert fleet.exit_status(verb, answers) == status
    assert fleet.exit_status(verb, answers[::-1]) == status


def test_for_programs_and_as_csv(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    down, up = json.loads(perform("status --json -H refused -H up", program, monkeypatch).out)
    assert (down["host"], down["exit"], down["answer"]) == ("refused", None, None) and "refused" in down["fault"]
    assert (up["host"], up["exit"], up["fault"], up["said"]) == ("up", 0, None, [])
    assert up["answer"] == {**json.loads(os.environ["ANSWER"]), "host": "up"}
    done = perform("status --csv -H refused -H up", program, monkeypatch)
    assert done.out.splitlines() == ["host, index, memory.used [MiB]", "refused, [N/A], [N/A]", "up, 0, 3 MiB"]
    assert done.exit == 69 and done.err.startswith("gpuprestart: refused: not reachable: ")


def test_the_runs_of_all_machines_are_one_list_by_time(program: str, put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    for host, times in (("a", (100.0, 300.0)), ("b", (200.0,)), ("none", ())):
        put(host, f"cat <<'END'\n{json.dumps([document(time=at, unit=f'{at:.0f}.service') for at in times])}\nEND")
    done = perform("history -H a -H b -H none -H refused", program, monkeypatch)
    overview, runs = done.out.split("\n\n")
    assert [line.split()[0:2] for line in overview.splitlines()[1:]] == [
        ["a", "2"], ["b", "1"], ["none", "0"], ["refused", "-"],
    ]  # fmt: skip
    assert [(line.split()[0], line.split()[3]) for line in runs.splitlines()[1:]] == [
        ("a", "100.service"), ("b", "200.service"), ("a", "300.service"),
    ]  # fmt: skip
    assert done.exit == 69
    assert perform("history -H none", program, monkeypatch) == Shown(
        0, "", "gpuprestart: none: no run in its journal\n"
    )


def test_the_findings_of_another_machine_read_as_they_do_there() -> None:
    there = [
        checks.ok("proc", "fine"),
        checks.fault("b", "it is so", "that comes of it", "do this"),
        checks.fault("c", "not seen", "unknown", "look", blind=True),
    ]
    found = fleet.answer("node7", "doctor", status=69, out=checks.as_json("s.service", there).encode(), err=b"")
    assert checks.read(found.found) == checks.in_order(there)
    here = checks.as_text("s.service", there).replace("check --unit", "check -H node7 --unit")
    assert checks.as_text("s.service", checks.read(found.found), host="node7") == here
    assert "not everything could be looked at" in here
    assert checks.as_text(None, there[:1], host="node7").endswith("\nnode7: 1 ok")


@pytest.mark.parametrize(
    "wrong",
    [{"level": "worse"}, {"level": ["ok"]}, {"level": None}, {"fact": 1}, {"fact": ""}, {"check": None}],
    ids=str,
)
def test_a_finding_that_is_none_is_left_out(wrong: dict[str, Any]) -> None:
    right = {"check": "proc", "level": "ok", "fact": "fine"}
    found = checks.read({"checks": [{**right, **wrong}, "x", right]})
    assert found == [checks.ok("proc", "fine")]
    only = json.dumps({"version": 1, "checks": [{**right, **wrong}]}).encode()
    assert "something else" in fleet.answer("node7", "doctor", status=0, out=only, err=b"").fault


def test_commands_that_would_help_are_for_that_machine() -> None:
    """Typed here they would stop the servers of this one."""
    held = document(outcome="protected", exit=75, holders=[{**document()["holders"][0], "action": "refuse"}])
    gpu = {**held["gpus"][0], "clean": False}
    there = documents.document({**held, "gpus": [gpu], "host": "node7"})
    assert columns.advice(there) and "\nWhat would help on node7:\n" in columns.check(there)
    del there["host"]
    assert "\nWhat would help:\n" in columns.check(there)


FLAT = some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=8)
JSON = FLAT | some.lists(FLAT, max_size=3) | some.dictionaries(some.text(max_size=3), FLAT, max_size=3)
KEYS = (*document(), "checks", "level", "fact", "check", "blind", *document()["gpus"][0], *document()["holders"][0])
PART = some.dictionaries(some.sampled_from(KEYS), JSON, max_size=6)
ODD = some.dictionaries(some.sampled_from(KEYS), JSON | PART | some.lists(PART, max_size=2), max_size=6)
HOSTILE = "\x1b[2J\x1b]0;x\x07[red]\u202e\n"


@given(
    verb=some.sampled_from(remote.VERBS),
    odd=ODD,
    status=some.sampled_from([0, 0, 0, -9, 64, 69, 75, 127, 255, 300]),
    garbage=some.binary(),
)
def test_whatever_comes_back_is_shown_and_moves_no_terminal(
    verb: str, odd: dict[str, Any], status: int, garbage: bytes
) -> None:
    level = {"check": HOSTILE, "level": "fault", "fact": HOSTILE, "remedy": HOSTILE}
    whole = {"version": 1, "outcome": HOSTILE, "unit": HOSTILE, "checks": [level, odd], **odd}
    several = []
    for found in (odd, whole, {**whole, "version": 1}, [{**whole, "version": 1}, {}]):
        out, err = json.dumps(found).encode() + garbage[:status], garbage + HOSTILE.encode()
        several.append(fleet.answer("node7", verb, status=status, out=out, err=err))
    for answers in (several, several[2:3]):
        for command in (Command(verb), Command(verb, json=True), Command(verb, csv=verb == "status")):
            said = io.StringIO()
            remote._show(command, answers, out=said, err=said)
            assert said.getvalue().replace("\n", "").isprintable()
        assert fleet.exit_status(verb, answers) in (0, 64, 66, 69, 70, 75, 77, 78)


def test_a_machine_that_is_not_well_is_red_on_a_terminal(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    from .test_history import Terminal

    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(ssh, "PROGRAM", program)
    out = Terminal()
    assert remote.perform(parse(["status", "-H", "up", "-H", "refused", "-H", "garbage"]), wait, out=out, err=out) == 69
    rows = out.getvalue().split("\n")
    assert "\x1b[32mclean" in rows[1] and "\x1b[31mnot reachable" in rows[2]
    assert "\x1b[31mhello" not in out.getvalue()
