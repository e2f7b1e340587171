"""Documents -> what a person sees: plain columns for a pipe, and the same laid out for terminals of every width."""

from __future__ import annotations

import io
import json
import re
from typing import Any, Optional

import pytest
from rich.console import Console

from gpuprestart import columns, documents, report, screen, telling, views
from gpuprestart.commandline import parse
from gpuprestart.model import MIB, Action, Leftover, Outcome, Unmet

from .test_report import HOSTILE, decision, state, verdict

REASON = "was left behind by old.service, which is failed"
RULE = f"{REASON} (rule mine)"


def document(**fields: Any) -> dict[str, Any]:
    return report.document(verdict(**fields), booted=1_699_999_000.0, verb="check")


def busy(gpus: int = 3, holders: int = 2) -> dict[str, Any]:
    """Some GPUs of which the first is dirty and the last is lost, with holders on the first."""
    states = [state(0, 1523 * MIB, fault="1523 MiB used, limit 64 MiB")]
    states += [*(state(index, 3 * MIB) for index in range(1, gpus - 1)), state(gpus - 1, None)]
    first = decision(listed={states[0].gpu.uuid: 1520 * MIB})
    second = decision("sh", Action.SPARE, opened=frozenset(each.gpu.uuid for each in states[:-1]))._replace(rule="mine")
    decisions = ((first, second) * holders)[:holders]
    return document(gpus=tuple(states), decisions=decisions, outcomes=(Outcome.PROTECTED, Outcome.UNKNOWN))


