"""What the documents and examples say is what the program does: tables, policies, units, ids, links."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from gpuprestart import commandline, events
from gpuprestart.commandline import EX_USAGE
from gpuprestart.model import EXIT_STATUS
from gpuprestart.policy import Layer, Policy, parse
from gpuprestart.schema import TABLES, Document

REPOSITORY = Path(__file__).parents[2]
UNITS = REPOSITORY / "units"
DOCUMENTS = [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = sorted((REPOSITORY / "docs").glob("*.md"))
EXAMPLES = [path for path in sorted(UNITS.rglob("*")) if path.is_file()]
README = DOCUMENTS[0].read_text(encoding="utf-8")


def _uncommented(text: str) -> str:
    """In the example policy a "#" without a space is in front of what could stand there."""
    return re.sub(r"^#(?! |$)", "", text, flags=re.MULTILINE)


def _keys(policy: Policy) -> tuple[object, ...]:
    """Everything in a policy but its rules and where it was read."""
    besides = (policy.require, policy.residue, policy.reset, policy.hooks, policy.metrics)
    return (policy.gpus.select, policy.memory, policy.deadline, policy.dedicated, policy.nvml, *besides)


def _settings(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.match(r"[A-Z]\w+=", line)]


def test_the_exit_statuses_in_the_readme() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| (\d+) \|", README, flags=re.MULTILINE)
    assert dict(rows) == {outcome.value: str(status) for outcome, status in EXIT_STATUS.items()}
    assert len(rows) == len(EXIT_STATUS)
    assert f"A bad command line exits with {EX_USAGE}." in README


def test_the_message_ids_in_the_readme() -> None:
    said = re.findall(r"MESSAGE_ID=([0-9a-f]{32})", README)
    assert set(said) == {events.MESSAGE_IDS["verdict"], events.MESSAGE_IDS["holder-signalled"]}


def test_the_journal_fields_in_the_readme() -> None:
    source = Path(events.__file__).read_text(encoding="utf-8")
    listed = README[README.index("Fields: ") : README.index("Secrets in command lines")]
    fields = re.findall(r"`([A-Z_]+)`", listed)
    assert len(fields) > 15
    assert [field for field in fields if f'"{field}"' not in source] == []


def test_the_policy_in_the_readme() -> None:
    site, overlay = re.findall(r"^```toml\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    policy = parse([Layer("policy.toml", site), Layer("sglang-qwen.service.toml", overlay, overlay=True)])
    assert policy.dedicated and len(policy.rules) == 1
    assert policy.require.ports == (30000,) and policy.residue.asked


def test_the_drop_in_in_the_readme() -> None:
    drop_in = (UNITS / "sglang-qwen.service.d/50-gpuprestart.conf").read_text(encoding="utf-8")
    block = README[README.index("    [Service]\n") : README.index("- The `+` lets it")]
    assert [line.strip() for line in block.splitlines()[1:] if line.strip()] == _settings(drop_in)


def test_the_example_policy_is_the_default() -> None:
    text = (UNITS / "policy.toml").read_text(encoding="utf-8")
    as_it_is = parse([Layer("policy.toml", text)])
    uncommented = parse([Layer("policy.toml", _uncommented(text))])
    assert (len(as_it_is.rules), len(uncommented.rules)) == (0, 2)
    assert _keys(as_it_is) == _keys(uncommented) == _keys(Policy())


def test_the_example_policy_has_every_key() -> None:
    text = (UNITS / "policy.toml").read_text(encoding="utf-8")
    document = Document("policy.toml", _uncommented(text))
    assert {name: sorted(keys) for name, keys in document.tables.items()} == {
        name: sorted(keys) for name, keys in TABLES.items()
    }


def test_the_example_overlay() -> None:
    site = Layer("policy.toml", (UNITS / "policy.toml").read_text(encoding="utf-8"))
    name = "sglang-qwen.service.toml"
    policy = parse([site, Layer(name, (UNITS / name).read_text(encoding="utf-8"), overlay=True)])
    unit = (UNITS / "sglang-qwen.service").read_text(encoding="utf-8")
    (minutes,) = re.findall(r"^TimeoutStartSec=(\d+)min$", unit, flags=re.MULTILINE)
    assert policy.deadline.total < int(minutes) * 60


def test_systemd_accepts_the_units() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze on this machine")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "./sglang-qwen.service"],
        cwd=UNITS,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    # Neither program is installed where the tests run; that the second is named shows that the drop-in is read.
    said = done.stderr.splitlines()
    missing = [line for line in said if "is not executable" in line]
    assert [line for line in said if line not in missing] == []
    if not Path("/usr/bin/gpuprestart").exists():
        assert any("/usr/bin/gpuprestart" in line for line in missing)


@pytest.mark.parametrize("path", [*DOCUMENTS, *PAGES], ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)]+)\)", path.read_text(encoding="utf-8"))
    local = [link for link in links if not link.startswith("https://")]
    assert [link for link in local if not (path.parent / link.partition("#")[0]).exists()] == []


@pytest.mark.parametrize("path", [*DOCUMENTS, *PAGES, *EXAMPLES], ids=lambda path: path.name)
def test_only_places_that_readers_have(path: Path) -> None:
    """Paths are those of any machine with systemd, and addresses those of the standards and projects that are meant."""
    text = path.read_text(encoding="utf-8")
    folders = set(re.findall(r"(?<![\w.~*:/-])/([a-z]+)/", text))
    assert folders <= {"dev", "etc", "lib", "opt", "proc", "run", "sys", "system", "usr", "var"}
    hosts = set(re.findall(r"https?://([^/\s)]+)", text))
    assert hosts <= {"docs.sglang.ai", "keepachangelog.com", "semver.org"}


@pytest.mark.parametrize("path", [*DOCUMENTS, *PAGES, *EXAMPLES], ids=lambda path: path.name)
def test_layout_of_text(path: Path) -> None:
    """Prose is laid out for a terminal; tables, transcripts and listings are as wide as they have to be."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    prose = [line for line in text.splitlines() if not line.startswith(("|", "    "))]
    assert [line for line in prose if len(line) > 120 or line != line.rstrip()] == []


