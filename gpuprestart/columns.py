"""A verdict's document -> rows for people, and the same as plain columns for a pipe.

Pure. Knows which figures stand beside one another and how they are written; ``-`` is what is not known. It takes a
document as documents.document returns it, and adds no judgement to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional

from .remedies import remedies
from .report import indices, short
from .text import amounts, mib

Document = Mapping[str, Any]

GPU = ("GPU", "UUID", "NAME", "USED", "RESERVED", "TOTAL", "LIMIT", "UNATTRIBUTED", "CLEAN", "FAULT")
HOLDER = ("PID", "USER", "COMMAND", "OWNER", "STATE", "GPU", "MEMORY", "EVIDENCE", "AGE", "ACTION", "REASON")
#: What is of numbers stands at the right.
RIGHT = frozenset({"GPU", "USED", "RESERVED", "TOTAL", "LIMIT", "UNATTRIBUTED", "PID", "MEMORY", "AGE", "BYTES"})

#: Holders that a view shows.
MOST_SHOWN = 200


def gpu_rows(document: Document) -> list[list[str]]:
    """A row under GPU for each."""
    return [_gpu(gpu) for gpu in document["gpus"]]


def _gpu(gpu: Document) -> list[str]:
    used, limit = gpu["used_bytes"], gpu["limit_bytes"]
    both = (_mib(used), _mib(limit)) if used is None or limit is None else amounts(used, limit)
    return [
        _number(gpu["index"]),
        short(gpu["uuid"] or ""),
        (gpu["name"] or "-").removeprefix("NVIDIA "),
        both[0],
        _mib(gpu["reserved_bytes"]),
        _mib(gpu["total_bytes"]),
        both[1],
        _mib(gpu["unattributed_bytes"]),
        {True: "yes", False: "no"}.get(gpu["clean"], "-"),
        gpu["fault"] or "",
    ]


def holder_rows(document: Document) -> list[list[str]]:
    """A row under HOLDER for each that is shown."""
    places = {gpu["uuid"]: gpu["index"] for gpu in document["gpus"] if gpu["index"] is not None}
    return [_holder(holder, places, document["time"]) for holder in document["holders"][:MOST_SHOWN]]


def _holder(holder: Document, places: Mapping[str, int], now: Optional[float]) -> list[str]:
    rule, reason = holder["rule"], holder["reason"] or "-"
    return [
        _number(holder["pid"]),
        holder["user"] or "-",
        holder["comm"] or "-",
        holder["owner"] or "-",
        holder["state"] or "-",
        indices(places[uuid] for uuid in holder["gpus"] if uuid in places) or "-",
        _mib(holder["bytes"]),
        ",".join((*holder["evidence"], *holder["occupies"])) or "-",
        "-" if now is None or holder["started"] is None else age(now - holder["started"]),
        holder["action"] or "-",
        reason if not rule or rule in reason else f"{reason} (rule {rule})",
    ]


def more_holders(document: Document) -> str:
    """That there are more than are shown, which a record in the journal does not even have."""
    shown = min(len(document["holders"]), MOST_SHOWN)
    count = max(document["holders_count"] or 0, len(document["holders"]))
    return f"and {count - shown} more" if count > shown else ""


def verdict_lines(document: Document) -> list[str]:
    """The verdict, its hints, and what to type that helps."""
    others = "".join(f" (also: {outcome})" for outcome in document["outcomes"][1:])
    outcome, status = document["outcome"] or "-", _number(document["exit"])
    return [f"{outcome}{others}, exit status {status}: {document['message'] or '-'}"]


def advice(document: Document) -> list[tuple[str, str]]:
    """Commands that would help, each with why."""
    return remedies(document)


def heading(document: Document) -> str:
    """Which machine this is of, where it is not this one."""
    return document.get("host") or ""


def where(document: Document) -> str:
    """That a command is to be typed on another machine: typed here it would stop this one's servers."""
    name = heading(document)
    return f" on {name}" if name else ""


# Plain columns -------------------------------------------------------------------------------------------------------


