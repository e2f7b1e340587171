"""What Prometheus is told: every line of it read back by the library's own parser; files that are not ours; units."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

import prometheus_client
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gpuprestart import events, metrics
from gpuprestart.freed import freed
from gpuprestart.host import textfile
from gpuprestart.model import EXIT_STATUS, MIB, Fate, Outcome, Timeline, Verdict
from gpuprestart.text import printable

ROOT = Path(__file__).parents[2]
UNIT = "sglang@qwen.service"

#: The labels of a series beside its unit, as the tests write them.
Key = tuple[str, str, str]


def verdict(path: Path, outcome: Outcome = Outcome.CLEAN, *, unit: Optional[str] = UNIT, **more: Any) -> Verdict:
    fields = {
        "outcomes": (outcome,),
        "exit": EXIT_STATUS[outcome],
        "unit": unit,
        "message": "all is well",
        "hints": (),
        "time": 1000.5,
        "run": "0123",
        "boot_id": "4567",
        "driver": "570.1",
        "nvml_path": "",
        "policy_files": (),
        "duration": 2.5,
        "phases": {"measure": 0.25, "evict": 2.0},
        "textfile": str(path),
    }
    return Verdict(**{**fields, **more})


def ask(request: Any, timeout: float) -> Any:
    """As the child answers, but for the lock, which is in a folder of the machine."""
    verb, question = request
    assert verb == "file:metrics" and timeout == metrics.PATIENCE
    return textfile.put(question)


def published(*verdicts: Verdict, ask: Any = ask) -> list[str]:
    """What is warned of."""
    written: list[events.Record] = []
    for each in verdicts:
        metrics.publish(each, ask, written.append)
    assert {record.fields["GPUPRESTART_EVENT"] for record in written} <= {"warning"}
    return [record.message for record in written]


def read(path: Path) -> dict[Key, float]:
    """Every series by (name, unit, further label), as a strict reader of the format finds them."""
    content = path.read_text(encoding="utf-8")
    found: dict[Key, float] = {}
    families = list(text_string_to_metric_families(content))
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert family.documentation and family.type in ("gauge", "counter")
        for sample in family.samples:
            assert (family.type == "counter") == sample.name.endswith("_total")
            labels = dict(sample.labels)
            unit = labels.pop("unit")
            key = (sample.name, unit, "".join(labels.values()))
            assert key not in found
            found[key] = sample.value
    for name, (kind, _, text) in metrics.FAMILIES.items():
        assert f"# HELP {name} {text}\n# TYPE {name} {kind}\n" in content
    return found


def of(path: Path, name: str, unit: str = UNIT) -> Mapping[str, float]:
    return {more: value for (each, whose, more), value in read(path).items() if each == name and whose == unit}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gpuprestart.prom"


# What is told --------------------------------------------------------------------------------------------------------


def test_what_a_run_found_is_told(path: Path) -> None:
    timeline = Timeline(memory=((0.0, (300 * MIB, 5)), (1.0, (700 * MIB, None)), (2.0, (100 * MIB, 5))))
    fates = {(1, 1): Fate.KILLED, (2, 1): Fate.TERMINATED, (3, 1): Fate.EXITED, (4, 1): Fate.SURVIVED}
    assert published(verdict(path, Outcome.CLEANED, timeline=timeline, fates=fates)) == []
    found = {(name, more): value for (name, unit, more), value in read(path).items() if value and unit == UNIT}
    assert found == {
        ("gpuprestart_last_run_timestamp_seconds", ""): 1000.5,
        ("gpuprestart_last_success_timestamp_seconds", ""): 1000.5,
        ("gpuprestart_last_outcome", "cleaned"): 1,
        ("gpuprestart_last_duration_seconds", ""): 2.5,
        ("gpuprestart_last_phase_duration_seconds", "measure"): 0.25,
        ("gpuprestart_last_phase_duration_seconds", "evict"): 2,
        ("gpuprestart_last_freed_bytes", ""): 600 * MIB,
        ("gpuprestart_last_ended_holders", ""): 2,
        ("gpuprestart_runs_total", "cleaned"): 1,
        ("gpuprestart_freed_bytes_total", ""): 600 * MIB,
        ("gpuprestart_ended_holders_total", ""): 2,
    }


def test_every_metric_is_written_by_every_run_and_every_outcome_has_a_series(path: Path) -> None:
    """A series that begins at 1 has never increased, as far as Prometheus can tell."""
    for outcome in Outcome:
        published(verdict(path, outcome))
        assert {name for name, _, _ in read(path)} == {*metrics.FAMILIES}
        assert of(path, "gpuprestart_last_outcome") == {each.value: each is outcome for each in Outcome}
        assert of(path, "gpuprestart_last_exit_status") == {"": EXIT_STATUS[outcome]}
    assert of(path, "gpuprestart_runs_total") == {each.value: 1 for each in Outcome}


def test_counters_live_on_and_the_rest_is_of_the_last_run(path: Path) -> None:
    timeline = Timeline(memory=((0.0, (9,)), (1.0, (2,))))
    one = verdict(path, timeline=timeline, fates={(1, 1): Fate.KILLED})
    two = verdict(path, timeline=timeline, phases={"drain": 1.0}, time=2000.0)
    assert published(one, one, two) == []
    assert of(path, "gpuprestart_freed_bytes_total") == {"": 21} and of(path, "gpuprestart_last_freed_bytes") == {"": 7}
    assert of(path, "gpuprestart_ended_holders_total") == {"": 2}
    assert of(path, "gpuprestart_last_ended_holders") == {"": 0}
    assert of(path, "gpuprestart_last_phase_duration_seconds") == {"drain": 1}


@pytest.mark.parametrize("outcome", Outcome)
def test_the_last_success_is_the_last_proof(path: Path, outcome: Outcome) -> None:
    """A start that was let pass has proved nothing."""
    success = EXIT_STATUS[outcome] == 0 and outcome is not Outcome.BYPASSED
    published(verdict(path, outcome))
    assert of(path, "gpuprestart_last_success_timestamp_seconds") == {"": 1000.5 if success else 0}
    published(verdict(path, time=2000.0), verdict(path, outcome, time=3000.0))
    assert of(path, "gpuprestart_last_success_timestamp_seconds") == {"": 3000 if success else 2000}
    assert of(path, "gpuprestart_last_run_timestamp_seconds") == {"": 3000}


@pytest.mark.parametrize(
    "samples, bytes_freed",
    [
        ([], 0),
        ([[5]], 0),
        ([[5], [9]], 0),
        ([[5], [9], [2]], 7),
        ([[5, 100], [2, 300]], 3),
        ([[None], [9], [None]], 0),
        ([[9], [4], [None]], 5),
        ([[9, 8], [1]], 8),
        ([[None, None]], 0),
    ],
)
def test_what_was_freed(samples: list[list[Optional[int]]], bytes_freed: int) -> None:
    assert freed(samples) == bytes_freed


# Units ---------------------------------------------------------------------------------------------------------------


def test_units_share_a_file(path: Path) -> None:
    published(verdict(path), verdict(path, Outcome.PROTECTED, unit="b.service"), verdict(path, unit=None))
    before = read(path)
    published(verdict(path, Outcome.CONFIG, unit="b.service", time=5000.0))
    after = read(path)
    assert {unit for _, unit, _ in after} == {UNIT, "b.service", ""}
    changed = {unit for name, unit, more in before if before[name, unit, more] != after[name, unit, more]}
    assert changed == {"b.service"}


@given(
    unit=st.text(min_size=1, max_size=40) | st.sampled_from(['a"b', "a\\nb", "a\\x2db", 'x"} 1\n#', "}", "{,=", " x "])
)
def test_whatever_a_unit_is_called_is_told_as_it_is(tmp_path_factory: pytest.TempPathFactory, unit: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.prom"
    path.unlink(missing_ok=True)
    shown = printable(unit, 300)
    assert published(verdict(path, unit=unit), verdict(path), verdict(path, unit=unit)) == []
    assert of(path, "gpuprestart_runs_total", shown)["clean"] == 2 + (shown == UNIT)


def test_there_are_only_so_many_units_and_what_they_need_can_be_read_again(path: Path) -> None:
    """Names as long as they can be, of which every character has to be escaped."""
    most = textfile.MOST_UNITS
    phases = dict.fromkeys(("measure", "survey", "evict", "drain", "reset", "preconditions"), 123.456789)
    figures: textfile.Figures = {}
    for number in range(most):
        each = verdict(path, unit=f"{number:04}".ljust(255, "\\"), time=1e9 - number, phases=phases)
        (_, question) = requested(each)
        textfile._merge(figures, question)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        textfile._replace(path.name, descriptor, figures, question["families"])
    finally:
        os.close(descriptor)
    assert path.stat().st_size < textfile.LIMIT
    assert published(verdict(path, time=2e9)) == []
    units = {unit for _, unit, _ in read(path)}
    # The one with the last name ran longest ago.
    assert len(units) == most and UNIT in units and not any(each.startswith(f"{most - 1:04}") for each in units)


def requested(of: Verdict) -> Any:
    asked: list[Any] = []

    def note(request: Any, timeout: float) -> Any:
        asked.append(request)
        return ("written",)

    assert published(of, ask=note) == []
    return asked[0]


def test_figures_that_no_counter_can_have_do_not_stay(path: Path) -> None:
    published(verdict(path))
    text = path.read_text()
    for bad in ("NaN", "+Inf", "-5"):
        path.write_text(re.sub(r'(runs_total\{outcome="clean".*\}) .*', rf"\1 {bad}", text))
        assert bad in path.read_text()
        assert published(verdict(path)) == []
        value = of(path, "gpuprestart_runs_total")["clean"]
        assert math.isfinite(value) and value == 1


def test_metrics_of_another_version_go(path: Path) -> None:
    published(verdict(path, unit="b.service"))
    more = (
        '# TYPE gpuprestart_old gauge\ngpuprestart_old{unit="b.service"} 5\ngpuprestart_last_gpus{unit="c",x="y"} 5\n'
    )
    path.write_text(path.read_text() + more)
    assert published(verdict(path)) == []
    assert {name for name, _, _ in read(path)} == {*metrics.FAMILIES} and "gpuprestart_old" not in path.read_text()
    assert 'x="y"' not in path.read_text()


# Files that are in the way -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"# TYPE node_load1 gauge\nnode_load1 5\n",
        b'node_systemd_unit_state{unit="a"} 5\n',
        b"gpuprestart_last_gpus 5\n",
        b'gpuprestart_last_gpus{unit="a",x="1",y="2"} 5\n',
        b'gpuprestart_last_gpus{unit="a" five\n',
        b"# TYPE x\n",
        b"\xff\xfe",
        b"once upon a time\n",
        b"#" * (textfile.LIMIT + 1),
    ],
)
def test_a_file_that_is_not_ours_is_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    (warning,) = published(verdict(path))
    assert warning.startswith(f"{path} was not written: it ") and "move it away" in warning
    assert path.read_bytes() == content and os.listdir(path.parent) == [path.name]


@given(st.binary(max_size=200) | st.text('{}"\\=,# \n\tgpuprestart_unit1TYPEHELP', max_size=100).map(str.encode))
def test_no_content_is_too_much_for_the_parser(content: bytes) -> None:
    try:
        textfile.parse(content)
    except textfile.Unusable as error:
        assert error.args[0] == "foreign"


def test_an_empty_file_is_filled(path: Path) -> None:
    """As a machine that has lost power may have left it."""
    path.touch()
    assert published(verdict(path)) == [] and of(path, "gpuprestart_runs_total")["clean"] == 1


def test_node_exporter_may_read_it(path: Path) -> None:
    before = os.umask(0o777)
    try:
        assert published(verdict(path), verdict(path)) == []
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert os.listdir(path.parent) == [path.name]


def test_a_link_is_replaced_and_not_followed(path: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path.symlink_to(victim)
    assert published(verdict(path)) == []
    assert victim.read_text() == "precious" and not path.is_symlink() and of(path, "gpuprestart_last_gpus") == {"": 0}


def test_the_library_writes_where_nobody_else_can_reach(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name that it gives to what it writes can be guessed, and it would follow a link of that name."""
    write = prometheus_client.write_to_textfile
    where: list[tuple[str, int]] = []

    def watched(target: str, collected: Any) -> None:
        folder = os.path.dirname(target)
        where.append((os.path.dirname(os.readlink(folder)), stat.S_IMODE(os.stat(folder).st_mode)))
        write(target, collected)
        assert not path.exists()

    monkeypatch.setattr(prometheus_client, "write_to_textfile", watched)
    assert published(verdict(path)) == [] and path.exists()
    assert where == [(str(path.parent), 0o700)]


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file(path: Path, kind: str) -> None:
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    (warning,) = published(verdict(path))
    assert "it is a folder" in warning or "it is no regular file" in warning
    assert not path.is_file() and os.listdir(path.parent) == [path.name]


