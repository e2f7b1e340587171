"""Shared memory as it is: who has a file open or mapped in whatever way, what is removed and what never is."""

from __future__ import annotations

import array
import contextlib
import ctypes
import os
import secrets
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuprestart import answers
from gpuprestart.host import ipc, opened, slow
from gpuprestart.host.ipc import Directory, File, Removal

from .processes import python

ROOT = Path(__file__).parents[2]

#: Has a file in one of many ways, and nothing else of it.
HAVING = """
import ctypes, mmap, os, platform, sys, threading
path, way = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
stay = threading.Event()

def state():
    with open(f"/proc/self/task/{os.getpid()}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0]

def have():
    if way == "in a table of its own" and libc.unshare(0x400):  # CLONE_FILES
        os._exit(77)
    number = os.open(path, os.O_PATH if way == "by its path" else os.O_RDONLY if way == "to read" else os.O_RDWR)
    if way.startswith("mapped"):
        # Straight from the C library: Python's own mmap keeps a descriptor.
        if libc.mmap(None, 4096, 1, 2 if way == "mapped for itself" else 1, number, 0) in (None, 2**64 - 1):
            os._exit(78)
        os.close(number)
    while way == "mapped, the leader gone" and state() != b"Z":
        os.sched_yield()
    if way == "not dumpable":
        libc.prctl(4, 0, 0, 0, 0)
    os.write(1, b"ready\\n")
    stay.wait()

threading.Thread(target=have, daemon=True).start()
if way == "mapped, the leader gone":
    libc.syscall({"x86_64": 60}.get(platform.machine(), 93), 0)
sys.stdin.read()
"""

