"""Who is tied to which GPU: the join of NVML's lists with open nodes, and the look at real processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Optional

import pytest

from gpuprestart import owners, survey, ties
from gpuprestart.host import opened, procfs, slow
from gpuprestart.host.locks import Locks, Notes
from gpuprestart.host.nvml import Driver, DriverError
from gpuprestart.host.program import Programs
from gpuprestart.host.systemd import Systemd, SystemdError
from gpuprestart.model import MIB, Holder, Listed, OwnerKind, Process, Reading, Refusal, Unit
from gpuprestart.neighbours import Neighbours
from gpuprestart.survey import Surveyor

from .machines import Shares, answer, decision, gpu, holder, inventory, reading, unit, uuid
from .processes import await_death, python, wait, waiting

# The join ------------------------------------------------------------------------------------------------------------

#: Device numbers of two GPUs, of their nvidia-uvm, and of an instance's capability.
ZERO, ONE, UVM, CAPABILITY = 100, 101, 900, 800


def tie(
    *readings: Reading,
    opened: Optional[Mapping[int, set[int]]] = None,
    mapped: Optional[Mapping[int, set[int]]] = None,
    selected: Sequence[int] = (0,),
    uvm: Optional[int] = None,
    needed: Optional[Mapping[int, set[int]]] = None,
    pids_ours: bool = True,
    beside: Sequence[int] = (),
) -> dict[int, ties.Tie]:
    numbers = needed or {0: {ZERO}, 1: {ONE}}
    return ties.tie(
        [gpu(index) for index in selected],
        {each.uuid: each for each in readings},
        {pid: frozenset(found) for pid, found in (opened or {}).items()},
        {pid: frozenset(found) for pid, found in (mapped or {}).items()},
        ties.Nodes(gpus={uuid(index): frozenset(numbers[index]) for index in selected}, uvm=uvm),
        pids_ours=pids_ours,
        beside=beside,
    )


def listing(index: int = 0, listed: Optional[Shares] = None, **changes: Any) -> Reading:
    return reading(index, 1523, listed, **changes)


def test_nvml_and_open_nodes_speak_of_one_process() -> None:
    found = tie(listing(0, {10: 1520}), listing(1), opened={10: {ZERO}, 11: {ZERO}})
    assert found[10].listed == {uuid(0): 1520 * MIB} and found[10].opened == {uuid(0)}
    assert found[11].listed == {} and found[11].opened == {uuid(0)}
    assert sorted(found) == [10, 11]


@pytest.mark.case("C8")
def test_whose_memory_is_on_other_gpus_only_is_no_holder_of_ours() -> None:
    assert tie(listing(0), listing(1, {10: 1520}), opened={10: {ZERO}}) == {}
    both = tie(listing(0, {10: 5}), listing(1, {10: 1520}), opened={10: {ZERO}})
    assert both[10].listed == {uuid(0): 5 * MIB, uuid(1): 1520 * MIB}


def test_who_uses_the_mps_server_of_one_that_may_be_ended_is_named_wherever_that_is() -> None:
    ours, theirs, other = (
        Listed(10, 5, frozenset({"mps"})),
        Listed(11, 5, frozenset({"mps"})),
        Listed(12, 5, frozenset({"compute"})),
    )
    served = listing(1)._replace(listed=(ours, theirs, other))
    client = ties.Tie(kinds={uuid(1): frozenset({"mps"})})
    assert tie(listing(0), served) == {}
    assert tie(listing(0), served, beside=[10]) == {10: client, 11: client}
    # One that is on a selected GPU may be ended for what it has there.
    assert sorted(tie(listing(0, {10: 5}), served)) == [10, 11]


@pytest.mark.case("C12")
def test_bytes_that_are_not_told_stay_untold() -> None:
    assert tie(listing(0, {10: None}))[10].listed == {uuid(0): None}


@pytest.mark.case("C14")
def test_a_list_that_is_not_believed_names_nobody_and_clears_nobody() -> None:
    found = tie(listing(0, {0: 5, 10: 5}, distrust="PID 0"), listing(1), opened={11: {ZERO}})
    assert found == {11: ties.Tie(opened=frozenset({uuid(0)}))}
    elsewhere = tie(listing(0), listing(1, {0: 5, 11: 1520}, distrust="PID 0"), opened={11: {ZERO}})
    assert elsewhere == {11: ties.Tie(opened=frozenset({uuid(0)}))}


@pytest.mark.case("C15")
@pytest.mark.case("C17")
def test_pids_of_another_namespace_name_nobody_and_clear_nobody() -> None:
    found = tie(listing(0, {10: 1520}), listing(1, {11: 5}), opened={11: {ZERO}}, pids_ours=False)
    assert found == {11: ties.Tie(opened=frozenset({uuid(0)}))}


@pytest.mark.case("A12")
def test_a_mapped_node_counts_like_an_open_one() -> None:
    assert tie(listing(0), mapped={10: {ZERO}})[10] == ties.Tie(mapped=frozenset({uuid(0)}))


def test_an_instance_is_held_by_who_has_its_capability_too() -> None:
    needed = {0: {ZERO, CAPABILITY}}
    opened = {10: {ZERO}, 11: {ZERO, CAPABILITY}, 12: {CAPABILITY}}
    found = tie(listing(0), opened=opened, mapped={12: {ZERO}}, needed=needed)
    assert sorted(found) == [11, 12]


def test_a_client_of_nvml_alone_is_told_from_cuda() -> None:
    found = tie(listing(0), opened={10: {ZERO}, 11: {ZERO, UVM}, 12: {UVM}}, uvm=UVM)
    assert {pid: one.cuda for pid, one in found.items()} == {10: False, 11: True}
    assert tie(listing(0), opened={10: {ZERO}})[10].cuda


@pytest.mark.case("B3")
def test_the_dead_are_told_by_gpu() -> None:
    readings = {uuid(0): listing(0, {10: 5, 11: 5}), uuid(1): listing(1, {12: 5})}
    gpus = [gpu(0)]
    assert ties.dead(gpus, readings, frozenset({10}), pids_ours=True) == {uuid(0): (11,)}
    assert ties.dead(gpus, readings, frozenset({10, 11}), pids_ours=True) == {}
    assert ties.dead(gpus, readings, frozenset(), pids_ours=False) == {}
    odd = {uuid(0): listing(0, {0: 5}, distrust="PID 0")}
    assert ties.dead(gpus, odd, frozenset(), pids_ours=True) == {}


# The look ------------------------------------------------------------------------------------------------------------

HOLDER = "import os, sys; kept = os.open(sys.argv[1], os.O_RDONLY | os.O_NOCTTY); print('ready', flush=True); input()"


class Answers:
    """A driver's child that answers every sample with these readings."""

    def __init__(self) -> None:
        self.readings = {uuid(index): reading(index) for index in range(2)}
        self.fault: Optional[dict[str, Any]] = None

    def send(self, request: Any) -> None:
        self.asked = request[1]

    def receive(self, timeout: float) -> Any:
        if self.fault:
            return self.fault
        return {each: answer(self.readings[each]) for each in self.asked}


