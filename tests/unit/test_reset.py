"""When a GPU is reset, and when it is not: on a machine that is written down, with the command run by nobody."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import pytest

from gpuprestart import judge, reset
from gpuprestart.events import Record
from gpuprestart.host.locks import Notes
from gpuprestart.host.nvml import Fact
from gpuprestart.host.program import Ended
from gpuprestart.ledger import Ledger
from gpuprestart.model import Listed, Survey
from gpuprestart.story import Story

from .machines import holder, inventory, owner, policy, survey, unit, uuid

BOOT = "0123456789abcdef0123456789abcdef"


class Machine:
    """Its GPUs, who has their nodes, and what a reset does: nothing but to take ``takes`` seconds."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, deadline: float) -> None:
        self.now = 0.0
        self.having: list[int] = []
        self.blind: list[int] = []
        self.hangs = False
        self.takes = 3.0
        self.ended = Ended()
        self.commands: list[tuple[Sequence[str], float]] = []
        self.events: list[str] = []
        self.records: list[Record] = []
        self.notes = Notes("resets", str(folder))
        monkeypatch.setattr(reset, "clock", lambda: self.now)
        self.policy = policy(f'[reset]\nmode = "last-resort"\ntimeout = "60 s"\n{text}')
        self.ledger = Ledger(
            Story(run="0123", time=0.0),
            write=self.records.append,
            clock=lambda: self.now,
            wchan=lambda pid: "",
            still_there=lambda process: False,
        )
        driver = SimpleNamespace(
            facts=lambda gpus, names, timeout: {each: {"persistence": Fact((1,))} for each in gpus},
            let_go=self._let_go,
            come_back=lambda timeout: self.events.append("come back"),
        )
        host: Any = SimpleNamespace(
            driver=driver, children=lambda: [77], say_status=lambda text: None, run_program=self._run
        )
        surveyor: Any = SimpleNamespace(having=lambda minor: (self.having, self.blind))
        self.last_resort = reset.LastResort(
            self.policy,
            host,
            self.ledger,
            surveyor,
            inventory(4),
            deadline=deadline,
            boot=BOOT,
            trusted_owner=0,
            notes=self.notes,
        )

    def _let_go(self) -> bool:
        self.events.append("let go")
        return not self.hangs

    def _run(self, command: Sequence[str], *, timeout: float, **options: Any) -> Ended:
        self.events.append("reset")
        self.commands.append((command, timeout))
        self.now += self.takes
        return self.ended

    def look(self, *, at: float, of: Optional[Survey] = None) -> None:
        """One round of the loop."""
        self.now = max(self.now, at)
        seen = of or dirty()
        plan = judge.plan(self.policy, seen, judge.History())
        if self.last_resort.due(plan):
            self.last_resort(seen, plan)

    @property
    def advice(self) -> str:
        return "; ".join(self.ledger.story().advice)


def dirty(*holders: Any, used: Sequence[int] = (1523,), **options: Any) -> Survey:
    return survey(*holders, used=tuple(used), at=0.0, **options)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(text: str = "", deadline: float = 120.0) -> Machine:
        return Machine(tmp_path, monkeypatch, text, deadline)

    return make


def test_it_is_begun_when_hardly_more_time_is_left_than_it_needs(machine: Any) -> None:
    one = machine()
    one.look(at=54.0)
    assert one.commands == []
    one.look(at=54.5)
    assert one.commands == [(["/usr/bin/nvidia-smi", "--gpu-reset", "-i", uuid(0)], 60.0)]
    assert one.events == ["let go", "reset", "come back"]
    # It is told before it is run, so that even one that takes the machine down is not repeated.
    assert one.notes.read()[uuid(0)].startswith(BOOT)
    one.look(at=100.0)
    assert len(one.commands) == 1


def test_one_after_the_other_as_far_as_time_allows(machine: Any) -> None:
    one = machine()
    one.takes = 52.0
    one.look(at=54.5, of=dirty(used=(1523, 1523, 1523)))
    assert [(command[-1], timeout) for command, timeout in one.commands] == [(uuid(0), 60.0)]
    assert "GPU 1 was not reset: no time is left" in one.advice


def test_a_run_too_short_for_it_says_so(machine: Any) -> None:
    one = machine(deadline=60.0)
    one.look(at=0.0)
    assert one.commands == [] and "a reset needs 65.5 s and this run has less" in one.advice


