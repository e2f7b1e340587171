"""How much memory a run got back: what each GPU used at most while it went on, less what it used at the end.

Pure, and of plain figures, so that it is the same for a run that has just ended and for one that is read back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional


def freed(samples: Sequence[Sequence[Optional[int]]]) -> int:
    """Of samples in their order, each with the used bytes of every GPU, or None where they could not be read."""
    total = 0
    for gpu in range(max(map(len, samples), default=0)):
        used = [sample[gpu] for sample in samples if gpu < len(sample)]
        known = [figure for figure in used if figure is not None]
        if known:
            total += max(known) - known[-1]
    return total
