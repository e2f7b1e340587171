"""What the hook has to be allowed: the unit that grants no more than that, and what becomes of a start without each.

The shown drop-in is installed as it is. DevicePolicy= is not enforced on the node: that the drop-in leaves the devices
alone is all that is checked of it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.node.hung import Hung
from tests.node.scene import Run, Scene, mappable

CLEAN = "/usr/bin/gpuprestart clean --json --deadline 3s"
HOLD = ("--open", "0", "--gpu", "0", "--mib", "900")
DROP_IN = (Path(__file__).parents[2] / "units/gpuprestart-least-privilege.conf").read_text(encoding="utf-8")

#: Numbers from linux/capability.h.
NUMBERS = {"CAP_DAC_READ_SEARCH": 2, "CAP_KILL": 5, "CAP_SYS_PTRACE": 19}
#: Everything of systemd.exec(5) that the hook can do with, as a careful server may have it.
SANDBOX = """
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
PrivateNetwork=yes
PrivateIPC=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
ProtectProc=invisible
ProcSubset=pid
RestrictAddressFamilies=AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
MemoryDenyWriteExecute=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
RemoveIPC=yes
UMask=0077
"""


@pytest.fixture(autouse=True)
def folder(scene: Scene) -> None:
    """As it is after a boot: the drop-in's line for tmpfiles.d has made it."""
    (line,) = [line for line in DROP_IN.split('"') if line.startswith("d /run/")]
    scene.node.run(["rm", "-rf", "/run/gpuprestart"])
    scene.node.write("/run/t-tmpfiles.conf", line + "\n")
    scene.node.run(["systemd-tmpfiles", "--create", "/run/t-tmpfiles.conf"])


def _server(scene: Scene, *, more: str = "", deadline: str = "3s", **settings: str) -> str:
    """A server with the drop-in as it is shown, but for settings that it has and the test wants otherwise."""
    server = scene.server(gpus="0", more=f"ExecStartPre=\n{more}")
    drop_in = DROP_IN.replace("gpuprestart clean\n", f"gpuprestart clean --json --deadline {deadline}\n")
    for name, value in settings.items():
        (line,) = [line for line in drop_in.splitlines() if line.startswith(f"{name}=")]
        drop_in = drop_in.replace(f"\n{line}\n", f"\n{name}={value}\n")
    scene.node.write(f"/etc/systemd/system/{server}.d/50-gpuprestart.conf", drop_in)
    scene.node.systemctl("daemon-reload")
    return server


def _status(scene: Scene, pid: str) -> dict[str, list[str]]:
    lines = scene.node.read(f"/proc/{pid}/status").splitlines()
    return {name: value.split() for name, _, value in (line.partition(":") for line in lines)}


def _refused(scene: Scene, server: str) -> Run:
    """The verdict on a start that has to be refused, and was."""
    assert not scene.start(server)
    run = scene.verdict(server)
    shown = scene.node.show(server, "ActiveState", "Result", "ExecMainStartTimestampMonotonic")
    assert shown == {"ActiveState": "failed", "Result": "exit-code", "ExecMainStartTimestampMonotonic": "0"}
    return run


# What is shown -------------------------------------------------------------------------------------------------------


def test_the_unit_that_is_shown(scene: Scene) -> None:
    """Somebody else's orphan is ended, its memory awaited, and the server started, without a single capability."""
    scene.gpu.ask("set", release_delay=3)
    _, (orphan,) = scene.orphans(*HOLD, user="bench")
    server = _server(scene, deadline="20s")
    scene.node.systemctl("start", "--no-block", server)
    scene.node.wait_for(
        lambda: scene.node.show(server, "StatusText")["StatusText"].startswith("Waiting"), timeout=10, what="it waits"
    )
    hook = _status(scene, scene.node.show(server, "ControlPID")["ControlPID"])
    assert set(hook["Uid"]) == {"0"} and hook["NoNewPrivs"] == ["1"]
    wanted = sum(1 << number for number in NUMBERS.values())
    for kind in ("CapEff", "CapPrm", "CapBnd"):
        assert int(hook[kind][0], 16) == wanted
    assert int(hook["CapAmb"][0], 16) == 0
    scene.await_state(server, "active")
    run = scene.verdict(server)
    assert (run.outcome, run.exit) == ("cleaned", 0)
    assert scene.signals(run) == [(orphan, "SIGTERM")] and run.holder(orphan)["user"] == "bench"
    # The claim is there, and root's, though nobody may write to it by right of a capability.
    shown = scene.node.run(
        ["sh", "-c", "stat -c %u:%a /run/gpuprestart/claims/*; cat /run/gpuprestart/claims/*"]
    ).stdout
    assert shown.startswith("0:644\n") and f"unit={server}" in shown
    main = _status(scene, scene.node.show(server, "MainPID")["MainPID"])
    assert set(main["Uid"]) == {"5001"} and {int(main[kind][0], 16) for kind in ("CapEff", "CapPrm", "CapAmb")} == {0}
    # It says nothing about devices, which could only take some away.
    assert scene.node.show(server, "DevicePolicy", "DeviceAllow") == {"DevicePolicy": "auto"}
    # Nor is there a line in it that systemd does not know.
    assert scene.node.run(["systemd-analyze", "verify", "--man=no", server]).stderr == ""


