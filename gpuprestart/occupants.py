"""Who has what the policy asks to be free: TCP ports that are listened on, and processes that should not run.

A survey asks it of the processes that there are, and the judge decides what becomes of those that it names. A socket
may be shared by any number of processes, all of which are named.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from . import crowd
from .host import opened, procfs, sockets
from .neighbours import Ask
from .policy import Require
from .survey import UNREAD, Look


def look(require: Require, ask: Ask) -> Look:
    """How a survey looks for what these requirements are about."""

    #: Who has not answered once is not asked again: each costs a child, and of those there are only a few.
    silent: set[int] = set()

    def occupied(pids: Sequence[int], kin: Collection[int]) -> dict[str, tuple[int, ...]]:
        return {**_ports(require.ports, [*pids, *kin]), **_processes(require.processes, pids, ask, silent)}

    return occupied


def _ports(ports: Sequence[int], pids: Sequence[int]) -> dict[str, tuple[int, ...]]:
    listening = {inode: port for inode, port in sockets.listening().items() if port in ports}
    having = opened.sockets_of(pids, listening) if listening else {}
    return {
        f"port {port}": tuple(
            sorted(pid for pid, inodes in having.items() if any(listening[each] == port for each in inodes))
        )
        for port in sorted(set(listening.values()))
    }


def _processes(
    patterns: Sequence[re.Pattern[str]], pids: Sequence[int], ask: Ask, silent: set[int]
) -> dict[str, tuple[int, ...]]:
    """By pattern; and those whose command lines cannot be told, who may be any of them. No answer is no proof, so they
    have nothing by that."""
    found: dict[str, list[int]] = {}
    words = [pattern.pattern for pattern in patterns]
    rest = [pid for pid in pids if pid not in silent] if words else []

    def of_all(request: tuple[str, tuple[list[int], list[str]]], timeout: float) -> Any:
        """Who matches nothing is left out of the answer, and need not be asked about again."""
        answer = ask(request, timeout)
        return None if answer is None else {**dict.fromkeys(request[1][0], ()), **answer}

    matching, unanswered = crowd.answers(of_all, "matching", rest, words)
    silent.update(unanswered)
    for pid, numbers in matching.items():
        for number in numbers:
            found.setdefault(f"process {words[number]}", []).append(pid)
    told = {clause: tuple(sorted(having)) for clause, having in found.items()}
    unread = sorted(pid for pid in silent.intersection(pids) if procfs.read(pid) is not None)
    return {**told, UNREAD: tuple(unread)} if unread else told
