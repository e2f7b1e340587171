"""The verdict, said wherever it is looked for: journal, standard error, STATUS=, standard output, exit status."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import time
from typing import TYPE_CHECKING, Any, Callable, TextIO

from . import events, report
from .model import EXIT_STATUS, Outcome, Verdict

if TYPE_CHECKING:
    from .commandline import Command


#: Seconds for which a reader of standard output that does not read is waited for, whatever else there is to be done.
PATIENCE = 2.0

#: A pipe that polls writable takes this much without blocking (PIPE_BUF).
_PIECE = 4096


class Teller:
    """``write`` sends a record to the journal, ``say`` a line to standard error, ``notify`` sets STATUS=."""

    def __init__(
        self,
        *,
        write: Callable[[events.Record], None],
        say: Callable[[str, int], None],
        notify: Callable[[str], object],
        out: TextIO,
        err: TextIO,
    ) -> None:
        self._write = write
        self._say = say
        self._notify = notify
        self._out = out
        self._err = err

    def tell(self, command: Command, verdict: Verdict) -> int:
        """Say it, and return the exit status."""
        booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        if command.journal:
            self._record(command.verb, verdict, booted)
        if command.verb == "clean":
            if command.json:
                text = report.as_json(report.document(verdict, booted=booted, verb=command.verb)) + "\n"
                show(text, out=self._out, err=self._err, waiting=False)
            return verdict.exit
        return self._show(command, verdict, report.document(verdict, booted=booted, verb=command.verb))

    def _record(self, verb: str, verdict: Verdict, booted: float) -> None:
        """The verdict is the last record, as dashboards expect; an audit writes no other and sets no STATUS=."""
        whole = verb == "clean"
        if whole and verdict.outcome not in (Outcome.CLEAN, Outcome.NONE):
            for state in verdict.gpus:
                self._write(events.gpu_verdict(events.Context(unit=verdict.unit, run=verdict.run), state))
        document = report.document(verdict, booted=booted, verb=verb, most=report.MOST_HELD)
        record = events.verdict(verdict, report.as_json(document))
        self._write(record)
        if not whole:
            return
        self._say(record.message, record.priority)
        ended = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(verdict.time + verdict.duration))
        self._notify(report.status_line(verdict, ended))

    def _show(self, command: Command, verdict: Verdict, document: dict[str, Any]) -> int:
        """``status`` is about what could be measured; what ``clean`` would make of it is no failure of its own."""
        from . import columns, documents, views

        checking = command.verb == "check"
        if command.json:
            if checking:
                helps = columns.advice(documents.document(document))
                document["commands"] = [{"command": each, "why": why} for each, why in helps]
            self._print(report.as_json(document) + "\n")
        elif command.csv:
            self._print(columns.csv(documents.document(document)))
        elif checking or verdict.gpus:
            views.show(command.verb, document, out=self._out, err=self._err)
        if checking:
            return verdict.exit
        if not verdict.gpus:
            self._complain(report.sentence(verdict))
        elif os.geteuid() != 0:
            self._complain("gpuprestart: this is not all, for only root may see who holds a GPU; run it as root")
        unmeasured = not verdict.gpus or any(state.unknown for state in verdict.gpus)
        return EXIT_STATUS[Outcome.UNKNOWN] if unmeasured else 0

    def _print(self, text: str) -> None:
        show(text, out=self._out, err=self._err)

    def _complain(self, line: str) -> None:
        _complain(line, self._err)


def show(text: str, *, out: TextIO, err: TextIO, waiting: bool = True) -> None:
    """Print it. A reader that has gone, or a full disk, changes nothing of what was found. One that does not read for
    long, as a pager does not until somebody turns the page, is waited for unless a server waits for us.
    """
    try:
        write(out, text, waiting=waiting)
    except OSError as error:
        _complain(f"gpuprestart: cannot write to standard output: {error.strerror}", err)
        # The interpreter tries once more when it ends, and would end with a status of its own.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, out.fileno())
        os.close(null)


def _complain(line: str, err: TextIO) -> None:
    with contextlib.suppress(OSError):
        print(line, file=err)


def write(out: TextIO, text: str, *, waiting: bool = False) -> None:
    """Write in pieces, so that nobody who does not read keeps a start waiting, and what the locale cannot say escaped,
    since a process may call itself anything. Raises OSError."""
    try:
        descriptor = out.fileno()
    except (OSError, ValueError):
        out.write(text)
        return
    out.flush()
    left = memoryview(text.encode(out.encoding or "utf-8", "backslashreplace"))
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    until = time.monotonic() + PATIENCE
    while left:
        if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
            if not waiting:
                raise TimeoutError(errno.ETIMEDOUT, "nobody reads it")
            _await(poll)
            until = time.monotonic() + PATIENCE
        left = left[os.write(descriptor, left[:_PIECE]) :]


def _await(poll: select.poll) -> None:
    """Until it is read on, or until a signal comes: what is not written by then is given up, and the exit status stays
    what it was to be."""
    import signal

    def give_up(*_: object) -> None:
        raise InterruptedError(errno.EINTR, "a signal came before it was read")

    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    # Where nobody wants to hear of it, it ends us or it does not, as ever.
    before = {number: signal.signal(number, give_up) for number in numbers if callable(signal.getsignal(number))}
    try:
        poll.poll()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
