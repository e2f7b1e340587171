"""[reset]: one reset before a start is given up, by a stand-in for nvidia-smi that refuses a GPU which is in use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.node.scene import TERM, Run, Scene, mappable

pytestmark = pytest.mark.node

SMI, LOG, NOTES = "/opt/smi/nvidia-smi", "/run/smi.log", "/run/gpuprestart/resets"

#: As nvidia-smi it resets nothing that somebody has open, itself apart, and leaves persistence mode off.
RESETS = f"""#!/usr/bin/python3
import glob, os, sys
sys.path.insert(0, "/opt/simgpu")
from simgpu_client import Client
open("{LOG}", "a").write(" ".join(sys.argv[1:]) + "\\n")
books = Client()
state = books.ask("state")
gpu, = (each for each in state["gpus"] if each["uuid"] == sys.argv[3])
wanted = os.stat("/dev/nvidia%d" % gpu["minor"]).st_rdev
for path in glob.glob("/proc/[0-9]*/fd/*"):
    try:
        used = os.stat(path).st_rdev == wanted
    except OSError:
        continue
    if used:
        sys.exit("GPU is in use by " + path)
for one in state["allocations"]:
    if one["gpu"] == gpu["slot"]:
        books.ask("free", id=one["id"])
books.ask("set_gpu", gpu=gpu["slot"], persistence=False)
"""


@pytest.fixture
def smi(scene: Scene) -> Iterator[Scene]:
    scene.node.write(SMI, RESETS, mode=0o755)
    # The driver's own clients have the nodes open, and so has our child.
    scene.gpu.ask("set", nodes=True)
    try:
        yield scene
    finally:
        scene.gpu.ask("set", nodes=False)
        scene.node.run(["rm", "-rf", LOG, NOTES, "/opt/smi"])


def policy(scene: Scene, more: str = "", *, timeout: str = "2 s") -> None:
    reset = f'[reset]\nmode = "last-resort"\ncommand = "{SMI}"\ntimeout = "{timeout}"\n{more}'
    scene.policy(f"[deadline]\n{TERM}{reset}")


def commands(scene: Scene) -> list[str]:
    return scene.node.read(LOG).splitlines() if scene.node.exists(LOG) else []


def uuid(scene: Scene, gpu: int = 0) -> str:
    return str(scene.gpu.ask("state")["gpus"][gpu]["uuid"])


def clean(scene: Scene, *options: str, deadline: str = "9s") -> Run:
    return scene.clean("--gpus", "0", "--deadline", deadline, *options)


def test_a_reset_frees_what_nobody_holds(smi: Scene) -> None:
    policy(smi)
    smi.gpu.ask("leak", gpu=0, mib=40000)
    smi.gpu.ask("ghost", gpu=3, mib=900)
    server = smi.server(gpus="0,1,2,3", command="/usr/bin/gpuprestart clean --json --deadline 9s")
    assert smi.start(server)
    run = smi.verdict(server)
    assert (run.outcome, run.exit) == ("cleaned", 0)
    assert "GPU 0, GPU 3 were reset" in run.verdict["message"]
    assert commands(smi) == [f"--gpu-reset -i {uuid(smi, gpu)}" for gpu in (0, 3)]
    records = smi.records(run, "gpu-reset")
    assert [each["GPU_UUID"] for each in records] == [uuid(smi, 0), uuid(smi, 3)]
    assert [each["GPU_INDEX"] for each in records] == ["0", "3"]
    # It was begun when hardly more time was left than it needs.
    assert run.verdict["duration_s"] >= 1.0
    assert [gpu["persistence"] for gpu in smi.gpu.ask("state")["gpus"][:4]] == [True] * 4


def test_persistence_mode_that_was_off_stays_off(smi: Scene) -> None:
    policy(smi)
    smi.gpu.ask("set_gpu", gpu=0, persistence=False)
    smi.gpu.ask("leak", gpu=0, mib=40000)
    assert clean(smi).outcome == "cleaned"
    assert smi.gpu.ask("state")["gpus"][0]["persistence"] is False


def test_memory_that_comes_back_by_itself_needs_no_reset(smi: Scene) -> None:
    policy(smi)
    smi.gpu.ask("set", release_delay=1.0)
    smi.orphans("--open", "0", "--gpu", "0", "--mib", "20480")
    assert clean(smi, deadline="30s").outcome == "cleaned"
    assert commands(smi) == [] and not smi.node.exists(NOTES)


@pytest.mark.parametrize("verb", ["off", "check"])
def test_nothing_is_reset_unless_the_policy_asks_and_clean_runs(smi: Scene, verb: str) -> None:
    if verb == "check":
        policy(smi)
    smi.gpu.ask("leak", gpu=0, mib=40000)
    run = smi.check("--gpus", "0") if verb == "check" else clean(smi, deadline="1s")
    assert run.outcome == "unattributed"
    assert commands(smi) == [] and not smi.node.exists(NOTES)


def test_once_in_a_boot(smi: Scene) -> None:
    policy(smi)
    smi.gpu.ask("leak", gpu=0, mib=40000)
    assert clean(smi).outcome == "cleaned"
    smi.gpu.ask("leak", gpu=0, mib=40000)
    run = clean(smi)
    assert (run.outcome, run.exit) == ("unattributed", 75)
    assert any("GPU 0 was not reset: a reset was tried already" in hint for hint in run.verdict["hints"])
    assert len(commands(smi)) == 1
    # What cannot be read is no leave to try again.
    smi.node.run(["sh", "-c", f": > {NOTES}/{uuid(smi)}"])
    assert clean(smi).outcome == "unattributed" and len(commands(smi)) == 1


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("#!/bin/sh\necho 'no such luck' >&2\nexit 7\n", "exited with status 7 (no such luck)"),
        ("#!/bin/sh\nexec sleep 4711\n", "was not done after"),
        (None, "is not there"),
    ],
)
def test_a_reset_that_fails_is_told_and_the_run_ends_as_it_would_have(
    smi: Scene, script: str | None, said: str
) -> None:
    policy(smi, timeout="1 s")
    smi.node.run(["rm", SMI])
    if script:
        smi.node.write(SMI, script, mode=0o755)
    smi.gpu.ask("leak", gpu=0, mib=40000)
    run = clean(smi)
    assert (run.outcome, run.exit) == ("unattributed", 75)
    assert any("a reset of GPU 0 was tried and failed" in hint and said in hint for hint in run.verdict["hints"])
    assert any(said in each["MESSAGE"] for each in smi.records(run, "warning"))
    assert smi.records(run, "gpu-reset") == []
    assert smi.node.run(["pgrep", "-x", "-f", "sleep 4711"], check=False).stdout == ""


def test_a_command_that_others_can_write_is_not_run(smi: Scene) -> None:
    policy(smi)
    smi.node.run(["chmod", "o+w", SMI])
    smi.gpu.ask("leak", gpu=0, mib=40000)
    run = clean(smi)
    assert run.outcome == "unattributed"
    assert any("can be written by others" in hint for hint in run.verdict["hints"])
    assert commands(smi) == []


def test_a_reset_that_frees_nothing(smi: Scene) -> None:
    policy(smi)
    smi.node.write(SMI, "#!/bin/sh\nexit 0\n", mode=0o755)
    smi.gpu.ask("leak", gpu=0, mib=40000)
    run = clean(smi)
    assert (run.outcome, run.exit) == ("unattributed", 75)
    assert any("GPU 0 was reset in this run" in hint for hint in run.verdict["hints"])


@pytest.mark.parametrize("how", ["--open", "--map-only"])
def test_whoever_has_the_node_keeps_it_from_being_reset(smi: Scene, how: str) -> None:
    """A monitor, which is in nobody's way otherwise."""
    policy(smi)
    with mappable(smi.node, how == "--map-only"):
        _, monitor = smi.service("--open", "0", *([] if how == "--open" else [how]), user="alice")
        smi.gpu.ask("leak", gpu=0, mib=40000)
        run = clean(smi)
    assert run.outcome == "unattributed"
    assert any(
        "GPU 0 was not reset: it is in use by" in hint and f"[{monitor}]" in hint for hint in run.verdict["hints"]
    )
    assert commands(smi) == [] and not smi.node.exists(NOTES)
    assert smi.alive(monitor)


