"""``doctor``: what would make the hook fail, or be ignored, on this machine and in front of one unit.

It gathers the facts, has checks, hookchecks and unitchecks make findings of them, and prints those. It touches nothing:
no lock, no claim, no record, no signal, and no reload. What cannot be found out is a finding too, and hides no other.
"""

from __future__ import annotations

import os
import sys
from typing import Callable, Optional, TextIO, Union

from . import checks, claims, facts, hookchecks, owners, printing, selection, service, settings, unitchecks, unitlines
from .checks import Check
from .commandline import Command, Options
from .faults import Interrupted
from .host import nvidia, procfs
from .host.locks import Denied, Notes
from .host.nvml import DriverError
from .host.systemd import SystemdError
from .model import EXIT_STATUS, Gpu, Inventory, Outcome, Reading, Refusal
from .neighbours import Neighbours, clock
from .policy import Policy


def perform(command: Command, host: Neighbours, *, out: TextIO) -> int:
    """Look, print what was found, and return the exit status."""
    doctor = _Doctor(host, owners.full_name(command.units[0]) if command.units else None)
    try:
        found = doctor.everything()
    except Interrupted as interrupted:
        print(f"gpuprestart: {interrupted.signal_name} came before everything was looked at", file=sys.stderr)
        return EXIT_STATUS[Outcome.INTERRUPTED]
    text = checks.as_json if command.json else checks.as_text
    printing.show(text(doctor.unit, found) + "\n", out=out, err=sys.stderr)
    return checks.status(found)


