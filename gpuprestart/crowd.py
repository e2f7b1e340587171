"""Looks at many processes at once, none of which can hang the run or keep a signal waiting.

What may hang is put to a child in batches, and where a batch is not answered, to its members one by one: so one process
that is wedged hides no other. What is looked for, and what it means, is who asks to know.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from .host import opened
from .model import Wait
from .neighbours import Ask, Neighbours
from .registry import SLOW

#: So many processes are asked about at once.
BATCH = 128


def breathing(pids: Iterable[int], wait: Wait) -> Iterator[int]:
    """The same, coming up for air now and then so that a signal does not wait for long."""
    for count, pid in enumerate(pids):
        if count % 64 == 0:
            wait((), 0)
        yield pid


def answers(ask: Ask, verb: str, pids: Sequence[int], what: Any) -> tuple[dict[int, Any], list[int]]:
    """What there is to say of each process, by PID, and the PIDs of those of whom nothing can be told: None is said of
    them, or their question is never answered. Who is left out of an answer is asked about again."""
    found: dict[int, Any] = {}
    silent: list[int] = []
    batches = [[*pids[start : start + BATCH]] for start in range(0, len(pids), BATCH)]
    while batches:
        batch = batches.pop(0)
        answer = ask((verb, (batch, what)), SLOW)
        if answer is None and len(batch) > 1:
            batches[:0] = [[pid] for pid in batch]
        elif answer is None:
            silent += batch
        else:
            found.update({pid: said for pid, said in answer.items() if said})
            silent += [pid for pid, said in answer.items() if said is None]
            rest = [pid for pid in batch if pid not in answer]
            batches[:0] = [rest] if rest else []
    return found, silent


def mapped(ask: Ask, devices: Collection[int], pids: Sequence[int]) -> tuple[dict[int, frozenset[int]], list[int]]:
    """Who has which of these devices mapped, and who could not be asked."""
    found, blind = answers(ask, "maps", pids, sorted(devices))
    return {pid: frozenset(numbers) for pid, numbers in found.items()}, blind


def having(host: Neighbours, devices: Collection[int], pids: Sequence[int]) -> tuple[set[int], set[int]]:
    """Who has any of these devices open or mapped, and who could not be looked into."""
    swept = opened.sweep(devices, breathing(pids, host.wait))
    seen, blind = mapped(host.ask, devices, pids)
    return {*swept.opened, *seen}, {*swept.unreadable, *blind}
