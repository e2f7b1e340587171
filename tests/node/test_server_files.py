"""What the policy asks of files: programs that the unit's user can run, models that are whole, and mounts that hang."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

from .hung import Hung
from .machine import wait_for
from .scene import Run, Scene

#: Where tests put files on the node.
PLACE = "/srv/t-files"

SHARD = "model-00002-of-00003.safetensors"

#: On a machine that has other things to do, everything may take so many times as long.
SLACK = 3


@pytest.fixture(autouse=True)
def place(scene: Scene) -> Iterator[Path]:
    """The same folder as seen from here; its own owner and mode let everybody in."""
    scene.node.run(["mkdir", "-p", PLACE])
    yield Path(f"/proc/{scene.node.leader}/root{PLACE}")
    scene.node.run(["rm", "-rf", PLACE])


def server(scene: Scene, require: str, *, deadline: str = "total = '15 s'", more: str = "") -> str:
    scene.policy(f"[deadline]\n{deadline}\n[require]\n{require}\n")
    return scene.server(gpus="0", more=more)


def started(scene: Scene, require: str, *, deadline: str = "total = '15 s'", more: str = "") -> tuple[bool, Run]:
    unit = server(scene, require, deadline=deadline, more=more)
    went = scene.start(unit)
    run = scene.verdict(unit)
    # While it runs, the GPU is its own.
    scene.node.systemctl("stop", unit)
    return went, run


def accepted(scene: Scene, require: str, *, deadline: str = "total = '15 s'", more: str = "") -> Run:
    went, run = started(scene, require, deadline=deadline, more=more)
    assert went and (run.exit, run.outcome, run.verdict["preconditions"]) == (0, "clean", [])
    return run


def refused(scene: Scene, require: str, *words: str, deadline: str = "total = '15 s'", more: str = "") -> Run:
    went, run = started(scene, require, deadline=deadline, more=more)
    assert not went
    return is_refused(scene, run, *words)


def is_refused(scene: Scene, run: Run, *words: str) -> Run:
    """About a file, so EX_NOINPUT; in the verdict, and in a record of its own."""
    assert (run.exit, run.outcome) == (66, "precondition")
    (record,) = scene.records(run, "precondition-failed")
    (unmet,) = run.verdict["preconditions"]
    for word in words:
        assert word in run.verdict["message"] and word in record["MESSAGE"]
    assert unmet["file"] and (unmet["check"], unmet["subject"]) == (
        record["GPUPRESTART_CHECK"],
        record["GPUPRESTART_SUBJECT"],
    )
    assert unmet["hint"] == run.verdict["hints"][0] == record["GPUPRESTART_HINT"]
    return run


# Programs ------------------------------------------------------------------------------------------------------------


def test_a_program_that_the_unit_s_user_can_run(scene: Scene) -> None:
    scene.node.write(f"{PLACE}/run.sh", "#!/usr/bin/env -S sh -e\n", mode=0o755)
    accepted(scene, f'executables = ["{PLACE}/run.sh", "/bin/sleep"]')


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (None, 0, "run.sh is not there"),
        ("#!/bin/sh\n", 0o644, "run.sh has mode 0644, by which model may not execute it"),
        ("#!/bin/sh\n", 0o700, "run.sh has mode 0700, by which model may not execute it"),
        ("#!/opt/venv/bin/python\n", 0o755, "run.sh is run by /opt/venv/bin/python, which is not there"),
        ("#!/usr/bin/env no-such\n", 0o755, "run.sh has env look for no-such"),
        ("", 0o755, "run.sh is empty"),
    ],
)
def test_a_program_that_it_cannot_run(scene: Scene, text: str | None, mode: int, words: str) -> None:
    if text is not None:
        scene.node.write(f"{PLACE}/run.sh", text, mode=mode)
    _, (orphan,) = scene.orphans("--open", "0", "--gpu", "0", "--mib", "900")
    run = refused(scene, f'executables = ["{PLACE}/run.sh"]', f"{PLACE}/{words}", "(require.executables)")
    # Nobody is ended for a start that is refused for that anyway.
    assert scene.alive(orphan) and not scene.signals(run)


def test_a_folder_that_its_user_may_not_search(scene: Scene) -> None:
    scene.node.write(f"{PLACE}/private/run.sh", "#!/bin/sh\n", mode=0o755)
    accepted(scene, f'executables = ["{PLACE}/private/run.sh"]')
    scene.node.run(["chmod", "700", f"{PLACE}/private"])
    refused(scene, f'executables = ["{PLACE}/private/run.sh"]', "model, who may not search", f"{PLACE}/private (")
    accepted(scene, f'executables = ["{PLACE}/private/run.sh"]', more="User=root\n")


def test_a_program_on_a_file_system_without_programs(scene: Scene) -> None:
    place = "/run/noexec"
    scene.node.run(["sh", "-c", f"mkdir -p {place} && mount -t tmpfs -o noexec none {place} && cp /bin/true {place}"])
    try:
        run = refused(scene, f'executables = ["{place}/true"]', "mounted with noexec")
        assert run.verdict["hints"][0].startswith(f"findmnt -T {place}/true")
    finally:
        scene.node.run(["umount", place])


def test_a_user_that_is_made_up_when_the_unit_starts(scene: Scene) -> None:
    scene.node.write(f"{PLACE}/run.sh", "#!/bin/sh\n", mode=0o750)
    for path, met in (("/bin/sleep", True), (f"{PLACE}/run.sh", False)):
        scene.policy(f"[require]\nexecutables = ['{path}']\n")
        unit = scene.server(gpus="0", more="User=\nDynamicUser=yes\n")
        run = scene.check("--unit", unit)
        assert (run.outcome, run.exit) == (("clean", 0) if met else ("precondition", 66)), run.verdict["message"]
        assert scene.start(unit) is met
        scene.node.systemctl("stop", unit)


@pytest.mark.parametrize("how", ["group", "supplementary", "member"])
def test_a_program_of_a_group_that_the_unit_is_in(scene: Scene, how: str) -> None:
    scene.node.write(f"{PLACE}/run.sh", "#!/bin/sh\n", mode=0o750)
    scene.node.run(["chgrp", "video", f"{PLACE}/run.sh"])
    require = f'executables = ["{PLACE}/run.sh"]'
    refused(scene, require, "has mode 0750")
    if how == "member":
        scene.node.run(["usermod", "--append", "--groups", "video", "model"])
    try:
        # The server is the program itself: systemd is of the same mind.
        scene.node.write(f"{PLACE}/run.sh", "#!/bin/sh\nexec sleep 1000\n", mode=0o750)
        scene.node.run(["chgrp", "video", f"{PLACE}/run.sh"])
        more = {"group": "Group=video\n", "supplementary": "SupplementaryGroups=video\n", "member": ""}[how]
        accepted(scene, require, more=f"{more}Type=exec\nExecStart=\nExecStart={PLACE}/run.sh\n")
    finally:
        if how == "member":
            scene.node.run(["gpasswd", "--delete", "model", "video"])


def test_a_user_that_nobody_knows(scene: Scene) -> None:
    """systemd does not even start the hook then; who checks the unit is told."""
    unit = server(scene, 'executables = ["/bin/sleep"]', more="User=no-such\n")
    run = scene.check("--unit", unit)
    assert (run.exit, run.outcome) == (66, "precondition")
    assert "User=no-such is not known on this machine" in run.verdict["message"]


def test_a_user_that_systemd_makes_up(scene: Scene) -> None:
    """It is there only while the unit runs, and on few machines by its name."""
    accepted(scene, 'executables = ["/bin/sleep"]', more="User=\nDynamicUser=yes\n")
    scene.node.write(f"{PLACE}/run.sh", "#!/bin/sh\n", mode=0o750)
    refused(scene, f'executables = ["{PLACE}/run.sh"]', "has mode 0750", more="User=\nDynamicUser=yes\n")


def test_env_looks_in_the_unit_s_own_path(scene: Scene) -> None:
    scene.node.write(f"{PLACE}/run.sh", "#!/usr/bin/env python9\n", mode=0o755)
    scene.node.run(["ln", "-s", "/bin/true", f"{PLACE}/python9"])
    require = f'executables = ["{PLACE}/run.sh"]'
    refused(scene, require, "has env look for python9")
    accepted(scene, require, more=f"Environment=PATH={PLACE}:/usr/bin\n")


# Models --------------------------------------------------------------------------------------------------------------


def model(place: Path, *, name: str = "model") -> Path:
    """As the library itself writes it, with a list of checksums."""
    folder = place / name
    folder.mkdir()
    where = []
    for number in range(1, 4):
        shard = f"model-{number:05}-of-00003.safetensors"
        save_file({f"layers.{number}.q": numpy.ones((64, 64), numpy.float32)}, folder / shard)
        where.append(f'"layers.{number}.q": "{shard}"')
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{", ".join(where)}}}}}')
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    listed(folder)
    return folder


def listed(folder: Path) -> None:
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(folder.iterdir())
        if path.name != "SHA256SUMS"
    ]
    (folder / "SHA256SUMS").write_text("".join(lines))


def test_a_model_that_is_whole(scene: Scene, place: Path) -> None:
    model(place)
    accepted(scene, f'models = ["{PLACE}/model"]')


def test_a_shard_that_is_cut(scene: Scene, place: Path) -> None:
    folder = model(place)
    length = (folder / SHARD).stat().st_size
    os.truncate(folder / SHARD, length - 1)
    require = f'models = ["{PLACE}/model"]'
    run = refused(
        scene, require, f"the model {PLACE}/model is not whole", f"{SHARD} has {length - 1} bytes, but by its"
    )
    assert f"header it has {length} (require.models)" in run.verdict["message"]
    check = scene.check("--gpus", "0")
    assert (check.exit, check.outcome) == (66, "precondition") and SHARD in check.verdict["message"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (SHARD, f"{SHARD} is not there"),
        ("config.json", "config.json is not there"),
        ("tokenizer.json", "has no tokenizer (tokenizer.json,"),
        (".", "model cannot be read: No such file or directory"),
    ],
)
def test_a_model_of_which_something_is_gone(scene: Scene, place: Path, name: str, words: str) -> None:
    folder = model(place)
    if name == ".":
        shutil.rmtree(folder)
    else:
        (folder / name).unlink()
    refused(scene, f'models = ["{PLACE}/model"]', words)


def test_a_download_that_is_not_finished(scene: Scene, place: Path) -> None:
    folder = model(place)
    left = folder / ".cache/huggingface/download/model-00001-of-00003.safetensors.0123.incomplete"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    run = refused(scene, f'models = ["{PLACE}/model"]', f"{left.name} is left of a download that is not finished")
    assert "finish the download" in run.verdict["hints"][0]


def test_a_snapshot_of_a_cache(scene: Scene, place: Path) -> None:
    folder = model(place)
    repository = place / "models--org--name"
    (repository / "snapshots").mkdir(parents=True)
    shutil.move(folder, repository / "blobs")
    (repository / "snapshots" / "0123").mkdir()
    for path in (repository / "blobs").iterdir():
        (repository / "snapshots" / "0123" / path.name).symlink_to(f"../../blobs/{path.name}")
    snapshot = f"{PLACE}/models--org--name/snapshots/0123"
    accepted(scene, f'models = ["{snapshot}"]\nchecksums = "SHA256SUMS"')
    (repository / "blobs" / "4567.incomplete").write_bytes(b"half")
    refused(scene, f'models = ["{snapshot}"]', "blobs/4567.incomplete is left of a download")


def test_every_file_that_is_at_fault_is_told(scene: Scene, place: Path) -> None:
    for name in ("a", "b"):
        (model(place, name=name) / "config.json").write_text("{")
    went, run = started(scene, f'models = ["{PLACE}/a", "{PLACE}/b"]\nexecutables = ["{PLACE}/run.sh"]')
    assert not went and run.exit == 66
    assert [each["check"] for each in run.verdict["preconditions"]] == ["executables", "models", "models"]
    assert len(scene.records(run, "precondition-failed")) == 3


def test_what_is_not_about_a_file_besides(scene: Scene, place: Path) -> None:
    """Then trying again may help."""
    (model(place) / "config.json").unlink()
    went, run = started(scene, f'models = ["{PLACE}/model"]\ngpu_count = 99')
    assert not went and (run.exit, run.outcome) == (75, "precondition")


# Mounts that hang ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["executables", "models", "checksums"])
def test_a_file_system_that_does_not_answer(scene: Scene, place: Path, what: str) -> None:
    """The run ends in time, and so does the unit, for what hangs is set aside."""
    folder = model(place)
    (folder / SHARD).unlink()
    (folder / SHARD).symlink_to(Hung.file)
    require = {
        "executables": f'executables = ["{Hung.file}"]',
        "models": f'models = ["{PLACE}/model"]',
        "checksums": f'models = ["{PLACE}/model"]\nchecksums = "SHA256SUMS"',
    }[what]
    unit = server(scene, require, deadline="total = '1500 ms'\nchecksums = '1500 ms'")
    with Hung(scene.node.leader) as hung:
        if what == "executables":
            hung.hang()
        began = time.monotonic()
        assert not scene.start(unit)
        scene.await_state(unit, "failed")
        assert time.monotonic() - began < SLACK * 5
        run = scene.verdict(unit)
        assert (run.exit, run.outcome) == (66, "precondition")
        (told,) = [each for each in run.verdict["preconditions"] if each["check"] == what]
        assert "gave no answer for" in told["message"] and "file system does not answer" in told["hint"]
        # That is sooner than an answer is waited for where there is time.
        assert run.verdict["duration_s"] < 3 + SLACK * 1.5
        scopes = scene.node.systemctl("list-units", "--type=scope", "--plain", "--no-legend", "gpuprestart-stuck-*")
        assert scopes.stdout.startswith("gpuprestart-stuck-")
    wait_for(
        lambda: not scene.node.systemctl("list-units", "--all", "--plain", "--no-legend", "gpuprestart-*").stdout,
        timeout=10,
        what="nothing is left of it once it does not hang",
    )


# Checksums -----------------------------------------------------------------------------------------------------------


def test_files_that_are_what_the_list_says(scene: Scene, place: Path) -> None:
    model(place)
    run = accepted(scene, f'models = ["{PLACE}/model"]\nchecksums = "SHA256SUMS"')
    assert run.verdict["phases"]["preconditions"] > 0


def test_one_byte_that_is_another(scene: Scene, place: Path) -> None:
    """The file is as long as it should be: only reading it tells."""
    folder = model(place)
    with open(folder / SHARD, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    accepted(scene, f'models = ["{PLACE}/model"]')
    require = f'models = ["{PLACE}/model"]\nchecksums = "SHA256SUMS"'
    refused(scene, require, f"{SHARD} is not what SHA256SUMS says (require.checksums)")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "SHA256SUMS is not there"),
        ("", "SHA256SUMS is empty"),
        ("junk\n", "SHA256SUMS:1 is no line of sha256sum's"),
        (f"{64 * '0'}  ../../etc/shadow\n", "SHA256SUMS names ../../etc/shadow, which is not in its folder"),
    ],
)
def test_a_list_that_is_none(scene: Scene, place: Path, text: str | None, words: str) -> None:
    folder = model(place)
    if text is None:
        (folder / "SHA256SUMS").unlink()
    else:
        (folder / "SHA256SUMS").write_text(text)
    refused(scene, f'models = ["{PLACE}/model"]\nchecksums = "SHA256SUMS"', words)


def test_a_shard_that_the_list_leaves_out(scene: Scene, place: Path) -> None:
    folder = model(place)
    lines = (folder / "SHA256SUMS").read_text().splitlines(keepends=True)
    (folder / "SHA256SUMS").write_text("".join(line for line in lines if SHARD not in line))
    require = f'models = ["{PLACE}/model"]\nchecksums = "SHA256SUMS"'
    refused(scene, require, f"{SHARD} is not listed in SHA256SUMS")


def large(place: Path, *, seconds: float) -> None:
    """A model with a file of holes that takes this long to read in full, here and now; and its list."""
    folder = model(place)
    piece, block = hashlib.sha256(), bytes(1 << 20)
    began, count = time.monotonic(), 0
    while time.monotonic() < began + 0.5:
        piece.update(block)
        count += 1
    blocks = int(2 * count * seconds)
    (folder / "extra.gguf").touch()
    os.truncate(folder / "extra.gguf", blocks << 20)
    if seconds < 60:
        digest = hashlib.sha256()
        for _ in range(blocks):
            digest.update(block)
        with open(folder / "SHA256SUMS", "a") as file:
            file.write(f"{digest.hexdigest()}  extra.gguf\n")
    else:
        with open(folder / "SHA256SUMS", "a") as file:
            file.write(f"{64 * '0'}  extra.gguf\n")


@pytest.mark.parametrize("access", ["exec", "none"])
def test_it_takes_longer_than_the_unit_s_timeout(scene: Scene, place: Path, access: str) -> None:
    """It is no part of deadline.total, and systemd is asked for the time; where it does not listen, what could be read
    until then is all."""
    large(place, seconds=4)
    # What is stale is still given its time after that.
    scene.orphans("--open", "0", "--gpu", "0", "--mib", "900", "--alloc", "release_delay=0.5")
    unit = server(
        scene,
        f'models = ["{PLACE}/model"]\nchecksums = "SHA256SUMS"',
        deadline="total = '3 s'\nchecksums = '2 min'",
        more=f"TimeoutStartSec=2\nNotifyAccess={access}\n",
    )
    began = time.monotonic()
    went = scene.start(unit)
    run = scene.verdict(unit)
    said = [str(each["MESSAGE"]) for each in scene.node.journal(unit=unit)]
    assert not any("timed out" in line or "Terminating" in line for line in said), said
    if access == "exec":
        assert went and (run.exit, run.outcome) == (0, "cleaned")
        assert time.monotonic() - began > 2 and run.verdict["duration_s"] > 2
        return
    assert not went and run.verdict["duration_s"] < 2
    is_refused(scene, run, "could be verified in time", "of 7 files", "deadline.checksums")
    assert any("TimeoutStartSec=" in hint for hint in run.verdict["hints"])


def test_it_has_a_deadline_of_its_own(scene: Scene, place: Path) -> None:
    large(place, seconds=600)
    run = refused(
        scene,
        f'models = ["{PLACE}/model"]\nchecksums = "SHA256SUMS"',
        "could be verified in time",
        "of 7 files",
        deadline="checksums = '1200 ms'",
    )
    assert "raise deadline.checksums" in run.verdict["hints"][0]
    assert 1.2 <= run.verdict["duration_s"] < SLACK * 3


def test_how_far_it_is_can_be_seen_and_it_can_be_stopped(scene: Scene, place: Path) -> None:
    large(place, seconds=600)
    require = f'models = ["{PLACE}/model"]\nchecksums = "SHA256SUMS"'
    unit = server(scene, require, more="Type=notify\nNotifyAccess=all\n")
    scene.node.systemctl("start", "--no-block", unit)

    def status() -> str:
        text = scene.node.show(unit, "StatusText")["StatusText"]
        return text if text.startswith("Verifying checksums: ") else ""

    first = wait_for(status, timeout=20, what="it is told")
    assert " of 7 files, " in first and first.endswith(" GiB")
    wait_for(lambda: status() not in ("", first), timeout=20, what="it goes on")
    began = time.monotonic()
    scene.node.systemctl("stop", unit)
    assert time.monotonic() - began < SLACK * 1
    run = scene.verdict(unit)
    assert (run.exit, run.outcome) == (75, "interrupted")
    assert scene.node.show(unit, "ExecMainStartTimestampMonotonic")["ExecMainStartTimestampMonotonic"] == "0"
