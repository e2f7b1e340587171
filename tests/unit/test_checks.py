"""What doctor makes of the facts: findings, their order, the exit status. Everything here is pure."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import pytest

from gpuprestart import checks, doctor, hook, hookchecks, service, unitchecks, unitlines
from gpuprestart.bypass import Bypass
from gpuprestart.bypass import text as bypass_text
from gpuprestart.checks import Check, Level
from gpuprestart.commandline import Command
from gpuprestart.hookchecks import Facts, Node
from gpuprestart.model import EXIT_STATUS, Outcome, Refusal, Unit
from gpuprestart.policy import Deadlines, Policy
from gpuprestart.selection import Selection
from tests.unit import machines

FILE = "/etc/systemd/system/s.service"
NAMES = {"-": "ignore-failure", "+": "privileged", "!": "no-setuid"}
CLEAN = "+/usr/bin/gpuprestart clean"


def command(line: str) -> list[Any]:
    """One command as systemd says it."""
    words = line.lstrip("".join(NAMES)).split()
    return [words[0], words, [NAMES[char] for char in line[: len(line) - len(line.lstrip("".join(NAMES)))]]]


def facts(text: str = "", changes: Optional[Mapping[str, Any]] = None, **said: Any) -> Facts:
    """A unit with the hook in front of it; ``text`` are its lines, ``said`` is what systemd has of it."""
    commands = {key: [command(line) for line in said.pop(key, ())] for key in ("ExecConditionEx", "ExecStopPostEx")}
    commands["ExecStartPreEx"] = [command(line) for line in said.pop("ExecStartPreEx", [CLEAN])]
    commands["ExecStartEx"] = [command(line) for line in said.pop("ExecStartEx", ["/usr/bin/server"])]
    normal = {
        "LoadState": "loaded",
        "FragmentPath": FILE,
        "User": "model",
        "NotifyAccess": "exec",
        "TimeoutStartUSec": 300_000_000,
        "Restart": "on-failure",
        "RestartUSec": 15_000_000,
        "StartLimitIntervalUSec": 10_000_000,
        "StartLimitBurst": 5,
    }
    return Facts(
        service=service.from_properties("s.service", {**normal, **commands, **said}),
        lines=unitlines.read([(FILE, f"[Service]\n{text}")]),
        policy=Policy(),
    )._replace(**(changes or {}))


def found(some: Sequence[Check]) -> list[tuple[str, str, Optional[int]]]:
    """What is not in order, with its line."""
    return [(each.check, each.level.value, each.line) for each in some if each.level is not Level.OK]


def of(known: Facts) -> list[Check]:
    return hookchecks.of(known) + unitchecks.of(known)


# All of them together ------------------------------------------------------------------------------------------------

FAULT = checks.fault("b", "it is so", "that comes of it", "do this", unitlines.Line("/x", 7, "Service.A", "1"))
REMARK = checks.remark("a", "by the way", "nothing much", "nothing")
BLIND = checks.fault("c", "not seen", "unknown", "look", blind=True)
OK = checks.ok("long-word", "fine")


@pytest.mark.parametrize(
    ("some", "status"),
    [([OK], 0), ([OK, REMARK], 0), ([OK, FAULT, REMARK], 75), ([BLIND, OK], 69), ([FAULT, BLIND], 69)],
)
def test_the_exit_status(some: list[Check], status: int) -> None:
    assert checks.status(some) == status
    assert json.loads(checks.as_json(None, some))["exit"] == status


def test_for_programs() -> None:
    said = json.loads(checks.as_json("s.service", [OK, FAULT]))
    assert (said["version"], said["unit"], said["exit"]) == (1, "s.service", 75)
    assert said["checks"] == [
        {
            "check": "b",
            "level": "fault",
            "fact": "it is so: /x:7: A=1",
            "consequence": "that comes of it",
            "remedy": "do this",
            "file": "/x",
            "line": 7,
            "blind": False,
        },
        {
            "check": "long-word",
            "level": "ok",
            "fact": "fine",
            "consequence": "",
            "remedy": "",
            "file": None,
            "line": None,
            "blind": False,
        },
    ]


@pytest.mark.parametrize("as_json", [False, True])
def test_what_is_printed_ends_with_a_line(monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    """The prompt would stand behind the last word."""
    monkeypatch.setattr(doctor._Doctor, "everything", lambda self: [OK])
    out = io.StringIO()
    assert doctor.perform(Command("doctor", json=as_json), None, out=out) == 0  # type: ignore[arg-type]
    assert out.getvalue().endswith("\n") and not out.getvalue().endswith("\n\n")


def test_for_people_what_is_wrong_comes_first() -> None:
    assert checks.as_text("s.service", [OK, REMARK, FAULT, OK, BLIND]).split("\n") == [
        "FAULT   c          not seen",
        "                   unknown",
        "                   remedy: look",
        "",
        "FAULT   b          it is so: /x:7: A=1",
        "                   that comes of it",
        "                   remedy: do this",
        "",
        "remark  a          by the way",
        "                   nothing much",
        "                   remedy: nothing",
        "",
        "ok      long-word  fine",
        "ok      long-word  fine",
        "s.service: 2 faults (c, b), 1 remark (a), 2 ok; not everything could be looked at",
        "Whether it could start now is another matter: gpuprestart check --unit s.service",
    ]
    assert checks.as_text("s@.service", [OK]).endswith("\ns@.service: 1 ok")
    assert checks.as_text(None, [OK]).endswith("\nthis machine: 1 ok")


def test_nothing_of_a_strangers_reaches_the_terminal() -> None:
    hostile = checks.fault("a", "x\x1b[31m\nok  b", "y\r", "z\x07")
    for shown in (checks.as_text(None, [hostile]), checks.as_json(None, [hostile])):
        assert not {"\x1b", "\r", "\x07"} & set(shown)
    assert checks.as_text(None, [hostile]).count("\n") == 4


# The machine ---------------------------------------------------------------------------------------------------------

ALL = (1 << 41) - 1


@pytest.mark.parametrize(
    ("uid", "own", "systemd", "said", "blind"),
    [
        (0, ALL, ALL, None, False),
        (0, ALL, None, None, False),
        (0, ALL & ~(1 << 2), ALL & ~(1 << 1), None, False),
        (5001, 0, ALL, "uid 5001, not root", True),
        (0, ALL & ~(1 << 19), ALL, "root has no CAP_SYS_PTRACE here", True),
        (0, ALL & ~0b110, ALL, "root has no CAP_DAC_READ_SEARCH here", True),
        (0, ALL, ALL & ~(1 << 5), "systemd itself has no CAP_KILL", False),
    ],
)
def test_privileges(uid: int, own: int, systemd: Optional[int], said: Optional[str], blind: bool) -> None:
    (check,) = checks.privileges(uid, own, systemd)
    assert (check.level is Level.FAULT, check.blind) == (said is not None, blind)
    assert (said or "") in check.fact


@pytest.mark.parametrize(
    ("hidepid", "seen", "level", "blind"),
    [
        ("", True, "ok", False),
        ("invisible", True, "remark", False),
        ("4", False, "fault", True),
        ("", False, "fault", True),
    ],
)
def test_hidden_processes(hidepid: str, seen: bool, level: str, blind: bool) -> None:
    (check,) = checks.processes(hidepid, seen)
    assert (check.level.value, check.blind) == (level, blind)


@pytest.mark.parametrize(
    ("missing", "levels"),
    [([], ["ok"]), (["systemd"], ["remark"]), (["psutil", "systemd"], ["remark", "remark"]), (["tomli"], ["fault"])],
)
def test_modules(missing: list[str], levels: list[str]) -> None:
    some = checks.modules({name: f"No module named {name!r}" for name in missing})
    assert [each.level.value for each in some] == levels
    assert all(f"python3-{name}" in each.remedy for name, each in zip(missing, some))


@pytest.mark.parametrize(
    ("setting", "initial", "level"),
    [("auto", True, "ok"), ("ours", False, "ok"), ("foreign", True, "ok"), ("auto", False, "remark")],
)
def test_whose_pids_the_driver_lists(setting: str, initial: bool, level: str) -> None:
    assert checks.pids(setting, initial)[0].level.value == level


def test_journald_and_the_folder_in_run() -> None:
    assert found([*checks.journald(True), *checks.runtime_folder([])]) == []
    assert found(checks.journald(False)) == [("journal", "remark", None)]
    some = checks.runtime_folder(["/run/gpuprestart: others can write it", "/run/gpuprestart: others can write it"])
    assert found(some) == [("run", "fault", None)] and "others can write it" in some[0].fact


def test_a_driver_that_cannot_be_asked() -> None:
    (check,) = checks.no_driver("NVML cannot be used", "modprobe nvidia", may_be_missing=False)
    assert (check.level, check.fact, check.remedy) == (Level.FAULT, "NVML cannot be used", "modprobe nvidia")
    assert checks.no_driver("x", "", may_be_missing=False)[0].remedy
    assert checks.no_driver("x", "", may_be_missing=True)[0].level is Level.OK


def test_which_files_the_policy_is_from() -> None:
    assert checks.policy(["/etc/a.toml", "/etc/b.toml"])[0].fact == "/etc/a.toml, /etc/b.toml"
    assert "defaults" in checks.policy([])[0].fact


def test_files_that_no_unit_reads() -> None:
    one, other = checks.overlays({"/etc/b.toml": "systemd has no unit b", "/etc/a.toml": "no name"})
    assert [(each.level, each.file) for each in (one, other)] == [
        (Level.REMARK, "/etc/a.toml"),
        (Level.REMARK, "/etc/b.toml"),
    ]
    assert other.fact == "/etc/b.toml: systemd has no unit b"
    assert checks.overlays({})[0].level is Level.OK


def test_a_driver_without_a_gpu() -> None:
    inventory = machines.inventory(2)
    assert checks.driver(inventory)[0] == checks.ok("nvml", f"{inventory.nvml_path}, driver 570.1, 2 GPUs")
    assert found(checks.driver(inventory._replace(gpus=()))) == [("nvml", "fault", None)]


def test_gpus_that_cannot_be_measured() -> None:
    inventory = machines.inventory(5)
    lost = inventory.gpus[0]._replace(fault="GPU is lost")
    inventory = inventory._replace(gpus=(lost, *inventory.gpus[1:]))
    readings = {
        machines.uuid(1): machines.reading(1, used=None),
        machines.uuid(2): machines.reading(2, distrust="PID 0"),
        machines.uuid(4): machines.reading(4),
    }
    absent = {machines.uuid(3): "/dev/nvidia3"}
    everybody = checks.gpus(inventory, readings, absent, None)
    assert [each.level.value for each in everybody] == ["fault", "fault", "remark", "fault"]
    assert [each.fact[:5] for each in everybody] == ["GPU 0", "GPU 1", "GPU 2", "/dev/"]
    ours = checks.gpus(inventory, readings, absent, inventory.gpus[1:3])
    assert [each.level.value for each in ours] == ["remark", "fault", "remark", "remark"]


def test_every_fault_of_a_policy_has_its_place() -> None:
    refusal = Refusal(Outcome.CONFIG, "/etc/a.toml:3: memory.x: wrong", ["/etc/a.toml:9: rule: wrong", "and 2 more"])
    first, second = checks.policy_refused(refusal, "s.service")
    assert (first.file, first.line, second.line) == ("/etc/a.toml", 3, 9)
    assert first.remedy == "and 2 more" and "a start of s.service" in first.consequence
    (unsafe,) = checks.policy_refused(Refusal(Outcome.CONFIG, "/etc/a.toml: can be written by others", ["chmod"]), None)
    assert (unsafe.line, unsafe.remedy) == (None, "chmod") and "every start" in unsafe.consequence


def test_bypasses_that_stand_and_that_are_over() -> None:
    texts = {
        "a.service": bypass_text(Bypass(until=700.0, by="alice")),
        "b.service": bypass_text(Bypass(until=99.0, by="bob")),
        "c.service": "junk",
    }
    standing, over, junk = checks.bypasses(texts, 100.0)
    assert "alice lets the next start of a.service pass, for another 600 s" in standing.fact
    assert "does not hold" in over.fact and "does not hold" in junk.fact
    assert {each.level.value for each in (standing, over, junk)} == {"remark"}
    assert "rm /run/gpuprestart/bypass/b.service" in over.remedy


def test_claims() -> None:
    claims = {machines.uuid(number): f"unit=s{number}.service invocation=x pid=7\n" for number in range(3)}
    claims[machines.uuid(7)] = claims[machines.uuid(0)]
    units = {
        f"s{number}.service": Unit(f"s{number}.service", "loaded", state, "", "", invocation="x")
        for number, state in enumerate(("active", "active", "inactive"))
    }
    gpus = machines.inventory(3).gpus
    assert checks.standing_claims(claims, units, None, ())[0] == checks.ok(
        "claims", "s0.service has GPU-00000000, GPU-00000007; s1.service has GPU-00000001"
    )
    (theirs,) = checks.standing_claims(claims, units, "s0.service", gpus)
    assert theirs.level is Level.REMARK and "s1.service was given" in theirs.fact
    assert checks.standing_claims(claims, units, "s0.service", gpus[:1])[0].level is Level.OK


@pytest.mark.parametrize("line", ["", "junk", "unit=a/b invocation=x pid=1"])
def test_a_claim_that_cannot_be_read_stands_in_everybodys_way(line: str) -> None:
    (check,) = checks.standing_claims({"GPU-1": line}, {}, None, ())
    assert check.level is Level.FAULT and check.remedy == "rm /run/gpuprestart/claims/GPU-1"


# A unit --------------------------------------------------------------------------------------------------------------


def test_a_unit_in_which_all_is_right() -> None:
    assert found(of(facts(f"ExecStartPre={CLEAN}\n"))) == []


PRE = f"ExecStartPre={CLEAN}\n"
HIDDEN, HIDING = "ProtectProc=invisible\nProcSubset=pid", {"ProtectProc": "invisible", "ProcSubset": "pid"}


@pytest.mark.parametrize(
    ("text", "said", "expected"),
    [
        # The hook's own line.
        (
            "ExecStartPre=-+gpuprestart clean",
            {"ExecStartPreEx": ["-+/usr/bin/gpuprestart clean"]},
            [("prefix", "fault", 2)],
        ),
        ("ExecStartPre=gpuprestart clean", {"ExecStartPreEx": ["/usr/bin/gpuprestart clean"]}, [("plus", "fault", 2)]),
        ("", {"ExecStartPreEx": [CLEAN[1:]], "User": ""}, []),
        ("", {"ExecStartPreEx": [f"!{CLEAN[1:]}"]}, []),
        (
            "CapabilityBoundingSet=CAP_KILL",
            {"ExecStartPreEx": [f"!{CLEAN[1:]}"], "CapabilityBoundingSet": 1 << 5},
            [("plus", "fault", 2)],
        ),
        ("CapabilityBoundingSet=", {"CapabilityBoundingSet": 0}, []),
        (
            "",
            {"ExecStartPreEx": [f"!{CLEAN[1:]}"], "CapabilityBoundingSet": 1 << 5 | 1 << 19 | 1 << 2},
            [],
        ),
        ("", {"ExecStartPreEx": []}, [("hook", "fault", None)]),
        ("ExecStartPre=x\nExecStartPre=y", {"ExecStartPreEx": ["/bin/x", "/bin/y"]}, [("hook", "fault", None)]),
        (f"{PRE}A=1\nExecStartPre=", {"ExecStartPreEx": []}, [("hook", "fault", 4)]),
        (f"A=1\n[Unit]\n{PRE}", {"ExecStartPreEx": []}, [("hook", "fault", 4)]),
        ("ExecStartPre=gpuprestart check", {"ExecStartPreEx": ["/usr/bin/gpuprestart check"]}, [("hook", "fault", 2)]),
        (
            "ExecStart=sh -c 'gpuprestart clean && x'",
            {"ExecStartPreEx": [], "ExecStartEx": ["/bin/sh gpuprestart clean"]},
            [("hook", "fault", 2)],
        ),
        (
            "ExecCondition=gpuprestart clean",
            {"ExecStartPreEx": [], "ExecConditionEx": ["/usr/bin/gpuprestart clean"]},
            [("condition", "fault", 2)],
        ),
        ("ExecCondition=/bin/test 1", {"ExecConditionEx": ["/bin/test 1"]}, [("condition", "remark", 2)]),
        (
            f"ExecStartPre=/opt/warm-up\nExecStartPre=/bin/mkdir x\n{PRE}ExecStartPre=/opt/later",
            {"ExecStartPreEx": ["/opt/warm-up", "/bin/mkdir x", CLEAN, "/opt/later"]},
            [("order", "remark", 2)],
        ),
        ("RootDirectory=/srv", {"RootDirectory": "/srv"}, [("program", "fault", 2)]),
        ("RootDirectory=/srv", {"RootDirectory": "/srv", "RootDirectoryStartOnly": True}, []),
        ("RootDirectory=/", {"RootDirectory": "/"}, []),
        # The plus lifts what is done by mounting, and root sees through it.
        (HIDDEN, HIDING, []),
        (HIDDEN, {**HIDING, "ExecStartPreEx": [f"!{CLEAN[1:]}"]}, []),
        (
            HIDDEN,
            {**HIDING, "ExecStartPreEx": [f"!{CLEAN[1:]}"], "CapabilityBoundingSet": 1 << 5 | 1 << 2},
            [("plus", "fault", None), ("sandbox", "fault", 2), ("sandbox", "fault", 3)],
        ),
        (
            HIDDEN,
            {**HIDING, "ExecStartPreEx": [CLEAN[1:]]},
            [("plus", "fault", None), ("sandbox", "fault", 2), ("sandbox", "fault", 3)],
        ),
        *(
            (f"{key}=x", {key: value, "ExecStartPreEx": [f"!{CLEAN[1:]}"]}, [("sandbox", "fault", 2)] if tight else [])
            for key, value, tight in [
                ("PrivateUsers", True, True),
                ("PrivateUsers", False, False),
                ("PrivatePIDs", "yes", True),
                ("PrivatePIDs", "no", False),
                ("ProtectSystem", "strict", True),
                ("ProtectSystem", "full", False),
                ("RestrictAddressFamilies", [True, ["AF_INET"]], True),
                ("RestrictAddressFamilies", [True, ["AF_INET", "AF_UNIX"]], False),
                ("RestrictAddressFamilies", [False, ["AF_UNIX"]], True),
                ("RestrictAddressFamilies", [False, []], False),
            ]
        ),
        ("", {"PrivateUsers": True, "ProtectSystem": "strict", "RestrictAddressFamilies": [True, []]}, []),
        *(
            (
                "ProtectSystem=strict",
                {"ProtectSystem": "strict", "ReadWritePaths": [path], "ExecStartPreEx": [f"!{CLEAN[1:]}"]},
                [] if enough else [("sandbox", "fault", 2)],
            )
            for path, enough in [("-/run/gpuprestart", True), ("/run", True), ("/run/other", False)]
        ),
        # Statuses.
        *(
            (f"SuccessExitStatus={word}", {"SuccessExitStatus": listed}, [("exit-statuses", "fault", 2)])
            for word, listed in [
                *((str(status), [[status], []]) for status in (1, 64, 66, 69, 70, 75, 77, 78)),
                *((word, [[], [number]]) for word, number in (("SIGTERM", 15), ("KILL", 9), ("ABRT", 6))),
            ]
        ),
        ("SuccessExitStatus=143 2 HUP", {"SuccessExitStatus": [[143, 2], [1]]}, []),
        # Environment.
        ("Environment=LD_PRELOAD=x", {"Environment": ["LD_PRELOAD=x"]}, [("environment", "remark", 2)]),
        ("Environment=NVML_X=x", {"Environment": ["A=LD_X", "NVML_X=x"]}, [("environment", "remark", 2)]),
        ("Environment=A=LD_X=1", {"Environment": ["A=LD_X=1"]}, []),
        # Times.
        ("TimeoutSec=60", {"TimeoutStartUSec": 60_000_000}, []),
        ("TimeoutSec=60", {"TimeoutStartUSec": 60_000_000, "NotifyAccess": "all"}, []),
        (
            "TimeoutSec=60\nNotifyAccess=main",
            {"TimeoutStartUSec": 60_000_000, "NotifyAccess": "main"},
            [("timeout", "fault", 2), ("notify-access", "remark", 3)],
        ),
        (
            "",
            {"TimeoutStartUSec": 125_000_000, "NotifyAccess": "none"},
            [("timeout", "fault", None), ("notify-access", "remark", None)],
        ),
        ("", {"TimeoutStartUSec": 126_000_000, "NotifyAccess": "none"}, [("notify-access", "remark", None)]),
        ("", {"TimeoutStartUSec": 2**64 - 1, "NotifyAccess": "none"}, [("notify-access", "remark", None)]),
        # Trying again.
        ("RestartSec=1", {"RestartUSec": 1_000_000}, [("restart", "fault", 2)]),
        ("Restart=always", {"Restart": "always", "RestartUSec": 100_000}, [("restart", "fault", None)]),
        ("", {"RestartUSec": 2_000_000}, []),
        ("", {"RestartUSec": 2_000_000, "StartLimitBurst": 4}, [("restart", "fault", None)]),
        ("", {"RestartUSec": 15_000_000, "StartLimitIntervalUSec": 2**64 - 1}, [("restart", "fault", None)]),
        ("", {"RestartUSec": 100_000, "StartLimitIntervalUSec": 0}, [("restart", "remark", None)]),
        ("", {"RestartUSec": 100_000, "StartLimitBurst": 0}, [("restart", "remark", None)]),
        ("", {"RestartUSec": 15_000_000, "StartLimitIntervalUSec": 0}, []),
        ("", {"RestartUSec": 100_000, "Restart": "no"}, []),
        ("", {"RestartUSec": 100_000, "Restart": "on-abnormal"}, []),
        ("FailureAction=reboot", {"FailureAction": "reboot"}, [("actions", "remark", 2)]),
        # Who runs it, and what kind of unit it is.
        ("DynamicUser=yes", {"DynamicUser": True}, [("user", "remark", 2)]),
        ("Type=oneshot", {"Type": "oneshot"}, [("kind", "remark", 2)]),
        ("", {"TriggeredBy": ["s.socket", "s.timer"]}, [("kind", "remark", None)]),
        ("", {"NeedDaemonReload": True}, [("reload", "remark", None)]),
    ],
)
def test_what_is_wrong_with_a_unit(
    text: str, said: dict[str, Any], expected: list[tuple[str, str, Optional[int]]]
) -> None:
    assert found(of(facts(text, **said))) == expected


@pytest.mark.parametrize(
    ("changes", "said", "expected"),
    [
        ({"usage": "unrecognized arguments: --fast"}, {}, [("arguments", "fault")]),
        ({"named": "s.service"}, {}, [("arguments", "fault")]),
        ({"programs": {"/usr/bin/gpuprestart": "is not there"}}, {}, [("program", "fault")]),
        ({"user_known": False}, {}, [("user", "fault")]),
        (
            {"writable": {"/etc/e": "can be written"}},
            {"EnvironmentFiles": [["/etc/e", False]]},
            [("environment-file", "fault")],
        ),
        (
            {"loaded_code": {"LD_PRELOAD": "/x can be written"}},
            {"Environment": ["LD_PRELOAD=/x"]},
            [("environment", "fault")],
        ),
        (
            {"loaded_code": {"LD_PRELOAD": "/x can be written"}},
            {"Environment": ["LD_PRELOAD=/x"], "ExecStartPreEx": [CLEAN[1:]]},
            [("plus", "fault"), ("environment", "remark")],
        ),
        (
            {"writable": {"/etc/e": "can be written"}},
            {"EnvironmentFiles": [["/etc/e", False]], "ExecStartPreEx": [f"!{CLEAN[1:]}"]},
            [("environment-file", "fault")],
        ),
        ({"can_notify": False}, {"TimeoutStartUSec": 60_000_000}, [("timeout", "fault")]),
        (
            {"policy": Policy(deadline=Deadlines(total=600.0))},
            {"NotifyAccess": "none"},
            [("timeout", "fault"), ("notify-access", "remark")],
        ),
        ({"policy": None}, {"TimeoutStartUSec": 1_000_000}, []),
    ],
)
def test_what_is_wrong_beside_the_unit(
    changes: dict[str, Any], said: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    assert [each[:2] for each in found(of(facts("", changes, **said)))] == expected


def test_where_nobody_has_made_the_folder_yet_it_cannot_be_written() -> None:
    said: dict[str, Any] = {"ProtectSystem": "strict", "ExecStartPreEx": [f"!{CLEAN[1:]}"]}
    for paths, expected in (["/run/gpuprestart"], [("sandbox", "fault", None)]), (["/run"], []):
        assert found(of(facts("", {"folder": False}, ReadWritePaths=paths, **said))) == expected


def test_a_user_s_file_is_no_way_to_root_without_the_plus() -> None:
    said: dict[str, Any] = {"EnvironmentFiles": [["/etc/e", False]], "ExecStartPreEx": ["/usr/bin/gpuprestart clean"]}
    assert found(of(facts("", {"writable": {"/etc/e": "x"}}, **said))) == [("plus", "fault", None)]


def test_the_margin_is_the_hooks_own() -> None:
    assert unitchecks.MARGIN == hook.EXTENSION


def test_every_status_that_refuses_is_one() -> None:
    assert {str(status) for status in EXIT_STATUS.values()} - {"0"} <= set(unitchecks.REFUSALS)


def test_a_drop_in_that_systemd_has_not_read() -> None:
    unread = unitlines.read([("/etc/x.conf", f"[Service]\nExecStartPre={CLEAN}\n")])
    some = of(facts("", {"unread": unread}, ExecStartPreEx=[]))
    assert found(some) == [("reload", "remark", None), ("hook", "fault", 2)]
    assert all("daemon-reload" in each.remedy for each in some[:2])
    assert found(of(facts("", ExecStartPreEx=[], NeedDaemonReload=True))) == [
        ("reload", "remark", None),
        ("hook", "fault", None),
    ]
    assert found(of(facts("", {"unread": unread}))) == [("reload", "remark", None)]


def test_a_unit_whose_work_is_other_people_s() -> None:
    known = facts()
    known = known._replace(service=known.service._replace(name="jupyterhub.service"))
    assert found(of(known)) == [("kind", "remark", None)]


@pytest.mark.parametrize(
    ("state", "active", "said"),
    [
        ("not-found", "inactive", "no unit"),
        ("masked", "inactive", "unmask"),
        ("bad-setting", "inactive", "bad unit file"),
    ],
)
def test_a_unit_that_cannot_start(state: str, active: str, said: str) -> None:
    known = facts(LoadState=state, ActiveState=active, LoadError=["x", "has a bad unit file setting"])
    (check,) = hookchecks.loaded(known.service)
    assert check.level is Level.FAULT and said in f"{check.fact} {check.remedy}"
    assert hookchecks.loaded(facts().service)[0].level is Level.OK


# Devices -------------------------------------------------------------------------------------------------------------

NODES = (
    Node("/dev/nvidiactl", 0xC3FF, ("195", "nvidia-frontend")),
    Node("/dev/nvidia0", 0xC300, ("195", "nvidia-frontend")),
)


@pytest.mark.parametrize(
    ("allowed", "policy", "shut"),
    [
        ([], "auto", []),
        ([], "closed", ["/dev/nvidiactl", "/dev/nvidia0"]),
        ([], "strict", ["/dev/nvidiactl", "/dev/nvidia0"]),
        ([["/dev/nvidia0", "rw"]], "auto", ["/dev/nvidiactl"]),
        ([["/dev/nvidia0", "rw"], ["/dev/nvidiactl", "r"]], "closed", ["/dev/nvidiactl"]),
        ([["/dev/nvidia0", "rwm"], ["/dev/nvidiactl", "rw"]], "closed", []),
        ([["/dev/char/195:0", "rw"], ["/dev/nvidiactl", "rw"]], "closed", []),
        ([["char-nvidia*", "rw"]], "closed", []),
        ([["char-nvidia-frontend", "rwm"]], "auto", []),
        ([["char-195", "rw"]], "closed", []),
        ([["char-*", "rw"]], "closed", []),
        ([["char-rtc", "r"], ["block-*", "rw"]], "auto", ["/dev/nvidiactl", "/dev/nvidia0"]),
    ],
)
def test_which_nodes_a_unit_may_not_open(allowed: list[list[str]], policy: str, shut: list[str]) -> None:
    numbers = {"/dev/nvidia0": 0xC300, "/dev/nvidiactl": 0xC3FF, "/dev/char/195:0": 0xC300}
    changes = {"nodes": NODES, "numbers": numbers}
    (check,) = unitchecks.devices(facts("DevicePolicy=x\n", changes, DeviceAllow=allowed, DevicePolicy=policy))
    assert (check.level is Level.FAULT) == bool(shut)
    assert all(path in check.fact for path in shut)


def test_private_devices_hide_the_gpus_whatever_is_allowed() -> None:
    changes = {"nodes": NODES}
    said: dict[str, Any] = {"PrivateDevices": True, "DevicePolicy": "closed", "DeviceAllow": [["char-*", "rw"]]}
    (check,) = unitchecks.devices(facts("PrivateDevices=yes\n", changes, **said))
    assert (check.level.value, check.line) == ("fault", 2)


# Containers ----------------------------------------------------------------------------------------------------------

RUN = "/usr/bin/docker run --rm --name llm image"


@pytest.mark.parametrize(
    ("before", "run", "after", "line"),
    [
        (["-/usr/bin/docker rm -f llm", CLEAN], RUN, [], 0),
        ([CLEAN], RUN, ["-/usr/bin/docker rm -f llm"], 0),
        ([CLEAN], "/usr/bin/podman run --cgroups=split --name llm image", [], 0),
        ([CLEAN], RUN, [], 3),
        ([CLEAN, "-/usr/bin/docker rm -f llm"], RUN, [], 3),
        (["-/usr/bin/docker rm -f other", CLEAN], RUN, [], 4),
        ([CLEAN], "/usr/bin/docker run --rm image", [], 3),
    ],
)
def test_a_container_that_outlives_its_client(before: list[str], run: str, after: list[str], line: int) -> None:
    lines = [*(f"ExecStartPre={each}" for each in before), f"ExecStart={run}"]
    said: dict[str, Any] = {"ExecStartPreEx": before, "ExecStartEx": [run], "ExecStopPostEx": after}
    expected = [("container", "fault", line)] if line else []
    assert found(unitchecks.container(facts("\n".join(lines), **said))) == expected


@pytest.mark.parametrize(
    ("options", "access", "kind", "hangs"),
    [
        ("", "exec", "simple", True),
        ("--sdnotify=container", "all", "exec", True),
        ("--sdnotify=ignore", "exec", "simple", False),
        ("--sdnotify conmon", "all", "simple", False),
        ("", "none", "simple", False),
        ("", "main", "simple", False),
        ("", "all", "notify", False),
    ],
)
def test_a_container_that_waits_for_a_word_of_its_own(options: str, access: str, kind: str, hangs: bool) -> None:
    known = facts(NotifyAccess=access, Type=kind, ExecStartEx=[f"/usr/bin/podman run {options} --name llm image"])
    assert found(unitchecks.podman(known)) == ([("podman", "fault", None)] if hangs else [])


# The GPUs ------------------------------------------------------------------------------------------------------------


def test_a_selection_that_does_not_resolve() -> None:
    refusal = Refusal(Outcome.CONFIG, "CUDA_VISIBLE_DEVICES: GPU 9 is not there", ["use another", "GPUs here: …"])
    (check,) = unitchecks.selection(
        facts("Environment=A=1\nEnvironment=CUDA_VISIBLE_DEVICES=9\n"), refusal, unset=False
    )
    assert (check.level.value, check.line, check.remedy) == ("fault", 3, "use another")
    assert "refused as config" in check.consequence


def test_a_selection_of_nothing() -> None:
    assert found(unitchecks.selection(facts(), Selection((), "x"), unset=False)) == [("selection", "remark", None)]


@pytest.mark.parametrize(
    ("start", "unset", "level"),
    [
        ("/usr/bin/docker run --gpus device=3 image", True, "remark"),
        ("/usr/bin/docker run --gpus=all image", True, "ok"),
        ("/usr/bin/docker run --gpus all image", True, "ok"),
        ("/usr/bin/podman run --device nvidia.com/gpu=0 image", True, "remark"),
        ("/usr/bin/podman run --device=nvidia.com/gpu=all image", True, "ok"),
        ("/usr/bin/env CUDA_VISIBLE_DEVICES=0 /usr/bin/server", True, "remark"),
        ("/usr/bin/env CUDA_VISIBLE_DEVICES=0 /usr/bin/server", False, "ok"),
        ("/usr/bin/server", True, "ok"),
    ],
)
def test_gpus_that_only_the_server_s_own_line_names(start: str, unset: bool, level: str) -> None:
    chosen = Selection(machines.inventory(2).gpus, "all GPUs")
    (check,) = unitchecks.selection(facts(ExecStartEx=[start]), chosen, unset=unset)
    assert check.level.value == level


def test_another_service_on_the_same_gpus() -> None:
    gpus = machines.inventory(3).gpus
    (one, other) = unitchecks.shared("s.service", {"a.service": (gpus[:2], True), "b.service": (gpus[2:], False)})
    assert one.fact == "a.service selects GPU 0-1 as well" and "second" in one.consequence
    assert other.fact == "b.service selects GPU 2 as well" and "without a look" in other.consequence
    assert unitchecks.shared("s.service", {})[0].level is Level.OK


def test_without_the_hook_only_what_enable_does_not_mend_is_told() -> None:
    said: dict[str, Any] = {
        "ExecStartPreEx": [],
        "NotifyAccess": "none",
        "RestartUSec": 100_000,
        "TimeoutStartUSec": 1_000_000,
        "ExecStartEx": [RUN],
        "SuccessExitStatus": [[75], []],
    }
    assert [each[0] for each in found(of(facts("", **said)))] == ["hook", "exit-statuses"]


def test_every_finding_says_what_comes_of_it_and_what_to_do() -> None:
    bad = facts(
        "",
        {"usage": "x", "programs": {"/usr/bin/gpuprestart": "is not there"}, "user_known": False, "nodes": NODES},
        ExecStartPreEx=["/opt/x", "-/usr/bin/gpuprestart clean"],
        ExecConditionEx=["/bin/x"],
        SuccessExitStatus=[[75], []],
        DevicePolicy="closed",
        NotifyAccess="none",
        TimeoutStartUSec=1_000_000,
        RestartUSec=100_000,
        ExecStartEx=["/usr/bin/podman run image"],
    )
    some = [each for each in of(bad) if each.level is not Level.OK]
    assert len(some) > 10
    for each in some:
        assert each.fact and each.consequence and each.remedy, each
        assert not each.consequence[0].isupper() and not each.consequence.endswith("."), each
