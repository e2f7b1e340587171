"""Records of the journal -> runs: who is believed, what is made of a document that is not one, what is proved."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as some

from gpuprestart import documents, events, history, past, report
from gpuprestart.model import MIB

from .test_report import decision, state, verdict

UUID = "GPU-00000000-aaaa"


def document(**changes: Any) -> dict[str, Any]:
    """A run that ended one of two holders on one GPU, whose memory came back."""
    return {
        "version": 1,
        "verb": "clean",
        "outcome": "cleaned",
        "outcomes": ["cleaned"],
        "exit": 0,
        "unit": "sglang-qwen.service",
        "message": "1 stale holder ended",
        "hints": [],
        "time": 1_796_106_600.5,
        "run": "3f2a" * 8,
        "boot_id": "0b3c" * 8,
        "driver": "570.86",
        "nvml_path": "/usr/lib/libnvidia-ml.so.1",
        "policy_files": ["/etc/gpuprestart/policy.toml"],
        "duration_s": 3.9,
        "phases": {"measure": 0.3, "evict": 1.0, "drain": 2.5},
        "gpus": [gpu()],
        "holders": [holder(), holder(pid=4712, comm="Xorg", action="spare", fate=None)],
        "holders_count": 2,
        "preconditions": [],
        "residue": [],
        "residue_count": 0,
        "timeline": {
            "phases": [["measure", 0.0, 0.3], ["evict", 0.3, 1.3], ["drain", 1.3, 3.8]],
            "signals": [[0.31, 4711, "SIGTERM"]],
            "used_bytes": [[0.3, [1523 * MIB]], [3.0, [1523 * MIB]], [3.1, [3 * MIB]], [3.9, [3 * MIB]]],
        },
        **changes,
    }


def gpu(index: int = 0, **changes: Any) -> dict[str, Any]:
    normal = {
        "index": index,
        "uuid": f"GPU-{index:08x}-aaaa",
        "name": "NVIDIA H200",
        "pci": "00000000:01:00.0",
        "parent": None,
        "memory_call": "v2",
        "used_bytes": 3 * MIB,
        "reserved_bytes": 500 * MIB,
        "total_bytes": 81_920 * MIB,
        "limit_bytes": 64 * MIB,
        "unattributed_bytes": 0,
        "clean": True,
        "fault": None,
    }
    return {**normal, **changes}


def holder(**changes: Any) -> dict[str, Any]:
    normal = {
        "pid": 4711,
        "started": 1_796_100_000.25,
        "comm": "python3",
        "user": "model",
        "owner": "unit:old.service",
        "state": "S",
        "gpus": [UUID],
        "bytes": 1520 * MIB,
        "evidence": ["nvml", "fd"],
        "occupies": [],
        "action": "kill",
        "reason": "was left behind by old.service, which has failed",
        "rule": None,
        "fate": "terminated",
    }
    return {**normal, **changes}


def record(of: Optional[Mapping[str, Any]] = None, **fields: str) -> dict[str, str]:
    """The fields of a verdict's record as journald has them."""
    read = document() if of is None else of
    normal = {
        "MESSAGE": "cleaned: 1 stale holder ended",
        "MESSAGE_ID": events.MESSAGE_IDS["verdict"],
        "GPUPRESTART_OUTCOME": "cleaned",
        "GPUPRESTART_EXIT": "0",
        "GPUPRESTART_UNIT": "sglang-qwen.service",
        "GPUPRESTART_RUN": "3f2a" * 8,
        "GPUPRESTART_VERDICT": json.dumps(read),
        "_UID": "0",
        "_SYSTEMD_UNIT": "sglang-qwen.service",
        "_BOOT_ID": "0b3c" * 8,
        "_MACHINE_ID": "f00d" * 8,
        "_HOSTNAME": "node1",
    }
    return {**normal, **fields}


def run(of: Optional[Mapping[str, Any]] = None, **fields: str) -> past.Run:
    found = past.run(record(of, **fields), at=1_796_106_605.0, cursor="s=1;i=2")
    assert found is not None
    return found


# Who is believed -----------------------------------------------------------------------------------------------------