def test_nobody_is_reset_for_where_somebody_alive_is_in_the_way(smi: Scene) -> None:
    policy(smi)
    smi.service("--open", "1", "--gpu", "1", "--mib", "500", user="alice")
    smi.gpu.ask("leak", gpu=0, mib=40000)
    assert smi.clean("--gpus", "0,1", "--deadline", "9s").outcome == "protected"
    assert commands(smi) == []


@pytest.mark.parametrize("allowed", [False, True])
def test_mig(smi: Scene, allowed: bool) -> None:
    policy(smi, "mig = true\n" if allowed else "")
    smi.gpu.ask("mig", gpu=0, slices=[1, 3])
    smi.gpu.ask("leak", gpu=0, mib=4000)
    run = clean(smi)
    assert run.outcome == ("cleaned" if allowed else "unattributed")
    assert len(commands(smi)) == allowed
    assert allowed or any("(reset.mig)" in hint for hint in run.verdict["hints"])


@pytest.mark.parametrize("allowed", [False, True])
def test_nvswitch(smi: Scene, allowed: bool) -> None:
    policy(smi, "nvswitch = true\n" if allowed else "")
    smi.gpu.ask("leak", gpu=0, mib=4000)
    smi.node.run(["touch", "/dev/nvidia-nvswitchctl"])
    try:
        run = clean(smi)
    finally:
        smi.node.run(["rm", "/dev/nvidia-nvswitchctl"])
    assert run.outcome == ("cleaned" if allowed else "unattributed")
    assert len(commands(smi)) == allowed
    assert allowed or any("(reset.nvswitch)" in hint for hint in run.verdict["hints"])


def test_a_reset_that_does_not_fit_into_the_run_is_not_begun(smi: Scene) -> None:
    policy(smi, timeout="60 s")
    smi.gpu.ask("leak", gpu=0, mib=4000)
    run = clean(smi, deadline="3s")
    assert run.outcome == "unattributed" and commands(smi) == []
    assert any("reset.timeout, deadline.total" in hint for hint in run.verdict["hints"])
