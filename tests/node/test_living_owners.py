"""Whoever is alive is left alone: callers of every kind, daemons of this start, other people's work (cases A)."""

from __future__ import annotations

import json
import shlex

import pytest

from tests.node.machine import wait_for
from tests.node.scene import HOLDER, Run, Scene

CLEAN = "/usr/bin/gpuprestart clean --json --deadline 5s"

#: Units whose processes are other people's work. The node has none of them, so transient ones bear their names.
CARRIERS = ["cron.service", "ssh.service", "slurmd.service", "docker.service"]


# Typed, scheduled, or run by a user's own systemd (A21) --------------------------------------------------------------


@pytest.mark.case("A21")
@pytest.mark.parametrize("user, outcome, status", [("root", "protected", 75), ("alice", "denied", 77)])
def test_typed_in_a_login_session(scene: Scene, user: str, outcome: str, status: int) -> None:
    """What the same person has running in the same session is wanted. alice may not even look at everybody."""
    folder = _folder(scene, user)
    session = scene.node.login_session(user, f"{_holds(folder, '0')}; {_cleans(folder)}; sleep 1000")
    try:
        run = _cleaned(scene, folder)
        holder = _ready(scene, folder)
        assert (run.outcome, run.exit) == (outcome, status)
        assert run.verdict["unit"] is None
        if user == "root":
            assert run.holder(holder)["owner"] == f"session:{session.id}:{user}"
        assert run.fates == {} and scene.signals(run) == []
        assert scene.alive([holder, session.leader])
    finally:
        scene.node.run(["loginctl", "terminate-session", session.id], check=False)
        scene.node.run(["systemctl", "kill", "--signal=KILL", session.scope], check=False)


@pytest.mark.case("A21")
@pytest.mark.parametrize("unit", ["", "cron.service"])
@pytest.mark.parametrize("gpus", ["0", "1"])
def test_in_a_job_of_a_daemon(scene: Scene, unit: str, gpus: str) -> None:
    """Every job inherits cron's SYSTEMD_EXEC_PID. One of them cleans; another, and a child of its own, hold GPUs."""
    unit = unit or scene.name("jobs")
    folder = _folder(scene, "root")
    other = f"setsid {HOLDER} --open 1 --gpu 1 --mib 900 --ready-file {folder}/other &"
    waits = f"until [ -e {folder}/other ]; do sleep 0.02; done"
    script = f"{other} {waits}; {_holds(folder, '0')}; {_cleans(folder, '--gpus', gpus)}; sleep 1000"
    _run_daemon(scene, unit, script)
    run = _cleaned(scene, folder)
    holders = [_ready(scene, folder), _ready(scene, folder, "other")]
    assert (run.outcome, run.exit) == ("protected", 75)
    assert run.holder(holders[int(gpus)])["owner"] == f"unit:{unit}"
    assert run.fates == {} and scene.signals(run) == []
    assert scene.alive([*holders, int(scene.node.show(unit, "MainPID")["MainPID"])])


@pytest.mark.case("A21")
@pytest.mark.parametrize("visible", ["0", ""])
def test_in_a_job_of_a_daemon_on_clean_gpus(scene: Scene, visible: str) -> None:
    """A main process is no control process: it speaks for no unit, and its environment selects nothing."""
    unit = scene.name("jobs")
    folder = _folder(scene, "root")
    _run_daemon(
        scene, unit, f"export CUDA_VISIBLE_DEVICES={visible}; {_cleans(folder, '--deadline', '5s')}; sleep 1000"
    )
    run = _cleaned(scene, folder)
    assert (run.outcome, run.exit) == ("clean", 0)
    assert run.verdict["unit"] is None
    assert [gpu["index"] for gpu in run.verdict["gpus"]] == list(range(8))


