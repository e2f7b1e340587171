"""Earlier runs as the journal has them: found, told, drawn and proved, on a booted node with a real journald."""

from __future__ import annotations

import json
import subprocess
from typing import Any
from xml.etree import ElementTree

import pytest

from gpuprestart.events import MESSAGE_IDS
from gpuprestart.model import MIB
from tests.node.machine import Node
from tests.node.scene import TERM, Scene

#: Writes one record with these fields, as whoever runs it.
SEND = (
    "import json, sys; from systemd.journal import sendv; sendv(*(f'{k}={v}' for k, v in json.load(sys.stdin).items()))"
)


def asked(scene: Scene, *words: str, user: str | None = None) -> subprocess.CompletedProcess[str]:
    scene.node.run(["journalctl", "--sync"])
    return scene.node.run(["/usr/bin/gpuprestart", *words], check=False, user=user)


def listed(scene: Scene, *words: str) -> list[dict[str, Any]]:
    done = asked(scene, "history", "--json", *words)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def proof(scene: Scene, *words: str) -> tuple[int, dict[str, Any], str]:
    done = asked(scene, "proof", *words)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def forged(unit: str, **changes: Any) -> dict[str, str]:
    """The fields of a verdict that never was."""
    gpu = {"index": 0, "uuid": "GPU-0", "used_bytes": 0, "limit_bytes": 1, "clean": True}
    document = {"version": 1, "verb": "clean", "outcome": "clean", "exit": 0, "unit": unit, "gpus": [gpu], **changes}
    return {
        "MESSAGE": "clean: all is well",
        "MESSAGE_ID": MESSAGE_IDS["verdict"],
        "SYSLOG_IDENTIFIER": "gpuprestart",
        "GPUPRESTART_EVENT": "verdict",
        "GPUPRESTART_OUTCOME": "clean",
        "GPUPRESTART_EXIT": "0",
        "GPUPRESTART_UNIT": unit,
        "GPUPRESTART_RUN": "f" * 32,
        "GPUPRESTART_VERDICT": json.dumps(document),
        "_UID": "0",
        "_SYSTEMD_UNIT": unit,
    }


def cleaned(scene: Scene, *, user: str = "") -> str:
    """A unit whose hook had to use SIGKILL, and then waited for the memory of two GPUs."""
    scene.gpu.ask("set", release_delay=0.5)
    scene.policy(f"[deadline]\n{TERM}")
    scene.orphans("--open", "0,1", "--gpu", "0,1", "--mib", "20000", "--ignore-term")
    unit = scene.server(gpus="0,1,2,3")
    assert scene.start(unit)
    return unit


def refused(scene: Scene) -> str:
    scene.service("--open", "7", "--gpu", "7", "--mib", "9000")
    unit = scene.server(gpus="7")
    assert not scene.start(unit)
    return unit


def test_the_runs_of_two_units_are_listed_with_what_they_did(scene: Scene) -> None:
    first, second = cleaned(scene), refused(scene)
    assert scene.check("--unit", second, "--journal").exit == 75
    for unit, outcome in ((first, "cleaned"), (second, "protected")):
        run = listed(scene, unit.removesuffix(".service"))[0]
        assert (run["unit"], run["outcome"], run["recorded_by"]) == (unit, outcome, 0)
        assert run["run"] == scene.verdict(unit).verdict["run"]
    assert [each["verb"] for each in listed(scene, second)] == ["clean", "check"]
    assert [each["unit"] for each in listed(scene, "-n", "3")] == [first, second, second]
    assert [each["verb"] for each in listed(scene, second, "-n", "1")] == ["check"]
    head, *rows = asked(scene, "history", "-n", "3").stdout.splitlines()
    assert head.split() == ["TIME", "UNIT", "OUTCOME", "TOOK", "PHASES", "ENDED", "FREED", "RUN"]
    assert "1: python3" in rows[0] and "40000 MiB" in rows[0] and "evict" in rows[0] and "drain" in rows[0]
    assert "protected" in rows[1] and "protected (check)" in rows[2]


def test_a_document_is_read_as_the_hook_printed_it(scene: Scene) -> None:
    unit = cleaned(scene)
    printed = dict(scene.verdict(unit).verdict)
    (found,) = listed(scene, unit)
    assert found == {**printed, "recorded_by": 0}


