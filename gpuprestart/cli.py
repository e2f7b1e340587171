"""The verbs, the wiring, and the only place that knows argv, the environment and how the process ends.

The child that talks to the driver is forked first, before anything heavy is imported: it is small then, and the driver
initialises while the rest of the program is loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from . import __version__
from .host.child import Child, Questions
from .host.nvml import Driver, Library, load_pynvml
from .host.waiter import Waiter
from .model import EXIT_USAGE, Outcome, Verdict

if TYPE_CHECKING:
    import argparse

    from .hook import Host
    from .host.journal import Journal

#: What in the environment can change which NVML answers, or how (ld.so(8), NVML's own variables).
SUSPECT = ("LD_", "NVML_")


def run() -> None:
    """The console entry."""
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Run the program and return its exit status."""
    _run_clean_of(os.environ)
    wait = Waiter()
    child = Child(answer=Library(load_pynvml), wait=wait, at_fork=wait.forget)
    try:
        driver = Driver(child)
        driver.begin()
        options = _parse(arguments)
        return _perform(options, driver, wait, child)
    finally:
        child.end()


def _run_clean_of(environ: Mapping[str, str]) -> None:
    """Execute ourselves again without what could bring another NVML than the system's.

    A process keeps the loader's search path that it was started with, and a forked child inherits it, so clearing
    ``os.environ`` would change nothing. The PID stays the same, which is what systemd knows us by.
    """
    clean = {name: value for name, value in environ.items() if not name.startswith(SUSPECT)}
    if len(clean) != len(environ):
        with open("/proc/self/cmdline", "rb") as file:
            command = file.read().rstrip(b"\0").split(b"\0")
        os.execve(sys.executable, command, clean)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    import argparse

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> None:  # type: ignore[override]
            self.print_usage(sys.stderr)
            self.exit(EXIT_USAGE, f"{self.prog}: {message}\n")

    parser = Parser(prog="gpuprestart", description="Proves a unit's GPUs clean before its model server starts.")
    parser.add_argument("--version", action="version", version=f"gpuprestart {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    for verb, purpose in (
        ("clean", "the hook: end stale holders, wait until the memory is back, give a verdict"),
        ("check", "judge as of now and touch nothing"),
    ):
        command = verbs.add_parser(verb, help=purpose, description=purpose)
        command.add_argument("--unit", help="policy and GPUs of this unit (x means x.service)")
        command.add_argument("--policy", metavar="FILE", help="this policy instead of the search path")
        command.add_argument("--gpus", metavar="LIST", help="indices, UUIDs or PCI addresses, separated by commas")
        command.add_argument("--deadline", metavar="DURATION", help="for everything, such as 120s")
        command.add_argument("--json", action="store_true", help="the verdict as JSON on standard output")
    verbs.add_parser("status", help="GPUs and their holders; also what no verb at all does")
    return parser.parse_args(arguments)


def _perform(options: argparse.Namespace, driver: Driver, wait: Waiter, child: Child) -> int:
    from . import hook
    from .host import procfs
    from .host.journal import Journal
    from .host.notify import notify_status
    from .host.systemd import Systemd

    questions = Questions(lambda: Child(answer=procfs.slow, wait=wait, at_fork=wait.forget))
    journal = Journal(journal_stream=os.environ.get("JOURNAL_STREAM", ""))
    hooking = options.verb == "clean"
    if hooking:
        journal.open()
    host = hook.Host(
        wait=wait,
        driver=driver,
        systemd=Systemd(wait),
        ask=questions,
        children=lambda: {child.pid, *questions.pids},
        write=lambda record: _write(journal, record),
        say_status=notify_status,
        environ=os.environ,
    )
    try:
        verdict = _verdict(options, host)
    finally:
        questions.end()
    return _tell(options, verdict, journal, hooking=hooking)


def _verdict(options: argparse.Namespace, host: Host) -> Verdict:
    from . import hook

    try:
        if options.verb in (None, "status"):
            return hook.check(hook.Options(gpus=("all",)), host)
        chosen = hook.Options(
            unit=options.unit,
            policy=options.policy,
            gpus=tuple(options.gpus.split(",")) if options.gpus is not None else None,
            deadline=options.deadline,
        )
        return hook.clean(chosen, host) if options.verb == "clean" else hook.check(chosen, host)
    except Exception as error:  # noqa: BLE001  Whatever it is, systemd must hear a status that refuses.
        import traceback

        traceback.print_exc()
        return hook.failed(error, host)


def _write(journal: Journal, record: object) -> None:
    from . import events

    assert isinstance(record, events.Record)
    journal.send(record.message, record.message_id, record.priority, record.fields)


def _tell(options: argparse.Namespace, verdict: Verdict, journal: Journal, *, hooking: bool) -> int:
    """Say the verdict everywhere it is looked for, each time in the words of the same sentence."""
    from . import events, report

    if hooking:
        context = events.Context(unit=verdict.unit, run=verdict.run)
        if verdict.outcome not in (Outcome.CLEAN, Outcome.NONE):
            for state in verdict.gpus:
                _write(journal, events.gpu_verdict(context, state))
        record = events.verdict(verdict)
        _write(journal, record)
        journal.say(record.message, record.priority)
        from .host.notify import notify_status

        notify_status(report.status_line(verdict, _local_time(verdict.time + verdict.duration)))
    if getattr(options, "json", False):
        print(report.as_json(verdict, booted=_booted()))
    elif options.verb == "check":
        print(report.table(verdict), end="")
    elif not hooking:
        return _tell_status(verdict)
    sys.stdout.flush()
    return verdict.exit


def _tell_status(verdict: Verdict) -> int:
    """``status`` is about what could be measured; what ``clean`` would make of it is no failure of its own."""
    from . import report

    if not verdict.gpus:
        print(report.sentence(verdict), file=sys.stderr)
        return 69
    print(report.overview(verdict.gpus, verdict.decisions), end="")
    return 0 if all(state.reading.memory for state in verdict.gpus) else 69


def _local_time(seconds: float) -> str:
    import time

    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))


def _booted() -> float:
    import time

    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
