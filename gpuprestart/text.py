"""Text that may be shown: escaped and bounded, with amounts that tell the truth.

Knows what a terminal would obey and how sizes round. Refuses to know where a text goes: what passes through here is fit
for a terminal, for the journal and for JSON alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from .model import MIB


def printable(text: str, limit: int = 1000) -> str:
    """``text`` on one line, at most ``limit`` characters long, with nothing in it that a terminal would obey.

    Everything that Python does not call printable is escaped: controls, line ends, bidirectional overrides and other
    format characters, what Unicode has not assigned; and bytes that were not UTF-8, which arrive as surrogates.
    """
    if len(text) <= limit and text.isprintable():
        return text
    pieces: list[str] = []
    room = limit
    for char in text:
        piece = char if char.isprintable() else _escaped(ord(char))
        if len(piece) > room:
            # An escape is shown whole or not at all.
            while room < 1:
                room += len(pieces.pop())
            return "".join(pieces) + "…"
        pieces.append(piece)
        room -= len(piece)
    return "".join(pieces)


def _escaped(code: int) -> str:
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def mib(amount: int, digits: int = 0) -> str:
    """``amount`` bytes in MiB, rounded up: what is not nothing never reads ``0 MiB``."""
    scale: int = 10**digits
    scaled = -(-amount * scale // MIB)
    return f"{scaled // scale}.{scaled % scale:0{digits}d} MiB" if digits else f"{scaled} MiB"


def numbered(pids: Sequence[int], most: int) -> str:
    """The first PIDs by their numbers, and how many more there are."""
    more = f" and {len(pids) - most} more" if len(pids) > most else ""
    return f"PID {', '.join(map(str, pids[:most]))}{more}"


def amounts(used: int, limit: int) -> tuple[str, str]:
    """Both in MiB, with as many digits as it takes for ``used`` to read above ``limit`` where it is, and only there."""
    for digits in (0, 1, 3, 7):
        scale: int = 10**digits
        if (-(-used * scale // MIB) > -(-limit * scale // MIB)) == (used > limit):
            break
    return mib(used, digits), mib(limit, digits)
