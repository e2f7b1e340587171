"""What the policy asks of the driver and its GPUs, both ways, by what NVML answers to each call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Optional

import pytest

from gpuprestart import driverfacts, require
from gpuprestart.driverfacts import COMPUTE_MODES, Found
from gpuprestart.host.library import FACTS
from gpuprestart.host.nvml import DriverError, Fact
from gpuprestart.model import Gpu, Inventory, Unmet
from gpuprestart.policy import Require

from .machines import gpu, inventory, policy, uuid

pynvml = pytest.importorskip("pynvml")

LOST = Fact(fault="GPU is lost", code=15)
UNTOLD = Fact(fault="Unknown Error", code=999)
UNSUPPORTED = Fact(fault="Not Supported", code=3)
OUTDATED = Fact(fault="Function Not Found", code=13)

#: An H200 on which nothing is wrong, and nothing is set.
IDLE: Mapping[str, Fact] = {
    "compute_mode": Fact((0,)),
    "persistence": Fact((1,)),
    "mig": Fact((0, 0)),
    "remapped_rows": Fact((2, 1, 0, 0)),
    "retired_pages": UNSUPPORTED,
    "uncorrected_errors": Fact((0,)),
}


class Told:
    """A driver that says of each GPU what is written down, and keeps what it was asked."""

    def __init__(self, others: Mapping[int, Mapping[str, Fact]]) -> None:
        self.others = others
        self.asked: list[tuple[list[int], list[str], float]] = []

    def facts(self, gpus: Sequence[Gpu], names: Sequence[str], timeout: float) -> dict[Gpu, dict[str, Fact]]:
        self.asked.append(([each.index for each in gpus], [*names], timeout))
        return {each: {name: {**IDLE, **self.others.get(each.index, {})}[name] for name in names} for each in gpus}


def asked_for(text: str) -> Require:
    return policy(f"[require]\n{text}").require


def look(
    text: str,
    others: Optional[Mapping[int, Mapping[str, Fact]]] = None,
    *,
    there: Optional[Inventory] = None,
    selected: Optional[Sequence[Gpu]] = None,
) -> tuple[Found, Told]:
    """What of this is not so, on machines of four GPUs."""
    there = there or inventory(4)
    told = Told(others or {})
    driver: Any = told
    gpus = there.gpus if selected is None else selected
    return driverfacts.look(asked_for(text), driver, there, gpus, 15.0), told


def unmet(*arguments: Any, **more: Any) -> Unmet:
    """The one thing that is not so."""
    found, _ = look(*arguments, **more)
    assert found.warnings == ()
    (only,) = found.unmet
    assert not only.file and f"require.{only.check} asks for" in only.message
    return only


def instance(of: int, number: int) -> Gpu:
    return gpu(of, uuid=f"MIG-{of}-{number}", parent=uuid(of), gi=number, ci=0)


# What is asked -------------------------------------------------------------------------------------------------------


def test_nothing_is_asked_of_the_driver_where_the_policy_asks_nothing() -> None:
    found, told = look("ports = [30000]\ngpu_count = 4\ndriver = '>=570'")
    assert found == Found() and told.asked == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("compute_mode = 'default'", ["compute_mode"]),
        ("persistence = 'warn'", ["persistence"]),
        ("persistence = 'require'", ["persistence"]),
        ("mig = 'off'", ["mig"]),
        ("ecc = 'no-pending'", ["remapped_rows", "retired_pages", "uncorrected_errors", "mig"]),
        ("mig = 'off'\necc = 'no-pending'", ["mig", "remapped_rows", "retired_pages", "uncorrected_errors"]),
    ],
)
def test_only_what_the_policy_asks_for_is_asked_of_the_driver(text: str, names: list[str]) -> None:
    found, told = look(text, selected=inventory(4).gpus[1:3])
    assert found == Found()
    assert told.asked == [([1, 2], names, 15.0)] and set(names) <= set(FACTS)


def test_of_instances_their_gpu_is_asked_once() -> None:
    parts = [instance(1, number) for number in range(3)]
    there = inventory(3)._replace(gpus=(gpu(0), gpu(1), *parts, gpu(2)))
    found, told = look("compute_mode = 'default'", there=there, selected=[parts[0], parts[2], there.gpus[-1]])
    assert found == Found() and [indices for indices, _, _ in told.asked] == [[1, 2]]


def test_another_gpu_without_a_uuid_is_not_asked_in_place_of_one() -> None:
    lost = [gpu(index, uuid="", fault="GPU is lost") for index in (0, 1)]
    there = inventory(2)._replace(gpus=tuple(lost))
    with pytest.raises(DriverError, match=r"^GPU 0: GPU is lost$"):
        look("mig = 'off'", there=there, selected=lost[:1])


def test_a_gpu_that_is_lost_cannot_be_measured_whatever_else_is_asked() -> None:
    with pytest.raises(DriverError, match=r"^GPUs 1,3: GPU is lost$"):
        look("mig = 'off'\ngpu_count = 9", {index: {"mig": LOST} for index in (1, 3)})


# The number of GPUs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "there", "selected", "message"),
    [
        (8, 7, 7, "require.gpu_count asks for 8 GPUs, but 7 are selected of the 7 that NVML has"),
        (1, 2, 2, "require.gpu_count asks for 1 GPU, but 2 are selected of the 2 that NVML has"),
        (2, 8, 1, "require.gpu_count asks for 2 GPUs, but 1 is selected of the 8 that NVML has"),
    ],
)
def test_too_few_or_too_many_gpus(wanted: int, there: int, selected: int, message: str) -> None:
    found = unmet(f"gpu_count = {wanted}", there=inventory(there), selected=inventory(there).gpus[:selected])
    assert (found.check, found.subject) == ("gpu_count", str(wanted))
    assert found.message == message and "gpus.select" in found.hint
    assert ("dmesg" in found.hint) is (wanted > there)


def test_a_start_without_a_gpu_is_only_asked_how_many_it_has() -> None:
    """The driver's own version would be that of a machine that may have none."""
    nowhere = Inventory("", "", ())
    everything = "driver = '>=570'\nmig = 'off'\necc = 'no-pending'\npersistence = 'require'"
    assert look(everything, there=nowhere)[0] == Found()
    found = unmet(f"gpu_count = 8\n{everything}", there=nowhere)
    assert found.message == "require.gpu_count asks for 8 GPUs, but this start uses none"


