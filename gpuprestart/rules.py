"""The policy's [[rule]] tables, held against one holder. Pure.

The first rule whose every key matches decides. A key that cannot be read might have matched, so it refuses; and what
somebody alive wants is out of reach of ``kill`` unless the rule names the unit, the session or the container.
"""

from __future__ import annotations

from collections.abc import Iterator
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

    def may_match(rule: Rule) -> bool:
        in_reach = rule.infrastructure or not infrastructure
        return in_reach and not any(fits is False for fits, _ in _keys(policy, rule.match, holder, age))

    rule = policy.rule_for(may_match)
    if rule is None:
        return None
    doubt = next((why for fits, why in _keys(policy, rule.match, holder, age) if fits is None), "")
    if doubt:
        reason = f"{doubt}, so it cannot be told whether the rule {rule.name!r} is about it"
        return Decision(
            holder=holder,
            action=Action.REFUSE,
            reason=reason,
            rule=rule.name,
            hint=f"see {rule.origin}, which has the rule",
        )
    if rule.action is Action.KILL and wanted(holder) and not _reaches_the_living(rule.match):
        # The owner's row refuses it, and says so better than a rule that does not apply.
        return None
    hint = f"see {rule.origin}, which has the rule" if rule.action is Action.REFUSE else ""
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


def _keys(policy: Policy, match: Match, holder: Holder, age: float) -> Iterator[tuple[Optional[bool], str]]:
    """Whether each key of a match fits the holder; None where that cannot be told, and then why it cannot. Patterns,
    which may take their time, come last."""
    process, owner = holder.process, holder.owner
    kind, _, name = owner.word.partition(":")
    unknown, doubt = owner.kind is OwnerKind.UNKNOWN, f"has no readable owner ({owner.doubt})"
    if match.age is not None:
        yield age >= match.age, ""
    if match.user is not None:
        yield _is_user(match.user, process), "has no readable user name"
    if match.unit is not None:
        yield None if unknown else kind == "unit" and _is_unit(match, name), doubt
    if match.session is not None:
        yield None if unknown else kind == "session" and fnmatchcase(name.partition(":")[0], match.session), doubt
    if match.container is not None:
        yield None if unknown else kind == "container" and _is_container(name, match.container), doubt
    patterns = (
        ("name", match.comm, process.comm),
        ("executable", match.exe, process.exe),
        ("command line", match.cmdline, process.cmdline),
    )
    for what, pattern, text in patterns:
        if pattern is not None and text is None:
            yield None, f"has no readable {what}"
        elif pattern is not None and text is not None:
            yield policy.search(pattern, text), f"has a {what} that the pattern takes too long for"


def _is_user(user: Union[str, int], process: Process) -> Optional[bool]:
    """By name or number; a name may be that of anybody whose own name nobody tells."""
    if str(user) in (process.user, str(process.uid)):
        return True
    return None if isinstance(user, str) and not process.user else False


def _suffixed(pattern: str) -> str:
    return pattern if "*" in pattern else full_name(pattern)


def _is_container(name: str, wanted_name: str) -> bool:
    runtime, _, identifier = name.partition(":")
    return runtime == wanted_name or identifier.startswith(wanted_name)
