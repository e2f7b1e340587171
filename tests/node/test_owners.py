"""Every kind of owner, ended and alive: servers, sessions, containers, jobs, units that stop (cases A)."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from tests.node import image
from tests.node.machine import Node
from tests.node.scene import HOLDER, Run, Scene

CLEAN = "/usr/bin/gpuprestart clean --json --deadline 10s"
HEX = "6f1c3d5a9e0b47d28c6f1c3d5a9e0b47d28c6f1c3d5a9e0b47d28c6f1c3d5a9e"
POD = "kubepods-burstable.slice/kubepods-burstable-pod0c1d2e3f.slice"
HOLD = (HOLDER, "--open", "0", "--gpu", "0", "--mib", "900")

#: Cgroups of containers, their engine and id in the words of a verdict, and what runs them.
CONTAINERS = [
    (f"/system.slice/docker-{HEX}.scope", f"docker:{HEX}", "containerd-shim-runc-v2"),
    (f"/docker/{HEX}", f"docker:{HEX}", "containerd-shim"),
    (f"/machine.slice/libpod-{HEX}.scope/container", f"podman:{HEX}", "conmon"),
    (f"/kubepods.slice/{POD}/cri-containerd-{HEX}.scope", f"cri-containerd:{HEX}", "containerd-shim-runc-v2"),
    (f"/kubepods.slice/{POD}/crio-{HEX}.scope", f"crio:{HEX}", "conmon"),
    (f"/kubepods/burstable/pod0c1d2e3f/{HEX}", f"kubernetes:{HEX}", "containerd-shim-runc-v2"),
    ("/lxc.payload.web/system.slice/nginx.service", "lxc:web", "[lxc monitor] web"),
    ("/machine.slice/machine-web.scope/payload", "nspawn:web", "systemd-nspawn"),
]

#: A server's main process with a subreaper below it, which starts the front and adopts what the front leaves. The main
#: process fails when the front is gone; the subreaper stays.
SUBREAPER = """
import ctypes, os, signal, sys
gone, tell = os.pipe()
if os.fork() == 0:
    os.close(gone)
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    front = os.fork()
    if front == 0:
        os.close(tell)
        os.execv(sys.argv[1], sys.argv[1:])
    os.waitpid(front, 0)
    os.close(tell)
    while True:
        signal.pause()
os.close(tell)
os.read(gone, 1)
sys.exit(1)
"""

#: What stands in for a runtime: its comm is the name of the file. It has a process in a cgroup below itself.
RUNTIME = """#!/bin/sh
cgroup=$1; shift
mkdir -p "$cgroup"
sh -c 'echo $$ > "$0/cgroup.procs"; exec "$@"' "$cgroup" "$@" &
wait
"""


class Stage:
    """Processes in cgroups that systemd did not make."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self._cgroups: set[str] = set()

    def folder(self, user: str = "root") -> str:
        folder = f"/run/{self.scene.name('folder').partition('.')[0]}"
        self.scene.node.run(["install", "-d", "-o", user, folder])
        return folder

    def orphan(self, cgroup: str, command: Sequence[str] = HOLD) -> int:
        """A holder of GPU 0 in this cgroup, which init has adopted."""
        ready = f"{self.folder()}/ready"
        self._cgroups.add(cgroup)
        # It leaves the scope that systemd made for it, which is then gone.
        script = 'mkdir -p "$0" && echo $$ > "$0/cgroup.procs" && exec "$@"'
        moved = ["sh", "-c", script, f"/sys/fs/cgroup{cgroup}", *command, "--ready-file", ready]
        words = shlex.join(["setsid", "systemd-run", "--quiet", "--scope", *moved])
        self.scene.node.run(["sh", "-c", f"{words} </dev/null >/dev/null 2>&1 &"])
        return self.ready(ready)

    def below(self, runtime: str, cgroup: str, command: Sequence[str]) -> int:
        """A runtime with this command in this cgroup below it; the runtime's PID."""
        self._cgroups.add(cgroup)
        path = f"{self.folder()}/{runtime}"
        self.scene.node.write(path, RUNTIME, mode=0o755)
        unit = self.scene.name("runtime")
        self.scene.node.start([path, f"/sys/fs/cgroup{cgroup}", *command], unit=unit)
        self.scene.node.wait_for(lambda: self.pids(cgroup), timeout=10, what=f"{runtime} has a process in {cgroup}")
        return int(self.scene.node.show(unit, "MainPID")["MainPID"])

    def pids(self, cgroup: str) -> list[int]:
        return [int(pid) for pid in self.scene.node.run(["cat", f"/sys/fs/cgroup{cgroup}/cgroup.procs"],
                                                        check=False).stdout.split()]  # fmt: skip

    def ready(self, path: str) -> int:
        node = self.scene.node
        node.wait_for(lambda: node.exists(path), timeout=10, what="a holder holds its GPU")
        return int(json.loads(node.read(path))["pid"])

    def end(self, pid: int) -> None:
        self.scene.node.run(["kill", "-KILL", str(pid)])
        self.scene.gpu.ask("wait", gone=pid)

    def strike(self) -> None:
        script = """
            cd /sys/fs/cgroup; path=.$1
            [ -e $path ] && echo 1 > $path/cgroup.kill
            while [ $path != . ]; do
                for try in 1 2 3 4 5 6 7 8 9; do rmdir $path 2>/dev/null && break; sleep 0.02; done
                path=$(dirname $path)
                [ $path != ./system.slice ] && [ $path != ./user.slice ] || break
            done
        """
        for cgroup in self._cgroups:
            self.scene.node.run(["sh", "-c", script, "sh", cgroup], check=False)


