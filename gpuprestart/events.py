"""Every kind of journal record: its MESSAGE_ID, its priority, its one sentence, its fields.

Pure: a record is a value, and somebody else sends it. The ids and the names of the fields are read by other people's
dashboards and by the message catalog (units/gpuprestart.catalog); they never change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional, Union

from .findings import where_of
from .model import Action, Decision, Fate, Gpu, GpuState, Leftover, Outcome, Owner, OwnerKind, Unmet, Verdict
from .report import held, sentence, usage, who
from .text import mib, printable

MESSAGE_IDS: Mapping[str, str] = {
    "run-started": "776978dba4fc63904aff245bf64989da",
    "holder-found": "0408b3daa17a52371bdd070807e8c0ee",
    "holder-signalled": "2ae5bb64dc6033671d6a65d697f1d093",
    "holder-gone": "76c501fd1bb67c06ecf7cabbf8a8a52f",
    "holder-survived": "172abcceaa4f7a4221b440f14d0ffdd3",
    "memory-freed": "3813ccca793d2ee11d1d9331c67c5b19",
    "gpu-verdict": "9d05bd6d6bf669631a6fa13c528f1c7a",
    "precondition-failed": "611a5896e5214046b4cc4d64cd18e461",
    "residue": "e1e88b97b9154e2fad69ad4d7480b917",
    "gpu-reset": "4d24ebba13fb49df830cf46adcf73434",
    "bypass-granted": "2e0f4ccf70e4439d9646597166b87c78",
    "hook-disabled": "3a21559104bc409fad1c9e85c9cc6783",
    "verdict": "dc832c83b1b367bd44ed134e9c2ec2f3",
    "warning": "9782a2a069d506afc467e933f9704cd7",
}

CRIT, ERR, WARNING, NOTICE, INFO, DEBUG = 2, 3, 4, 5, 6, 7

#: journald drops a record of more than 1,024 fields (ENTRY_FIELD_COUNT_MAX in its journald-server.c).
MOST_HINTS = 64

#: A tuple is a field with several values, as the journal knows them: ``journalctl GPU_UUID=…`` finds each of them.
Value = Union[str, tuple[str, ...]]


class Context(NamedTuple):
    """What every record of a run carries."""

    unit: Optional[str]
    run: str


class Record(NamedTuple):
    """One record: PRIORITY is a syslog number, and no field is empty."""

    message: str
    message_id: str
    priority: int
    fields: Mapping[str, Value] = {}


def run_started(
    context: Context, *, gpus: Sequence[Gpu], policy_files: Sequence[str], deadline: float, version: str
) -> Record:
    policy = ", ".join(policy_files) or "the built-in policy"
    what = "1 GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"
    message = f"Judging {what}{f' for {context.unit}' if context.unit else ''} by {policy}, within {deadline:g} s"
    fields = {**_gpu_names(gpus), "GPUPRESTART_POLICY": tuple(policy_files), "GPUPRESTART_VERSION": version}
    return _record("run-started", INFO, message, context, fields)


# Holders -------------------------------------------------------------------------------------------------------------

_FOUND: Mapping[Action, tuple[int, str]] = {
    Action.KILL: (NOTICE, "it is to be ended"),
    Action.SPARE: (INFO, "it is spared"),
    Action.REFUSE: (WARNING, "it may not be ended"),
    Action.WAIT: (NOTICE, "its end is awaited"),
    Action.NONE: (DEBUG, "it is left alone"),
}

_FATES: Mapping[Fate, str] = {
    Fate.EXITED: "exited on its own",
    Fate.TERMINATED: "was ended by SIGTERM",
    Fate.KILLED: "was ended by SIGKILL",
    Fate.SURVIVED: "survived SIGKILL",
    Fate.GONE: "was gone before it could be signalled",
}


def holder_found(context: Context, decision: Decision, gpus: Sequence[GpuState]) -> Record:
    """``gpus`` here and below are all selected GPUs; the record names those that the holder is tied to."""
    priority, what = _FOUND[decision.action]
    message = f"{_where(decision, gpus)}: {who(decision, gpus)} {decision.reason}; {what}{_for(context, decision)}"
    return _about_holder("holder-found", priority, message, context, decision, gpus)


def holder_signalled(context: Context, decision: Decision, gpus: Sequence[GpuState], *, signal_name: str) -> Record:
    what = f"sent {signal_name} to {who(decision, gpus)}{_for(context, decision)}"
    message = f"{_where(decision, gpus)}: {what}; it {decision.reason}"
    priority = WARNING if signal_name == "SIGKILL" else NOTICE
    fields = {"GPUPRESTART_SIGNAL": signal_name}
    return _about_holder("holder-signalled", priority, message, context, decision, gpus, fields)


def environment(context: Context, decision: Decision, gpus: Sequence[GpuState]) -> dict[str, str]:
    """The fields of a holder's record as variables for a program; what has several values is joined by commas."""
    fields = _about_holder("holder-found", NOTICE, "", context, decision, gpus).fields
    ours = {name: value for name, value in fields.items() if name not in ("GPUPRESTART_EVENT", "OBJECT_SYSTEMD_UNIT")}
    return {name: value if isinstance(value, str) else ",".join(value) for name, value in ours.items()}


