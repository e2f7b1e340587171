"""What is said besides, told by the program itself: of what the policy asks for, of files, units, verbs and resets."""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Optional
from unittest.mock import patch

import pytest

from gpuprestart import (
    administration,
    before_kill,
    driverfacts,
    events,
    findings,
    hook,
    judge,
    owners,
    placement,
    require,
    residue,
    selection,
    serverfiles,
    settings,
)
from gpuprestart.commandline import Command, Options
from gpuprestart.host import ipc, nvidia, procfs
from gpuprestart.host.ipc import Removal
from gpuprestart.host.locks import Denied
from gpuprestart.host.nvml import DriverError, Fact
from gpuprestart.host.program import Ended
from gpuprestart.host.systemd import Systemd, SystemdError
from gpuprestart.judge import History
from gpuprestart.model import (
    MIB,
    Account,
    Action,
    Claim,
    Decision,
    Gpu,
    Holder,
    Inventory,
    Leftover,
    Outcome,
    Owner,
    Process,
    Refusal,
    Survey,
    Unmet,
)
from gpuprestart.neighbours import clock
from gpuprestart.policy import Policy, Require
from gpuprestart.policy import Residue as ResiduePolicy
from gpuprestart.residue import Terms, Users
from gpuprestart.survey import UNREAD

from .machines import gpu, holder, inventory, owner, policy, process, reading, survey, unit, uuid
from .processes import wait
from .said import FAILED, OLLAMA, UNIT, Night, Scene, ended, of_record
from .test_reset import BOOT, Machine, dirty
from .test_settings import Books

# Scenes: what the policy asks besides --------------------------------------------------------------------------------


def of_unmet(unmet: Iterable[Unmet]) -> list[str]:
    """Each with its record, and the verdict of a start on clean GPUs that lacks them."""
    night = Night()
    night.look(used=(3,))
    night.ledger.lacks(unmet)
    return night.verdict(at=0.3)


def ports_and_processes() -> Iterator[Scene]:
    web = owner(of=unit("nginx.service", "active"), user="www-data")
    going = owner(of=unit("nginx.service", "deactivating"))

    def after(
        *holders: Holder, occupied: Mapping[str, tuple[int, ...]], own: frozenset[int] = frozenset()
    ) -> list[str]:
        machine = survey(*holders)._replace(occupied=occupied)
        plan = judge.plan(policy(), machine, History())
        host: Any = SimpleNamespace(ask_files=None)
        unmet = require.after(Require(), host, machine, plan, own_sockets=lambda: set(own), until=1e9)
        return of_unmet(unmet)

    def having(pid: int, clause: str, whose: Owner) -> Holder:
        return holder(pid, whose, opened=(), comm="nginx")._replace(occupies=(clause,))

    port, twin = "port 30000", "process sglang\\.launch_server"
    yield Scene("a port is taken", after(having(10, port, web), occupied={port: (10,)}))
    some = [having(pid, port, web) for pid in (10, 11, 12)]
    yield Scene("a port is taken by three", after(*some, occupied={port: (10, 11, 12)}))
    yield Scene("a port is taken by one on its way out", after(having(10, port, going), occupied={port: (10,)}))
    yield Scene("a port is systemd's", after(occupied={port: (1,)}))
    yield Scene("a port is our own start's", after(occupied={port: (40, 41)}))
    yield Scene("a port is nobody's", after(occupied={port: ()}))
    yield Scene("a process runs that must not", after(having(10, twin, web), occupied={twin: (10,)}))
    two = [having(pid, twin, web) for pid in (10, 11)]
    yield Scene("two processes run that must not", after(*two, occupied={twin: (10, 11)}))
    yield Scene("a process that does not tell", after(occupied={UNREAD: (10, 11, 12, 13, 14)}))


