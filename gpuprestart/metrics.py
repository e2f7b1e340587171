"""What a run found, for Prometheus, in the file that the policy names.

Knows what is measured and under which names, and the sentences for a file that could not be written. A child writes
it, because a mount whose server is gone hangs whoever writes there; it alone loads prometheus_client. Whatever becomes
of it changes no verdict.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any, Callable

from . import events
from .freed import freed
from .model import Fate, Outcome, Verdict
from .neighbours import Ask
from .text import printable

#: Seconds until the child is abandoned: less than systemd is asked to wait for the verdict of a run that took as long
#: as it may, so that the start is still refused for what the verdict says.
PATIENCE = 4.0

#: The ends of a run in which the GPUs were proved clean, or there were none to prove.
SUCCESSES = (Outcome.CLEAN, Outcome.CLEANED, Outcome.NONE)

#: The fates of holders that this run ended.
ENDED = (Fate.TERMINATED, Fate.KILLED)

#: When each unit last ran: when there are too many units in one file, the one that ran longest ago goes.
DATED = "gpuprestart_last_run_timestamp_seconds"

#: Every metric, by its name: its type, its label beside ``unit``, and what it means.
FAMILIES: Mapping[str, tuple[str, str, str]] = {
    DATED: ("gauge", "", "When the last run began, in seconds since the epoch."),
    "gpuprestart_last_success_timestamp_seconds": (
        "gauge",
        "",
        "When the last run began that proved every GPU clean, in seconds since the epoch; 0 if none has.",
    ),
    "gpuprestart_last_outcome": ("gauge", "outcome", "1 for the outcome that decided the last run, 0 for every other."),
    "gpuprestart_last_exit_status": ("gauge", "", "The exit status of the last run; all but 0 refuse the start."),
    "gpuprestart_last_duration_seconds": ("gauge", "", "How long the last run took."),
    "gpuprestart_last_phase_duration_seconds": ("gauge", "phase", "How long each phase of the last run took."),
    "gpuprestart_last_freed_bytes": ("gauge", "", "Memory of all GPUs that came back during the last run."),
    "gpuprestart_last_ended_holders": ("gauge", "", "Processes that the last run ended."),
    "gpuprestart_last_gpus": ("gauge", "", "GPUs that the last run had to prove clean."),
    "gpuprestart_last_clean_gpus": ("gauge", "", "Those of them that were clean when it last looked."),
    "gpuprestart_runs_total": ("counter", "outcome", "Runs, by the outcome that decided them."),
    "gpuprestart_freed_bytes_total": ("counter", "", "Memory of all GPUs that came back during runs."),
    "gpuprestart_ended_holders_total": ("counter", "", "Processes that runs ended."),
}


def publish(verdict: Verdict, ask_files: Ask, write: Callable[[events.Record], None]) -> None:
    """Write it, or a warning that says why not. Takes PATIENCE at most."""
    try:
        answer = ask_files(("file:metrics", _request(verdict)), PATIENCE)
    except (OSError, MemoryError) as error:
        # Not even a child is to be had. The verdict has been told, and stands.
        answer = ("scarce", str(error))
    reason = _reason(answer)
    if reason:
        text = f"{printable(verdict.textfile, 300)} was not written: {reason} (metrics.textfile)"
        write(events.warning(events.Context(unit=verdict.unit, run=verdict.run), text))


def _request(verdict: Verdict) -> dict[str, Any]:
    """What host.textfile.put is asked: plain values. What is to be added to is kept where nothing is added."""
    unit = printable(verdict.unit or "", 300)
    ended = sum(fate in ENDED for fate in verdict.fates.values())
    back = freed([used for _, used in verdict.timeline.memory])
    success = verdict.time if verdict.outcome in SUCCESSES else None
    one_of = [(("outcome", each.value), float(each is verdict.outcome)) for each in Outcome]
    last: list[tuple[str, tuple[str, ...], float]] = [
        (DATED, (), verdict.time),
        *(("gpuprestart_last_outcome", label, value) for label, value in one_of),
        ("gpuprestart_last_exit_status", (), verdict.exit),
        ("gpuprestart_last_duration_seconds", (), verdict.duration),
        *(
            ("gpuprestart_last_phase_duration_seconds", ("phase", name), spent)
            for name, spent in verdict.phases.items()
        ),
        ("gpuprestart_last_freed_bytes", (), back),
        ("gpuprestart_last_ended_holders", (), ended),
        ("gpuprestart_last_gpus", (), len(verdict.gpus)),
        ("gpuprestart_last_clean_gpus", (), sum(state.clean for state in verdict.gpus)),
    ]
    more: list[tuple[str, tuple[str, ...], float]] = [
        *(("gpuprestart_runs_total", label, value) for label, value in one_of),
        ("gpuprestart_freed_bytes_total", (), back),
        ("gpuprestart_ended_holders_total", (), ended),
    ]
    (more if success is None else last).append(("gpuprestart_last_success_timestamp_seconds", (), success or 0.0))
    return {
        "path": verdict.textfile,
        "unit": unit,
        "families": [(name, kind, (label,) if label else (), text) for name, (kind, label, text) in FAMILIES.items()],
        "dated": DATED,
        "set": last,
        "add": more,
    }


# Why it was not written ----------------------------------------------------------------------------------------------

_REASONS = {
    "package": "prometheus_client cannot be loaded ({}): install the package python3-prometheus-client",
    "no-folder": "{} is not there: make that folder, and have node_exporter read it"
    " (--collector.textfile.directory={})",
    "open": "anybody can write in {}, and so forge it: chmod o-w {}",
    "foreign": "{}, so it may be somebody else's: move it away, or name another file",
    "scarce": "nobody could be started to write it ({}): see TasksMax=, LimitNPROC=, LimitNOFILE= and MemoryMax= of"
    " the unit, and what else runs here",
    "lock": "it cannot be locked against other runs: {}",
}

_REMEDIES = {
    errno.ENOSPC: "make room there: df -h, df -i",
    errno.EDQUOT: "make room there: quota",
    errno.EROFS: "have its file system writable: findmnt shows how it is mounted, and ProtectSystem= of the unit counts"
    " where ExecStartPre= has no + in front",
    errno.EACCES: "have the hook run as root: ExecStartPre=+",
    errno.EPERM: "have the hook run as root (ExecStartPre=+), and see lsattr",
    errno.ENOTDIR: "name a file in a folder",
}


def _reason(answer: Any) -> str:
    """Why it was not written, and what helps; empty where it was."""
    if answer is None:
        return "no answer came in time: findmnt shows on which file system it is, dmesg whether that hangs"
    word, *facts = answer
    if word == "written":
        return ""
    if word == "failed":
        number, where, text = facts
        return f"{printable(where, 300)}: {text}; {_REMEDIES.get(number, 'see dmesg, and ls -ld for its folder')}"
    return _REASONS[word].format(*(printable(fact, 300) for fact in facts))
