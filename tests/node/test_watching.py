"""``status --watch`` on a booted node: on a terminal, into a pipe, while memory goes away, and how it ends."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.node.scene import Scene

#: Watches on a terminal of 100 columns until the first pattern is there, ends the process, waits for the second, sends
#: the signal, and says how it ended and what was written.
TERMINAL = """
import fcntl, json, os, pty, re, select, signal, struct, sys, termios, time
first, holder, second, number = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
pid, terminal = pty.fork()
if pid == 0:
    os.environ.update(TERM="xterm-256color", LANG="C.UTF-8")
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    os.execvp("gpuprestart", ["gpuprestart", "status", "--watch", "0.2"])
said = ""
def until(pattern):
    global said
    limit = time.monotonic() + 30
    while not re.search(pattern, said, re.DOTALL):
        assert time.monotonic() < limit, said
        if select.select([terminal], [], [], 1)[0]:
            said += os.read(terminal, 65536).decode()
until(first)
os.kill(holder, signal.SIGKILL)
until(second)
os.kill(pid, number)
try:
    while part := os.read(terminal, 65536):
        said += part.decode()
except OSError:
    pass
print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said]))
"""


def watched(scene: Scene, *arguments: object) -> Any:
    done = scene.node.run(["python3", "-c", TERMINAL, *map(str, arguments)], timeout=90)
    return json.loads(done.stdout)


@pytest.mark.parametrize("number", [2, 15])
def test_memory_is_seen_to_go_away_and_a_signal_ends_it(scene: Scene, number: int) -> None:
    _, (pid,) = scene.orphans("--open", "0", "--gpu", "0", "--mib", "1523")
    status, said = watched(scene, "1526 MiB.*unit:t-old", pid, "█+▁▁", number)
    assert status == 0
    # The terminal is as it was before.
    assert said.startswith("\x1b[?1049h\x1b[?25l") and said.endswith("\x1b[?25h\x1b[?1049l")
    last = said.split("\x1b[H")[-1]
    assert "no holders" in last and "1526 MiB" not in last
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", last).replace("\r", "")
    assert all(len(line) <= 100 for line in plain.splitlines())


def test_a_pipe_gets_one_view_after_the_other(scene: Scene) -> None:
    scene.orphans("--open", "0", "--gpu", "0", "--mib", "1523")
    line = "gpuprestart status --watch 0.1 | head -n 40"
    said = scene.node.run(["sh", "-c", line], timeout=60).stdout
    assert len(re.findall(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d$", said, re.MULTILINE)) >= 3
    assert said.count("unit:t-old") >= 2 and "\x1b" not in said
    # Nobody reads it any more, and so it is over.
    scene.node.wait_for(
        lambda: scene.node.run(["pgrep", "-f", "status --watch"], check=False).returncode == 1,
        timeout=20,
        what="the program has ended",
    )


def test_a_driver_that_falls_silent_is_shown(scene: Scene) -> None:
    scene.policy("[deadline]\nnvml = '1 s'\n")
    hung = {"function": "nvmlDeviceGetMemoryInfo_v2", "ms": 60_000}
    line = "timeout --signal=INT 12 gpuprestart status --watch 0.2 > /run/t-watch"
    scene.node.start(["sh", "-c", line], unit=scene.name("watch"))
    scene.node.wait_for(lambda: "GPU-a0576ece" in scene.node.read("/run/t-watch"), timeout=20, what="a first view")
    scene.gpu.ask("delay", **hung)
    try:
        scene.node.wait_for(
            lambda: "unknown:" in scene.node.read("/run/t-watch"), timeout=30, what="what cannot be measured is told"
        )
    finally:
        scene.gpu.ask("clear")


def test_nothing_grows_while_it_watches(scene: Scene) -> None:
    scene.service("--open", "all", "--gpu", "0", "--mib", "1523")
    unit = scene.name("watch")
    scene.node.start(["sh", "-c", "exec gpuprestart status --watch 0.1 > /run/t-watch"], unit=unit)
    pid = scene.node.show(unit, "MainPID")["MainPID"]

    def state(views: int) -> tuple[int, int, int]:
        """Its descriptors, its children and its memory in kB, once it has shown so much."""
        count = ["grep", "-c", "^GPU  UUID", "/run/t-watch"]
        scene.node.wait_for(
            lambda: int(scene.node.run(count, check=False).stdout or 0) >= views, timeout=60, what=f"{views} views"
        )
        script = f"ls /proc/{pid}/fd | wc -l; wc -w < /proc/{pid}/task/{pid}/children; grep VmRSS /proc/{pid}/status"
        words = scene.node.run(["sh", "-c", script]).stdout.split()
        return int(words[0]), int(words[1]), int(words[3])

    first, last = state(10), state(80)
    assert first[:2] == last[:2] and last[2] < first[2] + 4000, (first, last)