def room() -> Iterator[Scene]:
    import psutil

    def needs(text: str, answer: Any = None, **patched: Any) -> list[str]:
        machine, host = survey(), SimpleNamespace(ask_files=lambda request, timeout: answer)
        plan = judge.plan(policy(), machine, History())
        asked = policy(f"[require]\n{text}").require
        with ExitStack() as stack:
            for name, value in patched.items():
                stack.enter_context(
                    patch.object(*{"available": (psutil, "virtual_memory")}.get(name, (require, name)), value)
                )
            unmet = require.after(asked, host, machine, plan, own_sockets=set, until=1e9)  # type: ignore[arg-type]
        return of_unmet(unmet)

    def has(amount: int) -> Callable[[], Any]:
        return lambda: SimpleNamespace(available=amount * MIB)

    def cannot() -> Any:
        raise FileNotFoundError(2, "No such file or directory")

    asks = 'host_memory = "64 GiB"'
    yield Scene("the machine's memory", needs(asks, available=has(40_000), _huge_pages=lambda: 0))
    huge = needs(asks, available=has(40_000), _huge_pages=lambda: 32_768 * MIB)
    yield Scene("the machine's memory, beside huge pages", huge)
    yield Scene("the machine's memory cannot be told", needs(asks, available=cannot))
    with patch.dict(sys.modules, {"psutil": None}):
        yield Scene("there is no psutil", of_unmet(require._host_memory(64 << 30)))
    disk = '[require.disk]\n"/var/log" = "10 GiB"'
    yield Scene("a disk is full", needs(disk, (1 << 30, 10_000)))
    yield Scene("a disk has no inodes", needs(disk, (100 << 30, 12)))
    yield Scene("a disk that does not answer", needs(disk, None))
    yield Scene("a disk that is not there", needs(disk, "No such file or directory"))


def of_the_driver() -> Iterator[Scene]:
    unsupported, untold = Fact(fault="Not Supported", code=3), Fact(fault="Unknown Error", code=999)
    outdated = Fact(fault="Function Not Found", code=13)
    idle = {
        "compute_mode": Fact((0,)),
        "persistence": Fact((1,)),
        "mig": Fact((0, 0)),
        "remapped_rows": Fact((0, 0, 0, 0)),
        "retired_pages": unsupported,
        "uncorrected_errors": Fact((0,)),
    }

    def told(
        text: str, there: Optional[Inventory] = None, gpus: Optional[Sequence[Gpu]] = None, **facts: Fact
    ) -> list[str]:
        there = there or inventory(4)
        driver: Any = SimpleNamespace(
            facts=lambda gpus, names, timeout: {each: {n: {**idle, **facts}[n] for n in names} for each in gpus}
        )
        selected = there.gpus if gpus is None else gpus
        try:
            found = driverfacts.look(policy(f"[require]\n{text}").require, driver, there, selected, 15.0)
        except DriverError as error:
            return ended(refusal=Refusal(Outcome.UNKNOWN, str(error), [error.remedy]), at=0.3)
        night = Night()
        for warning, concerned in found.warnings:
            night.ledger.warned(warning, concerned)
        return night.lines or of_unmet(found.unmet)

    instance = gpu(0, uuid="MIG-0-1", parent=uuid(0), gi=1, ci=0)
    divided = Inventory("570.1", "", (gpu(0), instance, gpu(1)))
    yield Scene("a GPU is missing", told("gpu_count = 8"))
    yield Scene("one GPU is asked for", told("gpu_count = 1"))
    yield Scene("an instance of MIG is selected", told("gpu_count = 2", divided, [instance]))
    yield Scene("GPUs are asked for by a unit that uses none", told("gpu_count = 8", gpus=()))
    yield Scene("an old driver", told('driver = ">=575, <590"'))
    yield Scene("a driver without a version", told('driver = ">=575"', inventory(1)._replace(driver="R570 beta")))
    yield Scene("another compute mode", told('compute_mode = "exclusive-process"'))
    yield Scene(
        "a compute mode that is only warned of", told('compute_mode = "exclusive-process"', compute_mode=untold)
    )
    yield Scene("persistence mode is off", told('persistence = "require"', persistence=Fact((0,))))
    yield Scene("persistence mode is off, warned of", told('persistence = "warn"', persistence=Fact((0,))))
    yield Scene("persistence mode cannot be told", told('persistence = "require"', persistence=outdated))
    yield Scene("MIG is on", told('mig = "off"', mig=Fact((1, 1))))
    yield Scene("MIG is on until the next reset", told('mig = "off"', mig=Fact((1, 0))))
    yield Scene("MIG is on, by the instance that is selected", told('mig = "off"', divided, [instance]))
    yield Scene("MIG cannot be told", told('mig = "off"', mig=untold))
    wrong: dict[str, dict[str, Any]] = {
        "a row remapping has failed": {"remapped_rows": Fact((1, 1, 0, 1))},
        "a row remapping is pending, and errors": {
            "remapped_rows": Fact((1, 1, 1, 0)),
            "uncorrected_errors": Fact((3,)),
        },
        "one error": {"uncorrected_errors": Fact((1,))},
        "retired pages are pending": {"retired_pages": Fact((1,))},
        "row remappings cannot be told": {"remapped_rows": untold},
        "retired pages cannot be told": {"retired_pages": outdated},
        "uncorrected errors cannot be told": {"uncorrected_errors": untold},
        "MIG hides row remappings": {"remapped_rows": unsupported, "mig": Fact((1, 1))},
    }
    for title, facts in wrong.items():
        yield Scene(f"ECC: {title}", told('ecc = "no-pending"', **facts))
    lost = Fact(fault="GPU is lost", code=15)
    yield Scene(
        "a GPU is lost while it is asked",
        told('ecc = "no-pending"', uncorrected_errors=lost),
    )


