"""What a unit and its policy set to a run: times, statuses, rights, settings, figures (cases D, and limits)."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.node.machine import wait_for
from tests.node.scene import HOLDER, Run, Scene, verdicts

CLEAN = "/usr/bin/gpuprestart clean --json"
MIB = 1 << 20


# TimeoutStartSec= ----------------------------------------------------------------------------------------------------


@pytest.mark.case("D2")
def test_a_short_timeout_is_extended_where_systemd_listens(scene: Scene) -> None:
    leak = scene.gpu.ask("leak", gpu=0, mib=900)["id"]
    server = scene.server(gpus="0", command=f"{CLEAN} --deadline 8s", more="TimeoutStartSec=2\nNotifyAccess=exec\n")
    began = time.monotonic()
    scene.node.systemctl("start", "--no-block", server)
    wait_for(lambda: time.monotonic() > began + 3, timeout=5, what="systemd would have ended it")
    assert scene.node.show(server, "SubState")["SubState"] == "start-pre"
    scene.gpu.ask("free", id=leak)
    scene.await_state(server, "active")
    run = scene.verdict(server)
    assert (run.outcome, run.exit) == ("clean", 0)
    assert run.verdict["duration_s"] > 2


@pytest.mark.case("D2")
@pytest.mark.parametrize("access", ["none", "main"])
def test_a_short_timeout_cuts_the_run_short_where_systemd_does_not_listen(scene: Scene, access: str) -> None:
    scene.gpu.ask("leak", gpu=0, mib=900)
    server = scene.server(
        gpus="0", command=f"{CLEAN} --deadline 8s", more=f"TimeoutStartSec=3\nNotifyAccess={access}\n"
    )
    run = _refused(scene, server)
    assert (run.outcome, run.exit) == ("unattributed", 75)
    assert 1.5 < run.verdict["duration_s"] < 3
    assert any("TimeoutStartSec=" in hint and "NotifyAccess=exec" in hint for hint in run.verdict["hints"])
    # systemd had no reason to end anything: the verdict was there, and the run over, before.
    assert len(scene.records(run, "verdict")) == 1
    said = [str(each["MESSAGE"]) for each in scene.node.journal(unit=server)]
    assert not any("timed out" in line or "Terminating" in line for line in said), said


@pytest.mark.case("D2")
def test_the_timeout_is_that_of_the_unit_around_us(scene: Scene) -> None:
    """Also where another unit's GPUs are judged, or one's own by name."""
    scene.gpu.ask("leak", gpu=0, mib=900)
    server = scene.server(
        gpus="0", command=f"{CLEAN} --unit %n --deadline 8s", more="TimeoutStartSec=3\nNotifyAccess=none\n"
    )
    assert not scene.start(server)
    entries = scene.node.journal(unit=server)
    (verdict,) = verdicts(entries)
    assert verdict["outcome"] == "unattributed" and verdict["duration_s"] < 3
    said = [str(each["MESSAGE"]) for each in entries]
    assert not any("timed out" in line for line in said), said


@pytest.mark.case("D2")
def test_after_a_stop_the_other_timeout_holds(scene: Scene) -> None:
    scene.gpu.ask("leak", gpu=0, mib=900)
    server = scene.server(
        gpus="0",
        command="/bin/true",
        server="/bin/true",
        more=f"ExecStopPost=+{CLEAN} --deadline 8s\nTimeoutStopSec=3\nNotifyAccess=none\nType=oneshot\n",
    )
    scene.start(server)
    scene.await_state(server, "failed")
    (verdict,) = verdicts(scene.node.journal(unit=server))
    assert verdict["outcome"] == "unattributed" and verdict["duration_s"] < 3
    assert any("TimeoutStopSec=" in hint for hint in verdict["hints"])


@pytest.mark.case("D2")
@pytest.mark.parametrize("access", ["none", "exec"])
def test_no_timeout_at_all(scene: Scene, access: str) -> None:
    scene.gpu.ask("leak", gpu=0, mib=900)
    server = scene.server(
        gpus="0", command=f"{CLEAN} --deadline 1500ms", more=f"TimeoutStartSec=infinity\nNotifyAccess={access}\n"
    )
    run = _refused(scene, server)
    assert (run.outcome, run.exit) == ("unattributed", 75)
    assert 1.5 <= run.verdict["duration_s"] < 3
    assert "TimeoutStartSec=" not in " ".join(run.verdict["hints"])


@pytest.mark.case("D2")
def test_a_grace_is_cut_short_too(scene: Scene) -> None:
    """The holder would be given ten seconds; it gets what there is, and the run still has its say."""
    _, (orphan,) = scene.orphans("--open", "0", "--gpu", "0", "--mib", "900", "--ignore-term")
    server = scene.server(gpus="0", command=CLEAN, more="TimeoutStartSec=3\nNotifyAccess=none\n")
    run = _refused(scene, server)
    assert run.exit == 75 and run.verdict["duration_s"] < 3
    assert scene.signals(run)[0] == (orphan, "SIGTERM")
    assert any("TimeoutStartSec=" in hint for hint in run.verdict["hints"])


@pytest.mark.case("D2")
def test_a_driver_that_takes_longer_than_the_timeout(scene: Scene) -> None:
    """The first answer is part of the run too, so its verdict comes before systemd's SIGTERM."""
    scene.gpu.ask("hang", function="nvmlInit*")
    server = scene.server(gpus="0", command=CLEAN, more="TimeoutStartSec=3\nNotifyAccess=none\n")
    run = _refused(scene, server)
    assert (run.outcome, run.exit) == ("unknown", 69)
    assert run.verdict["duration_s"] < 3
    assert "did not answer" in run.verdict["message"]