@pytest.fixture
def stage(scene: Scene) -> Iterator[Stage]:
    stage = Stage(scene)
    try:
        yield stage
    finally:
        stage.strike()


def _refused(scene: Scene, run: Run, holder: int, owner: str) -> None:
    assert (run.outcome, run.exit) == ("protected", 75)
    assert run.holder(holder)["owner"] == owner
    assert run.holder(holder)["action"] == "refuse"
    assert run.fates == {} and scene.signals(run) == []
    assert scene.alive(holder)


def _ended(scene: Scene, run: Run, *holders: int) -> None:
    assert (run.outcome, run.exit) == ("cleaned", 0)
    assert scene.signals(run) == [(holder, "SIGTERM") for holder in sorted(holders)]
    assert run.fates == dict.fromkeys(holders, "terminated")


# A server whose front was killed (A1) --------------------------------------------------------------------------------


@pytest.mark.case("A1")
@pytest.mark.parametrize("name", ["VLLM::Worker_TP{}", "bash"])
def test_a_killed_front_in_a_failed_unit(scene: Scene, stage: Stage, name: str) -> None:
    unit, _, workers, reaper = _killed_front(scene, stage, name)
    run = scene.clean("--gpus", "0,1")
    _ended(scene, run, *workers)
    assert {run.holder(worker)["owner"] for worker in workers} == {f"unit:{unit}"}
    assert {run.holder(worker)["comm"] for worker in workers} == {name.format(0)[:15]}
    assert scene.alive(reaper)


@pytest.mark.case("A1")
def test_a_killed_front_in_our_own_unit(scene: Scene, stage: Stage) -> None:
    """The next start finds what the front has left beside itself; it allocates so much that all of it must be gone."""
    unit, ready, workers, reaper = _killed_front(scene, stage, "VLLM::Worker_TP{}")
    assert scene.start(unit)
    run = scene.verdict(unit)
    assert (run.outcome, run.exit) == ("cleaned", 0)
    assert run.fates == dict.fromkeys([*workers, reaper], "terminated")
    assert {pid for pid, _ in scene.signals(run)} == {*workers, reaper}
    fresh = {int(pid) for pid in scene.node.read(ready).split()}
    assert not fresh & {*workers, reaper} and scene.alive(fresh)


