"""Every kind of evidence: what NVML lists, and what /proc shows of descriptors, maps and threads (cases A, B, C)."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.node.machine import Node
from tests.node.scene import HOLDER, TERM, Run, Scene, mappable

MIB = 1 << 20
CLEAN = "/usr/bin/gpuprestart clean --json --deadline 10s"
HOLD = ("--open", "0", "--gpu", "0", "--mib", "900")
LEAK = "[deadline]\ntotal = '1 s'\n"

#: A holder that grows, does not obey SIGTERM, and has a child with nodes and memory of its own 200 ms after it.
LATE = """
import sys
sys.path.insert(0, "/opt/simgpu")
import holder
class Late(holder.Holder):
    def on_term(self, *_):
        if not self.children:
            self.later(0.2, self.fork_fresh)
late = Late(holder.parse(sys.argv[1:]))
late.start()
late.hold()
"""


@pytest.fixture(scope="module")
def uvm_node(node: Node) -> Iterator[Node]:
    """A node with /dev/nvidia-uvm, which CUDA opens and a mere client of NVML does not."""
    with Node(gpus=2, uvm=True) as booted:
        yield booted


@pytest.fixture
def uvm_scene(uvm_node: Node) -> Iterator[Scene]:
    scene = Scene(uvm_node)
    scene.reset(gpus=2)
    try:
        yield scene
    finally:
        scene.strike()


def _ended(scene: Scene, run: Run, *holders: int) -> None:
    assert (run.outcome, run.exit) == ("cleaned", 0)
    assert {pid for pid, _ in scene.signals(run)} == set(holders)
    assert set(run.fates) == set(holders)
    assert not any(scene.alive(pid) for pid in holders)


def _untouched(scene: Scene, run: Run, *pids: int, outcome: str = "unattributed") -> None:
    assert (run.outcome, run.exit) == (outcome, 0 if outcome == "clean" else 75)
    assert scene.signals(run) == []
    assert scene.alive(pids)


def _words(run: Run) -> str:
    return " ".join([run.verdict["message"], *run.verdict["hints"]])


# What /proc shows (A11, A12, A25, B6) --------------------------------------------------------------------------------


@pytest.mark.case("A11")
def test_twenty_children_of_the_one_that_is_listed_and_dead(scene: Scene) -> None:
    unit, children = scene.orphans(*HOLD, "--alloc", "keep_listed=true", "--fork", "20", "--leave")
    assert len(children) == 20
    (allocation,) = scene.gpu.ask("state")["allocations"]
    assert allocation["listed"] and allocation["pid"] not in children
    assert not scene.node.exists(f"/proc/{allocation['pid']}")
    run = scene.clean("--gpus", "0")
    _ended(scene, run, *children)
    assert {tuple(run.holder(child)["evidence"]) for child in children} == {("fd",)}
    assert {run.holder(child)["owner"] for child in children} == {f"unit:{unit}"}


@pytest.mark.case("A12")
@pytest.mark.parametrize("listed", [True, False])
def test_mapped_and_not_open(scene: Scene, listed: bool) -> None:
    """A console cannot be mapped; for this test /dev/nvidia0 is a node that can."""
    with mappable(scene.node):
        _, (orphan,) = scene.orphans(*HOLD, "--map-only", *([] if listed else ["--unlisted"]))
        links = scene.node.run(["sh", "-c", f"readlink /proc/{orphan}/fd/*"]).stdout
        assert "nvidia" not in links and "zero" not in links
        run = scene.clean("--gpus", "0")
        _ended(scene, run, orphan)
        assert run.holder(orphan)["evidence"] == (["nvml"] if listed else []) + ["map"]


@pytest.mark.case("A25")
def test_memory_that_grows_and_a_child_that_comes_late(scene: Scene) -> None:
    scene.policy(f"[deadline]\n{TERM}")
    folder = _folder(scene)
    scene.node.write(f"{folder}/late", LATE)
    unit, ready = scene.name("late"), f"{folder}/ready"
    late = shlex.join(["/usr/bin/python3", f"{folder}/late", *HOLD, "--grow", "100", "--ready-file", ready])
    script = f"{late} & until [ -e {ready} ]; do sleep 0.02; done; exit 1"
    scene.node.start(["/bin/sh", "-c", script], unit=unit, properties=["KillMode=process"])
    scene.await_state(unit, "failed")
    (parent,) = scene.node.unit_pids(unit)
    run = scene.clean("--gpus", "0")
    assert (run.outcome, run.exit) == ("cleaned", 0)
    (child,) = set(run.fates) - {parent}
    assert scene.signals(run) == [(parent, "SIGTERM"), (parent, "SIGKILL"), (child, "SIGTERM")]
    assert run.holder(child)["started"] > run.verdict["time"]
    found = {each["HOLDER_PID"]: each for each in scene.records(run, "holder-found")}
    gone = {each["HOLDER_PID"]: each for each in scene.records(run, "holder-gone")}
    assert set(found) == set(gone) == {str(parent), str(child)}
    released = {each["pid"]: each["bytes"] for each in scene.gpu.ask("releases")["releases"][-2:]}
    assert released[parent] > int(found[str(parent)]["HOLDER_BYTES"]) >= 900 * MIB
    assert run.verdict["gpus"][0]["used_bytes"] == 3 * MIB


@pytest.mark.case("B6")
@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("ignores", [True, False])
def test_a_zombie_leader_with_a_live_thread(scene: Scene, listed: bool, ignores: bool) -> None:
    scene.policy("[deadline]\nterm = '300 ms'\n")
    options = [*([] if listed else ["--unlisted"]), *(["--ignore-term"] if ignores else [])]
    _, (orphan,) = scene.orphans(*HOLD, "--thread-exit", *options)
    assert scene.node.read(f"/proc/{orphan}/stat").rpartition(")")[2].split()[0] == "Z"
    assert scene.node.run(["ls", f"/proc/{orphan}/fd"], check=False).stdout == ""
    run = scene.clean("--gpus", "0")
    _ended(scene, run, orphan)
    assert run.holder(orphan)["evidence"] == (["nvml"] if listed else []) + ["fd"]
    assert run.holder(orphan)["state"] == "Z"
    assert run.fates == {orphan: "killed" if ignores else "terminated"}
    assert not scene.node.exists(f"/proc/{orphan}")


# Memory that comes and goes (B2, B15) --------------------------------------------------------------------------------


@pytest.mark.case("B2")
@pytest.mark.parametrize("sibling", ["stale", "live"])
def test_memory_that_drops_and_is_taken_by_a_sibling(scene: Scene, sibling: str) -> None:
    """It is low for 200 ms, which is not as long as it has to stay low."""
    _, (orphan,) = scene.orphans("--open", "0")
    if sibling == "stale":
        _, (heir,) = scene.orphans("--open", "0")
    else:
        unit, heir = scene.service("--open", "0", user="alice")
    scene.gpu.ask("alloc", gpu=0, mib=900, pid=orphan, heir=heir, heir_after=0.2, heir_kind="compute")
    server = scene.server(gpus="0", command=CLEAN)
    started = scene.start(server)
    run = scene.verdict(server)
    signals = scene.signals(run)
    assert signals[0] == (orphan, "SIGTERM")
    assert len(scene.records(run, "memory-freed")) >= 1
    if sibling == "stale":
        assert started
        _ended(scene, run, orphan, heir)
        assert signals[1:] == [(heir, "SIGTERM")]
    else:
        assert not started
        assert (run.outcome, signals[1:]) == ("protected", [])
        assert unit in run.verdict["message"]
        assert scene.alive(heir)


@pytest.mark.case("B15")
@pytest.mark.parametrize("back_after, term, innocent", [(0.6, 3.0, True), (2.5, 1.0, False)])
def test_a_suspect_beside_a_holder_whose_memory_is_on_its_way_back(
    scene: Scene, back_after: float, term: float, innocent: bool
) -> None:
    """Whoever has the node open and nothing attributed is ended only once memory has stayed unexplained for `term`."""
    scene.policy(f"[deadline]\nterm = '{term:g} s'\n")
    scene.gpu.ask("set", release_delay=back_after)
    _, (suspect,) = scene.orphans("--open", "0")
    _, (orphan,) = scene.orphans(*HOLD)
    run = scene.clean("--gpus", "0")
    assert (run.outcome, run.exit) == ("cleaned", 0)
    if innocent:
        assert scene.signals(run) == [(orphan, "SIGTERM")]
        assert scene.alive(suspect)
    else:
        assert scene.signals(run) == [(orphan, "SIGTERM"), (suspect, "SIGTERM")]
        at = [int(each["__REALTIME_TIMESTAMP"]) / 1e6 for each in scene.records(run, "holder-signalled")]
        assert term <= at[1] - at[0] < back_after
        assert run.holder(suspect)["evidence"] == ["fd"]


@pytest.mark.case("B15")
def test_a_suspect_with_nobody_beside_it(scene: Scene) -> None:
    """Nobody else's memory can be on its way back, so there is nothing to wait for."""
    scene.policy("[deadline]\nterm = '5 s'\n")
    _, (suspect,) = scene.orphans(*HOLD, "--unlisted")
    _, live = scene.service("--open", "0", user="alice")
    run = scene.clean("--gpus", "0")
    _ended(scene, run, suspect)
    assert run.verdict["duration_s"] < 4
    assert scene.alive(live)


