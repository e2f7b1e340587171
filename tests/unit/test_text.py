"""What may be shown: nothing that a terminal obeys, no secret, no figure that lies."""

from __future__ import annotations

import time
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprestart.model import MIB
from gpuprestart.redaction import REDACTED, redacted
from gpuprestart.text import amounts, mib, printable

S = "s3cr3t-V4lue"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("VLLM::Worker_TP0", "VLLM::Worker_TP0"),
        ("été 模型", "été 模型"),
        ("", ""),
        ("a\nPRIORITY=0", "a\\x0aPRIORITY=0"),
        ("\x1b[31mred\x07\x7f", "\\x1b[31mred\\x07\\x7f"),
        ("\x9b31m\x85", "\\x9b31m\\x85"),
        ("\udcff\udc80", "\\xff\\x80"),
        ("\ud800", "\\ud800"),
        ("user\u202egpj.exe\u2066\u200b\ufeff", "user\\u202egpj.exe\\u2066\\u200b\\ufeff"),
        ("a\u2028b\u2029", "a\\u2028b\\u2029"),
        ("\U000e0041", "\\U000e0041"),
        ("sglang\\x2dqwen.service", "sglang\\x2dqwen.service"),
    ],
)
def test_printable(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize(
    ("text", "limit", "shown"),
    [
        ("abcdef", 6, "abcdef"),
        ("abcdefg", 6, "abcde…"),
        ("abc\n", 6, "abc…"),
        ("abc\n", 7, "abc\\x0a"),
        ("\n\n", 8, "\\x0a\\x0a"),
        ("\n\n", 7, "\\x0a…"),
        ("\n\n", 4, "…"),
        ("x" * 10_000_000, 3, "xx…"),
    ],
)
def test_printable_is_bounded_and_never_cuts_an_escape(text: str, limit: int, shown: str) -> None:
    assert printable(text, limit) == shown


@given(st.text(st.characters(exclude_categories=())), st.integers(1, 60))
def test_printable_never_lets_a_control_through(text: str, limit: int) -> None:
    shown = printable(text, limit)
    assert len(shown) <= limit
    for char in shown:
        assert unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"), repr(char)


@given(st.binary(max_size=40))
def test_printable_takes_any_bytes_that_a_process_may_be_called(raw: bytes) -> None:
    printable(raw.decode("utf-8", "surrogateescape")).encode("utf-8")


@pytest.mark.case("D5")
@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["x", "--api-key", S], "x --api-key [redacted]"),
        (["x", "--api-key=" + S, "-v"], "x --api-key=[redacted] -v"),
        (["x", "--api-key"], "x --api-key"),
        (["x", "--api-key", "-" + S, "-v"], "x --api-key [redacted] -v"),
        (["x", "--API_KEY", S], "x --API_KEY [redacted]"),
        (["x", "---apiKey", S], "x ---apiKey [redacted]"),
        (["x", "--hf-token", f"a {S}"], "x --hf-token [redacted]"),
        (["x", "--password", "12345"], "x --password [redacted]"),
        (["x", "--ssl-keyfile-password=a b"], "x --ssl-keyfile-password=[redacted]"),
        (["x", "--http.auth-file", "/etc/auth"], "x --http.auth-file /etc/auth"),
        (["x", "--allow-credentials", "--api-key", S], "x --allow-credentials --api-key [redacted]"),
        (["x", "--token", "--api-key", S], "x --token [redacted] [redacted]"),
        (["HF_TOKEN=" + S], "HF_TOKEN=[redacted]"),
        (["x", "-eHF_TOKEN=" + S], "x -eHF_TOKEN=[redacted]"),
        (["x", "--env", f"HF_TOKEN=a {S}"], "x --env HF_TOKEN=[redacted]"),
        (["x", f"--env=HF_TOKEN=a {S}"], "x --env=HF_TOKEN=[redacted]"),
        (["x", "dbPass=" + S], "x dbPass=[redacted]"),
        (["x", "awsSigOld=" + S], "x awsSigOld=[redacted]"),
        (["x", "--api-key-file", S], "x --api-key-file [redacted]"),
        (["x", "--token", "/" + S], "x --token [redacted]"),
        (["x", "2FA_TOKEN=" + S], "x 2FA_TOKEN=[redacted]"),
        (["x", f"user[password]={S}"], "x user[password]=[redacted]"),
        (["x", f"https://u:{S}@h/p"], "x https://[redacted]@h/p"),
        (["x", f"https://{S}@h/p"], "x https://[redacted]@h/p"),
        (["x", f"--db=redis://:a/{S}@h/0"], "x --db=redis://[redacted]@h/0"),
        (["x", f"http://h/?model=m&api_key={S}"], "x http://h/?model=m&api_key=[redacted]"),
        (["curl", "-u", "u:" + S], "curl -u [redacted]"),
        (["docker", "run", "--user", "1000:1000"], "docker run --user 1000:1000"),
        (["curl", "-H", f"Authorization: Bearer {S}"], "curl -H Authorization: [redacted]"),
        (["curl", "-H", f"X-Custom: bearer {S}"], "curl -H X-Custom: [redacted]"),
        (["curl", "-H", "Authorization:", f"Basic {S}"], "curl -H Authorization: [redacted]"),
        (["curl", f"--header=Cookie: a=b; c={S}"], "curl --header=Cookie: [redacted]"),
        (["sh", "-c", f"vllm --api-key {S} --port 8"], "sh -c vllm --api-key [redacted] --port 8"),
        (["sh", "-c", f"vllm --api-key 'a {S}' --port 8"], "sh -c vllm --api-key [redacted] --port 8"),
        (["sh", "-c", f'export HF_TOKEN="a {S}"; vllm'], "sh -c export HF_TOKEN=[redacted] vllm"),
        (["sh", "-c", f'curl -H "X-Api-Key: a {S}" http://h'], 'sh -c curl -H "X-Api-Key: [redacted]" http://h'),
        (["x", f'{{"api_key": "a {S}", "m": 1}}'], 'x {"api_key": [redacted] "m": 1}'),
        (["x", f"{{'api_key': 'a {S}', 'm': 1}}"], "x {'api_key': [redacted] 'm': 1}"),
        (["x", f'{{\\"api_key\\": \\"a {S}\\", \\"m\\": 1}}'], 'x {\\"api_key\\": [redacted] \\"m\\": 1}'),
        (["x", f'{{"api_key": "a\\" {S}", "m": 1}}'], 'x {"api_key": [redacted] "m": 1}'),
        (["x", f'{{"auth": {{"u": "x", "v": "{S}"}}}}'], 'x {"auth": [redacted]'),
        (["sh", "-c", f"x --auth {{u: {S}}}"], "sh -c x --auth [redacted]"),
        (["sh", "-c", f"echo \"it's\"; x --api-key 'a {S}'"], 'sh -c echo "it\'s"; x --api-key [redacted]'),
        (
            ["sh", "-c", f'curl -H "Authorization: Bearer {S}" http://h'],
            'sh -c curl -H "Authorization: [redacted]" http://h',
        ),
        (["x", f'["--api-key", "{S}"]'], 'x ["--api-key", [redacted]'),
        (["x", "hf_" + "aB3" * 11], "x [redacted]"),
        (["x", "--x=sk-proj-abcdef123"], "x --x=[redacted]"),
        (["x", "ghp_" + "aB3" * 12], "x [redacted]"),
        (["x", "nvapi-" + "aB3" * 12], "x [redacted]"),
        (["x", "eyJhbGciOiJI.eyJzdWIi.a-b_c"], "x [redacted]"),
        (["x", "AKIAIOSFODNN7EXAMPLE"], "x [redacted]"),
        (["x", f"-----BEGIN RSA PRIVATE KEY-----\n{S}"], "x [redacted]"),
    ],
)
def test_secrets_are_redacted(argv: list[str], shown: str) -> None:
    assert redacted(argv) == shown


