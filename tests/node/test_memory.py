"""Memory and processes disagree: what NVML counts against who is there, on a booted node (cases B)."""

from __future__ import annotations

import json
import re

import pytest

from tests.node.scene import TERM, Run, Scene

MIB = 1 << 20


@pytest.mark.case("B1")
@pytest.mark.parametrize("deadline, outcome", [("12s", "cleaned"), ("3s", "not-freed")])
def test_memory_comes_back_long_after_its_holder_is_gone(scene: Scene, deadline: str, outcome: str) -> None:
    """It stays where it is for 4.5 s and is back in one step; a monitor has every node open all the while."""
    scene.policy(f"[deadline]\n{TERM}")
    scene.gpu.ask("set", release_delay=4.5)
    _, monitor = scene.service("--open", "all", user="alice")
    _, (orphan,) = scene.orphans("--open", "0", "--gpu", "0", "--mib", "40000")
    server = scene.server(gpus="0", command=f"/usr/bin/gpuprestart clean --json --deadline {deadline}")
    assert scene.start(server) is (outcome == "cleaned")
    run = scene.verdict(server)
    assert run.outcome == outcome
    assert scene.signals(run) == [(orphan, "SIGTERM")]
    assert run.fates == {orphan: "terminated"}
    assert scene.alive(monitor)
    assert not _names(run, monitor)
    if outcome == "cleaned":
        (release,) = scene.gpu.ask("releases")["releases"][-1:]
        assert release["pid"] == orphan
        assert run.verdict["time"] + run.verdict["duration_s"] >= release["released_realtime"]
        assert len(scene.records(run, "memory-freed")) == 1
        assert _used(run) == [3 * MIB]
    else:
        assert run.exit == 75
        assert str(orphan) in run.verdict["message"]
        assert _used(run) == [40003 * MIB]


@pytest.mark.case("B3")
def test_a_listed_process_that_exists_nowhere(scene: Scene) -> None:
    dead = scene.gpu.ask("ghost", gpu=0, mib=1520)["pid"]
    run = scene.clean("--gpus", "0", "--deadline", "1s")
    assert (run.outcome, run.exit) == ("unattributed", 75)
    (record,) = scene.records(run, "verdict")
    assert re.search(rf"\bPID {dead}\b", record["MESSAGE"])
    assert "1523 MiB" in record["MESSAGE"]
    assert "reset" in record["MESSAGE"] and "reboot" in record["MESSAGE"]
    assert run.verdict["gpus"][0]["unattributed_bytes"] == 1523 * MIB
    assert run.verdict["holders"] == []
    assert scene.signals(run) == []


@pytest.mark.case("B4")
@pytest.mark.parametrize("limit, outcome, status", [("512 MiB", "unattributed", 75), ("1 GiB", "clean", 0)])
def test_memory_that_nobody_holds(scene: Scene, limit: str, outcome: str, status: int) -> None:
    scene.policy(f'[memory]\nmax_used = "{limit}"\n')
    scene.gpu.ask("set_gpu", gpu=0, baseline_mib=0)
    scene.gpu.ask("leak", gpu=0, mib=540)
    server = scene.server(command="/usr/bin/gpuprestart clean --json --deadline 1s")
    assert scene.start(server) is (outcome == "clean")
    run = scene.verdict(server)
    assert (run.outcome, run.exit) == (outcome, status)
    assert _used(run)[0] == 540 * MIB
    assert [gpu["clean"] for gpu in run.verdict["gpus"]] == [outcome == "clean"] + [True] * 7
    assert run.verdict["holders"] == []


@pytest.mark.case("B7")
@pytest.mark.parametrize("listed, outcome", [(False, "clean"), (True, "unattributed")])
def test_a_true_zombie(scene: Scene, listed: bool, outcome: str) -> None:
    """Dead and not waited for: it has nothing, even where NVML still lists it, and there is nothing to end."""
    unit, (parent,) = scene.orphans("--zombie")
    zombie = json.loads(scene.node.read(f"/tmp/{unit}.0"))["zombie"]
    assert scene.node.read(f"/proc/{zombie}/stat").rpartition(")")[2].split()[0] == "Z"
    if listed:
        scene.gpu.ask("ghost", gpu=0, mib=900, pid=zombie)
    run = scene.clean("--gpus", "0", "--deadline", "1s")
    assert run.outcome == outcome
    assert run.verdict["holders"] == []
    assert scene.signals(run) == []
    assert scene.alive(parent)
    if listed:
        assert re.search(rf"\bPID {zombie}\b", run.verdict["message"])


@pytest.mark.case("B8")
def test_full_utilisation_without_memory(scene: Scene) -> None:
    """A telemetry latch, not dirt."""
    scene.gpu.ask("set_gpu", gpu=0, util=100, mem_util=100, baseline_mib=0)
    seen = json.loads(scene.node.run(["gpustat", "--json"]).stdout)["gpus"][0]
    assert (seen["utilization.gpu"], seen["memory.used"]) == (100, 0)
    server = scene.server()
    assert scene.start(server)
    run = scene.verdict(server)
    assert (run.outcome, run.exit) == ("clean", 0)
    assert _used(run)[0] == 0


@pytest.mark.case("B14")
def test_a_stale_holder_and_a_live_suspect(scene: Scene) -> None:
    """Memory stays unexplained for longer than `term` after the stale one has gone: the suspect is still somebody's."""
    scene.policy(f"[deadline]\n{TERM}")
    scene.gpu.ask("set", release_delay=2)
    live, suspect = scene.service("--open", "all", user="alice")
    _, (orphan,) = scene.orphans("--open", "0", "--gpu", "0", "--mib", "20480")
    run = scene.clean("--gpus", "0")
    assert (run.outcome, run.exit) == ("cleaned", 0)
    assert scene.signals(run) == [(orphan, "SIGTERM")]
    assert run.fates == {orphan: "terminated"}
    assert scene.alive(suspect)
    assert scene.node.show(live, "ActiveState")["ActiveState"] == "active"


def _names(run: Run, pid: int) -> bool:
    """Whether the words of a verdict speak of a process."""
    words = " ".join([run.verdict["message"], *run.verdict["hints"]])
    return re.search(rf"\b{pid}\b", words) is not None


def _used(run: Run) -> list[int]:
    return [gpu["used_bytes"] for gpu in run.verdict["gpus"]]
