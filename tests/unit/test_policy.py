"""The policy: what its text means, which layer wins, and that every fault is told with file, line and key."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprestart.model import Action, Outcome, Refusal
from gpuprestart.places import Places, load
from gpuprestart.policy import (
    Deadlines,
    Gpus,
    Hooks,
    Layer,
    Match,
    MemoryPolicy,
    Nvml,
    Policy,
    Require,
    Reset,
    Residue,
    Rule,
    Size,
    overlay_names,
    parse,
)
from gpuprestart.quantities import duration, size

SITE = "/etc/gpuprestart/policy.toml"
TEMPLATE = "/etc/gpuprestart/sglang@.service.toml"
INSTANCE = "/etc/gpuprestart/sglang@qwen.service.toml"


def site(text: str) -> Policy:
    return parse([Layer(SITE, text)])


def short(value: object) -> str:
    """For the names of tests whose data is long on purpose."""
    return str(value)[:40]


def faults(*texts: str) -> list[str]:
    """The faults of these files, the site's first, without the folder they are in."""
    layers = [Layer(path, text, path != SITE) for path, text in zip((SITE, TEMPLATE, INSTANCE), texts)]
    with pytest.raises(Refusal) as caught:
        parse(layers)
    assert caught.value.outcome is Outcome.CONFIG
    told = [caught.value.message, *caught.value.hints]
    assert all(fault.isprintable() for fault in told)
    return [fault.replace("/etc/gpuprestart/", "") for fault in told]


# What the text means -------------------------------------------------------------------------------------------------


def test_no_file_is_the_contract_s_defaults() -> None:
    policy = parse([])
    assert policy == Policy()
    assert policy.gpus == Gpus(select="unit")
    assert policy.memory == MemoryPolicy(Size(64 * 2**20), Size(2 * 2**30), Size(0), 0.5, "holders")
    assert policy.deadline == Deadlines(120.0, 10.0, 0.0, 60.0, 15.0, 1800.0)
    assert policy.nvml == Nvml("refuse", "auto")
    assert (policy.dedicated, policy.rules, policy.files) == (False, (), ())
    assert policy.require == Require((), (), 0, {}, (), (), "", 0, (), "any", "any", "any", "any")
    patterns = ("nccl-*", "cuda.shm.*", "torch_*", "psm_*", "sem.*", "sgl_shm_*")
    assert policy.residue == Residue("off", "off", "off", patterns, "unit")
    assert policy.reset == Reset("off", "/usr/bin/nvidia-smi", 60.0, False, False)
    assert policy.hooks == Hooks((), 10.0)
    assert not policy.asks_more
    assert site("") == policy._replace(files=(SITE,))


def test_the_contract_s_example_says_the_defaults() -> None:
    policy = site(
        """
        [gpus]
        select = "unit"
        [memory]
        max_used = "64 MiB"
        spared_max = "2 GiB"
        min_free = "0"
        settle = "500 ms"
        unified = "holders"
        [deadline]
        total = "120 s"
        term = "10 s"
        protected = "0 s"
        nvml_init = "60 s"
        nvml = "15 s"
        [owners]
        dedicated = false
        [nvml]
        missing = "refuse"
        pids = "auto"
        [[rule]]
        name = "old benchmark launchers"
        match = { user = "bench", cmdline = 'sglang\\.launch_server' }
        action = "kill"
        """
    )
    (rule,) = policy.rules
    assert policy._replace(rules=(), gpus=Gpus(), files=()) == Policy()
    assert rule == Rule(
        name="old benchmark launchers",
        match=Match(user="bench", cmdline=re.compile(r"sglang\.launch_server")),
        action=Action.KILL,
        origin=f"{SITE}:21",
    )


def test_every_key_is_read() -> None:
    policy = site(
        """
        gpus.select = ["GPU-8932f937", 2, "0000:1b:00.0"]
        owners.dedicated = true
        nvml = { missing = "pass", pids = "foreign" }
        [memory]
        max_used = "1.5GiB"
        spared_max = "50 %"
        min_free = "1 TiB"
        settle = "1s"
        unified = "refuse"
        [deadline]
        total = "1.5 h"
        term = "0"
        protected = "2min"
        nvml_init = "1 ms"
        nvml = "0.5 s"
        [[rule]]
        match = { unit = "ollama*.service", session = "c?", user = 1000, container = "docker", age = "1 h" }
        action = "refuse"
        infrastructure = true
        [[rule]]
        name = "second"
        action = "spare"
        [rule.match]
        exe = '.*'
        comm = '^python'
        user = "1001"
        """
    )
    assert policy.gpus.select == ("GPU-8932f937", "2", "0000:1b:00.0")
    assert policy.gpus.origin == f"{SITE}:2"
    assert policy.dedicated is True
    assert policy.nvml == Nvml("pass", "foreign")
    assert policy.memory == MemoryPolicy(Size(3 * 2**29), Size(percent=50.0), Size(2**40), 1.0, "refuse")
    assert policy.deadline == Deadlines(5400.0, 0.0, 120.0, 0.001, 0.5)
    first, second = policy.rules
    assert first.match == Match("ollama*.service", "c?", 1000, "docker", age=3600.0)
    assert (first.action, first.infrastructure, first.name) == (Action.REFUSE, True, f"{SITE}:17")
    assert second.match == Match(user=1001, exe=re.compile(".*"), comm=re.compile("^python"))
    assert (second.name, second.action, second.infrastructure) == ("second", Action.SPARE, False)


