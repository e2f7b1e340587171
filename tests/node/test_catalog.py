"""What ``journalctl -x`` says on a machine on which gpuprestart is installed."""

from __future__ import annotations

import re

from gpuprestart import events
from tests.node.scene import Scene


def test_every_kind_of_record_is_explained(scene: Scene) -> None:
    scene.node.run(["journalctl", "--update-catalog"])
    for event, message_id in events.MESSAGE_IDS.items():
        shown = scene.node.run(["journalctl", "--no-pager", "--dump-catalog", message_id]).stdout
        assert shown.startswith(f"-- {message_id}") and re.search("^Subject: .+", shown, re.MULTILINE), event


def test_what_is_explained_is_about_this_very_record(scene: Scene) -> None:
    """The fields of each record stand in its paragraphs, as who looks for the process and the GPU needs them."""
    _, (orphan,) = scene.orphans("--open", "0", "--gpu", "0", "--mib", "900")
    scene.node.run(["journalctl", "--update-catalog"])
    server = scene.server(gpus="0")
    assert scene.start(server)
    run = scene.verdict(server)
    scene.node.run(["journalctl", "--sync"])
    shown = scene.node.run(["journalctl", "--no-pager", "--catalog", f"GPUPRESTART_RUN={run.verdict['run']}"]).stdout
    assert f"Subject: SIGTERM was sent to process python3[{orphan}]" in shown
    assert f"systemctl status {orphan}" in shown
    assert "Subject: The verdict on the GPUs is: cleaned" in shown and "exit status 0." in shown
    assert not re.search("@[A-Z_]+@", shown)
