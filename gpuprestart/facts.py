"""What ``doctor`` has to know of the machine and of a unit's files before anything can be said of them.

It looks and brings values, and knows nothing of what would be a fault. Nothing is touched. What is not there is None or
empty; what may not be seen is said as a reason.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import io
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Optional, Union

from . import commandline, envfile, settings
from .commandline import Options
from .hookchecks import Node
from .host import files, nvidia, opened
from .host.journal import Journal
from .host.locks import Denied, Notes
from .model import Gpu
from .service import Exec, Service

#: More than any file that is read here has.
LARGEST = 1 << 26

#: What is loaded late or in a child, so that its absence shows only when somebody is in the way.
MODULES = ("psutil", "systemd.daemon", *(("tomli",) if sys.version_info < (3, 11) else ()))

#: Variables by which the loader takes code from elsewhere (ld.so(8)).
LOADER = ("LD_PRELOAD", "LD_AUDIT", "LD_LIBRARY_PATH")

#: Where systemd looks for units of its own, in this order (systemd.unit(5)).
UNIT_FOLDERS = (
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
)


# The machine ---------------------------------------------------------------------------------------------------------


def capabilities(pid: Union[int, str], kind: str) -> Optional[int]:
    """A set of capabilities of a process, such as CapEff; None where it cannot be read (proc(5))."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith(f"{kind}:"):
                    return int(line.split()[1], 16)
    except OSError:
        pass
    return None


def hidepid() -> str:
    """That option of the mount at /proc, empty where it hides nothing."""
    found = ""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            before, _, after = line.rstrip("\n").partition(" - ")
            if before.split(" ")[4] == "/proc":
                options = dict(word.partition("=")[::2] for word in after.split(" ")[2].split(","))
                found = options.get("hidepid", "")
    return found


def init_seen() -> bool:
    return os.path.exists("/proc/1")


def missing_modules() -> dict[str, str]:
    """By package, why its module cannot be imported."""
    found = {}
    for name in MODULES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            found[name.partition(".")[0]] = str(error)
    return found


def journald() -> bool:
    """Whether somebody listens where records are sent to."""
    journal = Journal(sendv=lambda *_: None, journal_stream="")
    try:
        return journal.open()
    finally:
        journal.close()


def folder_faults(notes: Iterable[Notes]) -> list[str]:
    """Why what lies in /run/gpuprestart cannot be used."""
    found = []
    for each in notes:
        try:
            each.read()
        except Denied as error:
            found.append(str(error))
    return found


def absent_nodes(gpus: Iterable[Gpu]) -> dict[str, str]:
    """By UUID of its GPU, a device node that is not there."""
    found = {}
    for gpu in gpus:
        for path in nvidia.nodes(gpu.minor, gpu.gi):
            if not gpu.fault and opened.device_number(path) is None:
                found[gpu.uuid] = path
    return found


def policy_files() -> dict[str, str]:
    """Every TOML file beside the policy, by path, with what is in front of its .toml."""
    found = {}
    for folder in settings.FOLDERS:
        for path in sorted(glob.glob(f"{folder}/*.toml")):
            name = os.path.basename(path)[: -len(".toml")]
            if name != "policy":
                found[path] = name
    return found


# A unit's files ------------------------------------------------------------------------------------------------------


def texts(paths: Iterable[str]) -> list[tuple[str, str]]:
    """Those of the files that can be read: they are only quoted."""
    read = ((path, files.as_it_is(path, limit=LARGEST)) for path in paths)
    return [(path, text) for path, text in read if text is not None]


def unread_drop_ins(unit: Service) -> list[str]:
    """Drop-ins of a unit that systemd has not loaded; older ones do not see by themselves that there is a new folder.

    One that bears the name of another in a folder before it is no drop-in (systemd.unit(5)).
    """
    template = re.sub("@.+(?=[.]service$)", "@", unit.name)
    known = {os.path.basename(path) for path in unit.drop_ins}
    found: dict[str, str] = {}
    for folder in UNIT_FOLDERS:
        for name in dict.fromkeys([unit.name, template]):
            for path in glob.glob(f"{folder}/{glob.escape(name)}.d/*.conf"):
                found.setdefault(os.path.basename(path), path)
    return [found[name] for name in sorted(found.keys() - known)]


