"""The manual and the schema, held against the program: what can be typed, set and read is there, and nothing else."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gpuprestart import bypass, cli, commandline, dropin, events, places, policy, quantities, schema, settings
from gpuprestart.commandline import EX_USAGE
from gpuprestart.host import files
from gpuprestart.model import EXIT_STATUS, Action, Outcome, Refusal
from gpuprestart.policy import Layer, Policy, Require, parse

from .verbs import ALONE, EVERY, OPTIONS

REPOSITORY = Path(__file__).parents[2]
PAGES = {name: (REPOSITORY / "docs/man" / f"{name}.md") for name in ("gpuprestart.8", "gpuprestart.toml.5")}
PROGRAM, FORMAT = (path.read_text(encoding="utf-8") for path in PAGES.values())
SCHEMA: Any = json.loads((REPOSITORY / "packaging/gpuprestart.schema.json").read_text(encoding="utf-8"))

#: Options of other programs that examples have.
FOREIGN = {"--grep", "--since", "--gpu-reset", "--pid", "--port"}


def section(page: str, heading: str) -> str:
    (found,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    return str(found)


def definitions(text: str) -> Iterator[tuple[str, str]]:
    """The terms of a list, and what is said of each."""
    yield from re.findall(r"^(\S.*)\n: ((?:.+\n|\n(?=  ))+)", text, re.MULTILINE)


def literals(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


# What can be typed ---------------------------------------------------------------------------------------------------


def test_every_verb_is_there_and_no_other() -> None:
    told = [literals(term)[0] for term, _ in definitions(section(PROGRAM, "COMMANDS"))]
    assert told == list(OPTIONS)


def test_every_option_of_every_verb_is_there_and_no_other() -> None:
    told: dict[str, set[str]] = {verb: set() for verb in OPTIONS}
    for head, part in re.findall(r"^Of (.*?):\n(.*?)(?=^Of |\Z)", section(PROGRAM, "OPTIONS"), re.M | re.S):
        for term, text in definitions(part):
            options = {word for word in literals(term) if word.startswith("-")}
            also = re.findall(r"`(\w+)` has this option too", text)
            if "Only without a verb" in text:
                assert options <= ALONE
                continue
            for verb in OPTIONS if head == "all" else (*literals(head), *also):
                told[verb] |= options
    assert told == OPTIONS


def test_the_synopsis_has_a_line_for_every_verb_with_its_own_options() -> None:
    lines = section(PROGRAM, "SYNOPSIS").replace("\\", "").split("\n")
    for verb in OPTIONS:
        (line,) = [line for line in lines if re.match(rf"`gpuprestart {verb}`|`gpuprestart` \[`{verb}`\]", line)]
        options = {word for word in literals(line) if word.startswith("--")}
        rest = {option for option in OPTIONS[verb] if option.startswith("--")} - {"--help"}
        assert options == (rest - OPTIONS["clean"] if "OPTION" in line else rest), verb


def test_the_synopsis_promises_no_option_without_its_verb() -> None:
    """Nothing but --help and --version can be typed so."""
    with pytest.raises(SystemExit):
        commandline.parse(["--json"])
    assert not re.search(r"\[`\w+`\].*`--", section(PROGRAM, "SYNOPSIS"))


@pytest.mark.parametrize("page", [PROGRAM, FORMAT], ids=PAGES)
def test_no_option_is_named_that_is_not_there(page: str) -> None:
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", page)) <= EVERY | FOREIGN


@pytest.mark.parametrize("page", [PROGRAM, FORMAT], ids=PAGES)
def test_what_is_shown_can_be_typed(page: str) -> None:
    """Also in the texts of the schema and the catalog there is no other line."""
    catalog = (REPOSITORY / "units/gpuprestart.catalog").read_text(encoding="utf-8")
    listed = re.findall(r"^ {4,}(?:ExecStartPre=\S*/)?(gpuprestart .*)$", f"{page}\n{catalog}", re.MULTILINE)
    spoken = [word for word in literals(page) if re.match(r"gpuprestart \w", word)]
    shown = [line.replace("@GPUPRESTART_UNIT@", "UNIT") for line in [*listed, *spoken]]
    assert len(shown) > 3
    for line in shown:
        commandline.parse(shlex.split(line, comments=True)[1:] + (["UNIT"] if line in NEEDS_UNIT else []))


#: In the synopsis, these stand without what follows them.
NEEDS_UNIT = ("gpuprestart enable", "gpuprestart disable", "gpuprestart bypass")


# How it ends ---------------------------------------------------------------------------------------------------------


def test_every_outcome_is_there_with_its_status_in_the_order_in_which_they_decide() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| (\d+) \| (\S.*\S) \|$", section(PROGRAM, "EXIT STATUS"), re.MULTILINE)
    assert [row[:2] for row in rows] == [(each.value, str(EXIT_STATUS[each])) for each in Outcome]
    assert f"A command line that is wrong exits with {EX_USAGE}." in PROGRAM


def test_outcomes_that_are_named_are_there() -> None:
    catalog = (REPOSITORY / "units/gpuprestart.catalog").read_text(encoding="utf-8")
    verdict = catalog[catalog.index(events.MESSAGE_IDS["verdict"]) :]
    for outcome in Outcome:
        assert re.search(rf"^{outcome.value}[:,]|[,.] {outcome.value}:", verdict, re.MULTILINE), outcome


# The journal ---------------------------------------------------------------------------------------------------------


def test_every_kind_of_record_is_there_with_its_id_and_no_other() -> None:
    told = re.findall(r"^`([a-z-]+)` `([0-9a-f]{32})`$", section(PROGRAM, "JOURNAL"), re.MULTILINE)
    assert dict(told) == dict(events.MESSAGE_IDS) and len(told) == len(events.MESSAGE_IDS)
    assert set(re.findall(r"\b[0-9a-f]{32}\b", PROGRAM + FORMAT)) == set(events.MESSAGE_IDS.values())


def test_every_field_is_there_and_no_other() -> None:
    name = r"(?:GPUPRESTART|GPU|HOLDER|OBJECT)_[A-Z_]+"
    source = Path(events.__file__).read_text(encoding="utf-8")
    fields = set(re.findall(rf'"({name})"', source))
    assert len(fields) > 20
    listed = section(PROGRAM, "JOURNAL").split("The fields of a record")[1]
    told = [word for term, _ in definitions(listed) for word in literals(term)]
    assert sorted(told) == sorted(fields)
    assert set(re.findall(rf"\b({name})\b", PROGRAM + FORMAT)) == fields


def test_every_action_is_there() -> None:
    (text,) = [text for term, text in definitions(section(PROGRAM, "JOURNAL")) if "GPUPRESTART_ACTION" in term]
    assert sorted(literals(text)) == sorted(action.value for action in Action)


# The environment and files -------------------------------------------------------------------------------------------


def test_every_variable_that_is_read_or_dropped_is_there_and_no_other() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (REPOSITORY / "gpuprestart").rglob("*.py")]
    read = {
        found
        for source in sources
        for pair in re.findall(r'\benviron\.get\("(\w+)"|"(\w+)" in os\.environ', source)
        for found in pair
        if found
    }
    assert read == {"SYSTEMD_EXEC_PID", "INVOCATION_ID", "NOTIFY_SOCKET", "JOURNAL_STREAM", "PATH"}
    told = [word for term, _ in definitions(section(PROGRAM, "ENVIRONMENT")) for word in literals(term)]
    assert sorted(told) == sorted([*settings.VARIABLES, *read, *(f"{prefix}*" for prefix in cli.SUSPECT)])


def test_the_places_are_those_of_the_program() -> None:
    terms = [term.strip("*") for term, _ in definitions(section(PROGRAM, "FILES"))]
    assert {f"{settings.FOLDERS[0]}/policy.toml", f"/etc/systemd/system/UNIT.d/{dropin.NAME}"} <= {*terms}
    assert {f"{bypass.FOLDER}/", "/run/gpuprestart/claims/", "/run/gpuprestart/locks/"} <= {*terms}
    where = " ".join(section(FORMAT, "DESCRIPTION").split())
    assert f"looked for in *{settings.FOLDERS[0]}*, *{settings.FOLDERS[1]}* and *{settings.FOLDERS[2]}*;" in where
    for name in policy.overlay_names("sglang@qwen.service"):
        assert f"*{name}*" in where


def test_the_limits_are_those_of_the_program(tmp_path: Path) -> None:
    text = " ".join(FORMAT.split())
    assert f"of at most {quantities.LONGEST / 3600:.0f} h." in text
    assert f"of at most {quantities.LARGEST >> 40} TiB or 100 %." in text
    assert f"Regular expressions of up to {schema._PATTERN_LENGTH} characters" in text
    for unit in (*quantities.SECONDS, *quantities.BYTES):
        assert f"`{unit}`" in section(FORMAT, "DESCRIPTION")
    assert bypass.HOLDS == 10 * 60 and "within ten minutes" in " ".join(PROGRAM.split())
    assert "A file has at most 64 KiB" in text
    file = tmp_path / "policy.toml"
    file.write_bytes(b"#" * 64 * 1024)
    assert files.read_safely(str(file), trusted_owner=None)
    file.write_bytes(b"#" * (64 * 1024 + 1))
    with pytest.raises(files.UnsafeFile):
        files.read_safely(str(file), trusted_owner=None)


# The policy ----------------------------------------------------------------------------------------------------------


def _told_keys(text: str) -> list[tuple[str, str]]:
    """Every key that has an entry, with the default that its term has; or its text, where that is too long for one."""
    found = []
    for term, said in definitions(text):
        keys = [word for word in literals(term) if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", word)]
        _, _, default = term.partition("` = `")
        long = re.match(r"Default: `([^`\n]+)`\n", said)
        found += [(key, long[1] if long else default.rstrip("`")) for key in keys]
    return found


def test_every_key_is_there_with_its_default_and_no_other() -> None:
    told = dict(_told_keys(section(FORMAT, "KEYS")))
    assert sorted(told) == sorted(f"{table}.{key}" for table, keys in schema.TABLES.items() for key in keys)
    for key, default in told.items():
        table, _, name = key.partition(".")
        read = parse([Layer("policy.toml", f"[{table}]\n{name} = {default}\n")])
        assert _plain(read) == _plain(Policy()), key
        # It is this key that the value was read for, and not only one that is the same as ever.
        other = parse([Layer("policy.toml", f"[{table}]\n{name} = {_another(key, default)}\n")])
        assert _plain(other) != _plain(Policy()), key


def _plain(read: Policy) -> tuple[object, ...]:
    """Everything in a policy but its rules and where it was read."""
    besides = (read.require, read.residue, read.reset, read.hooks, read.metrics)
    return (read.gpus.select, read.memory, read.deadline, read.dedicated, read.nvml, *besides)


#: Values that are not the default, of the keys that have none of a common kind.
_OTHERS = {
    "require.ports": "[30000]",
    "require.processes": "['x']",
    "require.disk": '{ "/x" = "7 MiB" }',
    "require.executables": '["/x"]',
    "require.models": '["/x"]',
    "require.checksums": '"SHA256SUMS"',
    "require.gpu_count": "8",
    "require.driver": '">=570"',
    "residue.shm_patterns": '["x*"]',
    "reset.command": '"/x"',
    "hooks.before_kill": '["/x", "{pid}"]',
    "metrics.textfile": '"/x.prom"',
    "gpus.select": '"all"',
}


def _another(key: str, default: str) -> str:
    """Another value of the same kind."""
    if key in _OTHERS:
        return _OTHERS[key]
    others = [word for word in _choices().get(key, []) if f'"{word}"' != default]
    if others:
        return f'"{others[-1]}"'
    return "true" if default == "false" else '"7 s"' if default.endswith(('s"', 'min"')) else '"7 MiB"'


def test_every_key_of_a_rule_is_there_and_no_other() -> None:
    told = _told_keys(section(FORMAT, "RULES"))
    keys = [*(f"rule.{key}" for key in schema._RULE), *(f"rule.match.{key}" for key in schema._MATCH)]
    assert sorted(key for key, _ in told) == sorted(keys)
    assert {key: default for key, default in told if default} == {
        "rule.infrastructure": str(policy.Rule._field_defaults["infrastructure"]).lower()
    }


def test_no_key_is_named_that_is_not_there() -> None:
    known = {f"{table}.{key}" for table, keys in schema.TABLES.items() for key in keys}
    known |= {f"rule.{key}" for key in schema._RULE} | {f"rule.match.{key}" for key in schema._MATCH}
    tables = "|".join([*schema.TABLES, "rule"])
    for page in (PROGRAM, FORMAT):
        named = [word.partition(" ")[0] for word in literals(page) if re.match(rf"({tables})\.", word)]
        assert named and set(named) <= known


def test_what_is_allowed_is_said() -> None:
    told = {literals(term)[0]: text for term, text in definitions(section(FORMAT, "KEYS") + section(FORMAT, "RULES"))}
    for key, words in _choices().items():
        assert [word for word in words if f'`"{word}"`' not in told[key]] == [], key


def _choices() -> Mapping[str, list[str]]:
    """The keys that take one of some words, as the program tells them to whoever gives another."""
    text = "\n".join(
        [
            *(f"[{table}]\n{''.join(f'{key} = {_NONSENSE}{chr(10)}' for key in keys)}" for table, keys in TABLES),
            f'[[rule]]\nmatch = {{ user = "x" }}\naction = {_NONSENSE}\n',
        ]
    )
    faults = schema.Document("policy.toml", text).faults()
    found = {}
    for fault in faults:
        told = re.fullmatch(r'policy\.toml:\d+: ([\w.\[\]]+): .* \(("[\w-]+"(?: or "[\w-]+")+)\)', fault)
        if told is not None:
            found[told[1].replace("[0]", "")] = re.findall(r'"([\w-]+)"', told[2])
    assert len(found) == 13
    return found


_NONSENSE = '"nonsense"'
TABLES = tuple(schema.TABLES.items())


def _listings(page: str) -> list[str]:
    return re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("listing", _listings(FORMAT))
def test_the_examples_of_policies(listing: str) -> None:
    read = parse([Layer("policy.toml", listing)])
    assert read.rules or _plain(read) != _plain(Policy())
    assert _fits(listing)


def test_there_is_an_example_for_every_kind_of_machine() -> None:
    assert len(_listings(FORMAT)) >= 7
    (rule,) = re.findall(r"\A((?:\n    .*)+)", section(FORMAT, "RULES"))
    assert len(parse([Layer("policy.toml", rule.replace("\n    ", "\n"))]).rules) == 1


# The schema ----------------------------------------------------------------------------------------------------------


def _resolved(node: Mapping[str, Any]) -> Mapping[str, Any]:
    if "$ref" not in node:
        return node
    found: Mapping[str, Any] = SCHEMA["$defs"][node["$ref"].rpartition("/")[2]]
    return {**found, **{key: value for key, value in node.items() if key != "$ref"}}


def _fits(text: str) -> bool:
    return bool(jsonschema.Draft202012Validator(SCHEMA).is_valid(places.load(text)))


def _sound(text: str) -> bool:
    try:
        parse([Layer("policy.toml", text)])
    except Refusal:
        return False
    return True


def test_the_schema_is_one() -> None:
    assert SCHEMA["$schema"] == jsonschema.Draft202012Validator.META_SCHEMA["$id"]
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_every_key_is_in_the_schema_with_its_default_and_no_other() -> None:
    tables = {name: node for name, node in SCHEMA["properties"].items() if name != "rule"}
    assert {name: sorted(node["properties"]) for name, node in tables.items()} == {
        name: sorted(keys) for name, keys in schema.TABLES.items()
    }
    told = dict(_told_keys(section(FORMAT, "KEYS")))
    said = {
        f"{name}.{key}": node["default"] for name, table in tables.items() for key, node in table["properties"].items()
    }
    assert {key: places.load(f"value = {default}")["value"] for key, default in told.items()} == said
    rule = SCHEMA["$defs"]["rule"]["properties"]
    assert sorted(rule) == sorted(schema._RULE) and sorted(rule["match"]["properties"]) == sorted(schema._MATCH)


def test_every_key_of_the_schema_has_a_description_and_says_what_is_allowed() -> None:
    rule = SCHEMA["$defs"]["rule"]
    objects = [SCHEMA, rule, rule["properties"]["match"]]
    objects += [node for name, node in SCHEMA["properties"].items() if name != "rule"]
    for each in objects:
        assert each["type"] == "object" and each["additionalProperties"] is False
        for key, node in each["properties"].items():
            whole = _resolved(node)
            assert whole["description"].endswith("."), key
            assert whole.keys() & {"type", "enum", "oneOf"}, key


def test_the_schema_has_the_words_of_the_program() -> None:
    for key, words in _choices().items():
        node = SCHEMA["$defs"]["rule"] if key.startswith("rule.") else SCHEMA["properties"][key.partition(".")[0]]
        assert node["properties"][key.rpartition(".")[2]]["enum"] == words, key


def _uncommented(text: str) -> str:
    """In the example policy a "#" without a space is in front of what could stand there."""
    return re.sub(r"^#(?! |$)", "", text, flags=re.MULTILINE)


def test_a_complete_policy_for_a_server_has_every_requirement() -> None:
    """The one of the manual, of which the README and the example overlay have parts."""
    complete, *_ = (parse([Layer("policy.toml", listing)]) for listing in _listings(FORMAT))
    asked = [key for key, value in complete.require._asdict().items() if value != Require._field_defaults[key]]
    # Reading a model in full before each start is not for every day.
    assert sorted(asked) == sorted({*Require._fields} - {"checksums"})
    assert complete.residue.asked and complete.reset.mode == "last-resort" and complete.hooks.before_kill
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    texts = [_listings(readme)[1], (REPOSITORY / "units/sglang-qwen.service.toml").read_text(encoding="utf-8")]
    for text in texts:
        other = parse([Layer("policy.toml", text)])
        assert (other.require, other.residue) == (complete.require, complete.residue) and _fits(text)


def test_the_policy_of_the_example_is_that_of_the_example_unit() -> None:
    complete = parse([Layer("policy.toml", _listings(FORMAT)[0])])
    unit = (REPOSITORY / "units/sglang-qwen.service").read_text(encoding="utf-8")
    (command,) = re.findall(r"^ExecStart=((?:.*\\\n)*.*)$", unit, re.MULTILINE)
    words = shlex.split(command.replace("\\\n", " "))
    options = dict(zip(words[3::2], words[4::2]))
    assert complete.require.executables == (words[0],) and complete.require.models == (options["--model-path"],)
    assert complete.require.ports == (int(options["--port"]),)
    assert complete.require.gpu_count == int(options["--tp-size"])
    assert all(pattern.search(" ".join(words)) for pattern in complete.require.processes)


@pytest.mark.parametrize("name", ["policy.toml", "sglang-qwen.service.toml"])
def test_the_example_policies_fit_the_schema(name: str) -> None:
    text = (REPOSITORY / "units" / name).read_text(encoding="utf-8")
    assert _fits(text) and _fits(_uncommented(text))


_RULE = '[[rule]]\nmatch = { user = "x" }\naction = "kill"\n'

GOOD = (
    "",
    '[gpus]\nselect = "all"',
    '[gpus]\nselect = ["GPU-8932f937", "0000:1b:00.0", 2]',
    '[memory]\nmax_used = "0"\nspared_max = "1.5GiB"\nmin_free = "90 %"\nsettle = "0"',
    '[memory]\nmin_free = "100 %"',
    '[deadline]\ntotal = "1 ms"\nterm = "0 s"\nprotected = "0"\nnvml_init = "0.5 s"\nnvml = "1h"',
    "[owners]\ndedicated = true",
    '[nvml]\nmissing = "pass"\npids = "foreign"',
    '[deadline]\nchecksums = "2 h"',
    "[require]\nports = []\nprocesses = []\nexecutables = []\nmodels = []\ndisk = {}",
    "[require]\nports = [1, 65535]\nprocesses = ['sglang\\.launch_server']\ngpu_count = 99999",
    '[require]\nhost_memory = "0"\ndisk = { "/var/log" = "1.5 TiB", "/" = "0" }',
    '[require]\nexecutables = ["/opt/a b"]\nmodels = ["/"]\nchecksums = "SHA256SUMS"',
    '[require]\nchecksums = ""\ndriver = ""\ngpu_count = 0',
    '[require]\ndriver = ">=570"',
    '[require]\ndriver = ">= 570.86.15.1 , <580,!=571"',
    '[require]\ncompute_mode = "exclusive-process"\npersistence = "warn"\necc = "no-pending"\nmig = "off"',
    '[require]\ncompute_mode = "any"\npersistence = "any"\necc = "any"\nmig = "any"',
    '[residue]\nshm = "remove"\nsysv = "report"\nmqueue = "off"\nowner = "any"\nshm_patterns = []',
    '[residue]\nshm_patterns = ["x", "*.shm", "?a"]',
    '[reset]\nmode = "last-resort"\ncommand = "/x"\ntimeout = "1 ms"\nmig = true\nnvswitch = true',
    '[hooks]\nbefore_kill = ["/x", "{pid}", "a b"]\ntimeout = "1 s"',
    "[hooks]\nbefore_kill = []",
    _RULE,
    f'{_RULE}name = "x"\ninfrastructure = true',
    _RULE.replace('user = "x"', "user = 0"),
    _RULE.replace('user = "x"', "user = 4294967294"),
    _RULE.replace('user = "x"', 'unit = "a", session = "*", container = "docker", exe = "x", comm = "y", age = "2 h"'),
)
BAD = (
    "unknown = 1",
    "[unknown]",
    "memory = 1",
    '[gpus]\nselect = "none"',
    "[gpus]\nselect = []",
    "[gpus]\nselect = [true]",
    '[gpus]\nselect = [" "]',
    "[gpus]\nselect = [-1]",
    "[gpus]\nselect = [100000]",
    '[gpus]\nselects = "all"',
    "[memory]\nmax_used = 64",
    '[memory]\nmax_used = "64"',
    '[memory]\nmax_used = "64 MB"',
    '[memory]\nmax_used = "-1 MiB"',
    '[memory]\nmax_used = "1. MiB"',
    '[memory]\nmin_free = "101 %"',
    '[memory]\nmin_free = "100.5 %"',
    '[memory]\nsettle = "5"',
    '[memory]\nunified = "ignore"',
    '[deadline]\ntotal = "0"',
    '[deadline]\ntotal = "0.0 s"',
    '[deadline]\nterm = "10 sec"',
    '[deadline]\nnvml = "0 ms"',
    '[deadline]\nnvml_init = "0 h"',
    '[owners]\ndedicated = "yes"',
    '[nvml]\nmissing = "ok"',
    '[nvml]\npids = "host"',
    '[deadline]\nchecksums = "0"',
    "require = 1",
    "[require]\nports = 30000",
    "[require]\nports = [0]",
    "[require]\nports = [65536]",
    '[require]\nports = ["30000"]',
    "[require]\nports = [true]",
    "[require]\nprocesses = 'x'",
    "[require]\nprocesses = ['']",
    "[require]\nprocesses = [1]",
    "[require]\nhost_memory = 1",
    '[require]\nhost_memory = "50 %"',
    '[require]\ndisk = "5 GiB"',
    '[require]\ndisk = { "var/log" = "5 GiB" }',
    '[require]\ndisk = { "/var/log" = "5 %" }',
    '[require]\ndisk = { "/var/log" = 5 }',
    '[require]\nexecutables = ["run.sh"]',
    '[require]\nexecutables = "/run.sh"',
    '[require]\nexecutables = [""]',
    f'[require]\nmodels = ["/{"x" * 4000}"]',
    '[require]\nmodels = ["/\\u0000"]',
    '[require]\nchecksums = "a/b"',
    '[require]\nchecksums = ".."',
    '[require]\nchecksums = "\\u0007"',
    "[require]\nchecksums = true",
    "[require]\ngpu_count = -1",
    "[require]\ngpu_count = 100000",
    '[require]\ngpu_count = "8"',
    "[require]\ngpu_count = true",
    "[require]\ndriver = 570",
    '[require]\ndriver = "570"',
    '[require]\ndriver = "=>570"',
    '[require]\ndriver = ">=570,"',
    '[require]\ndriver = ">=570.1.2.3.4"',
    '[require]\ncompute_mode = "exclusive-thread"',
    '[require]\npersistence = "on"',
    "[require]\npersistence = true",
    '[require]\necc = "off"',
    '[require]\nmig = "on"',
    "[require]\nport = [1]",
    '[residue]\nshm = "delete"',
    "[residue]\nsysv = true",
    '[residue]\nmqueue = "yes"',
    '[residue]\nowner = "root"',
    '[residue]\nshm_patterns = "nccl-*"',
    '[residue]\nshm_patterns = ["*"]',
    '[residue]\nshm_patterns = ["a/b"]',
    '[residue]\nshm_patterns = [""]',
    '[reset]\nmode = "on"',
    '[reset]\ncommand = "nvidia-smi"',
    '[reset]\ntimeout = "0"',
    '[reset]\nmig = "no"',
    "[reset]\nnvswitch = 0",
    '[hooks]\nbefore_kill = "/x"',
    '[hooks]\nbefore_kill = ["x"]',
    '[hooks]\nbefore_kill = ["/x", ""]',
    '[hooks]\nbefore_kill = ["/x", 1]',
    '[hooks]\ntimeout = "0 s"',
    "rule = 1",
    "[rule]",
    "[[rule]]",
    _RULE.replace('user = "x"', ""),
    _RULE.replace('action = "kill"', ""),
    _RULE.replace("kill", "end"),
    f'{_RULE}name = ""',
    f"{_RULE}infrastructure = 1",
    f"{_RULE}unknown = 1",
    _RULE.replace('user = "x"', "user = -1"),
    _RULE.replace('user = "x"', "user = 4294967295"),
    _RULE.replace('user = "x"', "user = true"),
    _RULE.replace('user = "x"', "unit = 1"),
    _RULE.replace('user = "x"', 'exe = ""'),
    _RULE.replace('user = "x"', f'comm = "{"x" * 1001}"'),
    _RULE.replace('user = "x"', f'unit = "{"x" * 257}"'),
    _RULE.replace('user = "x"', 'session = "\\u0007"'),
    _RULE.replace('user = "x"', 'age = "0"'),
    _RULE.replace('user = "x"', 'pid = "1"'),
)


@pytest.mark.parametrize("text", GOOD)
def test_schema_and_program_take_what_is_good(text: str) -> None:
    assert (_fits(text), _sound(text)) == (True, True)


@pytest.mark.parametrize("text", BAD)
def test_schema_and_program_refuse_what_is_bad(text: str) -> None:
    assert (_fits(text), _sound(text)) == (False, False)


# The pages -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("man")
    _build(folder)
    return folder


def _build(folder: Path, **environ: str) -> None:
    command = [sys.executable, "packaging/man.py", str(folder)]
    subprocess.run(command, cwd=REPOSITORY, env={**os.environ, **environ}, check=True)


def test_the_pages_are_the_same_whenever_and_wherever_they_are_built(pages: Path, tmp_path: Path) -> None:
    _build(tmp_path, LC_ALL="C", TZ="Pacific/Auckland", PYTHONHASHSEED="1")
    assert sorted(path.name for path in pages.iterdir()) == sorted(PAGES)
    for name in PAGES:
        assert (tmp_path / name).read_bytes() == (pages / name).read_bytes()


def _formatted(page: Path) -> tuple[str, str]:
    """The page on a terminal of eighty columns, and what man and groff had to say of it."""
    if shutil.which("man") is None or shutil.which("groff") is None:
        pytest.skip("no man or no groff on this machine")
    environ = {**os.environ, "LC_ALL": "C.UTF-8", "MANWIDTH": "80", "MAN_KEEP_FORMATTING": "", "MANROFFSEQ": "t"}
    command = ["man", "--warnings", "-E", "UTF-8", "--nj", "--local-file", str(page)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    plain = re.sub(r"\x1b\[[0-9;]*m|.\x08", "", done.stdout)
    return plain, done.stderr


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_set_without_a_warning_in_eighty_columns(pages: Path, name: str) -> None:
    text, said = _formatted(pages / name)
    assert said == ""
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert re.search(r"^ +- |\*\*|`|\| ", text.replace(" | --all", ""), re.MULTILINE) is None


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_every_word_of_its_source(pages: Path, name: str) -> None:
    """Nothing is lost to the formatter: no line that looks like a request, no backslash, no hyphen."""
    text, _ = _formatted(pages / name)
    # Neither a head nor what is set in columns can be followed from word to word.
    source = re.sub(r"^(\|.*|# .*|```.*)\n", "", PAGES[name].read_text(encoding="utf-8"), flags=re.MULTILINE)
    plain = re.sub(r"\\\n|[`*]", " ", source)
    assert _words(plain) - _words(re.sub(r"-\n +", "-", text)) == set()


def _words(text: str) -> set[str]:
    return {word.strip(".") for word in re.findall(r"[\w.@/=\\-]+", text)}


def test_what_troff_would_take_for_its_own_is_text(tmp_path: Path) -> None:
    lines = (r".so and \n[HY]", "'tis a 'quotation' at the \"beginning\"", "~ and ^ and a back`tick", "… and – and é")
    source = "# odd(8)\n\n## NAME\n\nodd - what is odd\n\n" + "\n\n".join(lines) + "\n\n    .SH\n    'x\n    \\\\\n"
    spec = importlib.util.spec_from_file_location("man", REPOSITORY / "packaging/man.py")
    assert spec is not None and spec.loader is not None
    man = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(man)
    page = tmp_path / "odd.8"
    page.write_text(man.page(f"{source}\nSay `--a-b` for x-y\n", "odd", "8", "1.0"), encoding="ascii")
    text, said = _formatted(page)
    assert said == ""
    assert {*lines, ".SH", "'x", "\\\\"} <= {line.strip() for line in text.splitlines()}
    # Some distributions set these plain characters as ones that cannot be typed; of a hyphen in a word that is right.
    written = page.read_text(encoding="ascii").partition("\n")[2]
    assert re.search(r"[`'^~]", written) is None
    assert r"\-\-a\-b" in written and "x-y" in written


@pytest.mark.parametrize("name", PAGES)
def test_mandoc_takes_a_page_too(pages: Path, name: str) -> None:
    if shutil.which("mandoc") is None:
        pytest.skip("no mandoc on this machine")
    done = subprocess.run(["mandoc", "-T", "lint", "-W", "warning", pages / name], capture_output=True, text=True)
    # There is no date on purpose.
    assert [line for line in done.stdout.splitlines() if "missing date" not in line] == []


@pytest.mark.parametrize("name", PAGES)
def test_layout_of_the_source(name: str) -> None:
    text = PAGES[name].read_text(encoding="utf-8")
    prose = [line for line in text.splitlines() if not line.startswith("|")]
    assert [line for line in prose if len(line) > 120 or line != line.rstrip()] == []


def test_the_pages_lead_to_each_other() -> None:
    assert "**gpuprestart.toml**(5)" in section(PROGRAM, "SEE ALSO")
    assert "**gpuprestart**(8)" in section(FORMAT, "SEE ALSO")
    needed = ("NAME", "SYNOPSIS", "DESCRIPTION", "COMMANDS", "OPTIONS", "EXIT STATUS", "JOURNAL", "FILES")
    for heading in (*needed, "ENVIRONMENT", "EXAMPLES", "NOTES"):
        assert section(PROGRAM, heading).strip()
