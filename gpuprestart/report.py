"""Verdict -> sentence, STATUS= line, and the document that every view is made of.

Pure. Knows the words that programs read. Refuses to know what a verdict should be: it adds no judgement, and whatever a
process chose to call itself cannot colour or move a terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

from .model import Decision, GpuState, Holder, Leftover, Outcome, Reading, Timeline, Unmet, Verdict
from .text import amounts, mib, printable

#: What the run did, for a line that is still read when the server has been up for a month.
_PAST: Mapping[Outcome, str] = {
    Outcome.CLEAN: "found the GPUs clean",
    Outcome.CLEANED: "cleaned the GPUs",
    Outcome.BYPASSED: "let this start pass unproved",
    Outcome.NONE: "had no GPU to judge",
    Outcome.INTERRUPTED: "was interrupted",
    Outcome.INTERNAL: "failed",
}


#: Anybody may leave any number of files in shared memory.
MOST_LEFT = 64

#: Holders that the journal's record of a verdict names.
MOST_HELD = 64


def sentence(verdict: Verdict) -> str:
    """The verdict on one line: its word, its message, and at the end its first hint, which no long message cuts off."""
    return f"{verdict.outcome.value}: {_message(verdict)}"


def _message(verdict: Verdict) -> str:
    hint = f"; hint: {printable(verdict.hints[0], 300)}" if verdict.hints else ""
    return printable(verdict.message, 650).rstrip(". ") + hint


def status_line(verdict: Verdict, local_time: str) -> str:
    """The text of STATUS=, which stays in ``systemctl status`` for as long as the server lives."""
    past = _PAST.get(verdict.outcome)
    # What it did says the outcome already; of a refusal it is the first thing to know.
    said = f"refused the start: {sentence(verdict)}" if past is None else f"{past}: {_message(verdict)}"
    return f"At {printable(local_time, 40)} gpuprestart {said}"


def held(holder: Holder) -> frozenset[str]:
    """UUIDs of the GPUs that a holder is tied to: where NVML puts its memory, or else whose nodes it has."""
    return frozenset(holder.listed) or holder.opened | holder.mapped


def usage(state: GpuState) -> str:
    """What is used against the limit."""
    memory = state.reading.memory
    if memory is None:
        return "judged by its holders" if state.reading.unified else "use unknown"
    used, limit = amounts(memory.used, state.limit)
    return f"{used} used, limit {limit}"


def doubts(reading: Reading) -> tuple[str, ...]:
    """What keeps the driver's process list of a GPU from being believed, or from being whole."""
    distrust = f"the driver's process list is not believed: {reading.distrust}" if reading.distrust else ""
    unlisted = f"the driver gave no whole process list: {reading.unlisted}" if reading.unlisted else ""
    return tuple(filter(None, (distrust, unlisted)))


def who(decision: Decision, gpus: Sequence[GpuState]) -> str:
    """The process, its user and what it has on these GPUs, and its owner unless the reason beside it names that."""
    process = decision.holder.process
    share = decision.holder.bytes_on([state.gpu.uuid for state in gpus])
    amount = "" if share is None else f", {mib(share)}"
    word = decision.holder.owner.word
    named = all(name in decision.reason for name in word.split(":")[1:])
    owner = "" if named else f" of {word.removeprefix('unit:')}"
    return printable(f"{process}{owner} (user {process.user or process.uid}{amount})")


# For programs --------------------------------------------------------------------------------------------------------


def as_json(document: Mapping[str, Any]) -> str:
    """A document on one line, all of it ASCII and so safe on a terminal too."""
    import json

    return json.dumps(document)