@pytest.mark.case("A21")
def test_in_a_unit_of_a_user_manager(scene: Scene) -> None:
    """Its ExecStartPre= looks like a system unit's; what an earlier run left beside it is alice's all the same."""
    folder = _folder(scene, "alice")
    unit = scene.name("user")
    start = f"if [ -e {folder}/ready ]; then exec sleep 1000; fi; {_holds(folder, '0')}; exit 1"
    text = f"""
[Service]
KillMode=process
ExecStartPre=/bin/sh -c {shlex.quote(f"[ ! -e {folder}/ready ] || {{ {_cleans(folder)}; }}")}
ExecStart=/bin/sh -c {shlex.quote(start)}
"""
    scene.node.write(f"/run/systemd/user/{unit}", text)
    scene.node.systemctl("start", "user@5002.service")
    try:
        _as_alice(scene, "daemon-reload")
        _as_alice(scene, "start", unit)
        wait_for(lambda: _as_alice(scene, "is-failed", unit) == "failed", timeout=10, what="its first run is over")
        holder = _ready(scene, folder)
        assert scene.alive(holder)
        _as_alice(scene, "start", unit)
        run = _cleaned(scene, folder)
        assert (run.outcome, run.exit) == ("denied", 77)
        assert run.fates == {}
        assert scene.alive(holder)
        # The same from above: root may signal everybody, and a unit of alice's is no less alive for that.
        root = scene.clean("--gpus", "0")
        assert (root.outcome, root.exit) == ("protected", 75)
        assert root.holder(holder)["owner"] == "user:alice"
        assert scene.signals(root) == []
        assert scene.alive(holder)
    finally:
        scene.node.run(["systemctl", "kill", "--signal=KILL", "user@5002.service"], check=False)
        scene.node.systemctl("stop", "user@5002.service", check=False)
        scene.node.run(["rm", "-f", f"/run/systemd/user/{unit}"])


# For a unit that is running (A21) ------------------------------------------------------------------------------------


@pytest.mark.case("A21")
@pytest.mark.parametrize("gpus", ["0", "1"])
def test_for_a_unit_while_it_runs(scene: Scene, gpus: str) -> None:
    """To name a unit chooses policy and GPUs. Its server on GPU 0 stays, and what an earlier run left on GPU 1."""
    unit, left, server = _running(scene)
    run = scene.clean("--unit", unit.partition(".")[0], "--gpus", gpus)
    _nobody_signalled(scene, run, unit, left, server)
    assert run.verdict["unit"] == unit
    assert run.verdict["duration_s"] < 5


@pytest.mark.case("A21")
def test_for_a_unit_while_it_runs_on_the_gpus_of_that_unit(scene: Scene) -> None:
    unit, left, server = _running(scene)
    run = scene.clean("--unit", unit)
    _nobody_signalled(scene, run, unit, left, server)
    assert [gpu["index"] for gpu in run.verdict["gpus"]] == [0, 1]


@pytest.mark.case("A21")
@pytest.mark.parametrize("gpus", ["0", "1"])
def test_in_exec_reload_of_a_running_server(scene: Scene, gpus: str) -> None:
    unit, left, server = _running(scene, more=f"ExecReload=+{CLEAN} --gpus {gpus}\n")
    assert scene.node.systemctl("reload", unit, check=False).returncode != 0
    run = scene.verdict(unit)
    assert {int(gpu["index"]) for gpu in run.verdict["gpus"]} == {int(gpus)}
    _nobody_signalled(scene, run, unit, left, server)


# What this very start has started (A22) ------------------------------------------------------------------------------


@pytest.mark.case("A22")
def test_a_daemon_of_an_earlier_command_of_this_start(scene: Scene) -> None:
    """A tunnel or an MPS daemon: it has the nodes open, as every CUDA process has, and lives on in our cgroup."""
    server, folder = _with_daemon(scene, "--open", "all", "--setsid")
    assert scene.start(server)
    run = scene.verdict(server)
    daemon = _ready(scene, folder)
    assert (run.outcome, run.exit) == ("clean", 0)
    assert scene.signals(run) == []
    assert scene.alive(daemon)
    assert daemon in scene.node.unit_pids(server)


@pytest.mark.case("A22")
@pytest.mark.parametrize(
    "options, leak, outcome",
    [
        (["--open", "all", "--gpu", "0", "--mib", "900"], 0, "protected"),
        # Memory that nobody explains makes it a suspect, and a suspect of this start is not ended either.
        (["--open", "all"], 900, "unattributed"),
    ],
)
def test_a_daemon_of_this_start_beside_memory(scene: Scene, options: list[str], leak: int, outcome: str) -> None:
    server, folder = _with_daemon(scene, *options)
    if leak:
        scene.gpu.ask("leak", gpu=0, mib=leak)
    assert not scene.start(server)
    run = scene.verdict(server)
    daemon = _ready(scene, folder)
    assert (run.outcome, run.exit) == (outcome, 75)
    assert run.holder(daemon)["owner"] == f"unit:{server}"
    assert run.holder(daemon)["action"] == "refuse"
    assert str(daemon) in " ".join([run.verdict["message"], *run.verdict["hints"]])
    assert scene.signals(run) == []
    assert scene.alive(daemon)