# What NVML lists (C2, C11, C12, C14) ---------------------------------------------------------------------------------


@pytest.mark.case("C2")
@pytest.mark.parametrize(
    "library, unlisted, evidence",
    [("without-v3", False, ["nvml", "fd"]), ("without-v3-v2", False, ["fd"]), ("without-v3-v2", True, ["fd"])],
)
def test_a_library_without_the_newest_lists(scene: Scene, library: str, unlisted: bool, evidence: list[str]) -> None:
    _, live = scene.service("--open", "all", "--gpu", "1", "--mib", "900", user="alice")
    _, (orphan,) = scene.orphans(*HOLD, *(["--unlisted"] if unlisted else []))
    server = scene.server(gpus="0", command=CLEAN)
    with _library(scene, library):
        assert scene.start(server)
    run = scene.verdict(server)
    _ended(scene, run, orphan)
    assert scene.alive(live)
    assert run.holder(orphan)["evidence"] == evidence
    # That there is no list has to be said, whatever came of it.
    said = [str(each["MESSAGE"]) for each in scene.records(run)]
    assert any("process list" in words for words in said) is (library == "without-v3-v2"), said


@pytest.mark.case("C2")
def test_a_live_holder_where_there_is_no_list(scene: Scene) -> None:
    """Without a list nothing says that the memory is its own; it is a suspect, and nobody's to end."""
    scene.policy(LEAK)
    unit, live = scene.service(*HOLD, user="alice")
    with _library(scene, "without-v3-v2"):
        run = scene.clean("--gpus", "0", "--deadline", "1s")
    _untouched(scene, run, live)
    assert "process list" in _words(run) and unit in _words(run) and str(live) in _words(run)


