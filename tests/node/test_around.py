"""Around the judging: signals to the hook, hostile text, wrong policies and command lines, the journal (cases D)."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Sequence
from typing import Any

import pytest

from tests.node.scene import HOLDER, Run, Scene, verdicts

CLEAN = "/usr/bin/gpuprestart clean --json"
POLICY_FILE = "/etc/gpuprestart/policy.toml"

#: In the words of the holder's argv and name; none of them may be seen anywhere.
SECRETS = ("dr4gonfruit", "p0megranate", "hf_qu1ncequ1nce", "mulb3rry", "t4marind", "sk-l0quatl0quat")

#: What a record would look like to whoever believed these bytes.
FORGED = (
    "x\nMESSAGE=forged by argv\nPRIORITY=0\nFORGED_BY=argv\n\n<0>forged by argv\x1b[31mred\x1b]0;title\x07\r\t\x9b2J"
)

#: Says which processes are left of a command, and with which status it ended: an orphan would become its child.
REAPER = """
import ctypes, os, subprocess, sys
assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0
status = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode
try:
    left = os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    left = None
print(status, left)
"""


# Signals to the hook -------------------------------------------------------------------------------------------------


@pytest.mark.case("D3")
def test_stopped_while_it_waits_for_memory(scene: Scene) -> None:
    """With KillMode=process nobody but the hook itself clears up what it has started."""
    scene.gpu.ask("leak", gpu=0, mib=900)
    server = scene.server(gpus="0", more="KillMode=process\n")
    scene.node.systemctl("start", "--no-block", server)
    scene.node.wait_for(lambda: _status_text(scene, server).startswith("Waiting"), timeout=10, what="the hook waits")
    assert scene.node.show(server, "ActiveState", "SubState") == {"ActiveState": "activating", "SubState": "start-pre"}
    hook = int(scene.node.show(server, "ControlPID")["ControlPID"])
    assert len(scene.node.unit_pids(server)) > 1
    told = time.time()
    scene.node.systemctl("stop", server)
    run = scene.verdict(server)
    assert (run.outcome, run.exit) == ("interrupted", 75)
    (record,) = scene.records(run, "verdict")
    assert int(record["__REALTIME_TIMESTAMP"]) / 1e6 - told < 1
    assert "SIGTERM" in record["MESSAGE"]
    assert scene.signals(run) == []
    assert not scene.alive(hook)
    assert scene.node.unit_pids(server) == []


@pytest.mark.case("D3")
def test_stopped_before_it_knows_whose_start_it_is(scene: Scene) -> None:
    """The shell around it has kept the signal to itself. Without a unit it would judge every GPU of the machine."""
    _, orphans = scene.orphans("--open", "0,1", "--gpu", "0,1", "--mib", "900")
    begun, go = f"/run/{scene.name('begun')}", f"/run/{scene.name('go')}"
    waits = f"touch {begun}; until [ -e {go} ]; do sleep 0.02; done"
    script = f'trap : TERM; {waits}; {CLEAN} --deadline 5s; exit "$?"'
    hook = f"/bin/sh -c {shlex.quote(script.replace('$', '$$'))}"
    server = scene.server(gpus="0", command=hook, more="KillMode=process\n")
    scene.node.systemctl("start", "--no-block", server)
    scene.node.wait_for(lambda: scene.node.exists(begun), timeout=10, what="the shell has begun")
    scene.node.systemctl("stop", "--no-block", server)
    scene.await_state(server, "deactivating")
    scene.node.run(["touch", go])
    scene.await_state(server, "failed")
    run = _said(scene, server)
    assert (run["outcome"], run["exit"]) == ("interrupted", 75)
    assert server in run["message"]
    assert run["gpus"] == [] and scene.alive(orphans)


@pytest.mark.case("D3")
def test_what_is_left_of_a_start_that_is_over_judges_nothing(scene: Scene) -> None:
    """The shell has obeyed, and the hook in its pipeline goes on without it; nobody waits for what it finds."""
    _, orphans = scene.orphans("--open", "0,1", "--gpu", "0,1", "--mib", "900")
    begun, go = f"/run/{scene.name('begun')}", f"/run/{scene.name('go')}"
    script = f"{{ touch {begun}; until [ -e {go} ]; do sleep 0.02; done; {CLEAN} --deadline 5s; }} & wait"
    server = scene.server(gpus="0", command=f"/bin/sh -c {shlex.quote(script)}", more="KillMode=process\n")
    scene.node.systemctl("start", "--no-block", server)
    scene.node.wait_for(lambda: scene.node.exists(begun), timeout=10, what="the shell has begun")
    scene.node.systemctl("stop", server)
    scene.await_state(server, "failed")
    scene.node.run(["touch", go])
    scene.node.wait_for(lambda: not scene.node.unit_pids(server), timeout=20, what="what is left has ended")
    run = _said(scene, server)
    assert (run["outcome"], run["exit"]) == ("interrupted", 75)
    assert server in run["message"]
    assert run["gpus"] == [] and scene.alive(orphans)


@pytest.mark.parametrize("outcome", ["clean", "cleaned", "protected", "unattributed", "config"])
def test_no_process_outlives_a_run(scene: Scene, outcome: str) -> None:
    if outcome == "cleaned":
        scene.orphans("--open", "0", "--gpu", "0", "--mib", "900")
    elif outcome == "protected":
        scene.service("--open", "0", "--gpu", "0", "--mib", "900")
    elif outcome == "unattributed":
        scene.gpu.ask("leak", gpu=0, mib=900)
    command = ["/usr/bin/gpuprestart", "clean", "--gpus", "9" if outcome == "config" else "0", "--deadline", "1s"]
    done = scene.node.run(["/usr/bin/python3", "-c", REAPER, *command])
    status = {"clean": 0, "cleaned": 0, "config": 78}.get(outcome, 75)
    assert done.stdout == f"{status} None\n"


def test_no_descriptor_is_left_open_by_looking_again(scene: Scene) -> None:
    scene.gpu.ask("leak", gpu=0, mib=900)
    # A suspect, who is looked at closely each time, and somebody whose memory is elsewhere.
    scene.service("--open", "0")
    scene.service("--open", "0,1", "--gpu", "1", "--mib", "900")
    scene.gpu.ask("calls", start=True)
    server = scene.server(gpus="0", more="KillMode=process\n")
    scene.node.systemctl("start", "--no-block", server)
    try:
        _looks(scene, 1)
        hook = scene.node.show(server, "ControlPID")["ControlPID"]
        scene.node.wait_for(lambda: _status_text(scene, server).startswith("Waiting"), timeout=10, what="it waits")
        before = scene.node.run(["ls", "-l", f"/proc/{hook}/fd"]).stdout.splitlines()[1:]
        _looks(scene, 2)
        # Between two looks there are only samples, for which nothing is opened.
        scene.node.wait_for(
            lambda: len(scene.node.run(["ls", f"/proc/{hook}/fd"]).stdout.split()) == len(before),
            timeout=1,
            what=f"as many descriptors are open as before, {before}",
        )
    finally:
        scene.gpu.ask("calls", stop=True)
        scene.node.systemctl("stop", server)


# Hostile text --------------------------------------------------------------------------------------------------------


@pytest.mark.case("D5")
@pytest.mark.parametrize("stale", [True, False])
def test_secrets_and_forgeries_in_a_command_line(scene: Scene, stale: bool) -> None:
    # By way of a script: systemd tells of the command line of a transient unit, and forges records out of this one.
    hostile = shlex.join(["--comm", "a\n<0>forged\x1b[1m", *_hostile()])
    scene.node.write("/run/t-hostile", f'exec "$@" {hostile}\n')
    hold = ["/bin/sh", "/run/t-hostile", HOLDER, "--open", "0", "--gpu", "0", "--mib", "900"]
    if stale:
        _, (holder,) = scene.orphans(prefix=hold)
    else:
        unit = scene.name("live")
        scene.node.start(hold, unit=unit, user="model", properties=["Type=notify"])
        holder = int(scene.node.show(unit, "MainPID")["MainPID"])
    # What is to be hidden has to be there.
    assert all(secret in scene.node.read(f"/proc/{holder}/cmdline") for secret in SECRETS)
    assert scene.node.read(f"/proc/{holder}/comm") == "a\n<0>forged\x1b[1m\n"

    table = scene.node.run(["gpuprestart", "check", "--gpus", "0"], check=False)
    status = scene.node.run(["gpuprestart", "status"], check=False)
    checked = scene.check("--gpus", "0")
    typed = scene.clean("--gpus", "0") if not stale else None
    server = scene.server(gpus="0")
    assert scene.start(server) is stale
    run = scene.verdict(server)
    assert run.outcome == ("cleaned" if stale else "protected")
    assert run.holder(holder)["comm"].startswith("a\\x0a<0>forged")

    screens = [table.stdout, table.stderr, status.stdout, status.stderr, checked.stdout, checked.stderr]
    screens += [typed.stdout, typed.stderr] if typed else []
    screens.append(scene.node.run(["systemctl", "status", "--lines=0", server], check=False).stdout)
    assert str(holder) in table.stdout and str(holder) in checked.stdout and str(holder) in status.stdout
    for screen in screens:
        assert not _leaks(screen)
        assert all(line.isprintable() for line in screen.split("\n"))

    records = scene.records(run) + scene.node.journal(unit=server)
    about = [record for record in scene.records(run) if record.get("HOLDER_PID") == str(holder)]
    assert about and all("[redacted]" in record["HOLDER_CMDLINE"] for record in about)
    for record in records:
        assert not _leaks(json.dumps(record, ensure_ascii=False)), record
        for name in (field for field in record if not field.startswith("_")):
            assert all(value.isprintable() for value in _values(record[name])), (name, record[name])
    _nothing_forged(scene, run, server)


def _hostile() -> list[str]:
    secrets = iter(SECRETS)
    return [
        *("--api-key", next(secrets)),
        f"--api-key={next(secrets)}",
        f"HF_TOKEN={next(secrets)}",
        f"https://user:{next(secrets)}@example.org/model",
        FORGED,
        f"--env=A=b\nPASSWORD={next(secrets)}\nPRIORITY=0",
        next(secrets),
    ]


def _leaks(text: str) -> list[str]:
    return [secret for secret in SECRETS if secret in text]


def _nothing_forged(scene: Scene, run: Run, server: str) -> None:
    assert scene.node.journal(FORGED_BY="argv") == []
    for record in [*scene.records(run), *scene.node.journal(unit=server)]:
        assert record.get("PRIORITY") != "0", record
        assert len(_values(record["MESSAGE"])) == 1
        assert not record["MESSAGE"].startswith(("forged", "<0>")), record
        # Who wrote a record is journald's word: nobody but the hook, and systemd about the unit.
        assert record["_COMM"] in ("gpuprestart", "systemd"), record
    natives = scene.records(run)
    assert len({record["GPUPRESTART_EVENT"] for record in natives}) == len({r["MESSAGE_ID"] for r in natives})
    assert {record["SYSLOG_IDENTIFIER"] for record in natives} == {"gpuprestart"}


def _values(value: Any) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else [str(value)]


# Policies and command lines that are wrong ---------------------------------------------------------------------------


@pytest.mark.case("D7")
@pytest.mark.parametrize(
    "text, says",
    [
        ("[memory]\nmax_used = 64 MiB\n", r":2: .*TOML"),
        ("[memory]\nmax_usd = '64 MiB'\n", r":2: memory\.max_usd: is no known key .*max_used"),
        ("\n[owners]\ndedicated = 'yes'\n", r":3: owners\.dedicated: .*true or false"),
        ("[gpus]\n\n[[rule]]\naction = 'kill'\nmatch = { comm = '(' }\n", r":5: rule\[0\]\.match\.comm: .*regular"),
        ("[deadline]\n# how long\ntotal = '12 parsecs'\n", r":3: deadline\.total: .*12 parsecs"),
        # Well below the size that is read at all, so that the parser sees it.
        ("gpus = " + "[" * 60_000, r":1: .*(deep|nest)"),
    ],
    ids=["syntax", "key", "type", "regex", "parsecs", "nested"],
)
def test_a_policy_with_a_fault(scene: Scene, text: str, says: str) -> None:
    scene.policy(text, base="")
    _config(scene, re.escape(POLICY_FILE) + says)


@pytest.mark.case("D7")
@pytest.mark.parametrize(
    "script, says",
    [
        ("chmod 666 $0", r": can be written by others, mode 0666"),
        ("chown alice $0", r": belongs to uid 5002"),
        ("chmod 777 /etc/gpuprestart", r": /etc/gpuprestart can be written by others"),
        ("rm $0; mkdir $0", r": is not a regular file"),
        ("rm $0; ln -s /nowhere $0", r": leads over a link to /nowhere"),
        ("head -c 1048576 /dev/zero | tr '\\0' '[' > $0", r": is too big"),
        ("printf '[memory]\\n# \\303\\050\\n' > $0", r":2: byte 0xc3 is not UTF-8"),
    ],
    ids=["writable", "owner", "folder", "directory", "link", "brackets", "bytes"],
)
def test_a_policy_that_is_no_file_to_believe(scene: Scene, script: str, says: str) -> None:
    scene.policy()
    scene.node.run(["sh", "-ec", script, POLICY_FILE])
    try:
        _config(scene, re.escape(POLICY_FILE) + says)
    finally:
        scene.node.run(["chmod", "755", "/etc/gpuprestart"])


@pytest.mark.case("D7")
def test_a_policy_that_was_named_and_is_not_there(scene: Scene) -> None:
    _config(scene, "/nowhere/policy.toml: there is no such file", "--policy", "/nowhere/policy.toml")


@pytest.mark.case("D7")
def test_an_overlay_with_a_fault(scene: Scene) -> None:
    """The site's policy alone would do, but the unit was meant to have another."""
    server = scene.name("server")
    scene.policy("[memory]\nsettle = 'soon'\n", name=f"{server}.toml", base="")
    _config(scene, rf"/etc/gpuprestart/{server}\.toml:2: memory\.settle: .*soon", unit=server)


