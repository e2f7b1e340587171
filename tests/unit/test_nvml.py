"""The driver: what nvidia-ml-py may answer or raise, on the child's side and on ours."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Optional

import pytest

from gpuprestart.faults import Died, Silent
from gpuprestart.host import library, nvml
from gpuprestart.host.library import FACTS, NO_V2, Library
from gpuprestart.host.nvml import Driver, DriverError, Fact, Unanswered
from gpuprestart.model import MIB, Gpu, Listed, Memory

from .machines import TOTAL, gpu, memory, uuid

pynvml = pytest.importorskip("pynvml")

NOT_SUPPORTED, NO_PERMISSION, LOST, NOT_FOUND = 3, 4, 15, 13
LISTS = ("Compute", "Graphics", "MPSCompute")


def error(code: int) -> Exception:
    found: Exception = pynvml.NVMLError(code)
    return found


def record(pid: int, mib: Optional[int]) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=None if mib is None else mib * MIB)


class Nvml:
    """Stands in for the module pynvml. ``fails`` maps a function's name, or (name, GPU), to what it raises."""

    NVMLError = pynvml.NVMLError
    nvmlMemory_v2 = pynvml.nvmlMemory_v2
    NVML_DEVICE_MIG_ENABLE = pynvml.NVML_DEVICE_MIG_ENABLE
    NVML_DEVICE_ADDRESSING_MODE_ATS = getattr(pynvml, "NVML_DEVICE_ADDRESSING_MODE_ATS", 2)
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    NVML_VOLATILE_ECC = pynvml.NVML_VOLATILE_ECC

    def __init__(self, gpus: int = 2) -> None:
        self.gpus = gpus
        # A discrete GPU without MIG, under a driver that is not of the newest.
        self.fails: dict[Any, Exception] = {
            "nvmlDeviceGetMigMode": error(NOT_SUPPORTED),
            "nvmlDeviceGetAddressingMode": error(NOT_FOUND),
        }
        #: (kind, GPU) -> its list.
        self.lists: dict[tuple[str, int], list[SimpleNamespace]] = {}
        self.called: list[str] = []
        # For dladdr(3): any function of any library will do.
        self.nvmlLib = SimpleNamespace(nvmlInitWithFlags=ctypes.CDLL(None).getpid)
        for kind in LISTS:
            for version in ("_v2", "_v3"):
                name = f"nvmlDeviceGet{kind}RunningProcesses{version}"
                setattr(self, name, self._lister(name, kind))

    def _lister(self, name: str, kind: str) -> Any:
        def listed(handle: int) -> list[SimpleNamespace]:
            self._call(name, handle)
            return self.lists.get((kind, handle), [])

        return listed

    def _call(self, name: str, handle: Optional[int] = None) -> None:
        self.called.append(name)
        for key in (name, (name, handle)):
            if key in self.fails:
                raise self.fails[key]

    def nvmlInit(self) -> None:
        self._call("nvmlInit")

    def nvmlDeviceGetCount(self) -> int:
        return self.gpus

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.1"

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._call("nvmlDeviceGetHandleByIndex", index)
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        self._call("nvmlDeviceGetUUID", handle)
        return uuid(handle)

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId=f"00000000:{handle:02X}:00.0")

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetMinorNumber(self, handle: int) -> int:
        self._call("nvmlDeviceGetMinorNumber", handle)
        return 7 - handle

    def nvmlDeviceGetMigMode(self, handle: int) -> tuple[int, int]:
        self._call("nvmlDeviceGetMigMode", handle)
        return (0, 0)

    def nvmlDeviceGetAddressingMode(self, handle: int) -> int:
        self._call("nvmlDeviceGetAddressingMode", handle)
        return 0

    def nvmlDeviceGetComputeMode(self, handle: int) -> int:
        self._call("nvmlDeviceGetComputeMode", handle)
        return 3

    def nvmlDeviceGetPersistenceMode(self, handle: int) -> int:
        self._call("nvmlDeviceGetPersistenceMode", handle)
        return handle

    def nvmlDeviceGetRemappedRows(self, handle: int) -> tuple[int, int, int, int]:
        self._call("nvmlDeviceGetRemappedRows", handle)
        return (4, 3, 1, 0)

    def nvmlDeviceGetRetiredPagesPendingStatus(self, handle: int) -> int:
        self._call("nvmlDeviceGetRetiredPagesPendingStatus", handle)
        return 1

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        self._call("nvmlDeviceGetTotalEccErrors", handle)
        return 7 if (kind, counter) == (1, 0) else 10**9

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: Optional[int] = None) -> SimpleNamespace:
        self._call("memory v1" if version is None else "memory v2", handle)
        used, reserved = (8, 904) if version == self.nvmlMemory_v2 else (912, 0)
        free = TOTAL - used - reserved
        return SimpleNamespace(used=used * MIB, free=free * MIB, total=TOTAL * MIB, reserved=reserved * MIB)


