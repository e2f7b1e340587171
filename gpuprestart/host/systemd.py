"""What systemd itself says of its units, through ``systemctl show``: many units in one call.

It answers with what systemd printed and judges nothing. No answer, or a broken one, is a SystemdError.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence

from ..model import Unit, Wait

#: Absolute: nothing on the way of a server start is looked up in a PATH.
SYSTEMCTL = "/bin/systemctl"  # Where /bin and /usr/bin are two folders, as on old Debians, it is in the former.
BUSCTL = "/usr/bin/busctl"
ANALYZE = "/usr/bin/systemd-analyze"

#: Seconds for what reads every unit file that there is.
SLOW = 90.0

#: Seconds for each call after one that was not answered.
AGAIN = 1.0

#: The environment of everything that is run from here. Without the caller's own, nothing in it can change an answer.
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": ""}

PROPERTIES = (
    "Id",
    "LoadState",
    "ActiveState",
    "SubState",
    "ControlGroup",
    "Type",
    "User",
    "ControlPID",
    "MainPID",
    "ConditionTimestampMonotonic",
    "TimeoutStopUSec",
    "TimeoutStartUSec",
    "NotifyAccess",
    "SuccessExitStatus",
    "InvocationID",
)

#: Units of time as systemctl prints them (format_timespan in systemd's time-util.c), in seconds.
_SPAN = {"y": 31557600, "month": 2629800, "w": 604800, "d": 86400, "h": 3600, "min": 60, "s": 1, "ms": 1e-3, "us": 1e-6}


class SystemdError(Exception):
    """systemd could not be asked; the text says why."""


class Systemd:
    """systemd by way of its own command, asked with a timeout in seconds for every call."""

    def __init__(
        self,
        wait: Wait,
        *,
        systemctl: str = SYSTEMCTL,
        busctl: str = BUSCTL,
        analyze: str = ANALYZE,
        timeout: float = 10.0,
    ) -> None:
        self._wait = wait
        self._systemctl = systemctl
        self._busctl = busctl
        self._analyze = analyze
        self._timeout = timeout
        self._until = math.inf

    def hurry(self, seconds: float) -> None:
        """Have no call last much longer than so many seconds from now; each is still given one."""
        self._until = time.monotonic() + seconds

    def _silent(self) -> SystemdError:
        """It did not answer in time, and is not waited for as long again."""
        self._timeout = min(self._timeout, AGAIN)
        return SystemdError("systemd did not answer in time")

    def units(self, names: Sequence[str]) -> dict[str, Unit]:
        """Each unit by the name it was asked for. One that systemd does not know is ``not-found`` and ``inactive``."""
        if not names:
            return {}
        output = self._run([self._systemctl, "show", "--no-pager", f"--property={','.join(PROPERTIES)}", "--", *names])
        blocks = output.strip("\n").split("\n\n")
        if len(blocks) != len(names):
            raise SystemdError(f"systemctl show answered for {len(blocks)} units when asked for {len(names)}")
        return {name: _unit(block) for name, block in zip(names, blocks)}

    def properties(self, name: str, wanted: Sequence[str]) -> dict[str, str]:
        """These properties of one unit, as systemctl prints them; one that it does not have is absent."""
        return _pairs(self._run([self._systemctl, "show", "--no-pager", f"--property={','.join(wanted)}", "--", name]))

    def everything(self, name: str) -> dict[str, object]:
        """All that systemd knows of a service, by property, loaded for it where it was not: arguments, flags and paths
        as they are, where ``systemctl show`` prints them run together (org.freedesktop.systemd1(5))."""
        import json

        bus = "org.freedesktop.systemd1"
        # busctl would take a name that begins with a hyphen for an option, such as -H for another host.
        call = [self._busctl, "--json=short", "--", "call", bus]
        try:
            manager = ("/org/freedesktop/systemd1", f"{bus}.Manager")
            path = json.loads(self._run([*call, *manager, "LoadUnit", "s", name]))["data"][0]
            found: dict[str, object] = {}
            for interface in ("Unit", "Service") if name.endswith(".service") else ("Unit",):
                get = ("org.freedesktop.DBus.Properties", "GetAll", "s", f"{bus}.{interface}")
                said = json.loads(self._run([*call, path, *get]))["data"][0]
                found.update((key, value["data"]) for key, value in said.items())
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise SystemdError(f"systemd gave an answer about {name} that cannot be read ({error})") from error
        return found

    def list_unit_files(self, pattern: str) -> list[str]:
        """The names of the unit files that fit a pattern of systemctl(1), in which a backslash is a plain character."""
        show = [self._systemctl, "list-unit-files", *_LISTING, _plain(pattern)]
        # Where nothing fits, it fails without a word.
        status, output, complaint = self._finish(show)
        if status and complaint:
            raise _failed(show, status, complaint)
        return _first_words(output.decode("utf-8", "surrogateescape"))

    def list_units(self, pattern: str) -> list[str]:
        """The same of the units that systemd has loaded, running or not."""
        return _first_words(self._run([self._systemctl, "list-units", "--all", *_LISTING, _plain(pattern)]))

    def each(self, pattern: str, wanted: Sequence[str]) -> list[dict[str, str]]:
        """These properties of every loaded unit, running or not, that fits a pattern of systemctl(1)."""
        show = [self._systemctl, "show", "--all", "--no-pager", f"--property={','.join(wanted)}", "--", pattern]
        return [_pairs(block) for block in self._run(show).split("\n\n") if block.strip()]

    def verify(self, paths: Sequence[str]) -> list[str]:
        """What systemd-analyze(1) has to complain of when it loads these units; their folders come before systemd's."""
        _, _, complaint = self._finish([self._analyze, "verify", "--man=no", "--", *paths], SLOW)
        return complaint.decode("utf-8", "replace").splitlines()

    def reload(self) -> None:
        """Have systemd read its unit files again, with generators and all."""
        self._run([self._systemctl, "daemon-reload"], SLOW)

    def kill_user_processes(self) -> tuple[bool, list[str], list[str]]:
        """What logind is set to do with what ended sessions leave: KillUserProcesses=, KillOnlyUsers=,
        KillExcludeUsers= (org.freedesktop.login1(5))."""
        import json

        wanted = ("KillUserProcesses", "KillOnlyUsers", "KillExcludeUsers")
        logind = ("org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager")
        output = self._run([self._busctl, "--json=short", "get-property", *logind, *wanted])
        try:
            kill, only, exclude = (json.loads(line)["data"] for line in output.splitlines())
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise SystemdError(f"logind gave an answer that cannot be read ({error})") from error
        if not isinstance(kill, bool) or not all(_is_words(users) for users in (only, exclude)):
            raise SystemdError("logind gave an answer that cannot be read (other types than were asked for)")
        return kill, only, exclude

    def set_aside(self, pid: int, scope: str, description: str) -> None:
        """Move a process that nothing ends out of our unit, into a scope of its own. Left where it is, it would keep a
        unit whose start has failed ``deactivating`` for up to four times its TimeoutStopSec=."""
        manager = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager")
        properties = ("2", "Description", "s", description, "PIDs", "au", "1", str(pid))
        call = ("StartTransientUnit", "ssa(sv)a(sa(sv))", scope, "fail", *properties, "0")
        self._run([self._busctl, "--quiet", "call", *manager, *call])

    def _run(self, arguments: Sequence[str], timeout: float = 0.0) -> str:
        status, output, complaint = self._finish(arguments, timeout)
        if status:
            raise _failed(arguments, status, complaint)
        return output.decode("utf-8", "surrogateescape")

    def _finish(self, arguments: Sequence[str], timeout: float = 0.0) -> tuple[int, bytes, bytes]:
        """Run a command to its end: its exit status, and what it printed."""
        import subprocess

        try:
            process = subprocess.Popen(
                list(arguments),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=ENVIRONMENT,
                cwd="/",
            )
        except OSError as error:
            raise SystemdError(f"cannot run {arguments[0]}: {error.strerror}") from error
        with process:
            try:
                now = time.monotonic()
                deadline = now + max(1.0, min(timeout or self._timeout, self._until - now))
                output, complaint = self._read(process, deadline)
                self._await(process, deadline)
            except BaseException:
                process.kill()
                raise
        return process.returncode, output, complaint

    def _await(self, process: subprocess.Popen[bytes], deadline: float) -> None:  # type: ignore[name-defined]  # noqa: F821
        """Wait for an end that must come soon: it has closed its outputs."""
        pidfd = os.pidfd_open(process.pid)
        try:
            if not self._wait([pidfd], deadline - time.monotonic()):
                raise self._silent()
        finally:
            os.close(pidfd)

    def _read(self, process: subprocess.Popen[bytes], deadline: float) -> tuple[bytes, bytes]:  # type: ignore[name-defined]  # noqa: F821
        assert process.stdout and process.stderr
        parts: dict[int, bytes] = {process.stdout.fileno(): b"", process.stderr.fileno(): b""}
        still_open = set(parts)
        while still_open:
            left = deadline - time.monotonic()
            ready = self._wait(still_open, left)
            # One that never ends to answer does not answer either.
            if not ready or left < 0:
                raise self._silent()
            for descriptor in ready:
                part = os.read(descriptor, 65536)
                parts[descriptor] += part
                if not part:
                    still_open.discard(descriptor)
        return parts[process.stdout.fileno()], parts[process.stderr.fileno()]