def drawn(verb: str, found: dict[str, Any], width: int, **more: Any) -> list[str]:
    """The lines on a terminal, without their colours."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system="truecolor", _environ={})
    with console.capture() as capture:
        console.print(views.renderable(verb, found, width, **more))
    return re.sub(r"\x1b\[[0-9;]*m", "", capture.get()).splitlines()


# Plain ---------------------------------------------------------------------------------------------------------------


def test_the_plain_check_has_all_that_is_known() -> None:
    fault = "1523 MiB used, limit 64 MiB"
    lines = views.plain("check", busy()).splitlines()
    assert lines[:12] == [
        "GPU  UUID          NAME      USED  RESERVED      TOTAL   LIMIT  UNATTRIBUTED  CLEAN  FAULT",
        f"  0  GPU-00000000  H100  1523 MiB   500 MiB  81920 MiB  64 MiB      1523 MiB  no     {fault}",
        "  1  GPU-00000001  H100     3 MiB   500 MiB  81920 MiB  64 MiB         0 MiB  yes",
        "  2  GPU-00000002  H100         -         -          -       -             -  no     GPU is lost",
        "",
        " PID  USER   COMMAND  OWNER             STATE  GPU    MEMORY  EVIDENCE          AGE  ACTION  REASON",
        f"4711  model  python3  unit:old.service  S        0  1520 MiB  nvml      14 min 37 s  kill    {REASON}",
        f"4711  model  sh       unit:old.service  S      0-1         -  fd        14 min 37 s  spare   {RULE}",
        "",
        "protected (also: unknown), exit status 75: GPU 3 is held by ollama.service (ollama[812], 5120 MiB)",
        "  hint: systemctl stop ollama.service",
        "  hint: or choose other GPUs",
    ]


def test_check_ends_with_the_commands_that_help(monkeypatch: pytest.MonkeyPatch) -> None:
    helps = [("systemctl stop ollama.service", "it holds GPU 3"), ("gpuprestart doctor", "x" * 90)]
    monkeypatch.setattr(columns, "remedies", lambda found: helps)
    assert views.plain("check", busy()).splitlines()[-3:] == [
        "What would help:",
        "  systemctl stop ollama.service  # it holds GPU 3",
        f"  gpuprestart doctor             # {'x' * 90}",
    ]
    lines = [line.rstrip() for line in drawn("check", busy(), 80)]
    at = lines.index("What would help:")
    # A command is on a line of its own, to be copied; why it is shown is beside it or below.
    assert lines[at + 1 : at + 3] == ["  systemctl stop ollama.service  # it holds GPU 3", "  gpuprestart doctor"]
    assert "x" * 90 in "".join(line.strip() for line in lines[at + 3 :])
    assert "What would help:" not in views.plain("status", busy())


def test_status_has_the_same_tables_and_no_verdict() -> None:
    checked, shown = views.plain("check", busy()), views.plain("status", busy())
    assert checked.startswith(shown)
    assert "exit status" not in shown and "hint" not in shown
    empty = document()
    assert views.plain("status", empty) == "no GPU selected\n\nno holders\n"


def test_what_the_policy_asks_for_is_in_every_view() -> None:
    unmet = Unmet("ports", "30000", "port 30000 is in use by \x1b[31mnginx[9]", "systemctl stop nginx")
    left = Leftover("shm", "nccl-a\x07", 5 * MIB, "kept", "would be removed")
    one = document(gpus=(state(0, 3 * MIB),), unmet=(unmet,), residue=(left,) * 100)
    assert "NOT MET\nports    port 30000 is in use by \\x1b[31mnginx[9]\n" in views.plain("status", one)
    plain = views.plain("check", one)
    assert "shm   nccl-a\\x07  5 MiB  kept  would be removed" in plain and "and 36 more" in plain
    for verb in ("status", "check"):
        assert "not met  ports: port 30000 is in use by \\x1b[31mnginx[9]" in drawn(verb, one, 120)
    assert any("would be removed" in line for line in drawn("check", one, 120)) and "and 36 more" in drawn(
        "check", one, 80
    )


def test_a_figure_that_is_just_over_the_limit_reads_so() -> None:
    assert used_and_limit(64 * MIB + 1, 64 * MIB) == ("65 MiB", "64 MiB")
    assert used_and_limit(64 * MIB - 1, 64 * MIB - MIB // 2) == ("64.0 MiB", "63.5 MiB")
    assert used_and_limit(1523 * MIB, None) == ("1523 MiB", "-")
    assert used_and_limit(None, 64 * MIB) == ("-", "64 MiB")


def used_and_limit(used: Optional[int], limit: Optional[int]) -> tuple[str, str]:
    gpu = {"index": 0, "used_bytes": used, "limit_bytes": limit}
    (row,) = columns.gpu_rows(documents.document({"gpus": [gpu]}))
    return row[columns.GPU.index("USED")], row[columns.GPU.index("LIMIT")]


def test_what_another_machine_leaves_out_is_a_dash() -> None:
    shown = {"pid": 7, "gpus": ["GPU-b", "GPU-a", "GPU-unknown"]}
    gpus = [{"uuid": "GPU-a", "index": 3}, {"uuid": "GPU-b"}, {"uuid": "GPU-c", "index": 4}]
    for time, started in ((None, 10.0), (10.0, None)):
        found = documents.document({"time": time, "gpus": gpus, "holders": [{**shown, "started": started}]})
        assert columns.holder_rows(found) == [["7", "-", "-", "-", "-", "3", "-", "-", "-", "-", "-"]]


@pytest.mark.parametrize(("count", "told"), [(64, None), (65, "and 1 more"), (None, None)])
def test_what_is_left_behind_is_counted_too(count: Optional[int], told: Optional[str]) -> None:
    """A verdict names so many of them at most."""
    left = Leftover("shm", "n" * 80, 5 * MIB, "kept", "would be removed")
    found = {**document(residue=(left,) * 64), "residue_count": count}
    lines = views.plain("check", found).splitlines()
    assert [line for line in lines if line.endswith("more")] == ([told] if told else [])
    # So much of a name is enough to know it by.
    assert f" {'n' * 64} " in views.plain("check", found) and "n" * 65 not in views.plain("check", found)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59, "59 s"),
        (60, "1 min"),
        (3599, "59 min 59 s"),
        (3600, "1 h"),
        (86_400, "1 d"),
        (61, "1 min 1 s"),
        (7260, "2 h 1 min"),
        (200_000, "2 d 7 h"),
        (-5, "0 s"),
    ],
)
def test_age(seconds: float, text: str) -> None:
    assert columns.age(seconds) == text


def test_csv_is_that_of_nvidia_smi() -> None:
    gpus = (state(0, 1523 * MIB + 5), state(1, None))
    assert columns.csv(documents.document(document(gpus=gpus))) == ("index, memory.used [MiB]\n0, 1523 MiB\n1, [N/A]\n")


def test_csv_has_a_line_for_each_gpu_also_in_mig_mode() -> None:
    one, two, other = state(0, 10 * MIB), state(0, 20 * MIB), state(1, 3 * MIB)
    gpus = tuple(each._replace(gpu=each.gpu._replace(parent="GPU-x")) for each in (one, two))
    assert columns.csv(documents.document(document(gpus=(*gpus, other)))).splitlines()[1:] == ["0, 30 MiB", "1, 3 MiB"]


# On a terminal -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("verb", ["status", "check"])
def test_nothing_that_one_has_to_know_is_lost_on_a_narrow_terminal(verb: str, width: int) -> None:
    lines = drawn(verb, busy(gpus=8, holders=2), width)
    assert all(len(line.rstrip()) <= width for line in lines)
    text = " ".join(" ".join(lines).split())
    for word in ("4711", "python3", "unit:old.service", "kill", REASON, "spare", "(rule mine)", "GPU 7: GPU is lost"):
        assert word in text, (word, lines)
    for word in ("0-6", "1520 MiB", "1523 MiB", "model", "14 min 37 s", "nvml"):
        assert word in text, (word, lines)
    assert ("protected (also: unknown), exit status 75" in text) == (verb == "check")


def test_wide_terminals_show_more_columns_and_longer_bars() -> None:
    narrow, wide = drawn("status", busy(), 80), drawn("status", busy(), 140)
    assert "UNATTRIBUTED" in wide[2] and "UNATTRIBUTED" not in narrow[2]
    assert wide[3].count("█") + wide[3].count("░") > narrow[3].count("█") + narrow[3].count("░") >= 10


def test_a_terminal_that_cannot_draw_gets_letters() -> None:
    lines = drawn("status", busy(), 80, can_draw=False)
    assert "#" in lines[3] and all(line.isascii() for line in lines)


def test_what_is_in_use_is_seen_as_soon_as_it_is_too_much() -> None:
    """64 MiB of 80 GiB are less than a letter, and still the bar is not empty."""
    dirty, clean = drawn("status", document(gpus=(state(0, 65 * MIB), state(1, 60 * MIB))), 80)[3:5]
    assert dirty.count("█") == 1 and clean.count("█") == 0


def whole() -> dict[str, Any]:
    """Something of everything that a check can show."""
    first, second = state(0, 1523 * MIB, fault="1523 MiB used, limit 64 MiB"), state(1, 3 * MIB)
    monitor = decision("sh", Action.SPARE, opened=frozenset({first.gpu.uuid, second.gpu.uuid}))._replace(rule="mine")
    return document(
        gpus=(first, second, state(2, None)),
        decisions=(decision(listed={first.gpu.uuid: 1520 * MIB}), monitor),
        unmet=(Unmet("ports", "30000", "port 30000 is in use by nginx[9]", "systemctl stop nginx"),),
        residue=(Leftover("shm", "nccl-a", 5 * MIB, "kept", "would be removed"),),
        outcomes=(Outcome.PROTECTED, Outcome.UNKNOWN),
    )


#: As it is laid out in eighty columns and in a hundred and twenty.
NARROW = """
3 GPUs, driver 570.86