def test_as_many_gpus_as_are_asked_for() -> None:
    assert look("gpu_count = 3", selected=inventory(4).gpus[:3])[0] == Found()


def test_an_instance_counts_as_one() -> None:
    parts = [instance(0, number) for number in range(3)]
    there = inventory(2)._replace(gpus=(gpu(0), *parts, gpu(1)))
    assert look("gpu_count = 3", there=there, selected=parts)[0] == Found()
    found = unmet("gpu_count = 2", there=there, selected=parts)
    assert found.message.startswith(
        "require.gpu_count asks for 2 GPUs, but 3 are selected of the 2 that NVML has, with 3 instances of MIG"
    )


# The version of the driver -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "has", "met"),
    [
        (">=570", "570.86.15", True),
        (">=570", "570", True),
        (">=570", "569.99.99", False),
        # As text, 1000 would come before 570, and 570.9 after 570.86.
        (">=570", "1000.1", True),
        (">=570.86", "570.9.10", False),
        (">570.86", "570.86.15", True),
        (">570.86.15", "570.86.15", False),
        ("<=570", "570.0.0", True),
        ("<=570", "570.0.1", False),
        ("<580", "570.86.15", True),
        ("<580", "580.0", False),
        ("==570", "570.0", True),
        ("==570.86.15", "570.86.15", True),
        ("==570", "570.86.15", False),
        ("!=570.86.10", "570.86.15", True),
        ("!=570.86.15", "570.86.15", False),
        (">=570.86, <580", "575.1", True),
        (">=570.86, <580", "580.1", False),
        (">=570.86, <580", "550.1", False),
        (">=1", "", False),
        ("!=1", "570.x", False),
        ("!=1", "570.86.15-custom", False),
        ("!=1", "570..1", False),
        ("!=1", "٥٧٠", False),
    ],
)
def test_the_version_of_the_driver_is_compared_by_its_numbers(asked: str, has: str, met: bool) -> None:
    there = inventory(1)._replace(driver=has)
    if met:
        assert look(f"driver = '{asked}'", there=there)[0] == Found()
        return
    found = unmet(f"driver = '{asked}'", there=there)
    assert (found.check, found.subject) == ("driver", asked)
    assert has in found.message and f"but require.driver asks for {asked}" in found.message and "reboot" in found.hint


