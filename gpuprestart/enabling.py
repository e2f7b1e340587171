"""Putting the hook in front of services by a drop-in each, and taking these away again.

It shows what it writes, and has systemd read it once before it stands where it counts. Nothing is written where
anything is refused. What somebody else has written, or edited, is never written over.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import Optional, TextIO

from . import dropin, events, owners, placement, service, targets, unitlines
from .commandline import Command
from .dropin import State
from .host import files, procfs
from .host.journal import Journal
from .host.systemd import Systemd, SystemdError
from .model import Outcome, Refusal
from .placement import Found
from .targets import Target
from .text import printable

_RELOAD = "systemctl daemon-reload (it can take the GPUs away from containers that are running)"

#: Every drop-in of our name, whoever has written it.
enabled = placement.enabled


# enable --------------------------------------------------------------------------------------------------------------


def enable(command: Command, systemd: Systemd, *, out: TextIO) -> None:
    """Write the drop-ins, or say that they are there. All units are looked at before anything is written."""
    wanted = _targets(command.units, systemd)
    if command.now and not command.dry_run and any(each.stale and each.found is None for each in wanted):
        systemd.reload()
        wanted = _targets(command.units, systemd)
    texts: dict[str, str] = {}
    for each in wanted:
        there = _there(each)
        if there is not None:
            _say(f"{each.name} has the hook already, {there}. Nothing was changed.", out)
        else:
            composed = _composed(each)
            texts[each.path] = composed.text
            _show(each, composed, out)
    missing = [each for each in wanted if each.path in texts]
    if missing:
        _verify(missing, texts, systemd)
    if command.dry_run:
        return
    placement.put(texts)
    for path in texts:
        _say(f"{path} is written.", out)
    unread = [each for each in wanted if each.path in texts or (each.found is not None and not each.known)]
    if unread:
        _have_read(command, systemd, out, "is written")
    if unread and command.now:
        _prove(unread, systemd)


def _targets(names: Sequence[str], systemd: Systemd) -> list[Target]:
    found: dict[str, Target] = {}
    for name in dict.fromkeys(map(owners.full_name, names)):
        target = targets.of(name, systemd)
        found.setdefault(target.name, target)
    return list(found.values())


def _there(target: Target) -> Optional[str]:
    """Where the hook is already, or None. Raises Refusal where it can neither be there nor be put there."""
    found = target.found
    if found is not None and found.state is State.INTACT:
        return f"by {found.path}"
    if found is not None and _hook_in(found) is not None:
        return f"by {found.path}, which is {found.state.value}"
    others = [each for each in target.members if any(command.ours for command in each.unit.start_pre)]
    if found is not None and not others:
        raise Refusal(
            Outcome.CONFIG,
            f"{found.path} is {found.state.value}, and does not run the hook",
            [f"move it away, then gpuprestart enable {target.name}"],
        )
    if target.stale:
        raise Refusal(
            Outcome.CONFIG,
            f"the files of {target.name} have changed since systemd has read them, so it cannot be asked about them",
            [f"{_RELOAD}, or gpuprestart enable {target.name} --now"],
        )
    places = [str(dropin.hook_of(each.lines) or f"systemctl cat {each.unit.name}") for each in others]
    if 0 < len(others) < len(target.members):
        hint = f"take it out there, or enable the others of {target.name} by their own names"
        raise Refusal(Outcome.CONFIG, f"some of {target.name} would run the hook twice: {'; '.join(places)}", [hint])
    return f"by another file: {'; '.join(dict.fromkeys(places))}" if others else None


def _hook_in(found: Found) -> Optional[unitlines.Line]:
    return dropin.hook_of(unitlines.read([(found.path, found.text)]))


def _composed(target: Target) -> dropin.DropIn:
    for each in target.members:
        undoing = dropin.undoing(each.lines)
        if undoing is not None:
            raise Refusal(
                Outcome.CONFIG,
                f"{undoing.file}:{undoing.number} empties ExecStartPre= of {each.unit.name}, so the hook would not run",
                [f"give that file a name that sorts before {dropin.NAME}"],
            )
    return dropin.compose(target.name, target.members, makes_folder=placement.lacks_folder(target.name))


def _show(target: Target, composed: dropin.DropIn, out: TextIO) -> None:
    print(f"{target.path}:\n", file=out)
    for line in composed.text.splitlines():
        print(f"    {printable(line, 10_000)}".rstrip(), file=out)
    print(file=out)
    if target.asked != target.name:
        _say(f"Note: {target.asked} is another name of {target.name}.", out)
    if "@" not in target.name and (names := [each.unit.name for each in target.members]) != [target.name]:
        _say(f"Note: this is for {', '.join(map(service.called, names))}, and for all to come that begin so.", out)
    for remark in composed.remarks:
        _say(f"Note: {remark}", out)


def _verify(wanted: Sequence[Target], texts: Mapping[str, str], systemd: Systemd) -> None:
    """Have systemd read the units without their drop-ins and with them, in a folder aside. Raises Refusal with what it
    has to say of the drop-ins."""
    aside = tempfile.mkdtemp(prefix="gpuprestart-")
    try:
        units = [member.unit for target in wanted for member in target.members]
        for fragment in {unit.fragment for unit in units}:
            os.symlink(fragment, f"{aside}/{os.path.basename(fragment)}")
        paths = [f"{aside}/{unit.name}" for unit in units]
        before = systemd.verify(paths)
        for path, text in texts.items():
            place = aside + path[len(placement.FOLDER) :]
            os.mkdir(os.path.dirname(place), 0o755)
            files.put(place, text.encode("utf-8", "surrogateescape"))
        after = systemd.verify(paths)
    finally:
        shutil.rmtree(aside)
    ours = (dropin.NAME, *(unit.name for unit in units))
    complaints = [
        line.replace(aside, placement.FOLDER)
        for line in after
        if line not in before and any(name in line for name in ours)
    ]
    if complaints:
        raise Refusal(Outcome.CONFIG, f"systemd would not take it, so nothing was written: {'; '.join(complaints)}")


def _prove(wanted: Sequence[Target], systemd: Systemd) -> None:
    """systemd has read everything: say so if it does not run the hook after all."""
    for name in (each.unit.name for target in wanted for each in target.members):
        unit = service.from_properties(name, systemd.everything(name))
        if not any(each.ours for each in unit.start_pre):
            hint = f"systemctl cat {name} shows what it has read"
            raise Refusal(Outcome.CONFIG, f"systemd has read the drop-in, and {name} does not run the hook", [hint])


# disable -------------------------------------------------------------------------------------------------------------


def disable(command: Command, systemd: Systemd, *, out: TextIO) -> None:
    """Take the drop-ins away. It works for units that are gone, and for all of them also where systemd is not up."""
    if command.everything:
        _disable_all(command, systemd, out=out)
        return
    asked = {name: _to_disable(name, systemd) for name in dict.fromkeys(map(owners.full_name, command.units))}
    found = {each.path: each for each in asked.values() if each is not None}
    for each in found.values():
        if each.state is not State.INTACT:
            hint = f"rm {each.path}, if nobody needs it"
            raise Refusal(
                Outcome.CONFIG, f"{each.path} is {each.state.value}, so it stays, and so does the rest", [hint]
            )
    for each in found.values():
        if not command.dry_run:
            placement.remove(each)
            _record(each.unit)
        _say(f"{each.path} {'would be' if command.dry_run else 'is'} removed.", out)
    for name, there in asked.items():
        if there is None:
            _say(f"{name} has no drop-in by gpuprestart enable. Nothing was changed.", out)
        for line in _hooks_elsewhere(there.unit if there else name, systemd):
            _say(f"Note: {name} has the hook by another file too: {line}", out)
    if (found or any(_still_loaded(name, systemd) for name in asked)) and not command.dry_run:
        _have_read(command, systemd, out, "is gone")


def _still_loaded(name: str, systemd: Systemd) -> bool:
    """Whether systemd goes on with a drop-in that has gone, because nobody has told it; if it does not say: no."""
    try:
        target = targets.of(name, systemd)
    except (SystemdError, Refusal):
        return False
    return target.found is None and target.known


def _to_disable(name: str, systemd: Systemd) -> Optional[Found]:
    """What is to go. systemd is asked only for a name that has no drop-in of its own, so a unit may be gone."""
    if "/" in name or not name.endswith(".service"):
        raise Refusal(Outcome.CONFIG, f"{name!r} is no name of a service", ["name one such as sglang-qwen.service"])
    return placement.look(name) or targets.of(name, systemd).found


def _hooks_elsewhere(name: str, systemd: Systemd) -> list[str]:
    """The lines of other files by which a unit has the hook; where systemd does not answer, nobody can tell."""
    try:
        members = targets.of(name, systemd).members
    except (SystemdError, Refusal):
        return []
    return list(dict.fromkeys(str(line) for each in members if (line := dropin.hook_of(each.lines)) is not None))


def _disable_all(command: Command, systemd: Systemd, *, out: TextIO) -> None:
    """For when the program goes: no unit is left that cannot start without it, and nobody who has not been told.

    What was edited is renamed: systemd does not read it any more, and nothing is lost.
    """
    gone = []
    for each in enabled():
        if each.state is State.FOREIGN:
            _say(f"{each.path} is {each.state.value}, so it stays.", out)
            if _hook_in(each) is not None:
                _say(f"Without gpuprestart {each.unit} does not start then (203/EXEC): rm {each.path}", out)
            continue
        gone.append(each.unit)
        if command.dry_run:
            _say(f"{each.path}, {each.state.value}, would be taken away.", out)
        elif each.state is State.INTACT:
            placement.remove(each)
            _say(f"{each.path} is removed.", out)
        else:
            _say(f"{each.path} is {each.state.value}, and kept as {placement.set_aside(each)}.", out)
    if not gone:
        _say("There is no drop-in by gpuprestart enable.", out)
    elif not command.dry_run:
        for unit in gone:
            _record(unit)
        _say(f"From now on nothing proves the GPUs clean before a start of {', '.join(gone)}.", out)
        _have_read(command, systemd, out, "is gone")


# Telling -------------------------------------------------------------------------------------------------------------


def _say(sentence: str, out: TextIO) -> None:
    print(printable(sentence, 2000), file=out)


def _have_read(command: Command, systemd: Systemd, out: TextIO, state: str) -> None:
    """Have systemd read its units, or say that somebody has to. It is never done unasked."""
    if not command.now:
        _say(f"systemd does not know yet; to tell it: {_RELOAD}.", out)
        if state == "is gone":
            still = "Until then, a unit that it has loaded still runs the hook"
            _say(f"{still}, and does not start once gpuprestart is removed (203/EXEC).", out)
        else:
            _say("Until then it starts as before, with nothing proved.", out)
        return
    try:
        systemd.reload()
    except SystemdError as error:
        said = f"the drop-in {state}, but systemd could not be told: {error}"
        raise Refusal(Outcome.UNKNOWN, said, [_RELOAD]) from error
    _say("systemd has read its units; containers that were running may have lost their GPUs.", out)


def _record(unit: str) -> None:
    """In the log of the unit too, where whoever wonders about its next start looks first."""
    journal = Journal(journal_stream="")
    # Where there is no journal, as in a chroot, what was printed has to do.
    if journal.open():
        context = events.Context(unit=unit, run=os.urandom(16).hex())
        record = events.hook_disabled(context, by=procfs.login_name())
        with contextlib.closing(journal):
            journal.send(record.message, record.message_id, record.priority, record.fields)
