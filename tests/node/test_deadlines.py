"""When a start has failed, and what is left then, where something hangs, crashes, is gone or is full (B5, C4, D3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from tests.node.hung import Hung
from tests.node.scene import Run, Scene, verdicts

CLEAN = "/usr/bin/gpuprestart clean --json"
HOLD = ("--open", "0", "--gpu", "0", "--mib", "900")

#: Seconds: the deadline of a run, and how long after it a unit may still not have failed; on a machine that has other
#: things to do, so many times that.
DEADLINE, FAILED, SLACK = 1.5, 2, 3

#: Shorter than the deadline, so that both signals are sent inside it.
POLICY = "[deadline]\nterm = '500 ms'\n"

#: "A unit has failed", as systemd tells it (SD_MESSAGE_UNIT_FAILURE_RESULT in its sd-messages.h).
HAS_FAILED = "d9b373ed55a64feb8242e02dbe79a49c"


@pytest.fixture(autouse=True)
def before(scene: Scene) -> None:
    scene.node.run(["rm", "-rf", "/run/gpuprestart"])
    scene.policy(POLICY)


# A driver that hangs -------------------------------------------------------------------------------------------------


@pytest.mark.case("C4")
@pytest.mark.parametrize("state", ["killable", "D"])
@pytest.mark.parametrize("moment", ["lists processes", "ends somebody", "waits for memory"])
def test_a_driver_that_hangs_while_it(scene: Scene, moment: str, state: str) -> None:
    """Not only at the beginning of a run: what it has done by then is told, and the deadline holds."""
    holder = 0
    if moment == "ends somebody":
        _, (holder,) = scene.orphans(*HOLD, "--ignore-term")
    elif moment == "waits for memory":
        scene.gpu.ask("leak", gpu=0, mib=900)
    server = _server(scene)
    with _nothing_left(scene, stuck=state == "D") as hung:
        where = {"path": hung.file} if state == "D" else {}
        if moment == "lists processes":
            scene.gpu.ask("hang", function="nvmlDeviceGetComputeRunningProcesses*", **where)
            _start(scene, server)
        else:
            _start(scene, server)
            _says(scene, server, "Ending" if holder else "Waiting")
            scene.gpu.ask("hang", function="nvmlDeviceGetMemoryInfo*", **where)
        run = _failed(scene, server)
        assert (run.outcome, run.exit) == ("unknown", 69)
        assert scene.signals(run) == ([(holder, "SIGTERM"), (holder, "SIGKILL")] if holder else [])
        # There is a second for the last look.
        assert DEADLINE <= run.verdict["duration_s"] < DEADLINE + SLACK * FAILED
        _fails_in_time(scene, server, run, due=DEADLINE)


@pytest.mark.case("C4")
@pytest.mark.case("D3")
@pytest.mark.parametrize("state", ["killable", "D"])
def test_stopped_while_the_driver_hangs(scene: Scene, state: str) -> None:
    server = _server(scene, command=CLEAN)
    with _nothing_left(scene, stuck=state == "D") as hung:
        scene.gpu.ask("hang", function="nvmlInit*", **({"path": hung.file} if state == "D" else {}))
        scene.gpu.ask("calls", start=True)
        _start(scene, server)
        scene.gpu.ask("wait", call="nvmlInit*")
        scene.gpu.ask("calls", stop=True)
        if state == "D":
            _are_stuck(scene, [pid for pid in scene.node.unit_pids(server) if pid != _control(scene, server)])
        scene.node.systemctl("stop", server)
        run = _failed(scene, server)
        assert (run.outcome, run.exit) == ("interrupted", 75)
        _fails_in_time(scene, server, run, due=run.verdict["duration_s"])


@pytest.mark.case("C4")
def test_a_reader_of_what_a_run_prints_does_not_wait_for_what_hangs(scene: Scene) -> None:
    """A pipeline ends when nobody can write into it any more, and what hangs in the driver could for ever."""
    script = f"( {CLEAN} --gpus 0 --deadline 1s; echo $? ) 2>&1 | timeout 20 cat"
    with Hung(scene.node.leader) as hung:
        scene.gpu.ask("hang", function="nvmlInit*", path=hung.file)
        assert scene.node.run(["bash", "-c", f"set -o pipefail; {script}"]).stdout.endswith("\n69\n")


# A driver that crashes -----------------------------------------------------------------------------------------------


@pytest.mark.case("C4")
@pytest.mark.parametrize("moment", ["starts", "lists processes", "waits for memory"])
def test_a_driver_that_crashes_while_it(scene: Scene, moment: str) -> None:
    """There is nothing to wait for then."""
    server = _server(scene, command=CLEAN)
    with _nothing_left(scene):
        if moment == "waits for memory":
            scene.gpu.ask("leak", gpu=0, mib=900)
            _start(scene, server)
            _says(scene, server, "Waiting")
            scene.gpu.ask("crash", function="nvmlDeviceGetMemoryInfo*")
        else:
            function = "nvmlInit*" if moment == "starts" else "nvmlDeviceGetComputeRunningProcesses*"
            scene.gpu.ask("crash", function=function)
            _start(scene, server)
        run = _failed(scene, server)
        assert (run.outcome, run.exit) == ("unknown", 69)
        assert "SIGSEGV" in run.verdict["message"]
        _fails_in_time(scene, server, run, due=run.verdict["duration_s"])
    if moment != "waits for memory":
        assert run.verdict["duration_s"] < SLACK * FAILED


# Holders that nothing ends -------------------------------------------------------------------------------------------


@pytest.mark.case("B5")
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("whose", ["another unit's", "our own"])
def test_holders_that_survive_sigkill(scene: Scene, whose: str, count: int) -> None:
    """systemd would wait for its unit to be empty, for four times its TimeoutStopSec=, if they stayed in it."""
    with _nothing_left(scene, stuck=whose == "our own") as hung:
        server, pids = _stuck(scene, hung, count, ours=whose == "our own")
        _start(scene, server)
        run = _failed(scene, server)
        assert (run.outcome, run.exit) == ("unkillable", 75)
        assert run.fates == {pid: "survived" for pid in pids}
        assert f"[{pids[0]}]" in run.verdict["message"] and "state D" in run.verdict["message"]
        assert DEADLINE <= run.verdict["duration_s"] < DEADLINE + SLACK * FAILED
        _fails_in_time(scene, server, run, due=DEADLINE)
        # Where they are now they are still what they are, for the next start and for anybody else's.
        _start(scene, server)
        again = _failed(scene, server)
        assert (again.outcome, again.fates) == ("unkillable", run.fates)
        _fails_in_time(scene, server, again, due=DEADLINE)
        assert scene.clean("--gpus", "0", "--deadline", "1s").outcome == "unkillable"
    assert scene.start(server)
    assert _verdict(scene, server).outcome == "clean"


@pytest.mark.case("B5")
@pytest.mark.case("C4")
def test_a_driver_and_a_holder_that_hang(scene: Scene) -> None:
    with _nothing_left(scene, stuck=True) as hung:
        server, (pid,) = _stuck(scene, hung, 1, ours=True)
        _start(scene, server)
        _says(scene, server, "Ending")
        scene.gpu.ask("hang", function="nvmlDeviceGetMemoryInfo*", path=hung.file)
        run = _failed(scene, server)
        assert run.verdict["outcomes"] == ["unknown", "unkillable"]
        assert len(_scopes(scene)) == 2
        _fails_in_time(scene, server, run, due=DEADLINE)


# What a run leaves ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "outcome",
    [
        "clean", "cleaned", "none", "config", "interrupted", "unknown", "protected", "respawning", "not-freed",
        "unattributed",
    ],
)  # fmt: skip
def test_nothing_is_left_of_a_run(scene: Scene, outcome: str) -> None:
    """With KillMode=process systemd ends nobody but the hook itself, so it shows whom that has left."""
    if outcome in ("cleaned", "not-freed", "respawning"):
        more = {"not-freed": ["--alloc", "release_delay=60"], "respawning": ["--supervise", "0.02"]}
        scene.orphans(*HOLD, *more.get(outcome, ()))
    elif outcome in ("unattributed", "interrupted"):
        scene.gpu.ask("leak", gpu=0, mib=900)
    elif outcome == "protected":
        scene.service(*HOLD)
    elif outcome == "unknown":
        scene.gpu.ask("hang", function="nvmlDeviceGetMemoryInfo*")
    gpus = {"none": "", "config": "9"}.get(outcome, "0")
    deadline = 6 if outcome == "respawning" else DEADLINE
    server = _server(scene, gpus=gpus, deadline=deadline, more="KillMode=process\n")
    with _nothing_left(scene):
        _start(scene, server)
        if outcome == "interrupted":
            _says(scene, server, "Waiting")
            scene.node.systemctl("kill", "--kill-who=control", server)
        good = outcome in ("clean", "cleaned", "none")
        scene.await_state(server, "active" if good else "failed")
        assert _verdict(scene, server).outcome == outcome
        assert len(scene.node.unit_pids(server)) == (1 if good else 0)
        left = scene.node.run(["find", "/run/gpuprestart", "-type", "f", "-printf", "%P\n"], check=False).stdout.split()
        kept = {"none": [], "config": [], "unknown": ["locks"], "clean": ["claims", "locks"]}
        kept["cleaned"] = kept["clean"]
        assert sorted(name.partition("/GPU-")[0] for name in left) == kept.get(outcome, ["locks"])


# What a run is not given ---------------------------------------------------------------------------------------------

#: Accepts nobody: who connects is kept waiting for an answer.
SILENT = "import socket, time; s = socket.socket(socket.AF_UNIX); s.bind('/run/t-silent'); s.listen(); time.sleep(1000)"

NO_SYSTEMD = {
    "gone": "InaccessiblePaths=/run/systemd/private /run/dbus/system_bus_socket",
    "silent": "BindPaths=/run/t-silent:/run/systemd/private",
}


@pytest.mark.parametrize("dirty", [True, False])
@pytest.mark.parametrize("how", NO_SYSTEMD)
def test_without_an_answer_from_systemd(scene: Scene, how: str, dirty: bool) -> None:
    """That the GPUs are clean is proved without it, and that a holder is stale is not."""
    scene.node.run(["rm", "-f", "/run/t-silent"])
    scene.node.start(["python3", "-c", SILENT], unit=scene.name("silent"))
    scene.node.wait_for(lambda: scene.node.exists("/run/t-silent"), timeout=10, what="it listens")
    pids = scene.orphans(*HOLD)[1] if dirty else []
    # Without the +, which would lift the unit's settings.
    server = _server(scene, plus=False, more=f"User=root\n{NO_SYSTEMD[how]}\n")
    assert scene.start(server) is not dirty
    run = _verdict(scene, server)
    assert (run.outcome, run.exit) == (("unknown", 69) if dirty else ("clean", 0))
    assert scene.alive(pids)
    if dirty:
        assert run.verdict["message"].startswith("cannot tell whose start this is: ")
        _fails_in_time(scene, server, run, due=DEADLINE)


def test_without_the_message_bus(scene: Scene) -> None:
    """systemd has a way of its own for root."""
    _, (orphan,) = scene.orphans(*HOLD)
    more = "User=root\nInaccessiblePaths=/run/dbus/system_bus_socket\n"
    server = _server(scene, command=CLEAN, plus=False, more=more)
    assert scene.start(server)
    run = _verdict(scene, server)
    assert run.outcome == "cleaned" and run.fates == {orphan: "terminated"}


@pytest.mark.parametrize("dirty", [True, False])
@pytest.mark.parametrize(
    "options, why",
    [
        ("size=4k", "No space left on device"),
        ("size=8k", "No space left on device"),
        ("size=1m,nr_inodes=2", "No space left on device"),
        ("ro", "Read-only file system"),
    ],
)
def test_without_room_for_locks_and_claims(scene: Scene, options: str, why: str, dirty: bool) -> None:
    """A page is taken before, so that there is room for nothing, or for the lock and not for the claim behind it."""
    pids = scene.orphans(*HOLD)[1] if dirty else []
    server = _server(scene, command=CLEAN)
    mount = f"mkdir /run/gpuprestart; mount -t tmpfs -o {options},mode=755 tmpfs /run/gpuprestart"
    take = "; echo > /run/gpuprestart/taken" if options.startswith("size=") and "inodes" not in options else ""
    scene.node.run(["sh", "-ec", mount + take])
    try:
        assert not scene.start(server)
        files = scene.node.run(["find", "/run/gpuprestart", "-type", "f", "-name", ".*"]).stdout
    finally:
        scene.node.run(["umount", "/run/gpuprestart"])
    run = _verdict(scene, server)
    assert (run.outcome, run.exit) == ("denied", 77)
    assert ": /run/gpuprestart/" in run.verdict["message"] and run.verdict["message"].endswith(f": {why}")
    assert "/run" in run.verdict["hints"][0] and "root" not in run.verdict["hints"][0]
    assert "Traceback" not in run.stderr
    assert files == ""
    # For a claim there is nothing to be said before everything else is done.
    assert run.fates == ({pid: "terminated" for pid in pids} if options == "size=8k" else {})


#: Runs commands with these of their streams being pipes that nobody reads, and prints their exit statuses.
BROKEN = """
import os, subprocess, sys
read, write = os.pipe()
os.close(read)
for line in sys.stdin:
    for streams in ({"stdout"}, {"stderr"}, {"stdout", "stderr"}):
        rest = {"stdout", "stderr"} - streams
        given = {**dict.fromkeys(streams, write), **dict.fromkeys(rest, subprocess.DEVNULL)}
        print(subprocess.run(line.split(), **given).returncode)
