"""``history`` and ``history show``: earlier runs as a table, as JSON, as a picture, and one as a story.

Exit statuses: 0 also where there were no runs; 64 for a command line that cannot be meant, a time or the id of a run
among it; 69 where the journal cannot be read, the run that was asked for is not in it or not the only one, or the
picture cannot be written.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import Any, Literal, NamedTuple, Optional, TextIO

from . import documents, filing, past, picture, screen
from .commandline import Command
from .host import reading
from .past import Run
from .printing import show as say
from .report import short
from .runs import EX_UNAVAILABLE, EX_USAGE, Failed, answered, complain, newest_first, of_id, unit_named, warn_if_partial
from .text import mib, printable

#: So many runs, where nobody says how many.
MOST = 20

#: So many records of one run are told.
MOST_TOLD = 500


def perform(command: Command, *, out: TextIO, err: TextIO) -> int:
    return answered(lambda: _history(command, out=out, err=err), err)


def _history(command: Command, *, out: TextIO, err: TextIO) -> int:
    unit = unit_named(command.units[0]) if command.units else None
    since = _since(command.since)
    warn_if_partial(err)
    if command.run:
        runs = [of_id(command.run)]
    else:
        runs = list(newest_first(unit, since=since, most=command.most or MOST))[::-1]
    found = [run.document for run in runs]
    if command.svg:
        _draw(runs, command.svg, out=out, err=err)
        if command.svg == "-":
            return 0
    if command.json:
        say(json.dumps(found) + "\n", out=out, err=err)
    elif command.run:
        _print(_story(runs[0], screen.can_draw(out)), out=out, err=err)
    elif runs:
        show(found, out=out, err=err)
    else:
        complain(f"no run{f' of {unit}' if unit else ''}{' since then' if command.since else ''} in the journal", err)
    return 0


def _since(text: str) -> float:
    try:
        return past.since(text, now=time.time()) if text else 0.0
    except ValueError as error:
        raise Failed(EX_USAGE, f"argument --since: {error}") from error


# The picture ---------------------------------------------------------------------------------------------------------


def _draw(runs: Sequence[Run], path: str, *, out: TextIO, err: TextIO) -> None:
    if not runs:
        raise Failed(EX_UNAVAILABLE, "there is no run to draw in the journal")
    drawn = picture.svg(runs[-1].document)
    if path == "-":
        say(drawn, out=out, err=err)
        return
    try:
        filing.put(path, drawn)
    except filing.Unwritable as error:
        raise Failed(EX_UNAVAILABLE, f"{printable(path, 300)} cannot be written: {error}") from error


# For people ----------------------------------------------------------------------------------------------------------


class Styled(NamedTuple):
    """A text, and how it looks where there are colours; all of its lines begin behind ``lead``."""

    text: str
    style: str = ""
    lead: str = ""


#: What a person sees first.
_STYLES: Mapping[str, str] = {"clean": "green", "cleaned": "green", "bypassed": "yellow", "none": "yellow"}

#: Narrower terminals than this do not show the column.
_WIDTHS: Mapping[str, int] = {"PHASES": 140, "ENDED": 105, "FREED": 90, "TOOK": 60}


def show(runs: Sequence[Mapping[str, Any]], *, out: TextIO, err: TextIO) -> None:
    """A table of runs, newest last; with the machine's name where ``run["host"]`` says that it is another one."""
    read = [documents.document(each) for each in runs]
    head = ["TIME", "UNIT", "OUTCOME", "TOOK", "PHASES", "ENDED", "FREED", "RUN"]
    rows = [_row(each) for each in read]
    if any("host" in each for each in read):
        head = ["HOST", *head]
        rows = [[Styled(each.get("host") or "-"), *row] for each, row in zip(read, rows)]
    _print_table(head, rows, right=("TOOK", "FREED"), out=out, err=err)


def _row(read: Mapping[str, Any]) -> list[Styled]:
    outcome, verb, uid = read["outcome"] or "-", read["verb"], read.get("recorded_by")
    notes = [verb] if verb not in (None, "clean") else []
    notes += [f"said by uid {uid}"] if uid else []
    gone, freed = past.ended(read), past.freed(read)
    known = bool(read["version"])
    phases = ", ".join(f"{name} {spent:.2g}" for name, spent in read["phases"].items() if spent >= 0.01)
    return [
        Styled(_when(read["time"])),
        Styled(read["unit"] or "-"),
        Styled(f"{outcome} ({', '.join(notes)})" if notes else outcome, _STYLES.get(outcome, "red")),
        Styled(_took(read["duration_s"])),
        Styled(phases or "-"),
        Styled(f"{len(gone)}: {past.names(gone)}" if gone else "0" if known else "-"),
        Styled("-" if freed is None else mib(freed)),
        Styled((read["run"] or "-")[:8]),
    ]


def _took(seconds: Optional[float]) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"


