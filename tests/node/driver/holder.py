#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A process that holds simulated GPUs, in as many awkward ways as real ones have been seen to.

It opens device nodes and asks the bookkeeper for memory, as CUDA would of the driver, says when it is ready
(READY=1, --ready-file), and waits to be ended.  It knows nothing of the program under test.  Options that it
does not know are ignored, so that a test can put anything on its command line.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import mmap
import os
import platform
import select
import signal
import socket
import sys
import threading
import time
from typing import Any, Callable, NoReturn

from simgpu_client import Client, Refused
from simgpu_process import new_session, notify, rename, start_child

PR_SET_CHILD_SUBREAPER = 36
SYS_EXIT = {"x86_64": 60, "aarch64": 93}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--open", default="", metavar="0,3", help='open /dev/nvidia0 and 3; "all": all there are')
    add("--path", action="append", default=[], help="open this node too")
    add("--map-only", action="store_true", help="open the nodes, map them, close them")
    add("--in-flight", action="store_true", help="leave the descriptors in a socket, taken out by nobody")
    add("--gpu", action="append", default=[], metavar="SLOT[,SLOT]", help="allocate on these")
    add("--mib", action="append", default=[], type=float, help="so much; one for each --gpu, or one for all")
    add("--unlisted", action="store_true", help="allocate memory that NVML lists for nobody")
    add("--alloc", action="append", default=[], metavar="KEY=VALUE", help="any field of the alloc request")
    add("--grow", type=float, metavar="MIB", help="by so much every 100 ms")
    add("--delay-alloc", type=float, default=0, metavar="S", help="be ready first, allocate so much later")
    add("--ignore-term", action="store_true")
    add("--term-delay", type=float, default=0, metavar="S", help="take so long to end after SIGTERM")
    add("--term-fork", action="store_true", help="on SIGTERM, fork a fresh holder and end; that one obeys")
    add("--exit-after", type=float, metavar="S", help="end on its own")
    add("--stop", action="store_true", help="SIGSTOP itself once ready")
    add("--thread-exit", action="store_true", help="end the leading thread: a zombie that is alive")
    add("--zombie", action="store_true", help="have a child that is dead and not waited for")
    add("--fork", type=int, default=0, metavar="N", help="children that inherit descriptors and memory")
    add("--child-mib", type=float, help="each child allocates so much of its own as well")
    add("--child-comm", help="how the children are called")
    add("--leave", action="store_true", help="end once the children are ready, leaving them")
    add("--spawn-after", type=float, metavar="S", help="fork a holder with nodes and memory of its own")
    add("--supervise", type=float, metavar="S", help="hold in a child; start another S after each end")
    add("--comm", help="call itself so")
    add("--argv0", help="have this as the first word of its command line")
    add("--setsid", action="store_true", help="be, and have every child be, a session of its own")
    add("--subreaper", action="store_true", help="adopt orphaned descendants")
    add("--listen", type=int, metavar="PORT")
    add("--ready-file", metavar="PATH", help="a JSON object, put there when ready")
    return parser.parse_known_args(arguments)[0]


def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def nodes(options: argparse.Namespace) -> list[str]:
    if options.open == "all":
        numbers = sorted(int(n[6:]) for n in os.listdir("/dev") if n[:6] == "nvidia" and n[6:].isdigit())
    else:
        numbers = [int(number) for number in options.open.split(",") if number]
    return [f"/dev/nvidia{number}" for number in numbers] + list(options.path)


def map_node(fd: int) -> None:
    """Maps one page.  Python's own mmap keeps a duplicate of the descriptor open, which would spoil it."""
    function = libc().mmap
    function.restype = ctypes.c_void_p
    number = ctypes.c_int
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_long]
    if function(None, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_PRIVATE, fd, 0) == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")


