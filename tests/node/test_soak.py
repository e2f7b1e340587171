"""The endurance run in short, and that its checker finds what is put in: a false verdict, a leak, a broken promise."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.node import soak, soak_plan
from tests.node.machine import Node
from tests.node.soak_plan import Actor, Place, Plan, plan
from tests.node.soak_stage import Stage
from tests.node.soak_truth import Member, Seen, Told, faults, not_flat, permitted

MIB = 1 << 20
#: One whose first scenes have nearly everything, and few of which last to their deadline.
SEED = 379
RUNS = 25
UUIDS = ("GPU-aaaa", "GPU-bbbb")


# Scenes --------------------------------------------------------------------------------------------------------------


def test_a_scene_follows_from_seed_and_number_alone() -> None:
    assert [plan(7, number) for number in (5, 3, 900)] == [plan(7, number) for number in (5, 3, 900)]
    assert plan(7, 3) != plan(7, 4) != plan(8, 4)


def test_a_thousand_scenes_have_everything() -> None:
    plans = [plan(soak.SEED, number) for number in range(1000)]
    actors = [actor for each in plans for actor in each.actors]
    assert {actor.role for actor in actors} == set(soak_plan.ROLES)
    assert {actor.form for actor in actors} == set(soak_plan.FORMS)
    assert {each.fault for each in plans} == set(soak_plan.FAULTS)
    assert {each.event for each in plans} == set(soak_plan.EVENTS)
    assert {each.release for each in plans} == set(soak_plan.RELEASES)
    assert {len(each.selected) for each in plans} == set(range(9))
    assert {each.by for each in plans} == {"index", "uuid", "all", "none"}
    assert any(each.shell for each in plans) and any(each.measured for each in plans)


# The soak itself -----------------------------------------------------------------------------------------------------


def test_a_short_soak_and_that_it_goes_on_where_it_stopped(
    node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "state"

    def run(*options: str) -> int:
        return soak.main(["--seed", str(SEED), "--state", str(path), *options])

    assert run("--runs", "5") == soak.RIGHT, capsys.readouterr().out
    first = path.read_text()
    # A run that was being put down when everything ended.
    path.write_text(first + '{"number": 5, "outc')
    assert run("--runs", str(RUNS), "--minutes", "0") == soak.UNFINISHED
    assert run("--runs", str(RUNS)) == soak.RIGHT, capsys.readouterr().out
    assert path.read_text().startswith(first)
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert [line["number"] for line in lines] == list(range(RUNS))
    assert [line["faults"] for line in lines] == [[]] * RUNS
    assert {outcome for line in lines for outcome in line["outcomes"]} >= {"clean", "cleaned", "protected"}
    assert f"{RUNS} of {RUNS} runs" in capsys.readouterr().out


def test_another_seed_starts_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "state"
    state = soak.State(path, seed=1)
    state.append({"number": 0})
    assert soak.State(path, seed=1).lines == [{"number": 0}]
    assert capsys.readouterr().out == ""
    assert soak.State(path, seed=2).lines == []
    assert "starting over" in capsys.readouterr().out


@pytest.fixture
def folder(node: Node) -> Iterator[str]:
    """Where a program lies that is run in the place of the hook."""
    node.run(["mkdir", "-p", "/run/t-soak"])
    yield "/run/t-soak"
    node.run(["sh", "-c", "systemctl stop 't-left-*'; rm -rf /run/t-soak /run/gpuprestart"])


#: A stale process on the unit's GPU, and a live service beside it.
DIRTY = Plan(0, 3, ((0, None),), "index", (Actor("stale", ((0, None),)), Actor("live", ((1, None),))))


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        # As it should be, by way of the same shell.
        ('exec /usr/bin/gpuprestart "$@"', []),
        # It looks at a GPU that is not the unit's, and is as clean as it says.
        ('exec /usr/bin/gpuprestart "$@" --gpus 2', ["passed with 903 MiB in use on GPU 0", "judged"]),
        ('/usr/bin/gpuprestart "$@" >/dev/null; exit 0', ["no verdict, status 0, started True"]),
        ('/usr/bin/gpuprestart "$@"; exit 3', ["ended with status 3 and told 0"]),
        ('systemctl kill --signal=KILL "t-live-*"; exec /usr/bin/gpuprestart "$@"', ["live", "is dead"]),
        ('systemctl kill --signal=KILL "t-old-*"; exec /usr/bin/gpuprestart "$@"', ["no record tells of a signal"]),
    ],
)
def test_a_hook_that_is_wrong_is_found(node: Node, folder: str, hook: str, words: Sequence[str]) -> None:
    found = _played(node, folder, hook)
    assert bool(found) is bool(words), found
    assert all(word in "; ".join(found) for word in words), found


@pytest.mark.parametrize(
    ("leak", "words"),
    [
        (
            "mkdir /run/t-soak/x; cp /bin/sleep /run/t-soak/x/gpuprestart; /run/t-soak/x/gpuprestart 1000 &",
            "1 processes gpuprestart left",
        ),
        ("touch /run/gpuprestart/claims/.GPU-x.17", "claims/.GPU-x.17 left"),
        ("for lock in /run/gpuprestart/locks/*; do setsid flock $lock sleep 1000 & done; sleep 0.3", "is held"),
        ("systemctl start t-left-over", "unit t-left-over.service left"),
    ],
)
def test_what_a_hook_leaves_is_found(node: Node, folder: str, leak: str, words: str) -> None:
    node.write("/etc/systemd/system/t-left-over.service", "[Service]\nExecStart=/bin/sleep 1000\n")
    found = _played(node, folder, f'/usr/bin/gpuprestart "$@"; status=$?\n{leak}\nexit $status')
    assert any(words in each for each in found), found


def _played(node: Node, folder: str, hook: str) -> list[str]:
    """What is wrong with a start that has this in the place of its hook."""
    node.write(f"{folder}/gpuprestart", f"#!/bin/sh\n{hook}\n", mode=0o755)
    return faults(Stage(node, hook=f"{folder}/gpuprestart").play(DIRTY).seen)


# The checker ---------------------------------------------------------------------------------------------------------

STALE_PID, LIVE_PID, WATCHER_PID = 100, 200, 300
OLD, LIVE, SERVER = "t-old.service", "t-live.service", "t-server.service"


def _books(*charged: tuple[int, int, int]) -> dict[str, Any]:
    """Two GPUs with so many MiB charged: (PID or 0 for nobody, slot, MiB)."""
    return {
        "gpus": [
            {"slot": slot, "order": slot, "uuid": uuid, "baseline": 3 * MIB, "instances": []}
            for slot, uuid in enumerate(UUIDS)
        ],
        "allocations": [
            {
                "gpu": slot,
                "instance": None,
                "bytes": mib * MIB,
                "owners": [[pid, 1]] if pid else [],
                "release_delay": 0.05 if pid else None,
            }
            for pid, slot, mib in charged
        ],
    }


def _record(event: str, **fields: str) -> dict[str, str]:
    return {"GPUPRESTART_EVENT": event, **fields}


def _signal(pid: int, name: str = "SIGTERM") -> dict[str, str]:
    return _record("holder-signalled", HOLDER_PID=str(pid), GPUPRESTART_SIGNAL=name)


def _told(outcome: str, status: int, *records: dict[str, str], message: str = "", **changes: Any) -> Told:
    verdict = {
        "outcome": outcome,
        "exit": status,
        "message": message,
        "hints": ["do something"] if status else [],
        "gpus": [{"uuid": UUIDS[0], "index": 0}],
    }
    told = Told(SERVER, ((0, None),), status, status == 0, verdict, [*records, _record("verdict")])
    return told._replace(**changes)


def _seen(*told: Told, after: Sequence[tuple[int, int, int]] = (), stale: bool = False, **changes: Any) -> Seen:
    """A stale holder on the unit's GPU 0, a live one on GPU 1, and a live one that has nodes open and no memory."""
    members = {
        STALE_PID: Member("stale", OLD, stale),
        LIVE_PID: Member("live", LIVE, True),
        WATCHER_PID: Member("watcher", "t-watcher.service", True),
    }
    seen = Seen(
        plan=DIRTY,
        members=members,
        before=_books((STALE_PID, 0, 900), (LIVE_PID, 1, 900)),
        after=_books((LIVE_PID, 1, 900), *after),
        told=told,
        claimed={},
        claims={(0, None): SERVER},
        left=[],
    )
    return seen._replace(**changes)