@pytest.mark.case("C11")
def test_one_process_in_two_lists(scene: Scene) -> None:
    _, (orphan,) = scene.orphans(*HOLD, "--alloc", "kind=compute,graphics,mps")
    run = scene.clean("--gpus", "0")
    _ended(scene, run, orphan)
    assert [each["pid"] for each in run.verdict["holders"]] == [orphan]
    assert run.holder(orphan)["bytes"] == 900 * MIB
    (found,) = scene.records(run, "holder-found")
    assert found["HOLDER_BYTES"] == str(900 * MIB)


@pytest.mark.case("C11")
def test_one_spared_process_in_two_lists(scene: Scene) -> None:
    """Counted twice, it would raise the limit above what is in use beside it."""
    scene.policy(f"{LEAK}[[rule]]\nmatch = {{ unit = 't-live-*' }}\naction = 'spare'\n")
    _, live = scene.service(*HOLD, "--alloc", "kind=compute,graphics", user="alice")
    assert scene.clean("--gpus", "0").outcome == "clean"
    scene.gpu.ask("leak", gpu=0, mib=300)
    run = scene.clean("--gpus", "0", "--deadline", "1s")
    _untouched(scene, run, live)
    assert run.verdict["gpus"][0]["limit_bytes"] == 964 * MIB
    assert run.verdict["gpus"][0]["unattributed_bytes"] == 303 * MIB