def status(document: Document) -> str:
    """GPUs, holders, and what the policy asks for that is not so."""
    lines = _heading(document)
    lines += [*_gpus(document), "", *_holders(document)]
    if document["preconditions"]:
        lines += ["", *_unmet(document)]
    return "\n".join(lines) + "\n"


def check(document: Document) -> str:
    """The same, then what is left in shared memory, the verdict, its hints, and the commands that would help."""
    lines = _heading(document)
    if document["gpus"]:
        lines += [*_gpus(document), "", *_holders(document), ""]
    if document["residue"]:
        lines += [*_residue(document), ""]
    lines += verdict_lines(document)
    lines += [f"  hint: {hint}" for hint in document["hints"]]
    helps = advice(document)
    if helps:
        width = max(len(command) for command, _ in helps)
        lines += [
            "",
            f"What would help{where(document)}:",
            *(f"  {command.ljust(width)}  # {why}" for command, why in helps),
        ]
    return "\n".join(lines) + "\n"


def csv(document: Document) -> str:
    """What ``nvidia-smi --query-gpu=index,memory.used --format=csv`` prints: a GPU that is in MIG mode has a line too,
    with what its instances use together."""
    used: dict[int, list[Optional[int]]] = {}
    for gpu in document["gpus"]:
        if gpu["index"] is not None:
            used.setdefault(gpu["index"], []).append(gpu["used_bytes"])
    lines = ["index, memory.used [MiB]"]
    for index, shares in sorted(used.items()):
        known = [share for share in shares if share is not None]
        # nvidia-smi cuts what is less than a MiB off.
        lines.append(f"{index}, {f'{sum(known) >> 20} MiB' if len(known) == len(shares) else '[N/A]'}")
    return "\n".join(lines) + "\n"


def _heading(document: Document) -> list[str]:
    name = heading(document)
    return [f"{name}:", ""] if name else []


def _gpus(document: Document) -> list[str]:
    if not document["gpus"]:
        return ["no GPU selected"]
    return columns([GPU, *gpu_rows(document)])


def _holders(document: Document) -> list[str]:
    if not document["holders"]:
        return ["no holders"]
    more = more_holders(document)
    return columns([HOLDER, *holder_rows(document)]) + ([more] if more else [])


def _unmet(document: Document) -> list[str]:
    return columns([("NOT MET", ""), *((each["check"] or "-", each["message"] or "-") for each in unmet(document))])


def unmet(document: Document) -> Sequence[Document]:
    found: Sequence[Document] = document["preconditions"]
    return found


def _residue(document: Document) -> list[str]:
    return [*columns([RESIDUE, *residue_rows(document)]), *more_residue(document)]


def more_residue(document: Document) -> list[str]:
    """That there is more than a verdict names."""
    more = (document["residue_count"] or 0) - len(document["residue"])
    return [f"and {more} more"] if more > 0 else []


RESIDUE = ("LEFT", "NAME", "BYTES", "FATE", "REASON")


def residue_rows(document: Document) -> list[list[str]]:
    return [
        [
            each["kind"] or "-",
            (each["name"] or "-")[:64],
            _mib(each["bytes"]),
            each["fate"] or "-",
            each["reason"] or "-",
        ]
        for each in document["residue"]
    ]


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first row is the head."""
    widths = [max(len(row[number]) for row in rows) for number in range(len(rows[0]))]

    def cell(number: int, text: str) -> str:
        return text.rjust(widths[number]) if rows[0][number] in RIGHT else text.ljust(widths[number])

    return ["  ".join(cell(number, text) for number, text in enumerate(row)).rstrip() for row in rows]


def _mib(amount: Optional[int]) -> str:
    return "-" if amount is None else mib(amount)


def _number(number: Optional[int]) -> str:
    return "-" if number is None else str(number)


def age(seconds: float) -> str:
    """With two units at most, as people say it."""
    left = max(0, int(seconds))
    parts: list[str] = []
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if left >= size or (unit == "s" and not parts):
            parts.append(f"{left // size} {unit}")
            left %= size
    return " ".join(parts[:2])