#: Facts for each fault of a file, as the child that reads them tells it.
OF_FILES: Mapping[str, tuple[Any, ...]] = {
    "missing": ("model-2.safetensors",),
    "dangling": ("model-2.safetensors", "blobs/5f3c"),
    "folder": ("config.json",),
    "irregular": ("config.json",),
    "unreadable": ("config.json", "Permission denied"),
    "empty": ("config.json",),
    "big": ("config.json", 1 << 30),
    "pointer": ("model-1.safetensors",),
    "json": ("config.json",),
    "index": ("model.safetensors.index.json",),
    "outside": ("model.safetensors.index.json", "../x.safetensors"),
    "crowded": ("/srv/models/qwen", 10_000),
    "no-header": ("model-1.safetensors",),
    "headless": ("model-1.safetensors", 100, 4_096),
    "header": ("model-1.safetensors",),
    "entry": ("model-1.safetensors", "lm_head.weight"),
    "length": ("model-1.safetensors", 4_000_000_000, 5_000_000_000),
    "holes": ("model-1.safetensors",),
    "tensors": ("model.safetensors.index.json", 3, "lm_head.weight"),
    "unfinished": ("model-1.safetensors.incomplete",),
    "weights": ("/srv/models/qwen",),
    "tokenizer": ("/srv/models/qwen",),
    "line": ("SHA256SUMS", 3),
    "itself": ("SHA256SUMS",),
    "twice": ("SHA256SUMS", "model-1.safetensors"),
    "nothing": ("SHA256SUMS",),
    "uncovered": ("model-1.safetensors", "SHA256SUMS"),
    "differs": ("model-1.safetensors", "SHA256SUMS"),
}
OF_PROGRAMS: Mapping[str, tuple[Any, ...]] = {
    "missing": (),
    "dangling": ("/opt/venv/bin/python3",),
    "folder": (),
    "irregular": (),
    "unknown": ("User=", "model"),
    "noexec": (),
    "rights": ("0644",),
    "closed": ("/opt/venv",),
    "nameless": (),
    "nested": (),
    "unfound": ("python3.11",),
}


def of_files() -> Iterator[Scene]:
    def still() -> float:
        return 0.0

    def ask(answer: Any) -> Any:
        return lambda request, timeout: answer

    def model(answer: Any, until: float = 100) -> list[str]:
        return of_unmet(serverfiles.models(["/srv/models/qwen"], ask(answer), clock=still, until=until))

    path, account = "/opt/venv/bin/sglang", Account(user="model")

    def program(answer: Any) -> list[str]:
        found = serverfiles.executables([path], ask(answer), account, search="", clock=still, until=100)
        return of_unmet(found)

    for word, facts in OF_PROGRAMS.items():
        yield Scene(f"a program: {word}", program((word, path, *facts)))
    yield Scene("a program: its interpreter", program(("missing", "/opt/venv/bin/python3")))
    yield Scene("a program: cannot be told", program("Permission denied"))
    yield Scene("a program: no answer", program(None))
    for word, facts in OF_FILES.items():
        yield Scene(f"a model: {word}", model(("done", [(word, *facts)])))
    yield Scene("a model: many faults", model(("done", [("missing", f"model-{n}.safetensors") for n in range(9)])))
    yield Scene("a model: cannot be read", model("Permission denied"))
    yield Scene("a model: no answer", model(None))
    yield Scene("a model: late", model(("reading", 1), until=0))

    asks = Require(models=("/srv/models/qwen",), checksums="SHA256SUMS")
    said: list[str] = []

    def digests(request: Any, timeout: float) -> Any:
        kind, _ = request
        listed = [(f"model-{n}.safetensors", "ab", 20 << 30) for n in range(2)]
        return ("done", (listed, [])) if kind == "file:list" else ("done", "cd")

    found = serverfiles.checksums(asks, digests, say=said.append, clock=still, until=100)
    yield Scene("checksums differ", [*(f"    STATUS={line}" for line in said), *of_unmet(found)])
    late = serverfiles.checksums(asks, digests, say=said.append, clock=still, until=0)
    yield Scene("checksums: late", of_unmet(late))
    yield Scene(
        "checksums: no answer",
        of_unmet(serverfiles.checksums(asks, ask(None), say=said.append, clock=still, until=100)),
    )


