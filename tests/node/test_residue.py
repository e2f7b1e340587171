"""What a dead server has left in shared memory, beside a server that is alive, before a start through systemd."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from .scene import Run, Scene

pytestmark = pytest.mark.node

MIB = 1 << 20

#: Files of a MiB as NCCL, PyTorch, CUDA, SGLang and Python name them, open or mapped, a segment and a queue; and one
#: that is closed, as is what SGLang's tokenizer hands to the scheduler.
SERVER = """
import ctypes, mmap, os, signal, sys
stem, ready = sys.argv[1:]
signal.signal(signal.SIGTERM, signal.SIG_DFL)
libc, pid = ctypes.CDLL(None), os.getpid()
libc.shmat.restype = ctypes.c_void_p
names = [f"nccl-{stem}", f"torch_{pid}_{stem}_0", f"cuda.shm.{stem}.{pid:x}.1", f"sgl_shm_{stem}_{pid}_0a1b2c3d"]
for name in [*names, f"psm_{stem}", f"sem.mp-{stem}"]:
    number = os.open(f"/dev/shm/{name}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(number, b"x" * (1 << 20))
    if name.startswith("psm"):
        libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, *[ctypes.c_long] * 5]
        libc.mmap(None, 4096, 1, 1, number, 0)
        os.close(number)
with open(f"/dev/shm/psm_{stem}_passed", "xb") as file:
    file.write(b"x" * (1 << 20))
segment = libc.shmget(0, 5 << 20, 0o1600)
libc.shmat(segment, None, 0)
libc.mq_open(f"/{stem}".encode(), os.O_RDWR | os.O_CREAT, 0o600, None)
with open(f"{ready}.new", "w") as file:
    print(pid, segment, file=file)
os.rename(f"{ready}.new", ready)
signal.pause()
"""


class Server:
    """A service with things in shared memory, whose names are nobody else's."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.unit = scene.name("memory")
        self.stem = f"m{secrets.token_hex(5)}m"
        ready = f"/tmp/{self.unit}"
        scene.node.start(["/usr/bin/python3", "-c", SERVER, self.stem, ready], unit=self.unit, user="model")
        scene.node.wait_for(lambda: scene.node.exists(ready), timeout=20, what=f"{self.unit} is ready")
        self.pid, self.segment = map(int, scene.node.read(ready).split())

    @property
    def names(self) -> list[str]:
        """Of its files that are there."""
        return self.scene.node.run(["find", "/dev/shm", "-name", f"*{self.stem}*", "-printf", "%f\n"]).stdout.split()

    @property
    def others(self) -> tuple[bool, bool]:
        """Whether its segment and its queue are there."""
        segments = self.scene.node.run(["ipcs", "-m", "-i", str(self.segment)], check=False)
        return "nattch" in segments.stdout, self.scene.node.exists(f"/dev/mqueue/{self.stem}")


def policy(scene: Scene, servers: Sequence[Server], mode: str) -> None:
    patterns = ", ".join(f"'*{server.stem}*'" for server in servers)
    kinds = "".join(f"{kind} = '{mode}'\n" for kind in ("shm", "sysv", "mqueue"))
    scene.policy(f"[residue]\n{kinds}shm_patterns = [{patterns}]\n")


def told(run: Run, server: Server) -> dict[str, tuple[str, str]]:
    """The fates of what a server has, by kind and name, but for its PID and its stem."""
    mine = [each for each in run.verdict["residue"] if server.stem in each["name"] or each["kind"] == "sysv"]
    return {_short(each, server): (each["fate"], each["reason"]) for each in mine}


def _short(left: Mapping[str, Any], server: Server) -> str:
    if left["kind"] != "shm":
        return str(left["kind"])
    # A PID stands by itself: 204 is cc in hex, which is in nccl.
    pid = rf"(?<![0-9a-z])({server.pid}|{server.pid:x})(?![0-9a-z])"
    return re.sub(pid, "", str(left["name"]).replace(server.stem, ""))


ALL = {"nccl-", "torch___0", "cuda.shm...1", "sgl_shm___0a1b2c3d", "psm_", "psm__passed", "sem.mp-", "sysv", "mqueue"}


