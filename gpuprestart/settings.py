"""Whose start this is, which policy holds for it, and in which environment its server will run.

It gathers what the host says and hands it to the pure stages; every fault is a Refusal that names its place.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Optional

from . import owners, policy, quantities
from .host import files, procfs
from .host.systemd import Systemd, SystemdError
from .model import Account, Outcome, Refusal
from .policy import Layer, Policy

FOLDERS = ("/etc/gpuprestart", "/run/gpuprestart", "/usr/lib/gpuprestart")

#: What selects GPUs, of all that an environment may say.
VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES")

_SAFE = ("it must be a regular file, root's and writable by nobody else, as its folders: chown root, chmod go-w",)

_ANSWERS = ("systemctl show tells whether systemd answers; then start again",)

#: While a unit is in one of these states its control process is one that may judge for it.
CONTROL_STATES = ("condition", "start-pre", "stop-post")

#: In these, systemd has sent its control process a signal, which a shell around us may have kept to itself.
ENDING_STATES = ("stop-watchdog", "stop-sigterm", "stop-sigkill", "final-watchdog", "final-sigterm", "final-sigkill")


#: The uid of a user who owns nothing, and is known everywhere (systemd's UIDS-GIDS).
NOBODY = "65534"


# The policy ----------------------------------------------------------------------------------------------------------


def load(unit: Optional[str], *, file: Optional[str], deadline: Optional[str]) -> Policy:
    """The policy for a unit, from ``file`` or from the search path, with the command line's deadline over it."""
    layers = [_layer(file, overlay=False)] if file is not None else []
    names = [("policy.toml", False), *((name, True) for name in (policy.overlay_names(unit) if unit else ()))]
    for name, overlay in names if file is None else ():
        path = files.find_first(name, FOLDERS)
        if path is not None:
            layers.append(_layer(path, overlay=overlay))
    loaded = policy.parse(layers)
    if deadline is None:
        return loaded
    total = quantities.duration(deadline, positive=True)
    return loaded._replace(deadline=loaded.deadline._replace(total=total))


def _layer(path: str, *, overlay: bool) -> Layer:
    try:
        content = files.read_safely(path, trusted_owner=0 if os.geteuid() == 0 else None)
        if content is None:
            raise Refusal(Outcome.CONFIG, f"{path}: there is no such file", ["give --policy a file that is there"])
        return Layer(path=path, text=files.as_text(path, content), overlay=overlay)
    except files.UnsafeFile as error:
        raise Refusal(Outcome.CONFIG, str(error), _SAFE) from error


# The unit ------------------------------------------------------------------------------------------------------------


def certain_unit(environ: Mapping[str, str], cgroup: str) -> Optional[str]:
    """The unit whose control process we certainly are, without asking anybody; None where that is not certain.

    SYSTEMD_EXEC_PID is what systemd executed. Where that is an ancestor of ours it may be the shell around us in the
    unit's own line, but just as well a daemon whose job we are: then systemd is asked.
    """
    named = owners.candidates(cgroup)
    if len(named) != 1 or not named[0].endswith(".service") or owners.carrier(named[0]):
        return None
    return named[0] if environ.get("SYSTEMD_EXEC_PID") == str(os.getpid()) else None


def own_unit(systemd: Systemd, cgroup: str, lineage: Sequence[int]) -> Optional[owners.Own]:
    """The unit whose control process we are or descend from, as systemd says; None if there is none.

    Raises Refusal where systemd gives no answer though our cgroup names a service: whose start it is decides too much
    to be guessed. Also where that start is no longer wanted: without a unit, all GPUs of the machine would be judged.
    """
    named = owners.candidates(cgroup)
    try:
        units = systemd.units(named)
    except SystemdError as error:
        raise Refusal(Outcome.UNKNOWN, f"cannot tell whose start this is: {error}", _ANSWERS) from error
    unit = owners.unit_of(cgroup, units)
    if unit is None or not unit.name.endswith(".service"):
        return None
    over = unit.active_state in ("inactive", "failed")
    if over or (unit.sub_state in ENDING_STATES and unit.control_pid in lineage):
        why = "has ended" if over else "was told to stop, or timed out,"
        message = f"{unit.name}, of which this run is a part, {why} before its GPUs were judged ({unit.sub_state})"
        raise Refusal(Outcome.INTERRUPTED, message, [f"systemctl start {unit.name} begins anew"])
    if unit.control_pid not in lineage or unit.sub_state not in CONTROL_STATES:
        return None
    ahead = time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)
    return owners.Own(unit=unit, boottime_ahead=int(ahead * 1_000_000), ticks_per_second=procfs.TICKS)


