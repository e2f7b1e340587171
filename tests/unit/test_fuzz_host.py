"""Every parser, fed what hostile processes, broken libraries and hasty people may write.

What was written is read as it was meant, anything else is the fault that the parser documents, and no text takes long.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuprestart import owners
from gpuprestart.faults import Died, Silent
from gpuprestart.host import cgroupfs, procfs, slow
from gpuprestart.host.child import Child
from gpuprestart.host.nvml import Driver, DriverError
from gpuprestart.host.systemd import Systemd, SystemdError, seconds
from gpuprestart.model import Gpu, Reading, Unit
from gpuprestart.text import printable

from .machines import process
from .processes import PATIENCE, python, wait, within

PIECES = (b"\n", b" ", b"\0", b"(", b")", b":", b"=", b"0::/", b"Uid:\t0", b"\xff", b"\x1b[m", b"9", b"'", b'"', b"\\")
JUNK = st.binary(max_size=40) | st.lists(st.sampled_from(PIECES)).map(b"".join)
TEXTS = JUNK.map(os.fsdecode) | st.text(st.characters(exclude_categories=()), max_size=12)


# /proc ---------------------------------------------------------------------------------------------------------------

COMMS = st.lists(
    st.sampled_from([b") S 1 1 (b", b") Z 0", b"\n", b"\nUid:\t0 0", b"\\n", b"((", b"\xff", b"\x1b[m", b" "])
    | st.binary(min_size=1, max_size=4).filter(lambda part: b"\0" not in part),
    min_size=1,
).map(lambda parts: b"".join(parts)[:15])


@given(COMMS)
def test_whatever_we_call_ourselves_what_the_kernel_says_of_us_is_read_as_it_is(comm: bytes) -> None:
    with open("/proc/self/comm", "r+b", buffering=0) as file:
        before = file.read()[:-1]
        file.write(comm)
        try:
            found, names = procfs.read(os.getpid()), procfs.commands(os.getpid())
        finally:
            file.write(before)
    assert found is not None
    assert (found.comm, found.state, found.uid, found.ppid) == (os.fsdecode(comm), "R", os.geteuid(), os.getppid())
    assert names[0] == f"{os.fsdecode(comm)}[{os.getpid()}]"


#: A cgroup's name has neither a slash nor a line end (cgroup_mkdir() in the kernel).
NAMES = (b"/", b"/", b"a", b":", b"0::", b"1:name=systemd:", b" ", b"\xff", b"\x1b[m", b" (deleted)", b"..", b"\\x2d")
PATHS = st.lists(st.sampled_from(NAMES), max_size=6).map(lambda names: b"/" + b"".join(names))


@given(PATHS, PATHS, st.sampled_from(["", "u", "n", "un", "nu", "xun", "nxu", "uxn", "x"]))
def test_no_path_poses_as_another_hierarchy(unified: bytes, named: bytes, order: str) -> None:
    lines = {
        "u": b"0::%s\n" % unified,
        "n": b"1:name=systemd:%s\n" % named,
        "x": b"12:cpu,cpuacct:%s\n3:name=systemd0:%s\n2:name=x:%s\n" % (named, unified, unified),
    }
    meant = (named if "n" in order else b"?") if "u" not in order else unified
    if "n" in order and unified == b"/":
        meant = named
    assert os.fsencode(procfs.parse_cgroup(b"".join(lines[which] for which in order))) == meant


FOLDERS = (
    *(
        "system.slice",
        "kubepods",
        "docker",
        "lxc",
        "lxc.payload.x",
        "machine.slice",
        "machine-x.scope",
        "slurmstepd.scope",
    ),
    *("user.slice", "user-1000.slice", "session-7.scope", "user@1000.service", "x.service", "_x.service", "x@.service"),
    *(
        "..",
        "",
        "job_7",
        "ab" * 32,
        f"docker-{'ab' * 32}.scope",
        "a" * 250 + ".service",
        "\udcff",
        "\x1b[m",
        "x.service (deleted)",
    ),
)
CGROUPS = st.lists(st.sampled_from(FOLDERS), max_size=5).map("/".join)
KNOWN = Unit("x.service", "loaded", "failed", "failed", "/system.slice/x.service")


@given(CGROUPS.map("/{}".format), CGROUPS)
def test_a_cgroup_belongs_to_a_unit_only_below_that_units_own(cgroup: str, parent: str) -> None:
    names = owners.Names(users={}, uids={})
    above = ("python3[2]", f"conmon{parent}[1]" if parent else "sh[1]")
    found = owners.owner_of(
        process(cgroup=cgroup, pid_namespace=1),
        units={KNOWN.name: KNOWN},
        names=names,
        own=None,
        namespace=1,
        above=above,
    )
    assert found.unit is None or (cgroup + "/").startswith("/system.slice/x.service/")
    assert all(owners.is_unit_name(name) and len(name) < 256 for name in owners.candidates(cgroup))


def test_command_lines_as_they_are_and_no_longer_than_can_be_meant() -> None:
    words = ["", "a b", "a\nPRIORITY=0\n", "\udcff\udc80", "\x1b[31m", "--x=\u202e", "y" * 131_071, "never seen"]
    with python("print('ready', flush=True); input()", *words) as child:
        seen = slow.answer(("cmdline", child.pid))
    # The interpreter, its options and the program come first.
    assert seen[5:11] == words[:6] and set(seen[11]) == {"y"} and len(seen) == 12
    assert sum(map(len, seen)) < slow.CMDLINE_BYTES


#: Has its command line lead to a gigabyte of memory, as anybody may (prctl(2), PR_SET_MM_MAP).
GIGABYTE = """
import ctypes, mmap, struct
libc = ctypes.CDLL(None)
libc.mmap.restype = libc.sbrk.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
size = 1 << 30
start = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, -1, 0)
with open("/proc/self/stat") as file:
    said = [0, 0, 0, *map(str, file.read().rpartition(")")[2].split())]
