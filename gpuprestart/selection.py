"""Which GPUs a run is about: from the policy, --gpus or the unit's environment, against what NVML counts.

Resolves names as CUDA does, but never to silently fewer: an entry that does not resolve ends the run. Knows nothing of
memory and holders, and does not care whether a GPU can be measured; a lost one that is named is handed on as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional, Union

from .model import Gpu, Inventory, Outcome, Refusal

_CUDA = "CUDA_VISIBLE_DEVICES"
_NVIDIA = "NVIDIA_VISIBLE_DEVICES"

#: What of an environment selects GPUs.
VARIABLES = (_CUDA, _NVIDIA)
#: Set to one of these, either variable hides every GPU on purpose.
_NOTHING = ("", "NoDevFiles", "none", "void")
#: Common after a comma, and what they may hide from CUDA can only be fewer GPUs than we look at.
_BLANKS = " \t"

#: Neither 01 nor +1 nor 1x: where CUDA and people could read a number differently, nobody is asked to guess.
_NUMBER = r"0|[1-9][0-9]*"
_UUID = r"(?ai)(GPU|MIG)-[0-9a-z][0-9a-z/-]*"
_PCI = r"(?ai)(?:([0-9a-f]{4}|[0-9a-f]{8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])"


class Selection(NamedTuple):
    """The GPUs in the order of their NVML indices, and where the choice comes from, in words."""

    gpus: tuple[Gpu, ...]
    source: str

    @property
    def empty(self) -> bool:
        """The unit uses no GPU, and said so."""
        return not self.gpus


def select(
    policy_select: Union[str, Sequence[str]],
    inventory: Inventory,
    environment: Optional[Mapping[str, str]],
    override: Optional[Sequence[str]] = None,
    origin: str = "",
) -> Selection:
    """What ``--gpus`` (``override``) says, else what the policy says at ``origin``, which may be: ask the unit.

    ``environment`` is the unit's, None where there is no unit.
    """
    words = override if override is not None else policy_select
    words = (words,) if isinstance(words, str) else tuple(words)
    place = "--gpus" if override is not None else f"{origin}: gpus.select" if origin else "gpus.select"
    names = _Names(place, inventory)
    if words == ("unit",):
        return _of_unit(inventory, environment)
    if words == ("all",):
        return _all(inventory, f"all GPUs, as {place} says")
    if not words or words in (("none",), ("void",)):
        said = f"{words[0]!r} " if words else ""
        raise names.refusal(f"{said}names no GPU", "name one at least, or have it say all or unit")
    return Selection(_in_order(inventory, [names.gpu(word) for word in words]), f"{place} {_said(','.join(words))}")


def _of_unit(inventory: Inventory, environment: Optional[Mapping[str, str]]) -> Selection:
    if environment is None:
        return _all(inventory, "all GPUs, there is no unit to ask")
    # CUDA looks at its own variable only; the other one speaks to container runtimes.
    for variable in (_CUDA, _NVIDIA):
        if variable not in environment:
            continue
        value = environment[variable]
        source = f"{variable}={_said(value)} of the unit"
        if value in _NOTHING:
            return Selection((), source)
        if variable == _CUDA:
            return Selection(_in_order(inventory, _visible_to_cuda(value, inventory, environment)), source)
        if value == "all":
            return _all(inventory, source)
        names = _Names(variable, inventory)
        return Selection(_in_order(inventory, [names.gpu(entry) for entry in value.split(",")]), source)
    return _all(inventory, f"all GPUs, the unit sets neither {_CUDA} nor {_NVIDIA}")


def _visible_to_cuda(value: str, inventory: Inventory, environment: Mapping[str, str]) -> list[Gpu]:
    names = _Names(_CUDA, inventory)
    gpus: list[Gpu] = []
    for entry in (word.strip(_BLANKS) for word in value.split(",")):
        if entry == "-1":
            break
        if entry in ("all", "unit"):
            raise names.refusal(f"{entry!r} is nothing that CUDA understands", "leave it unset for all GPUs")
        if re.fullmatch(_PCI, entry):
            raise names.refusal(f"{entry!r} is nothing that CUDA understands", "use the UUID")
        gpu = names.gpu(entry)
        if re.fullmatch(_NUMBER, entry) and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            _refuse_unlike(names, entry, inventory)
        if gpu in gpus:
            raise names.refusal(f"{_said(entry)} names {gpu} twice, for which CUDA shows no GPU at all", "name it once")
        gpus.append(gpu)
    return gpus


def _refuse_unlike(names: _Names, entry: str, inventory: Inventory) -> None:
    """CUDA numbers GPUs by speed; only among equals is that the order of NVML. A lost GPU may have no name to tell."""
    kinds = {gpu.name for gpu in inventory.gpus if gpu.parent is None and (gpu.name or gpu.fault is None)}
    if len(kinds) > 1:
        raise names.refusal(
            f"{entry!r} may be any GPU: CUDA numbers them by speed, and these are not all alike",
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID in the unit, or use UUIDs",
        )


def _all(inventory: Inventory, source: str) -> Selection:
    gpus = [gpu for gpu in inventory.gpus if gpu.parent is None]
    if not gpus:
        # Having nothing to prove is not a proof: with a driver and no GPU, something has fallen off.
        hints = ["look for NVRM and Xid in dmesg, and whether nvidia-smi -L lists any"]
        raise Refusal(Outcome.UNKNOWN, f"NVML counts no GPU at all, and this start uses {source}", hints)
    return Selection(_in_order(inventory, gpus), source)


def _in_order(inventory: Inventory, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """In the order of the inventory, each once."""
    return tuple(gpu for gpu in inventory.gpus if gpu in gpus)


def _said(text: str) -> str:
    """The text, fit for a sentence: bounded, and without what could pose as another line."""
    short = text if len(text) <= 200 else text[:199] + "…"
    return short if short.isprintable() else ascii(short)


def _address(match: re.Match[str]) -> tuple[int, ...]:
    return tuple(int(part or "0", 16) for part in match.groups())


class _Names(NamedTuple):
    """Resolves the entries of one list; ``place`` is the variable, option or key that the list stands in."""

    place: str
    inventory: Inventory

    def refusal(self, what: str, remedy: str, outcome: Outcome = Outcome.CONFIG) -> Refusal:
        return Refusal(outcome, f"{self.place}: {what}", [remedy, self._present()])

    def _present(self) -> str:
        gpus = self.inventory.gpus
        shown = [" ".join(filter(None, (str(gpu), gpu.uuid or "(lost)", gpu.pci, gpu.name))) for gpu in gpus]
        return f"GPUs here: {'; '.join(shown[:32]) or 'none'}{' …' if len(shown) > 32 else ''}"

    def gpu(self, word: str) -> Gpu:
        entry = word.strip(_BLANKS)
        if re.fullmatch(_NUMBER, entry):
            return self._by_index(entry)
        if re.fullmatch(_UUID, entry):
            return self._by_uuid(entry)
        if (match := re.fullmatch(_PCI, entry)) is not None:
            return self._by_address(entry, _address(match))
        if entry in ("all", "unit", "none", "void"):
            raise self.refusal(f"{entry!r} stands beside others", "it must stand alone")
        raise self.refusal(
            f"{entry[:60]!r} names no GPU" if entry else "one entry is empty",
            "write numbers without sign or leading zeros, or UUIDs with their GPU- or MIG-, between single commas",
        )

    def _by_index(self, entry: str) -> Gpu:
        whole = [gpu for gpu in self.inventory.gpus if gpu.parent is None]
        # Compared as text: a number of ten thousand digits need not become one.
        for gpu in whole:
            if str(gpu.index) == entry:
                return gpu
        raise self.refusal(
            f"GPU {entry[:20]} is not there, NVML counts {len(whole)}",
            f"{'indices end at ' + str(whole[-1].index) if whole else 'there is none'}; dmesg (Xid) tells of lost GPUs",
        )

    def _by_uuid(self, entry: str) -> Gpu:
        gpus = self.inventory.gpus
        exact = [gpu for gpu in gpus if gpu.uuid.lower() == entry.lower()]
        found = exact or [gpu for gpu in gpus if gpu.uuid.lower().startswith(entry.lower())]
        if len(found) == 1:
            return found[0]
        if found:
            raise self.refusal(f"{entry[:60]} is the beginning of {len(found)} UUIDs", "give more of its characters")
        # A lost GPU may not tell its UUID, and certainly not its instances.
        instance = entry[:3].upper() == "MIG"
        self._perhaps_lost(entry, [gpu for gpu in gpus if gpu.fault and (instance or not gpu.uuid)])
        raise self.refusal(f"no GPU here has the UUID {entry[:60]}", "nvidia-smi -L lists the UUIDs that are there")

    def _by_address(self, entry: str, address: tuple[int, ...]) -> Gpu:
        for gpu in self.inventory.gpus:
            match = re.fullmatch(_PCI, gpu.pci)
            if gpu.parent is None and match is not None and _address(match) == address:
                return gpu
        self._perhaps_lost(entry, [gpu for gpu in self.inventory.gpus if gpu.fault and not gpu.pci])
        raise self.refusal(f"no GPU is at {entry}", "nvidia-smi --query-gpu=pci.bus_id --format=csv lists them")

    def _perhaps_lost(self, entry: str, lost: Sequence[Gpu]) -> None:
        if lost:
            names = ", ".join(f"{gpu} ({gpu.fault})" for gpu in lost)
            raise self.refusal(
                f"{entry[:60]} is none of the GPUs that answer, it may be {names}",
                "look for Xid in dmesg; reset that GPU, else reboot",
                Outcome.UNKNOWN,
            )