# Scenes: besides -----------------------------------------------------------------------------------------------------


def _left(found: Sequence[Leftover]) -> list[str]:
    """The record, and what becomes of each as its field has it."""
    record = events.residue(events.Context(unit=UNIT, run="0123"), found)
    each = record.fields["GPUPRESTART_RESIDUE"]
    return [
        of_record(record),
        *(f"    GPUPRESTART_RESIDUE={one}" for one in ([each] if isinstance(each, str) else each)),
    ]


def leftovers() -> Iterator[Scene]:
    import stat

    now = 1_000_000.0
    old = now - 100
    one = ipc.File("nccl-aB3xYz", 27, 4711, stat.S_IFREG | 0o600, 1, 1000, 8 * MIB, old)
    terms = Terms(uids=frozenset({0, 1000}), alive=lambda pid: pid == 77, now=now, booted=0.0)
    server = Process(pid=9, started=1, began=1.0, ppid=1, comm="sglang", state="S", uid=1000, cgroup="/")
    users = Users()
    files: list[tuple[ipc.File, Users]] = [
        (one, users),
        (one._replace(mode=stat.S_IFDIR), users),
        (one._replace(mode=stat.S_IFLNK), users),
        (one._replace(mode=stat.S_IFIFO), users),
        (one, Users(doubt="PID 9 may not be looked into, or does not answer")),
        (one._replace(links=2), users),
        (one._replace(name="torch_77_1"), users),
        (one._replace(uid=1001), users),
        (one._replace(changed=now), users),
        (one, Users(sharers=(server,))),
    ]

    def fate(kind: str, mode: str, why: Optional[str], touch: bool = True, does: Any = Removal.REMOVED) -> list[str]:
        def remove() -> Removal:
            if isinstance(does, OSError):
                raise does
            return does  # type: ignore[no-any-return]

        found = residue._fate(kind, mode, touch, remove, why)
        return _left([Leftover(kind, one.name, one.bytes, *found)]) if found else []

    for file, having in files:
        why = residue.of_file(file, having, terms)
        yield Scene(f"in /dev/shm: {why or 'it may go'}", fate("shm", "remove", why))
    segment = ipc.Segment(*[0] * len(ipc.Segment._fields))._replace(
        creator=5, last=6, uid=1000, ctime=int(old), atime=int(old), bytes=MIB
    )
    for changes in ({}, {"mode": ipc.SHM_LOCKED}, {"creator": 0}, {"creator": 77}, {"last": 77}, {"uid": 1001}):
        why = residue.of_segment(segment._replace(**changes), terms)
        yield Scene(f"a segment: {why or 'it may go'}", fate("sysv", "remove", why))
    yield Scene("the policy only reports", fate("shm", "report", ""))
    yield Scene("check", fate("shm", "remove", "", touch=False))
    yield Scene("it cannot be removed", fate("shm", "remove", "", does=PermissionError(1, "Operation not permitted")))
    yield Scene("somebody has just come", fate("shm", "remove", "", does=Removal.IN_USE))
    many = [Leftover("shm", f"nccl-{number:04}", 3 * MIB, "removed", "was nobody's any more") for number in range(9)]
    some = [Leftover("shm", f"psm_{number}", MIB, "kept", "was made or used less than 10 s ago") for number in range(2)]
    with patch.object(ipc, "mps_pid", lambda: 5), patch.object(ipc, "mps_sockets", lambda: ["/tmp/nvidia-mps/control"]):
        mps = residue._mps(ResiduePolicy(), SimpleNamespace(), terms, True)  # type: ignore[arg-type]
    blind: Any = SimpleNamespace()
    shut = ResiduePolicy(shm="remove")
    with patch.object(residue, "_shm", side_effect=PermissionError(13, "Permission denied"), __name__="_shm"):
        failed = residue.clear(shut, blind, account=Account(), touch=True)
    yield Scene("it cannot be looked at", _left([each for each in failed if each.kind == "shm"]))
    yield Scene("many", _left([*many, *some, *mps]))


