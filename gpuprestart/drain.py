"""Wait until the memory is back, or until it is time to look at everything again.

Memory comes back in one step when the dying process closes its device files, so a figure that does not move says
nothing; and it may be taken again by a sibling, so one low sample says nothing either. Whether a sample is low enough
is asked of the caller: nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Callable

from .model import Reading

#: Seconds after which somebody looks up from watching memory that does not move.
LOOK_UP = 1.0

#: The memory of the GPUs: after so many seconds, or as soon as it is not what was last told.
Watch = Callable[[float], Mapping[str, Reading]]


def drain(
    *,
    watch: Watch,
    low: Callable[[Mapping[str, Reading]], bool],
    clock: Callable[[], float],
    settle: float,
    until: float,
) -> bool:
    """Watch until every GPU has been low for ``settle`` seconds over two samples at least; False at ``until``."""
    low_since = None
    pause = 0.0
    while True:
        is_low = low(watch(pause))
        now = clock()
        if not is_low:
            low_since = None
        elif low_since is None:
            low_since = now
        elif now - low_since >= settle:
            return True
        if now >= until:
            return False
        pause = min(LOOK_UP, until - now)
        if low_since is not None:
            pause = min(pause, max(low_since + settle - now, 0.001))