def test_every_key_of_what_is_asked_besides_is_read() -> None:
    policy = site(
        """
        deadline.checksums = "2 h"
        [require]
        ports = [30000, 1]
        processes = ['sglang\\.launch_server', 'vllm']
        host_memory = "120 GiB"
        disk = { "/var/log/sglang" = "5 GiB", "/" = "0" }
        executables = ["/opt/sglang/run.sh"]
        models = ["/models/Qwen3.5-397B", "/models/other"]
        checksums = "SHA256SUMS"
        gpu_count = 8
        driver = ">=570.86, < 580,!=575.0.1"
        compute_mode = "exclusive-process"
        persistence = "warn"
        ecc = "no-pending"
        mig = "off"
        [residue]
        shm = "remove"
        sysv = "report"
        mqueue = "remove"
        shm_patterns = ["nccl-*"]
        owner = "any"
        [reset]
        mode = "last-resort"
        command = "/opt/bin/nvidia-smi"
        timeout = "1 min"
        mig = true
        nvswitch = true
        [hooks]
        before_kill = ["/usr/local/bin/dump-stacks", "{pid}"]
        timeout = "3 s"
        """
    )
    assert policy.deadline.checksums == 7200.0
    assert policy.require == Require(
        ports=(30000, 1),
        processes=(re.compile(r"sglang\.launch_server"), re.compile("vllm")),
        host_memory=120 << 30,
        disk={"/var/log/sglang": 5 << 30, "/": 0},
        executables=("/opt/sglang/run.sh",),
        models=("/models/Qwen3.5-397B", "/models/other"),
        checksums="SHA256SUMS",
        gpu_count=8,
        driver=((">=", (570, 86)), ("<", (580,)), ("!=", (575, 0, 1))),
        compute_mode="exclusive-process",
        persistence="warn",
        ecc="no-pending",
        mig="off",
    )
    assert policy.residue == Residue("remove", "report", "remove", ("nccl-*",), "any")
    assert policy.reset == Reset("last-resort", "/opt/bin/nvidia-smi", 60.0, True, True)
    assert policy.hooks == Hooks(("/usr/local/bin/dump-stacks", "{pid}"), 3.0)


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("", False),
        ("reset.mode = 'last-resort'\nhooks.before_kill = ['/x']", False),
        ("residue.owner = 'any'\nresidue.shm_patterns = ['x*']", False),
        ("require.gpu_count = 0\nrequire.mig = 'any'", False),
        ("require.gpu_count = 8", True),
        ("require.mig = 'off'", True),
        ("residue.sysv = 'report'", True),
    ],
)
def test_whether_more_than_clean_gpus_is_asked_for(text: str, more: bool) -> None:
    assert site(text).asks_more is more


def test_an_overlay_takes_away_what_the_site_asks_for() -> None:
    asked = """
    [require]
    ports = [1]
    disk = { "/a" = "1 B", "/b" = "2 B" }
    checksums = "SUMS"
    driver = ">=570"
    gpu_count = 8
    ecc = "no-pending"
    """
    overlay = """
    [require]
    ports = []
    disk = { "/b" = "3 B", "/c" = "4 B" }
    checksums = ""
    driver = ""
    gpu_count = 0
    ecc = "any"
    """
    assert layered(asked, overlay).require == Require(disk={"/a": 1, "/b": 3, "/c": 4})
    assert layered(asked, "require.gpu_count = 4").require.ports == (1,)


@pytest.mark.parametrize("start", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_files_of_other_editors_are_read(start: str, end: str) -> None:
    lines = (start + "[memory]", 'max_used = "1 MiB"', "[deadline]", 'term = "x"', "")
    assert faults(end.join(lines)) == [
        "policy.toml:4: deadline.term: 'x' is no duration (a number and ms, s, min or h, such as \"10 s\")"
    ]
    assert site(end.join(lines[:2])).memory.max_used == Size(2**20)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0), ("0 s", 0), ("500 ms", 0.5), ("1ms", 0.001), ("2.5 s", 2.5), ("3 min", 180), ("1 h", 3600)],
)
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "5",
        "0.0",
        "00",
        "5 m",
        "5 S",
        "s",
        "-5 s",
        "+5 s",
        "nan s",
        "inf s",
        "1e3 s",
        "1_000 s",
        ".5 s",
        "5. s",
        "1,5 s",
        "5 s ",
        " 5 s",
        "5 s\n",
        "5\ts",
        "٣ s",
        "5 sec",
        "12 parsecs",
        "9" * 5000 + " s",
        "8761 h",
        "5 MiB",
        "5 %",
    ],
    ids=short,
)
def test_no_durations(text: str) -> None:
    with pytest.raises(ValueError, match=r"\(.*\)$"):
        duration(text)


