"""From what a service is to the text of its drop-in, and what a person is told beside it."""

from __future__ import annotations

from typing import Any

import pytest

from gpuprestart import dropin, service, unitlines
from gpuprestart.dropin import DropIn, Member, State

UNIT = "/etc/systemd/system/sglang.service"
HOOK = "ExecStartPre=+/usr/bin/gpuprestart clean"


def command(*argv: str, flags: tuple[str, ...] = ()) -> list[Any]:
    return [argv[0], list(argv), list(flags)]


def member(
    *start: str,
    name: str = "sglang.service",
    total: float = 120.0,
    text: str = "",
    later: str = "",
    pre: tuple[list[Any], ...] = (),
    flags: tuple[str, ...] = (),
    **said: Any,
) -> Member:
    """A service as systemd has it when only ``said`` was set, and its files."""
    properties = {
        "Type": "simple",
        "NotifyAccess": "none",
        "Restart": "on-failure",
        "RestartUSec": 30_000_000,
        "TimeoutStartUSec": 600_000_000,
        "ExecStartEx": [command(*(start or ("/opt/server",)), flags=flags)],
        "ExecStartPreEx": list(pre),
        **said,
    }
    texts = [(UNIT, text)] + ([("/etc/systemd/system/sglang.service.d/60-late.conf", later)] if later else [])
    return Member(unit=service.from_properties(name, properties), lines=unitlines.read(texts), total=total)


def composed(*members: Member) -> DropIn:
    return dropin.compose("sglang.service", members or [member()], makes_folder=True)


def says(*members: Member) -> list[str]:
    """What the drop-in sets, without comments and without what every one has."""
    lines = [
        line for line in composed(*members).text.splitlines() if line and not line.startswith(("#", "[", "After="))
    ]
    return [line for line in lines if line != HOOK]


def told(*members: Member) -> str:
    return "\n".join(composed(*members).remarks)


def test_a_service_that_needs_nothing_else_gets_the_hook_alone() -> None:
    text = composed(member(NotifyAccess="all")).text
    assert [line for line in text.splitlines() if line and not line.startswith("#")] == [
        "[Unit]",
        "After=nvidia-persistenced.service nvidia-fabricmanager.service",
        "[Service]",
        HOOK,
    ]
    assert composed(member(NotifyAccess="all")).remarks == ()


def test_every_setting_stands_below_its_reason() -> None:
    lines = composed(member(RestartUSec=100_000, TimeoutStartUSec=90_000_000)).text.splitlines()
    settings = [number for number, line in enumerate(lines) if line and line[0] not in "#["]
    assert len(settings) == 5
    for number in settings:
        assert lines[number - 1].startswith("# ") and lines[number - 1].endswith(".")


def test_no_line_is_too_long_for_a_terminal() -> None:
    text = composed(member(RestartUSec=100_000, TimeoutStartUSec=90_000_000)).text
    assert max(len(line) for line in text.splitlines() if "sha256" not in line) <= 118


# NotifyAccess= -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("access", "line"), [("none", True), ("main", True), ("exec", False), ("all", False)])
def test_who_may_speak_to_systemd(access: str, line: bool) -> None:
    assert ("NotifyAccess=exec" in says(member(NotifyAccess=access))) is line


@pytest.mark.parametrize(
    "start",
    [
        ("/usr/bin/podman", "run", "--name", "x", "image"),
        ("podman", "run", "image", "serve", "--sdnotify"),
        ("/bin/sh", "-c", "exec podman run image"),
        ("/bin/bash", "-lc", "cd /srv && /usr/bin/podman run image"),
        ("/usr/bin/env", "podman", "run", "image"),
        ("/usr/bin/podman", "run", "--sdnotify=container", "image"),
        ("/usr/bin/podman-compose", "up"),
    ],
)
@pytest.mark.parametrize("access", ["none", "main"])
def test_podman_would_wait_for_its_container(start: tuple[str, ...], access: str) -> None:
    unit = member(*start, NotifyAccess=access, TimeoutStartUSec=90_000_000)
    assert "NotifyAccess=exec" not in says(unit)
    assert "--sdnotify=ignore" in told(unit)
    assert "TimeoutStartSec=135s" in says(unit)


@pytest.mark.parametrize(
    "start",
    [
        ("/usr/bin/podman", "run", "--sdnotify=ignore", "image"),
        ("/usr/bin/podman", "run", "--sdnotify", "ignore", "image"),
        ("/bin/sh", "-c", "exec podman run --sdnotify=ignore image"),
        ("/usr/bin/docker", "run", "image"),
        ("/opt/podmanager/server",),
    ],
)
def test_others_do_not_wait(start: tuple[str, ...]) -> None:
    assert "NotifyAccess=exec" in says(member(*start))
    assert "sdnotify" not in told(member(*start))


