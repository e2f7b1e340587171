"""Lines of the contract (docs/contract.md) that nothing else proves, on a booted node."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from tests.node.scene import Scene

GPUPRESTART = "/usr/bin/gpuprestart"
MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_claims(scene: Scene) -> None:
    """What earlier runs left is gone: a claim, even one that no longer holds, keeps a start from the quick way."""
    scene.node.run(["rm", "-rf", "/run/gpuprestart"])


# Commands ------------------------------------------------------------------------------------------------------------


def test_the_module_is_the_same_program(scene: Scene) -> None:
    module = ["env", "PYTHONPATH=/usr/lib/gpuprestart", "python3", "-m", "gpuprestart"]
    for arguments in (["--version"], ["--help"], ["check", "--help"]):
        said = scene.node.run([*module, *arguments])
        assert said.stdout == scene.node.run([GPUPRESTART, *arguments]).stdout != ""
    assert scene.node.run([*module, "clean", "--nonsense"], check=False).returncode == 64


def test_typing_the_name_shows_and_ends_nobody(scene: Scene) -> None:
    _, (orphan,) = scene.orphans("--open", "0", "--gpu", "0", "--mib", "900")
    bare, status = (scene.node.run([GPUPRESTART, *verb]) for verb in ([], ["status"]))
    assert bare.stdout == status.stdout
    assert re.search(rf"^ *{orphan} .* 900 MiB", status.stdout, re.MULTILINE)
    assert scene.alive(orphan)
    assert not scene.node.exists("/run/gpuprestart")


def test_status_of_somebody_who_is_not_root_says_that_it_is_not_all(scene: Scene) -> None:
    scene.orphans("--open", "0", "--gpu", "0", "--mib", "900")
    done = scene.node.run([GPUPRESTART], user="alice")
    assert "900 MiB" in done.stdout or "903 MiB" in done.stdout
    assert done.stderr.startswith("gpuprestart: this is not all, ") and done.stderr.count("\n") == 1
    assert scene.node.run([GPUPRESTART]).stderr == ""


@pytest.mark.parametrize("fault", ["lost", "silent"])
def test_status_where_it_cannot_measure(scene: Scene, fault: str) -> None:
    if fault == "lost":
        scene.gpu.ask("set_gpu", gpu=3, lost="calls")
    else:
        scene.gpu.ask("error", function="nvmlInit*", code="DRIVER_NOT_LOADED")
    assert scene.node.run([GPUPRESTART, "status"], check=False).returncode == 69


def test_status_whatever_the_policy_says(scene: Scene) -> None:
    scene.policy("[nonsense]\n")
    assert "GPU-" in scene.node.run([GPUPRESTART, "status"]).stdout


def test_status_of_a_service_shows_who_has_a_node_open(scene: Scene) -> None:
    _, monitor = scene.service("--open", "0", user="alice")
    said = scene.node.run(["systemd-run", "--pipe", "--quiet", "--wait", GPUPRESTART, "status"])
    assert re.search(rf"^ *{monitor} ", said.stdout, re.MULTILINE)


@pytest.mark.parametrize("name", ["t-qwen2.5", "t-llama.instruct"])
def test_a_name_with_a_dot_is_a_services_too(scene: Scene, name: str) -> None:
    unit = scene.server(f"{name}.service", gpus="1")
    scene.policy("[memory]\nmax_used = '65 MiB'\n", name=f"{unit}.toml", base="")
    run = scene.check("--unit", name)
    assert run.verdict["unit"] == unit
    assert [(gpu["index"], gpu["limit_bytes"]) for gpu in run.verdict["gpus"]] == [(1, 65 * MIB)]


def test_a_rule_for_a_unit_with_a_dot(scene: Scene) -> None:
    scene.policy("[[rule]]\nmatch = { unit = 't-qwen2.5' }\naction = 'spare'\n")
    scene.service("--open", "0", "--gpu", "0", "--mib", "900", unit="t-qwen2.5.service")
    assert scene.check("--gpus", "0").outcome == "clean"


@pytest.mark.parametrize("option, status", [("--unit", 78), ("--policy", 78), ("--gpus", 78), ("--deadline", 64)])
def test_an_option_without_a_word_is_not_left_out(scene: Scene, option: str, status: int) -> None:
    """As a script makes it whose variable is not set: it would judge other GPUs, or by another policy."""
    _, (orphan,) = scene.orphans("--open", "3", "--gpu", "3", "--mib", "900")
    run = scene.clean(option, "")
    assert run.exit == status
    assert run.verdict.get("outcome") == (None if status == 64 else "config")
    assert scene.alive(orphan)


# Outcomes ------------------------------------------------------------------------------------------------------------


def test_interrupted_by_sigint(scene: Scene) -> None:
    scene.gpu.ask("leak", gpu=0, mib=900)
    server = scene.server(gpus="0")
    scene.node.systemctl("start", "--no-block", server)
    scene.node.wait_for(
        lambda: scene.node.show(server, "StatusText")["StatusText"].startswith("Waiting"), timeout=10, what="it waits"
    )
    pid = scene.node.show(server, "ControlPID")["ControlPID"]
    scene.node.run(["kill", "-INT", pid])
    scene.await_state(server, "failed")
    run = scene.verdict(server)
    assert (run.outcome, run.exit) == ("interrupted", 75)
    assert run.verdict["message"].startswith("SIGINT ")


@pytest.mark.parametrize("verb", ["clean", "check"])
def test_all_that_applies_is_listed(scene: Scene, verb: str) -> None:
    """One GPU is held by somebody alive; another has memory that nobody was ever seen to hold; a third is stale's."""
    scene.service("--open", "0", "--gpu", "0", "--mib", "900")
    scene.orphans("--open", "2", "--gpu", "2", "--mib", "900")
    scene.gpu.ask("leak", gpu=1, mib=900)
    run = scene.clean("--gpus", "0,1,2", verb=verb)
    assert run.verdict["outcomes"] == ["protected", "unattributed"]
    assert "GPU 0" in run.verdict["message"] and "GPU 1" not in run.verdict["message"]


