"""Three starts of a model server on simulated GPUs: one that is cleaned for, and two that are refused.

``make demo`` runs this. It boots the node, plays the scenes with the units of units/ as they are, prints every command
that matters with what it says, and holds each scene to its promise: the exit status is 0 only if all three ended as
their titles say. Where no container boots, or with ``--node=none``, the program runs in a plain chroot of the same
root, and says what is missing there.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Optional

# What runs on the node is made of neighbours that import one another by their bare names, and so does the stage.
sys.path.insert(0, str(Path(__file__).parent / "driver"))

from simgpu_client import Client  # noqa: E402

from tests.node.image import ImageError  # noqa: E402
from tests.node.machine import Chroot, Machine, Node, NodeError, can_boot, wait_for  # noqa: E402
from tests.node.scene import HOLDER, POLICY, Scene  # noqa: E402

UNIT = "sglang-qwen.service"
EXAMPLES = "/usr/share/doc/gpuprestart/examples"

#: Where the unit expects the Python of SGLang there is the stand-in server. SGLang sends nothing to systemd, so the
#: stand-in is kept from it too: its STATUS= would replace the hook's.
SERVER = """#!/bin/sh
unset NOTIFY_SOCKET
exec /opt/simgpu/model_server.py --worker-name sglang::schedul --load-time 1
"""


class Broken(Exception):
    """A scene did not end as its title says."""


class Screen:
    """What the audience sees; coloured only on a terminal."""

    def __init__(self, *, colour: bool) -> None:
        self._colour = colour

    def title(self, text: str) -> None:
        print("\n" + self._in("1;36", text), flush=True)

    def prose(self, text: str) -> None:
        print(f"\n{text}", flush=True)

    def command(self, line: str) -> None:
        print("\n" + self._in("1", f"$ {line}"), flush=True)

    def output(self, text: str) -> None:
        if text.strip():
            print(text.rstrip("\n"), flush=True)

    def kept(self, text: str) -> None:
        print("\n" + self._in("32", f"=> {text}"), flush=True)

    def broken(self, text: str) -> None:
        print("\n" + self._in("1;31", f"=> NOT AS PROMISED: {text}"), flush=True)

    def _in(self, code: str, text: str) -> str:
        return f"\033[{code}m{text}\033[0m" if self._colour else text


def promise(kept: object, what: str) -> None:
    if not kept:
        raise Broken(what)


def run(
    screen: Screen, machine: Machine, line: str, *, enter: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a command line as somebody on the node would, and show it with everything that it says."""
    screen.command(line)
    done = machine.run([*enter, "/bin/sh", "-c", f"{{ {line}\n}} 2>&1"], check=False, timeout=120)
    screen.output(done.stdout)
    return done


# On a booted node ----------------------------------------------------------------------------------------------------