# TimeoutStartSec= ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "total", "line"),
    [
        (90.0, 120.0, "TimeoutStartSec=135s"),
        (134.9, 120.0, "TimeoutStartSec=135s"),
        (135.0, 120.0, None),
        (600.0, 120.0, None),
        (600.0, 1200.0, "TimeoutStartSec=1215s"),
        (90.0, 120.5, "TimeoutStartSec=136s"),
        (None, 1200.0, None),
    ],
)
def test_the_hook_has_time_for_its_deadline(limit: float | None, total: float, line: str | None) -> None:
    usec = 2**64 - 1 if limit is None else int(limit * 1_000_000)
    assert says(member(NotifyAccess="exec", TimeoutStartUSec=usec, total=total)) == ([line] if line else [])


# RestartSec= ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("restart", "seconds", "line"),
    [
        ("on-failure", 0.1, True),
        ("always", 0.0, True),
        ("on-abnormal", 1.999, True),
        ("always", 2.0, False),
        ("always", 60.0, False),
        ("no", 0.1, False),
    ],
)
def test_a_refused_start_is_not_tried_again_at_once(restart: str, seconds: float, line: bool) -> None:
    unit = member(NotifyAccess="exec", Restart=restart, RestartUSec=int(seconds * 1_000_000))
    assert says(unit) == (["RestartSec=15s"] if line else [])
    assert ("not tried again" in told(unit)) is (restart == "no")


# After= --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("after", "line"),
    [
        ([], "After=nvidia-persistenced.service nvidia-fabricmanager.service"),
        (["nvidia-persistenced.service"], "After=nvidia-fabricmanager.service"),
        (["nvidia-fabricmanager.service", "x.service", "nvidia-persistenced.service"], None),
    ],
)
def test_the_driver_s_services_come_first_and_are_not_started_for_it(after: list[str], line: str | None) -> None:
    text = composed(member(After=after)).text
    assert ("[Unit]" in text) is (line is not None)
    assert line is None or f"\n{line}\n" in text
    assert "Wants=" not in text and "Requires=" not in text


# Containers ----------------------------------------------------------------------------------------------------------


def removal(*start: str, text: str = "", name: str = "sglang.service", **more: Any) -> list[str]:
    text = text or "[Service]\nExecStart=" + " ".join(start)
    return [line for line in says(member(*start, text=text, name=name, **more)) if line.startswith("ExecStartPre=")]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ("--rm --name sglang image", "sglang"),
        ("--rm --name=sglang image", "sglang"),
        ("-it --name sglang image", "sglang"),
        ("-d -p 80:80 -v/a:/b -e A=b --gpus all --name sglang image", "sglang"),
        ("-itp 80:80 --name sglang image", "sglang"),
        ("--name first --name sglang image", "sglang"),
        ("--init=true --env --name --name sglang image", "sglang"),
        ("image --name other", ""),
        ("--rm image --name=other", ""),
        ("-- image --name=other", ""),
        ("-it image --name other", ""),
        ("-p 80:80 image --name other", ""),
        ("--privileged image --name other", ""),
        ("--name", ""),
    ],
)
def test_the_name_of_a_container_is_not_the_container_s_own_option(options: str, name: str) -> None:
    assert dropin.own_name(options.split()) == name


def test_a_container_of_an_earlier_run_is_removed_before_the_hook() -> None:
    text = composed(member("/usr/bin/docker", "run", "--name", "sglang", "image")).text.splitlines()
    removes = text.index("ExecStartPre=-/usr/bin/docker rm -f sglang")
    assert removes < text.index(HOOK)


@pytest.mark.parametrize(
    ("start", "line"),
    [
        ("/usr/bin/podman run --name sglang image", "-/usr/bin/podman rm -f sglang"),
        ("/opt/bin/nerdctl run --name sglang image", "-/opt/bin/nerdctl rm -f sglang"),
        ("/usr/bin/docker --context far run --name sglang image", "-/usr/bin/docker --context far rm -f sglang"),
        ("/usr/bin/docker container run --name sglang image", "-/usr/bin/docker container rm -f sglang"),
        ("/usr/bin/docker run --name ${NAME} image", "-/usr/bin/docker rm -f ${NAME}"),
        ("/usr/bin/docker run --name ten%%25 image", "-/usr/bin/docker rm -f ten%%25"),
    ],
)
def test_it_is_removed_as_it_was_started(start: str, line: str) -> None:
    assert removal(*start.replace("%%", "%").split(), text=f"[Service]\nExecStart={start}") == [f"ExecStartPre={line}"]


