"""What the driver says of the GPUs besides their memory, held against what the policy asks of them.

Only what is asked for is asked of the driver, of all selected GPUs at once; in place of an instance of MIG, its GPU is
asked. What the driver cannot tell counts as not met.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Callable, NamedTuple, Optional

from .host.nvml import LOOK, Driver, DriverError, Fact
from .model import Gpu, Inventory, Unmet
from .policy import Require
from .report import indices

#: nvmlComputeMode_t (nvml.h) in the words of the policy; nvidia-smi has the same in capitals.
COMPUTE_MODES = {0: "default", 1: "exclusive-thread", 2: "prohibited", 3: "exclusive-process"}

#: NVML keeps what the policy calls ``ecc`` in three places, and whether they can be asked depends on MIG.
ECC = ("remapped_rows", "retired_pages", "uncorrected_errors", "mig")

RESET = "nvidia-smi --gpu-reset -i {gpus} once nothing uses it, else reboot"
NEWER = "install a newer driver, or take require.{key} out of the policy"

Facts = Mapping[str, Fact]

#: What is not as it should be, as a clause, and what to do about it; ``{gpus}`` stands there for nvidia-smi's -i.
Fault = tuple[str, str]


class Found(NamedTuple):
    """``warnings`` is what the policy only wants to be told of: a sentence, and the GPUs that it is about."""

    unmet: tuple[Unmet, ...] = ()
    warnings: tuple[tuple[str, tuple[Gpu, ...]], ...] = ()


def look(require: Require, driver: Driver, inventory: Inventory, gpus: Sequence[Gpu], timeout: float) -> Found:
    """What is not as the policy asks on the selected GPUs. Raises DriverError."""
    found = _gpu_count(require.gpu_count, inventory, gpus)
    if not gpus:
        # Such a start has nothing to do with the driver, which may not even be there.
        return Found(tuple(found))
    found += _driver(require, inventory)
    warnings = []
    divided = {gpu.parent for gpu in gpus if gpu.parent is not None}
    whole = [gpu for gpu in inventory.gpus if gpu.parent is None and (gpu in gpus or gpu.uuid in divided)]
    names = _names(require)
    facts = driver.facts(whole, names, timeout) if names else {}
    lost = [gpu for gpu, known in facts.items() if gpu.fault or any(fact.lost for fact in known.values())]
    if lost:
        # Nothing can be measured there, whatever else is asked for.
        raise DriverError(f"{_named(lost)}: {lost[0].fault or 'GPU is lost'}", remedy=LOOK)
    for key, wanted, judge in _judges(require, divided):
        faults = _faults(judge, facts)
        if not faults:
            continue
        said = "; ".join(f"{_named(those)}: {clause}" for (clause, _), those in faults.items())
        message = f"{said}, but require.{key} asks for {wanted}"
        hint = "; ".join(remedy.format(gpus=_numbers(those), key=key) for (_, remedy), those in faults.items())
        concerned = tuple(gpu for gpu in whole if any(gpu in those for those in faults.values()))
        if getattr(require, key) == "warn":
            warnings.append((f"{message}: {hint}", concerned))
        else:
            subject = ",".join(gpu.uuid or str(gpu) for gpu in concerned)
            found.append(Unmet(key, subject, message, hint))
    return Found(tuple(found), tuple(warnings))


# What the inventory tells --------------------------------------------------------------------------------------------


def _gpu_count(wanted: int, inventory: Inventory, gpus: Sequence[Gpu]) -> list[Unmet]:
    """An instance of MIG that is selected counts as one, as it does for the server."""
    if wanted in (0, len(gpus)):
        return []
    whole = [gpu for gpu in inventory.gpus if gpu.parent is None]
    instances = len(inventory.gpus) - len(whole)
    divided = f", with {instances} instance{'s' if instances > 1 else ''} of MIG" if instances else ""
    are = "is" if len(gpus) == 1 else "are"
    selected = (
        f"{len(gpus)} {are} selected of the {len(whole)} that NVML has{divided}" if gpus else "this start uses none"
    )
    message = f"require.gpu_count asks for {wanted} GPU{'s' if wanted > 1 else ''}, but {selected}"
    hint = "correct what selects them: gpus.select, or CUDA_VISIBLE_DEVICES of the unit"
    if gpus and wanted > len(whole) + instances:
        hint = f"nvidia-smi -L and dmesg (Xid) tell of one that is missing; else {hint}"
    return [Unmet("gpu_count", str(wanted), message, hint)]


_COMPARISONS: Mapping[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": lambda is_, asked: is_ >= asked,
    "<=": lambda is_, asked: is_ <= asked,
    "==": lambda is_, asked: is_ == asked,
    "!=": lambda is_, asked: is_ != asked,
    ">": lambda is_, asked: is_ > asked,
    "<": lambda is_, asked: is_ < asked,
}


def _driver(require: Require, inventory: Inventory) -> list[Unmet]:
    if not require.driver:
        return []
    asked = ", ".join(operator + ".".join(map(str, numbers)) for operator, numbers in require.driver)
    hint = f"install a driver {asked}, and reboot"
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})*", inventory.driver, re.ASCII) is None:
        what = f"the driver calls itself {inventory.driver[:60]!r}, which is no version"
        return [Unmet("driver", asked, f"{what}, but require.driver asks for {asked}", hint)]
    version = tuple(map(int, inventory.driver.split(".")))
    if all(_COMPARISONS[operator](*_alike(version, numbers)) for operator, numbers in require.driver):
        return []
    return [Unmet("driver", asked, f"the driver is {inventory.driver}, but require.driver asks for {asked}", hint)]


def _alike(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Both with as many parts: 570 is 570.0.0."""
    parts = max(len(one), len(other))
    return one + (0,) * (parts - len(one)), other + (0,) * (parts - len(other))


