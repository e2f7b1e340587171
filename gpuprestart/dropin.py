"""The drop-in that puts the hook in front of a service: what it says and why, from what the service is. Pure.

Each setting stands there only where the service needs it, below its reason. What cannot be said in a drop-in becomes a
remark for whoever asked for it. A digest in the header tells a drop-in that was edited from one that was not.
"""

from __future__ import annotations

import hashlib
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple, Optional

from . import engines, unitlines, unitwords
from .service import Exec, Service, called
from .unitlines import Line

NAME = "50-gpuprestart.conf"
HOOK = "+/usr/bin/gpuprestart clean"

#: Seconds by which TimeoutStartSec= has to be longer than deadline.total: for a verdict that comes at the last moment.
ROOM = 15

#: Below so many seconds between two starts, five refusals come within the ten that systemd allows for them.
QUICK, SLOW = 2, 15

#: The driver's own services: where they are started at all, the GPUs are judged after them.
DRIVER = ("nvidia-persistenced.service", "nvidia-fabricmanager.service")

_PRE, _START = "Service.ExecStartPre", "Service.ExecStart"
_SEAL = re.compile(
    r"^# ([0-9a-f]{64}) is its sha256 without these digits(; the folder was made for it)?\.$", re.MULTILINE
)


class Member(NamedTuple):
    """A service that the drop-in is for. ``lines`` are its files', ``total`` is deadline.total of its policy."""

    unit: Service
    lines: tuple[Line, ...]
    total: float


class DropIn(NamedTuple):
    text: str
    #: Whole sentences for a person, the most important first.
    remarks: tuple[str, ...]


class State(Enum):
    """Whose a file of that name is."""

    INTACT = "as it was written"
    EDITED = "edited since it was written"
    FOREIGN = "not written by gpuprestart enable"


class _Setting(NamedTuple):
    section: str
    line: str
    why: str


# What it says --------------------------------------------------------------------------------------------------------


def compose(target: str, members: Sequence[Member], *, makes_folder: bool) -> DropIn:
    """The drop-in for a service, a template or a prefix; the latter stand for several services, and what is not right
    for all of them is left out."""
    remarks: list[str] = []
    settings = [
        *_after(members),
        *_removal(members, remarks),
        *_hook(members, remarks),
        *_notify_access(members, remarks),
        *_timeout(members, remarks),
        *_restart(members, remarks),
    ]
    for setting in settings:
        remarks += [
            f"{line} is read later and wins over {setting.line}."
            for line in dict.fromkeys(line for each in members for line in each.lines)
            if _is_later(line) and line.key in _sayings(setting)
        ]
    head = [
        *_comment(
            f'Written by "gpuprestart enable" for {target}: it starts on GPUs that are proved clean, or not at all. '
            f'"gpuprestart disable {target}" takes this file away again, unless it was edited.'
        ),
        _seal("0" * 64, makes_folder),
    ]
    body = []
    for section in ("Unit", "Service"):
        chosen = [each for each in settings if each.section == section]
        if chosen:
            body += ["", f"[{section}]"]
        for each in chosen:
            body += [*_comment(each.why), each.line]
    text = "\n".join([*head, *body, ""])
    return DropIn(text=text.replace("0" * 64, _digest(text.replace("0" * 64, "", 1)), 1), remarks=tuple(remarks))


def _sayings(setting: _Setting) -> tuple[str, ...]:
    """The keys by which a later file would say otherwise; lists are added to."""
    key = setting.line.partition("=")[0]
    if key in ("After", "ExecStartPre"):
        return ()
    return (f"Service.{key}", *(("Service.TimeoutSec",) if key == "TimeoutStartSec" else ()))


def _comment(sentence: str) -> list[str]:
    return textwrap.wrap(sentence, 118, initial_indent="# ", subsequent_indent="# ", break_long_words=False)