"""


@pytest.mark.parametrize("dirty", [True, False])
def test_without_a_reader(scene: Scene, dirty: bool) -> None:
    """A pipeline that has ended changes no status, and adds none to those of the contract."""
    if dirty:
        scene.gpu.ask("leak", gpu=0, mib=900)
    refused = 75 if dirty else 0
    verbs = {
        "clean --json --gpus 0 --deadline 200ms": refused,
        "clean --gpus 0 --deadline 200ms": refused,
        "check --gpus 0": refused,
        "clean --json --gpus 9": 78,
        "status": 0,
        "--help": 0,
        "clean --nonsense": 64,
    }
    lines = "".join(f"/usr/bin/gpuprestart {verb}\n" for verb in verbs)
    said = scene.node.run(["python3", "-c", BROKEN], input=lines).stdout.split()
    assert said == [str(status) for status in verbs.values() for _ in range(3)]


@pytest.mark.parametrize("limit", [4, 8, 16, 32])
def test_without_enough_descriptors(scene: Scene, limit: int) -> None:
    """Said as what it is, not as the fault of whatever comes to lack one first; and mended where that is allowed."""
    script = f"ulimit -n {limit}; exec {CLEAN} --gpus 0"
    refused = scene.node.run(["sh", "-c", script], check=False)
    assert (refused.returncode, refused.stdout) == (78, "")
    assert refused.stderr == f"gpuprestart: config: only {limit} open files are allowed; hint: LimitNOFILE=64\n"
    assert scene.node.run(["sh", "-c", script.replace("-n", "-Sn")], check=False).returncode == 0
    more = f"User=root\nLimitNOFILE={limit}\n"
    server = _server(scene, plus=False, more=more)
    assert not scene.start(server)
    assert "status=78" in scene.node.show(server, "ExecStartPre")["ExecStartPre"].replace("/CONFIG", "")


def test_without_another_process(scene: Scene) -> None:
    command = ["prlimit", "--nproc=1", "--", *CLEAN.split(), "--gpus", "0"]
    refused = scene.node.run(command, user="alice", check=False)
    assert (refused.returncode, refused.stdout) == (69, "")
    assert "no more processes" in refused.stderr and "Traceback" not in refused.stderr


# Their parts ---------------------------------------------------------------------------------------------------------


def _server(scene: Scene, *, deadline: float = DEADLINE, more: str = "", **settings: Any) -> str:
    """What its hook prints bears the unit's name from the start: journald may come to look at one that has ended at
    once too late to tell whose it was."""
    settings = {"gpus": "0", "command": f"{CLEAN} --deadline {deadline}s", **settings}
    return scene.server(more=f"SyslogIdentifier=%n\n{more}", **settings)


def _verdict(scene: Scene, server: str) -> Run:
    """That of a unit's last run."""
    entries = scene.node.journal(SYSLOG_IDENTIFIER=server)
    verdict = verdicts(entries)[-1]
    assert verdict["run"] == scene.node.show(server, "InvocationID")["InvocationID"]
    return Run(
        exit=verdict["exit"], verdict=verdict, stdout="", stderr="\n".join(str(each["MESSAGE"]) for each in entries)
    )


