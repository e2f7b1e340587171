"""The simulated node is what it says it is: real systemd, real sessions, devices of their own, and nothing
of it left afterwards, however it ended. It tests the stage, not gpuprestart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import pytest

from tests.node import image, machine
from tests.node.machine import Chroot, Node, NodeError, wait_for

pytestmark = pytest.mark.node


def needs(reason: str | None) -> None:
    """Skip with the reason where there can be no node, but never in CI: there it would pass unseen."""
    if reason is not None:
        if os.environ.get("CI"):
            pytest.fail(f"no simulated node: {reason}")
        pytest.skip(f"no simulated node: {reason}")


@pytest.fixture(scope="session")
def node() -> Iterator[Node]:
    needs(machine.can_boot())
    with Node(product=False, driver=False) as running:
        yield running


@pytest.fixture(scope="module")
def chroot() -> Iterator[Chroot]:
    needs(machine.can_chroot())
    with Chroot(product=False, driver=False) as running:
        yield running


def remains(name: str) -> list[str]:
    """All on the host that carries a node's name: files, cgroups, processes, mounts in any namespace."""
    found = [str(path) for path in image.cache_directory().glob(f"nodes/{name}")]
    found += [str(parent / name) for _, parent in machine._cgroup_parents() if (parent / name).exists()]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            # A process can end between any two of these lines.
            with suppress(OSError):
                if "\nState:\tZ" in (entry / "status").read_text():
                    # Dead; only its new parent, which need not be quick, has not looked yet.
                    continue
                if name in (entry / "mountinfo").read_text() or name in (entry / "cgroup").read_text():
                    found.append(f"process {entry.name}: {(entry / 'cmdline').read_text()}")
    return found


# ---- what it is


def test_systemd_is_pid_1_and_everything_is_up(node: Node) -> None:
    assert node.read("/proc/1/comm") == "systemd\n"
    assert node.systemctl("is-system-running", check=False).stdout.strip() in ("running", "degraded")
    for unit in ("systemd-journald.service", "systemd-logind.service", "dbus.service"):
        assert node.show(unit, "ActiveState") == {"ActiveState": "active"}
    # Processes that systemd starts see themselves in the unified hierarchy of the node.
    unit = node.start(["sh", "-c", "grep ^0:: /proc/self/cgroup; stat -f -c %T /sys/fs/cgroup"], wait=True)
    assert [entry["MESSAGE"] for entry in node.journal(unit=unit) if entry["_TRANSPORT"] == "stdout"] == [
        f"0::/system.slice/{unit}",
        "cgroup2fs",
    ]


def test_python_of_the_node_has_what_the_product_needs(node: Node) -> None:
    program = "import importlib.metadata as m, psutil, systemd.journal, pynvml; print(m.version('nvidia-ml-py'))"
    assert node.run(["/usr/bin/python3", "-I", "-c", program]).stdout == "13.615.71\n"
    assert node.run(["gpustat", "--version"]).stdout == "gpustat 1.1.1\n"


def test_a_service_runs_as_its_user_and_its_end_is_seen(node: Node) -> None:
    unit = node.start(["sleep", "600"], user="model", env={"COLOUR": "green"}, properties=["KillMode=process"])
    (pid,) = node.unit_pids(unit)
    assert node.show(unit, "MainPID", "ActiveState", "KillMode") == {
        "MainPID": str(pid),
        "ActiveState": "active",
        "KillMode": "process",
    }
    assert node.run(["stat", "-c", "%U", f"/proc/{pid}"]).stdout == "model\n"
    assert "COLOUR=green" in node.read(f"/proc/{pid}/environ").split("\0")
    node.run(["kill", "-KILL", str(pid)])
    node.wait_for(lambda: node.show(unit, "Result")["Result"] == "signal", timeout=5, what="the unit failed")
    assert node.unit_pids(unit) == []