def writable(entries: Iterable[str]) -> dict[str, str]:
    """By entry of EnvironmentFile=, why somebody else than root could write what it names, or put something there."""
    found = {entry: _first_unsafe(settings.files_of(entry) or [entry]) for entry in entries}
    return {entry: reason for entry, reason in found.items() if reason}


def loaded_code(unit: Service) -> dict[str, str]:
    """By variable, why somebody else than root could write the code that it has the loader take."""
    environ = dict(unit.environment)
    for _, text in texts(path for entry, _ in unit.environment_files for path in settings.files_of(entry)):
        environ.update(envfile.assignments(text))
    found = {}
    for name in LOADER:
        # In a folder any library may be the one that is looked for.
        inside = "/libc.so.6" if name == "LD_LIBRARY_PATH" else ""
        places = [path for path in re.split("[: ]", environ.get(name, "")) if path.startswith("/")]
        found[name] = _first_unsafe(path + inside for path in places)
    return {name: reason for name, reason in found.items() if reason}


def _first_unsafe(paths: Iterable[str]) -> str:
    return next(filter(None, map(_unsafe, paths)), "")


def _unsafe(path: str) -> str:
    if os.geteuid() != 0 and not os.access(path, os.R_OK):
        return ""
    try:
        files.read_safely(path, limit=LARGEST, trusted_owner=0)
    except files.UnsafeFile as error:
        return str(error)
    return ""


def programs(commands: Iterable[Exec]) -> dict[str, str]:
    """By program, why it cannot be run, or why somebody else than root could write it."""
    found = {}
    for command in commands:
        path = command.path
        if not os.path.isabs(path):
            continue
        if not os.path.exists(path):
            found[path] = "is not there"
        elif not os.access(path, os.X_OK):
            found[path] = "cannot be executed"
        elif reason := _unsafe(path):
            found[path] = f"is not root's alone: {reason}"
    return found


def options(command: Exec) -> tuple[Options, str]:
    """What the hook's line asks for, and why that is no command line, if it is none. What stands in a script is not
    looked at, nor what systemd has yet to fill in."""
    argv = command.argv
    ours = next((number for number, word in enumerate(argv) if re.fullmatch(r"(?:.*/)?gpuprestart", word)), len(argv))
    arguments = argv[ours + 1 :]
    if not arguments or any("$" in word for word in arguments):
        return Options(), ""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            return commandline.parse(arguments).options, ""
    except SystemExit as end:
        last = said.getvalue().strip().split("\n")[-1] if end.code else "it asks for help or the version"
        return Options(), last


# Devices -------------------------------------------------------------------------------------------------------------


def nodes(gpus: Optional[Iterable[Gpu]], *, strict: bool) -> tuple[Node, ...]:
    """The nodes that NVML opens for these GPUs, or for any where they are not known. Under a strict policy /dev/null
    is no matter of course, which every question to systemd is asked with."""
    paths = ["/dev/nvidiactl", *(["/dev/null"] if strict else [])]
    paths += sorted(glob.glob("/dev/nvidia[0-9]*")) if gpus is None else [f"/dev/nvidia{gpu.minor}" for gpu in gpus]
    groups = _groups()
    found = []
    for path in dict.fromkeys(paths):
        number = opened.device_number(path)
        if number is not None:
            major = os.major(number)
            found.append(Node(path, number, (str(major), *groups.get(major, ()))))
    return tuple(found)


def _groups() -> dict[int, list[str]]:
    """What /proc/devices calls the drivers of character devices, by major number."""
    found: dict[int, list[str]] = {}
    try:
        with open("/proc/devices", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("Block"):
                    break
                number, _, name = line.strip().partition(" ")
                if number.isdigit():
                    found.setdefault(int(number), []).append(name)
    except OSError:
        pass
    return found


def numbers(entries: Mapping[str, str]) -> dict[str, int]:
    """The device numbers of the entries of DeviceAllow= that are paths."""
    known = {entry: opened.device_number(entry) for entry in entries if entry.startswith("/")}
    return {entry: number for entry, number in known.items() if number is not None}