# SuccessExitStatus= --------------------------------------------------------------------------------------------------


@pytest.mark.case("D11")
@pytest.mark.parametrize(
    "listed, status",
    [("75", 78), ("TEMPFAIL", 78), ("75 78", 70), ("1 75 78 SIGTERM", 70), ("75 78 70", None), ("0 66 77", 75)],
)
def test_a_unit_that_takes_the_refusal_for_a_success(scene: Scene, listed: str, status: int | None) -> None:
    scene.gpu.ask("leak", gpu=0, mib=900)
    server = scene.server(gpus="0", command=f"{CLEAN} --deadline 500ms", more=f"SuccessExitStatus={listed}\n")
    assert not scene.start(server)
    shown = scene.node.show(server, "ActiveState", "Result", "ExecMainStartTimestampMonotonic", "ExecStartPre")
    assert (shown["ActiveState"], shown["ExecMainStartTimestampMonotonic"]) == ("failed", "0")
    run = scene.verdict(server)
    if status is None:
        # Where cores are piped to a program, systemd may call it a dump.
        assert shown["Result"] in ("signal", "core-dump")
        assert "status=6" in shown["ExecStartPre"]
    else:
        assert shown["Result"] == "exit-code"
        assert f"status={status} " in shown["ExecStartPre"].replace("/", " ").replace(";", " ")
        assert run.exit == status
    if status == 75:
        assert run.verdict["outcomes"] == ["unattributed"]
        return
    assert run.verdict["outcomes"] == ["config", "unattributed"]
    assert "SuccessExitStatus=" in run.verdict["message"] and "GPU 0" in run.verdict["message"]
    assert "SuccessExitStatus=" in run.verdict["hints"][0]
    (record,) = scene.records(run, "verdict")
    assert record["GPUPRESTART_OUTCOME"] == "config"


@pytest.mark.case("D11")
@pytest.mark.parametrize(
    "listed, outcomes, status", [("69", ["config", "unknown"], 78), ("69 78", ["config", "unknown"], 75)]
)
def test_the_same_for_any_other_refusal(scene: Scene, listed: str, outcomes: list[str], status: int) -> None:
    scene.gpu.ask("set_gpu", gpu=0, lost="calls")
    server = scene.server(gpus="0", more=f"SuccessExitStatus={listed}\n")
    run = _refused(scene, server)
    assert (run.verdict["outcomes"], run.exit) == (outcomes, status)


@pytest.mark.case("D11")
@pytest.mark.parametrize("told", [False, True])
def test_a_unit_that_takes_sigterm_for_a_success(scene: Scene, told: bool) -> None:
    """Told to end, the hook ends with a status; a death by that signal would start the server."""
    scene.gpu.ask("leak", gpu=0, mib=900)
    deadline = "20s" if told else "500ms"
    server = scene.server(gpus="0", command=f"{CLEAN} --deadline {deadline}", more="SuccessExitStatus=SIGTERM\n")
    scene.node.systemctl("start", "--no-block", server)
    if told:
        _waits(scene, server)
        scene.node.systemctl("kill", "--kill-who=control", "--signal=TERM", server)
    scene.await_state(server, "failed")
    run = _refused(scene, server, start=False)
    assert ("interrupted" if told else "unattributed") in run.verdict["outcomes"]
    assert run.verdict["outcomes"][0] == "config"
    assert "SIGTERM" in run.verdict["hints"][0] and "SuccessExitStatus=" in run.verdict["hints"][0]


