"""The files of a unit as text: which line of which file says a thing. Pure.

What a unit does is systemd's to say, and nobody should ask here for it: this finds the place to show to a person, by
the syntax of systemd.syntax(7). Where the files say something else than systemd has loaded, it finds nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, Optional

from .redaction import redacted

#: What may stand before the path of a command (systemd.service(5)).
_PREFIX = re.compile(r"[-@:+!|]*")

#: Several commands on one line are separated by a semicolon that is a word of its own.
_NEXT = re.compile(r"\s;\s")

_SHOWN = 200


class Line(NamedTuple):
    """An assignment; ``key`` bears its section, as in ``Service.ExecStart``, and an empty value resets a list."""

    file: str
    number: int
    key: str
    value: str

    @property
    def prefix(self) -> str:
        found = _PREFIX.match(self.value)
        return found[0] if found else ""

    def __str__(self) -> str:
        """For a person: where it stands and what it says, without secrets."""
        assignment = f"{self.key.rpartition('.')[2]}={' '.join(self.value.split())}"
        return f"{self.file}:{self.number}: {redacted([assignment], _SHOWN)}"


def read(files: Sequence[tuple[str, str]]) -> tuple[Line, ...]:
    """All assignments of these files, each by path and text, in the order in which systemd reads them."""
    return tuple(line for path, text in files for line in _assignments(path, text))


def _assignments(path: str, text: str) -> list[Line]:
    found = []
    section, whole, first = "", "", 0
    for number, physical in enumerate(text.split("\n"), start=1):
        stripped = physical.strip()
        # A comment may stand even between the lines of one assignment.
        if stripped.startswith(("#", ";")) or not (stripped or whole):
            continue
        first = first if whole else number
        if physical.endswith("\\"):
            whole += physical[:-1] + " "
            continue
        whole = (whole + physical).strip()
        if whole.startswith("[") and whole.endswith("]"):
            section = whole[1:-1]
        else:
            key, equals, value = whole.partition("=")
            if equals:
                found.append(Line(path, first, f"{section}.{key.strip()}", value.strip()))
        whole = ""
    return found


def standing(lines: Sequence[Line], *keys: str) -> tuple[Line, ...]:
    """What these keys are set to after the last line that resets them."""
    found: list[Line] = []
    for line in lines:
        if line.key in keys:
            found = [*found, line] if line.value else []
    return tuple(found)


def last(lines: Sequence[Line], *keys: str, fits: Callable[[Line], bool] = lambda line: True) -> Optional[Line]:
    """The last line of these keys that fits and is not undone by a later one."""
    return next((line for line in reversed(standing(lines, *keys)) if fits(line)), None)


def commands(lines: Sequence[Line], key: str, count: int) -> tuple[Optional[Line], ...]:
    """The line of each of the ``count`` commands that systemd has loaded for a key; None where the files have another
    number of them."""
    found = [line for line in standing(lines, key) for _ in _NEXT.split(line.value)]
    return tuple(found) if len(found) == count else (None,) * count


def undone(lines: Sequence[Line], key: str, fits: Callable[[Line], bool]) -> Optional[tuple[Line, Line]]:
    """A line of the key that fits, and the last one that resets the key after it."""
    line = next((line for line in lines if line.key == key and line.value and fits(line)), None)
    if line is None:
        return None
    resets = [other for other in lines[lines.index(line) :] if other.key == key and not other.value]
    return (line, resets[-1]) if resets else None
