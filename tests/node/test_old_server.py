"""The old server is still there: holders of every kind of owner, on a booted node (cases A)."""

from __future__ import annotations

import json

import pytest

from tests.node.machine import LoginSession
from tests.node.scene import HOLDER, TERM, Scene


@pytest.mark.case("A0")
def test_an_unlisted_orphan_of_a_failed_unit(scene: Scene) -> None:
    """What this project was born from: nobody in NVML's list, 1523 MiB on GPU 0, the other seven idle."""
    scene.gpu.ask("set_gpu", gpu=0, baseline_mib=0)
    _, (orphan,) = scene.orphans("--open", "0", "--gpu", "0", "--mib", "1523", "--unlisted")
    server = scene.server()
    assert scene.start(server)
    run = scene.verdict(server)
    assert (run.outcome, run.exit) == ("cleaned", 0)
    assert scene.signals(run) == [(orphan, "SIGTERM")]
    assert run.holder(orphan)["evidence"] == ["fd"]
    assert [gpu["index"] for gpu in run.verdict["gpus"]] == list(range(8))
    assert all(gpu["clean"] and gpu["used_bytes"] <= 3 << 20 for gpu in run.verdict["gpus"])
    assert {record["GPU_INDEX"] for record in scene.records(run, "gpu-verdict")} == {str(index) for index in range(8)}


@pytest.mark.case("A2")
@pytest.mark.parametrize("delegate", ["no", "yes"])
def test_a_holder_left_in_our_own_unit(scene: Scene, delegate: str) -> None:
    """A first run leaves a worker in the unit's cgroup; the second start finds it beside itself and a pipeline."""
    unit = scene.name("own")
    worker = f"{HOLDER} --open 0,1 --gpu 0,1 --mib 900 --fork 1"
    scene.server(
        unit,
        gpus="0,1",
        server=worker,
        command="/bin/sh -c '/usr/bin/gpuprestart clean --json | tee /run/%n.tee; exit 0'",
        more=f"Type=notify\nNotifyAccess=all\nKillMode=process\nDelegate={delegate}\n",
    )
    assert scene.start(unit)
    (left,) = scene.abandon(unit)
    assert scene.alive(left)
    assert scene.start(unit)
    run = scene.verdict(unit)
    assert run.outcome == "cleaned"
    assert run.holder(left)["owner"] == f"unit:{unit}"
    assert [pid for pid, _ in scene.signals(run)] == [left]
    # The tee in our pipeline and the shell above us lived to the end: the whole verdict went through them.
    assert scene.node.read(f"/run/{unit}.tee").startswith('{"version"')


@pytest.mark.case("A3")
def test_a_scheduler_of_a_failed_unit(scene: Scene) -> None:
    old, (orphan,) = scene.orphans(
        "--open", "all", "--gpu", "2", "--setsid", "--comm", "DP0_scheduler", "--mib", "20000"
    )
    assert scene.parent(orphan) == 1
    run = scene.clean()
    assert (run.outcome, run.exit) == ("cleaned", 0)
    assert run.holder(orphan)["owner"] == f"unit:{old}"
    assert run.fates == {orphan: "terminated"}


@pytest.mark.case("A3")
@pytest.mark.parametrize("dedicated, outcome", [("false", "protected"), ("true", "cleaned")])
def test_an_orphan_that_does_not_run_as_its_units_user(scene: Scene, dedicated: str, outcome: str) -> None:
    """The cgroup says where it was started, but the unit itself would not have run it as bench."""
    scene.policy(f"[owners]\ndedicated = {dedicated}\n")
    as_bench = ("setpriv", "--reuid=bench", "--clear-groups", "--")
    _, (orphan,) = scene.orphans("--open", "0", "--gpu", "0", "--mib", "900", prefix=as_bench, user=None)
    run = scene.clean()
    assert run.outcome == outcome
    assert run.holder(orphan)["user"] == "bench"


@pytest.mark.case("A4")
def test_left_by_a_session_that_is_over(scene: Scene) -> None:
    session, holder = _session_holder(scene)
    scene.node.end_session(session)
    run = scene.clean("--gpus", "0")
    assert (run.outcome, run.exit) == ("protected", 75)
    assert "owners.dedicated" in " ".join(run.verdict["hints"])
    assert run.holder(holder)["owner"] == f"session:{session.id}:alice"
    assert scene.signals(run) == []
    assert scene.alive(holder)
    scene.policy("[owners]\ndedicated = true\n")
    assert scene.clean("--gpus", "0").outcome == "cleaned"


@pytest.mark.case("A5")
@pytest.mark.parametrize("dedicated", ["false", "true"])
def test_held_from_a_live_session(scene: Scene, dedicated: str) -> None:
    scene.policy(f"[owners]\ndedicated = {dedicated}\n")
    session, holder = _session_holder(scene)
    try:
        run = scene.clean("--gpus", "0")
        assert (run.outcome, run.exit) == ("protected", 75)
        assert "alice" in run.verdict["message"] and session.id in run.verdict["message"]
        assert scene.signals(run) == []
        assert scene.alive(holder)
    finally:
        scene.node.end_session(session)
        scene.node.run(["kill", "-KILL", str(holder)], check=False)