def test_a_record_of_root_is_read_as_it_was_written() -> None:
    found = run()
    assert found.document == {**document(), "recorded_by": 0}
    assert (found.uid, found.cursor, found.boot, found.machine) == (0, "s=1;i=2", "0b3c" * 8, "f00d" * 8)


def test_a_unit_s_own_processes_are_believed_of_that_unit_and_marked() -> None:
    found = run(_UID="990")
    assert (found.uid, found.document["recorded_by"], found.unit) == (990, 990, "sglang-qwen.service")


@pytest.mark.parametrize(
    "fields",
    [
        {"_UID": "1000", "_SYSTEMD_UNIT": "user@1000.service"},
        {"_UID": "1000", "_SYSTEMD_UNIT": ""},
        {"_UID": "1000", "_SYSTEMD_UNIT": "", "GPUPRESTART_UNIT": ""},
        {"_UID": "", "_SYSTEMD_UNIT": "sglang-qwen.service"},
        {"_UID": "-0"},
        {"_UID": "0x0"},
        {"_UID": "٠"},
    ],
)
def test_nobody_else_is(fields: dict[str, str]) -> None:
    assert past.run(record(None, **fields), at=0.0) is None


def test_a_unit_s_own_process_speaks_of_no_other_unit_in_its_document_either() -> None:
    of = document(unit="victim.service", run="beef" * 8, host="node9", recorded_by=0)
    found = run(of, _UID="990")
    assert (found.unit, found.id, found.document["recorded_by"]) == ("sglang-qwen.service", "3f2a" * 8, 990)
    assert "host" not in found.document


def test_a_record_of_before_the_document_says_what_its_fields_do() -> None:
    found = run(GPUPRESTART_VERDICT="").document
    said = {key: value for key, value in found.items() if value not in (None, [], {})}
    assert said.pop("timeline") == {"phases": [], "signals": [], "used_bytes": []}
    assert said == {
        "outcome": "cleaned",
        "exit": 0,
        "unit": "sglang-qwen.service",
        "run": "3f2a" * 8,
        "time": 1_796_106_605.0,
        "message": "1 stale holder ended",
        "recorded_by": 0,
    }


# What is made of a document ------------------------------------------------------------------------------------------


def test_what_this_program_writes_is_of_the_right_form() -> None:
    """A key that is added to report.document has to be known here, or history would leave it out."""
    written = report.document(verdict(gpus=(state(0, 3 * MIB),), decisions=(decision(),)), booted=1.0, verb="clean")
    assert documents.document(json.loads(report.as_json(written))) == json.loads(report.as_json(written))


@pytest.mark.parametrize(
    "text",
    [
        "junk",
        "[]",
        "7",
        "null",
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"time": ' + "9" * 5000 + "}",
        '{"outcome": "cle',
        "{}",
        '{"outcome": NaN, "run": 7, "unit": [], "exit": "0", "message": {}}',
        " " * (past.LONGEST + 1) + json.dumps(document()),
    ],
)
def test_without_a_document_the_other_fields_tell(text: str) -> None:
    found = run(GPUPRESTART_VERDICT=text).document
    assert (found["outcome"], found["run"]) == ("cleaned", "3f2a" * 8) and found["gpus"] == []
    assert found["version"] is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, 10**40, 1e300, True, "soon", [], {}, None])
def test_a_time_that_cannot_be_is_unknown(value: object) -> None:
    found = documents.document(document(time=value, duration_s=value))
    assert found["time"] is None and found["duration_s"] is None


def test_samples_that_are_not_of_these_gpus_are_left_out() -> None:
    timeline = {"used_bytes": [[0.2, [1]], [0.1, [2]], [0.3, [1, 2]], [0.4, []], [0.5, None], ["x", [1]], [0.6], 7]}
    found = documents.document(document(timeline=timeline))
    assert found["timeline"] == {"phases": [], "signals": [], "used_bytes": [[0.1, [2]], [0.2, [1]]]}


def test_texts_are_printable_and_bounded() -> None:
    found = documents.document(document(message="\x1b[31m\n" + "x" * 10_000, unit="\ud800"))
    assert found["message"].startswith("\\x1b[31m\\x0ax") and len(found["message"]) < 1200
    assert found["unit"] == "\\ud800"