#: How systemctl lists, for programs.
_LISTING = ("--no-pager", "--no-legend", "--plain", "--full", "--")


def _plain(pattern: str) -> str:
    """To systemctl a backslash is an escape; names of units have some of their own."""
    return pattern.replace("\\", "\\\\")


def _first_words(listing: str) -> list[str]:
    return [line.split()[0] for line in listing.splitlines() if line.strip()]


def _failed(arguments: Sequence[str], status: int, complaint: bytes) -> SystemdError:
    lines = complaint.decode("utf-8", "replace").split("\n")
    return SystemdError(f"{arguments[0]} failed: {lines[0] or status}")


def _is_words(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def seconds(span: str) -> float | None:
    """A time span as systemctl prints it, such as ``1min 30s``; None is no limit. Raises ValueError."""
    if span == "infinity":
        return None
    total = 0.0
    for word in span.split():
        unit = word.lstrip("0123456789.")
        try:
            total += float(word[: len(word) - len(unit)]) * _SPAN[unit or "s"]
        except KeyError:
            raise ValueError(f"{span!r} is no time span") from None
    return total


def _pairs(block: str) -> dict[str, str]:
    """Properties by name. One that stands there several times, as EnvironmentFiles= does, has its values in lines."""
    pairs: dict[str, str] = {}
    for line in block.split("\n"):
        key, equals, value = line.partition("=")
        if equals:
            pairs[key] = f"{pairs[key]}\n{value}" if key in pairs else value
    return pairs


def _unit(block: str) -> Unit:
    said = _pairs(block)
    try:
        # It is shown as it stands there, and counted on elsewhere.
        seconds(said.get("TimeoutStopUSec") or "infinity")
        return Unit(
            name=said["Id"],
            load_state=said["LoadState"],
            active_state=said["ActiveState"],
            sub_state=said["SubState"],
            # Slices have none when nothing runs in them, and units that are not cgroup units have no such property.
            control_group=said.get("ControlGroup", ""),
            type=said.get("Type", ""),
            user=said.get("User", ""),
            control_pid=int(said.get("ControlPID", "0")),
            main_pid=int(said.get("MainPID", "0")),
            condition_usec=int(said.get("ConditionTimestampMonotonic", "0")),
            timeout_stop=said.get("TimeoutStopUSec", ""),
            timeout_start=seconds(said.get("TimeoutStartUSec", "infinity")),
            notify_access=said.get("NotifyAccess", ""),
            success_statuses=frozenset(said.get("SuccessExitStatus", "").split()),
            invocation=said.get("InvocationID", ""),
        )
    except (KeyError, ValueError) as error:
        raise SystemdError(f"systemctl show gave an answer that cannot be read ({error})") from error