@pytest.mark.parametrize(
    "line",
    [
        "python3 -m sglang.launch_server --model-path /m/qwen --tokenizer-path /m/tok --tp 8 --port 30000",
        "vllm serve q --tokenizer-mode auto --max-num-batched-tokens 8192 --max-total-tokens=64k --skip-tokenizer-init",
        "vllm --return-tokens-as-token-ids --host 0.0.0.0 --kv-cache-dtype fp8 --author me --monkey-patch x",
        "x --ssl-keyfile /etc/ssl/x.pem TOKENIZERS_PARALLELISM=false PWD=/srv git@github.com:a/b",
        "VLLM::EngineCore",
    ],
)
def test_what_is_no_secret_stays_readable(line: str) -> None:
    assert redacted(line.split(" ")) == line
    assert redacted(["sh", "-c", line]) == "sh -c " + line


def test_a_value_that_says_nothing_stays_readable() -> None:
    assert redacted(["x", "--auth", "none", '{"token": null, "m": 1}']) == 'x --auth none {"token": null, "m": 1}'
    assert redacted(["docker", "-e", "API_KEY=", "image"]) == "docker -e API_KEY= image"


def test_a_number_of_tokens_is_no_secret_in_json_either() -> None:
    assert redacted(["x", '{"max_tokens": 4096, "model": "m"}']) == 'x {"max_tokens": 4096, "model": "m"}'


