"""Every exit status, by a situation that really brings it about, as systemd and the journal then show it.

One row for each outcome that is built, and one for a bad command line, which has none. What each outcome says in detail
is proved elsewhere: docs/contract.md and docs/failure-modes.md name the tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Callable, NamedTuple, Optional

import pytest

from gpuprestart.model import EXIT_STATUS, Outcome
from tests.node.hung import Hung
from tests.node.scene import Scene

CLEAN = "/usr/bin/gpuprestart clean --json --deadline {}"
HOLD = ("--open", "0", "--gpu", "0", "--mib", "900")

#: A copy of the installed program in which one stage is broken.
BROKEN = """
cp -r /usr/lib/gpuprestart /run/t-broken
sed 's|/usr/lib/gpuprestart|/run/t-broken|' /usr/bin/gpuprestart > /run/t-broken/run
echo 'def plan(*_): raise LookupError("broken by a test")' >> /run/t-broken/gpuprestart/judge.py
"""


class Row(NamedTuple):
    """A situation that lasts for one start, and what comes of it."""

    situation: Callable[[Scene], Optional[Iterator[None]]]
    status: int
    #: The word of systemd's table of statuses (systemd.exec(5)), which the journal shows with a failure.
    name: str
    command: str = CLEAN.format("20s")
    more: str = ""
    gpus: str = "0"
    plus: bool = True


# The situations ------------------------------------------------------------------------------------------------------


def idle(scene: Scene) -> None:
    """Nothing is on the GPUs."""


def stale(scene: Scene) -> None:
    scene.orphans(*HOLD)


def live(scene: Scene) -> None:
    scene.service(*HOLD)


def supervised(scene: Scene) -> None:
    scene.orphans("--supervise", "0.02", *HOLD)


def slow(scene: Scene) -> None:
    """The driver takes longer to give memory back than the run may."""
    scene.gpu.ask("set", release_delay=30)
    stale(scene)


def leak(scene: Scene) -> None:
    scene.gpu.ask("leak", gpu=0, mib=900)


def lost(scene: Scene) -> None:
    scene.gpu.ask("set_gpu", gpu=0, lost="calls")


def misspelt(scene: Scene) -> None:
    scene.policy("[memory]\nmax_usd = '1 GiB'\n")


def broken(scene: Scene) -> None:
    scene.node.run(["/bin/sh", "-ec", f"rm -rf /run/t-broken; {BROKEN}"])


def stuck(scene: Scene) -> Iterator[None]:
    """The holder hangs in the kernel, on a file whose server does not answer."""
    scene.policy("[deadline]\nterm = '300 ms'\n")
    with Hung(scene.node.leader) as hung:
        unit = scene.name("stuck")
        # A session of its own, because the nodes of the simulation are terminals.
        script = f"setsid cat {hung.file} 9</dev/nvidia0 & exit 1"
        properties = ["KillMode=process"]
        # Its front process ends at once, which systemd may take for a start that has failed.
        scene.node.start(["/bin/sh", "-c", script], unit=unit, user="model", properties=properties, check=False)
        scene.await_state(unit, "failed")
        (pid,) = scene.node.unit_pids(unit)
        where = ["cat", f"/proc/{pid}/wchan"]
        scene.node.wait_for(lambda: scene.node.run(where).stdout == "request_wait_answer", timeout=10, what="it hangs")
        scene.gpu.ask("alloc", gpu=0, mib=900, pid=pid)
        yield


ROWS = {
    "clean": Row(idle, 0, "SUCCESS"),
    "cleaned": Row(stale, 0, "SUCCESS"),
    "none": Row(idle, 0, "SUCCESS", gpus=""),
    "usage": Row(idle, 64, "USAGE", command="/usr/bin/gpuprestart clean --nonsense"),
    "unknown": Row(lost, 69, "UNAVAILABLE"),
    "internal": Row(broken, 70, "SOFTWARE", command="/usr/bin/python3 -I /run/t-broken/run clean --json"),
    "interrupted": Row(leak, 75, "TEMPFAIL"),
    "protected": Row(live, 75, "TEMPFAIL"),
    "respawning": Row(supervised, 75, "TEMPFAIL", command=CLEAN.format("5s")),
    "unkillable": Row(stuck, 75, "TEMPFAIL", command=CLEAN.format("2s")),
    "not-freed": Row(slow, 75, "TEMPFAIL", command=CLEAN.format("1s")),
    "unattributed": Row(leak, 75, "TEMPFAIL", command=CLEAN.format("1s")),
    "denied": Row(stale, 77, "NOPERM", plus=False, more="User=root\nCapabilityBoundingSet=~CAP_KILL\n"),
    "config": Row(misspelt, 78, "CONFIG"),
}


@contextmanager
def _set(scene: Scene, row: Row) -> Iterator[None]:
    set_ = row.situation(scene)
    if set_ is None:
        yield
        return
    yield from set_


@pytest.mark.parametrize("outcome", ROWS)
def test_an_exit_status(scene: Scene, outcome: str) -> None:
    row = ROWS[outcome]
    with _set(scene, row):
        server = scene.server(gpus=row.gpus, command=row.command, plus=row.plus, more=row.more)
        scene.node.systemctl("start", "--no-block", server)
        if outcome == "interrupted":
            _interrupt(scene, server)
        scene.await_state(server, "failed" if row.status else "active")
    shown = scene.node.show(server, "Result", "ExecMainStatus", "ExecStartPre", "ExecMainStartTimestampMonotonic")
    assert f"code=exited ; status={row.status} " in shown["ExecStartPre"]
    assert shown["Result"] == ("exit-code" if row.status else "success")
    # The status of the hook is not the server's, which never ran.
    assert shown["ExecMainStatus"] == "0" and (shown["ExecMainStartTimestampMonotonic"] == "0") is bool(row.status)
    _journal_names_it(scene, server, row)
    if outcome == "usage":
        assert not any("GPUPRESTART_EVENT" in each for each in scene.node.journal(unit=server))
        return
    run = scene.verdict(server)
    assert (run.outcome, run.exit) == (outcome, row.status)
    assert EXIT_STATUS[Outcome(outcome)] == row.status
    (record,) = scene.records(run, "verdict")
    assert (record["GPUPRESTART_OUTCOME"], record["GPUPRESTART_EXIT"]) == (outcome, str(row.status))
    # A fault in a file is told with what is allowed there; everything else that refuses has a hint of what to do.
    assert bool(run.verdict["hints"]) is (row.status not in (0, 78))


def test_every_outcome_has_its_row() -> None:
    """But for those that are told in another issue."""
    assert ROWS.keys() - {"usage"} == {each.value for each in Outcome} - {"precondition", "bypassed"}
    assert {row.status for row in ROWS.values()} == {*EXIT_STATUS.values(), 64}


def _interrupt(scene: Scene, server: str) -> None:
    """As a start that is stopped, but told to the hook alone: its status has to be seen."""
    scene.node.wait_for(
        lambda: scene.node.show(server, "StatusText")["StatusText"].startswith("Waiting"), timeout=10, what="it waits"
    )
    scene.node.systemctl("kill", "--kill-who=control", "--signal=TERM", server)


def _journal_names_it(scene: Scene, server: str, row: Row) -> None:
    """systemd tells a failure by number and word, and of a success nothing."""
    said = [str(each["MESSAGE"]) for each in scene.node.journal(unit=server)]
    told = [line.partition("code=exited, ")[2] for line in said if "Control process exited" in line]
    assert told == ([f"status={row.status}/{row.name}"] if row.status else [])