_JUNK = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=8),
    lambda inner: some.lists(inner, max_size=4) | some.dictionaries(some.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def _paths(of: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = of.items() if isinstance(of, dict) else enumerate(of) if isinstance(of, list) else ()
    return [path, *(each for key, value in inner for each in _paths(value, (*path, key)))]


def _with(of: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    if isinstance(of, dict):
        return {**of, path[0]: _with(of[path[0]], path[1:], value)}
    return [_with(each, path[1:], value) if number == path[0] else each for number, each in enumerate(of)]


_PLACES = [path for path in _paths(document()) if path]


def _spoilt(changes: list[tuple[tuple[Any, ...], Any]]) -> Any:
    found: Any = document()
    for path, value in changes:
        try:
            found = _with(found, path, value)
        # An earlier change has taken the place away.
        except (KeyError, IndexError, TypeError):
            continue
    return found


hostile = some.lists(some.tuples(some.sampled_from(_PLACES), _JUNK), min_size=1, max_size=3).map(_spoilt)


@given(hostile | some.dictionaries(some.sampled_from(sorted(document())), _JUNK))
def test_whatever_a_record_says_it_can_be_shown(of: Any) -> None:
    """Nothing in it is a traceback, moves a terminal, or is proved that is not."""
    found = past.run(record(of, _UID="990"), at=1_796_106_605.0)
    assert found is not None
    assert set(found.document) == {*document(), "recorded_by"}
    assert documents.document(found.document) == found.document
    rows = [history._row(found.document), history._story(found._replace(document={**found.document, "run": ""}), True)]
    texts = [each.lead + each.text for row in rows for each in row]
    assert all(text.isprintable() for text in texts)
    assert past.proof(found, boot="0b3c" * 8)["proved"] is False
    json.dumps(past.proof(found, boot=""), allow_nan=False)


# Figures -------------------------------------------------------------------------------------------------------------


def test_what_was_freed_is_what_fell_from_the_highest_to_the_end() -> None:
    samples = [[0.0, [100, 7]], [1.0, [900, None]], [2.0, [300, 9]], [3.0, [500, None]]]
    found = documents.document(document(gpus=[gpu(0), gpu(1)], timeline={"used_bytes": samples}))
    assert past.freed(found) == 400
    assert past.freed(documents.document(document(timeline={}))) is None
    assert past.freed(documents.document(document(timeline={"used_bytes": [[0.0, [5]], [1.0, [9]]]}))) == 0


def test_who_was_ended_is_told_by_name_and_number() -> None:
    fates = ["terminated", "killed", "exited", "gone", "survived", None, "killed"]
    names = ["python3", "python3", "a", "b", "c", "d", "ray"]
    held = [holder(fate=fate, comm=name) for fate, name in zip(fates, names)]
    gone = past.ended(documents.document(document(holders=held)))
    assert len(gone) == 3 and past.names(gone) == "python3 ×2, ray"
    assert past.names([*gone, *gone, holder(comm="x"), holder(comm="y")], most=2) == "python3 ×4, ray ×2 and 2 more"


def test_a_sparkline() -> None:
    assert past.sparkline([100, 50, 0, None], most=100) == "█▄▁?"
    assert past.sparkline([0] * 10 + [100] + [0] * 10, most=100, width=7) == "▁▁▁█▁▁▁"
    assert past.sparkline([], most=0) == "" and past.sparkline([0], most=0) == "▁"


def test_the_bars_stand_for_equal_times_whenever_the_samples_were() -> None:
    points = [(0.0, 100), (7.0, 100), (7.5, 50), (10.0, 3)]
    assert past.resampled(points, until=10.0, count=10) == [100] * 8 + [50, 3]
    assert past.resampled([], until=10.0, count=10) == []
    assert past.resampled([(9.0, None)], until=10.0, count=2) == [None, None]


# What is proved ------------------------------------------------------------------------------------------------------


def test_a_proof() -> None:
    found = run()
    assert past.doubt(found) == ""
    proof = past.proof(found, boot="0b3c0b3c-0b3c-0b3c-0b3c-0b3c0b3c0b3c")
    assert proof["proved"] is True and proof["this_boot"] is True
    assert (proof["time"], proof["ended"]) == (1_796_106_600.5, 1_796_106_604.4)
    assert proof["journal"] == {"cursor": "s=1;i=2", "machine_id": "f00d" * 8, "hostname": "node1"}
    assert set(proof["gpus"][0]) == {
        "index", "uuid", "name", "used_bytes", "limit_bytes", "total_bytes", "unattributed_bytes", "clean",
    }  # fmt: skip
    assert past.proof(found, boot="beef")["this_boot"] is False


@pytest.mark.parametrize(
    ("changes", "fields", "said"),
    [
        ({}, {"_UID": "990"}, "uid 990"),
        ({"outcome": "bypassed"}, {}, "bypassed"),
        ({"outcome": "none", "gpus": []}, {}, "none"),
        ({"outcome": "protected", "exit": 75}, {}, "protected"),
        ({"exit": 75}, {}, "cleaned"),
        ({"exit": None}, {"GPUPRESTART_EXIT": ""}, "cleaned"),
        ({"outcome": None}, {"GPUPRESTART_OUTCOME": ""}, "unknown"),
        ({"gpus": []}, {}, "no GPU"),
        ({"gpus": [gpu(), gpu(3, clean=False)]}, {}, "GPU 3"),
        ({"gpus": [gpu(clean=None)]}, {}, "GPU 0"),
        ({"gpus": [{**gpu(clean="true"), "index": None}]}, {}, "GPU ?"),
        ({"verb": None}, {}, "earlier gpuprestart"),
        ({}, {"GPUPRESTART_VERDICT": ""}, "earlier gpuprestart"),
    ],
)
def test_what_is_no_proof(changes: dict[str, Any], fields: dict[str, str], said: str) -> None:
    found = run(document(**changes), **fields)
    assert said in past.doubt(found)
    assert past.proof(found, boot="")["proved"] is False


def test_a_look_is_no_start() -> None:
    assert run(document(verb="check")).audit and not run().audit and not run(GPUPRESTART_VERDICT="").audit


# Since when ----------------------------------------------------------------------------------------------------------

NOW = time.mktime((2026, 12, 1, 14, 30, 15, 0, 0, -1))


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-11-30 08:05", (2026, 11, 30, 8, 5, 0)),
        ("2026-11-30 08:05:06", (2026, 11, 30, 8, 5, 6)),
        ("2026-11-30T08:05", (2026, 11, 30, 8, 5, 0)),
        ("  2026-11-30   08:05 ", (2026, 11, 30, 8, 5, 0)),
        ("2026-11-30", (2026, 11, 30, 0, 0, 0)),
        ("08:05", (2026, 12, 1, 8, 5, 0)),
        ("today", (2026, 12, 1, 0, 0, 0)),
        ("yesterday", (2026, 11, 30, 0, 0, 0)),
        ("2h", (2026, 12, 1, 12, 30, 15)),
        ("2h ago", (2026, 12, 1, 12, 30, 15)),
        ("-2h", (2026, 12, 1, 12, 30, 15)),
        ("30 min", (2026, 12, 1, 14, 0, 15)),
        ("3d", (2026, 11, 28, 14, 30, 15)),
    ],
)
def test_a_time_is_said_as_people_say_it(text: str, moment: tuple[int, ...]) -> None:
    assert past.since(text, now=NOW) == time.mktime((*moment, 0, 0, -1))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "soon", "2026-13-01", "12 parsecs", "-", "9999d9", "25:00", "1e9h", "\x1b[31m"])
def test_what_is_no_time_is_told_with_what_would_be(text: str) -> None:
    with pytest.raises(ValueError, match="is no time .*yesterday") as caught:
        past.since(text, now=NOW)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("text", ["2026-12-02", "23:59", "9999-12-31 23:59"])
def test_the_future_has_no_runs(text: str) -> None:
    with pytest.raises(ValueError, match="in the future"):
        past.since(text, now=NOW)


@pytest.mark.parametrize("text", ["1970-01-01 00:00", "1969-12-31"])
def test_before_the_epoch_is_the_beginning(text: str) -> None:
    assert past.since(text, now=NOW) == 0.0


@given(some.text(max_size=30))
def test_any_text_is_a_time_or_a_sentence(text: str) -> None:
    try:
        assert 0.0 <= past.since(text, now=NOW) <= NOW
    except ValueError as error:
        assert "(allowed: " in str(error)
