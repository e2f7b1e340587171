"""The one picture of docs/how-it-decides.md: ``python -m tests.picture_of_decisions`` draws it into docs/img.

Its words for actions and outcomes are the program's own, so that a word that changes there is missed here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from gpuprestart.model import EXIT_STATUS, Action, Outcome

PICTURE = Path(__file__).parents[1] / "docs/img/how-it-decides.svg"

WIDTH, HEIGHT = 960, 1006
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"

#: Fill and edge of boxes, by what they are about.
PLAIN, SEEN = ("#ffffff", "#8a94a3"), ("#eef3fb", "#4a6fa5")
COLOURS = {
    Action.KILL: ("#fff4d6", "#b7791f"),
    Action.REFUSE: ("#fde4e4", "#b83232"),
    Action.WAIT: ("#e0f2fb", "#2b7a9b"),
    Action.SPARE: ("#e3f5e6", "#2f855a"),
}

#: What becomes of whom, as table.py has it.
TABLE = {
    Action.KILL: (
        "our own unit's last run",
        "a dead unit's, as its user",
        "what nothing runs any more",
        "a rule says so",
    ),
    Action.WAIT: ("a unit that is", "deactivating"),
    Action.REFUSE: ("a unit that is up", "a login session, a user", "a container, a Slurm job", "nobody, or no answer"),
    Action.SPARE: ("the driver's own services", "display servers, monitors", "a rule says so"),
}


class Drawing:
    def __init__(self) -> None:
        self.parts: list[str] = []

    def text(
        self, x: float, y: float, words: str, *, size: int = 14, weight: int = 400, anchor: str = "middle"
    ) -> None:
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
            f' fill="#1d2733">{escape(words)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, title: str, lines: Sequence[str] = (), colours: tuple[str, str] = PLAIN
    ) -> float:
        """A box with a title and lines below it; where it ends."""
        height = 34 + 20 * len(lines)
        fill, edge = colours
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height}" rx="8" fill="{fill}" stroke="{edge}"'
            ' stroke-width="1.5"/>'
        )
        self.text(x + width / 2, y + 22, title, size=15, weight=600)
        for number, line in enumerate(lines):
            self.text(x + width / 2, y + 44 + 20 * number, line)
        return y + height

    def arrow(self, x: float, y: float, to_x: float, to_y: float, words: str = "") -> None:
        self.parts.append(
            f'<path d="M{x:g} {y:g} L{to_x:g} {to_y:g}" stroke="#5b6675" stroke-width="1.6" fill="none"'
            ' marker-end="url(#head)"/>'
        )
        if words:
            self.text((x + to_x) / 2 + 8, (y + to_y) / 2 + 4, words, size=13, anchor="start")

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
            f' font-family="{FONT}" role="img" aria-labelledby="title desc">\n'
            '<title id="title">How gpuprestart decides</title>\n'
            '<desc id="desc">From what the driver and /proc show, by the owner that systemd names, to an exit status.'
            "</desc>\n"
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7"'
            ' orient="auto"><path d="M0 0 L10 5 L0 10 z" fill="#5b6675"/></marker></defs>\n'
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fbfcfe"/>\n'
        )
        return head + "\n".join(self.parts) + "\n</svg>\n"


def draw() -> str:
    made, middle = Drawing(), WIDTH / 2
    made.text(middle, 36, "How gpuprestart decides", size=22, weight=700)
    made.text(middle, 62, "It ends a process only with proof that nobody alive wants it,", size=15)
    made.text(middle, 82, "and passes only with proof that the memory is free. In all other cases it refuses.", size=15)

    seen = made.box(40, 104, 420, "NVML", ["memory in use, on every GPU", "who has how much of it"], SEEN)
    made.box(500, 104, 420, "/proc", ["who has the device open or mapped,", "in any thread, by its number"], SEEN)
    made.arrow(250, seen, middle - 90, 216)
    made.arrow(710, seen, middle + 90, 216)
    holders = made.box(250, 218, 460, "holders", ["each with its evidence: nvml, fd, map"])
    made.arrow(middle, holders, middle, 306)
    owner = made.box(
        150, 308, 660, "whose is each?",
        ["systemd says: a unit, a session, a user, a container, a job, nobody", "a name or a path never does"],
        SEEN,
    )  # fmt: skip
    made.text(middle, owner + 26, "first that fits: infrastructure, your rules, our own unit, then the owner", size=13)

    left, room = 40.0, 208.0
    centre, ends = {}, {}
    for action in (Action.KILL, Action.WAIT, Action.REFUSE, Action.SPARE):
        centre[action] = left + room / 2
        made.arrow(middle, owner + 34, centre[action], 466)
        ends[action] = made.box(left, 468, room, action.value, TABLE[action], COLOURS[action])
        left += room + 16

    again = made.box(
        40, 626, room, "SIGTERM, SIGKILL",
        ["grace between, by pidfd;", "before each signal all", "is looked at again"], COLOURS[Action.KILL],
    )  # fmt: skip
    made.arrow(centre[Action.KILL], ends[Action.KILL], centre[Action.KILL], 624)
    made.arrow(centre[Action.WAIT], ends[Action.WAIT], centre[Action.WAIT], 762)
    waited = made.box(
        40, 764, 2 * room + 16, "wait for the memory",
        ["every GPU under its limit, for the settle time;", "whoever comes meanwhile is judged as well"],
    )  # fmt: skip
    made.arrow(centre[Action.KILL], again, centre[Action.KILL], 762)
    made.arrow(centre[Action.SPARE], ends[Action.SPARE], centre[Action.SPARE], 640)
    made.text(centre[Action.SPARE], 660, "its memory is left out", size=13)
    made.text(centre[Action.SPARE], 678, "of account, up to a limit", size=13)

    top = 894
    passing = (Outcome.CLEAN, Outcome.CLEANED)
    late = (Outcome.NOT_FREED, Outcome.UNATTRIBUTED, Outcome.UNKILLABLE, Outcome.RESPAWNING)
    refusing = COLOURS[Action.REFUSE]
    made.arrow(centre[Action.KILL], waited, centre[Action.KILL], top - 2, "proved")
    words = [", ".join(each.value for each in passing), "the server starts"]
    made.box(40, top, room, f"exit {EXIT_STATUS[passing[0]]}", words, COLOURS[Action.SPARE])
    made.arrow(centre[Action.WAIT], waited, centre[Action.WAIT], top - 2, "deadline")
    words = [", ".join(each.value for each in late[:2]), ", ".join(each.value for each in late[2:])]
    words.append(f"{Outcome.PROTECTED.value}: it never stopped")
    made.box(56 + room, top, room, f"exit {EXIT_STATUS[late[0]]}", words, refusing)
    made.arrow(centre[Action.REFUSE], ends[Action.REFUSE], centre[Action.REFUSE], top - 2, "at once, unless")
    made.text(
        centre[Action.REFUSE] + 8, (ends[Action.REFUSE] + top) / 2 + 19, "the policy waits", size=13, anchor="start"
    )
    words = [Outcome.PROTECTED.value, "nobody is signalled"]
    made.box(72 + 2 * room, top, room, f"exit {EXIT_STATUS[Outcome.PROTECTED]}", words, refusing)
    words = [f"{Outcome.UNKNOWN.value}: no answer", f"{Outcome.DENIED.value}: not seen"]
    statuses = f"exit {EXIT_STATUS[Outcome.UNKNOWN]}, {EXIT_STATUS[Outcome.DENIED]}"
    made.box(88 + 3 * room, top, room, statuses, words, refusing)
    made.text(centre[Action.SPARE], top - 10, "and what cannot be told", size=13)
    return made.svg()


def main() -> int:
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(draw(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