def test_start_says_when_a_command_cannot_be_started(node: Node) -> None:
    with pytest.raises(NodeError, match="no-such-program"):
        node.start(["/no-such-program"])
    node.start(["false"], unit="fails", wait=True, check=False)
    assert node.show("fails.service", "Result") == {"Result": "exit-code"}


def test_a_scope_holds_a_process_that_no_service_owns(node: Node) -> None:
    scope = node.start_scope(["sleep", "600"], unit="docker-" + "ab" * 32, user="bench")
    (pid,) = node.unit_pids(scope)
    assert node.run(["ps", "-o", "ppid=,user=,comm=", "-p", str(pid)]).stdout.split() == [
        "1",
        "bench",
        "sleep",
    ]
    assert f"0::/system.slice/{scope}" in node.read(f"/proc/{pid}/cgroup").splitlines()


def test_the_journal_can_be_read_at_once(node: Node) -> None:
    program = (
        "from systemd import journal\n"
        "journal.send('two\\nlines', SYSLOG_IDENTIFIER='reader', RAW=b'\\xff', A='x' * 9000)\n"
    )
    node.run(["python3", "-c", program])
    (entry,) = node.journal(SYSLOG_IDENTIFIER="reader")
    assert entry["MESSAGE"] == "two\nlines"
    assert entry["RAW"].encode(errors="surrogateescape") == b"\xff"
    assert len(entry["A"]) == 9000
    assert node.journal("--lines=1", SYSLOG_IDENTIFIER="reader") == [entry]
    assert node.journal(SYSLOG_IDENTIFIER="nobody") == []


def test_a_login_session_is_abandoned_when_its_leader_is_gone(node: Node) -> None:
    session = node.login_session("alice", "nohup sleep 600 >/dev/null 2>&1 & exec sleep 700")
    assert node.show(session.scope, "ActiveState", "SubState") == {
        "ActiveState": "active",
        "SubState": "running",
    }
    shown = node.run(["loginctl", "show-session", session.id]).stdout.splitlines()
    assert "Name=alice" in shown
    assert f"Scope={session.scope}" in shown
    job = int(node.run(["pgrep", "-u", "alice", "-f", "sleep 600"]).stdout)
    # Beside the two there is systemd's PAM watcher, which ends with the leader.
    assert {session.leader, job} < set(node.unit_pids(session.scope))

    node.end_session(session)

    assert node.show(session.scope, "ActiveState", "SubState") == {
        "ActiveState": "active",
        "SubState": "abandoned",
    }
    assert node.unit_pids(session.scope) == [job]
    assert node.run(["ps", "-o", "ppid=,user=", "-p", str(job)]).stdout.split() == ["1", "alice"]
    node.run(["kill", str(job)])
    node.wait_for(
        lambda: node.show(session.scope, "ActiveState")["ActiveState"] == "inactive",
        timeout=10,
        what="scope gone",
    )


def test_a_session_with_nothing_left_in_it_is_gone_with_its_leader(node: Node) -> None:
    session = node.login_session("alice", "exec sleep 700")
    node.end_session(session)
    assert node.show(session.scope, "ActiveState") == {"ActiveState": "inactive"}


def test_a_user_manager_runs_services_of_its_own(node: Node) -> None:
    command = "systemd-run --user --quiet --unit=vllm sleep 600; exec sleep 700"
    session = node.login_session("alice", command)
    cgroup = "/user.slice/user-5002.slice/user@5002.service/app.slice/vllm.service"
    procs = f"/sys/fs/cgroup{cgroup}/cgroup.procs"
    pid = node.wait_for(lambda: node.run(["cat", procs], check=False).stdout.strip(), timeout=10, what="vllm.service")
    assert f"0::{cgroup}" in node.read(f"/proc/{pid}/cgroup").splitlines()
    assert node.show("vllm.service", "LoadState") == {"LoadState": "not-found"}
    node.end_session(session)


