"""Verdict -> sentence, STATUS=, JSON, tables."""

from __future__ import annotations

import json
from typing import Any, Optional

import pytest

from gpuprestart.model import (
    MIB,
    Action,
    Decision,
    Fate,
    Gpu,
    GpuState,
    Holder,
    Leftover,
    Memory,
    Outcome,
    Owner,
    OwnerKind,
    Process,
    Reading,
    Timeline,
    Unit,
    Unmet,
    Verdict,
)
from gpuprestart.report import as_json, document, held, indices, sentence, short, status_line

HOSTILE = "a\nPRIORITY=0\x1b[31m"


def state(index: int, used: Optional[int], *, fault: str = "") -> GpuState:
    uuid = f"GPU-{index:08x}-aaaa"
    memory = None
    if used is not None:
        memory = Memory(used=used, free=80_000 * MIB, total=81_920 * MIB, reserved=500 * MIB, call="v2")
    clean = used is not None and used <= 64 * MIB
    return GpuState(
        gpu=Gpu(index=index, uuid=uuid, name="NVIDIA H100", pci=f"00000000:{index:02X}:00.0", minor=index),
        reading=Reading(uuid=uuid, memory=memory, fault=None if memory else "GPU is lost"),
        limit=64 * MIB,
        unattributed=0 if clean else used or 0,
        clean=clean,
        fault=fault,
    )


def decision(comm: str = "python3", action: Action = Action.KILL, **fields: Any) -> Decision:
    path = "/system.slice/old.service"
    process = Process(
        pid=4711,
        started=12_345,
        began=123.45,
        ppid=1,
        comm=comm,
        state="S",
        uid=990,
        cgroup=path,
        user="model",
        cmdline="x [redacted]",
    )
    unit = Unit(name="old.service", load_state="loaded", active_state="failed", sub_state="failed", control_group=path)
    owner = Owner(kind=OwnerKind.UNIT, word="unit:old.service", unit=unit)
    holder = Holder(process=process, owner=owner, **fields)
    return Decision(holder=holder, action=action, reason="was left behind by old.service, which is failed")


def verdict(**fields: Any) -> Verdict:
    base = Verdict(
        outcomes=(Outcome.PROTECTED,),
        exit=75,
        unit="sglang-qwen.service",
        message="GPU 3 is held by ollama.service (ollama[812], 5120 MiB)",
        hints=("systemctl stop ollama.service", "or choose other GPUs"),
        time=1_700_000_000.5,
        run="0123abcd",
        boot_id="b007",
        driver="570.86",
        nvml_path="/usr/lib/libnvidia-ml.so.1",
        policy_files=("/etc/gpuprestart/policy.toml",),
        duration=1.23456,
        phases={"measure": 0.12345, "survey": 0.2, "evict": 0.0, "drain": 0.9, "preconditions": 0.0},
        timeline=Timeline(
            phases=(("measure", 0.0, 0.12345),),
            signals=((0.2, 4711, "SIGTERM"),),
            memory=((0.1, (1523 * MIB,)), (1.2, (None,))),
        ),
    )
    return base._replace(**fields)


def test_sentence_is_the_word_the_message_and_the_first_hint() -> None:
    assert sentence(verdict()) == (
        "protected: GPU 3 is held by ollama.service (ollama[812], 5120 MiB); hint: systemctl stop ollama.service"
    )
    assert sentence(verdict(hints=())).endswith("5120 MiB)")
    assert sentence(verdict(message="Held.")).startswith("protected: Held; hint: ")


@pytest.mark.case("D5")
def test_sentence_is_one_printable_line_that_a_long_message_cannot_rob_of_its_hint() -> None:
    line = sentence(verdict(message=HOSTILE * 100))
    assert line.isprintable() and line.endswith("systemctl stop ollama.service") and len(line) < 1000


@pytest.mark.parametrize(
    ("outcome", "start"),
    [
        (Outcome.PROTECTED, "At 14:03:22 gpuprestart refused the start: protected: GPU 3"),
        (Outcome.CONFIG, "At 14:03:22 gpuprestart refused the start: config: "),
        (Outcome.CLEAN, "At 14:03:22 gpuprestart found the GPUs clean: GPU 3"),
        (Outcome.CLEANED, "At 14:03:22 gpuprestart cleaned the GPUs: GPU 3"),
        (Outcome.INTERRUPTED, "At 14:03:22 gpuprestart was interrupted: "),
        (Outcome.INTERNAL, "At 14:03:22 gpuprestart failed: "),
        (Outcome.BYPASSED, "At 14:03:22 gpuprestart let this start pass unproved: "),
        (Outcome.NONE, "At 14:03:22 gpuprestart had no GPU to judge: "),
    ],
)
def test_status_line_says_when_and_in_the_past_tense(outcome: Outcome, start: str) -> None:
    line = status_line(verdict(outcomes=(outcome,)), "14:03:22")
    assert line.startswith(start) and line.endswith("systemctl stop ollama.service")


def test_held_believes_nvml_before_open_nodes() -> None:
    nodes = frozenset({"A", "B"})
    assert held(decision(listed={"A": 1}, opened=nodes).holder) == {"A"}
    assert held(decision(opened=frozenset("A"), mapped=frozenset("B")).holder) == nodes


