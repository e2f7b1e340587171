"""Every command that the documents show is run here, in the scene that its page tells of, and what it prints is held
against the page.

A block of ```console``` has a line "$ command" and below it all that the command printed. Below a heading, policies in
```toml``` blocks that begin with the name of their file are in force. ``python -m tests.node.test_documents --renew``
writes what is printed today into the pages; nobody types it by hand.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    # The stage uses the stand-in driver's own client, which lies beside it under its bare name.
    sys.path.insert(0, str(Path(__file__).parent / "driver"))

import pytest

from tests.node.machine import Node
from tests.node.scene import POLICY, Scene

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("policies.md", "journal.md", "troubleshooting.md")

#: What is another one each time: times, PIDs, ids, how long something took.
VARIES = (
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d+)? [A-Z]{3,4}", "TIME"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME"),
    (r"\[\d+\]", "[PID]"),
    (r"^ *\d+(?= +(model|alice|bench|ollama|root) )", "PID"),
    (r"\bPID \d+", "PID N"),
    (r"\bsession([ :])\d+", r"session\1N"),
    (r"\b[0-9a-f]{32}\b", "ID"),
    (r"\b[0-9a-f]{8}$", "RUN"),
    (r"\b\d+\.\d+ s\b", "N s"),
    (r"\b\d+ s\b", "N s"),
    (r"\b(measure|survey|evict|drain|preconditions) [\d.e-]+", r"\1 N"),
    # A list has only what took a hundredth of a second, and on a busy machine that may be any of them.
    (r"\b(measure|survey) N(, |(?= ))|(?<= s)  +- ", ""),
    (r" +", " "),
)


def alike(line: str) -> str:
    for pattern, instead in VARIES:
        line = re.sub(pattern, instead, line)
    return line.strip()


# The scenes ----------------------------------------------------------------------------------------------------------

SCENES: dict[tuple[str, str], Callable[[Scene], None]] = {}


def below(page: str, heading: str) -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
    def register(play: Callable[[Scene], None]) -> Callable[[Scene], None]:
        SCENES[page, heading] = play
        return play

    return register


@below("policies.md", "A machine of its own")
def oneshot(scene: Scene) -> None:
    """A benchmark that leaves a process, as a oneshot may."""
    holder = "/opt/simgpu/holder.py --open 0 --gpu 0 --mib 1523 --ready-file /tmp/t-bench"
    wait = "until [ -e /tmp/t-bench ]; do sleep 0.02; done"
    service = f"Type=oneshot\nUser=model\nKillMode=process\nExecStart=/bin/sh -c '{holder} & {wait}; exit 1'\n"
    scene.node.run(["rm", "-f", "/tmp/t-bench"])
    scene.node.write("/etc/systemd/system/benchmark.service", f"[Service]\n{service}")
    scene.node.systemctl("daemon-reload")
    scene.node.run(["systemctl", "start", "benchmark.service"], check=False)
    scene.server("sglang-qwen.service")


@below("policies.md", "A machine that others use")
def monitor(scene: Scene) -> None:
    scene.service("--open", "all", "--gpu", "2", "--mib", "300", "--comm", "exporter", unit="gpu-exporter.service")
    scene.server("sglang-qwen.service")


@below("policies.md", "A desktop with one GPU")
def desktop(scene: Scene) -> None:
    drawing = "--open 0 --gpu 0 --mib 3072 --alloc kind=graphics --comm gnome-shell --ready-file /run/t-drawing"
    session = scene.node.login_session("alice", f"/opt/simgpu/holder.py {drawing.replace('/run', '/tmp')}")
    scene.node.wait_for(lambda: scene.node.exists("/tmp/t-drawing"), timeout=20, what="the desktop draws")
    scene.at_the_end = lambda: scene.node.end_session(session)  # type: ignore[attr-defined]


@below("policies.md", "Two servers on one node")
def two(scene: Scene) -> None:
    serving = "/opt/simgpu/holder.py --open 4,5,6,7 --gpu 4,5,6,7 --mib 71680 --comm sglang::schedul"
    scene.server("sglang-small.service", gpus="0,1,2,3")
    scene.server("sglang-large.service", gpus="4,5,6,7", server=serving, more="Type=notify\nNotifyAccess=all\n")
    assert scene.start("sglang-large.service")


@below("journal.md", "The journal by example")
def story(scene: Scene) -> None:
    scene.node.run(["journalctl", "--rotate"])
    scene.node.run(["journalctl", "--vacuum-time=1us"])
    scene.orphans("--open", "0", "--gpu", "0", "--mib", "1523", unit="sglang-canary.service")
    scene.server("sglang-qwen.service", gpus="0,1,2,3", command="/usr/bin/gpuprestart clean")
    assert scene.start("sglang-qwen.service")
    scene.node.systemctl("stop", "sglang-qwen.service")
    ollama = ("--open", "all", "--gpu", "3", "--mib", "20480", "--comm", "ollama")
    scene.service(*ollama, unit="ollama.service", user="alice")
    assert not scene.start("sglang-qwen.service")
    scene.node.run(["journalctl", "--sync"])


@below("troubleshooting.md", "Troubleshooting")
def refused(scene: Scene) -> None:
    ollama = ("--open", "all", "--gpu", "3", "--mib", "20480", "--comm", "ollama")
    scene.service(*ollama, unit="ollama.service", user="alice")
    scene.server("sglang-qwen.service", command="/usr/bin/gpuprestart clean")


@below("troubleshooting.md", "By what one sees")
def without_hook(scene: Scene) -> None:
    scene.server("sglang-old.service", command="/bin/true", more="SuccessExitStatus=75\n")


# The pages -----------------------------------------------------------------------------------------------------------

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def parts(page: str) -> Iterator[tuple[str, str]]:
    """Each heading with a scene of its own, and the text that belongs to it."""
    text = (DOCS / page).read_text(encoding="utf-8")
    # What looks like a heading in a block is a comment.
    bare = BLOCK.sub(lambda found: re.sub(r"[^\n]", "x", found[0]), text)
    places = [(found.start(), len(found[1]), found[2]) for found in re.finditer(r"^(#+) (.+)$", bare, re.MULTILINE)]
    for number, (start, level, heading) in enumerate(places):
        if (page, heading) in SCENES:
            after = (at for at, deep, name in places[number + 1 :] if deep <= level or (page, name) in SCENES)
            yield heading, text[start : next(after, len(text))]


def commands(block: str) -> list[tuple[str, list[str]]]:
    """Each command of a console block with the lines that it printed."""
    found: list[tuple[str, list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif line or found[-1][1]:
            found[-1][1].append(line)
    return [(command, printed if printed[-1:] != [""] else printed[:-1]) for command, printed in found]


def printed(node: Node, command: str) -> list[str]:
    """All that a person would see who types it, without colours."""
    line = f"{{ {command}\n}} 2>&1"
    done = node.run(["/bin/sh", "-c", line], check=False, timeout=120, env={"SYSTEMD_PAGER": ""})
    return [each.rstrip() for each in done.stdout.rstrip("\n").split("\n")] if done.stdout.strip() else []


def played(scene: Scene, page: str, heading: str, text: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Each command below a heading, what the page shows of it, and what it prints."""
    scene.reset(gpus=8)
    for kind, block in BLOCK.findall(text):
        named = re.match(r"# /etc/gpuprestart/(\S+)\n", block)
        if kind == "toml" and named:
            scene.policy(block, name=named[1], base=POLICY if named[1] == "policy.toml" else "")
    SCENES[page, heading](scene)
    for kind, block in BLOCK.findall(text):
        if kind == "console":
            for command, shown in commands(block):
                yield command, shown, printed(scene.node, command)


