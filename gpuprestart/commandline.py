"""argv -> Command: what was asked for. A command line that is wrong ends the process with EX_USAGE.

The line of the hook itself needs no parser, and a server does not wait until one is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Optional

from . import __version__

if TYPE_CHECKING:
    import argparse

EX_USAGE = 64


class Options(NamedTuple):
    """What ``clean`` and ``check`` may be told."""

    unit: Optional[str] = None
    policy: Optional[str] = None
    gpus: Optional[tuple[str, ...]] = None
    deadline: Optional[str] = None
    #: Shows what there is and judges nothing.
    status: bool = False


class Command(NamedTuple):
    verb: str
    options: Options = Options()
    json: bool = False
    #: What ``enable``, ``disable``, ``doctor`` and ``bypass`` are about, as it was typed.
    units: tuple[str, ...] = ()
    #: Have systemd reload its units after a drop-in was written or removed.
    now: bool = False
    #: Show what would be written, and write nothing.
    dry_run: bool = False
    #: All that ``enable`` has written, whatever it is for.
    everything: bool = False
    #: Records go to the journal: all of ``clean``, and the verdict of a ``check`` that asks for it.
    journal: bool = False


HOOK = Command(verb="clean", journal=True)
#: Verbs that do not ask the driver anything, and leave it alone.
ADMINISTRATIVE = ("enable", "disable", "bypass")

STATUS = Command(verb="status", options=Options(gpus=("all",), status=True))


def parse(arguments: Sequence[str]) -> Command:
    """The command. Raises SystemExit, with EX_USAGE for a line that is wrong and 0 for ``--help`` and ``--version``."""
    if list(arguments) == ["clean"]:
        return HOOK
    parser = _parser()
    given, rest = parser.parse_known_args(arguments)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}{_meant(given.verb, rest)}")
    if given.verb in (None, "status"):
        return STATUS
    if given.verb in (*ADMINISTRATIVE, "doctor"):
        said = vars(given)
        if given.verb == "disable" and bool(given.unit) == given.all:
            parser.error("give the units, or --all")
        units = [given.unit] if isinstance(given.unit, str) else given.unit or []
        return Command(
            verb=given.verb,
            units=tuple(units),
            json=said.get("json", False),
            now=said.get("now", False),
            dry_run=said.get("dry_run", False),
            everything=said.get("all", False),
        )
    if given.deadline is not None:
        from .quantities import duration

        try:
            duration(given.deadline, positive=True)
        except ValueError as error:
            parser.error(f"argument --deadline: {error}")
    gpus = tuple(given.gpus.split(",")) if given.gpus is not None else None
    options = Options(unit=given.unit, policy=given.policy, gpus=gpus, deadline=given.deadline)
    return Command(verb=given.verb, options=options, json=given.json, journal=given.verb == "clean" or given.journal)


def _meant(verb: Optional[str], rest: Sequence[str]) -> str:
    """Some verbs take a unit as it is, and some by an option, which is easily confused."""
    if verb in (None, "status", "clean", "check") and not rest[0].startswith("-"):
        wanted = verb if verb in ("clean", "check") else "check"
        return f"; hint: gpuprestart {wanted} --unit {rest[0]}"
    if verb in (*ADMINISTRATIVE, "doctor") and rest[0].partition("=")[0] == "--unit":
        return f"; hint: gpuprestart {verb} UNIT, without --unit"
    return ""


def _parser() -> argparse.ArgumentParser:
    import argparse
    import contextlib
    import sys

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            with contextlib.suppress(OSError):
                self.print_usage(sys.stderr)
                print(f"{self.prog}: {message}", file=sys.stderr)
            raise SystemExit(EX_USAGE)

    parser = Parser(
        prog="gpuprestart",
        description="Proves the GPUs of a unit clean before its model server starts. Without a verb: status.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"gpuprestart {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    for verb, purpose in (
        ("clean", "the hook: end stale holders, wait until the memory is back, give a verdict"),
        ("check", "judge as of now and touch nothing"),
    ):
        command = verbs.add_parser(verb, help=purpose, description=purpose, allow_abbrev=False)
        command.add_argument("--unit", help="policy and GPUs of this unit (x means x.service)")
        command.add_argument("--policy", metavar="FILE", help="this policy instead of the search path")
        command.add_argument("--gpus", metavar="LIST", help="indices, UUIDs or PCI addresses, separated by commas")
        command.add_argument("--deadline", metavar="DURATION", help="for everything, such as 120s")
        command.add_argument("--json", action="store_true", help="the verdict as JSON on standard output")
        if verb == "check":
            command.add_argument("--journal", action="store_true", help="also write the verdict to the journal")
    verbs.add_parser("status", help="GPUs and their holders; the default")
    for verb, purpose in (
        ("enable", "put the hook in front of a service, by a drop-in"),
        ("disable", "take that drop-in away again"),
    ):
        command = verbs.add_parser(verb, help=purpose, description=purpose, allow_abbrev=False)
        names = "x means x.service; x@.service and x-.service too"
        command.add_argument("unit", metavar="UNIT", nargs="+" if verb == "enable" else "*", help=names)
        if verb == "disable":
            command.add_argument("--all", action="store_true", help="every drop-in that enable has written")
        command.add_argument("--now", action="store_true", help="have systemd reload its units at once")
        command.add_argument("--dry-run", action="store_true", help="show what would be done, and do nothing")
    purpose = "what would make the hook fail, or be ignored"
    command = verbs.add_parser("doctor", help=purpose, description=purpose, allow_abbrev=False)
    command.add_argument("unit", metavar="UNIT", nargs="?", help="look at this unit as well")
    command.add_argument("--json", action="store_true", help="as JSON on standard output")
    purpose = "let the next start of a unit pass unproved, once, within ten minutes"
    command = verbs.add_parser("bypass", help=purpose, description=purpose, allow_abbrev=False)
    command.add_argument("unit", metavar="UNIT")
    return parser
