"""The words of a command in a unit file: how systemd splits them, and how one has to be written. Pure.

As systemd.service(5) and systemd.syntax(7) have it. Specifiers such as ``%i`` are left as they stand: which value they
have is systemd's to say.
"""

from __future__ import annotations

import re

_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "s": " "}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{3})|(.))", re.DOTALL)
#: What needs no quotation marks. A semicolon that stands alone would end the command.
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./$!{}~^*?()-]+")
_BLANK = " \t\n\r"


def split(value: str) -> list[str]:
    """The words of a command. Quotes count anywhere and escapes everywhere. Raises ValueError where a quote is open."""
    found: list[str] = []
    word = quote = ""
    begun = False
    position = 0
    while position < len(value):
        char = value[position]
        position += 1
        if char == "\\":
            escape = _ESCAPE.match(value, position - 1)
            if escape is None:
                raise ValueError("it ends with a backslash")
            word, begun, position = word + _unescaped(escape), True, escape.end()
        elif quote and char != quote:
            word += char
        elif char in "\"'":
            quote, begun = "" if quote else char, True
        elif char in _BLANK:
            found += [word] if begun else []
            word, begun = "", False
        else:
            word, begun = word + char, True
    if quote:
        raise ValueError("a quotation mark is open")
    return [*found, word] if begun else found


def _unescaped(escape: re.Match[str]) -> str:
    code = escape[1] or escape[2] or escape[3]
    if code:
        return chr(int(code, 16))
    if escape[4]:
        return chr(int(escape[4], 8))
    # What is no escape is said as it stands, backslash and all.
    return _ESCAPES.get(escape[5], escape[5] if escape[5] in "\\\"'" else escape[0])


def quoted(word: str) -> str:
    """One word as it stands in a unit file. ``%`` and ``$`` are left to mean what they do there."""
    if _PLAIN.fullmatch(word):
        return word
    return '"' + "".join(_escaped(char) for char in word) + '"'


def _escaped(char: str) -> str:
    if char in '\\"':
        return f"\\{char}"
    return char if char.isprintable() else "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogateescape"))


def literal(word: str) -> str:
    """A word that systemd has already expanded, so that a ``%`` in it is no specifier."""
    return word.replace("%", "%%")


def expands_to(written: str, value: str) -> bool:
    """Whether a word with its specifiers may have become this value: what they stand for is not known here."""
    parts = re.findall(r"%.|[^%]+|%$", written, re.DOTALL)
    pattern = "".join("%" if part == "%%" else ".*" if part.startswith("%") else re.escape(part) for part in parts)
    return re.fullmatch(pattern, value, re.DOTALL) is not None