GPU  IN USE           UUID              USED  RESERVED      TOTAL   LIMIT  CLEAN
  0  █░░░░░░░░░░░░░░  GPU-00000000  1523 MiB   500 MiB  81920 MiB  64 MiB  no
  1  ░░░░░░░░░░░░░░░  GPU-00000001     3 MiB   500 MiB  81920 MiB  64 MiB  yes
  2  -                GPU-00000002         -         -          -       -  no
GPU 0: no process is known to have 1523 MiB of what is used
GPU 2: GPU is lost

 PID  USER   COMMAND  OWNER             STATE  GPU    MEMORY          AGE
4711  model  python3  unit:old.service  S        0  1520 MiB  14 min 37 s
    kill  was left behind by old.service, which is failed (evidence nvml)
4711  model  sh       unit:old.service  S      0-1         -  14 min 37 s
    spare  was left behind by old.service, which is failed (rule mine) (evidence
    fd)
not met  ports: port 30000 is in use by nginx[9]

LEFT  NAME    BYTES  FATE  REASON
shm   nccl-a  5 MiB  kept  would be removed

protected (also: unknown), exit status 75: GPU 3 is held by ollama.service
(ollama[812], 5120 MiB)
  hint  systemctl stop ollama.service
  hint  or choose other GPUs

