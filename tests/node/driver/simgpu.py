#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The bookkeeper of the simulated GPUs: ties memory to living processes and writes what nvml.c reads.

It knows processes by pidfd, so that "gone" means what the kernel means by it, and it alone decides when
memory comes back.  It knows nothing of device nodes, of NVML's calls, or of the program under test.

It listens on RUN/control (a JSON object a line, a reply to each, see simgpu_client.py), replaces RUN/state by
rename, and appends to RUN/releases one JSON line per allocation that ended.  All changes of one round of its
loop reach the state together, and a reply is sent only when its change is there.  RUN is /run/simgpu.

Requests.  "gpu" is a slot number or a UUID, "instance" a MIG instance's number; sizes are "bytes" or "mib",
times seconds.  Where no "pid" is given, it is the pid of who connected.

  reset      gpus=8 name total_mib reserved_mib baseline_mib minors ([…] or "reversed") driver release_delay:
             forget everything and start with idle GPUs of one kind
  set        driver nvml cuda nodes release_delay (number or "never"): what holds for the whole node
  set_gpu    gpu, then any of uuid name minor pci total_mib reserved_mib baseline_mib util mem_util missing
             lost ("no" "calls" "handle") memory memory_v2 mig ("none" "off" "on") arch bus_type addressing cc
             used free (bytes told in place of the sums, null: the sums again) mig_next ("same" "off" "on")
             compute_mode persistence ecc remap_pending remap_failed retired_pending uncorrected;
             with instance: uuid name gi ci total_mib reserved_mib baseline_mib used free
  order      slots: the order of NVML's indices
  mig        gpu slices=[1,1,2] or off=true
  alloc      gpu instance bytes|mib pid kind ("compute" "graphics" "mps" "none", or several, comma) na
             list_pid list_mib keep_listed release_delay also=[pid…] grow_mib grow_every grow_max_mib heir
             heir_after heir_kind: refused as out_of_memory where there is no room
             (heir: the pid that is charged with it when it is released, at once or heir_after later)
  share      pid with=PID: charge PID's allocations while pid lives too, as an inherited descriptor does
  update     id or pid, then fields of alloc
  free       id or pid, gpu: give it back now
  leak       gpu instance bytes|mib: charged to nobody until it is freed
  ghost      gpu instance bytes|mib pid kind na charge_mib: a record of a pid, by default one that is nowhere
  error      function gpu code (name or number) for;  delay function gpu ms for;  hang function gpu path for;
  crash      function gpu for: faults, gone after "for" seconds or with "clear"
  clear      id or function: these faults, else all
  unload     the driver is gone (no state file);  load: it is back
  state      the truth;  releases: what was released since since=CLOCK_BOOTTIME
  calls      start=true: count NVML calls from now on;  stop=true;  else the counts, per function and per pid
  wait       until all of these hold, or timeout (10): allocated=PID (count=N), gone=PID|[PID…],
             released=ID|[ID…], gpu with used_max_mib / used_min_mib, call=FUNCTION (count=N)
  ping       its pid
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import heapq
import json
import os
import select
import selectors
import signal
import socket
import struct
import sys
import time
from collections import Counter
from typing import Any, Callable

from simgpu_books import (
    CODES,
    GPU_FLAGS,
    KINDS,
    MAX_GPUS,
    MIB,
    Allocation,
    Books,
    Fault,
    Gpu,
    Identity,
    make_instances,
    model_gpus,
)
from simgpu_client import Refused
from simgpu_process import notify

Request = dict[str, Any]
Reply = dict[str, Any]

GPU_TEXTS = ("uuid", "name", "pci", "cc")
GPU_CHOICES = {"lost": ("no", "calls", "handle"), "mig": ("none", "off", "on"), "mig_next": ("same", "off", "on")}
CALL_POLL = 0.02


def boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def start_ticks(pid: int) -> int:
    """Field 22 of /proc/PID/stat, counted from the last ")", since the name before it may hold anything."""
    with open(f"/proc/{pid}/stat", "rb") as stat:
        return int(stat.read().rpartition(b")")[2].split()[19])


