"""NVML and /proc -> Survey: the machine at one moment.

It makes the calls, and ties.py joins what they bring. Nothing is judged here: a survey says who may hold a GPU and who
owns them, not what should become of them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Callable, Optional

from . import claims, crowd, owners, ties
from .host import cgroupfs, nvidia, opened, procfs
from .host.systemd import SystemdError
from .model import Claim, Decision, Gpu, Holder, Inventory, Outcome, OwnerKind, Process, Reading, Refusal, Survey, Unit
from .neighbours import Neighbours, clock
from .registry import Registry

#: What the policy asks to be free, and which of these processes have it.
Look = Callable[[Sequence[int], Collection[int]], Mapping[str, tuple[int, ...]]]

#: In place of a clause, for those of whom it cannot be told what they have. They have nothing, then, but a place in the
#: verdict: no answer is no proof.
UNREAD = "unread"


class Surveyor:
    """Looks at the machine, and knows nothing of what it looks for but the GPUs and whose start it is."""

    def __init__(
        self,
        host: Neighbours,
        *,
        inventory: Inventory,
        gpus: Sequence[Gpu],
        own: Optional[owners.Own],
        pids_ours: bool,
        timeout: Callable[[float], float],
        foreign_claims: Callable[[], Sequence[Claim]],
        keep_claims: bool,
        occupied: Optional[Look] = None,
    ) -> None:
        self._host = host
        self._inventory = inventory
        self._gpus = tuple(gpus)
        self._own = own
        self._pids_ours = pids_ours
        self._timeout = timeout
        self._foreign_claims = foreign_claims
        self._keep_claims = keep_claims
        self._occupied = occupied or _nothing
        self._registry = Registry(host, own)

    def watch(self, seconds: float, gpus: Optional[Sequence[Gpu]] = None) -> dict[str, Reading]:
        """The memory of the selected GPUs, or of these of them: after so many seconds, or as soon as it is not what was
        last told here. Raises DriverError."""
        return self._host.driver.watch(self._gpus if gpus is None else gpus, seconds, self._timeout(seconds))

    def look(self, within: float = float("inf")) -> Survey:
        """Everything; ``within`` so many seconds the driver has to answer, where that is less than it may take anyway.

        Raises DriverError, and Refusal where a node is missing; without systemd, owners are unknown.
        """
        readings = self._host.driver.sample(self._inventory.gpus, min(within, self._timeout(0.0)))
        # Before anything is asked, because the child that answers is started then, in our cgroup.
        in_unit = self._unit_pids()
        kin = self._kin(in_unit)
        beside = in_unit - kin
        nodes = self._nodes()
        others = [pid for pid in procfs.pids() if pid not in kin]
        swept = opened.sweep(nodes.all, crowd.breathing(others, self._host.wait))
        mapped, blind = crowd.mapped(self._host.ask, nodes.all, others)
        found = ties.tie(self._gpus, readings, swept.opened, mapped, nodes, pids_ours=self._pids_ours, beside=beside)
        occupied = self._occupied(others, kin)
        taken = _by_pid(occupied, kin)
        asked = self._registry.processes(found.keys() | beside | taken.keys())
        owned = self._registry.owners_of(asked)
        # One that is gone by the time that its owner is told has none: its unit may have gone with it.
        processes = [
            each for each in asked if owned[each.pid].kind is not OwnerKind.UNKNOWN or procfs.still_there(each)
        ]
        holders = tuple(
            Holder(
                process,
                owned[process.pid],
                **found.get(process.pid, ties.Tie())._asdict(),
                occupies=taken.get(process.pid, ()),
            )
            for process in processes
        )
        alive = frozenset(process.pid for process in processes)
        return Survey(
            at=clock(),
            gpus=self._gpus,
            readings=readings,
            holders=holders,
            dead=ties.dead(self._gpus, readings, alive, pids_ours=self._pids_ours),
            unreadable=tuple(sorted({*swept.unreadable, *blind})),
            pids_ours=self._pids_ours,
            kin=kin,
            claims=self._claims(),
            occupied=occupied,
        )

    def again(self, survey: Survey, holders: Iterable[Holder]) -> Survey:
        """The same survey with only these holders in it, each as it is now; who is gone or replaced is left out.

        A holder whose start time or cgroup is another one now is not the one that was judged.
        """
        before = {holder.process.pid: holder for holder in holders}
        now = [
            process
            for process in self._registry.processes(before)
            if process.identity == before[process.pid].process.identity
            and process.cgroup == before[process.pid].process.cgroup
        ]
        owned = self._registry.owners_of(now)
        fresh = tuple(before[process.pid]._replace(process=process, owner=owned[process.pid]) for process in now)
        return survey._replace(holders=fresh, kin=self._kin(self._unit_pids()))

    def unchanged(self, process: Process) -> bool:
        """Whether a process is as it was at the last look, as far as that can be told at once and of it alone."""
        return procfs.unchanged(process)

    def holding(self, decisions: Iterable[Decision]) -> tuple[Decision, ...]:
        """Those that have a node or a port as they did when they were looked at, or need none: between the walk over
        descriptors and the look at who that was, a PID may have become another's, and what was seen of the first is
        nobody's."""
        judged = [*decisions]
        bound = [each.holder.process.pid for each in judged if each.holder.owner.kind is not OwnerKind.OWN_PREVIOUS]
        nodes = self._nodes()
        swept = opened.sweep(nodes.all, bound)
        rest = [pid for pid in bound if not nodes.all <= swept.opened.get(pid, frozenset())]
        mapped, _ = crowd.mapped(self._host.ask, nodes.all, rest)
        found = ties.tie(self._gpus, {}, swept.opened, mapped, nodes, pids_ours=self._pids_ours)
        occupying = [each.holder.process.pid for each in judged if each.holder.occupies]
        taken = _by_pid(self._occupied(occupying, frozenset()), frozenset()) if occupying else {}

        def still(holder: Holder) -> bool:
            pid = holder.process.pid
            # A suspect is one by what CUDA opens; a mere client of NVML's has the node as well.
            has_gpu = pid in found and (found[pid].cuda or bool(holder.listed))
            return pid not in bound or pid in taken or has_gpu

        return tuple(each for each in judged if still(each.holder))

    def having(self, minor: Optional[int]) -> tuple[list[int], list[int]]:
        """Who has the node of this GPU open or mapped, whoever that is, and who could not be looked into."""
        number = opened.device_number(f"/dev/nvidia{minor}")
        found, blind = crowd.having(self._host, () if number is None else (number,), procfs.pids())
        return sorted(found), sorted(blind)

    def _claims(self) -> tuple[tuple[Claim, Unit], ...]:
        """Other units' claims that hold. One that does not is taken away, unless nothing is to be touched."""
        read = self._foreign_claims()
        names = sorted({claim.unit for claim in read if claim.unit != claims.NOBODY})
        try:
            units = self._host.systemd.units(names)
        except SystemdError:
            units = {}
        found = []
        for claim in read:
            unit = units.get(claim.unit)
            if unit is None or claims.holds(claim, unit):
                found.append(
                    (claim, unit or Unit(claim.unit, "unknown", "in a state that systemd does not tell", "", ""))
                )
            elif not self._keep_claims:
                self._host.claims.remove(claim.gpu)
        return tuple(found)

    def _nodes(self) -> ties.Nodes:
        """The device numbers that tell who has which selected GPU."""
        needed = {gpu.uuid: self._numbers(gpu) for gpu in self._gpus if not gpu.fault}
        return ties.Nodes(gpus=needed, uvm=opened.device_number("/dev/nvidia-uvm"))

    def _numbers(self, gpu: Gpu) -> frozenset[int]:
        numbers = {path: opened.device_number(path) for path in nvidia.nodes(gpu.minor, gpu.gi)}
        for path, number in numbers.items():
            if number is None:
                raise Refusal(
                    Outcome.UNKNOWN,
                    f"{path} of {gpu} is not there, so it cannot be told who has it open",
                    ["nvidia-modprobe makes the nodes; a container must be given them"],
                )
        return frozenset(number for number in numbers.values() if number is not None)

    def _kin(self, in_unit: frozenset[int]) -> frozenset[int]:
        """PID 1, ourselves, our ancestors and children, and what our control process started beside us: a pipeline."""
        kin = {1, *procfs.lineage(os.getpid()), *self._host.children()}
        if self._own:
            control = self._own.unit.control_pid
            kin |= {pid for pid in in_unit if control in procfs.lineage(pid)}
        return frozenset(kin)

    def _unit_pids(self) -> frozenset[int]:
        """Who is in our own unit's cgroup. Raises Refusal where it cannot be seen: we are in it ourselves."""
        if self._own is None:
            return frozenset()
        group = self._own.unit.control_group
        pids = frozenset(cgroupfs.pids(group))
        if os.getpid() not in pids:
            raise Refusal(
                Outcome.UNKNOWN,
                f"what is left of the last run cannot be seen: we are not in {group} below /sys/fs/cgroup",
                ["the hook must see /sys/fs/cgroup: ExecStartPre=+/usr/bin/gpuprestart clean lifts the unit's sandbox"],
            )
        return pids


def _nothing(pids: Sequence[int], kin: Collection[int]) -> Mapping[str, tuple[int, ...]]:
    return {}


def _by_pid(occupied: Mapping[str, tuple[int, ...]], kin: Collection[int]) -> dict[int, tuple[str, ...]]:
    """What each process occupies. Nobody of our own is a holder of anything."""
    found: dict[int, tuple[str, ...]] = {}
    for clause, pids in occupied.items():
        for pid in pids:
            if pid not in kin and clause != UNREAD:
                found[pid] = (*found.get(pid, ()), clause)
    return found
