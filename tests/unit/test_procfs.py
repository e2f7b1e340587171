"""What /proc says: hostile names, every cgroup layout, zombies that live, threads with tables of their own."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gpuprestart.host import libc, opened, procfs, slow

from .processes import PATIENCE, await_death, python, stop, wait, waiting

ZERO = os.stat("/dev/zero").st_rdev

#: Opens a device in a thread; with "leaderless" the leader then leaves by exit(2), which ends it alone.
THREADS = """
import ctypes, os, platform, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
leaderless, unshared = "leaderless" in sys.argv, "unshared" in sys.argv

def state():
    with open(f"/proc/self/task/{os.getpid()}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0]

def thread():
    if unshared and libc.unshare(0x400):  # CLONE_FILES
        os._exit(77)
    descriptor = os.open(sys.argv[1], os.O_RDONLY)
    if "mapped" in sys.argv:
        libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, *[ctypes.c_long] * 5]
        libc.mmap(None, 4096, 1, 2, descriptor, 0)  # PROT_READ, MAP_PRIVATE; Python's own keeps a descriptor.
        os.close(descriptor)
    while leaderless and state() != b"Z":
        os.sched_yield()
    os.write(1, b"ready\\n")
    threading.Event().wait()

threading.Thread(target=thread).start()
if leaderless:
    libc.syscall({"x86_64": 60}.get(platform.machine(), 93), 0)