RIGHT = _told("cleaned", 0, _signal(STALE_PID))
LEAK = ((STALE_PID, 0, 900), (0, 0, 500), (LIVE_PID, 1, 900))


def _dead(pid: int) -> dict[int, Member]:
    members = dict(_seen(RIGHT).members)
    return {**members, pid: members[pid]._replace(alive=False)}


def test_a_start_that_was_right_is_left_alone() -> None:
    assert faults(_seen(RIGHT)) == []
    blocked = _books((STALE_PID, 0, 900), (LIVE_PID, 0, 900))
    refused = _told("protected", 75, message=f"GPU 0 is held by python3[{LIVE_PID}]")
    assert faults(_seen(refused, stale=True, before=blocked)) == []
    leaking = _told("not-freed", 75, _signal(STALE_PID), message="GPU 0: 503 MiB used")
    assert faults(_seen(leaking, before=_books(*LEAK), after=[(0, 0, 500)])) == []


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (_seen(RIGHT, after=[(0, 0, 62)]), "passed with 65 MiB in use on GPU 0, limit 64 MiB"),
        (_seen(RIGHT, stale=True), "passed beside stale 100"),
        (_seen(RIGHT, claimed={(0, None): "t-other.service"}), "had been given to t-other.service"),
        (_seen(RIGHT, claims={}), "is claimed by None"),
        (_seen(_told("clean", 0, _signal(STALE_PID))), "clean instead of cleaned"),
        (_seen(RIGHT._replace(status=75)), "ended with status 75 and told 0"),
        (_seen(_told("cleaned", 75, _signal(STALE_PID))), "cleaned with status 75"),
        (_seen(RIGHT._replace(started=False)), "started is False"),
        (_seen(RIGHT._replace(verdict={})), "no verdict"),
        (_seen(_told("cleaned", 0, _signal(STALE_PID), places=((1, None),))), "judged ['GPU 0'] instead of ['GPU 1']"),
        (_seen(_told("cleaned", 0, _signal(STALE_PID), _signal(LIVE_PID))), "SIGTERM to 200, which is live"),
        (_seen(_told("cleaned", 0, _signal(STALE_PID), _signal(WATCHER_PID))), "SIGTERM to 300, which is watcher"),
        (_seen(_told("cleaned", 0, _signal(STALE_PID), _signal(999))), "SIGTERM to 999, whom the scene did not start"),
        (_seen(_told("cleaned", 0, _signal(STALE_PID, "SIGKILL"))), "SIGKILL to 100 before SIGTERM"),
        (_seen(_told("cleaned", 0)), "no record tells of a signal"),
        (_seen(RIGHT, members=_dead(LIVE_PID)), "live 200 of t-live.service is dead"),
        (_seen(RIGHT, members=_dead(WATCHER_PID)), "watcher 300 of t-watcher.service is dead"),
        (
            _seen(
                _told("clean", 0, _signal(STALE_PID)), before=_books((STALE_PID, 1, 900)), after=[(STALE_PID, 1, 900)]
            ),
            "SIGTERM to 100, which has nothing on a selected GPU",
        ),
        (
            _seen(
                _told("protected", 75, _signal(STALE_PID), message=LIVE),
                before=_books((STALE_PID, 0, 900), (LIVE_PID, 0, 900)),
            ),
            "signals with protected",
        ),
        (
            _seen(_told("protected", 75, message="held"), stale=True, before=_books((LIVE_PID, 0, 900))),
            "names nobody: held",
        ),
        (
            _seen(
                _told("not-freed", 75, _signal(STALE_PID), message="memory is not back"),
                before=_books(*LEAK),
                after=[(0, 0, 500)],
            ),
            "names no GPU",
        ),
        (
            _seen(_told("unattributed", 75, message="GPU 0"), stale=True, before=_books(*LEAK), after=LEAK),
            "unattributed instead of not-freed",
        ),
        (_seen(_told("cleaned", 0, _signal(STALE_PID), *[_record("warning")] * 40)), "records, where"),
        (_seen(_told("cleaned", 0, _signal(STALE_PID), _record("verdict"))), "2 verdicts in the journal"),
        (_seen(RIGHT, left=["file x left"]), "file x left"),
        (_seen(RIGHT, _told("not-freed", 75, checking=True, started=None)), "check wrote 1 records"),
        (
            _seen(_told("unknown", 69, message="no"), stale=True, plan=DIRTY._replace(fault="hang")),
            "does not say what could not be measured",
        ),
        (_seen(_told("config", 78, message="no"), stale=True, plan=DIRTY._replace(fault="policy")), "what is wrong"),
        (
            _seen(_told("interrupted", 75, message="no"), stale=True, plan=DIRTY._replace(event="stop")),
            "does not say by what",
        ),
        (_seen(_told("interrupted", 75, message="SIGTERM"), stale=True), "interrupted instead of cleaned"),
    ],
)
def test_what_is_put_in_is_found(seen: Seen, words: str) -> None:
    found = faults(seen)
    assert any(words in each for each in found), found


