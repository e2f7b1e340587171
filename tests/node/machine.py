"""A simulated GPU node that tests and the demo run commands on: booted with systemd, or a plain chroot.

It knows how to start one from the layers of image.py, how to get a command, a file or a login session
into it and the journal out of it, and how to leave nothing of it behind. It knows nothing of what the
stand-in driver keeps in its state, nor of what gpuprestart decides.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import json
import os
import secrets
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar

from . import image, keeper

REPOSITORY = Path(__file__).parents[2]

#: The device nodes are virtual consoles that nobody uses: they open, and each has a number of its own.
FIRST_MINOR, CONTROL_MINOR, UVM_MINOR = 40, 56, 57
MOST_GPUS = 16

T = TypeVar("T")
Machine_ = TypeVar("Machine_", bound="Machine")


class NodeError(Exception):
    """The node could not be started, or it is gone, or a command on it failed."""


def wait_for(condition: Callable[[], T], *, timeout: float, what: str, interval: float = 0.02) -> T:
    """Ask until the answer is true and give it back; AssertionError, naming `what`, if it never is."""
    limit = time.monotonic() + timeout
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > limit:
            raise AssertionError(f"{what}: not so within {timeout:g} s (last answer: {answer!r})")
        time.sleep(interval)


@functools.cache
def can_chroot() -> str | None:
    """Why not even a plain chroot of the node's root can be made on this machine; None if it can."""
    if not sys.platform.startswith("linux"):
        return "not Linux"
    if os.geteuid() != 0:
        return "not root"
    missing = [tool for tool in ("mmdebstrap", "nsenter", "unshare", "setpriv", "mount", "chroot") if not _which(tool)]
    if missing:
        return f"no {', '.join(missing)} (tests/node/setup.sh installs them)"
    # Tried rather than asked: capabilities, security modules and kernels each have their own say.
    attempt = f"""
        mount -t tmpfs -o mode=755 tmpfs /mnt
        mkdir /mnt/lower /mnt/upper /mnt/work /mnt/root
        mount -t overlay overlay -o lowerdir=/mnt/lower,upperdir=/mnt/upper,workdir=/mnt/work /mnt/root
        mknod /mnt/nvidia0 c 4 {FIRST_MINOR}
        : < /mnt/nvidia0
        unshare --pid --fork --net --ipc --uts --mount-proc=/mnt/root true
    """
    done = subprocess.run(
        ["unshare", "--mount", "/bin/sh", "-ec", attempt],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=_environment(),
        start_new_session=True,
    )  # fmt: skip
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"status {done.returncode}"
        return f"cannot mount, make device nodes and namespaces ({said})"
    return None


@functools.cache
def can_boot() -> str | None:
    """Why a node with systemd cannot boot on this machine; None if it can."""
    reason = can_chroot()
    if reason is not None:
        return reason
    if not _which("systemd-nspawn"):
        return "no systemd-nspawn (tests/node/setup.sh installs it)"
    parents = _cgroup_parents()
    if not any(fstype == "cgroup2" for fstype, _ in parents):
        return "no cgroup2 file system is mounted"
    for _, parent in parents:
        probe = parent / f"gpunode-probe-{secrets.token_hex(4)}"
        try:
            probe.mkdir()
            probe.rmdir()
        except OSError as error:
            return f"cannot make a cgroup: {error}"
    return None


