"""Whose start it is, which policy holds for it, and in which environment its server will run."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Optional

import pytest

from gpuprestart import commandline, owners, settings
from gpuprestart.host.systemd import Systemd, SystemdError
from gpuprestart.model import Outcome, Refusal, Unit

from .machines import unit
from .processes import wait

CGROUP = "/system.slice/sglang.service"
LINEAGE = (300, 200, 1)


class Books(Systemd):
    """systemd that answers from a list of units, or not at all."""

    def __init__(self, *units: Unit, says: Optional[Mapping[str, str]] = None, silent: str = "") -> None:
        super().__init__(wait, systemctl="/nowhere/systemctl")
        self.known = {each.name: each for each in units}
        self.says = says or {}
        self.silent = silent

    def units(self, names: Sequence[str]) -> dict[str, Unit]:
        self._speak()
        gone = {name: unit(name, "inactive", load_state="not-found", control_group="") for name in names}
        return {name: self.known.get(name, gone[name]) for name in names}

    def properties(self, name: str, wanted: Sequence[str]) -> dict[str, str]:
        self._speak()
        return dict(self.says)

    def _speak(self) -> None:
        if self.silent:
            raise SystemdError(self.silent)


# The unit, without asking --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("executed", "cgroup", "unit_name"),
    [
        ("ours", CGROUP, "sglang.service"),
        ("ours", CGROUP + "/.control", "sglang.service"),
        ("ours", "/system.slice/system-sglang.slice/sglang@qwen.service", "sglang@qwen.service"),
        # Of an ancestor, which may be a shell in the unit's line or a daemon; of nobody, and no number at all.
        ("parent", CGROUP, None),
        ("1", CGROUP, None),
        ("", CGROUP, None),
        ("30 0", CGROUP, None),
        ("-1", CGROUP, None),
        # Where it is no service's cgroup, or not certainly one's.
        ("ours", "/user.slice/user-0.slice/session-7.scope", None),
        ("ours", "/", None),
        ("ours", "/system.slice", None),
        ("ours", "/user.slice/user-1000.slice/user@1000.service/app.slice/sglang.service", None),
        ("ours", "/system.slice/outer.service/inner.service", None),
        # A cron job has the variable from the daemon that started it.
        ("ours", "/system.slice/cron.service", None),
    ],
)
@pytest.mark.case("A21")
def test_the_unit_that_is_certain(executed: str, cgroup: str, unit_name: Optional[str]) -> None:
    pid = {"ours": str(os.getpid()), "parent": str(os.getppid())}.get(executed, executed)
    assert settings.certain_unit({"SYSTEMD_EXEC_PID": pid}, cgroup) == unit_name


def test_without_the_variable_nothing_is_certain() -> None:
    assert settings.certain_unit({}, CGROUP) is None


# The unit, by systemd's word -----------------------------------------------------------------------------------------


def starting(sub: str = "start-pre", control_pid: int = 200, name: str = "sglang.service") -> Unit:
    return unit(name, "activating", sub, control_pid=control_pid, condition_usec=5)


@pytest.mark.parametrize("sub", ["condition", "start-pre", "stop-post"])
@pytest.mark.parametrize("control_pid", [300, 200])
def test_the_unit_whose_control_process_we_are(sub: str, control_pid: int) -> None:
    ours = starting(sub, control_pid)
    found = settings.own_unit(Books(ours), CGROUP + "/.control", LINEAGE)
    assert found is not None and found.unit == ours
    assert found.ticks_per_second == os.sysconf("SC_CLK_TCK")
    ahead = time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)
    assert abs(found.boottime_ahead / 1_000_000 - ahead) < 0.1


@pytest.mark.parametrize(
    "ours",
    [
        starting("running"),
        starting("reload"),
        starting("start"),
        starting("start-post"),
        starting("stop"),
        # A control process, but not ours.
        starting(control_pid=400),
        starting(control_pid=0),
        starting()._replace(control_group="/system.slice/other.service"),
        starting()._replace(load_state="not-found", control_group=""),
    ],
)
@pytest.mark.case("A21")
def test_otherwise_there_is_no_unit(ours: Unit) -> None:
    assert settings.own_unit(Books(ours), CGROUP, LINEAGE) is None


@pytest.mark.parametrize("sub", ["stop-sigterm", "stop-sigkill", "final-sigterm", "final-sigkill", "stop-watchdog"])
def test_a_start_that_is_no_longer_wanted_judges_nothing(sub: str) -> None:
    with pytest.raises(Refusal) as caught:
        settings.own_unit(Books(starting(sub)), CGROUP, LINEAGE)
    assert caught.value.outcome is Outcome.INTERRUPTED
    assert "sglang.service" in caught.value.message and "was told to stop" in caught.value.message
    # Whoever else is in that cgroup is not what was told to stop.
    assert settings.own_unit(Books(starting(sub, control_pid=400)), CGROUP, LINEAGE) is None


@pytest.mark.parametrize("state", ["inactive", "failed"])
def test_what_is_left_of_a_unit_that_has_ended_judges_nothing(state: str) -> None:
    """Its shell has obeyed, and the hook in the shell's pipeline goes on without a unit that wants to know."""
    with pytest.raises(Refusal) as caught:
        settings.own_unit(Books(unit("sglang.service", state, state)), CGROUP, LINEAGE)
    assert caught.value.outcome is Outcome.INTERRUPTED
    assert "sglang.service" in caught.value.message and "has ended" in caught.value.message


