"""``status --watch``: the same view again and again, with how memory goes away.

On a terminal that can be written over it is drawn in its place, beside what the terminal had shown; elsewhere one view
follows the other. Each is a look of its own, as ``status`` takes one, and nothing but some figures is kept of it.
"""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Optional, TextIO

from . import documents, hook, past, printing, report, screen, views
from .commandline import Command
from .faults import Interrupted
from .model import Outcome, Verdict
from .neighbours import Neighbours

#: Looks of which the memory of each GPU is remembered, and letters in which it is drawn.
REMEMBERED, DRAWN = 240, 16

#: To another screen and back, to its beginning, and what is left of a line or below it (ECMA-48, xterm's ctlseqs).
_ENTER, _LEAVE, _HOME, _REST, _BELOW = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l", "\x1b[H", "\x1b[K", "\x1b[J"


def perform(command: Command, host: Neighbours, *, out: TextIO, err: TextIO) -> int:
    """Until a signal comes, or nobody reads it any more. The exit status is 0, whatever was seen."""
    every = command.watch or 2.0
    # A verdict here is no end, and a signal must be heard after it too.
    listening = host._replace(deafen=lambda: None)
    watch = _Watch(out)
    try:
        printing.write(out, watch.begin())
        while True:
            verdict = hook.run(command.options, listening, checking=True)
            if verdict.outcome is Outcome.INTERRUPTED:
                return 0
            printing.write(out, watch.drawn(verdict))
            host.wait((), every)
    except Interrupted:
        return 0
    except OSError:
        # Who has read it has gone, and so there is nobody to be told.
        return 0
    finally:
        printing.show(watch.end(), out=out, err=err)


class _Watch:
    """What was seen so far, and how it is drawn."""

    def __init__(self, out: TextIO) -> None:
        self._live = screen.is_live(out)
        self._can_draw = screen.can_draw(out)
        self._out = out
        #: UUID -> the bytes in use at each look.
        self._seen: dict[str, deque[Optional[int]]] = {}

    def begin(self) -> str:
        return _ENTER if self._live else ""

    def end(self) -> str:
        return _LEAVE if self._live else ""

    def drawn(self, verdict: Verdict) -> str:
        now = time.time()
        booted = now - time.clock_gettime(time.CLOCK_BOOTTIME)
        document = report.document(verdict, booted=booted, verb="status")
        told = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
        if not verdict.gpus:
            view = f"{report.sentence(verdict)}\n"
            return self._in_place(f"{told}\n\n{view}") if self._live else f"{told}\n{view}\n"
        beside = self._remember(document)
        console = screen.console(self._out) if self._live else None
        if console is None:
            return f"{told}\n{views.plain('status', document)}\n"
        with console.capture() as capture:
            console.print(views.renderable("status", document, console.width, can_draw=self._can_draw, beside=beside))
        return self._in_place(f"{told}\n{capture.get()}")

    def _in_place(self, text: str) -> str:
        """Over what was there before, and no more of it than the terminal has room for."""
        lines, room = text.rstrip("\n").split("\n"), shutil.get_terminal_size().lines
        if len(lines) > room:
            lines = [*lines[: room - 1], f"and {len(lines) - room + 1} more lines"]
        return _HOME + "\n".join(f"{line}{_REST}" for line in lines) + _BELOW

    def _remember(self, document: Mapping[str, Any]) -> dict[str, str]:
        """A line for each GPU, of what it used from the first look that is remembered until now."""
        bars = past.BARS if self._can_draw else past.PLAIN_BARS
        lines = {}
        for gpu in documents.document(document)["gpus"]:
            seen = self._seen.setdefault(gpu["uuid"], deque(maxlen=REMEMBERED))
            seen.append(gpu["used_bytes"])
            most = max([gpu["limit_bytes"] or 1, *(used for used in seen if used is not None)])
            lines[gpu["uuid"]] = past.sparkline([*seen], most=most, width=DRAWN, bars=bars).ljust(DRAWN)
        return lines