class Theatre:
    """A booted node with the unit installed, and what the scenes need of it."""

    def __init__(self, screen: Screen, node: Node) -> None:
        self.screen = screen
        self.node = node
        self.stage = Scene(node)
        self._cursor: list[str] = []

    def run(self, line: str) -> int:
        return run(self.screen, self.node, line).returncode

    def set_up(self) -> None:
        """Install the unit and its drop-in unchanged, as somebody would from the examples."""
        node = self.node
        node.run(["useradd", "--system", "ollama"])
        node.write("/opt/sglang/bin/python", SERVER, mode=0o755)
        self.screen.prose("The unit of the model server and its drop-in, as they come with gpuprestart:")
        self.run(f"cd {EXAMPLES} && cp -r {UNIT} {UNIT}.d /etc/systemd/system && systemctl daemon-reload")
        self.run(f"grep '^[A-Z]' /etc/systemd/system/{UNIT}.d/50-gpuprestart.conf")
        self.screen.prose(
            "The policy is the built-in one, but for a line that is owed to the simulation: this node is a container,\n"
            "where gpuprestart rightly does not believe the PIDs that the driver lists, and here they are true."
        )
        self.policy("policy.toml", POLICY)

    def policy(self, name: str, text: str) -> None:
        self.node.write(f"/etc/gpuprestart/{name}", text)
        self.run(f"cat /etc/gpuprestart/{name}")

    def clear(self) -> None:
        """Idle GPUs and nobody on them; the journal is read from here on."""
        self.stage.gpu.ask("clear")
        self.stage.gpu.ask("reset", gpus=8)
        last = self.node.journal("--lines=1", unit=UNIT)
        self._cursor = [f"--after-cursor={last[-1]['__CURSOR']}"] if last else []

    def entries(self) -> list[dict[str, Any]]:
        return self.node.journal(*self._cursor, unit=UNIT)

    def verdict(self) -> Mapping[str, Any]:
        found = [each for each in self.entries() if each.get("GPUPRESTART_EVENT") == "verdict"]
        promise(len(found) == 1, f"the journal of {UNIT} has {len(found)} verdicts of this start")
        return found[0]

    def signalled(self) -> bool:
        return any(each.get("GPUPRESTART_EVENT") == "holder-signalled" for each in self.entries())

    def show_state(self, *, priority: int = 6) -> str:
        """What systemd and the journal say of the start that has just ended; the STATUS= that stays.

        Records of less weight than ``priority``, a syslog number, are left out.
        """
        self.run("systemctl status sglang-qwen --no-pager --lines=0")
        lines = sum(int(each["PRIORITY"]) <= priority for each in self.entries())
        only = "" if priority == 6 else f" -p {priority}"
        self.run(f"journalctl -u sglang-qwen -o short --no-hostname{only} -n {lines}")
        return self.node.show(UNIT, "StatusText")["StatusText"]


def dirty(theatre: Theatre) -> str:
    theatre.stage.gpu.ask("set_gpu", gpu=0, baseline_mib=0)
    old, (orphan,) = theatre.stage.orphans(
        *("--open", "0", "--gpu", "0", "--mib", "1523", "--unlisted"), unit="sglang-canary.service"
    )
    theatre.screen.prose(
        "sglang-canary.service has failed and left a process behind. init has adopted it, the driver lists nobody,\n"
        "and 1523 MiB are in use on GPU 0. Which process has /dev/nvidia0 open, and whose is it?"
    )
    theatre.run("gpustat --show-pid --no-header")
    theatre.run("gpuprestart")
    theatre.run(f"systemctl is-failed {old}; ps -o pid,ppid,user,comm -p {orphan}")
    started = theatre.run("systemctl start sglang-qwen")
    promise(started == 0, "systemctl start succeeds")
    wait_for(
        lambda: any("the server is ready" in str(each["MESSAGE"]) for each in theatre.entries()),
        timeout=30,
        what="the server is ready",
    )
    status = theatre.show_state()
    verdict = theatre.verdict()
    promise(verdict["GPUPRESTART_OUTCOME"] == "cleaned", f"the verdict is cleaned ({verdict['MESSAGE']})")
    promise(len(verdict["GPU_UUID"]) == 8, "all eight GPUs were proved")
    promise("cleaned the GPUs" in status, "systemctl status tells that the GPUs were cleaned")
    promise(not theatre.stage.alive(orphan), "the stale process is gone")
    promise(theatre.node.show(UNIT, "ActiveState")["ActiveState"] == "active", "the server runs")
    theatre.run("gpustat --show-pid --no-header")
    theatre.run("systemctl stop sglang-qwen")
    return f"PID {orphan} was ended, all eight GPUs were proved clean, and the server started."


