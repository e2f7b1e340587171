"""Earlier runs as the journal has them: which are believed, and what there is to say where they cannot be had.

Root's records are believed, and a unit's own about itself. Who asks gets runs, the newest first, or Failed.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Callable, Optional, TextIO

from . import events, owners, past
from .host import reading
from .past import Run
from .printing import show as say
from .text import printable

EX_USAGE, EX_UNAVAILABLE = 64, 69

#: So many records of accounts that are not root's are looked at, for anybody can write any number of them.
MOST_FOREIGN = 10_000

ID = events.MESSAGE_IDS["verdict"]


class Failed(Exception):
    """What was asked for is not to be had; the text says why, ``status`` is how the program ends."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def answered(answer: Callable[[], int], err: TextIO) -> int:
    """The exit status of what is asked of the journal."""
    try:
        with _interruptible():
            return answer()
    except Failed as failure:
        complain(str(failure), err)
        return failure.status
    except reading.Unreadable as error:
        complain(str(error), err)
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


def unit_named(name: str) -> str:
    unit = owners.full_name(name)
    if not owners.is_unit_name(unit):
        raise Failed(EX_USAGE, f"{printable(name, 100)!r} is no name of a unit, such as sglang-qwen.service")
    return unit


def warn_if_partial(err: TextIO) -> None:
    if not reading.is_whole():
        who = "only root and the groups systemd-journal and adm may read all of the journal"
        complain(f"this may not be all, for {who}; run it as root", err)


def complain(text: str, err: TextIO) -> None:
    say(f"gpuprestart: {printable(text)}\n", out=err, err=err)


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
