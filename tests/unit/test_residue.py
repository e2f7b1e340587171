"""What may go of what the dead have left in shared memory, and what is done about it, on the machine's own /dev/shm."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import pytest

from gpuprestart import answers, events, hook, infrastructure, residue
from gpuprestart.host import ipc, opened, procfs, slow
from gpuprestart.host.ipc import File, Segment
from gpuprestart.host.systemd import SystemdError
from gpuprestart.model import MIB, Account, Leftover, Process
from gpuprestart.policy import Policy, Residue
from gpuprestart.residue import Terms, Users

from .processes import await_death, python, wait, waiting
from .test_ipc import HAVING, MAPPED, OPEN

ROOT = Path(__file__).parents[2]
NOW = 1_000_000.0
OLD = NOW - residue.YOUNG
BOOTED = NOW - 1000.0

# The judgement -------------------------------------------------------------------------------------------------------


def file(name: str = "nccl-aB3xYz", **changes: Any) -> File:
    return File(name, 27, 4711, stat.S_IFREG | 0o600, 1, 1000, 8192, OLD)._replace(**changes)


def terms(*alive: int, uids: Optional[frozenset[int]] = frozenset({0, 1000})) -> Terms:
    return Terms(uids=uids, alive=lambda pid: pid in alive, now=NOW, booted=BOOTED)


def sharer(**changes: Any) -> Process:
    """One that began just when the file was last changed, and shares memory."""
    began = OLD - BOOTED
    made = Process(
        pid=9, started=int(began * procfs.TICKS), began=began, ppid=1, comm="sglang", state="S", uid=1000, cgroup="/"
    )
    return made._replace(**changes)


def test_what_nobody_has_may_go() -> None:
    assert residue.of_file(file(), Users(), terms()) == ""
    assert residue.of_file(file(uid=0), Users(), terms()) == ""


@pytest.mark.parametrize("changes", [{}, {"links": 2}, {"uid": 7}, {"changed": NOW}])
def test_what_somebody_has_is_his_and_not_a_word_is_lost_on_it(changes: dict[str, Any]) -> None:
    users = Users(files=frozenset({(27, 4711)}), doubt="PID 9 may not be looked into, or does not answer")
    assert residue.of_file(file(**changes), users, terms()) is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"mode": stat.S_IFLNK | 0o777}, "is a symbolic link"),
        ({"mode": stat.S_IFDIR | 0o777}, "is a directory"),
        ({"mode": stat.S_IFIFO | 0o777}, "is a special file"),
        ({"links": 2}, "has 2 names"),
        ({"links": 0}, "has 0 names"),
        ({"uid": 1001}, "belongs to uid 1001, neither the unit's user nor root (residue.owner)"),
        ({"changed": OLD + 0.1}, "was made or used less than 10 s ago"),
        ({"changed": NOW + 1000}, "was made or used less than 10 s ago"),
        ({"name": "torch_77_1_2"}, "has the number 77 in its name, which is the PID of a process that is alive"),
    ],
)
def test_in_doubt_it_stays(changes: dict[str, Any], why: str) -> None:
    assert (residue.of_file(file(**changes), Users(), terms(77)) or "").startswith(why)


def test_who_cannot_be_asked_may_have_anything() -> None:
    users = Users(files=frozenset({(27, 1), (28, 4711)}), doubt="PID 9 may not be looked into, or does not answer")
    assert residue.of_file(file(), users, terms()) == f"may be in use: {users.doubt}"


def test_anybodys_may_go_where_the_policy_says_so() -> None:
    assert residue.of_file(file(uid=1001), Users(), terms(uids=None)) == ""


@pytest.mark.parametrize("name", ["psm_0a1b2c3d", "psm_12345678", "nccl-aB3xYz", "sem.mp-k3x9_2a"])
def test_a_name_may_have_been_handed_to_who_was_there_before(name: str) -> None:
    """The SharedMemory of SGLang's tokenizer has no PID in its name, and the scheduler opens it when it comes to it."""
    stays = "may yet be opened by sglang[9], which is alive and was there before it was last used"
    users = Users(sharers=(sharer(uid=0, pid=8), sharer()))
    assert residue.of_file(file(name), users, terms()) == stays
    earlier, doubtful = sharer(began=1.0), sharer(began=OLD - BOOTED + residue.TICK)
    assert residue.of_file(file(name), Users(sharers=(earlier,)), terms()) == stays
    assert residue.of_file(file(name), Users(sharers=(doubtful,)), terms()) == stays


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("psm_0a1b2c3d", {"began": OLD - BOOTED + 2 * residue.TICK}),
        ("psm_0a1b2c3d", {"uid": 1001}),
        ("psm_0a1b2c3d", {"uid": 0}),
        ("torch_77_1_2", {}),
        ("cuda.shm.3e8.1a2b.1", {}),
        ("sgl_shm_mm_4711_0a1b2c3d", {}),
    ],
)
def test_a_name_was_not_handed_to_who_came_later_or_is_another_user(name: str, changes: dict[str, Any]) -> None:
    """And of who has put his PID into it, it is known that he is gone."""
    assert residue.of_file(file(name), Users(sharers=(sharer(**changes),)), terms()) == ""


