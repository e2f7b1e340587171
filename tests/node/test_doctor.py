"""``doctor`` on a node: what would make the hook fail or be ignored, by the words of systemd, /proc and the driver."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.node.machine import wait_for
from tests.node.scene import Scene

DOCTOR = "/usr/bin/gpuprestart doctor"
FOLDER = "/etc/systemd/system"
CLEAN = "/usr/bin/gpuprestart clean"
HOOK = f"+{CLEAN}"

#: A unit in which all is right, by setting.
GOOD = {
    "User": "model",
    "Environment": "CUDA_VISIBLE_DEVICES=0,1",
    "ExecStartPre": HOOK,
    "NotifyAccess": "exec",
    "TimeoutStartSec": "300",
    "Restart": "on-failure",
    "RestartSec": "15s",
    "ExecStart": "/bin/sleep 1000",
}


@dataclass(frozen=True)
class Seen:
    """What doctor said in JSON."""

    exit: int
    said: Mapping[str, Any]
    stderr: str

    @property
    def findings(self) -> dict[str, str]:
        """What is not in order, with its level."""
        return {each["check"]: each["level"] for each in self.said["checks"] if each["level"] != "ok"}

    def finding(self, check: str) -> Mapping[str, Any]:
        found: list[Mapping[str, Any]] = [each for each in self.said["checks"] if each["check"] == check]
        assert len(found) == 1, f"{check} is {len(found)} times among {self.said['checks']}"
        return found[0]


def _doctor(scene: Scene, *units: str, inside: str = "", user: str | None = None) -> Seen:
    """``inside`` is what a shell does in a mount namespace of its own before it."""
    script = f"{inside}\nexec {DOCTOR} {shlex.join(units)} --json"
    shell = ["unshare", "--mount", "/bin/sh", "-ec"] if inside else ["/bin/sh", "-ec"]
    done = scene.node.run([*shell, script], check=False, user=user)
    said = json.loads(done.stdout)
    assert (said["version"], said["exit"]) == (1, done.returncode), done.stderr
    return Seen(exit=done.returncode, said=said, stderr=done.stderr)


def _unit(scene: Scene, more: str = "", *, drop_in: str = "", **changes: str) -> str:
    """A good unit but for these settings; an empty one is left out."""
    unit = _write(scene, changes, more)
    if drop_in:
        scene.node.write(f"{FOLDER}/{unit}.d/60-later.conf", drop_in)
    scene.node.systemctl("daemon-reload")
    return unit


def _write(scene: Scene, changes: Mapping[str, str], more: str = "") -> str:
    unit = scene.name("doctor")
    lines = ["[Service]", *(f"{key}={value}" for key, value in {**GOOD, **changes}.items() if value)]
    scene.node.write(f"{FOLDER}/{unit}", "\n".join([*lines, more, ""]))
    return unit


def _place(scene: Scene, path: str, text: str) -> tuple[str, int]:
    """Where this line stands, as a person would look for it."""
    lines = scene.node.read(path).split("\n")
    assert lines.count(text) == 1, (text, lines)
    return path, lines.index(text) + 1


@pytest.fixture(autouse=True)
def nothing_is_kept(scene: Scene) -> Iterator[None]:
    """No claim and no bypass of an earlier test."""
    scene.node.run(["rm", "-rf", "/run/gpuprestart"])
    yield
    scene.node.run(["rm", "-rf", "/run/gpuprestart"])


# All is right --------------------------------------------------------------------------------------------------------


def test_a_machine_in_which_all_is_right(scene: Scene) -> None:
    seen = _doctor(scene)
    assert (seen.exit, seen.findings, seen.said["unit"]) == (0, {}, None)
    assert "libnvidia-ml.so.1, driver 550.54.15, 8 GPUs" in seen.finding("nvml")["fact"]
    assert "policy.toml" in seen.finding("policy")["fact"]


def test_a_unit_in_which_all_is_right(scene: Scene) -> None:
    unit = _unit(scene)
    seen = _doctor(scene, unit.removesuffix(".service"))
    assert (seen.exit, seen.findings, seen.said["unit"]) == (0, {}, unit)
    assert seen.finding("selection")["fact"] == "GPU 0-1: CUDA_VISIBLE_DEVICES=0,1 of the unit"
    assert scene.start(unit)
    # What it runs is its own, and so is its claim.
    assert _doctor(scene, unit).findings == {}


def test_for_people_what_is_wrong_comes_first(scene: Scene) -> None:
    unit = _unit(scene, ExecStartPre=f"-{HOOK}", NotifyAccess="none")
    done = scene.node.run([*DOCTOR.split(), unit], check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 75 and done.stderr == ""
    assert lines[0].startswith(f"FAULT   prefix            the hook's line begins with -: {FOLDER}/{unit}:4: ")
    assert lines[1].strip().startswith("systemd takes every refusal for success")
    assert lines[2].strip() == f"remedy: take the - away: ExecStartPre={HOOK}"
    assert lines[4].startswith("remark  notify-access")
    assert [line for line in lines[8:-2] if not line.startswith("ok  ")] == []
    assert lines[-2].startswith(f"{unit}: 1 fault (prefix), 1 remark (notify-access), ")


def test_a_line_is_quoted_without_its_secrets(scene: Scene) -> None:
    unit = _unit(scene, SuccessExitStatus="75", Environment="API_TOKEN=topsecret1 CUDA_VISIBLE_DEVICES=99")
    done = scene.node.run([*DOCTOR.split(), unit], check=False)
    assert "Environment=API_TOKEN=[redacted]" in done.stdout and "topsecret1" not in done.stdout
    assert "topsecret1" not in json.dumps(_doctor(scene, unit).said)


# The hook's own line -------------------------------------------------------------------------------------------------

Case = tuple[dict[str, str], dict[str, str], str]

#: What is changed, what is found, and the line that is quoted for the first of it.
LINE: list[Case] = [
    ({"ExecStartPre": f"-{HOOK}"}, {"prefix": "fault"}, f"ExecStartPre=-{HOOK}"),
    ({"ExecStartPre": CLEAN}, {"plus": "fault"}, f"ExecStartPre={CLEAN}"),
    ({"ExecStartPre": CLEAN, "User": "root"}, {}, ""),
    (
        {"ExecStartPre": f"!{CLEAN}", "CapabilityBoundingSet": "CAP_KILL CAP_DAC_OVERRIDE"},
        {"plus": "fault"},
        "CapabilityBoundingSet=CAP_KILL CAP_DAC_OVERRIDE",
    ),
    (
        {"ExecStartPre": CLEAN, "ProtectProc": "invisible"},
        {"sandbox": "fault", "plus": "fault"},
        "ProtectProc=invisible",
    ),
    ({"ProtectProc": "invisible", "ProcSubset": "pid", "PrivateUsers": "yes", "ProtectSystem": "strict"}, {}, ""),
    ({"ExecStartPre": f"!{CLEAN}", "ProcSubset": "pid", "RestrictAddressFamilies": "AF_UNIX"}, {}, ""),
    ({"ExecStartPre": f"!{CLEAN}", "PrivateUsers": "yes"}, {"sandbox": "fault"}, "PrivateUsers=yes"),
    ({"ExecStartPre": f"!{CLEAN}", "ProtectSystem": "strict"}, {"sandbox": "fault"}, "ProtectSystem=strict"),
    (
        {"ExecStartPre": f"!{CLEAN}", "RestrictAddressFamilies": "AF_INET"},
        {"sandbox": "fault"},
        "RestrictAddressFamilies=AF_INET",
    ),
    (
        {"ExecStartPre": f"!{CLEAN}", "User": "", "DynamicUser": "yes"},
        {"sandbox": "fault", "user": "remark"},
        "DynamicUser=yes",
    ),
    ({"ExecStartPre": ""}, {"hook": "fault"}, ""),
    ({"ExecStartPre": "/usr/bin/gpuprestart check"}, {"hook": "fault"}, "ExecStartPre=/usr/bin/gpuprestart check"),
    (
        {"ExecStartPre": "", "ExecStart": "/bin/sh -c 'gpuprestart clean && exec sleep 9'"},
        {"hook": "fault"},
        "ExecStart=/bin/sh -c 'gpuprestart clean && exec sleep 9'",
    ),
    ({"ExecStartPre": "", "ExecCondition": HOOK}, {"condition": "fault"}, f"ExecCondition={HOOK}"),
    ({"ExecCondition": "/bin/true"}, {"condition": "remark"}, "ExecCondition=/bin/true"),
    (
        {"ExecStartPre": f"/bin/mkdir -p /tmp/x\nExecStartPre=/usr/bin/python3 -c 1\nExecStartPre={HOOK}"},
        {"order": "remark"},
        "ExecStartPre=/usr/bin/python3 -c 1",
    ),
    (
        {"ExecStartPre": "+/opt/nowhere/gpuprestart clean"},
        {"program": "fault"},
        "ExecStartPre=+/opt/nowhere/gpuprestart clean",
    ),
    ({"RootDirectory": "/srv"}, {"program": "fault"}, "RootDirectory=/srv"),
    ({"RootDirectory": "/srv", "RootDirectoryStartOnly": "yes"}, {}, ""),
    ({"ExecStartPre": f"{HOOK} --fast"}, {"arguments": "fault"}, f"ExecStartPre={HOOK} --fast"),
    ({"ExecStartPre": f"{HOOK} --help"}, {"arguments": "fault"}, f"ExecStartPre={HOOK} --help"),
    ({"ExecStartPre": f"{HOOK} --unit %n"}, {"arguments": "fault"}, f"ExecStartPre={HOOK} --unit %n"),
    ({"ExecStartPre": f"{HOOK} --unit dbus"}, {"arguments": "fault"}, f"ExecStartPre={HOOK} --unit dbus"),
    ({"ExecStartPre": f"+/bin/sh -c 'exec {CLEAN}'"}, {}, ""),
]

ANSWER: list[Case] = [
    ({"SuccessExitStatus": "75 SIGTERM"}, {"exit-statuses": "fault"}, "SuccessExitStatus=75 SIGTERM"),
    ({"SuccessExitStatus": "TEMPFAIL"}, {"exit-statuses": "fault"}, "SuccessExitStatus=TEMPFAIL"),
    ({"SuccessExitStatus": "143"}, {}, ""),
    (
        {"Environment": "CUDA_VISIBLE_DEVICES=0 LD_PRELOAD=/opt/x.so"},
        {"environment": "remark"},
        "Environment=CUDA_VISIBLE_DEVICES=0 LD_PRELOAD=/opt/x.so",
    ),
    (
        {"TimeoutStartSec": "90", "NotifyAccess": "none"},
        {"timeout": "fault", "notify-access": "remark"},
        "TimeoutStartSec=90",
    ),
    ({"TimeoutStartSec": "90"}, {}, ""),
    ({"TimeoutStartSec": "infinity", "NotifyAccess": "main"}, {"notify-access": "remark"}, "NotifyAccess=main"),
    ({"RestartSec": "100ms"}, {"restart": "fault"}, "RestartSec=100ms"),
    ({"RestartSec": "100ms", "Restart": "no"}, {}, ""),
    ({"User": "t-nobody"}, {"user": "fault"}, "User=t-nobody"),
    ({"User": "", "DynamicUser": "yes"}, {"user": "remark"}, "DynamicUser=yes"),
    ({"Type": "oneshot", "Restart": "no"}, {"kind": "remark"}, "Type=oneshot"),
]

#: The node's devices are consoles.
DEVICES: list[Case] = [
    ({"DevicePolicy": "closed"}, {"devices": "fault"}, "DevicePolicy=closed"),
    ({"DevicePolicy": "strict"}, {"devices": "fault"}, "DevicePolicy=strict"),
    ({"DeviceAllow": "/dev/nvidia0 rw"}, {"devices": "fault"}, "DeviceAllow=/dev/nvidia0 rw"),
    (
        {"DeviceAllow": "/dev/nvidia0 rw\nDeviceAllow=/dev/nvidia1 rw\nDeviceAllow=/dev/nvidiactl r"},
        {"devices": "fault"},
        "DeviceAllow=/dev/nvidiactl r",
    ),
    ({"DeviceAllow": "/dev/nvidia0 rw\nDeviceAllow=/dev/nvidia1 rw\nDeviceAllow=/dev/nvidiactl rw"}, {}, ""),
    ({"DevicePolicy": "closed", "DeviceAllow": "char-tty rw"}, {}, ""),
    ({"DevicePolicy": "strict", "DeviceAllow": "char-tty rw"}, {"devices": "fault"}, "DevicePolicy=strict"),
    ({"PrivateDevices": "yes", "DeviceAllow": "char-tty rw"}, {"devices": "fault"}, "PrivateDevices=yes"),
]

DOCKER, PODMAN = "/usr/bin/docker run --rm --name llm image", "/usr/bin/podman run --name llm image"
RM = "-/usr/bin/docker rm -f llm"

CONTAINERS: list[Case] = [
    ({"ExecStart": DOCKER}, {"container": "fault"}, f"ExecStart={DOCKER}"),
    ({"ExecStartPre": f"{RM}\nExecStartPre={HOOK}", "ExecStart": DOCKER}, {}, ""),
    ({"ExecStopPost": RM, "ExecStart": DOCKER}, {}, ""),
    (
        {"ExecStartPre": f"{HOOK}\nExecStartPre={RM}", "ExecStart": DOCKER},
        {"container": "fault"},
        f"ExecStartPre={RM}",
    ),
    (
        {"ExecStartPre": f"-/usr/bin/podman rm -f llm\nExecStartPre={HOOK}", "ExecStart": PODMAN},
        {"podman": "fault"},
        f"ExecStart={PODMAN}",
    ),
]

GPUS: list[Case] = [
    ({"Environment": "CUDA_VISIBLE_DEVICES=0,8"}, {"selection": "fault"}, "Environment=CUDA_VISIBLE_DEVICES=0,8"),
    ({"Environment": "CUDA_VISIBLE_DEVICES="}, {"selection": "remark"}, ""),
    ({"EnvironmentFile": "/etc/t-missing"}, {"selection": "fault"}, ""),
    (
        {"Environment": "", "ExecStart": "/usr/bin/env CUDA_VISIBLE_DEVICES=3 /bin/sleep 9"},
        {"selection": "remark"},
        "ExecStart=/usr/bin/env CUDA_VISIBLE_DEVICES=3 /bin/sleep 9",
    ),
]


GROUPS = {"line": LINE, "answer": ANSWER, "devices": DEVICES, "containers": CONTAINERS, "gpus": GPUS}


@pytest.mark.parametrize("group", GROUPS)
def test_what_is_wrong_with_a_unit(scene: Scene, group: str) -> None:
    units = [_write(scene, changes) for changes, _, _ in GROUPS[group]]
    scene.node.systemctl("daemon-reload")
    for unit, (changes, findings, quoted) in zip(units, GROUPS[group]):
        seen = _doctor(scene, unit)
        assert seen.findings == findings, changes
        assert seen.exit == (75 if "fault" in findings.values() else 0)
        for check in findings:
            assert seen.finding(check)["consequence"] and seen.finding(check)["remedy"]
        if quoted:
            file, number = _place(scene, f"{FOLDER}/{unit}", quoted)
            first = seen.finding(next(iter(findings)))
            assert (first["file"], first["line"]) == (file, number), changes
            assert first["fact"].endswith(f"{file}:{number}: {quoted}")


def test_the_example_for_least_privilege(scene: Scene) -> None:
    """Whatever sandbox its unit has, and however it is hidden from others."""
    example = Path(__file__).parents[2] / "units/gpuprestart-least-privilege.conf"
    scene.node.run(["mkdir", "/run/gpuprestart"])
    changes = {"ExecStartPre": "", "ProtectSystem": "strict", "ProtectProc": "invisible", "PrivateTmp": "yes"}
    unit = _unit(scene, drop_in=example.read_text(encoding="utf-8"), **changes)
    assert _doctor(scene, unit).findings == {}
    assert scene.start(unit)


@pytest.mark.parametrize(
    ("setting", "value", "level"),
    [
        ("StartLimitIntervalSec", "0", "remark"),
        ("StartLimitBurst", "200", "ok"),
        ("StartLimitIntervalSec", "10min", "fault"),
    ],
)
def test_how_often_a_refused_start_is_tried_again(scene: Scene, setting: str, value: str, level: str) -> None:
    pause = "15s" if value == "10min" else "100ms"
    unit = _unit(scene, f"[Unit]\n{setting}={value}", RestartSec=pause)
    seen = _doctor(scene, unit)
    assert seen.findings == ({"restart": level} if level != "ok" else {})
    if level != "ok":
        assert seen.finding("restart")["line"] == _place(scene, f"{FOLDER}/{unit}", f"RestartSec={pause}")[1]


def test_a_machine_that_is_rebooted_for_a_refusal(scene: Scene) -> None:
    unit = _unit(scene, "[Unit]\nFailureAction=reboot", Restart="no")
    seen = _doctor(scene, unit)
    assert (seen.exit, seen.findings) == (0, {"actions": "remark"})
    assert seen.finding("actions")["fact"].endswith(":11: FailureAction=reboot")


def test_several_at_once_are_all_told(scene: Scene) -> None:
    unit = _unit(
        scene,
        ExecStartPre=f"-{CLEAN}",
        NotifyAccess="none",
        TimeoutStartSec="60",
        SuccessExitStatus="75",
        DevicePolicy="closed",
        RestartSec="1s",
        Environment="CUDA_VISIBLE_DEVICES=9",
    )
    scene.policy("[memory]\nmax_used = '12 parsecs'\n")
    seen = _doctor(scene, unit)
    assert seen.exit == 75
    faults = {check for check, level in seen.findings.items() if level == "fault"}
    # How long the hook may take is not known, and so not told.
    assert faults == {"prefix", "plus", "exit-statuses", "devices", "restart", "policy"}
    scene.policy()
    seen = _doctor(scene, unit)
    assert {check for check, level in seen.findings.items() if level == "fault"} == {
        *(faults - {"policy"}),
        "timeout",
        "selection",
    }


# Files of the unit ---------------------------------------------------------------------------------------------------


def test_a_later_drop_in_undoes_the_hook(scene: Scene) -> None:
    """Both files are among DropInPaths=, and what systemd has loaded is without the hook."""
    unit = _unit(scene, ExecStartPre="", drop_in="# by somebody\n[Service]\nExecStartPre=\nExecStartPre=/bin/true\n")
    scene.node.write(f"{FOLDER}/{unit}.d/50-gpuprestart.conf", f"[Service]\nExecStartPre={HOOK}\n")
    scene.node.systemctl("daemon-reload")
    seen = _doctor(scene, unit)
    assert (seen.exit, seen.findings) == (75, {"hook": "fault"})
    hook = seen.finding("hook")
    assert (hook["file"], hook["line"]) == (f"{FOLDER}/{unit}.d/60-later.conf", 3)
    assert f"{unit}.d/50-gpuprestart.conf:2: ExecStartPre={HOOK}" in hook["fact"]
    assert "60-later.conf:3: ExecStartPre=" in hook["fact"]


def test_the_hook_in_a_drop_in(scene: Scene) -> None:
    unit = _unit(scene, ExecStartPre="", drop_in=f"[Service]\nExecStartPre=-{HOOK}\n")
    prefix = _doctor(scene, unit).finding("prefix")
    assert (prefix["file"], prefix["line"]) == (f"{FOLDER}/{unit}.d/60-later.conf", 2)


def test_the_hook_in_the_wrong_section(scene: Scene) -> None:
    unit = _unit(scene, ExecStartPre="", drop_in=f"[Unit]\nExecStartPre={HOOK}\n")
    hook = _doctor(scene, unit).finding("hook")
    assert "[Unit]" in hook["fact"] and (hook["file"], hook["line"]) == (f"{FOLDER}/{unit}.d/60-later.conf", 2)


def test_files_that_systemd_has_not_read(scene: Scene) -> None:
    unit = _unit(scene, ExecStartPre="")
    # systemd reads the files of a unit anew that it has no use for.
    assert scene.start(unit)
    scene.node.write(f"{FOLDER}/{unit}.d/50-gpuprestart.conf", f"[Service]\nExecStartPre={HOOK}\n")
    seen = _doctor(scene, unit)
    assert (seen.exit, seen.findings) == (75, {"hook": "fault", "reload": "remark"})
    assert "daemon-reload" in seen.finding("hook")["remedy"]
    # It was asked about, and nothing was done.
    assert scene.node.show(unit, "NeedDaemonReload")["NeedDaemonReload"] == "yes"
    scene.node.systemctl("daemon-reload")
    assert _doctor(scene, unit).findings == {}


@pytest.mark.parametrize(
    ("state", "said"),
    [("not-found", "has no unit"), ("masked", "is masked"), ("bad-setting", "bad unit file setting")],
)
def test_a_unit_that_nothing_can_start(scene: Scene, state: str, said: str) -> None:
    unit = scene.name("doctor")
    if state == "bad-setting":
        scene.node.write(f"{FOLDER}/{unit}", "[Service]\nExecStartPre=/bin/true\n")
    if state == "masked":
        scene.node.systemctl("mask", unit)
    scene.node.systemctl("daemon-reload")
    seen = _doctor(scene, unit)
    assert (seen.exit, seen.findings) == (75, {"unit": "fault"})
    assert said in seen.finding("unit")["fact"]
    # What is true of the machine is told all the same.
    assert seen.finding("nvml")["level"] == "ok"


@pytest.mark.parametrize("name", ["dbus.socket", "a/b", "-Hnowhere", "*", ""])
def test_what_is_no_name_of_a_service(scene: Scene, name: str) -> None:
    done = scene.node.run(["/usr/bin/gpuprestart", "doctor", "--json", "--", name], check=False)
    said = json.loads(done.stdout)
    assert done.returncode == said["exit"] == 75
    assert {each["check"] for each in said["checks"] if each["level"] != "ok"} == {"unit"}
    assert "Traceback" not in done.stderr


def test_a_unit_by_another_name(scene: Scene) -> None:
    unit = _unit(scene, ExecStartPre="")
    alias = scene.name("alias")
    scene.node.run(["ln", "-s", f"{FOLDER}/{unit}", f"{FOLDER}/{alias}"])
    scene.node.systemctl("daemon-reload")
    seen = _doctor(scene, alias)
    assert seen.said["unit"] == unit and unit in seen.finding("hook")["fact"]


def test_an_instance_and_a_template(scene: Scene) -> None:
    """Which GPUs an instance has cannot be told of all of them."""
    stem = scene.name("doctor").removesuffix(".service")
    lines = "\n".join(f"{key}={value}" for key, value in {**GOOD, "Environment": "CUDA_VISIBLE_DEVICES=%i"}.items())
    scene.node.write(f"{FOLDER}/{stem}@.service", f"[Service]\n{lines}\nUser=%i\nSuccessExitStatus=75\n")
    scene.node.systemctl("daemon-reload")
    seen = _doctor(scene, f"{stem}@.service")
    assert (seen.findings, seen.said["unit"]) == ({"exit-statuses": "fault"}, f"{stem}@.service")
    seen = _doctor(scene, f"{stem}@9")
    assert seen.findings == {"exit-statuses": "fault", "selection": "fault"}
    assert seen.said["unit"] == f"{stem}@9.service"


# What others can write -----------------------------------------------------------------------------------------------

ENV = "/run/t-doctor-env"


@pytest.fixture
def env(scene: Scene) -> Iterator[str]:
    scene.node.run(["mkdir", "-p", f"{ENV}/folder"])
    scene.node.write(f"{ENV}/folder/env", "A=1\n")
    yield f"{ENV}/folder/env"
    scene.node.run(["rm", "-rf", ENV])


@pytest.mark.parametrize(
    ("setting", "entry", "said"),
    [
        ("true", "{env}", ""),
        ("true", "-{folder}/none", ""),
        ("chmod 666 {env}", "{env}", "mode 0666"),
        ("chown model {env}", "{env}", "belongs to uid 5001"),
        ("chmod 1777 {folder}", "{env}", "folder"),
        ("chown model {folder}", "{env}", "folder"),
        ("chmod 1777 {folder}", "-{folder}/none", "folder"),
        ("chmod 666 {env}", "{folder}/*", "mode 0666"),
        ("ln -s /home/model/env {folder}/link", "-{folder}/link", "/home/model"),
    ],
)
def test_who_can_write_the_environment_of_the_hook(scene: Scene, env: str, setting: str, entry: str, said: str) -> None:
    folder = env.rpartition("/")[0]
    scene.node.run(["/bin/sh", "-ec", setting.format(env=env, folder=folder)])
    line = f"EnvironmentFile={entry.format(env=env, folder=folder)}"
    unit = _unit(scene, f"EnvironmentFile=-/etc/default/t-none\n{line}")
    seen = _doctor(scene, unit)
    assert seen.findings == ({"environment-file": "fault"} if said else {})
    if said:
        check = seen.finding("environment-file")
        assert said in check["fact"] and "LD_PRELOAD" in check["consequence"]
        assert (check["file"], check["line"]) == _place(scene, f"{FOLDER}/{unit}", line)


@pytest.mark.parametrize(
    ("setting", "finding"),
    [
        ("EnvironmentFile={env}/folder/env", "environment-file"),
        ("EnvironmentFile={env}/trusted", "environment"),
        ("Environment=LD_PRELOAD={env}/x.so", "environment"),
    ],
)
def test_who_can_write_it_does_run_code_as_root(scene: Scene, env: str, setting: str, finding: str) -> None:
    """So the fault is none in theory only: the loader obeys before the hook can refuse to."""
    source = f'__attribute__((constructor)) static void f(void) {{ fclose(fopen("{ENV}/done", "w")); }}'
    scene.node.write(f"{ENV}/x.c", f"#include <stdio.h>\n{source}\n")
    scene.node.run(["cc", "-shared", "-fPIC", "-o", f"{ENV}/x.so", f"{ENV}/x.c"])
    if finding == "environment":
        scene.node.run(["chown", "model", f"{ENV}/x.so"])
    scene.node.write(env, f"LD_PRELOAD={ENV}/x.so\n", mode=0o666)
    scene.node.write(f"{ENV}/trusted", f"LD_PRELOAD={ENV}/x.so\n")
    unit = _unit(scene, setting.format(env=ENV))
    seen = _doctor(scene, unit)
    assert (seen.exit, seen.findings) == (75, {finding: "fault"})
    if not setting.endswith("trusted"):
        assert seen.finding(finding)["line"] == _place(scene, f"{FOLDER}/{unit}", setting.format(env=ENV))[1]
    assert scene.start(unit)
    assert scene.node.run(["stat", "-c", "%U", f"{ENV}/done"]).stdout == "root\n"


@pytest.mark.parametrize(
    ("value", "level"),
    [
        ("{env}/folder", "fault"),
        ("/usr/lib:/opt:{env}/folder/none", "fault"),
        ("/usr/lib", "remark"),
        ("$ORIGIN", "remark"),
    ],
)
def test_a_folder_of_libraries_that_the_server_s_user_can_write(scene: Scene, env: str, value: str, level: str) -> None:
    scene.node.run(["chown", "model", f"{ENV}/folder"])
    unit = _unit(scene, f"Environment=LD_LIBRARY_PATH={value.format(env=ENV)}")
    assert _doctor(scene, unit).findings == {"environment": level}


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("chmod 777 {path}", "mode 0777"),
        ("chown model {path}", "uid 5001"),
        ("chmod a-x {path}", "executed"),
        ("rm {path}", "is not there"),
    ],
)
def test_a_program_that_somebody_else_can_write(scene: Scene, setting: str, said: str) -> None:
    path = f"{ENV}/gpuprestart"
    scene.node.run(["/bin/sh", "-ec", f"mkdir -p {ENV}; cp /usr/bin/gpuprestart {path}; {setting.format(path=path)}"])
    try:
        seen = _doctor(scene, _unit(scene, ExecStartPre=f"+{path} clean"))
    finally:
        scene.node.run(["rm", "-rf", ENV])
    assert (seen.exit, seen.findings) == (75, {"program": "fault"})
    assert said in seen.finding("program")["fact"]


# The machine ---------------------------------------------------------------------------------------------------------


def test_without_root_it_says_that_it_cannot_see_all(scene: Scene) -> None:
    unit = _unit(scene, ExecStartPre=f"-{HOOK}")
    seen = _doctor(scene, unit, user="alice")
    assert (seen.exit, seen.findings) == (69, {"privileges": "fault", "prefix": "fault"})
    assert "uid 5002" in seen.finding("privileges")["fact"]
    done = scene.node.run([*DOCTOR.split(), unit], check=False, user="alice")
    assert done.returncode == 69 and done.stdout.startswith("FAULT   privileges")
    assert "; not everything could be looked at" in done.stdout


def test_root_without_a_capability(scene: Scene) -> None:
    done = scene.node.run(["setpriv", "--bounding-set=-sys_ptrace", *DOCTOR.split(), "--json"], check=False)
    assert done.returncode == 69
    (check,) = (each for each in json.loads(done.stdout)["checks"] if each["check"] == "privileges")
    assert "root has no CAP_SYS_PTRACE here" in check["fact"]


def test_a_file_that_root_alone_may_read_is_no_fault_of_the_unit_s(scene: Scene, env: str) -> None:
    scene.node.run(["chmod", "600", env])
    seen = _doctor(scene, _unit(scene, f"EnvironmentFile={env}"), user="alice")
    assert (seen.exit, seen.findings) == (69, {"privileges": "fault", "selection": "fault"})
    assert "Permission denied" in seen.finding("selection")["fact"]


@contextmanager
def _hidepid(scene: Scene, value: str) -> Iterator[None]:
    """/proc as the whole node sees it."""
    scene.node.run(["mount", "-o", f"remount,hidepid={value}", "/proc"])
    try:
        yield
    finally:
        scene.node.run(["mount", "-o", "remount,hidepid=0", "/proc"])


def test_a_proc_that_hides_processes(scene: Scene) -> None:
    unit = _unit(scene)
    with _hidepid(scene, "2"):
        seen = _doctor(scene, unit)
        assert (seen.exit, seen.findings) == (0, {"proc": "remark"})
        assert "hidepid=invisible" in seen.finding("proc")["fact"]
        assert _doctor(scene, unit, user="alice").findings == {"privileges": "fault", "proc": "fault"}
    assert _doctor(scene, unit).findings == {}


def test_a_proc_that_hides_processes_from_root(scene: Scene) -> None:
    with _hidepid(scene, "4"):
        done = scene.node.run(["setpriv", "--bounding-set=-sys_ptrace", *DOCTOR.split(), "--json"], check=False)
    found = {each["check"]: each for each in json.loads(done.stdout)["checks"] if each["level"] != "ok"}
    assert done.returncode == 69 and set(found) == {"privileges", "proc"}
    assert "does not show PID 1" in found["proc"]["fact"]


@pytest.mark.parametrize("program", ["systemctl", "busctl"])
@pytest.mark.parametrize("answer", ["exit 1", "echo nonsense", "head -c 999 /dev/urandom"])
def test_a_systemd_that_does_not_answer(scene: Scene, program: str, answer: str) -> None:
    unit = _unit(scene)
    scene.node.write(f"/tmp/{program}", f"#!/bin/sh\n{answer}\n", mode=0o755)
    seen = _doctor(scene, unit, inside=f"mount --bind /tmp/{program} $(command -v {program})")
    assert (seen.exit, seen.findings) == (69, {"systemd": "fault"})
    assert seen.finding("nvml")["level"] == "ok" and "Traceback" not in seen.stderr


MODULES = "/usr/lib/python3/dist-packages"


@pytest.mark.parametrize(
    ("inside", "findings"),
    [
        (
            f"echo 'raise ImportError(1)' > /tmp/t; mount --bind /tmp/t {MODULES}/psutil/__init__.py",
            {"modules": "remark"},
        ),
        (f"mount -t tmpfs none {MODULES}/systemd", {"modules": "remark"}),
        ("mount -t tmpfs none /run/systemd/journal", {"journal": "remark"}),
    ],
)
def test_what_the_hook_needs_is_not_there(scene: Scene, inside: str, findings: dict[str, str]) -> None:
    seen = _doctor(scene, inside=inside)
    assert seen.findings == findings
    assert seen.exit == (75 if "fault" in findings.values() else 0)


def test_without_systemds_module_nobody_is_asked_for_more_time(scene: Scene) -> None:
    unit = _unit(scene, TimeoutStartSec="60")
    assert _doctor(scene, unit, inside=f"mount -t tmpfs none {MODULES}/systemd").findings == {
        "modules": "remark",
        "timeout": "fault",
    }


@pytest.mark.parametrize(
    "setting",
    ["mkdir -p gpuprestart; chown model gpuprestart", "mkdir -pm 777 gpuprestart/locks; chmod 777 gpuprestart/*"],
)
def test_a_folder_in_run_that_is_not_ours(scene: Scene, setting: str) -> None:
    scene.node.run(["/bin/sh", "-ec", f"cd /run; {setting}"])
    seen = _doctor(scene)
    assert (seen.exit, seen.findings) == (75, {"run": "fault"})
    assert "/run/gpuprestart" in seen.finding("run")["fact"]


# The driver ----------------------------------------------------------------------------------------------------------


def test_a_driver_that_is_not_loaded(scene: Scene) -> None:
    unit = _unit(scene, ExecStartPre=f"-{HOOK}", DevicePolicy="closed")
    scene.gpu.ask("error", function="nvmlInit*", code="DRIVER_NOT_LOADED")
    seen = _doctor(scene, unit)
    assert (seen.exit, seen.findings) == (75, {"prefix": "fault", "devices": "fault", "nvml": "fault"})
    assert "modprobe nvidia" in seen.finding("nvml")["remedy"]


def test_a_driver_that_does_not_answer(scene: Scene) -> None:
    scene.policy("[deadline]\nnvml_init = '1 s'\n")
    scene.gpu.ask("hang", function="nvmlInit*")
    seen = _doctor(scene)
    assert (seen.exit, seen.findings) == (75, {"nvml": "fault"})
    assert "did not answer nvmlInit within 1 s" in seen.finding("nvml")["fact"]


@pytest.mark.parametrize("lost", ["calls", "handle"])
def test_a_gpu_that_is_lost(scene: Scene, lost: str) -> None:
    ours, others = _unit(scene), _unit(scene, Environment="CUDA_VISIBLE_DEVICES=2,3")
    scene.gpu.ask("set_gpu", gpu=1, lost=lost)
    assert _doctor(scene).findings == {"gpus": "fault"}
    seen = _doctor(scene, ours)
    assert (seen.exit, seen.findings) == (75, {"gpus": "fault"})
    assert seen.finding("gpus")["fact"].startswith("GPU 1 cannot be measured")
    seen = _doctor(scene, others)
    assert (seen.exit, seen.findings) == (0, {"gpus": "remark"})


def test_a_node_that_is_not_there(scene: Scene) -> None:
    unit = _unit(scene)
    # Below the node that is bound there lies an empty file.
    seen = _doctor(scene, unit, inside="umount /dev/nvidia1")
    assert (seen.exit, seen.findings) == (75, {"gpus": "fault"})
    assert seen.finding("gpus")["fact"] == "/dev/nvidia1 of GPU 1 is not there"


def test_no_gpu_at_all(scene: Scene) -> None:
    for gpu in range(8):
        scene.gpu.ask("set_gpu", gpu=gpu, missing=True)
    seen = _doctor(scene)
    assert (seen.exit, seen.findings) == (75, {"nvml": "fault"})
    assert "NVML counts no GPU" in seen.finding("nvml")["fact"]


@pytest.mark.parametrize(("missing", "findings"), [("pass", {}), ("refuse", {"nvml": "fault"})])
def test_a_machine_that_never_had_one(scene: Scene, missing: str, findings: dict[str, str]) -> None:
    scene.policy(f'[nvml]\nmissing = "{missing}"\npids = "ours"\n', base="")
    devices = "mount -t tmpfs -o mode=755 none /mnt; cp -a /dev/null /dev/urandom /mnt; mount --rbind /mnt /dev"
    traces = "for folder in /sys/bus/pci /sys/module; do [ ! -e $folder ] || mount -t tmpfs none $folder; done"
    library = scene.node.run(["ldconfig", "-p"]).stdout.partition("libnvidia-ml.so.1 ")[2].splitlines()[0].split()[-1]
    inside = f"{devices}; {traces}; : > /tmp/t; mount --bind /tmp/t {library}"
    assert _doctor(scene, inside=inside).findings == findings


def test_pids_of_another_namespace(scene: Scene) -> None:
    """A container is a PID namespace of its own, and only the policy can say whose PIDs the driver lists."""
    scene.policy(base="")
    seen = _doctor(scene)
    assert (seen.exit, seen.findings) == (0, {"pids": "remark"})
    assert 'nvml.pids = "ours"' in seen.finding("pids")["remedy"]


# Policy, bypasses, claims --------------------------------------------------------------------------------------------


def test_faults_of_a_policy_are_told_with_file_and_line(scene: Scene) -> None:
    scene.policy("[memory]\nmax_used = '12 parsecs'\nmin_fee = 1\n")
    done = scene.node.run([*DOCTOR.split(), "--json"], check=False)
    faults = [each for each in json.loads(done.stdout)["checks"] if each["level"] != "ok"]
    assert done.returncode == 75 and [each["check"] for each in faults] == ["policy", "policy"]
    assert {(each["file"], each["line"]) for each in faults} == {
        ("/etc/gpuprestart/policy.toml", 4),
        ("/etc/gpuprestart/policy.toml", 5),
    }


def test_an_overlay_is_the_fault_of_its_own_unit(scene: Scene) -> None:
    unit, other = _unit(scene), _unit(scene, Environment="CUDA_VISIBLE_DEVICES=5")
    scene.policy("[deadline]\ntotal = 'soon'\n", name=f"{unit}.toml", base="")
    for seen in (_doctor(scene, unit), _doctor(scene)):
        assert (seen.exit, seen.findings) == (75, {"policy": "fault"})
    assert _doctor(scene, other).findings == {}


def test_a_deadline_of_the_unit_s_own(scene: Scene) -> None:
    unit = _unit(scene, NotifyAccess="none")
    scene.policy("[deadline]\ntotal = '10 min'\n", name=f"{unit}.toml", base="")
    assert _doctor(scene, unit).findings == {"timeout": "fault", "notify-access": "remark"}
    unit = _unit(scene, NotifyAccess="none", ExecStartPre=f"{HOOK} --deadline 400s")
    timeout = _doctor(scene, unit).finding("timeout")
    assert "deadline.total = 400 s" in timeout["fact"] and "after 295 s" in timeout["consequence"]


def test_a_policy_that_the_hook_s_line_names(scene: Scene) -> None:
    unit = _unit(scene, ExecStartPre=f"{HOOK} --policy /etc/gpuprestart/mine --gpus 9")
    assert _doctor(scene, unit).findings == {"policy": "fault"}
    scene.policy(name="mine")
    assert _doctor(scene, unit).findings == {"selection": "fault"}


def test_overlays_that_nobody_reads(scene: Scene) -> None:
    unit = _unit(scene)
    for name in (unit, "t-nobody.service", "user@.service", "t-nobody@.service", unit.removesuffix(".service")):
        scene.policy(name=f"{name}.toml", base="")
    strays = {"t-nobody.service", "t-nobody@.service", unit.removesuffix(".service")}
    for seen in (_doctor(scene), _doctor(scene, unit)):
        assert (seen.exit, seen.findings) == (0, {"overlays": "remark"})
        files = {each["file"] for each in seen.said["checks"] if each["check"] == "overlays"}
        assert files == {f"/etc/gpuprestart/{name}.toml" for name in strays}


def test_a_bypass_that_stands_and_one_that_is_over(scene: Scene) -> None:
    unit = _unit(scene)
    scene.node.run(["/usr/bin/gpuprestart", "bypass", unit])
    seen = _doctor(scene, unit)
    assert (seen.exit, seen.findings) == (0, {"bypass": "remark"})
    assert f"lets the next start of {unit} pass" in seen.finding("bypass")["fact"]
    scene.node.write(f"/run/gpuprestart/bypass/{unit}", "until=1.0 by=root\n")
    assert "does not hold" in _doctor(scene).finding("bypass")["fact"]
    # It is there for the next start to see.
    assert scene.node.exists(f"/run/gpuprestart/bypass/{unit}")


def test_a_gpu_that_another_unit_was_just_given(scene: Scene) -> None:
    first, second, third = (_unit(scene, Environment=f"CUDA_VISIBLE_DEVICES={gpus}") for gpus in ("0,1", "1,2", "3"))
    assert scene.start(first)
    seen = _doctor(scene, second)
    assert (seen.exit, seen.findings) == (0, {"shared": "remark", "claims": "remark"})
    assert f"{first} was given GPU-" in seen.finding("claims")["fact"]
    assert f"{first} selects GPU 1 as well" in seen.finding("shared")["fact"]
    assert _doctor(scene, third).findings == {}
    assert _doctor(scene, first).findings == {}
    scene.node.systemctl("stop", first)
    assert _doctor(scene, second).findings == {}


def test_a_claim_that_cannot_be_read(scene: Scene) -> None:
    uuid = scene.gpu.ask("state")["gpus"][0]["uuid"]
    scene.node.write(f"/run/gpuprestart/claims/{uuid}", "junk\n")
    seen = _doctor(scene)
    assert (seen.exit, seen.findings) == (75, {"claims": "fault"})


@pytest.mark.parametrize(
    ("selects", "findings"),
    [
        ({"Environment": "CUDA_VISIBLE_DEVICES=1,2"}, {"shared": "remark"}),
        ({"Environment": "", "EnvironmentFile": "/etc/gpuprestart/env"}, {"shared": "remark"}),
        ({"Environment": "CUDA_VISIBLE_DEVICES=1,2", "ExecStartPre": ""}, {"shared": "remark"}),
        ({"Environment": "CUDA_VISIBLE_DEVICES=2,3"}, {}),
        ({"Environment": "CUDA_VISIBLE_DEVICES=1,9"}, {}),
        ({"Environment": ""}, {"shared": "remark"}),
        ({"Environment": "", "ExecStartPre": ""}, {}),
        ({"Environment": "", "ExecStartPre": "", "EnvironmentFile": "/etc/gpuprestart/policy.toml"}, {}),
    ],
)
def test_another_service_that_is_enabled_on_the_same_gpus(
    scene: Scene, selects: dict[str, str], findings: dict[str, str]
) -> None:
    scene.node.write("/etc/gpuprestart/env", "NVIDIA_VISIBLE_DEVICES=0\n")
    other = _write(scene, selects, "[Install]\nWantedBy=multi-user.target")
    unit = _unit(scene)
    assert _doctor(scene, unit).findings == {}
    scene.node.systemctl("enable", other)
    try:
        seen = _doctor(scene, unit)
        assert seen.findings == findings
        if findings:
            assert other in seen.finding("shared")["fact"]
        apart = _unit(scene, f"[Unit]\nConflicts={other}")
        assert _doctor(scene, apart).findings == {}
    finally:
        scene.node.systemctl("disable", other)


def test_another_service_that_is_neither_enabled_nor_up(scene: Scene) -> None:
    """systemd still has it, because it has failed."""
    other = _unit(scene, Restart="no", ExecStart="/bin/false")
    unit = _unit(scene)
    scene.start(other)
    scene.await_state(other, "failed")
    assert _doctor(scene, unit).findings == {}


def test_a_socket_that_starts_it(scene: Scene) -> None:
    unit = _unit(scene)
    socket = unit.replace(".service", ".socket")
    scene.node.write(f"{FOLDER}/{socket}", f"[Socket]\nListenStream=/run/{unit}.sock\n")
    scene.node.systemctl("daemon-reload")
    scene.node.systemctl("start", socket)
    try:
        assert _doctor(scene, unit).findings == {"kind": "remark"}
    finally:
        scene.node.systemctl("stop", socket)


# What it leaves ------------------------------------------------------------------------------------------------------


def test_it_touches_nothing_and_waits_for_nobody(scene: Scene) -> None:
    """A start is waiting for memory, and has the lock."""
    scene.gpu.ask("leak", gpu=0, mib=900)
    starting, unit = _unit(scene), _unit(scene)
    scene.policy("[deadline]\ntotal = '20 s'\n")
    scene.node.systemctl("start", "--no-block", starting)
    wait_for(lambda: scene.node.show(starting, "StatusText")["StatusText"], timeout=10, what="it waits for memory")
    assert scene.node.exists("/run/gpuprestart/locks")
    before = scene.node.run(["find", "/run/gpuprestart", "/etc", "-printf", "%p %T@\n"]).stdout
    marks = _records(scene)
    began = time.monotonic()
    assert _doctor(scene, unit).exit == 0
    assert time.monotonic() - began < 5
    assert scene.node.run(["find", "/run/gpuprestart", "/etc", "-printf", "%p %T@\n"]).stdout == before
    assert _records(scene) == marks
    assert scene.node.show(starting, "SubState")["SubState"] == "start-pre"
    assert scene.node.show(unit, "ActiveState")["ActiveState"] == "inactive"


def _records(scene: Scene) -> int:
    return len(scene.node.journal(SYSLOG_IDENTIFIER="gpuprestart"))


def test_on_a_machine_where_nothing_ran_yet_no_folder_is_made(scene: Scene) -> None:
    assert _doctor(scene, _unit(scene)).findings == {}
    assert not scene.node.exists("/run/gpuprestart")


def test_a_reader_that_has_gone(scene: Scene) -> None:
    script = f"{{ {DOCTOR}; echo $? >&2; }} | true"
    said = scene.node.run(["/bin/bash", "-c", script], check=False).stderr
    assert "Traceback" not in said and said.strip().endswith("0")


def test_it_can_be_interrupted(scene: Scene) -> None:
    scene.gpu.ask("hang", function="nvmlInit*")
    scene.gpu.ask("calls", start=True)
    unit = scene.name("interrupted")
    scene.node.start(DOCTOR.split(), unit=unit)
    scene.gpu.ask("wait", call="nvmlInitWithFlags")
    scene.node.systemctl("kill", "--kill-who=main", "--signal=TERM", unit)
    scene.await_state(unit, "failed")
    assert scene.node.show(unit, "ExecMainStatus")["ExecMainStatus"] == "75"
    said = [str(each["MESSAGE"]) for each in scene.node.journal(unit=unit)]
    assert "gpuprestart: SIGTERM came before everything was looked at" in said
    assert not any("Traceback" in line for line in said)
