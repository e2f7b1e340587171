"""What ``doctor`` finds: the shape of a finding, how a list of them reads, and what the machine's own facts come to.

Pure: doctor.py brings the facts. A finding is one fact, what comes of it, and what to do; what is in order is said in a
few words, so that it can be seen to have been looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, Optional

from . import bypass, claims, documents
from .model import EXIT_STATUS, Gpu, Inventory, Outcome, Reading, Refusal, Unit
from .text import printable
from .unitlines import Line


class Level(str, Enum):
    FAULT = "fault"
    REMARK = "remark"
    OK = "ok"


class Check(NamedTuple):
    """One finding; ``check`` is a word that never changes, for programs."""

    check: str
    level: Level
    fact: str
    consequence: str = ""
    remedy: str = ""
    file: Optional[str] = None
    line: Optional[int] = None
    #: What it is about could not be looked at, so nothing is known.
    blind: bool = False


def ok(check: str, fact: str) -> Check:
    return Check(check, Level.OK, fact)


def fault(
    check: str, fact: str, consequence: str, remedy: str, at: Optional[Line] = None, *, blind: bool = False
) -> Check:
    return _found(check, Level.FAULT, fact, consequence, remedy, at)._replace(blind=blind)


def remark(check: str, fact: str, consequence: str, remedy: str, at: Optional[Line] = None) -> Check:
    return _found(check, Level.REMARK, fact, consequence, remedy, at)


def _found(check: str, level: Level, fact: str, consequence: str, remedy: str, at: Optional[Line]) -> Check:
    if at is None:
        return Check(check, level, fact, consequence, remedy)
    return Check(check, level, f"{fact}: {at}", consequence, remedy, at.file, at.number)


# All of them together ------------------------------------------------------------------------------------------------


def status(checks: Iterable[Check]) -> int:
    """The exit status: what could not be looked at comes before what was found, as nothing is known of it."""
    found = list(checks)
    if any(each.blind for each in found):
        return EXIT_STATUS[Outcome.UNKNOWN]
    return FAULTY if any(each.level is Level.FAULT for each in found) else 0


#: EX_TEMPFAIL, as for a start that is refused until somebody has done something.
FAULTY = 75


def in_order(checks: Iterable[Check]) -> list[Check]:
    """What somebody was woken for comes first."""
    levels = list(Level)
    return sorted(checks, key=lambda each: (not each.blind, levels.index(each.level)))


def as_json(unit: Optional[str], checks: Sequence[Check]) -> str:
    import json

    document = {
        "version": 1,
        "unit": unit,
        "exit": status(checks),
        "checks": [
            {
                "check": each.check,
                "level": each.level.value,
                "fact": printable(each.fact),
                "consequence": printable(each.consequence),
                "remedy": printable(each.remedy),
                "file": None if each.file is None else printable(each.file),
                "line": each.line,
                "blind": each.blind,
            }
            for each in in_order(checks)
        ],
    }
    return json.dumps(document)


def read(found: Mapping[str, Any]) -> list[Check]:
    """The findings of another machine's ``doctor``, as far as they are of the right form."""
    checks = []
    said = found.get("checks")
    for each in said[:_MOST] if isinstance(said, list) else ():
        texts = [_TEXT(each.get(key)) or "" for key in _TEXTS] if isinstance(each, dict) else [""]
        if all(texts[:2]) and each.get("level") in _LEVELS:
            check, fact, consequence, remedy = texts
            blind = each.get("blind") is True
            checks.append(Check(check, Level(each["level"]), fact, consequence, remedy, blind=blind))
    return checks


#: So many findings at most are those of a machine.
_MOST = 1000
_TEXT, _TEXTS = documents.text(2000), ("check", "fact", "consequence", "remedy")
_LEVELS = [level.value for level in Level]