def _after(members: Sequence[Member]) -> list[_Setting]:
    missing = [name for name in DRIVER if not all(name in each.unit.after for each in members)]
    why = "Where the driver's own services are started, the GPUs are judged after them. It orders, and starts nothing."
    return [_Setting("Unit", f"After={' '.join(missing)}", why)] if missing else []


def _hook(members: Sequence[Member], remarks: list[str]) -> list[_Setting]:
    others = [line for each in members for line in unitlines.standing(_before(each.lines), _PRE) if not _tidies(line)]
    for line in dict.fromkeys(others):
        remarks.append(
            f"this ExecStartPre= runs before the hook, as a drop-in can only add to them: {line}. What it may leave on "
            f"a GPU is in the way of the start."
        )
    why = (
        'With "+" it runs as root and outside the sandbox of the unit: it has to see whose the GPUs are, and to end '
        'what is stale. Without "-", what is not proved does not start, as little as where the program is missing.'
    )
    return [_Setting("Service", f"ExecStartPre={HOOK}", why)]


def _notify_access(members: Sequence[Member], remarks: list[str]) -> list[_Setting]:
    deaf = [each.unit for each in members if each.unit.notify_access in ("none", "main")]
    podman = [unit for unit in deaf if any(_waits_for_a_container(command) for command in unit.start)]
    if podman:
        remarks.append(
            f"NotifyAccess= of {_names(podman)} stays: podman would hand systemd's socket to the container, and wait "
            f'for its word. So "systemctl status" shows no verdict, the journal alone does, and the hook cannot ask '
            f"for more time than TimeoutStartSec=. With --sdnotify=ignore in ExecStart= both would work: then disable "
            f"and enable it again."
        )
    elif 0 < len(deaf) < len(members):
        remarks.append(
            f'NotifyAccess= is not the same for all and stays: "systemctl status" shows no verdict of {_names(deaf)}, '
            f"the journal alone does. Enable what should show it by its own name."
        )
    if podman or not deaf or len(deaf) < len(members):
        return []
    why = 'Lets the verdict reach "systemctl status", where it stays, and lets the hook ask for more time.'
    if any(unit.notify_access == "main" for unit in deaf):
        why += " The server is heard as before."
    return [_Setting("Service", "NotifyAccess=exec", why)]


def _timeout(members: Sequence[Member], remarks: list[str]) -> list[_Setting]:
    limited = [(each.unit.timeout_start, each.total) for each in members if each.unit.timeout_start is not None]
    short = [(limit, total) for limit, total in limited if limit < total + ROOM]
    if short and len(limited) < len(members):
        endless = _names(each.unit for each in members if each.unit.timeout_start is None)
        remarks.append(
            f"TimeoutStartSec= stays, because {endless} has no limit, and the others have one that is below "
            f"deadline.total of the policy. Enable these by their own names."
        )
        return []
    if not short:
        return []
    needed = math.ceil(max(*(limit for limit, _ in limited), *(total + ROOM for _, total in short)))
    limit, total = short[0]
    why = (
        f"The hook may take deadline.total of the policy, {_seconds(total)}, and this was {_seconds(limit)}. Each "
        f"command of a start has so much to itself: what the hook takes is not taken from the server."
    )
    return [_Setting("Service", f"TimeoutStartSec={needed}s", why)]


def _restart(members: Sequence[Member], remarks: list[str]) -> list[_Setting]:
    once = [each.unit for each in members if each.unit.restart == "no"]
    if once:
        remarks.append(f"without Restart=, a refused start is not tried again by itself: {_names(once)}.")
    again = [each.unit for each in members if each.unit.restart != "no"]
    quick = [unit for unit in again if unit.restart_sec is not None and unit.restart_sec < QUICK]
    if not quick:
        return []
    seconds = math.ceil(max(SLOW, *(unit.restart_sec or 0 for unit in again)))
    why = (
        f"A refused start is tried again under Restart={quick[0].restart}. Only {_seconds(quick[0].restart_sec or 0)} "
        f"apart, as it was, such starts soon reach StartLimitBurst=, and systemd gives up."
    )
    return [_Setting("Service", f"RestartSec={seconds}s", why)]


