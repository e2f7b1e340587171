"""Runs that race: with another unit's, with the next one of their own unit, with a signal (A20, D3)."""

from __future__ import annotations

import json
from signal import SIGKILL

import pytest

from tests.node.scene import HOLDER, Run, Scene, verdicts

CLEAN = "/usr/bin/gpuprestart clean --json"


@pytest.fixture(autouse=True)
def no_claims(scene: Scene) -> None:
    """What earlier runs left is gone."""
    scene.node.run(["rm", "-rf", "/run/gpuprestart"])


# Two starts at once --------------------------------------------------------------------------------------------------

#: Pairs of units, one pair on a GPU at a time.
ROUNDS, GPUS = 50, 8


@pytest.mark.case("A20")
@pytest.mark.parametrize("first", range(0, ROUNDS, GPUS))
def test_of_two_units_on_one_gpu_exactly_one_starts(scene: Scene, first: int) -> None:
    """Both start at the same moment, and a server allocates only a second after it is up: its GPU looks free."""
    gpus = range(min(GPUS, ROUNDS - first))
    # From round to round the answer takes longer, so that the second comes at another place of the first one's way.
    for gpu in gpus:
        scene.gpu.ask("delay", function="nvmlDeviceGetMemoryInfo*", gpu=gpu, ms=(first + gpu) * 2)
    late = HOLDER + " --open {0} --gpu {0} --mib 60000 --delay-alloc 1"
    pairs = [
        [scene.server(gpus=str(gpu), server=late.format(gpu), more=f"Type=notify\n{NAMED}") for _ in range(2)]
        for gpu in gpus
    ]
    scene.node.systemctl("start", *[unit for pair in pairs for unit in pair], check=False)
    for pair in pairs:
        states = {unit: scene.node.show(unit, "ActiveState")["ActiveState"] for unit in pair}
        assert sorted(states.values()) == ["active", "failed"], states
        winner, loser = sorted(pair, key=lambda unit: states[unit])
        (given,), (run,) = _runs(scene, winner), _runs(scene, loser)
        assert (given.outcome, given.exit, given.fates) == ("clean", 0, {})
        assert (run.outcome, run.exit, run.fates) == ("protected", 75, {})
        assert winner in run.verdict["message"]
        scene.gpu.ask("wait", allocated=int(scene.node.show(winner, "MainPID")["MainPID"]))
    units = [f"GPUPRESTART_UNIT={unit}" for pair in pairs for unit in pair]
    assert scene.node.journal(*units, GPUPRESTART_EVENT="holder-signalled") == []


# The next start of one's own unit ------------------------------------------------------------------------------------

#: Seconds from SIGTERM to SIGKILL.
GRACE = 2
POLICY = f"[deadline]\nterm = '{GRACE} s'\n"


@pytest.mark.case("D3")
@pytest.mark.parametrize("how", ["restart --no-block", "stop, start --no-block"])
@pytest.mark.parametrize("what", ["ends", "waits"])
def test_started_again_while_its_hook(scene: Scene, what: str, how: str) -> None:
    """The earlier run has its say and is over before the next begins, which waits for the same memory."""
    scene.policy(POLICY)
    stubborn = ["--ignore-term"] if what == "ends" else []
    _, (orphan,) = scene.orphans(
        *("--open", "0", "--gpu", "0", "--mib", "900"), *("--alloc", "release_delay=60"), *stubborn
    )
    server = scene.server(gpus="0", more=NAMED)
    scene.node.systemctl("start", "--no-block", server)
    first = _waiting(scene, server, for_somebody=what == "ends")
    for command in how.split(", "):
        scene.node.systemctl(*command.split(), server)
    second = _waiting(scene, server, unlike=first)
    scene.gpu.ask("free", pid=orphan, gpu=0)
    scene.await_state(server, "active")

    interrupted, run = _runs(scene, server)
    assert (interrupted.verdict["run"], run.verdict["run"]) == (first, second)
    assert (interrupted.outcome, interrupted.exit) == ("interrupted", 75)
    assert (run.outcome, run.exit) == ("cleaned" if what == "ends" else "clean", 0)
    # One that is dead is not signalled again; one that was left alive by the first run gets its whole grace anew.
    told, ended = (orphan, "SIGTERM"), (orphan, "SIGKILL")
    assert scene.signals(interrupted) == [told]
    assert scene.signals(run) == ([told, ended] if what == "ends" else [])
    if what == "ends":
        sent = [int(each["__MONOTONIC_TIMESTAMP"]) / 1e6 for each in scene.records(run, "holder-signalled")]
        assert sent[1] - sent[0] >= GRACE
    last = max(int(each["__MONOTONIC_TIMESTAMP"]) for each in scene.records(interrupted))
    assert last < min(int(each["__MONOTONIC_TIMESTAMP"]) for each in scene.records(run))
    assert _unlocked(scene)
    assert second in scene.node.run(["sh", "-c", "cat /run/gpuprestart/claims/*"]).stdout


