"""Builders for the values of the model, so that a table row stays one line.

GPUs are named by their index and amounts are MiB; what a test does not say is what an idle and healthy machine says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from textwrap import dedent
from typing import Any, Optional

from gpuprestart.model import (
    MIB,
    Action,
    Decision,
    Gpu,
    Holder,
    Inventory,
    Listed,
    Memory,
    Owner,
    OwnerKind,
    Process,
    Reading,
    Survey,
    Unit,
)
from gpuprestart.policy import Layer, Policy, parse

POLICY = "/etc/gpuprestart/policy.toml"
TOTAL = 81_920

#: What each holder has on each GPU, in MiB; None is what NVML does not tell.
Shares = Mapping[int, Optional[int]]


def uuid(index: int) -> str:
    return f"GPU-{index:08x}"


def gpu(index: int = 0, **changes: Any) -> Gpu:
    return Gpu(index=index, uuid=uuid(index), name="NVIDIA H200", minor=index)._replace(**changes)


def inventory(count: int = 2) -> Inventory:
    path = "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"
    return Inventory(driver="570.1", nvml_path=path, gpus=tuple(gpu(index) for index in range(count)))


def memory(used: int, *, reserved: Optional[int] = 500, total: int = TOTAL, call: str = "v2") -> Memory:
    free = total - used - (reserved or 0)
    return Memory(
        used=used * MIB,
        free=free * MIB,
        total=total * MIB,
        reserved=None if reserved is None else reserved * MIB,
        call=call,
    )


def reading(index: int = 0, used: Optional[int] = 3, listed: Optional[Shares] = None, **changes: Any) -> Reading:
    """``used`` None is a GPU that could not be read; ``listed`` is by PID."""
    entries = tuple(
        Listed(pid=pid, bytes=_bytes(share), kinds=frozenset({"compute"})) for pid, share in (listed or {}).items()
    )
    found = Reading(uuid=uuid(index), memory=None if used is None else memory(used), listed=entries)
    if used is None:
        found = found._replace(fault="GPU is lost")
    return found._replace(**changes)


def answer(of: Reading) -> dict[str, object]:
    """The reading as the driver's child puts it."""
    listed = [(entry.pid, entry.bytes, kind) for entry in of.listed for kind in sorted(entry.kinds)]
    figures = None if of.memory is None else tuple(of.memory)
    return {"memory": figures, "fault": of.fault, "listed": listed, "unlisted": of.unlisted, "integrated": False}


def process(pid: int = 4711, **changes: Any) -> Process:
    normal = Process(
        pid=pid,
        started=90_000,
        began=900.0,
        ppid=1,
        comm="python3",
        state="S",
        uid=990,
        cgroup="/system.slice/old.service",
        user="model",
        cmdline="python3 -m sglang.launch_server",
        exe="/usr/bin/python3.11",
        exe_trusted=True,
    )
    return normal._replace(**changes)


def unit(name: str = "old.service", active: str = "failed", sub: str = "", **changes: Any) -> Unit:
    normal = Unit(
        name=name,
        load_state="loaded",
        active_state=active,
        sub_state=sub or {"active": "running", "activating": "start-pre", "inactive": "dead"}.get(active, active),
        control_group=f"/system.slice/{name}",
        type="simple",
        user="model",
        timeout_stop="1min 30s",
    )
    return normal._replace(**changes)


def owner(kind: OwnerKind = OwnerKind.UNIT, of: Optional[Unit] = None, **changes: Any) -> Owner:
    """For units of every kind: of a failed one, running as its user, unless the test says otherwise."""
    of = of or unit()
    words = {
        OwnerKind.SESSION: "session:7:alice",
        OwnerKind.USER: "user:alice",
        OwnerKind.CONTAINER: "container:docker:0123456789ab",
        OwnerKind.SLURM: "slurm:42",
        OwnerKind.NONE: "none",
        OwnerKind.UNKNOWN: "unknown",
    }
    has_unit = kind not in words or kind is OwnerKind.USER
    normal = Owner(
        kind=kind,
        word=words.get(kind, f"unit:{of.name}"),
        unit=of if has_unit else None,
        user="alice" if kind in (OwnerKind.SESSION, OwnerKind.USER) else "model",
        as_unit_user=kind is OwnerKind.UNIT,
        doubt="nobody answered" if kind is OwnerKind.UNKNOWN else "",
    )
    return normal._replace(**changes)


def session(active: str, sub: str, load: str = "loaded") -> Owner:
    """A login session whose scope systemd describes so; one that it does not have is ``not-found``."""
    scope = unit("session-7.scope", active, sub, load_state=load) if load == "loaded" else None
    return owner(OwnerKind.SESSION)._replace(unit=scope)


def holder(
    pid: int = 4711,
    of: Optional[Owner] = None,
    listed: Optional[Shares] = None,
    opened: Iterable[int] = (0,),
    mapped: Iterable[int] = (),
    **changes: Any,
) -> Holder:
    """A holder with the node of GPU 0 open; ``listed`` is what NVML says of it, by GPU."""
    return Holder(
        process=process(pid, **changes),
        owner=of or owner(),
        listed={uuid(index): _bytes(share) for index, share in (listed or {}).items()},
        opened=frozenset(uuid(index) for index in opened),
        mapped=frozenset(uuid(index) for index in mapped),
    )


def survey(*holders: Holder, used: Sequence[Optional[int]] = (3,), at: float = 1000.0, **changes: Any) -> Survey:
    """As many selected GPUs as there are figures in ``used``."""
    gpus = tuple(gpu(index) for index in range(len(used)))
    readings = {each.uuid: reading(each.index, used[each.index]) for each in gpus}
    return Survey(at=at, gpus=gpus, readings=readings, holders=holders)._replace(**changes)


def decision(of: Optional[Holder] = None, action: Action = Action.KILL, **changes: Any) -> Decision:
    reason = "was left behind by old.service, which is failed"
    return Decision(holder=of or holder(listed={0: 1520}), action=action, reason=reason)._replace(**changes)


def policy(text: str = "", overlay: Optional[str] = None) -> Policy:
    """The policy of this site file, and of this overlay over it."""
    layers = [Layer(POLICY, dedent(text))]
    if overlay is not None:
        layers.append(Layer("/etc/gpuprestart/sglang.service.toml", dedent(overlay), overlay=True))
    return parse(layers)


def rule(action: str, **match: object) -> str:
    """The text of one [[rule]] with these keys in its match."""
    infrastructure = match.pop("infrastructure", False)
    said = {key: str(value) if isinstance(value, int) else f"'{value}'" for key, value in match.items()}
    keys = ", ".join(f"{key} = {value}" for key, value in said.items())
    lines = ["[[rule]]", f'name = "{action} it"', f"match = {{ {keys} }}", f'action = "{action}"']
    return "\n".join([*lines, "infrastructure = true" if infrastructure else "", ""])


def _bytes(share: Optional[int]) -> Optional[int]:
    return None if share is None else share * MIB