def test_check_lists_what_clean_could_not_free(scene: Scene) -> None:
    scene.orphans("--open", "0", "--gpu", "0", "--mib", "900")
    scene.gpu.ask("leak", gpu=1, mib=900)
    run = scene.check("--gpus", "0,1")
    assert run.verdict["outcomes"] == ["not-freed", "unattributed"]
    assert "GPU 1" not in run.verdict["message"]


# Deadlines -----------------------------------------------------------------------------------------------------------


def test_memory_may_be_told_to_stay_low_for_long(scene: Scene) -> None:
    """Longer than the time between two looks at everything."""
    scene.policy("[memory]\nsettle = '2500 ms'\n")
    scene.orphans("--open", "0", "--gpu", "0", "--mib", "900")
    run = scene.clean("--gpus", "0")
    assert run.outcome == "cleaned"
    assert run.verdict["phases"]["drain"] >= 2.5


@pytest.mark.parametrize("limit", ["policy", "systemd"])
def test_a_query_that_hangs_on_the_quick_way(scene: Scene, limit: str) -> None:
    """Nobody holds anything and one sample would do, but it does not come: the deadline holds here too."""
    scene.policy(f"[deadline]\nnvml = '20 s'\ntotal = '{'2 s' if limit == 'policy' else '60 s'}'\n")
    server = scene.server(gpus="0", more="TimeoutStartSec=4\nNotifyAccess=none\n" if limit == "systemd" else "")
    scene.gpu.ask("hang", function="nvmlDeviceGetMemoryInfo*", gpu=0)
    assert not scene.start(server)
    run = scene.verdict(server)
    assert (run.outcome, run.exit) == ("unknown", 69)
    assert run.verdict["duration_s"] < 4


# The quick way -------------------------------------------------------------------------------------------------------

AUDIT = """
import os, sys
out = open("/run/t-audit.log", "a", buffering=1)
def hook(event, arguments):
    if event in ("open", "os.listdir", "os.scandir", "import", "subprocess.Popen", "os.posix_spawn", "os.exec"):
        print(os.getpid(), event, arguments[0], file=out)
sys.path.insert(0, "/usr/lib/gpuprestart")
sys.addaudithook(hook)
from gpuprestart import cli
cli.run()
"""


def test_the_quick_way_looks_at_next_to_nothing(scene: Scene) -> None:
    scene.service("--open", "all", user="alice")
    scene.node.write("/run/t-audit.py", AUDIT)
    scene.node.run(["rm", "-f", "/run/t-audit.log"])
    server = scene.server(gpus="0,1", command="/usr/bin/python3 /run/t-audit.py clean --json")
    assert scene.start(server)
    run = scene.verdict(server)
    assert (run.outcome, list(run.verdict["phases"]), run.verdict["holders"]) == ("clean", ["measure"], [])
    events = [line.split(" ", 2) for line in scene.node.read("/run/t-audit.log").splitlines()]
    ours = {pid for pid, _, _ in events}
    assert {event for _, event, _ in events}.isdisjoint({"subprocess.Popen", "os.posix_spawn", "os.exec"})
    assert "psutil" not in {what for _, event, what in events if event == "import"}
    looked = {what for _, event, what in events if event != "import" and what.startswith("/proc")}
    allowed = rf"/proc/(?:self|sys/kernel|{'|'.join(ours)}|1)/.*"
    assert looked and [what for what in looked if not re.fullmatch(allowed, what)] == []


# The journal, and what lies in /run ----------------------------------------------------------------------------------


def test_a_clean_start_beside_spared_holders_writes_little(scene: Scene) -> None:
    scene.policy("[[rule]]\nmatch = { user = 'alice' }\naction = 'spare'\n")
    for _ in range(3):
        scene.service("--open", "0", "--gpu", "0", "--mib", "100", user="alice")
    server = scene.server(gpus="0")
    assert scene.start(server)
    run = scene.verdict(server)
    assert [each["action"] for each in run.verdict["holders"]] == ["spare"] * 3
    assert len(scene.records(run)) <= 2


@pytest.mark.parametrize("mask", ["0000", "0077"])
def test_claims_are_roots_to_write_and_everybodys_to_read(scene: Scene, mask: str) -> None:
    assert scene.start(scene.server(gpus="0", more=f"UMask={mask}\n"))
    script = "cd /run/gpuprestart; stat -c %a . claims claims/*"
    assert scene.node.run(["sh", "-c", script]).stdout.split() == ["755", "755", "644"]
    other = scene.node.run([GPUPRESTART, "check", "--json", "--gpus", "1"], check=False, user="alice")
    assert json.loads(other.stdout)["outcome"] == "clean"


def test_a_name_in_another_script_than_the_terminals(scene: Scene) -> None:
    """What a process calls itself never changes an exit status."""
    scene.service("--open", "0", "--gpu", "0", "--mib", "900", "--comm", "модель")
    module = "env PYTHONPATH=/usr/lib/gpuprestart PYTHONIOENCODING=ascii python3 -m gpuprestart"
    for verb, status in (("check", 75), ("status", 0)):
        said = scene.node.run(shlex.split(f"{module} {verb}"), check=False)
        assert (said.returncode, said.stderr) == (status, "")
        assert "\\u043c" in said.stdout
