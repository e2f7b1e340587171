"""Who is tied to which GPU: what NVML lists, joined with who has which device nodes. Pure.

NVML says who has memory on a GPU; /proc says who has its node open or mapped. Neither is enough: CUDA opens every node
that it can see, and NVML may list the dead, or PIDs of another namespace.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Optional

from .model import Gpu, Reading


class Nodes(NamedTuple):
    """Device numbers: for each selected GPU those that a process must have to have the GPU (an instance of MIG has a
    capability node beside its GPU's), and that of nvidia-uvm, which CUDA opens too and a mere client of NVML does not;
    None where this machine has no such node."""

    gpus: Mapping[str, frozenset[int]]
    uvm: Optional[int] = None

    @property
    def all(self) -> frozenset[int]:
        uvm = frozenset() if self.uvm is None else frozenset({self.uvm})
        return uvm.union(*self.gpus.values())


class Tie(NamedTuple):
    """One process's ties, by the UUIDs of GPUs; ``listed`` also has GPUs that are not selected."""

    listed: Mapping[str, Optional[int]] = {}
    kinds: Mapping[str, frozenset[str]] = {}
    opened: frozenset[str] = frozenset()
    mapped: frozenset[str] = frozenset()
    #: It has everything open that CUDA opens.
    cuda: bool = True


#: PID -> device numbers.
Seen = Mapping[int, frozenset[int]]


def tie(
    gpus: Sequence[Gpu],
    readings: Mapping[str, Reading],
    opened: Seen,
    mapped: Seen,
    nodes: Nodes,
    *,
    pids_ours: bool,
    beside: Collection[int] = (),
) -> dict[int, Tie]:
    """Ties by PID of everybody who may hold a selected GPU.

    A process that NVML lists on other GPUs only is no holder of ours, whatever it has open. A list that is not to be
    believed, or that is of another PID namespace, speaks of nobody and clears nobody. ``beside`` are PIDs of processes
    that may be ended whatever they hold. The other clients of an MPS server are named too, wherever they use it: they
    may go down with one that is ended.
    """
    listed: dict[int, dict[str, Optional[int]]] = {}
    kinds: dict[int, dict[str, frozenset[str]]] = {}
    for uuid, reading in readings.items():
        if pids_ours and not reading.distrust:
            for entry in reading.listed:
                listed.setdefault(entry.pid, {})[uuid] = entry.bytes
                kinds.setdefault(entry.pid, {})[uuid] = entry.kinds
    ours = {gpu.uuid for gpu in gpus}
    found = {}
    for pid in {*listed, *opened, *mapped}:
        if pid in listed and not ours & listed[pid].keys():
            continue
        fds, maps = opened.get(pid, frozenset()), mapped.get(pid, frozenset())
        one = Tie(
            listed=listed.get(pid, {}),
            kinds=kinds.get(pid, {}),
            opened=frozenset(uuid for uuid, needed in nodes.gpus.items() if needed & fds and needed <= fds | maps),
            mapped=frozenset(uuid for uuid, needed in nodes.gpus.items() if needed & maps and needed <= fds | maps),
            cuda=nodes.uvm is None or nodes.uvm in fds | maps,
        )
        if one.listed or one.opened or one.mapped:
            found[pid] = one
    shared = {uuid for pid in {*found, *beside} for uuid in _mps(kinds.get(pid, {}))}
    for pid in kinds.keys() - found.keys():
        if shared & _mps(kinds[pid]):
            found[pid] = Tie(kinds=kinds[pid])
    return found


def _mps(kinds: Mapping[str, frozenset[str]]) -> set[str]:
    """The GPUs on which this is a client of an MPS server."""
    return {uuid for uuid, words in kinds.items() if "mps" in words}


def dead(
    gpus: Sequence[Gpu], readings: Mapping[str, Reading], alive: frozenset[int], *, pids_ours: bool
) -> dict[str, tuple[int, ...]]:
    """PIDs that NVML lists on each selected GPU and that are not alive, where its list is to be believed."""
    found = {}
    for gpu in gpus:
        reading = readings[gpu.uuid]
        gone = tuple(entry.pid for entry in reading.listed if entry.pid not in alive)
        if gone and pids_ours and not reading.distrust:
            found[gpu.uuid] = gone
    return found
