"""What the policy asks besides clean GPUs: ports, processes, memory, disk, with real sockets and processes."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import pytest

from .hung import Hung
from .scene import TERM, Run, Scene

pytestmark = pytest.mark.node

#: Listens on these addresses, in this many processes, and says so by a file.
LISTENER = """
import os, signal, socket, sys, time
workers, ready, *addresses = sys.argv[1:]
signal.signal(signal.SIGTERM, signal.SIG_DFL)
kept = []
for address in addresses:
    host, _, port = address.rpartition("/")
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((host, int(port)))
    made.listen()
    kept.append(made)
for _ in range(int(workers) - 1):
    if os.fork() == 0:
        break
open(f"{ready}.{os.getpid()}", "w").close()
signal.pause()
"""


@pytest.fixture
def port() -> int:
    """One that no other test has."""
    return 20000 + secrets.randbelow(10000)


def listener(scene: Scene, *addresses: str, unit: str, workers: int = 1, properties: Sequence[str] = ()) -> list[int]:
    """A service whose processes listen, and their PIDs once they do."""
    ready = f"/tmp/{unit}"
    command = ["/usr/bin/python3", "-c", LISTENER, str(workers), ready, *addresses]
    scene.node.start(command, unit=unit, user="model", properties=["KillMode=process", *properties])

    def listening() -> bool:
        done = scene.node.run(["sh", "-c", f"ls {ready}.* | wc -l"], check=False)
        return done.stdout.strip() == str(workers)

    scene.node.wait_for(listening, timeout=20, what=f"{unit} listens")
    return scene.node.unit_pids(unit)


def orphans(scene: Scene, *addresses: str, workers: int = 2) -> list[int]:
    """Listeners left by a service that has failed."""
    unit = scene.name("old")
    listener(scene, *addresses, unit=unit, workers=workers)
    return sorted(scene.abandon(unit))


def started(scene: Scene, require: str, *, more: str = "") -> tuple[bool, Run]:
    scene.policy(f"[deadline]\n{TERM}total = '15 s'\n[require]\n{require}\n")
    unit = scene.server(gpus="0", more=more)
    went = scene.start(unit)
    return went, scene.verdict(unit)


def refused(scene: Scene, require: str, *words: str) -> Run:
    went, run = started(scene, require)
    assert not went and (run.exit, run.outcome) == (75, "precondition")
    (record,) = scene.records(run, "precondition-failed")
    for word in words:
        assert word in run.verdict["message"] and word in str(record["MESSAGE"])
    assert run.verdict["preconditions"][0]["check"] == require.partition(" ")[0] == record["GPUPRESTART_CHECK"]
    return run


# Ports ---------------------------------------------------------------------------------------------------------------


def test_a_port_that_is_free_is_in_nobodys_way(scene: Scene, port: int) -> None:
    went, run = started(scene, f"ports = [{port}]")
    assert went and (run.exit, run.outcome, run.verdict["preconditions"]) == (0, "clean", [])


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::", "::ffff:127.0.0.1"])
def test_a_port_on_which_somebody_alive_listens(scene: Scene, port: int, host: str) -> None:
    unit = scene.name("web")
    (pid,) = listener(scene, f"{host}/{port}", unit=unit)
    run = refused(scene, f"ports = [{port}]", f"port {port} (require.ports) is in use by python3[{pid}]", unit)
    assert f"systemctl stop {unit}" in run.verdict["hints"][0]
    assert run.holder(pid)["occupies"] == [f"port {port}"] and run.holder(pid)["action"] == "refuse"
    assert scene.alive(pid) and scene.signals(run) == []


def test_the_stale_are_ended_before_a_port_is_looked_at(scene: Scene, port: int) -> None:
    listener(scene, f"0.0.0.0/{port}", unit=scene.name("web"))
    _, stale = scene.orphans("--open", "0", "--gpu", "0", "--mib", "1520")
    run = refused(scene, f"ports = [{port}]", f"port {port}")
    assert run.fates == {stale[0]: "terminated"}


def test_a_port_that_the_dead_have_left_is_taken_back(scene: Scene, port: int) -> None:
    pids = orphans(scene, f"0.0.0.0/{port}", workers=3)
    went, run = started(scene, f"ports = [{port}]")
    assert went and (run.exit, run.outcome) == (0, "cleaned")
    assert run.fates == dict.fromkeys(pids, "terminated")
    assert {record["HOLDER_PID"] for record in scene.records(run, "holder-signalled")} == {str(pid) for pid in pids}


def test_a_socket_of_many_processes_is_all_of_theirs(scene: Scene, port: int) -> None:
    """They are ended at once, and not taken for one that comes back."""
    pids = orphans(scene, f"0.0.0.0/{port}", workers=20)
    went, run = started(scene, f"ports = [{port}]")
    assert went and run.outcome == "cleaned" and len(run.fates) == len(pids) >= 19


def test_what_the_last_run_of_the_unit_left_on_its_port(scene: Scene, port: int) -> None:
    scene.policy(f"[deadline]\n{TERM}[require]\nports = [{port}]\n")
    scene.node.write("/tmp/listener.py", LISTENER)
    server = f"/usr/bin/python3 /tmp/listener.py 2 /tmp/ready-{port} 0.0.0.0/{port}"
    unit = scene.server(gpus="0", server=server, more="KillMode=process")
    assert scene.start(unit)
    scene.node.wait_for(lambda: len(scene.node.unit_pids(unit)) == 2, timeout=20, what="both processes are there")
    (left,) = scene.abandon(unit)
    assert scene.start(unit) and scene.verdict(unit).fates == {left: "terminated"}


def test_a_connection_that_is_over_is_no_listener(scene: Scene, port: int) -> None:
    talk = f"""
