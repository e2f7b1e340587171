"""What is offered to be typed: the right command for each that stands in the way, and nothing that a stranger wrote."""

from __future__ import annotations

import shlex
from typing import Any, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprestart import documents
from gpuprestart.model import MIB
from gpuprestart.remedies import MOST, remedies

UUID = "GPU-3bf2292e-91d4-5690-8712-cd66a9318ffc"


def holder(owner: str, action: str = "refuse") -> dict[str, Any]:
    return {"pid": 1, "owner": owner, "action": action, "comm": "x; reboot"}


def commands(*holders: dict[str, Any], unit: Optional[str] = None, **more: Any) -> list[str]:
    gpus = more.pop("gpus", [])
    outcomes = more.pop("outcomes", ["protected"])
    found = {"exit": 75, "outcome": outcomes[0], "outcomes": outcomes, "unit": unit, "gpus": gpus, **more}
    found["holders"] = list(holders)
    return [command for command, _ in remedies(documents.document(found))]


@pytest.mark.parametrize(
    ("owner", "action", "command"),
    [
        ("unit:ollama.service", "refuse", "systemctl stop ollama.service"),
        ("unit:old@a\\x2db.service", "refuse", r"systemctl stop 'old@a\x2db.service'"),
        ("unit:ollama.service", "wait", "systemctl kill --signal=SIGKILL ollama.service"),
        ("session:7:alice", "refuse", "loginctl terminate-session 7"),
        ("container:docker:0123456789ab", "refuse", "docker stop 0123456789ab"),
        ("container:podman:0123456789ab", "refuse", "podman stop 0123456789ab"),
        ("container:crio:0123456789ab", "refuse", "crictl stop 0123456789ab"),
        ("container:lxc:web-1", "refuse", "lxc-stop -n web-1"),
        ("container:nspawn:web-1", "refuse", "machinectl terminate web-1"),
        ("slurm:42", "refuse", "scancel 42"),
    ],
)
def test_whoever_stands_in_the_way_is_stopped_by_his_own_command(owner: str, action: str, command: str) -> None:
    assert commands(holder(owner, action)) == [command]
    # What is left alone is nobody's to stop.
    assert commands(holder(owner, "spare"), holder(owner, "none")) == []


@pytest.mark.parametrize(
    "owner",
    [
        "unit:a b.service", "unit:$(reboot).service", "unit:x", "unit:-H.service;", "session:7;reboot:alice",
        "container:docker:abc; reboot", "container:lxc:$(reboot)", "container:other:0123456789ab", "slurm:unknown",
        "unit:-H.service", "container:lxc:-k", "none", "unknown", "", "user:alice", "container:pidns:4026532901",
    ],
)  # fmt: skip
def test_what_has_no_name_that_can_be_typed_has_no_command(owner: str) -> None:
    assert commands(holder(owner)) == []


def test_a_command_says_for_whom_it_is_meant() -> None:
    def why(owner: str) -> str:
        found = {"exit": 75, "outcomes": ["protected"], "gpus": [], "holders": [holder(owner)]}
        return remedies(documents.document(found))[0][1]

    assert why("unit:ollama.service") == "ollama.service has it"
    assert why("session:7:alice") == "the login session of alice has it: ask first"
    assert why("session:7:") == "the login session of somebody has it: ask first"
    assert why("container:docker:0123456789ab") == "that docker container has it"


def test_who_only_has_the_node_open_is_not_said_to_have_the_memory() -> None:
    """It may be a monitor of the very person who is told to end that session."""
    for more, has in (({"evidence": ["fd"]}, "has it open, and may hold it"), ({"evidence": ["nvml", "fd"]}, "has it")):
        held = {**holder("session:7:alice"), **more}
        found = {"exit": 75, "outcomes": ["unattributed"], "gpus": [], "holders": [held]}
        assert remedies(documents.document(found))[0][1] == f"the login session of alice {has}: ask first"


def test_who_holds_memory_is_stopped_before_who_only_has_the_node_open() -> None:
    looks = {**holder("session:7:alice"), "evidence": ["fd"]}
    has = {**holder("unit:ollama.service"), "evidence": ["nvml", "fd"], "bytes": 5 * MIB}
    assert commands(looks, has) == ["systemctl stop ollama.service", "loginctl terminate-session 7"]


def test_what_is_stale_is_ended_by_a_start_or_by_hand() -> None:
    stale = holder("unit:old.service", "kill")
    assert commands(stale) == ["gpuprestart clean"]
    assert commands(stale, unit="sglang-qwen.service") == [
        "systemctl start sglang-qwen.service",
        "gpuprestart clean --unit sglang-qwen.service",
    ]