@pytest.mark.parametrize("text", ["0", "0 s", "0.0 min"])
def test_a_duration_that_must_be_some(text: str) -> None:
    with pytest.raises(ValueError, match="more than 0"):
        duration(text, positive=True)


@pytest.mark.parametrize(
    ("text", "total", "bytes_"),
    [
        ("0", 80, 0),
        ("64 MiB", 80, 64 << 20),
        ("64MiB", 80, 64 << 20),
        ("1.5 KiB", 80, 1536),
        ("7 B", 80, 7),
        ("2 GiB", 80, 2 << 30),
        ("1024 TiB", 80, 1 << 50),
        ("25 %", 80, 20),
        ("100%", 85899345920, 85899345920),
        ("0 %", 80, 0),
        ("0.5 %", 1000, 5),
    ],
)
def test_sizes(text: str, total: int, bytes_: int) -> None:
    assert size(text).of(total) == bytes_


@pytest.mark.parametrize(
    "text",
    [
        "",
        "64",
        "64 MB",
        "64 mib",
        "-1 MiB",
        "-1 %",
        "100.1 %",
        "1e9 B",
        "1025 TiB",
        "9" * 5000 + " B",
        "nan %",
        "64 MiB x",
    ],
    ids=short,
)
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match=r"\(.*\)$"):
        size(text)


@pytest.mark.parametrize(("text", "said"), [("64 MiB", "64 MiB"), ("0", "0 MiB"), ("5 B", "5 B"), ("2.5%", "2.5 %")])
def test_a_size_can_be_said(text: str, said: str) -> None:
    assert str(size(text)) == said


@given(st.floats(0, 100), st.integers(0, 2**47))
def test_a_share_is_never_more_than_the_gpu(percent: float, total: int) -> None:
    share = Size(percent=percent).of(total)
    assert 0 <= share <= total
    assert abs(share - Fraction(percent) * total / 100) <= 1


# Layers --------------------------------------------------------------------------------------------------------------


def rules(*words: str) -> str:
    """``"kill a"`` becomes a rule that kills what user a runs; ``"kill! a"`` one that may touch infrastructure too."""
    text = ""
    for word in words:
        action, user = word.split()
        text += f'[[rule]]\nname = "{word}"\nmatch.user = "{user}"\naction = "{action.rstrip("!")}"\n'
        text += "infrastructure = true\n" if action.endswith("!") else ""
    return text


def layered(*texts: str) -> Policy:
    return parse([Layer(path, text, path != SITE) for path, text in zip((SITE, TEMPLATE, INSTANCE), texts)])


def test_tables_merge_key_by_key_and_the_last_file_wins() -> None:
    policy = layered(
        'gpus.select = "all"\n[memory]\nmax_used = "1 MiB"\nmin_free = "1 GiB"\nsettle = "1 s"',
        '\ngpus.select = [0]\n[memory]\nmin_free = "2 GiB"\nsettle = "2 s"',
        '[memory]\nsettle = "3 s"',
    )
    assert policy.memory == MemoryPolicy(max_used=Size(2**20), min_free=Size(2 << 30), settle=3.0)
    assert policy.gpus == Gpus(("0",), f"{TEMPLATE}:2")
    assert policy.files == (SITE, TEMPLATE, INSTANCE)


def test_an_instance_s_rules_come_before_its_template_s_and_these_before_the_site_s() -> None:
    policy = layered(rules("kill a", "spare b"), rules("kill c", "spare d"), rules("kill e", "kill f"))
    assert [rule.name for rule in policy.rules] == ["kill e", "kill f", "kill c", "spare d", "kill a", "spare b"]
    assert [rule.origin for rule in policy.rules][::2] == [f"{INSTANCE}:1", f"{TEMPLATE}:1", f"{SITE}:1"]


def decides(policy: Policy, *users: str) -> str | None:
    """The name of the rule that decides about a holder which the rules on these users match."""
    rule = policy.rule_for(lambda rule: rule.match.user in users)
    return rule.name if rule else None


def test_the_first_rule_that_matches_decides() -> None:
    policy = layered(rules("spare a", "refuse b", "kill c"))
    assert [decides(policy, user) for user in "abcd"] == ["spare a", "refuse b", "kill c", None]
    assert decides(policy, "c", "b") == "refuse b"


