"""Very many processes, descriptors, holders and GPUs, and processes that are others from one look to the next (D10)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pytest

from tests.node.machine import Node
from tests.node.scene import Run, Scene

GPUS, SLICES = 16, 7

#: Opens so many files, and has a child for each list of nodes, which has all of them open too and does nothing else,
#: or calls itself something else all the time.
CROWD = """
import json, os, random, signal, socket, sys, time
sys.path.insert(0, "/opt/simgpu")
from simgpu_process import notify
files, nodes, leave, names = json.load(open(sys.argv[1]))
kept = [os.open("/dev/null", os.O_RDWR) for _ in range(files // 4)]
kept += [end for _ in range(files // 8) for end in os.pipe()]
kept += [end.detach() for _ in range(files // 8) for end in socket.socketpair()]
kept += [os.open("/etc/passwd", os.O_RDONLY) for _ in range(files - len(kept))]
read, write = os.pipe()
for each in nodes:
    if os.fork() == 0:
        os.close(read)
        for path in each:
            os.open(path, os.O_RDWR | os.O_NOCTTY)
        os.write(write, b".")
        os.close(write)
        comm = os.open("/proc/self/comm", os.O_WRONLY) if names else -1
        random.seed(os.getpid())
        while names:
            os.write(comm, random.choice(names).encode())
            time.sleep(random.uniform(0.5, 1.5))
        signal.pause()
os.close(write)
while os.read(read, 65536):
    pass
if leave:
    sys.exit(1)
notify("READY=1")
signal.pause()
"""

#: Keeps so many terminals, and has links to them where NVIDIA has its nodes: they open, each with a number of its own.
CAPABILITIES = """
import os, signal, sys
sys.path.insert(0, "/opt/simgpu")
from simgpu_process import notify
os.makedirs("/dev/nvidia-caps", exist_ok=True)
for number in sys.argv[1:]:
    _, slave = os.openpty()
    os.fchmod(slave, 0o666)
    os.symlink(os.ttyname(slave), f"/dev/nvidia-caps/nvidia-cap{number}")
    os.close(slave)
notify("READY=1")
signal.pause()
"""


@pytest.fixture(scope="module")
def node(boots: None) -> Iterator[Node]:
    """A node with as many GPUs as there can be."""
    with Node(gpus=GPUS) as booted:
        booted.write("/run/t-crowd.py", CROWD)
        yield booted


@pytest.fixture(autouse=True)
def before(scene: Scene) -> None:
    scene.node.run(["rm", "-rf", "/run/gpuprestart", "/run/t-out"])


# Many ----------------------------------------------------------------------------------------------------------------

#: Processes, the descriptors of each, and how many of them hold something.
PROCESSES, FILES, HOLDERS = 4000, 65, 200

#: A verdict on so many is longer than what journald takes for a line.
OUT = "StandardOutput=file:/run/t-out\nStandardError=journal\n"


@pytest.fixture
def instances(scene: Scene) -> Iterator[list[list[str]]]:
    """All GPUs in seven instances each, with their capabilities; the UUIDs of the instances."""
    scene.reset(gpus=GPUS)
    uuids = [scene.gpu.ask("mig", gpu=gpu, slices=[1] * SLICES)["uuids"] for gpu in range(GPUS)]
    numbers = [(gpu, instance, _number(gpu, instance)) for gpu in range(GPUS) for instance in range(SLICES)]
    lines = "".join(f"gpu{gpu}/gi{instance + 1}/access {number}\n" for gpu, instance, number in numbers)
    keeper = scene.name("caps")
    scene.node.run(["mount", "-t", "tmpfs", "tmpfs", "/proc/driver"])
    try:
        scene.node.write("/proc/driver/nvidia-caps/mig-minors", lines)
        argv = ["python3", "-c", CAPABILITIES, *(str(number) for _, _, number in numbers)]
        scene.node.start(argv, unit=keeper, properties=["Type=notify"])
        yield uuids
    finally:
        scene.node.run(["rm", "-rf", "/dev/nvidia-caps"])
        scene.node.run(["umount", "/proc/driver"])


@pytest.mark.case("D10")
def test_many_processes_descriptors_holders_and_instances(scene: Scene, instances: list[list[str]]) -> None:
    """The same answers as of one: who is stale is ended, and nobody else is, however many there are."""
    scene.policy("[deadline]\nterm = '1 s'\n")
    last = GPUS - 1
    everything = [path for gpu in range(GPUS) for path in _nodes(gpu, gpu % SLICES)]
    crowds = {
        _crowd(scene, nodes): len(nodes)
        for nodes in (
            [()] * (PROCESSES - HOLDERS),
            # Monitors have what there is, and no memory; a living server has memory on a GPU that is not ours.
            [everything] * 10,
            [_nodes(last, instance) for instance in range(SLICES)],
        )
    }
    places = [(number % GPUS, number // GPUS % SLICES) for number in range(HOLDERS)]
    stale = dict(zip(_left(scene, [_nodes(*place) for place in places]), places))
    for number, (pid, (gpu, instance)) in enumerate(stale.items()):
        # One in ten has memory that NVML lists for nobody.
        kind = "compute" if number % 10 else "none"
        scene.gpu.ask("alloc", gpu=gpu, instance=instance, mib=100, pid=pid, kind=kind)
    living = scene.node.unit_pids(list(crowds)[-1])[1:]
    for instance, pid in enumerate(living):
        scene.gpu.ask("alloc", gpu=last, instance=instance, mib=100, pid=pid)
    assert int(scene.node.run(["sh", "-c", "ls -d /proc/[0-9]* | wc -l"]).stdout) > PROCESSES

    ours = [uuid for gpu in range(last) for uuid in instances[gpu]]
    server = scene.server(gpus=",".join(ours), more=OUT)
    assert scene.start(server)
    run = _verdict(scene)
    assert (run.outcome, run.exit) == ("cleaned", 0)
    assert [gpu["uuid"] for gpu in run.verdict["gpus"]] == ours
    assert all(gpu["clean"] for gpu in run.verdict["gpus"])
    ended = {pid: place for pid, place in stale.items() if place[0] != last}
    assert run.fates == dict.fromkeys(ended, "terminated")
    # What NVML lists on an instance it lists on its GPU as well.
    held = {pid: [uuid for uuid in run.holder(pid)["gpus"] if uuid.startswith("MIG-")] for pid in ended}
    assert held == {pid: [instances[gpu][instance]] for pid, (gpu, instance) in ended.items()}
    assert sorted(scene.signals(run)) == [(pid, "SIGTERM") for pid in sorted(ended)]
    assert scene.alive(stale.keys() - ended)
    # Each has the process that made it, too.
    assert {unit: len(scene.node.unit_pids(unit)) - 1 for unit in crowds} == crowds


# Others from one look to the next ------------------------------------------------------------------------------------

FLAPPING = 3000

#: What stands in the way of everybody who looks for the end of a name, or for a word in it.
NAMES = ["stale", ") R 1 1 1 (", "a\nPRIORITY=0\nb", "python3", "((((((((((((((", "Xorg", "stale)))) Z 1"]


def test_names_that_change_while_they_are_read(scene: Scene) -> None:
    """None of the living is ended for what it is called, and the stale among them are found."""
    scene.policy("[[rule]]\nmatch = { comm = 'stale' }\naction = 'kill'\n")
    crowd = _crowd(scene, [["/dev/nvidia0"]] * FLAPPING, names=NAMES)
    stale = _left(scene, [["/dev/nvidia0"]] * 20, names=NAMES)
    for pid in stale:
        scene.gpu.ask("alloc", gpu=0, mib=100, pid=pid, kind="none")
    server = scene.server(gpus="0", more=OUT)
    assert scene.start(server)
    run = _verdict(scene)
    assert run.outcome == "cleaned" and run.fates == dict.fromkeys(stale, "terminated")
    assert sorted(scene.signals(run)) == [(pid, "SIGTERM") for pid in stale]
    assert len(scene.node.unit_pids(crowd)) == FLAPPING + 1


#: Has the first GPU open until it is told to be another program, of the same interpreter; and is not told to end.
BECOMES = """
import os, signal
os.open("/dev/nvidia0", os.O_RDWR | os.O_NOCTTY)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
other = ["python3", "-c", "import time; time.sleep(1000)", "wanted"]
signal.signal(signal.SIGUSR1, lambda *_: os.execv("/usr/bin/python3", other))
while True:
    signal.pause()
"""

#: Stands before systemctl. The question about a unit that is asked so often comes when something has just happened.
ASKED = """#!/bin/sh
case "$*" in *{unit}*)
    echo >> /run/t-asked
    test $(wc -l < /run/t-asked) != {call} || {{ {then}; }} 1>&2
esac
exec /run/t-systemctl "$@"
"""


@pytest.mark.case("D12")
@pytest.mark.parametrize("signal", ["SIGTERM", "SIGKILL"])
@pytest.mark.parametrize("what", ["moves", "executes"])
def test_a_holder_that_is_another_when_its_signal_is_due(scene: Scene, what: str, signal: str) -> None:
    """While systemd is asked once more, after the last look at it: it has got an owner, or become what no rule ends."""
    if what == "moves":
        wanted, _ = scene.service()
        # A second one stays, or systemd would see its unit empty and forget where that was.
        hold = ["--open", "0", "--gpu", "0", "--mib", "900", "--ignore-term"]
        unit, (pid, _) = scene.orphans(*hold, count=2)
        then = f"echo {pid} > /sys/fs/cgroup/system.slice/{wanted}/cgroup.procs"
        rule = ""
    else:
        unit = wanted = scene.name("live")
        scene.node.start(["python3", "-c", BECOMES, "unwanted"], unit=unit, user="model")
        pid = int(scene.node.show(unit, "MainPID")["MainPID"])
        scene.node.wait_for(lambda: scene.node.exists(f"/proc/{pid}/fd/3"), timeout=10, what="it has the node open")
        scene.gpu.ask("alloc", gpu=0, mib=900, pid=pid)
        then = f"kill -USR1 {pid}; until grep -qw wanted /proc/{pid}/cmdline; do sleep 0.01; done"
        rule = f"[[rule]]\nmatch = {{ unit = '{unit}', cmdline = 'unwanted' }}\naction = 'kill'\n"
    scene.policy(f"[deadline]\nterm = '300 ms'\n{rule}")
    # The first look is before anything is decided; then there is one before each signal.
    call = {"SIGTERM": 2, "SIGKILL": 3}[signal]
    scene.node.run(["rm", "-f", "/run/t-asked"])
    scene.node.run(["cp", "/usr/bin/systemctl", "/run/t-systemctl"])
    scene.node.write("/run/t-wrapped", ASKED.format(unit=unit, call=call, then=then), mode=0o755)
    # Without the +, which would lift the unit's settings.
    more = f"User=root\nBindPaths=/run/t-wrapped:/usr/bin/systemctl\n{OUT}"
    server = scene.server(gpus="0", plus=False, more=more)
    assert not scene.start(server)
    run = _verdict(scene)
    assert (run.outcome, run.exit) == ("protected", 75) and wanted in run.verdict["message"]
    sent = [name for whom, name in scene.signals(run) if whom == pid]
    assert sent == (["SIGTERM"] if signal == "SIGKILL" else [])
    assert scene.alive(pid)


# Their parts ---------------------------------------------------------------------------------------------------------


def _number(gpu: int, instance: int) -> int:
    return 100 + 10 * gpu + instance


def _nodes(gpu: int, instance: int) -> list[str]:
    """What CUDA has open for an instance."""
    return [f"/dev/nvidia{gpu}", f"/dev/nvidia-caps/nvidia-cap{_number(gpu, instance)}"]


def _crowd(scene: Scene, nodes: Sequence[Sequence[str]], *, leave: bool = False, names: Sequence[str] = ()) -> str:
    """A unit with a process for each list of nodes, and the one that has made them; all have many files open."""
    unit = scene.name("old" if leave else "crowd")
    scene.node.write(f"/run/{unit}.json", json.dumps([FILES, nodes, leave, names]))
    properties = ["TasksMax=infinity", "LimitNOFILE=1024", "KillMode=process" if leave else "Type=notify"]
    scene.node.start(
        ["python3", "/run/t-crowd.py", f"/run/{unit}.json"], unit=unit, user="model", properties=properties
    )
    return unit


def _left(scene: Scene, nodes: Sequence[Sequence[str]], *, names: Sequence[str] = ()) -> list[int]:
    """The same, left by a unit that has failed; their PIDs, in the order of the lists."""
    unit = _crowd(scene, nodes, leave=True, names=names)
    scene.await_state(unit, "failed")
    pids = scene.node.unit_pids(unit)
    assert len(pids) == len(nodes)
    return pids


def _verdict(scene: Scene) -> Run:
    verdict = json.loads(scene.node.read("/run/t-out"))
    return Run(exit=verdict["exit"], verdict=verdict, stdout="", stderr="")