@pytest.mark.case("D3")
@pytest.mark.parametrize("number", ["TERM", "HUP", "INT", "QUIT"])
def test_a_signal_to_the_hook(scene: Scene, number: str) -> None:
    leak = scene.gpu.ask("leak", gpu=0, mib=900)["id"]
    server = scene.server(gpus="0", more=NAMED)
    _is_interrupted_by(scene, server, number, "kill", "--kill-who=control", f"--signal={number}", server)
    scene.gpu.ask("free", id=leak)
    assert scene.start(server)
    assert [run.outcome for run in _runs(scene, server)] == ["interrupted", "clean"]


@pytest.mark.case("D3")
@pytest.mark.parametrize(
    "setting, number",
    [
        ("KillSignal=SIGHUP", "HUP"),
        ("KillSignal=SIGINT", "INT"),
        ("KillSignal=SIGQUIT", "QUIT"),
        ("KillSignal=SIGUSR1", "USR1"),
        ("KillSignal=SIGUSR2", "USR2"),
        ("SendSIGHUP=yes", "TERM"),
    ],
)
def test_a_unit_whose_server_is_ended_by_another_signal(scene: Scene, setting: str, number: str) -> None:
    """systemd ends the hook by the same one; SIGHUP comes right behind SIGTERM, and takes no verdict away."""
    scene.gpu.ask("leak", gpu=0, mib=900)
    server = scene.server(gpus="0", more=f"{setting}\n{NAMED}")
    _is_interrupted_by(scene, server, number, "stop", server)


def test_a_terminal_that_is_closed_ends_nothing_under_nohup(scene: Scene) -> None:
    leak = scene.gpu.ask("leak", gpu=0, mib=900)["id"]
    unit = scene.name("typed")
    typed = scene.node.start(
        ["nohup", *CLEAN.split(), "--gpus", "0"], unit=unit, properties=[f"SyslogIdentifier={unit}"]
    )
    pid = scene.node.show(typed, "MainPID")["MainPID"]
    lock = ["grep", "-rqw", pid, "/run/gpuprestart/locks"]
    scene.node.wait_for(
        lambda: scene.node.run(lock, check=False).returncode == 0, timeout=10, what="it judges, under nohup"
    )
    scene.node.systemctl("kill", "--kill-who=all", "--signal=HUP", typed)
    scene.gpu.ask("free", id=leak)
    (run,) = scene.node.wait_for(lambda: _runs(scene, typed), timeout=10, what="it has a verdict")
    assert (run.outcome, run.exit) == ("clean", 0)


# Twenty refusals in a row --------------------------------------------------------------------------------------------

ATTEMPTS = 20

#: Counts the attempts of a unit's start, and takes away what stood against all before.
COUNT = """
echo >> /run/t-attempts
test $(wc -l < /run/t-attempts) -le {most} || {{ {remedy}; }}
"""

RESTART = """
Restart=on-failure
RestartSec=100ms
ExecStartPre=+/usr/bin/gpuprestart clean --json

[Unit]
StartLimitIntervalSec=0
"""


