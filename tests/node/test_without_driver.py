"""NVML as NVIDIA ships it, on a machine without the driver: Debian's own libnvidia-ml1 in place of the stand-in (C3).

The package is in non-free, which is asked of the mirror that the node's root came from, with lists and settings of our
own: nothing is enabled on this machine, and on the node the one file lies there only as long as a test needs it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.node import image
from tests.node.machine import Node
from tests.node.scene import Run, Scene
from tests.node.test_devices import WITHOUT_DEVICES

CLEAN = "/usr/bin/gpuprestart clean --json"
PACKAGE = "libnvidia-ml1"

#: apt's hooks are for the machine's own lists, and its unprivileged user could not read ours.
APT = """
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
APT::Sandbox::User "root";
Dir::State "{here}/state";
Dir::State::status "/dev/null";
Dir::Cache "{here}/cache";
Dir::Etc::sourcelist "{here}/sources.list";
Dir::Etc::sourceparts "-";
"""


# The library ---------------------------------------------------------------------------------------------------------


def _fetch(source: str, target: Path) -> None:
    """Have the library of the package in the file ``target``. Raises image.ImageError."""
    with tempfile.TemporaryDirectory(prefix="building-", dir=target.parent) as work:
        here = Path(work)
        for folder in ("state/lists/partial", "cache/archives/partial", "root"):
            (here / folder).mkdir(parents=True)
        (here / "sources.list").write_text(source)
        (here / "apt.conf").write_text(APT.format(here=here))
        script = """
            cd "$1"
            apt-get --quiet --config-file apt.conf update
            apt-get --quiet --config-file apt.conf download "$2"
            dpkg-deb --extract "$2"_*.deb root
        """
        image.command(["/bin/sh", "-ec", script, "sh", work, PACKAGE], env=os.environ)
        (library,) = (path for path in here.glob("root/usr/lib/**/libnvidia-ml.so.*") if not path.is_symlink())
        library.chmod(0o644)
        library.rename(target)


@pytest.fixture(scope="module")
def library(node: Node) -> Path:
    """Debian's library for the node's release, fetched once and kept beside the node's root."""
    found = re.search(r"^(deb (?:\[.*?\] )?\S+ \S+) main$", node.read("/etc/apt/sources.list"), re.MULTILINE)
    assert found, "the node's root does not say where it came from"
    source = f"{found[1]} non-free\n"
    key = hashlib.sha256(f"{source}{PACKAGE}{APT}".encode()).hexdigest()[:16]
    cache = image.cache_directory()
    target = cache / f"nvml-{node.release}-{key}"
    with image.locked(cache / "lock"):
        try:
            if not target.exists():
                _fetch(source, target)
        except image.ImageError as error:
            if os.environ.get("CI"):
                pytest.fail(f"Debian's NVML cannot be had: {error}")
            pytest.skip(f"Debian's NVML cannot be had: {error}")
    return target


@contextmanager
def _installed(scene: Scene, library: Path) -> Iterator[str]:
    """It lies where the stand-in does, which is put back afterwards; its path on the node."""
    line = scene.node.run(["ldconfig", "-p"]).stdout.partition("libnvidia-ml.so.1 ")[2].splitlines()[0]
    place = line.rpartition("=> ")[2]
    quoted, aside = shlex.quote(place), "/opt/simgpu/aside"
    shutil.copyfile(library, f"/proc/{scene.node.leader}/root/opt/simgpu/debian")
    scene.node.run(["sh", "-ec", f"mv {quoted} {aside}; mv /opt/simgpu/debian {quoted}; ldconfig"])
    try:
        yield place
    finally:
        scene.node.run(["sh", "-ec", f"mv {aside} {quoted}; ldconfig"])


def test_it_is_the_real_one(scene: Scene, library: Path) -> None:
    content = library.read_bytes()
    assert b"/proc/driver/nvidia" in content and b"simgpu" not in content
    with _installed(scene, library) as place:
        code = "import pynvml; print(pynvml._LoadNvmlLibrary()); print(open('/proc/self/maps').read())"
        assert place in scene.node.run(["python3", "-c", code]).stdout


# Without a driver ----------------------------------------------------------------------------------------------------

#: The nodes as the driver numbers them, which are there and open nothing while its module is not loaded.
NODES = "mknod -m 666 /mnt/nvidiactl c 195 255; mknod -m 666 /mnt/nvidia0 c 195 0\n"
#: A machine without anything of NVIDIA's, and one that has the nodes.
MACHINES = {"nothing": WITHOUT_DEVICES, "nodes": WITHOUT_DEVICES.replace("mount --rbind", f"{NODES}mount --rbind")}


@pytest.mark.case("C3")
@pytest.mark.parametrize("missing", ["refuse", "pass"])
@pytest.mark.parametrize("machine", MACHINES)
def test_the_driver_is_not_loaded(scene: Scene, library: Path, missing: str, machine: str) -> None:
    """With the library there the machine is meant to have GPUs, so it may not pass for one that has none."""
    scene.policy(f'[nvml]\nmissing = "{missing}"\n', base="")
    _, (orphan,) = scene.orphans("--open", "0", "--gpu", "0", "--mib", "900")
    server = _server(scene, machine)
    with _installed(scene, library):
        run = _refused(scene, server)
    _is_unknown(run, "Driver Not Loaded", "modprobe nvidia")
    assert scene.signals(run) == [] and scene.alive(orphan)


