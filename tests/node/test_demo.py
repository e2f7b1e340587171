"""The demo does what it shows: both ways of running it end well and say what they are there to say."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Optional

import pytest

from tests.node.machine import REPOSITORY, can_boot, can_chroot

pytestmark = pytest.mark.node


def _demo(node: str, *, needs: Optional[str]) -> str:
    """What the demo prints; ``needs`` is why it cannot run here, which is a failure in CI."""
    if needs is not None:
        if os.environ.get("CI"):
            pytest.fail(needs)
        pytest.skip(needs)
    done = subprocess.run(
        [sys.executable, "-m", "tests.node.demo", f"--node={node}"],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    # Not a terminal: nothing is coloured.
    assert "\033" not in done.stdout
    return done.stdout


def _scenes(output: str) -> list[str]:
    before, *scenes = output.split("\nScene ")
    assert len(scenes) == 3, output
    assert "All three scenes ended as promised" in scenes[2]
    return [before, *scenes]


def test_on_a_booted_node() -> None:
    before, cleaned, foreign, unowned = _scenes(_demo("auto", needs=can_boot()))
    assert "ExecStartPre=+/usr/bin/gpuprestart clean" in before
    assert "NotifyAccess=exec" in before
    assert "1523 / 81559 MB" in cleaned
    assert "Active: active (running)" in cleaned
    assert "GPUs 0-7 proved clean" in cleaned
    assert "the server is ready on port 30000" in cleaned
    assert "status=75/TEMPFAIL" in foreign
    assert "refused the start: protected: GPU 3" in foreign
    assert "systemctl stop ollama.service" in foreign
    assert "refused the start: unattributed: GPU 5" in unowned
    assert "nvidia-smi --gpu-reset" in unowned


def test_in_a_plain_chroot() -> None:
    before, idle, held, unowned = _scenes(_demo("none", needs=can_chroot()))
    assert "NODE=none" in before and "plain chroot" in before
    assert "clean: GPUs 0-7 proved clean" in idle
    assert "protected, exit status 75" in held
    assert "unattributed: GPU 5" in unowned
    assert "nvidia-smi --gpu-reset" in unowned