def test_a_name_of_a_process_cannot_forge_the_record() -> None:
    users = Users(sharers=(sharer(comm="a\n\x1b[31m"),))
    assert "by a\\x0a\\x1b[31m[9], " in (residue.of_file(file(), users, terms()) or "")


@pytest.mark.parametrize(
    ("name", "pids"),
    [
        ("torch_4711_2890612345_17", [4711]),
        ("cuda.shm.3e8.1a2b.1", [0x1A2B]),
        ("cuda.shm.0.c4.1", [0xC4]),
        ("sgl_shm_mm_4711_0a1b2c3d", [4711]),
        ("sgl_shm_mq_2_4711_12345678", [4711]),
        ("sem.loky-4711-k3x9_2a", [4711]),
        ("sem.mp-k3x9_2a", []),
        ("nccl-123456", [123456]),
        ("nccl-aB3xYz", []),
        ("psm_0a1b2c3d", []),
        ("multi_tokenizer_args_4711", [4711]),
        ("mine-4711.2-1-0", [4711, 2]),
        ("x4711", []),
        ("vader_segment.host.1000.99999999999999999999", [1000]),
    ],
)
def test_the_pid_in_a_name(name: str, pids: Sequence[int]) -> None:
    assert list(residue.pids_in(name)) == pids


def segment(**changes: Any) -> Segment:
    made = Segment(
        key=1, id=2, mode=0o600, bytes=4096, creator=77, last=78, attached=0, uid=1000, atime=9, dtime=int(NOW), ctime=8
    )
    return made._replace(**changes)


def test_a_segment_of_the_dead_may_go() -> None:
    assert residue.of_segment(segment(), terms()) == ""
    assert residue.of_segment(segment(last=0, atime=0), terms()) == ""


@pytest.mark.parametrize("changes", [{"attached": 1}, {"mode": 0o600 | ipc.SHM_DEST}])
def test_a_segment_that_somebody_has_or_that_is_going_anyway_is_not_told(changes: dict[str, Any]) -> None:
    assert residue.of_segment(segment(**changes), terms()) is None


@pytest.mark.parametrize(
    ("changes", "alive", "why"),
    [
        ({"mode": 0o600 | ipc.SHM_LOCKED}, (), "is locked into memory"),
        ({"creator": 0}, (), "was made or used in another PID namespace"),
        ({"last": 0}, (), "was made or used in another PID namespace"),
        ({}, (77,), "is attached nowhere, but PID 77, which made it, is alive"),
        ({}, (78,), "is attached nowhere, but PID 78, which last used it, is alive"),
        ({"uid": 1001}, (), "belongs to uid 1001"),
        ({"ctime": int(NOW) - 5}, (), "was made or used less than 10 s ago"),
        ({"atime": int(NOW) - 5}, (), "was made or used less than 10 s ago"),
    ],
)
def test_in_doubt_a_segment_stays(changes: dict[str, Any], alive: Sequence[int], why: str) -> None:
    assert (residue.of_segment(segment(**changes), terms(*alive)) or "").startswith(why)


# What is done --------------------------------------------------------------------------------------------------------


class Stage:
    """Names in /dev/shm that nobody else has, and a policy that is about them alone."""

    def __init__(self) -> None:
        self.prefix = f"gpuprestart{secrets.token_hex(6)}x"
        # Nobody who is there already: neither PID 1 of a container, into which not even root may look, nor a server.
        self.hidden = {*procfs.pids()} - {os.getpid()}
        self.host: Any = SimpleNamespace(
            ask=lambda request, timeout: answers.answer(request), wait=wait, children=lambda: ()
        )

    def path(self, name: str = "one") -> Path:
        return Path("/dev/shm") / f"{self.prefix}-{name}"

    def made(self, name: str = "one", size: int = 8192) -> Path:
        path = self.path(name)
        path.write_bytes(b"x" * size)
        return path

    def clear(self, *, user: str = "", touch: bool = True, **keys: Any) -> dict[str, tuple[str, str]]:
        """The fate and the reason of what is told, by the rest of its name."""
        policy = Residue(**{"shm": "remove", "shm_patterns": (f"{self.prefix}-*",), **keys})
        found = residue.clear(policy, self.host, account=Account(user=user), touch=touch)
        assert all(each.kind == "shm" for each in found)
        return {each.name[len(self.prefix) + 1 :]: (each.fate, each.reason) for each in found}