# Other people's work (A23) -------------------------------------------------------------------------------------------


@pytest.mark.case("A23")
@pytest.mark.parametrize("unit", CARRIERS)
def test_left_over_of_a_unit_that_carries_other_peoples_work(scene: Scene, unit: str) -> None:
    holder = _left_over(scene, unit)
    run = scene.clean("--gpus", "0")
    assert (run.outcome, run.exit) == ("protected", 75)
    assert run.holder(holder)["owner"] == f"unit:{unit}"
    assert run.holder(holder)["action"] == "refuse"
    assert unit in run.verdict["message"] and "other people" in run.verdict["message"]
    assert scene.signals(run) == []
    assert scene.alive(holder)


@pytest.mark.case("A23")
def test_left_over_of_any_other_unit(scene: Scene) -> None:
    """It is the name that makes the difference: the same process, left in the same way, is stale."""
    holder = _left_over(scene, scene.name("plain"))
    run = scene.clean("--gpus", "0")
    assert (run.outcome, run.exit) == ("cleaned", 0)
    assert run.fates == {holder: "terminated"}


@pytest.mark.case("A23")
def test_beside_us_in_a_unit_that_carries_other_peoples_work(scene: Scene) -> None:
    """The hook in front of a job server: what is left in its own cgroup are jobs."""
    unit, folder = "ssh.service", _folder(scene, "model")
    hook = f"[ ! -e {folder}/ready ] || exec {CLEAN}"
    job = f"{_holds(folder, '0')}; exit 0"
    scene.server(
        unit,
        gpus="0",
        command=f"/bin/sh -c {shlex.quote(hook)}",
        server=f"/bin/sh -c {shlex.quote(job)}",
        more="KillMode=process\n",
    )
    try:
        assert scene.start(unit)
        scene.await_state(unit, "inactive")
        holder = _ready(scene, folder)
        assert scene.node.unit_pids(unit) == [holder]
        assert not scene.start(unit)
        run = scene.verdict(unit)
        assert (run.outcome, run.exit) == ("protected", 75)
        assert run.verdict["unit"] == unit
        assert run.holder(holder)["action"] == "refuse"
        assert scene.signals(run) == []
        assert scene.alive(holder)
    finally:
        scene.node.run(["rm", f"/etc/systemd/system/{unit}"])


# The stage -----------------------------------------------------------------------------------------------------------


def _folder(scene: Scene, user: str) -> str:
    """A fresh folder that a user may write."""
    folder = f"/run/{scene.name('folder').partition('.')[0]}"
    scene.node.run(["install", "-d", "-o", user, folder])
    return folder


def _holds(folder: str, gpu: str) -> str:
    """Shell: start a holder of a GPU in the background, and wait until it is one."""
    holder = f"{HOLDER} --open {gpu} --gpu {gpu} --mib 900 --ready-file {folder}/ready"
    return f"{holder} & until [ -e {folder}/ready ]; do sleep 0.02; done"


def _cleans(folder: str, *options: str) -> str:
    """Shell: run clean, on GPU 0 unless other options are given, and put down what it said, whole."""
    into = f"{folder}/verdict"
    command = f"{CLEAN} {shlex.join(options or ('--gpus', '0'))}"
    return f"{command} >{into}.new 2>{into}.err; echo {{}} >>{into}.new; mv {into}.new {into}"


def _cleaned(scene: Scene, folder: str) -> Run:
    scene.node.wait_for(lambda: scene.node.exists(f"{folder}/verdict"), timeout=20, what="clean has given its verdict")
    stdout = scene.node.read(f"{folder}/verdict")
    stderr = scene.node.read(f"{folder}/verdict.err")
    assert stdout.startswith('{"version"'), stderr
    verdict = json.loads(stdout.splitlines()[0])
    return Run(exit=verdict["exit"], verdict=verdict, stdout=stdout, stderr=stderr)


