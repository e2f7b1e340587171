"""Every GPU: selected by every form, lost, in instances, without figures of its own, in great number (cases C)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from tests.node.machine import Node
from tests.node.scene import Run, Scene

MIB = 1 << 20

#: What nvml.h calls NVML_DEVICE_ADDRESSING_MODE_ATS: the GPU uses the CPU's page tables.
ATS = 2

FASTER = "NVIDIA H200"


# CUDA_VISIBLE_DEVICES and NVIDIA_VISIBLE_DEVICES (C9) ----------------------------------------------------------------


@pytest.mark.case("C9")
@pytest.mark.parametrize(
    "environment, indices",
    [
        ("CUDA_VISIBLE_DEVICES=2,3", [2, 3]),
        ("CUDA_VISIBLE_DEVICES=3,2", [2, 3]),
        ('"CUDA_VISIBLE_DEVICES=2, 3"', [2, 3]),
        ("CUDA_VISIBLE_DEVICES=GPU-431c", [2]),
        ("CUDA_VISIBLE_DEVICES=gpu-431CC2A8,GPU-5d78ae58-bd3c-595b-980d-36e1d6f2cfdf", [1, 2]),
        ("CUDA_VISIBLE_DEVICES=1,GPU-431c", [1, 2]),
        ("CUDA_VISIBLE_DEVICES=0,-1,1", [0]),
        ("CUDA_VISIBLE_DEVICES=-1", []),
        ("CUDA_VISIBLE_DEVICES=", []),
        ("CUDA_VISIBLE_DEVICES=NoDevFiles", []),
        ("CUDA_VISIBLE_DEVICES=void", []),
        ("", None),
        ("NVIDIA_VISIBLE_DEVICES=2,3", [2, 3]),
        ("NVIDIA_VISIBLE_DEVICES=all", None),
        ("NVIDIA_VISIBLE_DEVICES=none", []),
        ("NVIDIA_VISIBLE_DEVICES=void", []),
        ("NVIDIA_VISIBLE_DEVICES=", []),
        ("NVIDIA_VISIBLE_DEVICES=GPU-431c", [2]),
        # CUDA looks at its own variable only.
        ("NVIDIA_VISIBLE_DEVICES=2 CUDA_VISIBLE_DEVICES=3", [3]),
        ("NVIDIA_VISIBLE_DEVICES=2 CUDA_VISIBLE_DEVICES=", []),
    ],
)
def test_what_a_unit_lets_its_server_see(scene: Scene, environment: str, indices: list[int] | None) -> None:
    """None: all of four GPUs. The others are dirty, so a run that looked at one of those would not pass."""
    scene.reset(gpus=4)
    expected = list(range(4)) if indices is None else indices
    for index in set(range(4)) - set(expected):
        scene.gpu.ask("leak", gpu=index, mib=900)
    server = _server(scene, environment)
    assert scene.start(server)
    run = scene.verdict(server)
    assert (run.outcome, run.exit) == ("clean" if expected else "none", 0)
    assert [gpu["index"] for gpu in run.verdict["gpus"]] == expected
    if not expected:
        assert environment.rpartition(" ")[2].partition("=")[0] in run.verdict["message"]


@pytest.mark.case("C9")
@pytest.mark.parametrize("environment", ["CUDA_VISIBLE_DEVICES=2,3", "CUDA_VISIBLE_DEVICES=GPU-750b,GPU-431c", ""])
def test_what_a_unit_lets_its_server_see_is_looked_at(scene: Scene, environment: str) -> None:
    """The same selection on the long way, where somebody has to be ended, on the GPU that was named last."""
    scene.reset(gpus=4)
    _, (orphan,) = scene.orphans("--open", "3", "--gpu", "3", "--mib", "900")
    server = _server(scene, environment)
    assert scene.start(server)
    run = scene.verdict(server)
    assert (run.outcome, run.fates) == ("cleaned", {orphan: "terminated"})
    assert [gpu["index"] for gpu in run.verdict["gpus"]] == ([2, 3] if environment else [0, 1, 2, 3])


@pytest.mark.case("C9")
@pytest.mark.parametrize(
    "environment, says",
    [
        ("CUDA_VISIBLE_DEVICES=0,7", "GPU 7 is not there, NVML counts 4"),
        ("CUDA_VISIBLE_DEVICES=0,,1", "one entry is empty"),
        ("CUDA_VISIBLE_DEVICES=0,1,0", "names GPU 0 twice"),
        ("CUDA_VISIBLE_DEVICES=0-3", "'0-3' names no GPU"),
        ("CUDA_VISIBLE_DEVICES=all", "'all' is nothing that CUDA understands"),
        ("CUDA_VISIBLE_DEVICES=00000000:1B:00.0", "is nothing that CUDA understands"),
        ("CUDA_VISIBLE_DEVICES=GPU-dead", "no GPU here has the UUID GPU-dead"),
        ("CUDA_VISIBLE_DEVICES=MIG-dead", "no GPU here has the UUID MIG-dead"),
        ("CUDA_VISIBLE_DEVICES=431cc2a8", "names no GPU"),
        ("CUDA_VISIBLE_DEVICES=GPU-", "'GPU-' names no GPU"),
        ("NVIDIA_VISIBLE_DEVICES=0,7", "GPU 7 is not there, NVML counts 4"),
        ("NVIDIA_VISIBLE_DEVICES=0,all", "'all' stands beside others"),
    ],
)
def test_what_cannot_be_resolved_is_never_fewer_gpus(scene: Scene, environment: str, says: str) -> None:
    scene.reset(gpus=4)
    _, (orphan,) = scene.orphans("--open", "0", "--gpu", "0", "--mib", "900")
    run = _refused(scene, _server(scene, environment))
    assert (run.outcome, run.exit) == ("config", 78)
    assert environment.partition("=")[0] in run.verdict["message"] and says in run.verdict["message"]
    assert run.verdict["gpus"] == []
    assert scene.alive(orphan)


@pytest.mark.case("C9")
@pytest.mark.parametrize(
    "environment, indices",
    [
        ("CUDA_VISIBLE_DEVICES=0,1", None),
        ("CUDA_VISIBLE_DEVICES=0,1 CUDA_DEVICE_ORDER=FASTEST_FIRST", None),
        ("CUDA_VISIBLE_DEVICES=0,1 CUDA_DEVICE_ORDER=PCI_BUS_ID", [0, 1]),
        ("CUDA_VISIBLE_DEVICES=GPU-a057,GPU-5d78", [0, 1]),
        ("CUDA_VISIBLE_DEVICES=-1", []),
        ("NVIDIA_VISIBLE_DEVICES=0,1", [0, 1]),
        ("", [0, 1, 2, 3]),
    ],
)
def test_numbers_on_gpus_that_are_not_alike(scene: Scene, environment: str, indices: list[int] | None) -> None:
    """CUDA would number the fastest 0, which is another one for NVML."""
    scene.reset(gpus=4)
    scene.gpu.ask("set_gpu", gpu=3, name=FASTER)
    server = _server(scene, environment)
    if indices is None:
        run = _refused(scene, server)
        assert (run.outcome, run.exit) == ("config", 78)
        assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in run.verdict["hints"][0]
        return
    assert scene.start(server)
    run = scene.verdict(server)
    assert run.outcome == ("clean" if indices else "none")
    assert [gpu["index"] for gpu in run.verdict["gpus"]] == indices


def test_mixed_models_are_judged_each_by_its_own_size(scene: Scene) -> None:
    scene.reset(gpus=4)
    scene.gpu.ask("set_gpu", gpu=3, name=FASTER, total_mib=143771, baseline_mib=1200)
    scene.gpu.ask("set_gpu", gpu=2, baseline_mib=1200)
    scene.policy('[memory]\nmax_used = "1 %"\n')
    run = scene.clean("--deadline", "1s")
    assert (run.outcome, run.exit) == ("unattributed", 75)
    gpus = run.verdict["gpus"]
    assert [gpu["clean"] for gpu in gpus] == [True, True, False, True]
    assert [gpu["name"] for gpu in gpus][2:] == ["NVIDIA H100 80GB HBM3", FASTER]
    assert [gpu["limit_bytes"] for gpu in gpus][2:] == [81559 * MIB // 100, 143771 * MIB // 100]


# A GPU that is lost (C5) ---------------------------------------------------------------------------------------------


@pytest.mark.case("C5")
@pytest.mark.parametrize("lost", ["calls", "handle"])
@pytest.mark.parametrize("select", ["CUDA_VISIBLE_DEVICES=2,3", "", "NVIDIA_VISIBLE_DEVICES=all"])
def test_a_selected_gpu_is_lost(scene: Scene, lost: str, select: str) -> None:
    scene.gpu.ask("set_gpu", gpu=3, lost=lost)
    _, (orphan,) = scene.orphans("--open", "2", "--gpu", "2", "--mib", "900")
    run = _refused(scene, _server(scene, select))
    assert (run.outcome, run.exit) == ("unknown", 69)
    assert "GPU 3" in run.verdict["message"]
    assert re.search("Xid|reset|reboot", run.verdict["hints"][0])
    assert run.verdict["duration_s"] < 3
    gpus = {gpu["index"]: gpu for gpu in run.verdict["gpus"]}
    assert gpus[3]["clean"] is False and gpus[3]["used_bytes"] is None
    # What is said of the others is true all the same.
    assert [index for index in gpus if not gpus[index]["clean"]] == [2, 3]
    assert scene.alive(orphan)


@pytest.mark.case("C5")
@pytest.mark.parametrize("lost", ["calls", "handle"])
@pytest.mark.parametrize("dirty", [False, True])
def test_a_gpu_beside_ours_is_lost(scene: Scene, lost: str, dirty: bool) -> None:
    """It is told of, and the rest is judged."""
    # A claim that has lapsed would be reason enough to look at everything.
    scene.node.run(["rm", "-rf", "/run/gpuprestart"])
    scene.gpu.ask("set_gpu", gpu=3, lost=lost)
    orphans = scene.orphans("--open", "2", "--gpu", "2", "--mib", "900")[1] if dirty else []
    server = _server(scene, "CUDA_VISIBLE_DEVICES=0,1,2")
    assert scene.start(server)
    run = scene.verdict(server)
    assert (run.outcome, run.exit) == ("cleaned" if dirty else "clean", 0)
    assert [gpu["index"] for gpu in run.verdict["gpus"]] == [0, 1, 2]
    assert list(run.fates) == orphans
    (warning,) = scene.records(run, "warning")
    assert "GPU 3" in warning["MESSAGE"] and warning["PRIORITY"] == "4"
    if not dirty:
        assert len(scene.records(run)) <= 2


@pytest.mark.case("C5")
def test_a_gpu_is_lost_between_two_looks(scene: Scene) -> None:
    scene.gpu.ask("error", function="nvmlDeviceGetMemoryInfo*", gpu=3, code="GPU_IS_LOST")
    run = _refused(scene, _server(scene, "CUDA_VISIBLE_DEVICES=2,3"))
    assert (run.outcome, run.exit) == ("unknown", 69)
    assert "GPU 3" in run.verdict["message"] and "lost" in run.verdict["message"]
    server = _server(scene, "CUDA_VISIBLE_DEVICES=2,4")
    assert scene.start(server)


# Instances of MIG (C10) ----------------------------------------------------------------------------------------------

#: Instances of GPU 0 by their GPU instance: which number its capability bears, and which console is its node.
CAPS = {1: (21, 58), 2: (30, 59), 3: (39, 60)}


@pytest.fixture
def mig(scene: Scene) -> Iterator[list[str]]:
    """GPU 0 in three instances of 10, 30 and 30 GiB, with their capabilities; the UUIDs of the instances."""
    uuids: list[str] = scene.gpu.ask("mig", gpu=0, slices=[1, 3, 3])["uuids"]
    lines = [f"gpu0/gi{instance}/access {number}" for instance, (number, _) in CAPS.items()]
    lines = ["config 1", "monitor 2", "gpu1/gi1/access 156", *lines, "gpu0/gi11/access 111", "gpu0/gi1/ci0/access 22"]
    scene.node.run(["mount", "-t", "tmpfs", "tmpfs", "/proc/driver"])
    try:
        scene.node.write("/proc/driver/nvidia-caps/mig-minors", "\n".join(lines) + "\n")
        nodes = "".join(f"mknod -m 666 nvidia-cap{number} c 4 {minor};" for number, minor in CAPS.values())
        scene.node.run(["sh", "-ec", f"mkdir -p /dev/nvidia-caps; cd /dev/nvidia-caps; {nodes}"])
        yield uuids
    finally:
        scene.node.run(["rm", "-rf", "/dev/nvidia-caps"])
        scene.node.run(["umount", "/proc/driver"])


def _on(instance: int, mib: int, *more: str) -> Sequence[str]:
    """A holder's options for memory on an instance, with what CUDA opens for it."""
    number = CAPS[instance + 1][0]
    place = ("--gpu", "0", "--alloc", f"instance={instance}", "--mib", str(mib))
    return ("--open", "0", "--path", f"/dev/nvidia-caps/nvidia-cap{number}", *place, *more)