@pytest.mark.case("D11")
def test_statuses_do_not_matter_to_a_start_that_may_go_on(scene: Scene) -> None:
    _, (orphan,) = scene.orphans("--open", "0", "--gpu", "0", "--mib", "900")
    server = scene.server(gpus="0", more="SuccessExitStatus=75 78 70 SIGTERM\n")
    assert scene.start(server)
    run = scene.verdict(server)
    assert run.verdict["outcomes"] == ["cleaned"] and orphan in run.fates


# Not root ------------------------------------------------------------------------------------------------------------


@pytest.mark.case("D1")
@pytest.mark.parametrize("holder", ["stale", "live", "unlisted", "nobody"])
@pytest.mark.parametrize("before", ["nothing", "root"])
def test_a_hook_without_the_plus(scene: Scene, holder: str, before: str) -> None:
    """It runs as the unit's user: it may not see whose nodes are open, signal, or keep a claim; so it never passes."""
    scene.node.run(["rm", "-rf", "/run/gpuprestart"])
    if before == "root":
        # Locks and claims that root's runs left are there to be read, not to be written.
        first = scene.server(gpus="0")
        assert scene.start(first)
        scene.node.systemctl("stop", first)
    options = ["--open", "0", "--gpu", "0", "--mib", "900"]
    pids = []
    if holder == "live":
        pids = [scene.service(*options, user="root")[1]]
    elif holder != "nobody":
        pids = scene.orphans(*options, *(["--unlisted"] if holder == "unlisted" else []), user=None)[1]
    server = scene.server(gpus="0", command=f"{CLEAN} --deadline 2s", plus=False)
    run = _refused(scene, server)
    assert (run.outcome, run.exit) in (("denied", 77), ("unknown", 69))
    assert "ExecStartPre=+" in " ".join(run.verdict["hints"])
    assert scene.alive(pids)
    assert run.fates == {}


@pytest.mark.case("D1")
@pytest.mark.parametrize("unlisted", [True, False])
def test_check_that_is_not_root(scene: Scene, unlisted: bool) -> None:
    """What NVML names can be judged; what nobody is seen to hold may be anybody's that may not be looked into."""
    _, holder = scene.service("--open", "0", "--gpu", "0", "--mib", "900", *(["--unlisted"] if unlisted else []))
    done = scene.node.run(["/usr/bin/gpuprestart", "check", "--json", "--gpus", "0"], user="alice", check=False)
    verdict = json.loads(done.stdout)
    assert verdict["exit"] == done.returncode != 0
    if unlisted:
        assert verdict["outcomes"][0] == "denied"
        assert "ExecStartPre=+" in " ".join(verdict["hints"])
    else:
        assert verdict["outcomes"][0] in ("denied", "protected")
    assert scene.alive(holder)


# The unit's own environment, asked from a shell (D13) ----------------------------------------------------------------

ENV = "/run/t-env"


