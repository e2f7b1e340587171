"""The process between the tests and a simulated node: it mounts, boots, waits, and takes everything down.

It runs in a mount namespace of its own, so its mounts vanish with it. It ends the node when told to, when
its standard input closes, and when the process that started it is gone, however that ended. It knows
nothing of images or tests; machine.py starts it and hands it one JSON object.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

#: Long enough for a loaded machine; a process that is still there after it is reported, not waited for.
END_TIMEOUT = 15.0


def main() -> int:
    owner = os.pidfd_open(os.getppid())
    spec = json.loads(sys.argv[1])
    # Ctrl-C and a closed terminal are the owner's business: it tells us, or it dies and we see it.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    state = Path(spec["state"])
    cgroups = [Path(path) for path in spec["cgroups"]]
    process = None
    leader_pidfd = None
    status: dict[str, Any] = {}
    try:
        root = mount_root(state, spec["lower"])
        nodes = make_nodes(state / "memory/dev", spec["devices"])
        process = start_nspawn(spec, state, root, nodes, cgroups) if spec["boot"] else start_chroot(state, root, nodes)
        status["leader"] = leader = find_leader(process, owner)
        leader_pidfd = os.pidfd_open(leader)
        tell(leader=leader)
        wait_for_the_end(owner, process)
    except (OSError, RuntimeError) as error:
        # The owner turns this into its own exception; a traceback on its terminal would help nobody.
        status["error"] = f"{type(error).__name__}: {error}"
    finally:
        left = take_down(process, leader_pidfd, cgroups)
        status.update(gone=True, left=left, console=console(state))
        tell(**status)
        if not left:
            # Lazily, as a mount that somebody still looks into would refuse; the namespace's end
            # takes the rest.
            subprocess.run(["umount", "--lazy", "--recursive", state / "memory"], capture_output=True, check=False)
            shutil.rmtree(state, ignore_errors=True)
    return 0


def tell(**fields: object) -> None:
    with suppress(BrokenPipeError):
        print(json.dumps(fields), flush=True)


def console(state: Path) -> str:
    try:
        return (state / "console").read_text(errors="replace")[-4000:]
    except OSError:
        return ""


def run(*argv: str) -> None:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")


def mount_root(state: Path, lower: list[str]) -> Path:
    """An overlay whose writable half is a tmpfs: nothing to remove afterwards, and no file system that
    could refuse to be an upper layer, as an overlay does."""
    memory = state / "memory"
    memory.mkdir()
    run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(memory))
    for name in ("upper", "work", "root", "dev"):
        (memory / name).mkdir(mode=0o755)
    root = memory / "root"
    options = f"lowerdir={':'.join(lower)},upperdir={memory}/upper,workdir={memory}/work"
    run("mount", "-t", "overlay", "-o", options, "overlay", str(root))
    return root


def make_nodes(directory: Path, devices: dict[str, int]) -> dict[str, Path]:
    """Device nodes that open, and whose numbers are nobody else's: virtual consoles that nobody uses."""
    nodes = {}
    for path, minor in devices.items():
        node = directory / path.strip("/").replace("/", "-")
        os.mknod(node, 0o020666, os.makedev(4, minor))
        # mknod's mode is cut by the umask.
        node.chmod(0o666)
        nodes[path] = node
    return nodes


