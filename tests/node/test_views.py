"""``status`` and ``check`` on a booted node, as they are typed: on a terminal, into a pipe, without root."""

from __future__ import annotations

import csv
import io
import json
import re

import pytest

from tests.node.captures import drawn, set_stage, typed
from tests.node.scene import Scene

GPUPRESTART = "/usr/bin/gpuprestart"


@pytest.fixture
def stage(scene: Scene) -> Scene:
    scene.node.run(["rm", "-rf", "/run/gpuprestart"])
    for unit in ("sglang-canary.service", "ollama.service", "gpu-exporter.service", "sglang-qwen.service"):
        scene._known(unit)
    set_stage(scene)
    return scene


def without_colour(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text).replace("\r", "")


@pytest.mark.parametrize("width", [80, 120])
def test_status_on_a_terminal(stage: Scene, width: int) -> None:
    text = typed(stage, width, "status")
    assert "\x1b[" in text
    lines = [line.rstrip() for line in without_colour(text).splitlines()]
    assert all(len(line) <= width for line in lines)
    assert re.match(r" +0  █+░*  GPU-a0576ece .* 61443 MiB .* 64 MiB .*no$", lines[3])
    told = " ".join(" ".join(lines).split())
    for words in (
        "sglang::schedul unit:sglang-canary.service",
        "was left behind by sglang-canary.service, which has failed",
        "refuse belongs to ollama.service, which is active",
        "spare matches the rule 'the monitor'",
        "nvml,fd",
    ):
        assert words in told
    assert "exit status" not in told


def test_check_on_a_terminal_ends_with_what_to_type(stage: Scene) -> None:
    lines = [line.rstrip() for line in without_colour(typed(stage, 120, "check", "--unit", "sglang-qwen")).splitlines()]
    told = " ".join(" ".join(lines).split())
    assert "protected (also: unattributed), exit status 75: GPU 3 (20483 MiB used, limit 64 MiB) is held by" in told
    at = lines.index("What would help:")
    assert lines[at + 1].startswith("  systemctl stop ollama.service")
    assert any("nvidia-smi --gpu-reset -i GPU-3bf2292e-" in line for line in lines[at + 1 :])


def test_a_pipe_gets_columns_that_can_be_cut(stage: Scene) -> None:
    for verb in ("status", "check"):
        said = stage.node.run([GPUPRESTART, verb], check=False).stdout
        assert said.isascii() and "\x1b" not in said
        (row,) = [line for line in said.splitlines() if "unit:ollama.service" in line]
        assert row.split()[1:7] == ["alice", "ollama", "unit:ollama.service", "S", "3", "20480"]
    assert (
        stage.node.run([GPUPRESTART]).stdout.splitlines()[0]
        == stage.node.run([GPUPRESTART, "status"]).stdout.splitlines()[0]
    )


def test_json_is_the_same_document(stage: Scene) -> None:
    done = stage.node.run([GPUPRESTART, "status", "--json"])
    found = json.loads(done.stdout)
    assert (found["verb"], len(found["gpus"]), found["holders_count"]) == ("status", 8, len(found["holders"]))
    assert [each["clean"] for each in found["gpus"]] == [False, False, True, False, True, False, True, True]
    checked = json.loads(stage.node.run([GPUPRESTART, "check", "--json"], check=False).stdout)
    assert checked["commands"][0]["command"] == "systemctl stop ollama.service"
    assert [each["pid"] for each in checked["holders"]] == [each["pid"] for each in found["holders"]]


def test_csv_can_be_read_by_what_reads_nvidia_smi(stage: Scene) -> None:
    said = stage.node.run([GPUPRESTART, "status", "--csv"]).stdout
    head, *rows = csv.reader(io.StringIO(said), skipinitialspace=True)
    assert head == ["index", "memory.used [MiB]"]
    assert rows[:4] == [["0", "61443 MiB"], ["1", "61443 MiB"], ["2", "303 MiB"], ["3", "20483 MiB"]] and len(rows) == 8
    stage.gpu.ask("set_gpu", gpu=7, lost="calls")
    done = stage.node.run([GPUPRESTART, "status", "--csv"], check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (69, "7, [N/A]")


def test_without_root_it_works_and_says_what_it_could_not_see(stage: Scene) -> None:
    done = stage.node.run([GPUPRESTART, "status"], user="model")
    assert "61443 MiB" in done.stdout
    why = "what clean would do may be otherwise, for only root may see who holds a GPU; run it as root"
    assert done.stderr == f"gpuprestart: this is not all, and {why}\n"


def test_without_rich_a_terminal_gets_columns(stage: Scene) -> None:
    folder = "/usr/lib/python3/dist-packages/rich"
    stage.node.run(["mv", folder, "/root/rich"])
    try:
        text = typed(stage, 80, "status")
    finally:
        stage.node.run(["mv", "/root/rich", folder])
    assert "\x1b[" not in text and "unit:ollama.service" in text and "GPU  UUID" in text


def test_pictures_fetch_nothing(stage: Scene) -> None:
    picture = drawn(typed(stage, 80, "status"), 80, "gpuprestart status")
    assert "http" not in picture.replace('xmlns="http://www.w3.org/2000/svg"', "")