def hook_failed(context: Context, decision: Decision, gpus: Sequence[GpuState], *, command: str, what: str) -> Record:
    """What was to be run before the first signal to this holder; it is signalled all the same."""
    message = f"{command} (hooks.before_kill) for {decision.holder.process} {what}"
    return _about_holder("warning", WARNING, message, context, decision, gpus)


def holder_gone(
    context: Context, decision: Decision, gpus: Sequence[GpuState], *, fate: Fate, seconds: Optional[float] = None
) -> Record:
    after = "" if seconds is None else f" after {seconds:.2f} s"
    message = f"{_where(decision, gpus)}: {who(decision, gpus)} {_FATES[fate]}{after}; it {decision.reason}"
    return _about_holder("holder-gone", INFO, message, context, decision, gpus, {"HOLDER_FATE": fate.value})


def holder_survived(
    context: Context, decision: Decision, gpus: Sequence[GpuState], *, seconds: float, state: str, wchan: str = ""
) -> Record:
    stuck = f"in state {state}" + (f" at {wchan}" if wchan else "")
    message = f"{_where(decision, gpus)}: {who(decision, gpus)} is still there {seconds:.1f} s after SIGKILL, {stuck}"
    fields = {"HOLDER_FATE": Fate.SURVIVED.value, "HOLDER_STATE": state, "HOLDER_WCHAN": wchan}
    return _about_holder("holder-survived", ERR, f"{message}; it {decision.reason}", context, decision, gpus, fields)


# GPUs ----------------------------------------------------------------------------------------------------------------


def memory_freed(context: Context, before: GpuState, after: GpuState, *, seconds: float) -> Record:
    was = before.reading.memory
    start = "an unknown amount" if was is None else mib(was.used)
    message = f"{after.gpu}: memory is back {seconds:.1f} s into this run: {usage(after)}, it was {start}"
    fields = {**_figures(after), "GPU_USED_BEFORE_BYTES": "" if was is None else str(was.used)}
    return _record("memory-freed", INFO, message, context, fields)


def gpu_reset(context: Context, gpu: Gpu) -> Record:
    message = f"{gpu} was reset: its memory was in use, and nobody held it"
    return _record("gpu-reset", NOTICE, message, context, _gpu_names([gpu]))


def gpu_verdict(context: Context, state: GpuState) -> Record:
    memory = state.reading.memory
    if state.clean:
        return _record("gpu-verdict", INFO, f"{state.gpu} is clean: {usage(state)}", context, _figures(state))
    nobody = state.unattributed > state.limit
    unexplained = f", {mib(state.unattributed)} of it held by nobody alive" if nobody else ""
    if memory is None:
        message = f"{state.gpu} is not clean: it {'is ' if state.held else ''}{state.fault}"
    elif memory.used > state.limit:
        message = f"{state.gpu} is not clean: {usage(state)}{unexplained}"
    else:
        message = f"{state.gpu} is not clean: {usage(state)}, but {state.fault}"
    return _record("gpu-verdict", WARNING, message, context, _figures(state))


