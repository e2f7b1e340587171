"""Every sentence that a person may read, as it is read: scenes of said.py and said_besides.py, held by messages/*.txt.

A block for each scene: what the journal shows, with its priority, the hints, and STATUS=. Whoever changes a sentence
renews the files with ``python -m tests.unit.test_messages --renew``, and reads what has become of it as somebody would
who was woken by it. No sentence of the source may be missing from them.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Callable

import pytest

import gpuprestart
from gpuprestart import events, judge, serverfiles, table
from gpuprestart.host import nvml
from gpuprestart.model import Action, Outcome, OwnerKind

from . import said, said_besides
from .said import Scene

SNAPSHOTS = Path(__file__).parent / "messages"
SOURCES = Path(gpuprestart.__file__).parent

#: The file of each kind of scene, and who makes them.
SCENES: dict[str, Callable[[], Iterable[Scene]]] = {
    "proved": said.proved,
    "protected": said.protected,
    "refused": said.refused,
    "owners": said.table,
    "rules": said.rules_of_the_site,
    "runs": said_besides.of_the_run,
    "progress": said_besides.waited_for,
    "ports": said_besides.ports_and_processes,
    "room": said_besides.room,
    "driver": said_besides.of_the_driver,
    "files": said_besides.of_files,
    "residue": said_besides.leftovers,
    "selection": said_besides.selections,
    "reset": said_besides.last_resorts,
    "before-kill": said_besides.before_kills,
    "settings": said_besides.of_units,
    "verbs": said_besides.of_verbs,
}

#: Modules whose every sentence is in one of the files.
SPEAKING = (
    "before_kill",
    "driverfacts",
    "events",
    "findings",
    "hook",
    "judge",
    "refusing",
    "require",
    "reset",
    "residue",
    "rules",
    "selection",
    "serverfiles",
    "settings",
    "table",
    "verdict",
)

#: What is in no scene, because it is no sentence of a run.
ELSEWHERE = {
    # Words for who reads the code.
    "judge": tuple(role.value for role in judge.Role),
}


def text_of(name: str) -> str:
    blocks = ["\n".join([f"== {scene.title}", *scene.lines, ""]) for scene in SCENES[name]()]
    return "\n".join(blocks)


def everything() -> str:
    return "\n".join((SNAPSHOTS / f"{name}.txt").read_text(encoding="utf-8") for name in SCENES)


@pytest.mark.parametrize("name", SCENES)
def test_the_sentences_are_those_that_were_read(name: str) -> None:
    assert text_of(name) == (SNAPSHOTS / f"{name}.txt").read_text(encoding="utf-8")


def test_no_other_file_lies_about() -> None:
    assert {path.stem for path in SNAPSHOTS.iterdir()} == set(SCENES)


# That nothing is missing ---------------------------------------------------------------------------------------------


def test_every_outcome_is_told() -> None:
    told = set(re.findall(r"^(?:crit|err|warning|notice|info) +([a-z-]+): ", everything(), re.MULTILINE))
    assert {outcome.value for outcome in Outcome} <= told


def test_every_kind_of_record_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    made: set[str] = set()
    whole = events._record

    def record(event: str, *arguments: object) -> events.Record:
        made.add(event)
        return whole(event, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(events, "_record", record)
    for name in SCENES:
        text_of(name)
    assert made == set(events.MESSAGE_IDS)


def test_every_kind_of_owner_is_told_with_every_action_that_it_may_come_to(monkeypatch: pytest.MonkeyPatch) -> None:
    came: set[tuple[OwnerKind, Action]] = set()
    rows = dict(table._ROWS)

    def noted(kind: OwnerKind) -> Callable[..., table.Row]:
        def row(*arguments: object) -> table.Row:
            found = rows[kind](*arguments)  # type: ignore[arg-type]
            came.add((kind, found[0]))
            return found

        return row

    monkeypatch.setattr(table, "_ROWS", {kind: noted(kind) for kind in rows})
    for name in ("owners", "proved", "protected"):
        text_of(name)
    both = {OwnerKind.OWN_PREVIOUS, OwnerKind.CONTAINER, OwnerKind.SLURM, OwnerKind.NONE}
    wanted = {(kind, action) for kind in both for action in (Action.KILL, Action.REFUSE)}
    wanted |= {(OwnerKind.UNIT, action) for action in (Action.KILL, Action.REFUSE, Action.WAIT)}
    wanted |= {(OwnerKind.SESSION, action) for action in (Action.KILL, Action.REFUSE, Action.SPARE)}
    wanted |= {(OwnerKind.USER, action) for action in (Action.REFUSE, Action.SPARE)}
    assert came == wanted | {(OwnerKind.OWN_CURRENT, Action.REFUSE), (OwnerKind.UNKNOWN, Action.REFUSE)}


@pytest.mark.parametrize("module", SPEAKING)
def test_every_sentence_of_the_source_is_told(module: str) -> None:
    told = everything()
    missing = [each for each in sentences(module) if each not in told and each not in ELSEWHERE.get(module, ())]
    assert missing == []


def sentences(module: str) -> list[str]:
    """What stands between the braces of every text of a module that has two words at least; no docstrings."""
    tree = ast.parse((SOURCES / f"{module}.py").read_text(encoding="utf-8"))
    comments = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in comments
    ]
    pieces = [piece for text in texts for piece in re.split(r"\{[a-z0-9]*\}", text)]
    return [piece for piece in pieces if re.search(r"[a-z]{2,},? [a-z]{2,}", piece)]


def test_every_fault_of_the_driver_is_told_with_its_remedy() -> None:
    told = everything()
    assert [remedy for remedy in (*nvml.REMEDIES.values(), nvml.LOOK) if remedy not in told] == []


def test_every_fault_of_a_file_is_told() -> None:
    told = set(said_besides.OF_FILES) | set(said_besides.OF_PROGRAMS)
    assert told == set(serverfiles._FAULTS)


# What every one of them has to be ------------------------------------------------------------------------------------


def verdicts() -> list[str]:
    """Of every scene, what stands in ``systemctl status`` and ends a start."""
    return re.findall(r"^    STATUS=(At .* refused the start: .*)$", everything(), re.MULTILINE)


def test_the_first_200_characters_of_a_refusal_tell_the_outcome_and_what_it_is_about() -> None:
    about = re.compile(
        r"GPUs? [0-9]|[\w:.-]+\[\d+\]|[\w@.-]+\.service|PID \d|require\.|VISIBLE_DEVICES|/\w+|gpus\.select"
        r"|driver|NVML|systemd|th[ei]s? machine|the GPUs|--unit|deadline|without a proof|locks and claims|no process"
    )
    for line in verdicts():
        seen = line[:200]
        assert re.search(r"refused the start: [a-z-]+: ", seen), line
        assert about.search(seen.partition("refused the start: ")[2]), line


def test_whoever_is_refused_a_start_reads_what_to_do() -> None:
    assert len(verdicts()) > 100
    assert [line for line in verdicts() if "; hint: " not in line] == []


def test_every_line_is_fit_for_a_terminal() -> None:
    assert all(line.isprintable() for line in everything().splitlines())


# The catalog ---------------------------------------------------------------------------------------------------------

#: What each kind of record means, as ``journalctl -x`` adds it.
ENTRIES = {
    entry.partition("\n")[0]: entry
    for entry in re.split(
        r"^-- ", (SOURCES.parent / "units/gpuprestart.catalog").read_text("utf-8"), flags=re.MULTILINE
    )
}


@pytest.mark.parametrize("event", events.MESSAGE_IDS)
def test_the_catalog_says_of_every_kind_what_to_do(event: str) -> None:
    """A command on a line of its own, or that nothing has to be done; after a paragraph about what has happened."""
    entry = ENTRIES[events.MESSAGE_IDS[event]]
    assert re.search(r"^ {4}(?:gpuprestart|journalctl|systemctl|nvidia-smi|cat|ls|rm) ", entry, re.MULTILINE) or (
        re.search(r"Nothing\s+has\s+to\s+be\s+done", entry)
    )
    assert entry.count("\n\n") >= 2


def test_the_catalog_has_words_for_every_outcome() -> None:
    words = dict(
        re.findall(r"^([a-z-]+): ((?:.+\n(?: {4}.+\n)*))", ENTRIES[events.MESSAGE_IDS["verdict"]], re.MULTILINE)
    )
    assert [outcome.value for outcome in Outcome if len(words.get(outcome.value, "")) < 80] == []


def renew() -> None:
    """Write all of them anew, for whoever has changed a sentence: to be read, every one."""
    SNAPSHOTS.mkdir(exist_ok=True)
    for path in SNAPSHOTS.iterdir():
        path.unlink()
    for name in SCENES:
        (SNAPSHOTS / f"{name}.txt").write_text(text_of(name), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--renew"]:
        raise SystemExit("python -m tests.unit.test_messages --renew")
    renew()
