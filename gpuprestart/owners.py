"""Who wants a process: its cgroup path, held against what systemd says of the units that the path names.

Pure: systemd's answers come in as values. A path proves nothing by itself, because anybody with a delegated cgroup can
name one after somebody else's unit; only a unit whose own ControlGroup= lies on the path owns what is below it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, Optional

from .model import Owner, OwnerKind, Process, Unit

#: Units whose processes are other people's work, by name. ``KillMode=`` does not tell: it is set for other reasons too.
CARRIERS = (
    "ssh", "ssh@*", "sshd", "sshd@*", "dropbear*", "xrdp*", "vncserver*", "getty@*", "serial-getty@*",
    "cron", "crond", "anacron", "atd", "fcron", "systemd-cron*",
    "slurmd", "slurmstepd", "slurm*", "pbs*", "sge_execd*", "lsf*", "condor*", "munge", "nomad", "mesos*", "ray*",
    "docker", "containerd", "podman*", "crio", "cri-*", "kubelet", "k3s*", "rke2*", "snap.*", "lxc*", "lxd*", "incus*",
    "machines*", "systemd-nspawn@*", "libvirtd", "virtqemud", "buildkit*",
    "jupyter*", "jupyterhub*", "code-server*", "rstudio-server*", "tmux*", "screen*",
    "gitlab-runner*", "actions.runner.*", "github-runner*", "buildkite-agent*", "jenkins*", "teamcity*", "drone*",
    "supervisor*", "supervisord*", "pm2*", "display-manager", "gdm*", "sddm*", "lightdm*",
)  # fmt: skip

#: Names of units as systemd takes them (systemd.unit(5)). systemctl refuses a whole call for one that it does not take,
#: such as a template without an instance, and anybody can name a cgroup of their own.
_UNIT_NAME = r"(?=.{1,255}$)[A-Za-z0-9:_.\\-]+(?:@[A-Za-z0-9:_.\\@-]+)?\.(?:service|scope)"
_SESSION = r"session-([A-Za-z0-9]+)\.scope"
_USER_MANAGER = r"user@([0-9]+)\.service"
_USER_SLICE = r"^/user\.slice/user-([0-9]{1,10})\.slice/"

#: How container engines and Slurm name the cgroups that they make; the first group is the id.
_CONTAINERS = (
    ("docker", r"/docker-([0-9a-f]{12,64})\.scope(?=/|$)"),
    ("docker", r"/docker/([0-9a-f]{64})(?=/|$)"),
    ("podman", r"/libpod-(?:payload-)?([0-9a-f]{12,64})(?:\.scope)?(?=/|$)"),
    ("cri-containerd", r"/cri-containerd-([0-9a-f]{12,64})(?:\.scope)?(?=/|$)"),
    ("crio", r"/crio-([0-9a-f]{12,64})(?:\.scope)?(?=/|$)"),
    ("kubernetes", r"/kubepods[^/]*/(?:.*/)?([0-9a-f]{64})(?=/|$)"),
    ("lxc", r"/lxc(?:\.payload\.|/)([^/]+)(?=/|$)"),
    ("nspawn", r"/machine\.slice/(?:machine-|systemd-nspawn@)([^/]+?)\.(?:scope|service)(?=/|$)"),
)
#: What runs containers and jobs, as ``comm[pid]``: a comm is cut at 15 bytes.
RUNTIMES = (
    "containerd-shim*", "conmon*", "lxc-start*", "lxc-execute*", "?lxc monitor*", "systemd-nspawn*", "slurmstepd*",
)  # fmt: skip

#: Stands for the runtime of what has this.
NAMESPACE = "its own PID namespace"

_UNKILLABLE = "gpuprestart-unkillable-"

_SLURM = r"/(?:slurmstepd\.scope|slurm[^/]*)/(?:.*/)?job_?([0-9]+)(?=/|$)"


class Own(NamedTuple):
    """The unit whose control process we are, and what sets its last run apart from its present start."""

    unit: Unit
    #: CLOCK_BOOTTIME less CLOCK_MONOTONIC in microseconds: /proc counts a start in the one, systemd in the other.
    boottime_ahead: int
    ticks_per_second: int

    def predates(self, process: Process) -> bool:
        """Whether the process began before this start did. In doubt, which is within one tick, it did not."""
        began = (process.started + 1) * 1_000_000 // self.ticks_per_second - self.boottime_ahead
        return 0 < began <= self.unit.condition_usec


def candidates(cgroup: str) -> tuple[str, ...]:
    """Names on a cgroup path that may be units, outermost first; systemd escapes a clash with a leading ``_``."""
    parts = (part[1:] if part.startswith("_") else part for part in cgroup.split("/"))
    return tuple(part for part in parts if re.fullmatch(_UNIT_NAME, part))


def is_unit_name(name: str) -> bool:
    return re.fullmatch(_UNIT_NAME, name) is not None


def cgroup_of(unit: str, cgroup: str) -> str:
    """The part of a cgroup path down to the one that a unit has; systemd may have put a ``_`` before its name."""
    parts = cgroup.split("/")
    place = next(number for number, part in enumerate(parts) if part.removeprefix("_") == unit.removeprefix("_"))
    return "/".join(parts[: place + 1])


#: The suffixes of units (systemd.unit(5)). A name may have other dots: sglang-qwen2.5 is a service.
TYPES = ("service", "scope", "slice", "socket", "target", "timer", "path", "mount", "automount", "swap", "device")


def full_name(unit: str) -> str:
    """``x`` means ``x.service``, as for systemctl."""
    return unit if unit.rpartition(".")[2] in TYPES else f"{unit}.service"


def carrier(unit: str) -> bool:
    """Whether a unit's processes are other people's work, so that an inactive unit says nothing about them."""
    name = unit.rpartition(".")[0]
    return any(fnmatchcase(name, pattern) for pattern in CARRIERS)


def unkillable_scope(pid: int) -> str:
    """The scope in which a process of our unit is set aside that survived SIGKILL."""
    return f"{_UNKILLABLE}{pid}.scope"


def is_set_aside(unit: str) -> bool:
    """Whether such a process is in it. Only root makes units of the system, so the name can be believed."""
    return unit.startswith(_UNKILLABLE)


def below(cgroup: str, control_group: str) -> bool:
    return bool(control_group) and (cgroup + "/").startswith(control_group.rstrip("/") + "/")


def unit_of(cgroup: str, units: Mapping[str, Unit]) -> Optional[Unit]:
    """The outermost unit of the path that systemd knows there: what GetUnitByPID answers."""
    for name in candidates(cgroup):
        unit = units.get(name)
        if unit is not None and below(cgroup, unit.control_group):
            return unit
    return None


class Names(NamedTuple):
    """What the name services say: uid -> user name, and User= of a unit -> uid. What they do not say is absent."""

    users: Mapping[int, str]
    uids: Mapping[str, int]


def owner_of(
    process: Process,
    *,
    units: Mapping[str, Unit],
    names: Names,
    own: Optional[Own],
    namespace: int,
    above: Sequence[str] = (),
) -> Owner:
    """Who owns the process. ``namespace`` is the inode of our own PID namespace, ``above`` are the names of the process
    and its ancestors, nearest first."""
    cgroup = process.cgroup
    if not cgroup.startswith("/") or ".." in cgroup.split("/"):
        return _unknown(f"its cgroup {cgroup} lies outside what can be seen from here")
    ours = of_own(process, own)
    if ours is not None:
        return ours
    if not process.pid_namespace:
        return _unknown("its PID namespace may not be read")._replace(hidden=True)
    container = _container(process, namespace, runtime(above[1:]))
    if container is not None:
        return container
    unit = unit_of(cgroup, units)
    session = _session(cgroup, unit, names)
    if session is not None:
        return session
    if unit is None:
        named = candidates(cgroup)
        if named:
            return _unknown(f"its cgroup {cgroup} names {named[0]}, which systemd does not have there")
        return Owner(kind=OwnerKind.NONE, word="none", user=process.user, orphan=process.ppid == 1)
    # An empty User= is root.
    runs_as = names.uids.get(unit.user) if unit.user else 0
    return Owner(
        kind=OwnerKind.UNIT,
        word=f"unit:{unit.name}",
        unit=unit,
        user=process.user,
        as_unit_user=runs_as is not None and runs_as == process.uid,
    )


def of_own(process: Process, own: Optional[Own]) -> Optional[Owner]:
    """Our own unit, as the owner of what is in its cgroup: from its last run, or from its present start."""
    if own is None or not below(process.cgroup, own.unit.control_group):
        return None
    kind = OwnerKind.OWN_PREVIOUS if own.predates(process) else OwnerKind.OWN_CURRENT
    return Owner(kind=kind, word=f"unit:{own.unit.name}", unit=own.unit, user=process.user)


def _unknown(doubt: str) -> Owner:
    return Owner(kind=OwnerKind.UNKNOWN, word="unknown", doubt=doubt)


def unanswered(reason: str) -> Owner:
    """The owner of a process when systemd could not be asked."""
    return _unknown(f"systemd could not be asked who owns it ({reason})")


def runtime(above: Sequence[str]) -> str:
    """The container's or job's runtime among these names, or empty. A name alone never ends a process, it only saves
    one, so a name is enough."""
    return next((name for name in above if any(fnmatchcase(name, pattern) for pattern in RUNTIMES)), "")


def _container(process: Process, namespace: int, above: str) -> Optional[Owner]:
    """A container or a job, by its cgroup, its PID namespace or what runs above it. Only where the cgroup bears an id,
    and the namespace is ours, can it be told whether anything still runs it."""
    foreign = process.pid_namespace != namespace
    found = _named_container(process.cgroup)
    if found is not None:
        return found._replace(cgroup="", runtime=NAMESPACE) if foreign else found
    if foreign:
        word = f"container:pidns:{process.pid_namespace}"
        return Owner(kind=OwnerKind.CONTAINER, word=word, user=process.user, runtime=NAMESPACE)
    if above.startswith("slurmstepd"):
        return Owner(kind=OwnerKind.SLURM, word="slurm:unknown", user=process.user, runtime=above)
    if above:
        word = f"container:{above.rpartition('[')[0]}:unknown"
        return Owner(kind=OwnerKind.CONTAINER, word=word, user=process.user, runtime=above)
    return None


def _named_container(cgroup: str) -> Optional[Owner]:
    job = re.search(_SLURM, cgroup)
    if job:
        return Owner(kind=OwnerKind.SLURM, word=f"slurm:{job[1]}", cgroup=cgroup[: job.end()])
    for engine, pattern in _CONTAINERS:
        found = re.search(pattern, cgroup)
        if found:
            word = f"container:{engine}:{found[1]}"
            return Owner(kind=OwnerKind.CONTAINER, word=word, cgroup=cgroup[: found.end()])
    return None


def over(owner: Owner) -> bool:
    """Whether a login session is over: its scope is abandoned, or gone while processes are left in its cgroup."""
    unit = owner.unit
    return unit is None or unit.sub_state == "abandoned" or unit.active_state in ("inactive", "failed")


def doomed(user: str, kill: bool, only: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether logind ends what a user's sessions leave (logind.conf(5): KillUserProcesses=, KillOnlyUsers=,
    KillExcludeUsers=, which wins). A user whose name nobody tells may be on any list."""
    if not user:
        return kill and not only and not exclude
    return kill and user not in exclude and (not only or user in only)


def slice_uid(cgroup: str) -> Optional[int]:
    """The user whose slice a cgroup lies in; all that user's sessions and the user's own manager are below it."""
    found = re.search(_USER_SLICE, cgroup)
    return int(found[1]) if found else None


def _session(cgroup: str, unit: Optional[Unit], names: Names) -> Optional[Owner]:
    """The login session or user manager that a process belongs to; a session without a unit is over."""
    uid = slice_uid(cgroup)
    if uid is None:
        return None
    user = names.users.get(uid, "")
    said = user or str(uid)
    for name in [unit.name] if unit is not None else candidates(cgroup)[:1]:
        session = re.fullmatch(_SESSION, name)
        if session:
            return Owner(kind=OwnerKind.SESSION, word=f"session:{session[1]}:{said}", unit=unit, user=user)
        if unit is not None and re.fullmatch(_USER_MANAGER, name):
            return Owner(kind=OwnerKind.USER, word=f"user:{said}", unit=unit, user=user)
    return None