@pytest.mark.parametrize(
    ("cgroup", "known"),
    [
        ("/", ()),
        ("/user.slice/user-0.slice/session-7.scope", (starting(name="session-7.scope"),)),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/sglang.service", (starting(),)),
    ],
)
@pytest.mark.case("A21")
def test_a_shell_and_a_user_s_unit_are_no_unit(cgroup: str, known: tuple[Unit, ...]) -> None:
    known = tuple(each._replace(control_group=cgroup) if each.name.endswith(".scope") else each for each in known)
    assert settings.own_unit(Books(*known), cgroup, LINEAGE) is None


def test_a_carrier_may_be_our_own_unit_and_is_judged_as_such() -> None:
    """The judge refuses what was left in it; to find no unit would let the run go on without an overlay."""
    ours = starting(name="cron.service")
    found = settings.own_unit(Books(ours), "/system.slice/cron.service", LINEAGE)
    assert found is not None and found.unit == ours


def test_whose_start_it_is_is_not_guessed() -> None:
    with pytest.raises(Refusal) as caught:
        settings.own_unit(Books(silent="systemd did not answer within 10 s"), CGROUP, LINEAGE)
    assert caught.value.outcome is Outcome.UNKNOWN
    assert caught.value.message == "cannot tell whose start this is: systemd did not answer within 10 s"


@pytest.mark.parametrize(
    ("name", "full"), [("x", "x.service"), ("x@y", "x@y.service"), ("x.service", "x.service"), ("x.scope", "x.scope")]
)
def test_a_bare_name_is_a_service_s(name: str, full: str) -> None:
    assert owners.full_name(name) == full


# The environment of a unit that was named ----------------------------------------------------------------------------


def environment(**says: str) -> dict[str, str]:
    return settings.environment_of(Books(says={"LoadState": "loaded", **says}), "sglang.service")


