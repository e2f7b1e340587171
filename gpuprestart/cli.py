"""The verbs, the wiring, and the only place that knows argv, the environment and how the process ends.

The child that talks to the driver is forked first, before anything heavy is imported: it is small then, and the driver
initialises while the rest of the program is loaded. So what is imported up here decides how soon a server can start.
"""

from __future__ import annotations

import gc
import os
import sys

from .faults import SCARCE, scarce
from .host.child import Child
from .host.library import Library, load_pynvml

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from .commandline import Command
    from .host.program import Ended
    from .host.waiter import Waiter

#: The statuses of a fault in this program, of a machine that has nothing to give, and of a unit that does not let us
#: have enough, where there is not even a verdict to tell it.
EX_SOFTWARE, EX_UNAVAILABLE, EX_CONFIG = 70, 69, 78

#: The verbs that ask the driver.
WITH_DRIVER = ("clean", "check", "status", "doctor")

#: Stands for an end by SIGABRT, as a shell shows it.
ABORTED = 134

#: So many open files a run needs at most beside its pidfds, with as many for those.
ENOUGH = 64

#: What in the environment can change which NVML answers, or how (ld.so(8), NVML's own variables).
SUSPECT = ("LD_", "NVML_")


def run() -> None:
    """The console entry."""
    try:
        status = main(sys.argv[1:])
    except SystemExit as end:
        status = int(end.code or 0)
    except Exception as error:  # noqa: BLE001  No status but those of the contract, also where no child can be forked.
        status = _failed(error)
    import contextlib

    for stream in (sys.stdout, sys.stderr):
        # Whoever read it may have gone; the interpreter would end with a status of its own for that.
        with contextlib.suppress(OSError):
            stream.flush()
    if status == ABORTED:
        _abort()
    # Everything is closed and told. To take the interpreter apart first would only keep a server waiting.
    os._exit(status)


def _failed(error: Exception) -> int:
    """Say what kept the program from running at all, and return the status for it."""
    import contextlib

    lacking = scarce(error)
    with contextlib.suppress(OSError):
        if lacking:
            print(f"gpuprestart: {SCARCE}: {error}", file=sys.stderr)
        else:
            import traceback

            traceback.print_exc()
    return EX_UNAVAILABLE if lacking else EX_SOFTWARE


def _abort() -> None:
    """Die by SIGABRT without a core: the unit takes every status that refuses for a success."""
    import resource
    import signal

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.raise_signal(signal.SIGABRT)


def main(arguments: Sequence[str]) -> int:
    """Run the program and return its exit status."""
    _have_standard_streams()
    if not _have_descriptors():
        limit = os.sysconf("SC_OPEN_MAX")
        print(f"gpuprestart: config: only {limit} open files are allowed; hint: LimitNOFILE={ENOUGH}", file=sys.stderr)
        return EX_CONFIG
    _run_clean_of(os.environ)
    # While everything is loaded nothing is garbage, and to look for it would take as long as to load a tenth of it.
    gc.disable()
    # What lies in /run is nobody's to change but ours, whatever UMask= is good for the server's files.
    os.umask(0o022)
    if arguments[:1] != ["clean"]:
        from .commandline import parse
        from .host.waiter import Waiter

        command = parse(arguments)
        if command.hosts or command.verb not in WITH_DRIVER:
            return _without_driver(command, Waiter())
    child = Child(answer=Library(load_pynvml), wait=lambda *asked: wait(*asked), at_fork=_as_a_child)
    child.send(("init",))
    # From here on the driver is at work, and we load what we need.
    from .commandline import parse
    from .host.waiter import Waiter

    wait = Waiter()
    try:
        return _perform(parse(arguments), wait, child)
    finally:
        wait.deafen()
        child.end()


def _as_a_child() -> None:
    from .host.waiter import obey_sigterm_alone

    obey_sigterm_alone()