def test_an_overlay_overrides_the_site() -> None:
    policy = layered(rules("kill a", "spare b"), rules("spare a"), rules("refuse b"))
    assert [decides(policy, user) for user in "ab"] == ["spare a", "refuse b"]


def test_no_overlay_overrides_a_refusal_of_the_site() -> None:
    policy = layered(rules("kill a", "refuse b"), rules("kill b"), rules("spare b"))
    assert decides(policy, "b") == "refuse b"


def test_an_overlay_s_own_refusal_can_be_preceded_in_the_overlay() -> None:
    policy = layered(rules("kill a"), rules("spare a", "refuse a"))
    assert decides(policy, "a") == "spare a"


def test_what_the_site_lets_off_before_its_refusal_an_overlay_may_speak_of() -> None:
    policy = layered(rules("spare a", "refuse b"), rules("kill a"))
    assert decides(policy, "a", "b") == "kill a"
    assert decides(policy, "b") == "refuse b"


@pytest.mark.parametrize(
    ("unit", "names"),
    [
        ("sglang.service", ("sglang.service.toml",)),
        ("sglang@qwen.service", ("sglang@.service.toml", "sglang@qwen.service.toml")),
        ("sglang@qwen-3.5.service", ("sglang@.service.toml", "sglang@qwen-3.5.service.toml")),
        (r"a\x2db@c\x2dd.service", (r"a\x2db@.service.toml", r"a\x2db@c\x2dd.service.toml")),
        ("a@b@c.service", ("a@.service.toml", "a@b@c.service.toml")),
        ("a@.service", ("a@.service.toml",)),
        ("x.scope", ("x.scope.toml",)),
    ],
)
def test_names_of_overlays(unit: str, names: tuple[str, ...]) -> None:
    assert overlay_names(unit) == names


@pytest.mark.parametrize(
    "unit",
    [
        "",
        "sglang",
        "../x.service",
        "a/b.service",
        "/a.service",
        "a..service",
        "..",
        "@a.service",
        "a b.service",
        "ä.service",
        "a.service\n",
        "a\x00.service",
        "x" * 250 + ".service",
    ],
    ids=short,
)
def test_no_names_of_units(unit: str) -> None:
    with pytest.raises(Refusal, match="is no name of a unit") as caught:
        overlay_names(unit)
    assert caught.value.outcome is Outcome.CONFIG
    assert caught.value.message.isprintable()


# Faults --------------------------------------------------------------------------------------------------------------


DURATION = 'a number and ms, s, min or h, such as "10 s"'
SELECT = '("unit", "all", or a list such as ["GPU-8932f937", "0000:1b:00.0", 2])'
PYTHON = "(Python's syntax)"
KEYS = "unit, session, user, container, exe, comm, cmdline, age"


