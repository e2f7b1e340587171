"""Entries of the journal -> earlier runs, what can be said of them in figures, and what they prove.

Pure. Knows which records may be believed: anybody can write one that looks like ours. Refuses to know how entries are
found, and how a run is shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple, Optional

from .documents import NAME, WORD, Document, document
from .freed import freed as memory_freed
from .quantities import duration
from .text import printable

#: So many bytes of JSON a record of ours has at most, a hundred GPUs and all; nothing longer is looked into.
LONGEST = 1 << 20

#: What became of a holder that a run has ended.
ENDED = ("terminated", "killed")


class Run(NamedTuple):
    """One verdict of the past. ``uid`` is who recorded it, as the kernel told journald."""

    document: Document
    at: float
    uid: int
    cursor: str = ""
    boot: str = ""
    machine: str = ""
    hostname: str = ""

    @property
    def unit(self) -> Optional[str]:
        unit: Optional[str] = self.document["unit"]
        return unit

    @property
    def id(self) -> str:
        return str(self.document["run"] or "")

    @property
    def audit(self) -> bool:
        """It only looked, as ``check --journal`` does, and nothing hung on its verdict."""
        return self.document["verb"] not in (None, "clean")


# What may be believed ------------------------------------------------------------------------------------------------


def recorded_by(fields: Mapping[str, str]) -> Optional[int]:
    """The uid of who wrote this record, if they may speak of its unit; None if it proves nothing.

    Of root everything is believed. Anybody else is, of the very unit that they run in: a hook without ``+`` runs as the
    unit's user. Fields that begin with an underscore are journald's own, and nobody can forge them.
    """
    uid = fields.get("_UID", "")
    if not re.fullmatch("[0-9]{1,10}", uid):
        return None
    own = fields.get("GPUPRESTART_UNIT") and fields["GPUPRESTART_UNIT"] == fields.get("_SYSTEMD_UNIT")
    return int(uid) if int(uid) == 0 or own else None


def run(fields: Mapping[str, str], *, at: float, cursor: str = "") -> Optional[Run]:
    """The run that a verdict's record is about; None where it may not be believed."""
    uid = recorded_by(fields)
    if uid is None:
        return None
    said = document(_of_fields(fields, at))
    found = document(_parsed(fields.get("GPUPRESTART_VERDICT", "")))
    found.update({key: value for key, value in said.items() if found[key] is None})
    # Only what another machine has answered has this.
    found.pop("host", None)
    if uid:
        # It speaks of its own unit only, whatever its document says.
        found["unit"] = NAME(fields["GPUPRESTART_UNIT"])
        found["run"] = WORD(fields.get("GPUPRESTART_RUN"))
    return Run(
        document={**found, "recorded_by": uid},
        at=at,
        uid=uid,
        cursor=printable(cursor, 500),
        boot=WORD(fields.get("_BOOT_ID")) or "",
        machine=WORD(fields.get("_MACHINE_ID")) or "",
        hostname=NAME(fields.get("_HOSTNAME")) or "",
    )


def _parsed(text: str) -> Mapping[str, Any]:
    """The document, or an empty one; records of versions before it have none."""
    if not text or len(text) > LONGEST:
        return {}
    try:
        found = json.loads(text)
    # A number of too many digits is a ValueError of its own, brackets without end are a RecursionError.
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _of_fields(fields: Mapping[str, str], at: float) -> Mapping[str, Any]:
    """What the other fields of a verdict's record say of the same."""
    outcome, status = fields.get("GPUPRESTART_OUTCOME", ""), fields.get("GPUPRESTART_EXIT", "")
    message = fields.get("MESSAGE", "")
    return {
        "outcome": outcome,
        "exit": int(status) if re.fullmatch("[0-9]{1,3}", status) else None,
        "unit": fields.get("GPUPRESTART_UNIT"),
        "run": fields.get("GPUPRESTART_RUN"),
        "time": at,
        "message": message[len(outcome) + 2 :] if outcome and message.startswith(f"{outcome}: ") else message,
    }


# What it says in figures ---------------------------------------------------------------------------------------------


def curve(read: Mapping[str, Any], position: int) -> list[tuple[float, Optional[int]]]:
    """What was used over time of the GPU in this place of ``gpus``."""
    return [(at, used[position]) for at, used in read["timeline"]["used_bytes"]]


def freed(read: Mapping[str, Any]) -> Optional[int]:
    """Bytes by which what is used fell from its highest to the end, of all GPUs; None where no figures were kept."""
    samples = [used for _, used in read["timeline"]["used_bytes"]]
    return memory_freed(samples) if any(figure is not None for used in samples for figure in used) else None


