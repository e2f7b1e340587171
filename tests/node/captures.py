"""Pictures of ``status`` and ``check`` for the documentation: ``python -m tests.node.captures`` makes them.

Boots a node with a scene on it that has something of everything, runs both on a terminal of 80 and of 120 columns, and
keeps what they wrote, colours and all, as docs/img/status-80.svg and so on.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

# The stage uses the stand-in driver's own client, which lies beside it under its bare name.
sys.path.insert(0, str(Path(__file__).parent / "driver"))

from rich.console import Console  # noqa: E402
from rich.text import Text  # noqa: E402

from tests.node.machine import Node  # noqa: E402
from tests.node.scene import Scene  # noqa: E402

IMAGES = Path(__file__).parents[2] / "docs" / "img"

#: Runs a command on a terminal of so many columns and prints what it wrote there.
TERMINAL = """
import fcntl, os, pty, struct, sys, termios
columns, argv = int(sys.argv[1]), sys.argv[2:]
pid, terminal = pty.fork()
if pid == 0:
    os.environ.update(TERM="xterm-256color", COLUMNS=str(columns), LINES="50", LANG="C.UTF-8")
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    os.execvp(argv[0], argv)
while True:
    try:
        part = os.read(terminal, 65536)
    except OSError:
        break
    if not part:
        break
    os.write(1, part)
os.waitpid(pid, 0)
"""


def set_stage(scene: Scene) -> None:
    """A crash's left-overs, a neighbour who is alive, a monitor, somebody's notebook, memory that is nobody's."""
    scene.reset(gpus=8)
    scene.policy("[[rule]]\nname = 'the monitor'\nmatch = { unit = 'gpu-exporter.service' }\naction = 'spare'\n")
    old = ("--comm", "sglang::schedul")
    scene.orphans("--open", "0,1", "--gpu", "0,1", "--mib", "61440", *old, unit="sglang-canary.service")
    ollama = ("--open", "all", "--gpu", "3", "--mib", "20480", "--comm", "ollama")
    scene.service(*ollama, unit="ollama.service", user="alice")
    scene.service("--open", "all", "--gpu", "2", "--mib", "300", "--comm", "exporter", unit="gpu-exporter.service")
    scene.gpu.ask("leak", gpu=5, mib=40960)
    scene.server("sglang-qwen.service", gpus="0,1,2,3,4,5,6,7")


def typed(scene: Scene, width: int, *words: str) -> str:
    """What a person sees who types this."""
    return scene.node.run(["python3", "-c", TERMINAL, str(width), "gpuprestart", *words], check=False).stdout


def drawn(text: str, width: int, title: str) -> str:
    console = Console(record=True, file=io.StringIO(), width=width, force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(text.replace("\r", "")), no_wrap=True)
    svg = console.export_svg(title=title)
    # Nothing is fetched when somebody looks at it.
    svg = re.sub(r"@font-face \{.*?\}|<!--.*?-->", "", svg, flags=re.DOTALL)
    # One name for the same picture each time that it is made.
    return re.sub(r"terminal-\d+-", "terminal-", svg).replace("Fira Code,", "").rstrip() + "\n"


def main() -> int:
    IMAGES.mkdir(parents=True, exist_ok=True)
    with Node(gpus=8) as node:
        scene = Scene(node)
        set_stage(scene)
        for name, words in (("status", ["status"]), ("check", ["check", "--unit", "sglang-qwen"])):
            for width in (80, 120):
                text = typed(scene, width, *words)
                (IMAGES / f"{name}-{width}.svg").write_text(drawn(text, width, f"gpuprestart {' '.join(words)}"))
                if "--show" in sys.argv:
                    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