def _killed_front(scene: Scene, stage: Stage, name: str) -> tuple[str, str, list[int], int]:
    """A server on two GPUs that has failed since somebody killed its front with -9: its unit, the ready-file, workers
    and the subreaper that has them now."""
    folder = stage.folder("model")
    port = 31000
    scene.node.write(f"{folder}/reaper", SUBREAPER)
    server = ["/usr/bin/python3", "/opt/simgpu/model_server.py", "--load-time", "0.1", "--port", str(port)]
    server += ["--worker-name", name, "--ready-file", f"{folder}/ready"]
    unit = scene.server(
        gpus="0,1",
        command=CLEAN,
        server=shlex.join(["/usr/bin/python3", f"{folder}/reaper", *server]),
        more="Type=notify\nNotifyAccess=all\nKillMode=process\n",
    )
    assert scene.start(unit)
    front, *workers = (int(pid) for pid in scene.node.read(f"{folder}/ready").split())
    reaper = scene.parent(front)
    main = int(scene.node.show(unit, "MainPID")["MainPID"])
    assert len(workers) == 2 and front != main
    stage.end(front)
    scene.await_state(unit, "failed")
    assert scene.node.unit_pids(unit) == sorted([reaper, *workers])
    assert {scene.parent(worker) for worker in workers} == {reaper} and reaper != 1
    assert {_session(scene, worker) for worker in workers} == set(workers)
    assert scene.node.run(["ss", "-Hltn", f"sport = :{port}"]).stdout == ""
    return unit, f"{folder}/ready", workers, reaper


def _session(scene: Scene, pid: int) -> int:
    return int(scene.node.read(f"/proc/{pid}/stat").rpartition(")")[2].split()[3])


# What login sessions left (A4) ---------------------------------------------------------------------------------------


@pytest.mark.case("A4")
@pytest.mark.parametrize(
    "logind, outcome",
    [
        ("KillUserProcesses=yes", "cleaned"),
        ("KillUserProcesses=yes\nKillOnlyUsers=bench alice", "cleaned"),
        ("KillUserProcesses=yes\nKillOnlyUsers=bench", "protected"),
        ("KillUserProcesses=yes\nKillExcludeUsers=root alice", "protected"),
        ("KillUserProcesses=yes\nKillOnlyUsers=alice\nKillExcludeUsers=alice", "protected"),
        ("KillUserProcesses=no\nKillOnlyUsers=alice", "protected"),
    ],
)
def test_left_by_a_session_where_logind_ends_what_is_left(
    scene: Scene, stage: Stage, logind: str, outcome: str
) -> None:
    """The session ended before logind was told so: what it left is still there."""
    session, holder = _left_by_a_session(scene, stage)
    with _logind(scene, logind):
        assert scene.alive(holder)
        assert scene.node.show(session, "SubState") == {"SubState": "abandoned"}
        run = scene.clean("--gpus", "0")
        owner = f"session:{session[8:-6]}:alice"
        if outcome == "cleaned":
            _ended(scene, run, holder)
            assert run.holder(holder)["owner"] == owner
            assert "KillUserProcesses" in run.holder(holder)["reason"]
        else:
            _refused(scene, run, holder, owner)
            assert "owners.dedicated" in " ".join(run.verdict["hints"])
    scene.node.run(["kill", "-KILL", str(holder)], check=False)


@pytest.mark.case("A4")
def test_left_by_a_session_whose_scope_is_gone(scene: Scene, stage: Stage) -> None:
    """Nothing is known of the session any more but the name of its cgroup."""
    holder = stage.orphan("/user.slice/user-5002.slice/session-4711.scope")
    run = scene.clean("--gpus", "0")
    _refused(scene, run, holder, "session:4711:alice")
    assert "owners.dedicated" in " ".join(run.verdict["hints"])
    scene.policy("[owners]\ndedicated = true\n")
    _ended(scene, scene.clean("--gpus", "0"), holder)


@pytest.mark.case("A5")
def test_a_live_session_where_logind_ends_what_is_left(scene: Scene, stage: Stage) -> None:
    folder = stage.folder("alice")
    holder = shlex.join([*HOLD, "--ready-file", f"{folder}/ready"])
    session = scene.node.login_session("alice", f"{holder} & sleep 1000")
    try:
        pid = stage.ready(f"{folder}/ready")
        with _logind(scene, "KillUserProcesses=yes"):
            _refused(scene, scene.clean("--gpus", "0"), pid, f"session:{session.id}:alice")
    finally:
        scene.node.run(["systemctl", "kill", "--signal=KILL", session.scope], check=False)