class Machine:
    """What a booted node and a plain chroot have in common: a root, a PID 1, devices, and commands.

    Use it as a context manager. Whatever ends the `with` block, or this process, ends the machine too.
    """

    boots = False
    #: What a command enters, as nsenter's options: all namespaces of PID 1, and its root folder, which
    #: is not that of its mount namespace where this process itself lives in a chroot.
    namespaces = ("-m", "-u", "-i", "-n", "-p", "-C", "-r", "-w")

    def __init__(
        self,
        *,
        gpus: int = 8,
        release: str = "bookworm",
        uvm: bool = False,
        devices: Mapping[str, int] | None = None,
        nspawn: Sequence[str] = (),
        product: bool = True,
        driver: bool = True,
        bare: bool = False,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """`devices` are further nodes, path to minor number of major 4; `nspawn` further arguments of it.

        `product` and `driver` say whether gpuprestart and the stand-in driver are installed on it. On a `bare` node
        gpuprestart is not, nor anything that it needs beside Python.
        """
        if not 0 <= gpus <= MOST_GPUS:
            raise ValueError(f"gpus: {gpus} (allowed: 0 to {MOST_GPUS})")
        self.devices: dict[str, int] = {f"/dev/nvidia{index}": FIRST_MINOR + index for index in range(gpus)}
        if gpus:
            self.devices["/dev/nvidiactl"] = CONTROL_MINOR
        if uvm:
            self.devices["/dev/nvidia-uvm"] = UVM_MINOR
        self.devices.update(devices or {})
        self.name = f"gpunode-{secrets.token_hex(4)}"
        self.release = release
        self.leader = 0
        self._nspawn = list(nspawn)
        self._product = product and not bare
        self._driver = driver
        self._bare = bare
        self._say = say or (lambda _: None)
        self._keeper: subprocess.Popen[str] | None = None
        self._state: Path | None = None
        self._locks: list[IO[str]] = []
        self._last_words: dict[str, Any] = {}

    def __enter__(self: Machine_) -> Machine_:
        self.boot()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- its life

    def boot(self) -> None:
        """Start the machine and wait until it is ready for commands."""
        reason = can_boot() if self.boots else can_chroot()
        if reason is not None:
            raise NodeError(f"no simulated node here: {reason}")
        try:
            self._start()
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        remove_leftovers()
        layers = image.layers(release=self.release, driver=self._driver, bare=self._bare, say=self._say)
        self._locks += layers.locks
        self._state = state = self._make_state()
        lower = list(layers.paths)
        if self._product and _has_install_target():
            lower.insert(0, install_product(state / "product"))
        cgroups = [parent / self.name for _, parent in _cgroup_parents()] if self.boots else []
        # Written before anything is made, so that whoever finds the folder of a dead owner knows
        # what else to look for.
        (state / "cgroups").write_text("".join(f"{path}\n" for path in cgroups))
        spec = {
            "name": self.name,
            "state": str(state),
            "lower": [str(path) for path in lower],
            "cgroups": [str(path) for path in cgroups],
            "devices": self.devices,
            "nspawn": self._nspawn,
            "boot": self.boots,
        }
        self._keeper = subprocess.Popen(
            ["unshare", "--mount", sys.executable, "-I", keeper.__file__, json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(),
            # The locks say "in use" for as long as either of us lives.
            pass_fds=[lock.fileno() for lock in self._locks],
            start_new_session=True,
            umask=0o022,
        )
        told = self._hear(timeout=60.0)
        if "leader" not in told or "gone" in told:
            raise NodeError(f"the node did not start: {told.get('error', told)}\n{told.get('console', '')}")
        self.leader = int(told["leader"])

    def _make_state(self) -> Path:
        nodes = image.cache_directory() / "nodes"
        nodes.mkdir(parents=True, exist_ok=True)
        with image.locked(nodes / "lock"):
            state = nodes / self.name
            state.mkdir()
            lock = open(state / "lock", "w")  # noqa: SIM115 (held as long as the node lives)
            fcntl.flock(lock, fcntl.LOCK_EX)
        self._locks.append(lock)
        return state

    def _wait_until_ready(self) -> None:
        pass

    def _hear(self, *, timeout: float) -> dict[str, Any]:
        """The next line of the keeper; its last one is remembered, it says how the node ended."""
        assert self._keeper is not None
        assert self._keeper.stdout is not None
        if not select.select([self._keeper.stdout], [], [], timeout)[0]:
            raise NodeError(f"the node's keeper said nothing for {timeout:g} s")
        line = self._keeper.stdout.readline()
        if not line:
            return {"gone": True, "error": f"the node's keeper ended with status {self._keeper.wait()}"}
        told: dict[str, Any] = json.loads(line)
        if "gone" in told:
            self._last_words = told
        return told

    def close(self) -> None:
        """Take the machine down; NodeError if something of it could not be removed."""
        process, self._keeper = self._keeper, None
        self.leader = 0
        try:
            if process is not None:
                _end_keeper(process)
        finally:
            for lock in self._locks:
                lock.close()
            self._locks = []
            state, self._state = self._state, None
        if state is not None:
            left = _remove_state(state)
            if left:
                raise NodeError(f"left behind by {self.name}: {', '.join(left)}")

    # ---- commands and files

    def argv(self, command: Sequence[str], *, user: str | None = None) -> list[str]:
        """What to execute on the host to run a command on the machine."""
        if self._keeper is None or not self.leader:
            raise NodeError("the node is not running")
        if self._keeper.poll() is not None:
            told = self._last_words or self._hear(timeout=1.0)
            raise NodeError(f"the node has gone: {told.get('error', 'its PID 1 ended')}\n{told.get('console', '')}")
        if user is not None:
            command = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--", *command]
        # The full path, because the environment that goes with it is the node's.
        return [_which("nsenter") or "nsenter", "-t", str(self.leader), *self.namespaces, "--", *command]

    def run(
        self,
        argv: Sequence[str],
        *,
        check: bool = True,
        input: str | None = None,  # noqa: A002 (named as subprocess.run names it)
        timeout: float = 60.0,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the machine and wait for it.

        It runs in the machine's namespaces but outside its cgroups: what is to be found as some unit's
        process has to be started by start(), start_scope() or login_session().
        """
        process = subprocess.Popen(
            self.argv(argv, user=user),
            stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="surrogateescape",
            env={**image.CLEAN_ENVIRONMENT, **(env or {})},
            # nsenter forks to get into the PID namespace, and a signal for it alone would leave its
            # child behind: a session of its own, ended as a group, reaches both.
            start_new_session=True,
        )
        try:
            stdout, stderr = process.communicate(input, timeout)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
        done = subprocess.CompletedProcess(list(argv), process.returncode, stdout, stderr)
        if check and done.returncode != 0:
            raise NodeError(f"{shlex.join(argv)} ended with status {done.returncode}: {stderr}{stdout}")
        return done

    def write(self, path: str, text: str, *, mode: int = 0o644) -> None:
        """Write a file, in one step for whoever reads it, making its folder if need be."""
        script = 'mkdir -p "$(dirname "$1")"; cat > "$1.new"; chmod "$2" "$1.new"; mv -f "$1.new" "$1"'
        self.run(["/bin/sh", "-ec", script, "sh", path, f"{mode:o}"], input=text)

    def read(self, path: str) -> str:
        return self.run(["cat", path]).stdout

    def exists(self, path: str) -> bool:
        return self.run(["test", "-e", path], check=False).returncode == 0

    def wait_for(self, condition: Callable[[], T], *, timeout: float, what: str) -> T:
        return wait_for(condition, timeout=timeout, what=what)

    # ---- its processes, seen from the host

    def host_pid(self, pid: int) -> int | None:
        """The host's number for a process of the machine; None if there is no such process."""
        depth = len(keeper.ns_pids(self.leader)) - 1
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                pids = keeper.ns_pids(int(entry))
                if len(pids) > depth and pids[depth] == pid and self._contains(int(entry)):
                    return int(entry)
        return None

    def node_pid(self, host_pid: int) -> int | None:
        """The machine's number for a process of the host; None if the machine cannot see it."""
        depth = len(keeper.ns_pids(self.leader)) - 1
        pids = keeper.ns_pids(host_pid)
        return pids[depth] if len(pids) > depth and self._contains(host_pid) else None

    def pids(self) -> list[int]:
        """All processes of the machine, as the machine numbers them."""
        found = (self.node_pid(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())
        return sorted(pid for pid in found if pid is not None)

    def _contains(self, host_pid: int) -> bool:
        """Whether a process lives in the machine's PID namespace or in one below it."""
        NS_GET_PARENT = 0xB702  # noqa: N806 (the kernel's name)
        try:
            wanted = os.stat(f"/proc/{self.leader}/ns/pid")
            namespace = os.open(f"/proc/{host_pid}/ns/pid", os.O_RDONLY)
        except OSError:
            return False
        try:
            while True:
                seen = os.fstat(namespace)
                if (seen.st_dev, seen.st_ino) == (wanted.st_dev, wanted.st_ino):
                    return True
                try:
                    parent = fcntl.ioctl(namespace, NS_GET_PARENT)
                except OSError:
                    return False
                os.close(namespace)
                namespace = parent
        finally:
            os.close(namespace)


class Chroot(Machine):
    """The same root with the same devices in namespaces of its own, but without systemd: for machines on
    which no container boots."""


@dataclasses.dataclass(frozen=True)
class LoginSession:
    """A session that logind knows, with the unit that stands in for sshd or login."""

    id: str
    user: str
    scope: str
    leader: int
    unit: str


class Node(Machine):
    """A booted node: systemd is PID 1, with journald, logind, D-Bus and unified cgroups."""

    boots = True

    def _wait_until_ready(self) -> None:
        def state() -> str:
            word = self.run(["systemctl", "is-system-running"], check=False).stdout.strip()
            return word if word in ("running", "degraded") else ""

        try:
            wait_for(state, timeout=60.0, what="the node is up")
        except AssertionError as error:
            jobs = self.run(["systemctl", "list-jobs", "--no-pager"], check=False)
            raise NodeError(f"{error}\n{jobs.stdout}{jobs.stderr}{self.console()}") from None
        if self._product:
            # What dpkg's and rpm's triggers do after a package has brought a message catalog.
            self.run(["journalctl", "--update-catalog"])

    def console(self) -> str:
        """What the node's PID 1 has said so far; all there is when it does not come up."""
        try:
            return (self._state / "console").read_text(errors="replace") if self._state else ""
        except OSError:
            return ""

    # ---- systemd

    def systemctl(self, *args: str, check: bool = True, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
        return self.run(["systemctl", *args], check=check, timeout=timeout)

    def show(self, unit: str, *properties: str) -> dict[str, str]:
        """The properties of a unit, as `systemctl show` prints them."""
        only = [f"--property={','.join(properties)}"] if properties else []
        lines = self.systemctl("show", *only, "--", unit).stdout.splitlines()
        return {name: value for name, _, value in (line.partition("=") for line in lines)}

    def unit_pids(self, unit: str) -> list[int]:
        """The processes in a unit's cgroup and below it, active or not, as the node numbers them."""
        cgroup = self.show(unit, "ControlGroup")["ControlGroup"]
        if not cgroup:
            return []
        script = 'find "/sys/fs/cgroup$1" -name cgroup.procs -exec cat {} + 2>/dev/null || :'
        return sorted(int(pid) for pid in self.run(["/bin/sh", "-c", script, "sh", cgroup]).stdout.split())

    def start(
        self,
        argv: Sequence[str],
        *,
        unit: str | None = None,
        user: str | None = None,
        properties: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        wait: bool = False,
        check: bool = True,
    ) -> str:
        """Start a command as a transient service and give back the unit's name.

        It is started when the call returns (Type=exec unless `properties`, `Name=value` each, say
        otherwise); with `wait` it is over.
        """
        unit = unit or f"t-{secrets.token_hex(4)}.service"
        if "." not in unit:
            unit += ".service"
        settings = list(properties)
        if not any(setting.startswith("Type=") for setting in settings):
            settings.append("Type=exec")
        if user is not None:
            settings.append(f"User={user}")
        command = ["systemd-run", "--quiet", f"--unit={unit}"]
        command += [f"--property={setting}" for setting in settings]
        command += [f"--setenv={name}={value}" for name, value in (env or {}).items()]
        command += ["--wait"] if wait else []
        self.run([*command, "--", *argv], check=check)
        return unit

    def start_scope(self, argv: Sequence[str], *, unit: str | None = None, user: str | None = None) -> str:
        """Start a command in a transient scope, reparented to PID 1, and give back the scope's name."""
        unit = unit or f"t-{secrets.token_hex(4)}.scope"
        if "." not in unit:
            unit += ".scope"
        as_user = [f"--uid={user}", f"--gid={user}"] if user is not None else []
        command = ["setsid", "systemd-run", "--quiet", "--scope", f"--unit={unit}", *as_user, "--", *argv]
        # systemd-run executes the command in its own place: it has to be in the background, and its
        # parent gone, before there is anything to give back.
        self.run(["/bin/sh", "-c", f"{shlex.join(command)} </dev/null >/dev/null 2>&1 &"])
        wait_for(
            lambda: self.show(unit, "ActiveState")["ActiveState"] == "active",
            timeout=10.0,
            what=f"{unit} is active",
        )
        return unit

    def login_session(self, user: str, command: str, *, timeout: float = 20.0) -> LoginSession:
        """Log a user in, by PAM and logind as sshd would, with a shell that runs `command`.

        The shell is the session's leader; the session is alive until the shell ends.
        """
        unit = f"login-{user}-{secrets.token_hex(4)}.service"
        self.start(
            ["/bin/bash", "-c", command],
            unit=unit,
            user=user,
            # Not Type=exec: systemd's PAM watcher, which closes the session when the leader is gone,
            # keeps the descriptor open whose closing would tell that the command was executed.
            # Collected, because a real sshd leaves no failed unit behind when its client is gone.
            properties=["PAMName=login", "Type=simple", "CollectMode=inactive-or-failed"],
        )
        leader = int(self.show(unit, "ExecMainPID")["ExecMainPID"])

        def session() -> str:
            # logind knows the session before systemd has made its scope, and the leader is still
            # systemd's own code, with a name like "(bash)", until PAM is through.
            if self.run(["cat", f"/proc/{leader}/comm"]).stdout.startswith("("):
                return ""
            for line in self.run(["loginctl", "list-sessions", "--no-legend"]).stdout.splitlines():
                found = line.split()[0]
                shown = self.run(["loginctl", "show-session", found, "--property=Leader", "--value"], check=False)
                if shown.stdout.strip() == str(leader) and leader in self.unit_pids(f"session-{found}.scope"):
                    return found
            return ""

        number = wait_for(session, timeout=timeout, what=f"logind has a session of {user} with leader {leader}")
        return LoginSession(id=number, user=user, scope=f"session-{number}.scope", leader=leader, unit=unit)

    def end_session(self, session: LoginSession, *, timeout: float = 20.0) -> None:
        """End the session's leader, as a lost connection does, and wait until logind has noticed.

        What else runs in the session is left alone: its scope is then abandoned, or gone if empty.
        """
        self.run(["kill", "-KILL", str(session.leader)], check=False)

        def over() -> bool:
            shown = self.show(session.scope, "ActiveState", "SubState")
            return shown["SubState"] == "abandoned" or shown["ActiveState"] == "inactive"

        wait_for(over, timeout=timeout, what=f"{session.scope} is abandoned or gone")

    def journal(
        self, *options: str, unit: str | None = None, sync: bool = True, **matches: str
    ) -> list[dict[str, Any]]:
        """Journal entries, oldest first: `journal(unit="x.service")`, `journal(SYSLOG_IDENTIFIER="y")`.

        A field is a str, bytes that are not UTF-8 as surrogate escapes, or a list if it occurs twice.
        """
        if sync:
            # Answered only after journald has taken in everything that was sent to it before.
            self.run(["journalctl", "--sync"])
        command = ["journalctl", "--output=json", "--all", "--no-pager", "--quiet", *options]
        given = [f"{name}={value}" for name, value in matches.items()]
        if unit:
            # As --unit=, but believing also what was said of the unit by a process that had gone before journald could
            # see whose it was, such as systemd's own when it cannot execute a command.
            fields = ("_SYSTEMD_UNIT", "UNIT", "OBJECT_SYSTEMD_UNIT")
            command += [word for field in fields for word in ("+", f"{field}={unit}", *given)][1:]
        else:
            command += given
        return [
            {name: _journal_value(value) for name, value in json.loads(line).items()}
            for line in self.run(command).stdout.splitlines()
        ]


def _journal_value(value: Any) -> Any:
    """journalctl prints a field that is not plain text as a list of its bytes, and a repeated one as a list
    of values."""
    if isinstance(value, list):
        if all(isinstance(item, int) for item in value):
            return bytes(value).decode(errors="surrogateescape")
        return [_journal_value(item) for item in value]
    return value


def install_product(target: Path) -> Path:
    """Install gpuprestart as a packager would, to be laid over the node's root."""
    target.mkdir(mode=0o755)
    image.command(
        [
            "make",
            "--no-print-directory",
            "-C",
            str(REPOSITORY),
            "install",
            f"DESTDIR={target}",
            "PREFIX=/usr",
        ],
        env={**os.environ, "MAKEFLAGS": "", "MAKELEVEL": ""},
    )
    return target


def _has_install_target() -> bool:
    makefile = REPOSITORY / "Makefile"
    return makefile.is_file() and any(line.startswith("install:") for line in makefile.read_text().splitlines())


def remove_leftovers() -> None:
    """Remove what nodes left whose owner and keeper were both killed. Their mounts and processes went with
    them; cgroups and folders cannot."""
    nodes = image.cache_directory() / "nodes"
    nodes.mkdir(parents=True, exist_ok=True)
    with image.locked(nodes / "lock"):
        for state in nodes.glob("gpunode-*"):
            with suppress(FileNotFoundError), open(state / "lock", "w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
            _remove_state(state)


def _remove_state(state: Path) -> list[str]:
    """Remove the folder of an ended node and its cgroups, and say what would not go."""
    try:
        cgroups = [Path(line) for line in (state / "cgroups").read_text().splitlines()]
    except OSError:
        cgroups = []
    left = [str(path) for path in cgroups if not keeper.remove_cgroup(path)]
    if not left:
        shutil.rmtree(state, ignore_errors=True)
        left = [str(state)] if state.exists() else []
    return left


def _end_keeper(process: subprocess.Popen[str]) -> None:
    """Closing its standard input tells the keeper to take the node down; then it ends by itself."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        process.wait(60.0)
    except BaseException:
        process.kill()
        process.wait()
        raise
    finally:
        process.stdout.close()


def _cgroup_parents() -> list[tuple[str, Path]]:
    """Where a node's cgroups go: the root of the unified hierarchy and, on a hybrid machine, that of
    systemd's own, as nspawn uses both."""
    found: list[tuple[str, Path]] = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        fstype, _, options = after.split(" ")[:3]
        if fstype == "cgroup2" or (fstype == "cgroup" and "name=systemd" in options.split(",")):
            path = Path(before.split(" ")[4])
            # A chroot may have the same hierarchy mounted once more; a cgroup made in the one is there in the other.
            if not any(kind == fstype and path.stat().st_dev == known.stat().st_dev for kind, known in found):
                found.append((fstype, path))
    return found


def _environment() -> dict[str, str]:
    """Ours, with the folders of root's programs in PATH: su and cron leave them out."""
    return {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin:/sbin:/bin".lstrip(":")}


def _which(tool: str) -> str | None:
    return shutil.which(tool, path=_environment()["PATH"])
