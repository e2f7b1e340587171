"""Earlier runs, read back from the journal: ``history`` and ``history show``; ``proof`` has a module of its own.

Exit statuses: 0 also where there were no runs; 64 for a command line that cannot be meant, a time or the id of a run
among it; 69 where the journal cannot be read, the run that was asked for is not in it or not the only one, or the
picture cannot be written.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import islice
from typing import Any, Literal, NamedTuple, Optional, TextIO

from . import documents, events, filing, owners, past, picture, screen
from .commandline import Command
from .host import reading
from .past import Run
from .report import short
from .telling import show as say
from .text import mib, printable

EX_USAGE, EX_UNAVAILABLE = 64, 69

#: So many runs, where nobody says how many.
MOST = 20

#: So many records of accounts that are not root's are looked at, for anybody can write any number of them.
MOST_FOREIGN = 10_000

#: So many records of one run are told.
MOST_TOLD = 500

ID = events.MESSAGE_IDS["verdict"]


class Failed(Exception):
    """What was asked for is not to be had; the text says why, ``status`` is how the program ends."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def perform(command: Command, *, out: TextIO, err: TextIO) -> int:
    try:
        with _interruptible():
            return _perform(command, out=out, err=err)
    except Failed as failure:
        _complain(str(failure), err)
        return failure.status
    except reading.Unreadable as error:
        _complain(str(error), err)
        return EX_UNAVAILABLE


@contextmanager
def _interruptible() -> Iterator[None]:
    """A signal ends us at once, as it ends any program that only shows something: a journal may be long."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _perform(command: Command, *, out: TextIO, err: TextIO) -> int:
    if command.verb == "proof":
        from . import proof

        return proof.perform(command, out=out, err=err)
    _history(command, out=out, err=err)
    return 0


def _history(command: Command, *, out: TextIO, err: TextIO) -> None:
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
            return
    if command.json:
        say(json.dumps(found) + "\n", out=out, err=err)
    elif command.run:
        _print(_story(runs[0], screen.can_draw(out)), out=out, err=err)
    elif runs:
        show(found, out=out, err=err)
    else:
        _complain(f"no run{f' of {unit}' if unit else ''}{' since then' if command.since else ''} in the journal", err)


def _since(text: str) -> float:
    try:
        return past.since(text, now=time.time()) if text else 0.0
    except ValueError as error:
        raise Failed(EX_USAGE, f"argument --since: {error}") from error


def unit_named(name: str) -> str:
    unit = owners.full_name(name)
    if not owners.is_unit_name(unit):
        raise Failed(EX_USAGE, f"{printable(name, 100)!r} is no name of a unit, such as sglang-qwen.service")
    return unit


def warn_if_partial(err: TextIO) -> None:
    if not reading.is_whole():
        who = "only root and the groups systemd-journal and adm may read all of the journal"
        _complain(f"this may not be all, for {who}; run it as root", err)


def _complain(text: str, err: TextIO) -> None:
    say(f"gpuprestart: {printable(text)}\n", out=err, err=err)


# What is found -------------------------------------------------------------------------------------------------------


def newest_first(unit: Optional[str], *, since: float = 0.0, most: int) -> Iterator[Run]:
    """Runs whose records may be believed, of this unit or of all."""
    if unit:
        ours = {"MESSAGE_ID": ID, "GPUPRESTART_UNIT": unit}
        entries = reading.newest_first({**ours, "_UID": "0"}, {**ours, "_SYSTEMD_UNIT": unit}, since=since)
        return islice(runs_of(entries), most)
    # Of root's the index of the journal knows; behind them nobody's records push them out of what is looked at.
    roots = list(islice(runs_of(reading.newest_first({"MESSAGE_ID": ID, "_UID": "0"}, since=since)), most))
    oldest = roots[-1].at if len(roots) == most else since
    others = islice(reading.newest_first({"MESSAGE_ID": ID}, since=oldest), MOST_FOREIGN)
    found = [*roots, *islice((run for run in runs_of(others) if run.uid), most)]
    return islice(sorted(found, key=lambda run: -run.at), most)


def runs_of(entries: Iterator[reading.Entry]) -> Iterator[Run]:
    found = (past.run(entry.fields, at=entry.at, cursor=entry.cursor) for entry in entries)
    return (run for run in found if run is not None)


def of_id(text: str) -> Run:
    """The run with this id, or with the only one that begins so; its last verdict, should it have several."""
    wanted = text.lower().replace("-", "")
    if not wanted or len(wanted) > 32 or wanted.strip("0123456789abcdef"):
        raise Failed(
            EX_USAGE, f"{printable(text, 60)!r} is no id of a run, nor the beginning of one; history lists them"
        )
    ids = sorted(each for each in reading.values("GPUPRESTART_RUN") if each.startswith(wanted))
    found: dict[str, Run] = {}
    for each in ids[:MOST_FOREIGN]:
        run = next(runs_of(reading.newest_first({"MESSAGE_ID": ID, "GPUPRESTART_RUN": each})), None)
        if run is not None:
            found[each] = run
        if len(found) > 1:
            some = ", ".join(f"{run.id[:12]}… of {run.unit or 'no unit'}" for run in found.values())
            raise Failed(EX_UNAVAILABLE, f"more than one run begins with {wanted}: {some}; give more of it")
    if not found:
        raise Failed(EX_UNAVAILABLE, f"the journal has no verdict of a run {wanted}; history lists those that it has")
    return next(iter(found.values()))


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
