"""A GPU is given to one unit at a time: claims, the lock of those who judge, and waiting for somebody to go (A20)."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import pytest

from tests.node.machine import wait_for
from tests.node.scene import Run, Scene

CLAIMS = "/run/gpuprestart/claims"
LOCKS = "/run/gpuprestart/locks"


@pytest.fixture(autouse=True)
def no_claims(scene: Scene) -> Iterator[None]:
    """What earlier runs left is gone, and a claim that a test forged does not outlive it."""
    scene.node.run(["rm", "-rf", "/run/gpuprestart"])
    yield
    scene.node.run(["rm", "-rf", CLAIMS])


# Two starts at once --------------------------------------------------------------------------------------------------


def test_three_units_that_share_gpus_two_by_two(scene: Scene) -> None:
    """Whoever is first has two of them, and each other unit lacks one; none waits for ever."""
    scene.gpu.ask("delay", function="nvmlDeviceGetMemoryInfo*", gpu="[012]", ms=50)
    units = [scene.server(gpus=gpus) for gpus in ("0,1", "1,2", "2,0")]
    scene.node.systemctl("start", *units, check=False)
    states = {unit: scene.node.show(unit, "ActiveState")["ActiveState"] for unit in units}
    assert sorted(states.values()) == ["active", "failed", "failed"], states
    (winner,) = (unit for unit in units if states[unit] == "active")
    for unit in units:
        if unit != winner:
            _is_protected_from(scene, scene.verdict(unit), winner)


# Claims --------------------------------------------------------------------------------------------------------------


@pytest.mark.case("A20")
def test_a_claim_tells_who_was_given_the_gpu(scene: Scene) -> None:
    server = _given(scene, "1,2")
    uuids = _uuids(scene)
    claims = _claims(scene)
    assert sorted(claims) == sorted([uuids[1], uuids[2]])
    invocation = scene.node.show(server, "InvocationID")["InvocationID"]
    assert all(server in text and invocation in text for text in claims.values())
    other = scene.server(gpus="2,3")
    assert not scene.start(other)
    run = scene.verdict(other)
    _is_protected_from(scene, run, server)
    # The sentence names the one GPU that both want, not all of either.
    assert "GPU 2 (3 MiB used, limit 64 MiB) is claimed by" in run.verdict["message"]
    assert sorted(_claims(scene)) == sorted(claims)
    # A GPU beside them is nobody's business.
    assert scene.start(scene.server(gpus="3"))


@pytest.mark.case("A20")
def test_a_claim_holds_while_the_server_is_still_activating(scene: Scene) -> None:
    server = scene.server(gpus="0", more="Type=notify\n")
    scene.node.systemctl("start", "--no-block", server)
    wait_for(lambda: scene.node.show(server, "SubState")["SubState"] == "start", timeout=10, what="the server loads")
    run = scene.clean("--gpus", "0")
    _is_protected_from(scene, run, server)
    assert "activating" in run.verdict["message"]


@pytest.mark.case("A20")
@pytest.mark.parametrize("end", ["stopped", "failed", "restarted"])
def test_a_claim_lapses_with_the_run_of_its_unit(scene: Scene, end: str) -> None:
    server = _given(scene)
    _is_protected_from(scene, scene.clean("--gpus", "0"), server)
    if end == "stopped":
        scene.node.systemctl("stop", server)
    elif end == "failed":
        scene.abandon(server)
    else:
        # It is up again, but by a start that asked nobody: this invocation was given nothing.
        scene.node.write(f"/etc/systemd/system/{server}.d/unasked.conf", "[Service]\nExecStartPre=\n")
        scene.node.systemctl("daemon-reload")
        scene.node.systemctl("restart", server)
        assert scene.node.show(server, "ActiveState")["ActiveState"] == "active"
    run = scene.clean("--gpus", "0")
    assert (run.outcome, run.exit) == ("clean", 0)
    assert _claims(scene) == {}


def test_a_unit_is_not_in_the_way_of_its_own_next_start(scene: Scene) -> None:
    server = _given(scene)
    before = _claims(scene)
    scene.node.systemctl("restart", server)
    assert scene.verdict(server).outcome == "clean"
    after = _claims(scene)
    assert after.keys() == before.keys() and after != before


@pytest.mark.case("A20")
def test_a_refused_start_claims_nothing(scene: Scene) -> None:
    scene.gpu.ask("leak", gpu=1, mib=900)
    server = scene.server(gpus="0,1", command="/usr/bin/gpuprestart clean --json --deadline 1s")
    assert not scene.start(server)
    assert _claims(scene) == {}


@pytest.mark.case("A20")
def test_a_run_without_a_unit_claims_nothing_and_respects_claims(scene: Scene) -> None:
    assert scene.clean("--gpus", "0").outcome == "clean"
    named = scene.server(gpus="0")
    assert scene.clean("--unit", named).outcome == "clean"
    assert _claims(scene) == {}
    server = _given(scene)
    run = scene.clean("--gpus", "0")
    _is_protected_from(scene, run, server)
    assert run.verdict["hints"][0].startswith(f"systemctl stop {server}")
    _is_protected_from(scene, scene.clean("--unit", named), server)
    assert len(_claims(scene)) == 1


@pytest.mark.parametrize("spared", ["t-server-*", "other"])
def test_a_claim_of_a_unit_that_a_rule_spares(scene: Scene, spared: str) -> None:
    scene.policy(f'[[rule]]\nname = "neighbours"\nmatch = {{ unit = "{spared}" }}\naction = "spare"\n')
    first = _given(scene)
    second = scene.server(gpus="0")
    started = scene.start(second)
    run = scene.verdict(second)
    assert started is (spared != "other")
    if started:
        assert run.outcome == "clean"
    else:
        _is_protected_from(scene, run, first)


def test_a_claim_for_what_a_unit_shares_is_not_ended_for(scene: Scene) -> None:
    """The start is refused, so a stale holder beside the claim is left alone."""
    server = _given(scene, "0")
    _, (orphan,) = scene.orphans("--open", "1", "--gpu", "1", "--mib", "900")
    run = scene.clean("--gpus", "0,1")
    _is_protected_from(scene, run, server)
    assert scene.signals(run) == [] and scene.alive(orphan)


@pytest.mark.parametrize("text", ["", "nonsense\n", "unit= invocation= pid=\n", "\\000\\377\\n"])
def test_a_claim_that_cannot_be_read(scene: Scene, text: str) -> None:
    """Somebody was given the GPU, and who it was is not known: that it is free now is not proved."""
    path = f"{CLAIMS}/{_uuids(scene)[0]}"
    scene.node.run(["sh", "-c", f"mkdir -p {CLAIMS}; printf '%b' {shlex.quote(text)} > {path}"])
    run = scene.clean("--gpus", "0")
    assert (run.outcome, run.exit) == ("protected", 75)
    # Nobody can be told to stop "?": what helps is to look at the file, and to take it away.
    assert path in run.verdict["hints"][0]
    assert "systemctl stop ?" not in " ".join(run.verdict["hints"])
    assert scene.node.exists(path)
    assert scene.clean("--gpus", "1").outcome == "clean"


@pytest.mark.parametrize("verb", ["check", "clean"])
def test_a_claim_of_a_unit_that_is_no_more(scene: Scene, verb: str) -> None:
    path = f"{CLAIMS}/{_uuids(scene)[0]}"
    scene.node.write(path, "unit=t-gone.service invocation=0123456789abcdef0123456789abcdef pid=1 parent=\n")
    run = scene.clean("--gpus", "0", verb=verb)
    assert (run.outcome, run.exit) == ("clean", 0)
    # check touches nothing, not even what is of no use any more.
    assert scene.node.exists(path) is (verb == "check")


# The lock ------------------------------------------------------------------------------------------------------------


@pytest.mark.case("A20")
def test_a_second_start_waits_until_the_first_is_through(scene: Scene) -> None:
    leak = scene.gpu.ask("leak", gpu=0, mib=900)["id"]
    first = _judging(scene)
    second = scene.server(gpus="0")
    scene.node.systemctl("start", "--no-block", second)
    _is_begun(scene, second)
    scene.gpu.ask("free", id=leak)
    scene.await_state(first, "active")
    scene.await_state(second, "failed")
    run = scene.verdict(second)
    _is_protected_from(scene, run, first)
    (earlier,), (later,) = scene.records(scene.verdict(first), "verdict"), scene.records(run, "verdict")
    assert int(earlier["__REALTIME_TIMESTAMP"]) < int(later["__REALTIME_TIMESTAMP"])


@pytest.mark.case("A20")
def test_a_start_waits_for_a_run_that_leaves_no_claim(scene: Scene) -> None:
    leak = scene.gpu.ask("leak", gpu=0, mib=900)["id"]
    typed = scene.node.start(["/usr/bin/gpuprestart", "clean", "--gpus", "0"], unit=scene.name("typed"))
    pid = int(scene.node.show(typed, "MainPID")["MainPID"])
    wait_for(lambda: _locked_by(scene, pid), timeout=10, what="the first run has the lock")
    server = scene.server(gpus="0,1")
    scene.node.systemctl("start", "--no-block", server)
    _is_begun(scene, server)
    scene.gpu.ask("free", id=leak)
    scene.await_state(server, "active")
    run = scene.verdict(server)
    assert run.outcome == "clean"
    assert scene.node.show(typed, "Result", "ActiveState") == {"Result": "success", "ActiveState": "inactive"}


@pytest.mark.case("A20")
@pytest.mark.parametrize("gpus", ["0", "0,1", "7,0"])
def test_who_has_the_lock_is_named_at_the_deadline(scene: Scene, gpus: str) -> None:
    """Also where only some of the GPUs are the same."""
    scene.gpu.ask("leak", gpu=0, mib=900)
    first = _judging(scene)
    control = scene.node.show(first, "ControlPID")["ControlPID"]
    run = scene.clean("--gpus", gpus, "--deadline", "500ms")
    assert (run.outcome, run.exit) == ("protected", 75)
    assert f"{first} (PID {control})" in run.verdict["message"]
    assert run.verdict["hints"]
    assert 0.5 <= run.verdict["duration_s"] < 3
    assert scene.node.show(first, "ControlPID")["ControlPID"] == control


@pytest.mark.case("A20")
def test_gpus_beside_those_that_are_judged_are_not_locked(scene: Scene) -> None:
    scene.gpu.ask("leak", gpu=0, mib=900)
    _judging(scene, gpus="0,1")
    run = scene.clean("--gpus", "2,3", "--deadline", "5s")
    assert (run.outcome, run.exit) == ("clean", 0)
    assert run.verdict["duration_s"] < 3


@pytest.mark.case("A20")
@pytest.mark.parametrize("children", ["end", "hang"])
def test_the_lock_of_a_run_that_is_killed(scene: Scene, children: str) -> None:
    """It is released by death. A child that hangs, as one does that asks a wedged process, does not keep it."""
    scene.gpu.ask("leak", gpu=0, mib=900)
    first = _judging(scene, more="KillMode=process\n")
    hook = int(scene.node.show(first, "ControlPID")["ControlPID"])
    assert scene.clean("--gpus", "0", "--deadline", "100ms").outcome == "protected"
    others = sorted(set(scene.node.unit_pids(first)) - {hook})
    assert others
    if children == "hang":
        scene.node.run(["kill", "-STOP", *map(str, others)])
    scene.node.run(["kill", "-KILL", str(hook)])
    scene.await_state(first, "failed")
    if children == "end":
        wait_for(lambda: not any(scene.alive(pid) for pid in others), timeout=5, what="they end with it")
    assert scene.clean("--gpus", "0", "--deadline", "1s").outcome == "unattributed"


@pytest.mark.case("A20")
def test_check_takes_no_lock_and_leaves_no_claim(scene: Scene) -> None:
    server = scene.server(gpus="0", command="/usr/bin/gpuprestart check --json")
    assert scene.start(server)
    assert scene.verdict(server).outcome == "clean"
    scene.gpu.ask("leak", gpu=1, mib=900)
    assert scene.check("--gpus", "0,1").outcome == "unattributed"
    assert not scene.node.exists("/run/gpuprestart")
    # Nor does it wait for who has one, though it tells what stands against a start.
    _judging(scene, gpus="1")
    run = scene.check("--gpus", "0,1")
    assert (run.outcome, run.exit) == ("unattributed", 75)
    assert run.verdict["duration_s"] < 3
    given = _given(scene, "0")
    _is_protected_from(scene, scene.check("--gpus", "0"), given)


# Waiting for somebody alive to go ------------------------------------------------------------------------------------


def test_somebody_alive_goes_in_time(scene: Scene) -> None:
    """Until then nobody is ended, however stale: it might have been for nothing."""
    scene.policy('[deadline]\nprotected = "15 s"\n')
    live, holder = scene.service("--open", "0", "--gpu", "0", "--mib", "20480", user="alice")
    _, (orphan,) = scene.orphans("--open", "1", "--gpu", "1", "--mib", "900")
    server = scene.server(gpus="0,1")
    _starts_waiting(scene, server)
    assert scene.alive([holder, orphan])
    scene.node.systemctl("stop", live)
    scene.await_state(server, "active")
    run = scene.verdict(server)
    assert (run.outcome, run.exit) == ("cleaned", 0)
    assert scene.signals(run) == [(orphan, "SIGTERM")]
    assert run.fates[holder] == "exited"
    (sent,) = scene.records(run, "holder-signalled")
    stopped = scene.node.show(live, "InactiveEnterTimestampMonotonic")["InactiveEnterTimestampMonotonic"]
    # A unit that systemd no longer knows has no timestamp: it was transient, and is gone.
    assert stopped == "0" or int(stopped) < int(sent["__MONOTONIC_TIMESTAMP"])


def test_somebody_alive_is_no_more_when_nobody_else_is_there(scene: Scene) -> None:
    scene.policy('[deadline]\nprotected = "15 s"\n')
    live, _ = scene.service("--open", "0", "--gpu", "0", "--mib", "20480", user="alice")
    server = scene.server(gpus="0")
    _starts_waiting(scene, server)
    scene.node.systemctl("stop", live)
    scene.await_state(server, "active")
    run = scene.verdict(server)
    assert (run.outcome, run.exit) == ("clean", 0)
    assert scene.signals(run) == []


def test_a_claim_lapses_while_it_is_waited_for(scene: Scene) -> None:
    scene.policy('[deadline]\nprotected = "15 s"\n')
    first = _given(scene)
    second = scene.server(gpus="0")
    _starts_waiting(scene, second)
    scene.node.systemctl("stop", first)
    scene.await_state(second, "active")
    assert scene.verdict(second).outcome == "clean"
    (claim,) = _claims(scene).values()
    assert second in claim


@pytest.mark.parametrize("by", ["memory", "claim"])
def test_somebody_alive_does_not_go(scene: Scene, by: str) -> None:
    scene.policy('[deadline]\nprotected = "700 ms"\n')
    if by == "memory":
        live, _ = scene.service("--open", "0", "--gpu", "0", "--mib", "20480", user="alice")
    else:
        live = _given(scene)
    server = scene.server(gpus="0")
    assert not scene.start(server)
    run = scene.verdict(server)
    assert (run.outcome, run.exit) == ("protected", 75)
    assert live in run.verdict["message"]
    assert 0.7 <= run.verdict["duration_s"] < 3
    assert scene.signals(run) == []


# Their parts ---------------------------------------------------------------------------------------------------------


def _given(scene: Scene, gpus: str = "0") -> str:
    """A unit that has been given these GPUs, whose server does not use them yet."""
    server = scene.server(gpus=gpus)
    assert scene.start(server)
    return server


def _judging(scene: Scene, gpus: str = "0", more: str = "") -> str:
    """A unit whose hook has the locks of these GPUs and waits for memory that nobody gives back."""
    server = scene.server(gpus=gpus, more=more)
    _starts_waiting(scene, server)
    return server


def _starts_waiting(scene: Scene, server: str) -> None:
    scene.node.systemctl("start", "--no-block", server)

    def waits() -> bool:
        shown = scene.node.show(server, "StatusText", "SubState")
        return shown["SubState"] == "start-pre" and shown["StatusText"].startswith(("Waiting", "Settling"))

    wait_for(waits, timeout=10, what=f"the hook of {server} waits")


def _is_begun(scene: Scene, server: str) -> None:
    """Its hook has told what it is going to judge, and has said nothing since: it waits for its turn."""
    told = wait_for(lambda: scene.node.journal(GPUPRESTART_UNIT=server), timeout=10, what=f"{server} has begun")
    assert [each["GPUPRESTART_EVENT"] for each in told] == ["run-started"]
    assert scene.node.show(server, "SubState")["SubState"] == "start-pre"


def _is_protected_from(scene: Scene, run: Run, unit: str) -> None:
    """Refused because the GPU was given to that unit, and nobody was signalled for it."""
    assert (run.outcome, run.exit) == ("protected", 75)
    assert unit in run.verdict["message"]
    assert any(unit in hint for hint in run.verdict["hints"])
    assert run.fates == {}


def _uuids(scene: Scene) -> list[str]:
    return [gpu["uuid"] for gpu in scene.gpu.ask("state")["gpus"]]


def _claims(scene: Scene) -> dict[str, str]:
    """What lies in the folder of claims, by GPU."""
    names = scene.node.run(["ls", CLAIMS], check=False).stdout.split()
    return {name: scene.node.read(f"{CLAIMS}/{name}") for name in names}


def _locked_by(scene: Scene, pid: int) -> bool:
    done = scene.node.run(["grep", "-rqw", str(pid), LOCKS], check=False)
    return done.returncode == 0
