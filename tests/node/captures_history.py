"""Pictures of real runs for the documentation: ``python -m tests.node.captures_history`` draws them into docs/img.

Boots a node, plays the scenes that a person looks back at, and keeps what ``history`` shows and draws of them. What is
on the pictures is what happened; nothing is made up but the GPUs.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path

# The stage uses the stand-in driver's own client, which lies beside it under its bare name.
sys.path.insert(0, str(Path(__file__).parent / "driver"))

from rich.console import Console  # noqa: E402
from rich.text import Text  # noqa: E402

from tests.node.machine import Node  # noqa: E402
from tests.node.scene import Scene  # noqa: E402

IMAGES = Path(__file__).parents[2] / "docs" / "img"

UNIT = "sglang-qwen.service"


def cleaned(scene: Scene) -> None:
    """Two workers of a dead server ignore SIGTERM; a third goes at once; memory comes back 1.5 s after them."""
    scene.gpu.ask("set", release_delay=1.5)
    scene.policy("[deadline]\nterm = '2 s'\n")
    old = ("--comm", "VLLM::Worker_TP", "--ignore-term")
    scene.orphans("--open", "0,1", "--gpu", "0,1", "--mib", "61440", *old, unit="vllm-old.service", count=1)
    scene.orphans(
        "--open", "2", "--gpu", "2", "--mib", "24576", "--comm", "VLLM::EngineCor", unit="embeddings-old.service"
    )
    scene.server(UNIT, gpus="0,1,2,3", command="/usr/bin/gpuprestart clean")
    assert scene.start(UNIT)
    scene.node.systemctl("stop", UNIT)


def clean(scene: Scene) -> None:
    scene.server(UNIT, gpus="0,1,2,3", command="/usr/bin/gpuprestart clean")
    assert scene.start(UNIT)
    scene.node.systemctl("stop", UNIT)


def refused(scene: Scene) -> None:
    """Somebody alive holds one of its GPUs."""
    scene.service("--open", "3", "--gpu", "3", "--mib", "9216", "--comm", "ollama", unit="ollama.service")
    scene.server(UNIT, gpus="0,1,2,3", command="/usr/bin/gpuprestart clean")
    assert not scene.start(UNIT)


def crowd(scene: Scene) -> None:
    """Eight GPUs, a worker on each, that go one after the other as memory comes back."""
    scene.gpu.ask("set", release_delay=0.4)
    for gpu in range(8):
        more = ("--ignore-term",) if gpu % 3 == 0 else ()
        where = ("--open", str(gpu), "--gpu", str(gpu), "--mib", str(70_000 - 4_000 * gpu))
        scene.orphans(*where, "--comm", f"TP{gpu}_scheduler", *more, unit=f"sglang-old{gpu}.service")
    scene.policy("[deadline]\nterm = '1 s'\n")
    scene.server("sglang-all.service", gpus="0,1,2,3,4,5,6,7", command="/usr/bin/gpuprestart clean")
    assert scene.start("sglang-all.service")
    scene.node.systemctl("stop", "sglang-all.service")


def drawn(scene: Scene, unit: str) -> str:
    scene.node.run(["journalctl", "--sync"])
    return scene.node.run(["/usr/bin/gpuprestart", "history", unit, "-n", "1", "--svg", "-"]).stdout


def screen(scene: Scene, width: int, *words: str) -> str:
    """What a terminal of this width shows, drawn by Rich as a picture of a terminal."""
    line = f"stty cols {width}; exec gpuprestart {' '.join(words)}"
    shown = scene.node.run(
        ["script", "-qec", line, "/dev/null"], env={"TERM": "xterm-256color", "COLUMNS": str(width), "LANG": "C.UTF-8"}
    ).stdout
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ gpuprestart {' '.join(words)}", style="bold"))
    console.print(Text.from_ansi(shown.replace("\r\n", "\n").rstrip("\n")))
    drawn = console.export_svg(title=f"{width} columns", unique_id="capture")
    # The picture is to load nothing from elsewhere: whoever reads it has a font of fixed width.
    return re.sub(r"\s*@font-face \{.*?\}", "", drawn, flags=re.DOTALL).replace("Fira Code", "DejaVu Sans Mono")


def main() -> int:
    IMAGES.mkdir(parents=True, exist_ok=True)
    with Node(gpus=8, say=print) as node:
        runs: tuple[tuple[str, Callable[[Scene], None], str], ...] = (
            ("history-clean.svg", clean, UNIT),
            ("run.svg", cleaned, UNIT),
            ("history-refused.svg", refused, UNIT),
            ("history-eight.svg", crowd, "sglang-all.service"),
        )
        for name, play, unit in runs:
            scene = Scene(node)
            scene.reset()
            try:
                play(scene)
                _write(name, drawn(scene, unit))
            finally:
                scene.strike()
        for width in (80, 120, 160):
            _write(f"history-{width}.svg", screen(scene, width, "history"))
        listed = node.run(["/usr/bin/gpuprestart", "history", UNIT]).stdout.splitlines()
        run = next(line.split()[-1] for line in listed if " cleaned " in line)
        _write("history-show.svg", screen(scene, 120, "history", "show", run))
        _write("history-proof.svg", screen(scene, 120, "proof", "sglang-all"))
    return 0


def _write(name: str, text: str) -> None:
    (IMAGES / name).write_text(text, encoding="utf-8")
    print(f"docs/img/{name}")


if __name__ == "__main__":
    sys.exit(main())