@pytest.mark.parametrize("arguments", [["clean", "--nonsense"], ["clean", "now"], ["frobnicate"], ["clean", "--unit"]])
def test_a_command_line_that_is_wrong(scene: Scene, arguments: Sequence[str]) -> None:
    """The status of a typing error, and no verdict that could be taken for one on the GPUs."""
    _, (orphan,) = scene.orphans("--open", "0", "--gpu", "0", "--mib", "900")
    server = scene.server(command=" ".join(["/usr/bin/gpuprestart", *arguments]))
    assert not scene.start(server)
    assert "status=64" in scene.node.show(server, "ExecStartPre")["ExecStartPre"]
    entries = scene.node.journal(unit=server)
    assert any("usage: gpuprestart" in each["MESSAGE"] for each in entries)
    assert not any("GPUPRESTART_EVENT" in each or each["MESSAGE"].startswith("{") for each in entries)
    assert _status_text(scene, server) == ""
    assert scene.alive(orphan)


def _config(scene: Scene, says: str, *options: str, unit: str | None = None) -> None:
    """The start is refused as a fault of configuration, and the stale holder that is there is not touched."""
    _, (orphan,) = scene.orphans("--open", "0", "--gpu", "0", "--mib", "900")
    server = scene.server(unit, command=" ".join([CLEAN, *options]))
    assert not scene.start(server)
    run = scene.verdict(server)
    assert (run.outcome, run.exit) == ("config", 78)
    assert "status=78" in scene.node.show(server, "ExecStartPre")["ExecStartPre"]
    assert re.search(says, run.verdict["message"]), run.verdict["message"]
    (record,) = scene.records(run, "verdict")
    assert (record["GPUPRESTART_OUTCOME"], record["GPUPRESTART_EXIT"]) == ("config", "78")
    assert re.search(says, record["MESSAGE"])
    assert scene.signals(run) == []
    assert scene.alive(orphan)