import socket
a = socket.create_server(("127.0.0.1", {port})); b = socket.create_connection(("127.0.0.1", {port}))
c, _ = a.accept(); c.close(); b.close(); a.close()
"""
    scene.node.run(["/usr/bin/python3", "-c", talk])
    waiting = scene.node.run(["sh", "-c", f"grep -c ':{port:04X} .* 06 ' /proc/net/tcp"], check=False).stdout
    assert waiting.strip() == "1"
    went, run = started(scene, f"ports = [{port}]")
    assert went and run.outcome == "clean"


def test_another_network_is_none_of_ours(scene: Scene, port: int) -> None:
    listener(scene, f"0.0.0.0/{port}", unit=scene.name("web"), properties=["PrivateNetwork=yes"])
    went, run = started(scene, f"ports = [{port}]")
    assert went and run.outcome == "clean"


@pytest.mark.parametrize("own", [True, False])
def test_a_socket_unit_listens_for_its_service(scene: Scene, port: int, own: bool) -> None:
    """systemd itself has the port then, for our server or for another."""
    unit, other = scene.server(gpus="0", server="/bin/sleep 1000"), scene.server(gpus="1")
    socket = (unit if own else other).replace(".service", ".socket")
    scene.policy(f"[deadline]\n{TERM}[require]\nports = [{port}]\n")
    scene.node.write(f"/etc/systemd/system/{socket}", f"[Socket]\nListenStream={port}\n")
    scene.node.systemctl("daemon-reload")
    scene.node.systemctl("start", socket)
    try:
        assert scene.start(unit) is own
        run = scene.verdict(unit)
        if not own:
            assert run.outcome == "precondition" and "systemd itself" in run.verdict["message"]
            assert "systemctl list-sockets" in run.verdict["hints"][0]
        assert scene.signals(run) == []
    finally:
        scene.node.systemctl("stop", socket)


@pytest.mark.parametrize("own", ["has failed", "has a path that ends like it", "has another address", "shares it"])
def test_a_socket_unit_of_ours_excuses_nobody_else(scene: Scene, port: int, own: str) -> None:
    unit, other = (scene.server(gpus=gpus) for gpus in "01")
    ours, theirs = (each.replace(".service", ".socket") for each in (unit, other))
    first, second = {
        "has failed": (f"{port}", f"{port}"),
        "has a path that ends like it": (f"{port}", f"/run/{unit}:{port}"),
        "has another address": (f"127.0.0.1:{port}", f"127.0.0.2:{port}"),
        "shares it": (f"{port}\nReusePort=yes", f"{port}\nReusePort=yes"),
    }[own]
    scene.policy(f"[deadline]\n{TERM}[require]\nports = [{port}]\n")
    for socket, listen in ((theirs, first), (ours, second)):
        scene.node.write(f"/etc/systemd/system/{socket}", f"[Socket]\nListenStream={listen}\n")
    scene.node.systemctl("daemon-reload")
    scene.node.systemctl("start", theirs)
    started_too = scene.node.run(["systemctl", "start", ours], check=False).returncode == 0
    assert started_too is (own != "has failed")
    try:
        assert not scene.start(unit)
        run = scene.verdict(unit)
        assert run.outcome == "precondition" and "is in use by systemd itself" in run.verdict["message"]
    finally:
        scene.node.run(["systemctl", "stop", theirs, ours], check=False)


def test_check_tells_who_has_the_port_and_touches_nobody(scene: Scene, port: int) -> None:
    pids = orphans(scene, f"0.0.0.0/{port}")
    scene.policy(f"[require]\nports = [{port}]\n")
    unit = scene.server(gpus="0")
    run = scene.check("--unit", unit)
    assert (run.exit, run.outcome) == (75, "not-freed") and run.holder(pids[0])["action"] == "kill"
    assert scene.alive(pids)
    shown = scene.node.run(["/usr/bin/gpuprestart", "check", "--unit", unit], check=False).stdout
    assert f"port {port}" in shown


@pytest.mark.parametrize("taken", [False, True])
def test_a_server_without_a_gpu_needs_its_port_too(scene: Scene, port: int, taken: bool) -> None:
    if taken:
        listener(scene, f"127.0.0.1/{port}", unit=scene.name("web"))
    scene.policy(f"[require]\nports = [{port}]\n")
    unit = scene.server(gpus="")
    assert scene.start(unit) is not taken
    run = scene.verdict(unit)
    assert (run.outcome, run.exit) == (("precondition", 75) if taken else ("none", 0))


# Processes -----------------------------------------------------------------------------------------------------------


def test_a_process_that_must_not_run(scene: Scene, port: int) -> None:
    unit = scene.name("web")
    (pid,) = listener(scene, f"127.0.0.1/{port}", unit=unit)
    run = refused(scene, f"processes = ['127\\.0\\.0\\.1/{port}']", f"python3[{pid}]", unit)
    assert scene.alive(pid) and scene.signals(run) == []


def test_a_process_that_must_not_run_and_is_stale(scene: Scene, port: int) -> None:
    pids = orphans(scene, f"127.0.0.1/{port}", workers=3)
    went, run = started(scene, f"processes = ['127\\.0\\.0\\.1/{port}']")
    assert went and run.outcome == "cleaned" and run.fates == dict.fromkeys(pids, "terminated")


def test_no_process_of_this_start_is_one_that_must_not_run(scene: Scene) -> None:
    """The pattern stands in the command line of a shell around the hook."""
    scene.policy("[require]\nprocesses = ['sglang\\.launch_server']\n")
    unit = scene.server(gpus="0", command="/bin/sh -c '/usr/bin/gpuprestart clean --json; : sglang.launch_server'")
    assert scene.start(unit) and scene.verdict(unit).outcome == "clean"


def test_who_does_not_answer_proves_nothing_of_anybody_else(scene: Scene) -> None:
    """The pattern takes for ever on one command line; and there is more than one look, for somebody stale."""
    old = scene.name("old")
    script = "sleep 1001 & sleep 1002 & exit 1"
    # It may be over before systemd-run has seen it start.
    scene.node.start(["/bin/sh", "-c", script], unit=old, user="model", properties=["KillMode=process"], check=False)
    scene.await_state(old, "failed")
    others = scene.node.unit_pids(old)
    hard = scene.name("hard")
    scene.node.start(["/bin/sleep", "1000", "0" * 45], unit=hard)
    _, stale = scene.orphans("--open", "0", "--gpu", "0", "--mib", "1520")
    went, run = started(scene, "processes = ['(0+0+)+y']")
    assert not went and run.outcome == "precondition" and run.fates == {stale[0]: "terminated"}
    (main,) = scene.node.unit_pids(hard)
    assert run.verdict["message"] == (
        f"the command line of PID {main} gave no answer, so it may be one of require.processes"
    )
    assert len(others) == 2 and scene.alive(others)


# Memory and disk -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("require", "words"),
    [
        ('host_memory = "900 TiB"', ["of memory available", "require.host_memory"]),
        ('disk = { "/var/log" = "900 TiB" }', ["/var/log has", "require.disk"]),
        ('disk = { "/no/such" = "1 MiB" }', ["/no/such cannot be measured: No such file"]),
    ],
)
def test_what_the_machine_has_not(scene: Scene, require: str, words: Sequence[str]) -> None:
    run = refused(scene, require, *words)
    assert run.verdict["preconditions"][0]["file"] is False


def test_what_the_machine_has(scene: Scene) -> None:
    went, run = started(scene, 'host_memory = "1 MiB"\ndisk = { "/var/log" = "1 MiB", "/tmp" = "1 B" }')
    assert went and run.outcome == "clean"


def test_few_inodes(scene: Scene) -> None:
    scene.node.run(["sh", "-c", "mkdir -p /run/few && mount -t tmpfs -o nr_inodes=20 few /run/few"])
    try:
        refused(scene, 'disk = { "/run/few" = "1 MiB" }', "/run/few has", "inodes free")
    finally:
        scene.node.run(["umount", "/run/few"])


def test_a_disk_that_does_not_answer_is_not_waited_for(scene: Scene) -> None:
    scene.policy("[deadline]\ntotal = '1500 ms'\n[require]\ndisk = { '/run/hung/file' = '1 B' }\n")
    unit = scene.server(gpus="0")
    with Hung(scene.node.leader) as hung:
        hung.hang()
        assert not scene.start(unit)
        run = scene.verdict(unit)
    assert run.outcome == "precondition" and "/run/hung/file gave no answer" in run.verdict["message"]
    assert run.verdict["duration_s"] < 4


def test_memory_that_cannot_be_told(scene: Scene) -> None:
    scene.policy("[require]\nhost_memory = '1 MiB'\n")
    unit = scene.server(gpus="0", plus=False, more="User=root\nProcSubset=pid\n")
    assert not scene.start(unit)
    run = scene.verdict(unit)
    assert (run.outcome, run.exit) == ("precondition", 75) and "memory cannot be told" in run.verdict["message"]


def test_every_requirement_that_is_not_met_is_told(scene: Scene, port: int) -> None:
    listener(scene, f"127.0.0.1/{port}", unit=scene.name("web"))
    went, run = started(scene, f'ports = [{port}]\nhost_memory = "900 TiB"')
    assert not went and [each["check"] for each in run.verdict["preconditions"]] == ["ports", "host_memory"]
    assert len(scene.records(run, "precondition-failed")) == 2
