"""The same views of other machines, asked by ssh side by side; never ``clean``.

Each machine judges itself, by its own policy and with the rights of whoever is logged in there. One that does not
answer is a row among the others. Exit statuses: 75 where we were asked to end, 64 for what is not to be had of other
machines, else that of fleet.exit_status.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from typing import TextIO

from . import checks, columns, documents, fleet, history, past, printing, screen, views
from .commandline import EX_USAGE, Command
from .faults import Interrupted
from .fleet import Answer
from .host import ssh
from .model import EXIT_STATUS, Outcome, Wait
from .quantities import LONGEST, duration
from .text import printable

#: What only looks. Nothing is ended from afar.
VERBS = ("status", "check", "history", "doctor")

#: Seconds for everything: to get there, and for the driver's first answer, of which that machine says itself when it
#: does not come (nvml_init).
GETTING_THERE, LOOKING = 30.0, 60.0


def perform(command: Command, wait: Wait, *, out: TextIO, err: TextIO) -> int:
    if command.verb not in VERBS:
        raise ValueError(f"{command.verb} is for this machine alone")
    try:
        asked = words(command, now=time.time())
    except ValueError as error:
        _complain(str(error), err)
        return EX_USAGE
    hosts = list(dict.fromkeys(command.hosts))
    verb = fleet.STORY if _is_story(command) else command.verb
    answers: dict[str, Answer] = {}
    ended = ""
    limit = GETTING_THERE + (duration(command.options.deadline) if command.options.deadline else LOOKING)
    try:
        # Whatever happens here, no ssh is left.
        with contextlib.closing(ssh.ask(hosts, asked, limit=limit, wait=wait, program=ssh.PROGRAM)) as replies:
            for reply in replies:
                answers[reply.host] = fleet.answer(
                    reply.host,
                    verb,
                    status=reply.status,
                    out=reply.out,
                    err=reply.err,
                    fault=reply.fault,
                    seconds=reply.seconds,
                )
    except Interrupted as interrupted:
        # What was answered until then is worth something too.
        ended = interrupted.signal_name
    found = [answers.get(host) or fleet.interrupted(host, ended) for host in hosts]
    _show(command, found, out=out, err=err)
    return EXIT_STATUS[Outcome.INTERRUPTED] if ended else fleet.exit_status(command.verb, found)


def words(command: Command, *, now: float) -> list[str]:
    """What is typed on the other machine. Raises ValueError where that cannot be meant."""
    options = command.options
    if command.watch is not None:
        raise ValueError("status --watch is for this machine alone: ssh -t HOST gpuprestart status --watch")
    if command.svg:
        raise ValueError("history --svg is for this machine alone: ssh HOST gpuprestart history --svg - > FILE")
    said = ["gpuprestart", command.verb]
    if command.verb == "check":
        for name, value in (("unit", options.unit), ("policy", options.policy), ("deadline", options.deadline)):
            said += [f"--{name}={value}"] if value is not None else []
        said += [f"--gpus={','.join(options.gpus)}"] if options.gpus is not None else []
        said += ["--journal"] if command.journal else []
    if command.since:
        said.append(f"--since={_ago(command.since, now)}")
    if command.most is not None:
        said.append(f"--number={command.most}")
    if not _is_story(command):
        said.append("--json")
    positional = ["show", command.run] if command.run else list(command.units)
    return [*said, *(["--", *positional] if positional else [])]


def _is_story(command: Command) -> bool:
    """It is told by who has the records of the run."""
    return bool(command.run) and not command.json


def _ago(text: str, now: float) -> str:
    """The same moment on every machine, wherever it is and whatever its clock says."""
    try:
        seconds = math.ceil(now - past.since(text, now=now))
    except ValueError as error:
        raise ValueError(f"argument --since: {error}") from error
    return f"{seconds}s" if seconds < LONGEST else f"{math.ceil(seconds / 86400)}d"


# For people ----------------------------------------------------------------------------------------------------------


def _show(command: Command, answers: Sequence[Answer], *, out: TextIO, err: TextIO) -> None:
    if command.json:
        printing.show(fleet.as_json(answers) + "\n", out=out, err=err)
    elif command.csv:
        printing.show(fleet.csv(answers), out=out, err=err)
    else:
        verb = fleet.STORY if _is_story(command) else command.verb
        if len(answers) > 1:
            _table(verb, answers, out=out, err=err)
        _views(verb, [each for each in answers if not each.fault], several=len(answers) > 1, out=out, err=err)
    # A table has told already who did not answer.
    tabled = len(answers) > 1 and not (command.json or command.csv)
    for each in answers:
        for line in (each.fault,) if each.fault and not tabled else each.said:
            _complain(f"{printable(each.host, 255)}: {line.removeprefix('gpuprestart: ')}", err)


def _views(verb: str, answers: Sequence[Answer], *, several: bool, out: TextIO, err: TextIO) -> None:
    """One below the other; of earlier runs one table of all machines."""
    if verb == "history":
        runs = [documents.document(run) for each in answers for run in each.found]
        if runs and several:
            printing.show("\n", out=out, err=err)
        if runs:
            history.show(sorted(runs, key=lambda run: run["time"] or 0.0), out=out, err=err)
        for each in answers:
            if not each.found and not several:
                _complain(f"{printable(each.host, 255)}: no run in its journal", err)
        return
    for place, each in enumerate(answers):
        if place or several:
            printing.show("\n", out=out, err=err)
        if verb in ("status", "check"):
            views.show(verb, each.found, out=out, err=err)
            continue
        if verb == "doctor":
            unit = documents.NAME(each.found.get("unit"))
            lines = checks.as_text(unit, checks.read(each.found), host=printable(each.host, 255)).split("\n")
        else:
            lines = each.found
        printing.show("\n".join([f"{printable(each.host, 255)}:", "", *lines]) + "\n", out=out, err=err)


def _table(verb: str, answers: Sequence[Answer], *, out: TextIO, err: TextIO) -> None:
    head, rows = fleet.table(verb, answers)
    console = screen.console(out)
    if console is None:
        lines = columns.columns([head, *(row.cells for row in rows)])
        printing.show("\n".join(lines) + "\n", out=out, err=err)
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in head:
        table.add_column(name, justify="right" if name in columns.RIGHT else "left", overflow="fold")
    for row in rows:
        *cells, last = (Text(cell) for cell in row.cells)
        last.stylize("green" if row.good else "red")
        table.add_row(*cells, last)
    with console.capture() as capture:
        console.print(table)
    printing.show(capture.get(), out=out, err=err)


def _complain(text: str, err: TextIO) -> None:
    printing.show(f"gpuprestart: {printable(text)}\n", out=err, err=err)
