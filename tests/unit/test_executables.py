"""Whether somebody may execute a program: asked of the kernel, of scripts down to their interpreters."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuprestart.host import executables

#: Nobody is called this, and no file of a test is theirs.
OTHER = "nobody"
FOLDERS = ["/usr/bin", "/bin"]

root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can ask for others")


def ask(path: object, user: str = "", group: str = "", supplementary: Sequence[str] = ()) -> Any:
    before = (os.getresuid(), os.getresgid(), os.getgroups())
    answer = executables.slow(("file:executable", (str(path), user, group, list(supplementary), FOLDERS)))
    assert (os.getresuid(), os.getresgid(), os.getgroups()) == before
    return answer


def script(path: Path, text: str = "#!/bin/sh\n", mode: int = 0o755) -> Path:
    path.write_bytes(text.encode())
    path.chmod(mode)
    return path


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that everybody may come to; pytest's own are for us alone."""
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o755)
        yield Path(made)


def test_programs_that_can_be_run(folder: Path) -> None:
    assert ask("/bin/true") == ask(script(folder / "run.sh")) == ()
    (folder / "link").symlink_to("run.sh")
    assert ask(folder / "link") == ()


def test_what_is_no_program(folder: Path) -> None:
    assert ask(folder / "gone") == ("missing", f"{folder}/gone")
    (folder / "link").symlink_to("nowhere")
    assert ask(folder / "link") == ("dangling", f"{folder}/link", "nowhere")
    assert ask(folder) == ("folder", str(folder))
    os.mkfifo(folder / "pipe", 0o755)
    assert ask(folder / "pipe") == ("irregular", f"{folder}/pipe")
    assert ask(script(folder / "empty", "")) == ("empty", f"{folder}/empty")
    assert ask(f"{folder}/empty/x") == ("unreadable", f"{folder}/empty/x", os.strerror(errno.ENOTDIR))


@pytest.mark.parametrize("user", ["", pytest.param("root", marks=root), pytest.param(OTHER, marks=root)])
def test_without_an_x_not_even_root_can_execute_it(folder: Path, user: str) -> None:
    assert ask(script(folder / "run.sh", mode=0o644), user) == ("rights", f"{folder}/run.sh", "0644")


@root
@pytest.mark.parametrize("mode", [0o700, 0o744, 0o740])
def test_what_only_its_owner_can_execute(folder: Path, mode: int) -> None:
    path = script(folder / "run.sh", mode=mode)
    assert ask(path) == ()
    assert ask(path, OTHER) == ("rights", str(path), f"{mode:04o}")
    os.chown(path, 65534, -1)
    assert ask(path, OTHER) == ()


@root
def test_groups_count(folder: Path) -> None:
    path = script(folder / "run.sh", mode=0o750)
    os.chown(path, 0, 4242)
    assert ask(path, OTHER) == ("rights", str(path), "0750")
    assert ask(path, OTHER, "4242") == ask(path, OTHER, "", ["4242"]) == ()
    os.chown(path, 0, 0)
    assert ask(path, OTHER, "4242", ["4243"]) == ("rights", str(path), "0750")


@root
def test_the_folders_on_the_way_count(folder: Path) -> None:
    (folder / "private" / "below").mkdir(parents=True)
    path = script(folder / "private" / "below" / "run.sh")
    assert ask(path, OTHER) == ()
    (folder / "private").chmod(0o700)
    assert ask(path, OTHER) == ("closed", str(path), f"{folder}/private")
    assert ask(path) == ()


@root
def test_access_lists_count(folder: Path) -> None:
    path = script(folder / "run.sh", mode=0o700)
    # Owner, one user, group, mask and others, in the kernel's own form (posix_acl_xattr.h).
    rows = [(1, 7, -1), (2, 5, 65534), (4, 0, -1), (16, 5, -1), (32, 0, -1)]
    packed = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *row) for row in rows)
    try:
        os.setxattr(path, "system.posix_acl_access", packed)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        pytest.skip("this file system has no access lists")
    assert ask(path, OTHER) == ()
    assert ask(path, "4242" if _known(4242) else "daemon")[0] == "rights"


