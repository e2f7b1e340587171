"""Whether the hook stands in front of a unit's server, and how it is run. Pure.

What a unit is, systemd has said; its files are there to quote the line that is to blame. Each check is a function from
the facts to what it finds, or to a few words where all is in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Optional

from . import checks, engines, unitlines
from .checks import Check, fault, ok, remark
from .policy import Policy
from .service import Exec, Service
from .unitlines import Line

PRE = "Service.ExecStartPre"

#: Where locks and claims are.
RUN = "/run/gpuprestart"

#: Programs of which a line before the hook may well be made: none of them opens a GPU.
_HARMLESS = (
    "rm", "mkdir", "install", "chown", "chmod", "cp", "mv", "ln", "touch", "test", "[", "true", "sleep", "echo",
    "logger", "sysctl", "ip", "systemctl", "systemd-tmpfiles", "mountpoint", "curl", "rsync",
)  # fmt: skip


class Node(NamedTuple):
    """A device node that NVML opens: its path, its number, and what /proc/devices calls drivers of its major."""

    path: str
    number: int
    groups: tuple[str, ...]


class Facts(NamedTuple):
    service: Service
    lines: tuple[Line, ...]
    #: Those of drop-ins that lie there, and that systemd has not read.
    unread: tuple[Line, ...] = ()
    #: None where it has a fault, which is told elsewhere.
    policy: Optional[Policy] = None
    #: systemd can be told anything at all: its Python module is there.
    can_notify: bool = True
    nodes: tuple[Node, ...] = ()
    #: Device numbers of the paths in DeviceAllow=.
    numbers: Mapping[str, int] = {}
    #: By entry of EnvironmentFile=, why somebody else than root could write what it names.
    writable: Mapping[str, str] = {}
    #: By variable of the loader, why somebody else than root could write the code that it names.
    loaded_code: Mapping[str, str] = {}
    #: By program of the hook, why it cannot be run, or why somebody else than root could write it.
    programs: Mapping[str, str] = {}
    #: Why the hook's line is no command line, and the unit that it names, if it does.
    usage: str = ""
    named: Optional[str] = None
    #: The folder for locks and claims is there.
    folder: bool = True
    #: User= names somebody whom the name services know.
    user_known: bool = True

    @property
    def hooks(self) -> list[tuple[Exec, Optional[Line]]]:
        found = zip(self.service.start_pre, unitlines.commands(self.lines, PRE, len(self.service.start_pre)))
        return [(command, line) for command, line in found if command.ours]

    @property
    def first(self) -> int:
        """The place of the hook among all ExecStartPre=."""
        return next(number for number, command in enumerate(self.service.start_pre) if command.ours)

    def last(self, *keys: str) -> Optional[Line]:
        return unitlines.last(self.lines, *keys)


def of(facts: Facts) -> list[Check]:
    """All that is told of the hook itself."""
    found = reload(facts) + hook(facts) + condition(facts)
    if facts.hooks:
        found += program(facts) + arguments(facts) + prefix(facts) + plus(facts) + order(facts) + sandbox(facts)
    return found


# Whether there is a unit, and the hook in front of it ----------------------------------------------------------------


def loaded(service: Service) -> list[Check]:
    """That there is a unit to look at; without one there is nothing else to be said of it."""
    consequence = "nothing can start it"
    name, state = service.name, service.load_state
    if state == "loaded":
        return [ok("unit", f"{service.fragment or name} is loaded, {service.active_state}")]
    if state == "masked":
        remedy = f"systemctl unmask {name}, if it is meant to start at all"
        return [fault("unit", f"{name} is masked", consequence, remedy)]
    if state == "not-found":
        remedy = "systemctl list-unit-files shows what there is; after writing one, systemctl daemon-reload"
        return [fault("unit", f"systemd has no unit {name}", consequence, remedy)]
    remedy = f"systemd-analyze verify {service.fragment or name}"
    return [fault("unit", f"systemd cannot load {name} ({state}): {service.load_error}", consequence, remedy)]


def reload(facts: Facts) -> list[Check]:
    if not (facts.service.need_reload or facts.unread):
        return [ok("reload", "systemd has read the unit's files as they are")]
    fact = f"files of {facts.service.name} have changed since systemd read them"
    consequence = "its next start is not what they say, and a line that is quoted here may be another one now"
    remedy = "systemctl daemon-reload, while no container runs that could lose its GPUs by it"
    return [remark("reload", fact, consequence, remedy)]


def hook(facts: Facts) -> list[Check]:
    if facts.hooks:
        command, line = facts.hooks[0]
        return [ok("hook", str(line) if line else f"ExecStartPre={command}")]
    if any(command.ours for command in facts.service.condition):
        # Told as what it is.
        return []
    name = facts.service.name
    consequence = "the server starts on whatever is on its GPUs"
    remedy = f"gpuprestart enable {name}"
    undone = unitlines.undone(facts.lines, PRE, _mentions)
    if undone is not None:
        line, reset = undone
        fact = f"the hook ({line}) is undone by a later ExecStartPre= without a value"
        remedy = "take the empty line out, or put the hook into a drop-in whose name sorts after it; then daemon-reload"
        return [fault("hook", fact, consequence, remedy, reset)]
    misplaced = next((line for line in facts.lines if line.key.endswith(".ExecStartPre") and _mentions(line)), None)
    if misplaced is not None and misplaced.key != PRE:
        section = misplaced.key.rpartition(".")[0]
        fact = f"the hook stands in the section [{section}], where systemd ignores it"
        return [fault("hook", fact, consequence, "put it below [Service]", misplaced)]
    unread = next((line for line in facts.unread if line.key == PRE and _mentions(line)), None)
    if unread is not None or facts.service.need_reload:
        fact = f"no ExecStartPre= of {name} runs gpuprestart clean, as systemd has it loaded"
        if unread is not None:
            fact = "systemd has not read the drop-in with the hook"
        return [fault("hook", fact, consequence, f"systemctl daemon-reload; if it is still so, {remedy}", unread)]
    if any(command.ours for command in facts.service.start):
        fact = f"gpuprestart clean runs in ExecStart= of {name}, not in ExecStartPre="
        consequence = "it does not count as this unit's start: it leaves no claim, and ends nothing of an earlier run"
        return [fault("hook", fact, consequence, remedy, facts.last("Service.ExecStart"))]
    audit = unitlines.last(facts.lines, PRE, fits=_mentions)
    fact = f"no ExecStartPre= of {name} runs gpuprestart clean"
    return [fault("hook", f"{fact}, only another verb" if audit else fact, consequence, remedy, audit)]


def _mentions(line: Line) -> bool:
    return "gpuprestart" in line.value


def condition(facts: Facts) -> list[Check]:
    key = "Service.ExecCondition"
    found = []
    commands = facts.service.condition
    for command, line in zip(commands, unitlines.commands(facts.lines, key, len(commands))):
        if command.ours:
            fact = "the hook is an ExecCondition="
            consequence = "a refusal skips the start, and systemctl start says that all went well"
            remedy = "make it ExecStartPre="
            found.append(fault("condition", fact, consequence, remedy, line))
        else:
            fact = f"ExecCondition= runs {command.path} first"
            consequence = "where it says no, the start is skipped without a word, and the hook is never asked"
            remedy = "make it ExecStartPre=, if its failure is to be seen"
            found.append(remark("condition", fact, consequence, remedy, line))
    return found or [ok("condition", "no ExecCondition= can skip a start")]


def program(facts: Facts) -> list[Check]:
    root = facts.service.root_directory
    if root:
        fact = "RootDirectory= holds for the hook too, as the + does not lift it"
        consequence = f"it is looked for below {root}, or sees neither systemd nor the driver from there"
        line = facts.last("Service.RootDirectory")
        return [fault("program", fact, consequence, "RootDirectoryStartOnly=yes, for the server alone", line)]
    found = []
    for command, line in facts.hooks:
        if command.path in facts.programs:
            fact = f"{command.path}, which the hook runs, {facts.programs[command.path]}"
            consequence = "the start fails, or root runs what somebody else has written"
            found.append(fault("program", fact, consequence, "install gpuprestart anew, as root's and go-w", line))
    return found or [ok("program", "the program of the hook is there, and root's alone to change")]


def arguments(facts: Facts) -> list[Check]:
    _, line = facts.hooks[0]
    remedy = "ExecStartPre=+/usr/bin/gpuprestart clean is all that it takes"
    if facts.usage:
        consequence = "the hook judges nothing: it ends at once, with a status that is no verdict"
        return [fault("arguments", f"the hook's command line is wrong ({facts.usage})", consequence, remedy, line)]
    if facts.named is not None:
        consequence = "it does not count as this unit's start: it leaves no claim, and refuses what an earlier run left"
        return [fault("arguments", f"the hook's line has --unit {facts.named}", consequence, remedy, line)]
    return [ok("arguments", "the hook's command line is right")]


def prefix(facts: Facts) -> list[Check]:
    found = []
    for command, line in facts.hooks:
        if "ignore-failure" in command.flags:
            consequence = "systemd takes every refusal for success: the server starts on whatever is on its GPUs"
            remedy = f"take the - away: ExecStartPre=+{command}"
            found.append(fault("prefix", "the hook's line begins with -", consequence, remedy, line))
    return found or [ok("prefix", "a refusal refuses")]


def plus(facts: Facts) -> list[Check]:
    """The hook as root, and with what it needs: by its +, or by what the unit leaves to root (the example for least
    privilege)."""
    service = facts.service
    found = []
    for command, line in facts.hooks:
        lack = checks.lacking(service.sandbox.get("CapabilityBoundingSet", -1))
        remedy = f"ExecStartPre=+{command}"
        if "privileged" in command.flags:
            continue
        if not _is_root(command, service):
            consequence = f"it runs as {service.user}, who can neither see nor end others' processes: it never passes"
            found.append(fault("plus", "the hook's line has no +", consequence, remedy, line))
        elif lack:
            fact = f"the hook's line has no +, and the unit leaves root no {lack}"
            consequence = "it cannot see or end others' processes: starts are refused as denied"
            remedy += ", or CapabilityBoundingSet= with it"
            found.append(fault("plus", fact, consequence, remedy, facts.last("Service.CapabilityBoundingSet") or line))
    return found or [ok("plus", "the hook runs as root, with the capabilities that it needs")]


def _is_root(command: Exec, service: Service) -> bool:
    return service.user in ("", "root", "0") or not command.flags.isdisjoint(("privileged", "no-setuid"))


def order(facts: Facts) -> list[Check]:
    before = facts.service.start_pre[: facts.first]
    lines = unitlines.commands(facts.lines, PRE, len(facts.service.start_pre))
    found = []
    for command, line in zip(before, lines):
        if command.path.rpartition("/")[2] in _HARMLESS or any(call.verb != "run" for call in engines.calls(command)):
            continue
        consequence = "what of it stays and has memory on a GPU is in the way of the hook, which is then refused"
        remedy = "put it behind the hook, unless it never opens a GPU"
        found.append(remark("order", "this runs before the hook", consequence, remedy, line))
    return found or [ok("order", "nothing that could open a GPU runs before the hook")]


def sandbox(facts: Facts) -> list[Check]:
    """What the + lifts, and what is in the way of a hook without it."""
    bare = [command for command, _ in facts.hooks if "privileged" not in command.flags]
    found = []
    for key, consequence, remedy in _tight(facts, bare[0]) if bare else ():
        fact, line = f"{key}= holds for the hook too, which has no +", facts.last(f"Service.{key}")
        found.append(fault("sandbox", fact, consequence, f"give the hook's line its +; or {remedy}", line))
    return found or [ok("sandbox", "nothing of the unit's sandbox is in the way of the hook")]


def _tight(facts: Facts, command: Exec) -> Iterator[tuple[str, str, str]]:
    """By setting, what comes of it and what would help."""
    service, held = facts.service, facts.service.sandbox
    blind = "it does not see who holds a GPU: starts are refused as denied"
    if not _is_root(command, service) or "CAP_SYS_PTRACE" in checks.lacking(held.get("CapabilityBoundingSet", -1)):
        if service.protect_proc != "default":
            yield "ProtectProc", blind, "take it out"
        if service.proc_subset != "all":
            yield "ProcSubset", blind, "take it out"
    # Newer systemds say how, in a word.
    for key in ("PrivateUsers", "PrivatePIDs"):
        if held.get(key, False) not in (False, "no"):
            yield key, blind, "take it out"
    writes = {path.lstrip("-+") for path in held.get("ReadWritePaths", ())}
    if held.get("ProtectSystem") == "strict" and not ("/run" in writes or (RUN in writes and facts.folder)):
        consequence = "locks and claims cannot be kept: starts are refused as denied"
        remedy = f"ReadWritePaths=-{RUN}, and a line for it in /etc/tmpfiles.d, as in the example for least privilege"
        yield "DynamicUser" if service.dynamic_user else "ProtectSystem", consequence, remedy
    allows, families = held.get("RestrictAddressFamilies", (False, ()))
    if allows != ("AF_UNIX" in families):
        consequence = "neither systemd nor the journal can be reached: starts are refused as unknown"
        yield "RestrictAddressFamilies", consequence, "let it have AF_UNIX"
