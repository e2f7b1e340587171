"""A page that is drawn from top to bottom, as SVG: places, letters and a time scale.

Pure. Knows what it takes for a text to be text alone wherever the page is opened. Refuses to know what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Optional
from xml.etree import ElementTree

from .text import printable

SVG = "http://www.w3.org/2000/svg"

WIDTH, MARGIN = 1000, 28
#: Between these the time runs, from the beginning of the run to its end.
LEFT, RIGHT = 190, 930

FONT = "system-ui, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif"
INK, GREY, RULE = "#1a1a1a", "#595959", "#d9d9d9"

#: About as wide as a letter is, for each point of its size; enough to keep labels apart.
LETTER = 0.56


class Canvas:
    """What has been drawn so far, from top to bottom."""

    def __init__(self) -> None:
        self.root = ElementTree.Element("svg", {"xmlns": SVG, "role": "img", "font-family": FONT, "fill": INK})
        self.y = 0.0

    def add(self, tag: str, text: str = "", /, **attributes: object) -> ElementTree.Element:
        values = {name.replace("_", "-").strip("-"): _said(value) for name, value in attributes.items()}
        element = ElementTree.SubElement(self.root, tag, values)
        element.text = text or None
        return element

    def text(self, x: float, text: str, *, size: int = 12, y: Optional[float] = None, **attributes: object) -> None:
        place = {"x": x, "y": self.y if y is None else y, "font_size": size}
        self.add("text", printable(text), **place, **attributes)

    def line(self, x1: float, y1: float, x2: float, y2: float, **attributes: object) -> None:
        attributes.setdefault("stroke", RULE)
        self.add("line", x1=x1, y1=y1, x2=x2, y2=y2, **attributes)

    def table(self, head: Sequence[str], columns: Sequence[float], rows: Sequence[Sequence[str]]) -> None:
        """Columns begin at these places; those whose place is below zero end there."""
        for number, row in enumerate([head, *rows]):
            self.y += 16
            for place, text in zip(columns, row):
                anchor = "start" if place > 0 else "end"
                self.text(abs(place), text, size=11, fill=INK if number else GREY, text_anchor=anchor)
            if not number:
                self.y += 5
                self.line(MARGIN, self.y, WIDTH - MARGIN, self.y)

    def finish(self) -> str:
        height = math.ceil(self.y + MARGIN)
        self.root.set("width", str(WIDTH))
        self.root.set("height", str(height))
        self.root.set("viewBox", f"0 0 {WIDTH} {height}")
        ElementTree.indent(self.root)
        return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(self.root, encoding="unicode")}\n'


def _said(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def cut(text: str, most: int) -> str:
    text = printable(text)
    return text if len(text) <= most else text[: most - 1] + "…"


def wrapped(text: str, width: int, *, most: int) -> list[str]:
    """Lines of whole words, as far as there are any; the last says that there is more."""
    lines: list[str] = []
    line = ""
    for word in printable(text, 1200).split():
        while len(word) > width:
            lines += filter(None, (line, word[:width]))
            line, word = "", word[width:]
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    lines += filter(None, (line,))
    return lines if len(lines) <= most else [*lines[: most - 1], lines[most - 1][: width - 1] + "…"]


class Scale(NamedTuple):
    """From seconds of the run to places on the page; ``step`` is from one tick to the next."""

    until: float
    step: float

    def x(self, seconds: float) -> float:
        return LEFT + (RIGHT - LEFT) * min(max(seconds, 0.0), self.until) / self.until

    @property
    def ticks(self) -> list[float]:
        return [self.step * number for number in range(math.floor(self.until / self.step + 1e-9) + 1)]


class Label(NamedTuple):
    """What stands beside a line that goes down from a mark: behind it, or before it where the page ends."""

    x: float
    name: str
    text: str

    @property
    def begin(self) -> float:
        width = 11 * LETTER * len(self.text)
        return self.x + 5 if self.x + 5 + width < WIDTH - MARGIN else self.x - 5 - width

    @property
    def end(self) -> float:
        return self.begin + 11 * LETTER * len(self.text)

    def touches(self, other: Label) -> bool:
        one, another = (
            (min(self.begin, self.x), max(self.end, self.x)),
            (min(other.begin, other.x), max(other.end, other.x)),
        )
        return one[0] - 8 < another[1] and another[0] - 8 < one[1]