@pytest.mark.case("D7")
@pytest.mark.parametrize(
    ("text", "fault"),
    [
        # syntax
        ("[gpus]\nselect = \n", "2: Invalid value, column 10 (TOML)"),
        ("[gpus]\nselect = [\n\n", "2: Invalid value, at the end of the file (TOML)"),
        ("x = 1\nx = 2\n", "2: Cannot overwrite a value, column 6 (TOML)"),
        ("a = 1\r\nb\x00 = 2", "2: Expected '=' after a key in a key/value pair, column 2 (TOML)"),
        ("# fine\n\nx = " + "[" * 65000, "3: brackets are nested too deeply (TOML)"),
        ("# fine\nx = " + "{a=" * 15000, "2: brackets are nested too deeply (TOML)"),
        ("\na" + ".a" * 30000 + " = 1", "2: more than 1000 dots in one line (TOML)"),
        # unknown keys
        ("[memory]\nmax_usd = 1", "2: memory.max_usd: is no known key (did you mean max_used?)"),
        (
            "\n[pre]\nfile = 1",
            "2: pre: is no known key (known here: gpus, memory, deadline, owners, nvml, require, residue, reset, hooks,"
            " metrics, rule)",
        ),
        ('[owners]\n"de di" = 1', "2: owners.'de di': is no known key (known here: dedicated)"),
        ("owners.x.y = 1", "1: owners.x: is no known key (known here: dedicated)"),
        ("[[rule]]\nmatch.user='a'\naction='kill'\nnam='x'", "4: rule[0].nam: is no known key (did you mean name?)"),
        # wrong types
        ("gpus = 1", "1: gpus: is an integer (a table)"),
        ("[[gpus]]", "1: gpus: is an array (a table)"),
        ("[memory]\n\nsettle = 5", '3: memory.settle: is an integer (a string such as "10 s")'),
        ("[memory]\nmin_free = 0.0", '2: memory.min_free: is a float (a string such as "64 MiB")'),
        ("[owners]\ndedicated = 1", "2: owners.dedicated: is an integer (true or false)"),
        ('[owners]\ndedicated = "yes"', "2: owners.dedicated: is a string (true or false)"),
        ("[nvml]\npids = true", '2: nvml.pids: is a boolean ("auto" or "ours" or "foreign")'),
        ("[nvml]\npids = 1979-05-27", '2: nvml.pids: is a date or time ("auto" or "ours" or "foreign")'),
        ("rule = {}", "1: rule: is a table (a list of tables, each under [[rule]])"),
        ("[rule]\nname = 'x'", "1: rule: is a table (a list of tables, each under [[rule]])"),
        ("rule = [\n1]", "1: rule[0]: is an integer (a table)"),
        ("[[rule]]\naction='kill'\nmatch = 'x'", "3: rule[0].match: is a string (a table)"),
        ("[[rule]]\naction='kill'\nmatch.user = ['a']", "3: rule[0].match.user: is an array (a user's name or uid)"),
        ("[[rule]]\naction='kill'\nmatch.user = true", "3: rule[0].match.user: is a boolean (a user's name or uid)"),
        # bad values
        ("[memory]\nsettle = '12 parsecs'", f"2: memory.settle: '12 parsecs' is no duration ({DURATION})"),
        ("[deadline]\ntotal = '0'", f"2: deadline.total: '0' makes no sense here (more than 0; {DURATION})"),
        ("[memory]\nmax_used = '101 %'", "2: memory.max_used: '101 %' is more than the whole GPU (at most 100 %)"),
        ("[memory]\nunified = ''", '2: memory.unified: is empty ("holders" or "refuse")'),
        ("[nvml]\nmissing = 'ok'", '2: nvml.missing: \'ok\' is not known ("refuse" or "pass")'),
        (
            "[[rule]]\naction='kill'\nmatch = {}",
            f"3: rule[0].match: is empty, it would match everybody (some of {KEYS})",
        ),
        (
            "[[rule]]\naction='kill'\nmatch.age = '0 s'",
            f"3: rule[0].match.age: '0 s' makes no sense here (more than 0; {DURATION})",
        ),
        ("[[rule]]\naction='kill'\nmatch.container = ''", "3: rule[0].match.container: is empty (a string)"),
        ("[[rule]]\naction='kill'\nmatch.user = 4294967295", "3: rule[0].match.user: is no uid (0 to 4294967294)"),
        ("[deadline]\nnvml = '0 s'", f"2: deadline.nvml: '0 s' makes no sense here (more than 0; {DURATION})"),
        ("[deadline]\nnvml_init = '0'", f"2: deadline.nvml_init: '0' makes no sense here (more than 0; {DURATION})"),
        ("[gpus]\nselect = [100000]", "2: gpus.select: entry [0] is no index of a GPU (an integer from 0)"),
        ("[[rule]]\naction='kill'\nmatch.user = -1", "3: rule[0].match.user: is no uid (0 to 4294967294)"),
        (
            "[[rule]]\naction='KILL'\nmatch.user = 1",
            '2: rule[0].action: \'KILL\' is not known ("kill" or "spare" or "refuse")',
        ),
        (
            "[[rule]]\naction='wait'\nmatch.user = 1",
            '2: rule[0].action: \'wait\' is not known ("kill" or "spare" or "refuse")',
        ),
        ("\n[[rule]]\nmatch.user = 1", "2: rule[0]: has no action (kill, spare or refuse)"),
        ("\n[[rule]]\naction = 'kill'", f"2: rule[0]: has no match ({KEYS})"),
        (
            "[[rule]]\nname='a\\nb'\naction='kill'\nmatch.user=1".replace("'", '"'),
            "2: rule[0].name: 'a\\nb' is too long or has control characters (up to 256 printable ones)",
        ),
        # patterns
        (
            "[[rule]]\naction='kill'\nmatch = { exe = '(' }",
            f"3: rule[0].match.exe: '(' is no regular expression: "
            f"missing ), unterminated subpattern at position 0 {PYTHON}",
        ),
        ("[[rule]]\naction='kill'\nmatch = { exe = '' }", "3: rule[0].match.exe: is empty (a regular expression)"),
        (
            "[[rule]]\naction='kill'\nmatch.comm = 'a{99999999999}'",
            f"3: rule[0].match.comm: 'a{{99999999999}}' is no regular expression: "
            f"the repetition number is too large {PYTHON}",
        ),
        (
            "[[rule]]\naction='kill'\nmatch.comm = '" + "a" * 1001 + "'",
            "3: rule[0].match.comm: is a pattern of 1001 characters (at most 1000)",
        ),
        # GPUs
        ("[gpus]\nselect = 'both'", f"2: gpus.select: 'both' is not known {SELECT}"),
        ("[gpus]\nselect = 3", f"2: gpus.select: is an integer {SELECT}"),
        ("[gpus]\nselect = []", f"2: gpus.select: is an empty list {SELECT}"),
        ("[gpus]\nselect = [0, true]", f"2: gpus.select: entry [1] is a boolean {SELECT}"),
        ("[gpus]\nselect = [-1]", "2: gpus.select: entry [0] is no index of a GPU (an integer from 0)"),
        ("[gpus]\nselect = [0, '']", f"2: gpus.select: entry [1] is empty {SELECT}"),
    ],
    ids=short,
)
def test_a_fault_is_told_with_file_line_and_key(text: str, fault: str) -> None:
    assert faults(text)[0] == f"policy.toml:{fault}"


