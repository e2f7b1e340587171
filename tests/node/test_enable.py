"""The hook is put in front of services and taken away again, with a real systemd to say what they are."""

from __future__ import annotations

import json
import random
import re
import shlex
import subprocess
from collections.abc import Iterator

import pytest

from gpuprestart import unitwords
from tests.node.machine import Node
from tests.node.scene import Scene

SYSTEM = "/etc/systemd/system"
NAME = "50-gpuprestart.conf"
HOOK = "ExecStartPre=+/usr/bin/gpuprestart clean"
PROGRAM = "/usr/bin/gpuprestart"

#: A driver of containers is needed for its name alone: systemd-analyze wants a program to be there.
ENGINES = ("/usr/bin/docker", "/usr/bin/podman")


def gpuprestart(scene: Scene, *words: str, check: bool = True, **more: str) -> subprocess.CompletedProcess[str]:
    done = scene.node.run([PROGRAM, *words], check=False, **more)  # type: ignore[arg-type]
    assert "Traceback" not in done.stderr
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def unit(scene: Scene, text: str, *, stem: str = "enable", to: str = ".service") -> str:
    """A service, or with ``to`` a template and the like, that systemd has not loaded yet; its name."""
    name = scene.name(stem).replace(".service", to)
    scene.node.write(f"{SYSTEM}/{name}", f"[Service]\n{text}\n")
    return name


def settings(scene: Scene, name: str) -> list[str]:
    """What its drop-in sets, without comments and sections."""
    lines = scene.node.read(f"{SYSTEM}/{name}.d/{NAME}").splitlines()
    return [line for line in lines if line and not line.startswith(("#", "["))]


def pre(scene: Scene, name: str) -> list[str]:
    """What systemd would run before a start."""
    said = scene.node.systemctl("show", "--property=ExecStartPre", "--", name).stdout
    return re.findall(r"argv\[\]=(.*?) ; ", said)


def listing(scene: Scene) -> str:
    """All that lies among an administrator's units, byte for byte."""
    script = f"cd {SYSTEM} && find . -printf '%p %M %u %l\\n' | sort && find . -type f -exec sha256sum {{}} + | sort"
    return scene.node.run(["sh", "-c", script]).stdout


@pytest.fixture
def engines(node: Node) -> Iterator[None]:
    for path in ENGINES:
        assert not node.exists(path)
        node.write(path, "#!/bin/sh\nexec sleep 1000\n", mode=0o755)
    yield
    node.run(["rm", *ENGINES])


SLEEP = "ExecStart=/bin/sleep 1000"


# A service -----------------------------------------------------------------------------------------------------------


def test_a_dirty_gpu_refuses_the_start_and_a_clean_one_lets_it_pass(scene: Scene) -> None:
    """The whole of it: written and shown, not reloaded unasked, proved by what the starts do, undone to the byte."""
    name = unit(scene, f"User=model\nEnvironment=CUDA_VISIBLE_DEVICES=0\n{SLEEP}\nRestart=on-failure")
    before = listing(scene)
    assert scene.start(name)
    done = gpuprestart(scene, "enable", name.removesuffix(".service"))
    path = f"{SYSTEM}/{name}.d/{NAME}"
    assert path in done.stdout and HOOK in done.stdout and "systemctl daemon-reload" in done.stdout
    assert scene.node.run(["stat", "-c", "%a %U", path, f"{SYSTEM}/{name}.d"]).stdout == "644 root\n755 root\n"
    assert scene.node.show(name, "DropInPaths")["DropInPaths"] == ""
    assert "containers" in gpuprestart(scene, "enable", name, "--now").stdout
    assert scene.node.show(name, "DropInPaths")["DropInPaths"] == path
    shown = scene.node.show(name, "NotifyAccess", "TimeoutStartUSec", "RestartUSec", "After", "Wants")
    assert (shown["NotifyAccess"], shown["TimeoutStartUSec"], shown["RestartUSec"]) == ("exec", "2min 15s", "15s")
    assert {"nvidia-persistenced.service", "nvidia-fabricmanager.service"} <= set(shown["After"].split())
    assert "nvidia" not in shown["Wants"]

    scene.node.systemctl("stop", name)
    scene.policy("[deadline]\ntotal = '1 s'\n")
    scene.gpu.ask("leak", gpu=0, mib=900)
    assert not scene.start(name)
    assert "unattributed" in scene.node.show(name, "StatusText")["StatusText"]
    scene.node.systemctl("stop", name)
    scene.gpu.ask("reset", gpus=8)
    assert scene.start(name)
    assert "proved clean" in scene.node.show(name, "StatusText")["StatusText"]

    assert f"{path} is removed" in gpuprestart(scene, "disable", name, "--now").stdout
    assert listing(scene) == before
    assert pre(scene, name) == []


