#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tells the simulated GPUs what to do: simctl reset --gpus 4; simctl alloc --gpu 0 --pid 42 --mib 1523.

Turns "--key value" into a request of the bookkeeper and prints its reply.  simctl help prints the requests
there are, simctl state how things stand.  Installed as a link to this file, so that it finds its neighbours.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from typing import Any

from simgpu_client import MIB, Client, Refused

HOME = os.path.dirname(os.path.realpath(__file__))


def fields(words: list[str]) -> dict[str, Any]:
    """--key value, or --key alone for true.  A value is taken as JSON where it is JSON, else as text."""
    result: dict[str, Any] = {}
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            sys.exit(f"simctl: {word}: expected --key value")
        key, equals, value = word[2:].partition("=")
        if not equals and words and not words[0].startswith("--"):
            value = words.pop(0)
        elif not equals:
            value = "true"
        try:
            result[key.replace("-", "_")] = json.loads(value)
        except ValueError:
            result[key.replace("-", "_")] = value
    return result


def show(state: dict[str, Any]) -> None:
    """The state for people: a line per GPU and per allocation."""
    print(f"driver {state['driver']}{'' if state['loaded'] else ' (not loaded)'}")
    for gpu in state["gpus"]:
        trouble = "  missing" if gpu["missing"] else "  lost" if gpu["lost"] != "no" else ""
        print(
            f"GPU {gpu['slot']}  {gpu['uuid']}  /dev/nvidia{gpu['minor']}  {gpu['used_bytes'] // MIB} of "
            f"{gpu['total'] // MIB} MiB used{trouble}"
        )
        for one in state["allocations"]:
            if one["gpu"] == gpu["slot"]:
                whose = f"pid {one['pid'] or one['list_pid']}" if one["origin"] != "leak" else "nobody"
                how = "listed" if one["listed"] else "not listed"
                print(
                    f"  #{one['id']}  {one['bytes'] // MIB} MiB  {whose}  {how}"
                    f"{'  dead' if one['gone'] is not None else ''}"
                )
    for fault in state["faults"]:
        words = (fault["kind"], fault["function"], fault["target"], fault["argument"])
        print(f"fault #{fault['id']}  {' '.join(words)}")


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("help", "--help"):
        with open(os.path.join(HOME, "simgpu.py"), encoding="utf-8") as file:
            print(ast.get_docstring(ast.parse(file.read())))
        return
    op, request = sys.argv[1], fields(sys.argv[2:])
    as_json = request.pop("json", False)
    try:
        reply = Client().ask(op.replace("-", "_"), **request)
    except Refused as refused:
        sys.exit(f"simctl: {refused}")
    except OSError as error:
        sys.exit(f"simctl: the bookkeeper does not answer: {error}")
    if op == "state" and not as_json:
        show(reply)
    elif reply:
        print(json.dumps(reply, indent=1))


if __name__ == "__main__":
    main()
