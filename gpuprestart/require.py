"""What a start needs besides free memory on its GPUs, asked in the order in which it can be known.

Files, executables and what the driver says are asked before anybody is signalled; what may be free only once the stale
are gone, such as a port, after that. Every requirement that is not met is told; none hides another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable

from . import driverfacts, serverfiles
from .model import Account, Action, Gpu, Inventory, Plan, Survey, Unmet
from .neighbours import Neighbours, clock
from .policy import Require
from .report import who
from .survey import UNREAD
from .text import amounts, mib, numbered

#: Fewer inodes than a server opens files for its logs and caches are as good as none.
FEWEST_INODES = 1000


def before(
    require: Require,
    host: Neighbours,
    *,
    account: Callable[[], Account],
    inventory: Inventory,
    gpus: Sequence[Gpu],
    until: float,
    timeout: float,
    warn: Callable[[str, Sequence[Gpu]], None],
) -> list[Unmet]:
    """What can be told at once. Files are looked at ``until`` then; ``timeout`` is in seconds, for the driver; ``warn``
    is told what does not decide.

    Raises DriverError, SystemdError.
    """
    ask, found = host.ask_files, []
    if require.executables:
        search = host.environ.get("PATH", "")
        found = serverfiles.executables(require.executables, ask, account(), search=search, clock=clock, until=until)
    found += serverfiles.models(require.models, ask, clock=clock, until=until)
    facts = driverfacts.look(require, host.driver, inventory, gpus, timeout)
    for text, concerned in facts.warnings:
        warn(text, concerned)
    return [*found, *facts.unmet]


def after(
    require: Require, host: Neighbours, survey: Survey, plan: Plan, *, own_sockets: Callable[[], set[int]], until: float
) -> list[Unmet]:
    """What the stale may have stood in the way of. ``own_sockets`` are the ports on which systemd listens for us;
    disks are looked at ``until`` then."""
    found = [unmet for clause, pids in survey.occupied.items() for unmet in _occupied(clause, pids, plan, own_sockets)]
    return found + _host_memory(require.host_memory) + _disk(require, host, until)


# Ports and processes -------------------------------------------------------------------------------------------------


def _occupied(clause: str, pids: Sequence[int], plan: Plan, own_sockets: Callable[[], set[int]]) -> list[Unmet]:
    """Nothing for those that are stale: they are ended, or the verdict names them as what could not be."""
    if clause == UNREAD:
        hint = f"ps -o pid,stat,wchan:32,comm -p {pids[0]} shows where it hangs"
        told = f"the command line of {numbered(pids, 4)} gave no answer"
        return [Unmet("processes", str(pids[0]), f"{told}, so it may be one of require.processes", hint)]
    kind, _, subject = clause.partition(" ")
    port = kind == "port"
    check = "ports" if port else "processes"
    taken = f"{clause} (require.ports) is in use by"
    holders = [each for each in plan.decisions if each.holder.process.pid in pids]
    staying = [each for each in holders if each in plan.occupants or each.action is not Action.KILL]
    # Nobody of this start is asked for its command line; who matched and is no holder has gone since.
    rest = [pid for pid in pids if port and pid not in {each.holder.process.pid for each in holders}]
    if port and rest == [1] and not staying and int(subject) in own_sockets():
        return []
    if staying:
        first, *others = staying
        name, more = who(first, plan.gpus), f"{len(others)} more"
        if port:
            message = f"{taken} {name}: it {first.reason}" + (f"; and by {more}" if others else "")
        else:
            message = f"{name} must not run (require.processes '{subject}'): it {first.reason}"
            message += f"; nor must {more}" if others else ""
        return [Unmet(check, subject, message, first.hint)]
    if rest == [1]:
        hint = f"systemctl list-sockets shows which unit listens on {subject}: stop that"
        what = f"{taken} systemd itself, for a socket unit or in a store of descriptors"
        return [Unmet(check, subject, f"{what} (FileDescriptorStoreMax=)", hint)]
    if rest or not pids:
        ours = f"{numbered(rest, 4)}, which this very start has started"
        hint = f"ss -ltnp 'sport = :{subject}' shows what it is"
        return [Unmet(check, subject, f"{taken} {ours if rest else 'nobody that can be seen'}", hint)]
    return []


# Memory and disk -----------------------------------------------------------------------------------------------------


_UNTOLD = "the machine's memory cannot be told (require.host_memory)"


def _host_memory(needed: int) -> list[Unmet]:
    if not needed:
        return []
    try:
        import psutil  # It takes as long to load as all the rest, so only where it is asked for.
    except ImportError as error:
        hint = "install python3-psutil for the system's own python3"
        return [Unmet("host_memory", mib(needed), f"{_UNTOLD}: {error}", hint)]
    try:
        available = psutil.virtual_memory().available
    except OSError as error:
        # /proc may show processes alone (ProcSubset=pid).
        hint = "/proc/meminfo has to be there: leave ProcSubset= out, or keep the + of the hook's line"
        return [Unmet("host_memory", mib(needed), f"{_UNTOLD}: {error.strerror}", hint)]
    if available >= needed:
        return []
    needs, has = amounts(needed, available)
    message = f"the machine has {has} of memory available, but {needs} are needed (require.host_memory)"
    huge = _huge_pages()
    counted = f"; {mib(huge)} are set aside as huge pages and cannot be used otherwise" if huge else ""
    return [Unmet("host_memory", mib(needed), message + counted, "free -m and systemd-cgtop show who has it")]


def _huge_pages() -> int:
    """Bytes of the pool of huge pages, which MemAvailable does not count (proc_meminfo(5))."""
    with open("/proc/meminfo", encoding="ascii") as file:
        rows = dict(line.split(":", 1) for line in file)
    return 1024 * int(rows.get("Hugetlb", "0 kB").split()[0])


def _disk(require: Require, host: Neighbours, until: float) -> list[Unmet]:
    found = []
    for path, needed in require.disk.items():
        try:
            answer = serverfiles.answer_of(("file:disk", path), host.ask_files, clock, until)
        except serverfiles.Silent as silence:
            found.append(Unmet("disk", path, f"{path} gave no answer for {silence} s (require.disk)", serverfiles.HUNG))
            continue
        if isinstance(answer, str):
            message = f"{path} cannot be measured: {answer} (require.disk)"
            found.append(Unmet("disk", path, message, f"correct require.disk, or ls -ld {path}"))
        elif answer[0] < needed:
            needs, has = amounts(needed, answer[0])
            message = f"{path} has {has} free, but {needs} are needed (require.disk)"
            found.append(Unmet("disk", path, message, f"make room there: df -h {path}"))
        elif answer[1] is not None and answer[1] < FEWEST_INODES:
            message = f"{path} has {answer[1]} inodes free, too few for a server to make its files (require.disk)"
            found.append(Unmet("disk", path, message, f"remove files there: df -i {path}"))
    return found
