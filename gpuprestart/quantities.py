"""Durations and sizes as people write them, in the policy and on the command line.

Knows the units of measure and nothing of keys, files or GPUs. What cannot be meant (negative, endless, without a unit)
is a ValueError whose text says what is wrong and, in brackets, what is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple, Optional

from .model import MIB

SECONDS: Mapping[str, float] = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}
BYTES: Mapping[str, int] = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}

#: Far above anything that can be meant, and small enough that floats are exact in bytes and in milliseconds.
LONGEST = 365 * 24 * 3600.0
LARGEST = 1 << 50

_DURATIONS = 'a number and ms, s, min or h, such as "10 s"'
_SIZES = 'a number and B, KiB, MiB, GiB, TiB or %, such as "64 MiB"'
_QUANTITY = re.compile(r"(-?)([0-9]+(?:\.[0-9]+)?) *([A-Za-z%]+)")


class Size(NamedTuple):
    """An amount of GPU memory: so many bytes, or a share of whatever GPU it is asked about."""

    bytes: int = 0
    percent: Optional[float] = None

    def of(self, total: int) -> int:
        """The amount in bytes on a GPU that has ``total`` bytes."""
        return self.bytes if self.percent is None else int(total * self.percent / 100)

    def __str__(self) -> str:
        if self.percent is not None:
            return f"{self.percent:g} %"
        return f"{self.bytes // MIB} MiB" if self.bytes % MIB == 0 else f"{self.bytes} B"


def _quantity(text: str, units: Mapping[str, object], what: str, allowed: str) -> tuple[float, str]:
    """The number and the unit, which is empty for a bare "0"."""
    if text == "0":
        return 0.0, ""
    match = _QUANTITY.fullmatch(text)
    if match is None or match[3] not in units:
        raise ValueError(f"{text[:60]!r} is no {what} ({allowed})")
    if match[1]:
        raise ValueError(f"{text[:60]!r} is negative ({allowed})")
    # float() makes infinity of too many digits where int() would raise; either is above every limit.
    return float(match[2]), match[3]


def duration(text: str, positive: bool = False) -> float:
    """The duration in seconds; ``positive`` where none at all would make no sense."""
    number, unit = _quantity(text, SECONDS, "duration", _DURATIONS)
    # Milliseconds are divided, because 0.001 has no exact float and "500 ms" is to be exactly half a second.
    seconds = number / 1000 if unit == "ms" else number * SECONDS.get(unit, 1.0)
    if seconds > LONGEST:
        raise ValueError(f"{text[:60]!r} is too long (at most {LONGEST / 3600:.0f} h)")
    if positive and not seconds > 0:
        raise ValueError(f"{text[:60]!r} makes no sense here (more than 0; {_DURATIONS})")
    return seconds


def size(text: str) -> Size:
    """The size, in bytes or as a share of a GPU."""
    number, unit = _quantity(text, {**BYTES, "%": 1}, "size", _SIZES)
    if unit == "%":
        if number > 100:
            raise ValueError(f"{text[:60]!r} is more than the whole GPU (at most 100 %)")
        return Size(percent=number)
    amount = number * BYTES.get(unit, 1)
    if amount > LARGEST:
        raise ValueError(f"{text[:60]!r} is too big (at most {LARGEST >> 40} TiB)")
    return Size(int(amount))