@pytest.mark.parametrize(
    ("flag", "prefix"), [("no-env-expand", ":"), ("privileged", "+"), ("no-setuid", "!"), ("ignore-failure", "")]
)
def test_it_is_removed_as_the_user_who_started_it(flag: str, prefix: str) -> None:
    start = ("/usr/bin/docker", "run", "--name", "a$b", "image")
    assert removal(*start, flags=(flag,)) == [f"ExecStartPre=-{prefix}/usr/bin/docker rm -f a$b"]


@pytest.mark.parametrize(
    "start",
    [
        "/usr/bin/docker run --rm image",
        "/usr/bin/docker run image --name other",
        "/usr/bin/docker start sglang",
        "/usr/bin/docker compose up",
        "/usr/bin/podman run --cgroups=split --name sglang image",
        "/opt/server --name sglang run",
    ],
)
def test_nothing_is_removed_that_is_not_certainly_the_unit_s_own(start: str) -> None:
    assert removal(*start.split()) == []


def test_a_container_without_a_name_is_told_of() -> None:
    assert "not certain under which name" in told(member("/usr/bin/docker", "run", "--rm", "image"))


@pytest.mark.parametrize(
    ("verb", "again"), [("rm -f sglang", False), ("stop sglang", False), ("rm -f other", True), ("pull sglang", True)]
)
def test_what_the_unit_removes_itself_is_not_removed_twice(verb: str, again: bool) -> None:
    pre = command("/usr/bin/docker", *verb.split(), flags=("ignore-failure",))
    lines = removal("/usr/bin/docker", "run", "--name", "sglang", "image", pre=(pre,))
    assert bool(lines) is again


def test_in_a_template_the_name_keeps_its_specifiers() -> None:
    text = '[Service]\nExecStart=/usr/bin/docker run --rm \\\n  # why\n  --name "sglang-%i" image\n'
    start = ("/usr/bin/docker", "run", "--rm", "--name", "sglang-gpuprestart", "image")
    name = "sglang@gpuprestart.service"
    assert removal(*start, text=text, name=name) == ["ExecStartPre=-/usr/bin/docker rm -f sglang-%i"]


@pytest.mark.parametrize(
    "text",
    [
        "[Service]\nExecStart=/usr/bin/docker run --name vllm-%i image\n",
        "[Service]\nExecStart=/usr/bin/docker run --rm --name sglang-%i image\n",
        "[Service]\nExecStart=/usr/bin/docker run --name 'sglang-%i image\n",
        "# gone since\n",
    ],
)
def test_a_name_is_not_taken_from_a_file_that_says_otherwise(text: str) -> None:
    start = ("/usr/bin/docker", "run", "--name", "sglang-gpuprestart", "image")
    template = member(*start, text=text, name="sglang@gpuprestart.service")
    assert not any(line.startswith("ExecStartPre=") for line in says(template))
    assert "sglang@.service" in told(template) and "@gpuprestart" not in told(template)
    # Of a single unit, what systemd has loaded is certain, and says itself alone.
    percent = removal("/usr/bin/docker", "run", "--name", "ten%i", "image", text=text)
    assert percent == ["ExecStartPre=-/usr/bin/docker rm -f ten%%i"]
    assert removal(*start, text=text) == ["ExecStartPre=-/usr/bin/docker rm -f sglang-gpuprestart"]


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("exec docker run --name sglang-%i image", "-docker rm -f sglang-%i"),
        ("cd /srv; exec /usr/bin/podman run --name=sglang image", "-/usr/bin/podman rm -f sglang"),
        ("docker run --name $NAME image", None),
        ("docker run --name sglang`hostname` image", None),
        ("docker --context far run --name sglang image", None),
    ],
)
def test_inside_a_shell_only_a_plain_name_is_certain(script: str, line: str | None) -> None:
    text = f"[Service]\nExecStart=/bin/sh -c '{script}'\n"
    start = ("/bin/sh", "-c", script.replace("%i", "gpuprestart"))
    found = removal(*start, text=text, name="sglang@gpuprestart.service")
    assert found == ([f"ExecStartPre={line}"] if line else [])


# Several services ----------------------------------------------------------------------------------------------------


def two(first: dict[str, Any], second: dict[str, Any]) -> tuple[Member, Member]:
    return member(name="a-1.service", **first), member(name="a-2.service", **second)


def test_what_is_raised_for_some_is_lowered_for_none() -> None:
    pair = two(
        {"TimeoutStartUSec": 90_000_000, "RestartUSec": 100_000},
        {"TimeoutStartUSec": 900_000_000, "RestartUSec": 60_000_000},
    )
    assert says(*pair) == ["NotifyAccess=exec", "TimeoutStartSec=900s", "RestartSec=60s"]


