"""What the NVIDIA driver says, through nvidia-ml-py in a child process that may hang, crash or lie.

``Library`` runs in the child and answers in plain values; ``Driver`` runs in the parent and turns the answers into
values of the model, or into ``DriverError``. Neither knows what a good answer would be for the run.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Mapping
from typing import Any, Callable, Protocol

from ..model import Died, Gpu, Inventory, Listed, Memory, Reading, Silent

#: What NVML's error codes mean for the person who reads them (nvml.h, nvmlReturn_t); the rest keep NVML's own words.
REMEDIES = {
    9: "load the nvidia kernel module (modprobe nvidia) and look at dmesg",
    12: "install the driver's libnvidia-ml.so.1 and run ldconfig",
    15: "the GPU has fallen off the bus: look for Xid 79 in dmesg, then reset it or reboot",
    18: "user-space library and kernel module are of different versions: reboot, or reload the module",
}

NOT_SUPPORTED = 3
DRIVER_NOT_LOADED = 9
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
ARGUMENT_VERSION_MISMATCH = 25
UNKNOWN = 999

#: nvmlDeviceGetMemoryInfo_v2 is not there before R510; these are the ways in which it says so.
NO_V2 = (NOT_SUPPORTED, FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH, UNKNOWN)


class DriverError(Exception):
    """The driver as a whole gave no answer. ``code`` is NVML's, or None if it was not NVML that failed."""

    def __init__(self, message: str, *, code: int | None = None, remedy: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.remedy = remedy or REMEDIES.get(code or 0, "")

    @property
    def missing(self) -> bool:
        """There is no library, as on a machine that never had a driver."""
        return self.code == LIBRARY_NOT_FOUND


# In the child --------------------------------------------------------------------------------------------------------


class Library:
    """Answers requests from one loaded NVML. ``load`` returns the pynvml module; it is called at the first request."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._handles: dict[str, Any] = {}

    def __call__(self, request: tuple[Any, ...]) -> dict[str, Any]:
        """``("init",)`` or ``("sample", [uuid, …])``. A failure of the library as a whole is an answer too."""
        verb, *arguments = request
        try:
            return self._init() if verb == "init" else self._sample(*arguments)
        except Exception as error:  # noqa: BLE001
            # Whatever nvidia-ml-py raises here, NVMLLibraryMismatchError and ctypes errors included, is an answer to
            # be judged by the parent; a traceback in a child that nobody reads would only look like a crash.
            return {"error": _code(error), "text": _text(error)}

    def _init(self) -> dict[str, Any]:
        self._nvml = self._load()
        self._nvml.nvmlInit()
        gpus = [self._describe(index) for index in range(self._nvml.nvmlDeviceGetCount())]
        return {"driver": self._nvml.nvmlSystemGetDriverVersion(), "path": _path(self._nvml), "gpus": gpus}

    def _describe(self, index: int) -> dict[str, Any]:
        nvml = self._nvml
        gpu: dict[str, Any] = {"index": index, "uuid": "", "name": "", "pci": "", "minor": None, "fault": None}
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            gpu["uuid"] = nvml.nvmlDeviceGetUUID(handle)
            self._handles[gpu["uuid"]] = handle
            gpu["pci"] = nvml.nvmlDeviceGetPciInfo(handle).busId
            gpu["name"] = nvml.nvmlDeviceGetName(handle)
            gpu["minor"] = nvml.nvmlDeviceGetMinorNumber(handle)
        except nvml.NVMLError as error:
            gpu["fault"] = _text(error)
        return gpu

    def _sample(self, uuids: list[str]) -> dict[str, Any]:
        return {uuid: self._read(self._handles[uuid]) for uuid in uuids}

    def _read(self, handle: Any) -> dict[str, Any]:
        """One GPU. A lost GPU fails its own calls only, so its error stays its own."""
        try:
            reading: dict[str, Any] = {"memory": self._memory(handle), "fault": None}
        except self._nvml.NVMLError as error:
            return {"memory": None, "fault": _text(error), "listed": [], "unlisted": None}
        listed: list[tuple[int, int | None, str]] = []
        unlisted = None
        for kind, call in (
            ("compute", "nvmlDeviceGetComputeRunningProcesses"),
            ("graphics", "nvmlDeviceGetGraphicsRunningProcesses"),
            ("mps", "nvmlDeviceGetMPSComputeRunningProcesses"),
        ):
            try:
                records = self._processes(call, handle)
            except Exception as error:  # noqa: BLE001
                # nvidia-ml-py raises more than NVMLError here, and what fails is this list alone.
                # GPUs without graphics or MPS say NOT_SUPPORTED for those lists; without compute there is no list.
                if kind == "compute" or _code(error) not in (NOT_SUPPORTED, FUNCTION_NOT_FOUND):
                    unlisted = f"{call}: {_text(error)}"
                continue
            listed += [(record.pid, record.usedGpuMemory, kind) for record in records]
        return {**reading, "listed": listed, "unlisted": unlisted}

    def _processes(self, call: str, handle: Any) -> Any:
        """The newest list that the library has: before R510 there is only the one with the suffix _v2 (nvml.h)."""
        try:
            return getattr(self._nvml, call + "_v3")(handle)
        except Exception as error:
            if _code(error) != FUNCTION_NOT_FOUND:
                raise
        return getattr(self._nvml, call + "_v2")(handle)

    def _memory(self, handle: Any) -> tuple[int, int, int, int | None, str]:
        """(used, free, total, reserved, call) in bytes; v1 counts what the driver reserves as used (nvml.h)."""
        nvml = self._nvml
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
            return (memory.used, memory.free, memory.total, memory.reserved, "v2")
        except nvml.NVMLError as error:
            if error.value not in NO_V2:
                raise
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return (memory.used, memory.free, memory.total, None, "v1")


def load_pynvml() -> Any:
    import pynvml

    return pynvml


def _code(error: Exception) -> int | None:
    return getattr(error, "value", None)


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__


def _path(nvml: Any) -> str:
    """The file that the loaded library came from, asked of the loader (dladdr(3)), since a maps file can mislead."""
    import ctypes

    class Info(ctypes.Structure):
        _fields_ = [
            ("file", ctypes.c_char_p),
            ("base", ctypes.c_void_p),
            ("symbol", ctypes.c_char_p),
            ("address", ctypes.c_void_p),
        ]

    info = Info()
    function = ctypes.cast(nvml.nvmlLib.nvmlInitWithFlags, ctypes.c_void_p)
    if not ctypes.CDLL(None).dladdr(function, ctypes.byref(info)) or not info.file:
        return "unknown"
    return os.path.realpath(os.fsdecode(info.file))


# In the parent -------------------------------------------------------------------------------------------------------


class Answers(Protocol):
    """The part of child.Child that is used here."""

    def send(self, request: Any) -> None: ...

    def receive(self, timeout: float) -> Any: ...


class Driver:
    """The driver as the run sees it. Every call raises DriverError after its timeout in seconds."""

    def __init__(self, child: Answers) -> None:
        self._child = child
        self._inventory: Inventory | None = None

    def begin(self) -> None:
        """Start nvmlInit in the child, which can take seconds per GPU, and come back at once."""
        self._child.send(("init",))

    def inventory(self, timeout: float) -> Inventory:
        """What ``begin`` brought to light; asked again, the same."""
        if self._inventory is None:
            answer = self._receive("nvmlInit", timeout)
            gpus = tuple(Gpu(**gpu) for gpu in answer["gpus"])
            self._inventory = Inventory(driver=answer["driver"], nvml_path=answer["path"], gpus=gpus)
        return self._inventory

    def sample(self, gpus: Iterable[Gpu], timeout: float) -> dict[str, Reading]:
        """A reading of each GPU by UUID. A GPU that failed at the start has a reading that says so."""
        reachable = [gpu for gpu in gpus if gpu.uuid and not gpu.fault]
        self._child.send(("sample", [gpu.uuid for gpu in reachable]))
        answer = self._receive("a query", timeout)
        readings = {gpu.uuid: Reading(uuid=gpu.uuid, fault=gpu.fault) for gpu in gpus if gpu.fault}
        pid_max = _pid_max()
        for gpu in reachable:
            readings[gpu.uuid] = _reading(gpu.uuid, answer[gpu.uuid], pid_max)
        return readings

    def _receive(self, what: str, timeout: float) -> Any:
        try:
            answer = self._child.receive(timeout)
        except Silent:
            raise DriverError(
                f"the NVIDIA driver did not answer {what} within {timeout:.0f} s",
                remedy="look for Xid and 'blocked for more than' in dmesg; a driver that hangs needs a reboot",
            ) from None
        except Died as error:
            raise DriverError(f"the process that asked NVML for {what} {error}") from None
        if "error" in answer:
            raise DriverError(f"NVML cannot be used: {answer['text']}", code=answer["error"])
        return answer


def traces() -> list[str]:
    """What on this machine speaks of an NVIDIA GPU: device nodes, the kernel module, devices on the PCI bus."""
    found = glob.glob("/dev/nvidia*") + glob.glob("/proc/driver/nvidia") + glob.glob("/sys/module/nvidia")
    for path in glob.glob("/sys/bus/pci/devices/*/vendor"):
        with open(path, encoding="ascii") as vendor, open(path[: -len("vendor")] + "class", encoding="ascii") as kind:
            # Vendor 0x10de is NVIDIA; class 0x03 is a display controller, which compute cards are too (pci.ids).
            if vendor.read().strip() == "0x10de" and kind.read().startswith("0x03"):
                found.append(path)
    return found


def _pid_max() -> int:
    with open("/proc/sys/kernel/pid_max", "rb") as file:
        return int(file.read())


def _reading(uuid: str, answer: Mapping[str, Any], pid_max: int) -> Reading:
    if answer["memory"] is None:
        return Reading(uuid=uuid, fault=answer["fault"])
    memory = Memory(*answer["memory"])
    fault = insane(memory)
    if fault:
        return Reading(uuid=uuid, fault=fault)
    return Reading(
        uuid=uuid,
        memory=memory,
        listed=merged(answer["listed"]),
        distrust=distrusted(answer["listed"], memory.total, pid_max),
        unlisted=answer["unlisted"],
    )


def insane(memory: Memory) -> str | None:
    """Why these figures cannot be a GPU's: libraries that stand in for NVML answer such."""
    accounted = memory.used + memory.free + (memory.reserved or 0)
    if memory.total <= 0 or abs(accounted - memory.total) > memory.total // 50:
        return (
            f"impossible memory figures from NVML ({memory.call}): used {memory.used} + free {memory.free}"
            f" + reserved {memory.reserved or 0} bytes is not the total of {memory.total}"
        )
    return None


def distrusted(records: Iterable[tuple[int, int | None, str]], total: int, pid_max: int) -> str | None:
    """Why a list is not to be believed. Early R535 drivers scramble PIDs and sizes (XuehaiPan/nvitop#75)."""
    for pid, used, _ in records:
        if not 0 < pid <= pid_max:
            return f"NVML lists PID {pid}, which cannot be"
        if used is not None and used > total:
            return f"NVML lists {used} bytes for PID {pid} on a GPU of {total}"
    return None


def merged(records: Iterable[tuple[int, int | None, str]]) -> tuple[Listed, ...]:
    """One entry per PID: a process that is in two lists holds its memory once, so the larger figure counts."""
    found: dict[int, Listed] = {}
    for pid, used, kind in records:
        before = found.get(pid, Listed(pid=pid, bytes=None, kinds=frozenset()))
        known = [size for size in (before.bytes, used) if size is not None]
        found[pid] = Listed(pid=pid, bytes=max(known, default=None), kinds=before.kinds | {kind})
    return tuple(found[pid] for pid in sorted(found))