@pytest.mark.parametrize("obstacle", ["somebody", "nobody"])
def test_refused_again_and_again(scene: Scene, obstacle: str) -> None:
    """A unit that is restarted for ever is refused in the same few words each time, and starts once it may."""
    scene.policy("[memory]\nsettle = '100 ms'\n")
    _, (orphan,) = scene.orphans("--open", "1", "--gpu", "1", "--mib", "900")
    if obstacle == "somebody":
        other, _ = scene.service("--open", "0", "--gpu", "0", "--mib", "20480", user="alice")
        remedy = f"systemctl stop {other}"
    else:
        remedy = f"simctl free --id {scene.gpu.ask('leak', gpu=0, mib=900)['id']}"
    scene.node.run(["rm", "-f", "/run/t-attempts"])
    server = scene.server(gpus="0,1", command="/bin/sh -e /run/t-count", more=NAMED + RESTART)
    # The last attempt has the time that it needs.
    scene.policy("[deadline]\ntotal = '500 ms'\n", name=f"{server}.toml", base="")
    scene.node.write("/run/t-count", COUNT.format(most=ATTEMPTS, remedy=f"{remedy}; rm /etc/gpuprestart/{server}.toml"))
    scene.node.systemctl("start", "--no-block", server)
    scene.node.wait_for(
        lambda: scene.node.show(server, "ActiveState")["ActiveState"] == "active", timeout=90, what=f"{server} is up"
    )

    *refused, last = _runs(scene, server)
    assert len(refused) == ATTEMPTS
    records = [scene.node.journal(GPUPRESTART_RUN=run.verdict["run"]) for run in (*refused, last)]
    told = [[each["GPUPRESTART_EVENT"] for each in some] for some in records]
    sent = [[int(each["HOLDER_PID"]) for each in some if "GPUPRESTART_SIGNAL" in each] for some in records]
    if obstacle == "somebody":
        # Whoever is stale beside somebody alive is ended when that is of use, by the run that may go on.
        assert {(run.outcome, run.exit, *run.fates) for run in refused} == {("protected", 75)}
        assert told[:-1] == [["run-started", "holder-found", "gpu-verdict", "gpu-verdict", "verdict"]] * ATTEMPTS
        assert sent == [[]] * ATTEMPTS + [[orphan]]
    else:
        assert told[0][:4] == ["run-started", "holder-found", "holder-signalled", "holder-gone"]
        del refused[0]
        assert {(run.outcome, run.exit) for run in refused} == {("unattributed", 75)}
        assert told[1:-1] == [["run-started", "gpu-verdict", "gpu-verdict", "verdict"]] * (ATTEMPTS - 1)
        assert sent == [[orphan]] + [[]] * ATTEMPTS
    assert len({run.verdict["message"] for run in refused}) == 1
    assert (last.outcome, last.exit) == ("cleaned" if obstacle == "somebody" else "clean", 0)
    # What lies in /run is as much as after a single run.
    uuids = sorted(gpu["uuid"] for gpu in last.verdict["gpus"])
    left = scene.node.run(["find", "/run/gpuprestart", "-type", "f", "-printf", "%P\n"]).stdout.split()
    assert sorted(left) == [f"{folder}/{uuid}" for folder in ("claims", "locks") for uuid in uuids]


# SIGTERM at any moment -----------------------------------------------------------------------------------------------

#: Runs the hook so many times, tells it to end at a random moment after it has begun to listen, and prints what came
#: of it; a process that the hook leaves behind becomes a child of this one.
TELL = """
import ctypes, json, os, random, subprocess, sys, time
assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0
seed, rounds, most, *command = sys.argv[1:]
chance = random.Random(int(seed))
def listens(pid):
    caught, = (line.split()[1] for line in open(f"/proc/{pid}/status") if line.startswith("SigCgt:"))
    return int(caught, 16) & 1 << 14
for _ in range(int(rounds)):
    hook = subprocess.Popen(command, stdout=subprocess.PIPE)
    while not listens(hook.pid):
        time.sleep(0.005)
    moment = chance.uniform(0, float(most))
    time.sleep(moment)
    hook.terminate()
    told = time.monotonic()
    said = hook.communicate()[0]
    took = time.monotonic() - told
    try:
        left = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        left = None
    print(json.dumps({"moment": moment, "took": took, "left": left, "exit": hook.returncode, "verdict": said.decode()}))
sys.exit(1)
"""

#: On each of the GPUs, and seconds: the longest wait before SIGTERM is a little longer than a run.
TIMES, LONGEST, DEADLINE = 13, 1.3, 1.0


