"""One run -> a picture of it, as a self-contained SVG: phases, signals, and the memory of each GPU over one time axis.

Pure. Knows how a run is drawn so that it can be filed: black on white, readable in print and without colours, with
nothing in it that runs, loads or links. Refuses to believe texts: each goes in escaped, bounded and as text alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, Optional

from . import documents, past
from .canvas import GREY, LEFT, MARGIN, RIGHT, Canvas, Label, Scale, cut, wrapped
from .model import MIB
from .report import short
from .text import amounts, mib, printable

#: Colours that differ for every kind of eye; where they mean something, a word says it too.
PHASES: Mapping[str, str] = {
    "measure": "#7a9cc6",
    "preconditions": "#b0a8b9",
    "survey": "#7fb8ad",
    "evict": "#d98a5b",
    "drain": "#4f81bd",
    "reset": "#a77ab5",
}
SIGNALS: Mapping[str, str] = {"SIGTERM": "#8a5a00", "SIGKILL": "#a11212"}

GOOD, BAD, CURVE = "#1c6b3a", "#a11212", "#2f5d94"

#: So many GPUs are drawn, so many are listed, and so many processes and labels of signals.
MOST_DRAWN, MOST_LISTED, MOST_HOLDERS, MOST_LABELS = 16, 24, 16, 12
MOST_STILL, MOST_LANES = 4, 12

#: What is narrower than this is hardly seen.
DOT = 5

#: What people read of a run without a timeline.
NO_TIMELINE = "No course of this run was recorded: it is of an earlier gpuprestart, or it ended before it looked."


def svg(found: Mapping[str, Any]) -> str:
    """The picture of the run that this document is about."""
    read = documents.document(found)
    canvas = Canvas()
    canvas.root.set("aria-labelledby", "title desc")
    canvas.add("title", _title(read), id="title")
    canvas.add("desc", _description(read), id="desc")
    canvas.add("rect", x=0, y=0, width="100%", height="100%", fill="#ffffff")
    _head(canvas, read)
    scale = _scale(read)
    _axis(canvas, scale)
    top = canvas.y
    _phases(canvas, read, scale)
    _signals(canvas, read, scale)
    _memory(canvas, read, scale)
    _grid(canvas, scale, top)
    _gpus(canvas, read)
    _holders(canvas, read)
    return canvas.finish()


# Words at the top ----------------------------------------------------------------------------------------------------


def _title(read: Mapping[str, Any]) -> str:
    return printable(f"{read['unit'] or 'no unit'}: {read['outcome'] or 'unknown'}{_when(read)}", 400)


def _when(read: Mapping[str, Any]) -> str:
    if read["time"] is None:
        return ""
    return f", {datetime.fromtimestamp(read['time'], timezone.utc).strftime('%Y-%m-%d %H:%M:%S UTC')}"


def _description(read: Mapping[str, Any]) -> str:
    """What is to be seen, for whoever does not see it."""
    gpus, gone = read["gpus"], past.ended(read)
    clean = sum(each["clean"] is True for each in gpus)
    freed = past.freed(read)
    return " ".join(
        (
            f"A run of gpuprestart of {_seconds(read['duration_s'])}.",
            f"{clean} of {len(gpus)} GPUs proved clean.",
            f"{len(gone)} processes ended{f' ({printable(past.names(gone), 300)})' if gone else ''}.",
            f"{mib(freed)} freed." if freed else "",
            read["message"] or "",
        )
    ).strip()


def _head(canvas: Canvas, read: Mapping[str, Any]) -> None:
    canvas.y = 44.0
    outcome = printable(read["outcome"] or "unknown", 20)
    good = read["exit"] == 0
    width = 24 + 10.2 * len(outcome)
    canvas.add("rect", x=MARGIN, y=canvas.y - 22, width=width, height=30, rx=4, fill=GOOD if good else BAD)
    canvas.text(MARGIN + width / 2, outcome, size=17, fill="#ffffff", font_weight="bold", text_anchor="middle")
    verb = f" ({read['verb']} only: nothing was touched)" if read["verb"] not in (None, "clean") else ""
    canvas.text(MARGIN + width + 14, cut(f"{read['unit'] or 'no unit'}{verb}", 66), size=19, font_weight="bold")
    canvas.y += 12
    for line in wrapped(read["message"] or "", 138, most=3):
        canvas.y += 18
        canvas.text(MARGIN, line, size=13)
    canvas.y += 8
    policy = ", ".join(read["policy_files"]) or ("built in" if read["version"] else "-")
    facts = [
        ("began", _when(read).removeprefix(", ") or "-", "took", _seconds(read["duration_s"])),
        ("run", read["run"] or "-", "boot", read["boot_id"] or "-"),
        ("driver", read["driver"] or "-", "NVML", read["nvml_path"] or "-"),
        ("policy", policy, "freed", _freed(read)),
    ]
    for left, one, right, other in facts:
        canvas.y += 17
        canvas.text(MARGIN, left, fill=GREY)
        canvas.text(MARGIN + 60, cut(one, 56))
        canvas.text(500, right, fill=GREY)
        canvas.text(560, cut(other, 56))
    canvas.y += 34


def _freed(read: Mapping[str, Any]) -> str:
    amount = past.freed(read)
    return "-" if amount is None else mib(amount)


def _seconds(seconds: Optional[float]) -> str:
    return "an unknown time" if seconds is None else f"{seconds:.3f} s" if seconds < 10 else f"{seconds:.1f} s"


# The time axis -------------------------------------------------------------------------------------------------------


def _scale(read: Mapping[str, Any]) -> Scale:
    timeline = read["timeline"]
    ends = [
        *(each[2] for each in timeline["phases"]),
        *(each[0] for each in timeline["signals"]),
        *(each[0] for each in timeline["used_bytes"]),
    ]
    until = max([0.001, read["duration_s"] or 0.0, *ends])
    rough = until / 8
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return Scale(until, step)


def _axis(canvas: Canvas, scale: Scale) -> None:
    digits = max(0, -math.floor(math.log10(scale.step)))
    canvas.text(MARGIN, "seconds", size=11, fill=GREY)
    for tick in scale.ticks:
        canvas.text(scale.x(tick), f"{tick:.{digits}f}", size=11, fill=GREY, text_anchor="middle")
    canvas.y += 8


def _grid(canvas: Canvas, scale: Scale, top: float) -> None:
    """Behind all that is drawn so far, and for all of it."""
    behind = 3
    for tick in scale.ticks:
        canvas.line(scale.x(tick), top, scale.x(tick), canvas.y + 4, stroke="#ececec")
        canvas.root.insert(behind, canvas.root[-1])
        del canvas.root[-1]


# Phases and signals --------------------------------------------------------------------------------------------------


def _phases(canvas: Canvas, read: Mapping[str, Any], scale: Scale) -> None:
    """A lane for each, in the order in which they first began: one may lie within another."""
    stretches = read["timeline"]["phases"]
    if not stretches:
        canvas.y += 20
        canvas.text(LEFT, NO_TIMELINE, fill=GREY)
        canvas.y += 12
        return
    lanes: dict[str, list[tuple[float, float]]] = {}
    for name, began, ended in sorted(stretches, key=lambda each: float(each[1])):
        lanes.setdefault(name, []).append((began, max(began, ended)))
    for name, spans in list(lanes.items())[:MOST_LANES]:
        canvas.y += 4
        canvas.text(MARGIN, cut(name, 18), y=canvas.y + 12)
        for began, ended in spans:
            x, colour = scale.x(began), PHASES.get(name, "#9a9a9a")
            width = max(1.5, scale.x(ended) - x)
            canvas.add("rect", x=x, y=canvas.y, width=width, height=16, rx=1.5, fill=colour)
        spent = read["phases"].get(name)
        if spent is not None:
            _beside(canvas, _seconds(spent), scale.x(spans[0][0]), scale.x(max(ended for _, ended in spans)))
        canvas.y += 16
    canvas.y += 10


def _beside(canvas: Canvas, text: str, begin: float, end: float) -> None:
    """How long it took, where there is room for it: behind its bars, before them, or on the last of them."""
    if end < RIGHT - 50:
        canvas.text(end + 6, text, size=11, y=canvas.y + 12, fill=GREY)
    elif begin > LEFT + 60:
        canvas.text(begin - 6, text, size=11, y=canvas.y + 12, fill=GREY, text_anchor="end")
    else:
        canvas.text(RIGHT + 6, text, size=11, y=canvas.y + 12, fill=GREY)


def _signals(canvas: Canvas, read: Mapping[str, Any], scale: Scale) -> None:
    """A mark for each; those that would lie on one another share a mark and a label."""
    signals = read["timeline"]["signals"]
    if not signals:
        return
    names = {each["pid"]: each["comm"] for each in read["holders"]}
    groups: list[tuple[float, str, list[int]]] = []
    for at, pid, name in sorted(signals, key=lambda each: float(each[0])):
        if groups and groups[-1][1] == name and scale.x(at) - scale.x(groups[-1][0]) < 10:
            groups[-1][2].append(pid)
        else:
            groups.append((at, name, [pid]))
    canvas.text(MARGIN, "signals", y=canvas.y + 11)
    labelled = [Label(scale.x(at), name, _signal(name, pids, names)) for at, name, pids in groups[:MOST_LABELS]]
    for at, name, _ in groups:
        canvas.add("path", d=f"M {scale.x(at):.2f} {canvas.y + 12:.2f} l -4.5 -10 h 9 z", fill=SIGNALS.get(name, GREY))
    # From the right, each in the first row that has room: so no line from a mark to its label crosses another label.
    rows: list[list[Label]] = []
    for label in reversed(labelled):
        row = next((row for row in rows if not any(label.touches(each) for each in row)), None)
        if row is None:
            row = []
            rows.append(row)
        row.append(label)
    for number, row in enumerate(rows):
        y = canvas.y + 27 + 15 * number
        for label in row:
            colour = SIGNALS.get(label.name, GREY)
            canvas.line(label.x, canvas.y + 12, label.x, y, stroke=colour, stroke_width=0.7)
            x, anchor = (label.x + 5, "start") if label.begin > label.x else (label.x - 5, "end")
            canvas.text(x, label.text, size=11, y=y, fill=colour, text_anchor=anchor)
    canvas.y += 15 * len(rows) + 18
    if len(groups) > MOST_LABELS:
        canvas.y += 12
        canvas.text(LEFT, f"and {len(groups) - MOST_LABELS} more marks without a label", size=11, fill=GREY)
        canvas.y += 6


def _signal(name: str, pids: Sequence[int], names: Mapping[Optional[int], Optional[str]]) -> str:
    who = ", ".join(f"{names.get(pid) or 'PID'}[{pid}]" for pid in pids[:2])
    return f"{cut(f'{name} {who}', 56)}{f' and {len(pids) - 2} more' if len(pids) > 2 else ''}"


# Memory --------------------------------------------------------------------------------------------------------------

Points = Sequence[tuple[float, Optional[int]]]


def _moved(points: Points) -> int:
    known = [used for _, used in points if used is not None]
    return max(known) - min(known) if known else 0


def _memory(canvas: Canvas, read: Mapping[str, Any], scale: Scale) -> None:
    """A small chart for each GPU that was not clean in the end or whose memory moved, one below the other on the same
    time; the rest is counted."""
    curves = [(gpu, past.curve(read, number)) for number, gpu in enumerate(read["gpus"])]
    curves = [(gpu, points) for gpu, points in curves if any(used is not None for _, used in points)]
    if not curves:
        return
    moved = [each for each in curves if _moved(each[1]) >= MIB]
    # What a refusal is about comes first, and need not have moved.
    wanted = [each for each in curves if each[0]["clean"] is False or each in moved]
    wanted.sort(key=lambda each: (each[0]["clean"] is not False, -_moved(each[1])))
    # Where all stayed clean and nothing moved that is what there is to see, on some of them.
    drawn = wanted[:MOST_DRAWN] or curves[:MOST_STILL]
    drawn.sort(key=lambda each: (each[0]["index"] or 0, each[0]["uuid"] or ""))
    canvas.y += 22
    canvas.text(MARGIN, "memory in use", size=13, font_weight="bold")
    canvas.line(LEFT, canvas.y - 4, LEFT + 26, canvas.y - 4, stroke=CURVE, stroke_width=2)
    canvas.text(LEFT + 32, "used; a step is when it was seen", size=11, fill=GREY)
    x = LEFT + 262
    canvas.line(x, canvas.y - 4, x + 26, canvas.y - 4, stroke=BAD, stroke_dasharray="5 3", stroke_width=1.2)
    canvas.text(x + 32, "limit: no more may be in use when a server starts", size=11, fill=GREY)
    height = 60 if len(drawn) <= 4 else 44 if len(drawn) <= 8 else 32
    for gpu, points in drawn:
        _chart(canvas, gpu, points, scale, height)
    rest = len(read["gpus"]) - len(drawn)
    if rest > 0:
        undrawn = sum(each not in drawn for each in moved)
        words = [f"{_gpus_of(undrawn)} more moved, less than these"] if undrawn else []
        words += [f"{_gpus_of(rest - undrawn)} more whose memory did not move"] if rest > undrawn and moved else []
        words += [f"{_gpus_of(rest)} more whose memory did not move either"] if not moved else []
        canvas.y += 18
        canvas.text(LEFT, "not drawn: " + ", ".join(words), size=11, fill=GREY, font_style="italic")
    canvas.y += 6


def _gpus_of(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _chart(canvas: Canvas, gpu: Mapping[str, Any], points: Points, scale: Scale, height: int) -> None:
    """Used memory as steps, since a figure holds until the next; where it could not be read there is a gap."""
    top, bottom = canvas.y + 10, canvas.y + 10 + height
    known = [used for _, used in points if used is not None]
    limit = gpu["limit_bytes"]
    most = 1.1 * max(*known, limit or 0, 1)

    def y(amount: int) -> float:
        return bottom - height * amount / most

    canvas.text(MARGIN, f"GPU {'?' if gpu['index'] is None else gpu['index']}", y=top + 11, font_weight="bold")
    canvas.text(LEFT - 12, short(gpu["uuid"] or ""), size=10, y=top + 11, fill=GREY, text_anchor="end")
    course = [f"{mib(max(known))} → {mib(known[-1])}"] if max(known) - known[-1] >= MIB else [mib(known[-1])]
    course += [f"limit {mib(limit)}"] if limit is not None and height > 32 else []
    for number, line in enumerate(course):
        canvas.text(LEFT - 12, line, size=10, y=top + 24 + 13 * number, fill=GREY, text_anchor="end")
    canvas.line(LEFT, bottom, RIGHT, bottom, stroke="#8c8c8c")
    for stretch in _stretches(points, scale.until):
        first, last = scale.x(stretch[0][0]), scale.x(stretch[-1][0])
        steps = "".join(f" H {scale.x(at):.2f} V {y(amount):.2f}" for at, amount in stretch[1:])
        line = f"{first:.2f} {y(stretch[0][1]):.2f}{steps}"
        canvas.add(
            "path", d=f"M {first:.2f} {bottom:.2f} L {line} H {last:.2f} V {bottom:.2f} Z", fill=CURVE, opacity=0.15
        )
        canvas.add("path", d=f"M {line}", fill="none", stroke=CURVE, stroke_width=1.8)
        if last - first < DOT:
            # One sample, at the end of a run that needed no other, is no line.
            middle = min((first + last) / 2, RIGHT - DOT / 2)
            canvas.add("rect", x=middle - DOT / 2, y=y(stretch[-1][1]) - DOT / 2, width=DOT, height=DOT, fill=CURVE)
    if limit is not None:
        canvas.line(LEFT, y(limit), RIGHT, y(limit), stroke=BAD, stroke_dasharray="5 3", stroke_width=1.2)
    canvas.y = bottom


def _stretches(points: Points, until: float) -> Iterator[list[tuple[float, int]]]:
    """The figures between two gaps; each stretch goes on until the next sample, or until the end of the run."""
    stretch: list[tuple[float, int]] = []
    for at, used in points:
        if used is not None:
            stretch.append((at, used))
        elif stretch:
            yield [*stretch, (at, stretch[-1][1])]
            stretch = []
    if stretch:
        yield [*stretch, (until, stretch[-1][1])]


# What it ended with --------------------------------------------------------------------------------------------------


def _gpus(canvas: Canvas, read: Mapping[str, Any]) -> None:
    """Every figure of the verdict. Those that are not clean come first, should there be more than have room."""
    gpus = read["gpus"]
    if not gpus:
        return
    shown = sorted(gpus, key=lambda each: each["clean"] is True)[:MOST_LISTED]
    shown = [each for each in gpus if each in shown]
    rows = []
    for gpu in shown:
        used, limit = gpu["used_bytes"], gpu["limit_bytes"]
        both = amounts(used, limit) if used is not None and limit is not None else (_mib(used), _mib(limit))
        index = "-" if gpu["index"] is None else str(gpu["index"])
        clean = {True: "yes", False: "no"}.get(gpu["clean"], "-")
        figures = [*both, _mib(gpu["unattributed_bytes"]), _mib(gpu["total_bytes"])]
        rows.append([index, cut(gpu["uuid"] or "-", 44), cut(gpu["name"] or "-", 28), *figures, clean])
    canvas.y += 30
    canvas.text(MARGIN, "the verdict on each GPU", size=13, font_weight="bold")
    head = ["GPU", "UUID", "name", "used", "limit", "unattributed", "total", "clean"]
    canvas.table(head, (MARGIN, 66, 362, -610, -700, -800, -890, 918), rows)
    if len(gpus) > len(shown):
        rest = [each for each in gpus if each not in shown]
        clean = "all of them clean" if all(each["clean"] is True for each in rest) else "not all of them clean"
        canvas.y += 17
        canvas.text(66, f"and {_gpus_of(len(rest))} more, {clean}", size=11, fill=GREY, font_style="italic")


def _mib(amount: Optional[int]) -> str:
    return "-" if amount is None else mib(amount)


def _holders(canvas: Canvas, read: Mapping[str, Any]) -> None:
    """Whom the run ended, and who was in its way."""
    told = [each for each in read["holders"] if each["fate"] or each["action"] in ("refuse", "wait")]
    if not told:
        return
    rows = [
        [
            "-" if each["pid"] is None else str(each["pid"]),
            cut(each["comm"] or "-", 18),
            cut(each["user"] or "-", 12),
            _mib(each["bytes"]),
            cut(each["fate"] or each["action"] or "-", 12),
            cut(each["reason"] or "-", 96),
        ]
        for each in told[:MOST_HOLDERS]
    ]
    canvas.y += 30
    canvas.text(MARGIN, "processes that it ended, or that were in its way", size=13, font_weight="bold")
    canvas.table(["PID", "command", "user", "memory", "fate", "because it"], (-66, 80, 206, -356, 372, 446), rows)
    if len(told) > MOST_HOLDERS:
        canvas.y += 17
        canvas.text(80, f"and {len(told) - MOST_HOLDERS} more", size=11, fill=GREY, font_style="italic")
