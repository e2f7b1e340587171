#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A small stand-in for a model server: a front process, a worker per GPU, and a port.

It behaves as tensor-parallel servers do: workers lead sessions of their own, rename themselves, open every
device node there is, load for a while before they allocate, outlive a front process that is killed, and die
of it when the memory is not free.  It knows nothing of the program under test.  Options that it does not know
are ignored.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import select
import signal
import socket
import sys
import time
from typing import Any, NoReturn

from simgpu_client import MIB, Client, Refused
from simgpu_process import notify, rename, start_child

GIB = 1 << 30


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--model", default="qwen")
    add("--tp-size", "--tensor-parallel-size", type=int, help="workers; by default one per visible GPU")
    add("--host", default="0.0.0.0")
    add("--port", type=int, default=30000)
    add("--mem-mib", type=float, default=70000, help="what each worker allocates on its GPU")
    add("--load-time", type=float, default=0.5, help="seconds from the start to the allocation")
    add("--worker-name", default="VLLM::Worker_TP{}", help="what a worker calls itself")
    add("--tokenizers", type=int, default=0, help="children without a GPU that inherit the port")
    add("--ignore-term", action="store_true", help="workers do not end at SIGTERM")
    add("--release-delay", type=float, help="seconds from a worker's end to its memory's release")
    add("--ready-file", metavar="PATH", help="put there once the port is open")
    return parser.parse_known_args(arguments)[0]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def visible_gpus(state: dict[str, Any]) -> list[dict[str, Any]]:
    """What CUDA would use: numbers or prefixes of UUIDs, up to the first entry that names no GPU."""
    gpus = [gpu for gpu in state["gpus"] if not gpu["missing"]]
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return gpus
    chosen = []
    for word in wanted.split(","):
        if word.strip().isdigit():
            found = gpus[int(word) :][:1]
        else:
            prefix = word.strip().lower()
            found = [gpu for gpu in gpus if prefix and gpu["uuid"].lower().startswith(prefix)]
        if len(found) != 1:
            break
        chosen.append(found[0])
    return chosen


def open_all_nodes() -> None:
    """CUDA opens every node that is there, not only those of the GPUs it will use."""
    for name in sorted(os.listdir("/dev")):
        if name == "nvidiactl" or name == "nvidia-uvm" or (name[:6] == "nvidia" and name[6:].isdigit()):
            os.open(f"/dev/{name}", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)


def worker(options: argparse.Namespace, rank: int, gpu: dict[str, Any], tell: int) -> NoReturn:
    os.setsid()
    rename(options.worker_name.format(rank))
    if options.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open_all_nodes()
    time.sleep(options.load_time)
    size = int(options.mem_mib * MIB)
    delay = {} if options.release_delay is None else {"release_delay": options.release_delay}
    try:
        Client().ask("alloc", gpu=gpu["slot"], bytes=size, **delay)
    except Refused as refused:
        if refused.code != "out_of_memory":
            raise
        total, free = gpu["total"], Client().ask("state")["gpus"][gpu["order"]]["free_bytes"]
        say(
            f"[TP{rank}] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {size / GIB:.2f} GiB. "
            f"GPU {rank} has a total capacity of {total / GIB:.2f} GiB, {free / GIB:.2f} GiB of it is free."
        )
        sys.exit(1)
    os.write(tell, b"x")
    while True:
        signal.pause()


def tokenizer() -> NoReturn:
    """Holds no GPU, but the port, which it inherited."""
    os.setsid()
    rename("sglang::detoken")
    while True:
        signal.pause()


class Front:
    """The parent: starts the workers, opens the port when all have loaded, ends when one of them does."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.children: list[int] = []
        self.term = False
        self.wake, wakes = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(wakes, False)
        signal.set_wakeup_fd(wakes)
        signal.signal(signal.SIGTERM, self.on_term)
        signal.signal(signal.SIGINT, self.on_term)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def on_term(self, *_: object) -> None:
        self.term = True

    def wait(self, *fds: int) -> list[int]:
        """Which of these are readable, once one is, or a signal came, or a child ended."""
        ready = select.select([self.wake, *fds], [], [])[0]
        if self.wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self.wake, 512)
        if self.term:
            self.end(0)
        for child in list(self.children):
            if os.waitpid(child, os.WNOHANG)[0]:
                self.children.remove(child)
                say("a worker has died, shutting down")
                self.end(1)
        return [fd for fd in ready if fd != self.wake]

    def end(self, code: int) -> NoReturn:
        for child in self.children:
            os.kill(child, signal.SIGTERM)
        for child in self.children:
            os.waitpid(child, 0)
        sys.exit(code)

    def run(self) -> NoReturn:
        options = self.options
        gpus = visible_gpus(Client().ask("state"))
        size = options.tp_size or len(gpus)
        if size > len(gpus) or not gpus:
            sys.exit(f"tensor parallel size is {size}, but only {len(gpus)} GPUs are visible")
        loaded, tell = os.pipe()
        for rank in range(size):
            self.children.append(start_child(functools.partial(worker, options, rank, gpus[rank], tell)))
        os.close(tell)
        say(f"loading {options.model} on {size} GPUs")
        count = 0
        while count < size:
            if self.wait(loaded):
                count += len(os.read(loaded, 64))
        try:
            listener = socket.create_server((options.host, options.port))
        except OSError as error:
            say(f"port {options.port}: {error.strerror}")
            self.end(1)
        for _ in range(options.tokenizers):
            self.children.append(start_child(tokenizer))
        say(f"the server is ready on port {options.port}")
        if options.ready_file:
            with open(options.ready_file + ".new", "w", encoding="ascii") as file:
                file.write(" ".join(map(str, [os.getpid(), *self.children])) + "\n")
            os.rename(options.ready_file + ".new", options.ready_file)
        notify(f"READY=1\nSTATUS=Serving {options.model} on {size} GPUs")
        while True:
            if self.wait(listener.fileno()):
                self.serve(listener)

    def serve(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.settimeout(1)
            connection.recv(4096)
            connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nok\n")


def main() -> NoReturn:
    Front(parse(sys.argv[1:])).run()


if __name__ == "__main__":
    main()