PORT, COUNT = "a TCP port, an integer from 1 to 65535", "an integer, or 0 where any number will do"
PATH, NAME = 'an absolute path such as "/opt/sglang/run.sh"', "the name of a file in each of require.models"
VERSION, PROGRAM = 'such as ">=570" or ">=570.86, <580"', 'a list such as ["/usr/local/bin/dump-stacks", "{pid}"]'
SHARE, GLOB = "is a share, and of what is not known here", "is no pattern of names in /dev/shm, or matches all of them"


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("require.ports", "30000", "is an integer (a list of TCP ports)"),
        ("require.ports", "[80, '90']", f"entry [1] is a string ({PORT})"),
        ("require.ports", "[true]", f"entry [0] is a boolean ({PORT})"),
        ("require.ports", "[0]", f"entry [0] is out of range ({PORT})"),
        ("require.ports", "[65536]", f"entry [0] is out of range ({PORT})"),
        ("require.processes", "'x'", "is a string (a list of regular expressions)"),
        ("require.processes", "['a', '(']", "entry [1] '(' is no regular expression: missing ), unterminated"),
        ("require.processes", "['']", "entry [0] is empty (a regular expression)"),
        ("require.host_memory", "5", 'is an integer (a string such as "64 MiB")'),
        ("require.host_memory", "'50 %'", f"'50 %' {SHARE}"),
        ("require.disk", "'5 GiB'", "is a string (a table such as"),
        ("require.disk", "{ log = '5 GiB' }", f"of 'log' 'log' is no absolute path ({PATH})"),
        ("require.disk", "{ '/log' = '5 %' }", f"of '/log' '5 %' {SHARE}"),
        ("require.disk", "{ '/log' = 5 }", "of '/log' is an integer"),
        ("require.executables", "'/x'", "is a string (a list of absolute paths)"),
        ("require.executables", "['/x', 'run.sh']", f"entry [1] 'run.sh' is no absolute path ({PATH})"),
        ("require.executables", "['']", f"entry [0] is empty ({PATH})"),
        ("require.executables", '["/x\\u0000"]', "entry [0] '/x\\x00' is no absolute path"),
        ("require.models", "[1]", f"entry [0] is an integer ({PATH})"),
        ("require.models", f"['/{'x' * 4000}']", "entry [0] '/xxxx"),
        ("require.checksums", "'a/b'", f"'a/b' is no name of a file ({NAME}"),
        ("require.checksums", "'..'", f"'..' is no name of a file ({NAME}"),
        ("require.checksums", "[]", f"is an array ({NAME}"),
        ("require.gpu_count", "-1", f"is out of range ({COUNT})"),
        ("require.gpu_count", "true", f"is a boolean ({COUNT})"),
        ("require.gpu_count", "8.0", f"is a float ({COUNT})"),
        ("require.driver", "570", f"is an integer ({VERSION})"),
        ("require.driver", "'570'", f"'570' is no requirement of a version ({VERSION})"),
        ("require.driver", "'>=570,'", f"'>=570,' is no requirement of a version ({VERSION})"),
        ("require.driver", "'>=1.2.3.4.5'", f"'>=1.2.3.4.5' is no requirement of a version ({VERSION})"),
        ("require.compute_mode", "'on'", '\'on\' is not known ("any" or "default" or "exclusive-process"'),
        ("require.persistence", "true", 'is a boolean ("any" or "warn" or "require")'),
        ("require.ecc", "'off'", '\'off\' is not known ("any" or "no-pending")'),
        ("require.mig", "'on'", '\'on\' is not known ("any" or "off")'),
        ("residue.shm", "true", 'is a boolean ("off" or "report" or "remove")'),
        ("residue.sysv", "'x'", '\'x\' is not known ("off" or "report" or "remove")'),
        ("residue.mqueue", "''", 'is empty ("off" or "report" or "remove")'),
        ("residue.shm_patterns", "'x'", "is a string (a list of patterns of names)"),
        ("residue.shm_patterns", "['a*', '*.?']", f"entry [1] '*.?' {GLOB}"),
        ("residue.shm_patterns", "['../x']", f"entry [0] '../x' {GLOB}"),
        ("residue.owner", "'root'", '\'root\' is not known ("unit" or "any")'),
        ("reset.mode", "true", 'is a boolean ("off" or "last-resort")'),
        ("reset.command", "'nvidia-smi'", f"'nvidia-smi' is no absolute path ({PATH})"),
        ("reset.timeout", "'0'", "'0' makes no sense here (more than 0;"),
        ("reset.mig", "0", "is an integer (true or false)"),
        ("reset.nvswitch", "'no'", "is a string (true or false)"),
        ("hooks.before_kill", "'/x'", f"is a string ({PROGRAM})"),
        ("hooks.before_kill", "['x']", f"'x' is no absolute path ({PATH})"),
        ("hooks.before_kill", "['/x', '']", f"is empty ({PROGRAM})"),
        ("hooks.before_kill", '["/x", "\\u0000"]', "has too many words, or a NUL in one"),
        ("hooks.before_kill", f"['/x', {', '.join(['1'] * 9)}]", f"is an integer ({PROGRAM})"),
        ("hooks.timeout", "10", 'is an integer (a string such as "10 s")'),
        ("deadline.checksums", "'0 s'", "'0 s' makes no sense here (more than 0;"),
    ],
    ids=short,
)
def test_a_fault_in_what_is_asked_besides_is_told_with_file_line_and_key(key: str, value: str, fault: str) -> None:
    table, _, name = key.partition(".")
    (told,) = faults(f"# comment\n[{table}]\n\n{name} = {value}\n")
    assert told.startswith(f"policy.toml:4: {key}: {fault}") and told.endswith(")")


