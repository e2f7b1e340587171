"""Locks and notes in a folder of our own: who holds one, and what is written down."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuprestart.host.locks import Denied, Locks, Notes

#: How an instance of MIG was named before R470.
OLD = "MIG-GPU-4e5a1b2c-91d4-5690-8712-cd66a9318ffc/1/0"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    tmp_path.chmod(0o755)
    return str(tmp_path / "run")


@pytest.mark.parametrize("name", ["GPU-1", OLD, "sglang@a\\x2db.service"])
def test_a_note_is_read_back_under_its_name(folder: str, name: str) -> None:
    notes = Notes("claims", folder)
    assert notes.read() == {}
    notes.write(name, "unit=a\n")
    notes.write(name, "unit=b\n")
    assert notes.read() == {name: "unit=b\n"}
    assert notes.remove(name) and not notes.remove(name)
    assert notes.read() == {}


def test_kinds_do_not_mix(folder: str) -> None:
    Notes("claims", folder).write("GPU-1", "unit=a\n")
    assert Notes("bypass", folder).read() == {}


def test_a_note_that_is_no_plain_file_is_none_of_ours(folder: str) -> None:
    notes = Notes("claims", folder)
    notes.write("GPU-1", "unit=a\n")
    (Path(folder) / "claims" / "GPU-2").symlink_to("GPU-1")
    with pytest.raises(Denied, match="GPU-2"):
        notes.read()


def test_a_folder_that_others_can_write_is_not_believed(folder: str) -> None:
    notes = Notes("claims", folder)
    notes.write("GPU-1", "unit=a\n")
    (Path(folder) / "claims").chmod(0o777)
    with pytest.raises(Denied, match="mode 0777"):
        notes.read()
    with pytest.raises(Denied, match="mode 0777"):
        notes.write("GPU-2", "unit=a\n")


def test_who_has_a_lock_is_named_to_the_next(folder: str) -> None:
    first, second = Locks(folder), Locks(folder)
    assert first.take([OLD, "GPU-1"], "a.service (PID 7)") is None
    assert second.take(["GPU-1"], "b.service (PID 8)") == "a.service (PID 7)"
    assert second.take([OLD], "b.service (PID 8)") == "a.service (PID 7)"
    first.release()
    assert second.take(["GPU-1", OLD], "b.service (PID 8)") is None
    second.release()