class Books(Systemd):
    def __init__(self) -> None:
        super().__init__(wait, systemctl="/nowhere/systemctl")
        self.known: dict[str, Unit] = {}
        self.asked: list[tuple[str, ...]] = []
        self.silent = False

    def units(self, names: Sequence[str]) -> dict[str, Unit]:
        self.asked.append(tuple(names))
        if self.silent:
            raise SystemdError("systemd did not answer within 10 s")
        gone = {name: unit(name, "inactive", load_state="not-found", control_group="") for name in names}
        return {name: self.known.get(name, gone[name]) for name in names}


class Scene:
    """A machine of two GPUs whose nodes are terminals, of which the first is selected."""

    def __init__(self, folder: Path, nodes: Sequence[str]) -> None:
        self.nodes = nodes
        self.driver = Answers()
        self.systemd = Books()
        self.children: set[int] = set()
        #: What the driver may take besides its timeout, each time.
        self.waited: list[float] = []
        self.host = Neighbours(
            wait=wait,
            deafen=lambda: None,
            driver=Driver(self.driver),
            systemd=self.systemd,
            ask=lambda request, timeout: slow.answer(request),
            ask_files=lambda request, timeout: slow.answer(request),
            children=lambda: self.children,
            write=lambda record: None,
            say_status=lambda text: None,
            extend_timeout=lambda seconds: False,
            environ={},
            locks=Locks(str(folder)),
            claims=Notes("claims", str(folder)),
            bypasses=Notes("bypass", str(folder)),
            run_program=Programs(wait=wait, at_fork=lambda: None),
        )

    def _timeout(self, waited: float) -> float:
        self.waited.append(waited)
        return 1.0

    def surveyor(self, own: Optional[owners.Own] = None, pids_ours: bool = True) -> Surveyor:
        return Surveyor(
            self.host,
            inventory=inventory(2),
            gpus=[gpu(0)],
            own=own,
            pids_ours=pids_ours,
            timeout=self._timeout,
            foreign_claims=list,
            keep_claims=True,
        )