def selections() -> Iterator[Scene]:
    h100 = "NVIDIA H100 80GB HBM3"
    uuids = ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-8932aaaa-0000-4106-c12f-20bd9faed9f6")

    def made(index: int, **changes: Any) -> Gpu:
        return Gpu(index, uuids[index % 2], h100, f"00000000:{0x1B + index:02X}:00.0", minor=index)._replace(**changes)

    two = Inventory("570.1", "", (made(0), made(1)))
    unlike = Inventory("570.1", "", (made(0, name="NVIDIA A100"), made(1)))
    lost = Inventory("570.1", "", (made(0), made(1, uuid="", pci="", fault="GPU is lost")))
    cases: Sequence[tuple[str, Any, Inventory, Optional[Mapping[str, str]]]] = (
        ("an index that is not there", "unit", two, {"CUDA_VISIBLE_DEVICES": "0,7"}),
        ("an index where there is no GPU", ["0"], Inventory("570.1", "", ()), None),
        ("no GPU at all", "all", Inventory("570.1", "", ()), None),
        ("an unknown UUID", ["GPU-ffff"], two, None),
        ("an ambiguous UUID", ["GPU-8932"], two, None),
        ("a UUID that may be the lost one's", ["GPU-ffff"], lost, None),
        ("an address that is not there", ["00000000:7F:00.0"], two, None),
        ("an address that may be the lost one's", ["00000000:7F:00.0"], lost, None),
        ("numbers on unlike GPUs", "unit", unlike, {"CUDA_VISIBLE_DEVICES": "1"}),
        ("a GPU twice", "unit", two, {"CUDA_VISIBLE_DEVICES": "0,0"}),
        ("no word of CUDA's", "unit", two, {"CUDA_VISIBLE_DEVICES": "all"}),
        ("an address for CUDA", "unit", two, {"CUDA_VISIBLE_DEVICES": "00000000:1B:00.0"}),
        ("junk", "unit", two, {"NVIDIA_VISIBLE_DEVICES": "0,+1"}),
        ("an empty entry", "unit", two, {"NVIDIA_VISIBLE_DEVICES": "0,,1"}),
        ("a word that must stand alone", ["all", "0"], two, None),
        ("an empty list", [], two, None),
    )
    for title, words, there, environ in cases:
        try:
            selection.select(words, there, environ, origin="/etc/gpuprestart/policy.toml:2" if environ is None else "")
        except Refusal as refusal:
            yield Scene(title, ended(refusal=refusal, at=0.3))
    for words, environ in (("all", None), ("unit", None), ("unit", {}), ("unit", {"NVIDIA_VISIBLE_DEVICES": "all"})):
        yield Scene(f"chosen: {words} {environ}", [selection.select(words, two, environ).source])


def last_resorts() -> Iterator[Scene]:
    def tried(
        *,
        at: float = 60.0,
        deadline: float = 120.0,
        seen: Optional[Survey] = None,
        switched: bool = False,
        **changes: Any,
    ) -> list[str]:
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(nvidia, "switched", lambda: switched)
            machine = Machine(Path("/nonexistent"), patches, "", deadline)
            host, said = machine.last_resort._host, []
            host.say_status = lambda text: said.append(f"    STATUS={text}")  # type: ignore[misc]
            machine.notes = machine.last_resort._notes = changes.pop("notes", SimpleNamespace(read=dict, write=_kept))
            for name, value in changes.items():
                setattr(host.driver if name in ("facts", "set_persistence") else machine, name, value)
            for moment in (at, 113.0):
                machine.look(at=moment, of=seen)
            return [*said, *map(of_record, machine.records)]

    def fails(*arguments: Any) -> Any:
        raise Denied("/run/gpuprestart/resets: Permission denied", 13)

    def no_permission(*arguments: Any) -> Any:
        raise DriverError("Insufficient Permissions", code=4)

    modes = iter([1, 0])

    def facts(gpus: Sequence[Gpu], names: Sequence[str], timeout: float) -> Any:
        return {each: {"persistence": Fact((next(modes),))} for each in gpus}

    yield Scene("it is done", tried())
    yield Scene("it fails", tried(ended=Ended(fault="exited with 3", said="GPU is in use by another client\n")))
    yield Scene("too little time in all", tried(deadline=30.0, at=20.0))
    yield Scene("too little time left", tried(at=112.0))
    yield Scene("an NVSwitch", tried(switched=True))
    yield Scene("tried already", tried(notes=SimpleNamespace(read=lambda: {uuid(0): f"{BOOT} 1 x"})))
    yield Scene("our own child hangs", tried(hangs=True))
    yield Scene("somebody has it", tried(having=[4_190_001, 4_190_002, 4_190_003, 4_190_004]))
    yield Scene("somebody may have it", tried(blind=[41, 42]))
    foreign = dirty(readings={uuid(0): reading(used=1523, listed={99: 1})}, pids_ours=False)
    yield Scene("another PID namespace has it", tried(seen=foreign))
    doubtful = dirty(readings={uuid(0): reading(used=1523)._replace(distrust="NVML lists PID 0, which cannot be")})
    yield Scene("nobody knows who has it", tried(seen=doubtful))
    yield Scene("persistence mode is lost", tried(facts=facts, set_persistence=no_permission))
    yield Scene("it cannot be told whether it was tried", tried(notes=SimpleNamespace(read=fails)))
    yield Scene("it cannot be noted", tried(notes=SimpleNamespace(read=dict, write=fails)))
    divided = gpu(0, uuid="MIG-0-1", parent=uuid(0), gi=1, ci=0)
    with (
        patch(f"{__name__}.inventory", None),
        patch("tests.unit.test_reset.inventory", lambda n: Inventory("", "", (gpu(0), divided))),
    ):
        yield Scene("it is divided by MIG", tried())