OPEN = ("to read", "to write", "in a table of its own", "not dumpable")
MAPPED = ("mapped", "mapped for itself", "mapped, the leader gone")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of /dev/shm, which is a tmpfs wherever there is one, unlike a folder for temporary files."""
    path = Path("/dev/shm") / f"gpuprestart-{secrets.token_hex(6)}"
    path.mkdir()
    yield path
    shutil.rmtree(path)


def made(folder: Path, name: str = "nccl-aB3xYz", size: int = 8192) -> Path:
    path = folder / name
    path.write_bytes(b"x" * size)
    return path


@contextlib.contextmanager
def looked(folder: Path) -> Iterator[tuple[Directory, File]]:
    """The directory, and the one file in it."""
    with Directory(str(folder)) as directory:
        (file,) = directory.files(bool)
        yield directory, file


def inode(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


# What is there -------------------------------------------------------------------------------------------------------


def test_a_file_is_told_with_what_it_takes(folder: Path) -> None:
    path = made(folder)
    os.chown(path, 1234, 1234)
    with looked(folder) as (directory, file):
        status = path.stat()
        assert file == File(
            "nccl-aB3xYz", status.st_dev, status.st_ino, status.st_mode, 1, 1234, 8192, max(status[7:10], default=0)
        )._replace(changed=file.changed)
        assert file.changed == max(status.st_atime, status.st_mtime, status.st_ctime)
        assert directory.device == status.st_dev


def test_a_file_of_any_size_that_was_never_written_takes_nothing(folder: Path) -> None:
    with open(folder / "sparse", "wb") as file:
        file.truncate(1 << 40)
    with looked(folder) as (_, found):
        assert found.bytes == 0


@pytest.mark.parametrize("times", [(1, 1), (1 << 32, 1), (1, 1 << 32)])
def test_the_latest_of_its_times_counts(folder: Path, times: tuple[int, int]) -> None:
    """A time can be set by anybody whose file it is, but for that of the setting."""
    path = made(folder)
    os.utime(path, times)
    with looked(folder) as (_, file):
        assert file.changed == (path.stat().st_ctime if times == (1, 1) else 1 << 32)


def test_only_what_is_asked_for_is_looked_at_and_no_more_than_can_be(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc, "MOST_NAMES", 3)
    for name in ("b", "a", "d", "c", "other"):
        made(folder, name, 1)
    (folder / "below").mkdir()
    made(folder / "below", "e", 1)
    with Directory(str(folder)) as directory:
        assert [file.name for file in directory.files(lambda name: len(name) == 1)] == ["a", "b", "c"]


def test_a_link_is_told_as_one(folder: Path) -> None:
    (folder / "nccl-link").symlink_to("/etc/passwd")
    with looked(folder) as (_, file):
        assert stat.S_ISLNK(file.mode)


def test_a_directory_that_is_a_link_is_not_opened(folder: Path) -> None:
    (folder / "link").symlink_to(folder)
    with pytest.raises(NotADirectoryError):
        Directory(str(folder / "link"))


# Who has it ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [*OPEN, "by its path"])
def test_who_has_a_file_open_is_seen(folder: Path, way: str) -> None:
    path = made(folder)
    with python(HAVING, str(path), way) as child:
        assert inode(path) in opened.files_of(child.pid, {path.stat().st_dev})
        assert opened.files_of(child.pid, {path.stat().st_dev + 1}) == frozenset()
    assert opened.files_of(child.pid, {path.stat().st_dev}) == frozenset()


def test_who_may_be_listed_and_not_looked_into_has_not_nothing(folder: Path) -> None:
    """So it is for root without CAP_SYS_PTRACE."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); from gpuprestart.host import opened\n"
    code += "try: opened.files_of(int(sys.argv[2]), ())\nexcept PermissionError: print('refused')"
    weaker = ["setpriv", "--inh-caps=-sys_ptrace", "--bounding-set=-sys_ptrace", sys.executable, "-c", code, str(ROOT)]
    other = ["setpriv", "--reuid=1234", "--clear-groups", "cat"]
    with subprocess.Popen(other, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin and child.stdout
        child.stdin.write(b"here\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"here\n"
        assert opened.files_of(child.pid, ()) == frozenset()
        assert subprocess.check_output([*weaker, str(child.pid)]) == b"refused\n"
        child.communicate()


@pytest.mark.parametrize("way", MAPPED)
def test_who_has_a_file_mapped_without_a_descriptor_is_seen(folder: Path, way: str) -> None:
    path = made(folder)
    device, number = inode(path)
    with python(HAVING, str(path), way) as child:
        assert opened.files_of(child.pid, {device}) == frozenset()
        assert answers.answer(("files", ([child.pid, os.getpid()], device))) == {
            child.pid: [number],
            os.getpid(): [],
        }
        assert answers.answer(("files", ([child.pid], device + 1))) == {child.pid: []}
    assert answers.answer(("files", ([child.pid], device))) == {child.pid: []}


def test_maps_that_are_too_long_are_asked_for_again_and_then_nobody_knows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made(folder)
    device, number = inode(path)
    with python(HAVING, str(path), "mapped") as child, python(HAVING, str(path), "mapped") as other:
        length = len(Path(f"/proc/{child.pid}/maps").read_bytes())
        monkeypatch.setattr(slow, "MAPS_BYTES", length * 3 // 2)
        assert slow.answer(("files", ([child.pid, other.pid], device))) == {child.pid: [number]}
        monkeypatch.setattr(slow, "MAPS_BYTES", length)
        assert slow.answer(("files", ([child.pid], device))) == {child.pid: None}


# Removal -------------------------------------------------------------------------------------------------------------


def test_what_nobody_has_is_removed(folder: Path) -> None:
    path = made(folder)
    with looked(folder) as (directory, file):
        assert directory.remove(file) is Removal.REMOVED and not path.exists()
        assert directory.remove(file) is Removal.GONE


@pytest.mark.parametrize("way", [*OPEN, *MAPPED])
def test_what_anybody_has_is_not_removed(folder: Path, way: str) -> None:
    path = made(folder)
    with python(HAVING, str(path), way), looked(folder) as (directory, file):
        assert directory.remove(file) is Removal.IN_USE and path.exists()
    with looked(folder) as (directory, file):
        assert directory.remove(file) is Removal.REMOVED


@pytest.mark.parametrize("unshared", ["--mount", "--pid"])
def test_what_somebody_in_another_namespace_has_is_not_removed(folder: Path, unshared: str) -> None:
    path = made(folder)
    command = ["unshare", unshared, "--fork", "--kill-child", sys.executable, "-I", "-S", "-c", HAVING, str(path)]
    with subprocess.Popen([*command, "mapped"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout and child.stdout.readline() == b"ready\n"
        with looked(folder) as (directory, file):
            assert directory.remove(file) is Removal.IN_USE and path.exists()
            child.communicate()
            assert directory.remove(file) is Removal.REMOVED


def test_what_is_on_its_way_through_a_socket_is_not_removed(folder: Path) -> None:
    """It is in nobody's table, and no look at all processes finds it."""
    path = made(folder)
    one, other = socket.socketpair()
    with one, other, looked(folder) as (directory, file):
        number = os.open(path, os.O_RDONLY)
        one.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [number]))])
        os.close(number)
        assert inode(path) not in opened.files_of(os.getpid(), {file.device})
        assert directory.remove(file) is Removal.IN_USE and path.exists()


def _swapped(path: Path) -> None:
    made(path.parent, "new", 8192).rename(path)


def _written(path: Path) -> None:
    path.write_bytes(b"y" * 8192)


def _linked(path: Path) -> None:
    os.link(path, path.parent / "second")


def _given(path: Path) -> None:
    os.chown(path, 1234, 1234)


def _led_elsewhere(path: Path) -> None:
    path.unlink()
    path.symlink_to(made(path.parent, "target"))


def _led_to_a_socket(path: Path) -> None:
    """Which cannot be opened: that would be told."""
    path.unlink()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path.parent / "socket"))
    path.symlink_to(path.parent / "socket")