class Holder:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.client = Client()
        self.fds: list[int] = []
        self.sockets: list[socket.socket] = []
        self.allocations: list[int] = []
        self.children: list[int] = []
        self.zombie: int | None = None
        self.term = False
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def open_nodes(self) -> None:
        for path in nodes(self.options):
            # The nodes are consoles: without O_NOCTTY a session leader would get one as its terminal.
            fd = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
            if self.options.map_only:
                map_node(fd)
                os.close(fd)
            else:
                os.set_inheritable(fd, True)
                self.fds.append(fd)
        if self.options.in_flight:
            self.sockets = list(socket.socketpair())
            socket.send_fds(self.sockets[0], [b"x"], self.fds)
            self.close_nodes()

    def close_nodes(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    def allocate(self, mib: float | None = None) -> None:
        options = self.options
        slots = [slot for given in options.gpu for slot in given.split(",")]
        sizes = options.mib if mib is None else [mib]
        fields: dict[str, Any] = {}
        for pair in options.alloc:
            key, _, value = pair.partition("=")
            try:
                fields[key] = json.loads(value)
            except ValueError:
                fields[key] = value
        if options.unlisted:
            fields["kind"] = "none"
        if options.grow:
            fields["grow_mib"] = options.grow
        for number, slot in enumerate(slots):
            size = sizes[min(number, len(sizes) - 1)]
            try:
                reply = self.client.ask("alloc", gpu=slot, mib=size, **fields)
            except Refused as refused:
                sys.exit(f"holder: {refused}")
            self.allocations.append(reply["id"])
        # A real holder has no connection to show among its descriptors.
        self.client.close()

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        self.timers.append((time.monotonic() + seconds, what))

    def fork(self, options: argparse.Namespace, before: Callable[[Holder], None]) -> int:
        """A child that goes on as a holder with these options, once before() is done; waits until it is."""
        done, tell = os.pipe()

        def be_child() -> NoReturn:
            os.close(done)
            child = Holder(options)
            child.fds, child.sockets = self.fds, self.sockets
            child.catch_signals()
            if options.setsid:
                new_session()
            if options.child_comm:
                rename(options.child_comm)
            before(child)
            os.close(tell)
            child.hold()

        pid = start_child(be_child)
        os.close(tell)
        # Ends when the child closes its end, be it because it is ready or because it failed.
        os.read(done, 1)
        os.close(done)
        return pid

    def child_options(self, **changes: Any) -> argparse.Namespace:
        options = copy.copy(self.options)
        for key in (
            "fork",
            "term_fork",
            "spawn_after",
            "stop",
            "thread_exit",
            "zombie",
            "leave",
            "listen",
            "ready_file",
        ):
            setattr(options, key, None)
        for key, value in changes.items():
            setattr(options, key, value)
        return options

    def fork_child(self) -> None:
        """One that inherits everything, and for whose life, too, the memory stays charged."""

        def before(child: Holder) -> None:
            if self.allocations:
                child.client.ask("share", **{"with": parent})
                child.client.close()
            if self.options.child_mib:
                child.allocate(self.options.child_mib)

        parent = os.getpid()
        self.children.append(self.fork(self.child_options(), before))

    def fork_fresh(self) -> None:
        """One that opens the nodes and allocates for itself."""

        def before(child: Holder) -> None:
            inherited, child.fds = child.fds, []
            child.open_nodes()
            for fd in inherited:
                os.close(fd)
            child.allocate()

        self.children.append(self.fork(self.child_options(), before))

    def make_zombie(self) -> None:
        self.zombie = start_child(lambda: None)
        os.waitid(os.P_PID, self.zombie, os.WEXITED | os.WNOWAIT)

    def catch_signals(self) -> None:
        signal.set_wakeup_fd(-1)
        if self.options.ignore_term:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        elif self.options.thread_exit:
            # A handler would be run by the thread that has ended.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        else:
            self.wake, wakes = os.pipe()
            os.set_blocking(wakes, False)
            signal.set_wakeup_fd(wakes)
            signal.signal(signal.SIGTERM, self.on_term)
            signal.signal(signal.SIGINT, self.on_term)
            return
        self.wake, _ = os.pipe()

    def on_term(self, *_: object) -> None:
        self.term = True

    def ready(self) -> None:
        path = self.options.ready_file
        if path:
            with open(path + ".new", "w", encoding="ascii") as file:
                json.dump(
                    {
                        "pid": os.getpid(),
                        "children": self.children,
                        "zombie": self.zombie,
                        "allocations": self.allocations,
                    },
                    file,
                )
            os.rename(path + ".new", path)
        notify("READY=1")

    def start(self) -> None:
        options = self.options
        self.catch_signals()
        self.open_nodes()
        if options.delay_alloc:
            self.later(options.delay_alloc, self.allocate)
        else:
            self.allocate()
        for _ in range(options.fork or 0):
            self.fork_child()
        if options.zombie:
            self.make_zombie()
        if options.listen:
            self.sockets.append(socket.create_server(("", options.listen)))
        if options.thread_exit:
            self.end_leader()
        self.ready()
        if options.leave:
            sys.exit(0)
        if options.stop:
            os.kill(os.getpid(), signal.SIGSTOP)

    def end_leader(self) -> NoReturn:
        """Ends this thread and no other, which Python cannot be asked to do."""

        def live_on() -> None:
            # Nothing tells a process that its leader is a zombie now; it only takes a moment.
            while leader_state() != b"Z":
                time.sleep(0.001)
            self.ready()
            threading.Event().wait(self.options.exit_after)
            os._exit(0)

        threading.Thread(target=live_on).start()
        libc().syscall(SYS_EXIT[platform.machine()], 0)
        raise AssertionError

    def hold(self) -> NoReturn:
        """Waits for SIGTERM, doing what is due meanwhile.  Children that end are not waited for."""
        options = self.options
        if options.spawn_after is not None:
            self.later(options.spawn_after, self.fork_fresh)
        if options.exit_after is not None:
            self.later(options.exit_after, lambda: sys.exit(0))
        while not self.term:
            now = time.monotonic()
            for timer in [timer for timer in self.timers if timer[0] <= now]:
                self.timers.remove(timer)
                timer[1]()
            patience = max(0.0, min(timer[0] for timer in self.timers) - now) if self.timers else None
            if select.select([self.wake], [], [], patience)[0]:
                os.read(self.wake, 64)
        if options.term_fork:
            self.fork_fresh()
        time.sleep(options.term_delay)
        sys.exit(0)


def leader_state() -> bytes:
    with open(f"/proc/{os.getpid()}/stat", "rb") as stat:
        return stat.read().rpartition(b")")[2].split()[0]


def supervise(options: argparse.Namespace) -> NoReturn:
    """Starts a holder, and another when it ends; itself it holds nothing."""
    stopping: list[int] = []

    def stop(*_: object) -> None:
        stopping.append(1)
        if pid:
            os.kill(pid, signal.SIGTERM)

    def be_child() -> NoReturn:
        holder = Holder(options)
        holder.start()
        holder.hold()

    pid = 0
    signal.signal(signal.SIGTERM, stop)
    while not stopping:
        pid = start_child(be_child)
        os.waitpid(pid, 0)
        pid = 0
        options.ready_file = None
        time.sleep(options.supervise)
    sys.exit(0)


def main() -> NoReturn:
    options = parse(sys.argv[1:])
    if options.argv0 and not os.environ.pop("HOLDER_RENAMED", ""):
        os.environ["HOLDER_RENAMED"] = "1"
        os.execv(sys.executable, [options.argv0, *sys.argv])
    if options.setsid:
        new_session()
    if options.comm:
        rename(options.comm)
    if options.subreaper:
        libc().prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if options.supervise is not None:
        supervise(options)
    holder = Holder(options)
    holder.start()
    holder.hold()


if __name__ == "__main__":
    main()
