"""What is measured, on a booted node: starts on clean and dirty GPUs, the search for holders, and waiting.

Each scene returns Measures: a figure of ours, that of a peer in the same run, their ratio, and what it should be. The
program is run as systemd would start it (in the cgroup of a service, with its environment), but not by systemd, whose
own time is no affair of ours.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from tests.node.machine import Node
from tests.node.scene import Scene

HERE = Path(__file__).parent
ON_NODE = "/run/bench"

HOOK = ["/usr/bin/gpuprestart", "clean"]
FLOOR = ["/usr/bin/python3", "-I", f"{ON_NODE}/floor.py"]
GPUSTAT = ["/usr/local/bin/gpustat", "--show-pid"]
NVITOP = ["/usr/local/bin/nvitop", "-1"]

#: As design.md says of them; the real ones, not shortened as in tests.
SETTLE = 0.5
GRACE = 2.0


class Measure(NamedTuple):
    """``ours`` and ``theirs`` are in ``unit``; what is compared with ``most`` or ``least`` is the ratio where there is
    a peer, else our own figure."""

    scene: str
    what: str
    unit: str
    ours: float
    peer: str = ""
    theirs: Optional[float] = None
    #: Ours by theirs, or theirs by ours where ``least`` says how many times faster we should be.
    most: Optional[float] = None
    least: Optional[float] = None
    values: tuple[float, ...] = ()

    @property
    def ratio(self) -> Optional[float]:
        if self.theirs is None:
            return None
        return self.theirs / self.ours if self.least is not None else self.ours / self.theirs

    @property
    def reached(self) -> Optional[bool]:
        figure = self.ours if self.ratio is None else self.ratio
        if self.most is not None:
            return figure <= self.most
        return None if self.least is None else figure >= self.least


class Bench:
    def __init__(self, node: Node, *, rounds: int, say: Callable[[str], None]) -> None:
        self.node = node
        self.stage = Scene(node)
        self.rounds = rounds
        self.say = say
        for name in ("launch.py", "floor.py", "crowd.py", "kill.py"):
            node.write(f"{ON_NODE}/{name}", (HERE / name).read_text(encoding="utf-8"), mode=0o755)
        node.run(["mkdir", "-p", "/sys/fs/cgroup/system.slice/bench.service"])

    def launch(self, commands: Mapping[str, Sequence[str]], *, gpus: str = "", **request: Any) -> dict[str, Any]:
        environ = {"INVOCATION_ID": "b" * 32, **({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {})}
        request = {"commands": commands, "rounds": self.rounds, "environ": environ, **request}
        done = self.node.run(["python3", f"{ON_NODE}/launch.py"], input=json.dumps(request), timeout=580)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def expect(self, found: Mapping[str, Any], name: str, *exits: int) -> None:
        """A figure of something that did not do its work is none."""
        wrong = [status for status in found[name]["exits"] if status not in exits]
        if wrong:
            said = found[name]["stdout"][-500:] + self.node.read("/run/bench.err")[-500:]
            raise AssertionError(f"{name} ended with {wrong}: {said}")

    # A start on clean GPUs -------------------------------------------------------------------------------------------

    def clean(self, gpus: int, *, mig: bool = False) -> list[Measure]:
        scene = f"clean start, {gpus} × 7 MIG instances" if mig else f"clean start, {gpus} GPU{'s' * (gpus > 1)}"
        self.say(scene)
        self.stage.reset(gpus=gpus)
        names = [str(index) for index in range(gpus)]
        if mig:
            uuids = [self.stage.gpu.ask("mig", gpu=gpu, slices=[1] * 7)["uuids"] for gpu in range(gpus)]
            names = [uuid for each in uuids for uuid in each]
        commands = {"hook": HOOK, "floor": FLOOR}
        if not mig:
            # They do not know instances.
            commands |= {"gpustat": GPUSTAT, "nvitop": NVITOP}
        within = "/sys/fs/cgroup/system.slice/bench.service"
        found = self.launch(commands, gpus=",".join(names), cgroup=within, watched=3)
        for name in ("hook", "floor"):
            self.expect(found, name, 0)
        peers = ["floor", *(name for name in commands if name not in ("hook", "floor"))]
        measures = []
        for peer in peers:
            if any(found[peer]["exits"]):
                continue
            most = {"floor": 1.4, "gpustat": 0.25}.get(peer)
            measures.append(_compare(scene, "wall", found, "hook", peer, most=most))
        measures.append(_compare(scene, "CPU", found, "hook", "floor", key="cpu"))
        measures.append(
            Measure(scene, "peak memory of all processes", "MiB", max(found["hook"]["rss"]) / 2**20, most=60)
        )
        return measures

    # The search for holders ------------------------------------------------------------------------------------------

    def search(self, processes: int, files: int = 60) -> list[Measure]:
        scene = f"holders among {processes} processes × {files} files"
        self.say(scene)
        self.stage.reset(gpus=8)
        unit, live = self.stage.service("--open", "all", "--gpu", "0", "--mib", "1000", "--fork", "7")
        crowd = self.stage.name("crowd")
        self.node.start(
            ["python3", f"{ON_NODE}/crowd.py", str(processes), str(files)],
            unit=crowd,
            properties=["Type=notify", "TasksMax=infinity", "LimitNPROC=infinity", "TimeoutStartSec=300"],
        )
        nodes = [f"/dev/nvidia{index}" for index in range(8)]
        commands = {
            "status": ["/usr/bin/gpuprestart", "status", "--json"],
            "fuser": ["fuser", "-v", *nodes],
            "lsof": ["lsof", "-w", "-t", *nodes],
        }
        few = max(3, self.rounds // (2 if processes <= 500 else 8))
        found = self.launch(commands, rounds=3 if processes > 5000 else few)
        self.expect(found, "status", 0, 75)
        ours = {each["pid"] for each in json.loads(found["status"]["stdout"])["holders"]}
        for peer in ("fuser", "lsof"):
            # fuser tells of mounts of the nodes as well.
            theirs = {int(word) for word in found[peer]["stdout"].split() if word.isdigit()}
            if not theirs or not theirs <= ours | {live}:
                raise AssertionError(f"{peer} found {sorted(theirs - ours)} that status did not")
        self.stage.strike()
        least = (4.0, 8.0) if processes == 4000 else (None, None)
        return [
            _compare(scene, "wall", found, "status", "fuser", least=least[0]),
            _compare(scene, "wall", found, "status", "lsof", least=least[1]),
        ]

    # A start on dirty GPUs -------------------------------------------------------------------------------------------

    def dirty(self, *, each: int, ignoring: bool) -> list[Measure]:
        """``each`` stale holders on each of eight GPUs, which obey SIGTERM, or do not."""
        scene = f"dirty start, {8 * each} holders that {'ignore SIGTERM' if ignoring else 'obey'}"
        self.say(scene)
        totals, delays, idiom, bare = [], [], [], []
        for _ in range(3):
            self._litter(each, ignoring)
            found = self.launch({"hook": HOOK}, rounds=1, warm=0)
            self.expect(found, "hook", 0)
            took, ended = found["hook"]["wall"][0], found["hook"]["ended"][0]
            freed = max(float(one["released_boottime"]) for one in self.stage.gpu.ask("releases")["releases"])
            totals.append(took - SETTLE - (GRACE if ignoring else 0.0))
            delays.append(ended - freed - SETTLE)
            self.stage.strike()
            self._litter(each, ignoring)
            command = "fuser -k /dev/nvidia[0-7] >/dev/null 2>&1; sleep 3; exec /usr/bin/python3 -I /run/bench/floor.py"
            found = self.launch({"idiom": ["sh", "-c", command]}, rounds=1, warm=0)
            idiom.append(found["idiom"]["wall"][0])
            self.stage.strike()
            if not ignoring:
                pids = self._litter(each, ignoring)
                kill = ["/usr/bin/python3", "-I", f"{ON_NODE}/kill.py", *map(str, pids)]
                bare.append(self.launch({"kill": kill}, rounds=1, warm=0)["kill"]["wall"][0])
                self.stage.strike()
        whole = statistics.median(totals) + SETTLE + (GRACE if ignoring else 0.0)
        beyond = "wall beyond grace and settle" if ignoring else "wall beyond settle"
        measures = [
            Measure(scene, "wall", "s", whole, most=GRACE + SETTLE + 0.3),
            Measure(scene, beyond, "s", statistics.median(totals), values=tuple(totals)),
            Measure(scene, "verdict after memory is back, beyond settle", "ms", max(delays) * 1000, most=150),
            Measure(scene, "wall, all of it", "s", whole, "fuser -k; sleep 3; query", statistics.median(idiom)),
        ]
        if bare:
            # How much of it is the dying of so many processes, which nobody can do faster.
            peer = "kill and wait, no questions asked"
            measures.append(Measure(scene, beyond, "s", statistics.median(totals), peer, statistics.median(bare)))
        return measures

    def _litter(self, each: int, ignoring: bool) -> list[int]:
        self.stage.reset(gpus=8, release_delay=0.0)
        self.stage.policy(f"[deadline]\nterm = '{GRACE:g} s'\n")
        pids = []
        for gpu in range(8):
            options = ["--open", str(gpu), "--gpu", str(gpu), "--mib", "1000", *["--ignore-term"] * ignoring]
            pids += self.stage.orphans(*options, count=each)[1]
        return pids

    # Waiting ---------------------------------------------------------------------------------------------------------

    def waiting(self, seconds: float) -> list[Measure]:
        scene = f"memory that comes back after {seconds:g} s"
        self.say(scene)
        used = {}
        # Counting the calls takes the driver time of its own, so that is done in another run.
        for name, delay in (("short", 0.0), ("counted", seconds / 4), ("long", seconds)):
            self.stage.reset(gpus=8, release_delay=delay)
            self.stage.orphans("--open", "0", "--gpu", "0", "--mib", "1000")
            if name == "counted":
                self.stage.gpu.ask("calls", start=True)
            found = self.launch({"hook": HOOK}, rounds=1, warm=0)
            self.expect(found, "hook", 0)
            used[name] = found["hook"]["cpu"][0]
            if name == "counted":
                counts = self.stage.gpu.ask("calls")["counts"]
                self.stage.gpu.ask("calls", stop=True)
            self.stage.strike()
        began = found["hook"]["began"][0]
        run = self.node.journal(GPUPRESTART_RUN="b" * 32)
        written = [each for each in run if float(each["__MONOTONIC_TIMESTAMP"]) / 1e6 >= began]
        share = (used["long"] - used["short"]) / seconds * 100
        return [
            Measure(scene, "CPU beyond that of a short one", "% of a core", share, most=0.5),
            Measure(scene, "NVML calls in a second", "", sum(counts.values()) / (seconds / 4)),
            Measure(scene, "journal records", "", len(written)),
        ]


def _compare(
    scene: str,
    what: str,
    found: Mapping[str, Any],
    name: str,
    peer: str,
    *,
    key: str = "wall",
    most: Optional[float] = None,
    least: Optional[float] = None,
) -> Measure:
    ours, theirs = (statistics.median(found[each][key]) * 1000 for each in (name, peer))
    values = tuple(found[name][key])
    return Measure(scene, what, "ms", ours, peer, theirs, most=most, least=least, values=values)