@pytest.mark.case("C10")
@pytest.mark.parametrize("short", [False, True])
def test_an_instance_is_free_among_other_tenants(scene: Scene, mig: list[str], short: bool) -> None:
    tenants = [scene.service(*_on(instance, 29000), user="alice")[1] for instance in (1, 2)]
    assert scene.gpu.ask("state")["gpus"][0]["used_bytes"] > 56 << 30
    server = _server(scene, f"CUDA_VISIBLE_DEVICES={mig[0][:12] if short else mig[0]}")
    assert scene.start(server)
    run = scene.verdict(server)
    assert (run.outcome, run.exit) == ("clean", 0)
    (gpu,) = run.verdict["gpus"]
    assert (gpu["uuid"], gpu["parent"], gpu["index"]) == (mig[0], scene.gpu.ask("state")["gpus"][0]["uuid"], 0)
    assert gpu["total_bytes"] == 81559 * MIB // 8
    assert run.verdict["holders"] == []
    # The long way sees the same.
    typed = scene.clean("--gpus", mig[0], "--unit", server)
    assert (typed.outcome, typed.exit) == ("clean", 0)
    assert scene.alive(tenants)


@pytest.mark.case("C10")
@pytest.mark.parametrize("holder, outcome", [("stale", "cleaned"), ("live", "protected"), ("nobody", "unattributed")])
def test_an_instance_is_dirty_though_its_gpu_looks_idle(
    scene: Scene, mig: list[str], holder: str, outcome: str
) -> None:
    _, tenant = scene.service(*_on(1, 29000), user="alice")
    pids = []
    if holder == "stale":
        pids = scene.orphans(*_on(0, 900))[1]
    elif holder == "live":
        pids = [scene.service(*_on(0, 900))[1]]
    else:
        scene.gpu.ask("leak", gpu=0, instance=0, mib=900)
    scene.gpu.ask("set_gpu", gpu=0, used=3 * MIB)
    server = _server(scene, f"CUDA_VISIBLE_DEVICES={mig[0]}", options=f"--deadline {1 if holder == 'nobody' else 5}s")
    started = scene.start(server)
    run = scene.verdict(server)
    assert (run.outcome, started) == (outcome, outcome == "cleaned")
    if pids:
        assert run.holder(pids[0])["gpus"][0] == mig[0]
        assert run.holder(pids[0])["bytes"] == 900 * MIB
    assert [pid for pid, _ in scene.signals(run)] == (pids if holder == "stale" else [])
    assert scene.alive(tenant)


