"""What of a unit, beside the hook's own line, makes its starts fail or pass unproved. Pure.

As in hookchecks, each check is a function from the facts to what it finds, or to a few words where all is in order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Optional, Union

from . import engines, owners, unitlines
from .checks import Check, fault, ok, remark
from .hookchecks import PRE, Facts, Node
from .model import EXIT_STATUS, Gpu, Refusal
from .report import indices
from .selection import Selection
from .service import Exec, Service
from .unitlines import Line

#: What lets systemd hear the hook, which is a control process and not the main one (systemd.service(5)).
LISTENING = ("exec", "all")

#: Seconds that a run asks systemd for beyond its deadline, or leaves before systemd's limit.
MARGIN = 5.0

#: Seconds between two starts, below which trying again is no waiting.
SLOW = 2.0

#: Ways in which the hook ends where it lets nobody start: Python's own 1, a bad command line, files that are missing,
#: the other statuses of the contract, and signals.
REFUSALS = (
    "1",
    "64",
    "66",
    *sorted({str(status) for status in EXIT_STATUS.values() if status}),
    "ABRT",
    "KILL",
    "TERM",
)


def of(facts: Facts) -> list[Check]:
    found = exit_statuses(facts) + devices(facts) + environment(facts) + podman(facts) + user(facts) + kind(facts)
    if facts.hooks:
        # What gpuprestart enable writes is no fault of a unit that it has not been asked for.
        found += environment_files(facts) + container(facts) + timeout(facts) + restart(facts)
        found += actions(facts) + notify_access(facts)
    return found


# What changes the answer ---------------------------------------------------------------------------------------------


def exit_statuses(facts: Facts) -> list[Check]:
    listed = [word for word in REFUSALS if word in facts.service.success_statuses]
    if not listed:
        return [ok("exit-statuses", "no refusal counts as success")]
    line = facts.last("Service.SuccessExitStatus")
    consequence = "a hook that ends like this lets the server start; where it can tell, it refuses as config instead"
    remedy = f"take {', '.join(listed)} out of SuccessExitStatus=; a script around the server can map them for it alone"
    return [fault("exit-statuses", f"SuccessExitStatus= lists {', '.join(listed)}", consequence, remedy, line)]


def devices(facts: Facts) -> list[Check]:
    service = facts.service
    if service.private_devices:
        line = facts.last("Service.PrivateDevices")
        consequence = "no NVIDIA device can be opened, by the server or, as the + does not lift it, by the hook"
        return [fault("devices", "PrivateDevices= hides the GPUs", consequence, "take it out", line)]
    if service.device_policy == "auto" and not service.device_rights:
        return [ok("devices", "the unit may open every device")]
    entries = service.device_rights.items()
    shut = [node.path for node in facts.nodes if not any(_admits(facts, *entry, node) for entry in entries)]
    if not shut:
        return [ok("devices", "DeviceAllow= has every NVIDIA device")]
    keys = ("Service.DeviceAllow", "Service.DevicePolicy")
    lines = [line for line in map(facts.last, keys) if line]
    fact = f"the unit may not open {', '.join(shut[:4])}{f' and {len(shut) - 4} more' if len(shut) > 4 else ''}"
    consequence = "the driver cannot be asked: every start is refused as unknown; the + does not lift this"
    remedy = "DeviceAllow=char-nvidia* rw, and the same for each that /proc/devices names nvidia-…"
    return [fault("devices", fact, consequence, remedy, lines[-1] if lines else None)]


def _admits(facts: Facts, entry: str, rights: str, node: Node) -> bool:
    """Whether an entry of DeviceAllow= lets a node be opened for reading and writing (systemd.resource-control(5))."""
    if not {"r", "w"} <= set(rights):
        return False
    if entry.startswith("char-"):
        return any(fnmatchcase(group, entry[len("char-") :]) for group in node.groups)
    return facts.numbers.get(entry) == node.number


def environment_files(facts: Facts) -> list[Check]:
    """The hook ignores what it finds in its environment; the loader of its interpreter, as root, does not."""
    entries = [entry for entry, _ in facts.service.environment_files]
    lines = unitlines.commands(facts.lines, "Service.EnvironmentFile", len(entries))
    found = []
    for entry, line in zip(entries, lines):
        if entry in facts.writable and _privileged(facts):
            consequence = "whoever writes LD_PRELOAD= into it runs code as root with the next start of the hook"
            remedy = "chown root and chmod go-w the file and every folder on its way"
            fact = f"EnvironmentFile= {facts.writable[entry]}"
            found.append(fault("environment-file", fact, consequence, remedy, line))
    return found or [ok("environment-file", "root alone can write the files of the unit's environment")]


def environment(facts: Facts) -> list[Check]:
    """The hook runs without these, but its interpreter has been started with them by then."""
    names = [name for name in facts.service.environment if name.startswith(("LD_", "NVML_"))]
    found = []
    for name, reason in facts.loaded_code.items() if _privileged(facts) else ():
        consequence = "whoever can write there runs code as root with the next start of the hook"
        remedy = "have the server set it for itself, by a script or by env in ExecStart="
        found.append(
            fault("environment", f"{name} of the unit: {reason}", consequence, remedy, _setting(facts, [name]))
        )
    if names and not found:
        consequence = "the server has it; the hook runs without it, and asks the system's own NVML"
        fact = f"Environment= sets {', '.join(names)}"
        found = [remark("environment", fact, consequence, "nothing, if the server needs it", _setting(facts, names))]
    return found or [ok("environment", "nothing in it that could bring another NVML, or code of somebody else's")]


def _setting(facts: Facts, names: Sequence[str]) -> Optional[Line]:
    """The line of Environment= that sets one of these."""
    return unitlines.last(
        facts.lines, "Service.Environment", fits=lambda line: any(name in line.value for name in names)
    )


def _privileged(facts: Facts) -> bool:
    """The hook is root whatever its unit is: what the unit's user can give it makes that user root."""
    return any(not command.flags.isdisjoint(("privileged", "no-setuid")) for command, _ in facts.hooks)