def in_cgroup(cgroup: str) -> Callable[[int], Optional[Process]]:
    """procfs.read, with every process in this cgroup."""
    reading_it = procfs.read

    def read(pid: int) -> Optional[Process]:
        found = reading_it(pid)
        return None if found is None else found._replace(cgroup=cgroup)

    return read


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    terminals = [os.openpty() for _ in range(2)]
    paths = [os.ttyname(slave) for _, slave in terminals]
    number = opened.device_number
    nodes = {f"/dev/nvidia{minor}": path for minor, path in enumerate(paths)}
    monkeypatch.setattr(opened, "device_number", lambda path: number(nodes[path]) if path in nodes else None)
    monkeypatch.setattr(procfs, "read", in_cgroup("/system.slice/old.service"))
    made = Scene(tmp_path, paths)
    made.systemd.known["old.service"] = unit()
    yield made
    for master, slave in terminals:
        os.close(master)
        os.close(slave)


def held(found: Sequence[Holder]) -> dict[int, frozenset[str]]:
    return {each.process.pid: each.opened for each in found}


@pytest.mark.case("A0")
def test_a_holder_is_found_by_its_node_and_told_by_its_owner(stage: Scene) -> None:
    with python(HOLDER, stage.nodes[0]) as child, python(HOLDER, stage.nodes[1]):
        found = stage.surveyor().look()
    assert held(found.holders) == {child.pid: {uuid(0)}}
    one = found.holders[0]
    assert (one.owner.kind, one.owner.word, one.listed) == (OwnerKind.UNIT, "unit:old.service", {})
    assert one.process.user and one.process.cmdline is not None and "input()" in one.process.cmdline
    assert stage.systemd.asked.count(("old.service",)) == 1
    assert set(found.readings) == {uuid(0), uuid(1)} and found.dead == {} and found.unreadable == ()
    assert {1, os.getpid(), os.getppid()} <= found.kin


@pytest.mark.parametrize("goes", [True, False])
def test_who_is_gone_with_its_unit_while_systemd_is_asked(
    stage: Scene, monkeypatch: pytest.MonkeyPatch, goes: bool
) -> None:
    """A unit that has just stopped is forgotten, and its last process is no longer anybody who could be in the way."""
    stage.systemd.known.clear()
    with python(HOLDER, stage.nodes[0]) as child:

        def units(names: Sequence[str]) -> dict[str, Unit]:
            if goes:
                child.kill()
                child.wait()
            return Books.units(stage.systemd, names)

        monkeypatch.setattr(stage.systemd, "units", units)
        found = stage.surveyor().look().holders
    assert [(each.process.pid, each.owner.kind) for each in found] == ([] if goes else [(child.pid, OwnerKind.UNKNOWN)])


