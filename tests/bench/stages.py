"""What single stages take inside one process, by pyperf: beside psutil where it can say the same, else by themselves.

    python -m tests.bench.stages -o FILE

Processes and files are this machine's own; no node is needed, and no driver.
"""

from __future__ import annotations

import os

import psutil
import pyperf

from gpuprestart import judge
from gpuprestart.host import procfs
from tests.unit.machines import holder, owner, policy, survey, unit

#: As many holders as eight servers with eight ranks each have.
CROWD = survey(*(holder(pid, owner(of=unit()), listed={0: 1000}) for pid in range(1000, 1064)), used=(64_000,))
POLICY = policy()


def identity() -> None:
    """Who a process is, as it is read before every signal."""
    assert procfs.read(os.getpid())


def identity_by_psutil() -> None:
    attributes = ["name", "status", "ppid", "uids", "create_time", "num_threads", "exe"]
    assert psutil.Process(os.getpid()).as_dict(attributes)


def plan() -> None:
    """What is to become of sixty-four holders."""
    assert len(judge.plan(POLICY, CROWD, judge.History()).evict) == 64


def main() -> None:
    # Its workers are started as this was, or they would not find the package.
    runner = pyperf.Runner(program_args=("-m", "tests.bench.stages"))
    for stage in (identity, identity_by_psutil, plan):
        runner.bench_func(stage.__name__, stage)


if __name__ == "__main__":
    main()
