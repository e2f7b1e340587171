"""Real processes that are called what a terminal would obey and a journal might believe, and carry secrets (D5)."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from collections.abc import Sequence

import pytest

from tests.node.image import CLEAN_ENVIRONMENT
from tests.node.scene import Run, Scene

#: In the words of the holder's command line; none of them may be seen anywhere.
SECRETS = (
    "dr4gonfruit",
    "p0megranate",
    "mulb3rry",
    "t4marind",
    "l0quatl0quat",
    "m1rabelle",
    "b1lberry",
    "qu1ncequ1nce",
)

FORGED = b"x\nMESSAGE=forged\nPRIORITY=0\nFORGED_BY=argv\n\n<0>forged\x1b[31mred\x1b]0;title\x07\r\t\x9b2J\xe2\x80\xae"
#: Where its program lies, and works; how it and so the process is called; its cgroup, which cannot have a line end.
PLACE = b"/tmp/t-place\n<0>forged\n\x1b[31m\xff"
NAME = b"a\n<0>\x1b[1m\xff)R 1"
GROUP = b"<0>forged\x1b[31m\xff PRIORITY=0"


def _argv() -> list[bytes]:
    said = iter(SECRETS)
    words = [
        *("--api-key", next(said)),
        f"--api-key={next(said)}",
        *("-e", f"HF_TOKEN=a {next(said)}"),
        f"AWS_SECRET_ACCESS_KEY={next(said)}",
        *("-H", f"Authorization: Bearer {next(said)}!"),
        f"https://user:{next(said)}@example.org/model",
        json.dumps({"env": [{"name": "HF_TOKEN", "value": next(said)}]}),
        f"docker run -e 'HF_TOKEN=a {next(said)}' image",
    ]
    # An argument of 128 KiB with its end is the longest that there is (MAX_ARG_STRLEN).
    return [*map(os.fsencode, words), FORGED, b"\xff\xfe\x80", b"", b"y" * 131_071]


#: Becomes the holder: a shell that waits for a line that never comes.
HOLDER = f"""
import os, shutil, sys
os.umask(0o077)
os.makedirs({PLACE!r})
os.chdir({PLACE!r})
shutil.copy("/bin/dash", {NAME!r})
os.mkfifo("fifo")
with open("/proc/self/cgroup", "rb") as file:
    group = b"/sys/fs/cgroup" + file.read().rpartition(b"0::")[2].strip() + b"/" + os.fsencode(sys.argv[1]) + {GROUP!r}