@pytest.mark.parametrize("evidence", [[], ["--unlisted"]])
@pytest.mark.parametrize("more", [SANDBOX, "DynamicUser=yes\n"], ids=["sandbox", "dynamic user"])
def test_inside_the_sandbox_of_the_unit(scene: Scene, more: str, evidence: list[str]) -> None:
    _, (orphan,) = scene.orphans(*HOLD, *evidence, user="bench")
    server = _server(scene, more=more)
    assert scene.start(server)
    run = scene.verdict(server)
    assert run.outcome == "cleaned" and scene.signals(run) == [(orphan, "SIGTERM")]


def test_what_nothing_ends_is_set_aside(scene: Scene) -> None:
    """systemd lets root move a process of ours into a scope, whatever root may do otherwise."""
    with Hung(scene.node.leader) as hung:
        scene.gpu.ask("hang", function="nvmlInit*", path=hung.file)
        server = _server(scene, deadline="1500ms")
        began = time.monotonic()
        run = _refused(scene, server)
        assert time.monotonic() - began < 6
        assert (run.outcome, run.exit) == ("unknown", 69)
        assert scene.node.systemctl("list-units", "--plain", "--no-legend", "gpuprestart-stuck-*").stdout


def test_left_by_the_units_own_last_run(scene: Scene) -> None:
    """The hook is still the control process of the unit, as it would not be in a unit of its own."""
    server = _server(
        scene, more="ExecStart=\nExecStart=/opt/simgpu/holder.py --fork 2\nType=notify\nKillMode=process\n"
    )
    scene.node.write(f"/etc/systemd/system/{server}.d/60-notify.conf", "[Service]\nNotifyAccess=all\n")
    scene.node.systemctl("daemon-reload")
    assert scene.start(server)
    left = scene.abandon(server)
    assert len(left) == 2
    assert scene.start(server)
    run = scene.verdict(server)
    assert run.outcome == "cleaned" and set(run.fates) == left


# What is missing -----------------------------------------------------------------------------------------------------

STALE, UNLISTED, MAPPED, LIVE = "stale", "unlisted", "mapped", "live"


@pytest.mark.parametrize(
    "missing, situation, says",
    [
        ("CAP_KILL", STALE, "the kernel refuses us signals to python3[{pid}]"),
        ("CAP_KILL", UNLISTED, "the kernel refuses us signals to python3[{pid}]"),
        ("CAP_KILL", MAPPED, "the kernel refuses us signals to python3[{pid}]"),
        (
            "CAP_SYS_PTRACE",
            STALE,
            "python3[{pid}] (user bench, 900 MiB): it has an owner that could not be established",
        ),
        ("CAP_SYS_PTRACE", UNLISTED, "nobody is seen to hold it, but"),
        ("CAP_SYS_PTRACE", MAPPED, "nobody is seen to hold it, but"),
        ("CAP_SYS_PTRACE", LIVE, "python3[{pid}] (user bench, 900 MiB): it has an owner that could not be established"),
        ("CAP_DAC_READ_SEARCH", STALE, "it was left behind by {unit}, which has failed, but it may not be looked into"),
        ("CAP_DAC_READ_SEARCH", UNLISTED, "nobody is seen to hold it, but"),
    ],
)
def test_without_one_capability(scene: Scene, missing: str, situation: str, says: str) -> None:
    """Never clean, and never anybody's fault: the hint says what the hook lacks."""
    with mappable(scene.node, situation == MAPPED):
        unit, pid = _hold(scene, situation)
        server = _server(scene, CapabilityBoundingSet=" ".join(NUMBERS.keys() - {missing}))
        run = _refused(scene, server)
        assert (run.outcome, run.exit) == ("denied", 77)
        assert says.format(pid=pid, unit=unit) in run.verdict["message"]
        assert "ExecStartPre=+" in run.verdict["hints"][0] and missing in run.verdict["hints"][0]
        assert run.fates == {} and scene.signals(run) == [] and scene.alive(pid)


