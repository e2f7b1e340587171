# SPDX-License-Identifier: Apache-2.0
"""The books of the simulated GPUs: which there are, who is charged for memory on them, which faults are set.

Knows sums and the text form that nvml.c reads.  Does no I/O, opens no process and has no clock: simgpu.py
tells it what happened and when.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20
MAX_GPUS = 16
MAX_INSTANCES = 7
KINDS = ("compute", "graphics", "mps")
GPU_FLAGS = (
    "missing",
    "memory",
    "memory_v2",
    "persistence",
    "ecc",
    "remap_pending",
    "remap_failed",
    "retired_pending",
)

# The first eight are a DGX H100's, the rest only have to differ.
BUSES = (0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF, 0x06, 0x2A, 0x38, 0x7B, 0x85, 0xA9, 0xB4, 0xE7)
NAMESPACE = uuid.UUID("6ba7b812-9dad-11d1-80b4-00c04fd430c8")

CODES = {
    "UNINITIALIZED": 1,
    "INVALID_ARGUMENT": 2,
    "NOT_SUPPORTED": 3,
    "NO_PERMISSION": 4,
    "NOT_FOUND": 6,
    "INSUFFICIENT_SIZE": 7,
    "INSUFFICIENT_POWER": 8,
    "DRIVER_NOT_LOADED": 9,
    "TIMEOUT": 10,
    "IRQ_ISSUE": 11,
    "LIBRARY_NOT_FOUND": 12,
    "FUNCTION_NOT_FOUND": 13,
    "CORRUPTED_INFOROM": 14,
    "GPU_IS_LOST": 15,
    "RESET_REQUIRED": 16,
    "OPERATING_SYSTEM": 17,
    "LIB_RM_VERSION_MISMATCH": 18,
    "IN_USE": 19,
    "MEMORY": 20,
    "NO_DATA": 21,
    "INSUFFICIENT_RESOURCES": 23,
    "ARGUMENT_VERSION_MISMATCH": 25,
    "NOT_READY": 27,
    "GPU_NOT_FOUND": 28,
    "INVALID_STATE": 29,
    "UNKNOWN": 999,
}

# A process is a pid and its start time in clock ticks: a pid alone may come to mean somebody else.
Identity = tuple[int, int]


def made_up_uuid(prefix: str, *what: object) -> str:
    """The same for the same GPU in every run, so that tests and transcripts can name it."""
    return prefix + str(uuid.uuid5(NAMESPACE, "simgpu " + " ".join(map(str, what))))


@dataclass
class Instance:
    """A MIG instance; sizes in bytes, "used" beside what is allocated on it."""

    number: int
    uuid: str
    name: str
    gi: int
    ci: int
    slices: int
    total: int
    reserved: int = 0
    baseline: int = 0
    used: int | None = None
    free: int | None = None


@dataclass
class Gpu:
    """What a GPU is and how it misbehaves.  used and free, if set, are told instead of the sums."""

    slot: int
    uuid: str
    name: str
    minor: int
    pci: str
    total: int
    reserved: int
    baseline: int
    util: int = 0
    mem_util: int = 0
    missing: bool = False
    lost: str = "no"
    memory: bool = True
    memory_v2: bool = True
    mig: str = "off"
    mig_next: str = "same"
    compute_mode: int = 0
    persistence: bool = True
    ecc: bool = True
    remap_pending: bool = False
    remap_failed: bool = False
    retired_pending: bool = False
    uncorrected: int = 0
    arch: int = 9
    bus_type: int = 2
    addressing: int = 0
    cc: str = "9.0"
    used: int | None = None
    free: int | None = None
    instances: list[Instance] = field(default_factory=list)


@dataclass
class Allocation:
    """Memory charged on a GPU, and how NVML tells of it.

    It is charged while one of owners lives, and then until it is released.  origin is "process", "leak"
    (charged to nobody) or "ghost" (listed under a pid, held by nobody).
    """

    id: int
    origin: str
    gpu: int
    instance: int | None
    bytes: int
    kinds: tuple[str, ...]
    first: Identity | None = None
    owners: list[Identity] = field(default_factory=list)
    na: bool = False
    list_pid: int | None = None
    list_bytes: int | None = None
    keep_listed: bool = False
    release_delay: float | None = 0.0  # None: never
    grow: int = 0
    grow_every: float = 0.1
    grow_max: int | None = None
    heir: int | None = None
    heir_after: float = 0.0
    heir_kinds: tuple[str, ...] = ()
    gone: float | None = None  # CLOCK_BOOTTIME at which the last owner was gone

    def listed(self) -> bool:
        """Whether NVML's lists show it: a driver forgets a process's records when it dies, mostly."""
        return bool(self.kinds) and (self.origin == "ghost" or self.keep_listed or self.first in self.owners)


@dataclass(frozen=True)
class Fault:
    id: int
    kind: str  # error, delay, hang or crash
    function: str
    target: str
    argument: str = ""

    def line(self) -> str:
        return f"{self.kind} {self.function} {self.target} {self.argument}".rstrip()


@dataclass
class Books:
    driver: str = "550.54.15"
    nvml: str = "12.550.54.15"
    cuda: int = 12040
    nodes: bool = True
    release_delay: float | None = 0.2
    gpus: dict[int, Gpu] = field(default_factory=dict)  # by slot, in the order of NVML's indices
    allocations: dict[int, Allocation] = field(default_factory=dict)
    faults: dict[int, Fault] = field(default_factory=dict)
    last_id: int = 0

    def next_id(self) -> int:
        self.last_id += 1
        return self.last_id

    def charged(self, gpu: int, instance: int | None = None) -> int:
        """Bytes allocated on a GPU, its instances included, or on one instance."""
        return sum(
            a.bytes for a in self.allocations.values() if a.gpu == gpu and (instance is None or a.instance == instance)
        )

    def used(self, gpu: Gpu) -> int:
        return gpu.used if gpu.used is not None else gpu.baseline + self.charged(gpu.slot)

    def free(self, gpu: Gpu) -> int:
        return gpu.free if gpu.free is not None else max(0, gpu.total - gpu.reserved - self.used(gpu))

    def room(self, gpu: int, instance: int | None) -> int:
        """Bytes that can still be allocated there, whatever NVML is told to say."""
        whole = self.gpus[gpu]
        room = whole.total - whole.reserved - whole.baseline - self.charged(gpu)
        if instance is not None:
            part = whole.instances[instance]
            room = min(room, part.total - part.reserved - part.baseline - self.charged(gpu, instance))
        return room

    def _lines(self) -> Iterator[str]:
        yield "simgpu 1"
        yield f"driver {self.driver}"
        yield f"nvml {self.nvml}"
        yield f"cuda {self.cuda}"
        yield f"nodes {int(self.nodes)}"
        for fault in self.faults.values():
            yield fault.line()
        for gpu in self.gpus.values():
            yield f"gpu {gpu.slot}"
            for key in (
                "uuid",
                "name",
                "pci",
                "minor",
                "lost",
                "mig",
                "mig_next",
                "compute_mode",
                "uncorrected",
                "arch",
                "bus_type",
                "addressing",
                "cc",
                "util",
                "mem_util",
                "total",
                "reserved",
            ):
                yield f"{key} {getattr(gpu, key)}"
            for key in GPU_FLAGS:
                yield f"{key} {int(getattr(gpu, key))}"
            yield f"used {self.used(gpu)}"
            yield f"free {self.free(gpu)}"
            yield from self._processes(gpu.slot, None)
            for part in gpu.instances:
                used = part.baseline + self.charged(gpu.slot, part.number) if part.used is None else part.used
                free = max(0, part.total - part.reserved - used) if part.free is None else part.free
                yield f"instance {part.number}"
                for key in ("uuid", "name", "gi", "ci", "slices", "total", "reserved"):
                    yield f"{key} {getattr(part, key)}"
                yield f"used {used}"
                yield f"free {free}"
                yield from self._processes(gpu.slot, part.number)

    def _processes(self, gpu: int, instance: int | None) -> Iterator[str]:
        for a in self.allocations.values():
            if (a.gpu, a.instance) == (gpu, instance) and a.listed():
                pid = a.list_pid if a.list_pid is not None else a.first[0] if a.first else 0
                size = a.bytes if a.list_bytes is None else a.list_bytes
                for kind in a.kinds:
                    yield f"proc {kind} {pid} {'na' if a.na else size}"

    def text(self) -> str:
        """The state file.  Every line is one fact, so a value with a newline must not get this far."""
        return "".join(line + "\n" for line in self._lines())

    def truth(self) -> dict[str, Any]:
        """Everything, for tests that compare a verdict with what is so."""
        gpus = []
        for index, gpu in enumerate(g for g in self.gpus.values()):
            one = dataclasses.asdict(gpu)
            one.update(
                order=index,
                used_bytes=self.used(gpu),
                free_bytes=self.free(gpu),
                charged_bytes=self.charged(gpu.slot),
            )
            gpus.append(one)
        return {
            "driver": self.driver,
            "nvml": self.nvml,
            "release_delay": "never" if self.release_delay is None else self.release_delay,
            "gpus": gpus,
            "allocations": [
                dict(dataclasses.asdict(a), listed=a.listed(), pid=a.first[0] if a.first else None)
                for a in self.allocations.values()
            ],
            "faults": [dataclasses.asdict(f) for f in self.faults.values()],
        }


def model_gpus(count: int, *, minors: list[int] | None = None) -> dict[int, Gpu]:
    """A node of so many H100s, all idle."""
    return {
        slot: Gpu(
            slot=slot,
            uuid=made_up_uuid("GPU-", slot),
            name="NVIDIA H100 80GB HBM3",
            minor=slot if minors is None else minors[slot],
            pci=f"00000000:{BUSES[slot]:02X}:00.0",
            total=81559 * MIB,
            reserved=904 * MIB,
            baseline=3 * MIB,
        )
        for slot in range(count)
    }


def make_instances(gpu: Gpu, slices: list[int]) -> list[Instance]:
    """MIG instances of so many compute slices each; a slice comes with an eighth of the memory."""
    parts = []
    for number, width in enumerate(slices):
        total = gpu.total // 8 * width
        parts.append(
            Instance(
                number=number,
                uuid=made_up_uuid("MIG-", gpu.slot, number),
                name=f"{gpu.name} MIG {width}g.{round(total / (1 << 30))}gb",
                gi=number + 1,
                ci=0,
                slices=width,
                total=total,
            )
        )
    return parts