@pytest.mark.case("C3")
def test_the_nodes_are_kept_from_us(scene: Scene, library: Path) -> None:
    """What the real library says where it may not use the control node, as behind a DeviceAllow= that leaves it out;
    here that is no NVIDIA device, but a console."""
    with _installed(scene, library):
        run = _refused(scene, scene.server(command=CLEAN))
    _is_unknown(run, "blocked", "DeviceAllow=")


@pytest.mark.case("C3")
def test_the_nodes_are_for_another_user(scene: Scene, library: Path) -> None:
    script = MACHINES["nodes"] + "chmod 600 /dev/nvidia*; exec setpriv --reuid=alice --clear-groups "
    with _installed(scene, library):
        done = scene.node.run(["unshare", "--mount", "sh", "-c", f"{script}gpuprestart check --json"], check=False)
    run = Run(exit=done.returncode, verdict=json.loads(done.stdout), stdout=done.stdout, stderr=done.stderr)
    _is_unknown(run, "Insufficient Permissions", "run it as root")


@pytest.mark.case("C3")
def test_neither_library_nor_anything_else(scene: Scene, library: Path) -> None:
    """The same machine once the package is removed, under the policy that lets it pass."""
    scene.policy('[nvml]\nmissing = "pass"\n', base="")
    server = _server(scene, "nothing")
    with _installed(scene, library) as place:
        assert not scene.start(server)
        scene.node.run(["sh", "-ec", f"rm {shlex.quote(place)}; ldconfig"])
        assert scene.start(server)
    run = scene.verdict(server)
    assert (run.outcome, run.exit) == ("none", 0)


#: What the kernel shows of modules and of the PCI bus: nothing that is NVIDIA's, and a device to make something of.
KERNEL = """
mount -t tmpfs tmpfs /sys
mkdir -p /sys/module/ext4 /sys/bus/pci/devices/0000:1b:00.0
cd /sys/bus/pci/devices/0000:1b:00.0
"""


@pytest.mark.case("C3")
@pytest.mark.parametrize(
    "trace, outcome",
    [
        ("touch /dev/nvidia0", "unknown"),
        ("mkdir /sys/module/nvidia", "unknown"),
        ("echo 0x10de >vendor; echo 0x030200 >class", "unknown"),
        # A bridge of NVIDIA's, and somebody else's display controller.
        ("echo 0x10de >vendor; echo 0x060400 >class", "none"),
        ("echo 0x1002 >vendor; echo 0x030000 >class", "none"),
    ],
    ids=["node", "module", "gpu on the bus", "bridge on the bus", "other gpu on the bus"],
)
def test_one_trace_without_a_library(scene: Scene, library: Path, trace: str, outcome: str) -> None:
    """Any of them speaks of a GPU that somebody has to see to, and for which `pass` was not meant."""
    scene.policy('[nvml]\nmissing = "pass"\n', base="")
    scene.node.write("/run/t-machine", f"{MACHINES['nothing']}{KERNEL}{trace}\nexec {CLEAN}\n")
    server = scene.server(command="/usr/bin/unshare --mount /bin/sh /run/t-machine")
    with _installed(scene, library) as place:
        scene.node.run(["sh", "-ec", f"rm {shlex.quote(place)}; ldconfig"])
        assert scene.start(server) is (outcome == "none")
    assert scene.verdict(server).outcome == outcome


@pytest.mark.case("C3")
def test_typed_in_a_shell(scene: Scene, library: Path) -> None:
    script = MACHINES["nothing"]
    with _installed(scene, library):
        done = scene.node.run(["unshare", "--mount", "sh", "-c", f"{script}exec gpuprestart status"], check=False)
    assert done.returncode == 69
    assert "Driver Not Loaded" in done.stdout + done.stderr and "modprobe nvidia" in done.stdout + done.stderr


@pytest.mark.parametrize("rights, made", [("-mknod", False), ("-kill", True)])
def test_who_makes_missing_nodes(scene: Scene, library: Path, rights: str, made: bool) -> None:
    """For root, the real library makes the control node itself; a hook with few capabilities has to find it there."""
    script = f"{MACHINES['nothing']}setpriv --bounding-set={rights} gpuprestart check >/dev/null; ls /dev"
    with _installed(scene, library):
        there = scene.node.run(["unshare", "--mount", "sh", "-c", script.replace("set -e\n", "")], check=False).stdout
    assert "null" in there and ("nvidiactl" in there) is made


def _server(scene: Scene, machine: str) -> str:
    """A server on such a machine. Where NVML could make the control node, it would no longer be without a trace."""
    without = "setpriv --inh-caps=-mknod --bounding-set=-mknod"
    scene.node.write("/run/t-machine", f"{MACHINES[machine]}exec {without} {CLEAN}\n")
    return scene.server(command="/usr/bin/unshare --mount /bin/sh /run/t-machine")


def _refused(scene: Scene, server: str) -> Run:
    """The verdict on a start that has to be refused, and was, at once."""
    assert not scene.start(server)
    shown = scene.node.show(server, "ActiveState", "Result", "ExecMainStartTimestampMonotonic")
    assert shown == {"ActiveState": "failed", "Result": "exit-code", "ExecMainStartTimestampMonotonic": "0"}
    return scene.verdict(server)


def _is_unknown(run: Run, message: str, hint: str) -> None:
    """The stand-in, which would have found clean GPUs, was not asked; and the hint tells what is missing."""
    assert (run.outcome, run.exit) == ("unknown", 69)
    assert message in run.verdict["message"] and hint in run.verdict["hints"][0]
    assert run.verdict["duration_s"] < 2 and run.verdict["gpus"] == []
