# SPDX-License-Identifier: Apache-2.0
"""The stand-in driver, tested on the host: real nvidia-ml-py and gpustat run on it, real processes use it.

Knows what nvml.h documents and what the bookkeeper promises.  Needs a C compiler, no node and no device.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest
from simgpu_client import MIB, Client, Refused

pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
if shutil.which("gcc") is None:
    pytest.skip("needs gcc", allow_module_level=True)

HERE = Path(__file__).parent
PATIENCE = 20.0

# Evaluates one expression a line with the real nvidia-ml-py, in a process of its own as every NVML user has.
PROBE = r"""
import ctypes, json, os, sys, time
import pynvml as N

def h(i): return N.nvmlDeviceGetHandleByIndex(i)
def v2(i):
    m = N.nvmlDeviceGetMemoryInfo(h(i), version=N.nvmlMemory_v2)
    return dict(total=m.total, reserved=m.reserved, free=m.free, used=m.used)
def v1(i):
    m = N.nvmlDeviceGetMemoryInfo(h(i))
    return dict(total=m.total, free=m.free, used=m.used)
def records(ps): return [[p.pid, p.usedGpuMemory] for p in ps]
def compute(i): return records(N.nvmlDeviceGetComputeRunningProcesses(h(i)))
def graphics(i): return records(N.nvmlDeviceGetGraphicsRunningProcesses(h(i)))
def mps(i): return records(N.nvmlDeviceGetMPSComputeRunningProcesses(h(i)))
def lib(): return ctypes.CDLL("libnvidia-ml.so.1")
def raw(function, handle, room, array=True):
    # The bare C call: its status, the count it leaves, and the records it wrote.
    count = ctypes.c_uint(room)
    procs = (N.c_nvmlProcessInfo_t * 8)() if array else None
    rc = getattr(lib(), function)(handle, ctypes.byref(count), procs)
    return [rc, count.value, [p.pid for p in procs if p.pid] if array else None]
def used_after_kill(i, pid, changes, seconds=10):
    # The values that a GPU's memory goes through, up to so many changes, looking as often as can be.
    handle = h(i)
    used = lambda: N.nvmlDeviceGetMemoryInfo(handle, version=N.nvmlMemory_v2).used
    seen, end = [used()], time.monotonic() + seconds
    os.kill(pid, 9)
    while time.monotonic() < end and len(seen) <= changes:
        now = used()
        if now != seen[-1]: seen.append(now)
    return seen
def in_fork(f):
    read, write = os.pipe()
    if os.fork() == 0:
        try: f(); code = 0
        except N.NVMLError as e: code = e.value
        os.write(write, json.dumps(code).encode()); os._exit(0)
    os.wait()
    return json.loads(os.read(read, 64))
def open_and_mapped():
    return [len(os.listdir("/proc/self/fd")), sum(1 for _ in open("/proc/self/maps"))]

sys.stdout.write("\n"); sys.stdout.flush()
for line in sys.stdin:
    try: answer = {"value": eval(line)}
    except N.NVMLError as e: answer = {"nvml": e.value, "text": str(e)}
    except Exception as e: answer = {"error": type(e).__name__}
    sys.stdout.write(json.dumps(answer, default=str) + "\n"); sys.stdout.flush()