def test_devices_open_for_everybody_and_each_has_its_own_number(node: Node) -> None:
    program = (
        "import os\n"
        "for name in [*(f'nvidia{i}' for i in range(8)), 'nvidiactl']:\n"
        "    fd = os.open('/dev/' + name, os.O_RDWR | os.O_NOCTTY)\n"
        "    number = os.fstat(fd).st_rdev\n"
        "    print(name, os.major(number), os.minor(number))\n"
    )
    wanted = [f"nvidia{index} 4 {40 + index}" for index in range(8)] + ["nvidiactl 4 56"]
    assert node.run(["python3", "-c", program], user="model").stdout.splitlines() == wanted
    unit = node.start(["python3", "-c", program], user="model", wait=True)
    assert [e["MESSAGE"] for e in node.journal(unit=unit) if e["_TRANSPORT"] == "stdout"] == wanted
    assert not node.exists("/dev/nvidia8")
    assert not node.exists("/dev/nvidia-uvm")


# ---- commands and files


def test_run(node: Node) -> None:
    assert node.run(["cat"], input="ä\n").stdout == "ä\n"
    assert node.run(["sh", "-c", "echo no >&2; exit 3"], check=False).returncode == 3
    with pytest.raises(NodeError, match=r"ended with status 3: no"):
        node.run(["sh", "-c", "echo no >&2; exit 3"])
    assert node.run(["env"], env={"A": "1"}).stdout.splitlines() == [
        *(f"{name}={value}" for name, value in image.CLEAN_ENVIRONMENT.items()),
        "A=1",
    ]
    assert node.run(["id", "-u", "-n"], user="bench").stdout == "bench\n"
    assert node.run(["pwd"]).stdout == "/\n"


def test_run_leaves_no_process_when_its_time_is_up(node: Node) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        node.run(["sh", "-c", "sleep 4321; :"], timeout=0.3)
    node.wait_for(
        lambda: node.run(["pgrep", "-f", "sleep 432[1]"], check=False).stdout == "",
        timeout=2,
        what="sleep has ended",
    )


def test_files(node: Node) -> None:
    node.write("/etc/new/folder/file", "a\nb", mode=0o600)
    assert node.read("/etc/new/folder/file") == "a\nb"
    assert node.run(["stat", "-c", "%a %U", "/etc/new/folder/file"]).stdout == "600 root\n"
    assert node.run(["ls", "/etc/new/folder"]).stdout == "file\n"


def test_pids_are_translated_both_ways(node: Node) -> None:
    unit = node.start(["unshare", "--pid", "--fork", "--kill-child", "sleep", "600"])
    # The first is unshare; the second is PID 1 of a namespace below the node's.
    node.wait_for(lambda: len(node.unit_pids(unit)) == 2, timeout=5, what="unshare and its child")
    outer, inner = node.unit_pids(unit)
    for pid in (1, outer, inner):
        host = node.host_pid(pid)
        assert host is not None
        assert node.node_pid(host) == pid
        assert pid in node.pids()
    assert node.host_pid(1) == node.leader
    assert node.node_pid(os.getpid()) is None
    assert node.host_pid(4_000_000) is None
    node.systemctl("kill", "--signal=KILL", unit)


def test_wait_for_gives_the_answer_or_names_what_never_came() -> None:
    answers = iter([0, 0, 7])
    assert wait_for(lambda: next(answers), timeout=5, what="seven") == 7
    with pytest.raises(AssertionError, match=r"the moon: not so within 0\.1 s"):
        wait_for(lambda: None, timeout=0.1, what="the moon")


# ---- options