def ended(read: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The holders that the run has ended."""
    return [each for each in read["holders"] if each["fate"] in ENDED]


def names(holders: Iterable[Mapping[str, Any]], most: int = 3) -> str:
    """``python3 ×2, VLLM::Worker``: who they were, those of one name together, so many names at most."""
    counts: dict[str, int] = {}
    for each in holders:
        name = each["comm"] or "?"
        counts[name] = counts.get(name, 0) + 1
    told = [name if count == 1 else f"{name} ×{count}" for name, count in counts.items()]
    left = sum(list(counts.values())[most:])
    return ", ".join(told[:most]) + (f" and {left} more" if left else "")


BARS = "▁▂▃▄▅▆▇█"
#: Where those letters cannot be said.
PLAIN_BARS = "_.-:=+*#"


def sparkline(values: Sequence[Optional[int]], *, most: int, width: int = 24, bars: str = BARS) -> str:
    """So many bars at most, the highest where ``most`` is reached. Of what falls together the highest is shown."""
    if len(values) > width:
        spans = [values[len(values) * at // width : len(values) * (at + 1) // width] for at in range(width)]
        values = [max((each for each in span if each is not None), default=None) for span in spans]
    top = len(bars) - 1
    return "".join("?" if each is None else bars[min(top, each * top // max(1, most))] for each in values)


def resampled(points: Sequence[tuple[float, Optional[int]]], *, until: float, count: int) -> list[Optional[int]]:
    """What was used in each of ``count`` equal parts of the time until then, the highest; a figure holds until the
    next."""
    if not points:
        return []
    found: list[Optional[int]] = []
    for part in range(count):
        begin, end = until * part / count, until * (part + 1) / count
        before = [used for at, used in points if at <= begin][-1:] or [points[0][1]]
        within = [used for at, used in points if begin < at < end]
        if part == count - 1:
            # The end is what the verdict is about, however short it was.
            found.append(points[-1][1])
            continue
        found.append(max((each for each in before + within if each is not None), default=None))
    return found


# What is proved ------------------------------------------------------------------------------------------------------


def doubt(of: Run) -> str:
    """Why this run is no proof that the GPUs were clean when it ended; empty where it is one."""
    read = of.document
    if of.uid != 0:
        return (
            f"the verdict was recorded by uid {of.uid} and not by root, so the unit's own processes could have made it"
        )
    if read["version"] is None or read["verb"] is None:
        return "the verdict was recorded by an earlier gpuprestart, which kept no figures"
    if read["outcome"] not in ("clean", "cleaned") or read["exit"] != 0:
        return f"the verdict was {read['outcome'] or 'unknown'}: {read['message'] or 'nothing is known of it'}"
    if not read["gpus"]:
        return "the verdict names no GPU"
    dirty = [each for each in read["gpus"] if each["clean"] is not True]
    if dirty:
        return f"GPU {dirty[0]['index'] if dirty[0]['index'] is not None else '?'} was not clean"
    return ""


def proof(of: Run, *, boot: str) -> Document:
    """What is filed with a benchmark. ``boot`` is the id of the present boot."""
    read = of.document
    keys = ("index", "uuid", "name", "used_bytes", "limit_bytes", "total_bytes", "unattributed_bytes", "clean")
    known = read["time"] is not None and read["duration_s"] is not None
    return {
        "version": 1,
        "unit": of.unit,
        "outcome": read["outcome"],
        "proved": not doubt(of),
        "time": read["time"],
        "ended": round(read["time"] + read["duration_s"], 3) if known else None,
        "message": read["message"],
        **{key: read[key] for key in ("run", "boot_id", "driver", "nvml_path", "policy_files", "duration_s")},
        "gpus": [{key: each[key] for key in keys} for each in read["gpus"]],
        "recorded_by": of.uid,
        "journal": {"cursor": of.cursor, "machine_id": of.machine, "hostname": of.hostname},
        "this_boot": bool(boot) and of.boot == boot.replace("-", ""),
    }


# What people say -----------------------------------------------------------------------------------------------------

_WHEN = 'a date and time as "2026-12-01 06:30" or one of them, today, yesterday, or how long ago, as 2h, "30 min" or 3d'
_FORMS = ("%Y-%m-%d %H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M", "%Y-%m-%d")
_HOURS = ("%H:%M:%S", "%H:%M")


def since(text: str, *, now: float) -> float:
    """The moment in seconds since the epoch, in local time. Raises ValueError with a sentence."""
    said = " ".join(text.split())
    today = datetime.fromtimestamp(now).replace(hour=0, minute=0, second=0, microsecond=0)
    found: Optional[float] = None
    if said in ("today", "yesterday"):
        found = (today - timedelta(days=said == "yesterday")).timestamp()
    for form in _FORMS + _HOURS if found is None else ():
        try:
            moment = datetime.strptime(said, form)
            if form in _HOURS:
                moment = today.replace(hour=moment.hour, minute=moment.minute, second=moment.second)
            found = moment.timestamp()
            break
        # Some moments of the calendar are none of the epoch.
        except (ValueError, OverflowError):
            continue
    if found is None:
        found = now - _ago(said, text)
    if found > now:
        raise ValueError(f"{printable(text, 60)!r} is in the future (allowed: {_WHEN})")
    return max(0.0, found)


def _ago(said: str, text: str) -> float:
    amount = said.removesuffix(" ago").lstrip("-")
    days = re.fullmatch(r"([0-9]{1,4}) ?d", amount)
    try:
        return int(days[1]) * 86400.0 if days else duration(amount)
    except ValueError:
        raise ValueError(f"{printable(text, 60)!r} is no time (allowed: {_WHEN})") from None
