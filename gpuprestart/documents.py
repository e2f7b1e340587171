"""The form of a verdict's document, whoever it comes from: the journal, another machine, or this program itself.

Pure. Knows every key and of what kind its value is. Refuses to believe one that is not: it is unknown, and what is of
the right kind is bounded and printable. See report.document for what the keys mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Optional

from .text import printable

#: More of anything than a run writes down.
_MOST = 4096

#: The last second that every calendar knows, less a day for the time zone.
_LATEST = 253402214400.0

Document = dict[str, Any]
Reader = Callable[[Any], Any]


def document(found: Mapping[str, Any]) -> Document:
    """The same document with all of its keys, in which whatever is not of the right form is unknown."""
    read: Document = _object(_KEYS)(found)
    for name in ("host",):
        if found.get(name) is not None:
            read[name] = text(255)(found[name])
    if found.get("recorded_by") is not None:
        read["recorded_by"] = _count(found["recorded_by"])
    # A sample has a figure for each GPU, or nobody knows whose they are.
    count = len(read["gpus"])
    figures = [each for each in read["timeline"]["used_bytes"] if len(each[1]) == count]
    read["timeline"]["used_bytes"] = sorted(figures, key=lambda each: float(each[0]))
    return read


def text(most: int) -> Reader:
    return lambda value: printable(value, most) if isinstance(value, str) else None


def _count(value: Any) -> Optional[int]:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 else None


def _number(most: float) -> Reader:
    def read(value: Any) -> Any:
        # Neither what is infinite nor what is no number is between these.
        right = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= most
        return value if right else None

    return read


def _flag(value: Any) -> Optional[bool]:
    return value if isinstance(value, bool) else None


def _list(read: Reader, most: int = _MOST) -> Reader:
    """What is not right in a list is left out of it."""

    def read_all(value: Any) -> list[Any]:
        found = [read(each) for each in value[:most]] if isinstance(value, list) else []
        return [each for each in found if each is not None]

    return read_all


def _object(keys: Mapping[str, Reader]) -> Reader:
    def read(value: Any) -> Optional[Document]:
        return {key: of(value.get(key)) for key, of in keys.items()} if isinstance(value, Mapping) else None

    return read


def _row(*columns: Reader) -> Reader:
    """A list of just these, all of them known."""

    def read(value: Any) -> Optional[list[Any]]:
        if not isinstance(value, list) or len(value) != len(columns):
            return None
        found = [of(each) for of, each in zip(columns, value)]
        return None if None in found else found

    return read


def _figures(value: Any) -> Optional[list[Optional[int]]]:
    return [_count(each) for each in value[:_MOST]] if isinstance(value, list) else None


def _phases(value: Any) -> dict[str, float]:
    found = {printable(name, 40): _SECONDS(spent) for name, spent in value.items()} if isinstance(value, dict) else {}
    return {name: spent for name, spent in list(found.items())[:16] if spent is not None}


def _timeline(value: Any) -> Document:
    found: Document = _object(_TIMELINE)(value if isinstance(value, Mapping) else {})
    return found


_SECONDS = _number(1e9)
WORD, NAME, _LINE = text(64), text(260), text(1100)

_TIMELINE: Mapping[str, Reader] = {
    "phases": _list(_row(WORD, _SECONDS, _SECONDS), 256),
    "signals": _list(_row(_SECONDS, _count, WORD), 256),
    "used_bytes": _list(_row(_SECONDS, _figures), 256),
}

_GPU: Mapping[str, Reader] = {
    "index": _count,
    "uuid": NAME,
    "name": NAME,
    "pci": WORD,
    "parent": NAME,
    "memory_call": WORD,
    "used_bytes": _count,
    "reserved_bytes": _count,
    "total_bytes": _count,
    "limit_bytes": _count,
    "unattributed_bytes": _count,
    "clean": _flag,
    "fault": _LINE,
}

_HOLDER: Mapping[str, Reader] = {
    "pid": _count,
    "started": _number(_LATEST),
    "comm": NAME,
    "user": NAME,
    "owner": _LINE,
    "state": WORD,
    "gpus": _list(NAME, 256),
    "bytes": _count,
    "evidence": _list(WORD, 8),
    "occupies": _list(_LINE, 64),
    "action": WORD,
    "reason": _LINE,
    "rule": _LINE,
    "fate": WORD,
}

_KEYS: Mapping[str, Reader] = {
    "version": _count,
    "verb": WORD,
    "outcome": WORD,
    "outcomes": _list(WORD, 16),
    "exit": _count,
    "unit": NAME,
    "message": _LINE,
    "hints": _list(_LINE, 64),
    "time": _number(_LATEST),
    "run": WORD,
    "boot_id": WORD,
    "driver": _LINE,
    "nvml_path": _LINE,
    "policy_files": _list(_LINE, 16),
    "duration_s": _SECONDS,
    "phases": _phases,
    "gpus": _list(_object(_GPU), 256),
    "holders": _list(_object(_HOLDER)),
    "holders_count": _count,
    "preconditions": _list(
        _object({"check": WORD, "subject": _LINE, "message": _LINE, "hint": _LINE, "file": _flag}), 256
    ),
    "residue": _list(_object({"kind": WORD, "name": _LINE, "bytes": _count, "fate": WORD, "reason": _LINE}), 256),
    "residue_count": _count,
    "timeline": _timeline,
}