POLICIES = re.findall(
    r"^```toml\n(# /etc/gpuprestart/(\S+)\n.*?)^```$",
    "\n".join(page.read_text(encoding="utf-8") for page in PAGES),
    re.M | re.S,
)


@pytest.mark.parametrize(("text", "name"), POLICIES, ids=[name for _, name in POLICIES])
def test_every_policy_that_is_shown_is_one(text: str, name: str) -> None:
    policy = parse([Layer(name, text, overlay=name != "policy.toml")])
    assert policy != parse([Layer(name, "", overlay=name != "policy.toml")])


def test_there_are_policies_for_every_kind_of_machine() -> None:
    assert len(POLICIES) >= 6


@pytest.mark.parametrize("path", [*DOCUMENTS, *PAGES], ids=lambda path: path.name)
def test_every_line_that_is_to_be_typed_is_taken(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    spoken = [" ".join(words.split()) for words in re.findall(r"`(gpuprestart [a-z][^`]*)`", text)]
    listed = re.findall(r"^ {4,}(gpuprestart [a-z].*)$", text, re.MULTILINE)
    typed = re.findall(r"^\$ (gpuprestart [a-z][^|\n]*)", text, re.MULTILINE)
    for line in [*spoken, *listed, *typed]:
        words = shlex.split(re.sub(r" [>|].*", "", line.replace("…", "")), comments=True)[1:]
        # In a sentence they may stand without what follows them.
        alone = words in (["enable"], ["disable"], ["bypass"]) or words[-1:] == ["--unit"]
        try:
            commandline.parse([*words, "UNIT"] if alone else words)
        except SystemExit as end:
            assert end.code == 0, line