@pytest.mark.case("D13")
@pytest.mark.parametrize(
    "unit_lines, files, indices",
    [
        ("EnvironmentFile={env}/a", {"a": "CUDA_VISIBLE_DEVICES=2,3\n"}, [2, 3]),
        ("EnvironmentFile={env}/a", {"a": 'CUDA_VISIBLE_DEVICES="2,3"\n'}, [2, 3]),
        ("EnvironmentFile={env}/a", {"a": "CUDA_VISIBLE_DEVICES='2,3'\n"}, [2, 3]),
        ("EnvironmentFile={env}/a", {"a": "  CUDA_VISIBLE_DEVICES = 2,3  \n"}, [2, 3]),
        ("EnvironmentFile={env}/a", {"a": "CUDA_VISIBLE_DEVICES=2, 3\n"}, [2, 3]),
        ("EnvironmentFile={env}/a", {"a": 'CUDA_VISIBLE_DEVICES="2,"3\n'}, [2, 3]),
        ("EnvironmentFile={env}/a", {"a": "CUDA_VISIBLE_DEVICES=2,\\\n3\n"}, [2, 3]),
        ("EnvironmentFile={env}/a", {"a": "# CUDA_VISIBLE_DEVICES=5\n;CUDA_VISIBLE_DEVICES=6\nX=1\n"}, None),
        ("EnvironmentFile={env}/a", {"a": "export CUDA_VISIBLE_DEVICES=5\n"}, None),
        ("EnvironmentFile={env}/a", {"a": "CUDA_VISIBLE_DEVICES=1\nX='\nCUDA_VISIBLE_DEVICES=5\n'\n"}, [1]),
        ("EnvironmentFile={env}/a", {"a": "CUDA_VISIBLE_DEVICES=1\nX=y \\\nCUDA_VISIBLE_DEVICES=5\n"}, [1]),
        ("EnvironmentFile={env}/a", {"a": "CUDA_VISIBLE_DEVICES=5\nCUDA_VISIBLE_DEVICES=1"}, [1]),
        ("EnvironmentFile={env}/a\nEnvironmentFile={env}/b", {"a": "CUDA_VISIBLE_DEVICES=1\n", "b": "X=1\n"}, [1]),
        (
            "EnvironmentFile={env}/a\nEnvironmentFile={env}/b",
            {"a": "CUDA_VISIBLE_DEVICES=1\n", "b": "CUDA_VISIBLE_DEVICES=4\n"},
            [4],
        ),
        (
            "EnvironmentFile={env}/b\nEnvironmentFile={env}/a",
            {"a": "CUDA_VISIBLE_DEVICES=1\n", "b": "CUDA_VISIBLE_DEVICES=4\n"},
            [1],
        ),
        ("EnvironmentFile={env}/*.x", {"1.x": "CUDA_VISIBLE_DEVICES=1\n", "2.x": "CUDA_VISIBLE_DEVICES=4\n"}, [4]),
        ("EnvironmentFile={env}/a\nEnvironment=CUDA_VISIBLE_DEVICES=6", {"a": "CUDA_VISIBLE_DEVICES=1\n"}, [1]),
        ('Environment="CUDA_VISIBLE_DEVICES=6, 7"', {}, [6, 7]),
        ("EnvironmentFile=-{env}/missing\nEnvironment=CUDA_VISIBLE_DEVICES=6", {}, [6]),
        ("EnvironmentFile=-{env}/none-*\nEnvironment=CUDA_VISIBLE_DEVICES=6", {}, [6]),
        ("EnvironmentFile={env}/a", {"a": "NVIDIA_VISIBLE_DEVICES=5\n"}, [5]),
        ("EnvironmentFile={env}/a", {"a": "NVIDIA_VISIBLE_DEVICES=5\nCUDA_VISIBLE_DEVICES=1\n"}, [1]),
        ("EnvironmentFile={env}/a", {"a": "NVIDIA_VISIBLE_DEVICES=all\n"}, None),
        ("EnvironmentFile={env}/a", {"a": "CUDA_VISIBLE_DEVICES=\n"}, []),
        ("EnvironmentFile={env}/a", {"a": "NVIDIA_VISIBLE_DEVICES=void\n"}, []),
    ],
)
def test_check_of_a_unit_looks_at_the_gpus_that_its_start_does(
    scene: Scene, unit_lines: str, files: Mapping[str, str], indices: list[int] | None
) -> None:
    """``indices`` is None for all GPUs, and empty for a unit that uses none. The caller's environment says 0."""
    expected = list(range(8)) if indices is None else indices
    unit = _with_files(scene, unit_lines, files)
    checked = _check_from_a_shell(scene, unit)
    assert scene.start(unit)
    cleaned = scene.verdict(unit)
    assert [gpu["index"] for gpu in cleaned.verdict["gpus"]] == expected
    assert cleaned.outcome == ("clean" if expected else "none")
    assert [gpu["index"] for gpu in checked.verdict["gpus"]] == expected, checked.verdict["message"]
    assert (checked.outcome, checked.exit) == (cleaned.outcome, 0)
    assert checked.verdict["unit"] == unit


@pytest.mark.case("D13")
@pytest.mark.parametrize("path", ["missing", "none-*", "back\\slash"])
def test_check_of_a_unit_whose_file_of_settings_is_missing(scene: Scene, path: str) -> None:
    """Such a unit does not even get to its hook. systemd takes every path for a pattern, in which \\s is an s."""
    unit = _with_files(scene, f"EnvironmentFile={{env}}/{path}", {"back\\slash": "CUDA_VISIBLE_DEVICES=1\n"})
    checked = _check_from_a_shell(scene, unit)
    assert not scene.start(unit)
    assert (checked.outcome, checked.exit) == ("config", 78)
    assert "EnvironmentFile=" in checked.verdict["message"]


