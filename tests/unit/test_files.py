"""Files that decide what root does: who could have written them, and nothing but regular files of a sane size."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuprestart.host.files import UnsafeFile, as_text, find_first, read_safely

ME = os.geteuid()
needs_root = pytest.mark.skipif(ME != 0, reason="only root can give files away")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that nobody else can write, all the way from /: pytest's own are below /tmp, which is not."""
    for home in (Path.home(), Path("/var/lib"), Path(__file__).parent):
        chain = [home, *home.parents]
        if all(os.access(home, os.W_OK) and p.stat().st_uid in (0, ME) and not p.stat().st_mode & 0o022 for p in chain):
            break
    else:
        pytest.skip("no folder here is out of everybody else's reach")
    made = Path(tempfile.mkdtemp(prefix=".gpuprestart-test-", dir=home))
    yield made
    shutil.rmtree(made)


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


def policy(folder: Path, content: bytes = b"x = 1\n", mode: int = 0o644, name: str = "policy.toml") -> Path:
    path = folder / name
    path.write_bytes(content)
    path.chmod(mode)
    return path


def read(path: object, **more: int) -> object:
    return read_safely(str(path), trusted_owner=ME, **more)


def unsafe(path: object, **more: int) -> str:
    """Why it is refused; the message begins with the path as it was asked for."""
    with pytest.raises(UnsafeFile) as caught:
        read(path, **more)
    assert str(caught.value) == f"{path}: {caught.value.reason}"
    assert caught.value.path == str(path)
    return caught.value.reason


# What is read --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o644, 0o600, 0o444, 0o755])
def test_a_file_that_only_its_owner_can_write(folder: Path, mode: int) -> None:
    assert read(policy(folder, b"x = 1\n", mode)) == b"x = 1\n"


def test_an_empty_file_is_not_an_absent_one(folder: Path) -> None:
    assert read(policy(folder, b"")) == b""
    assert read(folder / "absent") is None
    assert read(folder / "absent" / "policy.toml") is None


def test_paths_as_people_write_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "sub").mkdir()
    policy(folder)
    monkeypatch.chdir(folder)
    for path in (
        "policy.toml",
        "./policy.toml",
        "sub/../policy.toml",
        f"{folder}//sub/.././policy.toml",
        "/../" + str(folder) + "/policy.toml",
    ):
        assert read(path) == b"x = 1\n", path


def test_up_to_the_limit_and_no_further(folder: Path) -> None:
    path = policy(folder, b"x" * 100)
    assert read(path, limit=100) == b"x" * 100
    assert unsafe(path, limit=99) == "is too big (at most 99 bytes)"


@pytest.mark.case("D7")
def test_a_mebibyte_of_brackets_is_too_big(folder: Path) -> None:
    assert unsafe(policy(folder, b"[" * 2**20)) == "is too big (at most 65536 bytes)"


def test_a_file_that_grows_without_end_is_too_big(folder: Path) -> None:
    # Kernel files say a size of 0 and go on: what counts is what is read.
    assert Path("/proc/self/status").stat().st_size == 0
    with pytest.raises(UnsafeFile, match="too big"):
        read_safely("/proc/self/status", limit=10, trusted_owner=None)


# Who could have written it -------------------------------------------------------------------------------------------


@pytest.mark.case("D7")
@pytest.mark.parametrize("mode", [0o666, 0o646, 0o664, 0o622, 0o602])
def test_a_file_that_others_can_write(folder: Path, mode: int) -> None:
    path = policy(folder, mode=mode)
    assert unsafe(path) == f"can be written by others, mode {mode:04o} (chmod go-w {path})"


@pytest.mark.case("D7")
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777, 0o757])
def test_a_folder_that_others_can_write(folder: Path, mode: int) -> None:
    path = policy(folder)
    folder.chmod(mode)
    assert unsafe(path) == f"{folder} can be written by others, mode {mode:04o} (chmod go-w {folder})"