@pytest.mark.case("D7")
def test_an_endless_integer_is_a_fault_in_every_python() -> None:
    # Pythons from 3.10.7 on refuse to read it, older ones read it, and neither may try to print it.
    (fault,) = faults("\n[gpus]\nselect = [" + "1" * 5000 + "]")
    assert fault.startswith("policy.toml:3: ")


def test_a_pattern_of_too_many_brackets_is_a_fault() -> None:
    (fault,) = faults(f"[[rule]]\naction='kill'\nmatch.exe = '{'(' * 499}{')' * 499}'")
    assert fault.startswith("policy.toml:3: rule[0].match.exe: ")


@pytest.mark.filterwarnings("error")
def test_a_pattern_that_python_only_warns_of_is_read() -> None:
    assert site("[[rule]]\naction='kill'\nmatch.exe = '[[]'").rules[0].match.exe == re.compile(r"[[]")


def test_all_faults_of_all_files_are_told_in_the_order_of_their_lines() -> None:
    told = faults(
        "[memory]\nfoo = 1\nsettle = 2\n[[rule]]\naction = 3\n[deadline]\nterm = 4\n[owners]\ndedicated = 5",
        "x = ",
        "[nvml]\npids = 'x'",
    )
    assert [fault.split(": ")[:2] for fault in told] == [
        ["policy.toml:2", "memory.foo"],
        ["policy.toml:3", "memory.settle"],
        ["policy.toml:4", "rule[0]"],
        ["policy.toml:5", "rule[0].action"],
        ["policy.toml:7", "deadline.term"],
        ["policy.toml:9", "owners.dedicated"],
        ["sglang@.service.toml:1", "Invalid value, at the end of the file (TOML)"],
        ["sglang@qwen.service.toml:2", "nvml.pids"],
    ]


def test_of_very_many_faults_the_first_are_told_and_the_others_counted() -> None:
    told = faults("\n".join(f"x{number} = 1" for number in range(1000)))
    assert len(told) == 21
    assert told[-1] == "and 980 more faults"


def test_what_a_file_says_cannot_forge_a_line() -> None:
    assert faults('"a\\nPRIORITY=0\\u001b" = 1')[0].startswith(r"policy.toml:1: 'a\nPRIORITY=0\x1b': is no known key")
    assert faults('nvml.pids = "a\\nb"')[0].startswith(r"policy.toml:1: nvml.pids: 'a\nb' is not known")


# Lines ---------------------------------------------------------------------------------------------------------------