code, stack, data, env = said[26:28], said[28:29], said[45:48], said[50:52]
numbers = [*code, *data, libc.sbrk(0), *stack, start, start + size, *env, 0]
map_of_it = struct.pack("11QQII", *map(int, numbers), 0, 0xFFFFFFFF)
print("ready" if libc.prctl(35, 14, map_of_it, len(map_of_it), 0) == 0 else "no", flush=True)
input()
"""


def test_a_command_line_of_a_gigabyte() -> None:
    try:
        with python(GIGABYTE) as child, within(5.0):
            seen = slow.answer(("cmdline", child.pid))
    except AssertionError:
        pytest.skip("this kernel has no PR_SET_MM_MAP")
    assert seen is not None and sum(map(len, seen)) <= slow.CMDLINE_BYTES and len(seen) <= slow.CMDLINE_WORDS


@pytest.mark.parametrize(
    "name", ["a b", "a\n00400000-00500000 r--p 00000000 00:01 1 ", "x (deleted)", "\udcff", "0-1 r"]
)
def test_a_node_of_any_name_that_is_mapped(tmp_path: Path, name: str) -> None:
    import mmap

    node = tmp_path / name
    try:
        os.mknod(node, 0o600 | 0o020000, os.stat("/dev/zero").st_rdev)
        file = os.open(node, os.O_RDONLY)
    except PermissionError:
        pytest.skip("device nodes cannot be made and opened here")
    number = os.fstat(file).st_rdev
    with mmap.mmap(file, 4096, mmap.MAP_PRIVATE, mmap.PROT_READ):
        os.close(file)
        assert slow.answer(("maps", ([os.getpid()], [number, 1]))) == {os.getpid(): [number]}


def test_more_maps_than_can_be_meant_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, many = os.getpid(), slow.answer(("maps", ([1 << 22], [])))
    assert many == {1 << 22: []}
    with python("print('ready', flush=True); input()") as child:
        with open(f"/proc/{child.pid}/maps", "rb") as file:
            monkeypatch.setattr(slow, "MAPS_BYTES", len(file.read()) + 1)
        assert slow.answer(("maps", ([child.pid, ours], []))) == {child.pid: []}
        assert slow.answer(("maps", ([ours, child.pid], []))) == {ours: None}


def test_cgroups_one_below_the_other_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroupfs, "ROOTS", (str(tmp_path),))
    folders = [str(tmp_path / "x.service")]
    folders += [folders[0] + "/a" * depth for depth in range(1, 1500)]
    for folder in folders:
        os.mkdir(folder)
    try:
        (Path(folders[-1]) / "cgroup.procs").write_text("4711\n")
        assert cgroupfs.pids("/x.service") == {4711}
        (Path(folders[-1]) / "cgroup.procs").unlink()
    finally:
        for folder in reversed(folders):
            os.rmdir(folder)


# systemd -------------------------------------------------------------------------------------------------------------

Make = Callable[..., Systemd]


@pytest.fixture(scope="module")
def prints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Systemd]:
    """systemctl and busctl that print this."""
    folder = tmp_path_factory.mktemp("systemd")
    program = folder / "program"
    program.write_text(f"#!/bin/sh\nexec cat {folder}/answer\n")
    program.chmod(0o755)

    def make(text: str) -> Systemd:
        try:
            said = os.fsencode(text)
        except UnicodeEncodeError:
            # What no file system can have made of any bytes is bytes of its own.
            said = text.encode("utf-8", "surrogatepass")
        (folder / "answer").write_bytes(said)
        return Systemd(wait, systemctl=str(program), busctl=str(program))

    return make


VALUES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"), max_size=8)
NUMBERS = st.integers(0, 2**32)
UNITS = st.builds(
    Unit, *[VALUES] * 4, st.builds("/{}".format, VALUES),
    type=VALUES, user=VALUES, control_pid=NUMBERS, main_pid=NUMBERS, condition_usec=st.integers(0, 2**64),
    timeout_stop=st.sampled_from(["", "infinity", "1min 30s", "1y 2month 3w 4d 5h 6min 7s 8ms 9us"]),
    timeout_start=st.sampled_from([None, 90.0, 3600.0]), invocation=VALUES, notify_access=VALUES,
    success_statuses=st.frozensets(st.sampled_from(["75", "TERM"])),
)  # fmt: skip
SPANS = {None: "infinity", 90.0: "1min 30s", 3600.0: "1h"}


@settings(max_examples=60)
@given(st.lists(UNITS, min_size=1, max_size=4))
def test_units_that_were_printed_are_read_as_they_were(prints: Callable[[str], Systemd], units: list[Unit]) -> None:
    blocks = [
        f"Id={u.name}\nLoadState={u.load_state}\nActiveState={u.active_state}\nSubState={u.sub_state}\n"
        f"ControlGroup={u.control_group}\nType={u.type}\nUser={u.user}\nControlPID={u.control_pid}\n"
        f"MainPID={u.main_pid}\nConditionTimestampMonotonic={u.condition_usec}\nTimeoutStopUSec={u.timeout_stop}\n"
        f"TimeoutStartUSec={SPANS[u.timeout_start]}\nInvocationID={u.invocation}\nNotifyAccess={u.notify_access}\n"
        f"SuccessExitStatus={' '.join(u.success_statuses)}\n"
        for u in units
    ]
    names = [str(number) for number in range(len(units))]
    assert list(prints("\n".join(blocks)).units(names).values()) == units


LINES = st.sampled_from([
    "MainPID=²", "MainPID=7", "ControlPID=-", "ConditionTimestampMonotonic=" + "9" * 5000, "TimeoutStopUSec=soon",
    "TimeoutStopUSec=1min 30s", "TimeoutStopUSec=٣s", "TimeoutStartUSec=1.2.3s", "Id=y", "\n", "=", "\udcff\0",
])  # fmt: skip


@settings(max_examples=100)
@given(st.lists(LINES | TEXTS, max_size=3).map("\n".join))
def test_an_answer_that_makes_no_sense_is_an_error_of_systemds(prints: Callable[[str], Systemd], said: str) -> None:
    with suppress(SystemdError):
        systemd = prints(f"Id=x\nLoadState=loaded\nActiveState=active\nSubState=running\n{said}\n")
        for each in systemd.units(["a.service", "b.service"][: said.count("\n\n") + 1]).values():
            assert isinstance(each.main_pid, int)
            # It is shown as it was printed, and counted on elsewhere.
            seconds(each.timeout_stop or "infinity")


@pytest.mark.parametrize(
    "lines",
    [[], ["true"], ["true", "[]", "[]", "[]"], ["true", "[]", "5"], ["5", "[]", "[]"], ["true", "[[]]", "[]"],
     ["true", "[]", "[5]"], ["true", "[]", "[" * 100_000], ["null", "null", "null"], ["true", '"a"', "[]"]],
    ids=lambda lines: " ".join(lines)[:20],
)  # fmt: skip
def test_logind_s_words_are_of_the_types_that_were_asked_for(
    prints: Callable[[str], Systemd], lines: list[str]
) -> None:
    with pytest.raises(SystemdError):
        prints("\n".join(f'{{"data":{line}}}' for line in lines)).kill_user_processes()
    said = prints('{"type":"b","data":true}\n{"data":["a"]}\n{"data":[]}\n')
    assert said.kill_user_processes() == (True, ["a"], [])


# The driver ----------------------------------------------------------------------------------------------------------

FIGURES = (3 << 20, 81_417 << 20, 81_920 << 20, 500 << 20, "v2")
INIT = {"driver": "570.1", "path": "/x", "gpus": [
    {"index": n, "uuid": f"GPU-{n}", "name": "H200", "pci": f"0:{n}", "minor": n, "fault": None} for n in range(2)
]}  # fmt: skip
SAMPLE = {
    f"GPU-{n}": {"memory": FIGURES, "fault": None, "listed": [(10, 5, "compute")], "unlisted": None} for n in range(2)
}
ODD: Sequence[Any] = (
    *(None, True, -1, 0, 5, 2**70, 1.5, math.nan, math.inf, "", "x\n\x1b[m", b"x"),
    *([], {}, (), [1], (1, 2, 3), {"error": "x"}, {"error": [], "text": 5}),
)


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The ways to everything in an answer, itself first."""
    yield ()
    if isinstance(value, (dict, list, tuple)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from ((key, *way) for way in places(inner))


def changed(value: Any, way: Sequence[Any], odd: Any) -> Any:
    """The same answer with something else in one place."""
    if not way:
        return odd
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[way[0]] = changed(value[way[0]], way[1:], odd)
    return type(value)(copied)


class Says:
    """A child that has answered already."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def send(self, request: Any) -> None:
        pass

    def receive(self, timeout: float) -> Any:
        return self.answers.pop(0)


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_an_answer_with_anything_odd_in_it_is_an_error_of_the_drivers_or_makes_sense(odd: Any) -> None:
    answers = [(changed(INIT, way, odd), SAMPLE) for way in places(INIT)]
    answers += [(INIT, changed(SAMPLE, way, odd)) for way in places(SAMPLE)]
    for init, sample in answers:
        driver = Driver(Says(init, sample))
        try:
            inventory = driver.inventory(1.0)
            readings = driver.sample(inventory.gpus, 1.0)
        except DriverError as error:
            assert printable(str(error)) and not error.missing
            continue
        for gpu in inventory.gpus:
            makes_sense(gpu, readings[gpu.uuid])
            # Whose memory is not told by itself is judged by its holders.
            assert not readings[gpu.uuid].unified or sample[gpu.uuid]["memory"] is None


def makes_sense(gpu: Gpu, read: Reading) -> None:
    assert all(isinstance(text, str) for text in (gpu.uuid, gpu.name, gpu.pci)) and isinstance(gpu.index, int)
    assert all(text is None or isinstance(text, str) for text in (gpu.fault, read.fault, read.unlisted))
    assert (read.memory is None) == (read.fault is not None) or read.unified
    if read.memory is not None:
        figures = [figure for figure in read.memory[:4] if figure is not None]
        assert all(isinstance(figure, int) and 0 <= figure <= 84_000 << 20 for figure in figures) and len(figures) > 2
        assert isinstance(read.memory.call, str)
    if not read.distrust:
        assert all(isinstance(entry.pid, int) and entry.pid > 0 for entry in read.listed)
        assert all(entry.bytes is None or entry.bytes >= 0 for entry in read.listed)


class Wild:
    """Answers of a driver gone wild, which may write anything anywhere."""

    def __init__(self, frame: bytes, *, dies: bool) -> None:
        self.frame = frame
        self.dies = dies
        self.before = set(os.listdir("/proc/self/fd"))

    def __call__(self, request: Any) -> Any:
        for name in set(os.listdir("/proc/self/fd")) - self.before:
            if os.path.exists(f"/proc/self/fd/{name}") and fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_WRONLY:
                os.write(int(name), self.frame)
        return os._exit(0) if self.dies else "the answer"


#: A tuple of sixteen million, as marshal has it: it would take 128 MiB before it found out that there is nothing.
TUPLE = b"(\x00\x00\x00\x01"


@settings(max_examples=100)
@given(JUNK | st.sampled_from([b"\x05\0\0\0" + TUPLE, b"\x05\0\0\0" + b"\0" * 8 + TUPLE]), st.booleans())
def test_what_was_not_sent_as_an_answer_is_none(frame: bytes, dies: bool) -> None:
    child = Child(answer=Wild(frame, dies=dies), wait=wait, at_fork=lambda: None)
    try:
        assert child.ask(None, 0.2) == "the answer" and not frame
    except (Died, Silent):
        assert frame or dies
    finally:
        child.end()


def test_an_answer_that_is_longer_than_any_is_not_waited_for() -> None:
    child = Child(answer=Wild(b"\xff" * 12, dies=False), wait=wait, at_fork=lambda: None)
    try:
        with pytest.raises(Died, match="cannot be one"):
            child.ask(None, PATIENCE)
    finally:
        child.end()
