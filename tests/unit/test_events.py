"""Every kind of journal record, and that the message catalog explains each."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Callable, Optional

import pytest

from gpuprestart import events
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
    Unit,
    Unmet,
    Verdict,
)

CATALOG = Path(__file__).parents[2] / "units" / "gpuprestart.catalog"
CONTEXT = events.Context("sglang-qwen.service", "0123abcd")
HOSTILE = 'a\nPRIORITY=0\n\x1b[31m"'


def state(index: int = 0, used: Optional[int] = 1523 * MIB, fault: str = "") -> GpuState:
    uuid = f"GPU-{index:08x}"
    memory = None if used is None else Memory(used=used, free=0, total=81_920 * MIB, reserved=None, call="v2")
    clean = used is not None and used <= 64 * MIB and not fault
    return GpuState(
        gpu=Gpu(index=index, uuid=uuid),
        reading=Reading(uuid=uuid, memory=memory),
        limit=64 * MIB,
        unattributed=0 if clean else used or 0,
        clean=clean,
        fault=fault,
    )


def unit(name: str) -> Unit:
    return Unit(name=name, load_state="loaded", active_state="failed", sub_state="failed", control_group="/x")


def decision(action: Action = Action.KILL, comm: str = "python3", gpus: int = 1) -> Decision:
    listed = {f"GPU-{index:08x}": 1520 * MIB for index in range(gpus)}
    process = Process(
        pid=4711,
        started=1,
        began=0.01,
        ppid=1,
        comm=comm,
        state="S",
        uid=990,
        cgroup="/x",
        user="model",
        cmdline="python3 --api-key [redacted]",
    )
    owner = Owner(kind=OwnerKind.UNIT, word="unit:old.service", unit=unit("old.service"))
    holder = Holder(process=process, owner=owner, listed=listed, opened=frozenset(listed))
    reason = "was left behind by old.service, which is failed"
    return Decision(holder=holder, action=action, reason=reason, rule="mine")


def verdict(*outcomes: Outcome) -> Verdict:
    return Verdict(
        outcomes=outcomes,
        exit=75,
        unit="sglang-qwen.service",
        message="GPU 3 is held",
        hints=("stop ollama.service", "or wait"),
        time=0.0,
        run="0123abcd",
        boot_id="",
        driver="",
        nvml_path="",
        policy_files=(),
        duration=0.0,
        phases={},
        gpus=(state(),),
    )


def unmet(subject: str = "GPU-00000003", hint: str = "nvidia-smi -i 3 -pm 1") -> Unmet:
    message = f"GPU 3 ({subject}): persistence mode is off, but require.persistence asks for on"
    return Unmet("persistence", subject, message, hint)


def leftover(name: str = "nccl-1a2b", fate: str = "removed", size: int = 3 * MIB) -> Leftover:
    reasons = {
        "removed": "was nobody's any more",
        "kept": "is a directory",
        "failed": "could not be removed: I/O error",
    }
    return Leftover("shm", name, size, fate, reasons[fate])


def samples(comm: str = "python3", text: str = "GPU 3 is lost") -> dict[str, events.Record]:
    one, gpus = decision(comm=comm), [state()]
    return {
        "run-started": events.run_started(CONTEXT, gpus=[state().gpu], policy_files=[], deadline=120.0, version="1"),
        "holder-found": events.holder_found(CONTEXT, one, gpus),
        "holder-signalled": events.holder_signalled(CONTEXT, one, gpus, signal_name="SIGTERM"),
        "holder-gone": events.holder_gone(CONTEXT, one, gpus, fate=Fate.TERMINATED, seconds=2.04),
        "holder-survived": events.holder_survived(CONTEXT, one, gpus, seconds=10.0, state="D", wchan="uvm_spin_loop"),
        "memory-freed": events.memory_freed(CONTEXT, state(), state(used=3 * MIB), seconds=45.01),
        "gpu-verdict": events.gpu_verdict(CONTEXT, state()),
        "gpu-reset": events.gpu_reset(CONTEXT, state().gpu),
        "precondition-failed": events.precondition_failed(CONTEXT, unmet(comm)),
        "residue": events.residue(CONTEXT, [leftover(comm)]),
        "bypass-granted": events.bypass_granted(CONTEXT, by="alice", until="14:03:22"),
        "hook-disabled": events.hook_disabled(CONTEXT, by="alice"),
        "verdict": events.verdict(verdict(Outcome.PROTECTED), "{}"),
        "warning": events.warning(CONTEXT, text, gpus=[Gpu(3, "GPU-3")]),
    }


def test_every_kind_has_a_sample_and_carries_the_context() -> None:
    records = samples()
    assert set(records) == set(events.MESSAGE_IDS)
    for event, record in records.items():
        assert record.message_id == events.MESSAGE_IDS[event]
        assert record.fields["GPUPRESTART_EVENT"] == event
        assert record.fields["GPUPRESTART_UNIT"] == "sglang-qwen.service"
        assert record.fields["GPUPRESTART_RUN"] == "0123abcd"
        assert ("GPU" in record.message or event == "residue") and not record.message.endswith(".")


def test_message_ids_are_128_bits_and_unique() -> None:
    ids = list(events.MESSAGE_IDS.values())
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in ids)


def test_field_names_are_such_that_journald_takes_them() -> None:
    for record in samples().values():
        for name, value in record.fields.items():
            assert re.fullmatch("[A-Z][A-Z0-9_]{0,63}", name)
            assert value and all([value] if isinstance(value, str) else value)
        assert not {"MESSAGE", "MESSAGE_ID", "PRIORITY", "OBJECT_PID"} & set(record.fields)


def test_holder_found_names_gpu_process_owner_amounts_and_reason() -> None:
    record = events.holder_found(CONTEXT, decision(), [state(), state(1)])
    assert record.message == (
        "GPU 0 (1523 MiB used, limit 64 MiB): python3[4711] (user model, 1520 MiB)"
        " was left behind by old.service, which is failed; it is to be ended for the start of sglang-qwen.service"
    )
    assert record.priority == events.NOTICE
    assert record.fields == {
        "GPUPRESTART_EVENT": "holder-found",
        "GPUPRESTART_UNIT": "sglang-qwen.service",
        "GPUPRESTART_RUN": "0123abcd",
        "GPU_UUID": "GPU-00000000",
        "GPU_INDEX": "0",
        "GPU_USED_BYTES": str(1523 * MIB),
        "GPU_LIMIT_BYTES": str(64 * MIB),
        "HOLDER_PID": "4711",
        "HOLDER_COMM": "python3",
        "HOLDER_UID": "990",
        "HOLDER_OWNER": "unit:old.service",
        "HOLDER_EVIDENCE": "nvml,fd",
        "HOLDER_BYTES": str(1520 * MIB),
        "HOLDER_CMDLINE": "python3 --api-key [redacted]",
        "GPUPRESTART_RULE": "mine",
        "GPUPRESTART_ACTION": "kill",
        "OBJECT_SYSTEMD_UNIT": "old.service",
    }


@pytest.mark.parametrize(
    ("action", "priority", "end"),
    [
        (Action.KILL, events.NOTICE, "it is to be ended"),
        (Action.REFUSE, events.WARNING, "it may not be ended"),
        (Action.WAIT, events.NOTICE, "its end is awaited"),
        (Action.SPARE, events.INFO, "it is spared"),
        (Action.NONE, events.DEBUG, "it is left alone"),
    ],
)
def test_holder_found_by_action(action: Action, priority: int, end: str) -> None:
    record = events.holder_found(CONTEXT, decision(action), [state()])
    wanted = "" if action in (Action.SPARE, Action.NONE) else " for the start of sglang-qwen.service"
    assert record.priority == priority and record.message.endswith("; " + end + wanted)
    assert record.fields["GPUPRESTART_ACTION"] == action.value


def test_a_holder_of_many_gpus_has_a_field_for_each() -> None:
    record = events.holder_found(CONTEXT, decision(gpus=6), [state(index) for index in range(8)])
    assert record.fields["GPU_UUID"] == tuple(f"GPU-{index:08x}" for index in range(6))
    assert record.fields["GPU_INDEX"] == tuple("012345")
    assert "GPU_USED_BYTES" not in record.fields
    assert record.fields["HOLDER_BYTES"] == str(6 * 1520 * MIB)
    assert "GPUs 0-5 (at most 1523 MiB used, limit 64 MiB): python3[4711]" in record.message


def test_what_is_not_known_is_no_field() -> None:
    one = decision()
    holder = one.holder._replace(listed={}, opened=frozenset(), process=one.holder.process._replace(cmdline=None))
    record = events.holder_found(events.Context(None, "r"), one._replace(holder=holder, rule=None), [state()])
    absent = {"GPU_UUID", "GPU_INDEX", "GPU_USED_BYTES", "HOLDER_BYTES", "HOLDER_EVIDENCE", "HOLDER_CMDLINE"}
    assert not (absent | {"GPUPRESTART_RULE", "GPUPRESTART_UNIT"}) & set(record.fields)
    assert record.message.startswith("on no selected GPU: python3[4711]")


@pytest.mark.parametrize(
    ("owner", "expected"),
    [
        (Owner(kind=OwnerKind.UNIT, word="unit:ollama.service", unit=unit("ollama.service")), "ollama.service"),
        (Owner(kind=OwnerKind.UNIT, word="unit:x", unit=unit("sglang-qwen.service")), None),
        (Owner(kind=OwnerKind.OWN_PREVIOUS, word="unit:x", unit=unit("other.service")), None),
        (Owner(kind=OwnerKind.SESSION, word="session:5:alice", unit=unit("session-5.scope")), None),
        (Owner(kind=OwnerKind.NONE, word="none"), None),
    ],
)
def test_the_unit_whose_process_it_is_can_read_the_record_too(owner: Owner, expected: Optional[str]) -> None:
    one = decision()
    one = one._replace(holder=one.holder._replace(owner=owner))
    makers: list[Callable[[], events.Record]] = [
        lambda: events.holder_found(CONTEXT, one, [state()]),
        lambda: events.holder_signalled(CONTEXT, one, [state()], signal_name="SIGKILL"),
        lambda: events.holder_gone(CONTEXT, one, [state()], fate=Fate.KILLED),
        lambda: events.holder_survived(CONTEXT, one, [state()], seconds=1.0, state="D"),
    ]
    for make in makers:
        assert make().fields.get("OBJECT_SYSTEMD_UNIT") == expected


def test_an_owner_that_is_no_unit_is_named_by_its_word() -> None:
    one = decision()
    one = one._replace(holder=one.holder._replace(owner=Owner(kind=OwnerKind.SESSION, word="session:5:alice")))
    assert "python3[4711] of session:5:alice (" in events.holder_found(CONTEXT, one, [state()]).message


@pytest.mark.parametrize(
    ("name", "priority"), [("SIGTERM", events.NOTICE), ("SIGCONT", events.NOTICE), ("SIGKILL", events.WARNING)]
)
def test_holder_signalled(name: str, priority: int) -> None:
    record = events.holder_signalled(CONTEXT, decision(), [state()], signal_name=name)
    assert record.fields["GPUPRESTART_SIGNAL"] == name and record.priority == priority
    assert (
        f": sent {name} to python3[4711] (user model, 1520 MiB) for the start of sglang-qwen.service;" in record.message
    )
    assert record.message.endswith("; it was left behind by old.service, which is failed")


@pytest.mark.parametrize(
    ("fate", "words"),
    [
        (Fate.EXITED, "exited on its own"),
        (Fate.TERMINATED, "by SIGTERM"),
        (Fate.KILLED, "by SIGKILL"),
        (Fate.GONE, "gone before it could be signalled"),
    ],
)
def test_holder_gone(fate: Fate, words: str) -> None:
    record = events.holder_gone(CONTEXT, decision(), [state()], fate=fate, seconds=2.04)
    assert f"{words} after 2.04 s; it was left behind by old.service" in record.message
    assert record.fields["HOLDER_FATE"] == fate.value


def test_holder_survived_says_where_it_is_stuck() -> None:
    record = samples()["holder-survived"]
    assert "10.0 s after SIGKILL, in state D at uvm_spin_loop" in record.message and record.priority == events.ERR
    assert (record.fields["HOLDER_STATE"], record.fields["HOLDER_WCHAN"]) == ("D", "uvm_spin_loop")


def test_memory_freed() -> None:
    record = samples()["memory-freed"]
    assert record.message == "GPU 0: memory is back 45.0 s into this run: 3 MiB used, limit 64 MiB, it was 1523 MiB"
    assert record.fields["GPU_USED_BYTES"] == str(3 * MIB)
    assert record.fields["GPU_USED_BEFORE_BYTES"] == str(1523 * MIB)


def test_gpu_verdict() -> None:
    clean = events.gpu_verdict(CONTEXT, state(used=3 * MIB))
    assert (clean.message, clean.priority) == ("GPU 0 is clean: 3 MiB used, limit 64 MiB", events.INFO)
    dirty = events.gpu_verdict(CONTEXT, state(fault="1523 MiB used, limit 64 MiB"))
    message = "GPU 0 is not clean: 1523 MiB used, limit 64 MiB, 1523 MiB of it held by nobody alive"
    assert (dirty.message, dirty.priority) == (message, events.WARNING)
    lost = events.gpu_verdict(CONTEXT, state(used=None, fault="cannot be measured: GPU is lost"))
    assert lost.message == "GPU 0 is not clean: it cannot be measured: GPU is lost"
    assert "GPU_USED_BYTES" not in lost.fields and "GPU_LIMIT_BYTES" not in lost.fields
    full = events.gpu_verdict(CONTEXT, state(used=3 * MIB, fault="10 MiB free, 20 MiB needed (memory.min_free)"))
    assert full.message.endswith(", but 10 MiB free, 20 MiB needed (memory.min_free)")


def test_precondition_failed() -> None:
    record = events.precondition_failed(CONTEXT, unmet())
    assert record.message.endswith("persistence mode is off, but require.persistence asks for on")
    assert record.priority == events.ERR
    assert record.fields == {
        "GPUPRESTART_EVENT": "precondition-failed",
        "GPUPRESTART_UNIT": "sglang-qwen.service",
        "GPUPRESTART_RUN": "0123abcd",
        "GPUPRESTART_CHECK": "persistence",
        "GPUPRESTART_SUBJECT": "GPU-00000003",
        "GPUPRESTART_HINT": "nvidia-smi -i 3 -pm 1",
    }
    assert "GPUPRESTART_HINT" not in events.precondition_failed(CONTEXT, unmet(hint="")).fields


@pytest.mark.parametrize(
    ("fates", "priority", "removed"),
    [
        (["removed", "removed", "kept"], events.NOTICE, 2),
        (["kept"], events.INFO, 0),
        (["removed", "failed"], events.WARNING, 1),
    ],
)
def test_residue_is_told_by_its_fate(fates: list[str], priority: int, removed: int) -> None:
    found = [leftover(f"nccl-{number}", fate) for number, fate in enumerate(fates)]
    record = events.residue(CONTEXT, found)
    assert record.priority == priority
    assert record.fields["GPUPRESTART_REMOVED"] == str(removed)
    assert record.fields["GPUPRESTART_REMOVED_BYTES"] == str(removed * 3 * MIB)
    told = record.fields["GPUPRESTART_RESIDUE"]
    assert [each.split()[:2] for each in ([told] if isinstance(told, str) else told)] == [
        ["shm", each.name] for each in found
    ]
    for each in found:
        assert each.name in record.message
    assert ("could not be removed" in record.message) == ("failed" in fates)


def test_residue_names_the_first_and_counts_the_rest() -> None:
    found = [leftover(f"nccl-{number:04}") for number in range(500)]
    record = events.residue(CONTEXT, found)
    assert "500 removed (1500 MiB: nccl-0000, " in record.message and "nccl-0004" not in record.message
    assert "and 496 more" in record.message and len(record.fields["GPUPRESTART_RESIDUE"]) == events.MOST_HINTS


def test_just_over_the_limit_reads_so() -> None:
    assert "65 MiB used, limit 64 MiB" in events.gpu_verdict(CONTEXT, state(used=64 * MIB + 1)).message


def test_verdict_ends_with_the_first_hint() -> None:
    record = events.verdict(verdict(Outcome.PROTECTED, Outcome.UNKNOWN), "{}")
    assert record.message == "protected: GPU 3 is held; hint: stop ollama.service"
    assert record.fields["GPUPRESTART_OUTCOME"] == "protected"
    assert record.fields["GPUPRESTART_OUTCOMES"] == ("protected", "unknown")
    assert record.fields["GPUPRESTART_EXIT"] == "75"
    assert record.fields["GPUPRESTART_HINT"] == ("stop ollama.service", "or wait")


@pytest.mark.parametrize("outcome", list(Outcome))
def test_verdict_priority_by_weight(outcome: Outcome) -> None:
    light = {Outcome.CLEAN: 6, Outcome.NONE: 6, Outcome.CLEANED: 5, Outcome.BYPASSED: 4, Outcome.INTERNAL: 2}
    assert events.verdict(verdict(outcome), "{}").priority == light.get(outcome, 3)


def test_run_started() -> None:
    record = events.run_started(
        CONTEXT, gpus=[Gpu(0, "A"), Gpu(1, "B")], policy_files=["/etc/p", "/etc/q"], deadline=120.0, version="0.1"
    )
    assert record.message == "Judging 2 GPUs for sglang-qwen.service by /etc/p, /etc/q, within 120 s"
    assert record.fields["GPU_UUID"] == ("A", "B") and record.fields["GPUPRESTART_POLICY"] == ("/etc/p", "/etc/q")


@pytest.mark.case("D5")
def test_a_hostile_name_forges_nothing() -> None:
    for record in samples(comm=HOSTILE, text=HOSTILE + " of GPU").values():
        values: list[Any] = [record.message, *record.fields.values()]
        for value in values:
            for each in [value] if isinstance(value, str) else value:
                assert each.isprintable() and len(each) <= 2000
    assert samples(comm=HOSTILE)["holder-found"].fields["HOLDER_COMM"] == 'a\\x0aPRIORITY=0\\x0a\\x1b[31m"'


# The catalog ---------------------------------------------------------------------------------------------------------


def entries() -> dict[str, str]:
    text = re.sub(r"^#.*\n", "", CATALOG.read_text(encoding="utf-8"), flags=re.MULTILINE)
    _, *pieces = re.split(r"^-- ", text, flags=re.MULTILINE)
    return {piece.split("\n", 1)[0]: piece.split("\n", 1)[1] for piece in pieces}


def test_the_catalog_has_an_entry_per_kind_and_no_other() -> None:
    assert set(entries()) == set(events.MESSAGE_IDS.values())


def test_a_catalog_entry_has_a_subject_and_a_text_and_names_only_fields_that_are_always_there() -> None:
    by_id = {record.message_id: record for record in samples().values()}
    for message_id, entry in entries().items():
        head, _, body = entry.partition("\n\n")
        assert head.startswith("Subject: ") and "\nDefined-By: gpuprestart" in head
        assert len(body) > 80
        for name in re.findall("@([A-Z_]+)@", entry):
            assert isinstance(by_id[message_id].fields[name], str)


@pytest.mark.skipif(shutil.which("journalctl") is None, reason="no journalctl")
def test_journalctl_takes_the_catalog(tmp_path: Path) -> None:
    for place in ("usr/lib/systemd/catalog", "var/lib/systemd/catalog"):
        (tmp_path / place).mkdir(parents=True)
    shutil.copy(CATALOG, tmp_path / "usr/lib/systemd/catalog")
    subprocess.run(["journalctl", f"--root={tmp_path}", "--update-catalog"], check=True)
    listing = subprocess.run(
        ["journalctl", f"--root={tmp_path}", "--list-catalog"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.splitlines()
    assert {line.split()[0] for line in listing} == set(events.MESSAGE_IDS.values())
    assert all(line.split()[1] == "gpuprestart:" for line in listing)