@pytest.mark.parametrize("change", [_led_to_a_socket, _swapped, _written, _linked, _given, _led_elsewhere])
def test_what_is_no_longer_what_was_judged_is_not_removed(folder: Path, change: Any) -> None:
    path = made(folder)
    with looked(folder) as (directory, file):
        change(path)
        before = sorted(os.listdir(folder))
        assert directory.remove(file) is Removal.GONE
        assert sorted(os.listdir(folder)) == before


def test_what_is_another_file_when_its_turn_comes_is_not_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the lease, which is on the file, and the removal, which is of the name."""
    path = made(folder)
    leased = ipc._leased

    def swap(descriptor: int) -> bool:
        granted = leased(descriptor)
        _swapped(path)
        return granted

    monkeypatch.setattr(ipc, "_leased", swap)
    with looked(folder) as (directory, file):
        assert directory.remove(file) is Removal.GONE and path.exists()


def test_a_lease_on_another_file_proves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name led to that one only while it was opened; the kernel's clock is too coarse to tell."""
    path, described, opened = made(folder), ipc._described, os.open
    with looked(folder) as (directory, file), python(HAVING, str(path), "mapped"), monkeypatch.context() as patched:

        def swap(name: str, *arguments: int, **where: int) -> int:
            path.rename(folder / "aside")
            made(folder)
            number = opened(name, *arguments, **where)
            (folder / "aside").rename(path)
            return number

        patched.setattr(ipc, "_described", lambda *status: described(*status)._replace(changed=0.0))
        patched.setattr(os, "open", swap)
        assert directory.remove(file._replace(changed=0.0)) is Removal.GONE and path.exists()