def test_any_folder_on_the_way_counts(folder: Path) -> None:
    deep = folder / "a" / "b"
    deep.mkdir(parents=True)
    path = policy(deep)
    assert read(path) is not None
    (folder / "a").chmod(0o777)
    assert unsafe(path).startswith(f"{folder}/a can be written by others")
    # Whoever can write there could make the file that is not there yet.
    assert unsafe(folder / "a" / "absent").startswith(f"{folder}/a can be written by others")


def test_a_sticky_folder_is_no_home_for_a_policy(tmp_path: Path) -> None:
    sticky = tmp_path / "sticky"
    sticky.mkdir()
    path = policy(sticky)
    sticky.chmod(0o1777)
    assert "can be written by others" in unsafe(path)


@needs_root
def test_somebody_else_s_file_or_folder(folder: Path) -> None:
    path = policy(folder)
    os.chown(path, 12345, 0)
    assert unsafe(path) == "belongs to uid 12345 (must be root)"
    os.chown(path, 0, 0)
    os.chown(folder, 12345, 0)
    assert unsafe(path) == f"{folder} belongs to uid 12345 (must be root)"
    assert read_safely(str(path), trusted_owner=12345) == b"x = 1\n"
    with pytest.raises(UnsafeFile, match=r"belongs to uid 12345 \(must be root or uid 54321\)"):
        read_safely(str(path), trusted_owner=54321)


def test_without_a_trusted_owner_everybody_is_trusted(tmp_path: Path) -> None:
    assert read_safely(str(policy(tmp_path, mode=0o666)), trusted_owner=None) == b"x = 1\n"


# What is not a file --------------------------------------------------------------------------------------------------


@pytest.mark.case("D7")
@pytest.mark.parametrize("kind", ["folder", "fifo", "socket", "device"])
@pytest.mark.parametrize("trusted", [ME, None])
def test_what_is_not_a_file_is_refused_and_not_even_opened(folder: Path, kind: str, trusted: int | None) -> None:
    path = folder / kind
    listener = socket.socket(socket.AF_UNIX)
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path, 0o600)
    elif kind == "socket":
        listener.bind(str(path))
        path.chmod(0o600)
    else:
        # The way in which systemd's own files are masked. It is written by everybody, as devices may be.
        path, trusted = Path("/dev/null"), None
    with pytest.raises(UnsafeFile, match=r": is not a regular file$"):
        read_safely(str(path), trusted_owner=trusted)
    listener.close()


def test_a_file_is_no_folder(folder: Path) -> None:
    path = policy(folder)
    assert unsafe(path / "policy.toml") == f"{path} is not a folder"
    # As the kernel has it: a file has no "..".
    assert unsafe(f"{path}/../policy.toml") == f"{path} is not a folder"


