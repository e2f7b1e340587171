"""Who each process is, and who owns it, as /proc, systemd, logind and the name services say.

It gathers what owners.py needs for its answer. What nobody answers is left out, and the owner is then unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Optional

from . import owners, redaction
from .host import cgroupfs, procfs
from .host.systemd import SystemdError
from .model import Owner, OwnerKind, Process, Unit
from .neighbours import Ask, Neighbours
from .policy import Search

#: A question that a wedged process or a dead name service never answers is given up after so many seconds.
SLOW = 1.0


def searching(ask: Ask) -> Search:
    """Looks for patterns by way of a child. What was not answered is not asked again."""
    known: dict[tuple[str, str], Optional[bool]] = {}

    def search(pattern: re.Pattern[str], text: str) -> Optional[bool]:
        key = (pattern.pattern, text)
        if key not in known:
            known[key] = ask(("search", key), SLOW)
        return known[key]

    return search


class Registry:
    """Names are remembered for the run; processes and units are asked for anew each time."""

    def __init__(self, host: Neighbours, own: Optional[owners.Own]) -> None:
        self._host = host
        self._own = own
        self._namespace = procfs.own_pid_namespace()
        self._users: dict[int, str] = {}
        self._uids: dict[str, int] = {}

    def processes(self, pids: Iterable[int]) -> list[Process]:
        """These processes in PID order, those that are gone left out."""
        found = (procfs.read(pid) for pid in sorted(pids))
        return [self._named(process) for process in found if process is not None]

    def _named(self, process: Process) -> Process:
        words = self._host.ask(("cmdline", process.pid), SLOW)
        parent = procfs.read(process.ppid)
        return process._replace(
            user=self._user(process.uid),
            cmdline=None if words is None else redaction.redacted(words),
            parent="" if parent is None else str(parent),
        )

    def _user(self, uid: int) -> str:
        """The name of a user, the number where there is none, and nothing where nobody answers."""
        if uid not in self._users:
            name = self._host.ask(("user", uid), SLOW)
            self._users[uid] = "" if name is None else name or str(uid)
        return self._users[uid]

    def _learn_uid(self, user: str) -> None:
        if user and user not in self._uids:
            uid = int(user) if user.isascii() and user.isdigit() else self._host.ask(("uid", user), SLOW)
            if uid is not None:
                self._uids[user] = uid

    def owners_of(self, processes: Sequence[Process]) -> dict[int, Owner]:
        """The owner of each process by PID, asked of systemd in one call for all of them."""
        wanted = sorted({name for process in processes for name in owners.candidates(process.cgroup)})
        try:
            units = self._host.systemd.units(wanted)
        except SystemdError as error:
            # What is in our own unit's cgroup is known without another answer.
            unknown = owners.unanswered(str(error))
            return {process.pid: owners.of_own(process, self._own) or unknown for process in processes}
        names = self._names(processes, units)
        found = {process.pid: self._owner(process, units, names) for process in processes}
        if any(owner.kind is OwnerKind.SESSION and owners.over(owner) for owner in found.values()):
            self._ask_logind(found)
        return found

    def _names(self, processes: Sequence[Process], units: Mapping[str, Unit]) -> owners.Names:
        for unit in units.values():
            self._learn_uid(unit.user)
        for process in processes:
            uid = owners.slice_uid(process.cgroup)
            if uid is not None:
                self._user(uid)
        return owners.Names(users=self._users, uids=self._uids)

    def _owner(self, process: Process, units: Mapping[str, Unit], names: owners.Names) -> Owner:
        above = procfs.commands(process.pid)
        owner = owners.owner_of(
            process, units=units, names=names, own=self._own, namespace=self._namespace, above=above
        )
        if owner.kind in (OwnerKind.CONTAINER, OwnerKind.SLURM) and owner.cgroup:
            # The runtime may be above another process of the container only: the workers were orphaned, it was not.
            beside = (procfs.commands(pid) for pid in cgroupfs.pids(owner.cgroup))
            return owner._replace(runtime=owners.runtime(above) or next(filter(None, map(owners.runtime, beside)), ""))
        return owner

    def _ask_logind(self, found: dict[int, Owner]) -> None:
        """Whether logind is to end what ended sessions leave: then nobody alive can want it."""
        try:
            says = self._host.systemd.kill_user_processes()
        except SystemdError:
            return
        for pid, owner in found.items():
            if owner.kind is OwnerKind.SESSION:
                found[pid] = owner._replace(doomed=owners.doomed(owner.user, *says))