@pytest.mark.case("C10")
@pytest.mark.parametrize("capability", [None, 1, 0])
def test_a_suspect_on_an_instance_has_its_capability_too(scene: Scene, mig: list[str], capability: int | None) -> None:
    """Every tenant has the GPU's own node open; which instance it may use, the capability tells."""
    number = None if capability is None else CAPS[capability + 1][0]
    path = () if number is None else ("--path", f"/dev/nvidia-caps/nvidia-cap{number}")
    place = ("--gpu", "0", "--alloc", "instance=0", "--mib", "900", "--unlisted")
    _, (orphan,) = scene.orphans("--open", "0", *path, *place)
    run = scene.clean("--gpus", mig[0], "--deadline", "3s" if capability == 0 else "1s")
    if capability == 0:
        assert (run.outcome, run.fates) == ("cleaned", {orphan: "terminated"})
        assert run.holder(orphan)["gpus"] == [mig[0]]
    else:
        assert (run.outcome, run.fates) == ("unattributed", {})
        assert scene.alive(orphan)


@pytest.mark.case("C10")
@pytest.mark.parametrize("what", ["node", "minors"])
def test_a_capability_that_is_not_there(scene: Scene, mig: list[str], what: str) -> None:
    """Then it cannot be told who has the instance."""
    gone = "/dev/nvidia-caps/nvidia-cap21" if what == "node" else "/proc/driver/nvidia-caps/mig-minors"
    scene.node.run(["rm", gone])
    scene.gpu.ask("leak", gpu=0, instance=0, mib=900)
    run = _refused(scene, _server(scene, f"CUDA_VISIBLE_DEVICES={mig[0]}"))
    assert (run.outcome, run.exit) == ("unknown", 69)
    assert "nvidia-caps" in run.verdict["message"] and run.verdict["hints"]


