"""What is printed for somebody who does not read on at once, as a pager does not."""

from __future__ import annotations

import fcntl
import io
import os
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import IO

import pytest

from gpuprestart import printing

from .processes import PATIENCE, wait

ROOT = Path(__file__).parents[2]
TEXT = "x" * 300_000


def await_full(pipe: IO[bytes]) -> None:
    """Until what is in the pipe has not grown for a while: whoever writes into it waits."""
    until, seen = time.monotonic() + PATIENCE, -1
    while True:
        wait([], 0.1)
        (now,) = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4))
        if now and now == seen:
            return
        assert time.monotonic() < until
        seen = now


@pytest.mark.parametrize("waiting", [True, False])
def test_a_reader_that_is_slow_is_waited_for_unless_a_server_waits(
    waiting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(printing, "PATIENCE", 0.05)
    reading, writing = os.pipe()
    found = b""

    def read() -> None:
        nonlocal found
        with open(reading, "rb") as pipe:
            # Far longer than anybody has patience for here.
            await_full(pipe)
            found = pipe.read()

    reader = threading.Thread(target=read)
    reader.start()
    err = io.StringIO()
    with open(writing, "w", encoding="utf-8") as out:
        printing.show(TEXT, out=out, err=err, waiting=waiting)
    reader.join()
    assert (len(found) == len(TEXT)) == waiting
    assert ("nobody reads it" in err.getvalue()) != waiting


#: Says something to nobody, with the signals of the program, and ends as it was to end.
SAYS = """
import signal, sys
from gpuprestart import printing
from gpuprestart.host.waiter import Waiter
# Whoever runs the tests under nohup ignores it, and so do all whom they start.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
Waiter()
printing.PATIENCE = 0.05
printing.show("x" * 300_000, out=sys.stdout, err=sys.stderr)
sys.exit(75)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_waiting_and_changes_no_status(number: signal.Signals) -> None:
    command = [sys.executable, "-c", SAYS]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout and process.stderr
            await_full(process.stdout)
            process.send_signal(number)
            assert wait([process.stderr.fileno()], PATIENCE)
            assert b"a signal came before it was read" in process.stderr.readline()
            assert process.wait(PATIENCE) == 75
        finally:
            process.kill()


def test_a_reader_that_has_gone_is_nothing_to_complain_of() -> None:
    """As of head(1), which the documents recommend."""
    reading, writing = os.pipe()
    os.close(reading)
    err = io.StringIO()
    with open(writing, "w", encoding="utf-8") as out:
        printing.show("line\n" * 5000, out=out, err=err)
    assert err.getvalue() == ""


def test_a_disk_that_is_full_is() -> None:
    err = io.StringIO()
    with open("/dev/full", "w", encoding="utf-8") as out:
        printing.show("line\n", out=out, err=err)
    assert err.getvalue() == "gpuprestart: cannot write to standard output: No space left on device\n"
