"""What a site's rules may say, and programs that serve the GPUs themselves, against real processes (cases B)."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.node.machine import LoginSession
from tests.node.scene import HOLDER, Run, Scene

MIB = 1 << 20
HEX = "6f1c3d5a9e0b47d28c6f1c3d5a9e0b47d28c6f1c3d5a9e0b47d28c6f1c3d5a9e"
CLEAN = "/usr/bin/gpuprestart clean --json --deadline 10s"
HOLD = ("--open", "0", "--gpu", "0", "--mib", "900")

Program = Callable[[str], str]


@pytest.fixture
def program(scene: Scene) -> Iterator[Program]:
    """Puts a copy of Python, root's, at a path of the node, so that a holder's executable is there; taken away again
    after the test."""
    made: list[str] = []

    def put(path: str) -> str:
        if path not in made:
            assert not scene.node.exists(path)
            made.append(path)
            scene.node.run(
                ["sh", "-ec", 'mkdir -p "$(dirname $1)"; cp "$(readlink -f /usr/bin/python3)" $1', "sh", path]
            )
        return path

    try:
        yield put
    finally:
        if made:
            scene.node.run(["rm", "-f", *made])


def _rule(action: str, match: str, *, name: str = "the rule", more: str = "") -> str:
    return f"[[rule]]\nname = '{name}'\nmatch = {{ {match} }}\naction = '{action}'\n{more}\n"


def _nobody(scene: Scene, run: Run, *holders: int) -> None:
    assert (run.outcome, run.exit) == ("protected", 75)
    assert run.fates == {} and scene.signals(run) == []
    assert scene.alive(holders)


def _only(scene: Scene, run: Run, *holders: int) -> None:
    """These holders were ended, nobody else, and that was enough."""
    assert (run.outcome, run.exit) == ("cleaned", 0)
    assert {pid for pid, _ in scene.signals(run)} == set(holders)
    assert run.fates == dict.fromkeys(holders, "terminated")


# Every key, every action ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "match, fits",
    [
        ("unit = 't-bench-*'", True),
        ("unit = 't-bench-[0-9].service'", False),
        ("unit = 't-bench-*.scope'", False),
        ("user = 'bench'", True),
        ("user = 5003", True),
        ("user = '5003'", True),
        ("user = 'ben'", False),
        ("user = 5002", False),
        ("exe = 'python3\\.[0-9]+$'", True),
        ("exe = '^python'", False),
        ("comm = 'enchma'", True),
        ("comm = '^enchma'", False),
        ("cmdline = 'sglang\\.launch_server --port 3'", True),
        ("cmdline = 'sglang_launch'", False),
        ("age = '1 ms'", True),
        ("age = '10 min'", False),
        ("session = '*'", False),
        ("container = 'docker'", False),
        # Every key must fit.
        ("user = 'bench', comm = 'benchmark', unit = 't-*', exe = 'python', cmdline = 'sglang', age = '1 ms'", True),
        ("user = 'bench', comm = 'benchmark', unit = 't-*', exe = 'python', cmdline = 'vllm', age = '1 ms'", False),
    ],
)
def test_a_key(scene: Scene, match: str, fits: bool) -> None:
    """What a failed unit has left is stale, unless the site refuses; what it spares is not counted."""
    words = ("--comm", "benchmark", "--x", "sglang.launch_server", "--port", "30000")
    _, (orphan,) = scene.orphans(*HOLD, *words, unit=scene.name("bench-7"), user="bench")
    scene.policy(_rule("refuse", match))
    refused = scene.check("--gpus", "0")
    scene.policy(_rule("spare", match))
    spared = scene.check("--gpus", "0")
    assert refused.outcome == ("protected" if fits else "not-freed")
    assert spared.outcome == ("clean" if fits else "not-freed")
    for run, action in ((refused, "refuse"), (spared, "spare")):
        assert run.holder(orphan)["action"] == (action if fits else "kill")
        assert run.holder(orphan)["rule"] == ("the rule" if fits else None)
    assert scene.alive(orphan)


def test_the_first_rule_that_matches_decides(scene: Scene) -> None:
    _, (one,) = scene.orphans(*HOLD, "--comm", "one")
    _, (two,) = scene.orphans(*HOLD, "--comm", "two")
    scene.policy(
        _rule("spare", "comm = 'one'", name="first")
        + _rule("kill", "user = 'model'", name="second")
        + _rule("refuse", "unit = '*'", name="third")
    )
    run = scene.clean("--gpus", "0")
    _only(scene, run, two)
    assert (run.holder(one)["rule"], run.holder(two)["rule"]) == ("first", "second")
    (signalled,) = scene.records(run, "holder-signalled")
    assert (signalled["GPUPRESTART_RULE"], signalled["GPUPRESTART_ACTION"]) == ("second", "kill")
    assert run.verdict["gpus"][0]["used_bytes"] == 903 * MIB
    assert run.verdict["gpus"][0]["limit_bytes"] == 964 * MIB
    assert scene.alive(one)


def test_a_rule_that_refuses_says_where_it_stands(scene: Scene) -> None:
    _, (orphan,) = scene.orphans(*HOLD)
    scene.policy(_rule("refuse", "user = 'model'"))
    run = scene.clean("--gpus", "0")
    _nobody(scene, run, orphan)
    assert "'the rule'" in run.verdict["message"]
    assert "/etc/gpuprestart/policy.toml:3" in " ".join(run.verdict["hints"])


# Overlays ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "site, template, instance, outcome, rule",
    [
        ("refuse", "", "", "protected", "site"),
        ("spare", "kill", "", "cleaned", "template"),
        ("kill", "spare", "", "clean", "template"),
        ("kill", "kill", "spare", "clean", "instance"),
        ("", "refuse", "kill", "cleaned", "instance"),
        ("", "spare", "refuse", "protected", "instance"),
        ("kill", "refuse", "", "protected", "template"),
        # An overlay cannot undo what the site refuses.
        ("refuse", "kill", "", "protected", "site"),
        ("refuse", "", "spare", "protected", "site"),
        ("refuse", "spare", "kill", "protected", "site"),
    ],
)
def test_overlays(scene: Scene, site: str, template: str, instance: str, outcome: str, rule: str) -> None:
    stem = scene.name("over").partition(".")[0]
    unit = scene.server(f"{stem}@qwen.service", gpus="0", command=CLEAN)
    layers = {"policy": site, f"{stem}@.service": template, f"{stem}@qwen.service": instance}
    # Another instance's overlay is none of ours.
    layers[f"{stem}@llama.service"] = "refuse"
    names = ("site", "template", "instance", "other")
    for name, (stem, action) in zip(names, layers.items()):
        text = _rule(action, "user = 'model'", name=name) if action else ""
        scene.policy(text, name=f"{stem}.toml", base="[nvml]\npids = 'ours'\n" if name == "site" else "")
    _, (orphan,) = scene.orphans(*HOLD)
    started = scene.start(unit)
    run = scene.verdict(unit)
    assert (run.outcome, started) == (outcome, outcome != "protected")
    assert run.holder(orphan)["rule"] == rule
    assert len(run.verdict["policy_files"]) == 3
    assert scene.alive(orphan) is (outcome != "cleaned")


def test_an_overlays_keys_win_over_the_sites(scene: Scene) -> None:
    """Table by table and key by key: what the overlay does not say is as the site has it."""
    stem = scene.name("keys").partition(".")[0]
    unit = scene.server(f"{stem}@qwen.service", gpus="0", command=CLEAN.replace("10s", "1s"))
    scene.gpu.ask("leak", gpu=0, mib=300)
    scene.policy("[memory]\nmax_used = '400 MiB'\nmin_free = '200 GiB'\n")
    scene.policy("[memory]\nmin_free = '1 GiB'\n", name=f"{stem}@.service.toml", base="")
    assert scene.start(unit)
    assert scene.verdict(unit).outcome == "clean"
    scene.node.systemctl("stop", unit)
    scene.policy("[memory]\nmax_used = '200 MiB'\n", name=f"{stem}@qwen.service.toml", base="")
    assert not scene.start(unit)
    assert scene.verdict(unit).outcome == "unattributed"


# What somebody alive wants -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "match, reaches",
    [
        ("user = 'alice'", False),
        ("exe = '.*', comm = '.*', cmdline = '.*', age = '1 ms'", False),
        ("unit = 't-nobody-*'", False),
        ("unit = 't-live-*'", True),
        ("unit = '*', user = 'alice'", True),
    ],
)
def test_a_rule_that_kills_what_an_active_unit_has(scene: Scene, match: str, reaches: bool) -> None:
    unit, holder = scene.service(*HOLD, user="alice")
    scene.policy(_rule("kill", match))
    run = scene.clean("--gpus", "0")
    if reaches:
        _only(scene, run, holder)
        assert run.holder(holder)["rule"] == "the rule"
    else:
        _nobody(scene, run, holder)
        assert unit in run.verdict["message"]


@pytest.mark.parametrize(
    "match, reaches", [("user = 'alice'", False), ("session = 'ID'", True), ("session = '*'", True)]
)
def test_a_rule_that_kills_in_a_live_session(scene: Scene, match: str, reaches: bool) -> None:
    session, (holder,) = _in_a_session(scene, shlex.join([HOLDER, *HOLD]))
    try:
        scene.policy(_rule("kill", match.replace("ID", session.id)))
        run = scene.clean("--gpus", "0")
        if reaches:
            _only(scene, run, holder)
        else:
            _nobody(scene, run, holder)
        assert scene.alive(session.leader)
    finally:
        scene.node.run(["systemctl", "kill", "--signal=KILL", session.scope], check=False)


@pytest.mark.case("A4")
def test_a_rule_that_kills_what_a_session_left(scene: Scene) -> None:
    """Nobody alive is known to want it, so the rule need not name the session."""
    session, (holder,) = _in_a_session(scene, f"nohup {shlex.join([HOLDER, *HOLD])} >/dev/null 2>&1")
    scene.node.end_session(session)
    scene.policy(_rule("kill", "user = 'alice'"))
    _only(scene, scene.clean("--gpus", "0"), holder)


@pytest.mark.parametrize(
    "match, reaches",
    [
        ("user = 'root'", False),
        ("unit = '*'", False),
        ("container = 'crio'", False),
        (f"container = '{HEX[1:13]}'", False),
        (f"container = '{HEX[:12]}'", True),
        ("container = 'docker'", True),
    ],
)
def test_a_rule_that_kills_in_a_live_container(scene: Scene, match: str, reaches: bool) -> None:
    """In a PID namespace of its own, as nearly all are."""
    scope = scene._known(f"docker-{HEX}.scope")
    ready = f"/run/{scene.name('ready')}"
    holder = ["unshare", "--pid", "--fork", "--kill-child", "--", HOLDER, *HOLD, "--ready-file", ready]
    scene.node.start_scope(holder, unit=scope)
    scene.node.wait_for(lambda: scene.node.exists(ready), timeout=10, what="the container holds GPU 0")
    pid = scene.node.unit_pids(scope)[-1]
    scene.policy(_rule("kill", match))
    run = scene.clean("--gpus", "0")
    assert run.holder(pid)["owner"] == f"container:docker:{HEX}"
    if reaches:
        assert run.outcome == "cleaned"
        # The first process of a PID namespace ignores a SIGTERM that it does not handle; this one does.
        assert scene.signals(run) == [(pid, "SIGTERM")]
    else:
        _nobody(scene, run, pid)


# Infrastructure (B11, B12, B13) --------------------------------------------------------------------------------------


@pytest.mark.case("B11")
@pytest.mark.parametrize("installed", [True, False])
def test_a_desktop_beside_an_orphan(scene: Scene, program: Program, installed: bool) -> None:
    """Xorg and gnome-shell as they are installed; and two programs that only draw, of no name that is known here."""
    scene.gpu.ask("set_gpu", gpu=0, baseline_mib=0)
    paths = ("/usr/lib/xorg/Xorg", "/usr/bin/gnome-shell") if installed else ("/opt/game", "/usr/bin/compositor")
    draws = [
        shlex.join(
            [program(path), HOLDER, "--open", "all", "--gpu", "0", "--mib", str(mib), "--alloc", "kind=graphics"]
        )
        for path, mib in zip(paths, (207, 164))
    ]
    session, desktop = _in_a_session(scene, *draws)
    try:
        _, (orphan,) = scene.orphans("--open", "all", "--gpu", "0", "--mib", "20480")
        server = scene.server(gpus="0", command=CLEAN)
        assert scene.start(server)
        run = scene.verdict(server)
        _only(scene, run, orphan)
        (gpu,) = run.verdict["gpus"]
        assert (gpu["used_bytes"], gpu["limit_bytes"]) == (371 * MIB, (371 + 64) * MIB)
        assert {run.holder(pid)["action"] for pid in desktop} == {"spare"}
        assert scene.alive([*desktop, session.leader])
    finally:
        scene.node.run(["systemctl", "kill", "--signal=KILL", session.scope], check=False)


@pytest.mark.case("B11")
@pytest.mark.parametrize("kind, mib", [("compute", 207), ("compute,graphics", 207), ("graphics", 3000)])
def test_a_session_that_does_more_than_draw(scene: Scene, kind: str, mib: int) -> None:
    """It computes too, or draws more than may be spared."""
    command = [HOLDER, "--open", "0", "--gpu", "0", "--mib", str(mib), "--alloc", f"kind={kind}"]
    session, (holder,) = _in_a_session(scene, shlex.join(command))
    try:
        _, (orphan,) = scene.orphans(*HOLD)
        run = scene.clean("--gpus", "0")
        _nobody(scene, run, holder, orphan)
        assert "alice" in run.verdict["message"]
    finally:
        scene.node.run(["systemctl", "kill", "--signal=KILL", session.scope], check=False)


DAEMONS = (
    "/usr/bin/nvidia-persistenced",
    "/usr/bin/nv-hostengine",
    "/usr/bin/nvidia-cuda-mps-server",
    "/usr/bin/nv-fabricmanager",
)


@pytest.mark.case("B12")
@pytest.mark.parametrize("infrastructure", [False, True])
def test_infrastructure_and_a_rule_that_would_kill_everything(
    scene: Scene, program: Program, infrastructure: bool
) -> None:
    """Left in failed units, so that nothing but their executables speaks for them; the MPS server has memory."""
    daemons = []
    for path in DAEMONS:
        mib = ["--gpu", "0", "--mib", "90"] if path.endswith("mps-server") else []
        _, pids = scene.orphans("--open", "all", *mib, prefix=[program(path)], user=None)
        daemons += pids
    _, (orphan,) = scene.orphans("--open", "1", "--gpu", "1", "--mib", "900")
    # Memory that nobody explains, so that whoever has the nodes open may be ended on suspicion.
    leak = scene.gpu.ask("leak", gpu=2, mib=900)["id"]
    more = "infrastructure = true" if infrastructure else ""
    scene.policy(_rule("kill", "exe = '.*'", more=more) + "[deadline]\nterm = '300 ms'\n")
    run = scene.clean("--gpus", "0,1,2", "--deadline", "2s")
    scene.gpu.ask("free", id=leak)
    if infrastructure:
        assert {pid for pid, _ in scene.signals(run)} == {*daemons, orphan}
        assert not any(scene.alive(pid) for pid in daemons)
    else:
        assert run.outcome == "unattributed"
        assert scene.signals(run) == [(orphan, "SIGTERM")]
        assert scene.alive(daemons)
        again = scene.clean("--gpus", "0,1,2")
        assert (again.outcome, again.exit) == ("clean", 0)
        assert {again.holder(pid)["action"] for pid in daemons} == {"spare"}
        assert scene.signals(again) == []


@pytest.mark.case("B12")
def test_a_rule_for_infrastructure_reaches_an_active_unit_only_by_name(scene: Scene, program: Program) -> None:
    properties = ["Type=notify"]
    unit = scene.name("persistenced")
    command = [program(DAEMONS[0]), HOLDER, *HOLD]
    scene.node.start(command, unit=unit, properties=properties)
    pid = int(scene.node.show(unit, "MainPID")["MainPID"])
    scene.policy(_rule("kill", "exe = '.*'", more="infrastructure = true"))
    run = scene.clean("--gpus", "0")
    assert scene.signals(run) == []
    assert (run.outcome, run.holder(pid)["action"]) == ("clean", "spare")
    assert scene.alive(pid)
    scene.policy(_rule("kill", f"unit = '{unit}'", more="infrastructure = true"))
    _only(scene, scene.clean("--gpus", "0"), pid)


@pytest.mark.case("B13")
@pytest.mark.parametrize("how", ["comm", "argv0", "exe of another user", "exe that others can write", "deleted exe"])
def test_an_orphan_that_calls_itself_xorg(scene: Scene, program: Program, how: str) -> None:
    """60 GiB, in the cgroup of a failed unit; it is judged as what it is."""
    prefix: Sequence[str] = ()
    path = "/opt/pretends/Xorg"
    options = ["--open", "0", "--gpu", "0", "--mib", "61440", "--alloc", "kind=graphics"]
    if how == "comm":
        options += ["--comm", "Xorg"]
    elif how == "argv0":
        options += ["--argv0", "/usr/lib/xorg/Xorg"]
    else:
        prefix = [program(path)]
        if how == "exe of another user":
            scene.node.run(["chown", "model", path])
        elif how == "exe that others can write":
            scene.node.run(["chmod", "o+w", path])
    _, (orphan,) = scene.orphans(*options, prefix=prefix)
    if how == "deleted exe":
        scene.node.run(["rm", path])
    run = scene.clean("--gpus", "0")
    _only(scene, run, orphan)


@pytest.mark.case("B13")
@pytest.mark.parametrize("mib, outcome", [(30720, "protected"), (2048, "clean")])
def test_a_display_server_above_what_may_be_spared(scene: Scene, program: Program, mib: int, outcome: str) -> None:
    unit = scene.name("desktop")
    draws = ["--open", "0", "--gpu", "0", "--mib", str(mib), "--alloc", "kind=graphics"]
    scene.node.start([program("/usr/lib/xorg/Xorg"), HOLDER, *draws], unit=unit, properties=["Type=notify"])
    pid = int(scene.node.show(unit, "MainPID")["MainPID"])
    run = scene.clean("--gpus", "0")
    assert run.outcome == outcome
    assert scene.signals(run) == []
    assert scene.alive(pid)
    if outcome == "protected":
        assert "spared_max" in run.verdict["message"]
        assert "spared_max" in " ".join(run.verdict["hints"])


# MPS -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other, gpu, action, outcome",
    [
        ("live", 0, "spare", "protected"),
        ("live", 1, "spare", "cleaned"),
        ("stale", 0, None, "cleaned"),
    ],
)
def test_clients_of_an_mps_server(scene: Scene, other: str, gpu: int, action: str, outcome: str) -> None:
    """To end one client can end the server and all others with it; the site has said that it will share the GPU."""
    client = ["--open", "0,1", "--mib", "900", "--alloc", "kind=mps"]
    if other == "live":
        _, neighbour = scene.service(*client, "--gpu", str(gpu), user="alice")
    else:
        _, (neighbour,) = scene.orphans(*client, "--gpu", str(gpu))
    _, (orphan,) = scene.orphans(*client, "--gpu", "0")
    if action:
        scene.policy(_rule(action, "unit = 't-live-*'"))
    run = scene.clean("--gpus", "0,1")
    if outcome == "protected":
        _nobody(scene, run, orphan, neighbour)
        assert "MPS" in run.verdict["message"]
        assert str(orphan) in run.verdict["message"]
    elif action:
        _only(scene, run, orphan)
        assert scene.alive(neighbour)
    else:
        _only(scene, run, orphan, neighbour)


def test_an_mps_server_is_no_client_of_itself(scene: Scene, program: Program) -> None:
    """It stays, and its clients are ended all the same."""
    _, (server,) = scene.orphans(*HOLD, prefix=[program(DAEMONS[2])], user=None)
    _, (orphan,) = scene.orphans(*HOLD, "--alloc", "kind=mps")
    run = scene.clean("--gpus", "0")
    _only(scene, run, orphan)
    assert scene.alive(server)


# The stage -----------------------------------------------------------------------------------------------------------


def _in_a_session(scene: Scene, *commands: str) -> tuple[LoginSession, list[int]]:
    """A login session of alice's with these holders in it."""
    stem = f"/run/{scene.name('session').partition('.')[0]}"
    scene.node.run(["install", "-d", "-o", "alice", stem])
    files = [f"{stem}/{number}" for number, _ in enumerate(commands)]
    # Before an output is redirected, so that the option is the holder's.
    script = "".join(
        f"{before} --ready-file {file} {redirect}{rest} & "
        for (before, redirect, rest), file in zip((command.partition(">") for command in commands), files)
    )
    session = scene.node.login_session("alice", f"{script} sleep 1000")
    scene.node.wait_for(lambda: all(map(scene.node.exists, files)), timeout=10, what="alice's holders hold the GPU")
    return session, [int(json.loads(scene.node.read(file))["pid"]) for file in files]