# Modes ---------------------------------------------------------------------------------------------------------------


def test_the_modes_are_those_of_nvml() -> None:
    assert COMPUTE_MODES == {
        pynvml.NVML_COMPUTEMODE_DEFAULT: "default",
        pynvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD: "exclusive-thread",
        pynvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
        pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive-process",
    }


@pytest.mark.parametrize("wanted", ["default", "exclusive-process", "prohibited"])
@pytest.mark.parametrize("mode", [*COMPUTE_MODES, 4])
def test_the_compute_mode(wanted: str, mode: int) -> None:
    others = {index: {"compute_mode": Fact((mode,))} for index in range(4)}
    has = COMPUTE_MODES.get(mode, str(mode))
    if has == wanted:
        assert look(f"compute_mode = '{wanted}'", others)[0] == Found()
        return
    found = unmet(f"compute_mode = '{wanted}'", others)
    assert found.message == f"GPUs 0-3: compute mode is {has}, but require.compute_mode asks for {wanted}"
    assert found.hint == f"nvidia-smi -i 0,1,2,3 -c {wanted.upper().replace('-', '_')}"
    assert found.subject == ",".join(uuid(index) for index in range(4))


def test_each_gpu_is_named_with_what_it_has() -> None:
    others = {0: {"compute_mode": Fact((2,))}, 1: {"compute_mode": Fact((3,))}, 3: {"compute_mode": UNTOLD}}
    found = unmet("compute_mode = 'exclusive-process'", others)
    assert found.message.startswith(
        "GPU 0: compute mode is prohibited; GPU 2: compute mode is default;"
        " GPU 3: the driver does not tell the compute mode (Unknown Error),"
        " but require.compute_mode asks for exclusive-process"
    )
    assert found.subject == f"{uuid(0)},{uuid(2)},{uuid(3)}"
    assert "-i 0 -c" in found.hint and "-i 2 -c" in found.hint and "Xid" in found.hint


def test_persistence_that_is_required() -> None:
    assert look("persistence = 'require'")[0] == Found()
    found = unmet("persistence = 'require'", {2: {"persistence": Fact((0,))}})
    assert found.message == "GPU 2: persistence mode is off, but require.persistence asks for on"
    assert "nvidia-smi -i 2 -pm 1" in found.hint and "enable --now nvidia-persistenced" in found.hint


@pytest.mark.parametrize("fact", [Fact((0,)), UNTOLD, UNSUPPORTED, OUTDATED])
def test_persistence_that_is_only_told(fact: Fact) -> None:
    assert look("persistence = 'warn'")[0] == Found()
    found, _ = look("persistence = 'warn'", {1: {"persistence": fact}, 2: {"persistence": fact}})
    assert found.unmet == ()
    ((text, concerned),) = found.warnings
    assert text.startswith("GPUs 1-2: ") and "persistence mode" in text and [each.index for each in concerned] == [1, 2]


def test_what_is_only_told_hides_nothing() -> None:
    found, _ = look("persistence = 'warn'\nmig = 'off'", {0: {"persistence": Fact((0,)), "mig": Fact((1, 1))}})
    assert [each.check for each in found.unmet] == ["mig"] and len(found.warnings) == 1


@pytest.mark.parametrize(
    ("mode", "clause"),
    [
        (Fact((0, 0)), ""),
        (UNSUPPORTED, ""),
        (Fact((1, 1)), "MIG is on"),
        (Fact((1, 0)), "MIG is on, and off after the next reset"),
        (Fact((0, 1)), "MIG is off, and on after the next reset"),
        (UNTOLD, "the driver does not tell the MIG mode (Unknown Error)"),
        (OUTDATED, "this driver is too old to tell the MIG mode (Function Not Found)"),
    ],
)
def test_mig(mode: Fact, clause: str) -> None:
    if not clause:
        assert look("mig = 'off'", {3: {"mig": mode}})[0] == Found()
        return
    found = unmet("mig = 'off'", {3: {"mig": mode}})
    assert found.message == f"GPU 3: {clause}, but require.mig asks for off"
    assert mode.fault or found.hint.startswith("nvidia-smi -i 3 -mig 0")


