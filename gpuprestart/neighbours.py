"""What a run is given to work with: the machine's handles, so that a test can hand in its own."""

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from . import events
from .host.locks import Locks, Notes
from .host.nvml import Driver
from .host.systemd import Systemd
from .model import Wait

if TYPE_CHECKING:
    from .host.program import Ended

#: Puts a question of answers.answer to a child, for so many seconds at most; None is an answer that never came.
Ask = Callable[[Any, float], Any]


class Neighbours(NamedTuple):
    """``write`` sends a record to the journal, ``say_status`` sets STATUS=, ``children`` are the PIDs of ours."""

    wait: Wait
    #: From then on ``wait`` raises no Interrupted.
    deafen: Callable[[], None]
    driver: Driver
    systemd: Systemd
    ask: Ask
    #: The same, about files: a dead mount must not use up the patience that there is for wedged processes.
    ask_files: Ask
    children: Callable[[], Iterable[int]]
    write: Callable[[events.Record], None]
    say_status: Callable[[str], object]
    #: Asks systemd for so many seconds from now; False where it does not listen to us.
    extend_timeout: Callable[[float], bool]
    environ: Mapping[str, str]
    locks: Locks
    claims: Notes
    bypasses: Notes
    #: Runs a program that the policy names, as host.program.Programs does.
    run_program: Callable[..., "Ended"]


def clock() -> float:
    """Seconds of CLOCK_BOOTTIME, on which /proc counts when a process started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