@pytest.mark.case("C12")
@pytest.mark.parametrize("alloc, size", [("na=true", None), ("list_mib=1", 1), ("list_mib=60000", 60000)])
def test_figures_per_process_that_are_missing_or_wrong(scene: Scene, alloc: str, size: int | None) -> None:
    """The figure of the device says when it is clean, whatever was listed before."""
    _, (orphan,) = scene.orphans(*HOLD, "--alloc", alloc)
    scene.gpu.ask("set", release_delay=0.5)
    run = scene.clean("--gpus", "0")
    _ended(scene, run, orphan)
    assert run.holder(orphan)["bytes"] == (None if size is None else size * MIB)
    assert run.verdict["gpus"][0]["used_bytes"] == 3 * MIB


@pytest.mark.case("C12")
@pytest.mark.parametrize(
    "alloc, outcome",
    [
        # Its bytes are not told: it may explain everything, so that nobody else is suspected, but nothing is spared.
        ("na=true", "unattributed"),
        # It has less than is in use.
        ("list_mib=10", "unattributed"),
        # It has what is in use, and more.
        ("list_mib=1500", "clean"),
    ],
)
def test_the_figure_of_the_device_decides(scene: Scene, alloc: str, outcome: str) -> None:
    """A live neighbour with whom the site shares the GPU."""
    scene.policy(f"{LEAK}[[rule]]\nmatch = {{ unit = 't-live-*' }}\naction = 'spare'\n")
    _, live = scene.service(*HOLD, "--alloc", alloc, user="alice")
    run = scene.clean("--gpus", "0", "--deadline", "1s")
    _untouched(scene, run, live, outcome=outcome)
    assert run.verdict["gpus"][0]["used_bytes"] == 903 * MIB


@pytest.mark.case("C12")
@pytest.mark.parametrize("alloc, suspected", [("na=true", False), ("list_mib=10", True)])
def test_bytes_that_are_not_told_explain_all_of_it(scene: Scene, alloc: str, suspected: bool) -> None:
    """Beside a spared neighbour, somebody stale has the node open and nothing attributed."""
    scene.policy(f"{LEAK}[[rule]]\nmatch = {{ unit = 't-live-*' }}\naction = 'spare'\n")
    _, live = scene.service(*HOLD, "--alloc", alloc, user="alice")
    _, (stale,) = scene.orphans("--open", "0")
    run = scene.clean("--gpus", "0", "--deadline", "1s")
    assert scene.signals(run) == ([(stale, "SIGTERM")] if suspected else [])
    assert scene.alive(live)
    assert scene.alive(stale) is not suspected


