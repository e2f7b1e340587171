"""Which processes are in a cgroup, itself and below, wherever the machine has mounted systemd's hierarchy."""

from __future__ import annotations

import os

#: Unified, hybrid and legacy layouts, in the order in which systemd itself looks for its own tree.
ROOTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd")


def pids(cgroup: str) -> set[int]:
    """PIDs of all processes in this cgroup and below; empty if there is no such cgroup."""
    found: set[int] = set()
    for root in ROOTS:
        for folder, _, files in os.walk(root + cgroup):
            if "cgroup.procs" in files:
                found |= _procs(os.path.join(folder, "cgroup.procs"))
    return found


def _procs(path: str) -> set[int]:
    try:
        with open(path, "rb") as file:
            # A process of another PID namespace stands there as 0.
            return {int(line) for line in file.read().split() if line != b"0"}
    except OSError:
        return set()
