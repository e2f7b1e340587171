"""An operator lets one start pass unproved: once, within ten minutes, by name, and loudly."""

from __future__ import annotations

import pytest

from tests.node.scene import Scene

FOLDER = "/run/gpuprestart/bypass"


def _bypass(scene: Scene, unit: str) -> None:
    scene.node.run(["/usr/bin/gpuprestart", "bypass", unit])


def test_the_next_start_passes_once(scene: Scene) -> None:
    """Nobody is signalled for it, a stale holder as little as a live one."""
    _, orphans = scene.orphans("--open", "0", "--gpu", "0", "--mib", "1500")
    live, _ = scene.service("--open", "0", "--gpu", "0", "--mib", "20000")
    server = scene.server(gpus="0", more="StartLimitBurst=100")
    assert not scene.start(server)
    _bypass(scene, server)
    assert scene.start(server)
    run = scene.verdict(server)
    assert (run.outcome, run.exit) == ("bypassed", 0)
    assert "root let this start" in run.verdict["message"]
    assert not scene.signals(run) and scene.alive(orphans)
    scene.node.systemctl("stop", server)
    assert not scene.start(server)
    assert scene.verdict(server).outcome == "protected"
    assert scene.node.show(live, "ActiveState")["ActiveState"] == "active"


def test_it_is_recorded_where_the_unit_s_log_is_read(scene: Scene) -> None:
    scene.gpu.ask("leak", gpu=0, mib=900)
    server = scene.server(gpus="0")
    _bypass(scene, server.removesuffix(".service"))
    granted = [each for each in scene.node.journal(unit=server) if each.get("GPUPRESTART_EVENT") == "bypass-granted"]
    assert len(granted) == 1 and server in granted[0]["MESSAGE"] and granted[0]["PRIORITY"] == "4"
    assert scene.start(server)
    (verdict,) = scene.records(scene.verdict(server), "verdict")
    assert (verdict["GPUPRESTART_OUTCOME"], verdict["PRIORITY"]) == ("bypassed", "4")
    assert "let this start pass unproved" in scene.node.show(server, "StatusText")["StatusText"]


def test_it_leaves_a_claim(scene: Scene) -> None:
    scene.gpu.ask("leak", gpu=0, mib=900)
    server = scene.server(gpus="0,1")
    _bypass(scene, server)
    assert scene.start(server)
    other = scene.clean("--gpus", "1")
    assert (other.outcome, other.exit) == ("protected", 75)
    assert server in other.verdict["message"]


@pytest.mark.parametrize("trouble", ["policy", "driver"])
def test_what_is_broken_does_not_stand_in_its_way(scene: Scene, trouble: str) -> None:
    server = scene.server(gpus="0")
    if trouble == "policy":
        scene.policy("[memory]\nmax_used = '12 parsecs'\n")
    else:
        scene.gpu.ask("error", function="nvmlInit*", code="DRIVER_NOT_LOADED")
    assert not scene.start(server)
    _bypass(scene, server)
    assert scene.start(server)
    run = scene.verdict(server)
    assert run.outcome == "bypassed"
    assert ("no claim keeps others off" in run.verdict["message"]) == (trouble == "driver")


@pytest.mark.parametrize("line", ["until=1.0 by=root\n", "until=1e18 by=root\n", "until=nan by=root\n", "", "junk\n"])
def test_one_that_does_not_hold_lets_nobody_pass(scene: Scene, line: str) -> None:
    """It is over, or was never written by us; and it is taken away, so that it never comes to hold."""
    scene.gpu.ask("leak", gpu=0, mib=900)
    scene.policy("[deadline]\ntotal = '1 s'\n")
    server = scene.server(gpus="0")
    scene.node.run(["mkdir", "-p", FOLDER])
    scene.node.write(f"{FOLDER}/{server}", line)
    assert not scene.start(server)
    assert scene.verdict(server).outcome == "unattributed"
    assert not scene.node.exists(f"{FOLDER}/{server}")


def test_it_is_for_that_unit_and_for_clean_alone(scene: Scene) -> None:
    scene.gpu.ask("leak", gpu=0, mib=900)
    scene.policy("[deadline]\ntotal = '1 s'\n")
    server, other = scene.server(gpus="0"), scene.server(gpus="0")
    _bypass(scene, server)
    assert not scene.start(other)
    assert scene.check("--unit", server).outcome == "unattributed"
    assert scene.clean("--unit", server).outcome == "unattributed"
    assert scene.node.exists(f"{FOLDER}/{server}")


@pytest.mark.parametrize(
    ("unit", "status", "said"),
    [
        ("t-nobody-has-this", 78, "systemd has no unit t-nobody-has-this.service"),
        ("sglang@.service", 78, "is no name of a service"),
        ("dbus.socket", 78, "is no name of a service"),
        ("../../etc/passwd", 78, "is no name of a service"),
    ],
)
def test_what_it_is_refused_for(scene: Scene, unit: str, status: int, said: str) -> None:
    done = scene.node.run(["/usr/bin/gpuprestart", "bypass", unit], check=False)
    assert done.returncode == status
    assert said in done.stderr and "Traceback" not in done.stderr


def test_only_root_may(scene: Scene) -> None:
    server = scene.server(gpus="0")
    done = scene.node.run(
        ["setpriv", "--reuid=5001", "--clear-groups", "/usr/bin/gpuprestart", "bypass", server], check=False
    )
    assert done.returncode == 77 and "root" in done.stderr
    assert not scene.node.exists(f"{FOLDER}/{server}")