def _left_by_a_session(scene: Scene, stage: Stage) -> tuple[str, int]:
    """The scope of a session of alice's that is over, and the job that she left in it with nohup."""
    folder = stage.folder("alice")
    job = shlex.join([*HOLD, "--ready-file", f"{folder}/ready"])
    session = scene.node.login_session("alice", f"nohup {job} >/dev/null 2>&1 & sleep 1000")
    holder = stage.ready(f"{folder}/ready")
    scene.node.end_session(session)
    return session.scope, holder


@contextmanager
def _logind(scene: Scene, settings: str) -> Iterator[None]:
    """logind with these settings; it reads them when it starts."""
    path = "/etc/systemd/logind.conf.d/t-test.conf"
    scene.node.write(path, f"[Login]\n{settings}\n")
    scene.node.systemctl("restart", "systemd-logind")
    try:
        yield
    finally:
        scene.node.run(["rm", path])
        scene.node.systemctl("restart", "systemd-logind")


# Containers (A6, A7) -------------------------------------------------------------------------------------------------


@pytest.mark.case("A6")
@pytest.mark.parametrize("cgroup, word, runtime", CONTAINERS)
def test_what_a_container_left(scene: Scene, stage: Stage, cgroup: str, word: str, runtime: str) -> None:
    """While a runtime is above any process of the container, the container may be wanted; then nobody wants it."""
    holder = stage.orphan(cgroup)
    shim = stage.below(runtime, cgroup, ["/bin/sleep", "1000"])
    assert scene.parent(holder) == 1
    run = scene.clean("--gpus", "0")
    _refused(scene, run, holder, f"container:{word}")
    assert f"{runtime[:15]}[{shim}]" in run.holder(holder)["reason"]
    stage.end(shim)
    run = scene.clean("--gpus", "0")
    _ended(scene, run, holder)
    assert run.holder(holder)["owner"] == f"container:{word}"


@pytest.mark.case("A6")
def test_what_a_container_left_in_a_scope_that_systemd_has(scene: Scene, stage: Stage) -> None:
    """The scope is active as long as anything is in it, which says nothing."""
    folder = stage.folder()
    scope = f"docker-{HEX}.scope"
    scene._known(scope)
    scene.node.start_scope([*HOLD, "--ready-file", f"{folder}/ready"], unit=scope)
    holder = stage.ready(f"{folder}/ready")
    assert scene.node.show(scope, "ActiveState") == {"ActiveState": "active"}
    _ended(scene, scene.clean("--gpus", "0"), holder)


@pytest.mark.case("A7")
@pytest.mark.parametrize("cgroup, word, runtime", CONTAINERS)
def test_a_container_below_its_runtime(scene: Scene, stage: Stage, cgroup: str, word: str, runtime: str) -> None:
    scene.policy("[owners]\ndedicated = true\n")
    stage.below(runtime, cgroup, [*HOLD, "--ready-file", f"{(folder := stage.folder())}/ready"])
    holder = stage.ready(f"{folder}/ready")
    run = scene.clean("--gpus", "0")
    _refused(scene, run, holder, f"container:{word}")
    (found,) = [each for each in scene.records(run, "holder-found") if each["HOLDER_PID"] == str(holder)]
    assert found["HOLDER_OWNER"] == f"container:{word}"
    assert word.partition(":")[2] in run.verdict["message"]


@pytest.mark.case("A7")
@pytest.mark.parametrize("dedicated", ["false", "true"])
def test_a_container_in_a_pid_namespace_of_its_own(scene: Scene, stage: Stage, dedicated: str) -> None:
    """Its runtime is nowhere to be seen, but somebody made the namespace."""
    scene.policy(f"[owners]\ndedicated = {dedicated}\n")
    cgroup = f"/system.slice/docker-{HEX}.scope"
    unshared = ["unshare", "--pid", "--fork", "--kill-child", "--", *HOLD]
    stage.orphan(cgroup, unshared)
    (holder,) = _with_comm(scene, stage.pids(cgroup), "python3")
    _refused(scene, scene.clean("--gpus", "0"), holder, f"container:docker:{HEX}")