def test_what_an_aborted_write_left_is_removed(path: Path) -> None:
    published(verdict(path))
    seen: list[str] = []
    hidden = _hidden(path, seen)
    hidden.mkdir(0o700)
    (hidden / "new.prom").write_text("half")
    assert published(verdict(path)) == [] and os.listdir(path.parent) == [path.name]
    assert of(path, "gpuprestart_runs_total")["clean"] == 2


@pytest.mark.parametrize("trap", ["link", "file", "open", "full"])
def test_a_trap_where_it_is_written_first(path: Path, tmp_path: Path, trap: str) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").touch()
    hidden = _hidden(path, [])
    if trap == "link":
        hidden.symlink_to(victim)
    elif trap == "file":
        hidden.touch()
    else:
        hidden.mkdir()
        hidden.chmod(0o777 if trap == "open" else 0o700)
        if trap == "full":
            (hidden / "more").mkdir()
    (warning,) = published(verdict(path))
    assert "was not written: " in warning and not path.exists()
    assert os.listdir(victim) == ["precious"]


def _hidden(path: Path, seen: list[str]) -> Path:
    """The folder in which the library writes, as it is called while it does."""
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        with textfile._aside(path.name, descriptor):
            seen += [each for each in os.listdir(path.parent) if each.startswith(".")]
    finally:
        os.close(descriptor)
    return path.parent / seen[0]