@pytest.mark.case("C10")
def test_units_on_instances_of_one_gpu_are_not_in_each_others_way(scene: Scene, mig: list[str]) -> None:
    """They share no memory. The whole GPU is another matter, in both directions."""
    first, second = (_server(scene, f"CUDA_VISIBLE_DEVICES={uuid}") for uuid in mig[:2])
    assert scene.start(first)
    same = scene.clean("--gpus", mig[0])
    assert same.outcome == "protected" and first in same.verdict["message"]
    whole = scene.clean("--gpus", "0")
    assert whole.outcome == "protected" and first in whole.verdict["message"]
    assert scene.start(second), scene.verdict(second).verdict["message"]
    assert scene.verdict(second).outcome == "clean"
    scene.node.systemctl("stop", first, second)
    third = _server(scene, "NVIDIA_VISIBLE_DEVICES=0")
    assert scene.start(third)
    part = scene.clean("--gpus", mig[1])
    assert part.outcome == "protected" and third in part.verdict["message"]


# GPUs that share the machine's memory (C13) --------------------------------------------------------------------------


def _unify(scene: Scene, by: str = "addressing") -> None:
    """GPU 0 has no memory of its own, as newer drivers say and older ones let one guess."""
    fields: Mapping[str, Any] = {"addressing": ATS} if by == "addressing" else {"name": "NVIDIA GB10"}
    scene.gpu.ask("set_gpu", gpu=0, memory=False, **fields)