def as_text(unit: Optional[str], checks: Sequence[Check], host: str = "") -> str:
    """For a person: the faults, then the remarks, each with its consequence and remedy below it, then a line each for
    what is in order. ``host`` is the machine, where it is another one."""
    width = max(len(each.check) for each in checks)
    lines = []
    for each in in_order(checks):
        label = each.level.value.upper() if each.level is Level.FAULT else each.level.value
        lines.append(f"{label:6}  {each.check:{width}}  {printable(each.fact)}")
        below = " " * (6 + 2 + width + 2)
        if each.consequence:
            lines.append(f"{below}{printable(each.consequence)}")
        if each.remedy:
            lines += [f"{below}remedy: {printable(each.remedy)}", ""]
    blind = "; not everything could be looked at" if any(each.blind for each in checks) else ""
    # What is in order with the hook may still find the GPUs dirty.
    starts = unit is not None and "@." not in unit
    there = f" -H {host}" if host else ""
    now = [f"Whether it could start now is another matter: gpuprestart check{there} --unit {unit}"]
    return "\n".join([*lines, f"{unit or host or 'this machine'}: {_total(checks)}{blind}", *(now if starts else [])])


def _total(checks: Sequence[Check]) -> str:
    """How many of each kind, and which the faults are: a terminal may show nothing but the end."""
    said = []
    for level in Level:
        words = [each.check for each in in_order(checks) if each.level is level]
        if words:
            plural = "s" if len(words) > 1 and level is not Level.OK else ""
            names = f" ({', '.join(dict.fromkeys(words))})" if level is not Level.OK else ""
            said.append(f"{len(words)} {level.value}{plural}{names}")
    return ", ".join(said)


# The machine ---------------------------------------------------------------------------------------------------------

#: What looking into other people's processes and signalling them takes, and which bits of capabilities(7) allow it.
_NEEDED = (("CAP_KILL", (5,)), ("CAP_SYS_PTRACE", (19,)), ("CAP_DAC_READ_SEARCH", (1, 2)))


def privileges(uid: int, own: Optional[int], systemd: Optional[int]) -> list[Check]:
    """``own`` and ``systemd`` are sets of capabilities as /proc/PID/status has them: ours, and what systemd can give;
    None where that cannot be read."""
    found = []
    if uid != 0:
        consequence = "what only root may see was not looked at, so this list is not whole"
        found.append(fault("privileges", f"this is uid {uid}, not root", consequence, "run it as root", blind=True))
    elif own is not None and lacking(own):
        consequence = "what other users' processes hold cannot be seen from this shell, so this list is not whole"
        remedy = "run it from a shell of the machine itself"
        found.append(fault("privileges", f"root has no {lacking(own)} here", consequence, remedy, blind=True))
    if systemd is not None and lacking(systemd):
        consequence = "no hook can see or end other users' processes: starts are refused as denied"
        remedy = "give them to the container that this system runs in"
        found.append(fault("privileges", f"systemd itself has no {lacking(systemd)}", consequence, remedy))
    return found or [ok("privileges", "root, with the capabilities that the hook needs")]


def lacking(mask: int) -> str:
    """What the hook needs of these and has not."""
    return ", ".join(name for name, bits in _NEEDED if not any(mask >> bit & 1 for bit in bits))


def processes(hidepid: str, init_seen: bool) -> list[Check]:
    """``hidepid`` is that option of the mount at /proc, empty where there is none."""
    if not init_seen:
        consequence = "who holds a GPU cannot be found from here, nor by a hook that is started like this"
        remedy = "mount /proc without hidepid=, or give root CAP_SYS_PTRACE"
        return [fault("proc", "/proc does not show PID 1", consequence, remedy, blind=True)]
    if hidepid:
        consequence = "root is not affected; a hook without its + sees the unit's own processes alone"
        return [
            remark("proc", f"/proc is mounted with hidepid={hidepid}", consequence, "keep the + of the hook's line")
        ]
    return [ok("proc", "/proc shows all processes")]


#: What becomes of a run without a module, and what to install; that of the driver's own is told with the driver.
_MODULES = {
    "psutil": (
        Level.REMARK,
        "a policy that asks for memory of the machine (require.host_memory) refuses every start",
        "python3-psutil",
    ),
    "tomli": (Level.FAULT, "no policy can be read: where there is one, every start is refused", "python3-tomli"),
    "systemd": (
        Level.REMARK,
        "records go to standard error, systemctl status shows no verdict, systemd cannot be asked for more time",
        "python3-systemd",
    ),
}