def _kept(*arguments: Any) -> None:
    """The note of a reset."""


def before_kills() -> Iterator[Scene]:
    hooks = policy('[hooks]\nbefore_kill = ["/usr/local/bin/dump-stacks", "{pid}"]\n').hooks
    stale = Decision(holder(4711, FAILED, listed={0: 1520}), Action.KILL, "was left behind by vllm-old.service")

    def of(run: Any, until: float = 1e12) -> list[str]:
        night = Night()
        host: Any = SimpleNamespace(run_program=run)
        before_kill.BeforeKill(hooks, host, night.ledger, trusted_owner=0)(stale, (), until=until)
        return night.lines

    def missing(*arguments: Any, **more: Any) -> Any:
        raise FileNotFoundError(2, "No such file or directory")

    yield Scene("it hangs", of(lambda *arguments, **more: Ended(fault="did not end within 10 s", timed_out=True)))
    yield Scene("it fails", of(lambda *arguments, **more: Ended(fault="exited with 3")))
    yield Scene("it is not there", of(missing))
    yield Scene("no time is left", of(missing, until=-1e12))


def of_units() -> Iterator[Scene]:
    """What settings and the other places say that know units."""
    cgroup = f"/system.slice/{UNIT}"

    def of(what: Callable[[], object]) -> list[str]:
        try:
            what()
        except Refusal as refusal:
            return ended(refusal=refusal, at=0.3)
        raise AssertionError("nothing was refused")

    silent = Books(silent="systemctl gave no answer within 5 s")
    yield Scene("systemd is silent", of(lambda: settings.own_unit(silent, cgroup, (1,))))
    yield Scene("systemd is silent on a unit", of(lambda: settings.environment_of(silent, UNIT)))
    triggered = Books(says={"TriggeredBy": "sglang-qwen.socket"})
    with patch.object(Books, "each", side_effect=SystemdError("systemctl gave no answer within 5 s")):
        yield Scene("systemd is silent on sockets", of(lambda: settings.socket_ports(triggered, UNIT)))
    for state, sub in (("inactive", "dead"), ("deactivating", "stop-sigterm")):
        books = Books(unit(UNIT, state, sub, control_group=cgroup, control_pid=300))
        yield Scene(f"our start is {sub}", of(lambda books=books: settings.own_unit(books, cgroup, (300, 1))))  # type: ignore[misc]
    yield Scene(
        "there is no such unit", of(lambda: settings.environment_of(Books(says={"LoadState": "not-found"}), UNIT))
    )
    for path in ("/etc/nowhere.env", "/etc"):
        says = {"LoadState": "loaded", "Environment": "", "EnvironmentFiles": f"{path} (ignore_errors=no)"}
        yield Scene(f"EnvironmentFile={path}", of(lambda says=says: settings.environment_of(Books(says=says), UNIT)))  # type: ignore[misc]
    yield Scene("--policy names no file", of(lambda: settings.load(UNIT, file="/etc/nowhere.toml", deadline=None)))
    yield Scene("--policy names a folder", of(lambda: settings.load(UNIT, file="/etc", deadline=None)))


def of_verbs() -> Iterator[Scene]:
    """What enable, disable and bypass say, in their own words."""
    with tempfile.TemporaryDirectory() as folder:
        yield from _typed(Path(folder))


