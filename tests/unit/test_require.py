"""What a start needs besides its GPUs: who has a port, what becomes of them, and how that is told."""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Optional

import pytest

from gpuprestart import judge, occupants, require
from gpuprestart.host import opened, procfs, slow, sockets
from gpuprestart.model import MIB, Action, Holder, Outcome, OwnerKind, Plan, Survey, Unmet
from gpuprestart.policy import Require
from gpuprestart.story import Story
from gpuprestart.survey import UNREAD
from gpuprestart.verdict import conclude

from .machines import holder, owner, policy, process, survey, unit
from .processes import python

ACTIVE = owner(of=unit("web.service", "active"))
GOING = owner(of=unit("web.service", "deactivating"))


def occupant(pid: int = 10, *clauses: str, **changes: Any) -> Holder:
    return holder(pid, opened=(), **changes)._replace(occupies=clauses or ("port 30000",))


def planned(*holders: Holder, occupied: Optional[Mapping[str, tuple[int, ...]]] = None) -> tuple[Survey, Plan]:
    seen = {clause: (each.process.pid,) for each in holders for clause in each.occupies}
    looked = survey(*holders)._replace(occupied=seen if occupied is None else occupied)
    return looked, judge.plan(policy(), looked, judge.History())


def after(
    *holders: Holder, occupied: Optional[Mapping[str, tuple[int, ...]]] = None, own: Collection[int] = ()
) -> list[Unmet]:
    host: Any = SimpleNamespace(ask_files=None)
    return require.after(
        Require(), host, *planned(*holders, occupied=occupied), own_sockets=lambda: set(own), until=1e9
    )


# What is seen --------------------------------------------------------------------------------------------------------

SHARED = """
import os, socket, sys, threading, ctypes
made = socket.create_server(("127.0.0.1", 0)); made.set_inheritable(True)
number = made.getsockname()[1]
def alone():
    ctypes.CDLL(None).unshare(0x400); mine.set(); stay.wait()
mine, stay = threading.Event(), threading.Event()
if len(sys.argv) > 1:
    threading.Thread(target=alone, daemon=True).start(); mine.wait(); os.close(made.fileno())
print("ready", flush=True); input()
"""


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_who_listens_is_seen_and_who_only_talks_is_not(family: socket.AddressFamily) -> None:
    with socket.create_server(("", 0), family=family) as listening:
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1" if family is socket.AF_INET else "::1", port)) as talking:
            found = sockets.listening()
            assert [inode for inode, number in found.items() if number == port] == [_inode(listening)]
            assert talking.getsockname()[1] not in found.values()
    assert port not in sockets.listening().values()


def _inode(one: socket.socket) -> int:
    import os

    return os.fstat(one.fileno()).st_ino


@pytest.mark.parametrize("unshared", [(), ("unshared",)])
def test_a_socket_is_found_in_every_thread_s_table(unshared: tuple[str, ...]) -> None:
    before = sockets.listening()
    with python(SHARED, *unshared) as child:
        made = sockets.listening().keys() - before.keys()
        having = opened.sockets_of([child.pid, 1], made)
        assert having.keys() == {child.pid} and having[child.pid] <= made


def test_processes_are_looked_for_by_their_command_lines() -> None:
    with python("print('ready', flush=True); input()", "look-for-me") as child:
        assert slow.answer(("matching", ([child.pid, 1], ["look-for-me$", "nobody-has-this"]))) == {child.pid: [0]}
    assert slow.answer(("matching", ([child.pid], ["."]))) == {}