@pytest.mark.case("A8")
def test_another_service_is_active(scene: Scene) -> None:
    ollama, holder = scene.service("--open", "all", "--gpu", "3", "--mib", "20480", user="alice")
    _, (orphan,) = scene.orphans("--open", "0", "--gpu", "0", "--mib", "900")
    server = scene.server()
    assert not scene.start(server)
    run = scene.verdict(server)
    assert (run.outcome, run.exit) == ("protected", 75)
    assert scene.node.show(server, "Result", "ActiveState") == {"Result": "exit-code", "ActiveState": "failed"}
    assert ollama in run.verdict["message"] and "GPU 3" in run.verdict["message"]
    assert run.verdict["duration_s"] < 5
    assert scene.signals(run) == []
    assert scene.alive([holder, orphan])
    status = scene.node.run(["systemctl", "status", server], check=False).stdout
    assert f"systemctl stop {ollama}" in status and "GPU 3" in status
    # Whose process it is can read in its own log that somebody wanted its GPU.
    assert any(each.get("GPUPRESTART_RUN") == run.verdict["run"] for each in scene.node.journal(unit=ollama))


@pytest.mark.case("A10")
def test_children_of_the_last_run_without_a_gpu(scene: Scene) -> None:
    unit = scene.name("tokenizer")
    scene.server(unit, server=f"{HOLDER} --fork 2", more="Type=notify\nNotifyAccess=all\nKillMode=process\n")
    assert scene.start(unit)
    left = scene.abandon(unit)
    assert len(left) == 2 and scene.alive(left)
    assert scene.start(unit)
    run = scene.verdict(unit)
    assert run.outcome == "cleaned"
    assert set(run.fates) == left
    assert not scene.alive(left)


@pytest.mark.case("A13")
def test_a_holder_through_another_node(scene: Scene) -> None:
    scene.node.run(["sh", "-c", "mknod -m 666 /dev/other $(stat -c 'c 0x%t 0x%T' /dev/nvidia0)"])
    try:
        _, (orphan,) = scene.orphans("--path", "/dev/other", "--gpu", "0", "--mib", "900", "--unlisted")
        run = scene.clean()
        assert run.outcome == "cleaned"
        assert run.holder(orphan)["gpus"] == [run.verdict["gpus"][0]["uuid"]]
    finally:
        scene.node.run(["rm", "/dev/other"])


@pytest.mark.case("A14")
def test_a_fresh_holder_from_the_term_handler(scene: Scene) -> None:
    _, (orphan,) = scene.orphans("--open", "0", "--gpu", "0", "--term-fork", "--mib", "900")
    run = scene.clean()
    assert run.outcome == "cleaned"
    assert len(run.fates) == 2 and orphan in run.fates
    assert [name for _, name in scene.signals(run)] == ["SIGTERM", "SIGTERM"]


@pytest.mark.case("A15")
def test_a_holder_that_ignores_sigterm(scene: Scene) -> None:
    scene.policy(f"[deadline]\n{TERM}")
    _, (orphan,) = scene.orphans("--open", "0", "--gpu", "0", "--ignore-term", "--mib", "900")
    run = scene.clean()
    assert run.outcome == "cleaned"
    assert scene.signals(run) == [(orphan, "SIGTERM"), (orphan, "SIGKILL")]
    assert run.fates == {orphan: "killed"}
    assert run.verdict["phases"]["evict"] >= 1


@pytest.mark.case("A15")
def test_a_stopped_holder(scene: Scene) -> None:
    """SIGTERM stays pending while it is stopped: SIGCONT lets it obey, and no grace is wasted."""
    _, (orphan,) = scene.orphans("--open", "0", "--gpu", "0", "--mib", "900")
    scene.node.run(["kill", "-STOP", str(orphan)])
    run = scene.clean()
    assert run.outcome == "cleaned"
    assert scene.signals(run) == [(orphan, "SIGTERM"), (orphan, "SIGCONT")]
    assert run.verdict["phases"]["evict"] < 5


@pytest.mark.case("A16")
@pytest.mark.parametrize(
    "grace, signals, fate",
    [("5 s", ["SIGTERM"], "terminated"), ("300 ms", ["SIGTERM", "SIGKILL"], "killed")],
)
def test_a_holder_that_takes_its_time(scene: Scene, grace: str, signals: list[str], fate: str) -> None:
    scene.policy(f"[deadline]\nterm = '{grace}'\n")
    _, (orphan,) = scene.orphans("--open", "0", "--gpu", "0", "--term-delay", "0.8", "--mib", "900")
    run = scene.clean()
    assert run.outcome == "cleaned"
    assert [name for _, name in scene.signals(run)] == signals
    assert run.fates == {orphan: fate}


@pytest.mark.case("A18")
def test_one_of_four_stays(scene: Scene) -> None:
    scene.gpu.ask("leak", gpu=2, mib=5000)
    run = scene.clean("--gpus", "0,1,2,3", "--deadline", "1s")
    assert (run.outcome, run.exit) == ("unattributed", 75)
    assert [gpu["clean"] for gpu in run.verdict["gpus"]] == [True, True, False, True]
    verdicts = {each["GPU_INDEX"]: each["PRIORITY"] for each in scene.records(run, "gpu-verdict")}
    assert verdicts == {"0": "6", "1": "6", "2": "4", "3": "6"}


def _session_holder(scene: Scene) -> tuple[LoginSession, int]:
    """A job that alice started with nohup in a login session, and the session."""
    scene.node.run(["install", "-d", "-o", "alice", "/run/alice"])
    scene.node.run(["rm", "-f", "/run/alice/ready"])
    job = f"{HOLDER} --open 0 --gpu 0 --mib 900 --ready-file /run/alice/ready"
    session = scene.node.login_session("alice", f"nohup {job} >/dev/null 2>&1 & sleep 1000")
    scene.node.wait_for(lambda: scene.node.exists("/run/alice/ready"), timeout=10, what="alice's job holds GPU 0")
    return session, int(json.loads(scene.node.read("/run/alice/ready"))["pid"])