def _names(units: Iterable[Service]) -> str:
    return ", ".join(dict.fromkeys(called(unit.name) for unit in units))


def _seconds(amount: float) -> str:
    return f"{amount * 1000:.0f} ms" if amount < 1 else f"{amount:.10g} s"


# What the service has ------------------------------------------------------------------------------------------------


def runs_hook(line: Line) -> bool:
    """Whether this line of a file runs the hook."""
    return line.key == _PRE and _exec(line).ours


def hook_of(lines: Sequence[Line]) -> Optional[Line]:
    """The line that runs the hook, and is not undone by a later one."""
    return unitlines.last(lines, _PRE, fits=runs_hook)


def undoing(lines: Sequence[Line]) -> Optional[Line]:
    """A line that would undo ours: it begins the list anew, in a drop-in that is read later."""
    return next((line for line in lines if line.key == _PRE and not line.value and _is_later(line)), None)


def _is_later(line: Line) -> bool:
    folder, _, name = line.file.rpartition("/")
    return folder.endswith(".d") and name > NAME


def _before(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if not _is_later(line)]


def _exec(line: Line) -> Exec:
    return Exec("", tuple(_words(line)), frozenset())


def _words(line: Line) -> list[str]:
    try:
        return unitwords.split(line.value[len(line.prefix) :])
    except ValueError:
        return []


def _tidies(line: Line) -> bool:
    """It is about containers alone, as it should be before the hook, and leaves nothing on a GPU."""
    verbs = {call.verb for call in engines.calls(_exec(line))}
    return bool(verbs) and verbs <= {"rm", "stop", "kill", "pull"}


# Containers ----------------------------------------------------------------------------------------------------------


def _waits_for_a_container(command: Exec) -> bool:
    """podman hands NOTIFY_SOCKET to the container, whose program knows nothing of it, and waits for its word
    (podman-run(1), --sdnotify)."""
    words = " ".join((command.path, *command.argv))
    podman = re.search(r"(^|[/\s\"'])podman[\w-]*(\s|$)", words)
    return podman is not None and re.search(r"--sdnotify[=\s]ignore\b", words) is None


def _removal(members: Sequence[Member], remarks: list[str]) -> list[_Setting]:
    found = {each.unit.name: _removals(each, remarks) for each in members}
    lines = list(dict.fromkeys(line for removals in found.values() for line in removals))
    for line in list(lines):
        owning = [each.unit for each in members if line in found[each.unit.name]]
        if len(owning) < len(members):
            lines.remove(line)
            remarks.append(
                f"{line} is right for {_names(owning)} alone: write it there, so that it runs before the hook."
            )
    why = (
        "A container is not a child of the unit: one that an earlier run has left holds GPUs like anybody alive. It is "
        "the unit's own, by its name, and goes first."
    )
    # The reason stands once, also above several lines.
    return [_Setting("Service", "\n".join(lines), why)] if lines else []


def _removals(member: Member, remarks: list[str]) -> list[str]:
    """The lines that remove the containers of a service, and no others, before its hook."""
    unit, lines, _ = member
    found = []
    before = [call for command in unit.start_pre for call in engines.calls(command)]
    for command, line in zip(unit.start, unitlines.commands(lines, _START, len(unit.start))):
        run = engines.run(command)
        if run is None or run.within or any(call.ends(run) for call in before):
            continue
        removal = _removing(command, _written(command, line, certain="@" not in unit.name))
        if removal is not None:
            found.append(removal)
            continue
        remarks.append(
            f'{called(unit.name)} runs "{run.engine} run", and it is not certain under which name. The hook refuses a '
            f"start while a container of an earlier run holds a GPU: give it a plain --name=, and put an "
            f"ExecStartPre=- that removes it by that name before the hook."
        )
    return found


