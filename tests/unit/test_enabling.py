"""Drop-ins on a file system: what is written, what is taken away, and what is left as it was. systemd does not answer
here; what it says is asked on the node (tests/node/test_enable.py)."""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path

import pytest

from gpuprestart import dropin, enabling, placement, service
from gpuprestart.commandline import Command, parse
from gpuprestart.dropin import Member, State
from gpuprestart.host import files
from gpuprestart.host.systemd import Systemd, SystemdError
from gpuprestart.model import Outcome, Refusal

from .processes import wait

NAME = dropin.NAME
HOOK = f"[Service]\nExecStartPre={dropin.HOOK}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An administrator's units, in which there is something already."""
    place = tmp_path / "system"
    place.mkdir()
    (place / "sglang.service").write_text("[Service]\nExecStart=/opt/server\n")
    monkeypatch.setattr(placement, "FOLDER", str(place))
    return place


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The units of which the journal would be told."""
    units: list[str] = []
    monkeypatch.setattr(enabling, "_record", units.append)
    return units


def listing(folder: Path) -> dict[str, tuple[int, str]]:
    """All that lies there, with its mode and its content, or where it leads."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_text() if path.is_file() else ""
        found[str(path.relative_to(folder))] = (status.st_mode, content)
    return found


def text_for(unit: str = "sglang.service") -> str:
    member = Member(unit=service.from_properties(unit, {"Type": "simple"}), lines=(), total=120.0)
    return dropin.compose(unit, [member], makes_folder=placement.lacks_folder(unit)).text


def write(*units: str) -> None:
    placement.put({placement.path_of(unit): text_for(unit) for unit in units})


def disable(*units: str, everything: bool = False, dry_run: bool = False) -> str:
    """Take drop-ins away on a machine whose systemd does not answer."""
    systemd = Systemd(wait, systemctl="/nonexistent/systemctl", busctl="/nonexistent/busctl")
    out = io.StringIO()
    command = Command(verb="disable", units=units, everything=everything, dry_run=dry_run)
    enabling.disable(command, systemd, out=out)
    return out.getvalue()


# Writing -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o000])
def test_what_is_written_can_be_read_by_all_and_changed_by_root_alone(folder: Path, mask: int) -> None:
    old = os.umask(mask)
    try:
        files.put(str(folder / "file"), b"content\n")
    finally:
        os.umask(old)
    assert (folder / "file").read_bytes() == b"content\n"
    assert stat.S_IMODE((folder / "file").stat().st_mode) == 0o644


def test_a_file_is_exchanged_in_one_step_and_nothing_is_left_beside_it(folder: Path) -> None:
    with open(folder / "sglang.service") as old:
        files.put(str(folder / "sglang.service"), b"new")
        assert old.read().startswith("[Service]")
    assert [path.name for path in folder.iterdir()] == ["sglang.service"]
    assert (folder / "sglang.service").read_text() == "new"


def test_a_file_that_cannot_be_put_there_leaves_nothing(folder: Path) -> None:
    (folder / "taken").mkdir()
    with pytest.raises(OSError):
        files.put(str(folder / "taken"), b"content")
    assert sorted(listing(folder)) == ["sglang.service", "taken"]


def test_all_are_written_or_none(folder: Path) -> None:
    (folder / "c.service.d").mkdir()
    (folder / "c.service.d" / NAME).mkdir()
    before = listing(folder)
    with pytest.raises(Refusal) as refused:
        write("a.service", "b.service", "c.service")
    assert refused.value.outcome is Outcome.DENIED
    assert listing(folder) == before


@pytest.mark.parametrize("kind", ["link", "file"])
def test_no_drop_in_is_written_into_a_folder_that_is_none(folder: Path, tmp_path: Path, kind: str) -> None:
    place = folder / "sglang.service.d"
    if kind == "link":
        (tmp_path / "elsewhere").mkdir()
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.write_text("")
    with pytest.raises(Refusal, match="a link, or no folder"):
        placement.lacks_folder("sglang.service")


# Finding -------------------------------------------------------------------------------------------------------------


def test_what_is_enabled_is_found_whoever_wrote_it(folder: Path, tmp_path: Path) -> None:
    assert enabling.enabled() == ()
    write("sglang@.service", "sglang-.service")
    (folder / "mine.service.d").mkdir()
    (folder / "mine.service.d" / NAME).write_text(HOOK)
    (folder / "other.service.d").mkdir()
    (folder / "other.service.d" / "10-other.conf").write_text("")
    path = folder / "sglang-.service.d" / NAME
    path.write_text(path.read_text().replace("exec", "all"))
    found = {each.unit: each.state for each in enabling.enabled()}
    assert found == {
        "sglang@.service": State.INTACT,
        "sglang-.service": State.EDITED,
        "mine.service": State.FOREIGN,
    }


@pytest.mark.parametrize("what", ["file", "folder", "directory", "fifo"])
def test_links_are_not_followed_and_what_is_no_file_is_not_read(folder: Path, tmp_path: Path, what: str) -> None:
    write("real.service")
    real = folder / "real.service.d"
    place = folder / "sglang.service.d"
    if what == "folder":
        place.symlink_to(real)
    else:
        place.mkdir()
    if what == "file":
        (place / NAME).symlink_to(real / NAME)
    elif what == "directory":
        (place / NAME).mkdir()
    elif what == "fifo":
        os.mkfifo(place / NAME)
    found = placement.look("sglang.service")
    assert found is not None and found.state is State.FOREIGN
    with pytest.raises(Refusal, match="not written by gpuprestart enable"):
        disable("sglang")
    assert (real / NAME).exists()