os.mkdir(group)
with open(group + b"/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
os.set_inheritable(os.open("/dev/nvidia0", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK), True)
os.execve({PLACE!r} + b"/" + {NAME!r}, [{NAME!r}, b"-c", b"read x <>fifo", *{_argv()!r}], {{}})
"""


@pytest.mark.case("D5")
@pytest.mark.parametrize("stale", [True, False])
def test_nothing_that_a_process_is_called_forges_moves_or_betrays_anything(scene: Scene, stale: bool) -> None:
    before = scene.node.run(["journalctl", "--lines=0", "--show-cursor"]).stdout.partition("cursor: ")[2].strip()
    unit, holder = _holder(scene, stale=stale)
    screens = [_on_a_terminal(scene, "check", "--gpus", "0"), _on_a_terminal(scene, "status")]
    assert all(f"{holder}" in screen for screen in screens)
    server = scene.server(gpus="0")
    assert scene.start(server) is stale
    run = scene.verdict(server)
    assert run.outcome == ("cleaned" if stale else "protected")
    assert run.holder(holder)["comm"] == r"a\x0a<0>\x1b[1m\xff)R 1"
    owner = f"unit:{unit}" if not stale else r"container:lxc:<0>forged\x1b[31m\xff PRIORITY=0"
    assert run.holder(holder)["owner"] == owner
    screens.append(scene.node.run(["systemctl", "status", "--lines=0", server], check=False).stdout)
    screens.append(scene.check("--gpus", "0").stdout)
    if not stale:
        screens.append(_on_a_terminal(scene, "clean", "--gpus", "0"))
    for screen in screens:
        assert all(line.isprintable() for line in screen.replace("\r\n", "\n").split("\n")), screen
        assert not _leaks(screen)
    _is_told(scene, run, holder, before, unit=None if stale else unit)


def _is_told(scene: Scene, run: Run, holder: int, before: str, *, unit: str | None) -> None:
    """Every entry that the whole node has written since, whoever wrote it, in both forms in which a journal is read."""
    since = f"--after-cursor={before}"
    exported = _exported(scene, since)
    entries = scene.node.journal(since)
    assert len(entries) == len(exported) and not _leaks(json.dumps(entries, ensure_ascii=False))
    for names in exported:
        assert names.count(b"MESSAGE") == names.count(b"PRIORITY") == 1 and b"FORGED_BY" not in names
    about = [each for each in scene.records(run) if each.get("HOLDER_PID") == str(holder)]
    assert {each["HOLDER_COMM"] for each in about} == {r"a\x0a<0>\x1b[1m\xff)R 1"}
    assert all("[redacted]" in each["HOLDER_CMDLINE"] for each in about) and len(about) == (1 if unit else 3)
    assert {each.get("OBJECT_SYSTEMD_UNIT") for each in about} == {unit}
    for entry in entries:
        assert entry["PRIORITY"] in "34567" and not entry["MESSAGE"].startswith(("forged", "<0>"))
        if entry.get("SYSLOG_IDENTIFIER") == "gpuprestart":
            assert entry["_COMM"] == "gpuprestart"
            own = [entry[name] for name in entry if not name.startswith("_")]
            assert all(each.isprintable() for value in own for each in ([value] if isinstance(value, str) else value))


def test_a_pattern_that_takes_for_ever_on_a_command_line(scene: Scene) -> None:
    """A site's rule, and a process that was written against it: the verdict comes, and names the rule."""
    scene.policy("[[rule]]\nname = 'careless'\nmatch = { cmdline = '(a+)+$' }\naction = 'kill'\n")
    unit, (holder,) = scene.orphans("--open", "0", "--gpu", "0", "--mib", "900", "a" * 64 + "!")
    server = scene.server(gpus="0")
    scene.node.systemctl("start", "--no-block", server)
    scene.await_state(server, "failed")
    run = scene.verdict(server)
    assert run.outcome == "protected" and scene.signals(run) == [] and scene.alive(holder)
    assert run.verdict["duration_s"] < 10
    assert "'careless'" in run.verdict["message"] and "takes too long" in run.verdict["message"]
    assert run.holder(holder)["rule"] == "careless" and run.holder(holder)["owner"] == f"unit:{unit}"


# Their parts ---------------------------------------------------------------------------------------------------------


def _holder(scene: Scene, *, stale: bool) -> tuple[str, int]:
    """The holder, as a container's that nothing runs any more, or as an active unit's whose name has escapes in it."""
    scene.node.run(["rm", "-rf", os.fsdecode(PLACE)])
    scene.node.write("/run/t-hostile.py", HOLDER)
    unit = scene.name(r"hostile\x2dname")
    start = "/usr/bin/python3 -I /run/t-hostile.py"
    if stale:
        start = f"/bin/sh -c '{start} lxc.payload. & until [ -p {_glob()}/fifo ]; do sleep 0.02; done; exit 1'"
    else:
        start += " ''"
    text = f"[Service]\nUser=model\nDelegate=yes\nKillMode=process\nExecStart={start}\n"
    scene.node.write(f"/etc/systemd/system/{unit}", text)
    scene.node.systemctl("daemon-reload")
    scene.start(unit)
    if stale:
        scene.await_state(unit, "failed")
    pid = scene.node.wait_for(lambda: _named(scene, unit), timeout=20, what="the holder has become what it is")
    assert all(secret in scene.node.read(f"/proc/{pid}/cmdline") for secret in SECRETS)
    scene.gpu.ask("alloc", gpu=0, mib=900, pid=pid)
    return unit, pid


def _glob() -> str:
    return "/tmp/t-place*"


def _named(scene: Scene, unit: str) -> int:
    """The PID of the holder once it is called as it is to be."""
    wanted = os.fsdecode(NAME[:15]) + "\n"
    pids = scene.node.unit_pids(unit)
    return next((pid for pid in pids if scene.node.run(["cat", f"/proc/{pid}/comm"], check=False).stdout == wanted), 0)


def _on_a_terminal(scene: Scene, *arguments: str) -> str:
    """What the program shows on a terminal of its own."""
    ours, terminal = pty.openpty()
    try:
        # It is laid out for a dumb terminal too, without colours of ours that would have to be told from a stranger's.
        command = scene.node.argv(["env", "TERM=dumb", "/usr/bin/gpuprestart", *arguments])
        with subprocess.Popen(
            command, stdin=terminal, stdout=terminal, stderr=terminal, env=CLEAN_ENVIRONMENT, start_new_session=True
        ):
            os.close(terminal)
            shown = b""
            while piece := _read(ours):
                shown += piece
    finally:
        os.close(ours)
    return shown.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:
        # Nobody has it open any more (pty(7)).
        return b""


def _leaks(text: str) -> list[str]:
    return [secret for secret in SECRETS if secret in text]


def _exported(scene: Scene, *options: str) -> list[Sequence[bytes]]:
    """The names of the fields of each entry, in the format of journalctl's export."""
    text = os.fsencode(scene.node.run(["journalctl", "--output=export", *options]).stdout)
    assert not _leaks(os.fsdecode(text))
    entries: list[list[bytes]] = [[]]
    at = 0
    while at < len(text):
        end = text.index(b"\n", at)
        name, equals, _ = text[at:end].partition(b"=")
        if not equals and name:
            end += 9 + int.from_bytes(text[end + 1 : end + 9], "little")
        if name:
            entries[-1].append(name)
        elif entries[-1]:
            entries.append([])
        at = end + 1
    return [entry for entry in entries if entry]