def test_who_comes_while_it_is_removed_neither_gets_it_nor_ends_us(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel sends a signal to who has a lease that somebody wants broken."""
    path = made(folder)
    code = "import os, sys\ntry: os.open(sys.argv[1], os.O_RDWR | os.O_NONBLOCK)\nexcept BlockingIOError: sys.exit(5)"
    came = []
    unlink = os.unlink

    def slowly(name: str, *, dir_fd: int) -> None:
        came.append(subprocess.run([sys.executable, "-I", "-S", "-c", code, str(path)]).returncode)
        unlink(name, dir_fd=dir_fd)

    with looked(folder) as (directory, file), monkeypatch.context() as patched:
        patched.setattr(os, "unlink", slowly)
        removed = directory.remove(file)
    assert (removed, came, path.exists()) == (Removal.REMOVED, [5], False)


def test_one_that_another_run_is_removing_is_in_use(folder: Path) -> None:
    path = made(folder)
    with looked(folder) as (directory, file):
        number = os.open(path, os.O_RDONLY)
        assert ipc._leased(number)
        assert directory.remove(file) is Removal.IN_USE
        os.close(number)
        assert directory.remove(file) is Removal.REMOVED


# SysV segments -------------------------------------------------------------------------------------------------------

libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
libc.shmdt.argtypes = [ctypes.c_void_p]


@pytest.fixture
def segment() -> Iterator[ipc.Segment]:
    number = libc.shmget(0x6E760000 + secrets.randbelow(1 << 16), 12345, 0o1600)  # IPC_CREAT
    assert number >= 0
    yield by_id(number)
    libc.shmctl(number, 0, None)


def by_id(number: int) -> ipc.Segment:
    (found,) = (each for each in ipc.segments() if each.id == number)
    return found


def test_a_segment_as_it_is(segment: ipc.Segment) -> None:
    assert (segment.bytes, segment.creator, segment.last, segment.attached) == (12345, os.getpid(), 0, 0)
    assert (segment.uid, segment.mode, segment.atime) == (os.geteuid(), 0o600, 0) and segment.ctime > 0
    at = libc.shmat(segment.id, None, 0)
    now = by_id(segment.id)
    assert (now.attached, now.last) == (1, os.getpid()) and now.atime >= segment.ctime
    libc.shmctl(segment.id, 0, None)
    assert by_id(segment.id).mode & ipc.SHM_DEST
    libc.shmdt(at)
    assert segment.id not in {each.id for each in ipc.segments()}


def test_a_segment_of_terabytes_and_a_negative_key() -> None:
    head = "key shmid perms size cpid lpid nattch uid gid cuid cgid atime dtime ctime rss swap"
    row = "-1811939327 4 3600 9223372036854775807 7 8 0 1000 0 0 0 1 2 3 0 0"
    expected = ipc.Segment(-1811939327, 4, 0o3600, 9223372036854775807, 7, 8, 0, 1000, 1, 2, 3)
    assert ipc.parse_segments(f"{head}\n{row}\n") == [expected]
    assert ipc.parse_segments(f"{head}\n") == []


def test_a_segment_is_removed_if_it_is_what_it_was(segment: ipc.Segment) -> None:
    assert ipc.remove_segment(segment) is Removal.REMOVED
    assert ipc.remove_segment(segment) is Removal.GONE


def test_a_segment_that_somebody_has_attached_since_is_not_removed(segment: ipc.Segment) -> None:
    at = libc.shmat(segment.id, None, 0)
    assert ipc.remove_segment(segment) is Removal.GONE
    assert not by_id(segment.id).mode & ipc.SHM_DEST
    libc.shmdt(at)
    assert ipc.remove_segment(segment) is Removal.GONE and by_id(segment.id).attached == 0


# MPS -----------------------------------------------------------------------------------------------------------------


def test_a_control_socket_of_mps_on_which_nobody_listens(shallow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "MPS", str(shallow))
    assert ipc.mps_sockets() == []
    (shallow / "control_privileged").write_text("no socket")
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(shallow / "control"))
        assert ipc.mps_sockets() == [f"{shallow}/control"]
        daemon.listen()
        assert ipc.mps_sockets() == []
    assert ipc.mps_sockets() == [f"{shallow}/control"]


@pytest.mark.parametrize(("text", "pid"), [("4711\n", 4711), ("", 0), ("no number", 0), (None, 0)])
def test_the_pid_of_mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, pid: int) -> None:
    monkeypatch.setattr(ipc, "MPS", str(tmp_path))
    if text is not None:
        (tmp_path / ipc.MPS_PID).write_text(text)
    assert ipc.mps_pid() == pid
