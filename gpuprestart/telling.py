"""The verdict, said wherever it is looked for: journal, standard error, STATUS=, standard output, exit status."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Callable, TextIO

from . import events, report
from .model import EXIT_STATUS, Outcome, Verdict

if TYPE_CHECKING:
    from .commandline import Command


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
                # A server waits for us, and not for whoever reads this.
                document = report.document(verdict, booted=booted, verb=command.verb)
                self._print(report.as_json(document) + "\n", waiting=False)
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
            why = "what clean would do may be otherwise, for only root may see who holds a GPU; run it as root"
            self._complain(f"gpuprestart: this is not all, and {why}")
        unmeasured = not verdict.gpus or any(state.unknown for state in verdict.gpus)
        return EXIT_STATUS[Outcome.UNKNOWN] if unmeasured else 0

    def _print(self, text: str, *, waiting: bool = True) -> None:
        from . import printing

        printing.show(text, out=self._out, err=self._err, waiting=waiting)

    def _complain(self, line: str) -> None:
        from . import printing

        printing.complain(line, self._err)