@pytest.mark.case("D13")
def test_check_of_an_instance(scene: Scene) -> None:
    """Specifiers, a template's overlay and the instance's over it, and the name without its suffix."""
    unit = scene.name("many").replace(".service", "@a\\x2db.service")
    template = unit.partition("@")[0] + "@"
    scene.node.write(f"{ENV}/a-b", "CUDA_VISIBLE_DEVICES=4\n")
    scene.server(unit, more=f"Environment=\nEnvironmentFile={ENV}/%I\n")
    scene.node.run(["mv", f"/etc/systemd/system/{unit}", f"/etc/systemd/system/{template}.service"])
    scene.node.systemctl("daemon-reload")
    scene.policy("[memory]\nmax_used = '1 GiB'\n", name=f"{template}.service.toml", base="")
    scene.policy("[memory]\nsettle = '1 s'\n", name=f"{unit}.toml", base="")
    scene.gpu.ask("leak", gpu=4, mib=900)
    checked = _check_from_a_shell(scene, unit.removesuffix(".service"))
    assert scene.start(unit)
    for run in (checked, scene.verdict(unit)):
        assert (run.outcome, run.exit, run.verdict["unit"]) == ("clean", 0, unit)
        assert [gpu["index"] for gpu in run.verdict["gpus"]] == [4]
        assert [path.rpartition("/")[2] for path in run.verdict["policy_files"]] == [
            "policy.toml",
            f"{template}.service.toml",
            f"{unit}.toml",
        ]


def test_check_of_a_unit_that_there_is_not(scene: Scene) -> None:
    run = scene.check("--unit", "t-nowhere")
    assert (run.outcome, run.exit) == ("config", 78)
    assert "t-nowhere.service" in run.verdict["message"]


def _with_files(scene: Scene, lines: str, files: Mapping[str, str]) -> str:
    scene.node.run(["rm", "-rf", ENV])
    scene.node.run(["mkdir", ENV])
    for name, text in files.items():
        scene.node.write(f"{ENV}/{name}", text)
    return scene.server(more="Environment=\n" + lines.format(env=ENV) + "\n")


def _check_from_a_shell(scene: Scene, unit: str) -> Run:
    done = scene.node.run(
        ["/usr/bin/gpuprestart", "check", "--json", "--unit", unit],
        check=False,
        env={"CUDA_VISIBLE_DEVICES": "0", "NVIDIA_VISIBLE_DEVICES": "0"},
    )
    return Run(exit=done.returncode, verdict=json.loads(done.stdout), stdout=done.stdout, stderr=done.stderr)


# Names and cgroups of units (D8) -------------------------------------------------------------------------------------


@pytest.mark.case("D8")
@pytest.mark.parametrize("delegate", ["no", "yes"])
@pytest.mark.parametrize("name", ["{}.service", "{}@a\\x2db.service", "{}@x:y_z.service"])
def test_our_own_unit_by_every_form_of_its_cgroup(scene: Scene, name: str, delegate: str) -> None:
    """With Delegate= the hook is in .control; systemd writes a dash of a slice's name as \\x2d."""
    unit = name.format(scene.name("own").removesuffix(".service"))
    worker = f"{HOLDER} --open 0 --gpu 0 --mib 900 --fork 1"
    scene.policy("[memory]\nmax_used = '70 MiB'\n", name=f"{unit}.toml", base="")
    scene.server(
        unit,
        gpus="0",
        server=worker,
        command=f"{CLEAN} --deadline 5s",
        more=f"Type=notify\nNotifyAccess=all\nKillMode=process\nDelegate={delegate}\n",
    )
    assert scene.start(unit)
    first = scene.verdict(unit)
    assert first.outcome == "clean"
    (left,) = scene.abandon(unit)
    assert scene.start(unit)
    run = scene.verdict(unit)
    assert run.outcome == "cleaned"
    assert run.holder(left)["owner"] == f"unit:{unit}"
    assert scene.signals(run) == [(left, "SIGTERM")]
    for each in (first, run):
        assert each.verdict["unit"] == unit
        assert [gpu["limit_bytes"] for gpu in each.verdict["gpus"]] == [70 * MIB]