# Containers ----------------------------------------------------------------------------------------------------------


def container(facts: Facts) -> list[Check]:
    """A container outlives the client that the unit runs, and is somebody's as long as its runtime is there."""
    run = _run(facts.service)
    if run is None or run.within:
        return [ok("container", "the server's processes lie in the unit's own cgroup")]
    line = facts.last("Service.ExecStart")
    consequence = "a container that an earlier run left is alive to the hook, which refuses every start as protected"
    if not run.handles:
        remedy = f"give {run.engine} run a --name, and ExecStartPre=-{run.engine} rm -f NAME in front of the hook"
        fact = "the server's container has no --name by which it could be ended"
        return [fault("container", fact, consequence, remedy, line)]
    name = sorted(run.handles)[0]
    service = facts.service
    after = any(call.ends(run) for command in service.stop_post for call in engines.calls(command))
    if after or any(call.ends(run) for command in service.start_pre[: facts.first] for call in engines.calls(command)):
        return [ok("container", f"what is left of the container {name} is ended before the hook")]
    lines = unitlines.commands(facts.lines, PRE, len(service.start_pre))
    late = [at for each, at in zip(service.start_pre, lines) if any(call.ends(run) for call in engines.calls(each))]
    when = "is ended only after the hook" if late else "is not ended before the hook"
    remedy = f"ExecStartPre=-{service.start[0].path} rm -f {name} in front of the hook, as gpuprestart enable writes it"
    fact = f"what is left of the container {name} {when}"
    return [fault("container", fact, consequence, remedy, late[0] if late else line)]


def podman(facts: Facts) -> list[Check]:
    service, run = facts.service, _run(facts.service)
    heard = service.notify_access in LISTENING and not service.type.startswith("notify")
    if run is None or run.engine != "podman" or not heard or run.value("--sdnotify") not in (None, "container"):
        return [ok("podman", "no container waits to be allowed to notify systemd")]
    consequence = "podman hands NOTIFY_SOCKET on to the container and waits until that says READY=1, which may be never"
    remedy = "podman run --sdnotify=ignore"
    fact = f"NotifyAccess={service.notify_access}, and podman run without --sdnotify=ignore"
    return [fault("podman", fact, consequence, remedy, facts.last("Service.ExecStart"))]


def _run(service: Service) -> Optional[engines.Call]:
    return next(filter(None, map(engines.run, service.start)), None)