def test_no_limit_stays_no_limit() -> None:
    pair = two({"TimeoutStartUSec": 90_000_000}, {"TimeoutStartUSec": 2**64 - 1})
    assert says(*pair) == ["NotifyAccess=exec"]
    assert "a-2.service has no limit" in told(*pair)


def test_nobody_who_may_speak_is_silenced() -> None:
    pair = two({"NotifyAccess": "none"}, {"NotifyAccess": "all"})
    assert says(*pair) == []
    assert "no verdict of a-1.service" in told(*pair)


def test_a_container_of_one_is_not_removed_for_the_other() -> None:
    docker = [command("/usr/bin/docker", "run", "--name", "one", "image")]
    pair = two({"ExecStartEx": docker}, {})
    assert says(*pair) == ["NotifyAccess=exec"]
    assert "docker rm -f one is right for a-1.service alone" in told(*pair)


def test_the_same_line_for_all_stands_once() -> None:
    text = "[Service]\nExecStart=/usr/bin/docker run --name %p image\n"
    pair = (
        member("/usr/bin/docker", "run", "--name", "a-1", "image", name="a-1.service", text=text),
        member("/usr/bin/docker", "run", "--name", "a-2", "image", name="a-2.service", text=text),
    )
    assert says(*pair)[0] == "ExecStartPre=-/usr/bin/docker rm -f %p"


# What is told --------------------------------------------------------------------------------------------------------


def test_what_runs_before_the_hook_is_told_and_what_runs_after_it_is_not() -> None:
    text = "[Service]\nExecStartPre=/opt/warm-up\nExecStartPre=-/usr/bin/docker rm -f x\nExecStart=/opt/server\n"
    unit = member(text=text, later="[Service]\nExecStartPre=/opt/last\n")
    assert f"{UNIT}:2: ExecStartPre=/opt/warm-up" in told(unit)
    assert "rm -f x" not in told(unit) and "/opt/last" not in told(unit)


@pytest.mark.parametrize(
    ("later", "wins"),
    [
        ("NotifyAccess=main", True),
        ("TimeoutStartSec=10", True),
        ("TimeoutSec=10", True),
        ("RestartSec=1", True),
        ("ExecStartPre=/opt/last", False),
        ("User=model", False),
    ],
)
def test_a_later_drop_in_that_wins_is_told(later: str, wins: bool) -> None:
    unit = member(later=f"[Service]\n{later}\n", TimeoutStartUSec=90_000_000, RestartUSec=100_000)
    assert (f"60-late.conf:2: {later} is read later and wins" in told(unit)) is wins


def test_a_later_drop_in_that_undoes_the_hook_is_found() -> None:
    unit = member(later="[Service]\nExecStartPre=\nExecStartPre=/opt/last\n")
    line = dropin.undoing(unit.lines)
    assert line is not None and line.number == 2
    assert dropin.undoing(member(text="[Service]\nExecStartPre=\n").lines) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[Service]\nExecStartPre=+/usr/bin/gpuprestart clean\n", True),
        ("[Service]\nExecStartPre=-/bin/sh -c 'gpuprestart clean || true'\n", True),
        ("[Service]\nExecStartPre=+/usr/bin/gpuprestart clean\nExecStartPre=\n", False),
        ("[Service]\nExecStartPre=-+/usr/bin/gpuprestart check --journal\n", False),
        ("[Service]\n#ExecStartPre=+/usr/bin/gpuprestart clean\n", False),
        ("[Unit]\nExecStartPre=+/usr/bin/gpuprestart clean\n", False),
    ],
)
def test_whether_a_file_runs_the_hook(text: str, found: bool) -> None:
    assert (dropin.hook_of(unitlines.read([(UNIT, text)])) is not None) is found


# Whose a file is -----------------------------------------------------------------------------------------------------


def test_what_was_written_is_known_again() -> None:
    text = composed().text
    assert dropin.state_of(text) is State.INTACT
    assert dropin.made_folder(text)
    without = dropin.compose("sglang.service", [member()], makes_folder=False).text
    assert dropin.state_of(without) is State.INTACT and not dropin.made_folder(without)


def test_no_character_can_be_changed_unseen() -> None:
    text = composed().text
    for number, char in enumerate(text):
        changed = text[:number] + ("x" if char != "x" else "y") + text[number + 1 :]
        assert dropin.state_of(changed) is not State.INTACT, f"{char!r} at {number}"


@pytest.mark.parametrize("edit", ["\n", "# mine\n", "RestartSec=1\n"])
def test_what_was_added_is_seen(edit: str) -> None:
    assert dropin.state_of(composed().text + edit) is State.EDITED


def test_what_somebody_else_has_written_is_told_apart() -> None:
    assert dropin.state_of(f"[Service]\n{HOOK}\n") is State.FOREIGN
    assert dropin.state_of("") is State.FOREIGN