@pytest.mark.case("D8")
@pytest.mark.parametrize("active", [False, True])
def test_a_cgroup_below_a_units_that_bears_another_units_name(scene: Scene, active: bool) -> None:
    """Whoever has a cgroup of its own may call what is below it as it likes: the outermost unit is the owner."""
    other, bystander = scene.service("--open", "1")
    unit = scene.name("deep").replace(".service", "@a\\x2db.service")
    hold = f"{HOLDER} --open 0 --gpu 0 --mib 900 --fork 1"
    script = f"mkdir $0/{other}; echo $$ > $0/{other}/cgroup.procs; exec {hold}"
    shell = f"/bin/sh -c {shlex.quote(script.replace('$', '$$'))} /sys/fs/cgroup/system.slice/%n"
    more = "Type=notify\nNotifyAccess=all\nUser=root\nKillMode=process\nDelegate=yes\nSlice=system.slice\n"
    scene.server(unit, server=shell, more=f"{more}ExecStartPre=\n")
    assert scene.start(unit)
    holders = set(scene.node.unit_pids(unit))
    if not active:
        holders = scene.abandon(unit)
    assert all(f"{unit}/{other}" in scene.node.read(f"/proc/{pid}/cgroup") for pid in holders)
    run = scene.clean("--gpus", "0")
    assert run.outcome == ("protected" if active else "cleaned")
    assert {run.holder(pid)["owner"] for pid in holders} == {f"unit:{unit}"}
    assert [scene.alive(pid) for pid in holders] == [active] * len(holders)
    assert scene.alive(bystander)


@pytest.mark.case("D8")
def test_an_ended_instance_is_the_owner_of_what_it_left(scene: Scene) -> None:
    victim = scene.name("old").replace(".service", "@a\\x2db.service")
    unit, (orphan,) = scene.orphans("--open", "0", "--gpu", "0", "--mib", "900", unit=victim)
    run = scene.clean("--gpus", "0")
    assert run.outcome == "cleaned"
    assert run.holder(orphan)["owner"] == f"unit:{unit}"


# Figures of the policy -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "needed, enough",
    [("76 GiB", True), ("77 GiB", False), ("96 %", True), ("97 %", False), ("0", True), ("100%", False)],
)
def test_what_the_server_needs_free(scene: Scene, needed: str, enough: bool) -> None:
    """Of 81559 MiB the driver reserves 904, and 2000 are used."""
    scene.reset(baseline_mib=2000)
    scene.policy(f'[memory]\nmax_used = "4 GiB"\nmin_free = "{needed}"\n[deadline]\ntotal = "500 ms"\n')
    checked = scene.check("--gpus", "0,1")
    server = scene.server(gpus="0,1")
    assert scene.start(server) is enough
    run = scene.verdict(server)
    assert checked.outcome == run.outcome
    assert (run.outcome, run.exit) == (("clean", 0) if enough else ("not-freed", 75))
    if not enough:
        assert re.search(r"GPU 0.* 78655 MiB free, \d+ MiB needed", run.verdict["message"])
        assert [gpu["clean"] for gpu in run.verdict["gpus"]] == [False, False]


def test_memory_that_is_needed_free_comes_back(scene: Scene) -> None:
    """Below the limit, and yet too much: it is waited for."""
    scene.policy('[memory]\nmax_used = "4 GiB"\nmin_free = "78 GiB"\n')
    leak = scene.gpu.ask("leak", gpu=0, mib=2000)["id"]
    server = scene.server(gpus="0")
    scene.node.systemctl("start", "--no-block", server)
    _waits(scene, server)
    scene.gpu.ask("free", id=leak)
    scene.await_state(server, "active")
    assert scene.verdict(server).outcome == "clean"


