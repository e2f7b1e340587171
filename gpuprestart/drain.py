"""Wait until the memory is back, or until it is time to look at everything again.

Memory comes back in one step when the dying process closes its device files, so a figure that does not move says
nothing; and it may be taken again by a sibling, so one low sample says nothing either. Whether a sample is low enough
is asked of the caller: nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Callable

from .model import Reading, Wait

#: Seconds between two samples while memory is awaited. A sample takes the driver about a millisecond per GPU.
INTERVAL = 0.1

Sample = Callable[[], Mapping[str, Reading]]


def drain(
    *,
    sample: Sample,
    low: Callable[[Mapping[str, Reading]], bool],
    wait: Wait,
    clock: Callable[[], float],
    settle: float,
    until: float,
) -> bool:
    """Sample until every GPU has been low for ``settle`` seconds over two samples at least; False at ``until``."""
    low_since = None
    while True:
        is_low = low(sample())
        now = clock()
        if not is_low:
            low_since = None
        elif low_since is None:
            low_since = now
        elif now - low_since >= settle:
            return True
        if now >= until:
            return False
        pause = INTERVAL if low_since is None else max(low_since + settle - now, 0.001)
        wait((), min(pause, until - now))