def test_a_folder_that_is_not_there_is_not_made(path: Path) -> None:
    absent = path.parent / "absent" / path.name
    (warning,) = published(verdict(absent))
    assert f"{absent.parent} is not there" in warning and "--collector.textfile.directory" in warning
    assert not absent.parent.exists()


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_folder_in_which_anybody_can_forge_it(path: Path, mode: int) -> None:
    """Also one further up; but nobody can rename what is another's in a sticky one."""
    inner = path.parent / "inner"
    inner.mkdir()
    path.parent.chmod(mode)
    for each in (path, inner / path.name):
        warnings = published(verdict(each))
        assert bool(warnings) == (mode == 0o777) != each.exists()
        assert all(f"chmod o-w {path.parent}" in warning for warning in warnings)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_what_the_kernel_refuses_names_the_file_and_what_helps(path: Path, number: int) -> None:
    def failing(request: Any, timeout: float) -> Any:
        return ("failed", number, str(path), os.strerror(number))

    (warning,) = published(verdict(path), ask=failing)
    assert os.strerror(number) in warning and str(path) in warning
    helps = {errno.ENOSPC: "df -h", errno.EROFS: "findmnt", errno.EACCES: "ExecStartPre=+", errno.EIO: "dmesg"}
    assert helps[number] in warning