@pytest.mark.parametrize("used, clean", [(1631, True), (1632, False)])
def test_a_limit_in_percent(scene: Scene, used: int, clean: bool) -> None:
    """Two in a hundred of 81559 MiB are 1631.18 MiB."""
    scene.policy('[memory]\nmax_used = "2 %"\n')
    scene.gpu.ask("set_gpu", gpu=0, baseline_mib=used)
    run = scene.check("--gpus", "0")
    assert (run.outcome, run.exit) == (("clean", 0) if clean else ("unattributed", 75))
    (gpu,) = run.verdict["gpus"]
    assert (gpu["limit_bytes"], gpu["clean"]) == (81559 * MIB * 2 // 100, clean)


def test_memory_has_to_stay_low_once_anything_was_dirty(scene: Scene) -> None:
    scene.policy('[memory]\nsettle = "1200 ms"\n')
    assert scene.start(idle := scene.server(gpus="1"))
    # On clean GPUs nothing has to settle.
    assert scene.verdict(idle).verdict["duration_s"] < 1.2
    _, (orphan,) = scene.orphans("--open", "0", "--gpu", "0", "--mib", "900")
    server = scene.server(gpus="0")
    assert scene.start(server)
    run = scene.verdict(server)
    assert run.outcome == "cleaned" and orphan in run.fates
    (freed,), (verdict,) = scene.records(run, "memory-freed"), scene.records(run, "verdict")
    between = int(verdict["__MONOTONIC_TIMESTAMP"]) - int(freed["__MONOTONIC_TIMESTAMP"])
    assert 1_200_000 <= between < 3_000_000
    assert run.verdict["phases"]["drain"] >= 1.2


def test_two_low_samples_at_least(scene: Scene) -> None:
    """Also where no time to settle is asked for; and then everything is looked at once more."""
    scene.policy('[memory]\nsettle = "0"\n')
    scene.orphans("--open", "0", "--gpu", "0", "--mib", "900")
    scene.gpu.ask("calls", start=True)
    try:
        run = scene.clean("--gpus", "0")
        calls = scene.gpu.ask("calls", list=True)["calls"]
    finally:
        scene.gpu.ask("calls", stop=True)
    assert run.outcome == "cleaned"
    released = scene.gpu.ask("releases")["releases"][-1]["released_boottime"] * 1e9
    samples = [call for call in calls if call[2:] == ["nvmlDeviceGetMemoryInfo_v2", "0"] and int(call[0]) > released]
    assert len(samples) >= 3


def test_the_deadline_comes_before_memory_has_settled(scene: Scene) -> None:
    scene.policy('[memory]\nsettle = "10 s"\n')
    _, (orphan,) = scene.orphans("--open", "0", "--gpu", "0", "--mib", "900")
    server = scene.server(gpus="0", command=f"{CLEAN} --deadline 1500ms")
    run = _refused(scene, server)
    assert (run.outcome, run.exit) == ("not-freed", 75)
    assert run.fates == {orphan: "terminated"}
    assert "deadline.total" in run.verdict["hints"][0]


# check ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "situation, outcome, status",
    [
        ("idle", "clean", 0),
        ("stale", "not-freed", 75),
        ("live", "protected", 75),
        ("leak", "unattributed", 75),
        ("lost", "unknown", 69),
        ("policy", "config", 78),
        ("none", "none", 0),
    ],
)
@pytest.mark.parametrize("journal", [True, False])
def test_how_check_exits_and_what_it_leaves(
    scene: Scene, situation: str, outcome: str, status: int, journal: bool
) -> None:
    pids = _set(scene, situation)
    unit = scene.server(gpus="" if situation == "none" else "0")
    run = scene.check("--unit", unit, *(["--journal"] if journal else []))
    assert (run.outcome, run.exit) == (outcome, status)
    assert scene.alive(pids)
    records = scene.records(run)
    assert [each["GPUPRESTART_EVENT"] for each in records] == (["verdict"] if journal else [])
    if journal:
        assert (records[0]["GPUPRESTART_OUTCOME"], records[0]["GPUPRESTART_EXIT"]) == (outcome, str(status))
        assert records[0]["GPUPRESTART_UNIT"] == unit
    assert run.verdict["phases"].get("drain", 0) == 0


@pytest.mark.parametrize("situation", ["idle", "stale", "live", "policy"])
def test_an_audit_in_a_unit_does_not_stand_in_the_way(scene: Scene, situation: str) -> None:
    pids = _set(scene, situation)
    scene.node.run(["rm", "-rf", "/run/gpuprestart"])
    server = scene.server(gpus="0", more="ExecStartPre=\nExecStartPre=-+/usr/bin/gpuprestart check --journal\n")
    assert scene.start(server)
    assert scene.alive(pids)
    natives = [each for each in scene.node.journal(unit=server) if "GPUPRESTART_EVENT" in each]
    assert [each["GPUPRESTART_EVENT"] for each in natives] == ["verdict"]
    assert natives[0]["GPUPRESTART_UNIT"] == server
    assert scene.node.show(server, "StatusText")["StatusText"] == ""
    assert not scene.node.exists("/run/gpuprestart")


