"""argv -> Command: what was asked for. A command line that is wrong ends the process with EX_USAGE.

The line of the hook itself needs no parser, and a server does not wait until one is loaded.
"""

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
    #: As ``nvidia-smi --query-gpu=index,memory.used --format=csv`` prints it.
    csv: bool = False
    #: Look again every so many seconds.
    watch: Optional[float] = None
    #: Other machines to ask, by ssh, instead of this one.
    hosts: tuple[str, ...] = ()
    #: One run of the past, by its id or by a beginning of it.
    run: str = ""
    #: Runs of the past since then, and how many at most, the newest.
    since: str = ""
    most: Optional[int] = None
    #: Where a picture of the last of these runs goes.
    svg: str = ""


HOOK = Command(verb="clean", journal=True)
#: Verbs that do not ask the driver anything, and leave it alone.
ADMINISTRATIVE = ("enable", "disable", "bypass")
#: Verbs that read what earlier runs have left in the journal.
LOOKING_BACK = ("history", "proof")

STATUS = Command(verb="status", options=Options(gpus=("all",), status=True))


def parse(arguments: Sequence[str]) -> Command:
    """The command. Raises SystemExit, with EX_USAGE for a line that is wrong and 0 for ``--help`` and ``--version``."""
    if list(arguments) == ["clean"]:
        return HOOK
    parser = _parser()
    given, rest = parser.parse_known_args(arguments)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}{_meant(given.verb, rest)}")
    if given.verb is None:
        return STATUS
    hosts = tuple(getattr(given, "host", None) or ())
    if given.verb == "status":
        return STATUS._replace(json=given.json, csv=given.csv, watch=given.watch, hosts=hosts)
    if given.verb == "history":
        return _history(given, hosts, parser)
    if given.verb in (*ADMINISTRATIVE, "doctor", "proof"):
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
            hosts=hosts,
        )
    if given.deadline is not None:
        from .quantities import duration

        try:
            duration(given.deadline, positive=True)
        except ValueError as error:
            parser.error(f"argument --deadline: {error}")
    gpus = tuple(given.gpus.split(",")) if given.gpus is not None else None
    options = Options(unit=given.unit, policy=given.policy, gpus=gpus, deadline=given.deadline)
    journal = given.verb == "clean" or given.journal
    return Command(verb=given.verb, options=options, json=given.json, journal=journal, hosts=hosts)


def _history(given: "argparse.Namespace", hosts: tuple[str, ...], parser: "argparse.ArgumentParser") -> Command:
    words = tuple(given.what)
    showing = words[:1] == ("show",)
    if len(words) > (2 if showing else 1):
        parser.error("give one unit at most, or show and one run")
    if showing and not any(words[1:]):
        parser.error("history show: which run? history lists them by their id (a unit of that name is show.service)")
    return Command(
        verb="history",
        units=() if showing else words,
        run=words[1] if showing else "",
        since=given.since or "",
        most=given.number,
        svg=given.svg or "",
        json=given.json,
        hosts=hosts,
    )


def _meant(verb: Optional[str], rest: Sequence[str]) -> str:
    """Some verbs take a unit as it is, and some by an option, which is easily confused."""
    if verb in (None, "status", "clean", "check") and not rest[0].startswith("-"):
        wanted = verb if verb in ("clean", "check") else "check"
        return f"; hint: gpuprestart {wanted} --unit {rest[0]}"
    if verb in (*ADMINISTRATIVE, *LOOKING_BACK, "doctor") and rest[0].partition("=")[0] == "--unit":
        return f"; hint: gpuprestart {verb} UNIT, without --unit"
    return ""


def _parser() -> "argparse.ArgumentParser":
    import argparse
    import contextlib
    import sys

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            with contextlib.suppress(OSError):
                self.print_usage(sys.stderr)
                print(f"{self.prog}: {message}", file=sys.stderr)
            raise SystemExit(EX_USAGE)

    def interval(text: str) -> float:
        with contextlib.suppress(ValueError):
            if 0.1 <= float(text) <= 3600:
                return float(text)
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time to wait between two looks (allowed: 0.1 to 3600 seconds)"
        )

    def count(text: str) -> int:
        with contextlib.suppress(ValueError):
            if int(text) >= 1:
                # No journal has more.
                return min(int(text), sys.maxsize)
        raise argparse.ArgumentTypeError(f"{text!r} is no number of runs (allowed: 1 and more)")

    def some(text: str) -> str:
        # As of a script's variable that is not set: what was asked for would be left out, and nothing said.
        if not text:
            raise argparse.ArgumentTypeError("nothing is given")
        return text

    def host(text: str) -> str:
        # ssh would take it for an option, or for no host at all.
        if not text or text.startswith("-") or any(each.isspace() for each in text):
            raise argparse.ArgumentTypeError(f"{text!r} is no machine (allowed: HOST or USER@HOST)")
        return text

    def remote(command: argparse.ArgumentParser) -> None:
        what = "ask this machine instead, by ssh; may be given several times"
        command.add_argument("-H", "--host", metavar="[USER@]HOST", type=host, action="append", help=what)

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
            remote(command)
    purpose = "GPUs and their holders; the default"
    command = verbs.add_parser("status", help=purpose, description=purpose, allow_abbrev=False)
    form = command.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON on standard output")
    form.add_argument("--csv", action="store_true", help="index and used memory, as nvidia-smi prints them as CSV")
    what = "look again every N seconds (2 without N), until it is interrupted"
    form.add_argument("--watch", metavar="N", type=interval, nargs="?", const=2.0, help=what)
    remote(command)
    purpose = "earlier runs, as the journal has them"
    command = verbs.add_parser("history", help=purpose, description=purpose, allow_abbrev=False)
    command.add_argument("what", metavar="UNIT | show RUN", nargs="*", help="runs of this unit, or one run as a story")
    command.add_argument("--since", metavar="TIME", type=some, help="no earlier ones, such as yesterday or 2h")
    command.add_argument("-n", "--number", metavar="N", type=count, help="so many, the newest (20 without this)")
    command.add_argument("--svg", metavar="FILE", type=some, help="draw the last of these runs into this file")
    command.add_argument("--json", action="store_true", help="a list of verdicts, the newest last")
    remote(command)
    purpose = "the last verdict on a unit's GPUs, as JSON, to be filed"
    command = verbs.add_parser("proof", help=purpose, description=purpose, allow_abbrev=False)
    command.add_argument("unit", metavar="UNIT", nargs="?", help="x means x.service; without it the last of all")
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
    remote(command)
    purpose = "let the next start of a unit pass unproved, once, within ten minutes"
    command = verbs.add_parser("bypass", help=purpose, description=purpose, allow_abbrev=False)
    command.add_argument("unit", metavar="UNIT")
    return parser
