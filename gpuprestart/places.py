"""Where each key of a TOML text stands, for faults that the parser finds too late to place.

Knows just enough TOML to tell keys from values in a text that a real parser has accepted; it validates nothing, and its
answers on any other text are only a good guess. A key written with escapes is found by its table.
"""

from __future__ import annotations

import re
import sys
from typing import Any, Optional, Union

#: The way to a key: names, and positions in arrays. ``("rule", 2, "match", "user")`` is ``rule[2].match.user``.
KeyPath = tuple[Union[str, int], ...]

#: No key that we know lies deeper. Without a bound, one key of thirty thousand dots would cost gigabytes.
_DEPTH = 8

#: No line that can be meant has so many.
_DOTS = 1000

_LINE_STRING = r'"(?:[^"\\\n]|\\[^\n])*"' r"|'[^'\n]*'"
#: One that is not closed ends where its line or the text does, so that no text has its rest read again at every mark.
_STRING = (
    r'"""(?:[^\\]|\\.)*?(?:"{3,5}|\\?\Z)' r"|'''.*?(?:'{3,5}|\Z)"
    r'|"(?:[^"\\\n]|\\[^\n])*(?:"|\\?(?=\n|\Z))' r"|'[^'\n]*'?"
)  # fmt: skip
# Compiled where they are used: nobody looks for the line of a fault in a policy that has none.
_TOKEN = rf"(?P<skip>[ \t\r]+|#[^\n]*)|(?P<word>{_STRING}|[^\s\[\]{{}}=,.#\"']+)|(?P<mark>[\[\]{{}}=,.\n])"
_HEADER = rf"(\[\[?)((?:{_LINE_STRING}|[^\[\]\n\"'])*)\]\]?"
_PART = rf"{_LINE_STRING}|[^\s.\"']+"
_BARE = r"[A-Za-z0-9_-]+"


class Unparsable(ValueError):
    """The text is no TOML; ``line`` is where the parser, or else a look at the text, finds fault."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(what)
        self.line = line


def load(text: str) -> dict[str, Any]:
    """The TOML document, or an Unparsable."""
    # Imported here: without any policy file, or with that of the package, in which all is commented out, a start does
    # not pay for a parser.
    if all(line.isprintable() and (not line or line.startswith("#")) for line in text.split("\n")):
        return {}
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    # A parser's time grows with the square of the parts of a key: seconds for thirty thousand of them.
    for number, line in enumerate(text.split("\n") if text.count(".") > _DOTS else (), 1):
        if line.count(".") > _DOTS:
            raise Unparsable(number, f"more than {_DOTS} dots in one line")
    try:
        # Some editors begin a file with a byte order mark; it says nothing.
        document: dict[str, Any] = tomllib.loads(text[1:] if text.startswith("\ufeff") else text)
        return document
    except RecursionError:
        raise Unparsable(Places(text).deepest, "brackets are nested too deeply") from None
    # Not TOMLDecodeError alone: an integer of more than 4300 digits is a plain ValueError.
    except ValueError as error:
        message = str(error)
    place = re.search(r" \(at (?:line (\d+), (column \d+)|end of document)\)$", message)
    if place is None:
        digits = re.search(r"[0-9_]{4000}", text)
        what = message if digits is None else "a number has too many digits"
        raise Unparsable(text.count("\n", 0, digits.start() if digits is not None else 0) + 1, what)
    if place[1] is None:
        raise Unparsable(text.rstrip("\n").count("\n") + 1, f"{message[: place.start()]}, at the end of the file")
    raise Unparsable(int(place[1]), f"{message[: place.start()]}, {place[2]}")


def dotted(path: KeyPath) -> str:
    """The path as people write it, odd keys in quotes; positions count from 0."""
    words = ""
    for part in path:
        if isinstance(part, int):
            words += f"[{part}]"
        else:
            words += ("." if words else "") + (part[:60] if re.fullmatch(_BARE, part, re.ASCII) else repr(part[:60]))
    return words


class Places:
    """The lines of the keys and table headers of one text, counted from 1."""

    def __init__(self, text: str) -> None:
        self._lines: dict[KeyPath, int] = {}
        self._elements: dict[KeyPath, int] = {}
        self._table: KeyPath = ()
        self._line = 1
        #: The line at which brackets are nested most deeply.
        self.deepest = 1
        self._scan(text)

    def line(self, path: KeyPath) -> int:
        """The line of this key, else of what it stands in."""
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path, 1)

    def _note(self, path: KeyPath) -> None:
        for length in range(1, len(path) + 1):
            self._lines.setdefault(path[:length], self._line)

    def _header(self, opening: str, words: str) -> None:
        path: KeyPath = ()
        parts = [_unquoted(part) for part in re.findall(_PART, words)][:_DEPTH]
        for number, part in enumerate(parts, 1):
            path += (part,)
            if opening == "[[" and number == len(parts):
                self._elements[path] = self._elements.get(path, 0) + 1
            # [rule.match] speaks of the latest [[rule]].
            if path in self._elements:
                path += (self._elements[path] - 1,)
        self._table = path
        self._note(path)

    def _scan(self, text: str) -> None:
        tokens, headers = re.compile(_TOKEN, re.DOTALL), re.compile(_HEADER)
        at = 0
        key: list[str] = []
        value: Optional[KeyPath] = None
        # What is open around the value: an inline table's path, or an array's path and the position of its element.
        around: list[tuple[KeyPath, Optional[int]]] = []
        depth = 0
        while at < len(text):
            if value is None and not around and not key and text[at] == "[":
                header = headers.match(text, at)
                if header is not None:
                    self._header(header[1], header[2])
                    at = header.end()
                    continue
            token = tokens.match(text, at)
            at = token.end() if token is not None else at + 1
            word = token[0] if token is not None else ""
            kind = token.lastgroup if token is not None else "skip"
            inside, position = around[-1] if around else (self._table, None)
            if value is None and kind == "word":
                key.append(_unquoted(word))
            elif value is None and word == "=":
                value = (*inside, *key)[:_DEPTH]
                key = []
                self._note(value)
            elif value is not None and word in ("[", "{"):
                around.append((value, 0 if word == "[" else None))
                value = (*value, 0)[:_DEPTH] if word == "[" else None
                if len(around) > depth:
                    depth, self.deepest = len(around), self._line
            elif word in ("]", "}") and around:
                value = around.pop()[0]
                key = []
            elif word == "," and around:
                around[-1] = (inside, None if position is None else position + 1)
                value = None if position is None else (*inside, position + 1)[:_DEPTH]
            elif word == "\n" and not around:
                value = None
                key = []
            self._line += word.count("\n")


def _unquoted(word: str) -> str:
    return word[1:-1] if word[:1] in ("'", '"') else word
