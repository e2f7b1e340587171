"""A simulated node with a stage set on it: units, holders, GPUs, and what the hook made of them.

It knows how to start things through the node's systemd and how to read a verdict; what should come out is the tests'.
"""

from __future__ import annotations

import json
import secrets
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from simgpu_client import Client

from tests.node.machine import Node

HOLDER = "/opt/simgpu/holder.py"

#: A container is a PID namespace of its own, where the hook is right to distrust the PIDs that NVML lists. The stand-in
#: driver lists the node's PIDs, so the policy of the node says so.
POLICY = '[nvml]\npids = "ours"\n'

#: Seconds that the real default of ten is scaled to.
TERM = "term = '1 s'\n"


@dataclass(frozen=True)
class Run:
    """One run of the hook: its exit status, its verdict, what it printed."""

    exit: int
    verdict: Mapping[str, Any]
    stdout: str
    stderr: str

    @property
    def outcome(self) -> str:
        return str(self.verdict["outcome"])

    def holder(self, pid: int) -> Mapping[str, Any]:
        found: list[Mapping[str, Any]] = [each for each in self.verdict["holders"] if each["pid"] == pid]
        assert len(found) == 1, f"PID {pid} is {len(found)} times among {self.verdict['holders']}"
        return found[0]

    @property
    def fates(self) -> dict[int, str]:
        return {each["pid"]: each["fate"] for each in self.verdict["holders"] if each["fate"]}