def _typed(folder: Path) -> Iterator[Scene]:
    context = events.Context(unit=UNIT, run="0123")
    yield Scene("a bypass is granted", [of_record(events.bypass_granted(context, by="alice", until="03:22:40"))])
    yield Scene("the hook is disabled", [of_record(events.hook_disabled(context, by="alice"))])

    def typed(verb: str, *names: str, systemd: Systemd, root: bool = True, **options: Any) -> list[str]:
        out, err = io.StringIO(), io.StringIO()
        command = Command(verb=verb, units=names, **options)
        with patch("os.geteuid", lambda: 0 if root else 1000):
            status = administration.perform(command, systemd, out=out, err=err)
        said = [
            line.replace(str(folder), "/etc/systemd/system") for line in (out.getvalue() + err.getvalue()).splitlines()
        ]
        return [f"$ gpuprestart {' '.join([verb, *names])}", *said, f"exit status {status}"]

    silent = Systemd(wait, systemctl="/nonexistent/systemctl", busctl="/nonexistent/busctl")
    with patch.object(placement, "FOLDER", str(folder)):
        yield Scene("not root", typed("enable", "x", systemd=silent, root=False))
        yield Scene("systemd does not answer", typed("enable", "x", systemd=silent))
        for verb in ("bypass", "enable", "disable"):
            yield Scene(f"no name of a service: {verb}", typed(verb, "a b.socket", systemd=silent))
        for state in ("masked", "not-found", "error"):
            one = Loaded({"Id": UNIT, "LoadState": state})
            for verb in ("bypass", "enable"):
                yield Scene(f"{verb} of a unit that is {state}", typed(verb, UNIT, systemd=one))
        one = Loaded({"Id": UNIT, "LoadState": "loaded", "Transient": True})
        yield Scene("enable of a transient unit", typed("enable", UNIT, systemd=one))
        one = Loaded({"Id": "cron.service", "LoadState": "loaded"})
        yield Scene("enable of a carrier", typed("enable", "cron", systemd=one))
        place = folder / f"{UNIT}.d"
        place.mkdir()
        (place / "50-gpuprestart.conf").write_text("[Service]\nExecStartPre=/bin/true\n")
        yield Scene("disable of what somebody wrote", typed("disable", UNIT, systemd=silent))
        yield Scene("disable --all beside what somebody wrote", typed("disable", systemd=silent, everything=True))
        (place / "50-gpuprestart.conf").unlink()
        yield Scene("disable --all of nothing", typed("disable", systemd=silent, everything=True))


class Loaded(Systemd):
    """systemd that has one unit."""

    def __init__(self, says: Mapping[str, Any]) -> None:
        super().__init__(wait, systemctl="/nonexistent/systemctl", busctl="/nonexistent/busctl")
        self.says = says

    def everything(self, name: str) -> dict[str, Any]:
        return dict(self.says)

    def list_units(self, pattern: str) -> list[str]:
        return []


