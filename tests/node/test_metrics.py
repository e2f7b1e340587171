"""Metrics of real runs in a file that they share, and what a file that cannot be written does to a start: nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpuprestart import metrics

from .hung import Hung
from .machine import wait_for
from .scene import Run, Scene

#: Where node_exporter would read, on the node.
PLACE = "/var/lib/t-metrics"
FILE = f"{PLACE}/gpuprestart.prom"

LIBRARY = "/usr/lib/python3/dist-packages/prometheus_client"

#: On a machine that has other things to do, everything may take so many times as long.
SLACK = 3


@pytest.fixture(autouse=True)
def place(scene: Scene) -> Iterator[Path]:
    """The same folder as seen from here."""
    scene.node.run(["mkdir", "-p", PLACE])
    yield Path(f"/proc/{scene.node.leader}/root{PLACE}")
    scene.node.run(["rm", "-rf", PLACE])


def policy(scene: Scene, path: str = FILE) -> None:
    scene.policy(f'[deadline]\nterm = "1 s"\n[metrics]\ntextfile = "{path}"\n')


def told(place: Path) -> dict[tuple[str, str, str], float]:
    """Every series by (name without its prefix, unit, further label)."""
    found = {}
    for family in text_string_to_metric_families((place / "gpuprestart.prom").read_text()):
        for sample in family.samples:
            labels = dict(sample.labels)
            key = (sample.name[len("gpuprestart_") :], labels.pop("unit"), "".join(labels.values()))
            assert key not in found
            found[key] = sample.value
    return found


def warnings(scene: Scene, run: Run) -> Sequence[str]:
    return [record["MESSAGE"] for record in scene.records(run, "warning")]


def warned(scene: Scene, run: Run) -> str:
    """The one warning, which comes after the verdict."""
    wait_for(lambda: warnings(scene, run), timeout=10, what="there is a warning")
    (warning,) = warnings(scene, run)
    return warning


def test_a_start_that_cleaned_is_told(scene: Scene, place: Path) -> None:
    policy(scene)
    scene.orphans("--open", "0", "--gpu", "0", "--mib", "700")
    unit = scene.server(gpus="0,1")
    assert scene.start(unit)
    assert scene.verdict(unit).outcome == "cleaned"
    found = told(place)
    assert found["last_outcome", unit, "cleaned"] == found["runs_total", unit, "cleaned"] == 1
    assert (found["last_gpus", unit, ""], found["last_clean_gpus", unit, ""]) == (2, 2)
    assert found["last_ended_holders", unit, ""] == found["ended_holders_total", unit, ""] == 1
    assert 700 << 20 <= found["last_freed_bytes", unit, ""] < 900 << 20
    assert 0 < found["last_phase_duration_seconds", unit, "evict"] <= found["last_duration_seconds", unit, ""]
    assert time.time() - 300 < found["last_success_timestamp_seconds", unit, ""] <= time.time()
    scene.node.systemctl("stop", unit)
    # From a shell there is no unit, and what is told of others stays.
    assert scene.clean().outcome == "clean"
    assert told(place) == {**found, **{key: value for key, value in told(place).items() if key[1] == ""}}
    assert told(place)["runs_total", "", "clean"] == 1
    mode = os.stat(place / "gpuprestart.prom").st_mode
    assert mode & 0o777 == 0o644
    scene.node.run(["cat", FILE], user="model")


def test_a_refusal_is_told_and_a_check_is_not(scene: Scene, place: Path) -> None:
    policy(scene)
    scene.service("--gpu", "0", "--mib", "700")
    assert scene.check().outcome == "protected" and not os.listdir(place)
    unit = scene.server(gpus="0", more="UMask=0777\n")
    assert not scene.start(unit)
    found = told(place)
    assert found["last_exit_status", unit, ""] == 75 and found["last_outcome", unit, "protected"] == 1
    assert found["last_success_timestamp_seconds", unit, ""] == 0
    scene.node.run(["cat", FILE], user="model")


def test_twenty_at_once_lose_nothing(scene: Scene, place: Path) -> None:
    policy(scene)
    units = [scene.server(gpus="") for _ in range(20)]
    for _ in range(2):
        with ThreadPoolExecutor(len(units)) as pool:
            runs = list(pool.map(lambda unit: scene.clean("--unit", unit), units))
        assert {run.exit for run in runs} == {0}
        assert [warnings(scene, run) for run in runs] == [[] for _ in runs]
    found = told(place)
    assert {unit: found["runs_total", unit, "none"] for unit in units} == dict.fromkeys(units, 2)
    assert os.listdir(place) == ["gpuprestart.prom"]


def test_a_mount_that_hangs_keeps_no_server_waiting(scene: Scene) -> None:
    """The child that hangs is left behind, and keeps neither the GPUs nor the unit."""
    policy(scene, "/run/hung/gpuprestart.prom")
    unit = scene.server(gpus="0")
    with Hung(scene.node.leader) as hung:
        hung.hang()
        began = time.monotonic()
        assert scene.start(unit)
        assert metrics.PATIENCE < time.monotonic() - began < SLACK * metrics.PATIENCE
        run = scene.verdict(unit)
        assert (run.outcome, run.exit) == ("clean", 0)
        assert "/run/hung/gpuprestart.prom" in warned(scene, run) and "no answer" in warned(scene, run)
        scene.node.systemctl("stop", unit)
        # Another file is not kept by the first one's.
        policy(scene)
        assert scene.clean("--gpus", "0").exit == 0
        assert scene.node.exists(FILE)


@pytest.mark.parametrize(
    "path, prepare, words",
    [
        (f"{PLACE}/absent/a.prom", "true", f"{PLACE}/absent is not there"),
        (FILE, f"chmod 0777 {PLACE}", f"chmod o-w {PLACE}"),
        (FILE, f"mkdir {FILE}", "it is a folder"),
        (FILE, f"echo node_load1 5 > {FILE}", "node_load1"),
        (FILE, f"mount -t tmpfs -o ro t {PLACE}", "Read-only file system"),
        (FILE, f"mount -t tmpfs -o size=4k t {PLACE}; cat /dev/zero > {PLACE}/x || true", "No space left on device"),
    ],
)
def test_what_cannot_be_written_is_a_warning(scene: Scene, path: str, prepare: str, words: str) -> None:
    policy(scene, path)
    unit = scene.server(gpus="0")
    scene.node.run(["sh", "-c", prepare])
    before = scene.node.run(["sh", "-c", f"ls -lR {PLACE}; cat {FILE}"], check=False).stdout
    try:
        assert scene.start(unit)
        run = scene.verdict(unit)
        assert (run.outcome, run.exit) == ("clean", 0)
        warning = warned(scene, run)
        assert warning.startswith(f"{path} was not written: ") and words in warning
        assert scene.node.run(["sh", "-c", f"ls -lR {PLACE}; cat {FILE}"], check=False).stdout == before
    finally:
        scene.node.run(["umount", PLACE], check=False)


def test_links_in_the_folder_of_another_user_lead_nowhere(scene: Scene, place: Path) -> None:
    policy(scene)
    scene.node.run(["sh", "-c", f"chown model {PLACE}; echo precious > /run/t-victim; ln -s /run/t-victim {FILE}"])
    unit = scene.server(gpus="0")
    assert scene.start(unit)
    run = scene.verdict(unit)
    assert run.exit == 0 and warnings(scene, run) == []
    assert scene.node.read("/run/t-victim") == "precious\n" and not (place / "gpuprestart.prom").is_symlink()
    assert told(place)["last_outcome", unit, "clean"] == 1
    scene.node.run(["rm", "/run/t-victim"])


def test_without_the_library_a_start_goes_on(scene: Scene) -> None:
    policy(scene)
    unit = scene.server(gpus="0")
    scene.node.run(["mv", LIBRARY, f"{LIBRARY}.away"])
    try:
        assert scene.start(unit)
        run = scene.verdict(unit)
        assert run.exit == 0 and "python3-prometheus-client" in warned(scene, run)
    finally:
        scene.node.run(["mv", f"{LIBRARY}.away", LIBRARY])
