"""What is meant by a name that the hook is to be enabled for: a service, a template or a prefix, as systemd has it.

A template is asked about by an instance that nobody has, and by those that are loaded; a prefix by every service that
begins so. What cannot have the hook, or would never run it, is refused here, in a sentence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Optional

from . import dropin, infrastructure, owners, placement, service, settings, unitlines
from .dropin import Member
from .host.systemd import Systemd
from .model import Outcome, Refusal
from .placement import Found


class Target(NamedTuple):
    """``name`` is that of the drop-in's folder; ``asked`` was typed, and may be another of the unit's names."""

    name: str
    asked: str
    members: tuple[Member, ...]
    #: What lies there under our name.
    found: Optional[Found]

    @property
    def path(self) -> str:
        return placement.path_of(self.name)

    @property
    def stale(self) -> bool:
        """systemd does not have the files as they are, so what it says is of others."""
        return any(each.unit.need_reload for each in self.members)

    @property
    def known(self) -> bool:
        """systemd has read the drop-in."""
        return any(self.path in each.unit.drop_ins for each in self.members)


def of(asked: str, systemd: Systemd) -> Target:
    """The target of a full name. Raises Refusal, and SystemdError."""
    stem = asked.rpartition(".")[0]
    template = stem.endswith("@")
    instance = f"{stem}{service.INSTANCE}.service" if template else asked
    if not asked.endswith(".service") or not owners.is_unit_name(instance):
        hint = "such as sglang-qwen.service, sglang@.service, or sglang-.service for all that begin so"
        raise Refusal(Outcome.CONFIG, f"{asked!r} is no name of a service", [hint])
    if stem.endswith("-") and "@" not in stem:
        name, units = asked, _of_prefix(stem, systemd)
    else:
        said = systemd.everything(instance)
        # Of a unit that has several names, one is that of its file.
        name = str(said.get("Id", instance))
        units = {name: said}
        if template:
            name = service.called(name)
            instances = f"{name.rpartition('.')[0]}*.service"
            units.update(_startable(systemd.list_units(instances), systemd))
    found = [service.from_properties(name, said) for name, said in units.items()]
    for unit in found:
        _refuse(unit, service.called(unit.name))
    ours = placement.path_of(name)
    # Of several drop-ins of one name, systemd reads that of the more specific folder alone.
    served = [unit for unit in found if not any(path.endswith(f"/{dropin.NAME}") for path in {*unit.drop_ins} - {ours})]
    members = tuple(_member(unit, but=ours) for unit in served or found)
    return Target(name=name, asked=asked, members=members, found=placement.look(name))


def _of_prefix(stem: str, systemd: Systemd) -> dict[str, Mapping[str, Any]]:
    pattern = f"{stem}*.service"
    names = [*systemd.list_unit_files(pattern), *systemd.list_units(pattern)]
    units = _startable([name.replace("@.", f"@{service.INSTANCE}.") for name in names], systemd)
    if not units:
        hint = "systemctl list-unit-files shows what there is"
        raise Refusal(Outcome.CONFIG, f"systemd has no service that {stem}.service would stand for", [hint])
    return units


def _startable(names: Iterable[str], systemd: Systemd) -> dict[str, Mapping[str, Any]]:
    """Those of these services that could be started, each once, by the name of its file."""
    said = [systemd.everything(name) for name in dict.fromkeys(names)]
    return {str(each["Id"]): each for each in said if each.get("LoadState") == "loaded"}


def _member(unit: service.Service, *, but: str) -> Member:
    lines = unitlines.read([(path, placement.read(path)) for path in unit.files if path != but])
    return Member(unit=unit, lines=lines, total=settings.load(unit.name, file=None, deadline=None).deadline.total)


def _refuse(unit: service.Service, name: str) -> None:
    """Raises Refusal with why this service cannot have the hook."""
    if unit.load_state == "masked":
        hint = f"systemctl unmask {name}, if it is meant to start at all"
        raise Refusal(Outcome.CONFIG, f"{name} is masked, so nothing can start it", [hint])
    if unit.load_state == "not-found":
        hint = "systemctl list-unit-files shows what there is"
        raise Refusal(Outcome.CONFIG, f"systemd has no unit {name}", [hint])
    if unit.load_state != "loaded":
        hint = f"systemctl status {name} says what is wrong with it"
        raise Refusal(Outcome.CONFIG, f"systemd cannot load {name} ({unit.load_state})", [hint])
    if unit.transient:
        hint = f"have what makes it set ExecStartPre={dropin.HOOK}"
        raise Refusal(
            Outcome.CONFIG, f"{name} is transient: it is gone once it has ended, and no file is its own", [hint]
        )
    if owners.carrier(name):
        hint = "enable the units whose servers use the GPUs"
        raise Refusal(Outcome.CONFIG, f"{name} carries other people's work, which the hook would hold up", [hint])
    for command in unit.start:
        what = infrastructure.PROGRAMS.get(command.path.rpartition("/")[2])
        if what is not None:
            hint = "enable the units whose servers use the GPUs"
            raise Refusal(Outcome.CONFIG, f"{name} is a {what}, which serves the GPUs itself", [hint])
