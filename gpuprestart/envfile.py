"""An EnvironmentFile= as systemd reads it (systemd.exec(5)). Pure.

It reads assignments and knows nothing of which of them matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_COMMENT = re.compile(r"[ \t\r\n]+|[#;][^\r\n]*")
#: A line that begins with "=" has it in its name.
_KEY = re.compile(r"(=?[^=\r\n]*)(=?)")
_QUOTED = re.compile(r"""[ \t]*(?:'([^']*)(?:'|\Z)|"((?:\\.|[^"\\])*)(?:"|\\?\Z))""", re.DOTALL)
_PLAIN = re.compile(r"[ \t]*((?:\\.|[^\\\r\n])*)", re.DOTALL)


def assignments(text: str) -> Iterator[tuple[str, str]]:
    """Name and value of each assignment in an EnvironmentFile=, as systemd.exec(5) describes them: quotes and a
    backslash at the end of a line carry a value over to the next line, and only at its beginning do quotes count."""
    position = 0
    while position < len(text):
        comment = _COMMENT.match(text, position)
        if comment is not None:
            position = comment.end()
            continue
        name = _KEY.match(text, position)
        assert name is not None
        position = name.end()
        if not name[2]:
            continue
        value = ""
        while (quoted := _QUOTED.match(text, position)) is not None:
            position = quoted.end()
            value += quoted[1] if quoted[2] is None else re.sub(r'\\(\n|["\\`$])', _unescaped, quoted[2])
        plain = _PLAIN.match(text, position)
        assert plain is not None
        position = plain.end()
        # Blanks at the end do not count, but for one that is escaped, and those before a backslash that ends the file.
        bare = plain[1] if text[position:] == "\\" else plain[1].rstrip(" \t")
        if bare != plain[1] and (len(bare) - len(bare.rstrip("\\"))) % 2:
            bare = plain[1][: len(bare) + 1]
        yield name[1].strip(" \t"), value + re.sub(r"\\(.)", _unescaped, bare, flags=re.DOTALL)


def _unescaped(match: re.Match[str]) -> str:
    return "" if match[1] in "\r\n" else match[1]
