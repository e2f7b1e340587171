"""What the NVIDIA driver says, by way of a child process that may hang, crash or lie.

``Driver`` turns the answers of host.library into values of the model, or into ``DriverError``. It does not know what a
good answer would be for the run.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from ..faults import Died, Silent
from ..model import Gpu, Inventory, Listed, Memory, Reading

#: What NVML's error codes mean for the person who reads them (nvml.h, nvmlReturn_t); the rest keep NVML's own words.
REMEDIES = {
    4: "the nodes /dev/nvidia* are not for this user: run it as root",
    9: "load the nvidia kernel module (modprobe nvidia) and look at dmesg",
    12: "install the driver's libnvidia-ml.so.1 and run ldconfig",
    15: "the GPU has fallen off the bus: look for Xid 79 in dmesg, then reset it or reboot",
    17: "DeviceAllow= of the unit, or the container, has to let /dev/nvidiactl and the GPUs' nodes through",
    18: "user-space library and kernel module are of different versions: reboot, or reload the module",
}

#: What to do where the failure says nothing of its own.
LOOK = "look for NVRM and Xid in dmesg, and whether nvidia-smi works"

LIBRARY_NOT_FOUND = 12
NOT_SUPPORTED = 3
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15

#: Before R470 the UUID of an instance is that of its GPU with two numbers behind it.
_UUID = r"(?:GPU|MIG)-[0-9A-Za-z-]+(?:/[0-9]+/[0-9]+)?"


class DriverError(Exception):
    """The driver as a whole gave no answer. ``code`` is NVML's, or None if it was not NVML that failed."""

    def __init__(self, message: str, *, code: int | None = None, remedy: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.remedy = remedy or REMEDIES.get(code or 0, LOOK)

    @property
    def missing(self) -> bool:
        """There is no library, as on a machine that never had a driver."""
        return self.code == LIBRARY_NOT_FOUND


class Unanswered(DriverError):
    """Nothing was said in time; the answer may still come."""


class Fact(NamedTuple):
    """What one call of NVML says of one GPU: its numbers, or ``fault``, and NVML's ``code`` if that is what failed."""

    values: tuple[int, ...] = ()
    fault: str = ""
    code: int | None = None

    @property
    def unsupported(self) -> bool:
        """The GPU has no such thing."""
        return self.code == NOT_SUPPORTED

    @property
    def lost(self) -> bool:
        """The GPU has fallen off the bus, or cannot be reached any more."""
        return self.code == GPU_IS_LOST

    @property
    def outdated(self) -> bool:
        """The driver is older than the call."""
        return self.code == FUNCTION_NOT_FOUND


class Answers(Protocol):
    """The part of child.Child that is used here."""

    def send(self, request: Any) -> None: ...

    def receive(self, timeout: float) -> Any: ...


class Renewable(Protocol):
    """The rest of it: it can be ended, and another one started in its place."""

    def end(self) -> bool: ...

    def start(self) -> None: ...


class Driver:
    """The driver as the run sees it. Every call raises DriverError after its timeout in seconds."""

    def __init__(self, child: Answers, process: Renewable | None = None) -> None:
        self._child = child
        self._process = process
        self._inventory: Inventory | None = None
        #: Answers that were given up on. Should they still come, they come before any other.
        self._late = 0

    def inventory(self, timeout: float) -> Inventory:
        """The answer to ``("init",)``, which the child was sent before anything else; asked again, the same."""
        if self._inventory is None:
            answer = self._receive("nvmlInit", timeout, timeout)
            with _making_sense("nvmlInit"):
                gpus = identified([_gpu(**gpu) for gpu in answer["gpus"]])
                driver, path = _typed(str, answer["driver"]), _typed(str, answer["path"])
                self._inventory = Inventory(driver=driver, nvml_path=path, gpus=gpus)
        return self._inventory

    def sample(self, gpus: Sequence[Gpu], timeout: float) -> dict[str, Reading]:
        """A reading of each GPU by UUID. A GPU that failed at the start has a reading that says so."""
        return _readings(gpus, self._ask(("sample", _uuids(gpus)), timeout), _pid_max())

    def watch(self, gpus: Sequence[Gpu], seconds: float, timeout: float) -> dict[str, Reading]:
        """The same without lists of processes: after ``seconds``, or as soon as memory is not what it was when this was
        asked last. The timeout is for the time beyond."""
        # Nobody is listed, so nothing has to be read to tell which PIDs there can be.
        return _readings(gpus, self._ask(("watch", _uuids(gpus), seconds), timeout, seconds), 0)

    def facts(self, gpus: Sequence[Gpu], names: Sequence[str], timeout: float) -> dict[Gpu, dict[str, Fact]]:
        """What library.FACTS has under these names, of GPUs that are no instances. One that failed at the start is
        not asked again."""
        reachable = _reachable(gpus)
        answer = self._ask(("facts", _uuids(gpus), [*names]), timeout) if reachable else {}
        found = {gpu: dict.fromkeys(names, Fact(fault=gpu.fault or "has no UUID")) for gpu in gpus}
        with _making_sense("a query"):
            for gpu in reachable:
                found[gpu] = {name: _fact(*answer[gpu.uuid][name]) for name in names}
        return found

    def set_persistence(self, gpu: Gpu, mode: int, timeout: float) -> None:
        self._ask(("persistence", gpu.uuid, mode), timeout)

    def let_go(self) -> bool:
        """End the child, which has the devices open; False where it hangs. Only come_back() may follow."""
        return self._process is not None and self._process.end()

    def come_back(self, timeout: float) -> None:
        """Start another child, and have it find the GPUs again."""
        if self._process is not None:
            self._process.start()
            self._child.send(("init",))
        self._inventory, self._late = None, 0
        self.inventory(timeout)

    def _ask(self, request: tuple[Any, ...], timeout: float, seconds: float = 0.0) -> Any:
        """The answer to this request, which may take so many seconds by itself, behind those that may still come to
        earlier ones."""
        self._child.send(request)
        self._late += 1
        until = time.monotonic() + seconds + timeout
        while self._late:
            answer = self._receive("a query", max(0.0, until - time.monotonic()), timeout)
            self._late -= 1
        return answer

    def _receive(self, what: str, left: float, timeout: float) -> Any:
        try:
            answer = self._child.receive(left)
        except Silent:
            raise Unanswered(
                f"the NVIDIA driver did not answer {what} within {timeout:.0f} s",
                remedy="look for Xid and 'blocked for more than' in dmesg; a driver that hangs needs a reboot",
            ) from None
        except Died as error:
            raise DriverError(f"the process that asked NVML for {what} {error}") from None
        with _making_sense(what):
            if "error" in answer:
                missing = answer["text"].startswith("No module named")
                raise DriverError(
                    f"NVML cannot be used: {answer['text']}",
                    code=answer["error"],
                    remedy="install nvidia-ml-py for the system's own python3, which sees no venv" if missing else "",
                )
        return answer


def _reachable(gpus: Iterable[Gpu]) -> list[Gpu]:
    """Those that the driver can be asked about."""
    return [gpu for gpu in gpus if gpu.uuid and not gpu.fault]


def _uuids(gpus: Iterable[Gpu]) -> list[str]:
    return [gpu.uuid for gpu in _reachable(gpus)]


@contextmanager
def _making_sense(what: str) -> Iterator[None]:
    """An answer that is not made as host.library makes them is none: the library behind it may have said anything."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DriverError(f"NVML gave an answer to {what} that makes no sense ({error!r})") from error


def _typed(wanted: Any, value: Any) -> Any:
    if not isinstance(value, wanted):
        raise TypeError(f"{value!r:.80} is not of type {wanted}")
    return value


#: What host.library says of a GPU.
_NUMBERS, _TEXTS = ("minor", "gi", "ci"), ("uuid", "name", "pci")


def _gpu(*, index: Any, **said: Any) -> Gpu:
    for name, value in said.items():
        _typed(str if name in _TEXTS else (int if name in _NUMBERS else str, type(None)), value)
    return Gpu(index=_typed(int, index), **said)


def identified(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The same, where one that cannot be told from others by its UUID, or has none, counts as out of reach: a sample
    would be of another GPU than the one that is meant."""
    seen = [gpu.uuid for gpu in gpus]
    return tuple(gpu if gpu.fault else gpu._replace(fault=_impostor(gpu.uuid, seen)) for gpu in gpus)


def _impostor(uuid: str, seen: Sequence[str]) -> str | None:
    if re.fullmatch(_UUID, uuid) is None:
        return f"NVML calls it {uuid[:80]!r}, which is no UUID"
    count = seen.count(uuid)
    return f"NVML gives {count} GPUs the UUID {uuid}" if count > 1 else None


def _pid_max() -> int:
    """The kernel's own limit where /proc shows processes alone (PID_MAX_LIMIT in include/linux/threads.h)."""
    try:
        with open("/proc/sys/kernel/pid_max", "rb") as file:
            return int(file.read())
    except OSError:
        return 1 << 22


def _fact(values: Any, code: Any, fault: Any) -> Fact:
    numbers = tuple(_typed(int, value) for value in values)
    return Fact(values=numbers, code=_typed((int, type(None)), code), fault=_typed(str, fault))


def _readings(gpus: Sequence[Gpu], answer: Mapping[str, Any], pid_max: int) -> dict[str, Reading]:
    readings = {gpu.uuid: Reading(uuid=gpu.uuid, fault=gpu.fault) for gpu in gpus if gpu.fault}
    with _making_sense("a query"):
        for uuid in _uuids(gpus):
            readings[uuid] = _reading(uuid, answer[uuid], pid_max)
    return readings


def _reading(uuid: str, answer: Mapping[str, Any], pid_max: int) -> Reading:
    if answer["fault"] is not None:
        return Reading(uuid=uuid, fault=_typed(str, answer["fault"]))
    memory = None if answer["memory"] is None else Memory(*answer["memory"])
    if memory is not None:
        _typed(str, memory.call)
    fault = insane(memory) if memory else None
    if fault:
        return Reading(uuid=uuid, fault=fault)
    return Reading(
        uuid=uuid,
        memory=memory,
        listed=merged(answer["listed"]),
        distrust=distrusted(answer["listed"], memory.total if memory else None, pid_max),
        unlisted=_typed((str, type(None)), answer["unlisted"]),
        unified=memory is None,
    )


def insane(memory: Memory) -> str | None:
    """Why these figures cannot be a GPU's: libraries that stand in for NVML answer such."""
    figures = [memory.used, memory.free, memory.total, *([] if memory.reserved is None else [memory.reserved])]
    if not all(isinstance(figure, int) and figure >= 0 for figure in figures):
        return f"impossible memory figures from NVML ({memory.call}): {', '.join(map(str, figures))}"
    accounted = memory.used + memory.free + (memory.reserved or 0)
    if memory.total <= 0 or abs(accounted - memory.total) > memory.total // 50:
        return (
            f"impossible memory figures from NVML ({memory.call}): used {memory.used} + free {memory.free}"
            f" + reserved {memory.reserved or 0} bytes is not the total of {memory.total}"
        )
    return None


def distrusted(records: Iterable[tuple[int, int | None, str]], total: int | None, pid_max: int) -> str | None:
    """Why a list is not to be believed. Early R535 drivers scramble PIDs and sizes (XuehaiPan/nvitop#75)."""
    for pid, used, _ in records:
        if not isinstance(pid, int) or not 0 < pid <= pid_max:
            return f"NVML lists PID {pid}, which cannot be"
        if used is not None and not 0 <= used <= (used if total is None else total):
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