@pytest.mark.parametrize("kept", [["CAP_KILL", "CAP_DAC_READ_SEARCH"], ["CAP_KILL", "CAP_SYS_PTRACE"]])
def test_left_overs_of_the_unit_itself_need_only_the_right_to_signal(scene: Scene, kept: Sequence[str]) -> None:
    """Whose they are the cgroup says, which everybody may read."""
    more = "ExecStart=\nExecStart=/opt/simgpu/holder.py --fork 1\nType=notify\nKillMode=process\n"
    server = _server(scene, more=more, CapabilityBoundingSet=" ".join(kept), NotifyAccess="all")
    assert scene.start(server)
    left = scene.abandon(server)
    assert scene.start(server)
    assert set(scene.verdict(server).fates) == left


@pytest.mark.parametrize("situation", ["nobody", LIVE])
def test_what_needs_no_capability(scene: Scene, situation: str) -> None:
    """To see that GPUs are clean takes none, and to see that somebody alive has one takes none but to look at it."""
    if situation == LIVE:
        unit, pid = _hold(scene, LIVE)
        run = _refused(scene, _server(scene, CapabilityBoundingSet="CAP_SYS_PTRACE"))
        assert (run.outcome, run.exit) == ("protected", 75)
        assert f"belongs to {unit}, which is active" in run.verdict["message"] and scene.alive(pid)
        return
    server = _server(scene, CapabilityBoundingSet="")
    assert scene.start(server)
    assert scene.verdict(server).outcome == "clean"


@pytest.mark.parametrize("more, outcome", [("CAP_SYS_ADMIN", "cleaned"), ("", "unattributed")])
def test_mapped_through_a_node_that_is_gone(scene: Scene, more: str, outcome: str) -> None:
    """Only by the mapping itself can it be found, which takes a capability that is not worth granting."""
    with mappable(scene.node):
        scene.node.run(["mknod", "-m", "666", "/dev/t-other", "c", "1", "5"])
        options = ["--path", "/dev/t-other", "--map-only", "--gpu", "0", "--mib", "900", "--unlisted"]
        _, (orphan,) = scene.orphans(*options, user="bench")
        scene.node.run(["rm", "/dev/t-other"])
        server = _server(scene, CapabilityBoundingSet=" ".join([*NUMBERS, more]))
        assert scene.start(server) is (outcome == "cleaned")
        run = scene.verdict(server)
        assert run.outcome == outcome and scene.alive(orphan) is (outcome != "cleaned")


@pytest.mark.parametrize(
    "more, outcome, says",
    [
        ("ProtectSystem=strict\n", "denied", "/run/gpuprestart/locks: Read-only file system"),
        ("RestrictAddressFamilies=AF_INET\n", "unknown", "cannot tell whose start this is"),
        ("PrivateUsers=yes\n", "denied", "its PID namespace may not be read"),
        ("PrivateDevices=yes\n", "unknown", "/dev/nvidia0 of GPU 0 is not there"),
        ("InaccessiblePaths=/sys/fs/cgroup\n", "unknown", "what is left of the last run cannot be seen"),
        ("SystemCallFilter=~pidfd_send_signal\n", "denied", "the kernel refuses us signals"),
        ("SystemCallFilter=~flock\n", "denied", "cannot be locked"),
    ],
)
def test_inside_a_sandbox_that_is_too_tight(scene: Scene, more: str, outcome: str, says: str) -> None:
    _, (orphan,) = scene.orphans(*HOLD, user="bench")
    run = _refused(scene, _server(scene, more=f"SystemCallErrorNumber=EPERM\n{more}", ReadWritePaths="-/run/nowhere"))
    assert run.outcome == outcome
    assert says in run.verdict["message"] and run.verdict["hints"]
    assert run.fates == {} and scene.alive(orphan)


@pytest.mark.parametrize("how", ["a cgroup that cannot be seen", "a node that is hidden"])
def test_a_sandbox_does_not_matter_under_the_plus(scene: Scene, how: str) -> None:
    more = {"a": "InaccessiblePaths=/sys/fs/cgroup\nProtectSystem=strict\n", "b": "PrivateDevices=yes\n"}
    _, (orphan,) = scene.orphans(*HOLD, user="bench")
    server = scene.server(gpus="0", more=more["a" if "cgroup" in how else "b"])
    assert scene.start(server)
    assert scene.verdict(server).fates == {orphan: "terminated"}