REMOVED = ("removed", "was nobody's any more")


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """Where nothing is too young, and whoever comes may be looked into."""
    monkeypatch.setattr(residue, "YOUNG", 0.0)
    made, pids = Stage(), procfs.pids
    monkeypatch.setattr(procfs, "pids", lambda: [pid for pid in pids() if pid not in made.hidden])
    yield made
    for name in os.listdir("/dev/shm"):
        if name.startswith(made.prefix):
            with contextlib.suppress(IsADirectoryError, FileNotFoundError):
                os.unlink(f"/dev/shm/{name}")


def test_what_the_dead_have_left_is_removed_with_what_it_took(stage: Stage) -> None:
    path, other = stage.made("one", MIB), stage.made("two")
    kept = Path("/dev/shm") / f"x{stage.prefix}-one"
    kept.touch()
    try:
        policy = Residue(shm="remove", shm_patterns=(f"{stage.prefix}-on[e]", f"{stage.prefix}-o*"))
        found = residue.clear(policy, stage.host, account=Account(), touch=True)
        assert found == [Leftover("shm", path.name, MIB, *REMOVED)]
        assert not path.exists() and other.exists() and kept.exists()
    finally:
        kept.unlink()


@pytest.mark.parametrize("way", [*OPEN, *MAPPED, "by its path"])
def test_what_anybody_has_stays_and_is_not_told(stage: Stage, way: str) -> None:
    path = stage.made()
    with python(HAVING, str(path), way) as child:
        assert stage.clear() == {} and path.exists()
        child.kill()
        await_death(child.pid)
        assert stage.clear() == {"one": REMOVED} and not path.exists()


@pytest.mark.parametrize("unshared", ["--mount", "--pid"])
def test_what_somebody_in_another_namespace_has(stage: Stage, unshared: str) -> None:
    path = stage.made()
    command = ["unshare", unshared, "--fork", "--kill-child", sys.executable, "-I", "-S", "-c", HAVING, str(path)]
    with subprocess.Popen([*command, "mapped"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout and child.stdout.readline() == b"ready\n"
        assert stage.clear() == {} and path.exists()
        child.communicate()
    assert stage.clear() == {"one": REMOVED}


def test_a_descriptor_in_flight_is_had_by_somebody_who_cannot_be_seen(stage: Stage) -> None:
    import array

    path = stage.made()
    one, other = socket.socketpair()
    with one, other:
        number = os.open(path, os.O_RDONLY)
        one.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [number]))])
        os.close(number)
        why = "is in use by a process that cannot be seen from here or has just come"
        assert stage.clear() == {"one": ("kept", why)} and path.exists()
    assert stage.clear() == {"one": REMOVED}