@pytest.mark.case("C14")
@pytest.mark.parametrize("pid, mib", [(0, 100), (2**31, 100), (None, 200_000)])
def test_scrambled_records(scene: Scene, pid: int | None, mib: int) -> None:
    """Two that NVML lists correctly elsewhere: by GPU 0's list, if it were believed, they could be ended."""
    _, (other,) = scene.orphans("--open", "all", "--gpu", "1", "--mib", "900")
    _, live = scene.service("--open", "all", "--gpu", "1", "--mib", "900", user="alice")
    scene.gpu.ask("leak", gpu=0, mib=900)
    scene.gpu.ask("ghost", gpu=0, mib=900, charge_mib=0, pid=other)
    scene.gpu.ask("ghost", gpu=0, mib=mib, charge_mib=0, **({} if pid is None else {"pid": pid}))
    run = scene.clean("--gpus", "0", "--deadline", "1s")
    _untouched(scene, run, other, live)
    assert "not believed" in _words(run)
    assert run.verdict["gpus"][0]["unattributed_bytes"] == 903 * MIB


@pytest.mark.case("C14")
def test_scrambled_records_beside_a_stale_holder(scene: Scene) -> None:
    """What /proc shows still counts."""
    _, (orphan,) = scene.orphans(*HOLD)
    scene.gpu.ask("ghost", gpu=0, mib=100, charge_mib=0, pid=0)
    server = scene.server(gpus="0", command=CLEAN)
    assert scene.start(server)
    run = scene.verdict(server)
    _ended(scene, run, orphan)
    assert run.holder(orphan)["evidence"] == ["fd"]
    said = [str(each["MESSAGE"]) for each in scene.records(run)]
    assert any("not believed" in words for words in said), said


# Lists of another PID namespace (C15, C17) ---------------------------------------------------------------------------

FOREIGN = '[nvml]\npids = "foreign"\n'


@pytest.mark.case("C15")
@pytest.mark.parametrize("policy", [FOREIGN, "", '[nvml]\npids = "auto"\n'])
def test_a_number_that_is_somebody_elses_here(scene: Scene, policy: str) -> None:
    """An innocent with GPU 1's node; the node is a PID namespace of its own, so `auto` means foreign."""
    scene.policy(LEAK, base=policy)
    _, (innocent,) = scene.orphans("--open", "1")
    _, live = scene.service("--open", "1", user="alice")
    scene.gpu.ask("ghost", gpu=0, mib=900, pid=innocent)
    scene.gpu.ask("ghost", gpu=0, mib=900, pid=live)
    run = scene.clean("--gpus", "0,1", "--deadline", "1s")
    _untouched(scene, run, innocent, live)
    assert str(innocent) not in _words(run) and str(live) not in _words(run)
    assert run.verdict["gpus"][0]["unattributed_bytes"] == 1803 * MIB


@pytest.mark.case("C15")
def test_a_foreign_list_clears_nobody(scene: Scene) -> None:
    """The same number on GPU 1's list is another process: the one here with GPU 0's node is a suspect all the same."""
    scene.policy(base=FOREIGN)
    _, (orphan,) = scene.orphans("--open", "0,1", "--gpu", "0", "--mib", "900", "--unlisted")
    scene.gpu.ask("ghost", gpu=1, mib=0, pid=orphan)
    _ended(scene, scene.clean("--gpus", "0"), orphan)
    assert scene.clean("--gpus", "1").outcome == "clean"


@pytest.mark.case("C15")
def test_a_live_holder_of_a_foreign_list(scene: Scene) -> None:
    """Nothing ties the memory to it: named in a hint, not called the holder."""
    scene.policy(LEAK, base=FOREIGN)
    unit, live = scene.service(*HOLD, user="alice")
    run = scene.clean("--gpus", "0", "--deadline", "1s")
    _untouched(scene, run, live)
    assert run.holder(live)["evidence"] == ["fd"]
    assert unit in " ".join(run.verdict["hints"]) and str(live) in " ".join(run.verdict["hints"])