# As another user -----------------------------------------------------------------------------------------------------


def test_capabilities_alone_do_not_make_up_for_root(scene: Scene) -> None:
    """The hook as the server's user, with the capabilities: they would be the server's too, and claims are root's."""
    scene.orphans(*HOLD, user="bench")
    capabilities = f"AmbientCapabilities={' '.join(NUMBERS)}\n"
    server = scene.server(gpus="0", command=CLEAN, plus=False, more=capabilities)
    run = _refused(scene, server)
    assert (run.outcome, run.exit) == ("denied", 77)
    assert "locks and claims cannot be kept" in run.verdict["message"]


def test_in_a_unit_of_its_own(scene: Scene) -> None:
    """A oneshot in front of the server ends another unit's orphan, but what it proved is claimed for nobody."""
    server = scene.server(gpus="0", more="ExecStartPre=\n")
    _, (orphan,) = scene.orphans(*HOLD, user="bench")
    before = scene.name("before")
    text = f"[Service]\nType=oneshot\nExecStart={CLEAN} --unit {server}\n"
    scene.node.write(f"/etc/systemd/system/{before}", text)
    scene.node.systemctl("daemon-reload")
    assert scene.start(before)
    (line,) = [str(each["MESSAGE"]) for each in scene.node.journal(unit=before) if str(each["MESSAGE"]).startswith("{")]
    assert json.loads(line)["outcome"] == "cleaned" and not scene.alive(orphan)
    assert scene.node.run(["ls", "/run/gpuprestart"]).stdout.split() == ["locks"]


# What it runs --------------------------------------------------------------------------------------------------------

AUDIT = """
import json, os, sys
out = open("/run/t-audit.log", "a", buffering=1)
def hook(event, arguments):
    if event in ("subprocess.Popen", "os.posix_spawn", "os.system", "os.exec", "os.startfile", "pty.spawn"):
        print(json.dumps([event, arguments], default=lambda value: os.fsdecode(value)), file=out)
sys.path.insert(0, "/usr/lib/gpuprestart")
sys.addaudithook(hook)
from gpuprestart import cli
cli.run()
"""

#: What a program of systemd's name would do if it were found first.
TRAP = "#!/bin/sh\ntouch /run/t-trapped\n"


def test_what_is_run_is_named_in_full_and_inherits_nothing(scene: Scene) -> None:
    """No shell, no PATH, none of the unit's environment. That all are given up in time, test_hostile.py shows."""
    scene.node.run(["rm", "-rf", "/run/t-audit.log", "/run/t-trapped", "/run/t-traps"])
    for name in ("systemctl", "busctl", "sh", "python3", "env", "loginctl", "nvidia-smi", "nvidia-modprobe"):
        scene.node.write(f"/run/t-traps/{name}", TRAP, mode=0o755)
    scene.node.write("/run/t-audit.py", AUDIT)
    environment = "PATH=/run/t-traps BASH_ENV=/run/t-traps/sh PYTHONPATH=/run/t-traps SYSTEMD_PAGER=/run/t-traps/sh"
    _, (orphan,) = scene.orphans(*HOLD, user="bench")
    server = scene.server(
        gpus="0",
        command="/usr/bin/python3 -I /run/t-audit.py clean --json",
        more=f"Environment={environment}\nWorkingDirectory=/run/t-traps\n",
    )
    assert scene.start(server)
    assert scene.verdict(server).fates == {orphan: "terminated"}
    assert not scene.node.exists("/run/t-trapped")
    ran = [json.loads(line) for line in scene.node.read("/run/t-audit.log").splitlines()]
    assert ran and {event for event, _ in ran} == {"subprocess.Popen"}
    for _, (executable, words, folder, environment_of_it) in ran:
        assert re.fullmatch(r"(/usr)?/bin/(systemctl|busctl)", executable) and words[0] == executable
        assert folder == "/"
        assert environment_of_it.keys() <= {"PATH", "LC_ALL", "SYSTEMD_COLORS", "SYSTEMD_PAGER"}
        assert environment_of_it["PATH"] == "/usr/bin:/bin" and environment_of_it["SYSTEMD_PAGER"] == ""


# Their parts ---------------------------------------------------------------------------------------------------------


def _hold(scene: Scene, situation: str) -> tuple[str, int]:
    if situation == LIVE:
        return scene.service(*HOLD, user="bench")
    options = [] if situation == STALE else ["--unlisted"]
    options += ["--map-only"] if situation == MAPPED else []
    unit, (pid,) = scene.orphans(*HOLD, *options, user="bench")
    return unit, pid