def test_json_has_exactly_the_fields_of_the_contract() -> None:
    one = state(0, 1523 * MIB)
    who = decision(listed={"GPU-other": 7, one.gpu.uuid: 1520 * MIB}, opened=frozenset({one.gpu.uuid}))
    found = json.loads(as_json(document(verdict(gpus=(one,), decisions=(who,)), booted=1_699_999_000.0, verb="clean")))
    assert found == {
        "version": 1,
        "verb": "clean",
        "outcome": "protected",
        "outcomes": ["protected"],
        "exit": 75,
        "unit": "sglang-qwen.service",
        "message": "GPU 3 is held by ollama.service (ollama[812], 5120 MiB)",
        "hints": ["systemctl stop ollama.service", "or choose other GPUs"],
        "time": 1_700_000_000.5,
        "run": "0123abcd",
        "boot_id": "b007",
        "driver": "570.86",
        "nvml_path": "/usr/lib/libnvidia-ml.so.1",
        "policy_files": ["/etc/gpuprestart/policy.toml"],
        "duration_s": 1.235,
        "phases": {"measure": 0.123, "survey": 0.2, "evict": 0.0, "drain": 0.9, "preconditions": 0.0},
        "gpus": [
            {
                "index": 0,
                "uuid": one.gpu.uuid,
                "name": "NVIDIA H100",
                "pci": "00000000:00:00.0",
                "parent": None,
                "memory_call": "v2",
                "used_bytes": 1523 * MIB,
                "reserved_bytes": 500 * MIB,
                "total_bytes": 81_920 * MIB,
                "limit_bytes": 64 * MIB,
                "unattributed_bytes": 1523 * MIB,
                "clean": False,
                "fault": None,
            }
        ],
        "holders": [
            {
                "pid": 4711,
                "started": 1_699_999_123.45,
                "comm": "python3",
                "user": "model",
                "owner": "unit:old.service",
                "state": "S",
                "gpus": [one.gpu.uuid, "GPU-other"],
                "bytes": 1520 * MIB,
                "evidence": ["nvml", "fd"],
                "occupies": [],
                "action": "kill",
                "reason": "was left behind by old.service, which is failed",
                "rule": None,
                "fate": None,
            }
        ],
        "holders_count": 1,
        "preconditions": [],
        "residue": [],
        "residue_count": 0,
        "timeline": {
            "phases": [["measure", 0.0, 0.123]],
            "signals": [[0.2, 4711, "SIGTERM"]],
            "used_bytes": [[0.1, [1523 * MIB]], [1.2, [None]]],
        },
    }


def test_json_says_null_where_nothing_is_known() -> None:
    who = decision()
    fates = {who.holder.process.identity: Fate.TERMINATED}
    found = document(verdict(gpus=(state(0, None),), decisions=(who,), fates=fates, unit=None), booted=0.0)
    gpu, holder = found["gpus"][0], found["holders"][0]
    unknown = ("memory_call", "used_bytes", "reserved_bytes", "total_bytes", "limit_bytes", "unattributed_bytes")
    assert [gpu[name] for name in unknown] == [None] * 6
    assert (found["unit"], holder["bytes"], holder["fate"], gpu["clean"]) == (None, None, "terminated", False)
    assert (found["verb"], gpu["fault"]) == (None, "GPU is lost")


@pytest.mark.case("D5")
def test_json_carries_nothing_hostile() -> None:
    who = decision(HOSTILE, opened=frozenset({state(0, 0).gpu.uuid}))
    dirty = verdict(gpus=(state(0, 1523 * MIB, fault=HOSTILE),), decisions=(who,), message=HOSTILE, hints=(HOSTILE,))
    text = as_json(document(dirty, booted=0.0))
    assert text.isascii() and text.isprintable()
    assert json.loads(text)["holders"][0]["comm"] == "a\\x0aPRIORITY=0\\x1b[31m"


def test_json_has_what_the_policy_asks_for_and_what_is_left() -> None:
    unmet = Unmet("ports", "30000", "port 30000 is in use by \x1b[31mnginx[9]", "systemctl stop nginx")
    left = Leftover("shm", "nccl-a\x07", 5 * MIB, "kept", "would be removed")
    found = document(verdict(unmet=(unmet,), residue=(left,)), booted=0.0)
    assert found["preconditions"] == [
        {
            "check": "ports",
            "subject": "30000",
            "message": "port 30000 is in use by \\x1b[31mnginx[9]",
            "hint": "systemctl stop nginx",
            "file": False,
        }
    ]
    assert found["residue"] == [
        {"kind": "shm", "name": "nccl-a\\x07", "bytes": 5 * MIB, "fate": "kept", "reason": "would be removed"}
    ]
    found = document(verdict(residue=(left,) * 10_000), booted=0.0)
    assert (len(found["residue"]), found["residue_count"]) == (64, 10_000)


def test_of_many_holders_those_that_were_ended_come_first() -> None:
    """The record in the journal has room for some; in PID order, as everywhere."""
    many = [decision() for _ in range(200)]
    many = [
        each._replace(holder=each.holder._replace(process=each.holder.process._replace(pid=pid)))
        for pid, each in enumerate(many, 100)
    ]
    ended = {many[number].holder.process.identity: Fate.KILLED for number in (150, 199)}
    found = document(verdict(decisions=tuple(many), fates=ended), booted=0.0, most=4)
    assert [each["pid"] for each in found["holders"]] == [100, 101, 250, 299]
    assert found["holders_count"] == 200
    assert len(document(verdict(decisions=tuple(many)), booted=0.0)["holders"]) == 200


@pytest.mark.parametrize(
    ("numbers", "text"), [((), ""), ((3,), "3"), ((7, 0, 1, 3, 2), "0-3,7"), ((0, 2, 4, 5), "0,2,4-5")]
)
def test_indices(numbers: tuple[int, ...], text: str) -> None:
    assert indices(numbers) == text


def test_short() -> None:
    assert short("GPU-1b2c3d4e-5f60-7182") == "GPU-1b2c3d4e"
    assert short("") == "?"