"""


# Text ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "comm",
    [b"python3", b"", b") R 1 (", b"((", b"))", b"a b", b"a\nb\n", b") Z 0 0\n1 (x)", b"\xff\xfe", b"VLLM::Worker"],
)
def test_a_comm_cannot_pose_as_other_fields(comm: bytes) -> None:
    assert procfs.parse_stat(b"4711 (" + comm + b") S 1 42 42 0\n") == (os.fsdecode(comm), ["S", "1", "42", "42", "0"])


@pytest.mark.parametrize(
    ("text", "cgroup"),
    [
        (b"0::/system.slice/old.service\n", "/system.slice/old.service"),
        (b"12:pids:/x\n1:name=systemd:/system.slice/old.service\n", "/system.slice/old.service"),
        (b"1:name=systemd:/system.slice/old.service\n0::/\n", "/system.slice/old.service"),
        (b"0::/\n1:name=systemd:/system.slice/old.service\n", "/system.slice/old.service"),
        (b"1:name=systemd:/elsewhere\n0::/system.slice/old.service\n", "/system.slice/old.service"),
        (b"0::/\n", "/"),
        (b"0::/../../system.slice/old.service\n", "/../../system.slice/old.service"),
        (b"0::/system.slice/old.service (deleted)\n", "/system.slice/old.service (deleted)"),
        (b"0::/a:b::c\n", "/a:b::c"),
        (b"0::/\xff\n", "/\udcff"),
        (b"4:memory:/x\n", "?"),
        (b"", "?"),
    ],
)
@pytest.mark.case("D8")
def test_the_cgroup_that_systemd_manages(text: bytes, cgroup: str) -> None:
    assert procfs.parse_cgroup(text) == cgroup


# Processes -----------------------------------------------------------------------------------------------------------


def test_a_process_as_it_is() -> None:
    with waiting() as child:
        found = procfs.read(child.pid)
        assert found is not None
        assert (found.pid, found.ppid, found.comm, found.uid) == (child.pid, os.getpid(), "cat", os.geteuid())
        assert found.exe is not None and found.exe.endswith("/cat") and found.exe_trusted
        assert found.pid_namespace == procfs.own_pid_namespace()
        assert found.cgroup == procfs.own_cgroup()
        assert found.began == found.started / os.sysconf("SC_CLK_TCK") > 0
        ours = procfs.read(os.getpid())
        assert ours is not None and ours.started <= found.started
        stop(child.pid)
        stopped = procfs.read(child.pid)
        assert stopped is not None and (stopped.state, stopped.identity) == ("T", found.identity)


def test_an_executable_that_others_can_write_is_not_trusted(tmp_path: Path) -> None:
    copy = tmp_path / "Xorg"
    copy.write_bytes(Path("/bin/cat").read_bytes())
    copy.chmod(0o777)
    with subprocess.Popen([copy], stdin=subprocess.PIPE) as child:
        found = procfs.read(child.pid)
        assert found is not None and (found.exe, found.exe_trusted) == (str(copy), False)


@pytest.mark.case("B7")
def test_a_true_zombie_is_nobody() -> None:
    with waiting() as child:
        child.kill()
        await_death(child.pid)
        assert procfs.read(child.pid) is None
        assert opened.sweep({ZERO}, [child.pid]) == opened.Sweep(opened={}, unreadable=())
    assert procfs.read(child.pid) is None


@pytest.mark.case("B6")
def test_a_zombie_leader_with_a_live_thread_is_alive_and_its_device_is_found() -> None:
    with python(THREADS, "/dev/zero", "leaderless") as child:
        found = procfs.read(child.pid)
        assert found is not None and found.state == "Z"
        assert os.listdir(f"/proc/{child.pid}/fd") == []
        assert opened.sweep({ZERO}, [child.pid]).opened == {child.pid: {ZERO}}


@pytest.mark.case("A12")
@pytest.mark.case("B6")
def test_what_a_zombie_leader_s_threads_have_mapped_is_found() -> None:
    with python(THREADS, "/dev/zero", "leaderless", "mapped") as child:
        with open(f"/proc/{child.pid}/maps", "rb") as file:
            assert file.read() == b""
        assert opened.sweep({ZERO}, [child.pid]).opened == {}
        assert slow.answer(("maps", ([child.pid], [ZERO]))) == {child.pid: [ZERO]}


def test_a_process_that_vanishes_is_data() -> None:
    with waiting() as child:
        child.kill()
    assert procfs.lineage(child.pid) == [child.pid]
    assert procfs.wchan(child.pid) == ""
    assert opened.sweep({ZERO}, [child.pid]) == opened.Sweep(opened={}, unreadable=())
    assert child.pid not in procfs.pids() and os.getpid() in procfs.pids()


def test_a_process_that_vanishes_before_its_namespace_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that is gone the kernel says that we may not look; it must not pass for one that is hidden from us."""
    with waiting() as child:

        def stat(path: str, *, dir_fd: int) -> None:
            child.kill()
            child.wait()
            raise PermissionError

        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", stat)
            found = procfs.read(child.pid)
    assert found is None


