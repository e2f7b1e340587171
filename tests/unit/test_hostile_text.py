"""Text that strangers write, all the way from what a process calls itself to the journal's bytes and every screen."""

from __future__ import annotations

import io
import json
import marshal
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Callable, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprestart import columns, documents, events, judge, owners, report
from gpuprestart.commandline import Command
from gpuprestart.ledger import Ledger
from gpuprestart.model import Fate, Outcome, Refusal
from gpuprestart.redaction import redacted
from gpuprestart.story import Story
from gpuprestart.telling import Teller
from gpuprestart.verdict import conclude

from .machines import gpu, holder, policy, process, reading, survey, uuid

ROOT = Path(__file__).parents[2]

#: What a secret is made of, with anything between them. No four letters of them may be seen.
WORDS = ("Aqzx7kwpt", "Bvwj8hy", "Cykq9df")
SECRET = "-".join(WORDS)

#: How people give one away.
GIVEN_AWAY = [
    *("--api-key", SECRET), f"--api-key={SECRET}", "-e", f"HF_TOKEN={SECRET}", "-H", f"Authorization: Bearer {SECRET}",
    f"https://u:{SECRET}@h/", f'{{"password": "{SECRET}"}}', f"AWS_SECRET_ACCESS_KEY={SECRET}", "sk-" + SECRET,
]  # fmt: skip


def leaked(text: str) -> list[str]:
    return [word for word in WORDS if word[:4] in text]


# From what processes call themselves to journal and screen -----------------------------------------------------------


class Told(NamedTuple):
    """What leaves a run: records, single lines, JSON, and tables with the number of lines that each ought to have."""

    records: list[events.Record]
    lines: list[str]
    document: str
    tables: list[tuple[str, int]]


def told(text: str) -> Told:
    """A run that finds two processes and meets every fate with them, where everybody but systemd says this text: the
    processes, the driver, the kernel, the name services, the environment."""
    # A cgroup's name has neither a slash nor a line end (cgroup_mkdir() in the kernel).
    cgroup = "/user.slice/lxc/x" + re.sub("[/\n]", "", text) if len(text) % 2 else "/../" + text
    said = process(cmdline=redacted([text, *GIVEN_AWAY, text]), comm=text, user=text, cgroup=cgroup, exe=text)
    names = owners.Names(users={}, uids={})
    above = ("python3[1]", f"conmon{text}[7]")
    owner = owners.owner_of(said, units={}, names=names, own=None, namespace=0, above=above)
    them = [holder(pid, owner, {0: 1000})._replace(process=said._replace(pid=pid)) for pid in (4711, 4712)]
    machine = survey(*them, used=(3000, None))._replace(
        gpus=(gpu(0, name=text), gpu(1, name=text)),
        readings={uuid(0): reading(0, 3000, unlisted=text), uuid(1): reading(1, None, fault=text)},
    )
    records: list[events.Record] = []
    story = Story(run=text, time=0.0, unit="sglang.service", driver=text, nvml_path=text, policy_files=(text,))
    ledger = Ledger(
        story, write=records.append, clock=lambda: 0.0, wchan=lambda pid: text, still_there=lambda process: True
    )
    ledger.planned(machine, plan := judge.plan(policy(), machine, judge.History()))
    stays, goes = plan.decisions
    ledger.signalled(stays, "SIGKILL")
    ledger.refused(goes, "SIGTERM")
    ledger.ended(goes, Fate.GONE)
    verdict = conclude(ledger.story(refusal=Refusal(Outcome.CONFIG, text, [text])))
    lines: list[str] = []
    screens = []
    for command in (Command("clean", json=True, journal=True), Command("check"), Command("status")):
        out = io.StringIO()
        say = lambda line, priority: lines.append(line)  # noqa: E731
        Teller(write=records.append, say=say, notify=lines.append, out=out, err=out).tell(command, verdict)
        screens.append(out.getvalue())
    rows = 1 + len(verdict.gpus) + 1 + 1 + len(verdict.decisions)
    helps = columns.advice(documents.document(report.document(verdict, booted=0.0, verb="check")))
    commands = len(helps) + 2 if helps else 0
    tables = [(screens[1], rows + 2 + len(verdict.hints) + commands), (screens[2], rows)]
    return Told(records=records, lines=lines, document=screens[0], tables=tables)


