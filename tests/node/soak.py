"""The hook in front of a server a thousand times in a row, on a node where holders come and go, every verdict checked.

``make soak`` runs this. Each run is scene number i of a seed; after it a line is put into a state file, so that a run
that was cut short goes on where it stopped. The exit status is 0 if all runs are done and everything was right, 1 if
anything was wrong or grew, 3 if there are runs left to do.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

# What runs on the node is made of neighbours that import one another by their bare names, and so does the stage.
sys.path.insert(0, str(Path(__file__).parent / "driver"))

from simgpu_client import Refused  # noqa: E402

from tests.node.machine import REPOSITORY, Node, NodeError, can_boot  # noqa: E402
from tests.node.soak_plan import plan  # noqa: E402
from tests.node.soak_stage import Played, Stage  # noqa: E402
from tests.node.soak_truth import ends, faults, not_flat  # noqa: E402

SEED = 20261130
STATE = REPOSITORY / "build/soak/state"
RIGHT, WRONG, UNFINISHED = 0, 1, 3

#: A thousand runs are told in so many lines.
EVERY = 50


class State:
    """The runs so far, a line of JSON each, below one that says of what."""

    def __init__(self, path: Path, *, seed: int) -> None:
        self._path = path
        self._head = {"seed": seed, "sources": sources()}
        self.lines: list[dict[str, Any]] = []
        read = self._read()
        if read and read[0] == self._head:
            self.lines = read[1:]
        elif read:
            print(f"{path} is of another seed or of other sources: starting over", flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written whole: the last line of a run that was killed may be half a line.
        aside = path.with_suffix(".new")
        aside.write_text("".join(json.dumps(line) + "\n" for line in [self._head, *self.lines]))
        aside.rename(path)

    def _read(self) -> list[dict[str, Any]]:
        try:
            *whole, _ = self._path.read_text().split("\n")
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in whole]

    def append(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        with open(self._path, "a") as file:
            file.write(json.dumps(line) + "\n")


def sources() -> str:
    """What is put to the test, and by what."""
    digest = hashlib.sha256()
    for path in sorted([*(REPOSITORY / "gpuprestart").rglob("*.py"), *(REPOSITORY / "tests/node").rglob("*")]):
        if path.suffix in (".py", ".c", ".sh"):
            digest.update(f"{path.relative_to(REPOSITORY)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def soak(state: State, *, seed: int, runs: int, seconds: float) -> None:
    """Play what is left to play, on one node after the other if need be, for so many seconds at most."""
    until = time.monotonic() + seconds
    while len(state.lines) < runs and time.monotonic() < until:
        with Node(gpus=8) as node:
            stage = Stage(node)
            while len(state.lines) < runs and time.monotonic() < until:
                line, whole = one(stage, seed, len(state.lines))
                state.append(line)
                if line["faults"]:
                    print(f"run {line['number']}: {'; '.join(line['faults'])}", flush=True)
                if len(state.lines) % EVERY == 0:
                    print(f"{len(state.lines)} of {runs}, {sum(bool(each['faults']) for each in state.lines)} wrong",
                          flush=True)  # fmt: skip
                if not whole:
                    break


def one(stage: Stage, seed: int, number: int, *, verbose: bool = False) -> tuple[dict[str, Any], bool]:
    """The line of one run, and whether the node is fit for the next."""
    began = time.monotonic()
    chosen = plan(seed, number)
    line: dict[str, Any] = {"number": number}
    try:
        played = stage.play(chosen)
    except (AssertionError, NodeError, Refused, OSError) as error:
        if verbose:
            traceback.print_exc()
        return {**line, "outcomes": [], "faults": [f"cannot be played: {type(error).__name__}: {error}"]}, False
    if verbose:
        _show(played)
    told = [each for each in played.seen.told if not each.checking]
    line.update(
        outcomes=[each.outcome for each in told],
        signals=sum(len(each.signals) for each in told),
        records=max(len(each.records) for each in told),
        rss_kib=played.rss_kib,
        init_kib=played.init_kib,
        processes=played.processes,
        units=played.units,
        descriptors=played.descriptors,
        files=played.files,
        seconds=round(time.monotonic() - began, 2),
        faults=faults(played.seen),
    )
    return line, True


def _show(played: Played) -> None:
    seen = played.seen
    print(seen.plan)
    for pid, member in seen.members.items():
        print(f"  {pid}: {member}")
    for told in seen.told:
        print(f"  {told.unit} status {told.status}, started {told.started}: {json.dumps(told.verdict)}")
        for record in told.records:
            print(f"    {record['MESSAGE']}")


def summary(lines: Sequence[dict[str, Any]], *, runs: int) -> tuple[str, int]:
    """What there is to say of the runs so far, and the exit status that says it."""
    wrong = [line for line in lines if line["faults"]]
    grown = not_flat(lines)
    outcomes = Counter(outcome or "none given" for line in lines for outcome in line["outcomes"])
    text = [f"{len(lines)} of {runs} runs in {sum(line.get('seconds', 0) for line in lines) / 60:.0f} min"]
    text.append("outcomes: " + ", ".join(f"{word} {count}" for word, count in outcomes.most_common()))
    text.append(f"signals sent: {sum(line.get('signals', 0) for line in lines)}")
    text.append(f"records of a run: {max((line.get('records', 0) for line in lines), default=0)} at most")
    text.append(f"files in /run/gpuprestart: {max((line.get('files', 0) for line in lines), default=0)} at most")
    for what in ("rss_kib", "init_kib", "processes", "units", "descriptors"):
        text.append("{}: {} in the first runs, {} in the last".format(what, *ends(lines, what)))
    text += [f"GROWS: {each}" for each in grown]
    text += [f"WRONG: run {line['number']}: {'; '.join(line['faults'])}" for line in wrong]
    if wrong or grown:
        return "\n".join(text), WRONG
    return "\n".join(text), RIGHT if len(lines) >= runs else UNFINISHED


def main(arguments: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.node.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--state", type=Path, default=STATE, help="where the runs are put down, and go on from")
    parser.add_argument("--minutes", type=float, default=45, help="stop after so long; the same command goes on")
    parser.add_argument("--scene", type=int, metavar="N", help="play this one alone, and show all of it")
    options = parser.parse_args(arguments)
    reason = can_boot()
    if reason is not None:
        parser.error(f"the simulated node cannot boot: {reason}")
    if options.scene is not None:
        with Node(gpus=8) as node:
            line, _ = one(Stage(node), options.seed, options.scene, verbose=True)
        print(json.dumps(line, indent=1))
        return WRONG if line["faults"] else RIGHT
    state = State(options.state, seed=options.seed)
    soak(state, seed=options.seed, runs=options.runs, seconds=options.minutes * 60)
    text, status = summary(state.lines[: options.runs], runs=options.runs)
    print(text)
    if status == UNFINISHED:
        print(f"not finished: the same command goes on with run {len(state.lines)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
