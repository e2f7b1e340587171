"""[hooks] before_kill: a program that is run before the first signal to a holder, whatever becomes of it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.node.scene import TERM, Run, Scene

pytestmark = pytest.mark.node

HOOK, LOG = "/opt/hook/before-kill", "/run/hook.log"

#: Writes down what it is given, and whether the holder is still there and has had no SIGTERM yet.
WRITES = f"""#!/usr/bin/python3
import json, os, sys
pid = os.environ["HOLDER_PID"]
status = dict(line.split(":", 1) for line in open(f"/proc/{{pid}}/status") if ":" in line)
told = dict(words=sys.argv[1:], environ=dict(os.environ), state=status["State"].split()[0], stdin=sys.stdin.read())
open("{LOG}", "a").write(json.dumps(told) + "\\n")
print("said by the hook")
"""


@pytest.fixture
def hook(scene: Scene) -> Iterator[Scene]:
    scene.node.write(HOOK, WRITES, mode=0o755)
    try:
        yield scene
    finally:
        scene.node.run(["rm", "-rf", LOG, "/opt/hook"])


def policy(scene: Scene, *words: str, timeout: str = "5 s") -> None:
    command = json.dumps([HOOK, *(words or ("--pid", "{pid}"))])
    scene.policy(f'[deadline]\n{TERM}[hooks]\nbefore_kill = {command}\ntimeout = "{timeout}"\n')


def warnings(scene: Scene, run: Run) -> list[str]:
    return [str(each["MESSAGE"]) for each in scene.records(run, "warning")]


def test_it_is_run_before_sigterm_and_told_whom_it_is_about(hook: Scene) -> None:
    policy(hook, "--pid", "{pid}", "x{pid}y", "{", "{gpu}", "a b;$(id)")
    unit, orphans = hook.orphans("--open", "0,1", "--gpu", "0", "--mib", "20480", count=2)
    server = hook.server(gpus="0,1", more="Environment=SECRET=1")
    assert hook.start(server)
    run = hook.verdict(server)
    assert run.outcome == "cleaned" and warnings(hook, run) == []
    calls = [json.loads(line) for line in hook.node.read(LOG).splitlines()]
    assert [call["words"] for call in calls] == [
        ["--pid", str(pid), f"x{pid}y", "{", "{gpu}", "a b;$(id)"] for pid in sorted(orphans)
    ]
    assert {call["state"] for call in calls} == {"S"} and {call["stdin"] for call in calls} == {""}
    environ = calls[0]["environ"]
    state = hook.gpu.ask("state")["gpus"]
    assert environ["HOLDER_PID"] == str(min(orphans)) and environ["HOLDER_OWNER"] == f"unit:{unit}"
    assert environ["GPUPRESTART_UNIT"] == server and environ["GPUPRESTART_RUN"] == run.verdict["run"]
    assert environ["HOLDER_EVIDENCE"] == "nvml,fd" and environ["HOLDER_BYTES"] == str(20480 << 20)
    assert environ["GPU_UUID"] == state[0]["uuid"] and environ["GPU_INDEX"] == "0"
    assert environ["LC_ALL"] == "C" and "/usr/bin" in environ["PATH"]
    assert not {"SECRET", "CUDA_VISIBLE_DEVICES", "NOTIFY_SOCKET", "OBJECT_SYSTEMD_UNIT"} & environ.keys()
    assert "said by the hook" in run.stderr
    assert hook.signals(run) == [(pid, "SIGTERM") for pid in sorted(orphans)]


@pytest.mark.parametrize(
    ("script", "mode", "said"),
    [
        ("#!/bin/sh\nexit 3\n", 0o755, "exited with status 3"),
        ("#!/bin/sh\nkill -9 $$\n", 0o755, "was ended by SIGKILL"),
        ("#!/bin/sh\nexit 0\n", 0o644, "Permission denied"),
        ("#!/bin/sh\nexit 0\n", 0o757, "can be written by others"),
        ("not a program\n", 0o755, "Exec format error"),
        (None, 0, "is not there"),
    ],
)
def test_its_failure_stops_nothing(hook: Scene, script: str | None, mode: int, said: str) -> None:
    policy(hook)
    hook.node.run(["rm", HOOK])
    if script:
        hook.node.write(HOOK, script, mode=mode)
    _, orphans = hook.orphans("--open", "0", "--gpu", "0", "--mib", "20480", count=2)
    run = hook.clean("--gpus", "0")
    assert run.outcome == "cleaned" and sorted(run.fates) == sorted(orphans)
    found = warnings(hook, run)
    assert len(found) == 2 and all(said in each for each in found)
    assert [each["HOLDER_PID"] for each in hook.records(run, "warning")] == [str(pid) for pid in sorted(orphans)]


def test_one_that_hangs_is_killed_with_its_children_and_run_no_more(hook: Scene) -> None:
    policy(hook, timeout="1 s")
    hook.node.write(HOOK, "#!/bin/sh\nsleep 4321 &\nsleep 4321\n", mode=0o755)
    _, orphans = hook.orphans("--open", "0", "--gpu", "0", "--mib", "2048", count=8)
    run = hook.clean("--gpus", "0", "--deadline", "30s")
    assert run.outcome == "cleaned" and sorted(run.fates) == sorted(orphans)
    (said,) = warnings(hook, run)
    assert "was not done after 1 s; it is run for nobody else in this run" in said
    assert hook.node.run(["pgrep", "-f", "sleep 4321"], check=False).stdout == ""


def test_the_children_of_one_that_has_ended_are_not_left(hook: Scene) -> None:
    policy(hook)
    hook.node.write(HOOK, "#!/bin/sh\nsleep 4322 &\n", mode=0o755)
    hook.orphans("--open", "0", "--gpu", "0", "--mib", "2048")
    run = hook.clean("--gpus", "0")
    assert run.outcome == "cleaned" and warnings(hook, run) == []
    assert hook.node.run(["pgrep", "-f", "sleep 4322"], check=False).stdout == ""


def test_one_that_ends_the_holder_itself(hook: Scene) -> None:
    policy(hook, "{pid}")
    hook.node.write(HOOK, '#!/bin/sh\nkill -9 "$1"\nwhile [ -e /proc/$1 ]; do sleep 0.05; done\n', mode=0o755)
    _, (orphan,) = hook.orphans("--open", "0", "--gpu", "0", "--mib", "2048")
    run = hook.clean("--gpus", "0")
    assert run.exit == 0 and hook.signals(run) == []
    assert run.fates == {orphan: "exited"}


def test_somebody_alive_who_comes_meanwhile_is_seen_before_the_first_signal(hook: Scene) -> None:
    policy(hook)
    hook.node.write(HOOK, f"#!/bin/sh\n: > {LOG}\nuntil [ -e {LOG}.go ]; do sleep 0.05; done\n", mode=0o755)
    _, (orphan,) = hook.orphans("--open", "0", "--gpu", "0", "--mib", "2048")
    server = hook.server(gpus="0")
    hook.node.run(["systemctl", "start", "--no-block", server])
    try:
        hook.node.wait_for(lambda: hook.node.exists(LOG), timeout=20, what="the hook runs")
        hook.service("--open", "0", "--gpu", "0", "--mib", "500", user="alice")
    finally:
        hook.node.run(["touch", f"{LOG}.go"])
    hook.await_state(server, "failed")
    hook.node.run(["rm", f"{LOG}.go"])
    run = hook.verdict(server)
    assert run.outcome == "protected" and hook.signals(run) == []
    assert hook.alive(orphan)


def test_a_stop_of_the_unit_ends_it_too(hook: Scene) -> None:
    policy(hook, timeout="100 s")
    hook.node.write(HOOK, f"#!/bin/sh\ntrap '' TERM\n: > {LOG}\nwhile :; do sleep 4323; done\n", mode=0o755)
    _, (orphan,) = hook.orphans("--open", "0", "--gpu", "0", "--mib", "2048")
    server = hook.server(gpus="0")
    hook.node.run(["systemctl", "start", "--no-block", server])
    hook.node.wait_for(lambda: hook.node.exists(LOG), timeout=20, what="the hook runs")
    hook.node.run(["systemctl", "stop", server])
    run = hook.verdict(server)
    assert run.outcome == "interrupted" and hook.signals(run) == []
    assert hook.alive(orphan)
    assert hook.node.run(["pgrep", "-f", HOOK], check=False).stdout == ""


def test_check_runs_nothing(hook: Scene) -> None:
    policy(hook)
    hook.orphans("--open", "0", "--gpu", "0", "--mib", "2048")
    assert hook.check("--gpus", "0").outcome == "not-freed"
    assert not hook.node.exists(LOG)