@pytest.mark.case("D5")
def test_argv_cannot_forge_lines_or_colours() -> None:
    shown = redacted(["x", "a\nPRIORITY=0\nMESSAGE=all is well", "\x1b[2J", "\udcfe"])
    assert shown == "x a\\x0aPRIORITY=0\\x0aMESSAGE=all is well \\x1b[2J \\xfe"


def test_a_cut_never_leaves_half_a_secret() -> None:
    # The cut falls into the token, and what is left of it is too short to be known as one.
    for length in range(8192 - 40, 8192 + 2):
        shown = redacted(["y" * (length - 1) + " hf_" + "aB3" * 11], limit=100_000)
        assert "hf_" not in shown, length
        shown = redacted(["y" * (length - 1) + f' --x="https://u:{S}@h/"'], limit=100_000)
        assert "s3c" not in shown, length


def test_the_last_of_many_arguments_is_cut() -> None:
    assert redacted(["x", "y" * 9000]) == "x …"
    assert redacted(["x", "one two" + "y" * 9000]) == "x one …"
    assert len(redacted(["x"] * 100_000)) == 2000


@pytest.mark.parametrize(
    "piece",
    [
        "--key ",
        "key=",
        "-",
        "a-",
        "@://a:",
        "'key:",
        "\\",
        "eyJ",
        'key=\\"',
        "x",
        "basic ",
        " ",
        "key" + " " * 99,
        "key['",
    ],
)
def test_a_hostile_argv_takes_bounded_time(piece: str) -> None:
    argv = [(piece * 131072)[:131072] for _ in range(8)]
    argv[1:1] = [(piece * 8190)[:8100]]
    began = time.perf_counter()
    redacted(argv)
    redacted(argv[1:])
    assert time.perf_counter() - began < 0.5


@pytest.mark.parametrize(("amount", "shown"), [(0, "0 MiB"), (1, "1 MiB"), (MIB, "1 MiB"), (MIB + 1, "2 MiB")])
def test_mib_rounds_up(amount: int, shown: str) -> None:
    assert mib(amount) == shown


@pytest.mark.parametrize(
    ("used", "limit", "shown"),
    [
        (1523 * MIB, 64 * MIB, ("1523 MiB", "64 MiB")),
        (64 * MIB, 64 * MIB, ("64 MiB", "64 MiB")),
        (64 * MIB + 1, 64 * MIB, ("65 MiB", "64 MiB")),
        (int(64.5 * MIB), int(64.3 * MIB), ("64.5 MiB", "64.3 MiB")),
        (int(64.2 * MIB), int(64.3 * MIB), ("65 MiB", "65 MiB")),
    ],
)
def test_amounts(used: int, limit: int, shown: tuple[str, str]) -> None:
    assert amounts(used, limit) == shown


@given(st.integers(0, 2**38), st.integers(-3, 3))
def test_what_is_over_the_limit_reads_so_and_nothing_else_does(limit: int, more: int) -> None:
    used = max(0, limit + more)
    left, right = (float(text.split()[0]) for text in amounts(used, limit))
    assert (left > right) == (used > limit)


def test_redacted_marks_what_it_took() -> None:
    assert REDACTED == "[redacted]"