def test_a_reload_that_was_forgotten_can_be_made_up_for(scene: Scene) -> None:
    name = unit(scene, SLEEP)
    gpuprestart(scene, "enable", name, "--now")
    # Of a unit that does nothing systemd forgets what it has read.
    assert scene.start(name)
    assert "systemd does not know yet" in gpuprestart(scene, "disable", name).stdout
    again = gpuprestart(scene, "disable", name).stdout
    assert "Nothing was changed" in again and "still runs the hook" in again
    assert len(pre(scene, name)) == 1
    assert "systemd has read its units" in gpuprestart(scene, "disable", name, "--now").stdout
    assert pre(scene, name) == []
    assert "does not know" not in gpuprestart(scene, "disable", name).stdout


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Restart=always\nRestartSec=100ms", ["NotifyAccess=exec", "TimeoutStartSec=135s", "RestartSec=15s"]),
        ("Restart=no\nRestartSec=100ms", ["NotifyAccess=exec", "TimeoutStartSec=135s"]),
        ("Restart=always\nRestartSec=30s", ["NotifyAccess=exec", "TimeoutStartSec=135s"]),
        ("NotifyAccess=main\nTimeoutStartSec=1h", ["NotifyAccess=exec"]),
        ("NotifyAccess=all\nTimeoutStartSec=infinity", []),
        ("Type=notify\nTimeoutStartSec=1h", ["NotifyAccess=exec"]),
        ("Type=oneshot", ["NotifyAccess=exec"]),
    ],
)
def test_only_what_the_unit_needs_is_set(scene: Scene, text: str, expected: list[str]) -> None:
    name = unit(scene, f"{SLEEP}\n{text}")
    gpuprestart(scene, "enable", name)
    assert [line for line in settings(scene, name) if not line.startswith("After=")] == [HOOK, *expected]


def test_what_is_there_already_is_not_said_again(scene: Scene) -> None:
    name = scene.name("enable")
    after = "[Unit]\nAfter=nvidia-fabricmanager.service\n"
    scene.node.write(f"{SYSTEM}/{name}", f"{after}[Service]\n{SLEEP}\nNotifyAccess=exec\nTimeoutStartSec=1h\n")
    gpuprestart(scene, "enable", name)
    assert settings(scene, name) == ["After=nvidia-persistenced.service", HOOK]


def test_the_policy_of_the_unit_says_how_long_the_hook_may_take(scene: Scene) -> None:
    name = unit(scene, SLEEP)
    scene.policy("[deadline]\ntotal = '20 min'\n", name=f"{name}.toml", base="")
    gpuprestart(scene, "enable", name)
    assert "TimeoutStartSec=1215s" in settings(scene, name)


def test_every_command_of_a_start_has_the_timeout_to_itself(scene: Scene) -> None:
    """Which is why the hook's time is not added to the server's: three commands of 1.2 s in a timeout of 3 s."""
    ready = "/bin/sh -c 'sleep 1.2; systemd-notify --ready; exec sleep 1000'"
    slow = "ExecStartPre=/bin/sleep 1.2\nExecStartPre=/bin/sleep 1.2"
    name = unit(scene, f"Type=notify\nNotifyAccess=all\nTimeoutStartSec=3\n{slow}\nExecStart={ready}")
    assert scene.start(name)


