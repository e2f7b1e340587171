"""``status`` and ``check`` as a person sees them: laid out on a terminal, as plain columns everywhere else.

It takes documents, of whichever machine or time, and believes nothing in them. Which figures there are, and how they
are written, is columns.py's; here is only where they stand, and in which colour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional, TextIO

from . import columns, documents, printing, screen
from .text import mib

Document = Mapping[str, Any]

_ACTIONS: Mapping[str, str] = {"kill": "yellow", "refuse": "red", "wait": "cyan", "spare": "green", "none": "dim"}

#: What a narrow terminal leaves out first, of GPUs and of holders. What of a holder has no room stands below it.
_LESS_OF_GPUS = ("NAME", "UNATTRIBUTED", "RESERVED", "TOTAL", "UUID", "LIMIT")
_LESS_OF_HOLDERS = ("EVIDENCE", "AGE", "STATE", "USER", "OWNER")

#: Letters that the bar of a GPU's memory has at least and at most.
_BAR, _LONG_BAR = 10, 30

_GAP = 2


def show(verb: str, document: Document, *, out: TextIO, err: TextIO) -> None:
    """``status`` or ``check`` of one machine, whose name is ``document["host"]`` where it is another one."""
    console = screen.console(out)
    if console is None:
        printing.show(plain(verb, document), out=out, err=err)
        return
    with console.capture() as capture:
        console.print(renderable(verb, document, console.width, can_draw=screen.can_draw(out)))
    printing.show(capture.get(), out=out, err=err)


def plain(verb: str, document: Document) -> str:
    read = documents.document(document)
    return columns.check(read) if verb == "check" else columns.status(read)


def renderable(
    verb: str, document: Document, width: int, *, can_draw: bool = True, beside: Optional[Mapping[str, str]] = None
) -> Any:
    """The same for Rich, in so many columns. ``beside`` has a line for each GPU by UUID, to be shown with it."""
    from rich.console import Group
    from rich.text import Text

    read = documents.document(document)
    parts: list[Any] = []
    name = columns.heading(read)
    about = "  ".join(filter(None, (name, _about(read))))
    parts += [Text(about, style="bold"), Text("")]
    parts += [_gpus(read, width, can_draw, beside or {}), *_faults(read), Text(""), *_holders(read, width)]
    for each in columns.unmet(read):
        parts.append(Text.assemble(("not met  ", "red"), f"{each['check'] or '-'}: {each['message'] or '-'}"))
    if verb == "check":
        parts += [*_residue(read, width), Text(""), *_verdict(read, width)]
    return Group(*parts)


def _about(read: Document) -> str:
    count = len(read["gpus"])
    driver = f", driver {read['driver']}" if read["driver"] else ""
    return f"{count} GPU{'' if count == 1 else 's'}{driver}"


# GPUs ----------------------------------------------------------------------------------------------------------------


def _gpus(read: Document, width: int, can_draw: bool, beside: Mapping[str, str]) -> Any:
    from rich.text import Text

    if not read["gpus"]:
        return Text("no GPU selected")
    rows = columns.gpu_rows(read)
    fixed = max((len(line) for line in beside.values()), default=0)
    reserved = _BAR + _GAP + (fixed + _GAP if fixed else 0)
    # A fault has a line of its own.
    shown = _fitting([columns.GPU, *rows], width - reserved, less=_LESS_OF_GPUS, never=("FAULT",))
    left = width - reserved - _needed([columns.GPU, *rows], shown) + _BAR
    bar = min(_LONG_BAR, max(_BAR, left))
    first, *others = (columns.GPU[number] for number in shown)
    table = _table([first, "IN USE", *others, *([""] if fixed else [])])
    for gpu, row in zip(read["gpus"], rows):
        cells = [_styled(columns.GPU[number], row[number]) for number in shown]
        extra = [Text(beside.get(gpu["uuid"] or "", ""))] if fixed else []
        table.add_row(cells[0], _bar(gpu, bar, can_draw), *cells[1:], *extra)
    return table


def _faults(read: Document) -> list[Any]:
    """Why a GPU is not clean, where neither its figures nor its holders say it."""
    from rich.text import Text

    said = []
    for gpu in read["gpus"]:
        unexplained, limit = gpu["unattributed_bytes"], gpu["limit_bytes"]
        if gpu["fault"] and " used, limit " not in gpu["fault"]:
            said.append((gpu["index"], gpu["fault"]))
        elif not gpu["clean"] and unexplained is not None and limit is not None and unexplained > limit:
            said.append((gpu["index"], f"no process is known to have {mib(unexplained)} of what is used"))
    return [Text(f"GPU {'?' if index is None else index}: {fault}", style="red") for index, fault in said]


def _bar(gpu: Document, width: int, can_draw: bool) -> Any:
    """How much of the memory is in use."""
    from rich.text import Text

    used, total = gpu["used_bytes"], gpu["total_bytes"]
    if used is None or not total:
        return Text("-")
    full = min(width, -(-used * width // total)) if used > (gpu["limit_bytes"] or 0) else used * width // total
    on, off = ("█", "░") if can_draw else ("#", ".")
    return Text.assemble((on * full, "green" if gpu["clean"] else "red"), (off * (width - full), "dim"))


def _styled(column: str, text: str) -> Any:
    from rich.text import Text

    style = {"yes": "green", "no": "bold red"}.get(text, "") if column == "CLEAN" else ""
    return Text(text, style=style)


# Holders -------------------------------------------------------------------------------------------------------------


def _holders(read: Document, width: int) -> list[Any]:
    """Two lines for each: who it is, and below it what would become of it and why, however long that is."""
    from rich.padding import Padding
    from rich.text import Text

    rows = columns.holder_rows(read)
    if not rows:
        return [Text("no holders")]
    cut = [columns.HOLDER, *rows]
    shown = _fitting(cut, width, less=_LESS_OF_HOLDERS, never=("ACTION", "REASON"))
    left_out = [number for number in range(len(columns.HOLDER) - 2) if number not in shown]
    widths = {number: max(len(row[number]) for row in cut) for number in shown}
    parts: list[Any] = [Text(_line(columns.HOLDER, widths), style="bold", no_wrap=True)]
    for row in rows:
        action, reason = row[-2], row[-1]
        parts.append(Text(_line(row, widths), no_wrap=True, overflow="ellipsis"))
        # What had no room above is said here: nobody is to be guessed at.
        rest = ", ".join(f"{columns.HOLDER[number].lower()} {row[number]}" for number in left_out if row[number] != "-")
        said = Text.assemble((action, _ACTIONS.get(action, "")), f"  {reason}", (f" ({rest})" if rest else "", "dim"))
        parts.append(Padding(said, (0, 0, 0, 4)))
    more = columns.more_holders(read)
    return [*parts, Text(more)] if more else parts


def _line(row: Sequence[str], widths: Mapping[int, int]) -> str:
    cells = [
        row[number].rjust(width) if columns.HOLDER[number] in columns.RIGHT else row[number].ljust(width)
        for number, width in widths.items()
    ]
    return (" " * _GAP).join(cells).rstrip()


# The verdict ---------------------------------------------------------------------------------------------------------


def _residue(read: Document, width: int) -> list[Any]:
    from rich.text import Text

    if not read["residue"]:
        return []
    table = _table(columns.RESIDUE)
    for row in columns.residue_rows(read):
        table.add_row(*(Text(cell, overflow="fold") for cell in row))
    return [Text(""), table, *(Text(line) for line in columns.more_residue(read))]


def _verdict(read: Document, width: int) -> list[Any]:
    from rich.padding import Padding
    from rich.text import Text

    style = "bold green" if read["exit"] == 0 else "bold red"
    parts: list[Any] = [Text(line, style=style) for line in columns.verdict_lines(read)]
    parts += [Padding(Text.assemble(("hint  ", "dim"), hint), (0, 0, 0, 2)) for hint in read["hints"]]
    helps = columns.advice(read)
    if helps:
        parts += [Text(""), Text(f"What would help{columns.where(read)}:", style="bold")]
    for command, why in helps:
        # A command is never broken: it is there to be copied.
        fits = len(command) + len(why) + 6 <= width
        parts.append(Text.assemble("  ", (command, "bold cyan"), (f"  # {why}" if fits else "", "dim")))
        if not fits:
            parts.append(Padding(Text(f"# {why}", style="dim"), (0, 0, 0, 6)))
    return parts


# Columns that fit ----------------------------------------------------------------------------------------------------


def _fitting(rows: Sequence[Sequence[str]], width: int, *, less: Sequence[str], never: Sequence[str]) -> list[int]:
    """The columns that are shown: without those that are ``never``, and without so many of ``less`` that it fits."""
    head = rows[0]
    shown = [number for number, name in enumerate(head) if name not in never]
    for name in less:
        if _needed(rows, shown) <= width:
            break
        shown = [number for number in shown if head[number] != name]
    return shown


def _needed(rows: Sequence[Sequence[str]], shown: Sequence[int]) -> int:
    return sum(max(len(row[number]) for row in rows) for number in shown) + _GAP * (len(shown) - 1)


def _table(head: Sequence[str]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for name in head:
        table.add_column(name, justify="right" if name in columns.RIGHT else "left", no_wrap=name != "REASON")
    return table