NASTY = (
    "\n", "\r", "\0", "\x1b[31m", "\x1b]0;title\x07", "\x9b2J", "\x85", "\u2028", "\u202e", "\u2066", "\ufeff",
    "\udcff", "\ud800", "\U000e0041", "\nPRIORITY=0\n", "\nMESSAGE=forged\n\n", "<0>forged", "\nOBJECT_PID=1",
    *"=\t :[/{}%'\"ü模", "\\x0a", "A" * 131_072, "\x1b" * 3000,
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(NASTY) | st.characters(exclude_categories=()), max_size=6).map("".join)

#: Where journald's socket would be, beside the real library: answers with the datagrams that records become.
JOURNALD = """
import marshal, os, socket, sys
from gpuprestart.host.journal import Journal, SOCKET
os.makedirs(os.path.dirname(SOCKET))
journald = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
journald.bind(SOCKET)
journal = Journal()
assert journal.open()
while (record := marshal.load(sys.stdin.buffer)) is not None:
    assert journal.send(*record)
    marshal.dump(journald.recv(1 << 20), sys.stdout.buffer)
    sys.stdout.flush()
"""


@contextmanager
def journald() -> Iterator[Callable[[events.Record], bytes]]:
    """Turns a record into what the real library sends."""
    if find_spec("systemd") is None:
        pytest.skip("systemd-python is not installed")
    unshare = [shutil.which("unshare") or "false", "--mount", "sh", "-c"]
    if subprocess.run([*unshare, "mount -t tmpfs none /run"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("may not make a mount namespace, and the library's socket has a fixed place")
    command = [*unshare, 'mount -t tmpfs none /run && exec "$0" -c "$1"', sys.executable, JOURNALD]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin and child.stdout
        stdin, stdout = child.stdin, child.stdout

        def sent(record: events.Record) -> bytes:
            marshal.dump((record.message, record.message_id, record.priority, dict(record.fields)), stdin)
            stdin.flush()
            datagram: bytes = marshal.load(stdout)
            return datagram

        yield sent
        marshal.dump(None, stdin)


def fields_of(datagram: bytes) -> Counter[tuple[bytes, bytes]]:
    """A native entry as systemd's JOURNAL_NATIVE_PROTOCOL describes it: NAME=value, or NAME, a length and the value."""
    found: Counter[tuple[bytes, bytes]] = Counter()
    at = 0
    while at < len(datagram):
        end = datagram.index(b"\n", at)
        name, equals, value = datagram[at:end].partition(b"=")
        if not equals:
            start = end + 9
            end = start + int.from_bytes(datagram[end + 1 : start], "little")
            value = datagram[start:end]
            assert datagram[end : end + 1] == b"\n"
        found[name, value] += 1
        at = end + 1
    return found


def expected(record: events.Record) -> Counter[tuple[bytes, bytes]]:
    own = {"MESSAGE": record.message, "MESSAGE_ID": record.message_id, "PRIORITY": str(record.priority)}
    said = {**record.fields, **own, "SYSLOG_IDENTIFIER": "gpuprestart"}
    pairs = [(name, each) for name, value in said.items() for each in values(value)]
    return Counter((name.encode(), value.encode("utf-8", "backslashreplace")) for name, value in pairs if value)


def values(value: events.Value) -> Sequence[str]:
    return (value,) if isinstance(value, str) else value


@pytest.mark.case("D5")
@given(TEXTS)
def test_no_text_moves_a_terminal_makes_another_line_or_takes_a_secret_along(text: str) -> None:
    said = told(text)
    for record in said.records:
        # The whole verdict is a document, cut short by what is in it and not by its length.
        document = record.fields.get("GPUPRESTART_VERDICT", "{}")
        assert isinstance(document, str) and document.isprintable() and not leaked(document)
        fields = [value for name, value in record.fields.items() if name != "GPUPRESTART_VERDICT"]
        for value in [(record.message,), *map(values, fields)]:
            assert all(each.isprintable() and 0 < len(each) <= 2000 and not leaked(each) for each in value)
    for line in said.lines:
        assert line.isprintable() and len(line) <= 2000 and not leaked(line)
    assert said.document.isascii() and said.document[:-1].isprintable() and not leaked(said.document)
    assert [each["pid"] for each in json.loads(said.document)["holders"]] == [4711, 4712]
    for table, lines in said.tables:
        assert table.count("\n") == lines and not leaked(table)
        assert all(line.isprintable() for line in table.split("\n"))
    (found,) = {record.fields["HOLDER_CMDLINE"] for record in said.records if "HOLDER_CMDLINE" in record.fields}
    assert "[redacted]" in found or len(text) > 1000


@pytest.mark.case("D5")
def test_no_text_becomes_another_field_of_the_journal() -> None:
    """Neither what runs write nor, should somebody forget to escape it one day, the text as it is."""
    with journald() as sent:

        @given(TEXTS, st.integers(0, 99))
        def is_framed(text: str, number: int) -> None:
            records = told(text).records if number % 4 == 0 else []
            # So much goes through the socket; what is longer yet, the library hands over in a file.
            part = text[:65_536]
            raw = events.Record(message=part + "x", message_id="0" * 32, priority=4, fields={"HOLDER_COMM": part})
            for record in (raw, *records[number % 10 :][:1]):
                assert fields_of(sent(record)) == expected(record)

        is_framed()


# Secrets -------------------------------------------------------------------------------------------------------------

NAMES = (
    "api-key", "hf-token", "password", "client-secret", "access-key", "auth-token", "openai-api-key", "passphrase",
    "db-passwd", "pgpassword", "aws-secret-access-key", "x-api-key", "credentials", "ssh-key-passphrase", "sig",
    "tokenizer-api-key", "cookie", "user-pass",
)  # fmt: skip
SPELLED: Sequence[Callable[[str], str]] = (
    str,
    str.upper,
    str.title,
    lambda name: name.replace("-", "_"),
    lambda name: re.sub("-(.)", lambda match: match[1].upper(), name),
)


#: What is odd in a secret. In the password of a URL stands what may (RFC 3986, userinfo), and what people leave in it.
ODD = " '\"\\$=:,;&|(){}[]<>@#!%~*+?/`-._\t\n"
IN_URL, IN_QUERY = "!$&'()*+,;=:%~-._/", "!$'()*+,;:%~-._/?"
LINE = ODD.replace("\n", "")

#: How people hand a secret over, and what may be odd in it there. A bar is between two arguments.
FORMS = [(form, odd) for odd, forms in (
    (ODD, ["--{name}|{secret}", "--{name}={secret}", "-{name}|{secret}", "-u|user:{secret}"]),
    (ODD, ["{NAME}={secret}", "-e|{NAME}={secret}", "-e{NAME}={secret}", "--env={NAME}={secret}"]),
    (LINE, ["-H|Authorization: Bearer {secret}", "-H|authorization: token {secret}", "{name} = {secret}"]),
    (LINE, ["--header=Authorization: Basic {secret}", "--header={name}: {secret}", "{name}: {secret}"]),
    (IN_URL, ["https://u:{secret}@h/p?q#f", "--db=redis://:{secret}@h:6379/0", "sh -c curl https://u:{secret}@h/p"]),
    (IN_QUERY, ["https://h/p?m=1&{name}={secret}&n=2", "https://h/#{name}={secret}"]),
    (ODD, ["{object}", "--config|{object}", "--config={nested}", "{python}", "{listed}", "{words}"]),
    (ODD, ["sh|-c|x --{name} {quoted} --port 8", "sh|-c|x --{name}={quoted} -v", "sh|-c|export {NAME}={quoted}; x"]),
    (ODD, ["sh|-c|docker run -e {pair} i", "sh|-c|docker run {option} i", "sh|-c|curl -u {login} h"]),
    (LINE, ["sh|-c|x --{name} {escaped} --port 8", "sh|-c|{NAME}={escaped} x", "sh|-c|x {NAME}+={escaped}"]),
    (LINE.replace("'", ""), ["sh|-c|curl -H {header} http://h"]),
    (ODD.replace('"', "").replace("\\", ""), ['sh|-c|docker run -e "{NAME}={secret}" i']),
) for form in forms]  # fmt: skip


def written(form: str, name: str, spelled: Callable[[str], str], secret: str) -> list[str]:
    """The arguments."""
    variable, name = name.replace("-", "_").upper(), spelled(name)
    values = {
        "name": name, "NAME": variable, "secret": secret,
        "object": json.dumps({"m": 1, name: secret, "n": "x"}),
        "nested": json.dumps(json.dumps({"env": {"m": "x", variable: secret}}, separators=(",", ":"))),
        "python": repr({"m": 1, "env": {name: secret}}),
        "listed": json.dumps({"env": [{"name": variable, "value": secret}, {"name": "m"}]}, ensure_ascii=False),
        "words": json.dumps(["x", f"--{name}", secret, f"--{name}={secret}", "-v"]),
        "quoted": shlex.quote(secret), "login": shlex.quote(f"user:{secret}"),
        "pair": shlex.quote(f"{variable}={secret}"), "option": shlex.quote(f"--{name}={secret}"),
        "header": shlex.quote(f"Authorization: Bearer {secret}"), "escaped": re.sub(r"(\W)", r"\\\1", secret),
    }  # fmt: skip
    return [word.format_map(values) for word in form.split("|")]


#: What may stand beside it; some of it brings a secret to where a command line is cut.
OTHERS = [[], ["-m", "vllm"], ["--port", "8"], ["-v"], ["it's"], *(["y" * size] for size in range(8085, 8180, 12))]


def shown(before: list[str], hiding: list[str], after: list[str]) -> str:
    return redacted(["python3", *before, *hiding, *after], limit=100_000)


@pytest.mark.case("D5")
@pytest.mark.parametrize(("form", "odd"), FORMS, ids=[form for form, _ in FORMS])
def test_no_secret_with_anything_odd_in_it_is_left_in_a_command_line(form: str, odd: str) -> None:
    for number, mark in enumerate(odd):
        for spelled in SPELLED:
            for last in (mark, mark + " ") if " " in odd else (mark,):
                secret = f"{WORDS[0]}{mark}{WORDS[1]}{last}{WORDS[2]}"
                hiding = written(form, NAMES[number % len(NAMES)], spelled, secret)
                assert not leaked(shown([], hiding, ["-v"])), hiding
        for before in OTHERS if mark in " '" else OTHERS[:5]:
            assert not leaked(shown(before, hiding, [])), hiding


def _between(odd: str) -> st.SearchStrategy[str]:
    """Some of it, or anything that is not in question."""
    forbidden = "".join(each for each in ODD if each not in odd)
    other = st.characters(exclude_categories=(), exclude_characters="\0" + forbidden)
    return st.lists(st.sampled_from(odd) | other, max_size=3).map("".join)


SECRETS = st.sampled_from(FORMS).flatmap(
    lambda form: st.builds(
        lambda name, spelled, one, other: written(
            form[0], name, spelled, f"{WORDS[0]}{one}{WORDS[1]}{other}{WORDS[2]}"
        ),
        st.sampled_from(NAMES),
        st.sampled_from(SPELLED),
        *[st.text(form[1], max_size=3) if form[1] in (IN_URL, IN_QUERY) else _between(form[1])] * 2,
    )
)


@pytest.mark.case("D5")
@given(st.sampled_from(OTHERS[:5]), SECRETS, st.sampled_from(OTHERS[:5]))
def test_no_secret_of_any_form_is_left_in_a_command_line(
    before: list[str], hiding: list[str], after: list[str]
) -> None:
    assert not leaked(shown(before, hiding, after))
