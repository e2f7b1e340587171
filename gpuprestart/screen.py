"""Where a view goes: a terminal with Rich, or plain text everywhere else.

Knows what a stream can show. Rich is loaded for a terminal alone, and nobody needs it.
"""

from __future__ import annotations

import shutil
from typing import Any, TextIO


def can_draw(out: TextIO) -> bool:
    """Whether bars made of letters reach the reader as what they are."""
    try:
        "\u2581\u2588\u2192".encode(getattr(out, "encoding", None) or "ascii")
    except (UnicodeError, LookupError):
        return False
    return True


def console(out: TextIO) -> Any:
    """Rich's Console, on a terminal and where it is installed; else None, and the view is plain.

    Old ones do not look at COLUMNS, and to all of them a dumb terminal has eighty of them.
    """
    if not out.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=out, width=shutil.get_terminal_size().columns)


def is_live(out: TextIO) -> bool:
    """Whether what is shown can be drawn again in its place."""
    made = console(out)
    return made is not None and not made.is_dumb_terminal