def _known(uid: int) -> bool:
    return f":{uid}:" in Path("/etc/passwd").read_text()


def test_accounts_that_are_not_known() -> None:
    """As for systemd, a number will do only if somebody has it; a group's number need not be known."""
    assert ask("/bin/true", "no-such-user") == ("unknown", "/bin/true", "User=", "no-such-user")
    assert ask("/bin/true", "4294900000") == ("unknown", "/bin/true", "User=", "4294900000")
    assert ask("/bin/true", "root", "no-such-group") == ("unknown", "/bin/true", "Group=", "no-such-group")
    assert ask("/bin/true", "root", "", ["no-such-group"]) == ("unknown", "/bin/true", "Group=", "no-such-group")


def test_who_is_not_root_cannot_tell_for_others() -> None:
    code = """
import os
from gpuprestart.host import executables
os.geteuid() or os.setresuid(65534, 65534, 65534)
print(executables.slow(("file:executable", ("/bin/true", "daemon", "", [], []))))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout == "Operation not permitted\n"


# Interpreters --------------------------------------------------------------------------------------------------------


def test_an_interpreter_that_is_not_there(folder: Path) -> None:
    assert ask(script(folder / "run.sh", f"#!{folder}/venv/bin/python -u\n")) == (
        "missing",
        f"{folder}/venv/bin/python",
    )
    # Whoever edited it on another system.
    assert ask(script(folder / "run.sh", "#!/bin/sh\r\necho\r\n")) == ("missing", "/bin/sh\r")
    assert ask(script(folder / "run.sh", "#! \t/bin/sh\t-e \n")) == ()
    assert ask(script(folder / "run.sh", "#!/bin/sh")) == ()
    assert ask(script(folder / "run.sh", "#!  \n/bin/sh\n")) == ("nameless", f"{folder}/run.sh")


@root
def test_an_interpreter_that_the_user_cannot_execute(folder: Path) -> None:
    inner = script(folder / "python", mode=0o700)
    outer = script(folder / "run.sh", f"#!{inner}\n")
    assert ask(outer) == ()
    assert ask(outer, OTHER) == ("rights", str(inner), "0700")


def test_interpreters_without_end(folder: Path) -> None:
    path = folder / "run.sh"
    assert ask(script(path, f"#!{path}\n")) == ("nested", str(path))
    chain = [folder / str(number) for number in range(4)]
    for one, other in zip(chain, [*chain[1:], Path("/bin/sh")]):
        script(one, f"#!{other}\n")
    assert ask(chain[0]) == ()


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("sh", ()),
        ("-S sh -e", ()),
        ("-Ssh -e", ()),
        ("-S A=b sh", ()),
        ("--split-string=sh -e", ()),
        ("/bin/sh", ()),
        ("-u A sh", ()),
        ("", ()),
        ("no-such-program", "no-such-program"),
        # Without -S this is one word, and its name.
        ("sh -e", "sh -e"),
        ("-S A=b no-such-program -u", "no-such-program"),
        ("sh\r", "sh\r"),
    ],
)
def test_what_env_looks_for(folder: Path, line: str, fault: Any) -> None:
    path = script(folder / "run.sh", f"#!/usr/bin/env {line}\n")
    assert ask(path) == (("unfound", str(path), fault) if fault else ())


def test_what_env_looks_for_by_path(folder: Path) -> None:
    path = script(folder / "run.sh", f"#!/usr/bin/env {folder}/python\n")
    assert ask(path) == ("missing", f"{folder}/python")


def test_env_takes_the_first_that_it_may_execute(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    monkeypatch.setitem(globals(), "FOLDERS", [f"{folder}/a", f"{folder}/b"])
    path = script(folder / "run.sh", "#!/usr/bin/env python9\n")
    assert ask(path) == ("unfound", str(path), "python9")
    script(folder / "a" / "python9", mode=0o644)
    assert ask(path) == ("rights", f"{folder}/a/python9", "0644")
    script(folder / "b" / "python9")
    assert ask(path) == ()
