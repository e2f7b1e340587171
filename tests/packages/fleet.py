"""A node as a fleet has it before gpuprestart comes: with a driver, a model server's unit, apt, and no network.

It knows how an administrator installs things there and what is on its disk; what ought to be is the tests'.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.node.demo import SERVER
from tests.node.machine import Node
from tests.node.scene import POLICY, Scene
from tests.packages.building import ROOT, debian_version

UNIT = "sglang-qwen.service"
DROP_IN = f"/etc/systemd/system/{UNIT}.d/50-gpuprestart.conf"
#: All that it takes, as README.md has it, where the package lies.
FOUR_COMMANDS = (
    f"apt install ./gpuprestart_{debian_version()}_all.deb",
    "gpuprestart enable sglang-qwen",
    "systemctl daemon-reload",
    "systemctl restart sglang-qwen",
)
HOOK = "ExecStartPre=+/usr/bin/gpuprestart clean"

#: What a package that comes, changes or goes leaves behind by the ways of dpkg, apt, rpm and systemd themselves, in
#: their records, logs and caches; and where these tests put packages, and running servers their own things.
_RECORDS = (
    "/var/lib/dpkg/", "/var/lib/apt/", "/var/lib/rpm/", "/var/log/", "/var/cache/", "/var/lib/systemd/catalog/",
    "/run/log/", "/run/systemd/", "/run/user/", "/run/simgpu/", "/run/lock", "/tmp/", "/var/tmp/", "/var/lib/sglang",
)  # fmt: skip


class Fleet:
    """One node of it."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.scene = Scene(node)
        self.scene.gpu.ask("reset", gpus=8)
        # The unit is the administrator's own, as is what it runs: SGLang, for which the stand-in server is here.
        node.write(f"/etc/systemd/system/{UNIT}", (ROOT / "units" / UNIT).read_text())
        node.write("/opt/sglang/bin/python", SERVER, mode=0o755)
        node.systemctl("daemon-reload")

    def run(self, line: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A command line as somebody would type it there, with all that it says."""
        return self.node.run(["/bin/sh", "-c", f"{{ {line}\n}} 2>&1"], check=check, timeout=120)

    def policy(self) -> None:
        """What the simulation owes to itself (see scene.POLICY), as an overlay of the administrator's."""
        self.node.write(f"/etc/gpuprestart/{UNIT}.toml", POLICY)

    # Packages --------------------------------------------------------------------------------------------------------

    def bring(self, package: Path) -> str:
        """Put a file on the node, and say where."""
        target = f"/var/tmp/{package.name}"
        shutil.copyfile(package, self.path(target))
        return target

    def path(self, path: str) -> Path:
        """A file of the node as this machine sees it."""
        return Path(f"/proc/{self.node.leader}/root{path}")

    def apt(self, *words: str, environment: Mapping[str, str] | None = None, check: bool = True) -> str:
        """Run apt-get as something does that nobody can be asked by."""
        done = self.node.run(
            ["apt-get", "--quiet", "--yes", *words],
            env={"DEBIAN_FRONTEND": "noninteractive", **(environment or {})},
            check=check,
            timeout=300,
        )
        return done.stdout + done.stderr

    def install(self, package: Path, *options: str) -> str:
        return self.apt(*options, "install", self.bring(package))

    def ready(self) -> None:
        """What gpuprestart needs of the distribution is there already, and so is no news."""
        self.apt("update")
        self.apt("install", "python3-psutil", "python3-systemd", "python3-rich")

    # What is there ---------------------------------------------------------------------------------------------------

    def files(self) -> dict[str, str]:
        """All that is on the node's disk and in /run, but for the records of those who manage it."""
        script = "find / /run -xdev ! -type s -printf '%p\\t%y %m %u %s %T@ %l\\n'"
        found = {}
        for line in self.node.run(["sh", "-c", script], timeout=120).stdout.splitlines():
            path, _, state = line.partition("\t")
            if not path.startswith(_RECORDS):
                # A folder's size and time tell that something in it came or went, which the list itself tells better.
                kind, mode, user, *rest = state.split(" ")
                found[path] = f"{kind} {mode} {user}" if kind == "d" else f"{kind} {mode} {user} {' '.join(rest)}"
        return found

    def units(self) -> str:
        """Which units there are, and in which states."""
        listed = self.node.systemctl("list-units", "--all", "--plain", "--no-legend", "--no-pager").stdout
        known = self.node.systemctl("list-unit-files", "--plain", "--no-legend", "--no-pager").stdout
        # Of these, others come and go by themselves.
        return "\n".join(line for line in (listed + known).splitlines() if not line.startswith(("user@", "session-")))

    def changed_on_disk(self, unit: str) -> bool:
        """Whether systemd, which keeps a unit that runs, has read other files of it than there are: nobody has reloaded
        it since they were changed."""
        return self.node.show(unit, "NeedDaemonReload")["NeedDaemonReload"] == "yes"

    # The server ------------------------------------------------------------------------------------------------------

    def state(self, unit: str = UNIT) -> str:
        return self.node.show(unit, "ActiveState")["ActiveState"]

    def explained(self, unit: str = UNIT) -> str:
        return self.run(f"journalctl -x -u {unit} --no-pager").stdout


def difference(before: Mapping[str, str], after: Mapping[str, str]) -> set[str]:
    return {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
