"""A verdict's document -> the commands that would help, ready to be copied, the most useful first.

Pure. A command is made of a unit, a session, a container, a job or a GPU by its name or id, and only where that has the
form that such names have: nothing that a process chose to call itself is ever offered to a shell.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

Document = Mapping[str, Any]

#: More would be read by nobody.
MOST = 12

_UNIT = r"(?!-)[A-Za-z0-9:_.\\@-]{1,250}\.(service|scope)"
_GPU = r"(GPU|MIG)-[0-9A-Za-z-]{1,60}"

#: How what runs a container is told to stop one, and what its ids look like.
_ENGINES: Mapping[str, tuple[str, str]] = {
    "docker": ("docker stop", "[0-9a-f]{12,64}"),
    "podman": ("podman stop", "[0-9a-f]{12,64}"),
    "cri-containerd": ("crictl stop", "[0-9a-f]{12,64}"),
    "crio": ("crictl stop", "[0-9a-f]{12,64}"),
    "lxc": ("lxc-stop -n", "(?!-)[A-Za-z0-9_.-]{1,64}"),
    "nspawn": ("machinectl terminate", "(?!-)[A-Za-z0-9_.-]{1,64}"),
}

#: What a start is refused for that an operator may know better: with nobody alive in the way.
_BYPASSABLE = ("unknown", "unkillable", "not-freed", "unattributed")


def remedies(document: Document) -> list[tuple[str, str]]:
    """Each command with why it would help; none for a verdict that refuses nothing. ``document`` is one as
    documents.document returns it."""
    if document["exit"] == 0:
        return []
    found: dict[str, str] = {}
    for command, why in _all(document):
        found.setdefault(command, why)
    return list(found.items())[:MOST]


def _all(document: Document) -> Iterator[tuple[str, str]]:
    outcomes, unit = document["outcomes"], _named(_UNIT, document["unit"])
    # Who only has a node open may be a monitor, and is disturbed last.
    for holder in sorted(document["holders"], key=_is_suspect):
        if holder["action"] in ("refuse", "wait"):
            yield from _of_owner(holder)
    if any(holder["action"] == "kill" for holder in document["holders"]):
        yield from _of_stale(unit, alone=set(outcomes) == {"not-freed"})
    stays = "unattributed" in outcomes or ("not-freed" in outcomes and document["verb"] == "clean")
    # Who has the memory may be among those that could not be looked into.
    if stays and "denied" not in outcomes:
        yield from _of_memory(document)
    if "unknown" in outcomes:
        yield "nvidia-smi", "whether the driver answers anybody"
        yield "journalctl -k --grep NVRM", "what the driver has told the kernel's log"
    # What was typed wrong is corrected where it was typed, and doctor knows nothing of it.
    typed = (document["message"] or "").startswith("--")
    if ("config" in outcomes and not typed) or "denied" in outcomes or "unknown" in outcomes:
        yield f"gpuprestart doctor {unit}".rstrip(), "what keeps the hook from seeing or doing what it must"
    if unit and document["outcome"] in _BYPASSABLE:
        yield f"gpuprestart bypass {unit}", "lets its next start pass unproved, once, if you know better"


def _of_owner(holder: Document) -> Iterator[tuple[str, str]]:
    kind, _, rest = (holder["owner"] or "").partition(":")
    unit = _named(_UNIT, rest)
    # Who only looks, as a monitor does, has every node open.
    has = "has it open, and may hold it" if _is_suspect(holder) else "has it"
    if kind == "unit" and unit and holder["action"] == "wait":
        yield f"systemctl kill --signal=SIGKILL {unit}", f"{unit} is stopping; this does not wait for it"
    elif kind == "unit" and unit:
        yield f"systemctl stop {unit}", f"{unit} {has}"
    elif kind == "session":
        session, _, user = rest.partition(":")
        if _named("[A-Za-z0-9]{1,32}", session):
            yield (
                f"loginctl terminate-session {session}",
                f"the login session of {user or 'somebody'} {has}: ask first",
            )
    elif kind == "container":
        engine, _, name = rest.partition(":")
        command, form = _ENGINES.get(engine, ("", ""))
        if command and _named(form, name):
            yield f"{command} {shlex.quote(name)}", f"that {engine} container {has}"
    elif kind == "slurm" and _named("[0-9]{1,20}", rest):
        yield f"scancel {rest}", f"that Slurm job {has}"


def _is_suspect(holder: Document) -> bool:
    """Whether it was seen with the node open, and with nothing that is known to be in use."""
    return (
        bool(holder["evidence"])
        and holder["bytes"] is None
        and not holder["occupies"]
        and "nvml" not in holder["evidence"]
    )


def _of_stale(unit: str, *, alone: bool) -> Iterator[tuple[str, str]]:
    """``alone`` is where nothing else is in the way of the start."""
    if unit:
        then = ", and then it starts" if alone else "; the rest may still refuse the start"
        yield f"systemctl start {unit}", f"its hook ends what is stale{then}"
        yield f"gpuprestart clean --unit {unit}", "ends what is stale now, without a start"
    else:
        yield "gpuprestart clean", "ends what is stale now"


def _of_memory(document: Document) -> Iterator[tuple[str, str]]:
    for gpu in document["gpus"]:
        unexplained, limit = gpu["unattributed_bytes"], gpu["limit_bytes"]
        uuid = _named(_GPU, gpu["uuid"])
        if uuid and not gpu["parent"] and unexplained is not None and limit is not None and unexplained > limit:
            yield (
                f"nvidia-smi --gpu-reset -i {uuid}",
                "nobody holds its memory: if it is not back in a minute, once nothing uses that GPU",
            )


def _named(form: str, name: Any) -> str:
    """The name as a shell takes it, if it has the form; else nothing."""
    return shlex.quote(name) if isinstance(name, str) and re.fullmatch(form, name) else ""