def _start(scene: Scene, server: str) -> None:
    """Without waiting, and so that what it has failed with before is not taken for what comes of this."""
    scene.node.run(["systemctl", "reset-failed", server], check=False)
    scene.node.systemctl("start", "--no-block", server)


def _says(scene: Scene, server: str, word: str) -> None:
    scene.node.wait_for(
        lambda: scene.node.show(server, "StatusText")["StatusText"].startswith(word), timeout=10, what=f"it says {word}"
    )


def _failed(scene: Scene, server: str) -> Run:
    """The run of a unit's start, once that has failed."""
    scene.await_state(server, "failed")
    return _verdict(scene, server)


def _fails_in_time(scene: Scene, server: str, run: Run, *, due: float) -> None:
    """By the kernel's own stamp on what systemd told the journal, so that a slow test is no slow unit."""
    invocation = run.verdict["run"]
    (record,) = scene.node.journal(MESSAGE_ID=HAS_FAILED, INVOCATION_ID=invocation, _PID="1")
    after = int(record["_SOURCE_REALTIME_TIMESTAMP"]) / 1e6 - run.verdict["time"]
    assert after < due + SLACK * FAILED, (
        f"{server} had failed {after:.3f} s after its hook began, which was due at {due:.3f} s"
    )


def _stuck(scene: Scene, hung: Hung, count: int, *, ours: bool) -> tuple[str, list[int]]:
    """A server, and so many processes in state D that hold its GPU: left by another unit, or by its last run."""
    # Consoles are terminals: only in sessions of their own do they not go with the shell.
    stuck = f"for _ in $(seq {count}); do setsid sh -c 'exec cat {hung.file}' 9</dev/nvidia0 & done"
    script = f"test -e /run/t-left || {{ touch /run/t-left; {stuck}; sleep 0.3; exit 1; }}\n"
    # Of those who read one page, only one waits for the server; each who opens the file does.
    hung.hang()
    scene.node.run(["rm", "-f", "/run/t-left"])
    scene.node.write("/run/t-leave", script)
    server = _server(scene)
    path, hook = f"/etc/systemd/system/{server}", f"ExecStartPre=+{CLEAN}"
    whole = scene.node.read(path)
    if ours:
        left = server
        leaving = f"KillMode=process\nExecStartPre=+/bin/sh /run/t-leave\n{hook}"
        scene.node.write(path, whole.replace(hook, leaving))
        scene.node.systemctl("daemon-reload")
        assert not scene.start(server)
        scene.await_state(server, "failed")
        scene.node.write(path, whole)
        scene.node.systemctl("daemon-reload")
    else:
        left = scene.name("stuck")
        scene.node.start(["/bin/sh", "/run/t-leave"], unit=left, user="model", properties=["KillMode=process"])
        scene.await_state(left, "failed")
    pids = scene.node.unit_pids(left)
    assert len(pids) == count
    _are_stuck(scene, pids)
    for pid in pids:
        scene.gpu.ask("alloc", gpu=0, mib=500, pid=pid)
    return server, pids


