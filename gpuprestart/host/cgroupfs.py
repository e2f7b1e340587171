"""Which processes are in a cgroup, itself and below, wherever the machine has mounted systemd's hierarchy."""

from __future__ import annotations

import contextlib
import os

#: Unified, hybrid and legacy layouts, in the order in which systemd itself looks for its own tree.
ROOTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd")


def pids(cgroup: str) -> set[int]:
    """PIDs of all processes in this cgroup and below; empty if there is no such cgroup."""
    found: set[int] = set()
    # Not by os.walk(), which calls itself for each level: whoever has a cgroup can make a thousand of them.
    folders = [root + cgroup for root in ROOTS]
    while folders:
        folder = folders.pop()
        found |= _procs(folder + "/cgroup.procs")
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            folders += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    return found


def _procs(path: str) -> set[int]:
    try:
        with open(path, "rb") as file:
            # A process of another PID namespace stands there as 0.
            return {int(line) for line in file.read().split() if line != b"0"}
    except OSError:
        return set()
