#!/usr/bin/python3
"""Runs commands in turns, as systemd would start them, and says what each took. It lies on the node and runs there.

In: a JSON object with ``commands`` (name -> argv), ``rounds``, and, where they are wanted, ``cgroup`` (a folder of a
service, so that the program finds itself where a start would be), ``environ``, ``watched`` (further rounds in which
memory is looked at, which takes time of its own). Out: for each name the seconds of ``wall`` and ``cpu`` (of all its
processes that were waited for), ``exits``, ``began`` and ``ended`` on CLOCK_BOOTTIME, the peak of its processes'
resident memory together in ``rss`` bytes, and the ``stdout`` of its last run. It knows no command.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

PAGE = os.sysconf("SC_PAGE_SIZE")


def boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def start(argv: list[str], request: dict[str, Any], out: int) -> tuple[int, float]:
    """The PID and when the program began to be loaded."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        if request.get("cgroup"):
            with open(os.path.join(request["cgroup"], "cgroup.procs"), "w", encoding="ascii") as file:
                file.write(str(os.getpid()))
        environ = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", **request.get("environ", {})}
        if request.get("cgroup"):
            environ["SYSTEMD_EXEC_PID"] = str(os.getpid())
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(out, 1)
        os.dup2(os.open("/run/bench.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
        os.write(write, repr(boottime()).encode())
        try:
            os.execvpe(argv[0], argv, environ)
        finally:
            os._exit(127)
    os.close(write)
    began = float(os.read(read, 100))
    os.close(read)
    return pid, began


def resident(pid: int) -> int:
    """Bytes of a process and of all that it has started, as far as they are there."""
    found, todo = 0, [pid]
    while todo:
        each = todo.pop()
        try:
            with open(f"/proc/{each}/statm", encoding="ascii") as file:
                found += int(file.read().split()[1]) * PAGE
            with open(f"/proc/{each}/task/{each}/children", encoding="ascii") as file:
                todo += [int(child) for child in file.read().split()]
        except (OSError, IndexError):
            continue
    return found


def run(argv: list[str], request: dict[str, Any], *, watching: bool = False) -> dict[str, Any]:
    out = os.memfd_create("stdout")
    pid, began = start(argv, request, out)
    peak = 0
    while watching:
        peak = max(peak, resident(pid))
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
            break
        time.sleep(0.0005)
    _, status, used = os.wait4(pid, 0)
    ended = boottime()
    os.lseek(out, 0, os.SEEK_SET)
    with os.fdopen(out, "rb") as file:
        said = file.read().decode(errors="replace")
    cpu = used.ru_utime + used.ru_stime
    exit_status = os.waitstatus_to_exitcode(status)
    return {"began": began, "ended": ended, "cpu": cpu, "exit": exit_status, "rss": peak, "stdout": said}


def main() -> None:
    request = json.load(sys.stdin)
    found: dict[str, dict[str, Any]] = {
        name: {"wall": [], "cpu": [], "exits": [], "began": [], "ended": [], "rss": [], "stdout": ""}
        for name in request["commands"]
    }
    rounds, watched = request["rounds"], request.get("watched", 0)
    # The first of each is not counted: it fills the caches for the others.
    for number in range(-request.get("warm", 1), rounds + watched):
        for name, argv in request["commands"].items():
            once = run(argv, request, watching=number >= rounds)
            entry = found[name]
            if number >= rounds:
                entry["rss"].append(once["rss"])
            elif number >= 0:
                entry["wall"].append(once["ended"] - once["began"])
                for key in ("cpu", "began", "ended"):
                    entry[key].append(once[key])
                entry["exits"].append(once["exit"])
                entry["stdout"] = once["stdout"][-2_000_000:]
    json.dump(found, sys.stdout)


main()
