"""The table: what becomes of one holder, by what it is, by the policy's rules, and by who owns it. Pure.

A process is ended only with proof that nobody alive wants it. Every kind of owner has its row here, and whatever is in
none of them is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Callable

from . import infrastructure, rules
from .model import Action, Decision, Holder, Owner, OwnerKind, Survey, Unit
from .owners import NAMESPACE, carrier, is_set_aside, over
from .policy import Policy


def decide(policy: Policy, survey: Survey, holder: Holder) -> Decision:
    """What the table says of one holder: infrastructure, rules, our own unit, then its owner."""
    program = infrastructure.recognise(holder.process)
    decision = None
    if holder.process.pid not in survey.kin:
        decision = rules.first_match(policy, holder, now=survey.at, infrastructure=program is not None)
    if decision is None and program is not None:
        return Decision(holder=holder, action=Action.SPARE, reason=f"is infrastructure ({program})")
    decision = decision or _by_owner(policy, holder)
    if decision.action is not Action.KILL:
        return decision
    if holder.process.pid in survey.kin:
        reason = "is PID 1, or belongs to this very run, as what started it and what that started beside it"
        hint = f"systemctl status {holder.process.pid} shows what it is: it must not use these GPUs"
        return decision._replace(action=Action.REFUSE, reason=reason, hint=hint)
    seen = holder.opened or holder.mapped or holder.occupies
    only_nvml = bool(holder.listed) and not seen and holder.owner.kind is not OwnerKind.OWN_PREVIOUS
    if only_nvml and holder.process.pid in survey.unreadable:
        reason = f"{decision.reason}, but it may not be looked into, and nobody is ended on NVML's word"
        return decision._replace(action=Action.REFUSE, reason=reason, blind=True)
    if only_nvml:
        reason = "is named by NVML alone and has none of these GPUs' nodes open, and nobody is ended on NVML's word"
        return decision._replace(action=Action.REFUSE, reason=reason, hint=_look(holder))
    return decision


def _by_owner(policy: Policy, holder: Holder) -> Decision:
    action, reason, hint = _ROWS[holder.owner.kind](policy, holder)
    return Decision(holder=holder, action=action, reason=reason, hint=hint, blind=holder.owner.hidden)


Row = tuple[Action, str, str]


def _own_previous(policy: Policy, holder: Holder) -> Row:
    owner = holder.owner
    assert owner.unit
    if carrier(owner.unit.name):
        return Action.REFUSE, f"was left in {owner.unit.name}, whose processes are other people's work", _look(holder)
    return Action.KILL, f"was left behind by an earlier run of {owner.unit.name}", ""


def _own_current(policy: Policy, holder: Holder) -> Row:
    owner = holder.owner
    assert owner.unit
    hint = f"systemctl edit {owner.unit.name}: have the ExecStartPre= that started it come after gpuprestart's"
    return Action.REFUSE, f"was started in the present start of {owner.unit.name}", f"{hint}, or spare it by a rule"


def _unit(policy: Policy, holder: Holder) -> Row:
    owner = holder.owner
    unit = owner.unit
    assert unit
    if is_set_aside(unit.name):
        return Action.KILL, f"was set aside in {unit.name}, since it survived SIGKILL at an earlier start", ""
    if unit.up:
        return Action.REFUSE, f"belongs to {unit.name}, which is {unit.active_state}", f"systemctl stop {unit.name}"
    if unit.active_state == "deactivating":
        limit = f" (TimeoutStopSec={unit.timeout_stop})" if unit.timeout_stop else ""
        reason = f"belongs to {unit.name}, which is deactivating{limit}"
        return Action.WAIT, reason, f"wait for {unit.name} to stop, or systemctl kill --signal=SIGKILL {unit.name}"
    if unit.active_state not in ("inactive", "failed"):
        return (
            Action.REFUSE,
            f"belongs to {unit.name}, which is in the state {unit.active_state}, of which nothing is known here",
            _look(holder),
        )
    state = _ended(unit)
    doubt = _doubt(owner, unit)
    if doubt and not policy.dedicated:
        return Action.REFUSE, f"was left behind by {unit.name}, which {state}, but {doubt}", _dedicated(holder)
    return Action.KILL, f"was left behind by {unit.name}, which {state}", ""


def _ended(unit: Unit) -> str:
    return "has failed" if unit.active_state == "failed" else f"is {unit.active_state}"


def _doubt(owner: Owner, unit: Unit) -> str:
    """Why an ended unit's process may still be somebody's work."""
    if not unit.name.endswith(".service"):
        return "a scope may hold anybody's processes"
    if carrier(unit.name):
        return "that unit carries other people's work"
    if unit.type == "oneshot":
        return "a oneshot unit may leave processes on purpose"
    if not owner.as_unit_user:
        return f"it does not run as that unit's User={unit.user or 'root'}"
    return ""


def _session(policy: Policy, holder: Holder) -> Row:
    owner = holder.owner
    _, session, user = owner.word.split(":", 2)
    if not over(owner):
        if holder.graphics_only:
            return Action.SPARE, f"only draws, in the login session {session} of {user}", ""
        hint = f"ask {user}, or loginctl terminate-session {session}"
        return Action.REFUSE, f"belongs to the login session {session} of {user}", hint
    reason = f"was left by the login session {session} of {user}, which is over"
    if owner.doomed:
        return Action.KILL, f"{reason} and whose processes logind is set to end (KillUserProcesses=)", ""
    if policy.dedicated:
        return Action.KILL, reason, ""
    return Action.REFUSE, f"{reason}, and may be meant to outlive it (nohup, tmux)", _dedicated(holder)


def _user(policy: Policy, holder: Holder) -> Row:
    user = holder.owner.word.partition(":")[2]
    unit = holder.owner.unit
    assert unit
    if not unit.up:
        return Action.REFUSE, f"was left by the user manager of {user}, which {_ended(unit)}", _look(holder)
    if holder.graphics_only:
        return Action.SPARE, f"only draws, for the user manager of {user}", ""
    hint = f"ask {user}, to whom systemctl --user status {holder.process.pid} shows which unit to stop"
    return Action.REFUSE, f"belongs to the user manager of {user}", hint


def _container(policy: Policy, holder: Holder) -> Row:
    _, engine, name = holder.owner.word.split(":", 2)
    if engine == "pidns":
        hint = f"lsns -p {holder.process.pid} shows what made it: stop that"
        return Action.REFUSE, f"belongs to another PID namespace (pidns {name}), as of a container", hint
    if name == "unknown":
        hint = f"systemctl status {holder.process.pid} shows what runs it: stop its container"
        return Action.REFUSE, f"belongs to an unknown container, which {holder.owner.runtime} runs", hint
    stop = "stop that container"
    if _NAME.fullmatch(name):
        stop = _STOP[engine].format(name[:12] if _ID.fullmatch(name) else name)
    return _run_by_another(holder.owner, f"the {engine} container {name}", stop)


#: How the engines' containers are stopped; those of a pod are made anew, so that the pod has to go.
_STOP: Mapping[str, str] = {
    "docker": "docker stop {}",
    "podman": "podman stop {}",
    "cri-containerd": "crictl inspect {} shows its pod: delete that",
    "crio": "crictl inspect {} shows its pod: delete that",
    "kubernetes": "crictl inspect {} shows its pod: delete that",
    "lxc": "lxc-stop -n {}",
    "nspawn": "machinectl terminate {}",
}
_ID = re.compile("[0-9a-f]{12,64}")
#: Who has a cgroup of his own can give it any name, and a hint may be pasted into a shell.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def _slurm(policy: Policy, holder: Holder) -> Row:
    job = holder.owner.word.partition(":")[2]
    if job == "unknown":
        hint = f"scontrol pidinfo {holder.process.pid} shows which it is: scancel that"
        return Action.REFUSE, f"belongs to an unknown Slurm job, which {holder.owner.runtime} runs", hint
    return _run_by_another(holder.owner, f"the Slurm job {job}", f"scancel {job}")


def _run_by_another(owner: Owner, what: str, hint: str) -> Row:
    """A container's or job's process is stale once nothing in its cgroup has a runtime above it any more."""
    if owner.runtime or not owner.cgroup:
        runs = f"has {owner.runtime}" if owner.runtime == NAMESPACE else f"{owner.runtime or 'something'} runs"
        return Action.REFUSE, f"belongs to {what}, which {runs}", hint
    return Action.KILL, f"was left behind by {what}, which nothing runs any more", ""


def _none(policy: Policy, holder: Holder) -> Row:
    owner = holder.owner
    if policy.dedicated and owner.orphan:
        return Action.KILL, "belongs to no unit, session or container, and its parent is gone", ""
    hint = _dedicated(holder) if owner.orphan else _look(holder)
    return Action.REFUSE, "belongs to no unit, session or container", hint


def _unknown(policy: Policy, holder: Holder) -> Row:
    owner = holder.owner
    return Action.REFUSE, f"has an owner that could not be established: {owner.doubt}", _look(holder)


def _look(holder: Holder) -> str:
    pid = holder.process.pid
    return f"systemctl status {pid} shows what it is; if nobody needs it: kill {pid}"


def _dedicated(holder: Holder) -> str:
    pid = holder.process.pid
    return f"if nobody needs it: kill {pid}, or set owners.dedicated = true if nobody else may use this machine's GPUs"


_ROWS: Mapping[OwnerKind, Callable[[Policy, Holder], Row]] = {
    OwnerKind.OWN_PREVIOUS: _own_previous,
    OwnerKind.OWN_CURRENT: _own_current,
    OwnerKind.UNIT: _unit,
    OwnerKind.SESSION: _session,
    OwnerKind.USER: _user,
    OwnerKind.CONTAINER: _container,
    OwnerKind.SLURM: _slurm,
    OwnerKind.NONE: _none,
    OwnerKind.UNKNOWN: _unknown,
}