"""


class NvmlError(Exception):
    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__(str(answer))
        self.code = answer.get("nvml")
        self.name = answer.get("error")


class Probe:
    """A process that uses NVML; called with an expression, it gives its value or raises NvmlError."""

    def __init__(self, env: dict[str, str], *, init: bool = True) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROBE], env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        self.process.stdout.readline()
        if init:
            self("N.nvmlInit()")

    def send(self, expression: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise NvmlError({"error": f"ended with {self.process.wait()}"})
        answer = json.loads(line)
        if "value" not in answer:
            raise NvmlError(answer)
        return answer["value"]

    def __call__(self, expression: str) -> Any:
        self.send(expression)
        return self.receive()

    def code(self, expression: str) -> int:
        """The nvmlReturn_t that the expression raises, 0 if none."""
        try:
            self(expression)
        except NvmlError as error:
            if error.code is None:
                raise
            return int(error.code)
        return 0

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class Sim:
    """A bookkeeper in a folder of its own, and whatever a test starts beside it; all ended with the test."""

    def __init__(self, library: Path, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        # Short, since the address of a socket has 108 bytes and a test's folder can be longer.
        self.home = Path(f"/tmp/simgpu-test-{os.getpid()}")
        self.home.mkdir(exist_ok=True)
        self.notify.bind(str(self.home / "notify"))
        self.notify.settimeout(PATIENCE)
        (self.home / "control").symlink_to(self.run / "control")
        self.env = dict(
            os.environ,
            SIMGPU_STATE=str(self.run / "state"),
            SIMGPU_CONTROL=str(self.home / "control"),
            LD_LIBRARY_PATH=str(library),
            NOTIFY_SOCKET=str(self.home / "notify"),
        )
        self.probes: list[Probe] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.client = Client(str(self.home / "control"))
        self.ask = self.client.ask

    def probe(self, *, init: bool = True, **env: str) -> Probe:
        probe = Probe({**self.env, **env}, init=init)
        self.probes.append(probe)
        return probe

    def start(self, argv: list[str], *, ready: bool = True, **env: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(argv, env={**self.env, **env})
        self.processes.append(process)
        if ready:
            assert b"READY=1" in self.notify.recv(4096)
        return process

    def holder(self, *options: str, ready: bool = True) -> subprocess.Popen[bytes]:
        return self.start([sys.executable, str(HERE / "holder.py"), *options], ready=ready)

    def used(self, gpu: int) -> int:
        """MiB beside the baseline, as the books have it."""
        return int(self.ask("state")["gpus"][gpu]["used_bytes"]) // MIB - 3

    def close(self) -> None:
        for probe in self.probes:
            probe.close()
        bookkeeper, *others = self.processes
        for process in others:
            process.kill()
            process.wait()
        with contextlib.suppress(OSError, Refused):
            # Children that a holder left behind are known to the bookkeeper, if to nobody else.
            for allocation in self.ask("state")["allocations"]:
                for pid, _ in allocation["owners"]:
                    if pid != os.getpid():
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
        bookkeeper.kill()
        bookkeeper.wait()
        self.client.close()
        self.notify.close()
        shutil.rmtree(self.home)


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def build(*flags: str) -> Path:
        folder = tmp_path_factory.mktemp("library")
        subprocess.run([HERE / "install.sh", "--build-only", folder, *flags], check=True)
        return folder

    return build


@pytest.fixture(scope="session")
def library(build: Callable[..., Path]) -> Path:
    return build()


@pytest.fixture
def sim(library: Path, tmp_path: Path) -> Iterator[Sim]:
    sim = Sim(library, tmp_path)
    try:
        sim.start([sys.executable, str(HERE / "simgpu.py"), "--run", str(sim.run)])
        yield sim
    finally:
        sim.close()


def process() -> subprocess.Popen[bytes]:
    """Somebody to charge memory to, who ends when killed."""
    return subprocess.Popen(["sleep", "1000"])


@pytest.fixture
def somebody() -> Iterator[subprocess.Popen[bytes]]:
    one = process()
    yield one
    one.kill()
    one.wait()


def refusal(ask: Callable[..., Any], op: str, **fields: Any) -> str:
    with pytest.raises(Refused) as caught:
        ask(op, **fields)
    return caught.value.code


# ---- the library: who is there


def test_a_node_is_what_it_was_reset_to(sim: Sim) -> None:
    sim.ask("reset", gpus=3, minors="reversed", driver="535.1", name="NVIDIA L4")
    sim.ask("set_gpu", gpu=1, uuid="GPU-11111111-0000-0000-0000-000000000001", pci="00000001:C1:00.0")
    nvml = sim.probe()
    assert nvml("N.nvmlDeviceGetCount()") == 3
    assert nvml("N.nvmlSystemGetDriverVersion()") == "535.1"
    assert nvml("[N.nvmlDeviceGetMinorNumber(h(i)) for i in range(3)]") == [2, 1, 0]
    assert nvml("[N.nvmlDeviceGetIndex(h(i)) for i in range(3)]") == [0, 1, 2]
    assert nvml("N.nvmlDeviceGetName(h(2))") == "NVIDIA L4"
    assert nvml("N.nvmlDeviceGetUUID(h(1))") == "GPU-11111111-0000-0000-0000-000000000001"
    assert nvml("N.nvmlDeviceGetIndex(N.nvmlDeviceGetHandleByUUID(N.nvmlDeviceGetUUID(h(1))))") == 1
    assert nvml("N.nvmlDeviceGetPciInfo(h(1)).busId") == "00000001:C1:00.0"
    assert nvml("N.nvmlDeviceGetPciInfo(h(1)).domain") == 1
    assert nvml("N.nvmlDeviceGetIndex(N.nvmlDeviceGetHandleByPciBusId('1:c1:0.0'))") == 1
    assert nvml("N.nvmlDeviceGetIndex(N.nvmlDeviceGetHandleByPciBusId('1b:00.0'))") == 0
    assert len(set(nvml("[N.nvmlDeviceGetUUID(h(i)) for i in range(3)]"))) == 3


def test_what_is_not_there_is_refused_with_the_documented_code(sim: Sim) -> None:
    nvml = sim.probe()
    assert nvml.code("N.nvmlDeviceGetHandleByIndex(8)") == 2
    assert nvml.code("N.nvmlDeviceGetHandleByUUID('GPU-0')") == 6
    assert nvml.code("N.nvmlDeviceGetHandleByPciBusId('0000:ff:00.0')") == 6
    assert nvml.code("N.nvmlDeviceGetHandleByPciBusId('rubbish')") == 2
    assert nvml("lib().nvmlDeviceGetIndex(None, None)") == 2
    assert nvml("lib().nvmlDeviceGetUUID(h(0), ctypes.create_string_buffer(40), 40)") == 7
    assert nvml("lib().nvmlDeviceGetUUID(h(0), None, 96)") == 2
    assert nvml("lib().nvmlDeviceGetUUID(h(0), ctypes.create_string_buffer(41), 41)") == 0
    assert nvml.code("N.nvmlDeviceGetFanSpeed(h(0))") == 3
    assert nvml("N.nvmlErrorString(15)") == "GPU is lost"


def test_nothing_works_before_init_or_after_the_last_shutdown(sim: Sim) -> None:
    nvml = sim.probe(init=False)
    # nvidia-ml-py itself says "uninitialised" until it has loaded a library, so the library is asked.
    count = "lib().nvmlDeviceGetCount_v2(ctypes.byref(ctypes.c_uint()))"
    assert nvml(count) == 1
    assert nvml("lib().nvmlShutdown()") == 1
    nvml("N.nvmlInit()")
    nvml("N.nvmlInit()")
    nvml("N.nvmlShutdown()")
    assert nvml(count) == 0
    nvml("N.nvmlShutdown()")
    assert nvml(count) == 1


def test_a_forked_child_gets_no_sense_from_its_parents_nvml(sim: Sim) -> None:
    nvml = sim.probe()
    assert nvml("in_fork(lambda: N.nvmlDeviceGetCount())") == 999
    assert nvml("N.nvmlDeviceGetCount()") == 8


def test_without_a_state_there_is_no_driver(sim: Sim) -> None:
    running = sim.probe()
    sim.ask("unload")
    assert sim.probe(init=False).code("N.nvmlInit()") == 9
    assert running.code("N.nvmlDeviceGetCount()") == 999
    sim.ask("load")
    assert sim.probe()("N.nvmlDeviceGetCount()") == 8


# ---- the library: memory


def test_the_first_memory_call_counts_reserved_as_used(sim: Sim) -> None:
    sim.ask("reset", gpus=1, total_mib=81559, reserved_mib=904, baseline_mib=8)
    nvml = sim.probe()
    assert nvml("v2(0)") == {"total": 81559 * MIB, "reserved": 904 * MIB, "used": 8 * MIB, "free": (81559 - 912) * MIB}
    assert nvml("v1(0)") == {"total": 81559 * MIB, "used": 912 * MIB, "free": (81559 - 912) * MIB}


def test_memory_that_cannot_be_had(sim: Sim) -> None:
    nvml = sim.probe()
    assert nvml.code("N.nvmlDeviceGetMemoryInfo(h(0), version=0x03000028)") == 25
    assert nvml.code("N.nvmlDeviceGetMemoryInfo(h(0), version=0x02000020)") == 25
    assert nvml("lib().nvmlDeviceGetMemoryInfo_v2(h(0), None)") == 2
    sim.ask("set_gpu", gpu=0, memory_v2=False)
    assert (nvml.code("v2(0)"), nvml.code("v1(0)"), nvml.code("v2(1)")) == (3, 0, 0)
    sim.ask("set_gpu", gpu=0, memory=False)
    assert (nvml.code("v2(0)"), nvml.code("v1(0)")) == (3, 3)


def test_figures_can_be_made_insane_and_sane_again(sim: Sim) -> None:
    nvml = sim.probe()
    sim.ask("set_gpu", gpu=0, free=2**64 - 1, used=7)
    assert (nvml("v2(0)['free']"), nvml("v2(0)['used']")) == (2**64 - 1, 7)
    sim.ask("set_gpu", gpu=0, free=None, used=None)
    assert nvml("v2(0)['used']") == 3 * MIB


def test_the_mps_variable_makes_the_library_lie(sim: Sim, somebody: subprocess.Popen[bytes]) -> None:
    sim.ask("alloc", gpu=0, pid=somebody.pid, mib=100)
    assert sim.probe(NVML_MPS_DEVICE_ENUMERATION="1")("v2(0)['used']") == 0
    assert sim.probe(NVML_MPS_DEVICE_ENUMERATION="0")("v2(0)['used']") == 103 * MIB


def test_utilisation_says_nothing_about_memory(sim: Sim) -> None:
    sim.ask("set_gpu", gpu=0, util=100, mem_util=7, baseline_mib=0)
    nvml = sim.probe()
    assert nvml("(lambda u: [u.gpu, u.memory])(N.nvmlDeviceGetUtilizationRates(h(0)))") == [100, 7]
    assert nvml("v2(0)['used']") == 0


# ---- the library: processes


def test_process_lists_follow_the_protocol_of_sizes(sim: Sim) -> None:
    nvml = sim.probe()
    compute = "nvmlDeviceGetComputeRunningProcesses_v3"
    assert nvml(f"raw('{compute}', h(0), 0, False)") == [0, 0, None]
    for pid in (901, 902, 903):
        sim.ask("ghost", gpu=0, pid=pid, mib=1)
    assert nvml(f"raw('{compute}', h(0), 0, False)") == [7, 3, None]
    assert nvml(f"raw('{compute}', h(0), 2)") == [7, 3, []]
    assert nvml(f"raw('{compute}', h(0), 2, False)") == [2, 2, None]
    assert nvml(f"raw('{compute}', h(0), 3)") == [0, 3, [901, 902, 903]]
    assert nvml(f"raw('{compute}', h(0), 8)") == [0, 3, [901, 902, 903]]
    assert nvml(f"lib().{compute}(h(0), None, None)") == 2
    assert nvml("raw('nvmlDeviceGetGraphicsRunningProcesses_v3', h(0), 0, False)") == [0, 0, None]


def test_records_of_every_kind(sim: Sim, somebody: subprocess.Popen[bytes]) -> None:
    pid = somebody.pid
    sim.ask("alloc", gpu=0, pid=pid, mib=10, kind="compute,graphics")
    sim.ask("alloc", gpu=1, pid=pid, mib=20, kind="mps")
    sim.ask("alloc", gpu=2, pid=pid, mib=30, na=True)
    sim.ask("alloc", gpu=3, pid=pid, mib=40, kind="none")
    sim.ask("alloc", gpu=4, pid=pid, mib=50, list_pid=812345, list_mib=9)
    nvml = sim.probe()
    assert nvml("compute(0)") == nvml("graphics(0)") == [[pid, 10 * MIB]]
    assert nvml("v2(0)['used']") == 13 * MIB
    assert (nvml("compute(1)"), nvml("mps(1)")) == ([], [[pid, 20 * MIB]])
    assert nvml("compute(2)") == [[pid, None]]
    assert (nvml("compute(3)"), nvml("v2(3)['used']")) == ([], 43 * MIB)
    assert (nvml("compute(4)"), nvml("v2(4)['used']")) == ([[812345, 9 * MIB]], 53 * MIB)
    assert nvml("N.nvmlDeviceGetComputeRunningProcesses(h(0))[0].gpuInstanceId") == 0xFFFFFFFF


def test_scrambled_records_come_as_they_are(sim: Sim) -> None:
    sim.ask("ghost", gpu=0, pid=0, bytes=5, charge_mib=0)
    sim.ask("ghost", gpu=0, pid=4294967295, bytes=2**63, charge_mib=0)
    nvml = sim.probe()
    assert nvml("compute(0)") == [[0, 5], [4294967295, 2**63]]
    assert nvml("v2(0)['used']") == 3 * MIB


def test_older_libraries_lack_symbols(sim: Sim, build: Callable[..., Path], somebody: subprocess.Popen[bytes]) -> None:
    sim.ask("alloc", gpu=0, pid=somebody.pid, mib=10)
    no_v3 = sim.probe(LD_LIBRARY_PATH=str(build("-DNO_V3")))
    with pytest.raises(NvmlError) as caught:
        no_v3("compute(0)")
    assert caught.value.name == "NVMLLibraryMismatchError"
    assert no_v3("records(N.nvmlDeviceGetComputeRunningProcesses_v2(h(0)))") == [[somebody.pid, 10 * MIB]]
    neither = sim.probe(LD_LIBRARY_PATH=str(build("-DNO_V3", "-DNO_V2", "-DNO_MEMORY_V2")))
    assert neither.code("N.nvmlDeviceGetComputeRunningProcesses_v2(h(0))") == 13
    assert neither.code("v2(0)") == 13
    # The oldest record is shorter: pid and bytes.
    call = "lib().nvmlDeviceGetComputeRunningProcesses(h(0), ctypes.byref(ctypes.c_uint(4)), a)"
    first = f"(lambda a: [{call}, a[0], a[1]])((ctypes.c_ulonglong * 8)())"
    assert neither(first) == [0, somebody.pid, 10 * MIB]


# ---- the library: trouble


def test_errors_change_under_a_running_program(sim: Sim) -> None:
    nvml = sim.probe()
    sim.ask("error", function="nvmlDeviceGetMemoryInfo_v2", gpu=3, code="UNKNOWN")
    sim.ask("error", function="nvmlDeviceGet*RunningProcesses_v3", code=4)
    assert [nvml.code(f"v2({i})") for i in range(5)] == [0, 0, 0, 999, 0]
    assert (nvml.code("compute(0)"), nvml.code("graphics(7)"), nvml.code("v1(3)")) == (4, 4, 0)
    sim.ask("clear", function="nvmlDeviceGetMemoryInfo_v2")
    assert (nvml.code("v2(3)"), nvml.code("compute(0)")) == (0, 4)
    sim.ask("clear")
    assert nvml.code("compute(0)") == 0


def test_an_error_can_pass_by_itself(sim: Sim) -> None:
    nvml = sim.probe()
    sim.ask("error", function="nvmlDeviceGetCount_v2", code="TIMEOUT", **{"for": 0.2})
    assert nvml.code("N.nvmlDeviceGetCount()") == 10
    assert (
        nvml(
            "[[time.sleep(0.01) for _ in iter(lambda: lib().nvmlDeviceGetCount_v2(ctypes.byref("
            "ctypes.c_uint())), 0)], 1][1]"
        )
        == 1
    )


def test_init_fails_as_told_whichever_init_is_called(sim: Sim) -> None:
    sim.ask("error", function="nvmlInit", code="LIB_RM_VERSION_MISMATCH")
    nvml = sim.probe(init=False)
    assert nvml.code("N.nvmlInit()") == 18
    assert nvml("[lib().nvmlInit_v2(), lib().nvmlInit()]") == [18, 18]


def test_a_hang_lasts_until_it_is_killed_and_can_be_awaited(sim: Sim) -> None:
    sim.ask("calls", start=True)
    sim.ask("hang", function="nvmlDeviceGetMemoryInfo_v2", gpu=2)
    nvml = sim.probe()
    assert nvml.code("v2(1)") == 0
    nvml.send("v2(2)")
    sim.ask("wait", call="nvmlDeviceGetMemoryInfo_v2", count=2)
    # It hangs for those who are in it, even when others no longer get there.
    sim.ask("clear")
    assert sim.probe()("v2(2)['used']") == 3 * MIB
    assert nvml.process.poll() is None
    nvml.process.terminate()
    assert nvml.process.wait(PATIENCE) == -signal.SIGTERM


def test_a_hang_can_be_in_whatever_a_path_hangs_in(sim: Sim) -> None:
    os.mkfifo(sim.folder / "fifo")
    end = os.open(sim.folder / "fifo", os.O_RDWR)
    sim.ask("hang", function="nvmlInit", path=str(sim.folder / "fifo"))
    sim.ask("calls", start=True)
    nvml = sim.probe(init=False)
    nvml.send("N.nvmlInit()")
    sim.ask("wait", call="nvmlInit*")
    assert nvml.process.poll() is None
    os.close(end)


def test_a_delay_delays_and_a_crash_crashes(sim: Sim) -> None:
    nvml = sim.probe()
    sim.ask("delay", function="nvmlDeviceGetCount_v2", ms=150)
    assert nvml("(lambda t: [N.nvmlDeviceGetCount(), time.monotonic() - t])(time.monotonic())[1] >= 0.15")
    sim.ask("crash", function="nvmlDeviceGetName", gpu=1)
    assert nvml.code("N.nvmlDeviceGetName(h(0))") == 0
    nvml.send("N.nvmlDeviceGetName(h(1))")
    assert nvml.process.wait(PATIENCE) == -signal.SIGSEGV


def test_lost_and_missing_gpus(sim: Sim) -> None:
    nvml = sim.probe()
    sim.ask("set_gpu", gpu=3, lost="calls")
    assert [nvml.code(call) for call in ("h(3)", "v2(3)", "compute(3)", "v2(4)")] == [0, 15, 15, 0]
    sim.ask("set_gpu", gpu=3, lost="handle")
    assert nvml.code("h(3)") == 15
    assert nvml("N.nvmlDeviceGetCount()") == 8
    sim.ask("set_gpu", gpu=3, lost="no", missing=True)
    assert nvml("N.nvmlDeviceGetCount()") == 7
    assert nvml("[N.nvmlDeviceGetMinorNumber(h(i)) for i in range(7)]") == [0, 1, 2, 4, 5, 6, 7]
    assert nvml.code("h(7)") == 2
    sim.ask("set_gpu", gpu=3, missing=False)
    sim.ask("order", slots=[7, 6, 5, 4, 3, 2, 1, 0])
    assert nvml("[N.nvmlDeviceGetMinorNumber(h(i)) for i in range(3)]") == [7, 6, 5]
    # Faults go by slot, wherever the index is.
    sim.ask("error", function="nvmlDeviceGetHandleByIndex_v2", gpu=7, code="GPU_IS_LOST")
    assert (nvml.code("h(0)"), nvml.code("h(7)")) == (15, 0)


def test_calls_leave_nothing_behind(sim: Sim, somebody: subprocess.Popen[bytes]) -> None:
    sim.ask("alloc", gpu=0, pid=somebody.pid, mib=10)
    nvml = sim.probe()
    round_ = "[(v2(i), compute(i), N.nvmlDeviceGetUUID(h(i)), 0)[3] for i in range(8)]"
    nvml(round_)
    before = nvml("open_and_mapped()")
    nvml(f"[{round_} for _ in range(300)][0][0]")
    fds, maps = nvml("open_and_mapped()")
    # Python's own heap may take another mapping or two; a leak would show as thousands.
    assert fds == before[0] and maps <= before[1] + 8


def test_calls_are_counted_by_function_and_process(sim: Sim) -> None:
    sim.ask("calls", start=True)
    nvml = sim.probe()
    nvml("[N.nvmlDeviceGetName(h(i)) for i in range(4)]")
    counted = sim.ask("calls", list=True)
    assert counted["counts"]["nvmlDeviceGetName"] == 4
    assert counted["pids"] == {str(nvml.process.pid): 9}
    assert [call[3] for call in counted["calls"] if call[2] == "nvmlDeviceGetName"] == ["0", "1", "2", "3"]
    sim.ask("calls", stop=True)
    nvml("N.nvmlDeviceGetCount()")
    assert sim.ask("calls")["counts"] == {}


# ---- modes and errors


def test_modes_are_as_they_were_set(sim: Sim) -> None:
    nvml = sim.probe()
    modes = "[N.nvmlDeviceGetComputeMode(h(0)), N.nvmlDeviceGetPersistenceMode(h(0)), N.nvmlDeviceGetMigMode(h(0))]"
    assert nvml(modes) == [0, 1, [0, 0]]
    sim.ask("set_gpu", gpu=0, compute_mode=3, persistence=False, mig_next="on")
    assert nvml(modes) == [3, 0, [0, 1]]
    assert nvml(modes.replace("h(0)", "h(1)")) == [0, 1, [0, 0]]


def test_persistence_mode_can_be_set(sim: Sim) -> None:
    nvml = sim.probe()
    sim.ask("set_gpu", gpu=1, persistence=False)
    for mode in (1, 0):
        assert nvml(f"N.nvmlDeviceSetPersistenceMode(h(1), {mode})") is None
        assert nvml("[N.nvmlDeviceGetPersistenceMode(h(i)) for i in (0, 1)]") == [1, mode]
    assert nvml.code("N.nvmlDeviceSetPersistenceMode(h(1), 2)") == 2


def test_errors_of_the_memory_are_where_the_generation_keeps_them(sim: Sim) -> None:
    nvml = sim.probe()
    rows, pages = "N.nvmlDeviceGetRemappedRows(h(0))", "N.nvmlDeviceGetRetiredPagesPendingStatus(h(0))"
    errors, ecc = "N.nvmlDeviceGetTotalEccErrors(h(0), {}, {})", "N.nvmlDeviceGetEccMode(h(0))"
    assert (nvml(rows), nvml.code(pages), nvml(errors.format(1, 0)), nvml(ecc)) == ([0, 0, 0, 0], 3, 0, [1, 1])
    sim.ask("set_gpu", gpu=0, remap_pending=True, uncorrected=7)
    assert nvml(rows) == [0, 1, 1, 0]
    assert [nvml(errors.format(kind, counter)) for kind, counter in ((1, 0), (0, 0), (1, 1))] == [7, 0, 0]
    sim.ask("set_gpu", gpu=0, remap_failed=True, remap_pending=False)
    assert nvml(rows) == [0, 1, 0, 1]
    sim.ask("set_gpu", gpu=0, arch=5, retired_pending=True)
    assert (nvml.code(rows), nvml(pages)) == (3, 1)
    sim.ask("set_gpu", gpu=0, ecc=False)
    assert [nvml.code(each) for each in (rows, pages, errors.format(1, 0))] == [3, 3, 3] and nvml(ecc) == [0, 0]


# ---- MIG


def test_instances_have_memory_of_their_own(sim: Sim, somebody: subprocess.Popen[bytes]) -> None:
    nvml = sim.probe()
    assert nvml("N.nvmlDeviceGetMigMode(h(0))") == [0, 0]
    uuids = sim.ask("mig", gpu=0, slices=[1, 2])["uuids"]
    sim.ask("alloc", gpu=0, instance=1, pid=somebody.pid, mib=60)
    assert nvml("N.nvmlDeviceGetMigMode(h(0))") == [1, 1]
    assert [nvml.code(f"N.nvmlDeviceGetRemappedRows(h({i}))") for i in (0, 1)] == [3, 0]
    assert nvml("N.nvmlDeviceGetMaxMigDeviceCount(h(0))") == 7
    assert nvml.code("N.nvmlDeviceGetMigDeviceHandleByIndex(h(0), 2)") == 6
    assert nvml.code("N.nvmlDeviceGetMigDeviceHandleByIndex(h(1), 0)") == 3
    one, two = (f"N.nvmlDeviceGetMigDeviceHandleByIndex(h(0), {i})" for i in (0, 1))
    used = "N.nvmlDeviceGetMemoryInfo({}, version=N.nvmlMemory_v2).used"
    assert nvml(used.format(one)) == 0
    assert nvml(used.format(two)) == 60 * MIB
    assert nvml("v2(0)['used']") == 63 * MIB
    assert nvml(f"records(N.nvmlDeviceGetComputeRunningProcesses({one}))") == []
    assert nvml(f"records(N.nvmlDeviceGetComputeRunningProcesses({two}))") == [[somebody.pid, 60 * MIB]]
    assert nvml("[[p.pid, p.gpuInstanceId] for p in N.nvmlDeviceGetComputeRunningProcesses(h(0))]") == [
        [somebody.pid, 2]
    ]
    assert nvml(f"N.nvmlDeviceGetIndex(N.nvmlDeviceGetHandleByUUID({uuids[1]!r}))") == 1
    assert nvml(f"N.nvmlDeviceGetUUID({two})") == uuids[1]
    assert nvml(f"N.nvmlDeviceIsMigDeviceHandle({two}).value") == 1
    assert nvml(f"N.nvmlDeviceGetUUID(N.nvmlDeviceGetDeviceHandleFromMigDeviceHandle({two}))") == nvml(
        "N.nvmlDeviceGetUUID(h(0))"
    )
    assert nvml(f"[N.nvmlDeviceGetGpuInstanceId({two}), N.nvmlDeviceGetComputeInstanceId({two})]") == [2, 0]
    sim.ask("error", function="nvmlDeviceGetMemoryInfo*", gpu="0.1", code="NO_PERMISSION")
    assert (nvml.code(used.format(one)), nvml.code(used.format(two)), nvml.code("v2(0)")) == (0, 4, 0)


# ---- the books: memory and those who hold it


def test_memory_comes_back_in_one_step_after_the_end(sim: Sim, somebody: subprocess.Popen[bytes]) -> None:
    pid = somebody.pid
    first = sim.ask("alloc", gpu=0, pid=pid, mib=1000, release_delay=0.3)
    second = sim.ask("alloc", gpu=0, pid=pid, mib=500, release_delay=0.3)
    nvml = sim.probe()
    nvml.send(f"used_after_kill(0, {pid}, 1)")
    sim.ask("wait", gone=pid)
    assert sim.used(0) == 1500
    assert sim.probe()("compute(0)") == []
    sim.ask("wait", released=[first["id"], second["id"]])
    assert nvml.receive() == [1503 * MIB, 3 * MIB]
    stamps = sim.ask("releases")["releases"]
    assert [(s["id"], s["pid"], s["bytes"]) for s in stamps] == [
        (first["id"], pid, 1000 * MIB),
        (second["id"], pid, 500 * MIB),
    ]
    for stamp in stamps:
        assert 0.3 <= stamp["released_boottime"] - stamp["gone_boottime"] < 5
    lines = (sim.run / "releases").read_text().splitlines()
    assert [json.loads(line) for line in lines] == stamps


def test_a_zombie_leader_is_not_gone_and_a_zombie_is(sim: Sim) -> None:
    leader = sim.holder("--thread-exit", "--gpu", "0", "--mib", "10")
    stat = Path(f"/proc/{leader.pid}/stat").read_text()
    assert stat.rpartition(")")[2].split()[0] == "Z"
    assert refusal(sim.ask, "wait", gone=leader.pid, timeout=0.1) == "timeout"
    os.kill(leader.pid, signal.SIGKILL)
    # Not waited for by its parent, which is this test, and gone all the same.
    sim.ask("wait", gone=leader.pid)
    sim.ask("wait", gpu=0, used_max_mib=3)


def test_memory_that_never_comes_back_by_itself(sim: Sim, somebody: subprocess.Popen[bytes]) -> None:
    stuck = sim.ask("alloc", gpu=0, pid=somebody.pid, mib=10, release_delay="never", keep_listed=True)
    somebody.kill()
    sim.ask("wait", gone=somebody.pid)
    assert sim.probe()("compute(0)") == [[somebody.pid, 10 * MIB]]
    assert refusal(sim.ask, "wait", released=stuck["id"], timeout=0.3) == "timeout"
    sim.ask("update", id=stuck["id"], release_delay=0)
    sim.ask("wait", released=stuck["id"])
    assert sim.used(0) == 0


def test_memory_of_nobody_and_of_a_pid_that_is_nowhere(sim: Sim) -> None:
    leak = sim.ask("leak", gpu=2, mib=540)
    ghost = sim.ask("ghost", gpu=1, mib=100)
    assert not Path(f"/proc/{ghost['pid']}").exists()
    nvml = sim.probe()
    assert (nvml("compute(2)"), nvml("v2(2)['used']")) == ([], 543 * MIB)
    assert (nvml("compute(1)"), nvml("v2(1)['used']")) == ([[ghost["pid"], 100 * MIB]], 103 * MIB)
    sim.ask("free", id=[leak["id"], ghost["id"]])
    assert (nvml("compute(1)"), nvml("v2(1)['used']"), nvml("v2(2)['used']")) == ([], 3 * MIB, 3 * MIB)
    assert [s["why"] for s in sim.ask("releases")["releases"]] == ["freed", "freed"]


def test_children_keep_what_they_inherited(sim: Sim, somebody: subprocess.Popen[bytes]) -> None:
    heir = process()
    try:
        sim.ask("alloc", gpu=0, pid=somebody.pid, mib=10, release_delay=0, keep_listed=True)
        sim.ask("share", pid=heir.pid, **{"with": somebody.pid})
        somebody.kill()
        sim.ask("wait", gone=somebody.pid)
        assert (sim.used(0), sim.probe()("compute(0)")) == (10, [[somebody.pid, 10 * MIB]])
    finally:
        heir.kill()
        heir.wait()
    sim.ask("wait", gpu=0, used_max_mib=3)


@pytest.mark.parametrize("after", [0, 0.3])
def test_memory_can_go_to_a_sibling(sim: Sim, somebody: subprocess.Popen[bytes], after: float) -> None:
    victim = process()
    taken = sim.ask("alloc", gpu=0, pid=victim.pid, mib=90, release_delay=0, heir=somebody.pid, heir_after=after)
    nvml = sim.probe()
    # With a gap the drop can be seen, without it there is none.
    values = nvml(f"used_after_kill(0, {victim.pid}, 2, {10 if after else 1})")
    assert values == ([93 * MIB, 3 * MIB, 93 * MIB] if after else [93 * MIB])
    victim.wait()
    sim.ask("wait", released=taken["id"], allocated=somebody.pid)
    assert nvml("compute(0)") == []
    sim.ask("update", pid=somebody.pid, kind="compute")
    assert nvml("compute(0)") == [[somebody.pid, 90 * MIB]]


def test_memory_grows_while_its_owner_lives(sim: Sim, somebody: subprocess.Popen[bytes]) -> None:
    sim.ask(
        "alloc", gpu=0, pid=somebody.pid, mib=10, grow_mib=10, grow_every=0.02, grow_max_mib=50, release_delay="never"
    )
    sim.ask("wait", gpu=0, used_min_mib=53)
    assert refusal(sim.ask, "wait", gpu=0, used_min_mib=54, timeout=0.2) == "timeout"
    sim.ask("update", pid=somebody.pid, grow_max_mib=1000000)
    sim.ask("wait", gpu=0, used_min_mib=80)
    somebody.kill()
    sim.ask("wait", gone=somebody.pid)
    at_the_end = sim.used(0)
    assert refusal(sim.ask, "wait", gpu=0, used_min_mib=at_the_end + 4, timeout=0.2) == "timeout"


def test_there_is_no_more_memory_than_there_is(sim: Sim, somebody: subprocess.Popen[bytes]) -> None:
    room = 81559 - 904 - 3
    sim.ask("leak", gpu=0, mib=room - 100)
    assert refusal(sim.ask, "alloc", gpu=0, pid=somebody.pid, mib=101) == "out_of_memory"
    sim.ask("alloc", gpu=0, pid=somebody.pid, mib=100)
    assert refusal(sim.ask, "alloc", gpu=0, pid=somebody.pid, bytes=1) == "out_of_memory"


def test_a_client_allocates_for_itself(sim: Sim) -> None:
    assert sim.ask("alloc", gpu=0, mib=5)["pid"] == os.getpid()
    sim.ask("free")
    assert sim.used(0) == 0
    assert refusal(sim.ask, "free") == "no_such_allocation"


def test_nonsense_is_refused_and_harms_nobody(sim: Sim) -> None:
    assert refusal(sim.ask, "alloc", gpu=9, mib=1) == "no_such_gpu"
    assert refusal(sim.ask, "alloc", gpu=0) == "bad_request"
    assert refusal(sim.ask, "alloc", gpu=0, mib=1, kind="magic") == "bad_request"
    assert refusal(sim.ask, "alloc", gpu=0, mib=1, pid=4194303) == "no_such_process"
    assert refusal(sim.ask, "alloc", gpu=0, instance=0, mib=1) == "no_such_instance"
    assert refusal(sim.ask, "explode") == "unknown_op"
    assert refusal(sim.ask, "set_gpu", gpu=0, colour="red") == "bad_request"
    assert refusal(sim.ask, "set_gpu", gpu=0, name="two\nlines") == "bad_request"
    assert refusal(sim.ask, "reset", gpus=17) == "bad_request"
    assert refusal(sim.ask, "error", function="nvmlInit *", code=1) == "bad_request"
    with socket.socket(socket.AF_UNIX) as rude:
        rude.connect(sim.client.path)
        rude.sendall(b"not json\n[]\n")
        assert b"bad_request" in rude.recv(4096)
    assert sim.ask("state")["allocations"] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace of one's own needs root")
def test_a_reused_pid_is_somebody_else(sim: Sim) -> None:
    # In a PID namespace of its own the next pid can be chosen, so the newcomer gets the very same number.
    script = r"""