# Taking away ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("there", ["no folder", "an empty folder", "a folder with another file"])
def test_the_undoing_is_exact(folder: Path, recorded: list[str], there: str) -> None:
    if there != "no folder":
        (folder / "sglang.service.d").mkdir(mode=0o750)
    if there == "a folder with another file":
        (folder / "sglang.service.d" / "10-mine.conf").write_text("[Service]\nNice=5\n")
    before = listing(folder)
    write("sglang.service")
    assert listing(folder) != before
    said = disable("sglang")
    assert listing(folder) == before
    assert f"{folder}/sglang.service.d/{NAME} is removed" in said and "systemctl daemon-reload" in said
    assert recorded == ["sglang.service"]


def test_what_has_come_to_lie_beside_it_stays(folder: Path, recorded: list[str]) -> None:
    write("sglang.service")
    (folder / "sglang.service.d" / "90-mine.conf").write_text("mine")
    disable("sglang")
    assert [path.name for path in (folder / "sglang.service.d").iterdir()] == ["90-mine.conf"]


def test_nothing_goes_where_one_was_edited(folder: Path, recorded: list[str]) -> None:
    write("a.service", "b.service")
    path = folder / "b.service.d" / NAME
    path.write_text(path.read_text() + "Nice=5\n")
    before = listing(folder)
    with pytest.raises(Refusal) as refused:
        disable("a", "b")
    assert refused.value.outcome is Outcome.CONFIG and str(path) in refused.value.message
    assert listing(folder) == before and recorded == []


@pytest.mark.parametrize("everything", [False, True])
def test_a_dry_run_takes_nothing_away(folder: Path, recorded: list[str], everything: bool) -> None:
    write("a.service")
    before = listing(folder)
    said = disable(*([] if everything else ["a"]), everything=everything, dry_run=True)
    assert listing(folder) == before and recorded == []
    assert "would be" in said and "daemon-reload" not in said


def test_only_a_name_without_a_drop_in_needs_systemd(folder: Path, recorded: list[str]) -> None:
    write("gone.service")
    disable("gone")
    with pytest.raises(SystemdError):
        disable("gone")


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "dbus.socket", "../system/sglang"])
def test_a_name_that_is_none_of_a_service(folder: Path, name: str) -> None:
    """Not even where it would lead to a drop-in."""
    write("sglang.service")
    with pytest.raises(Refusal, match="no name of a service"):
        disable(name)


# All of them ---------------------------------------------------------------------------------------------------------


def test_when_the_program_goes_no_unit_needs_it_and_nothing_edited_is_lost(folder: Path, recorded: list[str]) -> None:
    before = listing(folder)
    write("a.service", "b@.service")
    edited = folder / "b@.service.d" / NAME
    edited.write_text(edited.read_text() + "Nice=5\n")
    text = edited.read_text()
    said = disable(everything=True)
    assert not any(each.state is not State.FOREIGN for each in enabling.enabled())
    aside = folder / "b@.service.d" / f"{NAME}.disabled"
    assert aside.read_text() == text and str(aside) in said
    assert recorded == ["a.service", "b@.service"]
    assert "nothing proves the GPUs clean before a start of a.service, b@.service" in said
    assert "systemctl daemon-reload" in said
    aside.unlink()
    aside.parent.rmdir()
    assert listing(folder) == before


def test_what_was_set_aside_before_is_not_written_over(folder: Path, recorded: list[str]) -> None:
    for number in range(3):
        write("a.service")
        path = folder / "a.service.d" / NAME
        path.write_text(f"{path.read_text()}# {number}\n")
        disable(everything=True)
    kept = sorted((folder / "a.service.d").iterdir())
    assert [path.name for path in kept] == [f"{NAME}.disabled", f"{NAME}.disabled.1", f"{NAME}.disabled.2"]
    assert [path.read_text()[-2] for path in kept] == ["0", "1", "2"]


@pytest.mark.parametrize("text", [HOOK, "[Service]\nNice=5\n"])
def test_what_somebody_else_wrote_stays_and_what_it_means_is_told(folder: Path, recorded: list[str], text: str) -> None:
    (folder / "mine.service.d").mkdir()
    (folder / "mine.service.d" / NAME).write_text(text)
    before = listing(folder)
    said = disable(everything=True)
    assert listing(folder) == before and recorded == []
    assert ("mine.service does not start then (203/EXEC)" in said) is (text == HOOK)


def test_where_there_are_none(folder: Path, recorded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "There is no drop-in" in disable(everything=True)
    monkeypatch.setattr(placement, "FOLDER", str(folder / "nowhere"))
    assert "There is no drop-in" in disable(everything=True)


# The command line ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    ["enable", "enable --all", "enable --now", "disable", "disable --all sglang", "disable --now", "enable -x y"],
)
def test_a_line_that_is_wrong(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(line.split())
    assert ended.value.code == 64


def test_lines_that_are_right() -> None:
    assert parse(["enable", "a", "b@", "--now"]) == Command(verb="enable", units=("a", "b@"), now=True)
    assert parse(["enable", "--dry-run", "a"]) == Command(verb="enable", units=("a",), dry_run=True)
    assert parse(["disable", "a", "--now"]) == Command(verb="disable", units=("a",), now=True)
    assert parse(["disable", "--all"]) == Command(verb="disable", everything=True)