def verdicts(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Those that were printed among these journal entries, in their order."""
    printed = (str(each["MESSAGE"]) for each in entries)
    return [json.loads(line) for line in printed if line.startswith('{"version"')]


@contextmanager
def mappable(node: Node, wanted: bool = True) -> Iterator[None]:
    """While this lasts, and if it is wanted, /dev/nvidia0 is a node that can be mapped, as a console cannot."""
    if not wanted:
        yield
        return
    node.run(["sh", "-ec", "mknod -m 666 /dev/t-zero c 1 5; mount --bind /dev/t-zero /dev/nvidia0"])
    try:
        yield
    finally:
        # Lazily: whoever has it mapped may outlive the test's last word on it.
        node.run(["sh", "-ec", "umount --lazy /dev/nvidia0; rm /dev/t-zero"])


class Scene:
    """One test's stage on a node that many tests share."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.gpu = Client(f"/proc/{node.leader}/root/run/simgpu/control")
        self._units: set[str] = set()

    # The stage -------------------------------------------------------------------------------------------------------

    def reset(self, *, gpus: int = 8, **fields: Any) -> None:
        """Idle GPUs, the default policy, no units of an earlier test."""
        self.gpu.ask("clear")
        self.gpu.ask("reset", gpus=gpus, **fields)
        self.policy()

    def strike(self) -> None:
        """End everything that the test started, and wait until it is gone."""
        for unit in sorted(self._units):
            self.node.run(["systemctl", "kill", "--kill-who=all", "--signal=KILL", unit], check=False)
            self.node.run(["systemctl", "stop", unit], check=False)
        self.node.wait_for(
            lambda: not any(self.node.unit_pids(unit) for unit in self._units), timeout=10, what="all units are empty"
        )
        self.node.run(["sh", "-c", "rm -rf /etc/systemd/system/t-* /etc/gpuprestart/*"])
        self.node.systemctl("daemon-reload")
        self.node.run(["systemctl", "reset-failed"], check=False)
        self.gpu.close()

    def policy(self, text: str = "", *, name: str = "policy.toml", base: str = POLICY) -> None:
        self.node.run(["mkdir", "-p", "/etc/gpuprestart"])
        self.node.write(f"/etc/gpuprestart/{name}", base + text)

    def name(self, stem: str) -> str:
        """A name for a unit that no other test has."""
        return self._known(f"t-{stem}-{secrets.token_hex(3)}.service")

    def _known(self, unit: str) -> str:
        self._units.add(unit)
        return unit

    # Holders ---------------------------------------------------------------------------------------------------------

    def service(
        self, *options: str, unit: str | None = None, user: str = "model", properties: Sequence[str] = ()
    ) -> tuple[str, int]:
        """An active service that holds GPUs as ``options`` say, and the PID of its main process."""
        unit = self._known(unit) if unit else self.name("live")
        self.node.start([HOLDER, *options], unit=unit, user=user, properties=["Type=notify", *properties])
        return unit, int(self.node.show(unit, "MainPID")["MainPID"])

    def orphans(
        self,
        *options: str,
        unit: str | None = None,
        user: str | None = "model",
        count: int = 1,
        properties: Sequence[str] = (),
        prefix: Sequence[str] = (),
    ) -> tuple[str, list[int]]:
        """Holders left in the cgroup of a service that has failed: what started them is gone, and init has them."""
        unit = self._known(unit) if unit else self.name("old")
        ready = f"/tmp/{unit}"
        # A test may give its unit a name that an earlier one gave to another.
        self.node.run(["sh", "-c", f"rm -f {shlex.quote(ready)}.*"])
        holder = shlex.join([*prefix, HOLDER, *options])
        # The front process of a server that dies once its workers run: the workers stay where they are.
        script = "; ".join(
            [f"{holder} --ready-file {ready}.{number} &" for number in range(count)]
            + [f"until [ -e {ready}.{number} ]; do sleep 0.02; done" for number in range(count)]
            + ["exit 1"]
        ).replace("&;", "&")
        self.node.start(["/bin/sh", "-c", script], unit=unit, user=user, properties=["KillMode=process", *properties])
        self.await_state(unit, "failed")
        return unit, self.node.unit_pids(unit)

    def await_state(self, unit: str, state: str) -> None:
        self.node.wait_for(
            lambda: self.node.show(unit, "ActiveState")["ActiveState"] == state, timeout=20, what=f"{unit} is {state}"
        )

    def abandon(self, unit: str) -> set[int]:
        """Kill a running unit's main process with -9, and give back what is left in its cgroup once it has failed."""
        main = int(self.node.show(unit, "MainPID")["MainPID"])
        self.node.run(["systemctl", "kill", "--kill-who=main", "--signal=KILL", unit])
        self.await_state(unit, "failed")
        return set(self.node.unit_pids(unit)) - {main}

    def alive(self, pids: int | Iterable[int]) -> bool:
        """Whether all of these processes are there, and no zombies."""
        wanted = [pids] if isinstance(pids, int) else list(pids)
        for pid in wanted:
            state = self.node.run(["cat", f"/proc/{pid}/stat"], check=False).stdout.rpartition(")")[2].split()
            if not state or state[0] == "Z":
                return False
        return True

    def parent(self, pid: int) -> int:
        return int(self.node.run(["cat", f"/proc/{pid}/stat"]).stdout.rpartition(")")[2].split()[1])

    # The hook --------------------------------------------------------------------------------------------------------

    def clean(self, *options: str, verb: str = "clean") -> Run:
        """Run the program from a shell."""
        done = self.node.run(
            ["/usr/bin/gpuprestart", verb, "--json", "--deadline", "20s", *options], check=False, timeout=120
        )
        verdict = json.loads(done.stdout) if done.stdout.startswith("{") else {}
        return Run(exit=done.returncode, verdict=verdict, stdout=done.stdout, stderr=done.stderr)

    def check(self, *options: str) -> Run:
        return self.clean(*options, verb="check")

    def server(
        self,
        unit: str | None = None,
        *,
        gpus: str = "0,1,2,3,4,5,6,7",
        command: str = "/usr/bin/gpuprestart clean --json",
        server: str = "/bin/sleep 1000",
        more: str = "",
        plus: bool = True,
    ) -> str:
        """A server's unit with the hook in front of it, written but not started."""
        unit = self._known(unit) if unit else self.name("server")
        text = f"""
[Service]
User=model
Environment=CUDA_VISIBLE_DEVICES={gpus}
ExecStartPre={"+" if plus else ""}{command}
NotifyAccess=exec
ExecStart={server}
TimeoutStartSec=300
{more}
"""
        self.node.write(f"/etc/systemd/system/{unit}", text)
        self.node.systemctl("daemon-reload")
        return unit

    def start(self, unit: str) -> bool:
        """Start a unit through systemd; whether it started."""
        return self.node.run(["systemctl", "start", unit], check=False, timeout=300).returncode == 0

    def verdict(self, unit: str) -> Run:
        """The verdict of a unit's last run, as its hook printed it into the journal."""
        invocation = self.node.show(unit, "InvocationID")["InvocationID"]
        said: list[str] = []

        def printed() -> Any:
            entries = self.node.journal(unit=unit)
            said[:] = [str(each["MESSAGE"]) for each in entries if each.get("SYSLOG_IDENTIFIER") == "gpuprestart"]
            found = verdicts(entries)
            if not found and invocation:
                # A busy journald may come to look at a process when that has gone, and then never tells whose it was.
                by_all = verdicts(self.node.journal(_TRANSPORT="stdout"))
                found = [each for each in by_all if each.get("run") == invocation]
            return found[-1] if found and invocation in ("", found[-1]["run"]) else None

        # What a process that has ended had printed may still wait for journald to read it.
        verdict = self.node.wait_for(printed, timeout=5, what=f"the verdict of {unit} is in its journal")
        return Run(exit=verdict["exit"], verdict=verdict, stdout=json.dumps(verdict), stderr="\n".join(said))

    def records(self, run: Run, event: str | None = None) -> list[dict[str, Any]]:
        """The journal records of a run, or those of one kind."""
        found = self.node.journal(GPUPRESTART_RUN=run.verdict["run"])
        return [each for each in found if event is None or each["GPUPRESTART_EVENT"] == event]

    def signals(self, run: Run) -> list[tuple[int, str]]:
        """Every signal of a run in order, as (PID, name)."""
        records = self.records(run, "holder-signalled")
        return [(int(each["HOLDER_PID"]), each["GPUPRESTART_SIGNAL"]) for each in records]