def modules(missing: Mapping[str, str]) -> list[Check]:
    """``missing`` is, by name, why a module cannot be imported."""
    found = []
    for name, (level, consequence, package) in _MODULES.items():
        if name in missing:
            fact = f"the Python module {name} cannot be imported: {missing[name]}"
            remedy = f"install {package} for the system's own python3, which sees no venv and no home folder"
            found.append(Check("modules", level, fact, consequence, remedy))
    return found or [ok("modules", "all Python modules are there")]


def journald(listens: bool) -> list[Check]:
    if listens:
        return [ok("journal", "journald takes records")]
    consequence = "what the hook does and why goes to standard error alone; starts do not depend on it"
    return [remark("journal", "journald does not listen", consequence, "systemctl status systemd-journald")]


def runtime_folder(reasons: Iterable[str]) -> list[Check]:
    """``reasons`` are why locks, claims and bypasses cannot be kept, if anything is in the way."""
    consequence = "no lock and no claim can be kept: every start is refused as denied"
    remedy = "it must be root's, and nobody else's to write; while no unit is starting, rm -r it, and it is made anew"
    found = [
        fault("run", f"/run/gpuprestart cannot be used: {reason}", consequence, remedy)
        for reason in sorted(set(reasons))
    ]
    return found or [ok("run", "/run/gpuprestart can be used")]


# The driver ----------------------------------------------------------------------------------------------------------


def no_driver(reason: str, remedy: str, *, may_be_missing: bool) -> list[Check]:
    """``may_be_missing``: there is no trace of a GPU here, and the policy lets such machines pass."""
    if may_be_missing:
        return [ok("nvml", 'no NVIDIA device, module, node or library here, which nvml.missing = "pass" lets pass')]
    return [fault("nvml", reason, "every start is refused as unknown", remedy or "nvidia-smi and dmesg may say more")]


def driver(inventory: Inventory) -> list[Check]:
    whole = [gpu for gpu in inventory.gpus if gpu.parent is None]
    said = f"{inventory.nvml_path}, driver {inventory.driver}, {len(whole)} GPU{'s' if len(whole) != 1 else ''}"
    if whole:
        return [ok("nvml", said)]
    consequence = "every start that is to use one is refused as unknown"
    return [fault("nvml", f"NVML counts no GPU at all ({said})", consequence, "nvidia-smi and dmesg may say why")]


def gpus(
    inventory: Inventory, readings: Mapping[str, Reading], absent: Mapping[str, str], selected: Optional[Sequence[Gpu]]
) -> list[Check]:
    """``absent`` is, by UUID, the device node that is not there. What no unit in question has selected is a remark."""
    found = []
    for gpu in inventory.gpus:
        reading = readings.get(gpu.uuid)
        reason = gpu.fault or (reading.fault if reading else None)
        say = fault if selected is None or gpu in selected else remark
        consequence = "a start that uses it is refused as unknown"
        if reason:
            remedy = "nvidia-smi, and journalctl -k --grep NVRM; it may need a reset, or a reboot"
            found.append(say("gpus", f"{gpu} cannot be measured: {reason}", consequence, remedy))
        elif gpu.uuid in absent:
            remedy = "nvidia-modprobe makes the nodes; a container must be given them"
            found.append(say("gpus", f"{absent[gpu.uuid]} of {gpu} is not there", consequence, remedy))
        elif reading and (reading.distrust or reading.unlisted):
            consequence = "who has how much of its memory is told by /proc alone, so more starts are refused"
            remedy = "update the driver, if it is always so"
            found.append(remark("gpus", f"{gpu}: {reading.distrust or reading.unlisted}", consequence, remedy))
    return found or [ok("gpus", "every GPU can be measured")]