def _when(seconds: Optional[float]) -> str:
    return "-" if seconds is None else datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def _story(run: Run, can_draw: bool) -> list[Styled]:
    """One run from its beginning to its verdict, line by line."""
    read = run.document
    outcome = read["outcome"] or "unknown"
    audit = f" ({read['verb']}: it touched nothing)" if run.audit else ""
    lines = [
        Styled(f"{run.unit or 'no unit'}: {outcome}{audit}", f"bold {_STYLES.get(outcome, 'red')}"),
        *_facts(run),
        Styled(""),
    ]
    began = read["time"] if read["time"] is not None else run.at
    for entry in _records(run):
        priority = entry.fields.get("PRIORITY", "")
        style = "red" if priority in ("0", "1", "2", "3") else "yellow" if priority == "4" else ""
        message = printable(entry.fields.get("MESSAGE", ""), 2000)
        lines.append(Styled(message, style, f"{max(0.0, entry.at - began):+9.3f} s  "))
    lines.append(Styled(f"{outcome}: {read['message'] or '-'}", "bold", f"{max(0.0, run.at - began):+9.3f} s  "))
    lines += [Styled(hint, lead=f"{'':13}hint: ") for hint in read["hints"]]
    return [*lines, *_memory(read, can_draw)]


def _facts(run: Run) -> Iterator[Styled]:
    read = run.document
    took = "" if read["duration_s"] is None else f", it took {read['duration_s']:.3f} s"
    phases = ", ".join(f"{name} {spent:.3f} s" for name, spent in read["phases"].items())
    facts = {
        "began": _when(read["time"]) + took,
        "phases": phases or "-",
        "run": run.id or "-",
        "boot": read["boot_id"] or run.boot or "-",
        "policy": ", ".join(read["policy_files"]) or ("built in" if read["version"] else "-"),
        "driver": f"{read['driver'] or '-'} ({read['nvml_path'] or '-'})",
        "machine": run.hostname or "-",
    }
    if run.uid:
        facts["recorded by"] = f"uid {run.uid}, which is not root: the unit's own processes could have made it"
    return (Styled(value, lead=f"  {name:11}  ") for name, value in facts.items())


def _records(run: Run) -> list[reading.Entry]:
    """What else the run said, oldest first; of who may be believed."""
    found = islice(reading.newest_first({"GPUPRESTART_RUN": run.id}), MOST_TOLD) if run.id else iter(())
    return [
        entry
        for entry in reversed(list(found))
        if entry.cursor != run.cursor and past.recorded_by(entry.fields) in (0, run.uid)
    ]


def _memory(read: Mapping[str, Any], can_draw: bool) -> list[Styled]:
    """How what is used went away, on each GPU of which it is known."""
    points = [past.curve(read, number) for number in range(len(read["gpus"]))]
    until = max([read["duration_s"] or 0.0, *(at for at, _ in (points[0] if points else ()))])
    lines = [Styled(""), Styled(f"memory in use, over {until:.3f} s")]
    for gpu, course in zip(read["gpus"], points):
        known = [used for _, used in course if used is not None]
        index = "?" if gpu["index"] is None else gpu["index"]
        figures = f"{mib(max(known))} at most, {mib(known[-1])} at the end" if known else "unknown"
        limit = "" if gpu["limit_bytes"] is None else f", limit {mib(gpu['limit_bytes'])}"
        line = past.resampled(course, until=until, count=24)
        most = max([*known, gpu["limit_bytes"] or 0])
        drawn = past.sparkline(line, most=most, bars=past.BARS if can_draw else past.PLAIN_BARS)
        clean = {True: "clean", False: "not clean"}.get(gpu["clean"], "unknown")
        lead = f"  GPU {index:<3} {short(gpu['uuid'] or ''):12}  {drawn:24}  "
        lines.append(Styled(f"{figures}{limit}, {clean}", lead=lead))
    return lines if read["gpus"] else []


# Where it goes -------------------------------------------------------------------------------------------------------


def _print(lines: Sequence[Styled], *, out: TextIO, err: TextIO) -> None:
    console = screen.console(out)
    if console is None:
        say("".join(f"{line.lead}{line.text}\n" for line in lines), out=out, err=err)
        return
    from rich.table import Table
    from rich.text import Text

    with console.capture() as capture:
        for line in lines:
            both = Table.grid()
            both.add_column(no_wrap=True)
            both.add_column(overflow="fold")
            both.add_row(Text(line.lead), Text(line.text, style=line.style))
            console.print(both)
    say(capture.get(), out=out, err=err)


def _print_table(
    head: Sequence[str], rows: Sequence[Sequence[Styled]], *, right: Sequence[str], out: TextIO, err: TextIO
) -> None:
    console = screen.console(out)
    if console is None:
        _print(_plain(head, rows, right), out=out, err=err)
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    shown = [number for number, name in enumerate(head) if console.width >= _WIDTHS.get(name, 0)]
    for number in shown:
        fixed = head[number] in ("TIME", "RUN", *right)
        side: Literal["right", "left"] = "right" if head[number] in right else "left"
        table.add_column(head[number], justify=side, no_wrap=fixed, overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[number].text, style=row[number].style) for number in shown))
    with console.capture() as capture:
        console.print(table)
    say(capture.get(), out=out, err=err)


def _plain(head: Sequence[str], rows: Sequence[Sequence[Styled]], right: Sequence[str]) -> list[Styled]:
    texts = [list(head), *([each.text for each in row] for row in rows)]
    widths = [max(len(row[number]) for row in texts) for number in range(len(head))]

    def cell(number: int, text: str) -> str:
        return text.rjust(widths[number]) if head[number] in right else text.ljust(widths[number])

    return [Styled("  ".join(cell(number, text) for number, text in enumerate(row)).rstrip()) for row in texts]
