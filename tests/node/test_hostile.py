"""A machine that is broken or means harm: what hangs, lies, comes back, or runs as nobody expected."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.node.hung import Hung
from tests.node.machine import wait_for
from tests.node.scene import HOLDER, Run, Scene

CLEAN = "/usr/bin/gpuprestart clean --json"
HOLD = ("--open", "0", "--gpu", "0", "--mib", "900")
TERM = "[deadline]\nterm = '500 ms'\n"


def _shell(scene: Scene, script: str, *, timeout: float = 30, **env: str) -> Run:
    """Run a script that ends in the hook; its status and what it printed."""
    done = scene.node.run(["/bin/sh", "-c", script], check=False, timeout=timeout, env=env)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    verdict: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    return Run(exit=done.returncode, verdict=verdict, stdout=done.stdout, stderr=done.stderr)


# The driver ----------------------------------------------------------------------------------------------------------


@pytest.mark.case("C4")
@pytest.mark.parametrize("function", ["nvmlInit*", "nvmlDeviceGetMemoryInfo*"])
@pytest.mark.parametrize("state", ["killable", "D"])
def test_a_driver_that_hangs(scene: Scene, function: str, state: str) -> None:
    """The deadline holds, and the unit has failed two seconds after it, though nothing ends what hangs."""
    server = scene.server(gpus="0", command=f"{CLEAN} --deadline 1500ms")
    with Hung(scene.node.leader) as hung:
        scene.gpu.ask("hang", function=function, **({"path": hung.file} if state == "D" else {}))
        began = time.monotonic()
        scene.node.systemctl("start", "--no-block", server)
        scene.await_state(server, "failed")
        assert time.monotonic() - began < 1.5 + 2 + 0.5
        run = scene.verdict(server)
        assert (run.outcome, run.exit) == ("unknown", 69)
        assert run.verdict["duration_s"] < 2.5
        scopes = scene.node.systemctl("list-units", "--plain", "--no-legend", "gpuprestart-stuck-*").stdout
        assert bool(scopes) is (state == "D")


@pytest.mark.case("C4")
def test_who_reads_what_the_hook_prints_is_not_kept_by_a_driver_that_hangs(scene: Scene) -> None:
    """A pipe is at its end when nobody has it open: what hangs in the driver, and cannot be ended, must not have it."""
    with Hung(scene.node.leader) as hung:
        scene.gpu.ask("hang", function="nvmlDeviceGetMemoryInfo*", path=hung.file)
        run = _shell(scene, "/usr/bin/gpuprestart clean --json --gpus 0 --deadline 1500ms 2>&1 | cat", timeout=10)
    assert run.verdict["outcome"] == "unknown"


@pytest.mark.case("C4")
def test_a_sample_that_hangs_is_cut_short_by_the_units_timeout(scene: Scene) -> None:
    scene.gpu.ask("hang", function="nvmlDeviceGetMemoryInfo*")
    server = scene.server(gpus="0", command=CLEAN, more="TimeoutStartSec=4\nNotifyAccess=none\n")
    assert not scene.start(server)
    assert scene.node.show(server, "Result")["Result"] == "exit-code"
    run = scene.verdict(server)
    assert run.outcome == "unknown" and run.verdict["duration_s"] < 4


@pytest.mark.parametrize("function", ["nvmlInit*", "nvmlDeviceGetMemoryInfo*", "nvmlDeviceGetComputeRunningProcesses*"])
def test_a_driver_that_crashes(scene: Scene, function: str) -> None:
    scene.gpu.ask("crash", function=function)
    run = scene.clean("--gpus", "0")
    assert (run.outcome, run.exit) == ("unknown", 69)
    assert "SIGSEGV" in run.verdict["message"]


@pytest.mark.parametrize("gpus", ["0", "1", "all"])
def test_two_gpus_with_one_uuid(scene: Scene, gpus: str) -> None:
    """A sample by UUID is one of the last of them: the dirty one must not be proved clean by it."""
    uuids = [gpu["uuid"] for gpu in scene.gpu.ask("state")["gpus"]]
    scene.gpu.ask("leak", gpu=0, mib=900)
    scene.gpu.ask("set_gpu", gpu=1, uuid=uuids[0])
    run = scene.clean("--gpus", gpus)
    assert (run.outcome, run.exit) == ("unknown", 69)
    assert "UUID" in run.verdict["message"]
    assert scene.clean("--gpus", "2").outcome == "clean"


@pytest.mark.parametrize("uuid", ["", "../../../tmp/x", "GPU-", "nothing"])
def test_a_gpu_without_a_proper_uuid(scene: Scene, uuid: str) -> None:
    scene.gpu.ask("set_gpu", gpu=0, uuid=uuid)
    run = scene.clean("--gpus", "0")
    assert (run.outcome, run.exit) == ("unknown", 69)


# Holders -------------------------------------------------------------------------------------------------------------


@pytest.mark.case("A17")
def test_a_supervisor_that_starts_another_at_once(scene: Scene) -> None:
    unit, pids = scene.orphans("--supervise", "0.02", *HOLD)
    supervisor = min(pids)
    run = scene.clean("--gpus", "0")
    assert (run.outcome, run.exit) == ("respawning", 75)
    assert f"started by python3[{supervisor}]" in run.verdict["message"] and unit in run.verdict["message"]
    assert any(str(supervisor) in hint for hint in run.verdict["hints"])
    assert len(scene.records(run)) < 100
    assert scene.alive(supervisor)


@pytest.mark.case("B5")
def test_a_holder_that_survives_sigkill(scene: Scene) -> None:
    scene.policy(TERM)
    with Hung(scene.node.leader) as hung:
        victim, pid = _stuck(scene, f"cat {hung.file}")
        scene.gpu.ask("alloc", gpu=0, mib=500, pid=pid)
        server = scene.server(gpus="0", command=f"{CLEAN} --deadline 3s")
        began = time.monotonic()
        assert not scene.start(server)
        assert time.monotonic() - began < 4
        run = scene.verdict(server)
        assert (run.outcome, run.exit) == ("unkillable", 75)
        assert re_all(run.verdict["message"], f"[{pid}]", "state D", "request_wait_answer", victim)
        assert run.fates == {pid: "survived"}
        assert scene.signals(run) == [(pid, "SIGTERM"), (pid, "SIGKILL")]


def test_a_program_on_a_mount_whose_server_is_gone(scene: Scene) -> None:
    """Whether root's alone can write the holder's program is not worth hanging for."""
    program = Path(f"/proc/{scene.node.leader}/root/bin/sleep").read_bytes()
    with Hung(scene.node.leader, program) as hung:
        _, pid = _stuck(scene, f"{hung.file} 1000")
        scene.gpu.ask("alloc", gpu=0, mib=500, pid=pid)
        hung.hang()
        run = scene.clean("--gpus", "0")
        assert run.outcome == "cleaned" and run.fates == {pid: "terminated"}


@pytest.mark.case("B9")
@pytest.mark.parametrize("after", [0, 0.3])
def test_memory_that_is_charged_to_a_sidecar_after_the_kill(scene: Scene, after: float) -> None:
    unit, sidecar = scene.service("--open", "0")
    heir = [f"heir={sidecar}", f"heir_after={after}", "heir_kind=compute"]
    scene.orphans(*HOLD, *(word for pair in heir for word in ("--alloc", pair)))
    run = scene.clean("--gpus", "0")
    assert (run.outcome, run.exit) == ("protected", 75)
    assert unit in run.verdict["message"] and scene.alive(sidecar)
    assert run.holder(sidecar)["action"] == "refuse"


@pytest.mark.case("B10")
def test_a_descriptor_in_flight(scene: Scene) -> None:
    _, (holder,) = scene.orphans(*HOLD, "--in-flight", "--unlisted")
    run = scene.clean("--gpus", "0", "--deadline", "1500ms")
    assert (run.outcome, run.exit) == ("unattributed", 75)
    assert scene.alive(holder) and not scene.signals(run)


@pytest.mark.case("D4")
def test_a_pid_that_is_reused_between_the_signals(scene: Scene) -> None:
    """The holder goes in its grace, and an innocent process of the same unit's user gets its number at once."""
    scene.policy("[deadline]\nterm = '3 s'\n")
    _, (holder, other) = scene.orphans(*HOLD, "--ignore-term", count=2)
    server = scene.server(gpus="0", command=CLEAN)
    scene.node.systemctl("start", "--no-block", server)
    wait_for(
        lambda: len(scene.node.journal(HOLDER_PID=str(holder), GPUPRESTART_SIGNAL="SIGTERM")) == 1,
        timeout=10,
        what="it has got its SIGTERM",
    )
    scene.node.run(["kill", "-KILL", str(holder)])
    # /proc/sys is read-only on the node, so this comes from outside, with the node's PIDs alone.
    last = "/proc/sys/kernel/ns_last_pid"
    script = f"while echo {holder - 1} >{last}; sleep 1000 & [ $! != {holder} ]; do kill $!; done; echo; wait"
    newcomer = subprocess.Popen(
        ["nsenter", "-t", str(scene.node.leader), "-p", "sh", "-c", script],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert newcomer.stdout and newcomer.stdout.readline() == b"\n"
        _reused(scene, server, holder, other)
    finally:
        os.killpg(newcomer.pid, signal.SIGKILL)
        newcomer.communicate()


def _reused(scene: Scene, server: str, holder: int, other: int) -> None:
    scene.await_state(server, "active")
    run = scene.verdict(server)
    assert run.outcome == "cleaned"
    assert (holder, "SIGKILL") not in scene.signals(run) and (other, "SIGKILL") in scene.signals(run)
    assert scene.alive(holder)


@pytest.mark.case("D12")
def test_a_unit_that_is_started_in_its_grace(scene: Scene) -> None:
    """Inactive when it was asked for, active when SIGKILL is due: nobody in its cgroup is touched any more."""
    scene.policy("[deadline]\nterm = '3 s'\n")
    unit = scene.name("again")
    scene.server(
        unit, server=f"{HOLDER} {shlex.join(HOLD)} --ignore-term --fork 1", more="KillMode=process\nExecStartPre=\n"
    )
    assert scene.start(unit)
    wait_for(lambda: len(scene.node.unit_pids(unit)) == 2, timeout=10, what="its child runs")
    (left,) = scene.abandon(unit)
    server = scene.server(gpus="0", command=CLEAN)
    scene.node.systemctl("start", "--no-block", server)
    wait_for(lambda: scene.node.journal(HOLDER_PID=str(left), GPUPRESTART_SIGNAL="SIGTERM"), timeout=10, what="SIGTERM")
    assert scene.start(unit)
    main = int(scene.node.show(unit, "MainPID")["MainPID"])
    scene.await_state(server, "failed")
    run = scene.verdict(server)
    assert run.outcome == "protected" and unit in run.verdict["message"]
    assert scene.signals(run) == [(left, "SIGTERM")]
    assert scene.alive([left, main])


@pytest.mark.case("D9")
def test_root_without_the_right_to_signal(scene: Scene) -> None:
    _, (holder,) = scene.orphans(*HOLD)
    server = scene.server(gpus="0", plus=False, more="User=root\nCapabilityBoundingSet=~CAP_KILL\n")
    assert not scene.start(server)
    run = scene.verdict(server)
    assert (run.outcome, run.exit) == ("denied", 77)
    assert run.verdict["duration_s"] < 2 and len(scene.records(run)) < 8
    assert scene.alive(holder)


# Around it -----------------------------------------------------------------------------------------------------------


@pytest.mark.case("D6")
def test_few_lines_for_many_holders(scene: Scene) -> None:
    """journald drops what is over the limit, be it the verdict; STATUS= has it still, and the start goes on."""
    scene.orphans(*HOLD, "--fork", "200", properties=["TasksMax=1000"])
    more = "LogRateLimitIntervalSec=60\nLogRateLimitBurst=20\n"
    server = scene.server(gpus="0", command="/usr/bin/gpuprestart clean", more=more)
    assert scene.start(server)
    assert "cleaned the GPUs" in scene.node.show(server, "StatusText")["StatusText"]


@pytest.mark.case("D6")
@pytest.mark.parametrize("setting", ["LogNamespace=hostile", "StandardOutput=null\nStandardError=null"])
def test_records_that_go_elsewhere(scene: Scene, setting: str) -> None:
    scene.orphans(*HOLD)
    server = scene.server(gpus="0", command="/usr/bin/gpuprestart clean", more=setting)
    assert scene.start(server)
    assert "cleaned the GPUs" in scene.node.show(server, "StatusText")["StatusText"]


@pytest.mark.case("D6")
def test_a_journald_that_does_not_read(scene: Scene) -> None:
    scene.orphans(*HOLD)
    scene.node.systemctl("kill", "--signal=STOP", "systemd-journald.service")
    try:
        run = scene.clean("--gpus", "0")
    finally:
        scene.node.systemctl("kill", "--signal=CONT", "systemd-journald.service")
    assert run.outcome == "cleaned"


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
@pytest.mark.parametrize("verb", ["clean --json", "clean"])
def test_without_standard_streams(scene: Scene, closed: str, verb: str) -> None:
    scene.gpu.ask("leak", gpu=0, mib=900)
    run = _shell(scene, f"/usr/bin/gpuprestart {verb} --gpus 0 --deadline 500ms {closed}")
    assert run.exit == 75


def test_a_reader_that_does_not_read(scene: Scene) -> None:
    scene.orphans(*HOLD, "--fork", "250", properties=["TasksMax=1000"])
    script = "mkfifo /tmp/unread; exec 8<>/tmp/unread; {} >/tmp/unread; echo $?; rm /tmp/unread"
    assert _shell(scene, script.format(f"{CLEAN} --gpus 0")).stdout == "0\n"


def test_children_that_nobody_is_told_of(scene: Scene) -> None:
    """A shell or a supervisor that ignores SIGCHLD hands that on."""
    scene.gpu.ask("leak", gpu=0, mib=900)
    code = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    run = _shell(scene, f"exec python3 -c {shlex.quote(code)} {CLEAN} --gpus 0 --deadline 500ms")
    assert (run.outcome, run.exit) == ("unattributed", 75)


@pytest.mark.parametrize(
    "hide",
    ["mount -t tmpfs none /proc/sys", "mount -t tmpfs none /proc/sys/kernel/random", "mount -t tmpfs none /proc"],
)
def test_without_parts_of_proc(scene: Scene, hide: str) -> None:
    scene.gpu.ask("leak", gpu=0, mib=900)
    run = _shell(scene, f"unshare --mount sh -c {shlex.quote(f'{hide}; exec {CLEAN} --gpus 0 --deadline 500ms')}")
    assert run.exit == (70 if hide.endswith("/proc") else 75)


def test_a_unit_that_sees_processes_alone(scene: Scene) -> None:
    """ProcSubset=pid without the +: neither the boot's id nor the highest PID can be read, and neither matters."""
    _, (holder,) = scene.orphans(*HOLD)
    server = scene.server(gpus="0", plus=False, more="User=root\nProcSubset=pid\n")
    assert scene.start(server)
    run = scene.verdict(server)
    assert run.outcome == "cleaned" and run.fates == {holder: "terminated"}


def test_few_descriptors(scene: Scene) -> None:
    scene.orphans(*HOLD, "--fork", "150", properties=["TasksMax=1000"])
    # Without the +, which would lift the limit. As JSON it would be longer than what journald takes for one line.
    more = "User=root\nLimitNOFILE=100\n"
    server = scene.server(gpus="0", command="/usr/bin/gpuprestart clean", plus=False, more=more)
    assert scene.start(server)
    assert "cleaned the GPUs: 151 stale holders" in scene.node.show(server, "StatusText")["StatusText"]


@pytest.mark.parametrize("limit", [4, 6, 8])
def test_next_to_no_descriptors(scene: Scene, limit: int) -> None:
    assert _shell(scene, f"ulimit -n {limit}; exec {CLEAN} --gpus 0").exit == 78


def test_an_empty_argument_survives_the_loaders_variables(scene: Scene) -> None:
    run = _shell(scene, f"{CLEAN} --gpus ''", LD_LIBRARY_PATH="/nowhere")
    assert (run.outcome, run.exit) == ("config", 78)


@pytest.mark.parametrize("unit", ["", "*.service", "t-no@.service", "a/b"])
def test_what_is_no_name_of_a_unit(scene: Scene, unit: str) -> None:
    assert scene.check(f"--unit={unit}").outcome == "config"


@pytest.mark.parametrize(
    "setting, outcome",
    [
        ("mkdir -p claims; mkfifo claims/GPU-x", "denied"),
        ("mkdir -p claims/GPU-x", "denied"),
        ("mkdir -p claims; ln -s /etc/passwd claims/GPU-x", "denied"),
        ("mkdir locks; chown model .", "denied"),
        ("mkdir locks; chmod 777 locks", "denied"),
        ("cd ..; rmdir gpuprestart; ln -s /tmp gpuprestart", "denied"),
        ("echo > locks", "denied"),
    ],
)
def test_a_folder_of_locks_that_is_not_ours(scene: Scene, setting: str, outcome: str) -> None:
    scene.node.run(
        ["/bin/sh", "-ec", f"rm -rf /run/gpuprestart; mkdir /run/gpuprestart; cd /run/gpuprestart; {setting}"]
    )
    try:
        run = scene.clean("--gpus", "0")
        assert (run.outcome, run.exit) == (outcome, 77)
    finally:
        scene.node.run(["rm", "-rf", "/run/gpuprestart"])


def test_a_umask_that_keeps_nothing(scene: Scene) -> None:
    scene.node.run(["rm", "-rf", "/run/gpuprestart"])
    server = scene.server(gpus="0", more="UMask=0000\n")
    assert scene.start(server)
    assert not scene.node.run(["find", "/run/gpuprestart", "-perm", "/022"]).stdout


@pytest.mark.parametrize("answer", ["exec yes", "exec sleep 100", "exit 1", "head -c 9999 /dev/urandom", "sleep 100 &"])
def test_a_systemctl_that_does_not_answer(scene: Scene, answer: str) -> None:
    _, (holder,) = scene.orphans(*HOLD)
    scene.node.write("/tmp/systemctl", f"#!/bin/sh\n{answer}\n", mode=0o755)
    inside = f"mount --bind /tmp/systemctl /usr/bin/systemctl; exec {CLEAN} --gpus 0 --deadline 2s"
    began = time.monotonic()
    run = _shell(scene, f"unshare --mount sh -c {shlex.quote(inside)} 8>&1 | cat")
    assert time.monotonic() - began < 6
    assert run.outcome == "protected" and scene.alive(holder)


def test_sigterm_at_any_moment(scene: Scene) -> None:
    """The verdict, or a death before there could be one; the server never starts on a GPU that is not clean."""
    scene.gpu.ask("leak", gpu=0, mib=900)
    server = scene.server(gpus="0", command=f"{CLEAN} --deadline 400ms")
    chance = random.Random(1)  # noqa: S311
    for _ in range(30):
        scene.node.systemctl("start", "--no-block", server)
        time.sleep(chance.uniform(0, 0.6))
        scene.node.run(["systemctl", "kill", "--kill-who=control", "--signal=TERM", server], check=False)
        scene.await_state(server, "failed")
        shown = scene.node.show(server, "Result", "ExecStartPre", "ExecMainStartTimestampMonotonic")
        assert shown["ExecMainStartTimestampMonotonic"] == "0"
        if shown["Result"] == "exit-code":
            assert scene.verdict(server).outcome in ("interrupted", "unattributed")
        else:
            assert "status=15" in shown["ExecStartPre"]
        assert not scene.node.unit_pids(server)
        scene.node.systemctl("reset-failed", server)


# Their parts ---------------------------------------------------------------------------------------------------------


def _stuck(scene: Scene, command: str) -> tuple[str, int]:
    """A process with the first GPU's node open, left by a unit that has failed."""
    unit = scene.name("stuck")
    # Consoles are terminals: only in a session of its own does it not go with the shell.
    script = f"setsid sh -c 'exec {command}' 9</dev/nvidia0 & sleep 0.3; exit 1"
    scene.node.start(["/bin/sh", "-c", script], unit=unit, user="model", properties=["KillMode=process"])
    scene.await_state(unit, "failed")
    (pid,) = scene.node.unit_pids(unit)
    return unit, pid


def re_all(text: str, *parts: str) -> bool:
    return all(part in text for part in parts)