NOBODY = (0, 0, 500)
STOPPING = {STALE_PID: Member("stopping", OLD, False)}
SECOND = DIRTY._replace(event="second", second=((0, None),), actors=(Actor("leak", ((0, None),)),))
BESIDE = _told("protected", 75, message=SERVER, unit="t-second.service")


@pytest.mark.parametrize(
    ("seen", "outcomes"),
    [
        (_seen(RIGHT), {"cleaned"}),
        (_seen(RIGHT, plan=DIRTY._replace(event="stop")), {"cleaned", "interrupted"}),
        (_seen(RIGHT, before=_books((LIVE_PID, 1, 900))), {"clean"}),
        (_seen(RIGHT, before=_books(NOBODY)), {"unattributed"}),
        (_seen(RIGHT, before=_books(NOBODY, (STALE_PID, 0, 900))), {"not-freed"}),
        # Whether it was seen before it was gone is not known.
        (_seen(RIGHT, before=_books(NOBODY, (STALE_PID, 0, 900)), members=STOPPING), {"not-freed", "unattributed"}),
        (_seen(RIGHT, before=_books((LIVE_PID, 0, 900))), {"protected"}),
        (_seen(RIGHT, BESIDE, plan=SECOND._replace(actors=())), {"cleaned", "clean", "protected"}),
        # Whoever comes second finds memory of nobody whom it has seen, or has no time left.
        (
            _seen(RIGHT, BESIDE, plan=SECOND, before=_books(NOBODY, (STALE_PID, 0, 900))),
            {"not-freed", "protected", "unattributed"},
        ),
        (_seen(RIGHT, BESIDE, plan=SECOND), {"cleaned", "clean", "protected", "not-freed"}),
    ],
)
def test_what_must_come_out(seen: Seen, outcomes: set[str]) -> None:
    assert permitted(seen, seen.told[0]) == outcomes