def start_nspawn(
    spec: dict[str, Any], state: Path, root: Path, nodes: dict[str, Path], cgroups: list[Path]
) -> subprocess.Popen[bytes]:
    for cgroup in cgroups:
        cgroup.mkdir()
    # nspawn keeps run-time files here; on a tmpfs of our own they are gone when we are.
    Path("/run/systemd").mkdir(exist_ok=True)
    run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run/systemd")

    def enter_cgroups() -> None:
        # nspawn puts its payload below the caller's cgroup. Entered here, between fork and exec, so
        # that this process itself stays outside and can remove the cgroup in the end.
        for cgroup in cgroups:
            (cgroup / "cgroup.procs").write_text("0")

    environment = {name: os.environ[name] for name in ("PATH",) if name in os.environ}
    environment["SYSTEMD_NSPAWN_UNIFIED_HIERARCHY"] = "1"
    binds = [f"--bind={node}:{path}" for path, node in nodes.items()]
    with open(state / "console", "wb") as output:
        return subprocess.Popen(
            [
                # Should this process be killed before it can take anything down, nspawn gets SIGTERM and
                # ends its payload: killed itself, it would leave the payload running.
                *("setpriv", "--pdeathsig", "TERM"),
                *(
                    "systemd-nspawn",
                    "--quiet",
                    "--boot",
                    "--register=no",
                    "--keep-unit",
                    "--kill-signal=SIGKILL",
                ),
                f"--directory={root}",
                f"--machine={spec['name']}",
                "--hostname=gpunode",
                # The model server's port is the node's own: the host may use it, and so may a second node.
                "--private-network",
                *("--link-journal=no", "--resolv-conf=off", "--timezone=off", "--console=read-only"),
                *binds,
                *spec["nspawn"],
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            preexec_fn=enter_cgroups,
        )


#: PID 1 of a plain chroot: all it does is to be there and to reap what is reparented to it.
REAPER = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
while True:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
    signal.sigwait({signal.SIGCHLD})
"""

INIT = 'ip link set lo up; exec /usr/bin/python3 -ISc "$0"'


def start_chroot(state: Path, root: Path, nodes: dict[str, Path]) -> subprocess.Popen[bytes]:
    run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(root / "dev"))
    run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(root / "run"))
    (root / "dev/shm").mkdir()
    (root / "dev/shm").chmod(0o1777)
    for name in ("null", "zero", "full", "random", "urandom"):
        nodes = {**nodes, f"/dev/{name}": Path("/dev") / name}
    for path, node in nodes.items():
        target = root / path.strip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
        run("mount", "--bind", str(node), str(target))
    for name, link in {"fd": "fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}.items():
        (root / "dev" / name).symlink_to(f"/proc/self/{link}")
    with open(state / "console", "wb") as output:
        return subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL"),
                *("unshare", "--pid", "--fork", "--kill-child", "--net", "--ipc", "--uts"),
                f"--mount-proc={root}/proc",
                *("chroot", str(root), "/bin/sh", "-c", INIT, REAPER),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def find_leader(process: subprocess.Popen[bytes], owner: int) -> int:
    """The host's PID of the node's PID 1, once it runs the node's own init."""
    ours = len(ns_pids(os.getpid()))
    limit = time.monotonic() + END_TIMEOUT
    while time.monotonic() < limit:
        if process.poll() is not None:
            raise RuntimeError(f"its first process ended with status {process.returncode}")
        for pid in descendants(process.pid):
            # Before it executes init, PID 1 is nspawn (or a shell) itself, and entering its
            # namespaces would run the host's programs.
            if ns_pids(pid)[ours:] == [1] and comm(pid) in ("systemd", "python3"):
                return pid
        if select.select([owner, sys.stdin], [], [], 0.01)[0]:
            raise RuntimeError("told to end while the node was starting")
    raise RuntimeError(f"no PID 1 of the node within {END_TIMEOUT:.0f} s")


def descendants(pid: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != pid:
            with suppress(OSError, IndexError):
                parent = int(Path(f"/proc/{entry}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
                if parent == pid:
                    found += [int(entry), *descendants(int(entry))]
    return found


def ns_pids(pid: int) -> list[int]:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith("NSpid:"):
                return [int(word) for word in line.split()[1:]]
    return []


def comm(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").rstrip("\n")
    return ""


def wait_for_the_end(owner: int, process: subprocess.Popen[bytes]) -> None:
    poll = select.poll()
    for descriptor in (owner, sys.stdin.fileno(), os.pidfd_open(process.pid)):
        poll.register(descriptor, select.POLLIN | select.POLLHUP)
    poll.poll()


def take_down(process: subprocess.Popen[bytes] | None, leader_pidfd: int | None, cgroups: list[Path]) -> list[str]:
    """End the node, remove its cgroups, and say what could not be removed."""
    if process is not None:
        # The kernel ends a whole PID namespace with its PID 1; nspawn then sees its child gone and
        # leaves by itself. Orderly shutdown would take seconds and prove nothing.
        if leader_pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(leader_pidfd, signal.SIGKILL)
        try:
            process.wait(3.0 if leader_pidfd is not None else 0.0)
        except subprocess.TimeoutExpired:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_TIMEOUT)
    return [f"cgroup {cgroup}" for cgroup in cgroups if not remove_cgroup(cgroup)]


def remove_cgroup(cgroup: Path) -> bool:
    """Kill what is in a cgroup, remove it and all below it; false if it is still there at the end."""
    limit = time.monotonic() + END_TIMEOUT
    while cgroup.exists():
        for directory, _, _ in os.walk(cgroup, topdown=False):
            with suppress(OSError):
                for pid in Path(directory, "cgroup.procs").read_text().split():
                    # A pid 0 stands for a process of another PID namespace; to kill it would be to
                    # kill ourselves.
                    if pid != "0":
                        os.kill(int(pid), signal.SIGKILL)
            with suppress(OSError):
                os.rmdir(directory)
        if time.monotonic() > limit:
            return False
        if cgroup.exists():
            time.sleep(0.01)
    return True


if __name__ == "__main__":
    sys.exit(main())
