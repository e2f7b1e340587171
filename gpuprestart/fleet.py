"""What other machines say -> answers that may be shown, the row of each, and what all of them come to.

Pure. Knows the forms in which gpuprestart answers on another machine and how ssh says that there is no answer. Refuses
to believe any of it: what comes back may be anything at all, and a machine without an answer is a row like the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional

from . import checks, documents
from .checks import Level
from .columns import csv as as_csv
from .model import EX_NOINPUT, EXIT_STATUS, Outcome
from .text import mib, printable

#: Statuses of ssh and of the shell on the other side, and ours for a command line that is wrong.
SSH_FAILED, NOT_FOUND, NOT_EXECUTABLE, USAGE = 255, 127, 126, 64

#: To tell one run, which who has its records does, in text for people. Here it is a verb of its own.
STORY = "story"

#: Lines of what was said beside an answer, and of how many letters; and bytes of a text that are looked at.
_MOST_SAID, _LENGTH, _LOOKED_AT = 5, 200, 1 << 20

UNKNOWN = EXIT_STATUS[Outcome.UNKNOWN]


class Answer(NamedTuple):
    """``exit`` is gpuprestart's own over there. ``found`` is what it answered, or ``fault`` why that is not known;
    ``said`` is what it said beside that, line by line."""

    host: str
    exit: Optional[int] = None
    found: Any = None
    fault: str = ""
    said: tuple[str, ...] = ()
    seconds: float = 0.0


# What came back ------------------------------------------------------------------------------------------------------


def answer(
    host: str, verb: str, *, status: Optional[int], out: bytes, err: bytes, fault: str = "", seconds: float = 0.0
) -> Answer:
    """``fault`` is why there is no ``status``."""
    said = _lines(err)
    of = Answer(host, seconds=seconds)
    if status is None or status == SSH_FAILED:
        return of._replace(fault=fault or _ssh_s_fault(said, host))
    if status < 0:
        return of._replace(fault=f"ssh was ended by signal {-status}")
    of = of._replace(exit=status)
    try:
        found = _story(out, status) if verb == STORY else _named(_parsed(out, verb), host)
    except _Other as other:
        return of._replace(fault=str(other) or _their_fault(status, _first_line(out), said))
    return of._replace(found=found, said=tuple(said[:_MOST_SAID]))


class _Other(Exception):
    """It answered something else than was asked for; the text says what, where more can be said than that."""


def interrupted(host: str, signal_name: str) -> Answer:
    return Answer(host, fault=f"{signal_name} came before it had answered")


def _lines(said: bytes) -> list[str]:
    """With something to read in each."""
    found = said[:_LOOKED_AT].decode("utf-8", "surrogateescape").splitlines()
    return [printable(line.strip(), _LENGTH) for line in found if any(each.isalnum() for each in line)]


def _first_line(said: bytes) -> str:
    return printable(said[:_LOOKED_AT].decode("utf-8", "surrogateescape").strip().partition("\n")[0], _LENGTH)


def _parsed(out: bytes, verb: str) -> Any:
    """What the shell there may have said before it is passed over: an answer is on one line."""
    line = out.strip().rpartition(b"\n")[2]
    try:
        found = json.loads(line.decode("utf-8"), parse_int=_integer, parse_float=_number, parse_constant=_number)
    # Brackets without end are a RecursionError.
    except (ValueError, RecursionError):
        raise _Other from None
    items = found if verb == "history" and isinstance(found, list) else [found]
    for each in items:
        if not isinstance(each, dict):
            raise _Other
        version = each.get("version")
        # An earlier run that kept no figures has none.
        if (version != 1 or isinstance(version, bool)) and not (verb == "history" and version is None):
            raise _Other(
                "answered in a form that is not known here; gpuprestart should be of one version here and there"
            )
    if isinstance(found, list) != (verb == "history"):
        raise _Other
    if verb == "doctor" and not checks.read(found):
        raise _Other
    if verb in ("status", "check") and not documents.document(found)["outcome"]:
        raise _Other
    return found


def _integer(text: str) -> int:
    # To make one of millions of digits takes minutes.
    if len(text) > 40:
        raise ValueError("too many digits")
    return int(text)


def _number(text: str) -> float:
    found = float(text)
    # Neither what is infinite nor what is no number is JSON.
    if not -1e300 < found < 1e300:
        raise ValueError("no number")
    return found


def _story(out: bytes, status: int) -> list[str]:
    lines = out[:_LOOKED_AT].decode("utf-8", "surrogateescape").splitlines()
    if status or not lines:
        raise _Other
    return [printable(line, 2000) for line in lines]


def _named(found: Any, host: str) -> Any:
    """With the machine's name, as it was typed, in each object."""
    return [{**each, "host": host} for each in found] if isinstance(found, list) else {**found, "host": host}


# Why there is no answer ----------------------------------------------------------------------------------------------


def _ssh_s_fault(said: Sequence[str], host: str) -> str:
    """ssh says the fact in one line of several."""
    failed = next((line for line in said if "Host key verification failed" in line), "")
    if failed:
        others = [line for line in said if line != failed]
        why = ""
        if any("REMOTE HOST IDENTIFICATION HAS CHANGED" in line for line in others):
            why = ": its key is not the one that is known; find out why before you go on"
        elif not others or any("host key is known for" in line for line in others):
            why = f": its key is not known here; ssh {printable(host, 255)} once, and compare it"
        return f"not reachable: {failed.rstrip('.')}{why}"
    denied = next((line for line in said if "Permission denied (" in line), "")
    if denied:
        return f"not reachable: {denied.rstrip('.')}; no password is asked for here, it takes a key or an agent"
    if said:
        return f"not reachable: {said[0].removeprefix('ssh: ')}"
    return "the connection broke, or gpuprestart was killed there (ssh ended with status 255)"


