"""The child's side of the driver: asks nvidia-ml-py, and answers in plain values.

It runs in a process that may hang or crash with the driver, and that is forked before the model is loaded; so it knows
no value of the model. host.nvml is the other side, and makes sense of the answers.
"""

from __future__ import annotations

import os
import time

# Whatever is loaded before the fork keeps the driver waiting, so here it is next to nothing.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any, Callable

#: NVML's error codes that are told apart here (nvml.h, nvmlReturn_t).
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NOT_FOUND = 6
FUNCTION_NOT_FOUND = 13
ARGUMENT_VERSION_MISMATCH = 25
UNKNOWN = 999

#: Seconds between two looks at memory that is watched. One takes the driver about a millisecond per GPU.
INTERVAL = 0.1

#: nvmlDeviceGetMemoryInfo_v2 is not there before R510; these are the ways in which the driver says so.
NO_V2 = (NOT_SUPPORTED, FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH, UNKNOWN)


#: Names of GPUs that share the memory of the machine: DGX Spark and the Jetsons.
INTEGRATED = ("GB10", "Orin", "Thor", "Xavier", "Tegra")


class Library:
    """Answers requests from one loaded NVML. ``load`` returns the pynvml module; it is called at the first request."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._handles: dict[str, Any] = {}
        #: The last answer about memory that is watched.
        self._told: dict[str, Any] = {}

    def __call__(self, request: tuple[Any, ...]) -> dict[str, Any]:
        """``("init",)``, ``("sample", uuids)``, ``("watch", uuids, seconds)``, ``("facts", uuids, [name, …])`` or
        ``("persistence", uuid, mode)``. A failure of the library as a whole is an answer too."""
        verb, *arguments = request
        try:
            if verb == "persistence":
                return self._set_persistence(*arguments)
            if verb == "facts":
                return self._facts(*arguments)
            if verb == "watch":
                return self._watch(*arguments)
            return self._init() if verb == "init" else self._sample(*arguments)
        except Exception as error:  # noqa: BLE001
            # Whatever nvidia-ml-py raises here, NVMLLibraryMismatchError and ctypes errors included, is an answer to
            # be judged by the parent; a traceback in a child that nobody reads would only look like a crash.
            return {"error": _code(error), "text": _text(error)}

    def _init(self) -> dict[str, Any]:
        self._nvml = self._load()
        self._nvml.nvmlInit()
        gpus = [gpu for index in range(self._nvml.nvmlDeviceGetCount()) for gpu in self._describe(index)]
        return {"driver": self._nvml.nvmlSystemGetDriverVersion(), "path": _path(self._nvml), "gpus": gpus}

    def _describe(self, index: int) -> list[dict[str, Any]]:
        """The GPU with this index, and behind it its MIG instances; a lost GPU has a fault and what could be learnt."""
        nvml = self._nvml
        gpu: dict[str, Any] = {"index": index, "uuid": "", "fault": None}
        instances: list[dict[str, Any]] = []
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            gpu["uuid"] = nvml.nvmlDeviceGetUUID(handle)
            self._handles[gpu["uuid"]] = handle
            gpu["pci"] = nvml.nvmlDeviceGetPciInfo(handle).busId
            gpu["name"] = nvml.nvmlDeviceGetName(handle)
            gpu["minor"] = nvml.nvmlDeviceGetMinorNumber(handle)
            instances = self._instances(handle, gpu)
        except nvml.NVMLError as error:
            gpu["fault"] = _text(error)
        return [gpu, *instances]

    def _instances(self, handle: Any, gpu: dict[str, Any]) -> list[dict[str, Any]]:
        nvml = self._nvml
        try:
            if nvml.nvmlDeviceGetMigMode(handle)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
                return []
        except nvml.NVMLError as error:
            if _code(error) in (NOT_SUPPORTED, FUNCTION_NOT_FOUND):
                return []
            raise
        found = []
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            except nvml.NVMLError as error:
                # Slots of which nothing was made are NOT_FOUND (nvml.h, nvmlDeviceGetMigDeviceHandleByIndex).
                if _code(error) in (NOT_FOUND, INVALID_ARGUMENT):
                    continue
                raise
            uuid = nvml.nvmlDeviceGetUUID(instance)
            self._handles[uuid] = instance
            gi, ci = nvml.nvmlDeviceGetGpuInstanceId(instance), nvml.nvmlDeviceGetComputeInstanceId(instance)
            name = nvml.nvmlDeviceGetName(instance)
            found.append({**gpu, "uuid": uuid, "name": name, "parent": gpu["uuid"], "gi": gi, "ci": ci})
        return found

    def _sample(self, uuids: list[str]) -> dict[str, Any]:
        return {uuid: self._read(self._handles[uuid]) for uuid in uuids}

    def _watch(self, uuids: list[str], seconds: float) -> dict[str, Any]:
        """Their memory, as soon as it is not what was last told, or after so many seconds.

        NVML has no event for that, so it is asked again and again; here, where nobody else has to wake up for it.
        """
        until = time.monotonic() + seconds
        while True:
            time.sleep(max(0.0, min(INTERVAL, until - time.monotonic())))
            readings = {uuid: self._read_memory(self._handles[uuid]) for uuid in uuids}
            if readings != self._told or time.monotonic() >= until:
                self._told = readings
                return readings

    def _read_memory(self, handle: Any) -> dict[str, Any]:
        """Of one GPU. A lost GPU fails its own calls only, so its error stays its own."""
        reading: dict[str, Any] = {"memory": None, "fault": None, "listed": [], "unlisted": None}
        try:
            return {**reading, "memory": self._memory(handle)}
        except self._nvml.NVMLError as error:
            if _code(error) == NOT_SUPPORTED and self._integrated(handle):
                return reading
            return {**reading, "fault": f"memory: {_text(error)}"}

    def _read(self, handle: Any) -> dict[str, Any]:
        reading = self._read_memory(handle)
        if reading["fault"] is not None:
            return reading
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

    def _facts(self, uuids: list[str], names: list[str]) -> dict[str, Any]:
        return {uuid: {name: self._fact(FACTS[name], self._handles[uuid]) for name in names} for uuid in uuids}

    def _fact(self, ask: Callable[[Any, Any], Any], handle: Any) -> tuple[list[int], int | None, str]:
        """What the call returned, NVML's code and the text of its error; there is a text only where it failed."""
        try:
            return ([*map(int, ask(self._nvml, handle))], None, "")
        except Exception as error:  # noqa: BLE001
            # An nvidia-ml-py that is older than a call has no such attribute; that fails this fact alone, too.
            return ([], _code(error), _text(error))

    def _set_persistence(self, uuid: str, mode: int) -> dict[str, Any]:
        self._nvml.nvmlDeviceSetPersistenceMode(self._handles[uuid], mode)
        return {}

    def _processes(self, call: str, handle: Any) -> Any:
        """The newest list that the library has: before R510 there is only the one with the suffix _v2 (nvml.h)."""
        try:
            return getattr(self._nvml, call + "_v3")(handle)
        except Exception as error:
            if _code(error) != FUNCTION_NOT_FOUND:
                raise
        return getattr(self._nvml, call + "_v2")(handle)

    def _integrated(self, handle: Any) -> bool:
        """Whether the GPU shares the memory of the machine, and so cannot say how much of it is in use: it addresses
        memory through the CPU's page tables (nvml.h, nvmlDeviceGetAddressingMode), or is one of those known to."""
        nvml = self._nvml
        try:
            if nvml.nvmlDeviceGetAddressingMode(handle) == nvml.NVML_DEVICE_ADDRESSING_MODE_ATS:
                return True
        except Exception as error:  # noqa: BLE001
            # Drivers before R570 do not have the call; anything else than that is worth no more here.
            if _code(error) is None:
                return False
        return any(word in nvml.nvmlDeviceGetName(handle) for word in INTEGRATED)

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


#: What can be asked of a GPU besides a sample, each with the call that tells it and its numbers in their order.
FACTS: Mapping[str, Callable[[Any, Any], Iterable[int]]] = {
    "compute_mode": lambda nvml, handle: [nvml.nvmlDeviceGetComputeMode(handle)],
    "persistence": lambda nvml, handle: [nvml.nvmlDeviceGetPersistenceMode(handle)],
    # The mode that is on, and the one that a reset brings.
    "mig": lambda nvml, handle: nvml.nvmlDeviceGetMigMode(handle),
    # Rows that were remapped for corrected and for uncorrected errors, whether some are pending, whether one failed.
    "remapped_rows": lambda nvml, handle: nvml.nvmlDeviceGetRemappedRows(handle),
    "retired_pages": lambda nvml, handle: [nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle)],
    "uncorrected_errors": lambda nvml, handle: [
        nvml.nvmlDeviceGetTotalEccErrors(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    ],
}


def load_pynvml() -> Any:
    import gc

    import pynvml

    # What is loaded is no garbage; from here on there may be some.
    gc.freeze()
    gc.enable()
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