def test_gpus_uvm_and_other_devices_are_chosen() -> None:
    needs(machine.can_boot())
    with Node(product=False, driver=False, gpus=16, uvm=True, devices={"/dev/nvidia-caps/nvidia-cap1": 58}) as node:
        minors = {path: int(node.run(["stat", "-c", "%T", path]).stdout, 16) for path in node.devices}
        assert minors == {
            **{f"/dev/nvidia{index}": 40 + index for index in range(16)},
            "/dev/nvidiactl": 56,
            "/dev/nvidia-uvm": 57,
            "/dev/nvidia-caps/nvidia-cap1": 58,
        }
    with pytest.raises(ValueError, match="17"):
        Node(gpus=17)


# ---- one beside the other, and the end


def test_two_nodes_at_once_know_nothing_of_each_other(node: Node) -> None:
    listen = (
        "import socket, time\n"
        "server = socket.create_server(('127.0.0.1', 30000))\n"
        "print('up', flush=True)\n"
        "time.sleep(99)\n"
    )
    with Node(product=False, driver=False) as other:
        for each in (node, other):
            each.start(["python3", "-c", listen], unit="twin")
            each.wait_for(
                lambda each=each: any(e["MESSAGE"] == "up" for e in each.journal(unit="twin.service")),  # type: ignore[misc]
                timeout=10,
                what="the port is taken",
            )
        hosts = [each.host_pid(each.unit_pids("twin.service")[0]) for each in (node, other)]
        assert None not in hosts
        assert hosts[0] != hosts[1]
        assert other.read("/etc/machine-id") != node.read("/etc/machine-id")
        other.write("/etc/only-here", "")
        other.systemctl("stop", "twin.service")
        assert len(node.unit_pids("twin.service")) == 1
        assert not node.exists("/etc/only-here")
    assert len(node.unit_pids("twin.service")) == 1
    node.systemctl("stop", "twin.service")


@pytest.mark.parametrize("kind", [Node, Chroot])
def test_nothing_is_left_after_the_end(kind: type[machine.Machine]) -> None:
    needs(machine.can_boot() if kind.boots else machine.can_chroot())
    with kind(product=False, driver=False) as running:
        name = running.name
        assert remains(name) != []
        running.run(["sh", "-c", "trap '' TERM HUP; setsid sleep 600 >/dev/null 2>&1 &"])
        if isinstance(running, Node):
            running.start(["sh", "-c", "trap '' TERM; sleep 600; sleep 600"])
    assert remains(name) == []
    with pytest.raises(NodeError, match="not running"):
        running.run(["true"])
    running.close()


def test_an_exception_ends_the_node_too() -> None:
    needs(machine.can_boot())
    with pytest.raises(KeyboardInterrupt), Node(product=False, driver=False) as node:
        raise KeyboardInterrupt
    assert remains(node.name) == []


def test_a_boot_that_fails_says_why_and_leaves_nothing() -> None:
    needs(machine.can_boot())
    node = Node(product=False, driver=False, nspawn=["--bind=/no/such/file"])
    with pytest.raises(NodeError, match="/no/such/file"):
        node.boot()
    assert remains(node.name) == []


def test_a_node_whose_pid_1_ends_is_reported_as_gone() -> None:
    needs(machine.can_boot())
    with Node(product=False, driver=False) as node:
        os.kill(node.leader, signal.SIGKILL)
        with pytest.raises(NodeError, match="the node has gone"):
            wait_for(lambda: node.run(["true"], check=False) and None, timeout=20, what="gone")
    assert remains(node.name) == []


OWNER = """
import sys, time
from tests.node.machine import Node
node = Node(product=False, driver=False)
node.boot()
print(node.name, node._keeper.pid, flush=True)
time.sleep(600)
"""


def start_owner() -> tuple[subprocess.Popen[str], str, int]:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        cwd=machine.REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert owner.stdout is not None
    name, keeper = owner.stdout.readline().split()
    owner.stdout.close()
    return owner, name, int(keeper)


def test_nothing_is_left_when_the_owner_is_killed() -> None:
    needs(machine.can_boot())
    owner, name, _ = start_owner()
    owner.kill()
    owner.wait()
    wait_for(lambda: not remains(name), timeout=10, what="its keeper took the node down")