# Times ---------------------------------------------------------------------------------------------------------------


def timeout(facts: Facts) -> list[Check]:
    service, limit = facts.service, facts.service.timeout_start
    if facts.policy is None:
        return []
    total = facts.policy.deadline.total
    if limit is None or limit > total + MARGIN:
        return [ok("timeout", f"TimeoutStartSec={_span(limit)} has room for the hook's {_span(total)}")]
    if service.notify_access in LISTENING and facts.can_notify:
        return [ok("timeout", f"the hook asks for its {_span(total)} beyond TimeoutStartSec={_span(limit)}")]
    left = limit - min(MARGIN, 0.3 * limit)
    fact = f"TimeoutStartSec={_span(limit)} is too short for deadline.total = {_span(total)}"
    consequence = f"the hook gives up after {_span(left)}: memory that comes back later refuses the start"
    remedy = f"TimeoutStartSec={_span(total + 60)}, or NotifyAccess=exec, by which the hook can ask for more"
    return [fault("timeout", fact, consequence, remedy, facts.last("Service.TimeoutStartSec", "Service.TimeoutSec"))]


#: Values of Restart= that try a refused start again.
_AGAIN = ("always", "on-failure")


def restart(facts: Facts) -> list[Check]:
    service = facts.service
    pause, interval, burst = service.restart_sec, service.start_limit_interval, service.start_limit_burst
    if service.restart not in _AGAIN or pause is None:
        return [ok("restart", "a refused start is not tried again by itself")]
    again = facts.last("Service.RestartSec")
    limited = interval is None or (interval > 0 and burst > 0)
    if limited and (interval is None or pause * burst < interval):
        fact = f"RestartSec={_span(pause)}, with {burst} starts allowed in {_span(interval)}"
        consequence = f"refused {burst} times, within seconds, the unit stays failed, also once the GPUs are free"
        return [fault("restart", fact, consequence, "RestartSec=15s", again)]
    if not limited and pause < SLOW:
        fact = f"RestartSec={_span(pause)}, and no limit of starts"
        consequence = "a start that is refused is tried again at once, for ever, and fills the journal"
        keys = ("Unit.StartLimitIntervalSec", "Unit.StartLimitBurst", "Service.StartLimitInterval")
        return [remark("restart", fact, consequence, "RestartSec=15s", again or facts.last(*keys))]
    return [ok("restart", f"a refused start is tried again every {_span(pause)}, without an end")]


def actions(facts: Facts) -> list[Check]:
    found = []
    for key, action in facts.service.actions.items():
        often = key == "StartLimitAction" or facts.service.restart in _AGAIN
        consequence = f"systemd does that to the machine, after {'several refused starts' if often else 'one refusal'}"
        line = facts.last(f"Unit.{key}", f"Service.{key}")
        found.append(remark("actions", f"{key}={action}", consequence, "take it out, if that is not meant", line))
    return found or [ok("actions", "a refused start does nothing to the machine")]


def _span(seconds: Optional[float]) -> str:
    return "infinity" if seconds is None else f"{seconds:g} s"


# Who hears and who runs it -------------------------------------------------------------------------------------------


def notify_access(facts: Facts) -> list[Check]:
    access = facts.service.notify_access
    if access in LISTENING:
        return [ok("notify-access", f"NotifyAccess={access}: systemctl status shows the verdict")]
    run = _run(facts.service)
    consequence = "systemctl status does not show the verdict, and systemd is not asked for more time"
    remedy = "NotifyAccess=exec"
    if run is not None and run.engine == "podman":
        remedy += ", together with podman run --sdnotify=ignore"
    line = facts.last("Service.NotifyAccess")
    return [remark("notify-access", f"NotifyAccess={access} does not listen to the hook", consequence, remedy, line)]


def user(facts: Facts) -> list[Check]:
    service = facts.service
    line = facts.last("Service.User", "Service.DynamicUser")
    if service.dynamic_user:
        consequence = "between two runs nobody has that name: what another start finds of it is refused, not ended"
        return [remark("user", "DynamicUser=yes", consequence, "User= with a user that is always there", line)]
    if not facts.user_known:
        consequence = "the server cannot start (217/USER), and what it has left cannot be told to be its own"
        remedy = f"useradd --system {service.user}, or correct the line"
        return [fault("user", f"User={service.user} is nobody here", consequence, remedy, line)]
    return [ok("user", f"the server runs as {service.user or 'root'}")]