@pytest.mark.case("A7")
def test_a_pid_namespace_below_a_failed_unit(scene: Scene) -> None:
    """A sandbox of nobody's making: the unit has failed, and still this is not simply what the unit left."""
    unit, pids = scene.orphans(*HOLD[1:], user=None, prefix=("unshare", "--pid", "--fork", "--"))
    (holder,) = _with_comm(scene, pids, "python3")
    run = scene.clean("--gpus", "0")
    namespace = scene.node.run(["stat", "-Lc", "%i", f"/proc/{holder}/ns/pid"]).stdout.strip()
    _refused(scene, run, holder, f"container:pidns:{namespace}")


@pytest.mark.case("A7")
@pytest.mark.parametrize("runtime, owner", [("conmon", "container:conmon:unknown"), ("slurmstepd", "slurm:unknown")])
def test_below_a_runtime_in_a_cgroup_without_an_id(scene: Scene, stage: Stage, runtime: str, owner: str) -> None:
    """The unit around the runtime is active; what counts is that a runtime runs it."""
    stage.below(runtime, "/t-plain/job", [*HOLD, "--ready-file", f"{(folder := stage.folder())}/ready"])
    holder = stage.ready(f"{folder}/ready")
    _refused(scene, scene.clean("--gpus", "0"), holder, owner)


def _with_comm(scene: Scene, pids: Sequence[int], comm: str) -> list[int]:
    return [pid for pid in pids if scene.node.read(f"/proc/{pid}/comm").strip() == comm]


# A real engine (A6, A7) ----------------------------------------------------------------------------------------------

PODMAN = ("podman", "--runtime=runc", "--cgroup-manager=cgroupfs", "--storage-driver=vfs")

#: What a container gets on the node: limits that can be set there, and the folders that a holder of the node needs.
RUN = (
    *("run", "--detach", "--network=none", "--pids-limit=-1", "--log-driver=k8s-file", "--device=/dev/nvidia0"),
    *("--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096"),
    *("-v/usr:/usr:ro", "-v/opt/simgpu:/opt/simgpu:ro", "-v/run/simgpu:/run/simgpu", "-v/run/box:/run/box"),
)

ENGINE = """
systemctl stop podman.socket podman.service
rm -rf /var/lib/containers /run/containers /run/libpod
mkdir -p /etc/containers /run/box /opt/box; cd /opt/box
printf '[containers]\\nkeyring = false\\n' > /etc/containers/containers.conf
mkdir usr opt run dev proc sys tmp etc
for name in bin lib lib64 sbin; do ln -s usr/$name; done
"""