def test_one_that_may_not_be_looked_into_may_have_anything(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stage.made()
    files_of = opened.files_of

    def refused(pid: int, devices: Any) -> frozenset[tuple[int, int]]:
        if pid in (child.pid, 1 << 30):
            raise PermissionError
        return files_of(pid, devices)

    monkeypatch.setattr(opened, "files_of", refused)
    with waiting() as child:
        monkeypatch.setattr(procfs, "pids", lambda: [os.getpid(), child.pid])
        why = f"may be in use: PID {child.pid} may not be looked into, or does not answer"
        assert stage.clear() == {"one": ("kept", why)} and path.exists()
    # One that refuses while it goes has nothing any more.
    monkeypatch.setattr(procfs, "pids", lambda: [os.getpid(), 1 << 30])
    assert stage.clear() == {"one": REMOVED}


@pytest.mark.parametrize("answer", [None, "refuses"])
def test_one_that_does_not_tell_what_it_has_mapped_may_have_anything(stage: Stage, answer: Optional[str]) -> None:
    """The others of its batch are asked again without it."""
    path = stage.made()

    def ask(request: tuple[str, Any], timeout: float) -> Any:
        pids, device = request[1]
        if child.pid in pids:
            return None if answer is None else {**answers.answer(request), child.pid: None}
        return answers.answer(request)

    with waiting() as child:
        stage.host.ask = ask
        why = f"may be in use: PID {child.pid} may not be looked into, or does not answer"
        assert stage.clear() == {"one": ("kept", why)} and path.exists()


def test_maps_that_are_told_in_parts_are_all_looked_at(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stage.made()
    with waiting() as first, python(HAVING, str(path), "mapped") as child:
        sizes = [len(Path(f"/proc/{one.pid}/maps").read_bytes()) for one in (first, child)]
        monkeypatch.setattr(slow, "MAPS_BYTES", max(sizes) + 1)
        monkeypatch.setattr(procfs, "pids", lambda: [first.pid, child.pid])
        assert stage.clear() == {} and path.exists()


def test_what_leads_elsewhere_or_is_no_file_is_told_and_never_touched(stage: Stage, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("precious")
    stage.path("link").symlink_to(target)
    stage.path("dangling").symlink_to(tmp_path / "nothing")
    stage.path("folder").mkdir()
    (stage.path("folder") / f"{stage.prefix}-below").touch()
    os.mkfifo(stage.path("pipe"))
    stage.made("first")
    os.link(stage.path("first"), stage.path("second"))
    try:
        told = stage.clear()
        assert {name: fate for name, (fate, _) in told.items()} == dict.fromkeys(
            ("link", "dangling", "folder", "pipe", "first", "second"), "kept"
        )
        assert "symbolic link" in told["link"][1] and "2 names" in told["second"][1]
        assert target.read_text() == "precious" and stage.path("link").is_symlink()
        assert (stage.path("folder") / f"{stage.prefix}-below").exists()
    finally:
        (stage.path("folder") / f"{stage.prefix}-below").unlink()
        stage.path("folder").rmdir()


def test_whose_it_is(stage: Stage) -> None:
    for name, uid in (("root", 0), ("server", 1234), ("other", 1235)):
        os.chown(stage.made(name), uid, uid)
    told = stage.clear(user="1234", touch=False)
    assert {name for name, (_, why) in told.items() if why == "would be removed"} == {"root", "server"}
    assert stage.clear(owner="any", touch=False).keys() == {"root", "server", "other"}
    assert "belongs to uid 1235" in stage.clear(user="1234")["other"][1]
    assert stage.clear(owner="any") == {"other": REMOVED}


@pytest.mark.parametrize(("user", "goes"), [("nobody", True), ("no-such-user", False), ("", False)])
def test_the_units_user_by_name(stage: Stage, user: str, goes: bool) -> None:
    os.chown(stage.made("one"), int(subprocess.check_output(["id", "-u", "nobody"])), 0)
    assert (stage.clear(user=user)["one"] == REMOVED) is goes


def test_a_name_with_the_pid_of_somebody_alive(stage: Stage) -> None:
    with waiting() as child:
        path = stage.made(f"{child.pid}-x")
        (told,) = stage.clear().values()
        assert told[0] == "kept" and f"the number {child.pid}" in told[1] and path.exists()
        child.kill()
        await_death(child.pid)
        # A corpse wants nothing.
        assert [*stage.clear().values()] == [REMOVED] and not path.exists()


def test_a_thread_of_the_kernel_and_pid_1_are_no_servers(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = [pid for pid in stage.hidden if (process := procfs.read(pid)) and process.ppid == 2]
    if not threads:
        pytest.skip("no thread of the kernel is seen here")
    monkeypatch.setattr(procfs, "pids", lambda: [os.getpid(), threads[0]])
    stage.made(f"{threads[0]}-1")
    assert [*stage.clear().values()] == [REMOVED]


#: The first process of a PID namespace, with a child that is told by its PID there, and is a corpse after a line.
CONTAINER = """
import os, signal, sys
with open("/proc/sys/kernel/ns_last_pid", "w") as file:
    file.write(str(int(sys.argv[1]) - 1))
child = os.fork()
if child == 0:
    signal.pause()
print(child, flush=True)
sys.stdin.readline()
os.kill(child, 9)
os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
print("dead", flush=True)
sys.stdin.readline()
"""


def test_a_name_with_the_pid_that_somebody_has_in_a_container(stage: Stage) -> None:
    taken = {*procfs.pids(), *stage.hidden}
    free = next(number for number in range(20_000, 30_000) if number not in taken)
    command = ["unshare", "--pid", "--mount-proc", "--fork", "--kill-child", sys.executable, "-I", "-S", "-c"]
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, CONTAINER, str(free)], stdin=pipe, stdout=pipe, text=True, bufsize=1) as container:
        assert container.stdin and container.stdout and container.stdout.readline() == f"{free}\n"
        path = stage.made(f"{free}-x")
        (told,) = stage.clear().values()
        assert told[0] == "kept" and f"the number {free}" in told[1] and path.exists()
        # A corpse wants nothing.
        container.stdin.write("die\n")
        assert container.stdout.readline() == "dead\n"
        assert [*stage.clear().values()] == [REMOVED] and not path.exists()
        container.communicate("\n")


def test_what_was_made_just_now_is_perhaps_on_its_way(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residue, "YOUNG", 100.0)
    path = stage.made()
    assert stage.clear() == {"one": ("kept", "was made or used less than 100 s ago")} and path.exists()
    monkeypatch.setattr(time, "time", lambda clock=time.time: clock() + 101.0)
    assert stage.clear() == {"one": REMOVED}


@pytest.mark.parametrize(
    ("mode", "touch", "why"),
    [
        ("report", True, 'is nobody\'s any more, and residue.shm = "report" leaves it'),
        ("report", False, 'is nobody\'s any more, and residue.shm = "report" leaves it'),
        ("remove", False, "would be removed"),
    ],
)
def test_nothing_is_touched_where_it_is_only_asked(stage: Stage, mode: str, touch: bool, why: str) -> None:
    path = stage.made()
    before = path.stat()
    assert stage.clear(shm=mode, touch=touch) == {"one": ("kept", why)}
    assert path.stat() == before


def test_what_is_off_is_not_looked_at(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.made()
    monkeypatch.setattr(residue, "SHM", "/no/such")
    assert stage.clear(shm="off", sysv="report") == {}


def test_what_cannot_be_removed_or_looked_at_is_told_and_no_more(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.made()
    with monkeypatch.context() as patched:
        patched.setattr(residue, "SHM", "/no/such")
        found = residue.clear(Residue(shm="remove"), stage.host, account=Account(), touch=True)
        assert found == [Leftover("shm", "", 0, "failed", "could not be looked at: No such file or directory")]

    def refuse(name: str, **where: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refuse)
        assert stage.clear() == {"one": ("failed", "could not be removed: Operation not permitted")}


def test_a_start_that_is_proved_is_not_refused_because_systemd_does_not_answer(stage: Stage) -> None:
    """Whose the unit's files are is not known then, and only root's go."""

    def silent(unit: str, names: Sequence[str]) -> None:
        raise SystemdError("gave no answer")

    os.chown(stage.made("server"), 1234, 0)
    stage.made("root")
    stage.host.systemd = SimpleNamespace(properties=silent)
    told: list[Leftover] = []
    run: Any = object.__new__(hook._Run)
    run._host, run._checking = stage.host, False
    run._ledger = SimpleNamespace(phase=lambda name: contextlib.nullcontext(), left=told.extend)
    policy = Policy(residue=Residue(shm="remove", shm_patterns=(f"{stage.prefix}-*",)))
    run._clear(hook.Start(unit="a.service", environ=None, policy=policy))
    assert [each.fate for each in told] == ["removed", "kept"] and stage.path("server").exists()


def test_without_the_right_to_prove_it_nothing_goes(stage: Stage) -> None:
    """A lease on another user's file takes CAP_LEASE."""
    path = stage.made()
    os.chown(path, 1234, 0)
    path.chmod(0o666)
    code = "import sys; sys.path.insert(0, sys.argv[1]); import os; from gpuprestart.host import ipc\n"
    code += "os.setuid(1235); d = ipc.Directory('/dev/shm'); f, = d.files(lambda name: name == sys.argv[2])\n"
    code += "try: d.remove(f)\nexcept OSError as error: print(error.strerror)"
    done = subprocess.run([sys.executable, "-c", code, str(ROOT), path.name], stdout=subprocess.PIPE, text=True)
    assert done.stdout == "Permission denied\n" and path.exists()


# Who may have been told a name ----------------------------------------------------------------------------------------

#: Has something of its own on the same file system, and then makes files and closes them, for somebody whom it tells.
HANDS_OVER = """
import ctypes, os, sys
own, way, *handed = sys.argv[1:]
number = os.open(own, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
if way == "mapped":
    # Straight from the C library: Python's own mmap keeps a descriptor.
    libc = ctypes.CDLL(None)
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, *[ctypes.c_long] * 5]
    os.ftruncate(number, 4096)
    libc.mmap(None, 4096, 1, 1, number, 0)
    os.close(number)
if way != "named":
    os.unlink(own)
for path in handed:
    with open(path, "xb") as file:
        file.write(b"x" * 5000)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("way", ["open", "mapped", "named"])
def test_what_a_server_has_handed_over_stays_until_it_is_gone(stage: Stage, way: str) -> None:
    """It is closed, and nobody has opened it yet: the scheduler loads its model for minutes."""
    earlier = stage.made("earlier")
    await_tick(earlier)
    names = ["psm", "12345678"]
    with python(HANDS_OVER, str(stage.path("own")), way, *(str(stage.path(name)) for name in names)) as server:
        who = f"{comm(server.pid)}[{server.pid}]"
        why = f"may yet be opened by {who}, which is alive and was there before it was last used"
        kept = dict.fromkeys(names, ("kept", why))
        assert stage.clear() == {**kept, "earlier": REMOVED}
        server.kill()
        await_death(server.pid)
        # What it had is among it then.
        told = stage.clear()
        assert told.items() >= dict.fromkeys(names, REMOVED).items()


def test_a_queue_may_have_been_handed_over_as_well(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder stands for the place of the queues here; who has one open may be told of another."""
    folder = stage.path("queues")
    folder.mkdir()
    monkeypatch.setattr(ipc, "queues", lambda: str(folder))
    policy = Residue(mqueue="remove")
    try:
        with python(HANDS_OVER, str(folder / "own"), "open", str(folder / "handed")):
            (told,) = residue.clear(policy, stage.host, account=Account(), touch=True)
            assert (told.kind, told.fate) == ("mqueue", "kept") and told.reason.startswith("may yet be opened by")
        (told,) = residue.clear(policy, stage.host, account=Account(), touch=True)
        assert (told.fate, told.reason) == REMOVED
    finally:
        folder.rmdir()


def test_who_only_looks_at_gpus_or_has_none_is_told_nothing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/zero stands for the node of a GPU here."""
    with open("/dev/zero", "rb") as zero, subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stderr=zero) as cat:
        stage.made()
        told = ("kept", f"may yet be opened by cat[{cat.pid}], which is alive and was there before it was last used")
        monkeypatch.setattr(residue, "NODES", "/dev/zer[o]")
        assert stage.clear() == {"one": told}
        with monkeypatch.context() as patched:
            patched.setattr(stage.host, "children", lambda: (cat.pid,))
            assert stage.clear(touch=False) == {"one": ("kept", "would be removed")}
        with monkeypatch.context() as patched:
            program = os.readlink(f"/proc/{cat.pid}/exe").rpartition("/")[2]
            patched.setitem(infrastructure.PROGRAMS, program, "display server")
            assert stage.clear(touch=False) == {"one": ("kept", "would be removed")}
        monkeypatch.setattr(residue, "NODES", "/dev/ful[l]")
        assert stage.clear() == {"one": REMOVED}
        cat.kill()


@pytest.mark.parametrize("way", ["mapped", "silent", "refuses"])
def test_who_has_a_gpu_mapped_or_does_not_tell_may_be_a_server(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    code = "import mmap, os, sys; n = os.open('/dev/zero', os.O_RDWR); m = mmap.mmap(n, 4096, mmap.MAP_PRIVATE)\n"
    code += "os.closerange(3, 99); print('ready', flush=True); sys.stdin.read()"
    monkeypatch.setattr(residue, "NODES", "/dev/zer[o]")

    def ask(request: tuple[str, Any], timeout: float) -> Any:
        told = answers.answer(request)
        return (
            told
            if way == "mapped" or request[0] != "maps"
            else None
            if way == "silent"
            else dict.fromkeys(request[1][0], [])
        )

    with python(code) as child:
        monkeypatch.setattr(procfs, "pids", lambda: [os.getpid(), child.pid])
        stage.made()
        stage.host.ask = ask
        if way == "refuses":
            monkeypatch.setattr(opened, "sweep", lambda devices, pids: opened.Sweep({}, tuple(pids)))
        (told,) = stage.clear().values()
        assert told[0] == "kept" and f"[{child.pid}], which is alive" in told[1]


def test_of_several_servers_who_was_there_first_counts(stage: Stage) -> None:
    with python(HANDS_OVER, str(stage.path("first")), "open", str(stage.path("one"))) as first:
        await_tick(stage.path("one"))
        with python(HANDS_OVER, str(stage.path("second")), "open", str(stage.path("two"))):
            told = stage.clear()
            assert told.keys() == {"one", "two"}
            assert all(fate == "kept" and f"[{first.pid}], which is alive" in why for fate, why in told.values())


def test_who_came_after_the_last_use_was_not_told(stage: Stage) -> None:
    """However long that is ago, and whatever it has; and when it is used, that counts."""
    path = stage.made("one")
    await_tick(path)
    with python(HANDS_OVER, str(stage.path("own")), "open"):
        assert stage.clear(touch=False) == {"one": ("kept", "would be removed")}
        path.write_bytes(b"y")
        assert stage.clear()["one"][1].startswith("may yet be opened by")


def comm(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").rstrip("\n")


def await_tick(path: Path) -> None:
    """Come back when a process that begins from now on is known to have begun after the file's last change."""
    while time.time() < path.stat().st_ctime + 3 * residue.TICK:
        wait([], residue.TICK)


# SysV and MPS --------------------------------------------------------------------------------------------------------

libc = ctypes.CDLL(None, use_errno=True)
MAKES = (
    "import ctypes, sys; c = ctypes.CDLL(None); c.shmat.restype = ctypes.c_void_p; n = c.shmget(0, 5000, 0o1600);"
    "a = c.shmat(n, None, 0); print(n, flush=True); sys.stdin.read()"
)


@pytest.fixture
def left() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that has made a segment and has it attached, and the segment."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", MAKES], stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdout
        number = int(child.stdout.readline())
        try:
            yield child, number
        finally:
            child.kill()
            libc.shmctl(number, 0, None)


def sysv(number: int, stage: Stage, **keys: Any) -> Optional[Leftover]:
    policy = Residue(**{"sysv": "remove", **keys})
    only = [each for each in ipc.segments() if each.id == number]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ipc, "segments", lambda: only)
        found = residue.clear(policy, stage.host, account=Account(), touch=True)
    return found[0] if found else None


def test_a_segment_goes_when_all_who_had_it_are_gone(stage: Stage, left: tuple[subprocess.Popen[str], int]) -> None:
    child, number = left
    assert sysv(number, stage) is None
    child.kill()
    child.wait()
    told = sysv(number, stage, sysv="report")
    assert told and (told.fate, told.bytes) == ("kept", 5000) and "residue.sysv" in told.reason
    assert sysv(number, stage, sysv="off", shm="report", shm_patterns=()) is None
    assert sysv(number, stage) == Leftover("sysv", str(number), 5000, *REMOVED)
    assert number not in {each.id for each in ipc.segments()}


def test_a_segment_whose_maker_is_alive_stays(stage: Stage) -> None:
    number = libc.shmget(0, 5000, 0o1600)
    try:
        told = sysv(number, stage)
        assert told and told.fate == "kept" and f"PID {os.getpid()}, which made it, is alive" in told.reason
        assert number in {each.id for each in ipc.segments()}
    finally:
        libc.shmctl(number, 0, None)


def test_a_socket_of_mps_is_told_and_stays(stage: Stage, shallow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "MPS", str(shallow))
    path = shallow / "control"
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(path))
    policy = Residue(shm="report", shm_patterns=())
    told = [Leftover("mps", str(path), 0, "kept", "is a control socket of an MPS daemon that is gone")]
    assert residue.clear(policy, stage.host, account=Account(), touch=True) == told and path.exists()
    # One in another network namespace is not seen to listen.
    (shallow / ipc.MPS_PID).write_text(f"{os.getpid()}\n")
    assert residue.clear(policy, stage.host, account=Account(), touch=True) == []


# A live server, and a crowd ------------------------------------------------------------------------------------------

#: Makes, maps, opens again, closes and unlinks files all the time, and ends with the name of one that it has lost.
SERVER = """
import mmap, os, sys, threading
prefix, rounds = sys.argv[1], 0
# The runs, which look into the folder, are somebody else then, and no excuse for anything.
os.setuid(1234)
print("ready", flush=True)
stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()

def there(path, inode):
    try:
        if os.stat(path).st_ino == inode:
            return
    except FileNotFoundError:
        pass
    print("lost", path, "in round", rounds)
    sys.exit(1)

while not stop.is_set() or rounds < 20:
    rounds += 1
    held = f"/dev/shm/{prefix}-held"
    number = os.open(held, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.ftruncate(number, 8192)
    inode = os.fstat(number).st_ino
    memory = mmap.mmap(number, 8192)
    os.close(number)
    # They lie there closed, for somebody who is told of them; our PID is in the name of one.
    inodes = {}
    for passed in (f"/dev/shm/{prefix}-{os.getpid()}-passed", f"/dev/shm/{prefix}-random"):
        with open(passed, "xb") as file:
            file.write(b"x" * 5000)
            inodes[passed] = os.fstat(file.fileno()).st_ino
    for _ in range(20):
        there(held, inode)
        with open(held, "r+b", buffering=0) as file:
            there(held, inode)
            file.write(b"y")
        for passed, other in inodes.items():
            there(passed, other)
            with open(passed, "r+b", buffering=0) as file:
                file.write(b"y")
    for passed in inodes:
        os.unlink(passed)
    there(held, inode)
    os.unlink(held)
    memory.close()
print("rounds", rounds)
"""

RUNS = """
import sys
from types import SimpleNamespace
from gpuprestart import answers, residue
from gpuprestart.host import procfs
from gpuprestart.model import Account
from gpuprestart.policy import Residue
prefix, times, *left_out = sys.argv[1], *map(int, sys.argv[2:])
residue.YOUNG = 0.0
pids = procfs.pids
procfs.pids = lambda: [pid for pid in pids() if pid not in left_out]
host = SimpleNamespace(
    ask=lambda request, timeout: answers.answer(request), wait=lambda descriptors, seconds: set(), children=lambda: ()
)
policy = Residue(shm="remove", shm_patterns=(f"{prefix}-*",), owner="any")
removed = set()
for _ in range(times):
    found = residue.clear(policy, host, account=Account(), touch=True)
    removed |= {each.name for each in found if each.fate == "removed"}
    assert not any(each.fate == "failed" for each in found), found
print(*sorted(removed))
"""


def test_the_files_of_a_live_server_survive_200_runs_at_once(stage: Stage) -> None:
    """And those of the dead beside them do not; none of them is removed twice."""
    dead = {stage.made(f"dead{number:c}").name for number in range(ord("a"), ord("z"))}
    await_tick(stage.path("deady"))
    server = [sys.executable, "-I", "-S", "-c", SERVER, stage.prefix]
    runs = [sys.executable, "-c", RUNS, stage.prefix, "25", *map(str, stage.hidden)]
    pipe = subprocess.PIPE
    with subprocess.Popen(server, stdin=pipe, stdout=pipe, text=True) as alive:
        assert alive.stdout and alive.stdout.readline() == "ready\n"
        clearing = [subprocess.Popen(runs, cwd=ROOT, stdout=pipe, text=True) for _ in range(8)]
        removed = [name for one in clearing for name in one.communicate()[0].split()]
        assert [one.returncode for one in clearing] == [0] * 8
        said, _ = alive.communicate()
    assert alive.returncode == 0 and said.startswith("rounds"), said
    assert sorted(removed) == sorted(dead)


CROWD = """
import os, signal, sys
pids, (count, user) = [], map(int, sys.argv[1:])
os.setuid(user)
for _ in range(count):
    pid = os.fork()
    if pid == 0:
        signal.pause()
    pids.append(pid)
print("ready", flush=True); sys.stdin.read()
for pid in pids:
    os.kill(pid, 9); os.waitpid(pid, 0)
"""


def test_20_000_files_among_1_000_processes(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes are looked at once, whatever the number of files: it takes a second or two. They are of the same
    user, were there before, and could have a GPU, but have none."""
    monkeypatch.setattr(residue, "NODES", "/dev/zer[o]")
    with python(CROWD, "1000", "1234") as crowd:
        for number in range(20_000):
            os.close(os.open(stage.path(f"x{number}"), os.O_CREAT | os.O_WRONLY, 0o600))
            os.chown(stage.path(f"x{number}"), 1234, 1234)
        began = time.process_time()
        told = stage.clear(user="1234")
        took = time.process_time() - began
        crowd.communicate()
    assert [*told.values()] == [REMOVED] * 20_000
    assert took < 6.0


# The record ----------------------------------------------------------------------------------------------------------


def test_the_record_tells_counts_bytes_and_why() -> None:
    found = [
        *(Leftover("shm", f"nccl-{number}", MIB, *REMOVED) for number in range(6)),
        Leftover("shm", "psm_a\n", 3 * MIB, "kept", "was made or used less than 10 s ago"),
    ]
    record = events.residue(events.Context(unit="a.service", run="r"), found)
    assert record.priority == events.NOTICE and record.message == (
        "Leftovers in shared memory: 6 removed (6 MiB: nccl-0, nccl-1, nccl-2, nccl-3 and 2 more), "
        "1 kept (3 MiB: psm_a\\x0a; it was made or used less than 10 s ago)"
    )
    assert (record.fields["GPUPRESTART_REMOVED"], record.fields["GPUPRESTART_REMOVED_BYTES"]) == ("6", str(6 * MIB))
    assert record.fields["GPUPRESTART_RESIDUE"][-1] == "shm psm_a\\x0a kept: it was made or used less than 10 s ago"


@pytest.mark.parametrize(
    ("fates", "priority"),
    [(["kept"], events.INFO), (["kept", "removed"], events.NOTICE), (["removed", "failed"], events.WARNING)],
)
def test_the_priority_of_the_record(fates: Sequence[str], priority: int) -> None:
    found = [Leftover("shm", "psm_a", 0, fate, "is so") for fate in fates]
    assert events.residue(events.Context(unit=None, run="r"), found).priority == priority