def _ready(scene: Scene, folder: str, name: str = "ready") -> int:
    return int(json.loads(scene.node.read(f"{folder}/{name}"))["pid"])


def _run_daemon(scene: Scene, unit: str, script: str) -> None:
    """An active service whose main process is a shell; it is struck after the test, as units named by a scene are."""
    scene._known(unit)
    scene.node.start(["/bin/sh", "-c", script], unit=unit, properties=["KillMode=process"])


def _left_over(scene: Scene, unit: str) -> int:
    """A process that holds GPU 0, left in the cgroup of a unit that has ended well, and that runs as its user."""
    folder = _folder(scene, "root")
    _run_daemon(scene, unit, f"{_holds(folder, '0')}; exit 0")
    holder = wait_for(lambda: _ready_or_not(scene, folder), timeout=10, what="the holder holds GPU 0")
    scene.await_state(unit, "inactive")
    assert scene.node.unit_pids(unit) == [holder]
    assert scene.node.show(unit, "LoadState", "KillMode") == {"LoadState": "loaded", "KillMode": "process"}
    return holder


def _ready_or_not(scene: Scene, folder: str) -> int:
    return _ready(scene, folder) if scene.node.exists(f"{folder}/ready") else 0


def _running(scene: Scene, *, more: str = "") -> tuple[str, int, int]:
    """A running server on GPU 0, without a hook, with a worker of its last run on GPU 1 in its cgroup; both PIDs."""
    unit = scene.name("server")
    folder = _folder(scene, "model")
    worker = f"{HOLDER} --open 1 --gpu 1 --mib 900 --ready-file {folder}/left"
    front = f"{HOLDER} --open 0 --gpu 0 --mib 900 --fork 1"
    script = f"[ -e {folder}/left ] || {worker} & until [ -e {folder}/left ]; do sleep 0.02; done; exec {front}"
    scene.server(
        unit,
        gpus="0,1",
        command="/bin/true",
        server=f"/bin/sh -c {shlex.quote(script)}",
        more=f"Type=notify\nNotifyAccess=all\nKillMode=process\n{more}",
    )
    assert scene.start(unit)
    left = _ready(scene, folder, "left")
    scene.node.run(["systemctl", "kill", "--kill-who=main", "--signal=KILL", unit])
    scene.await_state(unit, "failed")
    for pid in set(scene.node.unit_pids(unit)) - {left}:
        scene.node.run(["kill", "-KILL", str(pid)], check=False)
    scene.node.wait_for(lambda: scene.node.unit_pids(unit) == [left], timeout=5, what="only the worker is left")
    assert scene.start(unit)
    return unit, left, int(scene.node.show(unit, "MainPID")["MainPID"])


def _nobody_signalled(scene: Scene, run: Run, unit: str, left: int, server: int) -> None:
    assert (run.outcome, run.exit) == ("protected", 75)
    assert unit in run.verdict["message"]
    assert run.fates == {} and scene.signals(run) == []
    assert scene.alive([left, *scene.node.unit_pids(unit)])
    assert scene.node.show(unit, "ActiveState", "MainPID") == {"ActiveState": "active", "MainPID": str(server)}


def _with_daemon(scene: Scene, *options: str) -> tuple[str, str]:
    """A server's unit with a first ExecStartPre= that starts a daemon, and the folder where that says its PID."""
    folder = _folder(scene, "model")
    daemon = shlex.join([HOLDER, *options, "--ready-file", f"{folder}/ready"])
    script = f"{daemon} & until [ -e {folder}/ready ]; do sleep 0.02; done"
    server = scene.server(
        gpus="0,1",
        command=f"/bin/sh -c {shlex.quote(script)}",
        plus=False,
        more=f"ExecStartPre=+{CLEAN} --deadline 1s\nKillMode=process\n",
    )
    return server, folder


def _as_alice(scene: Scene, *arguments: str) -> str:
    env = {"XDG_RUNTIME_DIR": "/run/user/5002"}
    done = scene.node.run(["systemctl", "--user", *arguments], user="alice", env=env, check=False)
    return done.stdout.strip()
