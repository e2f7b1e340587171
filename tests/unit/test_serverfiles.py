"""What is said of a server's files, and when no more is asked of them: real files, read as a run reads them."""

from __future__ import annotations

import ast
import hashlib
import json
import os
from pathlib import Path
from typing import Any, Callable, Optional

import numpy
import pytest
from safetensors.numpy import save_file

from gpuprestart import answers, serverfiles
from gpuprestart.host import checkpoint
from gpuprestart.model import Account, Unmet
from gpuprestart.policy import Require
from gpuprestart.text import printable

NOBODY = Account(user="nobody")


def ask(request: Any, timeout: float) -> Any:
    assert timeout >= serverfiles.LEAST > checkpoint.PIECE
    return answers.answer(request)


def never(request: Any, timeout: float) -> Any:
    """As from a mount whose server is gone."""
    return None


def ticking(seconds: float) -> Callable[[], float]:
    """A clock that goes on by so much whenever it is looked at."""
    now = [0.0]

    def clock() -> float:
        now[0] += seconds
        return now[0]

    return clock


STILL = ticking(0)


def executable(path: object, account: Account = NOBODY, search: str = "") -> Optional[Unmet]:
    found = serverfiles.executables([str(path)], ask, account, search=search, clock=STILL, until=100)
    return found[0] if found else None


