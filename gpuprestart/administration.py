"""The verbs for whoever looks after a machine: ``enable``, ``disable`` and ``bypass``.

They change files, never processes or GPUs. What cannot be done is said in a sentence, with the exit status that the
hook has for faults of that kind.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TextIO

from . import bypass, enabling, events, owners, service
from .commandline import Command
from .faults import Interrupted
from .host import procfs
from .host.journal import Journal
from .host.locks import Denied, Notes
from .host.systemd import Systemd, SystemdError
from .model import EXIT_STATUS, Outcome, Refusal
from .neighbours import clock
from .text import printable


def perform(command: Command, systemd: Systemd, *, out: TextIO, err: TextIO) -> int:
    """Do it, and return the exit status."""
    try:
        if os.geteuid() != 0 and not command.dry_run:
            words = " ".join(["sudo gpuprestart", command.verb, *command.units])
            raise Refusal(Outcome.DENIED, f"gpuprestart {command.verb} is for root alone", [words])
        if command.verb == "enable":
            enabling.enable(command, systemd, out=out)
        elif command.verb == "disable":
            enabling.disable(command, systemd, out=out)
        else:
            _bypass(command.units[0], systemd, out=out)
    except Refusal as refusal:
        hints = "".join(f"; hint: {hint}" for hint in refusal.hints[:1])
        print(f"gpuprestart: {printable(refusal.message + hints, 1000)}", file=err)
        return EXIT_STATUS[refusal.outcome]
    except SystemdError as error:
        hint = "hint: systemctl is-system-running tells whether it is up"
        print(f"gpuprestart: systemd cannot be asked: {printable(str(error), 1000)}; {hint}", file=err)
        return EXIT_STATUS[Outcome.UNKNOWN]
    except Interrupted as interruption:
        print(f"gpuprestart: {interruption.signal_name} came before {command.verb} was done; do it again", file=err)
        return EXIT_STATUS[Outcome.INTERRUPTED]
    return 0


def loaded(systemd: Systemd, name: str) -> service.Service:
    """The service of that name as systemd has it. Raises Refusal where there is none that could be started."""
    unit = owners.full_name(name)
    if not owners.is_unit_name(unit) or not unit.endswith(".service"):
        raise Refusal(Outcome.CONFIG, f"{unit!r} is no name of a service", ["name one such as sglang-qwen.service"])
    found = service.from_properties(unit, systemd.everything(unit))
    if found.load_state == "masked":
        hint = f"systemctl unmask {unit}, if it is meant to start at all"
        raise Refusal(Outcome.CONFIG, f"{unit} is masked, so nothing can start it", [hint])
    if found.load_state == "not-found":
        hint = "systemctl list-unit-files shows which there are"
        raise Refusal(Outcome.CONFIG, f"systemd has no unit {unit}", [hint])
    if found.load_state != "loaded":
        hint = f"systemctl status {unit} says what is wrong with it"
        raise Refusal(Outcome.CONFIG, f"systemd cannot load {unit} ({found.load_state})", [hint])
    return found


def _bypass(name: str, systemd: Systemd, *, out: TextIO) -> None:
    unit = loaded(systemd, name)
    granted = bypass.Bypass(until=clock() + bypass.HOLDS, by=procfs.login_name())
    try:
        Notes("bypass").write(unit.name, bypass.text(granted))
    except Denied as error:
        hint = f"see whether {bypass.FOLDER} can be written to: ls -ld {bypass.FOLDER}, df /run"
        raise Refusal(Outcome.DENIED, f"the bypass cannot be put down: {error}", [hint]) from error
    until = time.strftime("%H:%M:%S", time.localtime(time.time() + bypass.HOLDS))
    record = events.bypass_granted(events.Context(unit=unit.name, run=os.urandom(16).hex()), by=granted.by, until=until)
    journal = Journal(journal_stream="")
    journal.open()
    journal.send(record.message, record.message_id, record.priority, record.fields)
    journal.close()
    print(f"{record.message}; to take it back: rm {bypass.FOLDER}/{unit.name}", file=out)
    if not any(each.ours for each in unit.start_pre):
        print(f"But no ExecStartPre= of {unit.name} runs gpuprestart, as far as its words show.", file=sys.stderr)