@pytest.mark.case("C7")
def test_the_node_bears_the_minor_and_not_the_index(stage: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    surveyor = stage.surveyor()
    monkeypatch.setattr(surveyor, "_gpus", (gpu(0, minor=1),))
    with python(HOLDER, stage.nodes[0]), python(HOLDER, stage.nodes[1]) as child:
        assert held(surveyor.look().holders) == {child.pid: {uuid(0)}}


def test_whom_nvml_lists_is_a_holder_without_a_node(stage: Scene) -> None:
    with waiting() as gone:
        gone.kill()
    with waiting() as listed, waiting() as elsewhere:
        stage.driver.readings[uuid(0)] = reading(0, 1523, {listed.pid: 1520, gone.pid: 5})
        stage.driver.readings[uuid(1)] = reading(1, 1523, {elsewhere.pid: 1520})
        found = stage.surveyor().look()
    assert [(each.process.pid, each.listed, each.opened) for each in found.holders] == [
        (listed.pid, {uuid(0): 1520 * MIB}, frozenset())
    ]
    assert found.dead == {uuid(0): (gone.pid,)}


@pytest.mark.case("C15")
def test_foreign_pids_are_not_looked_up(stage: Scene) -> None:
    with waiting() as innocent:
        stage.driver.readings[uuid(0)] = reading(0, 1523, {innocent.pid: 1520})
        found = stage.surveyor(pids_ours=False).look()
    assert (found.holders, found.dead, found.pids_ours) == ((), {}, False)


@pytest.mark.case("B7")
def test_a_zombie_that_nvml_still_lists_is_dead(stage: Scene) -> None:
    with waiting() as child:
        child.kill()
        await_death(child.pid)
        stage.driver.readings[uuid(0)] = reading(0, 1523, {child.pid: 1520})
        found = stage.surveyor().look()
    assert (found.holders, found.dead) == ((), {uuid(0): (child.pid,)})


def test_our_own_kin_is_no_holder(stage: Scene) -> None:
    """The fixture has both terminals open in this very process, and its children may have them inherited."""
    with python(HOLDER, stage.nodes[0]) as child:
        stage.children.add(child.pid)
        found = stage.surveyor().look()
    assert found.holders == () and {child.pid, os.getpid()} <= found.kin


@pytest.mark.case("A10")
@pytest.mark.case("A2")
def test_all_processes_of_our_own_unit_are_looked_at(stage: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of its last run are holders without any GPU; what our control process started is kin."""
    with waiting() as left, python(HOLDER, stage.nodes[1]) as beside:
        ours = unit("old.service", "activating", control_pid=beside.pid, condition_usec=2**62)
        in_unit = {left.pid, beside.pid, os.getpid()}
        monkeypatch.setattr(survey, "cgroupfs", SimpleNamespace(pids=lambda cgroup: in_unit))
        found = stage.surveyor(owners.Own(unit=ours, boottime_ahead=0, ticks_per_second=procfs.TICKS)).look()
        assert {each.process.pid: each.owner.kind for each in found.holders}[left.pid] is OwnerKind.OWN_PREVIOUS
        assert beside.pid in found.kin and left.pid not in found.kin


def test_a_silent_systemd_makes_owners_unknown(stage: Scene) -> None:
    stage.systemd.silent = True
    with python(HOLDER, stage.nodes[0]):
        found = stage.surveyor().look()
    assert [each.owner.kind for each in found.holders] == [OwnerKind.UNKNOWN]
    assert "systemd did not answer within 10 s" in found.holders[0].owner.doubt


@pytest.mark.case("D1")
def test_who_may_not_be_looked_into_is_counted(stage: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened, "sweep", lambda devices, pids: opened.Sweep(opened={}, unreadable=(10, 11)))
    assert {10, 11} <= set(stage.surveyor().look().unreadable)


def test_a_node_that_is_missing_is_unknown(stage: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    surveyor = stage.surveyor()
    monkeypatch.setattr(surveyor, "_gpus", (gpu(0, minor=5),))
    with pytest.raises(Refusal, match="/dev/nvidia5 of GPU 0 is not there"):
        surveyor.look()


@pytest.mark.case("C5")
def test_a_lost_gpu_has_no_node_to_look_for(stage: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    surveyor = stage.surveyor()
    lost = gpu(0, minor=None, fault="GPU is lost")
    monkeypatch.setattr(surveyor, "_gpus", (lost,))
    monkeypatch.setattr(surveyor, "_inventory", inventory(2)._replace(gpus=(lost, gpu(1))))
    assert surveyor.look().readings[uuid(0)].fault == "GPU is lost"


def test_a_driver_that_fails_is_not_hidden(stage: Scene) -> None:
    stage.driver.fault = {"error": 999, "text": "Unknown Error"}
    with pytest.raises(DriverError):
        stage.surveyor().look()
    with pytest.raises(DriverError):
        stage.surveyor().watch(0.0)


def test_the_selected_gpus_alone_are_watched(stage: Scene) -> None:
    assert list(stage.surveyor().watch(7.0)) == [uuid(0)]
    assert stage.driver.asked == [uuid(0)] and stage.waited == [7.0]


# Looking again -------------------------------------------------------------------------------------------------------


@pytest.mark.case("D12")
def test_looking_again_asks_for_the_owner_again(stage: Scene) -> None:
    with python(HOLDER, stage.nodes[0]):
        surveyor = stage.surveyor()
        found = surveyor.look()
        stage.systemd.known["old.service"] = unit(active="active")
        again = surveyor.again(found, found.holders)
    assert [each.owner.unit and each.owner.unit.active_state for each in again.holders] == ["active"]
    assert held(again.holders) == held(found.holders) and again.readings == found.readings


@pytest.mark.case("D4")
def test_who_is_gone_replaced_or_moved_is_left_out(stage: Scene) -> None:
    with python(HOLDER, stage.nodes[0]):
        surveyor = stage.surveyor()
        found = surveyor.look()
        one = found.holders[0]
        for other in (
            one._replace(process=one.process._replace(started=one.process.started - 1)),
            one._replace(process=one.process._replace(cgroup="/system.slice/new.service")),
        ):
            assert surveyor.again(found, [other]).holders == ()
        assert len(surveyor.again(found, [one]).holders) == 1
    assert surveyor.again(found, [one]).holders == ()


def test_nobody_is_asked_about_who_is_gone(stage: Scene) -> None:
    surveyor = stage.surveyor()
    assert surveyor.again(surveyor.look(), []).holders == ()


@pytest.mark.case("D4")
@pytest.mark.parametrize(("opens", "listed", "kept"), [("both", 0, True), ("node", 0, False), ("node", 5, True)])
def test_a_suspect_that_is_not_what_it_was_seen_as_is_left_alone(
    stage: Scene, monkeypatch: pytest.MonkeyPatch, opens: str, listed: int, kept: bool
) -> None:
    """What a PID had open may be another's by now, such as a monitor's, which has the node and not what CUDA opens."""
    gpu_node, uvm = (os.stat(path).st_rdev for path in stage.nodes)
    monkeypatch.setattr(opened, "device_number", {"/dev/nvidia0": gpu_node, "/dev/nvidia-uvm": uvm}.get)
    code = HOLDER.replace("os.open(sys.argv[1], ", "[os.open(path, ").replace(";  ", "; ")
    code = code.replace("O_NOCTTY)", "O_NOCTTY) for path in sys.argv[1:]]")
    with python(code, *stage.nodes[: 2 if opens == "both" else 1]) as child:
        suspect = holder(child.pid, listed={0: listed} if listed else {})
        judged = decision(suspect._replace(opened=frozenset({uuid(0)})))
        assert [each is judged for each in stage.surveyor().holding([judged])] == [True] * kept