class _Doctor:
    """One look at the machine and at one unit; what is found out early serves what comes later."""

    def __init__(self, host: Neighbours, unit: Optional[str]) -> None:
        self._host = host
        self.unit = unit
        #: The unit as systemd has it, where there is one that could be started.
        self._service: Optional[service.Service] = None
        self._options = Options()
        self._usage = ""
        self._policy: Optional[Policy] = None
        self._missing = facts.missing_modules()
        self._inventory: Optional[Inventory] = None
        self._readings: dict[str, Reading] = {}
        self._selected: Optional[tuple[Gpu, ...]] = None

    def everything(self) -> list[Check]:
        found = self._machine() + self._systemd()
        silent = any(each.blind for each in found if each.check == "systemd")
        if self.unit is not None and not silent:
            found += self._asked("unit", self._load)
        found += self._policies() + self._driver()
        if self._service is not None:
            found += self._asked("unit", self._in_detail)
        if not silent:
            found += self._asked("overlays", self._overlays)
            found += self._asked("claims", self._claims)
        return found + self._gpus() + self._bypasses()

    def _asked(self, check: str, look: Callable[[], list[Check]]) -> list[Check]:
        """What comes of asking systemd, which may fall silent at any time."""
        try:
            return look()
        except SystemdError as error:
            return [_silent(check, error)]

    # The machine -----------------------------------------------------------------------------------------------------

    def _machine(self) -> list[Check]:
        notes = [self._host.claims, self._host.bypasses]
        if os.geteuid() == 0:
            # Nobody else may read those.
            notes.append(Notes("locks"))
        return [
            *checks.privileges(os.geteuid(), facts.capabilities("self", "CapEff"), facts.capabilities(1, "CapBnd")),
            *checks.processes(facts.hidepid(), facts.init_seen()),
            *checks.modules(self._missing),
            *checks.journald(facts.journald()),
            *checks.runtime_folder(facts.folder_faults(notes)),
        ]

    def _systemd(self) -> list[Check]:
        try:
            # Each is asked in its own way, and starts depend on both.
            self._host.systemd.units(["init.scope"])
            self._host.systemd.everything("init.scope")
        except SystemdError as error:
            return [_silent("systemd", error)]
        return [checks.ok("systemd", "systemd answers")]

    def _policies(self) -> list[Check]:
        """The policy of the unit; without one the machine's, and everybody's over it."""
        unit = self.unit if self._service is not None else None
        policy = _policy(unit, self._options)
        if isinstance(policy, Refusal):
            return checks.policy_refused(policy, unit)
        self._policy = policy
        found = checks.policy(policy.files)
        for name in sorted(set(facts.policy_files().values())) if self.unit is None else ():
            over = _policy(name, Options()) if name.endswith(".service") else policy
            if isinstance(over, Refusal):
                found += checks.policy_refused(over, name)
        return found

    def _overlays(self) -> list[Check]:
        """Files that no unit reads. systemctl refuses a whole call for one name that it does not take."""
        found = facts.policy_files()
        instances = [name for name in found.values() if owners.is_unit_name(name) and name.endswith(".service")]
        templates = [name for name in found.values() if "@." in name and self._host.systemd.list_unit_files(name)]
        known = {name for name, unit in self._host.systemd.units(instances).items() if unit.load_state != "not-found"}
        strays = {}
        for path, name in found.items():
            if not name.endswith(".service"):
                strays[path] = "its name is not that of a service with .toml behind it"
            elif name not in known and name not in templates:
                strays[path] = f"systemd has no unit {name}"
        return checks.overlays(strays)

    def _bypasses(self) -> list[Check]:
        try:
            return checks.bypasses(self._host.bypasses.read(), clock())
        except Denied:
            # Told of the folder already.
            return []

    def _claims(self) -> list[Check]:
        try:
            texts = self._host.claims.read()
        except Denied:
            return []
        names = sorted({claims.parse(gpu, line).unit for gpu, line in texts.items()})
        units = self._host.systemd.units([name for name in names if owners.is_unit_name(name)])
        return checks.standing_claims(texts, units, self.unit, self._selected or ())

    # The driver ------------------------------------------------------------------------------------------------------

    def _driver(self) -> list[Check]:
        policy = self._policy or Policy()
        initial = procfs.own_pid_namespace() == procfs.INITIAL_PID_NAMESPACE
        pids = checks.pids(policy.nvml.pids, initial) if self._policy else []
        try:
            self._inventory = self._host.driver.inventory(policy.deadline.nvml_init)
            self._readings = self._host.driver.sample(self._inventory.gpus, policy.deadline.nvml)
        except DriverError as error:
            allowed = policy.nvml.missing == "pass" and error.missing and not nvidia.traces()
            return checks.no_driver(str(error), error.remedy, may_be_missing=allowed) + pids
        return checks.driver(self._inventory) + pids

    def _gpus(self) -> list[Check]:
        if self._inventory is None:
            return []
        absent = facts.absent_nodes(self._inventory.gpus)
        return checks.gpus(self._inventory, self._readings, absent, self._selected)

    # The unit --------------------------------------------------------------------------------------------------------

    def _load(self) -> list[Check]:
        """The unit as systemd has it, by its own name and not by an alias. A template as a whole is looked at by an
        instance of it."""
        assert self.unit is not None
        name = self.unit.replace("@.", f"@{service.INSTANCE}.")
        if not owners.is_unit_name(name) or not name.endswith(".service"):
            consequence, remedy = "nothing can start it", "such as sglang-qwen, or sglang@qwen for an instance"
            return [checks.fault("unit", f"{self.unit!r} is no name of a service", consequence, remedy)]
        said = self._host.systemd.everything(name)
        self.unit = self.unit if self._template else str(said.get("Id", name))
        found = service.from_properties(self.unit, said)
        if found.load_state == "loaded":
            self._service = found
            hooks = [command for command in found.start_pre if command.ours]
            self._options, self._usage = facts.options(hooks[0]) if hooks else (Options(), "")
            if self._options.unit is not None:
                self._options = self._options._replace(unit=owners.full_name(self._options.unit))
        return hookchecks.loaded(found)

    @property
    def _template(self) -> bool:
        return self.unit is not None and "@." in self.unit

    def _in_detail(self) -> list[Check]:
        unit = self._service
        assert unit is not None
        known = hookchecks.Facts(
            service=unit,
            lines=unitlines.read(facts.texts(unit.files)),
            unread=unitlines.read(facts.texts(facts.unread_drop_ins(unit))),
            policy=self._policy,
            usage=self._usage,
            named=self._options.unit,
            can_notify="systemd" not in self._missing,
            writable=facts.writable(entry for entry, _ in unit.environment_files),
            loaded_code=facts.loaded_code(unit),
            programs=facts.programs(command for command in unit.start_pre if command.ours),
            numbers=facts.numbers(unit.device_rights),
            folder=os.path.isdir(hookchecks.RUN),
            user_known=self._template or self._is_user(unit.user),
        )
        found = self._asked("selection", lambda: self._selection(known))
        known = known._replace(nodes=facts.nodes(self._selected, strict=unit.device_policy == "strict"))
        return hookchecks.of(known) + unitchecks.of(known) + found

    def _is_user(self, name: str) -> bool:
        return not name or name.isdigit() or self._host.ask(("uid", name), SLOW) is not None

    def _selection(self, known: hookchecks.Facts) -> list[Check]:
        """Which GPUs the hook will judge, and who else uses them; nothing of a template, whose instances differ."""
        if self._policy is None or self._inventory is None or self._template:
            return []
        chosen, unset = self._chosen(known.service.name, self._policy, self._options)
        found = unitchecks.selection(known, chosen, unset=unset)
        if isinstance(chosen, selection.Selection) and chosen.gpus:
            self._selected = chosen.gpus
            found += unitchecks.shared(known.service.name, self._others(known.service, chosen.gpus))
        return found

    def _chosen(self, unit: str, policy: Policy, options: Options) -> tuple[Union[selection.Selection, Refusal], bool]:
        """What a unit's start would judge, and whether that is all because nothing selects any."""
        assert self._inventory is not None
        select = policy.gpus.select
        try:
            environ = settings.environment_of(self._host.systemd, options.unit or unit)
            chosen = selection.select(select, self._inventory, environ, options.gpus, origin=policy.gpus.origin)
        except Refusal as refusal:
            return refusal, False
        return chosen, select == "unit" and options.gpus is None and not environ.keys() & set(selection.VARIABLES)

    def _others(self, unit: service.Service, gpus: tuple[Gpu, ...]) -> dict[str, tuple[list[Gpu], bool]]:
        """Other services that are enabled or active and select some of these GPUs, and whether the hook is before
        them."""
        found = {}
        for said in self._host.systemd.each("*.service", _SHOWN):
            name = said.get("Id", unit.name)
            up = said.get("UnitFileState", "").startswith("enabled") or said.get("ActiveState") == "active"
            hooked = "gpuprestart" in said.get("ExecStartPre", "")
            environment = said.get("Environment", "")
            speaks = said.get("EnvironmentFiles") or any(word in environment for word in selection.VARIABLES)
            if not up or not (hooked or speaks) or name in (unit.name, *unit.conflicts):
                continue
            policy = _policy(name, Options()) if hooked else Policy()
            chosen, unset = self._chosen(name, policy, Options()) if isinstance(policy, Policy) else (policy, False)
            if isinstance(chosen, Refusal) or (unset and not hooked):
                continue
            both = [gpu for gpu in gpus if gpu in chosen.gpus or any(gpu.parent == each.uuid for each in chosen.gpus)]
            if both:
                found[name] = (both, hooked)
        return found


#: What is asked of every service.
_SHOWN = ("Id", "ActiveState", "UnitFileState", "Environment", "EnvironmentFiles", "ExecStartPre")

#: Seconds for an answer of the name services.
SLOW = 2.0


def _policy(unit: Optional[str], options: Options) -> Union[Policy, Refusal]:
    try:
        return settings.load(options.unit or unit, file=options.policy, deadline=options.deadline)
    except Refusal as refusal:
        return refusal


def _silent(check: str, error: SystemdError) -> Check:
    consequence = "what systemd has of the units cannot be looked at; a hook refuses where it has to ask"
    remedy = "systemctl status; systemctl is-system-running"
    return checks.fault(check, f"systemd cannot be asked: {error}", consequence, remedy, blind=True)
