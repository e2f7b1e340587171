"""``make bench``: the program beside what people use today, in one run on one machine, as a table of ratios.

Times on different machines, or at different moments, say nothing of one another; so the commands take turns, and only
their ratio is judged. The exit status says whether everything was measured, not how fast it was.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Optional

import pyperf

# What runs on the node is made of neighbours that import one another by their bare names, and so does the stage.
sys.path.insert(0, str(Path(__file__).parents[1] / "node/driver"))

from tests.bench.scenes import Bench, Measure  # noqa: E402
from tests.node.machine import REPOSITORY, Node, NodeError, can_boot  # noqa: E402

STAGES = "stages within one process"
RESULT = REPOSITORY / "build/bench.json"


def main(arguments: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=31, help="of each command (31)")
    parser.add_argument("--only", default="", help="what has this in its name: clean, search, dirty, waiting, stages")
    parser.add_argument("--out", type=Path, default=RESULT, help="where the figures go as JSON")
    options = parser.parse_args(arguments)
    fault = can_boot()
    if fault is not None:
        print(f"bench: this machine cannot boot a node: {fault}", file=sys.stderr)
        return 1
    measures: list[Measure] = []
    try:
        with Node(gpus=16, say=_say) as node:
            bench = Bench(node, rounds=options.rounds, say=_say)
            scenes: list[tuple[str, Callable[[], list[Measure]]]] = [
                ("clean 1", lambda: bench.clean(1)),
                ("clean 8", lambda: bench.clean(8)),
                ("clean 16", lambda: bench.clean(16)),
                ("clean mig", lambda: bench.clean(16, mig=True)),
                ("search 500", lambda: bench.search(500)),
                ("search 4000", lambda: bench.search(4000)),
                ("search 20000", lambda: bench.search(20000)),
                ("dirty 64", lambda: bench.dirty(each=8, ignoring=False)),
                ("dirty 8", lambda: bench.dirty(each=1, ignoring=True)),
                ("waiting", lambda: bench.waiting(60.0)),
            ]
            for name, play in scenes:
                if options.only in name:
                    measures += play()
    except (NodeError, AssertionError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    if options.only in STAGES:
        measures += stages()
    measures += growth(measures)
    print(table(measures))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document(measures), indent=1) + "\n", encoding="utf-8")
    print(f"\nAll figures: {options.out}")
    return 0


def stages() -> list[Measure]:
    """What pyperf finds of single stages, each in workers of its own."""
    _say(STAGES)
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/stages.json"
        command = [sys.executable, "-m", "tests.bench.stages", "--fast", "--quiet", "-o", file]
        subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
        found = {each.get_name(): each.median() * 1e6 for each in pyperf.BenchmarkSuite.load(file)}
    return [
        Measure(STAGES, "who a process is", "µs", found["identity"], "psutil", found["identity_by_psutil"]),
        Measure(STAGES, "the plan for 64 holders", "µs", found["plan"]),
    ]


def _say(text: str) -> None:
    print(f"… {text}", file=sys.stderr, flush=True)


def growth(measures: list[Measure]) -> list[Measure]:
    """How many times longer the search takes where there are so many times more processes; 1 is linear, and no run is
    nearer to it than a tenth."""
    times = {}
    for each in measures:
        if each.scene.startswith("holders among") and each.peer == "fuser":
            times[int(each.scene.split()[2])] = each
    found = []
    for few, many in zip(sorted(times), sorted(times)[1:]):
        ours = times[many].ours / times[few].ours / (many / few)
        theirs = (times[many].theirs or 0) / (times[few].theirs or 1) / (many / few)
        scene = f"holders among {few} → {many} processes"
        found.append(Measure(scene, "growth of the time by that of the crowd", "", ours, most=1.1))
        found.append(Measure(scene, "the same of fuser", "", theirs))
    return found


def table(measures: list[Measure]) -> str:
    rows = [("scene", "figure", "ours", "peer", "theirs", "ratio", "wanted", "")]
    for each in measures:
        wanted = "" if each.most is None else f"≤ {each.most:g}"
        wanted = wanted if each.least is None else f"≥ {each.least:g} × faster"
        # Nobody is to guess which of the two is divided by which.
        times = "" if each.least is None else " × as fast"
        ratio = "" if each.ratio is None else f"{each.ratio:.2f}{times}"
        theirs = "" if each.theirs is None else f"{each.theirs:.1f} {each.unit}"
        mark = {True: "reached", False: "NOT REACHED", None: ""}[each.reached]
        ours = f"{each.ours:.2f} {each.unit}" if each.unit != "ms" else f"{each.ours:.1f} ms"
        rows.append((each.scene, each.what, ours.strip(), each.peer, theirs, ratio, wanted, mark))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def document(measures: list[Measure]) -> dict[str, object]:
    machine = {"cpus": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()}
    figures = [{**each._asdict(), "ratio": each.ratio, "reached": each.reached} for each in measures]
    return {"version": 1, "machine": machine, "measures": figures}


if __name__ == "__main__":
    sys.exit(main())