# What the policy asks besides ----------------------------------------------------------------------------------------


def precondition_failed(context: Context, unmet: Unmet) -> Record:
    fields = {"GPUPRESTART_CHECK": unmet.check, "GPUPRESTART_SUBJECT": unmet.subject, "GPUPRESTART_HINT": unmet.hint}
    return _record("precondition-failed", ERR, unmet.message, context, fields)


def residue(context: Context, found: Sequence[Leftover]) -> Record:
    """What was found in shared memory: counts and bytes of each fate, the first names, and why the first one stays."""
    parts = []
    for fate, words in (("removed", "removed"), ("kept", "kept"), ("failed", "could not be removed")):
        some = [each for each in found if each.fate == fate]
        if some:
            names = ", ".join(printable(each.name, 64) for each in some[:MOST_RESIDUE])
            more = f" and {len(some) - MOST_RESIDUE} more" if len(some) > MOST_RESIDUE else ""
            why = f"; {'it' if len(some) == 1 else 'the first'} {some[0].reason}" if fate != "removed" else ""
            parts.append(f"{len(some)} {words} ({mib(sum(each.bytes for each in some))}: {names}{more}{why})")
    removed = [each for each in found if each.fate == "removed"]
    fields: dict[str, Value] = {
        "GPUPRESTART_RESIDUE": tuple(
            f"{each.kind} {printable(each.name, 255)} {each.fate}: it {each.reason}" for each in found[:MOST_HINTS]
        ),
        "GPUPRESTART_REMOVED": str(len(removed)),
        "GPUPRESTART_REMOVED_BYTES": str(sum(each.bytes for each in removed)),
    }
    priority = WARNING if any(each.fate == "failed" for each in found) else NOTICE if removed else INFO
    return _record("residue", priority, f"Leftovers in shared memory: {', '.join(parts)}", context, fields)


#: So many names stand in the sentence; the fields have more.
MOST_RESIDUE = 4


# The run -------------------------------------------------------------------------------------------------------------


#: Every other outcome is a refusal.
_WEIGHTS: Mapping[Outcome, int] = {
    Outcome.CLEAN: INFO,
    Outcome.NONE: INFO,
    Outcome.CLEANED: NOTICE,
    Outcome.BYPASSED: WARNING,
    Outcome.INTERNAL: CRIT,
}


def verdict(verdict: Verdict, document: str) -> Record:
    """``document`` is the whole of it as JSON, as ``history`` and ``proof`` read it back."""
    fields: dict[str, Value] = {
        "GPUPRESTART_OUTCOME": verdict.outcome.value,
        "GPUPRESTART_OUTCOMES": tuple(outcome.value for outcome in verdict.outcomes),
        "GPUPRESTART_EXIT": str(verdict.exit),
        "GPUPRESTART_HINT": verdict.hints[:MOST_HINTS],
        **_gpu_names([state.gpu for state in verdict.gpus]),
        # journald asks whose a record is when it reads it, and that of a process which has gone by then is nobody's.
        "OBJECT_SYSTEMD_UNIT": verdict.unit or "",
    }
    context = Context(unit=verdict.unit, run=verdict.run)
    record = _record("verdict", _WEIGHTS.get(verdict.outcome, ERR), sentence(verdict), context, fields)
    # It is printable as it is, and cut short it would be no document.
    return record._replace(fields={**record.fields, "GPUPRESTART_VERDICT": document})


def warning(context: Context, text: str, *, gpus: Sequence[Gpu] = ()) -> Record:
    """Something that a person should know and that does not decide: a GPU lost beside ours, a list not believed."""
    return _record("warning", WARNING, text, context, _gpu_names(gpus))


# What an operator does -----------------------------------------------------------------------------------------------


def bypass_granted(context: Context, *, by: str, until: str) -> Record:
    """Also shown in the unit's own log, where whoever wonders about its next start looks first."""
    message = (
        f"{by} lets the next start of {context.unit} pass without a proof that its GPUs are clean, once, until {until}"
    )
    return _record("bypass-granted", WARNING, message, context, {"OBJECT_SYSTEMD_UNIT": context.unit or ""})