@pytest.mark.case("D3")
def test_told_to_end_at_any_moment_of_a_run(scene: Scene) -> None:
    """While it looks, ends somebody, or waits for memory: there is a verdict at once, and nobody is left."""
    scene.node.write("/run/t-tell.py", TELL)
    for gpu in range(0, GPUS, 2):
        scene.gpu.ask("leak", gpu=gpu, mib=900)
        scene.orphans("--open", str(gpu + 1), "--gpu", str(gpu + 1), "--mib", "900", "--ignore-term")
    tell = f"/usr/bin/python3 /run/t-tell.py {{}} {TIMES} {LONGEST} {CLEAN} --deadline {DEADLINE}s"
    units = [scene.server(gpus=str(gpu), command=tell.format(gpu), more=NAMED) for gpu in range(GPUS)]
    scene.node.systemctl("start", *units, check=False)
    late = []
    for gpu, unit in enumerate(units):
        printed = (str(each["MESSAGE"]) for each in scene.node.journal(SYSLOG_IDENTIFIER=unit))
        told = [json.loads(line) for line in printed if line.startswith('{"moment"')]
        assert len(told) == TIMES
        for each in told:
            assert each["verdict"], each
            verdict = json.loads(each["verdict"])
            # One that was over by then has the verdict that it would have had.
            over = "not-freed" if gpu % 2 else "unattributed"
            assert verdict["outcome"] in ("interrupted", over) and each["exit"] == verdict["exit"] == 75, each
            assert verdict["outcome"] == "interrupted" or each["moment"] > DEADLINE / 2, each
            # Nobody, or one that had been sent SIGKILL and was not to be waited for any longer.
            assert each["left"] is None or each["left"][1] == SIGKILL, each
            late += [each] if each["took"] >= 1 or each["left"] else []
        invocation = scene.node.show(unit, "InvocationID")["InvocationID"]
        assert len(scene.node.journal(GPUPRESTART_RUN=invocation, GPUPRESTART_EVENT="verdict")) == TIMES
    # This machine may have had something else to do now and then.
    assert len(late) <= 5 and all(each["took"] < 3 for each in late), late


# Gone before anybody has looked --------------------------------------------------------------------------------------


@pytest.mark.case("D6")
def test_the_verdict_of_a_hook_that_has_gone_is_in_the_log_of_its_unit(scene: Scene) -> None:
    """journald asks the kernel whose a record is when it comes to read it, and a busy one comes too late."""
    scene.gpu.ask("leak", gpu=0, mib=900)
    # What a unit prints is known to be the unit's all along; here there is nothing but the record.
    more = "StandardOutput=null\nStandardError=null\n"
    server = scene.server(gpus="0", command=f"{CLEAN} --deadline 300ms", more=more)
    scene.node.systemctl("kill", "--signal=STOP", "systemd-journald.service")
    try:
        assert not scene.start(server)
    finally:
        scene.node.systemctl("kill", "--signal=CONT", "systemd-journald.service")
    (record,) = scene.node.journal(unit=server, GPUPRESTART_EVENT="verdict")
    assert (record["GPUPRESTART_UNIT"], record["GPUPRESTART_OUTCOME"]) == (server, "unattributed")


# Their parts ---------------------------------------------------------------------------------------------------------

#: What a unit's commands print bears the unit's name from the start: where many end at once, journald comes to look at
#: some of them too late to tell whose they were.
NAMED = "SyslogIdentifier=%n\n"


def _waiting(scene: Scene, server: str, *, for_somebody: bool = False, unlike: str = "") -> str:
    """The invocation of the unit whose hook waits for memory, or for somebody whom it has told to end, once there is
    another one than before."""

    def waits() -> str:
        shown = scene.node.show(server, "StatusText", "SubState", "InvocationID")
        invocation = shown["InvocationID"]
        if shown["SubState"] != "start-pre" or invocation == unlike:
            return ""
        if for_somebody:
            told = scene.node.journal(GPUPRESTART_RUN=invocation, GPUPRESTART_EVENT="holder-signalled")
            return invocation if told else ""
        return invocation if shown["StatusText"].startswith("Waiting") else ""

    return scene.node.wait_for(waits, timeout=20, what=f"the hook of {server} waits")


def _is_interrupted_by(scene: Scene, server: str, number: str, *command: str) -> None:
    scene.node.systemctl("start", "--no-block", server)
    _waiting(scene, server)
    scene.node.systemctl(*command)
    scene.await_state(server, "failed")
    (run,) = _runs(scene, server)
    assert (run.outcome, run.exit) == ("interrupted", 75)
    assert run.verdict["message"].startswith(f"SIG{number} ")
    assert len(scene.records(run, "verdict")) == 1
    assert _unlocked(scene) and not scene.node.unit_pids(server)


def _runs(scene: Scene, unit: str) -> list[Run]:
    """All runs of a unit's hook that came to a verdict, by what they printed."""
    found = verdicts(scene.node.journal(SYSLOG_IDENTIFIER=unit))
    return [Run(exit=each["exit"], verdict=each, stdout="", stderr="") for each in found]


def _unlocked(scene: Scene) -> bool:
    """Whether nobody has the lock of any GPU, though there have been runs that took one."""
    script = "set -e; for lock in /run/gpuprestart/locks/*; do flock --nonblock $lock true; done"
    return scene.node.run(["sh", "-c", script], check=False).returncode == 0