@pytest.fixture
def fake() -> Nvml:
    return Nvml()


def driver(fake: Nvml) -> Driver:
    """Both sides of the driver, without the process between them."""
    return Driver(Direct(Library(lambda: fake)))


class Direct:
    """Answers at once, in this process; ``("init",)`` has been asked already."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.answers = [library(("init",))]

    def send(self, request: Any) -> None:
        self.answers.append(self.library(request))

    def receive(self, timeout: float) -> Any:
        return self.answers.pop(0)


def sample(fake: Nvml, gpus: Optional[Sequence[Gpu]] = None) -> dict[str, Any]:
    made = driver(fake)
    found = made.inventory(1.0)
    return made.sample(found.gpus if gpus is None else gpus, 1.0)


# In the child --------------------------------------------------------------------------------------------------------


def test_the_fake_has_no_function_that_the_real_module_lacks(fake: Nvml) -> None:
    names = [name for name in (*dir(fake), *vars(fake)) if name.startswith("nvml")]
    assert [name for name in names if not hasattr(pynvml, name)] == []


def test_the_inventory(fake: Nvml) -> None:
    found = driver(fake).inventory(1.0)
    assert found.driver == "570.1"
    assert found.nvml_path.startswith("/") and "libc" in found.nvml_path
    assert found.gpus == (
        Gpu(index=0, uuid=uuid(0), name="NVIDIA H200", pci="00000000:00:00.0", minor=7),
        Gpu(index=1, uuid=uuid(1), name="NVIDIA H200", pci="00000000:01:00.0", minor=6),
    )


@pytest.mark.case("C1")
def test_memory_by_v2_does_not_count_what_the_driver_reserves(fake: Nvml) -> None:
    found = sample(fake)[uuid(0)].memory
    assert found == Memory(8 * MIB, (TOTAL - 912) * MIB, TOTAL * MIB, 904 * MIB, "v2")


@pytest.mark.parametrize("code", NO_V2)
@pytest.mark.case("C1")
def test_without_v2_memory_is_v1_and_says_so(fake: Nvml, code: int) -> None:
    fake.fails["memory v2"] = error(code)
    found = sample(fake)[uuid(0)].memory
    assert found == Memory(912 * MIB, (TOTAL - 912) * MIB, TOTAL * MIB, None, "v1")


def test_the_codes_that_mean_there_is_no_v2() -> None:
    assert set(NO_V2) == {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        pynvml.NVML_ERROR_UNKNOWN,
    }


@pytest.mark.parametrize("code", [NO_PERMISSION, LOST])
def test_any_other_failure_of_v2_is_no_reason_to_ask_v1(fake: Nvml, code: int) -> None:
    fake.fails["memory v2"] = error(code)
    found = sample(fake)[uuid(0)]
    assert found.memory is None and found.fault is not None and str(error(code)) in found.fault
    assert "memory v1" not in fake.called


@pytest.mark.case("C13")
def test_a_gpu_that_has_no_memory_to_tell_of_is_not_measured(fake: Nvml) -> None:
    fake.fails.update({"memory v2": error(NOT_SUPPORTED), "memory v1": error(NOT_SUPPORTED)})
    found = sample(fake)[uuid(0)]
    assert found.memory is None and found.fault is not None and "Not Supported" in found.fault


@pytest.mark.case("C5")
def test_a_gpu_that_is_lost_later_fails_alone(fake: Nvml) -> None:
    fake.fails[("memory v2", 1)] = error(LOST)
    found = sample(fake)
    assert found[uuid(0)].memory is not None and found[uuid(0)].fault is None
    assert found[uuid(1)].memory is None and "GPU is lost" in str(found[uuid(1)].fault)


@pytest.mark.case("C5")
@pytest.mark.parametrize(
    ("function", "known"),
    [("nvmlDeviceGetHandleByIndex", ""), ("nvmlDeviceGetUUID", ""), ("nvmlDeviceGetMinorNumber", uuid(1))],
)
def test_a_gpu_that_is_lost_from_the_start_fails_alone(fake: Nvml, function: str, known: str) -> None:
    fake.fails[(function, 1)] = error(LOST)
    made = driver(fake)
    found = made.inventory(1.0)
    assert (found.gpus[0].fault, found.gpus[1].fault, found.gpus[1].uuid) == (None, "GPU is lost", known)
    readings = made.sample(found.gpus, 1.0)
    assert readings[uuid(0)].memory is not None
    assert (readings[known].memory, readings[known].fault) == (None, "GPU is lost")


@pytest.mark.case("C11")
def test_one_process_in_two_lists_is_counted_once(fake: Nvml) -> None:
    fake.lists = {("Compute", 0): [record(10, 500), record(9, None)], ("Graphics", 0): [record(10, 520)]}
    found = sample(fake)
    assert found[uuid(0)].listed == (
        Listed(pid=9, bytes=None, kinds=frozenset({"compute"})),
        Listed(pid=10, bytes=520 * MIB, kinds=frozenset({"compute", "graphics"})),
    )
    assert found[uuid(1)].listed == ()


@pytest.mark.case("C2")
def test_a_library_without_v3_lists_by_v2(fake: Nvml) -> None:
    for kind in LISTS:
        fake.fails[f"nvmlDeviceGet{kind}RunningProcesses_v3"] = error(NOT_FOUND)
    fake.lists = {("Compute", 0): [record(10, 500)], ("MPSCompute", 0): [record(11, 100)]}
    found = sample(fake)[uuid(0)]
    assert [entry.pid for entry in found.listed] == [10, 11] and found.unlisted is None


@pytest.mark.case("C2")
def test_a_library_without_lists_says_so_and_measures_memory(fake: Nvml) -> None:
    for kind in LISTS:
        for version in ("_v2", "_v3"):
            fake.fails[f"nvmlDeviceGet{kind}RunningProcesses{version}"] = error(NOT_FOUND)
    found = sample(fake)[uuid(0)]
    assert found.memory is not None and found.listed == ()
    assert found.unlisted == "nvmlDeviceGetComputeRunningProcesses: Function Not Found"


@pytest.mark.parametrize("kind", ["Graphics", "MPSCompute"])
def test_a_gpu_without_graphics_or_mps_has_its_whole_list(fake: Nvml, kind: str) -> None:
    fake.fails[f"nvmlDeviceGet{kind}RunningProcesses_v3"] = error(NOT_SUPPORTED)
    fake.lists = {("Compute", 0): [record(10, 500)]}
    found = sample(fake)[uuid(0)]
    assert [entry.pid for entry in found.listed] == [10] and found.unlisted is None


@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize(
    "failure", [error(NO_PERMISSION), pynvml.NVMLLibraryMismatchError("too old"), AttributeError("no such function")]
)
def test_a_list_that_fails_otherwise_is_told(fake: Nvml, kind: str, failure: Exception) -> None:
    """nvidia-ml-py raises more than NVMLError; the other lists still count."""
    fake.fails[f"nvmlDeviceGet{kind}RunningProcesses_v3"] = failure
    fake.lists = {(other, 0): [record(10, 500)] for other in LISTS if other != kind}
    found = sample(fake)[uuid(0)]
    assert found.unlisted is not None and str(failure) in found.unlisted
    assert [entry.pid for entry in found.listed] == [10] and found.memory is not None


@pytest.mark.parametrize(
    ("failure", "code"),
    [(error(9), 9), (error(12), 12), (error(18), 18), (OSError("wrong ELF class"), None), (ImportError("none"), None)],
)
@pytest.mark.case("C3")
def test_a_library_that_cannot_start_is_an_answer(fake: Nvml, failure: Exception, code: Optional[int]) -> None:
    fake.fails["nvmlInit"] = failure
    assert Library(lambda: fake)(("init",)) == {"error": code, "text": str(failure)}


def test_a_failure_without_words_is_told_by_its_name(fake: Nvml) -> None:
    fake.fails["nvmlInit"] = MemoryError()
    assert Library(lambda: fake)(("init",))["text"] == "MemoryError"


# Facts ---------------------------------------------------------------------------------------------------------------


def facts(fake: Nvml, *names: str, fails: Mapping[Any, Exception]) -> dict[int, dict[str, Fact]]:
    """By the index of each GPU, where these calls fail once the inventory is made."""
    made = driver(fake)
    gpus = made.inventory(1.0).gpus
    fake.fails = {**fails}
    found = made.facts(gpus, names, 1.0)
    return {each.index: known for each, known in found.items()}


#: Each fact with its call, and what the fake says.
CALLS = [
    ("compute_mode", "nvmlDeviceGetComputeMode", (3,)),
    ("persistence", "nvmlDeviceGetPersistenceMode", (1,)),
    ("mig", "nvmlDeviceGetMigMode", (0, 0)),
    ("remapped_rows", "nvmlDeviceGetRemappedRows", (4, 3, 1, 0)),
    ("retired_pages", "nvmlDeviceGetRetiredPagesPendingStatus", (1,)),
    ("uncorrected_errors", "nvmlDeviceGetTotalEccErrors", (7,)),
]


@pytest.mark.parametrize(("name", "call", "values"), CALLS)
def test_each_fact_is_what_its_call_returns_or_why_it_does_not(
    fake: Nvml, name: str, call: str, values: tuple[int, ...]
) -> None:
    assert facts(fake, name, fails={(call, 0): error(LOST)}) == {
        0: {name: Fact((), "GPU is lost", LOST)},
        1: {name: Fact(values)},
    }


def test_every_fact_is_tested() -> None:
    assert {name for name, _, _ in CALLS} == set(FACTS)


def test_what_is_not_asked_is_not_called(fake: Nvml) -> None:
    fake.fails = {}
    made = driver(fake)
    gpus = made.inventory(1.0).gpus
    fake.called.clear()
    made.facts(gpus[1:], ["persistence", "mig"], 1.0)
    assert fake.called == ["nvmlDeviceGetPersistenceMode", "nvmlDeviceGetMigMode"]


@pytest.mark.parametrize(
    ("code", "unsupported", "outdated"), [(NOT_SUPPORTED, True, False), (NOT_FOUND, False, True), (LOST, False, False)]
)
def test_why_a_fact_is_not_known(fake: Nvml, code: int, unsupported: bool, outdated: bool) -> None:
    fact = facts(fake, "remapped_rows", fails={"nvmlDeviceGetRemappedRows": error(code)})[0]["remapped_rows"]
    assert (fact.unsupported, fact.outdated, fact.code) == (unsupported, outdated, code) and fact.fault


def test_an_nvidia_ml_py_that_lacks_a_call_fails_that_fact_alone(fake: Nvml) -> None:
    fails = {"nvmlDeviceGetRemappedRows": AttributeError("module 'pynvml' has no attribute")}
    found = facts(fake, "remapped_rows", "compute_mode", fails=fails)[0]
    assert found == {
        "remapped_rows": Fact((), "module 'pynvml' has no attribute"),
        "compute_mode": Fact((3,)),
    }


def test_of_a_gpu_that_cannot_be_reached_nothing_is_asked() -> None:
    child = Scripted({uuid(0): {"mig": ([1, 1], None, "")}})
    lost = gpu(1, uuid="", fault="GPU is lost")
    found = Driver(child).facts([gpu(0), lost], ["mig"], 1.0)
    assert child.sent == [("facts", [uuid(0)], ["mig"])]
    assert found == {gpu(0): {"mig": Fact((1, 1))}, lost: {"mig": Fact(fault="GPU is lost")}}
    assert Driver(child).facts([lost], ["mig"], 1.0) == {lost: {"mig": Fact(fault="GPU is lost")}}
    assert len(child.sent) == 1


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {uuid(0): {}},
        {uuid(0): {"mig": ([1, 1], None)}},
        {uuid(0): {"mig": (["on"], None, "")}},
        {uuid(0): {"mig": ([1, 1], "?", "")}},
        {uuid(0): {"mig": ([1, 1], None, None)}},
        [],
    ],
)
def test_facts_that_make_no_sense_are_no_answer(answer: Any) -> None:
    with pytest.raises(DriverError, match="makes no sense"):
        Driver(Scripted(answer)).facts([gpu()], ["mig"], 1.0)


def test_an_answer_that_came_too_late_is_not_taken_for_the_next_one() -> None:
    late = {uuid(0): {"memory": list(memory(3)), "fault": None, "listed": [], "unlisted": None}}
    made = Driver(Scripted(Silent(), late, {uuid(0): {"mig": ([0, 1], None, "")}}))
    with pytest.raises(Unanswered):
        made.sample([gpu()], 1.0)
    assert made.facts([gpu()], ["mig"], 1.0) == {gpu(): {"mig": Fact((0, 1))}}


# In the parent -------------------------------------------------------------------------------------------------------


class Scripted:
    """A child whose answers are written down; an exception among them is raised."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.sent: list[Any] = []

    def send(self, request: Any) -> None:
        self.sent.append(request)

    def receive(self, timeout: float) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def raised(*answers: Any) -> DriverError:
    with pytest.raises(DriverError) as caught:
        Driver(Scripted(*answers)).inventory(60.0)
    return caught.value