@pytest.mark.parametrize(
    ("printed", "found"),
    [
        ("", {}),
        ("CUDA_VISIBLE_DEVICES=0,1 HF_TOKEN=secret", {"CUDA_VISIBLE_DEVICES": "0,1"}),
        ("CUDA_VISIBLE_DEVICES=", {"CUDA_VISIBLE_DEVICES": ""}),
        ("CUDA_VISIBLE_DEVICES=0 CUDA_VISIBLE_DEVICES=1", {"CUDA_VISIBLE_DEVICES": "1"}),
        ("NVIDIA_VISIBLE_DEVICES=all CUDA_DEVICE_ORDER=PCI_BUS_ID",
         {"NVIDIA_VISIBLE_DEVICES": "all", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        ("A=CUDA_VISIBLE_DEVICES=1 CUDA_VISIBLE_DEVICES", {}),
        # As systemd 252 prints values with spaces and quotation marks.
        (r'''"CUDA_VISIBLE_DEVICES=0, 1" "MOTD=it's" PLAIN=1 "T=a\"b"''', {"CUDA_VISIBLE_DEVICES": "0, 1"}),
    ],
)  # fmt: skip
def test_what_environment_says(printed: str, found: dict[str, str]) -> None:
    assert environment(Environment=printed) == found


def files(*paths: tuple[Path, str]) -> str:
    return "\n".join(f"{path} (ignore_errors={ignore})" for path, ignore in paths)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("CUDA_VISIBLE_DEVICES=2,3\n", "2,3"),
        ("CUDA_VISIBLE_DEVICES=2,3", "2,3"),
        ('CUDA_VISIBLE_DEVICES="2,3"\n', "2,3"),
        ("CUDA_VISIBLE_DEVICES='2, 3'\n", "2, 3"),
        ("  CUDA_VISIBLE_DEVICES = 2 \n", "2"),
        ("CUDA_VISIBLE_DEVICES=\n", ""),
        ("CUDA_VISIBLE_DEVICES=1\nCUDA_VISIBLE_DEVICES=2\n", "2"),
        ("# CUDA_VISIBLE_DEVICES=1\n; CUDA_VISIBLE_DEVICES=1\n\nOTHER='x y' z \\\n", "0"),
        ("XCUDA_VISIBLE_DEVICES=1\nCUDA_VISIBLE_DEVICES_X=1\n", "0"),
        # What stands on a line that was continued belongs to the one before.
        ("ARGS=--model x \\\nCUDA_VISIBLE_DEVICES=1\n", "0"),
        ("ARGS='\nCUDA_VISIBLE_DEVICES=1\n'\n", "0"),
        ("CUDA_VISIBLE_DEVICES=2, 3\n", "2, 3"),
        ("CUDA_VISIBLE_DEVICES=2,\\\n3\n", "2,3"),
        ("CUDA_VISIBLE_DEVICES='2", "2"),
    ],
)
@pytest.mark.case("D13")
def test_a_file_comes_after_the_settings_of_the_unit(text: str, value: str, tmp_path: Path) -> None:
    file = tmp_path / "env"
    file.write_text(text)
    said = environment(Environment="CUDA_VISIBLE_DEVICES=0", EnvironmentFiles=files((file, "no")))
    assert said == {"CUDA_VISIBLE_DEVICES": value}


def test_several_files_and_patterns_in_their_order(tmp_path: Path) -> None:
    for name, value in (("10.conf", "1"), ("20.conf", "2"), ("last file", "3")):
        (tmp_path / name).write_text(f"CUDA_VISIBLE_DEVICES={value}\n")
    pattern, last, none = tmp_path / "*.conf", tmp_path / "last file", tmp_path / "none"
    assert environment(EnvironmentFiles=files((pattern, "no"))) == {"CUDA_VISIBLE_DEVICES": "2"}
    assert environment(EnvironmentFiles=files((pattern, "no"), (last, "yes"), (none, "yes"))) == {
        "CUDA_VISIBLE_DEVICES": "3"
    }


def test_a_file_that_is_missing_is_a_fault_unless_the_unit_says_that_it_may_be(tmp_path: Path) -> None:
    assert environment(EnvironmentFiles=files((tmp_path / "none", "yes"))) == {}
    with pytest.raises(Refusal) as caught:
        environment(EnvironmentFiles=files((tmp_path / "none", "no")))
    assert caught.value.message == f"EnvironmentFile={tmp_path}/none of sglang.service: No such file or directory"
    assert "systemctl edit sglang.service" in caught.value.hints[0]


@pytest.mark.parametrize("state", ["not-found", "masked", "bad-setting", None])
def test_a_unit_that_is_not_there_is_a_fault(state: Optional[str]) -> None:
    says = {} if state is None else {"LoadState": state}
    with pytest.raises(Refusal) as caught:
        settings.environment_of(Books(says=says), "sglang.service")
    assert caught.value.outcome is Outcome.CONFIG
    assert f"no unit sglang.service to start ({state or 'not-found'})" in caught.value.message


def test_a_unit_that_systemd_is_silent_about_is_unknown() -> None:
    with pytest.raises(Refusal) as caught:
        settings.environment_of(Books(silent="no answer"), "sglang.service")
    assert caught.value.outcome is Outcome.UNKNOWN
    assert caught.value.hints


