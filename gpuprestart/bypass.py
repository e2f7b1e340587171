"""An operator's word that the next start of a unit may pass unproved: once, and not for long. Pure.

The text of one is a line, so that a person can read it with cat. One that cannot be read lets nobody pass.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

#: Seconds for which it holds.
HOLDS = 600.0

#: Where they lie, for people to look.
FOLDER = "/run/gpuprestart/bypass"


class Bypass(NamedTuple):
    """``until`` is in seconds of CLOCK_BOOTTIME; the folder does not outlive a boot."""

    until: float
    by: str


def text(bypass: Bypass) -> str:
    return f"until={bypass.until:.3f} by={bypass.by}\n"


def parse(line: str) -> Optional[Bypass]:
    said = dict(word.partition("=")[::2] for word in line.split())
    try:
        return Bypass(until=float(said["until"]), by=said["by"])
    except (KeyError, ValueError):
        return None


def holds(bypass: Bypass, now: float) -> bool:
    """One that lies further ahead than any can was not written by us."""
    return now < bypass.until <= now + HOLDS