def document(
    verdict: Verdict, *, booted: float, verb: Optional[str] = None, most: Optional[int] = None
) -> dict[str, Any]:
    """The verdict in the words that programs read; every view is made of this, wherever and whenever it is shown.

    ``booted`` is where CLOCK_BOOTTIME began, in seconds since the epoch: a process knows its start only since then.
    ``verb`` tells a start from a mere look. ``most`` holders are in it, those first that something was done about.
    """
    selected = [state.gpu.uuid for state in verdict.gpus]
    holders = verdict.decisions
    if most is not None and len(holders) > most:
        acted = sorted(holders, key=lambda each: each.holder.process.identity not in verdict.fates)
        holders = tuple(sorted(acted[:most], key=lambda each: each.holder.process.identity))
    return {
        "version": 1,
        "verb": verb,
        "outcome": verdict.outcome.value,
        "outcomes": [outcome.value for outcome in verdict.outcomes],
        "exit": verdict.exit,
        "unit": verdict.unit,
        "message": printable(verdict.message),
        "hints": [printable(hint) for hint in verdict.hints],
        "time": verdict.time,
        "run": verdict.run,
        "boot_id": verdict.boot_id,
        "driver": printable(verdict.driver),
        "nvml_path": printable(verdict.nvml_path),
        "policy_files": [printable(path) for path in verdict.policy_files],
        "duration_s": round(verdict.duration, 3),
        "phases": {phase: round(seconds, 3) for phase, seconds in verdict.phases.items()},
        "gpus": [_gpu(state) for state in verdict.gpus],
        "holders": [_holder(verdict, each, selected, booted) for each in holders],
        "holders_count": len(verdict.decisions),
        "preconditions": [_unmet(each) for each in verdict.unmet],
        "residue": [_leftover(each) for each in verdict.residue[:MOST_LEFT]],
        "residue_count": len(verdict.residue),
        "timeline": _timeline(verdict.timeline),
    }


def _gpu(state: GpuState) -> dict[str, object]:
    gpu, memory = state.gpu, state.reading.memory
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "name": printable(gpu.name),
        "pci": gpu.pci,
        "parent": gpu.parent,
        "memory_call": memory.call if memory else None,
        "used_bytes": memory.used if memory else None,
        "reserved_bytes": memory.reserved if memory else None,
        "total_bytes": memory.total if memory else None,
        "limit_bytes": state.limit if memory else None,
        "unattributed_bytes": state.unattributed if memory else None,
        "clean": state.clean,
        "fault": printable(state.fault or state.reading.fault or gpu.fault or "") or None,
    }


def _timeline(timeline: Timeline) -> dict[str, object]:
    return {
        "phases": [[name, round(began, 3), round(ended, 3)] for name, began, ended in timeline.phases],
        "signals": [[round(at, 3), pid, name] for at, pid, name in timeline.signals],
        "used_bytes": [[round(at, 3), list(used)] for at, used in timeline.memory],
    }


def _holder(verdict: Verdict, decision: Decision, selected: Sequence[str], booted: float) -> dict[str, object]:
    holder, process = decision.holder, decision.holder.process
    fate = verdict.fates.get(process.identity)
    gpus = held(holder)
    return {
        "pid": process.pid,
        "started": round(booted + process.began, 2),
        "comm": printable(process.comm),
        "user": printable(process.user or str(process.uid)),
        "owner": printable(holder.owner.word),
        "state": process.state,
        "gpus": [uuid for uuid in selected if uuid in gpus] + sorted(gpus.difference(selected)),
        "bytes": holder.bytes_on(selected),
        "evidence": list(holder.evidence),
        "occupies": [printable(each) for each in holder.occupies],
        "action": decision.action.value,
        "reason": printable(decision.reason),
        "rule": None if decision.rule is None else printable(decision.rule),
        "fate": None if fate is None else fate.value,
    }


def _unmet(unmet: Unmet) -> dict[str, object]:
    return {
        "check": unmet.check,
        "subject": printable(unmet.subject),
        "message": printable(unmet.message),
        "hint": printable(unmet.hint) or None,
        "file": unmet.file,
    }


def _leftover(left: Leftover) -> dict[str, object]:
    return {
        "kind": left.kind,
        "name": printable(left.name),
        "bytes": left.bytes,
        "fate": left.fate,
        "reason": printable(left.reason),
    }


# Names of GPUs --------------------------------------------------------------------------------------------------------


def short(uuid: str) -> str:
    """The kind and the first eight digits: what people compare, and a prefix that CUDA and the policy accept."""
    return printable(uuid, 64)[:12] or "?"


def indices(numbers: Iterable[int]) -> str:
    """``0-3,7`` for 0, 1, 2, 3 and 7."""
    spans: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        first, last = spans[-1] if spans else (number, -2)
        if last == number - 1:
            spans[-1] = (first, number)
        else:
            spans.append((number, number))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