# Several -------------------------------------------------------------------------------------------------------------


def test_a_template_is_for_every_instance(scene: Scene) -> None:
    name = unit(scene, f"{SLEEP}\nType=exec\nEnvironment=CUDA_VISIBLE_DEVICES=0", to="@.service")
    instance = name.replace("@.", "@a.")
    gpuprestart(scene, "enable", name, "--now")
    assert pre(scene, instance) == ["/usr/bin/gpuprestart clean"]
    assert scene.start(instance)
    assert "proved clean" in scene.node.show(instance, "StatusText")["StatusText"]
    # Its instances have it by the template, and once.
    assert f"{name}.d/{NAME}" in gpuprestart(scene, "enable", instance).stdout
    assert not scene.node.exists(f"{SYSTEM}/{instance}.d")
    scene.node.systemctl("stop", instance)
    gpuprestart(scene, "disable", name, "--now")
    assert pre(scene, instance) == []


def test_an_instance_is_for_itself_alone(scene: Scene) -> None:
    name = unit(scene, SLEEP, to="@.service")
    gpuprestart(scene, "enable", name.replace("@.", "@a."), "--now")
    assert pre(scene, name.replace("@.", "@a.")) == ["/usr/bin/gpuprestart clean"]
    assert pre(scene, name.replace("@.", "@b.")) == []


def test_a_template_is_judged_by_its_running_instances_too(scene: Scene) -> None:
    name = unit(scene, f"{SLEEP}\nTimeoutStartSec=1h", to="@.service")
    instance = name.replace("@.", "@a.")
    scene.node.write(f"{SYSTEM}/{instance}.d/10-mine.conf", "[Service]\nNotifyAccess=all\n")
    assert scene.start(instance)
    said = gpuprestart(scene, "enable", name).stdout
    assert "NotifyAccess=exec" not in settings(scene, name) and "NotifyAccess= is not the same for all" in said
    scene.node.systemctl("stop", instance)


def test_a_prefix_is_for_all_that_begin_so(scene: Scene) -> None:
    first = unit(scene, f"{SLEEP}\nTimeoutStartSec=100\nRestart=always\nRestartSec=100ms", to="-a.service")
    stem = first.removesuffix("a.service")
    template, other = f"{stem}b@.service", f"{stem}c.service"
    scene.node.write(f"{SYSTEM}/{template}", f"[Service]\n{SLEEP}\nTimeoutStartSec=900\n")
    scene.node.write(f"{SYSTEM}/{other}", f"[Service]\n{SLEEP}\nRestart=always\nRestartSec=40s\n")
    scene.node.run(["ln", "-s", "/dev/null", f"{SYSTEM}/{stem}masked.service"])
    before = listing(scene)
    said = gpuprestart(scene, "enable", f"{stem}.service", "--now").stdout
    assert f"for {first}, {template}, {other}, and for all to come" in said
    for name in (first, template.replace("@.", "@x."), other):
        assert pre(scene, name) == ["/usr/bin/gpuprestart clean"]
    assert settings(scene, f"{stem}.service")[-3:] == ["NotifyAccess=exec", "TimeoutStartSec=900s", "RestartSec=40s"]
    # One of them by its own name has it already, by the other file.
    assert f"{stem}.service.d/{NAME}" in gpuprestart(scene, "enable", first).stdout
    gpuprestart(scene, "disable", f"{stem}.service", "--now")
    assert pre(scene, first) == [] and listing(scene) == before