def _are_stuck(scene: Scene, pids: Sequence[int]) -> None:
    """They wait for an answer that never comes, where the first signal that would end them turns them to state D."""
    waits = ["grep", "-Lw", "request_wait_answer", *(f"/proc/{pid}/wchan" for pid in pids)]
    scene.node.wait_for(lambda: not scene.node.run(waits, check=False).stdout, timeout=10, what="they are stuck")


def _control(scene: Scene, server: str) -> int:
    return int(scene.node.show(server, "ControlPID")["ControlPID"])


def _scopes(scene: Scene) -> set[str]:
    listed = scene.node.systemctl(
        "list-units", "--type=scope", "--all", "--plain", "--no-legend", "gpuprestart-*"
    ).stdout
    return {line.split()[0] for line in listed.splitlines()}


@contextmanager
def _nothing_left(scene: Scene, *, stuck: bool = False) -> Iterator[Hung]:
    """Nothing that a run has made or started outlives it, save what hangs, set aside, and that only while it hangs."""
    files = _files(scene)
    with Hung(scene.node.leader) as hung:
        yield hung
        assert bool(_scopes(scene)) is stuck
        scene.node.wait_for(
            lambda: all(state.startswith("D") for state in _processes(scene)), timeout=5, what="only what hangs is left"
        )
        assert _files(scene) == files
        locks = "set -e; for lock in $(ls -d /run/gpuprestart/locks/*); do flock --nonblock $lock true; done"
        scene.node.run(["sh", "-c", locks])
    scene.node.wait_for(
        lambda: not _processes(scene) and not _scopes(scene), timeout=10, what="nor is that, once it does not hang"
    )


def _processes(scene: Scene) -> list[str]:
    """The states of those that may be ours, and of all zombies: PID 1 has not seen them, or another has forgotten."""
    ours = ("gpuprestart", "systemctl", "busctl")
    lines = [line.split() for line in scene.node.run(["ps", "-eo", "stat=,comm="]).stdout.splitlines()]
    return [state for state, *name in lines if state.startswith("Z") or name[0] in ours]


def _files(scene: Scene) -> list[str]:
    """In the folders where programs put what is of use for a while."""
    return sorted(scene.node.run(["find", "/tmp", "/var/tmp", "/dev/shm"]).stdout.split())