@pytest.mark.case("C13")
@pytest.mark.parametrize("by", ["addressing", "name"])
@pytest.mark.parametrize(
    "holder, outcome, status", [("nobody", "clean", 0), ("stale", "cleaned", 0), ("live", "protected", 75)]
)
def test_an_integrated_gpu_is_judged_by_its_holders(
    scene: Scene, by: str, holder: str, outcome: str, status: int
) -> None:
    hold = ("--open", "0", "--gpu", "0", "--mib", "20480")
    pids = []
    if holder == "stale":
        pids = scene.orphans(*hold)[1]
    elif holder == "live":
        pids = [scene.service(*hold, user="alice")[1]]
    _unify(scene, by)
    server = _server(scene, "NVIDIA_VISIBLE_DEVICES=0")
    assert scene.start(server) is (status == 0)
    run = scene.verdict(server)
    assert (run.outcome, run.exit) == (outcome, status)
    (gpu,) = run.verdict["gpus"]
    assert (gpu["used_bytes"], gpu["total_bytes"], gpu["memory_call"]) == (None, None, None)
    assert gpu["clean"] is (status == 0)
    assert [pid for pid, _ in scene.signals(run)] == (pids if holder == "stale" else [])
    if holder == "live":
        assert scene.alive(pids)


@pytest.mark.case("C13")
@pytest.mark.parametrize(
    "policy, says",
    [
        ('[memory]\nunified = "refuse"\n', "memory.unified"),
        ('[memory]\nmin_free = "1 GiB"\n', "memory.min_free"),
        ("", "another namespace"),
    ],
)
@pytest.mark.parametrize("way", ["unit", "shell"])
def test_an_integrated_gpu_that_cannot_be_proved_clean(scene: Scene, policy: str, says: str, way: str) -> None:
    """The last: nobody told whose PIDs the driver lists, and in a container they are not ours."""
    _unify(scene)
    if policy:
        scene.policy(policy)
    else:
        scene.policy(base="")
    run = _refused(scene, _server(scene, "NVIDIA_VISIBLE_DEVICES=0")) if way == "unit" else scene.clean("--gpus", "0")
    assert (run.outcome, run.exit) == ("unknown", 69)
    assert says in run.verdict["message"]


@pytest.mark.case("C13")
@pytest.mark.parametrize("addressing", [0, 1])
def test_a_discrete_gpu_that_does_not_tell_its_memory(scene: Scene, addressing: int) -> None:
    """HMM, which is 1, is a discrete GPU's way to share page tables: its memory is its own."""
    scene.gpu.ask("set_gpu", gpu=0, memory=False, addressing=addressing)
    run = _refused(scene, _server(scene, "CUDA_VISIBLE_DEVICES=0"))
    assert (run.outcome, run.exit) == ("unknown", 69)
    assert "GPU 0" in run.verdict["message"]


#: Prints what is used of GPU 0.
USED = """
import pynvml
pynvml.nvmlInit()
print(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0), version=pynvml.nvmlMemory_v2).used)
"""

# Other libraries, insane figures (C16) -------------------------------------------------------------------------------


