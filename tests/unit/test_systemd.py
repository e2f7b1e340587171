"""systemctl show, as a script that answers what was recorded, or breaks in every way it can."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Callable

import pytest

from gpuprestart.faults import Interrupted
from gpuprestart.host import cgroupfs
from gpuprestart.host.systemd import PROPERTIES, Systemd, SystemdError
from gpuprestart.model import Unit

from .processes import PATIENCE, wait

#: What systemd 252 printed for a running service, a login session's scope, a slice's child and a unit that is not.
RECORDED = """\
Type=notify
User=ollama
ControlPID=0
MainPID=812
Result=success
TimeoutStopUSec=1min 30s
Id=ollama.service
LoadState=loaded
ActiveState=active
SubState=running
ControlGroup=/system.slice/ollama.service
ConditionTimestampMonotonic=5123456

Result=success
TimeoutStopUSec=1min 30s
Id=session-7.scope
LoadState=loaded
ActiveState=active
SubState=abandoned
ControlGroup=/user.slice/user-1000.slice/session-7.scope
ConditionTimestampMonotonic=7123456

Type=simple
ControlPID=0
MainPID=0
Result=success
TimeoutStopUSec=1min 30s
Id=gone.service
LoadState=not-found
ActiveState=inactive
SubState=dead
ControlGroup=
ConditionTimestampMonotonic=0
"""
NAMES = ("ollama.service", "session-7.scope", "gone.service")

Make = Callable[..., Systemd]


@pytest.fixture
def systemctl(tmp_path: Path) -> Make:
    def make(script: str, timeout: float = PATIENCE) -> Systemd:
        path = tmp_path / "systemctl"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return Systemd(wait, systemctl=str(path), timeout=timeout)

    return make


def printing(tmp_path: Path, text: str) -> str:
    """A script that writes down how it was called, and prints this."""
    (tmp_path / "answer").write_text(text)
    return f'printf "%s\\n" "$@" > {tmp_path}/asked; env > {tmp_path}/env; cat {tmp_path}/answer'


def test_many_units_in_one_call(systemctl: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD_OF_A_UNIT", "x")
    units = systemctl(printing(tmp_path, RECORDED)).units(NAMES)
    assert tuple(units) == NAMES
    assert units["ollama.service"] == Unit(
        name="ollama.service",
        load_state="loaded",
        active_state="active",
        sub_state="running",
        control_group="/system.slice/ollama.service",
        type="notify",
        user="ollama",
        main_pid=812,
        condition_usec=5_123_456,
        timeout_stop="1min 30s",
    )
    session = units["session-7.scope"]
    assert (session.sub_state, session.type, session.control_pid) == ("abandoned", "", 0)
    gone = units["gone.service"]
    assert (gone.load_state, gone.active_state, gone.control_group) == ("not-found", "inactive", "")
    asked = (tmp_path / "asked").read_text().split("\n")
    assert asked == ["show", "--no-pager", f"--property={','.join(PROPERTIES)}", "--", *NAMES, ""]
    assert "LD_PRELOAD_OF_A_UNIT" not in (tmp_path / "env").read_text()


def test_nobody_is_asked_about_nothing(systemctl: Make) -> None:
    assert systemctl("exit 1").units([]) == {}


def test_the_name_that_was_asked_for_is_the_key_also_of_an_alias(systemctl: Make, tmp_path: Path) -> None:
    one = RECORDED.split("\n\n")[0]
    assert systemctl(printing(tmp_path, one)).units(["alias.service"])["alias.service"].name == "ollama.service"


def test_properties_as_they_are_printed(systemctl: Make, tmp_path: Path) -> None:
    text = "LoadState=loaded\nEnvironment=A=1 B=2\nEnvironmentFiles=/etc/a (ignore_errors=no)\n"
    said = systemctl(printing(tmp_path, text)).properties("x.service", ("LoadState", "Environment", "Nothing"))
    assert said == {
        "LoadState": "loaded",
        "Environment": "A=1 B=2",
        "EnvironmentFiles": "/etc/a (ignore_errors=no)",
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (RECORDED.rpartition("\n\n")[0], "answered for 2 units when asked for 3"),
        (RECORDED + "\n" + RECORDED, "answered for 6 units"),
        ("", "answered for 1 units"),
        (RECORDED.replace("Id=gone.service\n", ""), "cannot be read ('Id')"),
        (RECORDED.replace("MainPID=812", "MainPID=many"), "cannot be read"),
        (RECORDED.replace("ActiveState=active\n", "", 1), "cannot be read ('ActiveState')"),
        ("garbage\n\n\\xff\n\n=\n", "cannot be read"),
    ],
)
def test_a_broken_answer_is_none(systemctl: Make, tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(SystemdError) as caught:
        systemctl(printing(tmp_path, text)).units(NAMES)
    assert words in str(caught.value)


def test_bytes_that_are_no_text_do_not_matter(systemctl: Make, tmp_path: Path) -> None:
    odd = r"printf 'Id=\377.service\nLoadState=loaded\nActiveState=active\nSubState=running\n'"
    assert systemctl(odd).units(["x.service"])["x.service"].name == "\udcff.service"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'Failed to connect to bus: Host is down' >&2; exit 1", "failed: Failed to connect to bus"),
        ("exit 4", "failed: 4"),
        ("kill -9 $$", "failed: -9"),
    ],
)
def test_a_failure_is_told_in_systemctl_s_words(systemctl: Make, script: str, words: str) -> None:
    with pytest.raises(SystemdError) as caught:
        systemctl(script).units(NAMES)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["-Hnowhere.service", "--user.service"])
def test_a_name_is_never_an_option(tmp_path: Path, name: str) -> None:
    """busctl would connect to another host by one."""
    asked, path = tmp_path / "asked", tmp_path / "busctl"
    path.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    path.chmod(0o755)
    with pytest.raises(SystemdError):
        Systemd(wait, busctl=str(path)).everything(name)
    words = asked.read_text().split()
    assert words.index("--") < words.index(name)


@pytest.mark.parametrize("listing", ["list_unit_files", "list_units"])
def test_a_backslash_in_a_name_that_is_looked_for_is_a_plain_one(tmp_path: Path, listing: str) -> None:
    path = tmp_path / "systemctl"
    path.write_text('#!/bin/sh\nfor last; do :; done\nprintf "%s loaded\\n" "$last"\n')
    path.chmod(0o755)
    assert getattr(Systemd(wait, systemctl=str(path)), listing)(r"a\x2db@.service") == [r"a\\x2db@.service"]


def test_no_systemctl_at_all(tmp_path: Path) -> None:
    with pytest.raises(SystemdError, match="No such file or directory"):
        Systemd(wait, systemctl=str(tmp_path / "none")).units(NAMES)


@pytest.mark.parametrize(
    "script",
    [
        "exec sleep 60",
        "echo Id=x.service; exec sleep 60",
        "trap '' TERM; exec sleep 60",
        # It has said all that it will, and does not end.
        "exec sleep 8 >&- 2>&-",
    ],
)
@pytest.mark.case("C4")
def test_silence_ends_in_time_and_leaves_no_child(systemctl: Make, script: str) -> None:
    began = time.monotonic()
    with pytest.raises(SystemdError):
        systemctl(script, timeout=0.1).units(NAMES)
    assert time.monotonic() - began < PATIENCE / 2


def test_one_that_did_not_answer_is_not_waited_for_as_long_again(systemctl: Make) -> None:
    silent = systemctl("exec sleep 100", timeout=1.5)
    began = time.monotonic()
    for most in (1.5, 1.0):
        with pytest.raises(SystemdError):
            silent.units(NAMES)
        began, took = time.monotonic(), time.monotonic() - began
        assert most <= took < most + PATIENCE / 4


@pytest.mark.case("D10")
def test_a_huge_answer_and_a_huge_complaint(systemctl: Make, tmp_path: Path) -> None:
    names = [f"unit-{number}.service" for number in range(4000)]
    block = RECORDED.split("\n\n")[0]
    text = "\n\n".join(block.replace("Id=ollama.service", f"Id={name}") for name in names)
    script = printing(tmp_path, text) + "; head -c 1000000 /dev/zero >&2"
    assert [unit.name for unit in systemctl(script).units(names).values()] == names


@pytest.mark.case("D3")
def test_an_interruption_leaves_no_child(tmp_path: Path) -> None:
    def interrupted(descriptors: object, seconds: float) -> set[int]:
        raise Interrupted("SIGTERM")

    path = tmp_path / "systemctl"
    path.write_text("#!/bin/sh\nexec sleep 60\n")
    path.chmod(0o755)
    with pytest.raises(Interrupted):
        Systemd(interrupted, systemctl=str(path)).units(NAMES)


# cgroup.procs --------------------------------------------------------------------------------------------------------


def test_who_is_in_a_cgroup_and_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unified, legacy = tmp_path / "unified", tmp_path / "systemd"
    for root, folder, text in (
        (unified, "x.service", "10\n11\n"),
        (unified, "x.service/.control", "12\n0\n"),
        (unified, "x.service/empty", ""),
        (unified, "y.service", "99\n"),
        (legacy, "x.service", "11\n13\n"),
    ):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / "cgroup.procs").write_text(text)
    monkeypatch.setattr(cgroupfs, "ROOTS", (str(unified), str(legacy), str(tmp_path / "none")))
    assert cgroupfs.pids("/x.service") == {10, 11, 12, 13}
    assert cgroupfs.pids("/none.service") == set()
    # A cgroup that is removed while it is read, or one of threads, which refuses.
    (unified / "x.service" / "cgroup.procs").unlink()
    (unified / "x.service" / "cgroup.procs").mkdir()
    assert cgroupfs.pids("/x.service") == {11, 12, 13}