What would help:
  systemctl start sglang-qwen.service
      # its hook ends what is stale; the rest may still refuse the start
  gpuprestart clean --unit sglang-qwen.service
      # ends what is stale now, without a start
  nvidia-smi  # whether the driver answers anybody
  journalctl -k --grep NVRM  # what the driver has told the kernel's log
  gpuprestart doctor sglang-qwen.service
      # what keeps the hook from seeing or doing what it must
"""
WIDE = """
3 GPUs, driver 570.86

GPU  IN USE                          UUID          NAME      USED  RESERVED      TOTAL   LIMIT  UNATTRIBUTED  CLEAN
  0  █░░░░░░░░░░░░░░░░░░░░░░░░░░░░░  GPU-00000000  H100  1523 MiB   500 MiB  81920 MiB  64 MiB      1523 MiB  no
  1  ░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░  GPU-00000001  H100     3 MiB   500 MiB  81920 MiB  64 MiB         0 MiB  yes
  2  -                               GPU-00000002  H100         -         -          -       -             -  no
GPU 0: no process is known to have 1523 MiB of what is used
GPU 2: GPU is lost

 PID  USER   COMMAND  OWNER             STATE  GPU    MEMORY  EVIDENCE          AGE
4711  model  python3  unit:old.service  S        0  1520 MiB  nvml      14 min 37 s
    kill  was left behind by old.service, which is failed
4711  model  sh       unit:old.service  S      0-1         -  fd        14 min 37 s
    spare  was left behind by old.service, which is failed (rule mine)
not met  ports: port 30000 is in use by nginx[9]

LEFT  NAME    BYTES  FATE  REASON
shm   nccl-a  5 MiB  kept  would be removed

protected (also: unknown), exit status 75: GPU 3 is held by ollama.service (ollama[812], 5120 MiB)
  hint  systemctl stop ollama.service
  hint  or choose other GPUs

What would help:
  systemctl start sglang-qwen.service  # its hook ends what is stale; the rest may still refuse the start
  gpuprestart clean --unit sglang-qwen.service  # ends what is stale now, without a start
  nvidia-smi  # whether the driver answers anybody
  journalctl -k --grep NVRM  # what the driver has told the kernel's log
  gpuprestart doctor sglang-qwen.service  # what keeps the hook from seeing or doing what it must