def test_the_course_of_a_run_is_what_the_driver_s_books_say(scene: Scene) -> None:
    """Used memory stays until half a second after the holder is gone, which is a second after SIGTERM."""
    unit = cleaned(scene)
    (run,) = listed(scene, unit)
    timeline, used = run["timeline"], run["timeline"]["used_bytes"]
    (sigterm, sigkill) = timeline["signals"]
    assert (sigterm[2], sigkill[2]) == ("SIGTERM", "SIGKILL") and sigkill[0] - sigterm[0] >= 1
    assert used[0][1] == [20_003 * MIB, 20_003 * MIB, 3 * MIB, 3 * MIB] and used[-1][1] == [3 * MIB] * 4
    back = next(at for at, figures in used if figures[0] == 3 * MIB)
    assert back >= sigkill[0] + 0.5 and len(used) <= 8
    assert {name for name, _, _ in timeline["phases"]} == {"measure", "survey", "evict", "drain"}
    assert all(0 <= began <= ended <= run["duration_s"] + 0.01 for _, began, ended in timeline["phases"])


def test_since_when(scene: Scene) -> None:
    unit = scene.server(gpus="0")
    assert scene.start(unit)
    assert len(listed(scene, unit, "--since", "1h")) == 1
    assert len(listed(scene, unit, "--since", "30 min ago")) == 1
    scene.node.run(["systemctl", "stop", unit])
    began = listed(scene, unit)[0]["time"]
    later = scene.node.run(["date", "-d", f"@{int(began) + 2}", "+%Y-%m-%d %H:%M:%S"]).stdout.strip()
    scene.node.wait_for(
        lambda: float(scene.node.run(["date", "+%s"]).stdout) > began + 3, timeout=20, what="three seconds have passed"
    )
    assert listed(scene, unit, "--since", later) == []
    assert scene.start(unit)
    assert len(listed(scene, unit, "--since", later)) == 1 and len(listed(scene, unit)) == 2
    done = asked(scene, "history", unit, "--since", "soon")
    assert (done.returncode, done.stdout) == (64, "") and "yesterday" in done.stderr


def test_no_runs_is_no_failure(scene: Scene) -> None:
    done = asked(scene, "history", "t-nobody-has-this")
    assert (done.returncode, done.stdout) == (0, "")
    assert "no run of t-nobody-has-this.service" in done.stderr
    assert listed(scene, "t-nobody-has-this") == []
    assert proof(scene, "t-nobody-has-this")[0] == 69


# One run -------------------------------------------------------------------------------------------------------------


def test_one_run_is_told_as_a_story(scene: Scene) -> None:
    unit = cleaned(scene)
    run = scene.verdict(unit).verdict["run"]
    story = asked(scene, "history", "show", run[:10]).stdout
    assert story.splitlines()[0] == f"{unit}: cleaned"
    told = [
        "Judging 4 GPUs",
        "is to be ended",
        "sent SIGTERM",
        "sent SIGKILL",
        "was ended by SIGKILL",
        "memory is back",
        "GPU 3 is clean",
        "cleaned: 1 stale holder ended",
        "memory in use",
        "  GPU 0  ",
    ]
    places = [story.index(each) for each in told]
    assert places == sorted(places)
    assert run in story and "/etc/gpuprestart/policy.toml" in story and "550.54.15" in story
    assert story.count("cleaned: 1 stale holder ended") == 1
    assert "20003 MiB at most, 3 MiB at the end, limit 64 MiB, clean" in story
    (same,) = json.loads(asked(scene, "history", "show", run.upper(), "--json").stdout)
    assert same == listed(scene, unit)[0]


def test_which_run_has_to_be_clear(scene: Scene) -> None:
    units = [scene.server(gpus="0") for _ in range(17)]
    runs = []
    for unit in units:
        assert scene.start(unit)
        runs.append(scene.verdict(unit).verdict["run"])
        scene.node.systemctl("stop", unit)
    # Of seventeen two begin alike.
    alike = next(run[0] for run in runs if sum(other[0] == run[0] for other in runs) > 1)
    done = asked(scene, "history", "show", alike)
    assert (done.returncode, done.stdout) == (69, "") and "more than one run" in done.stderr
    done = asked(scene, "history", "show", "0" * 31)
    assert done.returncode == 69 and "no verdict of a run" in done.stderr
    assert asked(scene, "history", "show", "xyz").returncode == 64


