"""The straight line of a run: settings, measure, survey, judge, evict, drain, verdict, claim.

Whose start it is and what its policy says is read while the driver initialises. Then the machine is surveyed and
judged; what is stale is ended, what is awaited is waited for, and everything is looked at again, until every selected
GPU is proved clean and stays so, until somebody alive stands in the way, or until the deadline.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Optional

from . import __version__, bypass, claims, events, judge, owners, refusing, selection, settings
from .commandline import Options
from .faults import SCARCE, Interrupted, scarce
from .findings import ROOT
from .host import cgroupfs, procfs
from .host.locks import Denied
from .host.nvidia import traces
from .host.nvml import DriverError, Unanswered
from .host.systemd import seconds
from .ledger import Ledger
from .model import Account, Gpu, Inventory, Outcome, Refusal, Survey, Verdict
from .neighbours import Neighbours, clock
from .policy import Policy, Require
from .story import Story
from .verdict import conclude

if TYPE_CHECKING:
    from .before_kill import BeforeKill
    from .reset import LastResort
    from .survey import Look, Surveyor

#: Seconds between two tries to get the lock of a GPU that another run is judging.
LOCK_AGAIN = 0.05

#: Seconds in which the driver may say which GPUs a start is given that passes unproved, so that they can be claimed.
UNPROVED = 10.0


class Start(NamedTuple):
    """Whose start this is and what holds for it; ``environ`` is None where no unit's environment selects GPUs."""

    unit: Optional[str]
    environ: Optional[Mapping[str, str]]
    policy: Policy
    #: The unit whose control process we are, once systemd has said so, where it is judged for that unit.
    own: Optional[owners.Own] = None
    #: The same, whichever unit it is judged for: its time limit is ours.
    around: Optional[owners.Own] = None
    #: The PID under which a claim is made, where this is the start of a unit.
    control_pid: int = 0


def run(options: Options, host: Neighbours, *, checking: bool) -> Verdict:
    """The hook: judge, evict what is stale, wait until the memory is back, give a verdict.

    With ``checking``: judge as of now and touch nothing, not even the journal.
    """
    story = Story(run=_run_id(host), time=time.time(), boot_id=_boot_id(), checking=checking)
    write = _silent if checking else host.write
    ledger = Ledger(story, write=write, clock=clock, wchan=procfs.wchan, still_there=procfs.still_there)
    try:
        _Run(options, host, ledger, checking=checking).straight_line()
        verdict = conclude(ledger.story())
    except Refusal as refusal:
        verdict = conclude(ledger.story(refusal=refusal))
    except DriverError as error:
        hints = [error.remedy] if error.remedy else []
        verdict = conclude(ledger.story(refusal=Refusal(Outcome.UNKNOWN, str(error), hints)))
    except Interrupted as interrupted:
        verdict = conclude(ledger.story(interrupted=interrupted))
    except Exception as error:  # noqa: BLE001  Whatever it is, systemd must hear a status that refuses.
        verdict = conclude(ledger.story(refusal=_fault(error)))
    finally:
        host.deafen()
        host.locks.release()
    return verdict if checking else refusing.sure(verdict, host.systemd, procfs.own_cgroup())


def _fault(error: Exception) -> Refusal:
    if scarce(error):
        hint = "TasksMax=, LimitNPROC=, LimitNOFILE= and MemoryMax= of the unit, and what else runs here, may be why"
        return Refusal(Outcome.UNKNOWN, f"{SCARCE}: {error}", [hint])
    import traceback

    with contextlib.suppress(OSError):
        traceback.print_exc()
    message = f"a fault in gpuprestart itself: {type(error).__name__}: {error}"
    return Refusal(Outcome.INTERNAL, message, ["report it, with its traceback from the journal"])


def _silent(record: events.Record) -> None:
    """``check`` leaves no record of what it looked at."""


def _run_id(host: Neighbours) -> str:
    return host.environ.get("INVOCATION_ID") or os.urandom(16).hex()


