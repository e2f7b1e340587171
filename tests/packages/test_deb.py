"""The Debian package on nodes that it has never been on: Debian 12, 13 and 11, with systemd 252, 257 and 247.

Debian 11 has Python 3.9, as RHEL 9 has.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.node.machine import Node, wait_for
from tests.packages.building import Packages
from tests.packages.conftest import OLDER
from tests.packages.fleet import DROP_IN, FOUR_COMMANDS, HOOK, UNIT, Fleet, difference

pytestmark = pytest.mark.node


@pytest.fixture(params=["bookworm", "trixie", "bullseye"])
def fleet(request: pytest.FixtureRequest, boots: None) -> Iterator[Fleet]:
    with Node(gpus=8, release=request.param, bare=True) as node:
        yield Fleet(node)


def test_four_commands_put_proof_before_a_start(fleet: Fleet, packages: Packages) -> None:
    """Installed from the file, enabled, reloaded, restarted: refused while somebody alive has a GPU, else cleaned."""
    fleet.policy()
    fleet.apt("update")
    scene = fleet.scene
    # What a distribution has of nvidia-ml-py is too old, and comes after what is bundled.
    fleet.node.write("/usr/lib/python3/dist-packages/pynvml.py", "raise ImportError('too old')\n")
    other, holder = scene.service("--open", "all", "--gpu", "3", "--mib", "20480", user="alice")

    package = fleet.bring(packages.deb)
    # Whoever types it says yes to what the package brings along.
    fleet.node.write("/etc/apt/apt.conf.d/90yes", 'APT::Get::Assume-Yes "true";\n')
    *before, restart = FOUR_COMMANDS
    for command in before:
        fleet.run(f"cd {package.rpartition('/')[0]} && {command}")
    refused = fleet.run(restart, check=False)

    assert refused.returncode != 0
    status = fleet.run("systemctl status sglang-qwen", check=False).stdout
    assert "refused the start" in status and f"systemctl stop {other}" in status
    assert scene.alive(holder)
    told = fleet.explained()
    assert "Subject: The verdict on the GPUs is: protected" in told
    assert "stop that unit, session" in told

    fleet.node.systemctl("stop", other, UNIT)
    _, (orphan,) = scene.orphans("--open", "0", "--gpu", "0", "--mib", "1523", "--unlisted")
    fleet.run(restart)

    assert fleet.state() == "active"
    assert not scene.alive(orphan)
    assert "Subject: The verdict on the GPUs is: cleaned" in fleet.explained()


def test_it_comes_without_a_word_to_anybody(fleet: Fleet, packages: Packages) -> None:
    """Nothing is started, stopped, enabled or reloaded, no GPU is asked, and no file is there but its own."""
    fleet.ready()
    fleet.run("systemctl start sglang-qwen")
    unit = f"/etc/systemd/system/{UNIT}"
    fleet.node.write(unit, fleet.node.read(unit) + "# changed\n")
    fleet.scene.gpu.ask("calls", start=True)
    files, units = fleet.files(), fleet.units()
    assert fleet.changed_on_disk(UNIT)

    said = fleet.install(packages.deb)

    assert fleet.units() == units
    assert fleet.changed_on_disk(UNIT)
    assert fleet.scene.gpu.ask("calls")["counts"] == {}
    assert "warning" not in said.lower()
    own = set(fleet.run("dpkg-query --listfiles gpuprestart").stdout.split())
    new = difference(files, fleet.files()) - {"/run/gpuprestart"}
    assert {path for path in new - own if not path.startswith("/usr/lib/gpuprestart/")} == set()
    compiled = {path for path in new - own if path.endswith(".pyc")}
    assert {path for path in new - own if not path.endswith(("/__pycache__", ".pyc"))} == set()
    assert len(compiled) == len([path for path in own if path.endswith(".py")])
    assert fleet.run("stat -c '%a %U' /run/gpuprestart").stdout == "755 root\n"


def test_it_proves_without_the_journal_s_module_too(fleet: Fleet, packages: Packages) -> None:
    """What is only recommended can be left out; the verdict is the same, and its records go to standard error."""
    fleet.apt("update")
    fleet.install(packages.deb, "--no-install-recommends")
    assert "No module named" in fleet.run("python3 -c 'import systemd'", check=False).stdout
    done = fleet.run("gpuprestart check --gpus 0")
    assert "clean, exit status 0" in done.stdout


def test_its_manual_and_its_completion_are_found(fleet: Fleet, packages: Packages) -> None:
    fleet.apt("update")
    fleet.install(packages.deb)
    assert "GPUPRESTART(8)" in fleet.run("man 8 gpuprestart").stdout
    assert "GPUPRESTART.TOML(5)" in fleet.run("man 5 gpuprestart.toml").stdout
    assert "gpuprestart (8)" in fleet.run("apropos gpuprestart").stdout
    # A terminal, a login shell, and the tabulator key.
    shell = ["script", "--quiet", "--flush", "--command", "bash --login -i", "/dev/null"]
    typed = fleet.node.run(shell, input="gpuprestart disab\t\x01echo typed: \nexit\n", env={"TERM": "dumb"})
    assert "typed: gpuprestart disable" in typed.stdout


def test_an_upgrade_keeps_an_edited_policy_and_the_drop_ins(fleet: Fleet, packages: Packages, older: Packages) -> None:
    fleet.ready()
    fleet.install(older.deb)
    assert OLDER in fleet.run("gpuprestart --version").stdout
    fleet.run("gpuprestart enable sglang-qwen")
    drop_in = fleet.node.read(DROP_IN)
    edited = fleet.node.read("/etc/gpuprestart/policy.toml") + "\n[owners]\ndedicated = true\n"
    fleet.node.write("/etc/gpuprestart/policy.toml", edited)

    said = fleet.install(packages.deb, "--option=Dpkg::Options::=--force-confold")

    assert OLDER not in fleet.run("gpuprestart --version").stdout
    assert fleet.node.read("/etc/gpuprestart/policy.toml") == edited
    assert '#max_used = "64 MiB"' in fleet.node.read("/etc/gpuprestart/policy.toml.dpkg-dist")
    assert fleet.node.read(DROP_IN) == drop_in
    assert "being removed" not in said
    # What was compiled of the older version has gone with it.
    assert fleet.run("find /usr/lib/gpuprestart -name 'vanished*'").stdout == ""


def test_an_upgrade_asks_nobody_about_a_policy_that_nobody_has_edited(
    fleet: Fleet, packages: Packages, older: Packages
) -> None:
    fleet.ready()
    fleet.install(older.deb)
    fleet.install(packages.deb)
    assert '#max_used = "64 MiB"' in fleet.node.read("/etc/gpuprestart/policy.toml")


def test_a_removal_leaves_configuration_and_servers_that_start(fleet: Fleet, packages: Packages) -> None:
    """The hook goes from the units that `enable` gave it to, and whoever removes it is told what to do and why."""
    fleet.policy()
    fleet.ready()
    fleet.install(packages.deb)
    fleet.run("gpuprestart enable sglang-qwen; systemctl daemon-reload; systemctl start sglang-qwen")
    fleet.node.write("/etc/systemd/system/other.service", f"[Service]\n{HOOK}\nExecStart=/bin/sleep 1000\n")
    fleet.node.systemctl("daemon-reload")
    edited = "[owners]\ndedicated = true\n"
    fleet.node.write("/etc/gpuprestart/policy.toml", edited)

    said = fleet.apt("remove", "gpuprestart")

    assert DROP_IN in said and "systemctl daemon-reload" in said
    assert not fleet.node.exists(DROP_IN)
    assert "/etc/systemd/system/other.service" in said
    assert fleet.node.read("/etc/gpuprestart/policy.toml") == edited
    assert fleet.node.exists(f"/etc/gpuprestart/{UNIT}.toml")
    assert not fleet.node.exists("/usr/lib/gpuprestart")
    # Nobody has told systemd: what it has loaded still names the hook, so it refuses rather than start unproved.
    assert fleet.state() == "active" and fleet.changed_on_disk(UNIT)
    assert fleet.run("systemctl restart sglang-qwen", check=False).returncode != 0
    wait_for(lambda: "203/EXEC" in fleet.explained(), timeout=20, what="systemd says why")
    fleet.node.systemctl("daemon-reload")
    fleet.run("systemctl restart sglang-qwen")
    assert fleet.state() == "active"
    # Where an administrator wrote the line, the line has to go: a hook that is missing is no proof.
    assert fleet.run("systemctl start other", check=False).returncode != 0
    wait_for(lambda: "203/EXEC" in fleet.explained("other.service"), timeout=20, what="systemd says why")

    fleet.install(packages.deb)
    assert fleet.node.read("/etc/gpuprestart/policy.toml") == edited


def test_a_program_that_does_not_run_can_be_removed(fleet: Fleet, packages: Packages) -> None:
    fleet.ready()
    fleet.install(packages.deb)
    fleet.run("gpuprestart enable sglang-qwen")
    fleet.node.write("/usr/lib/gpuprestart/gpuprestart/enabling.py", "raise ImportError('a disk has failed')\n")
    said = fleet.apt("remove", "gpuprestart")
    assert "rm /etc/systemd/system/UNIT.d/50-gpuprestart.conf" in said
    # Not taken away, so its unit is named among those that do not start any more.
    assert f"    {DROP_IN}" in said
    assert not fleet.node.exists("/usr/lib/gpuprestart")


def test_a_purge_leaves_nothing(fleet: Fleet, packages: Packages) -> None:
    fleet.ready()
    before = fleet.files()
    fleet.install(packages.deb)
    fleet.policy()
    fleet.node.write("/etc/gpuprestart/policy.toml", "[owners]\ndedicated = true\n")
    fleet.run("gpuprestart enable sglang-qwen; systemctl daemon-reload; systemctl restart sglang-qwen")
    assert fleet.node.exists("/run/gpuprestart/claims")
    fleet.node.systemctl("stop", UNIT)

    fleet.apt("purge", "gpuprestart")

    assert difference(before, fleet.files()) == set()


def test_a_purge_takes_nothing_that_is_not_its_own(fleet: Fleet, packages: Packages) -> None:
    fleet.ready()
    fleet.install(packages.deb)
    fleet.node.write("/etc/gpuprestart/notes.txt", "why GPU 3 is not for qwen\n")
    fleet.node.write(f"{DROP_IN.rpartition('/')[0]}/10-own.conf", "[Service]\nRestartSec=30s\n")
    fleet.apt("purge", "gpuprestart")
    assert fleet.run("ls /etc/gpuprestart").stdout == "notes.txt\n"
    assert fleet.node.exists(f"{DROP_IN.rpartition('/')[0]}/10-own.conf")