def test_a_picture_of_a_run(scene: Scene) -> None:
    unit = cleaned(scene)
    run = scene.verdict(unit).verdict["run"]
    assert asked(scene, "history", unit, "--svg", "/root/last.svg").returncode == 0
    assert asked(scene, "history", "show", run, "--svg", "/root/shown.svg").returncode == 0
    drawn = scene.node.read("/root/last.svg")
    assert drawn == scene.node.read("/root/shown.svg")
    assert drawn == asked(scene, "history", unit, "--svg", "-").stdout
    said = " ".join(element.text or "" for element in ElementTree.fromstring(drawn).iter())
    assert all(word in said for word in (unit, run, "SIGTERM python3", "SIGKILL python3", "GPU-a0576ece-5bc2"))
    # Nobody makes root write somewhere else by a link in a folder that is everybody's.
    scene.node.run(["ln", "-s", "/root/last.svg", "/tmp/link.svg"], user="alice")
    done = asked(scene, "history", unit, "--svg", "/tmp/link.svg")
    assert done.returncode == 69 and "symbolic link" in done.stderr
    assert scene.node.read("/root/last.svg") == drawn
    done = asked(scene, "history", unit, "--svg", "/dev/null")
    assert done.returncode == 69 and "no plain file" in done.stderr
    done = asked(scene, "history", "t-nobody-has-this", "--svg", "/root/none.svg")
    assert done.returncode == 69 and not scene.node.exists("/root/none.svg")


# Proof ---------------------------------------------------------------------------------------------------------------


def test_a_start_on_clean_gpus_is_proved(scene: Scene) -> None:
    unit = cleaned(scene)
    verdict = scene.verdict(unit).verdict
    status, found, said = proof(scene, unit)
    assert (status, said) == (0, "") and found["proved"] is True and found["this_boot"] is True
    assert found["run"] == scene.node.show(unit, "InvocationID")["InvocationID"]
    assert found["boot_id"] == scene.node.read("/proc/sys/kernel/random/boot_id").strip().replace("-", "")
    assert found["ended"] == pytest.approx(verdict["time"] + verdict["duration_s"])
    assert [(each["index"], each["uuid"]) for each in found["gpus"]] == [
        (each["index"], each["uuid"]) for each in verdict["gpus"]
    ]
    assert all(each["clean"] and each["used_bytes"] <= each["limit_bytes"] for each in found["gpus"])
    assert found["journal"]["machine_id"] == scene.node.read("/etc/machine-id").strip()
    cursor = found["journal"]["cursor"]
    (entry,) = scene.node.journal(f"--cursor={cursor}", "--lines=1")
    assert entry["GPUPRESTART_RUN"] == found["run"]
    # A look at the same GPUs afterwards is no start, whatever it finds.
    scene.service("--open", "0", "--gpu", "0", "--mib", "9000")
    assert scene.check("--unit", unit, "--journal").exit == 75
    assert proof(scene, unit)[0] == 0
    assert proof(scene)[1]["run"] == found["run"]


def test_what_was_not_proved_is_not(scene: Scene) -> None:
    unit = refused(scene)
    status, found, said = proof(scene, unit)
    assert (status, found["proved"], found["outcome"]) == (75, False, "protected") and "no proof" in said
    scene.node.run(["/usr/bin/gpuprestart", "bypass", unit])
    assert scene.start(unit)
    status, found, said = proof(scene, unit)
    assert (status, found["proved"], found["outcome"]) == (75, False, "bypassed") and "bypassed" in said


def test_a_unit_that_uses_no_gpu_proves_nothing(scene: Scene) -> None:
    unit = scene.server(gpus="")
    assert scene.start(unit)
    assert proof(scene, unit)[0] == 75


# Who is believed -----------------------------------------------------------------------------------------------------