@pytest.mark.case("C4")
def test_a_driver_that_is_silent() -> None:
    found = raised(Silent())
    assert str(found) == "the NVIDIA driver did not answer nvmlInit within 60 s"
    assert "dmesg" in found.remedy and not found.missing
    with pytest.raises(DriverError, match="did not answer a query within 15 s"):
        Driver(Scripted(Silent())).sample([gpu()], 15.0)


def test_a_driver_that_kills_who_asks_it() -> None:
    assert str(raised(Died("was ended by SIGSEGV"))) == "the process that asked NVML for nvmlInit was ended by SIGSEGV"


@pytest.mark.parametrize(
    ("code", "words", "missing"),
    [(9, "modprobe", False), (12, "ldconfig", True), (15, "Xid 79", False), (18, "reboot", False), (999, "", False)],
)
@pytest.mark.case("C3")
def test_a_driver_that_fails_says_what_to_do(code: int, words: str, missing: bool) -> None:
    found = raised({"error": code, "text": "in NVML's words"})
    assert str(found) == "NVML cannot be used: in NVML's words"
    assert words in found.remedy
    assert (found.code, found.missing) == (code, missing)


def test_the_inventory_is_asked_for_once() -> None:
    child = Scripted({"driver": "570.1", "path": "/x", "gpus": []})
    made = Driver(child)
    assert made.inventory(1.0) is made.inventory(1.0)
    assert child.sent == []