# Where people look ---------------------------------------------------------------------------------------------------


def test_systemctl_status_tells_why_a_start_failed(scene: Scene) -> None:
    scene.gpu.ask("leak", gpu=3, mib=900)
    server = scene.server(command=f"{CLEAN} --deadline 1s")
    assert not scene.start(server)
    run = scene.verdict(server)
    shown = scene.node.run(["systemctl", "status", "--full", "--lines=0", server], check=False).stdout
    (line,) = [line for line in shown.splitlines() if line.strip().startswith("Status: ")]
    assert re.search(
        r'Status: "At 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d \w+ gpuprestart refused the start: unattributed: ', line
    )
    assert "GPU 3" in line and "903 MiB" in line and run.verdict["hints"][0] in line


def test_systemctl_status_of_a_running_server_tells_what_was_done(scene: Scene) -> None:
    _, (orphan,) = scene.orphans("--open", "0", "--gpu", "0", "--mib", "900")
    server = scene.server()
    assert scene.start(server)
    shown = scene.node.run(["systemctl", "status", "--full", "--lines=0", server]).stdout
    assert re.search(rf'Status: "At 20.* gpuprestart cleaned the GPUs: .*\[{orphan}\]', shown)


def test_the_journal_explains_a_verdict(scene: Scene) -> None:
    scene.service("--open", "0", "--gpu", "0", "--mib", "900")
    scene.node.run(["journalctl", "--update-catalog"])
    server = scene.server(gpus="0")
    assert not scene.start(server)
    run = scene.verdict(server)
    scene.node.run(["journalctl", "--sync"])
    match = f"GPUPRESTART_RUN={run.verdict['run']}"
    shown = scene.node.run(["journalctl", "--no-pager", "--catalog", match]).stdout
    assert "Subject: The verdict on the GPUs is: protected" in shown
    assert "Defined-By: gpuprestart" in shown
    assert re.search(r"protected: a GPU is held or claimed by somebody alive; stop that unit", shown)
    assert f"journalctl {match}" in shown
    # Every kind of record that a run writes is explained.
    for message_id in {record["MESSAGE_ID"] for record in scene.records(run)}:
        assert "Subject:" in scene.node.run(["journalctl", "--no-pager", "--dump-catalog", message_id]).stdout