def foreign(theatre: Theatre) -> str:
    ollama, holder = theatre.stage.service(
        *("--open", "all", "--gpu", "3", "--mib", "20480", "--comm", "ollama"), unit="ollama.service", user="ollama"
    )
    theatre.screen.prose("ollama.service is up and serves somebody from GPU 3.")
    started = theatre.run("systemctl start sglang-qwen")
    promise(started != 0, "systemctl start fails")
    status = theatre.show_state(priority=5)
    verdict = theatre.verdict()
    promise(verdict["GPUPRESTART_OUTCOME"] == "protected", f"the verdict is protected ({verdict['MESSAGE']})")
    promise(verdict["GPUPRESTART_EXIT"] == "75", "the exit status is 75")
    promise(all(word in status for word in ("ollama.service", "GPU 3", "refused")), "systemctl status names both")
    promise(not theatre.signalled(), "nobody was signalled")
    promise(theatre.stage.alive(holder), "ollama lives")
    theatre.screen.prose("Whoever looks after ollama can read in its own log that somebody wanted its GPU.")
    theatre.run("journalctl -u ollama -o short --no-hostname -n 1")
    theatre.run("systemctl stop sglang-qwen ollama")
    return f"{ollama} was named and left in peace, and the server was not started."


def unowned(theatre: Theatre) -> str:
    theatre.stage.gpu.ask("leak", gpu=5, mib=40960)
    theatre.screen.prose(
        "40 GiB are in use on GPU 5 and no process holds them, as some drivers leave it after a crash. An overlay of\n"
        "the policy for this unit shortens the wait from two minutes to five seconds."
    )
    theatre.policy(f"{UNIT}.toml", '[deadline]\ntotal = "5 s"\n')
    began = time.monotonic()
    started = theatre.run("systemctl start sglang-qwen")
    took = time.monotonic() - began
    promise(started != 0, "systemctl start fails")
    promise(4.5 < took < 15, f"it waits until the deadline of five seconds (it took {took:.1f} s)")
    status = theatre.show_state(priority=5)
    verdict = theatre.verdict()
    promise(verdict["GPUPRESTART_OUTCOME"] == "unattributed", f"the verdict is unattributed ({verdict['MESSAGE']})")
    promise(verdict["GPUPRESTART_EXIT"] == "75", "the exit status is 75")
    promise("GPU 5" in status and "--gpu-reset" in status, "systemctl status names the GPU and what to do")
    theatre.run("systemctl stop sglang-qwen")
    return "The memory did not come back, and the server was not started; the hint says what brings it back."


SCENES: tuple[tuple[str, Callable[[Theatre], str]], ...] = (
    ("Scene 1: a process that nobody wants any more holds GPU 0; it is ended and the server starts.", dirty),
    ("Scene 2: a live service holds GPU 3; the start is refused and the service is named.", foreign),
    ("Scene 3: memory of GPU 5 belongs to nobody; the start is refused at the deadline, with a hint.", unowned),
)


def on_node(screen: Screen) -> None:
    screen.prose(
        "Booting a simulated GPU node: Debian 12 with systemd, and eight GPUs that are a stand-in libnvidia-ml.so.1."
    )
    with Node(gpus=8, say=screen.prose) as node:
        theatre = Theatre(screen, node)
        theatre.set_up()
        for title, play in SCENES:
            screen.title(title)
            theatre.clear()
            try:
                screen.kept(play(theatre))
            except (Broken, AssertionError):
                theatre.run("journalctl -u sglang-qwen -o short --no-hostname -n 40")
                raise


# In a plain chroot ---------------------------------------------------------------------------------------------------

#: The shell that this is run from is in somebody's cgroup, and there is no systemd here to ask about it.
ENTER = ("unshare", "--cgroup")