KNOWN = [(page, heading) for page in PAGES for heading, _ in parts(page)]


@pytest.fixture
def fresh(scene: Scene) -> Iterator[Scene]:
    scene.node.run(["rm", "-rf", "/run/gpuprestart"])
    for name in ("benchmark", "sglang-qwen", "sglang-small", "sglang-large", "sglang-canary", "sglang-old", "ollama"):
        scene._known(f"{name}.service")
    scene._known("gpu-exporter.service")
    yield scene
    getattr(scene, "at_the_end", lambda: None)()
    scene.strike()
    names = "benchmark sglang-qwen sglang-small sglang-large sglang-old"
    scene.node.run(["sh", "-c", f"cd /etc/systemd/system && for each in {names}; do rm -f $each.service; done"])
    scene.node.systemctl("daemon-reload")


@pytest.mark.parametrize(("page", "heading"), KNOWN)
def test_what_is_shown_is_what_is_printed(fresh: Scene, page: str, heading: str) -> None:
    text = dict(parts(page))[heading]
    seen = list(played(fresh, page, heading, text))
    assert seen, "nothing is shown here"
    for command, shown, said in seen:
        assert [*map(alike, said)] == [*map(alike, shown)], f"$ {command}"


def test_every_block_is_below_a_heading_that_has_a_scene() -> None:
    for page in (*PAGES, *(path.name for path in DOCS.glob("*.md") if path.name not in PAGES)):
        text = (DOCS / page).read_text(encoding="utf-8")
        blocks = [block for kind, block in BLOCK.findall(text) if kind == "console"]
        ours = [block for _, part in parts(page) for kind, block in BLOCK.findall(part) if kind == "console"]
        assert blocks == ours, f"{page} shows commands that nobody runs"
    assert {(page, heading) for page, heading in SCENES} == set(KNOWN)


# Renewing ------------------------------------------------------------------------------------------------------------


def _block(pieces: Iterator[str], match: re.Match[str]) -> str:
    """The same block with what its commands print today."""
    if match[1] != "console":
        return match[0]
    return "```console\n" + "\n".join(next(pieces) for _ in commands(match[2])) + "```"


def renew() -> None:
    with Node(gpus=8) as node:
        for page, heading in KNOWN:
            scene = Scene(node)
            path = DOCS / page
            text = dict(parts(page))[heading]
            found = list(played(scene, page, heading, text))

            pieces = iter(["\n".join([f"$ {command}", *said]) + "\n" for command, _, said in found])
            whole = path.read_text(encoding="utf-8")
            assert whole.count(text) == 1
            path.write_text(whole.replace(text, BLOCK.sub(partial(_block, pieces), text)), encoding="utf-8")
            getattr(scene, "at_the_end", lambda: None)()
            scene.strike()
            node.run(
                ["sh", "-c", "rm -rf /run/gpuprestart /etc/systemd/system/sglang-*.service* /etc/systemd/system/bench*"]
            )
            node.systemctl("daemon-reload")


if __name__ == "__main__":
    if sys.argv[1:] != ["--renew"]:
        sys.exit("python -m tests.node.test_documents --renew")
    renew()