def environment_of(systemd: Systemd, unit: str) -> dict[str, str]:
    """What of a unit's environment selects GPUs, from its Environment= and EnvironmentFile= as systemd tells them."""
    said = _said(systemd, unit, ("LoadState", "Environment", "EnvironmentFiles"))
    if said.get("LoadState") != "loaded":
        raise Refusal(
            Outcome.CONFIG,
            f"--unit: systemd has no unit {unit} to start ({said.get('LoadState', 'not-found')})",
            ["systemctl list-unit-files shows which there are"],
        )
    import shlex

    found = _assignments(shlex.split(said.get("Environment", "")))
    # systemd reads the files after the settings of the unit, and the later assignment wins.
    for line in said.get("EnvironmentFiles", "").split("\n"):
        if line:
            path, _, options = line.rpartition(" (ignore_errors=")
            found.update(_environment_file(unit, path, optional=options.startswith("yes")))
    return found


def account_of(systemd: Systemd, unit: Optional[str]) -> Account:
    """As whom a unit's server runs; without a unit, as root. Raises Refusal where systemd gives no answer."""
    said = _said(systemd, unit, ("User", "Group", "SupplementaryGroups", "DynamicUser"))
    user, group = said.get("User", ""), said.get("Group", "")
    if said.get("DynamicUser") == "yes" and not os.path.lexists(f"/run/systemd/dynamic-uid/direct:{user}"):
        # Both are made up when the unit starts, and may do what anybody may.
        user, group = NOBODY, NOBODY if group == user else group
    return Account(user=user, group=group, supplementary=tuple(said.get("SupplementaryGroups", "").split()))


def socket_ports(systemd: Systemd, unit: Optional[str]) -> set[int]:
    """The TCP ports on which systemd listens for this unit, by the sockets that start it, and for no other."""
    triggers = _said(systemd, unit, ("TriggeredBy",)).get("TriggeredBy", "").split()
    if not triggers:
        return set()
    try:
        sockets = systemd.each("*.socket", ("Id", "ActiveState", "Listen"))
    except SystemdError as error:
        raise Refusal(Outcome.UNKNOWN, f"systemd could not be asked about its sockets: {error}", _ANSWERS) from error
    ours: set[int] = set()
    others: set[int] = set()
    for socket in sockets:
        # One that has failed listens on nothing, whatever it was to listen on.
        if socket.get("ActiveState") == "active":
            (ours if socket.get("Id") in triggers else others).update(_tcp_ports(socket.get("Listen", "")))
    return ours - others


def _tcp_ports(listen: str) -> Iterator[int]:
    """Of an address on each line, such as "[::]:30000 (Stream)"."""
    for line in listen.split("\n"):
        address, _, kind = line.partition(" ")
        port = address.rpartition(":")[2]
        # A path, a name in the abstract, and an address of a virtual machine's host may end in a number as well.
        if kind == "(Stream)" and not address.startswith(("/", "@", "vsock:")) and port.isascii() and port.isdigit():
            yield int(port)


def _said(systemd: Systemd, unit: Optional[str], names: Sequence[str]) -> Mapping[str, str]:
    try:
        return systemd.properties(unit, names) if unit else {}
    except SystemdError as error:
        raise Refusal(Outcome.UNKNOWN, f"systemd could not be asked about {unit}: {error}", _ANSWERS) from error


def _at_once(path: str, flags: int) -> int:
    """Open without waiting for whoever may write into a pipe of that name."""
    return os.open(path, flags | os.O_NONBLOCK)


def _assignments(words: Sequence[str]) -> dict[str, str]:
    pairs = (word.partition("=") for word in words)
    return {name: value for name, equals, value in pairs if equals and name in VARIABLES}


def files_of(entry: str) -> list[str]:
    """What systemd reads for an EnvironmentFile=, in its order: it takes every path for a pattern, in which a backslash
    makes its next character a plain one."""
    import glob

    return sorted(glob.glob(re.sub(r"\\(.)", r"[\1]", entry)))


def _environment_file(unit: str, path: str, *, optional: bool) -> dict[str, str]:
    """The variables that count here. Where nothing fits the path, or cannot be read, a unit whose line has no ``-``
    does not start."""
    found: dict[str, str] = {}
    paths = files_of(path)
    if not paths and not optional:
        raise _unreadable(unit, path, os.strerror(errno.ENOENT))
    for each in paths:
        try:
            with open(each, encoding="utf-8", errors="surrogateescape", newline="", opener=_at_once) as file:
                text = file.read(1 << 20)
        except OSError as error:
            if optional:
                continue
            raise _unreadable(unit, each, error.strerror or str(error)) from error
        from . import envfile

        found.update(pair for pair in envfile.assignments(text) if pair[0] in VARIABLES)
    return found


def _unreadable(unit: str, path: str, why: str) -> Refusal:
    hint = f"make that file readable, or systemctl edit {unit}: a - before its path lets it be missing"
    return Refusal(Outcome.CONFIG, f"EnvironmentFile={path} of {unit}: {why}", [hint])