# The policy ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, ...]:
    """Three folders in place of those of the contract, trusted whoever runs the tests."""
    base = tmp_path_factory.mktemp("policies")
    made = tuple(base / name for name in ("etc", "run", "usr"))
    for folder in made:
        folder.mkdir()
    monkeypatch.setattr(settings, "FOLDERS", tuple(str(folder) for folder in made))
    # Below /tmp, where others can write, root would trust nothing.
    monkeypatch.setattr(os, "geteuid", lambda: 990)
    return made


def term(seconds: int) -> str:
    return f'[deadline]\nterm = "{seconds} s"\n'


def test_the_folders_of_the_contract() -> None:
    assert settings.FOLDERS == ("/etc/gpuprestart", "/run/gpuprestart", "/usr/lib/gpuprestart")


def test_no_file_is_the_default(folders: tuple[Path, ...]) -> None:
    loaded = settings.load("sglang.service", file=None, deadline=None)
    assert (loaded.files, loaded.deadline.total) == ((), 120.0)


def test_of_each_name_the_first_folder_that_has_it_wins(folders: tuple[Path, ...]) -> None:
    etc, run, usr = folders
    (usr / "policy.toml").write_text(term(3))
    assert settings.load(None, file=None, deadline=None).deadline.term == 3
    (run / "policy.toml").write_text(term(2))
    assert settings.load(None, file=None, deadline=None).deadline.term == 2
    (etc / "policy.toml").write_text(term(1))
    loaded = settings.load(None, file=None, deadline=None)
    assert (loaded.deadline.term, loaded.files) == (1, (f"{etc}/policy.toml",))


def test_template_and_instance_lie_over_the_site(folders: tuple[Path, ...]) -> None:
    etc, run, usr = folders
    (etc / "policy.toml").write_text(term(1) + 'nvml = "1 s"\nprotected = "1 s"\n')
    (usr / "sglang@.service.toml").write_text(term(2) + 'nvml = "2 s"\n')
    (run / "sglang@qwen.service.toml").write_text(term(3))
    loaded = settings.load("sglang@qwen.service", file=None, deadline=None)
    assert (loaded.deadline.term, loaded.deadline.nvml, loaded.deadline.protected) == (3, 2, 1)
    assert [Path(path).name for path in loaded.files] == [
        "policy.toml", "sglang@.service.toml", "sglang@qwen.service.toml"
    ]  # fmt: skip
    assert settings.load("sglang@other.service", file=None, deadline=None).deadline.term == 2
    assert settings.load(None, file=None, deadline=None).deadline.term == 1


def test_a_file_that_was_named_is_instead_of_the_site_s(folders: tuple[Path, ...], tmp_path: Path) -> None:
    (folders[0] / "policy.toml").write_text(term(1))
    named = tmp_path / "mine.toml"
    named.write_text(term(7))
    loaded = settings.load(None, file=str(named), deadline=None)
    assert (loaded.deadline.term, loaded.files) == (7, (str(named),))
    with pytest.raises(Refusal) as caught:
        settings.load(None, file=str(tmp_path / "none.toml"), deadline=None)
    assert caught.value.outcome is Outcome.CONFIG and "there is no such file" in caught.value.message


@pytest.mark.case("D7")
def test_a_file_that_others_could_have_written_is_a_fault(
    folders: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.getuid() != 0:
        pytest.skip("only root trusts no one else")
    (folders[0] / "policy.toml").write_text(term(1))
    (folders[0] / "policy.toml").chmod(0o666)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(Refusal) as caught:
        settings.load(None, file=None, deadline=None)
    assert caught.value.outcome is Outcome.CONFIG and "chmod go-w" in caught.value.hints[0]


def test_the_command_line_s_deadline_lies_over_all(folders: tuple[Path, ...]) -> None:
    (folders[0] / "policy.toml").write_text('[deadline]\ntotal = "60 s"\nterm = "3 s"\n')
    loaded = settings.load(None, file=None, deadline="2 min")
    assert (loaded.deadline.total, loaded.deadline.term) == (120.0, 3.0)
    assert settings.load(None, file=None, deadline=None).deadline.total == 60.0


@pytest.mark.parametrize("deadline", ["", "12", "0", "0 s", "-1 s", "12 parsecs"])
def test_a_deadline_that_is_none_is_a_bad_command_line(deadline: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        commandline.parse(["clean", f"--deadline={deadline}"])
    assert caught.value.code == 64 and "argument --deadline: " in capsys.readouterr().err
