"""A service as systemd has loaded it, in so far as it decides what becomes of a start that gpuprestart stands before.

Pure: it reads what host.systemd brings, and judges nothing. Times are seconds, None is no limit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional

#: How systemd writes "no limit" where a time is meant (USEC_INFINITY).
_INFINITY = 2**64 - 1

#: The names of signals as SuccessExitStatus= takes them, without SIG.
_SIGNALS = {1: "HUP", 2: "INT", 3: "QUIT", 6: "ABRT", 9: "KILL", 13: "PIPE", 14: "ALRM", 15: "TERM"}

#: What of a sandbox decides what the hook can do in it.
_SANDBOX = (
    "CapabilityBoundingSet",
    "PrivatePIDs",
    "PrivateUsers",
    "ProtectSystem",
    "ReadWritePaths",
    "RestrictAddressFamilies",
)

#: What stands for the instance where a template as a whole is asked about.
INSTANCE = "gpuprestart"


def called(unit: str) -> str:
    """The name by which people know what was asked about: the template, where it stands for one."""
    return unit.replace(f"@{INSTANCE}.", "@.")


class Exec(NamedTuple):
    """One command of a service; ``flags`` are systemd's words for the prefixes: ignore-failure is ``-``, privileged
    is ``+``."""

    path: str
    argv: tuple[str, ...]
    flags: frozenset[str]

    def __str__(self) -> str:
        return " ".join(self.argv)

    @property
    def ours(self) -> bool:
        """It is the hook, run by itself or through something else."""
        return any(re.search(r"(^|[/\s])gpuprestart($|\s)", word) for word in self.argv) and "clean" in str(self)


class Service(NamedTuple):
    name: str
    load_state: str
    active_state: str
    #: The file of the unit, and its drop-ins in the order in which systemd reads them.
    fragment: str
    drop_ins: tuple[str, ...]
    need_reload: bool
    type: str
    user: str
    notify_access: str
    restart: str
    restart_sec: Optional[float]
    timeout_start: Optional[float]
    start_limit_interval: Optional[float]
    start_limit_burst: int
    condition: tuple[Exec, ...]
    start_pre: tuple[Exec, ...]
    start: tuple[Exec, ...]
    after: tuple[str, ...]
    #: Numbers, and signals without their SIG, that systemd takes for success.
    success_statuses: frozenset[str]
    environment: Mapping[str, str]
    #: Each file or pattern of EnvironmentFile=, and whether it may be missing.
    environment_files: tuple[tuple[str, bool], ...]
    device_policy: str
    private_devices: bool
    protect_proc: str
    proc_subset: str
    #: Made by systemd-run and the like: it has no file that outlives it.
    transient: bool
    #: Why systemd could not load it, in its own words.
    load_error: str
    stop_post: tuple[Exec, ...]
    #: What each entry of DeviceAllow= allows: some of r, w and m.
    device_rights: Mapping[str, str]
    dynamic_user: bool
    #: Sockets, timers and paths that start it.
    triggered_by: tuple[str, ...]
    #: Of the sandbox that a command without + is in, by setting, as systemd says it.
    sandbox: Mapping[str, Any]
    #: What cannot be up at the same time, and needs not be kept off its GPUs (Conflicts=, from either side).
    conflicts: frozenset[str]
    #: Where all its commands run, the hook too (RootDirectory=); empty where that is / or holds for the server alone.
    root_directory: str
    #: What systemd does to the machine when a start has failed, by setting: FailureAction=, StartLimitAction=.
    actions: Mapping[str, str]

    @property
    def files(self) -> tuple[str, ...]:
        return (*((self.fragment,) if self.fragment else ()), *self.drop_ins)


def from_properties(name: str, said: Mapping[str, Any]) -> Service:
    """The service from systemd's own properties (org.freedesktop.systemd1(5)); what an older systemd does not have
    reads as its default."""
    numbers, signals = said.get("SuccessExitStatus", ([], []))
    words = (word.partition("=") for word in said.get("Environment", ()))
    return Service(
        name=name,
        load_state=said.get("LoadState", ""),
        active_state=said.get("ActiveState", ""),
        fragment=said.get("FragmentPath", ""),
        drop_ins=tuple(said.get("DropInPaths", ())),
        need_reload=bool(said.get("NeedDaemonReload", False)),
        type=said.get("Type", ""),
        user=said.get("User", ""),
        notify_access=said.get("NotifyAccess", "none"),
        restart=said.get("Restart", "no"),
        restart_sec=_seconds(said.get("RestartUSec", 100_000)),
        timeout_start=_seconds(said.get("TimeoutStartUSec", _INFINITY)),
        start_limit_interval=_seconds(said.get("StartLimitIntervalUSec", 10_000_000)),
        start_limit_burst=int(said.get("StartLimitBurst", 5)),
        condition=_commands(said.get("ExecConditionEx", ())),
        start_pre=_commands(said.get("ExecStartPreEx", ())),
        start=_commands(said.get("ExecStartEx", ())),
        after=tuple(said.get("After", ())),
        success_statuses=frozenset([*map(str, numbers), *(_SIGNALS.get(number, str(number)) for number in signals)]),
        environment={key: value for key, equals, value in words if equals},
        environment_files=tuple((path, bool(optional)) for path, optional in said.get("EnvironmentFiles", ())),
        device_policy=said.get("DevicePolicy", "auto"),
        private_devices=bool(said.get("PrivateDevices", False)),
        protect_proc=said.get("ProtectProc", "default"),
        proc_subset=said.get("ProcSubset", "all"),
        transient=bool(said.get("Transient", False)),
        load_error=said.get("LoadError", ("", ""))[1],
        stop_post=_commands(said.get("ExecStopPostEx", ())),
        device_rights=dict(said.get("DeviceAllow", ())),
        dynamic_user=bool(said.get("DynamicUser", False)),
        triggered_by=tuple(said.get("TriggeredBy", ())),
        sandbox={key: said[key] for key in _SANDBOX if key in said},
        conflicts=frozenset([*said.get("Conflicts", ()), *said.get("ConflictedBy", ())]),
        root_directory="" if said.get("RootDirectoryStartOnly") else said.get("RootDirectory", "").rstrip("/"),
        actions={key: said[key] for key in ("FailureAction", "StartLimitAction") if said.get(key, "none") != "none"},
    )


def _seconds(usec: int) -> Optional[float]:
    return None if usec == _INFINITY else usec / 1_000_000


def _commands(said: Any) -> tuple[Exec, ...]:
    return tuple(Exec(path=each[0], argv=tuple(each[1]), flags=frozenset(each[2])) for each in said)