def test_the_next_boot_removes_what_two_killed_processes_left(node: Node) -> None:
    owner, name, keeper = start_owner()
    os.kill(keeper, signal.SIGSTOP)
    owner.kill()
    os.kill(keeper, signal.SIGKILL)
    owner.wait()
    wait_for(lambda: not any("process" in line for line in remains(name)), timeout=10, what="the node is dead")
    # Its cgroups and its folder are still there, unless another run's boot was faster than ours.
    with Node(product=False, driver=False):
        assert remains(name) == []
    assert node.read("/proc/1/comm") == "systemd\n"


# ---- the plain chroot


def test_the_chroot_has_the_same_root_and_devices(chroot: Chroot) -> None:
    assert chroot.read("/etc/hostname") == "gpunode\n"
    assert chroot.run(["cat", "/proc/self/comm"], user="model").stdout == "cat\n"
    chroot.run(["python3", "-c", "import os; os.open('/dev/nvidia7', os.O_RDWR | os.O_NOCTTY)"], user="model")
    chroot.write("/etc/gpuprestart/policy.toml", "x")
    assert chroot.read("/etc/gpuprestart/policy.toml") == "x"
    assert chroot.run(["sh", "-c", "cd; pwd; echo $PPID; ls /proc/1/exe"]).stdout.startswith("/root\n")
    assert chroot.run(["sh", "-c", ": > /dev/null; head -c 1 /dev/zero | wc -c"]).stdout.strip() == "1"
    assert "state UNKNOWN" in chroot.run(["ip", "link", "show", "up", "dev", "lo"]).stdout
    assert not chroot.exists("/run/systemd/system")


def test_the_chroot_reaps_orphans(chroot: Chroot) -> None:
    pid = chroot.run(["sh", "-c", "setsid sleep 0.2 >/dev/null 2>&1 & echo $!"]).stdout.strip()
    chroot.wait_for(lambda: not chroot.exists(f"/proc/{pid}"), timeout=5, what="the orphan was reaped")


# ---- the layers


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "gpuprestart"


def test_a_layer_is_built_once_even_if_two_want_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Path] = []

    def build(wanted: image.Recipe, target: Path, *, keep: IO[str]) -> None:
        built.append(target)
        time.sleep(0.3)
        (target / "etc").mkdir()

    monkeypatch.setattr(image, "build_base", build)
    threads = [threading.Thread(target=lambda: image.layers(driver=False).close()) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    held = image.layers(driver=False)
    assert [path.parent for path in held.paths] == [cache]
    assert (held.paths[0] / "etc").is_dir()
    assert held.paths[0].stat().st_mode & 0o777 == 0o755
    held.close()


def test_an_interrupted_build_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(wanted: image.Recipe, target: Path, *, keep: IO[str]) -> None:
        (target / "half").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(image, "build_base", build)
    (cache / "building-killed").mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt):
        image.layers(driver=False)
    assert [path.name for path in cache.iterdir()] == ["lock"]


def test_layers_of_older_recipes_go_unless_they_are_in_use(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "build_base", lambda wanted, target, *, keep: (target / "etc").mkdir())

    def present() -> list[Path]:
        return sorted(path for path in cache.iterdir() if path.is_dir())

    first = image.layers(driver=False)
    monkeypatch.setattr(image, "SCRIPT", "something else")
    second = image.layers(driver=False)
    trixie = image.layers(release="trixie", driver=False)
    assert present() == sorted(first.paths + second.paths + trixie.paths)
    first.close()
    image.layers(driver=False).close()
    assert present() == sorted(second.paths + trixie.paths)
    assert len(list(cache.glob("*.lock"))) == 2
    second.close()
    trixie.close()


def test_a_release_that_is_no_name_is_refused(cache: Path) -> None:
    with pytest.raises(image.ImageError, match="code name"):
        image.layers(release="../etc", driver=False)