def test_a_file_that_may_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = policy(folder)
    real = os.open

    def refuse(name: str, flags: int, *args: object, **more: object) -> int:
        if name == "policy.toml" and not flags & os.O_PATH:
            raise PermissionError(13, "Permission denied")
        return real(name, flags, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    assert unsafe(path) == "cannot be read: Permission denied"


@pytest.mark.parametrize("kind", ["open", "fifo"])
def test_a_file_exchanged_while_we_look_is_judged_by_what_is_opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = policy(folder)
    other = folder / "other"
    if kind == "open":
        policy(folder, mode=0o666, name="other")
    else:
        os.mkfifo(other, 0o600)
    real = os.open

    def exchange(name: str, flags: int, *args: object, **more: object) -> int:
        if name == "policy.toml" and not flags & os.O_PATH:
            os.replace(other, path)
        return real(name, flags, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", exchange)
    assert unsafe(path).startswith("can be written by others, mode 0666" if kind == "open" else "is not a regular file")


# Links ---------------------------------------------------------------------------------------------------------------


def test_links_are_followed_where_all_on_the_way_is_trusted(folder: Path) -> None:
    (folder / "real").mkdir()
    policy(folder / "real")
    (folder / "absolute.toml").symlink_to(folder / "real" / "policy.toml")
    (folder / "relative.toml").symlink_to("real/policy.toml")
    (folder / "dir").symlink_to("real")
    (folder / "real" / "up.toml").symlink_to("../dir/../relative.toml")
    for name in ("absolute.toml", "relative.toml", "dir/policy.toml", "dir/up.toml", "dir/../relative.toml"):
        assert read(folder / name) == b"x = 1\n", name


def test_a_link_is_as_safe_as_what_it_leads_to(folder: Path) -> None:
    (folder / "real").mkdir()
    target = policy(folder / "real")
    link = folder / "policy.toml"
    link.symlink_to(target)
    target.chmod(0o666)
    assert unsafe(link) == f"{target} can be written by others, mode 0666 (chmod go-w {target})"
    target.chmod(0o644)
    (folder / "real").chmod(0o777)
    assert unsafe(link).startswith(f"{folder}/real can be written by others")


def test_a_link_is_as_safe_as_the_folder_it_lies_in(folder: Path) -> None:
    (folder / "open").mkdir()
    (folder / "open" / "policy.toml").symlink_to(policy(folder))
    (folder / "open").chmod(0o777)
    assert unsafe(folder / "open" / "policy.toml").startswith(f"{folder}/open can be written by others")


@needs_root
def test_somebody_else_s_link(folder: Path) -> None:
    link = folder / "link.toml"
    link.symlink_to(policy(folder))
    os.chown(link, 12345, 0, follow_symlinks=False)
    assert unsafe(link) == "belongs to uid 12345 (must be root)"


def test_a_link_that_leads_nowhere_is_a_fault_and_not_an_absence(folder: Path) -> None:
    (folder / "policy.toml").symlink_to("gone.toml")
    assert unsafe(folder / "policy.toml") == f"leads over a link to {folder}/gone.toml, which is not there"


def test_links_in_a_ring(folder: Path) -> None:
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to("a")
    assert unsafe(folder / "a") == "leads over too many links"


def test_a_link_to_a_device(folder: Path) -> None:
    (folder / "policy.toml").symlink_to("/dev/null")
    with pytest.raises(UnsafeFile, match="is not a regular file"):
        read_safely(str(folder / "policy.toml"), trusted_owner=None)


# Text and search -----------------------------------------------------------------------------------------------------


def test_text(folder: Path) -> None:
    assert as_text("p", "é\n".encode()) == "é\n"


@pytest.mark.case("D7")
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"# one\n# caf\xe9\n", "p:2: byte 0xe9 is not UTF-8 (text in UTF-8)"),
        (b"\xff\xfea\x00", "p:1: byte 0xff is not UTF-8 (text in UTF-8)"),
        (b"\n\n\xed\xb2\x80", "p:3: byte 0xed is not UTF-8 (text in UTF-8)"),
    ],
)
def test_what_is_not_utf_8_is_told_with_its_line(content: bytes, said: str) -> None:
    with pytest.raises(UnsafeFile) as caught:
        as_text("p", content)
    assert str(caught.value) == said


def test_the_first_folder_wins(tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("etc", "run", "usr")]
    assert find_first("policy.toml", folders) is None
    for folder in folders[:0:-1]:
        os.mkdir(folder)
        policy(Path(folder))
        assert find_first("policy.toml", folders) == f"{folder}/policy.toml"
    # Whatever bears the name wins, even if it cannot be used: it must be refused, not passed over.
    os.mkdir(folders[0])
    os.symlink("nowhere", f"{folders[0]}/policy.toml")
    assert find_first("policy.toml", folders) == f"{folders[0]}/policy.toml"
    assert find_first("x" * 300, folders) is None


def test_a_folder_that_cannot_be_searched_may_hide_a_policy(tmp_path: Path) -> None:
    (tmp_path / "etc").write_text("")
    with pytest.raises(UnsafeFile) as caught:
        find_first("policy.toml", [str(tmp_path / "etc"), str(tmp_path)])
    assert str(caught.value) == f"{tmp_path}/etc/policy.toml: cannot be looked for: Not a directory"