#: What was typed here has been understood here; of an older one it is said so (argparse).
_OLDER = ("unrecognized arguments", "invalid choice")


def _their_fault(status: int, out: str, said: Sequence[str]) -> str:
    ours = [line for line in said if line.startswith("gpuprestart")]
    why = f" ({said[-1]})" if said else ""
    if status == NOT_FOUND:
        return f"gpuprestart is not installed there{why}"
    if status == NOT_EXECUTABLE:
        return f"gpuprestart may not be run there{why}"
    if status == USAGE and any(sign in line for line in ours[-1:] for sign in _OLDER):
        return f"its gpuprestart does not take this, so it may be an older one: {ours[-1]}"
    if out:
        return f"answered something else: {out}"
    if not status:
        return "answered nothing"
    last = (ours or list(said) or ["it did not say why"])[-1].removeprefix("gpuprestart: ")
    return f"{last} (status {status})"


# Beside one another --------------------------------------------------------------------------------------------------

_HEADS: Mapping[str, Sequence[str]] = {
    "status": ("GPUS CLEAN", "USED", "HOLDERS"),
    "check": ("GPUS CLEAN", "USED", "HOLDERS"),
    "history": ("RUNS",),
    "doctor": ("FAULTS", "REMARKS"),
    STORY: (),
}


class Row(NamedTuple):
    cells: Sequence[str]
    #: Nothing has to be done about this machine.
    good: bool


def table(verb: str, answers: Iterable[Answer]) -> tuple[Sequence[str], list[Row]]:
    """The head, and a row for each machine. To tell one run as a story is a verb of its own here."""
    figures = _HEADS[verb]
    rows = []
    for each in answers:
        cells, word, good = _row(verb, each) if not each.fault else (["-"] * len(figures), each.fault, False)
        rows.append(
            Row((printable(each.host, 255), *cells, f"{each.seconds:.1f} s" if each.seconds else "-", word), good)
        )
    return ("HOST", *figures, "TOOK", "ANSWER"), rows


def _row(verb: str, of: Answer) -> tuple[list[str], str, bool]:
    if verb == "history":
        last = documents.document(of.found[-1]) if of.found else {"outcome": "no run"}
        word = last["outcome"] or "-"
        return [str(len(of.found))], f"last {word}" if of.found else word, of.exit == 0
    if verb == "doctor":
        found = checks.read(of.found)
        faulty = [each.check for each in found if each.level is Level.FAULT]
        counts = [str(sum(each.level is level for each in found)) for level in (Level.FAULT, Level.REMARK)]
        return counts, ", ".join(dict.fromkeys(faulty)) or "in order", not faulty and of.exit == 0
    if verb == STORY:
        return [], "has this run", True
    read = documents.document(of.found)
    gpus = read["gpus"]
    clean = sum(gpu["clean"] is True for gpu in gpus)
    used = [gpu["used_bytes"] for gpu in gpus]
    known = [figure for figure in used if figure is not None]
    holders = max(read["holders_count"] or 0, len(read["holders"]))
    word = (read["outcome"] or "-") if verb == "check" else _measured(read, clean, of.exit)
    cells = [f"{clean}/{len(gpus)}", mib(sum(known)) if known and len(known) == len(used) else "-", str(holders)]
    return cells, word, of.exit == 0 and clean == len(gpus)


def _measured(read: Mapping[str, Any], clean: int, status: Optional[int]) -> str:
    if status:
        return f"unknown: {read['message'] or '-'}"
    return "clean" if clean == len(read["gpus"]) else "not clean"


def csv(answers: Iterable[Answer]) -> str:
    """Used memory of each GPU with the machine's name before it; ``[N/A]`` of a machine that did not answer."""
    lines = []
    for each in answers:
        _, *rows = as_csv(documents.document(each.found if not each.fault else {})).splitlines()
        host = printable(each.host, 255)
        lines += [f"{host}, {row}" for row in rows] or [f"{host}, [N/A], [N/A]"]
    return "\n".join(["host, index, memory.used [MiB]", *lines]) + "\n"


def as_json(answers: Iterable[Answer]) -> str:
    """A list in the order in which the machines were given."""
    return json.dumps(
        [
            {
                "host": each.host,
                "exit": each.exit,
                "fault": each.fault or None,
                "said": list(each.said),
                "seconds": round(each.seconds, 3),
                "answer": each.found,
            }
            for each in answers
        ]
    )


# What all of them come to --------------------------------------------------------------------------------------------


def exit_status(verb: str, answers: Iterable[Answer]) -> int:
    """That of the machine whose outcome comes first in the order of outcomes; of one that did not answer nothing is
    known."""
    _, status = min(_rank(verb, each) for each in answers)
    return status


def _rank(verb: str, of: Answer) -> tuple[int, int]:
    status = UNKNOWN if of.fault or of.exit is None else of.exit
    if verb == "status" and status:
        # It could be measured there, or not.
        status = UNKNOWN
    order = list(Outcome)
    outcome = of.found.get("outcome") if verb == "check" and isinstance(of.found, dict) else None
    for place, each in enumerate(order):
        if EXIT_STATUS[each] == status and outcome == each.value:
            return place, status
    if status == EX_NOINPUT:
        return order.index(Outcome.PRECONDITION), status
    # It has no outcome, or one that does not fit how it ended. What was found comes behind what could not be looked at.
    places = [place for place, each in enumerate(order) if EXIT_STATUS[each] == status]
    return (places[-1], status) if places else (order.index(Outcome.UNKNOWN), UNKNOWN)