def _written(command: Exec, line: Optional[Line], *, certain: bool) -> Optional[list[str]]:
    """The words of a command as they stand in the file, with their specifiers: in a template they mean another
    container for each instance, and some change from one boot to the next."""
    if line is not None and "|" not in line.prefix:
        words = _words(line)
        words = words[1:] if "@" in line.prefix else words
        if len(words) == len(command.argv) and all(map(unitwords.expands_to, words[1:], command.argv[1:])):
            return words
    return [unitwords.literal(word) for word in command.argv] if certain else None


def _removing(command: Exec, words: Optional[Sequence[str]]) -> Optional[str]:
    """The line that removes the container which a command with these words starts; None where that is not certain."""
    if not words:
        return None
    if command.path.rpartition("/")[2] in engines.NAMES:
        number = next((number for number, word in enumerate(words) if word == "run"), len(words))
        program, rest, name = command.path, list(words[1:number]), own_name(words[number + 1 :])
    else:
        # What a shell makes of a word is not known here, unless it is plain.
        script = re.search(rf"(?:^|[\s;&|(])([\w./-]*(?:{'|'.join(engines.NAMES)}))\s+run\s", words[-1])
        run = engines.run(command._replace(argv=tuple(words)))
        if script is None or run is None or len(words) < 3 or not re.fullmatch(r"-[a-z]*c", words[-2]):
            return None
        program, rest, name = script[1], [], own_name(run.words)
        name = name if re.fullmatch(r"[A-Za-z0-9%][A-Za-z0-9_.%-]*", name) else ""
    if not name:
        return None
    prefix = "".join(sign for flag, sign in _PREFIXES.items() if flag in command.flags)
    return "ExecStartPre=-" + prefix + " ".join(unitwords.quoted(word) for word in (program, *rest, "rm", "-f", name))


#: systemd's words for what may stand before a command: what removes a container runs as what starts it.
_PREFIXES = {"no-env-expand": ":", "privileged": "+", "no-setuid": "!", "ambient": "!!"}

#: Options of docker run and podman run that take no value: all others do, as one word or as two.
_SWITCHES = frozenset((
    "--detach", "--disable-content-trust", "--env-host", "--help", "--http-proxy", "--init", "--interactive",
    "--no-healthcheck", "--no-hostname", "--no-hosts", "--oom-kill-disable", "--passwd", "--privileged",
    "--publish-all", "--quiet", "--read-only", "--read-only-tmpfs", "--replace", "--rm", "--rmi", "--rootfs",
    "--sig-proxy", "--tls-verify", "--tty", "--unsetenv-all", "--use-api-socket",
))  # fmt: skip
_SHORT_SWITCHES = "ditqP"


def own_name(words: Iterable[str]) -> str:
    """What --name= says among the options behind ``run``; what stands behind the image is the container's own."""
    name = ""
    remaining = iter(words)
    for word in remaining:
        if not word.startswith("-") or word in ("-", "--"):
            break
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            if not equals and option not in _SWITCHES:
                value = next(remaining, "")
            name = value if option == "--name" else name
        elif len(word[1:].lstrip(_SHORT_SWITCHES)) == 1:
            # The first letter that is no switch takes a value; here none is left of the word itself.
            next(remaining, "")
    return name


# Whose a file is -----------------------------------------------------------------------------------------------------


def _seal(digits: str, makes_folder: bool) -> str:
    return f"# {digits} is its sha256 without these digits{'; the folder was made for it' if makes_folder else ''}."


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def state_of(text: str) -> State:
    """Whose a file with this text is."""
    seal = _SEAL.search(text)
    if seal is None:
        return State.FOREIGN
    return State.INTACT if _digest(text[: seal.start(1)] + text[seal.end(1) :]) == seal[1] else State.EDITED


def made_folder(text: str) -> bool:
    """Whether the folder of the drop-in was made for it."""
    seal = _SEAL.search(text)
    return seal is not None and seal[2] is not None