def kind(facts: Facts) -> list[Check]:
    service = facts.service
    found = []
    if owners.carrier(service.name):
        fact = f"by its name, {service.name} runs other people's work"
        consequence = "what it leaves is never ended: a start on top of it is refused"
        found.append(remark("kind", fact, consequence, "give the server's unit another name"))
    if service.type == "oneshot":
        consequence = "what it leaves is taken for other people's work: another unit's start on top of it is refused"
        remedy = "Type=exec, if it is a server"
        found.append(remark("kind", "Type=oneshot", consequence, remedy, facts.last("Service.Type")))
    for name in service.triggered_by:
        if name.endswith(".socket"):
            fact = f"{service.name} is started by {name}"
            consequence = "after a refusal every connection starts it anew, until systemd gives up the socket as well"
            remedy = f"start it by itself; systemctl reset-failed {name} after that"
            found.append(remark("kind", fact, consequence, remedy))
    return found or [ok("kind", "a service that is started by itself")]


# The GPUs that it uses -----------------------------------------------------------------------------------------------


def selection(facts: Facts, chosen: Union[Selection, Refusal], *, unset: bool) -> list[Check]:
    """What the hook will judge; ``unset``: nothing that it can see selects GPUs, so it judges all of them."""
    name = facts.service.name
    if isinstance(chosen, Refusal):
        hints = "; ".join(chosen.hints[:1])
        consequence = f"its start is refused as {chosen.outcome.value}"
        lines = unitlines.standing(facts.lines, "Service.Environment", "Service.EnvironmentFile")
        line = next((line for line in reversed(lines) if _VISIBLE.search(line.value)), None)
        remedy = hints or f"gpuprestart check --unit {name} says more"
        return [fault("selection", chosen.message, consequence, remedy, line)]
    if chosen.empty:
        consequence = "the hook lets it start as none, and proves nothing"
        remedy = "name its GPUs in CUDA_VISIBLE_DEVICES, if it is to have any"
        return [remark("selection", f"{name} uses no GPU ({chosen.source})", consequence, remedy)]
    given = [word for command in facts.service.start for word in _given(command)]
    if unset and given:
        consequence = "the hook cannot tell, and judges all: it refuses for a GPU that the server will never use"
        remedy = "set CUDA_VISIBLE_DEVICES or NVIDIA_VISIBLE_DEVICES in Environment=, or gpus.select in its policy, too"
        line = facts.last("Service.ExecStart")
        fact = f"only the server's own line names its GPUs ({given[0]})"
        return [remark("selection", fact, consequence, remedy, line)]
    numbers = indices(gpu.index for gpu in chosen.gpus)
    return [ok("selection", f"GPU {numbers}: {chosen.source}")]


_VISIBLE = re.compile(r"(?:CUDA|NVIDIA)_VISIBLE_DEVICES")


def _given(command: Exec) -> list[str]:
    """Words by which a command line gives the server some GPUs, and not all."""
    words = [word for argument in command.argv for word in argument.split()]
    found = [word for word in words if _VISIBLE.match(word) or "nvidia.com/gpu=" in word or word.startswith("--gpus=")]
    found += [f"--gpus {after}" for word, after in zip(words, words[1:]) if word == "--gpus"]
    return [word for word in found if not word.endswith(("=all", " all"))]


def shared(name: str, others: Mapping[str, tuple[Sequence[Gpu], bool]]) -> list[Check]:
    """``others`` are enabled services that select some of the same GPUs, and whether the hook is in front of them."""
    found = []
    for other, (gpus, hooked) in sorted(others.items()):
        fact = f"{other} selects GPU {indices(gpu.index for gpu in gpus)} as well"
        consequence = "whichever of the two starts second is refused as protected"
        if not hooked:
            consequence = f"it starts without a look, and {name} is refused while it runs"
        found.append(remark("shared", fact, consequence, "give each GPUs of its own, or Conflicts= between them"))
    return found or [ok("shared", "no other enabled service selects its GPUs")]