def test_all_are_written_or_none(scene: Scene) -> None:
    good, masked = unit(scene, SLEEP), scene.name("masked")
    scene.node.run(["ln", "-s", "/dev/null", f"{SYSTEM}/{masked}"])
    before = listing(scene)
    done = gpuprestart(scene, "enable", good, masked, check=False)
    assert done.returncode == 78 and f"{masked} is masked" in done.stderr
    assert listing(scene) == before


def test_another_name_of_a_unit_means_that_unit(scene: Scene) -> None:
    name, alias = unit(scene, SLEEP), scene.name("alias")
    scene.node.run(["ln", "-s", name, f"{SYSTEM}/{alias}"])
    said = gpuprestart(scene, "enable", alias, name).stdout
    assert f"{alias} is another name of {name}" in said
    assert said.count(HOOK) == 1
    assert scene.node.exists(f"{SYSTEM}/{name}.d/{NAME}") and not scene.node.exists(f"{SYSTEM}/{alias}.d")
    gpuprestart(scene, "disable", alias)
    assert not scene.node.exists(f"{SYSTEM}/{name}.d")


# Containers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "removal", "access"),
    [
        ("/usr/bin/docker run --rm --name sg image", "/usr/bin/docker rm -f sg", True),
        ("/usr/bin/podman run --rm --name=sg image", "/usr/bin/podman rm -f sg", False),
        ("/usr/bin/podman run --sdnotify=ignore --name sg image", "/usr/bin/podman rm -f sg", True),
        ("/bin/sh -c 'exec podman run --name sg image'", "podman rm -f sg", False),
        ("/usr/bin/docker run --rm image --name sg", None, True),
        ('/usr/bin/docker run --name "a %%%% b$$c" image', "/usr/bin/docker rm -f a %% b$$c", True),
    ],
)
def test_a_container_of_an_earlier_run(
    scene: Scene, engines: None, start: str, removal: str | None, access: bool
) -> None:
    name = unit(scene, f"ExecStart={start}\nExecStartPre=-/usr/bin/docker pull image")
    gpuprestart(scene, "enable", name, "--now")
    hook = "/usr/bin/gpuprestart clean"
    assert pre(scene, name) == ["/usr/bin/docker pull image", *([removal] if removal else []), hook]
    assert (scene.node.show(name, "NotifyAccess")["NotifyAccess"] == "exec") is access


def test_a_template_removes_the_container_of_its_own_instance(scene: Scene, engines: None) -> None:
    start = "ExecStart=/usr/bin/docker run --rm \\\n    --name %p-%i-%%i image"
    name = unit(scene, f"{start}\nTimeoutStartSec=1h", to="@.service")
    gpuprestart(scene, "enable", name, "--now")
    stem = name.removesuffix("@.service")
    for instance in ("a", "b"):
        removes = pre(scene, name.replace("@.", f"@{instance}."))[0]
        assert removes == f"/usr/bin/docker rm -f {stem}-{instance}-%i"


def test_systemd_reads_a_word_as_it_was_meant(scene: Scene) -> None:
    """Against systemd's own reader: words of every awkward kind, alone and together."""
    dice = random.Random(5)
    words = [
        "".join(dice.choice("ab ;\"'\\%$@-:+!|{}#=\t\x01é~*") for _ in range(dice.randint(1, 8))) for _ in range(200)
    ]
    words += ["", ";", "\\;", "a;", "#", "\\", "%", "$", '"', "'", "\\x41", "a\\", "-"]
    text = " ".join(unitwords.quoted(unitwords.literal(word)) for word in words)
    name = unit(scene, f"ExecStart=/bin/echo {text}")
    bus, manager = "org.freedesktop.systemd1", "/org/freedesktop/systemd1"
    call = ["busctl", "--json=short", "call", bus]
    path = json.loads(scene.node.run([*call, manager, f"{bus}.Manager", "LoadUnit", "s", name]).stdout)["data"][0]
    get = [*call, path, "org.freedesktop.DBus.Properties", "Get", "ss", f"{bus}.Service", "ExecStart"]
    (command,) = json.loads(scene.node.run(get).stdout)["data"][0]["data"]
    assert command[1][1:] == words
    # And what it had read is split here into the same.
    assert unitwords.split(f"/bin/echo {text}")[1:] == [unitwords.literal(word) for word in words]