def test_nobody_forges_a_run(scene: Scene) -> None:
    """alice says it by the library, by logger, and from a unit of her own that has another's name in its records."""
    unit = refused(scene)
    fields = forged(unit)
    scene.node.run(["python3", "-c", SEND], input=json.dumps(fields), user="alice")
    lines = "".join(f"{name}={value}\n" for name, value in fields.items())
    scene.node.run(["logger", "--journald"], input=lines, user="alice")
    scene.node.run(["systemd-cat", "-t", "gpuprestart"], input=lines, user="alice")
    path = f"/tmp/{unit}.json"
    scene.node.write(path, json.dumps(fields))
    other = scene.name("other")
    scene.node.start(["/bin/sh", "-c", f'python3 -c "{SEND}" < {path}'], unit=other, user="alice", wait=True)
    assert len(scene.node.journal(GPUPRESTART_RUN="f" * 32, GPUPRESTART_UNIT=unit)) == 3
    assert [each["outcome"] for each in listed(scene, unit)] == ["protected"]
    assert "all is well" not in asked(scene, "history").stdout
    assert asked(scene, "history", "show", "f" * 32).returncode == 69
    assert proof(scene, unit)[0] == 75 and proof(scene)[1]["unit"] == unit


def test_a_server_can_say_of_itself_what_it_likes_and_proves_nothing_by_it(scene: Scene) -> None:
    """Its records are listed and marked. Those of its start that root wrote stand."""
    unit = scene.name("liar")
    path = f"/tmp/{unit}.json"
    # It stays, because journald asks the kernel whose a record is when it comes to read it.
    stays = f"{SEND}; import signal; open('/tmp/{unit}.said', 'w').close(); signal.pause()"
    server = f'/bin/sh -c "exec python3 -c \\"{stays}\\" < {path}"'
    scene.server(unit, gpus="0", server=server.replace("%", "%%"), more="PrivateTmp=no")
    scene.node.write(path, json.dumps(forged(unit, hints=7, time="soon", timeline=[[[]]], driver="\x1b[31m")))
    scene.gpu.ask("leak", gpu=0, mib=900)
    scene.policy("[deadline]\ntotal = '500 ms'\n")
    scene.node.run(["/usr/bin/gpuprestart", "bypass", unit])
    assert scene.start(unit)
    scene.node.wait_for(lambda: scene.node.exists(f"/tmp/{unit}.said"), timeout=20, what="the server has spoken")
    honest, lie = listed(scene, unit)
    assert (honest["outcome"], honest["recorded_by"]) == ("bypassed", 0)
    uid = int(scene.node.run(["id", "-u", "model"]).stdout)
    assert (lie["outcome"], lie["recorded_by"], lie["driver"], lie["hints"]) == ("clean", uid, "\\x1b[31m", [])
    assert f"clean (said by uid {uid})" in asked(scene, "history", unit).stdout
    assert listed(scene, "-n", "2") == [honest, lie]
    story = asked(scene, "history", "show", "f" * 32)
    assert story.returncode == 0 and f"uid {uid}, which is not root" in story.stdout and "\x1b" not in story.stdout
    status, found, said = proof(scene, unit)
    assert (status, found["proved"], found["recorded_by"]) == (75, False, uid) and f"uid {uid}" in said


