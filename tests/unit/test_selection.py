"""Which GPUs a run is about: as CUDA would resolve it, but never silently fewer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprestart.model import Gpu, Inventory, Outcome, Refusal
from gpuprestart.selection import Selection, select

UUIDS = (
    "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    "GPU-8932aaaa-0000-4106-c12f-20bd9faed9f6",
    "GPU-11110000-d72c-4106-c12f-20bd9faed9f6",
    "GPU-22220000-d72c-4106-c12f-20bd9faed9f6",
)
H100 = "NVIDIA H100 80GB HBM3"
PCI_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def gpu(index: int, name: str = H100) -> Gpu:
    uuid = UUIDS[index] if index < len(UUIDS) else f"GPU-{index:08x}-d72c-4106-c12f-20bd9faed9f6"
    # The minors run the other way: nobody may take one number for another.
    return Gpu(index, uuid, name, f"00000000:{0x1B + index:02X}:00.0", minor=63 - index)


def inventory(*gpus: Gpu) -> Inventory:
    return Inventory("550.54", "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", gpus)


FOUR = inventory(*(gpu(index) for index in range(4)))
UNLIKE = inventory(gpu(0, "NVIDIA A100"), gpu(1), gpu(2), gpu(3))
MIG = inventory(
    gpu(0),
    Gpu(0, "MIG-aaaa1111-0000-5000-8000-000000000000", "H100 1g.10gb", "00000000:1B:00.0", parent=UUIDS[0]),
    Gpu(1, "MIG-aaaa2222-0000-5000-8000-000000000000", "H100 1g.10gb", "00000000:1B:00.0", parent=UUIDS[0]),
    gpu(1),
    Gpu(0, f"MIG-{UUIDS[1]}/1/0", "H100 1g.10gb", "00000000:1C:00.0", parent=UUIDS[1]),
    Gpu(1, f"MIG-{UUIDS[1]}/1/10", "H100 1g.10gb", "00000000:1C:00.0", parent=UUIDS[1]),
)


def of_unit(environment: Optional[Mapping[str, str]], machine: Inventory = FOUR) -> Selection:
    return select("unit", machine, environment)


def cuda(value: str, machine: Inventory = FOUR, **more: str) -> list[int]:
    return [chosen.index for chosen in of_unit({"CUDA_VISIBLE_DEVICES": value, **more}, machine).gpus]


def refused(
    policy: object = "unit",
    machine: Inventory = FOUR,
    environment: Optional[Mapping[str, str]] = None,
    override: Optional[list[str]] = None,
    outcome: Outcome = Outcome.CONFIG,
    origin: str = "",
) -> str:
    with pytest.raises(Refusal) as caught:
        select(policy, machine, environment, override, origin)  # type: ignore[arg-type]
    assert caught.value.outcome is outcome
    assert caught.value.hints
    assert all(text.isprintable() for text in (caught.value.message, *caught.value.hints))
    # The remedy stands behind the message wherever that is shown, and so need not be in it.
    remedy = caught.value.hints[0]
    assert remedy not in caught.value.message
    return f"{caught.value.message} ({remedy})"


# Where the choice comes from -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "indices", "source"),
    [
        (None, [0, 1, 2, 3], "all GPUs, there is no unit to ask"),
        ({}, [0, 1, 2, 3], "all GPUs, the unit sets neither CUDA_VISIBLE_DEVICES nor NVIDIA_VISIBLE_DEVICES"),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, [2, 3], "CUDA_VISIBLE_DEVICES=2,3 of the unit"),
        ({"NVIDIA_VISIBLE_DEVICES": "2,3"}, [2, 3], "NVIDIA_VISIBLE_DEVICES=2,3 of the unit"),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, [0, 1, 2, 3], "NVIDIA_VISIBLE_DEVICES=all of the unit"),
        ({"CUDA_VISIBLE_DEVICES": "1", "NVIDIA_VISIBLE_DEVICES": "2"}, [1], "CUDA_VISIBLE_DEVICES=1 of the unit"),
        ({"CUDA_VISIBLE_DEVICES": "1", "NVIDIA_VISIBLE_DEVICES": "x"}, [1], "CUDA_VISIBLE_DEVICES=1 of the unit"),
        ({"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "2"}, [], "CUDA_VISIBLE_DEVICES= of the unit"),
        ({"NVIDIA_VISIBLE_DEVICES": "2,2"}, [2], "NVIDIA_VISIBLE_DEVICES=2,2 of the unit"),
        ({"NVIDIA_VISIBLE_DEVICES": "1, 2"}, [1, 2], "NVIDIA_VISIBLE_DEVICES=1, 2 of the unit"),
    ],
)
def test_the_unit_s_environment(environment: Optional[dict[str, str]], indices: list[int], source: str) -> None:
    selection = of_unit(environment)
    assert [chosen.index for chosen in selection.gpus] == indices
    assert selection.source == source
    assert selection.empty is (not indices)


@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"])
@pytest.mark.parametrize("value", ["", "NoDevFiles", "none", "void"])
def test_no_gpu_on_purpose(variable: str, value: str) -> None:
    selection = of_unit({variable: value})
    assert (selection.gpus, selection.empty) == ((), True)
    assert selection.source == f"{variable}={value} of the unit"


def test_the_policy_s_list_and_the_option_before_it() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "0"}
    chosen = select(("3", "0000:1b:00.0", "3"), FOUR, environment, None, "/etc/p:7")
    assert chosen.gpus == (FOUR.gpus[0], FOUR.gpus[3])
    assert chosen.source == "/etc/p:7: gpus.select 3,0000:1b:00.0,3"
    chosen = select(("3",), FOUR, environment, ["2", "1"])
    assert (chosen.gpus, chosen.source) == (FOUR.gpus[1:3], "--gpus 2,1")
    assert select("all", FOUR, environment).gpus == FOUR.gpus
    assert select("all", FOUR, environment).source == "all GPUs, as gpus.select says"
    assert select("unit", FOUR, environment, ["all"]).source == "all GPUs, as --gpus says"
    assert select(("3",), FOUR, environment, ["unit"]).source == "CUDA_VISIBLE_DEVICES=0 of the unit"


@pytest.mark.parametrize("words", [[], [""], ["all", "0"], ["0", "unit"], ["none"], ["-1"]])
def test_words_that_the_option_does_not_know(words: list[str]) -> None:
    assert refused(override=words).startswith("--gpus: ")


def test_a_source_is_bounded_and_cannot_forge_a_line() -> None:
    source = of_unit({"CUDA_VISIBLE_DEVICES": "0,-1,\nPRIORITY=0\x1b[2J" + "x" * 1000}).source
    assert source.isprintable()
    assert len(source) < 300


@pytest.mark.parametrize("policy", ["all", "unit"])
def test_no_gpu_at_all_proves_nothing(policy: str) -> None:
    assert "NVML counts no GPU at all" in refused(policy, inventory(), outcome=Outcome.UNKNOWN)
    environment = {"NVIDIA_VISIBLE_DEVICES": "all"}
    assert "NVML counts no GPU" in refused("unit", inventory(), environment, outcome=Outcome.UNKNOWN)


# CUDA_VISIBLE_DEVICES ------------------------------------------------------------------------------------------------


@pytest.mark.case("C9")
@pytest.mark.parametrize(
    ("value", "indices"),
    [
        ("2,3", [2, 3]),
        ("3,2", [2, 3]),
        ("0", [0]),
        ("0,-1,1", [0]),
        ("2,1,-1,", [1, 2]),
        ("1,-1,99,rubbish", [1]),
        ("-1", []),
        ("-1,0", []),
        ("0, 1", [0, 1]),
        (" 1 ,\t2", [1, 2]),
        (UUIDS[2], [2]),
        (UUIDS[2].upper(), [2]),
        ("gpu-8932F9", [0]),
        ("GPU-8932a,GPU-1", [1, 2]),
        ("GPU-2,0", [0, 3]),
    ],
)
def test_what_cuda_would_show(value: str, indices: list[int]) -> None:
    assert cuda(value) == indices


@pytest.mark.case("C9")
@pytest.mark.case("C6")
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("0,7", "GPU 7 is not there, NVML counts 4 (indices end at 3; dmesg (Xid) tells of lost GPUs)"),
        ("4", "GPU 4 is not there"),
        ("9" * 5000, "is not there"),
        ("GPU-8932", "GPU-8932 is the beginning of 2 UUIDs (give more of its characters)"),
        ("GPU-", "'GPU-' names no GPU"),
        ("GPU-ffff", "no GPU here has the UUID GPU-ffff"),
        (UUIDS[0] + "0", "no GPU here has the UUID"),
        ("MIG-8932f937", "no GPU here has the UUID MIG-8932f937"),
        ("8932f937", "'8932f937' names no GPU"),
        ("0,0", "0 names GPU 0 twice, for which CUDA shows no GPU at all"),
        (f"0,{UUIDS[0]}", "names GPU 0 twice"),
        ("0,,1", "one entry is empty"),
        ("0,1,", "one entry is empty"),
        (",0", "one entry is empty"),
        (" ", "one entry is empty"),
        ("all", "'all' is nothing that CUDA understands (leave it unset for all GPUs)"),
        ("0000:1b:00.0", "'0000:1b:00.0' is nothing that CUDA understands (use the UUID)"),
        ("0,none", "'none' stands beside others (it must stand alone)"),
        ("None", "'None' names no GPU"),
        ("nodevfiles", "'nodevfiles' names no GPU"),
        ("01", "'01' names no GPU"),
        ("+1", "'+1' names no GPU"),
        ("-2", "'-2' names no GPU"),
        ("-01", "'-01' names no GPU"),
        ("1x", "'1x' names no GPU"),
        ("0x1", "'0x1' names no GPU"),
        ("1.0", "'1.0' names no GPU"),
        ("1_0", "'1_0' names no GPU"),
        ("٣", "'٣' names no GPU"),
        ("²", "'²' names no GPU"),
        ("0-3", "'0-3' names no GPU"),
        ("0;1", "'0;1' names no GPU"),
        ("cuda:0", "'cuda:0' names no GPU"),
        ('"0,1"', "'\"0' names no GPU"),
        ("0\n", "'0\\n' names no GPU"),
        ("0,-1\n", "'-1\\n' names no GPU"),
        ("GPU-8932f937\n", "names no GPU"),
        ("0\x00", "'0\\x00' names no GPU"),
    ],
    ids=lambda value: value[:40],
)
def test_what_does_not_resolve_is_never_silently_fewer(value: str, said: str) -> None:
    message = refused(environment={"CUDA_VISIBLE_DEVICES": value})
    assert message.startswith("CUDA_VISIBLE_DEVICES: ")
    assert said in message


@pytest.mark.parametrize("word", ["none", "void"])
def test_an_option_that_says_none_is_not_told_that_it_stands_beside_others(word: str) -> None:
    message = refused(override=[word])
    assert f"--gpus: '{word}' names no GPU (name one at least, or have it say all or unit)" in message


def test_a_refusal_lists_what_there_is() -> None:
    with pytest.raises(Refusal) as caught:
        cuda("7")
    assert caught.value.hints[-1].startswith(f"GPUs here: GPU 0 {UUIDS[0]} 00000000:1B:00.0 {H100}; GPU 1 {UUIDS[1]} ")


@pytest.mark.case("C9")
@pytest.mark.parametrize("order", [None, "FASTEST_FIRST", "pci_bus_id", ""])
def test_numbers_on_unlike_gpus_are_anybody_s_guess(order: Optional[str]) -> None:
    environment = (
        {"CUDA_VISIBLE_DEVICES": "1"} if order is None else {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": order}
    )
    message = refused(machine=UNLIKE, environment=environment)
    assert message == (
        "CUDA_VISIBLE_DEVICES: '1' may be any GPU: CUDA numbers them by speed, and these are not all alike "
        "(set CUDA_DEVICE_ORDER=PCI_BUS_ID in the unit, or use UUIDs)"
    )


@pytest.mark.case("C9")
def test_unlike_gpus_by_pci_order_by_uuid_or_by_numbers_of_nvml() -> None:
    assert cuda("1,2", UNLIKE, **PCI_ORDER) == [1, 2]
    assert cuda(UUIDS[1], UNLIKE) == [1]
    assert cuda("-1", UNLIKE) == []
    assert [chosen.index for chosen in of_unit({"NVIDIA_VISIBLE_DEVICES": "1"}, UNLIKE).gpus] == [1]
    assert [chosen.index for chosen in select(("1",), UNLIKE, {}).gpus] == [1]
    assert [chosen.index for chosen in select("unit", UNLIKE, {}, ["1"]).gpus] == [1]


@pytest.mark.case("C7")
def test_an_index_is_no_minor() -> None:
    machine = inventory(*(gpu(index) for index in range(8)))
    (chosen,) = select(("7",), machine, {}).gpus
    assert (chosen.index, chosen.minor) == (7, 56)


# The policy's list ---------------------------------------------------------------------------------------------------


@pytest.mark.case("C6")
def test_a_policy_for_eight_gpus_on_a_machine_with_seven() -> None:
    seven = inventory(*(gpu(index) for index in range(7)))
    eight = tuple(str(index) for index in range(8))
    assert refused(eight, seven, origin="/etc/gpuprestart/policy.toml:2") == (
        "/etc/gpuprestart/policy.toml:2: gpus.select: GPU 7 is not there, NVML counts 7 "
        "(indices end at 6; dmesg (Xid) tells of lost GPUs)"
    )
    assert "the UUID GPU-00000007" in refused((*(gpu(index).uuid for index in range(8)),), seven)
    assert "no GPU is at 0000:22:00.0" in refused((*(gpu(index).pci[4:] for index in range(8)),), seven)


@pytest.mark.parametrize(
    "entry", ["00000000:1D:00.0", "00000000:1d:00.0", "0000:1D:00.0", "0000:1d:00.0", "1d:00.0", "1D:00.0"]
)
def test_pci_addresses(entry: str) -> None:
    assert select((entry,), FOUR, {}).gpus == (FOUR.gpus[2],)


@pytest.mark.parametrize(
    "entry",
    [
        "1d:00",
        "1d:00.1",
        "0001:1d:00.0",
        "00010000:1d:00.0",
        "000:1d:00.0",
        "1d:00.8",
        "ff:00.0",
        "1d.00.0",
        "0000-1d:00.0",
    ],
)
def test_no_pci_addresses(entry: str) -> None:
    assert entry in refused((entry,))


@pytest.mark.parametrize("entry", ["-1", "01", "+1", "2 3", "GPU-8932", "x", "\x1b[2J", "8932f937"])
def test_what_a_policy_may_not_name(entry: str) -> None:
    assert refused((entry,)).startswith("gpus.select: ")


# Lost GPUs, MIG ------------------------------------------------------------------------------------------------------

LOST = FOUR.gpus[3]._replace(fault="GPU is lost")
NAMELESS = Gpu(3, "", fault="GPU is lost")


@pytest.mark.case("C5")
@pytest.mark.parametrize("lost", [LOST, NAMELESS])
def test_a_lost_gpu_is_handed_on_where_it_is_selected(lost: Gpu) -> None:
    machine = inventory(*FOUR.gpus[:3], lost)
    assert select("all", machine, None).gpus == machine.gpus
    assert select(("3",), machine, None).gpus == (lost,)
    assert of_unit({"CUDA_VISIBLE_DEVICES": "1,3"}, machine).gpus == (machine.gpus[1], lost)
    assert of_unit({"CUDA_VISIBLE_DEVICES": "1,2"}, machine).gpus == machine.gpus[1:3]


@pytest.mark.case("C5")
def test_a_name_that_nobody_answers_to_may_be_the_lost_gpu_s() -> None:
    machine = inventory(*FOUR.gpus[:3], NAMELESS)
    message = refused((UUIDS[3],), machine, outcome=Outcome.UNKNOWN)
    assert message.startswith(f"gpus.select: {UUIDS[3]} is none of the GPUs that answer, it may be GPU 3 (GPU is lost)")
    refused(environment={"CUDA_VISIBLE_DEVICES": "0,GPU-2222"}, machine=machine, outcome=Outcome.UNKNOWN)
    refused(("1e:00.0",), machine, outcome=Outcome.UNKNOWN)
    refused(("GPU-8932",), machine)
    refused(("4",), machine)
    refused(("x",), machine)


def test_a_name_that_the_lost_gpu_is_known_not_to_have_is_wrong() -> None:
    machine = inventory(*FOUR.gpus[:3], LOST)
    assert select((UUIDS[3],), machine, None).gpus == (LOST,)
    refused(("GPU-ffff",), machine)
    refused(("ff:00.0",), machine)
    # Its instances cannot be listed any more, whatever is known of itself.
    refused(("MIG-ffff",), machine, outcome=Outcome.UNKNOWN)


@pytest.mark.case("C9")
def test_mig_instances_are_found_by_uuid_among_instances_only() -> None:
    assert of_unit({"CUDA_VISIBLE_DEVICES": "MIG-aaaa2"}, MIG).gpus == (MIG.gpus[2],)
    assert of_unit({"CUDA_VISIBLE_DEVICES": "mig-AAAA1111-0000-5000-8000-000000000000"}, MIG).gpus == (MIG.gpus[1],)
    assert "beginning of 2" in refused(machine=MIG, environment={"CUDA_VISIBLE_DEVICES": "MIG-aaaa"})
    assert "no GPU here has the UUID" in refused(machine=MIG, environment={"CUDA_VISIBLE_DEVICES": "MIG-bbbb"})
    assert of_unit({"CUDA_VISIBLE_DEVICES": "GPU-8932f"}, MIG).gpus == (MIG.gpus[0],)


def test_an_old_mig_name_is_not_the_beginning_of_a_longer_one() -> None:
    assert select((f"MIG-{UUIDS[1]}/1/0",), MIG, None).gpus == (MIG.gpus[4],)
    machine = inventory(*MIG.gpus[:4], MIG.gpus[4]._replace(uuid=f"MIG-{UUIDS[1]}/1/1"), MIG.gpus[5])
    assert select((f"MIG-{UUIDS[1]}/1/1",), machine, None).gpus == (machine.gpus[4],)


def test_indices_and_addresses_mean_whole_gpus() -> None:
    assert select(("1", "1b:00.0"), MIG, None).gpus == (MIG.gpus[0], MIG.gpus[3])
    assert select("all", MIG, None).gpus == (MIG.gpus[0], MIG.gpus[3])
    assert cuda("1,0", MIG) == [0, 1]
    assert select(("0", "1b:00.0"), inventory(*MIG.gpus[::-1]), None).gpus == (MIG.gpus[0],)


def test_instances_stand_in_the_order_of_the_inventory() -> None:
    words = (f"MIG-{UUIDS[1]}/1/0", "MIG-aaaa2", "1", "MIG-aaaa1")
    assert select(words, MIG, None).gpus == (MIG.gpus[1], MIG.gpus[2], MIG.gpus[3], MIG.gpus[4])


ENTRIES = st.sampled_from(
    ["0", "1", "2", "3", "4", "-1", "", " ", "GPU-1", "GPU-2", "GPU-8932", "all", "none", "01", "\n"]
)


@given(st.lists(ENTRIES | st.text(max_size=4), max_size=6).map(",".join))
def test_a_list_is_resolved_whole_or_refused(value: str) -> None:
    try:
        indices = cuda(value)
    except Refusal as refusal:
        outcome, message = refusal.outcome, refusal.message
    else:
        entries = (
            [entry.strip() for entry in value.split(",")] if value not in ("none", "NoDevFiles", "void", "") else []
        )
        assert len(indices) == len(entries[: entries.index("-1")] if "-1" in entries else entries)
        assert indices == sorted(set(indices))
        return
    assert outcome is Outcome.CONFIG
    assert message.isprintable()