@pytest.mark.case("C17")
@pytest.mark.parametrize("policy", [FOREIGN, ""])
@pytest.mark.parametrize("own", [True, False])
def test_inside_a_guest(scene: Scene, policy: str, own: bool) -> None:
    """NVML lists the host's number 812345; it is our failed unit's python, with /dev/nvidia0 open."""
    scene.policy(base=policy)
    holder = ["--open", "0", "--gpu", "0", "--mib", "1520", "--alloc", "list_pid=812345"]
    if own:
        unit = scene.server(
            gpus="0", command=CLEAN, server=shlex.join([HOLDER, *holder, "--fork", "1"]),
            more="Type=notify\nNotifyAccess=all\nKillMode=process\n",
        )  # fmt: skip
        assert scene.start(unit)
        (left,) = scene.abandon(unit)
        # The one that is listed is dead, which the driver of a host tells a guest no better.
        scene.gpu.ask("update", id=scene.gpu.ask("state")["allocations"][0]["id"], keep_listed=True)
    else:
        unit, (left,) = scene.orphans(*holder)
    assert not scene.node.exists("/proc/812345")
    run = scene.clean("--gpus", "0")
    if own:
        assert scene.start(unit)
        run = run if run.fates else scene.verdict(unit)
    _ended(scene, run, left)
    assert run.holder(left)["evidence"] == ["fd"]
    assert run.holder(left)["bytes"] is None
    assert run.verdict["gpus"][0]["used_bytes"] == 3 * MIB


# /dev/nvidia-uvm -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uvm", [True, False])
def test_who_has_not_opened_uvm_is_no_suspect(uvm_scene: Scene, uvm: bool) -> None:
    """A client of NVML that its unit left behind, or a process that computed; memory that is nobody's."""
    scene = uvm_scene
    _, (orphan,) = scene.orphans("--open", "0", *(["--path", "/dev/nvidia-uvm"] if uvm else []))
    # Whoever opens it and no GPU holds none.
    _, (bystander,) = scene.orphans("--path", "/dev/nvidia-uvm")
    scene.gpu.ask("leak", gpu=0, mib=900)
    run = scene.clean("--gpus", "0", "--deadline", "1s")
    assert (run.outcome, run.exit) == ("not-freed" if uvm else "unattributed", 75)
    assert scene.signals(run) == ([(orphan, "SIGTERM")] if uvm else [])
    assert scene.alive(orphan) is not uvm
    assert scene.alive(bystander)


def test_unlisted_memory_of_one_that_has_opened_uvm(uvm_scene: Scene) -> None:
    scene = uvm_scene
    _, monitor = scene.service("--open", "all", user="alice")
    _, (stale,) = scene.orphans("--open", "all")
    _, (orphan,) = scene.orphans("--path", "/dev/nvidia-uvm", *HOLD, "--unlisted")
    _ended(scene, scene.clean("--gpus", "0"), orphan)
    assert scene.alive([monitor, stale])


def test_a_listed_holder_needs_no_uvm(uvm_scene: Scene) -> None:
    """Graphics and old runtimes do without; NVML's list and the GPU's own node are enough."""
    _, (orphan,) = uvm_scene.orphans(*HOLD)
    _ended(uvm_scene, uvm_scene.clean("--gpus", "0"), orphan)


# The stage -----------------------------------------------------------------------------------------------------------


def _folder(scene: Scene) -> str:
    folder = f"/run/{scene.name('folder').partition('.')[0]}"
    scene.node.run(["install", "-d", folder])
    return folder


@contextmanager
def _library(scene: Scene, which: str) -> Iterator[None]:
    """An older driver's library in the place of the real one."""
    line = scene.node.run(["ldconfig", "-p"]).stdout.partition("libnvidia-ml.so.1 ")[2].splitlines()[0]
    path = line.rpartition("=> ")[2]
    scene.node.run(["mount", "--bind", f"/opt/simgpu/{which}/libnvidia-ml.so.1", path])
    try:
        yield
    finally:
        scene.node.run(["umount", path])
