"""What the policy asks of the driver and its GPUs, by the real nvidia-ml-py on the stand-in driver, both ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from .scene import TERM, Run, Scene

pytestmark = pytest.mark.node


def started(scene: Scene, require: str, *, gpus: str = "0,1,2,3") -> tuple[bool, Run, list[int]]:
    """A start on four GPUs, on the first of which a stale holder is; whether it went, its verdict, and the holder."""
    _, stale = scene.orphans("--open", "0", "--gpu", "0", "--mib", "1520")
    scene.policy(f"[deadline]\n{TERM}total = '15 s'\n[require]\n{require}\n")
    unit = scene.server(gpus=gpus)
    went = scene.start(unit)
    return went, scene.verdict(unit), stale


def refused(scene: Scene, require: str, message: str, hint: str, *, gpus: str = "0,1,2,3") -> Run:
    """Refused before anybody is signalled, and told in the verdict and in a record."""
    went, run, stale = started(scene, require, gpus=gpus)
    assert not went and (run.exit, run.outcome) == (75, "precondition")
    assert scene.alive(stale) and scene.signals(run) == [] and run.fates == {}
    (told,) = run.verdict["preconditions"]
    assert told["message"] == message and told["file"] is False and hint in told["hint"]
    assert message in run.verdict["message"] and hint in run.verdict["hints"][0]
    (record,) = scene.records(run, "precondition-failed")
    assert (record["MESSAGE"], record["GPUPRESTART_CHECK"]) == (message, told["check"])
    assert record["GPUPRESTART_SUBJECT"] == told["subject"] and record["GPUPRESTART_HINT"] == told["hint"]
    return run


def passed(scene: Scene, require: str) -> Run:
    went, run, stale = started(scene, require)
    assert went and (run.exit, run.outcome, run.verdict["preconditions"]) == (0, "cleaned", [])
    assert run.fates == dict.fromkeys(stale, "terminated")
    return run


def set_all(scene: Scene, gpus: Sequence[int], fields: Mapping[str, Any]) -> None:
    for number in gpus:
        scene.gpu.ask("set_gpu", gpu=number, **fields)


# Met -----------------------------------------------------------------------------------------------------------------

EVERYTHING = """
gpu_count = 4
driver = ">=550, <551"
compute_mode = "exclusive-process"
persistence = "require"
ecc = "no-pending"
mig = "off"
"""


def test_a_machine_on_which_everything_is_as_asked(scene: Scene) -> None:
    """What is not selected may be as it likes."""
    set_all(scene, range(4), {"compute_mode": 3})
    set_all(scene, range(4, 8), {"persistence": False, "remap_pending": True, "uncorrected": 1, "mig_next": "on"})
    passed(scene, EVERYTHING)


def test_nothing_is_asked_of_the_driver_that_the_policy_does_not_ask(scene: Scene) -> None:
    scene.gpu.ask("calls", start=True)
    passed(scene, "persistence = 'require'")
    called = scene.gpu.ask("calls", list=True)["calls"]
    scene.gpu.ask("calls", stop=True)
    asked = {(function, target) for _, _, function, target in called}
    wanted = {target for function, target in asked if function == "nvmlDeviceGetPersistenceMode"}
    assert wanted == {"0", "1", "2", "3"}
    others = ("ComputeMode", "RemappedRows", "RetiredPagesPendingStatus", "TotalEccErrors")
    assert not {f"nvmlDeviceGet{name}" for name in others} & {function for function, _ in asked}


# Not met -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("require", "gpus", "fields", "message", "hint"),
    [
        (
            "compute_mode = 'exclusive-process'",
            (0, 1, 2, 3),
            {},
            "GPUs 0-3: compute mode is default, but require.compute_mode asks for exclusive-process",
            "nvidia-smi -i 0,1,2,3 -c EXCLUSIVE_PROCESS",
        ),
        (
            "compute_mode = 'default'",
            (2,),
            {"compute_mode": 2},
            "GPU 2: compute mode is prohibited, but require.compute_mode asks for default",
            "nvidia-smi -i 2 -c DEFAULT",
        ),
        (
            "persistence = 'require'",
            (1, 3),
            {"persistence": False},
            "GPUs 1,3: persistence mode is off, but require.persistence asks for on",
            "nvidia-smi -i 1,3 -pm 1",
        ),
        (
            "ecc = 'no-pending'",
            (1, 2),
            {"remap_pending": True},
            "GPUs 1-2: a row remapping is pending, but require.ecc asks for no-pending",
            "nvidia-smi --gpu-reset -i 1,2",
        ),
        (
            "ecc = 'no-pending'",
            (3,),
            {"remap_failed": True},
            "GPU 3: a row remapping has failed, but require.ecc asks for no-pending",
            "is to be replaced",
        ),
        (
            "ecc = 'no-pending'",
            (3,),
            {"arch": 5, "retired_pending": True},
            "GPU 3: retired pages are pending, but require.ecc asks for no-pending",
            "nvidia-smi --gpu-reset -i 3",
        ),
        (
            "ecc = 'no-pending'",
            (0,),
            {"uncorrected": 2},
            "GPU 0: 2 uncorrected errors since the last reset, but require.ecc asks for no-pending",
            "nvidia-smi --gpu-reset -i 0",
        ),
        (
            "mig = 'off'",
            (1,),
            {"mig_next": "on"},
            "GPU 1: MIG is off, and on after the next reset, but require.mig asks for off",
            "nvidia-smi -i 1 -mig 0",
        ),
        (
            "mig = 'off'",
            (1,),
            {"mig": "on"},
            "GPU 1: MIG is on, but require.mig asks for off",
            "nvidia-smi -i 1 -mig 0",
        ),
    ],
)
def test_a_gpu_that_is_not_as_asked(
    scene: Scene, require: str, gpus: Sequence[int], fields: Mapping[str, Any], message: str, hint: str
) -> None:
    set_all(scene, gpus, fields)
    refused(scene, require, message, hint)


@pytest.mark.parametrize(
    ("require", "message", "hint"),
    [
        (
            "gpu_count = 8",
            "require.gpu_count asks for 8 GPUs, but 4 are selected of the 8 that NVML has",
            "gpus.select",
        ),
        (
            "driver = '>=570'",
            "the driver is 550.54.15, but require.driver asks for >=570",
            "install a driver >=570",
        ),
    ],
)
def test_a_machine_that_is_not_as_asked(scene: Scene, require: str, message: str, hint: str) -> None:
    refused(scene, require, message, hint)


def test_everything_that_is_not_as_asked_is_told_at_once(scene: Scene) -> None:
    set_all(scene, [0], {"persistence": False, "uncorrected": 1, "mig_next": "on"})
    went, run, _ = started(scene, EVERYTHING.replace("550, ", "560, "), gpus="0,1,2")
    checks = ["gpu_count", "driver", "compute_mode", "persistence", "ecc", "mig"]
    assert not went and [each["check"] for each in run.verdict["preconditions"]] == checks
    assert [each["GPUPRESTART_CHECK"] for each in scene.records(run, "precondition-failed")] == checks


@pytest.mark.parametrize("count", [0, 8])
def test_a_start_without_a_gpu_passes_only_where_none_is_asked_for(scene: Scene, count: int) -> None:
    """Else an environment file that comes to nothing would let it pass unproved."""
    scene.policy(f"[require]\ngpu_count = {count}\ndriver = '>=570'\nmig = 'off'\n")
    unit = scene.server(gpus="")
    assert scene.start(unit) is not bool(count)
    run = scene.verdict(unit)
    if not count:
        assert (run.exit, run.outcome) == (0, "none")
        return
    assert (run.exit, run.outcome) == (75, "precondition")
    assert run.verdict["message"] == "require.gpu_count asks for 8 GPUs, but this start uses none"
    assert [each["GPUPRESTART_CHECK"] for each in scene.records(run, "precondition-failed")] == ["gpu_count"]


# What cannot be told -------------------------------------------------------------------------------------------------

CALLS = [
    ("compute_mode = 'default'", "nvmlDeviceGetComputeMode"),
    ("persistence = 'require'", "nvmlDeviceGetPersistenceMode"),
    ("ecc = 'no-pending'", "nvmlDeviceGetRemappedRows"),
    ("ecc = 'no-pending'", "nvmlDeviceGetRetiredPagesPendingStatus"),
    ("ecc = 'no-pending'", "nvmlDeviceGetTotalEccErrors"),
]


@pytest.mark.parametrize(("require", "call"), CALLS)
@pytest.mark.parametrize(
    ("code", "words"),
    [("UNKNOWN", "the driver does not tell "), ("FUNCTION_NOT_FOUND", "this driver is too old to tell ")],
)
def test_what_the_driver_cannot_tell_is_not_met(scene: Scene, require: str, call: str, code: str, words: str) -> None:
    scene.gpu.ask("error", function=call, gpu=2, code=code)
    went, run, stale = started(scene, require)
    assert not went and (run.exit, run.outcome) == (75, "precondition") and scene.alive(stale)
    (told,) = run.verdict["preconditions"]
    assert told["message"].startswith("GPU 2: ") and words in told["message"]


@pytest.mark.parametrize("require", ["ecc = 'no-pending'", "mig = 'off'"])
def test_a_gpu_that_has_no_such_thing_has_nothing_pending(scene: Scene, require: str) -> None:
    """As consumer GPUs, which have neither ECC nor MIG."""
    set_all(scene, range(4), {"ecc": False, "mig": "none", "remap_pending": True, "uncorrected": 5})
    passed(scene, require)


@pytest.mark.parametrize("lost", ["calls", "handle"])
def test_a_lost_gpu_is_named(scene: Scene, lost: str) -> None:
    """It cannot be measured either, so that is what decides."""
    set_all(scene, [3], {"lost": lost})
    went, run, stale = started(scene, "mig = 'off'\ncompute_mode = 'default'")
    assert not went and scene.alive(stale) and (run.exit, run.outcome) == (69, "unknown")
    assert run.verdict["message"].startswith("GPU 3: ")


def test_a_driver_that_hangs_when_asked_is_not_waited_for(scene: Scene) -> None:
    scene.gpu.ask("hang", function="nvmlDeviceGetComputeMode", gpu=1)
    scene.policy("[deadline]\nnvml = '2 s'\n[require]\ncompute_mode = 'default'\n")
    unit = scene.server(gpus="0,1")
    assert not scene.start(unit)
    run = scene.verdict(unit)
    assert (run.exit, run.outcome) == (69, "unknown") and "did not answer a query within 2 s" in run.verdict["message"]


# MIG -----------------------------------------------------------------------------------------------------------------


def test_instances_are_asked_by_their_gpu(scene: Scene) -> None:
    uuids = scene.gpu.ask("mig", gpu=1, slices=[1, 1, 2])["uuids"]
    set_all(scene, [1], {"persistence": False})
    scene.policy("[require]\ngpu_count = 2\ncompute_mode = 'default'\npersistence = 'require'\nmig = 'off'\n")
    unit = scene.server(gpus=",".join(uuids[:2]))
    assert not scene.start(unit)
    run = scene.verdict(unit)
    assert [each["message"] for each in run.verdict["preconditions"]] == [
        "GPU 1: persistence mode is off, but require.persistence asks for on",
        "GPU 1: MIG is on, but require.mig asks for off",
    ]


def test_instances_that_are_as_asked(scene: Scene) -> None:
    uuids = scene.gpu.ask("mig", gpu=1, slices=[1, 1, 2])["uuids"]
    scene.policy("[require]\ngpu_count = 2\ncompute_mode = 'default'\npersistence = 'require'\n")
    unit = scene.server(gpus=",".join(uuids[:2]))
    scene.start(unit)
    run = scene.verdict(unit)
    # The run goes on, to the instances' capabilities, which only test_gpus.py makes.
    assert run.verdict["preconditions"] == [] and "/dev/nvidia-caps/" in run.verdict["message"]


def test_with_mig_on_nobody_knows_of_remapped_rows(scene: Scene) -> None:
    uuids = scene.gpu.ask("mig", gpu=1, slices=[1, 1, 2])["uuids"]
    scene.policy("[require]\necc = 'no-pending'\n")
    unit = scene.server(gpus=uuids[0])
    assert not scene.start(unit)
    assert "cannot be told while MIG is on" in scene.verdict(unit).verdict["message"]


# What is only told ---------------------------------------------------------------------------------------------------


def test_persistence_that_is_only_told_does_not_decide(scene: Scene) -> None:
    set_all(scene, [1, 2], {"persistence": False})
    run = passed(scene, "persistence = 'warn'")
    (record,) = scene.records(run, "warning")
    assert str(record["MESSAGE"]).startswith("GPUs 1-2: persistence mode is off")
    assert "nvidia-smi -i 1,2 -pm 1" in str(record["MESSAGE"]) and sorted(record["GPU_INDEX"]) == ["1", "2"]
    assert scene.records(run, "precondition-failed") == []


def test_persistence_that_is_on_is_not_told(scene: Scene) -> None:
    assert scene.records(passed(scene, "persistence = 'warn'"), "warning") == []


def test_check_tells_the_same_and_judges_the_rest_as_well(scene: Scene) -> None:
    set_all(scene, [0], {"persistence": False})
    _, stale = scene.orphans("--open", "0", "--gpu", "0", "--mib", "1520")
    scene.policy("[require]\nmig = 'off'\ncompute_mode = 'exclusive-process'\npersistence = 'warn'\n")
    run = scene.check("--gpus", "0")
    assert (run.exit, run.verdict["outcomes"]) == (75, ["not-freed", "precondition"])
    assert [each["check"] for each in run.verdict["preconditions"]] == ["compute_mode"]
    assert run.holder(stale[0])["action"] == "kill" and scene.alive(stale)
    assert any("persistence mode is off" in hint for hint in run.verdict["hints"])


def test_check_tells_of_persistence_where_all_is_clean(scene: Scene) -> None:
    set_all(scene, [0], {"persistence": False})
    scene.policy("[require]\npersistence = 'warn'\n")
    run = scene.check("--gpus", "0")
    assert (run.exit, run.outcome) == (0, "clean")
    assert any("persistence mode is off" in hint for hint in run.verdict["hints"])