@pytest.mark.parametrize("what", ["blocking", "evict", "listed", "distrust", "unlisted", "foreign", "min_free"])
def test_memory_that_somebody_has_or_may_have_is_no_reason(machine: Any, what: str) -> None:
    one = machine('[memory]\nmin_free = "79 GiB"\n' if what == "min_free" else "")
    active = owner(of=unit("ollama.service", "active"))
    seen = {
        "blocking": dirty(holder(9, active, listed={0: 1520}), used=(1523, 1523)),
        "evict": dirty(holder(9, listed={0: 1520})),
        "min_free": dirty(used=(60,)),
    }.get(what, dirty())
    reading = seen.readings[uuid(0)]
    if what == "distrust":
        seen = seen._replace(readings={uuid(0): reading._replace(distrust="is scrambled")})
    elif what == "unlisted":
        seen = seen._replace(readings={uuid(0): reading._replace(unlisted="gave no list")})
    elif what in ("listed", "foreign"):
        listed = reading._replace(listed=(Listed(4711, 1, frozenset({"compute"})),))
        seen = seen._replace(readings={uuid(0): listed}, pids_ours=what == "listed")
    for at in (54.5, 60.0, 120.0):
        one.look(at=at, of=seen)
    assert one.commands == [] and one.notes.read() == {}
    assert what != "foreign" or "another PID namespace" in one.advice


def test_the_dead_that_are_still_listed_are_nobody(machine: Any) -> None:
    one = machine()
    seen = dirty()
    listed = seen.readings[uuid(0)]._replace(listed=(Listed(4711, 1520, frozenset({"compute"})),))
    one.look(at=54.5, of=seen._replace(readings={uuid(0): listed}, dead={uuid(0): (4711,)}))
    assert len(one.commands) == 1


def test_who_has_the_node_only_for_a_moment_is_waited_for(machine: Any) -> None:
    one = machine()
    one.having = [1 << 30, 77]
    one.look(at=54.5)
    assert one.commands == [] and one.advice == ""
    one.having = [77]
    one.look(at=56.5)
    # Our own children are let go of.
    assert [timeout for _, timeout in one.commands] == [58.0]


@pytest.mark.parametrize("what", ["having", "blind"])
def test_who_has_the_node_to_the_end_is_named(machine: Any, what: str) -> None:
    one = machine()
    setattr(one, what, [1 << 30])
    for at in range(54, 120):
        one.look(at=at + 0.5)
    assert one.commands == [] and f"PID {1 << 30}" in one.advice
    assert one.advice.count("was not reset") == 1


def test_a_child_of_ours_that_hangs_has_the_gpu_too(machine: Any) -> None:
    one = machine()
    one.hangs = True
    one.look(at=54.5)
    assert one.commands == [] and one.events == ["let go", "come back"] and "hangs" in one.advice


def test_what_cannot_be_written_down_is_not_done(machine: Any, tmp_path: Path) -> None:
    (tmp_path / "resets").write_text("")
    one = machine()
    one.look(at=54.5)
    assert one.commands == [] and "it cannot be told whether it was reset before" in one.advice


@pytest.mark.parametrize(
    ("note", "again"), [(f"{BOOT} 3 a.service\n", False), ("", False), (f"{'f' * 32} 3 a.service\n", True)]
)
def test_one_of_an_earlier_boot_counts_no_more(machine: Any, note: str, again: bool) -> None:
    one = machine()
    one.notes.write(uuid(0), note)
    one.look(at=54.5)
    assert len(one.commands) == again


def test_what_a_failed_one_said_is_told_in_one_printable_line(machine: Any) -> None:
    one = machine()
    one.ended = Ended(fault="exited with status 3", said="\n \x1b[31mno luck\nmore\n" + "x" * 5000)
    one.look(at=54.5)
    assert "a reset of GPU 0 was tried and failed: /usr/bin/nvidia-smi exited with status 3" in one.advice
    assert "no luck" in one.advice and "\x1b" not in one.advice and "more" not in one.advice


def test_none_is_reset_where_another_may_never_be(machine: Any) -> None:
    one = machine()
    one.notes.write(uuid(1), f"{BOOT} 3 a.service\n")
    one.look(at=54.5, of=dirty(used=(1523, 1523)))
    assert one.commands == [] and "GPU 1 was not reset: a reset was tried already" in one.advice