def test_no_answer_is_a_warning(path: Path) -> None:
    (warning,) = published(verdict(path), ask=lambda request, timeout: None)
    assert "no answer" in warning and "findmnt" in warning


@pytest.mark.parametrize("error", [OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)), MemoryError()])
def test_where_no_child_is_to_be_had_the_verdict_stands(path: Path, error: Exception) -> None:
    def ask(request: object, timeout: float) -> Any:
        raise error

    (warning,) = published(verdict(path), ask=ask)
    assert "nobody could be started" in warning and "TasksMax=" in warning


def test_without_the_library_its_package_is_named(path: Path) -> None:
    lacking = [("package", "No module named 'prometheus_client'")]
    (warning,) = published(verdict(path), ask=lambda request, timeout: lacking[0])
    assert "python3-prometheus-client" in warning


def test_only_the_child_loads_the_library() -> None:
    code = (
        "import sys, gpuprestart.cli, gpuprestart.hook, gpuprestart.answers, gpuprestart.metrics;"
        "print([name for name in sys.modules if 'prometheus' in name or 'textfile' in name])"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    assert found.stdout == "[]\n"


# What is made of them ------------------------------------------------------------------------------------------------

RULES = ROOT / "docs/prometheus/gpuprestart.rules.yml"
DASHBOARD = ROOT / "docs/prometheus/gpuprestart-dashboard.json"
MANUAL = ROOT / "docs/metrics.md"


def names(expression: str) -> set[str]:
    return set(re.findall(r"gpuprestart_\w+", expression))


def test_the_rules_alert_on_what_there_is_and_say_what_to_do() -> None:
    loaded = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    assert [*loaded] == ["groups"]
    rules = [rule for group in loaded["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 6
    for rule in rules:
        assert {*rule} <= {"alert", "expr", "for", "labels", "annotations"}
        assert names(rule["expr"]) and names(rule["expr"]) <= {*metrics.FAMILIES}
        assert {*re.findall(r'outcome="([^"]*)"', rule["expr"])} <= {each.value for each in Outcome}
        assert {*rule["annotations"]} == {"summary", "description"} and rule["labels"]["severity"]
        assert "{{ $labels.unit }}" in rule["annotations"]["summary"]
        # What is to be typed.
        assert "`" in rule["annotations"]["description"]
        assert rule["alert"] in MANUAL.read_text(encoding="utf-8")


def test_the_dashboard_shows_what_there_is() -> None:
    loaded = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in loaded["panels"] for target in panel["targets"]]
    assert len(expressions) >= 6
    for expression in expressions:
        assert names(expression) and names(expression) <= {*metrics.FAMILIES}
    assert len({panel["id"] for panel in loaded["panels"]}) == len(loaded["panels"])
    variables = {each["name"] for each in loaded["templating"]["list"]}
    assert {*re.findall(r"\$(\w+)", json.dumps([*expressions, loaded["panels"]]))} - {"__rate_interval"} <= variables


def test_the_manual_tells_each_metric_and_no_other() -> None:
    rows = re.findall(r"^\| `(gpuprestart_\w+)(?:\{(\w+)\})?` \| (\w+) \|", MANUAL.read_text(encoding="utf-8"), re.M)
    assert {name: (kind, label) for name, label, kind in rows} == {
        name: (kind, label) for name, (kind, label, _) in metrics.FAMILIES.items()
    }
    assert len(rows) == len(metrics.FAMILIES)
