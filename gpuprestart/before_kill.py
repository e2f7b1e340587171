"""[hooks] before_kill: the program that the policy has run before the first signal to a holder.

It looks at the holder while that is still there: a dump of its stacks, a page to somebody. Whatever becomes of it, the
eviction goes on; what went wrong is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from . import events
from .host import files
from .ledger import Ledger
from .model import Decision, GpuState
from .neighbours import Neighbours, clock
from .policy import Hooks


class BeforeKill:
    """Runs the program once for each holder in a run, and for nobody any more once it has hung."""

    def __init__(self, hooks: Hooks, host: Neighbours, ledger: Ledger, *, trusted_owner: int) -> None:
        self._hooks = hooks
        self._host = host
        self._ledger = ledger
        self._trusted_owner = trusted_owner
        self._done: set[tuple[int, int]] = set()
        self._over = False

    def due(self, decision: Decision) -> bool:
        return bool(self._hooks.before_kill) and not self._over and decision.holder.process.identity not in self._done

    def __call__(self, decision: Decision, gpus: Sequence[GpuState], *, until: float) -> None:
        """Run it for this holder. ``until`` is on our clock: the eviction needs the time after that."""
        if not self.due(decision):
            return
        pid = str(decision.holder.process.pid)
        command = [word.replace("{pid}", pid) for word in self._hooks.before_kill]
        left = until - clock()
        if left <= 0:
            self._over = True
            self._warn(decision, gpus, "is not run any more: the time that is left is needed to end the holders")
            return
        self._done.add(decision.holder.process.identity)
        try:
            ended = self._host.run_program(
                command,
                environ=events.environment(self._ledger.context, decision, gpus),
                timeout=min(self._hooks.timeout, left),
                check=partial(files.trust_program, trusted_owner=self._trusted_owner),
            )
        except OSError as error:
            self._warn(decision, gpus, f"was not run: {error.strerror}")
            return
        if ended.timed_out:
            self._over = True
            self._warn(decision, gpus, f"{ended.fault}; it is run for nobody else in this run")
        elif ended.fault:
            self._warn(decision, gpus, ended.fault)

    def _warn(self, decision: Decision, gpus: Sequence[GpuState], what: str) -> None:
        path = self._hooks.before_kill[0]
        self._ledger.write(events.hook_failed(self._ledger.context, decision, gpus, command=path, what=what))