def _boot_id() -> str:
    """Empty where /proc shows processes alone (ProcSubset=pid)."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            return file.read().strip().replace("-", "")
    except OSError:
        return ""


class _Run:
    """One run: what it was asked, what it works with, and where it writes down what it sees."""

    def __init__(self, options: Options, host: Neighbours, ledger: Ledger, *, checking: bool) -> None:
        self._options = options
        self._host = host
        self._ledger = ledger
        self._checking = checking
        self._began = clock()
        self._cgroup = procfs.own_cgroup()
        self._lineage = procfs.lineage(os.getpid())

    def straight_line(self) -> None:
        certain = (
            None
            if self._options.unit is not None or self._options.status
            else settings.certain_unit(self._host.environ, self._cgroup)
        )
        if certain is not None:
            self._let_pass(certain, os.getpid())
            if self._quick_way(certain):
                return
        start = self._start()
        if start.own is not None:
            self._let_pass(start.own.unit.name, start.control_pid)
        if start.policy.require.checksums and not self._options.status:
            self._verify(start)
        deadline = self._deadline(start, start.policy.deadline.total)
        self._host.systemd.hurry(deadline - clock())
        without: Optional[Refusal] = None
        try:
            inventory, gpus = self._measure(start, deadline)
        except Refusal as refusal:
            if refusal.outcome is not Outcome.NONE or not start.policy.asks_more:
                raise
            # A server without a GPU needs its port all the same.
            without, inventory, gpus = refusal, Inventory("", "", ()), ()
        self._announce(start, inventory, gpus)
        if self._may_go_on(start, inventory, gpus, deadline):
            self._long_way(start, inventory, gpus, deadline)
        if without is not None and self._ledger.proved:
            raise without

    # Whose start, which GPUs -----------------------------------------------------------------------------------------

    def _start(self) -> Start:
        """By systemd's word. A unit that was named chooses policy and GPUs; its processes are not ours to end."""
        if self._options.unit is not None:
            unit = owners.full_name(self._options.unit)
            if not owners.is_unit_name(unit):
                hint = "name one such as sglang-qwen.service, or an instance of a template"
                raise Refusal(Outcome.CONFIG, f"--unit: {self._options.unit!r} is no name of a unit", [hint])
            policy = self._policy(unit)
            environ = settings.environment_of(self._host.systemd, unit)
            around = self._own_unit()
            return Start(unit=unit, environ=environ, policy=policy, around=around)
        own = self._own_unit()
        if own is None:
            return Start(unit=None, environ=None, policy=self._policy(None))
        name, control_pid = own.unit.name, own.unit.control_pid
        policy = self._policy(name)
        return Start(name, self._host.environ, policy, own=own, around=own, control_pid=control_pid)

    def _own_unit(self) -> Optional[owners.Own]:
        try:
            return settings.own_unit(self._host.systemd, self._cgroup, self._lineage)
        except Refusal as refusal:
            # Who only looks may do so from what is left of a unit that has ended, such as a shell of an old sshd's.
            if self._checking and refusal.outcome is Outcome.INTERRUPTED:
                return None
            raise

    def _policy(self, unit: Optional[str]) -> Policy:
        self._ledger.note(unit=unit)
        try:
            policy = settings.load(unit, file=self._options.policy, deadline=self._options.deadline)
        except Refusal:
            # What is on the GPUs can be shown whatever a policy says of them.
            if not self._options.status:
                raise
            policy = Policy()
        self._ledger.note(policy_files=policy.files, textfile=policy.metrics.textfile)
        self._host.systemd.hurry(self._began + policy.deadline.total - clock())
        return policy

    def _measure(self, start: Start, deadline: float) -> tuple[Inventory, tuple[Gpu, ...]]:
        """What the driver has, and which of it this start uses. Where that is no GPU at all, the run ends."""
        policy = start.policy
        with self._ledger.phase("measure"):
            try:
                until = min(self._began + policy.deadline.nvml_init, deadline)
                inventory = self._host.driver.inventory(_left(policy.deadline.nvml_init, until))
            except DriverError as error:
                if policy.nvml.missing == "pass" and error.missing and not traces():
                    message = "this machine has no NVIDIA device, module, node or library"
                    raise Refusal(Outcome.NONE, message) from error
                raise
        self._ledger.note(driver=inventory.driver, nvml_path=inventory.nvml_path)
        override, origin = self._options.gpus, policy.gpus.origin
        chosen = selection.select(policy.gpus.select, inventory, start.environ, override, origin=origin)
        if chosen.empty:
            raise Refusal(Outcome.NONE, f"{start.unit or 'this start'} uses no GPU ({chosen.source})")
        return inventory, chosen.gpus

    def _announce(self, start: Start, inventory: Inventory, gpus: Sequence[Gpu]) -> None:
        policy, context = start.policy, self._ledger.context
        deadline = policy.deadline.total
        self._ledger.open_with(
            events.run_started(context, gpus=gpus, policy_files=policy.files, deadline=deadline, version=__version__)
        )
        self._warn(inventory, gpus)

    def _warn(self, inventory: Inventory, gpus: Sequence[Gpu]) -> None:
        """Of what is lost beside our GPUs; in one record, because a clean run writes but two."""
        lost = [gpu for gpu in inventory.gpus if gpu.fault and gpu not in gpus]
        if lost:
            faults = ", ".join(f"{gpu} ({gpu.fault})" for gpu in lost)
            text = f"NVML cannot reach {faults}; this start does not use {'it' if len(lost) == 1 else 'them'}"
            self._ledger.write(events.warning(self._ledger.context, text, gpus=lost))

    # What the policy asks besides -----------------------------------------------------------------------------------

    def _verify(self, start: Start) -> None:
        """Read the models in full, which may take far longer than anything else and has a deadline of its own."""
        from . import serverfiles

        began, policy = clock(), start.policy
        until = self._deadline(start, policy.deadline.checksums)
        with self._ledger.phase("preconditions"):
            found = serverfiles.checksums(
                policy.require, self._host.ask_files, say=self._host.say_status, clock=clock, until=until
            )
        self._ledger.lacks(found)
        self._began += clock() - began

    def _may_go_on(self, start: Start, inventory: Inventory, gpus: Sequence[Gpu], deadline: float) -> bool:
        """Whether all that is asked of files and of the driver is so. Nobody is ended for a start that is refused for
        that anyway; who only asks is told the rest as well."""
        policy = start.policy
        if policy.require == Require():
            return True
        from . import require

        with self._ledger.phase("preconditions"):
            found = require.before(
                policy.require,
                self._host,
                account=lambda: settings.account_of(self._host.systemd, start.unit),
                inventory=inventory,
                gpus=gpus,
                until=deadline,
                timeout=_left(policy.deadline.nvml, deadline),
                warn=self._ledger.warned,
            )
        self._ledger.lacks(found)
        return self._checking or not self._ledger.unmet

    def _needs(self, start: Start, deadline: float) -> bool:
        """Whether what the stale may have stood in the way of is free now."""
        policy, last = start.policy, self._ledger.last
        if not policy.asks_more or last is None:
            return True
        from . import require

        with self._ledger.phase("preconditions"):
            found = require.after(
                policy.require,
                self._host,
                *last,
                own_sockets=lambda: settings.socket_ports(self._host.systemd, start.unit),
                until=deadline,
            )
        self._ledger.lacks(found)
        return not self._ledger.unmet

    def _clear(self, start: Start) -> None:
        """Remove what dead servers have left in shared memory, or tell what would go."""
        policy = start.policy.residue
        if not policy.asked:
            return
        from . import residue

        with self._ledger.phase("preconditions"):
            try:
                account = settings.account_of(self._host.systemd, start.unit)
            except Refusal:
                # A start that is proved is refused for no answer about this; only root's is known to be nobody's then.
                account = Account()
            self._ledger.left(residue.clear(policy, self._host, account=account, touch=not self._checking))

    # Without a proof -------------------------------------------------------------------------------------------------

    def _let_pass(self, unit: str, control_pid: int) -> None:
        """Where an operator has said that this start may pass unproved, it does. Nothing is judged then, nobody is
        signalled, and nothing that is broken may stand in the way: the policy, the driver, or the locks."""
        if self._checking or self._options.status:
            return
        try:
            line = self._host.bypasses.read().get(unit)
        except Denied as error:
            raise _no_folder(error) from error
        if line is None:
            return
        granted = bypass.parse(line)
        # It is taken away before it is used: once means once.
        removed = self._host.bypasses.remove(unit)
        if granted is None or not removed or not bypass.holds(granted, clock()):
            return
        self._ledger.note(unit=unit)
        message = f"{granted.by} let this start of {unit} pass: nothing was proved of its GPUs"
        try:
            start = Start(unit=unit, environ=self._host.environ, policy=Policy(), control_pid=control_pid)
            with contextlib.suppress(Refusal):
                start = start._replace(policy=self._policy(unit))
            _, gpus = self._measure(start, clock() + UNPROVED)
            self._locked_by(start, gpus)
            self._claim(start, gpus)
        except (Refusal, DriverError) as fault:
            message += f", and no claim keeps others off them ({fault})"
        raise Refusal(Outcome.BYPASSED, message)

    # The quick way ---------------------------------------------------------------------------------------------------

    def _quick_way(self, unit: str) -> bool:
        """Whether one sample proves everything: nobody is listed or has claimed anything, all GPUs are under their
        limit, and our cgroup holds only our own tree. What is not certain here is left to the long way."""
        control_pid = os.getpid()
        start = Start(unit=unit, environ=self._host.environ, policy=self._policy(unit), control_pid=control_pid)
        if start.policy.asks_more:
            return False
        try:
            inventory, gpus = self._measure(start, self._began + SOON)
        except Unanswered:
            # Only systemd can tell how long this start may wait for it.
            return False
        beside = cgroupfs.pids(owners.cgroup_of(unit, self._cgroup))
        # Where not even we are seen in it, nothing tells that nobody else is.
        if control_pid not in beside or any(control_pid not in procfs.lineage(pid) for pid in beside):
            return False
        if not self._checking and self._locked_by(start, gpus) is not None:
            return False
        if self._foreign_claims(start, gpus):
            return False
        try:
            with self._ledger.phase("measure"):
                readings = self._host.driver.sample(gpus, min(start.policy.deadline.nvml, SOON))
        except Unanswered:
            return False
        if any(reading.listed or reading.distrust or reading.unlisted for reading in readings.values()):
            return False
        survey = Survey(at=clock(), gpus=gpus, readings=readings, pids_ours=_pids_ours(start.policy))
        plan = judge.plan(start.policy, survey, judge.History())
        if not plan.clean:
            return False
        self._ledger.planned(survey, plan)
        self._warn(inventory, gpus)
        self._prove(start, gpus)
        return True

    # The long way ----------------------------------------------------------------------------------------------------

    def _long_way(self, start: Start, inventory: Inventory, gpus: Sequence[Gpu], deadline: float) -> None:
        """Everything is looked at. A start on clean GPUs never comes here, and does not wait until this is loaded."""
        from . import loop
        from .registry import searching
        from .survey import Surveyor

        ledger, host = self._ledger, self._host
        policy = start.policy._replace(search=searching(host.ask))
        if not self._checking:
            self._lock(start, gpus, deadline)
        surveyor = Surveyor(
            host,
            inventory=inventory,
            gpus=gpus,
            own=start.own,
            pids_ours=_pids_ours(policy),
            timeout=lambda waited: _left(policy.deadline.nvml, deadline - waited),
            foreign_claims=lambda: self._foreign_claims(start, gpus),
            keep_claims=self._checking,
            occupied=_occupied(policy.require, host),
        )
        if self._checking:
            _, plan, _ = loop.look(surveyor, policy, judge.History(), ledger)
            proved = plan.clean
        else:
            protected_until = min(deadline, self._began + policy.deadline.protected)
            proved = loop.clean(
                policy,
                surveyor,
                host,
                ledger,
                deadline=deadline,
                protected_until=protected_until,
                before_kill=self._before_kill(policy),
                last_resort=self._last_resort(policy, surveyor, inventory, deadline),
            )
        if self._needs(start, deadline) and proved:
            self._clear(start)
            self._prove(start, gpus)
        elif self._checking:
            self._clear(start)

    def _before_kill(self, policy: Policy) -> Optional[BeforeKill]:
        if not policy.hooks.before_kill:
            return None
        from .before_kill import BeforeKill

        return BeforeKill(policy.hooks, self._host, self._ledger, trusted_owner=os.geteuid())

    def _last_resort(
        self, policy: Policy, surveyor: Surveyor, inventory: Inventory, deadline: float
    ) -> Optional[LastResort]:
        if policy.reset.mode == "off":
            return None
        from .reset import LastResort

        return LastResort(
            policy,
            self._host,
            self._ledger,
            surveyor,
            inventory,
            deadline=deadline,
            boot=_boot_id(),
            trusted_owner=os.geteuid(),
        )

    def _deadline(self, start: Start, total: float) -> float:
        """When this run, or what comes before its judgement, must be over: after ``total`` seconds as the policy says,
        and before systemd ends it."""
        deadline = self._began + total
        if start.around is None or self._checking:
            return deadline
        unit = start.around.unit
        stopping = unit.sub_state == "stop-post"
        limit = seconds(unit.timeout_stop or "infinity") if stopping else unit.timeout_start
        control = procfs.read(unit.control_pid)
        if limit is None or control is None or control.began + limit > deadline + EXTENSION:
            return deadline
        if self._host.extend_timeout(deadline - clock() + EXTENSION):
            return deadline
        cut = control.began + limit - min(EXTENSION, 0.3 * limit)
        self._ledger.note(
            advice=(
                f"this run was cut short at {limit:g} s by Timeout{'Stop' if stopping else 'Start'}Sec= of {unit.name}:"
                " raise it above deadline.total, or set NotifyAccess=exec so that it can be extended",
            )
        )
        return min(deadline, cut)

    # Claims and locks ------------------------------------------------------------------------------------------------

    def _prove(self, start: Start, gpus: Sequence[Gpu]) -> None:
        """Every selected GPU is clean. A unit's start claims them before the lock is given up."""
        self._claim(start, gpus)
        self._ledger.note(proved=True)

    def _claim(self, start: Start, gpus: Sequence[Gpu]) -> None:
        if not self._checking and start.control_pid:
            invocation = start.own.unit.invocation if start.own else self._host.environ.get("INVOCATION_ID", "")
            try:
                for claim in claims.of(start.unit or "", invocation, start.control_pid, gpus):
                    self._host.claims.write(claim.gpu, claims.text(claim))
            except Denied as error:
                raise _no_folder(error) from error

    def _foreign_claims(self, start: Start, gpus: Sequence[Gpu]) -> list[claims.Claim]:
        try:
            return claims.foreign(self._host.claims.read(), gpus, start.unit)
        except Denied as error:
            raise _no_folder(error) from error

    def _locked_by(self, start: Start, gpus: Sequence[Gpu]) -> Optional[str]:
        """Try to lock the GPUs: None if they are ours, else who has one of them. An instance is locked by its GPU."""
        holder = f"{start.unit or 'gpuprestart clean'} (PID {os.getpid()})"
        try:
            return self._host.locks.take([gpu.parent or gpu.uuid for gpu in gpus if gpu.uuid], holder)
        except Denied as error:
            raise _no_folder(error) from error

    def _lock(self, start: Start, gpus: Sequence[Gpu], deadline: float) -> None:
        """Wait until no other run judges these GPUs."""
        with self._ledger.phase("measure"):
            while (other := self._locked_by(start, gpus)) is not None:
                if clock() >= deadline:
                    message = f"the start of {other} is judging these GPUs and was not over by the deadline"
                    raise Refusal(Outcome.PROTECTED, message, ["start one unit after the other (After=)"])
                if self._ledger.begin():
                    self._host.say_status(f"Waiting for the start of {other}, which is judging the same GPUs")
                self._host.wait((), LOCK_AGAIN)


#: Seconds in which a driver whose GPUs are initialised has given its first answer many times over.
SOON = 1.0

#: Seconds that systemd is asked for beyond the deadline, for the last look and the verdict.
EXTENSION = 5.0


def _occupied(require: Require, host: Neighbours) -> Optional[Look]:
    """How a survey sees what the policy asks to be free, where it asks for any of that."""
    if not (require.ports or require.processes):
        return None
    from . import occupants

    return occupants.look(require, host.ask)


def _no_folder(error: Denied) -> Refusal:
    room = {
        errno.ENOSPC: "make room in /run: df -h /run, df -i /run",
        errno.EROFS: "/run has to be writable: mount -o remount,rw /run",
    }
    return Refusal(Outcome.DENIED, f"locks and claims cannot be kept: {error}", [room.get(error.number, ROOT)])


def _pids_ours(policy: Policy) -> bool:
    if policy.nvml.pids == "auto":
        return procfs.own_pid_namespace() == procfs.INITIAL_PID_NAMESPACE
    return policy.nvml.pids == "ours"


def _left(most: float, deadline: float) -> float:
    """A timeout for one call inside the deadline. At the end there is still a second for the last look."""
    return max(1.0, min(most, deadline - clock()))