@pytest.mark.case("C16")
@pytest.mark.parametrize(
    "environment",
    [
        "LD_LIBRARY_PATH=/opt/simgpu/decoy",
        "LD_PRELOAD=/opt/simgpu/decoy/libnvidia-ml.so.1",
        "NVML_MPS_DEVICE_ENUMERATION=1",
    ],
)
def test_a_library_that_would_answer_instead(scene: Scene, environment: str) -> None:
    """It would say that all is idle. It is not, and the path of who said so stands in the verdict."""
    scene.node.run(["cp", "/run/simgpu/state", "/run/simgpu/decoy"])
    try:
        scene.gpu.ask("leak", gpu=0, mib=900)
        # The same without the hook shows that the environment works.
        name, _, value = environment.partition("=")
        fooled = scene.node.run(["/usr/bin/python3", "-c", USED], env={name: value})
        assert int(fooled.stdout) < 64 * MIB
        server = _server(scene, f"CUDA_VISIBLE_DEVICES=0 {environment}", options="--deadline 500ms")
        run = _refused(scene, server)
    finally:
        scene.node.run(["rm", "/run/simgpu/decoy"])
    assert (run.outcome, run.exit) == ("unattributed", 75)
    assert re.fullmatch(r"/usr/lib/[^/]+/libnvidia-ml\.so\.1", run.verdict["nvml_path"])


@pytest.mark.case("C16")
@pytest.mark.parametrize("fields", [{"free": 2**64 - 1}, {"used": 2**64 - 1}, {"free": 0}, {"used": 0, "free": 0}])
def test_figures_that_cannot_be(scene: Scene, fields: Mapping[str, int]) -> None:
    scene.gpu.ask("set_gpu", gpu=1, **fields)
    run = _refused(scene, _server(scene, "CUDA_VISIBLE_DEVICES=0,1"))
    assert (run.outcome, run.exit) == ("unknown", 69)
    assert "GPU 1" in run.verdict["message"] and "impossible" in run.verdict["message"]


# Sixteen GPUs --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def big_node(node: Node) -> Iterator[Node]:
    """Boots where the node that all share boots."""
    with Node(gpus=16) as booted:
        yield booted


@pytest.fixture
def big(big_node: Node) -> Iterator[Scene]:
    scene = Scene(big_node)
    scene.reset(gpus=16)
    try:
        yield scene
    finally:
        scene.strike()


@pytest.mark.parametrize("last", [False, True])
def test_sixteen_gpus(big: Scene, last: bool) -> None:
    orphans = big.orphans("--open", "all", "--gpu", "15", "--mib", "900")[1] if last else []
    server = _server(big, "")
    assert big.start(server)
    run = big.verdict(server)
    assert run.outcome == ("cleaned" if last else "clean")
    assert [gpu["index"] for gpu in run.verdict["gpus"]] == list(range(16))
    assert list(run.fates) == orphans
    assert "GPUs 0-15 proved clean" in run.verdict["message"]


def test_the_last_of_sixteen_gpus_is_not_the_second(big: Scene) -> None:
    """Neither a number nor a node is matched by its beginning."""
    _, (other,) = big.orphans("--open", "1", "--gpu", "1", "--mib", "900")
    _, (orphan,) = big.orphans("--open", "15", "--gpu", "15", "--mib", "900", "--unlisted")
    run = big.clean("--gpus", "15")
    assert (run.outcome, run.fates) == ("cleaned", {orphan: "terminated"})
    assert big.alive(other)


# Their parts ---------------------------------------------------------------------------------------------------------


def _server(scene: Scene, environment: str, options: str = "--deadline 5s") -> str:
    """A server in exactly this environment, as far as GPUs go."""
    return scene.server(
        command=f"/usr/bin/gpuprestart clean --json {options}", more=f"Environment=\nEnvironment={environment}\n"
    )


def _refused(scene: Scene, server: str) -> Run:
    """The verdict on a start that has to be refused, with systemd's word that it was, and with which status."""
    assert not scene.start(server)
    run = scene.verdict(server)
    shown = scene.node.show(server, "ActiveState", "Result", "ExecStartPre", "ExecMainStartTimestampMonotonic")
    assert (shown["ActiveState"], shown["Result"]) == ("failed", "exit-code")
    assert f"status={run.exit}" in shown["ExecStartPre"]
    assert shown["ExecMainStartTimestampMonotonic"] == "0"
    return run