@pytest.mark.parametrize("mode", [Fact((0, 0)), UNSUPPORTED])
def test_an_instance_that_is_selected_says_that_mig_is_on(mode: Fact) -> None:
    part = instance(1, 0)
    there = inventory(2)._replace(gpus=(gpu(0), gpu(1), part))
    found = unmet("mig = 'off'", {1: {"mig": mode}}, there=there, selected=[gpu(0), part])
    assert found.message == "GPU 1: MIG is on, but require.mig asks for off"


# Errors of the memory ------------------------------------------------------------------------------------------------

PENDING, FAILED, PAGES = Fact((0, 1, 1, 0)), Fact((0, 9, 0, 1)), Fact((1,))


@pytest.mark.parametrize(
    ("facts", "clause"),
    [
        ({"remapped_rows": PENDING}, "a row remapping is pending"),
        ({"remapped_rows": FAILED}, "a row remapping has failed"),
        ({"remapped_rows": UNSUPPORTED, "retired_pages": PAGES}, "retired pages are pending"),
        ({"uncorrected_errors": Fact((1,))}, "1 uncorrected error since the last reset"),
        (
            {"remapped_rows": PENDING, "uncorrected_errors": Fact((2,))},
            "a row remapping is pending and 2 uncorrected errors since the last reset",
        ),
        ({"remapped_rows": UNTOLD}, "the driver does not tell the row remappings (Unknown Error)"),
        ({"retired_pages": UNTOLD}, "the driver does not tell the retired pages (Unknown Error)"),
        ({"uncorrected_errors": UNTOLD}, "the driver does not tell the uncorrected errors (Unknown Error)"),
        ({"remapped_rows": OUTDATED}, "this driver is too old to tell the row remappings (Function Not Found)"),
        # What is known comes before what is not.
        ({"remapped_rows": UNTOLD, "uncorrected_errors": Fact((1,))}, "1 uncorrected error since the last reset"),
        (
            {"remapped_rows": UNSUPPORTED, "mig": Fact((1, 1))},
            "the row remappings cannot be told while MIG is on",
        ),
        # ECC is off, or there is none.
        (dict.fromkeys(("remapped_rows", "retired_pages", "uncorrected_errors", "mig"), UNSUPPORTED), ""),
        ({"remapped_rows": UNSUPPORTED, "retired_pages": Fact((0,))}, ""),
        ({"mig": Fact((1, 1))}, ""),
        ({"mig": UNTOLD}, ""),
    ],
)
def test_errors_of_the_memory(facts: Mapping[str, Fact], clause: str) -> None:
    if not clause:
        assert look("ecc = 'no-pending'", {2: facts})[0] == Found()
        return
    found = unmet("ecc = 'no-pending'", {2: facts})
    assert found.message == f"GPU 2: {clause}, but require.ecc asks for no-pending" and found.subject == uuid(2)
    if "failed" in clause:
        assert "replaced" in found.hint and "-i 2 " in found.hint
    elif "tell" not in clause and "told" not in clause:
        assert "nvidia-smi --gpu-reset -i 2" in found.hint and "reboot" in found.hint


def test_many_gpus_with_the_same_are_named_together() -> None:
    found = unmet("ecc = 'no-pending'", {index: {"remapped_rows": PENDING} for index in (0, 1, 3)})
    assert found.message.startswith("GPUs 0-1,3: a row remapping is pending")


# Both sides together -------------------------------------------------------------------------------------------------


class Silent:
    def facts(self, *_: Any) -> Any:
        raise DriverError("the NVIDIA driver did not answer a query within 15 s")


def test_a_driver_that_does_not_answer_is_no_unmet_requirement() -> None:
    driver: Any = Silent()
    with pytest.raises(DriverError):
        driverfacts.look(asked_for("mig = 'off'"), driver, inventory(), inventory().gpus, 15.0)


def test_what_is_only_told_is_handed_on_beside_what_is_not_met() -> None:
    host: Any = SimpleNamespace(driver=Told({0: {"persistence": Fact((0,)), "mig": Fact((1, 1))}}), ask_files=None)
    warned: list[tuple[str, Sequence[Gpu]]] = []
    found = require.before(
        asked_for("persistence = 'warn'\nmig = 'off'"),
        host,
        account=lambda: pytest.fail("no file is asked for"),
        inventory=inventory(1),
        gpus=inventory(1).gpus,
        until=0.0,
        timeout=15.0,
        warn=lambda text, gpus: warned.append((text, gpus)),
    )
    assert [each.check for each in found] == ["mig"]
    assert [[each.index for each in gpus] for _, gpus in warned] == [[0]]