def test_a_process_that_executes_another_program_is_changed() -> None:
    """Of the same file, with the same start and name: only its memory is laid out anew."""
    again = "import os, sys; input(); os.execv(sys.executable, [sys.executable, '-c', 'print(1, flush=True); input()'])"
    with subprocess.Popen([sys.executable, "-c", again], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin and child.stdout
        before = procfs.read(child.pid)
        assert before and procfs.unchanged(before)
        child.stdin.write(b"\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"1\n"
        assert procfs.still_there(before) and not procfs.unchanged(before)
        child.kill()
    assert not procfs.unchanged(before)


def test_the_line_of_ancestors() -> None:
    with waiting() as child:
        line = procfs.lineage(child.pid)
        assert line[:3] == [child.pid, os.getpid(), os.getppid()]
    ours = procfs.lineage(os.getpid())
    assert ours[0] == os.getpid() and len(ours) == len(set(ours))


# Devices -------------------------------------------------------------------------------------------------------------


def test_only_the_devices_that_were_asked_for_are_found(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    master, slave = os.openpty()
    descriptors = [master, slave, os.open("/dev/zero", os.O_RDONLY), os.open(file, os.O_RDONLY), *os.pipe()]
    try:
        terminal = os.fstat(slave).st_rdev
        assert opened.sweep({ZERO, terminal, 0}, [os.getpid()]).opened == {os.getpid(): {ZERO, terminal}}
        assert opened.sweep({terminal}, [os.getpid()]).opened == {os.getpid(): {terminal}}
        assert opened.sweep({os.makedev(195, 0)}, [os.getpid()]).opened == {}
        assert opened.device_number(os.ttyname(slave)) == terminal
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


@pytest.mark.parametrize("path", ["/dev/there/is/none", "/dev", "/etc/passwd"])
def test_what_is_no_character_device_has_no_number(path: str) -> None:
    assert opened.device_number(path) is None


@pytest.mark.case("A13")
def test_another_node_of_the_same_device_counts(tmp_path: Path) -> None:
    node = tmp_path / "nvidia0"
    try:
        os.mknod(node, 0o600 | stat.S_IFCHR, os.stat("/dev/zero").st_rdev)
        os.close(os.open(node, os.O_RDONLY))
    except PermissionError:
        pytest.skip("device nodes cannot be made and opened here")
    with python(THREADS, str(node)) as child:
        assert opened.sweep({ZERO}, [child.pid]).opened == {child.pid: {ZERO}}


@pytest.mark.parametrize("unshared", [(), ("unshared",)])
def test_every_thread_s_table_is_looked_at(unshared: tuple[str, ...]) -> None:
    with python(THREADS, "/dev/zero", *unshared) as child:
        assert opened.sweep({ZERO}, [child.pid]).opened == {child.pid: {ZERO}}
        seen_in_leader = any(os.stat(f"/proc/{child.pid}/fd/{name}").st_rdev == ZERO for name in _files(child.pid))
        assert seen_in_leader is not bool(unshared)
        thread = next(int(name) for name in os.listdir(f"/proc/{child.pid}/task") if int(name) != child.pid)
        if libc.kcmp_files(child.pid, child.pid) != 0:
            pytest.skip("kcmp(2) is not allowed here, so every table is looked at")
        assert (libc.kcmp_files(child.pid, thread) == 0) is not bool(unshared)


def _files(pid: int) -> list[str]:
    return [name for name in os.listdir(f"/proc/{pid}/fd") if os.path.exists(f"/proc/{pid}/fd/{name}")]


@pytest.mark.case("D1")
def test_who_may_not_be_looked_into_is_counted_and_never_called_empty() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); from gpuprestart.host import opened, procfs; import ctypes;"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534); pid = int(sys.argv[2]);"
        "swept = opened.sweep({1}, [pid]); found = procfs.read(pid);"
        "print(swept.unreadable == (pid,), swept.opened == {}, found.uid, found.exe, found.pid_namespace)"
    )
    root = str(Path(__file__).parents[2])
    with waiting() as child:
        command = [sys.executable, "-c", code, root, str(child.pid)]
        answer = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, timeout=PATIENCE)
    assert answer.stdout.split() == ["True", "True", "0", "None", "0"]


# What can hang -------------------------------------------------------------------------------------------------------


def test_slow_answers() -> None:
    with waiting() as child:
        assert slow.answer(("cmdline", child.pid)) == ["/bin/cat"]
    assert slow.answer(("cmdline", child.pid)) is None
    assert slow.answer(("user", 0)) == "root" and slow.answer(("uid", "root")) == 0
    assert slow.answer(("user", 4_000_000_001)) == "" and slow.answer(("uid", "nobody-of-that-name")) is None


def test_a_command_line_is_bounded() -> None:
    with python("print('ready', flush=True); input()", *["x"] * 2000) as child:
        assert len(slow.answer(("cmdline", child.pid))) == slow.CMDLINE_WORDS


def test_a_kernel_function_is_told_or_empty() -> None:
    with waiting() as child:
        pidfd = os.pidfd_open(child.pid)
        try:
            assert "\n" not in procfs.wchan(child.pid)
            child.send_signal(signal.SIGKILL)
            assert wait([pidfd], PATIENCE) == {pidfd}
        finally:
            os.close(pidfd)