def test_a_start_removes_what_the_dead_have_left_and_nothing_of_the_living(scene: Scene) -> None:
    dead, alive = Server(scene), Server(scene)
    scene.abandon(dead.unit)
    since = time.monotonic()
    shm = f"/dev/shm/nccl-{dead.stem}"
    scene.node.run(["sh", "-ec", f"ln -s /etc/hostname {shm}-link; echo bench > {shm}-other; chown bench {shm}-other"])
    policy(scene, [dead, alive], "remove")
    unit, before = scene.server(gpus="0"), sorted(dead.names)
    # What has just been made may be on its way to somebody.
    early = told(scene.check("--unit", unit), dead)
    assert early["nccl-"] == early["mqueue"] == ("kept", "was made or used less than 10 s ago")
    scene.node.wait_for(lambda: time.monotonic() > since + 12, timeout=30, what="it has lain there for 10 seconds")

    # Who only asks is told, and nothing is touched.
    checked = scene.check("--unit", unit)
    found = told(checked, dead)
    assert (checked.exit, checked.outcome) == (0, "clean")
    assert {name for name, (_, why) in found.items() if why == "would be removed"} == ALL
    assert found["nccl--other"][1].startswith("belongs to uid") and "symbolic link" in found["nccl--link"][1]
    assert passed_alone(checked, alive)
    shown = scene.node.run(["/usr/bin/gpuprestart", "check", "--unit", unit], check=False).stdout
    assert "would be removed" in shown and f"psm_{dead.stem}" in shown

    # A start that is refused removes nothing.
    holder, _ = scene.service("--open", "0", "--gpu", "0", "--mib", "900")
    assert not scene.start(unit)
    refused = scene.verdict(unit)
    assert refused.outcome == "protected" and refused.verdict["residue"] == []
    assert sorted(dead.names) == before and dead.others == (True, True)
    scene.node.systemctl("stop", holder)

    assert scene.start(unit)
    run = scene.verdict(unit)
    assert (run.exit, run.outcome) == (0, "clean")
    (record,) = scene.records(run, "residue")
    assert {name for name, (fate, _) in told(run, dead).items() if fate == "removed"} == ALL
    assert record["GPUPRESTART_REMOVED"] == str(len(ALL))
    assert record["GPUPRESTART_REMOVED_BYTES"] == str(7 * MIB + 5 * MIB)
    assert f"shm psm_{dead.stem} removed: it was nobody's any more" in record["GPUPRESTART_RESIDUE"]
    assert f"{len(ALL)} removed (12 MiB: " in record["MESSAGE"] and "3 kept (" in record["MESSAGE"]
    assert sorted(dead.names) == [f"nccl-{dead.stem}-link", f"nccl-{dead.stem}-other"]
    assert dead.others == (False, False) and scene.node.exists("/etc/hostname")

    # What the living one has is not even told, and what it has closed may yet be opened.
    assert passed_alone(run, alive)
    assert len(alive.names) == 7 and alive.others == (True, True) and scene.alive(alive.pid)
    scene.abandon(alive.unit)
    assert told(scene.check("--unit", unit), alive)["psm__passed"] == ("kept", "would be removed")


def passed_alone(run: Run, alive: Server) -> bool:
    """Whether of a living server's there is told only what it has closed, which stays, and because of whom."""
    why = f"may yet be opened by python3[{alive.pid}], which is alive and was there before it was last used"
    mine = [
        (each["name"], each["fate"], each["reason"]) for each in run.verdict["residue"] if alive.stem in each["name"]
    ]
    return mine == [(f"psm_{alive.stem}_passed", "kept", why)]


def test_a_start_that_only_reports_tells_what_is_there(scene: Scene) -> None:
    dead = Server(scene)
    scene.abandon(dead.unit)
    bound = "import socket; socket.socket(socket.AF_UNIX).bind('/tmp/nvidia-mps/control')"
    scene.node.run(["mkdir", "-p", "/tmp/nvidia-mps"])
    scene.node.run(["/usr/bin/python3", "-c", bound])
    try:
        policy(scene, [dead], "report")
        unit = scene.server(gpus="0")
        assert scene.start(unit)
        run = scene.verdict(unit)
        assert run.outcome == "clean" and told(run, dead).keys() == ALL
        assert {fate for fate, _ in told(run, dead).values()} == {"kept"}
        (record,) = scene.records(run, "residue")
        assert record["GPUPRESTART_REMOVED"] == record["GPUPRESTART_REMOVED_BYTES"] == "0"
        gone = "is a control socket of an MPS daemon that is gone"
        assert {"kind": "mps", "name": "/tmp/nvidia-mps/control", "bytes": 0, "fate": "kept", "reason": gone} in (
            run.verdict["residue"]
        )
        assert len(dead.names) == 7 and dead.others == (True, True)
        assert scene.node.exists("/tmp/nvidia-mps/control")
    finally:
        names = " ".join(f"/dev/shm/{name}" for name in dead.names)
        scene.node.run(["sh", "-c", f"rm -rf {names} /dev/mqueue/{dead.stem} /tmp/nvidia-mps; ipcrm -m {dead.segment}"])


def test_a_policy_that_asks_for_nothing_looks_at_nothing(scene: Scene) -> None:
    dead = Server(scene)
    scene.abandon(dead.unit)
    scene.policy(f"[residue]\nshm_patterns = ['*{dead.stem}*']\n")
    unit = scene.server(gpus="0")
    assert scene.start(unit)
    run = scene.verdict(unit)
    assert run.verdict["residue"] == [] and scene.records(run, "residue") == []
    assert len(dead.names) == 7 and dead.others == (True, True)
    names = " ".join(f"/dev/shm/{name}" for name in dead.names)
    scene.node.run(["sh", "-c", f"rm -f {names} /dev/mqueue/{dead.stem}; ipcrm -m {dead.segment}"])
