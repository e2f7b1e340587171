"""The last verdict on a unit's GPUs, to be filed: that a benchmark began on GPUs that were proved clean.

Refuses whatever somebody else than root could have written. Exit statuses: 0 only if it is proved, 75 if the last
verdict is no proof, 69 where there is none or the journal cannot be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Optional, TextIO

from . import past
from .commandline import Command
from .host import reading
from .printing import show as say
from .runs import EX_UNAVAILABLE, ID, Failed, answered, newest_first, runs_of, unit_named, warn_if_partial
from .text import printable

EX_TEMPFAIL = 75

#: So many audits are passed over in search of a start.
MOST_AUDITS = 10_000


def perform(command: Command, *, out: TextIO, err: TextIO) -> int:
    return answered(lambda: _prove(command, out=out, err=err), err)


def _prove(command: Command, *, out: TextIO, err: TextIO) -> int:
    unit = unit_named(command.units[0]) if command.units else None
    warn_if_partial(err)
    run = _last(unit)
    if run is None:
        what = f"no start of {unit}" if unit else "no start"
        raise Failed(EX_UNAVAILABLE, f"the journal has {what} with a verdict of gpuprestart")
    say(json.dumps(past.proof(run, boot=reading.boot()), indent=2) + "\n", out=out, err=err)
    doubt = past.doubt(run)
    if not doubt:
        return 0
    say(f"gpuprestart: no proof: {printable(doubt)}\n", out=err, err=err)
    return EX_TEMPFAIL


def _starts(runs: Iterable[past.Run]) -> Iterator[past.Run]:
    return (run for run in runs if not run.audit)


def _last(unit: Optional[str]) -> Optional[past.Run]:
    """The last start of this unit, or of any. Root's word on a start stands, whatever its server said after it."""
    ours = {"MESSAGE_ID": ID, "_UID": "0", **({"GPUPRESTART_UNIT": unit} if unit else {})}
    root = next(_starts(runs_of(islice(reading.newest_first(ours), MOST_AUDITS))), None)
    about = unit or (root.unit if root else None)
    if about is None:
        return root
    for run in _starts(newest_first(about, since=root.at if root else 0.0, most=MOST_AUDITS)):
        if run.uid and (root is None or run.id != root.id):
            return run
    return root
