"""Plays a plan of the endurance run on a node, and takes down what the node itself says of it.

It starts everybody through systemd, has the hook run in front of a server or in a shell, and looks at the bookkeeper's
books, at /proc, at the claims and at what was left. Whether that is right is soak_truth's business.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Optional

from tests.node.hung import Hung
from tests.node.machine import Node, wait_for
from tests.node.scene import HOLDER, Scene, mappable
from tests.node.soak_plan import Actor, Place, Plan
from tests.node.soak_truth import Member, Seen, Told

HOOK = "/usr/bin/gpuprestart"
RUN = "/run/gpuprestart"

#: Runs the hook as a shell around it would, and puts down the most memory that it, or a child of its, had at once. What
#: systemd sends to end a start reaches both of them.
MEASURE = """#!/usr/bin/python3 -I
import os, resource, signal, sys
signal.signal(signal.SIGTERM, lambda *_: None)
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, setsigdef=[signal.SIGTERM])
_, status = os.waitpid(pid, 0)
with open("/run/soak/peak", "w") as file:
    print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=file)
os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))
"""
#: What it prints is then the hook's in the journal too.
MEASURED = "/run/soak/gpuprestart"

#: How a stale process holds on, in options of holder.py.
FORMS = {
    "obeys": (),
    "ignores": ("--ignore-term",),
    "slow": ("--term-delay", "0.15"),
    "stopped": ("--stop",),
    "forks": ("--term-fork",),
    "mapped": ("--map-only",),
    "zombie": ("--thread-exit",),
    "unlisted": ("--unlisted",),
    "draws": ("--alloc", "kind=graphics"),
    "crowd": ("--leave",),
    "several": (),
}

#: Instances of GPU 0: the number of the capability, and which console is its node.
CAPABILITIES = ((21, 58), (30, 59), (39, 60))

FIRST_USER = 1000

#: What login sessions bring and take away on their own time.
PASSING = re.compile(
    r"user(@|-runtime-dir@)?[-\d]*\.(service|slice)|session-\w+\.scope|run-(user|credentials)-.*\.mount"
)


class Level(NamedTuple):
    """What a node has when nothing is played on it."""

    processes: Counter[str]
    units: frozenset[str]


class Played(NamedTuple):
    seen: Seen
    #: What the node had after everybody had left, and the memory that the hook needed, in KiB.
    processes: int
    units: int
    descriptors: int
    files: int
    rss_kib: Optional[int]
    #: What PID 1 has, which forgets nothing that it might use again; told, and held against nobody.
    init_kib: int


class Inside:
    """A node's files and processes, looked at from outside without a process on it."""

    def __init__(self, node: Node) -> None:
        self.root = Path(f"/proc/{node.leader}/root")

    def pids(self) -> list[int]:
        return [int(name) for name in os.listdir(self.root / "proc") if name.isdigit()]

    def stat(self, pid: int) -> Sequence[str]:
        """comm, state and what follows it, or nothing."""
        try:
            before, _, after = (self.root / f"proc/{pid}/stat").read_text(errors="replace").rpartition(")")
        except OSError:
            return ()
        return (before.partition("(")[2], *after.split())

    def start(self, pid: int) -> str:
        """The start time of a process that is alive: one that is dead and not waited for is not, a dead leader with
        live threads is."""
        stat = self.stat(pid)
        dead = not stat or (stat[1] in "ZX" and int(stat[18]) <= 1)
        return "" if dead else stat[20]

    def commands(self) -> Counter[str]:
        return Counter(stat[0] for stat in map(self.stat, self.pids()) if stat)

    def descriptors(self) -> int:
        """Of the system's own processes together; a user manager comes and goes on its own time."""
        count = 0
        for pid in self.pids():
            with suppress(OSError):
                if (self.root / f"proc/{pid}").stat().st_uid < FIRST_USER:
                    count += len(os.listdir(self.root / f"proc/{pid}/fd"))
        return count

    def resident(self, pid: int) -> int:
        status = (self.root / f"proc/{pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0])

    def files(self) -> list[Path]:
        return sorted(path for path in (self.root / RUN[1:]).rglob("*") if not path.is_dir())

    def lock_is_held(self, path: Path) -> bool:
        with open(path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False


class Stage:
    """A node that scenes are played on, one after the other. ``hook`` is the program that is run as the hook."""

    def __init__(self, node: Node, *, hook: str = HOOK) -> None:
        self._node = node
        self._hook = hook
        self._inside = Inside(node)
        node.write(MEASURED, MEASURE, mode=0o755)
        self._level = self._now()

    def play(self, plan: Plan) -> Played:
        with ExitStack() as stack:
            seen = _Scene(self._node, self._inside, stack, plan, hook=self._hook).play()
        peak = self._inside.root / "run/soak/peak"
        rss = int(peak.read_text()) if peak.exists() else None
        peak.unlink(missing_ok=True)
        left = self._until_empty()
        now = self._now()
        return Played(
            seen._replace(left=[*seen.left, *left]),
            processes=sum(now.processes.values()),
            units=len(now.units),
            descriptors=self._inside.descriptors(),
            files=len(self._inside.files()),
            rss_kib=rss,
            init_kib=self._inside.resident(1),
        )

    def _now(self) -> Level:
        listed = self._node.systemctl("list-units", "--all", "--plain", "--no-legend").stdout.splitlines()
        units = frozenset(
            name
            for name, load, active, *_ in map(str.split, listed)
            # What another unit only mentions is not there.
            if (load, active) != ("not-found", "inactive") and not PASSING.fullmatch(name)
        )
        # A user manager stays for ten seconds after its user's last session.
        passing = Counter({"(sd-pam)": 99, "systemd": 99, "dbus-daemon": 99})
        return Level(self._inside.commands() - passing, units)

    def _until_empty(self) -> list[str]:
        """Wait until the node is as it was before the first scene, and say what does not go."""
        found: list[str] = []

        def empty() -> bool:
            now = self._now()
            processes = now.processes - self._level.processes
            found[:] = [f"{count} process {name} left" for name, count in processes.items()]
            found.extend(f"unit {unit} left" for unit in sorted(now.units - self._level.units))
            return not found

        with suppress(AssertionError):
            wait_for(empty, timeout=10, interval=0.1, what="the node is empty again")
        return found


class _Scene:
    """One plan, being played."""

    def __init__(self, node: Node, inside: Inside, stack: ExitStack, plan: Plan, *, hook: str) -> None:
        self._node = node
        self._inside = inside
        self._stack = stack
        self._plan = plan
        self._hook = hook
        self._members: dict[int, tuple[str, str, str, bool]] = {}
        self._uuids: dict[str, Place] = {}
        self._scene = Scene(node)
        self._own = self._scene.name("server")

    def play(self) -> Seen:
        plan, scene = self._plan, self._scene
        if any(actor.form == "mapped" for actor in plan.actors):
            self._stack.enter_context(mappable(self._node))
        self._stack.callback(self._clear)
        scene.reset(gpus=plan.gpus, release_delay="never" if plan.release is None else plan.release)
        scene.policy(_policy(plan))
        if plan.fault == "mig":
            self._stack.enter_context(self._instances())
        for gpu in self._state()["gpus"]:
            self._uuids[gpu["uuid"]] = (gpu["slot"], None)
            self._uuids.update({part["uuid"]: (gpu["slot"], part["number"]) for part in gpu["instances"]})
        # Who is given a GPU comes while it is clean, and who is about to go while there is still time to see it.
        order = {"claimant": 0, "own": 1, "stopping": 9}
        for actor in sorted(plan.actors, key=lambda actor: order.get(actor.role, 5)):
            self._enter(actor)
        self._server(self._own, plan.selected, "KillMode=process\n" if self._has("own") else "")
        units = [self._own]
        if plan.event == "second":
            units.append(scene.server(gpus=self._words(plan.second), command=f"{self._hook} clean --json"))
        self._break()
        before, claimed = self._state(), self._claimed()
        cursor = scene.node.journal("--lines=1")[0]["__CURSOR"]
        shell, checked = self._run(units)
        told = self._told(units, shell, checked, cursor)
        claims, left = self._claimed(), self._left()
        members = {
            pid: Member(role, unit, bool(began) and self._inside.start(pid) == began, forks)
            for pid, (role, unit, began, forks) in self._members.items()
        }
        return Seen(plan, members, before, self._state(), told, claimed, claims, left)

    # Who is there ----------------------------------------------------------------------------------------------------

    def _has(self, role: str) -> bool:
        return any(actor.role == role for actor in self._plan.actors) and not self._plan.shell

    def _join(self, role: str, unit: str, pids: Sequence[int], *, forks: bool = False) -> None:
        for pid in pids:
            self._members[pid] = (role, unit, self._inside.start(pid), forks)

    def _enter(self, actor: Actor) -> None:
        scene, role = self._scene, actor.role
        hold = _hold(actor)
        if role == "own" and not self._plan.shell:
            self._leave_in_own(hold)
        elif role in ("stale", "own"):
            count = actor.many if actor.form == "several" else 1
            unit, pids = scene.orphans(*hold, *FORMS[actor.form], *_children(actor), count=count)
            if actor.form == "crowd":
                # The one that has started the others is on its way.
                wait_for(lambda: len(scene.node.unit_pids(unit)) == actor.many, timeout=20, what="the crowd is alone")
                pids = scene.node.unit_pids(unit)
            self._join("stale", unit, pids, forks=actor.form == "forks")
        elif role == "stranger":
            unit, pids = scene.orphans(*hold, prefix=("setpriv", "--reuid=bench", "--clear-groups", "--"), user=None)
            self._join(role, unit, pids)
        elif role in ("leak", "ghost"):
            for slot, part in actor.places:
                scene.gpu.ask(role, gpu=slot, mib=actor.mib, **({} if part is None else {"instance": part}))
        elif role == "gone":
            _, pids = scene.orphans(*hold)
            self._node.run(["kill", "-KILL", *map(str, pids)])
            scene.gpu.ask("wait", gone=pids)
        elif role == "session":
            self._leave_a_session(hold)
        elif role == "claimant":
            unit = scene.server(gpus=self._words(actor.places), command=f"{HOOK} clean")
            assert scene.start(unit), f"{unit} was not given {actor.places}"
            self._join(role, unit, [int(self._node.show(unit, "MainPID")["MainPID"])])
        else:
            self._serve(actor, hold)

    def _serve(self, actor: Actor, hold: Sequence[str]) -> None:
        """An active service, or one that is being stopped."""
        scene, role = self._scene, actor.role
        more = {
            "hidden": ["--unlisted"],
            "stopping": ["--term-delay", "0.4"],
            "lingering": ["--ignore-term"],
        }.get(role, [])
        options = ["--open", "all"] if role == "watcher" else [*hold, *more]
        lasting = ["TimeoutStopSec=77s", "SendSIGKILL=no"] if role in ("lingering", "stopping") else []
        unit, pid = scene.service(*options, unit=scene.name(role), user="alice", properties=lasting)
        self._join(role, unit, [pid])
        if lasting:
            self._node.systemctl("stop", "--no-block", unit)
            # It may be gone before it is looked at.
            wait_for(
                lambda: self._node.show(unit, "ActiveState")["ActiveState"] != "active",
                timeout=20,
                what=f"{unit} is stopping",
            )

    def _leave_in_own(self, hold: Sequence[str]) -> None:
        """A run of the server's unit, without a hook, whose worker outlives its main process."""
        more = "Type=notify\nNotifyAccess=all\nKillMode=process\n"
        worker = shlex.join([HOLDER, *hold, "--fork", "1"])
        self._scene.server(self._own, command="/bin/true", server=worker, more=more)
        assert self._scene.start(self._own), "a server that has no hook does not start"
        self._join("own", self._own, sorted(self._scene.abandon(self._own)))

    def _leave_a_session(self, hold: Sequence[str]) -> None:
        self._node.run(["sh", "-c", "install -d -o alice /run/alice; rm -f /run/alice/ready"])
        job = shlex.join([HOLDER, *hold, "--ready-file", "/run/alice/ready"])
        session = self._node.login_session("alice", f"nohup {job} >/dev/null 2>&1 & exec sleep 1000")
        ready = self._inside.root / "run/alice/ready"
        wait_for(ready.exists, timeout=20, what="alice's job holds its GPU")
        pid = int(json.loads(ready.read_text())["pid"])
        self._stack.callback(self._node.run, ["kill", "-KILL", str(pid)], check=False)
        self._join("session", session.scope, [pid])
        self._node.end_session(session)

    # What there is ---------------------------------------------------------------------------------------------------

    def _words(self, places: Sequence[Place]) -> str:
        """CUDA_VISIBLE_DEVICES for these."""
        uuids = {place: uuid for uuid, place in self._uuids.items()}
        if self._plan.by == "uuid":
            return ",".join(uuids[place] if place[1] is not None else uuids[place][:12] for place in places)
        return ",".join(str(slot) for slot, _ in places)

    def _server(self, unit: str, places: Sequence[Place], more: str) -> None:
        plan = self._plan
        words = plan.detail if plan.fault == "selection" else self._words(places)
        wrapped = f"{MEASURED} " if plan.measured and not plan.shell else ""
        # An empty Environment= takes back what was set before: none of the variables, all GPUs.
        more += "Environment=\n" if plan.by == "all" else ""
        self._scene.server(unit, gpus=words, command=f"{wrapped}{self._hook} clean --json", more=more)

    @contextmanager
    def _instances(self) -> Iterator[None]:
        """GPU 0 in three instances, with their capabilities."""
        self._scene.gpu.ask("mig", gpu=0, slices=[1, 3, 3])
        self._node.run(["mount", "-t", "tmpfs", "tmpfs", "/proc/driver"])
        try:
            lines = [f"gpu0/gi{index + 1}/access {number}" for index, (number, _) in enumerate(CAPABILITIES)]
            self._node.write("/proc/driver/nvidia-caps/mig-minors", "\n".join(lines) + "\n")
            nodes = "".join(f"mknod -m 666 nvidia-cap{number} c 4 {minor};" for number, minor in CAPABILITIES)
            self._node.run(["sh", "-ec", f"mkdir -p /dev/nvidia-caps; cd /dev/nvidia-caps; {nodes}"])
            yield
        finally:
            self._node.run(["sh", "-c", "rm -rf /dev/nvidia-caps; umount /proc/driver"])

    def _break(self) -> None:
        plan, scene = self._plan, self._scene
        if plan.fault == "lost":
            scene.gpu.ask("set_gpu", gpu=int(plan.detail), lost="calls")
        elif plan.fault == "hang":
            scene.gpu.ask("hang", function=plan.detail)
        elif plan.fault == "stuck":
            hung = self._stack.enter_context(Hung(self._node.leader))
            scene.gpu.ask("hang", function=plan.detail, path=hung.file)
        elif plan.fault == "policy":
            scene.policy(_policy(plan) + plan.detail)

    def _clear(self) -> None:
        self._scene.gpu.ask("clear")
        self._scene.strike()

    # The run ---------------------------------------------------------------------------------------------------------

    def _run(self, units: Sequence[str]) -> tuple[Optional[Any], Optional[Any]]:
        """Start, have happen in the middle what is to happen, and wait until it is over. What a shell got to see of the
        hook and of a check beside it, if there was any."""
        plan = self._plan
        with ThreadPoolExecutor(3) as pool:
            if plan.shell:
                command = [MEASURED, self._hook, "clean", "--json", "--unit", self._own]
                started: list[Future[Any]] = [pool.submit(self._node.run, command, check=False)]
            else:
                started = [pool.submit(self._scene.start, unit) for unit in units]
            # Either it is over before, or the moment has come.
            wait(started, timeout=plan.delay if plan.event not in ("", "second") else None)
            beside = None
            if plan.event == "stop":
                # Where this comes before the start itself, the one cancels the other.
                self._node.systemctl("stop", self._own, check=False)
            elif plan.event == "reload":
                self._node.systemctl("daemon-reload")
            elif plan.event == "journald":
                self._node.systemctl("restart", "systemd-journald")
            elif plan.event == "check":
                beside = self._node.run([HOOK, "check", "--json", "--unit", self._own], check=False)
            results = [each.result() for each in started]
        return (results[0] if plan.shell else None), beside

    def _told(self, units: Sequence[str], shell: Optional[Any], checked: Optional[Any], cursor: str) -> list[Told]:
        """What each run said; journald may still have to read what one that has just ended has printed."""
        told: list[Told] = []

        def complete() -> bool:
            told[:] = self._read(units, shell, checked, cursor)
            return all(each.verdict or each.status is None for each in told)

        # One that has said nothing is the checker's to find.
        with suppress(AssertionError):
            self._node.wait_for(complete, timeout=5, what="journald has everything")
        return told

    def _read(self, units: Sequence[str], shell: Optional[Any], checked: Optional[Any], cursor: str) -> list[Told]:
        plan = self._plan
        # With a match, --after-cursor would leave out the first entry that fits it.
        said = self._node.journal(f"--cursor={cursor}", SYSLOG_IDENTIFIER="gpuprestart")
        said = [each for each in said if each["__CURSOR"] != cursor]
        if shell is not None:
            found = [self._typed(shell, said, plan.selected, checking=False)]
        else:
            found = [self._started(unit, said, places) for unit, places in zip(units, (plan.selected, plan.second))]
        if checked is not None:
            found.append(self._typed(checked, said, plan.selected, checking=True))
        return found

    def _started(self, unit: str, said: Sequence[Any], places: tuple[Place, ...]) -> Told:
        # Also one that was not given for this unit, though it should; and one of which a busy journald, which came to
        # look at its process when that had gone, does not tell whose it was.
        lines = [(each.get("_SYSTEMD_UNIT"), str(each["MESSAGE"])) for each in said]
        verdicts = [(owner, json.loads(line)) for owner, line in lines if line.startswith('{"version"')]
        printed = [verdict for owner, verdict in verdicts if unit in (owner, verdict["unit"])]
        verdict = printed[-1] if printed else {}
        shown = self._node.show(unit, "ActiveState", "ExecMainStartTimestampMonotonic", "ExecStartPre", "InvocationID")
        ended = re.search(r"code=exited ; status=(\d+)", shown["ExecStartPre"])
        # systemd may have forgotten which start it was, and journald may not know whose record it is.
        runs = {shown["InvocationID"], verdict.get("run", "")} - {""}
        records = [
            each
            for each in said
            if "GPUPRESTART_EVENT" in each and (each["GPUPRESTART_RUN"] in runs or each.get("_SYSTEMD_UNIT") == unit)
        ]
        plain = [each for each in said if each.get("_SYSTEMD_UNIT") == unit and "GPUPRESTART_EVENT" not in each]
        started: Optional[bool] = shown["ExecMainStartTimestampMonotonic"] != "0"
        if self._plan.event == "stop" and shown["ActiveState"] == "inactive" and not started:
            # systemd has forgotten it, or it was told to stop between the hook and the server.
            started = None
        return Told(
            unit=unit,
            places=places,
            status=int(ended[1]) if ended else None,
            started=started,
            verdict=verdict,
            records=records,
            lines=len(plain),
        )

    def _typed(self, done: Any, said: Sequence[Any], places: tuple[Place, ...], *, checking: bool) -> Told:
        verdict = json.loads(done.stdout) if done.stdout.startswith("{") else {}
        records = [each for each in said if each.get("GPUPRESTART_RUN") == verdict.get("run", "")]
        return Told("", places, done.returncode, None, verdict, records, len(done.stderr.splitlines()), checking)

    # What the node says ----------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        return self._scene.gpu.ask("state")

    def _claimed(self) -> dict[Place, str]:
        """Which unit has been given which place, and is still up by the same start."""
        found = {}
        folder = self._inside.root / RUN[1:] / "claims"
        for path in folder.iterdir() if folder.exists() else ():
            words = dict(word.partition("=")[::2] for word in path.read_text().split())
            if path.name not in self._uuids or not words.get("unit"):
                continue
            shown = self._node.show(words["unit"], "ActiveState", "InvocationID")
            up = shown["ActiveState"] in ("active", "activating", "reloading")
            if up and shown["InvocationID"] == words["invocation"]:
                found[self._uuids[path.name]] = words["unit"]
        return found

    def _left(self) -> list[str]:
        """What a run that is over must not have left."""
        found: list[str] = []

        def nothing() -> bool:
            commands = self._inside.commands()
            here = commands["gpuprestart"]
            # What hangs in the driver is there until that lets it go; it is looked for when everybody has left.
            found[:] = [f"{here} processes gpuprestart left"] if here and self._plan.fault != "stuck" else []
            return not found

        with suppress(AssertionError):
            wait_for(nothing, timeout=3, what="the hook's children have ended with it")
        for path in self._inside.files():
            name = str(path.relative_to(self._inside.root))
            if not re.fullmatch(r"(GPU|MIG)-[0-9a-f-]{36}", path.name):
                found.append(f"file {name} left")
            elif path.parent.name == "locks" and self._inside.lock_is_held(path):
                found.append(f"lock {name} is held")
        return found


def _hold(actor: Actor) -> list[str]:
    """Options of holder.py for memory on these places."""
    if not actor.places:
        return []
    slots = ",".join(str(slot) for slot, _ in actor.places)
    options = ["--open", slots, "--gpu", slots, "--mib", str(actor.mib)]
    for _, part in actor.places:
        if part is not None:
            number = CAPABILITIES[part][0]
            options += ["--path", f"/dev/nvidia-caps/nvidia-cap{number}", "--alloc", f"instance={part}"]
    return options


def _children(actor: Actor) -> list[str]:
    return ["--fork", str(actor.many)] if actor.form == "crowd" else []


def _policy(plan: Plan) -> str:
    """The times are scaled so that a run that waits for nobody's memory is over in a second."""
    text = '[memory]\nsettle = "100 ms"\n[deadline]\nterm = "300 ms"\n'
    text += f'total = "{"3 s" if plan.hopeless else "20 s"}"\n'
    if plan.fault in ("hang", "stuck"):
        text += 'nvml = "700 ms"\nnvml_init = "700 ms"\n'
    if any(actor.role == "spared" for actor in plan.actors):
        text += "[[rule]]\nmatch = { unit = 't-spared-*' }\naction = 'spare'\n"
    return text