def hook_disabled(context: Context, *, by: str) -> Record:
    """Also shown in the unit's own log, like a bypass, and for the same reason."""
    message = f"nothing proves the GPUs clean any more before {context.unit} starts: {by} has disabled the hook"
    return _record("hook-disabled", WARNING, message, context, {"OBJECT_SYSTEMD_UNIT": context.unit or ""})


# Their parts ---------------------------------------------------------------------------------------------------------


def _record(event: str, priority: int, message: str, context: Context, fields: Mapping[str, Value]) -> Record:
    """The one place where text becomes part of a record: printable, bounded, and nothing empty."""
    common: dict[str, Value] = {
        "GPUPRESTART_EVENT": event,
        "GPUPRESTART_UNIT": context.unit or "",
        "GPUPRESTART_RUN": context.run,
    }
    clean: dict[str, Value] = {}
    for name, value in {**common, **fields}.items():
        values = tuple(printable(each, 2000) for each in ((value,) if isinstance(value, str) else value) if each)
        if values:
            clean[name] = values[0] if len(values) == 1 else values
    return Record(printable(message, 2000), MESSAGE_IDS[event], priority, clean)


def _about_holder(
    event: str,
    priority: int,
    message: str,
    context: Context,
    decision: Decision,
    gpus: Sequence[GpuState],
    more: Optional[Mapping[str, Value]] = None,
) -> Record:
    holder, process = decision.holder, decision.holder.process
    concerned = _concerned(decision, gpus)
    share = holder.bytes_on([state.gpu.uuid for state in gpus])
    fields: dict[str, Value] = {
        **(_figures(concerned[0]) if len(concerned) == 1 else _gpu_names([state.gpu for state in concerned])),
        "HOLDER_PID": str(process.pid),
        "HOLDER_COMM": process.comm,
        "HOLDER_UID": str(process.uid),
        "HOLDER_OWNER": holder.owner.word,
        "HOLDER_EVIDENCE": ",".join(holder.evidence),
        "HOLDER_BYTES": "" if share is None else str(share),
        "HOLDER_CMDLINE": process.cmdline or "",
        "GPUPRESTART_RULE": decision.rule or "",
        "GPUPRESTART_ACTION": decision.action.value,
        "OBJECT_SYSTEMD_UNIT": _object(context, holder.owner),
        **(more or {}),
    }
    return _record(event, priority, message, context, fields)


def _for(context: Context, decision: Decision) -> str:
    """Who wants it: its own unit's journal shows the record too, to people who have never heard of us."""
    wanted = decision.action in (Action.KILL, Action.REFUSE, Action.WAIT)
    return f" for the start of {context.unit}" if context.unit and wanted else ""


def _object(context: Context, owner: Owner) -> str:
    """The other unit in whose own log this record is to be read too. journald believes this field of root only.

    Never OBJECT_PID=: journald would then store the whole command line of the process beside it, secrets and all.
    """
    if owner.kind is not OwnerKind.UNIT or owner.unit is None or owner.unit.name == context.unit:
        return ""
    return owner.unit.name


def _concerned(decision: Decision, gpus: Sequence[GpuState]) -> list[GpuState]:
    uuids = held(decision.holder)
    return [state for state in gpus if state.gpu.uuid in uuids]


def _where(decision: Decision, gpus: Sequence[GpuState]) -> str:
    concerned = _concerned(decision, gpus)
    named = [where_of(concerned)] if concerned else []
    return ", ".join([*named, *decision.holder.occupies]) or "on no selected GPU"


def _gpu_names(gpus: Sequence[Gpu]) -> dict[str, Value]:
    return {"GPU_UUID": tuple(gpu.uuid for gpu in gpus), "GPU_INDEX": tuple(str(gpu.index) for gpu in gpus)}


def _figures(state: GpuState) -> dict[str, Value]:
    memory = state.reading.memory
    used = "" if memory is None else str(memory.used)
    limit = "" if memory is None else str(state.limit)
    return {**_gpu_names([state.gpu]), "GPU_USED_BYTES": used, "GPU_LIMIT_BYTES": limit}