def pids(setting: str, initial: bool) -> list[Check]:
    """``initial``: we are in the first PID namespace, whose numbers are those that the driver lists."""
    if initial or setting != "auto":
        return [
            ok("pids", "the driver's PIDs are taken for " + ("somebody else's" if setting == "foreign" else "ours"))
        ]
    consequence = "the PIDs that the driver lists are taken for somebody else's, so memory can belong to nobody here"
    remedy = 'nvml.pids = "ours" in policy.toml, if nvidia-smi shows the PIDs of this system'
    return [remark("pids", "this system runs in a PID namespace of its own", consequence, remedy)]


# Policy and notes ----------------------------------------------------------------------------------------------------


def policy(files: Sequence[str]) -> list[Check]:
    return [ok("policy", ", ".join(files) or "there is no file, so the defaults hold")]


def policy_refused(refusal: Refusal, unit: Optional[str]) -> list[Check]:
    """All faults of the files that hold for one unit, or for all."""
    consequence = f"{f'a start of {unit}' if unit else 'every start'} is refused as {refusal.outcome.value}"
    # All faults but the first are among the hints.
    said = [refusal.message, *(hint for hint in refusal.hints if hint.startswith("/"))]
    remedies = [hint for hint in refusal.hints if not hint.startswith("/")]
    remedy = remedies[0] if remedies else "correct the line; the examples have a policy with every key"
    return [_placed(fault("policy", message, consequence, remedy)) for message in said]


def _placed(check: Check) -> Check:
    """With the file and line that a message of a policy's begins with."""
    file, _, rest = check.fact.partition(":")
    line = rest.partition(":")[0]
    return check._replace(file=file, line=int(line)) if file.startswith("/") and line.isdigit() else check


def overlays(strays: Mapping[str, str]) -> list[Check]:
    """``strays`` is, by path, why no unit reads this file."""
    consequence = "no start is judged by it"
    remedy = "name it after the unit, with .service.toml at its end, or remove it"
    found = [
        remark("overlays", f"{path}: {why}", consequence, remedy)._replace(file=path)
        for path, why in sorted(strays.items())
    ]
    return found or [ok("overlays", "every policy beside the machine's is some unit's")]


def bypasses(texts: Mapping[str, str], now: float) -> list[Check]:
    found = []
    for unit, line in sorted(texts.items()):
        granted = bypass.parse(line)
        remedy = f"rm {bypass.FOLDER}/{unit}"
        if granted is not None and bypass.holds(granted, now):
            fact = f"{granted.by} lets the next start of {unit} pass, for another {granted.until - now:.0f} s"
            found.append(remark("bypass", fact, "nothing will be proved of its GPUs", f"if that is over: {remedy}"))
        else:
            fact = f"a bypass of {unit} lies there that does not hold any more"
            found.append(remark("bypass", fact, "it lets nobody pass; the next start takes it away", remedy))
    return found or [ok("bypass", "nobody is let pass")]


def standing_claims(
    texts: Mapping[str, str], units: Mapping[str, Unit], unit: Optional[str], selected: Sequence[Gpu]
) -> list[Check]:
    """``units`` are those that have a claim, as systemd has them; ``unit`` has selected these GPUs, if there is one."""
    found = []
    theirs = {claim.gpu for claim in claims.foreign(texts, selected, unit)} if unit else set()
    standing: dict[str, list[str]] = {}
    for uuid, line in sorted(texts.items()):
        claim = claims.parse(uuid, line)
        owner = units.get(claim.unit)
        if claim.unit == claims.NOBODY or owner is None:
            consequence = "it counts as somebody's: every start that uses this GPU is refused as protected"
            remedy = f"rm {claims.FOLDER}/{uuid}"
            found.append(fault("claims", f"the claim on {uuid} cannot be read", consequence, remedy))
        elif claims.holds(claim, owner):
            standing.setdefault(claim.unit, []).append(uuid[:12])
            if uuid in theirs:
                consequence = f"while it is up, a start of {unit} is refused as protected"
                remedy = f"systemctl stop {claim.unit}, or use other GPUs"
                found.append(remark("claims", f"{claim.unit} was given {uuid}", consequence, remedy))
    said = "; ".join(f"{unit} has {', '.join(uuids)}" for unit, uuids in standing.items())
    return found or [ok("claims", said or "none stands")]