def _have_standard_streams() -> None:
    """Put /dev/null where we were started without a stream: its number would go to a pipe or socket of ours, into which
    the next message would be written."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)


def _have_descriptors() -> bool:
    """Whether there may be enough of them, raising the limit if need be: with too few, one thing after the other would
    fail, and be told as the fault of whatever came last."""
    if os.sysconf("SC_OPEN_MAX") < ENOUGH:
        import contextlib
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (ENOUGH, max(ENOUGH, hard)))
    return os.sysconf("SC_OPEN_MAX") >= ENOUGH


def _run_clean_of(environ: Mapping[str, str]) -> None:
    """Execute ourselves again without what could bring another NVML than the system's.

    A process keeps the loader's search path that it was started with, and a forked child inherits it, so clearing
    ``os.environ`` would change nothing. The PID stays the same, which is what systemd knows us by.
    """
    clean = {name: value for name, value in environ.items() if not name.startswith(SUSPECT)}
    if len(clean) != len(environ):
        with open("/proc/self/cmdline", "rb") as file:
            command = file.read()[:-1].split(b"\0")
        os.execve(sys.executable, command, clean)


def _without_driver(command: Command, wait: Waiter) -> int:
    """What is about units, files, the journal or other machines alone. The driver is not asked, nor woken."""
    if command.hosts:
        from . import remote

        return remote.perform(command, wait, out=sys.stdout, err=sys.stderr)
    if command.verb == "history":
        from . import history

        return history.perform(command, out=sys.stdout, err=sys.stderr)
    if command.verb == "proof":
        from . import proof

        return proof.perform(command, out=sys.stdout, err=sys.stderr)
    from . import administration
    from .host.systemd import Systemd

    return administration.perform(command, Systemd(wait), out=sys.stdout, err=sys.stderr)


def _perform(command: Command, wait: Waiter, child: Child) -> int:
    import contextlib

    from . import answers, events, hook, owners
    from .host import procfs
    from .host.child import Questions
    from .host.journal import Journal
    from .host.locks import Locks, Notes
    from .host.notify import extend_timeout, notify_status
    from .host.nvml import Driver
    from .host.systemd import Systemd, SystemdError
    from .neighbours import Neighbours
    from .telling import Teller
    from .verdict import survivors

    if command.journal:
        # Loaded while the driver initialises, and not when a server already waits for the verdict.
        import json  # noqa: F401

    gc.freeze()
    gc.enable()
    locks = Locks()

    def alone() -> None:
        # A child that hangs outlives us, and would keep a lock that it has inherited.
        locks.release()
        wait.forget()

    def start() -> Child:
        return Child(answer=answers.answer, wait=wait, at_fork=alone)

    # The one that is there was forked before there were any locks; another may have to take its place.
    child.at_fork = alone
    unended: set[int] = set()

    def run_program(*command: Any, **how: Any) -> Ended:
        # Few policies name one, and no other start has to wait until this is loaded.
        from .host.program import Programs

        return Programs(wait=wait, at_fork=alone, pids=unended)(*command, **how)

    questions, files = Questions(start), Questions(start)
    journal = Journal(journal_stream=os.environ.get("JOURNAL_STREAM", ""))
    if command.journal:
        journal.open()

    def write(record: events.Record) -> None:
        journal.send(record.message, record.message_id, record.priority, record.fields)

    host = Neighbours(
        wait=wait,
        deafen=wait.deafen,
        driver=Driver(child, child),
        systemd=Systemd(wait),
        ask=questions,
        ask_files=files,
        children=lambda: {child.pid, *questions.pids, *files.pids, *unended},
        write=write,
        say_status=notify_status,
        extend_timeout=lambda seconds: "NOTIFY_SOCKET" in os.environ and extend_timeout(int(seconds * 1_000_000)),
        environ=os.environ,
        locks=locks,
        claims=Notes("claims"),
        bypasses=Notes("bypass"),
        run_program=run_program,
    )
    try:
        if command.verb == "doctor":
            from . import doctor

            return doctor.perform(command, host, out=sys.stdout)
        if command.watch is not None:
            from . import watching

            return watching.perform(command, host, out=sys.stdout, err=sys.stderr)
        verdict = hook.run(command.options, host, checking=command.verb != "clean")
    finally:
        wait.deafen()
        questions.end()
        files.end()
    teller = Teller(write=write, say=journal.say, notify=notify_status, out=sys.stdout, err=sys.stderr)
    status = teller.tell(command, verdict)
    if command.verb == "clean" and verdict.textfile:
        from . import metrics

        metrics.publish(verdict, files, write)
        files.end()
    journal.close()
    if command.verb == "clean" and verdict.unit:
        stuck = questions.pids | files.pids | unended | (set() if child.end() else {child.pid})
        aside = [(pid, f"gpuprestart-stuck-{pid}.scope", "Asked the driver or the kernel, and hangs") for pid in stuck]
        aside += [
            (process.pid, owners.unkillable_scope(process.pid), f"A process of {verdict.unit} that survived SIGKILL")
            for process in survivors(verdict)
            if procfs.still_there(process)
        ]
        for pid, scope, description in aside:
            with contextlib.suppress(SystemdError):
                host.systemd.set_aside(pid, scope, description)
    return status