import os, signal, socket, subprocess, sys
here = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
os.environ["NOTIFY_SOCKET"] = sys.argv[2] + ".notify"
here.bind(sys.argv[2] + ".notify")
sys.path.insert(0, sys.argv[1])
from simgpu_client import Client
def spawn(pid=None):
    if pid: open("/proc/sys/kernel/ns_last_pid", "w").write(str(pid - 1))
    return subprocess.Popen(["sleep", "1000"])
server = subprocess.Popen([sys.executable, sys.argv[1] + "/simgpu.py", "--run", sys.argv[2]])
here.recv(100)
ask = Client(sys.argv[2] + "/control").ask
old = spawn()
a = ask("alloc", gpu=0, pid=old.pid, mib=100, release_delay="never")
old.kill(); old.wait()
new = spawn(old.pid)
assert new.pid == old.pid, (new.pid, old.pid)
b = ask("alloc", gpu=1, pid=new.pid, mib=50, release_delay=0)
one, two = ask("state")["allocations"]
# Even the start times may be the same: they are counted in hundredths of a second.
assert one["first"][0] == two["first"][0], (one, two)
assert one["gone"] is not None and not one["listed"] and two["gone"] is None and two["listed"]
ask("update", id=a["id"], release_delay=0)
ask("wait", released=a["id"])
assert [x["id"] for x in ask("state")["allocations"]] == [b["id"]]
new.kill(); new.wait()
ask("wait", released=b["id"])
print("told apart")
"""
    done = sim.start(
        [
            "unshare",
            "--pid",
            "--fork",
            "--mount-proc",
            "--kill-child",
            sys.executable,
            "-c",
            script,
            str(HERE),
            str(sim.home / "inner"),
        ],
        ready=False,
    )
    assert done.wait(PATIENCE) == 0


# ---- gpustat


def test_gpustat_shows_the_same_figures(sim: Sim, somebody: subprocess.Popen[bytes]) -> None:
    pytest.importorskip("gpustat")
    sim.ask("alloc", gpu=0, pid=somebody.pid, mib=1523)
    sim.ask("leak", gpu=2, mib=540)
    sim.ask("set_gpu", gpu=3, util=100)
    sim.ask("set_gpu", gpu=4, lost="calls")

    def gpustat(*options: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "gpustat", *options], env=sim.env, check=True, capture_output=True, text=True
        )
        return done.stdout

    gpus = json.loads(gpustat("--json"))["gpus"]
    assert [g.get("memory.used") for g in gpus] == [1526, 3, 543, 3, None, 3, 3, 3]
    assert [(p["pid"], p["gpu_memory_usage"], p["command"]) for p in gpus[0]["processes"]] == [
        (somebody.pid, 1523, "sleep")
    ]
    assert (gpus[3]["utilization.gpu"], gpus[1]["memory.total"], gpus[1]["processes"]) == (100, 81559, [])
    assert [g["uuid"] for g in sim.ask("state")["gpus"]][:4] == [g["uuid"] for g in gpus[:4]]
    me = pwd.getpwuid(os.getuid()).pw_name
    assert f"1526 / 81559 MB | {me}/{somebody.pid}(1523M)" in gpustat("-p", "--no-color")


# ---- the holder


def test_a_holder_holds_until_it_is_told_to_end(sim: Sim) -> None:
    ready = sim.folder / "ready"
    holder = sim.holder(
        "--path",
        "/dev/null",
        "--gpu",
        "0,1",
        "--mib",
        "1523",
        "--ready-file",
        str(ready),
        "--comm",
        "VLLM::Worker_TP0",
        "--api-key",
        "secret\n",
    )
    told = json.loads(ready.read_text())
    assert (told["pid"], len(told["allocations"])) == (holder.pid, 2)
    assert Path(f"/proc/{holder.pid}/comm").read_text() == "VLLM::Worker_TP\n"
    assert b"secret\n" in Path(f"/proc/{holder.pid}/cmdline").read_bytes()
    nodes = [os.readlink(fd) for fd in Path(f"/proc/{holder.pid}/fd").iterdir()]
    assert "/dev/null" in nodes and not any("control" in node for node in nodes)
    assert (sim.used(0), sim.used(1)) == (1523, 1523)
    holder.terminate()
    assert holder.wait(PATIENCE) == 0
    sim.ask("wait", released=told["allocations"])


def test_a_holder_that_cannot_have_the_memory_says_so(sim: Sim) -> None:
    sim.ask("leak", gpu=0, mib=80000)
    assert sim.holder("--gpu", "0", "--mib", "10000", ready=False).wait(PATIENCE) == 1


def test_mapped_only(sim: Sim) -> None:
    holder = sim.holder("--path", "/dev/zero", "--map-only", "--gpu", "0", "--mib", "1")
    assert "/dev/zero" in Path(f"/proc/{holder.pid}/maps").read_text()
    assert "/dev/zero" not in [os.readlink(fd) for fd in Path(f"/proc/{holder.pid}/fd").iterdir()]


def test_in_flight(sim: Sim) -> None:
    holder = sim.holder("--path", "/dev/zero", "--in-flight", "--unlisted", "--gpu", "0", "--mib", "1")
    assert "/dev/zero" not in [os.readlink(fd) for fd in Path(f"/proc/{holder.pid}/fd").iterdir()]
    assert (sim.used(0), sim.probe()("compute(0)")) == (1, [])


def test_forked_children_outlive_a_holder_that_leaves(sim: Sim) -> None:
    ready = sim.folder / "ready"
    holder = sim.holder(
        "--gpu",
        "0",
        "--mib",
        "5",
        "--path",
        "/dev/zero",
        "--fork",
        "3",
        "--leave",
        "--setsid",
        "--child-comm",
        "child",
        "--ready-file",
        str(ready),
    )
    assert holder.wait(PATIENCE) == 0
    children = json.loads(ready.read_text())["children"]
    for child in children:
        assert Path(f"/proc/{child}/comm").read_text() == "child\n"
        assert os.getsid(child) == child
        assert "/dev/zero" in [os.readlink(fd) for fd in Path(f"/proc/{child}/fd").iterdir()]
    assert (sim.used(0), sim.probe()("compute(0)")) == (5, [])
    for child in children:
        os.kill(child, signal.SIGTERM)
    sim.ask("wait", gone=children, gpu=0, used_max_mib=3)


def test_ignoring_and_slow_and_stopped_holders(sim: Sim) -> None:
    ignoring = sim.holder("--gpu", "0", "--mib", "1", "--ignore-term")
    slow = sim.holder("--gpu", "1", "--mib", "1", "--term-delay", "0.3")
    stopped = sim.holder("--gpu", "2", "--mib", "1", "--stop")
    os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
    for holder in (ignoring, slow, stopped):
        holder.terminate()
    assert refusal(sim.ask, "wait", gone=slow.pid, timeout=0.1) == "timeout"
    assert slow.wait(PATIENCE) == 0
    assert (ignoring.poll(), stopped.poll()) == (None, None)
    stopped.send_signal(signal.SIGCONT)
    assert stopped.wait(PATIENCE) == 0


def test_a_holder_that_has_a_successor(sim: Sim) -> None:
    holder = sim.holder("--gpu", "0", "--mib", "7", "--term-fork", "--alloc", "release_delay=0")
    holder.terminate()
    assert holder.wait(PATIENCE) == 0
    sim.ask("wait", gone=holder.pid)
    (successor,) = sim.ask("state")["allocations"]
    assert successor["pid"] != holder.pid and successor["bytes"] == 7 * MIB
    os.kill(successor["pid"], signal.SIGTERM)
    sim.ask("wait", gone=successor["pid"], gpu=0, used_max_mib=3)


def test_a_supervised_holder_comes_back(sim: Sim) -> None:
    supervisor = sim.holder("--gpu", "0", "--mib", "7", "--supervise", "0.01", "--alloc", "release_delay=0")
    (first,) = sim.ask("state")["allocations"]
    os.kill(first["pid"], signal.SIGKILL)
    assert b"READY" in sim.notify.recv(100)
    (second,) = sim.ask("state")["allocations"]
    assert second["pid"] != first["pid"]
    supervisor.terminate()
    assert supervisor.wait(PATIENCE) == 0
    sim.ask("wait", gpu=0, used_max_mib=3)


def test_late_allocation_and_late_children(sim: Sim) -> None:
    holder = sim.holder(
        "--gpu", "0", "--mib", "7", "--delay-alloc", "0.2", "--spawn-after", "0.4", "--grow", "1", "--exit-after", "30"
    )
    assert sim.ask("state")["allocations"] == []
    sim.ask("wait", allocated=holder.pid)
    sim.ask("wait", gpu=0, used_min_mib=3 + 14)
    assert len({a["pid"] for a in sim.ask("state")["allocations"]}) == 2


def test_a_true_zombie(sim: Sim) -> None:
    ready = sim.folder / "ready"
    sim.holder("--zombie", "--ready-file", str(ready))
    zombie = json.loads(ready.read_text())["zombie"]
    assert Path(f"/proc/{zombie}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    sim.ask("wait", gone=zombie)


def test_a_chosen_first_word(sim: Sim) -> None:
    holder = sim.holder("--argv0", "python3\nPRIORITY=0")
    assert Path(f"/proc/{holder.pid}/cmdline").read_bytes().startswith(b"python3\nPRIORITY=0\0")


# ---- the model server


def server(sim: Sim, *options: str, ready: bool = True, **env: str) -> subprocess.Popen[bytes]:
    program = [sys.executable, str(HERE / "model_server.py"), "--load-time", "0", "--host", "127.0.0.1"]
    return sim.start([*program, *options], ready=ready, **env)


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


def test_a_model_server_serves_and_its_workers_outlive_its_front(sim: Sim) -> None:
    port = free_port()
    uuid = sim.ask("state")["gpus"][5]["uuid"]
    visible = f"1,{uuid[:12]},nonsense,2"
    front = server(sim, "--port", port, "--mem-mib", "70000", CUDA_VISIBLE_DEVICES=visible)
    with socket.create_connection(("127.0.0.1", int(port))) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert b"200 OK" in connection.recv(4096)
    assert [sim.used(gpu) for gpu in range(8)] == [0, 70000, 0, 0, 0, 70000, 0, 0]
    workers = [a["pid"] for a in sim.ask("state")["allocations"]]
    assert [Path(f"/proc/{pid}/comm").read_text() for pid in workers] == ["VLLM::Worker_TP\n"] * 2
    assert all(os.getsid(pid) == pid for pid in workers)
    front.kill()
    front.wait()
    assert sim.used(1) == 70000
    socket.create_server(("127.0.0.1", int(port))).close()


def test_a_model_server_ends_in_order(sim: Sim) -> None:
    front = server(sim, "--port", free_port(), "--tp-size", "2", "--tokenizers", "1")
    front.terminate()
    assert front.wait(PATIENCE) == 0
    sim.ask("wait", gpu=0, used_max_mib=3)


def test_a_model_server_fails_without_free_memory(sim: Sim, capfd: pytest.CaptureFixture[str]) -> None:
    sim.ask("leak", gpu=1, mib=20000)
    front = server(sim, "--port", free_port(), ready=False, CUDA_VISIBLE_DEVICES="0,1")
    assert front.wait(PATIENCE) == 1
    assert "CUDA out of memory" in capfd.readouterr().err
    assert server(sim, "--tp-size", "3", ready=False, CUDA_VISIBLE_DEVICES="0,1").wait(PATIENCE) == 1


# ---- the command line


def test_simctl_asks_and_shows(sim: Sim) -> None:
    def simctl(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [str(HERE / "simctl.py"), *words]
        return subprocess.run(argv, env=sim.env, capture_output=True, text=True, check=False)

    assert simctl("reset", "--gpus", "2").returncode == 0
    assert json.loads(simctl("leak", "--gpu", "1", "--mib", "540").stdout)["id"] > 0
    shown = simctl("state").stdout
    assert "543 of 81559 MiB used" in shown and "nobody" in shown
    assert len(json.loads(simctl("state", "--json").stdout)["gpus"]) == 2
    refused = simctl("leak", "--gpu", "5", "--mib", "1")
    assert (refused.returncode, refused.stderr) == (1, "simctl: no_such_gpu: 5\n")
    assert "Requests" in simctl("help").stdout