def test_a_start_is_promised_only_where_nothing_else_is_in_its_way() -> None:
    def why(*outcomes: str) -> str:
        found = {"exit": 75, "outcomes": list(outcomes), "unit": "x.service", "holders": [holder("none", "kill")]}
        return dict(remedies(documents.document(found)))["systemctl start x.service"]

    assert why("not-freed") == "its hook ends what is stale, and then it starts"
    assert why("not-freed", "unattributed") == "its hook ends what is stale; the rest may still refuse the start"


def gpu(unexplained: Optional[int], **more: Any) -> dict[str, Any]:
    return {"index": 5, "uuid": UUID, "unattributed_bytes": unexplained, "limit_bytes": 64 * MIB, **more}


def test_memory_that_nobody_holds_is_brought_back_by_a_reset() -> None:
    reset = f"nvidia-smi --gpu-reset -i {UUID}"
    assert commands(gpus=[gpu(70 * MIB)], outcomes=["unattributed"]) == [reset]
    assert commands(gpus=[gpu(70 * MIB)], outcomes=["not-freed"], verb="clean") == [reset]
    # For check that only means that clean could free it.
    assert commands(gpus=[gpu(70 * MIB)], outcomes=["not-freed"], verb="check") == []
    # Whoever may not look into all processes does not know that.
    assert reset not in commands(gpus=[gpu(70 * MIB)], outcomes=["denied", "unattributed"])
    for other in (gpu(64 * MIB), gpu(None), gpu(70 * MIB, parent=UUID), gpu(70 * MIB, uuid="GPU-x; reboot")):
        assert commands(gpus=[other], outcomes=["unattributed"]) == []


@pytest.mark.parametrize(
    ("outcome", "wanted"),
    [
        ("unknown", ["nvidia-smi", "journalctl -k --grep NVRM", "gpuprestart doctor x.service"]),
        ("denied", ["gpuprestart doctor x.service"]),
        ("config", ["gpuprestart doctor x.service"]),
    ],
)
def test_what_cannot_be_measured_or_seen_is_looked_into(outcome: str, wanted: list[str]) -> None:
    found = commands(outcomes=[outcome], unit="x.service")
    assert found[: len(wanted)] == wanted
    assert commands(outcomes=[outcome])[: len(wanted)] == [each.replace(" x.service", "") for each in wanted]


def test_what_was_typed_wrong_is_nothing_for_doctor() -> None:
    assert commands(outcomes=["config"], message="--gpus: GPU 7 is not there, NVML counts 2") == []
    wrong = "/etc/gpuprestart/policy.toml:4: memory.max_usedd: is no known key"
    assert commands(outcomes=["config"], message=wrong) == ["gpuprestart doctor"]


def test_a_bypass_is_offered_last_and_only_where_nobody_alive_is_in_the_way() -> None:
    for outcome in ("unknown", "unkillable", "not-freed", "unattributed"):
        assert commands(outcomes=[outcome], unit="x.service")[-1] == "gpuprestart bypass x.service"
        assert not any("bypass" in each for each in commands(outcomes=[outcome]))
    assert not any("bypass" in each for each in commands(outcomes=["protected", "unattributed"], unit="x.service"))
    for outcome in ("protected", "config", "denied", "precondition", "respawning"):
        assert not any("bypass" in each for each in commands(outcomes=[outcome], unit="x.service"))


def test_nothing_helps_a_start_that_may_go_on() -> None:
    assert commands(holder("unit:ollama.service"), exit=0) == []


def test_each_command_once_and_not_too_many() -> None:
    assert commands(*[holder("unit:ollama.service")] * 9) == ["systemctl stop ollama.service"]
    assert len(commands(*(holder(f"unit:a{number}.service") for number in range(50)))) == MOST


@given(st.text(), st.text(), st.sampled_from(["refuse", "kill", "wait"]))
def test_no_text_becomes_another_command(owner: str, name: str, action: str) -> None:
    kinds = ("unit", "session", "container:docker", "container:lxc", "slurm")
    for kind in kinds:
        for command in commands(holder(f"{kind}:{owner}", action), unit=name, outcomes=["unknown"]):
            words = shlex.split(command)
            assert words[0] in {
                "systemctl", "loginctl", "docker", "lxc-stop", "scancel", "gpuprestart", "nvidia-smi", "journalctl"
            }  # fmt: skip
            assert command == shlex.join(words) and not any(each in command for each in "\n;|&$`<>")