# Where it is not done ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("t-nobody-has-this", "systemd has no unit t-nobody-has-this.service"),
        ("t-nobody-has-this@", "systemd has no unit t-nobody-has-this@.service"),
        ("t-nobody-has-this-", "systemd has no service that t-nobody-has-this-.service would stand for"),
        ("dbus.socket", "is no name of a service"),
        ("../x", "is no name of a service"),
        ("a b", "is no name of a service"),
    ],
)
def test_what_there_is_not(scene: Scene, name: str, said: str) -> None:
    before = listing(scene)
    done = gpuprestart(scene, "enable", name, check=False)
    assert done.returncode == 78 and said in done.stderr and "hint:" in done.stderr
    assert listing(scene) == before


def test_what_is_gone_once_it_ends(scene: Scene) -> None:
    name = scene.node.start(["/bin/sleep", "1000"], unit=scene.name("transient"))
    done = gpuprestart(scene, "enable", name, check=False)
    assert done.returncode == 78 and "transient" in done.stderr


@pytest.mark.parametrize(("stem", "said"), [("docker", "other people's work"), ("broken", "bad-setting")])
def test_what_the_hook_would_be_wrong_for(scene: Scene, stem: str, said: str) -> None:
    path = f"{SYSTEM}/{stem}.service"
    scene.node.write(path, f"[Service]\n{SLEEP if stem == 'docker' else ''}\n")
    try:
        done = gpuprestart(scene, "enable", stem, check=False)
    finally:
        scene.node.run(["rm", path])
    assert done.returncode == 78 and said in done.stderr
    assert not scene.node.exists(f"{path}.d")


def test_infrastructure_is_not_held_up(scene: Scene) -> None:
    name = unit(scene, "ExecStart=/usr/bin/nvidia-persistenced --verbose")
    done = gpuprestart(scene, "enable", name, check=False)
    assert done.returncode == 78 and "persistence daemon" in done.stderr


def test_a_later_drop_in_would_undo_it(scene: Scene) -> None:
    name = unit(scene, SLEEP)
    later = f"{SYSTEM}/{name}.d/90-site.conf"
    scene.node.write(later, "[Service]\nExecStartPre=\nExecStartPre=/bin/true\n")
    done = gpuprestart(scene, "enable", name, check=False)
    assert done.returncode == 78 and f"{later}:2 empties ExecStartPre=" in done.stderr
    assert not scene.node.exists(f"{SYSTEM}/{name}.d/{NAME}")


@pytest.mark.parametrize("now", [False, True])
def test_systemd_is_not_asked_about_files_that_it_has_not_read(scene: Scene, now: bool) -> None:
    name = unit(scene, f"{SLEEP}\nTimeoutStartSec=1h")
    assert scene.start(name)
    scene.node.write(f"{SYSTEM}/{name}", f"[Service]\n{SLEEP}\nNotifyAccess=all\nTimeoutStartSec=1h\n")
    done = gpuprestart(scene, "enable", name, *(["--now"] if now else []), check=False)
    if now:
        assert done.returncode == 0
        assert [line for line in settings(scene, name) if not line.startswith("After=")] == [HOOK]
    else:
        assert done.returncode == 78 and "have changed since systemd has read them" in done.stderr
        assert not scene.node.exists(f"{SYSTEM}/{name}.d")


def test_a_policy_with_a_fault_is_named(scene: Scene) -> None:
    name = unit(scene, SLEEP)
    scene.policy("[deadline]\ntotal = '2 parsecs'\n")
    done = gpuprestart(scene, "enable", name, check=False)
    assert done.returncode == 78 and "policy.toml:4" in done.stderr
    assert not scene.node.exists(f"{SYSTEM}/{name}.d")