class Connection:
    """A client, its unfinished input, and the requests that wait for something to become true."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.pending = b""
        creds = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        # A client of another PID namespace has no number here and shows as 0.
        self.pid: int = struct.unpack("3i", creds)[0]


class Bookkeeper:
    def __init__(self, run: str) -> None:
        self.run = run
        self.books = Books()
        self.dirty = True
        self.loaded = True
        self.selector = selectors.DefaultSelector()
        self.watched: dict[Identity, int] = {}
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        self.timer_count = 0
        self.released: list[dict[str, Any]] = []
        self.to_stamp: list[tuple[Allocation, str]] = []
        self.waiters: list[tuple[Connection, Request, float]] = []
        self.replies: list[tuple[Connection, Reply]] = []
        self.op_reset({})

    # ---- the loop ----

    def serve(self, ready: str) -> None:
        control = os.path.join(self.run, "control")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(control)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        listener.bind(control)
        # Model servers run as users of their own, and allocate.
        os.chmod(control, 0o666)
        listener.listen(128)
        self.selector.register(listener, selectors.EVENT_READ, self.accept)
        self.flush()
        notify(ready)
        while True:
            for key, _ in self.selector.select(self.patience()):
                key.data(key.fileobj)
            now = boottime()
            while self.timers and self.timers[0][0] <= now:
                heapq.heappop(self.timers)[2]()
            self.flush()

    def patience(self) -> float | None:
        times = [self.timers[0][0]] if self.timers else []
        times += [deadline for _, _, deadline in self.waiters]
        if any("call" in request for _, request, _ in self.waiters):
            # The library appends to its log without telling anybody.
            times.append(boottime() + CALL_POLL)
        return max(0.0, min(times) - boottime()) if times else None

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        self.at(boottime() + seconds, what)

    def at(self, when: float, what: Callable[[], None]) -> None:
        self.timer_count += 1
        heapq.heappush(self.timers, (when, self.timer_count, what))

    def accept(self, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        connection = Connection(sock)
        self.selector.register(sock, selectors.EVENT_READ, lambda _: self.receive(connection))

    def receive(self, connection: Connection) -> None:
        try:
            data = connection.socket.recv(65536)
        except ConnectionError:
            data = b""
        if not data:
            self.selector.unregister(connection.socket)
            connection.socket.close()
            self.waiters = [w for w in self.waiters if w[0] is not connection]
            return
        *lines, connection.pending = (connection.pending + data).split(b"\n")
        for line in lines:
            reply = self.answer(connection, line)
            if reply is not None:
                self.replies.append((connection, reply))

    def answer(self, connection: Connection, line: bytes) -> Reply | None:
        try:
            request = json.loads(line)
            op = getattr(self, "op_" + str(request.pop("op")), None)
            if op is None:
                raise Refused("unknown_op", line.decode())
            if op == self.op_wait:
                self.waiters.append((connection, request, boottime() + float(request.get("timeout", 10))))
                return None
            if "pid" not in request and op in (self.op_alloc, self.op_share, self.op_free, self.op_update):
                request["peer"] = connection.pid
            return {"ok": True, **(op(request) or {})}
        except Refused as refused:
            return {"ok": False, "error": refused.code, "message": refused.message}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as fault:
            return {"ok": False, "error": "bad_request", "message": f"{type(fault).__name__}: {fault}"}

    def flush(self) -> None:
        """Makes the round's changes visible in one step, then says so to those who asked or wait."""
        # Stamped before the rename: whoever sees the memory free sees it later than the stamp says.
        stamps = [self.stamp(allocation, why) for allocation, why in self.to_stamp]
        self.to_stamp = []
        if self.dirty:
            self.dirty = False
            state = os.path.join(self.run, "state")
            if self.loaded:
                with open(state + ".new", "w", encoding="ascii", errors="replace") as file:
                    file.write(self.books.text())
                os.replace(state + ".new", state)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(state)
        if stamps:
            self.released += stamps
            with open(os.path.join(self.run, "releases"), "a", encoding="ascii") as file:
                file.writelines(json.dumps(stamp) + "\n" for stamp in stamps)
        now = boottime()
        for waiter in list(self.waiters):
            connection, request, deadline = waiter
            unmet = self.unmet(request)
            if unmet is None or now >= deadline:
                self.waiters.remove(waiter)
                self.replies.append(
                    (connection, {"ok": True} if unmet is None else {"ok": False, "error": "timeout", "message": unmet})
                )
        for connection, reply in self.replies:
            with contextlib.suppress(OSError):
                connection.socket.sendall(json.dumps(reply).encode() + b"\n")
        self.replies = []

    def stamp(self, allocation: Allocation, why: str) -> dict[str, Any]:
        return {
            "id": allocation.id,
            "why": why,
            "gpu": allocation.gpu,
            "instance": allocation.instance,
            "bytes": allocation.bytes,
            "pid": allocation.first[0] if allocation.first else None,
            "start": allocation.first[1] if allocation.first else None,
            "gone_boottime": allocation.gone,
            "released_boottime": boottime(),
            "released_realtime": time.time(),
        }

    # ---- processes ----

    def watch(self, pid: int) -> Identity:
        """Opens the process before its start time is read: what is read is then this one's or nobody's."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            raise Refused("no_such_process", f"pid {pid}: {error.strerror}") from error
        try:
            identity = (pid, start_ticks(pid))
        except (OSError, IndexError, ValueError) as error:
            os.close(pidfd)
            raise Refused("no_such_process", f"pid {pid} has just gone") from error
        known = self.watched.get(identity)
        if known is not None and select.select([known], [], [], 0)[0]:
            # Start times are counted in hundredths of a second: this is a newcomer with the same pid and the
            # same start time as one whose end has not been noticed yet.
            self.process_gone(identity, known)
            known = None
        if known is not None:
            os.close(pidfd)
        else:
            self.watched[identity] = pidfd
            self.selector.register(pidfd, selectors.EVENT_READ, lambda _: self.process_gone(identity, pidfd))
        return identity

    def process_gone(self, identity: Identity, pidfd: int) -> None:
        """A pidfd is readable when the last thread has ended, which is after its descriptors were closed."""
        if self.watched.get(identity) != pidfd:
            return  # noticed already in this round
        del self.watched[identity]
        self.selector.unregister(pidfd)
        os.close(pidfd)
        now = boottime()
        for allocation in self.books.allocations.values():
            if identity not in allocation.owners:
                continue
            allocation.owners.remove(identity)
            self.dirty = True
            if not allocation.owners:
                allocation.gone = now
                self.schedule_release(allocation)

    def schedule_release(self, allocation: Allocation) -> None:
        delay = allocation.release_delay
        if allocation.gone is None or delay is None:
            return

        def due() -> None:
            # The delay may have been changed, or the memory given back, since this was scheduled.
            if allocation.release_delay == delay:
                self.release(allocation, "gone")

        # All that one process held becomes due at the same instant, and so comes back in the same round.
        self.at(allocation.gone + delay, due)

    def release(self, allocation: Allocation, why: str) -> None:
        if self.books.allocations.pop(allocation.id, None) is None:
            return
        self.dirty = True
        self.to_stamp.append((allocation, why))
        if allocation.heir is not None and why == "gone":
            if allocation.heir_after > 0:
                self.later(allocation.heir_after, lambda: self.inherit(allocation))
            else:
                self.inherit(allocation)

    def inherit(self, allocation: Allocation) -> None:
        assert allocation.heir is not None
        with contextlib.suppress(Refused):
            heir = self.watch(allocation.heir)
            self.add(
                Allocation(
                    id=self.books.next_id(),
                    origin="process",
                    gpu=allocation.gpu,
                    instance=allocation.instance,
                    bytes=allocation.bytes,
                    kinds=allocation.heir_kinds,
                    first=heir,
                    owners=[heir],
                    release_delay=self.books.release_delay,
                )
            )

    def add(self, allocation: Allocation) -> Reply:
        self.books.allocations[allocation.id] = allocation
        self.dirty = True
        return {"id": allocation.id, "pid": allocation.first[0] if allocation.first else None}

    # ---- reading requests ----

    def gpu(self, request: Request) -> Gpu:
        wanted = request["gpu"]
        for gpu in self.books.gpus.values():
            if wanted in (gpu.slot, gpu.uuid, str(gpu.slot)):
                return gpu
        raise Refused("no_such_gpu", str(wanted))

    def place(self, request: Request) -> tuple[int, int | None]:
        gpu = self.gpu(request)
        instance = request.get("instance")
        if instance is None:
            return gpu.slot, None
        if not 0 <= int(instance) < len(gpu.instances):
            raise Refused("no_such_instance", f"GPU {gpu.slot} has {len(gpu.instances)}")
        return gpu.slot, int(instance)

    @staticmethod
    def size(request: Request, prefix: str = "") -> int | None:
        if request.get(prefix + "bytes") is not None:
            return int(request[prefix + "bytes"])
        if request.get(prefix + "mib") is not None:
            return int(float(request[prefix + "mib"]) * MIB)
        return None

    def needed_size(self, request: Request) -> int:
        size = self.size(request)
        if size is None:
            raise Refused("bad_request", "bytes or mib is needed")
        return size

    @staticmethod
    def kinds(value: Any) -> tuple[str, ...]:
        kinds = tuple(k for k in str(value).split(",") if k != "none")
        if not set(kinds) <= set(KINDS):
            raise Refused("bad_request", f"kind {value}: not of {', '.join(KINDS)}, none")
        return kinds

    @staticmethod
    def delay(value: Any) -> float | None:
        return None if value in (None, "never") else float(value)

    def pid(self, request: Request) -> int:
        pid = int(request.get("pid") or request.get("peer") or 0)
        if pid <= 0:
            raise Refused("no_such_process", "the connection comes from another PID namespace: give pid")
        return pid

    def chosen(self, request: Request) -> list[Allocation]:
        """The allocations that id, or pid (and gpu, where given), means."""
        if "id" in request:
            ids = request["id"] if isinstance(request["id"], list) else [request["id"]]
            found = [a for i, a in self.books.allocations.items() if i in ids]
        else:
            pid = self.pid(request)
            found = [a for a in self.books.allocations.values() if a.first is not None and a.first[0] == pid]
        if request.get("gpu") is not None:
            slot = self.gpu(request).slot
            found = [a for a in found if a.gpu == slot]
        if not found:
            raise Refused("no_such_allocation", json.dumps(request))
        return found

    def fill(self, allocation: Allocation, request: Request) -> None:
        """The fields of alloc that update may change too."""
        a = allocation
        size = self.size(request)
        a.bytes = a.bytes if size is None else size
        a.kinds = self.kinds(request["kind"]) if "kind" in request else a.kinds
        a.na = bool(request.get("na", a.na))
        a.keep_listed = bool(request.get("keep_listed", a.keep_listed))
        if "list_pid" in request:
            a.list_pid = None if request["list_pid"] is None else int(request["list_pid"])
        listed = self.size(request, "list_")
        a.list_bytes = a.list_bytes if listed is None else listed
        if "release_delay" in request:
            a.release_delay = self.delay(request["release_delay"])
        if "heir" in request:
            a.heir = None if request["heir"] is None else int(request["heir"])
        a.heir_after = float(request.get("heir_after", a.heir_after))
        a.heir_kinds = self.kinds(request["heir_kind"]) if "heir_kind" in request else a.heir_kinds
        a.grow_every = float(request.get("grow_every", a.grow_every))
        a.grow_max = self.size(request, "grow_max_") or a.grow_max
        grow = self.size(request, "grow_")
        if grow is not None:
            started, a.grow = a.grow > 0, grow
            if grow > 0 and not started:
                self.later(a.grow_every, lambda: self.grow(a))

    def grow(self, allocation: Allocation) -> None:
        a = allocation
        if a.id not in self.books.allocations or not a.owners or a.grow <= 0:
            return
        step = min(a.grow, self.books.room(a.gpu, a.instance))
        if a.grow_max is not None:
            step = min(step, a.grow_max - a.bytes)
        if step > 0:
            a.bytes += step
            self.dirty = True
        self.later(a.grow_every, lambda: self.grow(a))

    # ---- requests about the node ----

    def op_reset(self, request: Request) -> None:
        count = int(request.get("gpus", 8))
        if not 1 <= count <= MAX_GPUS:
            raise Refused("bad_request", f"gpus: 1 to {MAX_GPUS}")
        minors = request.get("minors")
        if minors == "reversed":
            minors = list(range(count - 1, -1, -1))
        fresh = Books(last_id=self.books.last_id)
        fresh.gpus = model_gpus(count, minors=minors)
        for gpu in fresh.gpus.values():
            gpu.name = self.one_line(request.get("name", gpu.name))
            for key in ("total", "reserved", "baseline"):
                if key + "_mib" in request:
                    setattr(gpu, key, int(float(request[key + "_mib"]) * MIB))
        self.books = fresh
        self.loaded = self.dirty = True
        self.op_set({key: request[key] for key in ("driver", "release_delay") if key in request})

    def op_set(self, request: Request) -> None:
        for key in ("driver", "nvml"):
            if key in request:
                setattr(self.books, key, self.one_line(request[key]))
        if "cuda" in request:
            self.books.cuda = int(request["cuda"])
        if "nodes" in request:
            self.books.nodes = bool(request["nodes"])
        if "release_delay" in request:
            self.books.release_delay = self.delay(request["release_delay"])
        self.dirty = True

    @staticmethod
    def one_line(value: Any) -> str:
        if "\n" in str(value) or not str(value).isascii():
            raise Refused("bad_request", f"{value!r}: one line of ASCII")
        return str(value)

    def op_set_gpu(self, request: Request) -> None:
        slot, instance = self.place(request)
        gpu: Any = self.books.gpus[slot]
        what = gpu if instance is None else gpu.instances[instance]
        changes: dict[str, Any] = {}
        for key, value in request.items():
            stem = key.removesuffix("_mib")
            if key in ("gpu", "instance"):
                continue
            if not hasattr(what, stem):
                raise Refused("bad_request", f"{key}: unknown")
            if key in GPU_CHOICES and value not in GPU_CHOICES[key]:
                raise Refused("bad_request", f"{key}: one of {', '.join(GPU_CHOICES[key])}")
            if key.endswith("_mib"):
                changes[stem] = int(float(value) * MIB)
            elif key in GPU_TEXTS:
                changes[key] = self.one_line(value)
            elif key in GPU_FLAGS:
                changes[key] = bool(value)
            else:
                changes[key] = value if value is None or key in GPU_CHOICES else int(value)
        for key, value in changes.items():
            setattr(what, key, value)
        self.dirty = True

    def op_order(self, request: Request) -> None:
        slots = [int(slot) for slot in request["slots"]]
        if sorted(slots) != sorted(self.books.gpus):
            raise Refused("bad_request", "slots: every slot once")
        self.books.gpus = {slot: self.books.gpus[slot] for slot in slots}
        self.dirty = True

    def op_mig(self, request: Request) -> Reply:
        gpu = self.gpu(request)
        slices = [] if request.get("off") else [int(width) for width in request["slices"]]
        if sum(slices) > 7 or any(width < 1 for width in slices):
            raise Refused("bad_request", "slices: seven in all")
        gpu.mig = "off" if request.get("off") else "on"
        gpu.instances = make_instances(gpu, slices)
        self.dirty = True
        return {"uuids": [part.uuid for part in gpu.instances]}

    def op_unload(self, request: Request) -> None:
        self.loaded, self.dirty = False, True

    def op_load(self, request: Request) -> None:
        self.loaded = self.dirty = True

    # ---- requests about memory ----

    def op_alloc(self, request: Request) -> Reply:
        slot, instance = self.place(request)
        size, room = self.needed_size(request), self.books.room(slot, instance)
        if size > room:
            raise Refused("out_of_memory", f"{size} bytes wanted on GPU {slot}, {room} free")
        first = self.watch(self.pid(request))
        allocation = Allocation(
            id=self.books.next_id(),
            origin="process",
            gpu=slot,
            instance=instance,
            bytes=size,
            kinds=("compute",),
            first=first,
            owners=[first],
            release_delay=self.books.release_delay,
        )
        for other in request.get("also", []):
            allocation.owners.append(self.watch(int(other)))
        self.fill(allocation, request)
        return self.add(allocation)

    def op_share(self, request: Request) -> None:
        sharer = self.watch(self.pid(request))
        for allocation in self.chosen({"pid": request["with"]}):
            if allocation.gone is None and sharer not in allocation.owners:
                allocation.owners.append(sharer)

    def op_update(self, request: Request) -> None:
        for allocation in self.chosen(request):
            self.fill(allocation, {key: value for key, value in request.items() if key != "gpu"})
            self.schedule_release(allocation)
        self.dirty = True

    def op_free(self, request: Request) -> None:
        for allocation in self.chosen(request):
            self.release(allocation, "freed")

    def op_leak(self, request: Request) -> Reply:
        slot, instance = self.place(request)
        return self.add(
            Allocation(
                id=self.books.next_id(),
                origin="leak",
                gpu=slot,
                instance=instance,
                bytes=self.needed_size(request),
                kinds=(),
                release_delay=None,
            )
        )

    def op_ghost(self, request: Request) -> Reply:
        slot, instance = self.place(request)
        size, charge = self.needed_size(request), self.size(request, "charge_")
        pid = request.get("pid")
        if pid is None:
            with open("/proc/sys/kernel/pid_max", encoding="ascii") as file:
                pid = int(file.read()) - 7
            while os.path.exists(f"/proc/{pid}"):
                pid -= 1
        reply = self.add(
            Allocation(
                id=self.books.next_id(),
                origin="ghost",
                gpu=slot,
                instance=instance,
                bytes=size if charge is None else charge,
                list_bytes=size,
                list_pid=int(pid),
                kinds=self.kinds(request.get("kind", "compute")),
                na=bool(request.get("na")),
                release_delay=None,
            )
        )
        return {**reply, "pid": pid}

    # ---- requests about faults ----

    def fault(self, kind: str, request: Request, argument: str = "") -> Reply:
        target = str(request.get("gpu", "*"))
        function = str(request["function"])
        if any(character.isspace() for character in function + target + argument):
            raise Refused("bad_request", "a fault's words have no white space")
        fault = Fault(self.books.next_id(), kind, function, target, argument)
        self.books.faults[fault.id] = fault
        self.dirty = True
        if "for" in request:
            self.later(float(request["for"]), lambda: self.drop_fault(fault))
        return {"id": fault.id}

    def drop_fault(self, fault: Fault) -> None:
        self.dirty = self.books.faults.pop(fault.id, None) is not None or self.dirty

    def op_error(self, request: Request) -> Reply:
        code = request["code"]
        return self.fault("error", request, str(CODES[code] if code in CODES else int(code)))

    def op_delay(self, request: Request) -> Reply:
        return self.fault("delay", request, str(int(request["ms"])))

    def op_hang(self, request: Request) -> Reply:
        return self.fault("hang", request, str(request.get("path", "")))

    def op_crash(self, request: Request) -> Reply:
        return self.fault("crash", request)

    def op_clear(self, request: Request) -> None:
        for fault in list(self.books.faults.values()):
            if request.get("id") in (None, fault.id) and request.get("function") in (None, fault.function):
                self.drop_fault(fault)

    # ---- questions ----

    def op_ping(self, request: Request) -> Reply:
        return {"pid": os.getpid()}

    def op_state(self, request: Request) -> Reply:
        return {"loaded": self.loaded, **self.books.truth()}

    def op_releases(self, request: Request) -> Reply:
        since = float(request.get("since", 0))
        return {"releases": [r for r in self.released if r["released_boottime"] >= since]}

    def op_calls(self, request: Request) -> Reply:
        path = os.path.join(self.run, "calls")
        if request.get("start") or request.get("stop"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        if request.get("start"):
            with open(path, "w", encoding="ascii") as file:
                os.fchmod(file.fileno(), 0o666)
            return {}
        calls = self.calls()
        return {
            "counts": Counter(call[2] for call in calls),
            "pids": Counter(call[1] for call in calls),
            "calls": calls if request.get("list") else [],
        }

    def calls(self) -> list[list[str]]:
        """What the library logged: time in ns, pid, function, target.  Not there: nobody asked for it."""
        try:
            with open(os.path.join(self.run, "calls"), encoding="ascii") as file:
                return [line.split() for line in file.read().split("\n")[:-1]]
        except FileNotFoundError:
            return []

    # Only there so that "wait" is an op like the others; flush() answers it.
    def op_wait(self, request: Request) -> None:
        raise AssertionError

    def unmet(self, request: Request) -> str | None:
        """Which condition of a wait does not hold yet."""
        count = int(request.get("count", 1))
        if "allocated" in request:
            pid = int(request["allocated"])
            has = [a for a in self.books.allocations.values() if any(owner[0] == pid for owner in a.owners)]
            if len(has) < count:
                return f"pid {pid} has {len(has)} allocations"
        if "gone" in request:
            for pid in request["gone"] if isinstance(request["gone"], list) else [request["gone"]]:
                if self.alive(int(pid)):
                    return f"pid {pid} is still there"
        if "released" in request:
            ids = request["released"] if isinstance(request["released"], list) else [request["released"]]
            if any(i in self.books.allocations for i in ids):
                return "still charged"
        if "used_max_mib" in request or "used_min_mib" in request:
            try:
                used = self.books.used(self.gpu(request))
            except Refused as refused:
                return str(refused)
            low, high = request.get("used_min_mib", 0), request.get("used_max_mib", 1 << 40)
            if not float(low) * MIB <= used <= float(high) * MIB:
                return f"{used} bytes are used"
        if "call" in request:
            seen = sum(fnmatch.fnmatchcase(call[2], request["call"]) for call in self.calls())
            if seen < count:
                return f"{request['call']} was called {seen} times"
        return None

    def alive(self, pid: int) -> bool:
        try:
            self.watch(pid)
        except Refused:
            return False
        # A zombie can still be opened, and its pidfd is readable at once: the next round forgets it.
        try:
            with open(f"/proc/{pid}/stat", "rb") as stat:
                state, threads = stat.read().rpartition(b")")[2].split()[0::17][:2]
        except OSError:
            return False  # It was reaped in between.
        return not (state in (b"Z", b"X") and int(threads) <= 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Keep the books of the simulated GPUs.")
    parser.add_argument("--run", default="/run/simgpu", help="folder of state, control and releases")
    parser.add_argument("--gpus", type=int, default=8)
    options = parser.parse_args()
    os.umask(0o022)
    os.makedirs(options.run, exist_ok=True)
    # A run that is over must not be taken for this one's.
    with open(os.path.join(options.run, "releases"), "w", encoding="ascii"):
        pass
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    bookkeeper = Bookkeeper(options.run)
    bookkeeper.op_reset({"gpus": options.gpus})
    bookkeeper.serve(f"READY=1\nSTATUS={options.gpus} simulated GPUs")


if __name__ == "__main__":
    main()
