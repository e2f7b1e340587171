"""The RPM package on the node that is nearest to RHEL 9: its rpm is 4.16, its Python 3.9, its systemd 247.

There is no node of Fedora or RHEL here, and no dnf: rpm is told to leave its requirements alone, since it does not know
Debian's packages, and what systemd's own package does there by file triggers, the test does. packaging/README.md says
what is left untested by that.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.machine import Node
from tests.packages.building import Packages
from tests.packages.conftest import OLDER
from tests.packages.fleet import DROP_IN, UNIT, Fleet, difference

pytestmark = pytest.mark.node

#: Fedora's package "filesystem" has it.
LICENSES = "/usr/share/licenses"


@pytest.fixture(scope="module")
def node(boots: None) -> Iterator[Node]:
    """A node with rpm on it, which takes a while to install."""
    with Node(gpus=8, release="bullseye", bare=True) as node:
        fleet = Fleet(node)
        fleet.ready()
        fleet.apt("install", "rpm")
        yield node


@pytest.fixture
def fleet(node: Node) -> Iterator[Fleet]:
    fleet = Fleet(node)
    yield fleet
    fleet.run(f"systemctl stop {UNIT}")
    fleet.run("rpm --dbpath=/var/lib/rpm --nodeps --force-debian --erase gpuprestart", check=False)
    fleet.run("rm -rf /etc/gpuprestart /run/gpuprestart; systemctl daemon-reload")


def rpm(fleet: Fleet, verb: str, what: str | Path) -> str:
    """Run the node's own rpm, and give back what it has to say."""
    if isinstance(what, Path):
        what = fleet.bring(what)
    # Debian's rpm would not install anything else.
    allowed = ["--nodeps", "--force-debian"] if verb in ("--install", "--upgrade", "--erase") else []
    done = fleet.node.run(["rpm", "--dbpath=/var/lib/rpm", *allowed, *verb.split(), what], check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def trigger(fleet: Fleet) -> None:
    """What systemd's package does on Fedora and RHEL once files came to lie in these folders (its triggers.systemd)."""
    fleet.run("journalctl --update-catalog; systemd-tmpfiles --create /usr/lib/tmpfiles.d/gpuprestart.conf")


def test_its_program_proves_before_a_start(fleet: Fleet, packages: Packages) -> None:
    fleet.policy()
    rpm(fleet, "--install", packages.rpm)
    trigger(fleet)
    fleet.run("gpuprestart enable sglang-qwen; systemctl daemon-reload")
    _, (orphan,) = fleet.scene.orphans("--open", "0", "--gpu", "0", "--mib", "1523", "--unlisted")
    fleet.run("systemctl restart sglang-qwen")
    assert fleet.state() == "active"
    assert not fleet.scene.alive(orphan)
    assert "Subject: The verdict on the GPUs is: cleaned" in fleet.explained()
    assert "GPUPRESTART(8)" in fleet.run("man 8 gpuprestart").stdout
    assert rpm(fleet, "--verify --nodeps", "gpuprestart") == ""


def test_it_comes_without_a_word_to_anybody(fleet: Fleet, packages: Packages) -> None:
    fleet.run("systemctl start sglang-qwen")
    unit = f"/etc/systemd/system/{UNIT}"
    fleet.node.write(unit, fleet.node.read(unit) + "# changed\n")
    fleet.scene.gpu.ask("calls", start=True)
    files, units = fleet.files(), fleet.units()

    assert rpm(fleet, "--install", packages.rpm) == ""

    assert fleet.units() == units
    assert fleet.changed_on_disk(UNIT)
    assert fleet.scene.gpu.ask("calls")["counts"] == {}
    own = set(rpm(fleet, "--query --list", "gpuprestart").splitlines())
    assert own <= fleet.files().keys()
    new = difference(files, fleet.files()) - {LICENSES}
    # For the Python that is there, and for all modules.
    compiled = {path for path in new - own if path.endswith(".cpython-39.pyc")}
    assert {path for path in new - own - compiled if not path.endswith("/__pycache__")} == set()
    assert len(compiled) == len([path for path in own if path.endswith(".py")])


def test_an_upgrade_keeps_an_edited_policy_and_the_drop_ins(fleet: Fleet, packages: Packages, older: Packages) -> None:
    rpm(fleet, "--install", older.rpm)
    assert OLDER in fleet.run("gpuprestart --version").stdout
    fleet.run("gpuprestart enable sglang-qwen")
    edited = fleet.node.read("/etc/gpuprestart/policy.toml") + "\n[owners]\ndedicated = true\n"
    fleet.node.write("/etc/gpuprestart/policy.toml", edited)

    said = rpm(fleet, "--upgrade", packages.rpm)

    assert OLDER not in fleet.run("gpuprestart --version").stdout
    assert fleet.node.read("/etc/gpuprestart/policy.toml") == edited
    assert '#max_used = "64 MiB"' in fleet.node.read("/etc/gpuprestart/policy.toml.rpmnew")
    assert fleet.node.exists(DROP_IN)
    assert "being removed" not in said
    # What was compiled of the older version has gone with it, and all is compiled anew.
    assert fleet.run("find /usr/lib/gpuprestart -name 'vanished*'").stdout == ""
    assert fleet.run("find /usr/lib/gpuprestart -name '*.pyc' ! -newer /usr/lib/gpuprestart/pynvml.py").stdout == ""


def test_a_removal_leaves_configuration_and_servers_that_start(fleet: Fleet, packages: Packages) -> None:
    before = fleet.files()
    rpm(fleet, "--install", packages.rpm)
    trigger(fleet)
    fleet.policy()
    edited = "[owners]\ndedicated = true\n"
    fleet.node.write("/etc/gpuprestart/policy.toml", edited)
    fleet.run("gpuprestart enable sglang-qwen; systemctl daemon-reload; systemctl start sglang-qwen")

    said = rpm(fleet, "--erase", "gpuprestart")

    assert DROP_IN in said and "systemctl daemon-reload" in said
    assert not fleet.node.exists(DROP_IN)
    assert fleet.run("systemctl restart sglang-qwen", check=False).returncode != 0
    fleet.run("systemctl daemon-reload; systemctl restart sglang-qwen")
    assert fleet.state() == "active"
    left = {path for path in difference(before, fleet.files()) if not path.startswith("/run/gpuprestart")}
    kept = ("", f"/{UNIT}.toml", "/policy.toml.rpmsave")
    assert left - {LICENSES} == {f"/etc/gpuprestart{name}" for name in kept}
    assert fleet.node.read("/etc/gpuprestart/policy.toml.rpmsave") == edited