def test_what_systemd_would_complain_of_is_not_written(scene: Scene) -> None:
    """A program that cannot be executed, which is how a broken installation looks."""
    name = unit(scene, SLEEP)
    before = listing(scene)
    run = [
        "python3",
        "-c",
        "import sys; sys.path[:0] = ['/usr/lib/gpuprestart']; from gpuprestart.cli import run; run()",
    ]
    scene.node.run(["chmod", "-x", PROGRAM])
    try:
        done = scene.node.run([*run, "enable", name], check=False)
    finally:
        scene.node.run(["chmod", "+x", PROGRAM])
    assert done.returncode == 78 and f"{PROGRAM} is not executable" in done.stderr
    assert listing(scene) == before
    assert scene.node.run(["sh", "-c", "ls -d /tmp/gpuprestart-* || :"]).stdout == ""


def test_what_the_unit_itself_has_wrong_is_not_held_against_the_drop_in(scene: Scene) -> None:
    name = unit(scene, "ExecStart=/opt/not/there\nNonsense=1")
    gpuprestart(scene, "enable", name)
    assert HOOK in settings(scene, name)


@pytest.mark.parametrize("verb", ["enable", "disable"])
def test_only_root_may_but_everybody_may_look(scene: Scene, verb: str) -> None:
    name = unit(scene, SLEEP)
    before = listing(scene)
    done = gpuprestart(scene, verb, name, check=False, user="model")
    assert done.returncode == 77 and "root" in done.stderr
    done = gpuprestart(scene, verb, name, "--dry-run", user="model")
    assert (HOOK in done.stdout) is (verb == "enable")
    gpuprestart(scene, verb, name, "--dry-run")
    assert listing(scene) == before


def _without_systemd(*words: str) -> list[str]:
    """As in a chroot in which an image is built: nobody answers on the bus."""
    return ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs none /run && exec {PROGRAM} {shlex.join(words)}"]


def test_where_systemd_does_not_answer(scene: Scene) -> None:
    name = unit(scene, SLEEP)
    done = scene.node.run(_without_systemd("enable", name), check=False)
    assert done.returncode == 69 and "systemd cannot be asked" in done.stderr and "Traceback" not in done.stderr
    assert not scene.node.exists(f"{SYSTEM}/{name}.d")


def test_a_line_that_is_wrong(scene: Scene) -> None:
    for line in (["enable"], ["disable"], ["disable", "--all", "x"]):
        assert gpuprestart(scene, *line, check=False).returncode == 64


# Once more -----------------------------------------------------------------------------------------------------------


def test_once_more_changes_nothing(scene: Scene) -> None:
    name = unit(scene, f"{SLEEP}\nRestart=always")
    gpuprestart(scene, "enable", name)
    before = listing(scene)
    for more in ([], ["--now"], [], ["--now"]):
        done = gpuprestart(scene, "enable", name, *more)
        assert f"has the hook already, by {SYSTEM}/{name}.d/{NAME}. Nothing was changed." in done.stdout
    # It is not reloaded where there is nothing to read.
    assert "systemd" not in done.stdout.replace(SYSTEM, "")
    assert listing(scene) == before


@pytest.mark.parametrize("hook", [True, False])
@pytest.mark.parametrize("edited", [True, False])
def test_what_a_person_wrote_is_never_written_over(scene: Scene, hook: bool, edited: bool) -> None:
    name = unit(scene, SLEEP)
    path = f"{SYSTEM}/{name}.d/{NAME}"
    text = f"[Service]\n{HOOK if hook else 'Nice=5'}\n"
    if edited:
        gpuprestart(scene, "enable", name)
        written = scene.node.read(path)
        text = f"{written}Nice=5\n" if hook else written.replace(f"\n{HOOK}\n", "\n")
    scene.node.write(path, text)
    done = gpuprestart(scene, "enable", name, check=False)
    said = "edited since it was written" if edited else "not written by gpuprestart enable"
    assert done.returncode == (0 if hook else 78) and said in done.stdout + done.stderr
    undo = gpuprestart(scene, "disable", name, check=False)
    assert undo.returncode == 78 and path in undo.stderr and said in undo.stderr
    assert scene.node.read(path) == text


