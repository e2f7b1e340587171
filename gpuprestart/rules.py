"""The policy's [[rule]] tables, held against one holder. Pure.

The first rule whose every key matches decides. A key that cannot be read might have matched, so it refuses; and what
somebody alive wants is out of reach of ``kill`` unless the rule names the unit, the session or the container.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Optional, Union

from .model import Action, Decision, Holder, OwnerKind, Process
from .owners import full_name, over
from .policy import Match, Policy, Rule


def first_match(policy: Policy, holder: Holder, *, now: float, infrastructure: bool) -> Optional[Decision]:
    """What the rules say of this holder, or None if they say nothing.

    ``now`` is the age of the machine in seconds, on the clock of ``Process.started``. ``infrastructure`` says what the
    holder is: only rules that declare it may touch that.
    """
    age = now - holder.process.began
    rule = policy.rule_for(lambda rule: (rule.infrastructure or not infrastructure) and not _differs(rule, holder, age))
    if rule is None:
        return None
    unread = _unread(rule.match, holder)
    if unread:
        reason = f"has no readable {unread}, so it cannot be told whether the rule {rule.name!r} is about it"
        return Decision(holder=holder, action=Action.REFUSE, reason=reason, rule=rule.name, hint=f"see {rule.origin}")
    if rule.action is Action.KILL and wanted(holder) and not _reaches_the_living(rule.match):
        # The owner's row refuses it, and says so better than a rule that does not apply.
        return None
    hint = f"see {rule.origin}" if rule.action is Action.REFUSE else ""
    return Decision(
        holder=holder, action=rule.action, reason=f"matches the rule {rule.name!r}", rule=rule.name, hint=hint
    )


def spare_unit(policy: Policy, unit: str) -> bool:
    """Whether a rule that is about units and nothing else spares this one, and so lets us share a GPU with it."""
    rule = policy.rule_for(lambda rule: rule.match == Match(unit=rule.match.unit) and _is_unit(rule.match, unit))
    return rule is not None and rule.action is Action.SPARE


def _is_unit(match: Match, unit: str) -> bool:
    return match.unit is not None and fnmatchcase(unit, _suffixed(match.unit))


def wanted(holder: Holder) -> bool:
    """Whether somebody alive may want the process: a unit that is not down, a session, a container or a job."""
    owner = holder.owner
    if owner.kind is OwnerKind.UNIT and owner.unit is not None:
        return owner.unit.active_state not in ("inactive", "failed")
    if owner.kind is OwnerKind.SESSION:
        return not over(owner)
    if owner.kind in (OwnerKind.CONTAINER, OwnerKind.SLURM):
        return bool(owner.runtime) or not owner.cgroup
    return owner.kind not in (OwnerKind.NONE, OwnerKind.OWN_PREVIOUS)


def _reaches_the_living(match: Match) -> bool:
    return any(key is not None for key in (match.unit, match.session, match.container))


def _differs(rule: Rule, holder: Holder, age: float) -> bool:
    """Whether a key that can be read does not match; what cannot be read never tells a holder apart from a rule."""
    match, process = rule.match, holder.process
    kind, _, name = holder.owner.word.partition(":")
    known = holder.owner.kind is not OwnerKind.UNKNOWN
    session = name.partition(":")[0]
    tests = (
        known and match.unit is not None and not (kind == "unit" and _is_unit(match, name)),
        known and match.session is not None and not (kind == "session" and fnmatchcase(session, match.session)),
        known and match.container is not None and not (kind == "container" and _is_container(name, match.container)),
        match.user is not None and not _is_user(match.user, process),
        match.age is not None and age < match.age,
        match.comm is not None and not match.comm.search(process.comm),
        match.exe is not None and process.exe is not None and not match.exe.search(process.exe),
        match.cmdline is not None and process.cmdline is not None and not match.cmdline.search(process.cmdline),
    )
    return any(tests)


def _is_user(user: Union[str, int], process: Process) -> bool:
    """By name or number; a name may be that of anybody whose own name nobody tells."""
    return str(user) in (process.user, str(process.uid)) or (not process.user and isinstance(user, str))


def _unread(match: Match, holder: Holder) -> str:
    if holder.owner.kind is OwnerKind.UNKNOWN and _reaches_the_living(match):
        return f"owner ({holder.owner.doubt})"
    if isinstance(match.user, str) and not holder.process.user:
        return "user name"
    if match.exe is not None and holder.process.exe is None:
        return "executable"
    return "command line" if match.cmdline is not None and holder.process.cmdline is None else ""


def _suffixed(pattern: str) -> str:
    return pattern if "*" in pattern else full_name(pattern)


def _is_container(name: str, wanted_name: str) -> bool:
    runtime, _, identifier = name.partition(":")
    return runtime == wanted_name or identifier.startswith(wanted_name)
