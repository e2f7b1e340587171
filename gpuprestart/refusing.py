"""That a refusal refuses: systemd starts the server if the unit lists our status as a success.

It looks before a run ends, and picks a status that systemd takes for a failure.
"""

from __future__ import annotations

from typing import Optional

from .host.systemd import Systemd, SystemdError
from .model import Outcome, Verdict
from .owners import candidates

#: Statuses to refuse with, in this order. Failing all, the run dies by SIGABRT, which a shell shows as 134.
STATUSES = (78, 75, 70)
ABORTED = 134


def sure(verdict: Verdict, systemd: Systemd, cgroup: str) -> Verdict:
    """The verdict with an exit status that the unit around us does not list; unchanged where there is no such unit."""
    if verdict.exit == 0:
        return verdict
    services = [name for name in candidates(cgroup) if name.endswith(".service")]
    try:
        units = systemd.units(services[:1])
    except SystemdError:
        # Nothing is known against the status, and there is no better one to be had.
        return verdict
    for unit in units.values():
        return against(verdict, unit.name, unit.success_statuses)
    return verdict


def against(verdict: Verdict, unit: str, listed: frozenset[str]) -> Verdict:
    """The verdict for a unit whose SuccessExitStatus= lists these."""
    if str(verdict.exit) in listed:
        taken, why = str(verdict.exit), "which would turn this refusal into a start"
    elif "TERM" in listed:
        taken, why = "SIGTERM", "so that a hook that is ended too early would count as a success and be a start"
    else:
        return verdict
    status: Optional[int] = next((status for status in STATUSES if str(status) not in listed), None)
    others = tuple(outcome for outcome in verdict.outcomes if outcome is not Outcome.CONFIG)
    return verdict._replace(
        outcomes=(Outcome.CONFIG, *others),
        exit=ABORTED if status is None else status,
        message=f"{unit} has {taken} in SuccessExitStatus=, {why}; {verdict.message}",
        hints=(f"systemctl edit {unit}: take {taken} out of SuccessExitStatus=", *verdict.hints),
    )