def model(folder: Path, *, shards: int = 2) -> Path:
    folder.mkdir(parents=True)
    for number in range(shards):
        save_file({f"q{number}": numpy.zeros(100, numpy.uint8)}, folder / f"{number}.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def whole(folder: Path) -> Optional[Unmet]:
    found = serverfiles.models([str(folder)], ask, clock=STILL, until=100)
    return found[0] if found else None


# Sentences -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["checkpoint", "executables"])
def test_there_is_a_sentence_for_every_fault(module: str) -> None:
    """A word that nobody knows would be a fault of ours, in the middle of a refusal."""
    path = Path(answers.__file__).parent / "host" / f"{module}.py"
    words = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        first = None
        if isinstance(node, ast.Tuple) and node.elts:
            first = node.elts[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "Faulty":
            first = node.args[0]
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            words.add(first.value)
    words -= {"on", "done", "tokenizer.json", "tokenizer.model", "vocab.json", "-S", "User="}
    assert words and words <= set(serverfiles._FAULTS)


def test_what_is_said_of_programs(tmp_path: Path) -> None:
    assert executable("/bin/true") is None
    path = tmp_path / "run.sh"
    unmet = executable(path)
    assert unmet is not None and (unmet.check, unmet.subject, unmet.file) == ("executables", str(path), True)
    assert unmet.message == f"{path} is not there (require.executables)"
    assert unmet.hint == "install it, or correct require.executables"
    path.write_text("#!/no/such/python -u\n")
    path.chmod(0o755)
    unmet = executable(path, Account())
    assert unmet is not None
    assert unmet.message == f"{path} is run by /no/such/python, which is not there (require.executables)"
    path.chmod(0o644)
    unmet = executable(path, Account())
    assert unmet is not None and f"{path} has mode 0644, by which root may not execute it" in unmet.message
    unmet = executable("/bin/true", Account(user="no-such-user"))
    assert unmet is not None and "its unit's User=no-such-user is not known on this machine" in unmet.message
    assert "User=" in unmet.hint


def test_env_looks_where_the_unit_does_too(tmp_path: Path) -> None:
    """A unit may set PATH= in its environment, as for a virtual environment."""
    (tmp_path / "python9").symlink_to("/bin/true")
    path = tmp_path / "run.sh"
    path.write_text("#!/usr/bin/env python9\n")
    path.chmod(0o755)
    unmet = executable(path, Account())
    assert unmet is not None and "has env look for python9, which is in no folder of PATH" in unmet.message
    assert executable(path, Account(), search=f"bin:{tmp_path}:/usr/bin") is None


def test_what_is_said_of_models(tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    assert whole(folder) is None
    length = (folder / "1.safetensors").stat().st_size
    os.truncate(folder / "1.safetensors", length - 40)
    unmet = whole(folder)
    assert unmet is not None and (unmet.check, unmet.subject, unmet.file) == ("models", str(folder), True)
    assert unmet.message == (
        f"the model {folder} is not whole: 1.safetensors has {length - 40} bytes, but by its header it has {length}"
        " (require.models)"
    )
    assert unmet.hint == f"get these files again, in {folder}"
    folder = model(tmp_path / "other")
    (folder / "config.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    unmet = whole(folder)
    assert unmet is not None and "config.json is what Git LFS has" in unmet.message and "git lfs pull" in unmet.hint
    unmet = whole(tmp_path / "gone")
    assert unmet is not None and f"{tmp_path}/gone cannot be read: No such file or directory" in unmet.message


def test_many_faults_are_told_in_one(tmp_path: Path) -> None:
    folder = model(tmp_path / "model", shards=9)
    for number in range(9):
        os.truncate(folder / f"{number}.safetensors", 20)
    unmet = whole(folder)
    assert unmet is not None and unmet.message.count("has 20 bytes") == serverfiles.MOST
    assert "; 4 more (require.models)" in unmet.message


def test_names_that_a_terminal_would_obey(tmp_path: Path) -> None:
    folder = model(tmp_path / "mod\x1b[2Jel{0}")
    (folder / "\x1b]0;x\x07{}.safetensors").write_bytes(b"")
    unmet = whole(folder)
    assert unmet is not None and unmet.message == printable(unmet.message) and unmet.hint == printable(unmet.hint)
    assert "mod\\x1b[2Jel{0} is not whole" in unmet.message and "x\\x07{}.safetensors is empty" in unmet.message


# Time ----------------------------------------------------------------------------------------------------------------


def test_what_gives_no_answer() -> None:
    (one,) = serverfiles.executables(["/run.sh"], never, Account(), search="", clock=STILL, until=100)
    (other,) = serverfiles.models(["/model"], never, clock=STILL, until=100)
    assert one.message == "/run.sh gave no answer for 10 s (require.executables)"
    assert other.message == "/model gave no answer for 10 s (require.models)"
    assert one.hint == other.hint == serverfiles.HUNG and one.file and other.file


def test_a_model_that_takes_longer_than_the_run_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "PIECE", 0.0)
    folder = model(tmp_path / "model", shards=20)
    (unmet,) = serverfiles.models([str(folder)], ask, clock=ticking(1), until=12)
    assert "could not be looked through before the deadline" in unmet.message
    assert unmet.hint == "raise deadline.total"
    assert serverfiles.models([str(folder)], ask, clock=ticking(1), until=1000) == []


# Checksums -----------------------------------------------------------------------------------------------------------


def verified(*folders: Path, **how: Any) -> tuple[list[Unmet], list[str]]:
    said: list[str] = []
    require = Require(models=tuple(map(str, folders)), checksums="SHA256SUMS")
    given = {"ask": ask, "clock": STILL, "until": 100.0, **how}
    return serverfiles.checksums(require, given.pop("ask"), say=said.append, **given), said


def summed(folder: Path) -> Path:
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / "SHA256SUMS").write_text("".join(lines))
    return folder


def test_files_that_are_what_the_list_says(tmp_path: Path) -> None:
    found, said = verified(summed(model(tmp_path / "a")), summed(model(tmp_path / "b")), clock=ticking(0.25))
    assert found == []
    assert said[0] == "Verifying checksums: 0 of 8 files, 0.0 of 0.0 GiB"
    assert said[1:] and all(line.startswith("Verifying checksums: ") for line in said)


def test_files_that_are_not(tmp_path: Path) -> None:
    folder, other = summed(model(tmp_path / "model")), summed(model(tmp_path / "other"))
    with open(folder / "1.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    assert whole(folder) is None
    (folder / "tokenizer.json").unlink()
    (other / "SHA256SUMS").unlink()
    found, _ = verified(folder, other)
    assert [(unmet.check, unmet.subject, unmet.file) for unmet in found] == [
        ("checksums", str(folder), True),
        ("checksums", str(other), True),
    ]
    assert found[0].message == (
        f"the model {folder} is not whole: tokenizer.json is not there; 1.safetensors is not what SHA256SUMS says"
        " (require.checksums)"
    )
    assert "SHA256SUMS is not there" in found[1].message


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    (unmet,), _ = verified(tmp_path / "gone")
    assert "SHA256SUMS is not there" in unmet.message and unmet.file


def test_how_far_it_had_come_when_the_time_was_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the middle of a file."""
    monkeypatch.setattr(checkpoint, "PIECE", 0.0)
    folder = model(tmp_path / "model")
    (folder / "a.gguf").write_bytes(bytes(40 << 20))
    summed(folder)
    found, said = verified(folder, clock=ticking(1), until=40.0)
    # There is a look at the clock for each block: the time is over in the midst of the large file.
    assert verified(folder) == ([], ["Verifying checksums: 0 of 5 files, 0.0 of 0.0 GiB"])
    (late,) = found
    assert (late.check, late.subject, late.file) == ("checksums", "SHA256SUMS", True)
    assert late.message == (
        f"of {folder} only 2 of 5 files, 0.0 of 0.0 GiB could be verified in time"
        " (require.checksums, deadline.checksums)"
    )
    assert "raise deadline.checksums" in late.hint and "TimeoutStartSec=" in late.hint
    assert said[-1].startswith("Verifying checksums: 2 of 5 files")


def test_the_time_may_be_over_between_two_files(tmp_path: Path) -> None:
    folder = summed(model(tmp_path / "model"))
    (late,), _ = verified(folder, clock=ticking(10))
    assert "could be verified in time" in late.message and "4 of 4" not in late.message


def test_a_model_that_gives_no_answer_does_not_hide_another(tmp_path: Path) -> None:
    first, second = summed(model(tmp_path / "first")), summed(model(tmp_path / "second"))
    (second / "config.json").write_text("[]")
    asked = []

    def silent(request: Any, timeout: float) -> Any:
        asked.append(request)
        return None if request == ("file:digest", (str(first), "1.safetensors")) else answers.answer(request)

    found, _ = verified(first, second, ask=silent)
    assert [(unmet.subject, "gave no answer" in unmet.message) for unmet in found] == [
        (str(second), False),
        (f"{first}/1.safetensors", True),
    ]
    assert "gave no answer for 30 s" in found[1].message
    # Of that one no more is asked.
    assert ("file:digest", (str(first), "config.json")) not in asked[
        asked.index(("file:digest", (str(first), "1.safetensors"))) :
    ]


def test_what_a_list_says_is_shown_on_one_line(tmp_path: Path) -> None:
    folder = summed(model(tmp_path / "model"))
    with open(folder / "SHA256SUMS", "a") as file:
        file.write(f"\\{64 * '0'}  ../../\\n\x1b[2J\njunk\n")
    (unmet,), _ = verified(folder)
    assert "SHA256SUMS names ../../\\x0a\\x1b[2J, which is not in its folder; SHA256SUMS:6 is no line" in unmet.message


def test_a_list_is_made_anew_only_of_files_that_are_whole(tmp_path: Path) -> None:
    folder = summed(model(tmp_path / "model"))
    text = (folder / "SHA256SUMS").read_text()
    (folder / "SHA256SUMS").write_text("".join(line for line in text.splitlines(True) if "1.safe" not in line))
    (unmet,), _ = verified(folder)
    assert "1.safetensors is not listed in SHA256SUMS" in unmet.message and "make the list anew" in unmet.hint
    (folder / "config.json").write_text("[]")
    (unmet,), _ = verified(folder)
    assert "config.json is not what SHA256SUMS says" in unmet.message and "get these files again" in unmet.hint


@pytest.mark.parametrize("amount, text", [(0, "0.0"), (1, "0.0"), ((1 << 30) - 1, "0.9"), (10 << 30, "10")])
def test_amounts_are_all_only_when_they_are(amount: int, text: str) -> None:
    assert serverfiles._gib(amount) == text
    assert json.loads(text) <= amount / (1 << 30)
