"""docs/man/*.md -> man(7) in build/man, or in the folder that is given, for the few constructs that our pages use.

Distributions have such converters, but not the same ones: RHEL has no pandoc, and go-md2man sets tables that do not fit
on a terminal. This one needs nothing but Python, so the packages of all of them have the same pages. No date is in a
page: the version says as much, and the page is the same whenever it is built.

What it knows: headings, paragraphs, a backslash for the end of a line, lists with "- ", terms with ": " below them,
listings (indented by four, or fenced), tables, `literal`, **bold** and *placeholder*. All else is text.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Callable

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = {"5": "File Formats", "8": "System Administration"}

#: Characters that troff reads or sets otherwise, and what stands for them.
_SPECIAL = {"\\": "\\(rs", "'": "\\(aq", "`": "\\(ga", "^": "\\(ha", "~": "\\(ti", '"': "\\(dq"}
_INLINE = re.compile(r"`([^`]+)`|\*\*(.+?)\*\*|\*([^*\s][^*]*)\*")
#: A column that has a longer cell than this is set as text of several lines.
_NARROW = 24


def page(source: str, name: str, section: str, version: str) -> str:
    """The page in man(7), which man(1) hands to tbl(1) first, as its first line asks."""
    head = [
        "'\\\" t",
        # Neither hyphens nor gaps: what is copied from a page has to be what stands there. groff's macros set .hy anew
        # from this register with every paragraph.
        ".nr HY 0",
        f'.TH "{name.upper()}" "{section}" "" "gpuprestart {version}" "{SECTIONS[section]}"',
        ".nh",
        ".ad l",
    ]
    body = "\n".join([*_blocks(source.splitlines()), ""])
    # What a heading is followed by needs no gap of its own.
    return "\n".join([*head, re.sub(r"^(\.S[HS] .*)\n\.PP$", r"\1", body, flags=re.MULTILINE)])


def _blocks(lines: Sequence[str], *, opened: bool = False) -> Iterable[str]:
    """``opened`` where a list item has begun, whose first paragraph goes on in its line."""
    at = 0
    while at < len(lines):
        line = lines[at]
        end = at + 1
        if not line or line.startswith("# "):
            # The name of the page, which stands in its first and last line anyway.
            at = end
            continue
        if line.startswith("#"):
            level, _, title = line.partition(" ")
            yield f'.{"SH" if level == "##" else "SS"} "{_text(title)}"'
        elif line.startswith("```"):
            end = lines.index("```", end) + 1
            yield from _listing(lines[at + 1 : end - 1])
        elif line.startswith("    "):
            end = _while(lines, at, lambda each: not each or each.startswith("    "))
            yield from _listing([each[4:] for each in lines[at:end]])
        elif line.startswith("| "):
            end = _while(lines, at, lambda each: each.startswith("|"))
            yield from _table([_cells(each) for each in lines[at:end] if not each.startswith("|-")])
        elif line.startswith("- "):
            end = _while(lines, end, lambda each: not each or each.startswith("  "))
            yield ".IP \\(bu 2"
            yield from _item([line[2:], *(each[2:] for each in lines[at + 1 : end])])
        elif lines[end : end + 1] and lines[end].startswith(": "):
            end = _while(lines, end + 1, lambda each: not each or each.startswith("  "))
            yield ".TP"
            yield _text(line)
            yield from _item([each[2:] for each in lines[at + 1 : end]])
        else:
            end = _while(lines, at, lambda each: bool(each) and not each.startswith(("#", "```", "    ", "| ", "- ")))
            if not opened:
                yield ".PP"
            yield from _paragraph(lines[at:end])
        opened = False
        at = end


def _while(lines: Sequence[str], at: int, belongs: Callable[[str], bool]) -> int:
    """Where what begins at this line is over."""
    while at < len(lines) and belongs(lines[at]):
        at += 1
    return at


def _item(lines: Sequence[str]) -> Iterable[str]:
    """The first paragraph stands beside the bullet or below the term, and what follows is indented like it."""
    first = _while(lines, 0, bool)
    yield from _blocks(lines[:first], opened=True)
    if any(lines[first:]):
        yield ".RS"
        yield from _blocks(lines[first:])
        yield ".RE"


def _paragraph(lines: Sequence[str]) -> Iterable[str]:
    for number, piece in enumerate(re.split(r"\\\n", "\n".join(lines))):
        if number:
            yield ".br"
        yield _text(" ".join(piece.split()))


def _listing(lines: Sequence[str]) -> Iterable[str]:
    while lines and not lines[-1]:
        lines = lines[:-1]
    yield from (".PP", ".RS 4", ".EX")
    yield from (_guarded(_literal(line)) for line in lines)
    yield from (".EE", ".RE")


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split(" | ")]


def _table(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    wide = [max(map(len, column)) > _NARROW for column in zip(*rows)]
    yield from (".PP", ".TS", " ".join("lB" for _ in wide), f"{' '.join(['l'] * len(wide[1:]))} lx.")
    yield "\t".join(map(_text, rows[0]))
    for row in rows[1:]:
        # An empty line keeps the rows apart, which have several lines each.
        yield ""
        yield "\t".join(
            f"T{{\n{_text(cell)}\nT}}" if block else _text(cell) for cell, block in zip(row, [*wide[:-1], True])
        )
    yield ".TE"


def _text(text: str) -> str:
    """A line of text, with its literals and placeholders set as such."""
    parts = []
    at = 0
    for found in _INLINE.finditer(text):
        parts.append(_prose(text[at : found.start()]))
        literal, bold, placeholder = found.groups()
        if literal is not None:
            # Short ones, such as "64 MiB", stay in one line.
            kept = " " if len(literal) > _NARROW // 2 else "\\ "
            parts.append(f"\\fB{_literal(literal).replace(' ', kept)}\\fR")
        else:
            parts.append(f"\\fB{_prose(bold)}\\fR" if bold is not None else f"\\fI{_prose(placeholder)}\\fR")
        at = found.end()
    return _guarded("".join([*parts, _prose(text[at:])]))


def _prose(text: str) -> str:
    """A hyphen between two words is one; what begins a word or stands alone is a minus, as in options and in NAME."""
    return re.sub(r"(?<!\w)-|-(?!\w)", r"\\-", _escaped(text))


def _literal(text: str) -> str:
    return _escaped(text).replace("-", "\\-")


def _escaped(text: str) -> str:
    plain = "".join(_SPECIAL.get(character, character) for character in text)
    return re.sub(r"[^\x00-\x7f]", lambda found: f"\\[u{ord(found[0]):04X}]", plain)


def _guarded(line: str) -> str:
    """What begins with a full stop would be a request."""
    return f"\\&{line}" if line.startswith((".", "'")) else line


def main(folder: Path) -> None:
    init = (ROOT / "gpuprestart" / "__init__.py").read_text(encoding="utf-8")
    version = re.findall(r'^__version__ = "(.*)"$', init, re.MULTILINE)[0]
    folder.mkdir(parents=True, exist_ok=True)
    for source in sorted((ROOT / "docs" / "man").glob("*.md")):
        name, _, section = source.stem.rpartition(".")
        text = page(source.read_text(encoding="utf-8"), name, section, version)
        (folder / source.stem).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "build" / "man")