"""


@pytest.mark.parametrize(("width", "text"), [(80, NARROW), (120, WIDE)])
def test_how_it_is_laid_out(width: int, text: str) -> None:
    assert [line.rstrip() for line in drawn("check", whole(), width)] == text.strip("\n").split("\n")


def test_colours_say_at_a_glance_what_is_in_the_way() -> None:
    green, red, bold_red, yellow = "\x1b[32m", "\x1b[31m", "\x1b[1;31m", "\x1b[33m"

    def coloured(verb: str, found: dict[str, Any]) -> str:
        console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system="standard", _environ={})
        with console.capture() as capture:
            console.print(views.renderable(verb, found, 120))
        return capture.get()

    text = coloured("check", busy(holders=2))
    assert f"{bold_red}no" in text and f"{green}yes" in text and f"{red}█" in text
    assert f"{yellow}kill\x1b[0m" in text and f"{green}spare\x1b[0m" in text
    assert f"{bold_red}protected (also: unknown), exit status 75" in text
    proved = coloured("check", {**document(outcomes=(Outcome.CLEAN,)), "exit": 0})
    assert "\x1b[1;32mclean, exit status 0" in proved


def test_why_a_command_helps_is_beside_it_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "remedies", lambda found: [("systemctl stop a.service", "b" * 30)])
    line = f"  systemctl stop a.service  # {'b' * 30}"
    assert line in drawn("check", busy(), len(line))
    assert [each.rstrip() for each in drawn("check", busy(), len(line) - 1)][-2:] == [
        "  systemctl stop a.service",
        f"      # {'b' * 30}",
    ]


def test_memory_that_nobody_is_known_to_have_is_told_at_any_width() -> None:
    """Where there is no room for that column, nothing else says why such a GPU is not clean."""
    leaked = state(5, 40963 * MIB, fault="40963 MiB used, limit 64 MiB")
    for width in (40, 80, 120):
        told = " ".join(" ".join(drawn("status", document(gpus=(leaked, state(6, 3 * MIB))), width)).split())
        assert "GPU 5: no process is known to have 40963 MiB of what is used" in told and "GPU 6:" not in told


def test_a_line_for_each_gpu_beside_it() -> None:
    found = busy()
    lines = drawn("status", found, 80, beside={found["gpus"][0]["uuid"]: "▁▂▃▄▅"})
    assert lines[3].rstrip().endswith("▁▂▃▄▅") and all(len(line.rstrip()) <= 80 for line in lines)


def test_another_machine_is_named() -> None:
    found = {**busy(), "host": "root@gpu1"}
    assert views.plain("status", found).startswith("root@gpu1:\n\nGPU")
    assert drawn("status", found, 80)[0].startswith("root@gpu1  3 GPUs, driver 570.86")


def test_of_a_crowd_the_first_are_shown_and_the_rest_are_counted() -> None:
    found = busy(holders=300)
    assert views.plain("status", found).count("unit:old.service") == columns.MOST_SHOWN
    assert "and 100 more\n" in views.plain("status", found)
    assert drawn("status", found, 80)[-1] == "and 100 more"
    # A record in the journal has but the first.
    fewer = {**found, "holders": found["holders"][:10]}
    assert "and 290 more\n" in views.plain("status", fewer)


@pytest.mark.case("D5")
@pytest.mark.parametrize("width", [40, 120])
def test_nothing_hostile_moves_a_terminal_or_colours_it(width: int) -> None:
    text = HOSTILE + "[bold red]x[/]"
    who = decision(text, opened=frozenset({state(0, 0).gpu.uuid}))
    found = document(gpus=(state(0, 1523 * MIB, fault=text),), decisions=(who,), message=text, hints=(text,))
    # Another machine sends what it likes.
    raw = {**found, "message": text, "host": text, "driver": text}
    raw["holders"][0].update(comm=text, owner=text, reason=text, user=text, rule=text)
    for verb in ("status", "check"):
        assert views.plain(verb, raw).replace("\n", "").isprintable()
        lines = drawn(verb, raw, width)
        assert "".join(lines).isprintable()
        # Markup is for us alone.
        assert "[bold red]x[/]" in "".join("".join(lines).split()).replace("boldred", "bold red")


@pytest.mark.parametrize("found", [{}, {"gpus": 7, "holders": "x"}, {"gpus": [{}], "holders": [{}], "outcomes": [1]}])
def test_a_document_of_another_kind_is_unknown_and_no_fault(found: dict[str, Any]) -> None:
    for verb in ("status", "check"):
        assert "-" in views.plain(verb, found) or "no GPU" in views.plain(verb, found)
        assert drawn(verb, found, 80)


# Which of the two ----------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def shown(out: io.StringIO) -> str:
    views.show("status", busy(), out=out, err=io.StringIO())
    return out.getvalue()


def test_a_pipe_gets_plain_columns_and_a_terminal_what_is_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert shown(io.StringIO()) == views.plain("status", busy())
    assert "\x1b[" in shown(Terminal()) and "█" in shown(Terminal())


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_colour_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv(name, value)
    text = shown(Terminal())
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", text) and "old.service" in text


def test_without_rich_a_terminal_gets_plain_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    real = builtins.__import__

    def lacking(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == "rich":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", lacking)
    assert screen.console(Terminal()) is None and not screen.is_live(Terminal())
    assert shown(Terminal()) == views.plain("status", busy())


# The verbs -----------------------------------------------------------------------------------------------------------


def told(line: str, **fields: Any) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    teller = telling.Teller(write=lambda record: None, say=lambda text, weight: None, notify=print, out=out, err=err)
    return teller.tell(parse(line.split()), verdict(**fields)), out.getvalue(), err.getvalue()


@pytest.mark.parametrize("form", ["status", "status --json", "status --csv"])
def test_status_is_about_what_could_be_measured(form: str) -> None:
    assert told(form, gpus=(state(0, 1523 * MIB),))[0] == 0
    assert told(form, gpus=(state(0, 3 * MIB), state(1, None)))[0] == 69
    status, _, said = told(form, message="the driver does not answer")
    assert status == 69 and "the driver does not answer" in said


def test_check_says_what_would_help_in_json_too() -> None:
    status, said, _ = told("check --json", gpus=(state(0, 3 * MIB),))
    found = json.loads(said)
    assert status == 75 and found["verb"] == "check" and isinstance(found["commands"], list)
    assert "commands" not in json.loads(told("clean --json", gpus=(state(0, 3 * MIB),))[1])