@pytest.fixture(scope="module")
def engine(node: Node) -> Iterator[Node]:
    """A node with podman and runc. Its layers lie in a cache of their own, so that the other nodes' are kept."""
    cache = image.cache_directory() / "podman"
    cache.mkdir(parents=True, exist_ok=True)
    # What runc needs beyond what nspawn leaves to a payload: to ask for the device filter of a cgroup.
    nspawn = ["--capability=CAP_BPF,CAP_NET_ADMIN", "--system-call-filter=bpf"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.setattr(image, "PACKAGES", (*image.PACKAGES, "podman", "runc"))
        with Node(gpus=2, nspawn=nspawn) as booted:
            booted.run(["sh", "-ec", ENGINE])
            yield booted


@pytest.fixture
def engine_scene(engine: Node) -> Iterator[Scene]:
    scene = Scene(engine)
    scene.reset(gpus=2)
    try:
        yield scene
    finally:
        scene.node.run([*PODMAN, "rm", "--all", "--force", "--time=0"], timeout=60)
        scene.strike()


@pytest.mark.parametrize(
    "namespace, conmon, outcome",
    [
        pytest.param("private", True, "protected", marks=pytest.mark.case("A7")),
        pytest.param("host", True, "protected", marks=pytest.mark.case("A7")),
        # Whoever killed it, the namespace is still somebody's.
        pytest.param("private", False, "protected", marks=pytest.mark.case("A7")),
        pytest.param("host", False, "cleaned", marks=pytest.mark.case("A6")),
    ],
)
def test_a_container_of_podman(engine_scene: Scene, namespace: str, conmon: bool, outcome: str) -> None:
    scene = engine_scene
    unit, ready = scene.name("podman"), f"/run/box/{namespace}-{conmon}"
    pid = ["--pid=host"] if namespace == "host" else []
    holder = ["--rootfs", "/opt/box", *HOLD, "--ready-file", ready]
    properties = ["Type=oneshot", "KillMode=process", "RemainAfterExit=yes"]
    scene.node.start([*PODMAN, *RUN, *pid, *holder], unit=unit, properties=properties)
    scene.node.wait_for(lambda: scene.node.exists(ready), timeout=10, what="the container holds GPU 0")
    asked = [*PODMAN, "inspect", "--latest", "--format={{.State.Pid}} {{.Id}} {{.State.ConmonPid}}"]
    main, container, monitor = scene.node.run(asked).stdout.split()
    if not conmon:
        scene.node.run(["kill", "-KILL", monitor])
        scene.gpu.ask("wait", gone=int(monitor))
    # The unit that started it is up, and says nothing about it.
    assert scene.node.show(unit, "ActiveState") == {"ActiveState": "active"}
    run = scene.clean("--gpus", "0")
    if outcome == "cleaned":
        _ended(scene, run, int(main))
    else:
        _refused(scene, run, int(main), f"container:podman:{container}")
    assert run.holder(int(main))["owner"] == f"container:podman:{container}"


# Slurm jobs ----------------------------------------------------------------------------------------------------------


@pytest.mark.case("A6")
@pytest.mark.parametrize(
    "cgroup", ["/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0", "/slurm/uid_5002/job_4711/step_batch"]
)
def test_what_a_slurm_job_left(scene: Scene, stage: Stage, cgroup: str) -> None:
    holder = stage.orphan(cgroup)
    step = stage.below("slurmstepd", f"{cgroup[: cgroup.index('job_')]}job_4711/step_extern", ["/bin/sleep", "1000"])
    other = stage.below("slurmstepd", f"{cgroup[: cgroup.index('job_')]}job_4712/step_0", ["/bin/sleep", "1000"])
    run = scene.clean("--gpus", "0")
    _refused(scene, run, holder, "slurm:4711")
    assert "scancel 4711" in " ".join(run.verdict["hints"])
    stage.end(step)
    # Another job of the node still runs, and does not make this one wanted.
    assert scene.alive(other)
    _ended(scene, scene.clean("--gpus", "0"), holder)


# Units that are stopping (A9) ----------------------------------------------------------------------------------------


@pytest.mark.case("A9")
@pytest.mark.parametrize("beside", [False, True])
def test_a_unit_that_is_stopping_and_gone_soon(scene: Scene, beside: bool) -> None:
    unit, holder = scene.service("--open", "0", "--gpu", "0", "--mib", "900", "--term-delay", "0.6", user="alice")
    orphans = scene.orphans("--open", "1", "--gpu", "1", "--mib", "900")[1] if beside else []
    scene.node.systemctl("stop", "--no-block", unit)
    scene.await_state(unit, "deactivating")
    run = scene.clean("--gpus", "0,1")
    if beside:
        assert scene.signals(run) == [(orphans[0], "SIGTERM")]
    else:
        assert scene.signals(run) == []
    assert (run.outcome, run.exit) == ("cleaned" if beside else "clean", 0)
    (found,) = [each for each in scene.records(run, "holder-found") if each["HOLDER_PID"] == str(holder)]
    assert found["GPUPRESTART_ACTION"] == "wait"
    assert not scene.alive(holder)


@pytest.mark.case("A9")
@pytest.mark.parametrize("dedicated", ["false", "true"])
def test_a_unit_that_is_stopping_for_ever(scene: Scene, dedicated: str) -> None:
    scene.policy(f"[owners]\ndedicated = {dedicated}\n")
    unit, holder = scene.service(
        *("--open", "0", "--gpu", "0", "--mib", "900", "--ignore-term"),
        user="alice",
        properties=["TimeoutStopSec=77s", "SendSIGKILL=no"],
    )
    scene.node.systemctl("stop", "--no-block", unit)
    scene.await_state(unit, "deactivating")
    run = scene.clean("--gpus", "0", "--deadline", "1s")
    assert (run.outcome, run.exit) == ("protected", 75)
    assert run.holder(holder)["action"] == "wait"
    assert unit in run.verdict["message"] and "TimeoutStopSec=1min 17s" in run.verdict["message"]
    assert 1 <= run.verdict["duration_s"] < 4
    assert scene.signals(run) == []
    assert scene.alive(holder)


# PID files (A19) -----------------------------------------------------------------------------------------------------


@pytest.mark.case("A19")
def test_stale_pid_files(scene: Scene, stage: Stage) -> None:
    """The innocent could even be ended by its owner's row, if anybody looked at it."""
    _, (innocent,) = scene.orphans()
    _, (orphan,) = scene.orphans("--open", "0", "--gpu", "0", "--mib", "900")
    unit = scene.name("server")
    files = [f"/run/{unit}.pid", f"/run/{unit.partition('.')[0]}.pid", f"/tmp/{unit.partition('.')[0]}.pid"]
    for path in files:
        scene.node.write(path, f"{innocent}\n")
    scene.server(unit, gpus="0", command=CLEAN, more=f"PIDFile={files[0]}\n")
    assert scene.start(unit)
    run = scene.verdict(unit)
    _ended(scene, run, orphan)
    assert [each["pid"] for each in run.verdict["holders"]] == [orphan]
    assert scene.alive(innocent)
    scene.node.run(["rm", "-f", *files])


# Names that are somebody else's (A24) --------------------------------------------------------------------------------


@pytest.mark.case("A24")
@pytest.mark.parametrize("dedicated", ["false", "true"])
def test_a_user_managers_unit_of_the_same_name(scene: Scene, stage: Stage, dedicated: str) -> None:
    """The unit of that name here is inactive, loaded, and runs as the same user."""
    scene.policy(f"[owners]\ndedicated = {dedicated}\n")
    unit = scene.name("vllm")
    folder = stage.folder("alice")
    service = f"[Service]\n{{}}ExecStart={shlex.join([*HOLD, '--ready-file', f'{folder}/ready'])}\n"
    scene.node.write(f"/etc/systemd/system/{unit}", service.format("User=alice\n"))
    scene.node.write(f"/run/systemd/user/{unit}", service.format(""))
    scene.node.systemctl("daemon-reload")
    scene.node.systemctl("start", "user@5002.service")
    try:
        _as_alice(scene, "daemon-reload")
        _as_alice(scene, "start", unit)
        holder = stage.ready(f"{folder}/ready")
        shown = scene.node.show(unit, "LoadState", "ActiveState")
        assert shown == {"LoadState": "loaded", "ActiveState": "inactive"}
        run = scene.clean("--gpus", "0")
        _refused(scene, run, holder, "user:alice")
        assert "alice" in run.verdict["message"]
    finally:
        scene.node.run(["systemctl", "kill", "--signal=KILL", "user@5002.service"], check=False)
        scene.node.systemctl("stop", "user@5002.service", check=False)
        scene.node.run(["rm", "-f", f"/run/systemd/user/{unit}"])


@pytest.mark.case("A24")
@pytest.mark.parametrize(
    "above, owner",
    [
        ("/lxc.payload.web", "container:lxc:web"),
        (f"/docker/{HEX}", f"container:docker:{HEX}"),
        ("/machine.slice/machine-web.scope/payload", "container:nspawn:web"),
        # Of a container whose cgroup nothing is known about.
        ("/t-unheard-of", "container:pidns:"),
    ],
)
def test_a_unit_of_the_same_name_in_a_container(scene: Scene, stage: Stage, above: str, owner: str) -> None:
    unit = scene.name("ollama")
    scene.node.write(f"/etc/systemd/system/{unit}", f"[Service]\nExecStart={shlex.join(HOLD)}\n")
    scene.node.systemctl("daemon-reload")
    scene.policy("[owners]\ndedicated = true\n")
    cgroup = f"{above}/system.slice/{unit}"
    stage.orphan(cgroup, ["unshare", "--pid", "--fork", "--kill-child", "--", *HOLD])
    (holder,) = _with_comm(scene, stage.pids(cgroup), "python3")
    run = scene.clean("--gpus", "0")
    if owner.endswith("pidns:"):
        owner += scene.node.run(["stat", "-Lc", "%i", f"/proc/{holder}/ns/pid"]).stdout.strip()
    _refused(scene, run, holder, owner)


@pytest.mark.case("A24")
def test_a_cgroup_that_bears_the_name_of_a_unit(scene: Scene, stage: Stage) -> None:
    """Anybody with a delegated cgroup can make one of any name; the unit of that name is elsewhere, and failed."""
    unit, (left,) = scene.orphans()
    holder = stage.orphan(f"/t-delegated/{unit}")
    scene.policy("[owners]\ndedicated = true\n")
    assert scene.node.show(unit, "ActiveState") == {"ActiveState": "failed"}
    _refused(scene, scene.clean("--gpus", "0"), holder, "unknown")
    assert scene.alive(left)


def _as_alice(scene: Scene, *arguments: str) -> None:
    env = {"XDG_RUNTIME_DIR": "/run/user/5002"}
    scene.node.run(["systemctl", "--user", *arguments], user="alice", env=env)


# The rest of the table -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dedicated", ["false", "true"])
def test_a_plain_scope(scene: Scene, stage: Stage, dedicated: str) -> None:
    """As systemd-run makes it: active for as long as anything is in it, though what started it is gone."""
    scene.policy(f"[owners]\ndedicated = {dedicated}\n")
    folder = stage.folder("model")
    scope = scene.node.start_scope([*HOLD, "--ready-file", f"{folder}/ready"], user="model")
    scene._known(scope)
    holder = stage.ready(f"{folder}/ready")
    assert scene.parent(holder) == 1
    run = scene.clean("--gpus", "0")
    _refused(scene, run, holder, f"unit:{scope}")
    assert f"systemctl stop {scope}" in " ".join(run.verdict["hints"])


@pytest.mark.parametrize(
    "unit, properties", [("", ["Type=oneshot"]), ("cron.service", []), ("slurmd.service", []), ("", ["Type=exec"])]
)
def test_left_by_units_that_leave_processes_on_purpose(
    scene: Scene, stage: Stage, unit: str, properties: list[str]
) -> None:
    """A oneshot unit's, a carrier's; the last one is neither. All of them may be ended on a dedicated machine."""
    unit = unit or scene.name("ended")
    scene._known(unit)
    folder = stage.folder()
    script = f"{shlex.join([*HOLD, '--ready-file', f'{folder}/ready'])} & until [ -e {folder}/ready ]; do :; done"
    scene.node.start(["/bin/sh", "-c", script], unit=unit, properties=["KillMode=process", *properties])
    holder = stage.ready(f"{folder}/ready")
    scene.await_state(unit, "inactive")
    if properties != ["Type=exec"]:
        run = scene.clean("--gpus", "0")
        _refused(scene, run, holder, f"unit:{unit}")
        assert "owners.dedicated" in " ".join(run.verdict["hints"])
        scene.policy("[owners]\ndedicated = true\n")
    _ended(scene, scene.clean("--gpus", "0"), holder)


@pytest.mark.parametrize("adopted", [True, False])
def test_in_a_cgroup_of_nobodys(scene: Scene, stage: Stage, adopted: bool) -> None:
    """Only a dedicated machine ends it, and only once its parent is gone."""
    if adopted:
        holder = stage.orphan("/t-nowhere")
    else:
        stage.below("some-launcher", "/t-nowhere", [*HOLD, "--ready-file", f"{(folder := stage.folder())}/ready"])
        holder = stage.ready(f"{folder}/ready")
    _refused(scene, scene.clean("--gpus", "0"), holder, "none")
    scene.policy("[owners]\ndedicated = true\n")
    run = scene.clean("--gpus", "0")
    if adopted:
        _ended(scene, run, holder)
    else:
        _refused(scene, run, holder, "none")
