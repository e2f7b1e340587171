"""Which GPUs were just given to a unit, whose server may allocate only half a minute later. Pure.

A claim holds for as long as systemd reports that unit up with the same invocation. The text of a claim is one line, so
that a person can read it with cat; one that cannot be read is a claim of somebody unknown, and holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Optional

from .model import Claim as Claim
from .model import Gpu, Unit

NOBODY = "?"

_PID = re.compile("[0-9]{1,10}")

#: Where they lie, for people to look.
FOLDER = "/run/gpuprestart/claims"


def text(claim: Claim) -> str:
    fields = (
        ("unit", claim.unit),
        ("invocation", claim.invocation),
        ("pid", str(claim.pid)),
        ("parent", claim.parent or ""),
    )
    return " ".join(f"{name}={value}" for name, value in fields) + "\n"


def parse(gpu: str, line: str) -> Claim:
    said = dict(word.partition("=")[::2] for word in line.split())
    pid = said.get("pid", "")
    return Claim(
        gpu=gpu,
        unit=said.get("unit") or NOBODY,
        invocation=said.get("invocation", ""),
        pid=int(pid) if _PID.fullmatch(pid) else 0,
        parent=said.get("parent") or None,
    )


def of(unit: str, invocation: str, control_pid: int, gpus: Iterable[Gpu]) -> list[Claim]:
    """What a start that may go on leaves behind."""
    return [Claim(gpu=gpu.uuid, unit=unit, invocation=invocation, pid=control_pid, parent=gpu.parent) for gpu in gpus]


def foreign(texts: Mapping[str, str], gpus: Sequence[Gpu], unit: Optional[str]) -> list[Claim]:
    """Other units' claims on these GPUs, on instances of them, or on what they are instances of."""
    ours = {gpu.uuid for gpu in gpus}
    above = {gpu.parent for gpu in gpus}
    read = [parse(gpu, line) for gpu, line in sorted(texts.items())]
    # Two instances of one GPU have it in common as parent, and share no memory.
    return [claim for claim in read if (claim.gpu in ours | above or claim.parent in ours) and claim.unit != unit]


def holds(claim: Claim, unit: Unit) -> bool:
    """Whether the unit is still the one that was given the GPU.

    A run that was no control process, such as a cron job's, may have taken itself for one where it had no time to ask;
    the unit's main process then bears the PID of the claim, and no server is about to come.
    """
    return unit.up and unit.invocation == claim.invocation and unit.main_pid != claim.pid