def of_the_run() -> Iterator[Scene]:
    """What hook itself refuses, and what it says while it waits."""

    def of(does: Callable[[hook._Run, Night], object], unit: Optional[str] = UNIT, **handles: Any) -> list[str]:
        night = Night(unit=unit)
        host: Any = SimpleNamespace(
            **{
                "environ": {"CUDA_VISIBLE_DEVICES": "0"},
                "say_status": lambda text: night.lines.append(f"    STATUS={text}"),
                "wait": lambda descriptors, seconds: set(),
                "systemd": SimpleNamespace(hurry=lambda seconds: None),
                "driver": SimpleNamespace(inventory=_no_driver),
                **handles,
            }
        )
        run = hook._Run(Options(), host, night.ledger, checking=False)
        try:
            does(run, night)
        except Refusal as refusal:
            return night.verdict(at=0.3, refusal=refusal)
        return night.lines

    def start(text: str = "") -> hook.Start:
        return hook.Start(unit=UNIT, environ={"CUDA_VISIBLE_DEVICES": "0"}, policy=policy(text), control_pid=300)

    def denied(number: int, why: str) -> Callable[..., Any]:
        def never(*arguments: Any) -> Any:
            raise Denied(f"/run/gpuprestart/locks: {why}", number)

        return never

    taken = iter(["vllm.service (PID 812)", "vllm.service (PID 812)"])
    busy = SimpleNamespace(take=lambda uuids, holder: next(taken))

    def waits(run: hook._Run, night: Night) -> None:
        gpus = (gpu(0),)
        run._announce(start(), inventory(1), gpus)
        with patch.object(hook, "clock", side_effect=[0.0, 200.0, 200.0]):
            run._lock(start(), gpus, 120.0)

    yield Scene("another start has the lock", of(waits, locks=busy))
    for number, why in ((13, "Permission denied"), (28, "No space left on device"), (30, "Read-only file system")):
        shut = SimpleNamespace(take=denied(number, why))
        yield Scene(f"locks: {why}", of(lambda run, night: run._locked_by(start(), (gpu(0),)), locks=shut))

    granted = SimpleNamespace(read=lambda: {UNIT: f"until={clock() + 500} by=alice"}, remove=lambda name: True)
    with patch.object(settings, "load", lambda *arguments, **more: Policy()):
        yield Scene("an operator lets it pass", of(lambda run, night: run._let_pass(UNIT, 300), bypasses=granted))

    def measures(text: str, environ: Mapping[str, str], driver: Any) -> list[str]:
        given = start(text)._replace(environ=environ)
        with patch.object(hook, "traces", lambda: False):
            return of(lambda run, night: run._measure(given, 1e12), driver=SimpleNamespace(inventory=driver))

    for environ in ({"CUDA_VISIBLE_DEVICES": ""}, {"NVIDIA_VISIBLE_DEVICES": "void"}):
        yield Scene(f"no GPU is used: {environ}", measures("", environ, lambda timeout: inventory(8)))
    yield Scene("there is no driver, on purpose", measures('[nvml]\nmissing = "pass"', {}, _no_driver))

    def begins(run: hook._Run, night: Night) -> None:
        lost = Inventory("570.1", "", (gpu(0), gpu(1, fault="GPU is lost")))
        run._announce(start(), lost, lost.gpus[:1])
        night.ledger.begin()

    yield Scene("a GPU beside ours is lost", of(begins))
    night = Night(unit=None)
    night.ledger.open_with(
        events.run_started(night.ledger.context, gpus=inventory(8).gpus, policy_files=(), deadline=120.0, version="1.0")
    )
    night.ledger.begin()
    yield Scene("a run without a unit", night.lines)
    wrong: Any = Options(unit="a b")
    yield Scene("--unit is no name", of(lambda run, night: setattr(run, "_options", wrong) or run._start()))  # type: ignore[func-returns-value]
    with redirect_stderr(io.StringIO()):
        yield Scene("a bug", ended(refusal=hook._fault(KeyError("x")), at=0.3))
    scarce = hook._fault(OSError(11, "Resource temporarily unavailable"))
    yield Scene("nothing is left", ended(refusal=scarce, at=0.3))

    for state, access in (("start-pre", "TimeoutStartSec="), ("stop-post", "TimeoutStopSec=")):
        around = unit(UNIT, "activating", state, timeout_start=30.0, timeout_stop="30s", control_pid=1)
        given = start()._replace(around=owners.Own(unit=around, boottime_ahead=0, ticks_per_second=100))

        def cut(run: hook._Run, night: Night, given: hook.Start = given) -> None:
            with patch.object(procfs, "read", lambda pid: process(pid, began=clock())):
                run._deadline(given, 120.0)
            night.look(used=(1523,))
            night.lines = night.verdict(at=29.0)

        yield Scene(f"cut short by {access}", of(cut, extend_timeout=lambda seconds: False))


def _no_driver(timeout: float) -> Any:
    raise DriverError("NVML cannot be used: NVML Shared Library Not Found", code=12)


def waited_for() -> Iterator[Scene]:
    """STATUS= while a run goes on."""
    stopping = owner(of=unit("ollama.service", "deactivating"))
    five = [holder(pid, FAILED, listed={0: 9_000}) for pid in range(4711, 4716)]
    claim = (Claim(uuid(0), "ollama.service", "abcd", 77), unit("ollama.service", "activating"))
    plans = {
        "five that are stale": survey(*five, used=(45_003,)),
        "one that is stopping": survey(holder(812, stopping, listed={0: 21_760}), used=(21_763,)),
        "one that is alive": survey(holder(812, OLLAMA, listed={0: 21_760}), used=(21_763,)),
        "a claim": survey(claims=(claim,)),
        "memory": survey(used=(1523, 1523, 3)),
        "memory of eight": survey(used=(1523,) * 8),
        "time": survey(),
    }
    for title, seen in plans.items():
        plan = judge.plan(policy(), seen, judge.History())
        said = findings.ending(plan) if plan.evict else findings.waiting(plan)
        yield Scene(title, [f"    STATUS={said}"])
