"""A command line without its secrets.

Knows how command lines carry secrets. Where something may or may not be a secret, it is one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Optional

from .text import printable

REDACTED = "[redacted]"

#: How much of a command line is looked at: its author is not our friend, and may have made it 2 MiB long.
_WINDOW = 8192

_NAME = re.compile(r"(?<![\w.-])([-.]*)(\w[\w.-]*)")
_SECRET = re.compile(
    r"key|token|secret|passw|passphrase|pwd|credential|auth|bearer|cookie|jwt|webhook|signature"
    r"|(?:pass|pw)(?=$|[-_.])|(?:^|[-_.])(?:creds?|dsn|sig|t?otp)(?=$|[-_.])",
    re.IGNORECASE,
)
#: Words that only look like one of the above; they are taken out of a name before it is judged.
_HARMLESS = re.compile(
    r"(?:de)?tokeni[sz](?:e|ed|ers?|ing|ation)(?![a-z])|authors?(?![a-z])"
    r"|monkey|keyboard|keyring|bypass|compass|(?-i:^(?:OLD)?PWD$)",
    re.IGNORECASE,
)
_TOKENS = re.compile(r"tokens(?![a-z])", re.IGNORECASE)
_COUNT = re.compile(r"\d{1,9}[kKmM]?")
_FILE = re.compile(r"(?:file|path|dir|map)$", re.IGNORECASE)
#: Options of this kind take no value, unless what follows is no option.
_FLAG = re.compile(r"(?:allow|disable|enable|no|require|return|skip|use|with|without)[-_]", re.IGNORECASE)

_ASSIGNED = re.compile(r"(?:\\*[\"'])?\]?\s*[+?]?[=:]+>?\s*")
_FOLLOWED = re.compile(r"\\*[\"']?[\s,=:]+")
_WORD = re.compile(r"[^\s,;&\"'}\])]*")
_QUOTE = re.compile(r"\\*[\"']")
_AROUND = re.compile(r"\\*[\"']\Z")
#: The name stands in a list of names and values: {"name": "HF_TOKEN", "value": "..."}.
_LISTED = re.compile(r"\\*[\"']\s*,")
#: What has spaces around it is no shell's assignment, and its value may have spaces too, as a header's.
_SPACED = re.compile(r":|\s=")

#: A name alone in front of the "@" is hidden as well: it may be a token. The second form is a password with a slash.
_URL = re.compile(r"://(?:[^\s/?#]*|[^\s/@?#]*:[^\s@]{0,256})@")
_LOGIN = re.compile(r"-u|--(?:proxy-)?user")
_PAIR = re.compile(r"\\*[\"']?(?!\d)[^\s:\"']*:(?!//)")
_SHAPE = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{8,}|gh[a-z]_[A-Za-z0-9]{8,}|(?:github|dckr)_pat_\w{8,}|npm_[A-Za-z0-9]{16,}"
    r"|(?:sk|pk|rk|gsk|nvapi|glpat|xox[a-z])[-_][\w-]{8,}|pypi-AgE[\w-]{8,}|AIza[\w-]{20,}|(?:AKIA|ASIA)[A-Z0-9]{12,}"
    r"|eyJ[\w-]{6,}(?:\.[\w-]*)*|(?i:bearer|basic)\s+[\w.~+/=-]{8,}|hooks\.slack\.com/services/\S+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?s:.)*)"
)


def redacted(argv: Sequence[str], limit: int = 2000) -> str:
    """The command line as one printable line, every secret in it replaced by ``[redacted]``."""
    shown: list[str] = []
    expecting: Optional[str] = None
    before = ""
    for argument in _bounded(argv):
        login = _LOGIN.fullmatch(before) and ":" in argument and not _COUNT.match(argument)
        if login or (expecting is not None and _is_value(expecting, argument)):
            shown.append(REDACTED)
            # What was hidden may have been an option after all, whose value follows.
            expecting = _scan(argument)[1] if argument.startswith("-") else None
        else:
            text, expecting = _scan(argument)
            shown.append(text)
        before = argument
    return printable(" ".join(shown), limit)


def _bounded(argv: Sequence[str]) -> Iterable[str]:
    left = _WINDOW
    for argument in argv:
        if len(argument) > left:
            # The cut may leave half a secret, which nothing would recognise: the whole last word goes.
            word = max(argument.rfind(end, 0, left) for end in " \t\n")
            yield argument[: word + 1] + "…"
            return
        yield argument
        left -= len(argument) + 1


def _is_secret(name: str) -> bool:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return _SECRET.search(_HARMLESS.sub("", words)) is not None


def _is_value(name: str, value: str) -> bool:
    """Whether ``value``, which follows a name that sounds secret, has to be hidden."""
    if value.startswith("-") and _FLAG.match(name):
        return False
    if _COUNT.fullmatch(value) and not _is_secret(_TOKENS.sub("", name)):
        return False
    if value.startswith(("/", "./", "~/")) and _FILE.search(name):
        return False
    return value.lower() not in ("true", "false", "null", "none")


def _scan(argument: str) -> tuple[str, Optional[str]]:
    """One argument without its secrets, and the name at its end whose secret is the next argument, if there is one."""
    text = _SHAPE.sub(REDACTED, _URL.sub(f"://{REDACTED}@", argument))
    shown: list[str] = []
    done = position = head = 0
    while True:
        found = _NAME.search(text, position)
        if found is None:
            return "".join(shown) + text[done:], None
        position = found.end()
        assigned = text.startswith("=", position)
        # In "--env=NAME=a b" nothing but the end of the argument ends the value; inside a script a space does.
        whole = assigned and found.start() == head
        head = position + 1 if whole else -1
        name = found.group(2)
        login = _LOGIN.fullmatch(found.group()) is not None
        if not login and not _is_secret(name):
            continue
        option = "-" in found.group(1)
        separator = (_FOLLOWED if option else _ASSIGNED).match(text, position)
        if separator is None or separator.end() == len(text):
            if not option and _LISTED.match(text, position):
                return "".join(shown) + text[done:position] + REDACTED, None
            if login or (separator is None and (not option or position < len(text))):
                continue
            return "".join(shown) + text[done:], None if assigned else name
        start = separator.end()
        value = text[start:] if whole else _WORD.match(text, start).group()  # type: ignore[union-attr]
        if not (_PAIR.match(text, start) if login else _is_value(name, value)):
            position = start
            continue
        position = len(text) if whole else _end_of_value(text, found.start(), separator)
        shown += (text[done:start], REDACTED)
        done = position


def _end_of_value(text: str, name: int, separator: re.Match[str]) -> int:
    """Where the value ends that ``separator`` parts from the name that begins at ``name``; in doubt at the end of the
    argument.

    After a colon, as in a header, it may contain spaces; a quotation mark that was open before it ends it.
    """
    start = separator.end()
    position = start + len(REDACTED) if text.startswith(REDACTED, start) else start
    if text[position : position + 1] in ("{", "[", "("):
        return len(text)
    spaced = _SPACED.search(separator.group()) is not None
    mark = _QUOTE.match(text, start)
    header = spaced and mark is None
    around = _AROUND.search(text, max(0, name - 16), name)
    if not spaced and around is not None and _QUOTE.search(separator.group()) is None:
        # In 'NAME=a b' the marks are around both.
        mark = around
        position = _after(mark.group(), text, position)
    own = "" if mark is None else mark.group()
    while position < len(text):
        quote = _QUOTE.match(text, position)
        if quote is not None:
            if quote.group() != own and position > start and text.count(quote.group(), 0, start) % 2:
                return position
            position = _after(quote.group(), text, quote.end())
        elif text[position] == "\n" or (text[position].isspace() and not header):
            return position
        else:
            # A backslash makes the next one, be it a space, a part of the word.
            position += 2 if text[position] == "\\" else 1
    return position


def _after(mark: str, text: str, position: int) -> int:
    """What is behind the next mark of this kind, or the end of the text."""
    closing = re.compile(r"(?<!\\)" + re.escape(mark)).search(text, position)
    return len(text) if closing is None else closing.end()