@pytest.mark.parametrize("holder", ["live", "none"])
def test_without_journald(scene: Scene, holder: str) -> None:
    """The verdict is the same. What would be records are lines with a priority, as systemd reads them."""
    if holder == "live":
        scene.service("--open", "0", "--gpu", "0", "--mib", "900")
    else:
        scene.gpu.ask("leak", gpu=0, mib=900)
    options = ["clean", "--json", "--gpus", "0", "--deadline", "1s"]
    usual = scene.node.run(["/usr/bin/gpuprestart", *options], check=False)
    script = 'mount -t tmpfs tmpfs /run/systemd/journal && exec /usr/bin/gpuprestart "$@"'
    done = scene.node.run(["unshare", "--mount", "sh", "-c", script, "sh", *options], check=False)
    expected, verdict = json.loads(usual.stdout), json.loads(done.stdout)
    assert done.returncode == usual.returncode == verdict["exit"] == 75
    assert verdict["outcome"] == ("protected" if holder == "live" else "unattributed")
    for key in ("outcomes", "exit", "message", "hints", "holders"):
        assert verdict[key] == expected[key]
    lines = done.stderr.splitlines()
    assert all(re.match("<[2-7]>", line) for line in lines), lines
    assert sum(line.startswith("<3>") and verdict["message"] in line for line in lines) == 1
    assert any(line.startswith("<4>GPU 0 is not clean") for line in lines)
    assert scene.node.journal(GPUPRESTART_RUN=verdict["run"]) == []


def test_a_start_without_journald(scene: Scene) -> None:
    """A clean start is one all the same."""
    hook = "mount -t tmpfs tmpfs /run/systemd/journal && exec /usr/bin/gpuprestart clean"
    server = scene.server(command=f"/usr/bin/unshare --mount /bin/sh -c '{hook}'")
    assert scene.start(server)
    assert "gpuprestart found the GPUs clean" in _status_text(scene, server)


def _said(scene: Scene, unit: str) -> dict[str, Any]:
    """The last verdict that was printed in a unit, whichever unit it was given for."""
    return verdicts(scene.node.journal(unit=unit))[-1]


def _status_text(scene: Scene, unit: str) -> str:
    return scene.node.show(unit, "StatusText")["StatusText"]


def _looks(scene: Scene, count: int) -> None:
    """Wait until the hook has looked at everything so many times: GPU 7, which it does not use, is asked only then."""

    def looked() -> bool:
        calls: list[list[str]] = scene.gpu.ask("calls", list=True)["calls"]
        return sum(call[2:4] == ["nvmlDeviceGetComputeRunningProcesses_v3", "7"] for call in calls) >= count

    scene.node.wait_for(looked, timeout=10, what=f"everything was looked at {count} times")