def test_a_hook_that_is_not_root_s_proves_nothing(scene: Scene) -> None:
    unit = scene.server(gpus="0", plus=False)

    def heard() -> list[dict[str, Any]]:
        scene.start(unit)
        scene.node.systemctl("stop", unit)
        return listed(scene, unit)

    # Where a busy journald came to look when the hook had gone, it never tells whose the record was; so once more.
    run = scene.node.wait_for(heard, timeout=20, what="the journal knows whose the verdict is")[-1]
    uid = int(scene.node.run(["id", "-u", "model"]).stdout)
    assert run["recorded_by"] == uid
    status, found, said = proof(scene, unit)
    assert (status, found["proved"]) == (75, False) and f"uid {uid}" in said


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("{", id="torn"),
        pytest.param("[" * 100_000, id="deep"),
        pytest.param(f'{{"time": {"9" * 4000}}}', id="huge"),
        pytest.param("{}", id="empty"),
        pytest.param('{"outcome": NaN, "unit": 7}', id="wrong"),
    ],
)
def test_a_record_without_a_document_says_what_its_fields_do(scene: Scene, text: str) -> None:
    """As those of the versions before it; and what root's journal has is no traceback either."""
    unit = scene.name("old-version")
    fields = {**forged(unit), "GPUPRESTART_VERDICT": text, "GPUPRESTART_RUN": "e" * 24 + unit[-14:-8].zfill(8)}
    scene.node.run(["python3", "-c", SEND], input=json.dumps(fields))
    (run,) = listed(scene, unit)
    assert (run["unit"], run["outcome"], run["exit"], run["message"]) == (unit, "clean", 0, "all is well")
    assert run["gpus"] == [] and run["duration_s"] is None and run["time"] > 0
    (row,) = asked(scene, "history", unit).stdout.splitlines()[1:]
    assert row.split()[2:8] == [unit, "clean", "-", "-", "-", "-"]
    story = asked(scene, "history", "show", fields["GPUPRESTART_RUN"])
    assert story.returncode == 0 and "all is well" in story.stdout
    status, found, said = proof(scene, unit)
    assert (status, found["proved"]) == (75, False) and "earlier gpuprestart" in said


# Who may read it, and where it lies ----------------------------------------------------------------------------------


def test_who_may_not_read_the_journal_is_told_so(scene: Scene) -> None:
    unit = refused(scene)
    done = asked(scene, "history", unit, user="alice")
    assert (done.returncode, done.stdout) == (0, "")
    assert "systemd-journal" in done.stderr and "no run" in done.stderr
    done = asked(scene, "proof", unit, user="alice")
    assert (done.returncode, done.stdout) == (69, "") and "systemd-journal" in done.stderr
    scene.node.run(["usermod", "-aG", "systemd-journal", "alice"])
    try:
        done = asked(scene, "history", unit, user="alice")
        assert (done.returncode, done.stderr) == (0, "") and "protected" in done.stdout
    finally:
        scene.node.run(["gpasswd", "-d", "alice", "systemd-journal"])


def test_a_journal_whose_folder_may_be_read_and_not_its_file(boots: None) -> None:
    """As it is where the journal is kept from boot to boot."""
    with Node(gpus=8) as node:
        node.write("/etc/systemd/journald.conf.d/zz.conf", "[Journal]\nStorage=persistent\n")
        node.run(["systemctl", "restart", "systemd-journald"])
        node.run(["systemd-tmpfiles", "--create", "--prefix", "/var/log/journal"])
        node.run(["journalctl", "--flush"])
        node.run(["/usr/bin/gpuprestart", "clean"])
        node.run(["journalctl", "--sync"])
        machine = node.read("/etc/machine-id").strip()
        assert node.exists(f"/var/log/journal/{machine}/system.journal")
        done = node.run(["/usr/bin/gpuprestart", "history"])
        assert "clean" in done.stdout and done.stderr == ""
        done = node.run(["/usr/bin/gpuprestart", "history"], user="alice")
        assert done.stdout == "" and "systemd-journal" in done.stderr


def test_a_document_of_any_length_that_a_run_can_have(scene: Scene) -> None:
    """The library may cut off what is longer than 64 KiB, unless it is told not to."""
    unit = scene.name("crowd")
    held = [{"pid": pid, "comm": "worker", "reason": "was left behind " * 50, "fate": "killed"} for pid in range(300)]
    fields = forged(unit, holders=held)
    assert len(fields["GPUPRESTART_VERDICT"]) > 3 << 16
    scene.node.run(["python3", "-c", SEND], input=json.dumps(fields))
    (run,) = listed(scene, unit)
    assert len(run["holders"]) == 300 and run["holders"][299]["pid"] == 299
    assert "300: worker ×300" in asked(scene, "history", unit).stdout


def test_a_unit_with_a_journal_to_itself(scene: Scene) -> None:
    unit = scene.server(gpus="0", more="LogNamespace=servers")
    assert scene.start(unit)
    scene.node.run(["journalctl", "--namespace=servers", "--sync"])
    assert [each["outcome"] for each in listed(scene, unit)] == ["clean"]
    assert proof(scene, unit)[0] == 0
