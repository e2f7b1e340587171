"""NVML and the device nodes: which GPU is which, and a driver that is not there, on a booted node (cases C)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.node.scene import Run, Scene

MIB = 1 << 20

#: A machine that never had an NVIDIA device, for the commands after it: no node, no module, nothing on the PCI bus.
WITHOUT_DEVICES = """
set -e
mount -t tmpfs -o mode=755 tmpfs /mnt
cp -a /dev/null /dev/zero /dev/urandom /mnt/
mount --rbind /mnt /dev
for folder in /sys/bus/pci /sys/module; do
    [ ! -e $folder ] || mount -t tmpfs tmpfs $folder
done
"""


# Memory that the driver reserves -------------------------------------------------------------------------------------


@pytest.mark.case("C1")
def test_reserved_memory_is_not_used_memory(scene: Scene) -> None:
    scene.reset(baseline_mib=8, reserved_mib=904)
    run = scene.clean()
    assert (run.outcome, run.exit) == ("clean", 0)
    for gpu in run.verdict["gpus"]:
        figures = (gpu["memory_call"], gpu["used_bytes"], gpu["reserved_bytes"])
        assert figures == ("v2", 8 * MIB, 904 * MIB)


@pytest.mark.case("C1")
def test_reserved_memory_where_only_the_old_call_is(scene: Scene) -> None:
    """It counts 904 MiB that nobody uses, so the limit has to be raised, and that is what the hint says."""
    scene.reset(baseline_mib=8, reserved_mib=904)
    scene.gpu.ask("set_gpu", gpu=0, memory_v2=False)
    server = scene.server(gpus="0", command="/usr/bin/gpuprestart clean --json --deadline 1s")
    assert not scene.start(server)
    run = scene.verdict(server)
    assert (run.outcome, run.exit) == ("unattributed", 75)
    (gpu,) = run.verdict["gpus"]
    assert (gpu["memory_call"], gpu["used_bytes"], gpu["reserved_bytes"]) == ("v1", 912 * MIB, None)
    assert any("v1" in hint and "reserve" in hint and "max_used" in hint for hint in run.verdict["hints"])
    scene.policy('[memory]\nmax_used = "1 GiB"\n')
    assert scene.start(server)


# A driver that is not there ------------------------------------------------------------------------------------------


@pytest.mark.case("C3")
@pytest.mark.parametrize(
    "code, says",
    [
        ("DRIVER_NOT_LOADED", "modprobe nvidia"),
        ("LIB_RM_VERSION_MISMATCH", "different versions"),
        ("UNKNOWN", "Unknown Error"),
    ],
)
@pytest.mark.parametrize("missing", ["refuse", "pass"])
def test_nvml_does_not_initialise(scene: Scene, code: str, says: str, missing: str) -> None:
    scene.policy(f'[nvml]\nmissing = "{missing}"\n', base="")
    scene.gpu.ask("error", function="nvmlInit*", code=code)
    _, (orphan,) = scene.orphans("--open", "0", "--gpu", "0", "--mib", "900")
    run = _refused(scene, scene.server())
    _is_unknown(run)
    assert says in " ".join([run.verdict["message"], *run.verdict["hints"]])
    assert run.verdict["hints"]
    assert scene.signals(run) == []
    assert scene.alive(orphan)


@pytest.mark.case("C3")
@pytest.mark.parametrize("missing", ["refuse", "pass"])
def test_the_library_is_missing(scene: Scene, missing: str) -> None:
    """The nodes of GPUs are there: this machine has GPUs, whatever the policy says of machines that have none."""
    scene.policy(f'[nvml]\nmissing = "{missing}"\n', base="")
    server = scene.server()
    with _without_library(scene):
        run = _refused(scene, server)
    _is_unknown(run)
    assert "libnvidia-ml.so.1" in " ".join(run.verdict["hints"])
    assert "Library" in run.verdict["message"]


@pytest.mark.case("C3")
@pytest.mark.parametrize(
    "missing, library, outcome, status",
    [("pass", False, "none", 0), ("refuse", False, "unknown", 69), ("pass", True, "unknown", 69)],
)
def test_no_trace_of_a_gpu(scene: Scene, missing: str, library: bool, outcome: str, status: int) -> None:
    """A library alone, whose driver is not loaded, is a trace as well."""
    scene.policy(f'[nvml]\nmissing = "{missing}"\n', base="")
    hook = "exec /usr/bin/gpuprestart clean --json"
    scene.node.write("/run/t-without-devices", f"{WITHOUT_DEVICES}{hook}\n")
    server = scene.server(command="/usr/bin/unshare --mount /bin/sh /run/t-without-devices")
    if library:
        scene.gpu.ask("error", function="nvmlInit*", code="DRIVER_NOT_LOADED")
        started = scene.start(server)
    else:
        with _without_library(scene):
            started = scene.start(server)
    run = scene.verdict(server)
    assert (run.outcome, run.exit, started) == (outcome, status, status == 0)
    assert run.verdict["gpus"] == []
    if outcome == "none":
        assert "no NVIDIA device" in run.verdict["message"]
    else:
        assert run.verdict["duration_s"] < 2


# Which GPU is meant --------------------------------------------------------------------------------------------------


@pytest.mark.case("C6")
@pytest.mark.parametrize(
    "select, says",
    [
        ("[0, 1, 2, 3, 4, 5, 6, 7]", "GPU 7 is not there, NVML counts 7"),
        ('["GPU-00000000-dead"]', "no GPU here has the UUID GPU-00000000-dead"),
        ('["gpu-aaaa"]', "gpu-aaaa is the beginning of 2 UUIDs"),
    ],
)
def test_a_policy_names_what_is_not_there(scene: Scene, select: str, says: str) -> None:
    scene.gpu.ask("set_gpu", gpu=7, missing=True)
    _make_alike(scene)
    scene.policy(f"[gpus]\nselect = {select}\n", base="")
    _, (orphan,) = scene.orphans("--open", "0", "--gpu", "0", "--mib", "900")
    run = _refused(scene, scene.server())
    assert (run.outcome, run.exit) == ("config", 78)
    assert re.search(rf"/etc/gpuprestart/policy\.toml:2: gpus\.select: .*{says}", run.verdict["message"])
    assert run.verdict["gpus"] == []
    assert scene.signals(run) == []
    assert scene.alive(orphan)


@pytest.mark.case("C6")
@pytest.mark.parametrize(
    "visible, says",
    [
        ("0,1,2,3,4,5,6,7", "GPU 7 is not there, NVML counts 7"),
        ("0,GPU-00000000-dead", "no GPU here has the UUID"),
        ("GPU-aaaa,1", "GPU-aaaa is the beginning of 2 UUIDs"),
    ],
)
def test_a_unit_names_what_is_not_there(scene: Scene, visible: str, says: str) -> None:
    """CUDA itself would end the list there and start on fewer GPUs without a word."""
    scene.gpu.ask("set_gpu", gpu=7, missing=True)
    _, (orphan,) = scene.orphans("--open", "0", "--gpu", "0", "--mib", "900")
    _make_alike(scene)
    run = _refused(scene, scene.server(gpus=visible))
    assert (run.outcome, run.exit) == ("config", 78)
    assert re.search(f"CUDA_VISIBLE_DEVICES: .*{says}", run.verdict["message"])
    assert scene.signals(run) == []
    assert scene.alive(orphan)


@pytest.mark.case("C7")
def test_minors_in_another_order_than_indices(scene: Scene) -> None:
    """Who has /dev/nvidia0 open, and is listed nowhere, holds the GPU that NVML calls 7."""
    scene.reset(minors="reversed")
    _, (orphan,) = scene.orphans("--open", "0", "--gpu", "7", "--mib", "900", "--unlisted")
    _, (other,) = scene.orphans("--open", "7")
    wrong = scene.clean("--gpus", "0,1,2,3,4,5,6")
    assert (wrong.outcome, wrong.exit) == ("clean", 0)
    assert scene.alive([orphan, other])
    run = scene.clean("--gpus", "7")
    assert (run.outcome, run.exit) == ("cleaned", 0)
    assert scene.signals(run) == [(orphan, "SIGTERM")]
    assert run.holder(orphan)["gpus"] == [run.verdict["gpus"][0]["uuid"]]
    assert run.verdict["gpus"][0]["index"] == 7
    assert scene.alive(other)


@pytest.mark.case("C8")
def test_a_stranger_with_our_node_open_and_its_memory_elsewhere(scene: Scene) -> None:
    _, stranger = scene.service("--open", "all", "--gpu", "0", "--mib", "20480", user="alice")
    typed = scene.clean("--gpus", "3")
    assert (typed.outcome, typed.exit) == ("clean", 0)
    server = scene.server(gpus="3")
    assert scene.start(server)
    run = scene.verdict(server)
    assert (run.outcome, run.exit) == ("clean", 0)
    assert run.verdict["holders"] == []
    assert scene.signals(run) == scene.signals(typed) == []
    assert scene.alive(stranger)


@pytest.mark.case("C8")
def test_memory_elsewhere_clears_even_a_stale_process_of_suspicion(scene: Scene) -> None:
    """GPU 3 has memory that nobody explains. Whoever NVML puts on GPU 0 did not take it, though it might be ended."""
    scene.gpu.ask("leak", gpu=3, mib=900)
    _, (stranger,) = scene.orphans("--open", "all", "--gpu", "0", "--mib", "20480")
    run = scene.clean("--gpus", "3", "--deadline", "1s")
    assert (run.outcome, run.exit) == ("unattributed", 75)
    assert scene.signals(run) == []
    assert scene.alive(stranger)
    assert not re.search(rf"\b{stranger}\b", " ".join([run.verdict["message"], *run.verdict["hints"]]))


def test_nobody_is_ended_on_the_word_of_nvml_alone(scene: Scene) -> None:
    """Its owner would let it be ended, but it has no node open: the list may mean somebody else by that number."""
    _, (listed,) = scene.orphans("--gpu", "0", "--mib", "900")
    run = _refused(scene, scene.server())
    assert (run.outcome, run.exit) == ("protected", 75)
    assert run.holder(listed)["evidence"] == ["nvml"]
    assert run.holder(listed)["action"] == "refuse"
    assert "NVML alone" in run.verdict["message"]
    assert scene.signals(run) == []
    assert scene.alive(listed)


def _refused(scene: Scene, server: str) -> Run:
    """The verdict on a start that has to be refused, with systemd's word that it was, and with which status."""
    assert not scene.start(server)
    run = scene.verdict(server)
    shown = scene.node.show(server, "ActiveState", "Result", "ExecStartPre", "ExecMainStartTimestampMonotonic")
    assert (shown["ActiveState"], shown["Result"]) == ("failed", "exit-code")
    assert f"status={run.exit}" in shown["ExecStartPre"]
    assert shown["ExecMainStartTimestampMonotonic"] == "0"
    return run


def _is_unknown(run: Run) -> None:
    assert (run.outcome, run.exit) == ("unknown", 69)
    assert run.verdict["duration_s"] < 2


def _make_alike(scene: Scene) -> None:
    """Two GPUs whose UUIDs begin alike."""
    for gpu in (5, 6):
        scene.gpu.ask("set_gpu", gpu=gpu, uuid=f"GPU-aaaa{gpu:04d}-0000-0000-0000-000000000000")


@contextmanager
def _without_library(scene: Scene) -> Iterator[None]:
    """The driver's library is not installed."""
    line = scene.node.run(["ldconfig", "-p"]).stdout.partition("libnvidia-ml.so.1 ")[2].splitlines()[0]
    library = line.rpartition("=> ")[2]
    hidden = "/opt/simgpu/hidden"
    scene.node.run(["sh", "-ec", f"mv {shlex.quote(library)} {hidden}; ldconfig"])
    try:
        yield
    finally:
        scene.node.run(["sh", "-ec", f"mv {hidden} {shlex.quote(library)}; ldconfig"])