def test_of_one_whose_command_line_cannot_be_told_nothing_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others of its batch are asked again, one by one; it itself is not, because each silence costs a child."""
    asked: list[list[int]] = []

    def ask(request: tuple[str, tuple[list[int], list[str]]], timeout: float) -> Optional[dict[int, list[int]]]:
        pids, _ = request[1]
        asked.append(pids)
        return None if 11 in pids else {pid: [0] for pid in pids if pid == 10}

    monkeypatch.setattr(procfs, "read", lambda pid: process(pid))
    look = occupants.look(Require(processes=(re.compile("a"), re.compile("b"))), ask)
    for _ in range(2):
        assert look([9, 10, 11], frozenset()) == {"process a": (10,), UNREAD: (11,)}
    assert asked == [[9, 10, 11], [9], [10], [11], [9, 10]]
    told = "the command line of PID 11 gave no answer, so it may be one of require.processes"
    assert after(occupied={UNREAD: (11,)})[0].message == told
    _, plan = planned(occupied={UNREAD: (11,)})
    assert plan.decisions == ()


def test_of_a_long_command_line_all_is_looked_at() -> None:
    with python("print('ready', flush=True); input()", *["x"] * 2000, "y" * 70_000, "look-for-me") as child:
        assert slow.answer(("matching", ([child.pid], ["look-for-me$"]))) == {child.pid: [0]}


# What becomes of them ------------------------------------------------------------------------------------------------


def test_the_stale_are_ended_for_a_port_and_the_living_are_not() -> None:
    _, found = planned(occupant(10), occupant(11, of=ACTIVE), occupant(12, of=GOING))
    assert [each.holder.process.pid for each in found.evict] == [10]
    assert [each.holder.process.pid for each in found.occupants] == [11, 12]
    assert [each.holder.process.pid for each in found.awaited] == [12]
    # It is told when everything else is done, and keeps nobody from being ended before.
    assert found.blocking == () and not found.clean


def test_what_is_on_our_own_gpus_as_well_is_judged_by_that() -> None:
    both = holder(10, of=ACTIVE, listed={0: 500})._replace(occupies=("port 30000",))
    _, found = planned(both)
    assert [each.holder.process.pid for each in found.blocking] == [10]


@pytest.mark.parametrize(
    ("holders", "occupied", "own", "words"),
    [
        ([occupant(10)], None, [], None),
        ([occupant(10, of=ACTIVE)], None, [], "port 30000 (require.ports) is in use by python3[10]"),
        ([occupant(10), occupant(11, of=ACTIVE)], {"port 30000": (10, 11)}, [], "by python3[11]"),
        ([occupant(10, of=ACTIVE), occupant(11, of=ACTIVE)], {"port 30000": (10, 11)}, [], "; and by 1 more"),
        ([], {"port 30000": (1,)}, [30000], None),
        ([], {"port 30000": (1,)}, [30001], "by systemd itself"),
        ([], {"port 30000": ()}, [], "by nobody that can be seen"),
        ([], {"port 30000": (77,)}, [], "PID 77, which this very start has started"),
        ([occupant(10, "process x", of=ACTIVE)], None, [], "python3[10] (user model) must not run"),
        ([occupant(pid, "process x", of=ACTIVE) for pid in (10, 11)], {"process x": (10, 11)}, [], "; nor must 1 more"),
        ([], {}, [], None),
    ],
)
def test_who_has_what_is_to_be_free(
    holders: Sequence[Holder], occupied: Any, own: Sequence[int], words: Optional[str]
) -> None:
    found = after(*holders, occupied=occupied, own=own)
    assert len(found) == (words is not None)
    if words is not None:
        assert words in found[0].message and found[0].hint and not found[0].file


def test_one_that_is_spared_still_has_the_port() -> None:
    program = occupant(10)._replace(owner=owner(OwnerKind.NONE))
    looked = survey(program)._replace(occupied={"port 30000": (10,)})
    rule = "[[rule]]\nmatch = { comm = 'python3' }\naction = 'spare'\n"
    plan = judge.plan(policy(rule), looked, judge.History())
    assert plan.decisions[0].action is Action.SPARE and plan.clean
    host: Any = SimpleNamespace(ask_files=None)
    (unmet,) = require.after(Require(), host, looked, plan, own_sockets=set, until=1e9)
    assert (unmet.check, unmet.subject) == ("ports", "30000")


# How it is told ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("files", "exit"), [((True,), 66), ((True, True), 66), ((True, False), 75), ((False,), 75)])
def test_files_alone_have_a_status_of_their_own(files: Sequence[bool], exit: int) -> None:
    unmet = tuple(Unmet("models", f"/m{number}", f"/m{number} is cut", file=file) for number, file in enumerate(files))
    found = conclude(Story(run="0", time=0.0, unmet=unmet))
    assert (found.outcome, found.exit, found.unmet) == (Outcome.PRECONDITION, exit, unmet)
    assert found.message == "; ".join(each.message for each in unmet)


def test_what_comes_before_it_decides_the_status() -> None:
    looked, plan = planned(holder(10, of=ACTIVE, listed={0: 500}))
    unmet = (Unmet("models", "/m", "/m is cut", file=True),)
    found = conclude(Story(run="0", time=0.0, survey=looked, plan=plan, unmet=unmet))
    assert (found.outcomes, found.exit) == ((Outcome.PROTECTED, Outcome.PRECONDITION), 75)


# Memory and disk -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((5 << 30, 100_000), None),
        ((5 << 30, None), None),
        (((5 << 30) - MIB, 100_000), "has 5119 MiB free, but 5120 MiB are needed (require.disk)"),
        ((5 << 30, 999), "has 999 inodes free"),
        ("No such file or directory", "cannot be measured: No such file or directory"),
        (None, "gave no answer for"),
    ],
)
def test_room_on_a_disk(answer: Any, words: Optional[str]) -> None:
    host: Any = SimpleNamespace(ask_files=lambda request, timeout: answer)
    found = require.after(Require(disk={"/var/log": 5 << 30}), host, *planned(), own_sockets=set, until=1e9)
    assert [words in each.message for each in found if words] == ([True] if words else [])
    assert len(found) == (words is not None)


@pytest.mark.parametrize(("needed", "met"), [(1, True), (1 << 50, False)])
def test_memory_of_the_machine(needed: int, met: bool) -> None:
    host: Any = SimpleNamespace(ask_files=None)
    found = require.after(Require(host_memory=needed), host, *planned(), own_sockets=set, until=1e9)
    assert (found == []) is met
    assert met or f"{(1 << 50) // MIB} MiB are needed (require.host_memory)" in found[0].message
