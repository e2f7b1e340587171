"""NVML and /proc -> Survey: the machine at one moment.

The join of what NVML lists with what /proc shows is a pure function, ``tie``; ``Surveyor`` makes the calls around it.
Nothing is judged here: a survey says who may hold a GPU and who owns them, not what should become of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Callable, NamedTuple, Optional

from . import claims, owners, text
from .host import cgroupfs, procfs
from .host.systemd import SystemdError
from .model import Claim, Gpu, Holder, Inventory, Outcome, Owner, Process, Reading, Refusal, Survey, Unit
from .neighbours import Neighbours, clock

#: A question that a wedged process or a dead name service never answers is given up after so many seconds.
SLOW = 1.0


class Ties(NamedTuple):
    """Who is tied to the selected GPUs, by PID: where NVML lists it, and which nodes it has open."""

    listed: Mapping[int, Mapping[str, Optional[int]]]
    opened: Mapping[int, frozenset[str]]

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(self.listed) | frozenset(self.opened)


def tie(
    gpus: Sequence[Gpu],
    readings: Mapping[str, Reading],
    opened: Mapping[int, frozenset[int]],
    devices: Mapping[int, str],
    pids_ours: bool,
) -> Ties:
    """Join NVML's lists with the open nodes. ``opened`` has device numbers by PID, ``devices`` the GPU of each number.

    A process that NVML lists on other GPUs only is no holder of ours, whatever it has open, because CUDA opens every
    node that it can see. A list that is not to be believed, or that is of another PID namespace, clears nobody.
    """
    listed: dict[int, dict[str, Optional[int]]] = {}
    for uuid, reading in readings.items():
        if pids_ours and not reading.distrust:
            for entry in reading.listed:
                listed.setdefault(entry.pid, {})[uuid] = entry.bytes
    ours = {gpu.uuid for gpu in gpus}
    elsewhere = {pid for pid, where in listed.items() if not ours & set(where)}
    return Ties(
        listed={pid: where for pid, where in listed.items() if pid not in elsewhere},
        opened={
            pid: frozenset(devices[number] for number in numbers)
            for pid, numbers in opened.items()
            if pid not in elsewhere
        },
    )


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
        timeout: Callable[[], float],
        foreign_claims: Callable[[], Sequence[Claim]],
        keep_claims: bool,
    ) -> None:
        self._host = host
        self._inventory = inventory
        self._gpus = tuple(gpus)
        self._own = own
        self._pids_ours = pids_ours
        self._timeout = timeout
        self._foreign_claims = foreign_claims
        self._keep_claims = keep_claims
        self._namespace = procfs.own_pid_namespace()
        self._users: dict[int, str] = {}
        self._uids: dict[str, int] = {}

    def sample(self) -> dict[str, Reading]:
        """The selected GPUs alone, for watching memory come back. Raises DriverError."""
        return self._host.driver.sample(self._gpus, self._timeout())

    def look(self) -> Survey:
        """Everything. Raises DriverError, and Refusal where a node is missing; without systemd, owners are unknown."""
        readings = self._host.driver.sample(self._inventory.gpus, self._timeout())
        kin = self._kin()
        devices = self._devices()
        swept = procfs.sweep(devices, self._others(kin))
        ties = tie(self._gpus, readings, swept.opened, devices, self._pids_ours)
        processes = self._read(ties.pids | self._unit_pids())
        owned = self._owners(processes)
        holders = tuple(
            Holder(
                process=process,
                owner=owned[process.pid],
                listed=ties.listed.get(process.pid, {}),
                opened=ties.opened.get(process.pid, frozenset()),
            )
            for process in processes
        )
        alive = {process.pid for process in processes}
        ours = {gpu.uuid for gpu in self._gpus}
        dead = {
            uuid: tuple(entry.pid for entry in reading.listed if entry.pid not in alive)
            for uuid, reading in readings.items()
            if uuid in ours and self._pids_ours and not reading.distrust
        }
        return Survey(
            at=clock(),
            gpus=self._gpus,
            readings=readings,
            holders=holders,
            dead={uuid: pids for uuid, pids in dead.items() if pids},
            unreadable=swept.unreadable,
            pids_ours=self._pids_ours,
            kin=kin,
            claims=self._claims(),
        )

    def again(self, survey: Survey, holders: Iterable[Holder]) -> Survey:
        """The same survey with only these holders in it, each as it is now; who is gone or replaced is left out.

        A holder whose start time or cgroup is another one now is not the one that was judged.
        """
        before = {holder.process.pid: holder for holder in holders}
        now = [
            process
            for process in self._read(before)
            if process.identity == before[process.pid].process.identity
            and process.cgroup == before[process.pid].process.cgroup
        ]
        owned = self._owners(now)
        fresh = tuple(before[process.pid]._replace(process=process, owner=owned[process.pid]) for process in now)
        return survey._replace(holders=fresh, kin=self._kin())

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

    def _devices(self) -> dict[int, str]:
        """Device number -> UUID of the selected GPUs. The node bears the minor, which need not be NVML's index."""
        devices = {}
        for gpu in self._gpus:
            if gpu.fault:
                continue
            path = f"/dev/nvidia{gpu.minor}"
            number = procfs.device_number(path)
            if number is None:
                raise Refusal(
                    Outcome.UNKNOWN,
                    f"{path} of {gpu} is not there, so it cannot be told who has it open",
                    ["nvidia-modprobe -c MINOR makes the node; a container must be given it"],
                )
            devices[number] = gpu.uuid
        return devices

    def _others(self, kin: frozenset[int]) -> Iterable[int]:
        """Every process but our own kin, coming up for air now and then so that a signal does not wait for long."""
        for count, pid in enumerate(procfs.pids()):
            if count % 64 == 0:
                self._host.wait((), 0)
            if pid not in kin:
                yield pid

    def _kin(self) -> frozenset[int]:
        """PID 1, ourselves, our ancestors and children, and what our control process started beside us: a pipeline."""
        kin = {1, *procfs.lineage(os.getpid()), *self._host.children()}
        if self._own:
            control = self._own.unit.control_pid
            kin |= {pid for pid in self._unit_pids() if control in procfs.lineage(pid)}
        return frozenset(kin)

    def _unit_pids(self) -> frozenset[int]:
        return frozenset(cgroupfs.pids(self._own.unit.control_group)) if self._own else frozenset()

    def _read(self, pids: Iterable[int]) -> list[Process]:
        """These processes in PID order, those that are gone left out."""
        found = (procfs.read(pid) for pid in sorted(pids))
        return [self._named(process) for process in found if process is not None]

    def _named(self, process: Process) -> Process:
        words = self._host.ask(("cmdline", process.pid), SLOW)
        return process._replace(user=self._user(process.uid), cmdline=None if words is None else text.redacted(words))

    def _user(self, uid: int) -> str:
        if uid not in self._users:
            self._users[uid] = self._host.ask(("user", uid), SLOW) or str(uid)
        return self._users[uid]

    def _uid(self, user: str) -> None:
        if user not in self._uids:
            uid = int(user) if user.isdigit() else self._host.ask(("uid", user), SLOW)
            if uid is not None:
                self._uids[user] = uid

    def _owners(self, processes: Sequence[Process]) -> dict[int, Owner]:
        """The owner of each process by PID, asked of systemd in one call for all of them."""
        wanted = sorted({name for process in processes for name in owners.candidates(process.cgroup)})
        try:
            units = self._host.systemd.units(wanted)
        except SystemdError as error:
            return {process.pid: owners.unanswered(str(error)) for process in processes}
        for unit in units.values():
            if unit.user:
                self._uid(unit.user)
        for process in processes:
            uid = owners.slice_uid(process.cgroup)
            if uid is not None:
                self._user(uid)
        names = owners.Names(users=self._users, uids=self._uids)
        return {
            process.pid: owners.owner_of(process, units=units, names=names, own=self._own, namespace=self._namespace)
            for process in processes
        }