class Course(Nvml):
    """A GPU with this many MiB used, sample by sample, the last for ever; time goes by while somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *used: int) -> None:
        super().__init__()
        self.used, self.now = [*used], 0.0
        monkeypatch.setattr(library, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep))

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: Optional[int] = None) -> SimpleNamespace:
        said = super().nvmlDeviceGetMemoryInfo(handle, version)
        said.used = (self.used.pop(0) if len(self.used) > 1 else self.used[0]) * MIB
        said.free = said.total - said.used - said.reserved
        return said


def test_memory_is_watched_without_the_lists(fake: Nvml) -> None:
    made = driver(fake)
    gpu = made.inventory(1.0).gpus[0]
    fake.lists[("Compute", 0)] = [record(10, 5)]
    fake.called.clear()
    reading = made.watch([gpu], 0.0, 1.0)[gpu.uuid]
    assert fake.called == ["memory v2"] and reading.listed == ()
    assert reading == made.sample([gpu], 1.0)[gpu.uuid]._replace(listed=())


@pytest.mark.case("B1")
@pytest.mark.parametrize(
    ("course", "seconds", "used", "took"),
    [
        ((1523, 1523), 1.0, 1523, 1.0),
        ((1523, 1523, 1523, 3), 1.0, 3, 0.3),
        # It was other while nobody looked. Somebody who always has news is asked no more often than others.
        ((1523, 3), 1.0, 3, 0.1),
        ((1523, 1524), 1.0, 1524, 0.1),
        ((1523, 3), 0.05, 3, 0.05),
        ((1523, 3), 0.0, 3, 0.0),
    ],
)
def test_what_is_watched_is_told_as_soon_as_it_is_news(
    monkeypatch: pytest.MonkeyPatch, course: Sequence[int], seconds: float, used: int, took: float
) -> None:
    fake = Course(monkeypatch, *course)
    made = driver(fake)
    gpus = made.inventory(1.0).gpus[:1]
    made.watch(gpus, 0.0, 1.0)
    memory = made.watch(gpus, seconds, 1.0)[uuid(0)].memory
    assert memory is not None and memory.used == used * MIB
    assert fake.now == pytest.approx(took)


def test_what_is_watched_may_take_as_long_as_it_is_watched() -> None:
    """The timeout is for what comes on top of that."""
    asked: list[float] = []

    class Slow(Scripted):
        def receive(self, timeout: float) -> Any:
            asked.append(timeout)
            return super().receive(timeout)

    child = Slow({uuid(0): {"memory": list(memory(3)), "fault": None, "listed": [], "unlisted": None}})
    Driver(child).watch([gpu(0)], 7.0, 15.0)
    assert child.sent == [("watch", [uuid(0)], 7.0)] and asked == [pytest.approx(22.0, abs=0.5)]


@pytest.mark.case("C5")
def test_a_gpu_that_cannot_be_reached_is_not_asked_about() -> None:
    answer = {uuid(0): {"memory": list(memory(3)), "fault": None, "listed": [], "unlisted": None}}
    child = Scripted(answer)
    readings = Driver(child).sample([gpu(0), gpu(1, uuid="", fault="GPU is lost")], 1.0)
    assert child.sent == [("sample", [uuid(0)])]
    assert (readings[""].fault, readings[uuid(0)].memory) == ("GPU is lost", memory(3))


@pytest.mark.parametrize(
    ("figures", "sane"),
    [
        (memory(3), True),
        (memory(0, reserved=None, call="v1"), True),
        # Within a fiftieth of the total: drivers round, and pages are lost to error correction.
        (memory(3)._replace(free=(TOTAL - 503 - TOTAL // 50) * MIB), True),
        (memory(3)._replace(free=(TOTAL - 504 - TOTAL // 50) * MIB), False),
        (memory(3)._replace(free=2**64 - 1), False),
        (Memory(0, 0, 0, 0, "v2"), False),
        (Memory(0, 0, TOTAL * MIB, None, "v1"), False),
    ],
)
@pytest.mark.case("C16")
def test_figures_that_cannot_be_are_no_measure(figures: Memory, sane: bool) -> None:
    answer = {uuid(0): {"memory": list(figures), "fault": None, "listed": [(0, 1, "compute")], "unlisted": None}}
    found = Driver(Scripted(answer)).sample([gpu()], 1.0)[uuid(0)]
    if sane:
        assert found.memory == figures
    else:
        assert found.memory is None and found.listed == ()
        assert found.fault is not None and "impossible memory figures" in found.fault


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ((0, 1, "compute"), "PID 0"),
        ((2**22 + 1, 1, "compute"), "PID 4194305"),
        ((10, TOTAL * MIB + 1, "mps"), "bytes for PID 10"),
        ((10, TOTAL * MIB, "compute"), None),
        ((2**22, None, "graphics"), None),
        ((1, 0, "compute"), None),
    ],
)
@pytest.mark.case("C14")
def test_a_scrambled_list_is_not_believed(
    entry: tuple[int, Optional[int], str], words: Optional[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "_pid_max", lambda: 2**22)
    good = (11, 5 * MIB, "compute")
    answer = {uuid(0): {"memory": list(memory(3)), "fault": None, "listed": [good, entry], "unlisted": None}}
    found = Driver(Scripted(answer)).sample([gpu()], 1.0)[uuid(0)]
    if words is None:
        assert found.distrust is None
    else:
        assert found.distrust is not None and words in found.distrust