# What each GPU tells -------------------------------------------------------------------------------------------------

Judge = Callable[[Gpu, Facts], Optional[Fault]]


def _names(require: Require) -> list[str]:
    """What has to be asked of the driver."""
    asked = [key for key in ("compute_mode", "persistence", "mig") if getattr(require, key) != "any"]
    return [*dict.fromkeys([*asked, *(ECC if require.ecc != "any" else ())])]


def _judges(require: Require, divided: set[str]) -> list[tuple[str, str, Judge]]:
    """Each key that is asked for, with what it asks for and who judges it. ``divided`` are the UUIDs of GPUs whose
    instances are selected."""

    def compute_mode(gpu: Gpu, facts: Facts) -> Optional[Fault]:
        mode = facts["compute_mode"]
        if mode.fault:
            return _untold("the compute mode", mode)
        word = COMPUTE_MODES.get(mode.values[0], str(mode.values[0]))
        remedy = f"nvidia-smi -i {{gpus}} -c {require.compute_mode.upper().replace('-', '_')}"
        return None if word == require.compute_mode else (f"compute mode is {word}", remedy)

    def mig(gpu: Gpu, facts: Facts) -> Optional[Fault]:
        return ("MIG is on", MIG_OFF) if gpu.uuid in divided else _mig(facts["mig"])

    every: list[tuple[str, str, Judge]] = [
        ("compute_mode", require.compute_mode, compute_mode),
        ("persistence", "on", _persistence),
        ("ecc", require.ecc, _ecc),
        ("mig", require.mig, mig),
    ]
    return [each for each in every if getattr(require, each[0]) != "any"]


def _persistence(gpu: Gpu, facts: Facts) -> Optional[Fault]:
    mode = facts["persistence"]
    if mode.fault:
        return _untold("the persistence mode", mode)
    remedy = "nvidia-smi -i {gpus} -pm 1, or systemctl enable --now nvidia-persistenced, which keeps it on"
    return None if mode.values[0] else ("persistence mode is off", remedy)


MIG_OFF = "nvidia-smi -i {gpus} -mig 0 once nothing uses it"


def _mig(mode: Fact) -> Optional[Fault]:
    if mode.unsupported:
        return None
    if mode.fault:
        return _untold("the MIG mode", mode)
    now, next_ = ("on" if value else "off" for value in mode.values)
    if (now, next_) == ("off", "off"):
        return None
    return (f"MIG is {now}" + (f", and {next_} after the next reset" if now != next_ else ""), MIG_OFF)


def _ecc(gpu: Gpu, facts: Facts) -> Optional[Fault]:
    """Consumer GPUs, and all with ECC turned off, support none of it; each generation keeps it in other places."""
    rows, pages, errors, mig = (facts[name] for name in ECC)
    _, _, pending, failed = rows.values or (0, 0, 0, 0)
    count = sum(errors.values)
    clauses = [
        *(["a row remapping has failed"] if failed else []),
        *(["a row remapping is pending"] if pending else []),
        *(["retired pages are pending"] if any(pages.values) else []),
        *([f"{count} uncorrected error{'s' if count > 1 else ''} since the last reset"] if count else []),
    ]
    if clauses:
        replace = "nvidia-smi -q -d ROW_REMAPPER -i {gpus} tells more: a GPU that cannot remap a row is to be replaced"
        return " and ".join(clauses), replace if failed else RESET
    for what, fact in (("row remappings", rows), ("retired pages", pages), ("uncorrected errors", errors)):
        if fact.fault and not fact.unsupported:
            return _untold(f"the {what}", fact)
    # All GPUs that can do MIG remap rows, and do not tell of it while MIG is on (nvml.h, nvmlDeviceGetRemappedRows).
    if rows.unsupported and any(mig.values[:1]):
        return "the row remappings cannot be told while MIG is on", "leave require.ecc out for GPUs with instances"
    return None


def _untold(what: str, fact: Fact) -> Fault:
    """What cannot be told, with NVML's own word for why."""
    if fact.outdated:
        return f"this driver is too old to tell {what} ({fact.fault})", NEWER
    return f"the driver does not tell {what} ({fact.fault})", LOOK


def _faults(judge: Judge, facts: Mapping[Gpu, Facts]) -> dict[Fault, list[Gpu]]:
    """What is wrong, each with the GPUs of which it is so."""
    found: dict[Fault, list[Gpu]] = {}
    for gpu, known in facts.items():
        fault = judge(gpu, known)
        if fault is not None:
            found.setdefault(fault, []).append(gpu)
    return found


def _named(gpus: Sequence[Gpu]) -> str:
    return f"GPU{'s' if len(gpus) > 1 else ''} {indices(gpu.index for gpu in gpus)}"


def _numbers(gpus: Sequence[Gpu]) -> str:
    """As nvidia-smi takes them; it counts as NVML does."""
    return ",".join(str(gpu.index) for gpu in gpus)
