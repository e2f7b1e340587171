"""The journal, standard error and the notify socket: never a fault, never a hang, never a forged field."""

from __future__ import annotations

import os
import pty
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuprestart.host import notify
from gpuprestart.host.journal import Fields, Journal

ROOT = Path(__file__).parents[2]
ID = "776978dba4fc63904aff245bf64989da"


class Desk:
    """A journald that does not read, a pipe for standard error, and what the library was asked to send."""

    def __init__(self, path: Path) -> None:
        self.path = str(path / "socket")
        self.journald = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.journald.bind(self.path)
        self.read, self.write = os.pipe()
        self.sent: list[tuple[bytes, ...]] = []
        self.journals: list[Journal] = []

    def journal(self, **options: Any) -> Journal:
        defaults = {"sendv": lambda *fields: self.sent.append(fields), "socket_path": self.path, "stderr": self.write}
        self.journals.append(Journal(**{**defaults, **options}))
        return self.journals[-1]

    def stderr(self) -> str:
        os.set_blocking(self.read, False)
        try:
            return os.read(self.read, 65536).decode()
        except BlockingIOError:
            return ""

    def fill(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
            other.setblocking(False)
            try:
                while True:
                    other.sendto(b"x", self.path)
            except BlockingIOError:
                pass

    def close(self) -> None:
        for journal in self.journals:
            journal.close()
        self.journald.close()
        os.close(self.read)
        os.close(self.write)


@pytest.fixture
def desk(shallow: Path) -> Iterator[Desk]:
    desk = Desk(shallow)
    yield desk
    desk.close()


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys; import gpuprestart.host.journal, gpuprestart.host.notify, gpuprestart.events;"
        "print([name for name in ('systemd', 'socket', 'json', 'logging', 'unicodedata') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    assert answer.stdout.strip() == "[]"


def test_a_record_is_one_call_with_every_field_that_has_a_value(desk: Desk) -> None:
    journal = desk.journal()
    assert journal.open() and journal.open()
    fields: Fields = {
        "HOLDER_COMM": "a\nPRIORITY=0",
        "EMPTY": "",
        "GPU_UUID": ("A", "B"),
        "PRIORITY": "0",
        "BYTES": "\udcff",
    }
    assert journal.send("hello", ID, 4, fields)
    assert sorted(desk.sent[0]) == sorted(
        [
            b"HOLDER_COMM=a\nPRIORITY=0",
            b"GPU_UUID=A",
            b"GPU_UUID=B",
            b"BYTES=\\udcff",
            b"MESSAGE=hello",
            b"MESSAGE_ID=" + ID.encode(),
            b"PRIORITY=4",
            b"SYSLOG_IDENTIFIER=gpuprestart",
        ]
    )
    assert len(desk.sent) == 1 and desk.stderr() == ""


@pytest.mark.case("D6")
def test_without_journald_records_are_lines_with_a_priority(desk: Desk) -> None:
    journal = desk.journal(socket_path=desk.path + ".absent")
    assert not journal.open()
    assert not journal.send("hello\nthere", ID, 4, {})
    assert (desk.sent, desk.stderr()) == ([], "<4>hello there\n")


def test_before_open_records_are_lines(desk: Desk) -> None:
    assert not desk.journal().send("hello", ID, 6, {})
    assert (desk.sent, desk.stderr()) == ([], "<6>hello\n")


@pytest.mark.case("D6")
def test_without_the_library_records_are_lines(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "systemd", None)
    journal = desk.journal(sendv=None)
    assert not journal.open()
    assert not journal.send("hello", ID, 3, {})
    assert desk.stderr() == "<3>hello\n"


@pytest.mark.case("D6")
@pytest.mark.parametrize("fault", [FileNotFoundError(), ConnectionRefusedError(), BlockingIOError(), OSError(90, "")])
def test_a_refused_record_is_a_line(desk: Desk, fault: OSError) -> None:
    def refuse(*fields: bytes) -> None:
        raise fault

    journal = desk.journal(sendv=refuse)
    assert journal.open()
    assert not journal.send("hello", ID, 3, {})
    assert desk.stderr() == "<3>hello\n"


@pytest.mark.case("D6")
def test_a_journald_that_does_not_read_is_waited_for_once(desk: Desk) -> None:
    journal = desk.journal(patience=0.2)
    assert journal.open()
    desk.fill()
    began = time.monotonic()
    for _ in range(200):
        assert not journal.send("hello", ID, 3, {})
    assert 0.1 < time.monotonic() - began < 1.0
    assert (desk.sent, desk.stderr()) == ([], "<3>hello\n" * 200)


def test_a_standard_error_that_nobody_reads_does_not_hold_us_up(desk: Desk) -> None:
    os.set_blocking(desk.write, False)
    try:
        while True:
            os.write(desk.write, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(desk.write, True)
    began = time.monotonic()
    desk.journal(patience=0.1).say("verdict", 3)
    assert time.monotonic() - began < 1.0


def test_a_closed_standard_error_is_no_fault(desk: Desk) -> None:
    spare = os.dup(desk.write)
    os.close(spare)
    journal = desk.journal(stderr=spare)
    journal.say("verdict", 3)
    assert not journal.send("hello", ID, 3, {})
    os.close(desk.read)
    desk.journal().say("verdict", 3)
    desk.read = os.open("/dev/null", os.O_RDONLY)


def test_say_tells_journald_the_priority_and_nobody_else(desk: Desk) -> None:
    stat = os.fstat(desk.write)
    desk.journal().say("to a pipe", 3)
    desk.journal(journal_stream=f"{stat.st_dev}:{stat.st_ino}").say("to\njournald", 3)
    desk.journal(journal_stream=f"{stat.st_dev}:{stat.st_ino + 1}").say("to another", 3)
    assert desk.stderr() == "to a pipe\n<3>to journald\nto another\n"


def test_a_terminal_sees_no_priorities(desk: Desk) -> None:
    ours, terminal = pty.openpty()
    try:
        journal = desk.journal(stderr=terminal)
        journal.send("record", ID, 3, {})
        journal.say("line", 3)
        shown = b""
        while shown.count(b"\n") < 2:
            shown += os.read(ours, 100)
        assert shown == b"record\r\nline\r\n"
    finally:
        os.close(ours)
        os.close(terminal)


def test_what_a_record_has_said_on_standard_error_is_not_said_again(desk: Desk) -> None:
    journal = desk.journal()
    journal.send("verdict", ID, 3, {})
    journal.say("verdict", 3)
    assert desk.stderr() == "<3>verdict\n"


def test_lines_are_bounded(desk: Desk) -> None:
    desk.journal().say("x" * 1_000_000, 3)
    assert len(desk.stderr()) <= 4096


def test_notify_without_a_socket_or_a_library_is_false(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not notify.notify_status("hello")
    monkeypatch.setitem(sys.modules, "systemd", None)
    assert not notify.notify_status("hello")
    assert not notify.extend_timeout(1)


def test_notify(shallow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("systemd.daemon")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(shallow / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(shallow / "notify"))
        assert notify.notify_status("a\nMAINPID=1 \udcff")
        assert notify.extend_timeout(5_000_000)
        assert manager.recv(4096) == b"STATUS=a MAINPID=1 \\udcff"
        assert manager.recv(4096) == b"EXTEND_TIMEOUT_USEC=5000000"
    assert not notify.notify_status("nobody listens any more")


CHILD = """
import os, socket, sys
from pathlib import Path
from gpuprestart.host.journal import Journal, SOCKET
Path(SOCKET).parent.mkdir(parents=True)
journald = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
journald.bind(SOCKET)
journal = Journal()
assert journal.open()
assert journal.send("hello", "ID", 4, {"COMM": "a\\nPRIORITY=0\\nMESSAGE=forged", "GPU": ("A", "B")})
sys.stdout.buffer.write(journald.recv(65536))
journald.close()
assert not journal.send("nobody listens", "ID", 3, {})
"""


@pytest.mark.case("D5")
def test_the_real_library_frames_what_has_line_ends(tmp_path: Path) -> None:
    pytest.importorskip("systemd.journal")
    unshare = [shutil.which("unshare") or "", "--mount", "sh", "-c"]
    if (
        not unshare[0]
        or subprocess.run([*unshare, "mount -t tmpfs none /run"], check=False, stderr=subprocess.DEVNULL).returncode
    ):
        pytest.skip("may not make a mount namespace, and the library's socket has a fixed place")
    command = [*unshare, 'mount -t tmpfs none /run && exec "$0" -c "$1"', sys.executable, CHILD]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"<3>nobody listens\n")
    hostile = b"a\nPRIORITY=0\nMESSAGE=forged"
    framed = b"COMM\n" + len(hostile).to_bytes(8, "little") + hostile + b"\n"
    assert framed in done.stdout
    lines = done.stdout.replace(framed, b"").splitlines()
    own = [b"MESSAGE=hello", b"MESSAGE_ID=ID", b"PRIORITY=4", b"SYSLOG_IDENTIFIER=gpuprestart"]
    assert sorted(lines) == [b"GPU=A", b"GPU=B", *own]