@pytest.mark.parametrize("place", ["unit", "drop-in"])
def test_a_hook_from_another_file_is_enough(scene: Scene, place: str) -> None:
    name = unit(scene, f"{SLEEP}\n{HOOK if place == 'unit' else ''}")
    where = f"{SYSTEM}/{name}"
    if place == "drop-in":
        where = f"{SYSTEM}/{name}.d/10-site.conf"
        scene.node.write(where, f"[Service]\n{HOOK}\n")
    before = listing(scene)
    assert where in gpuprestart(scene, "enable", name).stdout
    assert where in gpuprestart(scene, "disable", name).stdout
    assert listing(scene) == before


def test_a_prefix_of_which_some_have_it_is_refused(scene: Scene) -> None:
    first = unit(scene, f"{SLEEP}\n{HOOK}", to="-a.service")
    stem = first.removesuffix("a.service")
    scene.node.write(f"{SYSTEM}/{stem}b.service", f"[Service]\n{SLEEP}\n")
    done = gpuprestart(scene, "enable", f"{stem}.service", check=False)
    assert done.returncode == 78 and f"{SYSTEM}/{first}:3" in done.stderr
    # One that has a drop-in of its own, by our name, has that one instead.
    scene.node.write(f"{SYSTEM}/{first}", f"[Service]\n{SLEEP}\n")
    gpuprestart(scene, "enable", first)
    gpuprestart(scene, "enable", f"{stem}.service", "--now")
    for name in (first, f"{stem}b.service"):
        assert pre(scene, name) == ["/usr/bin/gpuprestart clean"]


def test_after_an_undoing_that_systemd_has_not_seen(scene: Scene) -> None:
    name = unit(scene, SLEEP)
    assert scene.start(name)
    gpuprestart(scene, "enable", name, "--now")
    text = scene.node.read(f"{SYSTEM}/{name}.d/{NAME}")
    assert "another file" not in gpuprestart(scene, "disable", name, "--dry-run").stdout
    gpuprestart(scene, "disable", name)
    assert gpuprestart(scene, "enable", name, check=False).returncode == 78
    gpuprestart(scene, "enable", name, "--now")
    assert scene.node.read(f"{SYSTEM}/{name}.d/{NAME}") == text
    assert pre(scene, name) == ["/usr/bin/gpuprestart clean"]


# Undone --------------------------------------------------------------------------------------------------------------


def test_the_drop_in_of_a_unit_that_is_gone(scene: Scene) -> None:
    name = unit(scene, SLEEP)
    gpuprestart(scene, "enable", name, "--now")
    scene.node.run(["rm", f"{SYSTEM}/{name}"])
    scene.node.systemctl("daemon-reload")
    gpuprestart(scene, "disable", name, "--now")
    assert not scene.node.exists(f"{SYSTEM}/{name}.d")
    assert gpuprestart(scene, "disable", name, check=False).returncode == 78


def test_a_unit_that_was_masked_since(scene: Scene) -> None:
    name = unit(scene, SLEEP)
    gpuprestart(scene, "enable", name)
    scene.node.run(["ln", "-sf", "/dev/null", f"{SYSTEM}/{name}"])
    gpuprestart(scene, "disable", name)
    assert not scene.node.exists(f"{SYSTEM}/{name}.d")


def test_there_is_nothing_to_undo(scene: Scene) -> None:
    name = unit(scene, SLEEP)
    before = listing(scene)
    assert "Nothing was changed" in gpuprestart(scene, "disable", name).stdout
    assert listing(scene) == before


