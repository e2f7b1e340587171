"""What a start on clean GPUs costs, counted: times depend on the machine and the moment, and counts on neither.

A figure that grows here is not forbidden. It is to be seen, and to be worth what every server's start then pays.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import NamedTuple

import pytest

from tests.node.scene import Scene

GPUS = 8

#: Runs the program as its launcher does, and writes down what it asks of Python and of the system.
AUDIT = """
import os, sys
log = os.open("/run/t-counts", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
kinds = ("open", "os.listdir", "os.scandir", "import", "os.fork", "subprocess.Popen", "os.posix_spawn", "os.exec")
def hook(event, arguments):
    if event in kinds:
        what = arguments[0] if arguments else ""
        os.write(log, f"{os.getpid()} {event} {what}\\n".encode())
sys.addaudithook(hook)
with open("/usr/bin/gpuprestart") as file:
    launcher = file.read()
exec(compile(launcher, "/usr/bin/gpuprestart", "exec"))
"""

#: What a start on clean GPUs never needs.
NEVER = {
    "argparse", "asyncio", "concurrent", "dataclasses", "email", "hashlib", "inspect", "logging", "pathlib",
    "prometheus_client", "psutil", "random", "rich", "shutil", "socket", "ssl", "subprocess", "systemd.journal",
    "tempfile", "traceback", "unittest", "uuid",
}  # fmt: skip

#: Modules of our own that are for what is not clean, or for people.
ONLY_THEN = {
    "administration", "before_kill", "checks", "crowd", "doctor", "drain", "enabling", "evict", "history", "host.libc",
    "host.opened", "host.slow", "loop", "metrics", "occupants", "printing", "redaction", "registry", "remote",
    "require", "reset", "residue", "runs", "serverfiles", "survey", "views", "watching",
}  # fmt: skip


class Counts(NamedTuple):
    ours: list[str]
    others: list[str]
    opened: list[str]
    forks: int
    programs: int
    calls: Counter[str]


@pytest.fixture
def counts(scene: Scene) -> Counts:
    scene.node.run(["rm", "-rf", "/run/gpuprestart", "/run/t-counts"])
    # Every module compiled, and every folder there: the second start is like all that follow.
    scene.node.write("/run/t-counts.py", AUDIT)
    server = scene.server(command="/usr/bin/python3 -I /run/t-counts.py clean")
    for _ in range(2):
        scene.node.run(["rm", "-f", "/run/t-counts"])
        scene.gpu.ask("calls", start=True)
        assert scene.start(server)
        record = scene.node.journal(GPUPRESTART_UNIT=server, GPUPRESTART_EVENT="verdict")[-1]
        verdict = json.loads(record["GPUPRESTART_VERDICT"])
        assert (verdict["outcome"], list(verdict["phases"])) == ("clean", ["measure"])
        scene.node.systemctl("stop", server)
    calls = scene.gpu.ask("calls")["counts"]
    scene.gpu.ask("calls", stop=True)
    lines = [line.split(" ", 2) for line in scene.node.read("/run/t-counts").splitlines()]
    first = lines[0][0]
    # The other is the child, which asks the driver while we load what we need, and imports what that takes.
    mine = [(event, what) for pid, event, what in lines if pid == first]
    modules = list(dict.fromkeys(what for event, what in mine if event == "import"))
    files = [what for event, what in mine if event in ("open", "os.listdir", "os.scandir")]
    return Counts(
        ours=[name.removeprefix("gpuprestart.") for name in modules if name.startswith("gpuprestart")],
        others=[name for name in modules if not name.startswith("gpuprestart")],
        # Python's own and our modules are counted as modules.
        opened=[name for name in files if not name.endswith((".pyc", ".py", ".so")) and "/python3" not in name],
        forks=sum(event == "os.fork" for event, _ in mine),
        programs=sum(event in ("subprocess.Popen", "os.posix_spawn", "os.exec") for event, _ in mine),
        calls=Counter(calls),
    )


def test_a_clean_start_costs_no_more_than_it_did(counts: Counts) -> None:
    assert counts.forks == 1 and counts.programs == 0
    assert NEVER.isdisjoint(counts.others), sorted(NEVER.intersection(counts.others))
    assert ONLY_THEN.isdisjoint(counts.ours), sorted(ONLY_THEN.intersection(counts.ours))
    assert len(counts.ours) <= 44, counts.ours
    assert len(counts.others) <= 52, counts.others
    # Of each GPU its lock and its claim, which is read and written.
    assert len(counts.opened) <= 3 * GPUS + 28, counts.opened


def test_the_driver_is_asked_once_for_each_thing(counts: Counts) -> None:
    asked = {name: number for name, number in counts.calls.items() if number > GPUS}
    assert asked == {}
    assert sum(counts.calls.values()) <= 10 * GPUS + 3, counts.calls