def test_an_audit_that_may_refuse(scene: Scene) -> None:
    _, holder = scene.service("--open", "0", "--gpu", "0", "--mib", "900")
    server = scene.server(gpus="0", command="/usr/bin/gpuprestart check --json --journal")
    run = _refused(scene, server)
    assert (run.outcome, run.exit) == ("protected", 75)
    assert scene.alive(holder)


# Records -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", ["0", "0,1,2,3,4,5,6,7", ""])
def test_a_clean_start_writes_little(scene: Scene, gpus: str) -> None:
    server = scene.server(gpus=gpus, command="/usr/bin/gpuprestart clean")
    assert scene.start(server)
    entries = [each for each in scene.node.journal(unit=server) if each.get("_COMM") == "gpuprestart"]
    natives = [each for each in entries if each["_TRANSPORT"] == "journal"]
    lines = [each for each in entries if each["_TRANSPORT"] == "stdout"]
    assert 1 <= len(natives) <= 2
    assert natives[-1]["GPUPRESTART_EVENT"] == "verdict"
    assert [each["MESSAGE"] for each in lines] == [natives[-1]["MESSAGE"]]
    # A clean start is nothing to be woken for.
    assert {each["PRIORITY"] for each in entries} == {"6"}


def test_a_units_own_log_tells_who_ended_its_process(scene: Scene) -> None:
    victim, (orphan,) = scene.orphans("--open", "0", "--gpu", "0", "--mib", "900", "--ignore-term")
    scene.policy("[deadline]\nterm = '300 ms'\n")
    server = scene.server(gpus="0")
    assert scene.start(server)
    run = scene.verdict(server)
    told = [each for each in scene.node.journal(unit=victim) if each.get("GPUPRESTART_RUN") == run.verdict["run"]]
    assert [each["GPUPRESTART_EVENT"] for each in told] == [
        "holder-found",
        "holder-signalled",
        "holder-signalled",
        "holder-gone",
    ]
    assert [each.get("GPUPRESTART_SIGNAL") for each in told] == [None, "SIGTERM", "SIGKILL", None]
    for each in told:
        assert (each["HOLDER_PID"], each["GPUPRESTART_UNIT"]) == (str(orphan), server)
        assert each["OBJECT_SYSTEMD_UNIT"] == victim
        # With OBJECT_PID= journald would have stored the whole command line.
        assert "OBJECT_CMDLINE" not in each
    shown = scene.node.run(["journalctl", "--no-pager", "--unit", victim]).stdout
    assert re.search(rf"sent SIGKILL to .*\[{orphan}\]", shown)


# Their parts ---------------------------------------------------------------------------------------------------------


def _set(scene: Scene, situation: str) -> Sequence[int]:
    """Make it so, and say which processes must not be touched."""
    hold = ("--open", "0", "--gpu", "0", "--mib", "900")
    if situation == "stale":
        return scene.orphans(*hold)[1]
    if situation == "live":
        return [scene.service(*hold)[1]]
    if situation == "leak":
        scene.gpu.ask("leak", gpu=0, mib=900)
    elif situation == "lost":
        scene.gpu.ask("set_gpu", gpu=0, lost="calls")
    elif situation == "policy":
        scene.policy("[memory]\nmax_usd = '1 GiB'\n")
    return []


def _waits(scene: Scene, server: str) -> None:
    wait_for(
        lambda: scene.node.show(server, "StatusText")["StatusText"].startswith("Waiting"),
        timeout=10,
        what=f"the hook of {server} waits for memory",
    )


def _refused(scene: Scene, server: str, *, start: bool = True) -> Run:
    """The verdict on a start that has to be refused: systemd took its status for a failure, and ended nothing."""
    assert not (start and scene.start(server))
    run = scene.verdict(server)
    shown: Mapping[str, Any] = scene.node.show(
        server, "ActiveState", "Result", "ExecStartPre", "ExecMainStartTimestampMonotonic"
    )
    assert (shown["ActiveState"], shown["Result"]) == ("failed", "exit-code")
    assert f"status={run.exit}" in shown["ExecStartPre"]
    assert shown["ExecMainStartTimestampMonotonic"] == "0"
    return run
