"""The situations that must come out right, by the ids that tests are marked with.

``make cases`` lists them with their tests and results; a test fails if one of them has no test.
"""

from __future__ import annotations

CASES = {
    "A0": "1523 MiB with no process listed, the holder an orphan in a failed unit's cgroup; all eight GPUs proved",
    "A2": "a holder left beside us in our own unit's cgroup, also with Delegate=yes",
    "A3": "a scheduler with ppid 1 in the cgroup of its failed unit",
    "A4": "left by a login session that is over",
    "A5": "held from a login session that is alive",
    "A8": "another service is active on our GPU, a stale holder beside it",
    "A10": "children of our unit's last run that hold no GPU",
    "A13": "a holder through another node of the same device number",
    "A14": "a holder that forks a fresh holder in its SIGTERM handler",
    "A15": "a holder that ignores SIGTERM; one that is stopped",
    "A16": "a holder that takes its time after SIGTERM",
    "A18": "several GPUs free, one stays dirty",
    "A21": "clean from a shell, cron, a user unit, for a running unit, in ExecReload=",
    "A22": "what an earlier ExecStartPre= of this start has started",
    "A23": "left-overs of units that carry other people's work",
    "B1": "memory that comes back long after the processes are gone",
    "B3": "NVML lists a PID that exists nowhere",
    "B4": "memory with no process at all, over and under the limit",
    "B7": "a true zombie",
    "B8": "full utilisation, no memory",
    "B14": "a stale holder and a live suspect on one GPU",
    "C1": "memory that the driver reserves",
    "C3": "no driver, no library, versions that do not match",
    "C6": "fewer GPUs than the policy names, unknown and ambiguous UUIDs",
    "C7": "device minors in another order than NVML's indices",
    "C8": "a neighbour that has our nodes open and its memory elsewhere",
    "D3": "SIGTERM from systemd in the middle of the wait",
    "D5": "secrets and control characters in a holder's command line",
    "D7": "policies that are wrong in every way",
}