def test_who_reads_the_unit_s_log_is_told(scene: Scene) -> None:
    name = unit(scene, SLEEP)
    gpuprestart(scene, "enable", name)
    gpuprestart(scene, "disable", name)
    (record,) = [each for each in scene.node.journal(unit=name) if each.get("SYSLOG_IDENTIFIER") == "gpuprestart"]
    assert f"before {name} starts: root has disabled the hook" in record["MESSAGE"] and record["PRIORITY"] == "4"
    assert (record["GPUPRESTART_UNIT"], record["GPUPRESTART_EVENT"]) == (name, "hook-disabled")


# When the program goes -----------------------------------------------------------------------------------------------


@pytest.fixture
def goes(node: Node) -> Iterator[None]:
    """The program can be taken away in a test, and is put back."""
    node.run(["cp", "-a", PROGRAM, "/root/gpuprestart"])
    yield
    node.run(["mv", "/root/gpuprestart", PROGRAM])


def test_a_program_that_is_missing_does_not_pass_silently(scene: Scene, goes: None) -> None:
    name = unit(scene, SLEEP)
    gpuprestart(scene, "enable", name, "--now")
    scene.node.run(["rm", PROGRAM])
    assert not scene.start(name)
    said = [str(each["MESSAGE"]) for each in scene.node.journal(unit=name)]
    assert any(PROGRAM in line and "No such file" in line for line in said)
    assert any("status=203/EXEC" in line for line in said)


def test_a_program_that_is_taken_away_leaves_units_that_start(scene: Scene, goes: None) -> None:
    """What the packages do before they go; and it works where systemd does not answer."""
    names = [unit(scene, SLEEP) for _ in range(2)]
    before = listing(scene)
    gpuprestart(scene, "enable", *names, "--now")
    edited = f"{SYSTEM}/{names[1]}.d/{NAME}"
    scene.node.write(edited, f"{scene.node.read(edited)}Nice=5\n")
    done = gpuprestart(scene, "disable", "--all", "--dry-run")
    assert all(name in done.stdout for name in names)
    done = gpuprestart(scene, "disable", "--all")
    assert f"nothing proves the GPUs clean before a start of {', '.join(sorted(names))}" in done.stdout
    assert "203/EXEC" in done.stdout and "systemctl daemon-reload" in done.stdout
    scene.node.run(["rm", PROGRAM])
    scene.node.systemctl("daemon-reload")
    assert all(scene.start(name) for name in names)
    scene.node.run(["sh", "-c", f"rm {edited}.disabled && rmdir {SYSTEM}/{names[1]}.d"])
    assert listing(scene) == before


def test_it_can_be_taken_away_where_no_systemd_runs(scene: Scene) -> None:
    name = unit(scene, SLEEP)
    before = listing(scene)
    gpuprestart(scene, "enable", name)
    done = scene.node.run(_without_systemd("disable", "--all"))
    assert "Traceback" not in done.stderr and listing(scene) == before


@pytest.mark.parametrize("verb", ["enable", "disable", "bypass"])
def test_who_grows_tired_of_waiting_is_told_and_nothing_is_half_done(scene: Scene, verb: str) -> None:
    """Ctrl-C while systemd does not answer."""
    name = unit(scene, SLEEP)
    before = listing(scene)
    scene.node.write("/tmp/busctl", "#!/bin/sh\n: > /tmp/asked\nexec sleep 1000\n", mode=0o755)
    scene.node.run(["rm", "-f", "/tmp/asked"])
    script = (
        f"mount --bind /tmp/busctl /usr/bin/busctl; {PROGRAM} {verb} {name} & "
        "until [ -e /tmp/asked ]; do sleep 0.05; done; kill -INT $!; wait $!"
    )
    done = scene.node.run(["unshare", "--mount", "bash", "-c", script], check=False)
    assert done.returncode == 75 and "SIGINT" in done.stderr and "Traceback" not in done.stderr
    assert listing(scene) == before