def test_a_refusal_without_a_hint_is_found() -> None:
    told = _told("protected", 75, message=LIVE)
    seen = _seen(told, stale=True, before=_books((LIVE_PID, 0, 900)))
    assert faults(seen) == []
    told.verdict["hints"].clear()
    assert faults(seen) == [f"{SERVER}: no hint"]


def test_of_two_units_on_one_gpu_one_starts() -> None:
    places: tuple[Place, ...] = ((0, None),)
    first = _told("cleaned", 0, _signal(STALE_PID))
    second = _told("protected", 75, message=SERVER, unit="t-second.service", places=places)
    beside = DIRTY._replace(event="second", second=places)
    assert faults(_seen(first, second, plan=beside)) == []
    both = (first, _told("clean", 0, unit="t-second.service", places=places))
    assert any("both units" in each for each in faults(_seen(*both, plan=beside)))
    neither = (_told("protected", 75, message="t-second.service"), second)
    assert any("neither unit" in each for each in faults(_seen(*neither, stale=True, plan=beside)))


@pytest.mark.parametrize("what", ["processes", "units", "descriptors", "rss_kib"])
def test_what_grows_is_found(what: str) -> None:
    level = {"processes": 30, "units": 130, "descriptors": 90, "rss_kib": 17_000}
    flat: list[dict[str, Any]] = [
        {**level, "faults": [], "outcomes": ["clean"], "number": number} for number in range(1000)
    ]
    # Scenes differ, and the memory of some is not taken down.
    for number, line in enumerate(flat):
        line["rss_kib"] = None if number % 3 else 17_000 + number % 7 * 100
    assert not_flat(flat) == []
    assert soak.summary(flat, runs=1000)[1] == soak.RIGHT
    leaking = [{**line, what: (line[what] or 17_000) + line["number"] * level[what] // 1000} for line in flat]
    assert len(not_flat(leaking)) == 1 and what in not_flat(leaking)[0]
    assert soak.summary(leaking, runs=1000)[1] == soak.WRONG
    # The first few differ by chance.
    assert not_flat(flat[:10] + leaking[-10:]) == []


def test_how_a_soak_ends() -> None:
    line = {"number": 0, "outcomes": ["clean"], "faults": []}
    assert soak.summary([line], runs=1)[1] == soak.RIGHT
    assert soak.summary([line], runs=2)[1] == soak.UNFINISHED
    text, status = soak.summary([line, {**line, "number": 1, "faults": ["it is wrong"]}], runs=3)
    assert status == soak.WRONG and "run 1: it is wrong" in text