ODD = '''\
# [memory] in a comment = "x"
top."quoted key" . 'other' = 1
[a . "b"]   # comment
x = """
[not]
y = 1
""""
y = \'\'\'
z = 1\'\'\'
list = [
    1, # one
    "two, ]",
    { in = 3, deep = [4,
        5] },
    [[6],
     7],
]
z = { p = { q = 1979-05-27 07:32:00 }, r.s = 1.5 }
esc = "a\\"]"
end = 1
[[rule]]
name = "r0"
[rule.match]
user = "u0"
[[rule]]
match.user = "u1"
match.unit = "x"
[[ rule.sub ]]
k = 1
[[rule.sub]]
k = 2
[rule.sub.t]
k = 3
'''


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("top",), 2),
        (("top", "quoted key", "other"), 2),
        (("a",), 3),
        (("a", "b"), 3),
        (("a", "b", "x"), 4),
        (("a", "b", "y"), 8),
        (("a", "b", "list"), 10),
        (("a", "b", "list", 2, "deep"), 13),
        (("a", "b", "list", 2, "deep", 1), 13),
        (("a", "b", "z", "p", "q"), 18),
        (("a", "b", "z", "r", "s"), 18),
        (("a", "b", "esc"), 19),
        (("a", "b", "end"), 20),
        (("rule",), 21),
        (("rule", 0), 21),
        (("rule", 0, "name"), 22),
        (("rule", 0, "match"), 23),
        (("rule", 0, "match", "user"), 24),
        (("rule", 1), 25),
        (("rule", 1, "match"), 26),
        (("rule", 1, "match", "user"), 26),
        (("rule", 1, "match", "unit"), 27),
        (("rule", 1, "sub", 0, "k"), 29),
        (("rule", 1, "sub", 1), 30),
        (("rule", 1, "sub", 1, "k"), 31),
        (("rule", 1, "sub", 1, "t", "k"), 33),
        (("rule", 1, "absent"), 25),
        (("absent",), 1),
        ((), 1),
    ],
)
def test_where_keys_stand(path: tuple[str | int, ...], line: int) -> None:
    load(ODD)
    load(ODD.replace("\n", "\r\n"))
    assert Places(ODD).line(path) == line
    assert Places(ODD.replace("\n", "\r\n")).line(path) == line


WORDS = "gpus select memory rule match user action total a [ ] [[ ]] { } = . , # ' \" \\ 0 -1 nan 07:32:00"
ODD_WORDS = ['"""', "'''", "\n", "\r\n", "\r", " ", "\t", "\x00", "\ufeff", "\u2028", "[memory]\n", "[[rule]]\n"]
TEXTS = st.lists(st.sampled_from(WORDS.split() + ODD_WORDS) | st.text(max_size=6), max_size=40).map("".join)

#: Most of these lines are TOML, so that what lies behind the parser is reached as well.
NAMES = "select max_used settle total dedicated pids name action match match.user match.x x"
VALUES_OF_ANY_KIND = (
    "0 -1 1e999 nan true '' 'all' '10s' '5%' '1MiB' 'kill' 'auto' '(' [] [0] ['all',1] [[[]]] {} {user=1} {exe='['} "
    "{age='1h',unit='x'} 1979-05-27 07:32:00 9999999999999999999999"
)
LINES = st.builds("{} = {}".format, st.sampled_from(NAMES.split()), st.sampled_from(VALUES_OF_ANY_KIND.split()))
HEADERS = st.sampled_from(["[gpus]", "[memory]", "[deadline]", "[owners]", "[nvml]", "[[rule]]", "[rule.match]", "[x]"])
DOCUMENTS = st.lists(LINES | HEADERS, max_size=12).map("\n".join)


@given(TEXTS | DOCUMENTS)
def test_no_text_raises_anything_but_a_refusal(text: str) -> None:
    Places(text)
    try:
        policy: Optional[Policy] = parse([Layer(SITE, text), Layer(TEMPLATE, text, True)])
        told: tuple[str, ...] = ()
    except Refusal as refusal:
        policy, told = None, (refusal.message, *refusal.hints)
    assert policy is None or policy.files == (SITE, TEMPLATE)
    assert all("\n" not in fault and fault.startswith((SITE, TEMPLATE, "and ")) for fault in told)
    assert all(re.match(r"\S+:[1-9]\d*: ", fault) for fault in told[:1])
    if policy is not None:
        load(text)


SCALARS = st.sampled_from(
    ["1", "1.5", "true", '"s]"', "'}'", '"""m\n]"""', "'''\n\n'''", "1979-05-27 07:32:00", '"\\""']
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3).map(lambda items: "[\n" + ", # c]\n".join(items) + "\n]"),
    max_leaves=5,
)


@given(
    st.lists(st.tuples(VALUES, st.sampled_from(["k{} = {}", "'k{}'={}", "k{}. x = {{ y = {} }}", "[[t]]\nk{} = {}"])))
)
def test_keys_are_found_behind_any_value(statements: list[tuple[str, str]]) -> None:
    text = "# start\n"
    lines = {}
    tables = 0
    for number, (value, form) in enumerate(statements):
        # An array may go on in the next line, an inline table may not.
        line = form if "{{" not in form or "\n" not in value else "k{} = {}"
        tables += line.startswith("[[")
        where = ("t", tables - 1, f"k{number}") if tables else (f"k{number}",)
        lines[where] = text.count("\n") + 1 + line.startswith("[[")
        text += line.format(number, value) + "\n"
    load(text)
    places = Places(text)
    assert {path: places.line(path) for path in lines} == lines