def in_chroot(screen: Screen, reason: str) -> None:
    screen.prose(
        f"{reason}\n"
        "So gpuprestart runs by hand, on the same simulated GPUs, in a plain chroot of the same root. Without systemd\n"
        "nobody can be proved to be stale, so it ends no process here; what is left to see is that it passes on proof\n"
        "alone. Without journald, its records go to standard error, each with its priority in front."
    )
    with Chroot(gpus=8, say=screen.prose) as chroot:
        gpu = _start_driver(chroot)
        chroot.write("/etc/gpuprestart/policy.toml", POLICY)

        screen.title("Scene 1: eight GPUs are idle; they are proved clean.")
        _expect(screen, chroot, "gpuprestart clean", status=0, words=("clean: GPUs 0-7 proved clean",))
        screen.kept("Exit status 0: the server would start.")

        screen.title("Scene 2: a process holds GPU 0, and nobody can say whose it is; the start is refused.")
        holder = _start_holder(chroot)
        _expect(screen, chroot, "gpuprestart", status=0, words=(str(holder), "1523 MiB"))
        _expect(screen, chroot, "gpuprestart check", status=75, words=("protected", f"[{holder}]"))
        _expect(screen, chroot, "gpuprestart clean", status=75, words=("protected", f"[{holder}]", "GPU 0"))
        promise(chroot.exists(f"/proc/{holder}"), "the process lives")
        chroot.run(["kill", "-KILL", str(holder)])
        gpu.ask("wait", gpu=0, used_max_mib=64)
        screen.kept(f"PID {holder} was named and left in peace, and the server would not start.")

        screen.title("Scene 3: memory of GPU 5 belongs to nobody; the start is refused at the deadline, with a hint.")
        gpu.ask("leak", gpu=5, mib=40960)
        began = time.monotonic()
        words = ("unattributed", "GPU 5", "--gpu-reset")
        _expect(screen, chroot, "gpuprestart clean --deadline 5s", status=75, words=words)
        promise(time.monotonic() - began > 4.5, "it waits until the deadline of five seconds")
        screen.kept("The memory did not come back, and the server would not start.")
        gpu.close()


def _start_driver(chroot: Chroot) -> Client:
    """The bookkeeper of the simulated GPUs, which a booted node has as a service."""
    chroot.run(["/bin/sh", "-c", "mkdir -p /run/simgpu; setsid /opt/simgpu/simgpu.py </dev/null >/dev/null 2>&1 &"])
    wait_for(lambda: chroot.exists("/run/simgpu/state"), timeout=10, what="the simulated driver is up")
    gpu = Client(f"/proc/{chroot.leader}/root/run/simgpu/control")
    gpu.ask("reset", gpus=8)
    return gpu


def _start_holder(chroot: Chroot) -> int:
    holder = f"{HOLDER} --open 0 --gpu 0 --mib 1523 --ready-file /tmp/ready"
    as_model = "setsid setpriv --reuid=model --regid=model --clear-groups --"
    chroot.run([*ENTER, "/bin/sh", "-c", f"{as_model} {holder} </dev/null >/dev/null 2>&1 &"])
    wait_for(lambda: chroot.exists("/tmp/ready"), timeout=10, what="the holder has its memory")
    found = re.search(r'"pid": (\d+)', chroot.read("/tmp/ready"))
    assert found
    return int(found[1])


def _expect(screen: Screen, chroot: Chroot, line: str, *, status: int, words: tuple[str, ...]) -> None:
    done = run(screen, chroot, line, enter=ENTER)
    screen.command("echo $?")
    screen.output(str(done.returncode))
    promise(done.returncode == status, f"{line} ends with status {status}")
    for word in words:
        promise(word in done.stdout, f"{line} says {word!r}")


def main(arguments: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(description="Three starts of a model server on simulated GPUs.")
    parser.add_argument("--node", choices=("auto", "none"), default="auto", help="none: in a plain chroot")
    options = parser.parse_args(arguments)
    screen = Screen(colour=sys.stdout.isatty())
    reason = "No node is to be booted (NODE=none)." if options.node == "none" else None
    if reason is None and (fault := can_boot()) is not None:
        reason = f"This machine cannot boot a container: {fault}."
    began = time.monotonic()
    try:
        if reason is None:
            on_node(screen)
        else:
            in_chroot(screen, reason)
    except Broken as broken:
        screen.broken(str(broken))
        return 1
    except AssertionError as late:
        # Of wait_for(): something that was to become true did not.
        screen.broken(str(late))
        return 1
    except (NodeError, ImageError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read along has seen enough. The interpreter would try to write once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    screen.prose(f"All three scenes ended as promised, in {time.monotonic() - began:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
