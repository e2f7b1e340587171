"""``-H HOST`` over a real ssh to a real sshd: the node asks itself under several names, and some that do not answer."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator

import pytest

from tests.node.scene import Scene

GPUPRESTART = "/usr/bin/gpuprestart"

SSHD = """
Port 2222
ListenAddress 127.0.0.1
HostKey /root/t-ssh/host
PermitRootLogin prohibit-password
PasswordAuthentication yes
StrictModes no
UsePAM no
PidFile none
"""

#: Two machines, one where nobody listens, one that is not what it was, one that wants a password, one that is silent.
CONFIG = """
Host gpu1 gpu2 closed wants-password silent
    HostName 127.0.0.1
    Port 2222
    HostKeyAlias node
    UserKnownHostsFile /root/t-ssh/known
    IdentityFile /root/t-ssh/key
    IdentitiesOnly yes
Host down
    HostName 127.0.0.1
    Port 2223
Host strange
    HostName 127.0.0.1
    Port 2222
    HostKeyAlias another
    UserKnownHostsFile /root/t-ssh/known
    IdentityFile /root/t-ssh/key
"""

SETUP = """
mkdir -p /run/sshd /root/t-ssh /root/.ssh /home/alice/.ssh
cd /root/t-ssh
rm -f host key host.pub key.pub
ssh-keygen -q -t ed25519 -N '' -f host
ssh-keygen -q -t ed25519 -N '' -f key
echo "node $(cut -d' ' -f1,2 host.pub)" > known
cp key.pub /root/.ssh/authorized_keys
cp key.pub /home/alice/.ssh/authorized_keys
chown -R alice /home/alice/.ssh
# No password, which is something else than a locked account.
usermod -p '*' alice
"""


@pytest.fixture
def machines(scene: Scene) -> Iterator[Scene]:
    node = scene.node
    node.run(["rm", "-rf", "/run/gpuprestart"])
    node.run(["sh", "-ec", SETUP])
    node.write("/root/t-ssh/sshd", SSHD)
    node.write("/root/.ssh/config", CONFIG, mode=0o600)
    node.start(["/usr/sbin/sshd", "-D", "-e", "-f", "/root/t-ssh/sshd"], unit=scene.name("sshd"))
    node.wait_for(
        lambda: node.run(["ssh", "-o", "BatchMode=yes", "gpu1", "true"], check=False).returncode == 0,
        timeout=20,
        what="sshd lets us in",
    )
    yield scene
    node.run(["rm", "-rf", "/root/.ssh", "/home/alice/.ssh"])


def asked(scene: Scene, *words: str, timeout: float = 90) -> subprocess.CompletedProcess[str]:
    return scene.node.run([GPUPRESTART, *words], check=False, timeout=timeout)


def test_status_of_another_machine_is_what_that_machine_shows(machines: Scene) -> None:
    machines.service("--open", "0", "--gpu", "0", "--mib", "1523", unit="ollama.service")
    machines._known("ollama.service")
    there, here = asked(machines, "status", "-H", "gpu1"), asked(machines, "status")
    assert (there.returncode, there.stderr) == (0, "")

    def without_age(text: str) -> list[str]:
        return [re.sub(r" +\d+ (s|min)( \d+ s)?", "", line) for line in text.splitlines()]

    assert there.stdout.startswith("gpu1:\n\n") and without_age(there.stdout)[2:] == without_age(here.stdout)


def test_machines_that_do_not_answer_are_rows_and_the_others_are_shown(machines: Scene) -> None:
    hosts = ["gpu1", "down", "strange", "gpu2", "gpu1"]
    done = asked(machines, "status", *(word for host in hosts for word in ("-H", host)))
    assert done.returncode == 69
    rows = done.stdout.split("\n\n")[0].splitlines()
    assert [row.split()[0] for row in rows] == ["HOST", "gpu1", "down", "strange", "gpu2"]
    assert "8/8" in rows[1] and "8/8" in rows[4]
    assert "Connection refused" in rows[2] and "Host key verification failed" in rows[3]
    assert done.stdout.count("GPU-a0576ece") == 2


def test_nobody_is_asked_for_a_password(machines: Scene) -> None:
    done = asked(machines, "status", "-H", "bench@wants-password")
    assert done.returncode == 69 and "Permission denied" in done.stdout + done.stderr


def test_a_machine_without_the_program_says_so(machines: Scene) -> None:
    machines.node.run(["mv", GPUPRESTART, "/root/gpuprestart"])
    try:
        done = machines.node.run(["/usr/bin/python3", "/root/gpuprestart", "status", "-H", "gpu1"], check=False)
    finally:
        machines.node.run(["mv", "/root/gpuprestart", GPUPRESTART])
    assert done.returncode == 69 and "not installed" in done.stdout + done.stderr


def test_json_is_a_list_in_the_order_in_which_they_were_typed(machines: Scene) -> None:
    done = asked(machines, "status", "--json", "-H", "down", "-H", "gpu2")
    down, up = json.loads(done.stdout)
    assert (down["host"], up["host"], up["exit"]) == ("down", "gpu2", 0)
    assert "refused" in down["fault"] and len(up["answer"]["gpus"]) == 8


def test_csv_says_which_machine_a_line_is_of(machines: Scene) -> None:
    lines = asked(machines, "status", "--csv", "-H", "gpu1", "-H", "gpu2").stdout.splitlines()
    assert lines[:2] == ["host, index, memory.used [MiB]", "gpu1, 0, 3 MiB"] and lines[-1] == "gpu2, 7, 3 MiB"


def test_check_history_and_doctor(machines: Scene) -> None:
    server = machines.server(gpus="0,1", command="/usr/bin/gpuprestart clean")
    assert machines.start(server)
    machines.node.systemctl("stop", server)
    machines.service("--open", "1", "--gpu", "1", "--mib", "900")
    done = asked(machines, "check", "--unit", server, "-H", "gpu1")
    assert done.returncode == 75 and "protected" in done.stdout and "systemctl stop t-live-" in done.stdout
    assert asked(machines, "check", "--gpus", "0", "-H", "gpu1", "-H", "gpu2").returncode == 0
    runs = asked(machines, "history", server, "-H", "gpu1", "-H", "gpu2").stdout
    assert [line.split()[0] for line in runs.splitlines() if server in line and " clean " in line] == ["gpu1", "gpu2"]
    found = asked(machines, "doctor", server, "-H", "gpu1")
    assert "systemd answers" in found.stdout and found.stdout.startswith("gpu1:")


def test_it_works_without_root_there_and_says_what_it_could_not_see(machines: Scene) -> None:
    done = asked(machines, "status", "-H", "alice@gpu1")
    assert done.returncode == 0 and "GPU-a0576ece" in done.stdout
    assert "only root may see who holds a GPU" in done.stdout + done.stderr


@pytest.mark.parametrize("verb", ["check", "history", "doctor"])
def test_without_root_there_every_verb_says_so(machines: Scene, verb: str) -> None:
    machines.service("--open", "1", "--gpu", "1", "--mib", "900")
    done = asked(machines, verb, "-H", "alice@gpu1", "-H", "gpu2")
    rows = done.stdout.split("\n\n")[0].splitlines()
    assert [row.split()[0] for row in rows] == ["HOST", "alice@gpu1", "gpu2"]
    exit, row, said = {
        "check": (77, "denied", "run it as root"),
        "history": (0, "", "gpuprestart: alice@gpu1: this may not be all, for only root"),
        "doctor": (69, "privileges", "; not everything could be looked at"),
    }[verb]
    assert done.returncode == exit and rows[1].endswith(row) and said in done.stdout + done.stderr


def test_one_run_is_told_by_the_machine_that_has_it(machines: Scene) -> None:
    server = machines.server(gpus="0,1")
    assert machines.start(server)
    run = machines.verdict(server).verdict["run"]
    there, here = asked(machines, "history", "show", run, "-H", "gpu1"), asked(machines, "history", "show", run)
    assert (there.returncode, there.stderr) == (0, "") and there.stdout == f"gpu1:\n\n{here.stdout}"
    (found,) = json.loads(asked(machines, "history", "show", run, "-H", "gpu1", "--json").stdout)
    (same,) = json.loads(asked(machines, "history", "show", run, "--json").stdout)
    assert found["answer"] == [{**same, "host": "gpu1"}]
    done = asked(machines, "history", "show", "0" * 31, "-H", "gpu1", "-H", "down")
    assert done.returncode == 69 and "has no verdict of a run" in done.stdout and "refused" in done.stdout


def test_a_driver_that_does_not_answer_there_is_told_by_that_machine(machines: Scene) -> None:
    machines.policy("[deadline]\nnvml_init = '500 ms'\n")
    machines.gpu.ask("hang", function="nvmlInit*")
    done = asked(machines, "check", "-H", "gpu1", "-H", "down")
    up, down = done.stdout.split("\n\n")[0].splitlines()[1:]
    assert done.returncode == 69 and up.endswith("unknown") and "refused" in down
    assert "driver" in done.stdout.split("\n\n")[-1]


def test_what_is_installed_there_may_be_older_and_a_shell_may_greet(machines: Scene) -> None:
    """Asked for what it does not know, it says so in its own words."""
    node = machines.node
    old = "#!/bin/sh\necho \"gpuprestart: argument VERB: invalid choice: '$1' (choose from clean)\" >&2\nexit 64\n"
    node.write("/home/alice/bin/gpuprestart", old, mode=0o755)
    node.write("/home/alice/.bashrc", "echo Welcome to gpu1; PATH=$HOME/bin:$PATH\n")
    node.write("/home/bench/.bashrc", "echo Welcome to gpu1\n")
    node.run(["sh", "-ec", "cp -a /home/alice/.ssh /home/bench; chown -R bench /home/bench/.ssh; usermod -p '*' bench"])
    try:
        done = asked(machines, "status", "-H", "alice@gpu1", "-H", "bench@gpu1")
    finally:
        node.run(["rm", "-rf", "/home/alice/bin", "/home/alice/.bashrc", "/home/bench/.bashrc", "/home/bench/.ssh"])
    old, greeted = done.stdout.splitlines()[1:3]
    assert done.returncode == 69
    assert "it may be an older one" in old and "invalid choice: 'status'" in old
    assert greeted.startswith("bench@gpu1  8/8") and greeted.endswith("clean")


@pytest.mark.parametrize(
    "words", [("clean", "-H", "gpu1"), ("enable", "x", "-H", "gpu1"), ("status", "--watch", "-H", "gpu1")]
)
def test_nothing_is_done_from_afar(machines: Scene, words: tuple[str, ...]) -> None:
    assert asked(machines, *words).returncode == 64


def test_one_that_is_silent_is_given_up_and_a_signal_leaves_no_ssh(machines: Scene) -> None:
    node = machines.node
    listening = "import signal, socket; s = socket.create_server(('127.0.0.1', 2224)); signal.pause()"
    node.start(["python3", "-c", listening], unit=machines.name("silent"))
    node.run(["sh", "-c", "printf 'Host mute\\n HostName 127.0.0.1\\n Port 2224\\n' >> /root/.ssh/config"])
    done = asked(machines, "status", "-H", "mute", "-H", "gpu1")
    assert done.returncode == 69 and re.search(r"^mute .*(timed out|no answer)", done.stdout, re.MULTILINE)
    unit = machines.name("asking")
    node.start(["sh", "-c", "gpuprestart status -H mute; echo $? > /run/t-exit"], unit=unit)
    node.wait_for(lambda: node.run(["pgrep", "-x", "ssh"], check=False).returncode == 0, timeout=20, what="ssh runs")
    node.run(["pkill", "-INT", "-f", "gpuprestart status -H mut[e]$"])
    node.wait_for(lambda: node.exists("/run/t-exit"), timeout=10, what="it has ended")
    assert node.read("/run/t-exit") == "75\n"
    assert node.run(["pgrep", "-x", "ssh"], check=False).returncode == 1
