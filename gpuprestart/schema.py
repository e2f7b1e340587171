"""Every key of a policy file and what may be said under it: TOML text in, checked plain values and faults out.

Knows one file at a time, and goes on after a fault, so that one run tells them all. Refuses to know the defaults, which
file wins over which, and what the machine looks like; a number of a GPU is only a word here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Callable, Optional

from .places import KeyPath, Places, Unparsable, dotted, load
from .quantities import duration, size

#: Returns what the value means; a ValueError says what is wrong with it and, in brackets, what is allowed.
Reader = Callable[[object], Any]

#: Long enough for any command line that can be meant, short enough that compiling it takes no time.
_PATTERN_LENGTH = 1000
#: (uid_t) -1 means "no user" to the kernel.
_UIDS = range(0, 2**32 - 1)
_SELECT = '"unit", "all", or a list such as ["GPU-8932f937", "0000:1b:00.0", 2]'


def _kind(value: object) -> str:
    # bool comes first, because to Python it is an int as well.
    for kind, word in (
        (bool, "a boolean"),
        (int, "an integer"),
        (float, "a float"),
        (str, "a string"),
        (list, "an array"),
        (dict, "a table"),
    ):
        if isinstance(value, kind):
            return word
    return "a date or time"


def _string(value: object, allowed: str = "a string") -> str:
    if not isinstance(value, str):
        raise ValueError(f"is {_kind(value)} ({allowed})")
    # An empty glob, prefix or pattern is a slip, and as a prefix or pattern it would match everybody.
    if not value:
        raise ValueError(f"is empty ({allowed})")
    return value


def _word(value: object) -> str:
    word = _string(value)
    if len(word) > 256 or not word.isprintable():
        raise ValueError(f"{word[:60]!r} is too long or has control characters (up to 256 printable ones)")
    return word


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"is {_kind(value)} (true or false)")
    return value


def _duration(value: object) -> float:
    return duration(_string(value, 'a string such as "10 s"'))


def _positive(value: object) -> float:
    return duration(_string(value, 'a string such as "10 s"'), positive=True)


def _size(value: object) -> Any:
    return size(_string(value, 'a string such as "64 MiB"'))


def _one_of(*words: str) -> Reader:
    allowed = " or ".join(f'"{word}"' for word in words)

    def read(value: object) -> str:
        word = _string(value, allowed)
        if word not in words:
            raise ValueError(f"{word[:60]!r} is not known ({allowed})")
        return word

    return read


def _select(value: object) -> Any:
    if value in ("unit", "all"):
        return value
    if not isinstance(value, list):
        what = f"{value[:60]!r} is not known" if isinstance(value, str) else f"is {_kind(value)}"
        raise ValueError(f"{what} ({_SELECT})")
    if not value:
        raise ValueError(f"is an empty list ({_SELECT})")
    return tuple(_gpu(number, entry) for number, entry in enumerate(value))


def _gpu(number: int, entry: object) -> str:
    if isinstance(entry, int) and not isinstance(entry, bool):
        # No machine has so many; a longer integer could not even be printed.
        if not 0 <= entry < 100_000:
            raise ValueError(f"entry [{number}] is no index of a GPU (an integer from 0)")
        return str(entry)
    if not isinstance(entry, str) or not entry.strip():
        raise ValueError(f"entry [{number}] is {'empty' if isinstance(entry, str) else _kind(entry)} ({_SELECT})")
    return entry


def _user(value: object) -> Any:
    allowed = "a user's name or uid"
    if isinstance(value, int) and not isinstance(value, bool):
        uid = value
    else:
        name = _word(value) if isinstance(value, str) else _string(value, allowed)
        if re.fullmatch(r"[0-9]{1,10}", name, re.ASCII) is None:
            return name
        uid = int(name)
    if uid not in _UIDS:
        raise ValueError(f"is no uid (0 to {_UIDS[-1]})")
    return uid


def _regex(value: object) -> re.Pattern[str]:
    import warnings

    text = _string(value, "a regular expression")
    if len(text) > _PATTERN_LENGTH:
        raise ValueError(f"is a pattern of {len(text)} characters (at most {_PATTERN_LENGTH})")
    try:
        # What Python may one day read otherwise is no fault of today, and a warning would only litter the journal.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{text[:60]!r} is no regular expression: {error} (Python's syntax)") from None


def _as_it_is(value: object) -> object:
    return value


def _bytes(value: object) -> int:
    amount = _size(value)
    if amount.percent is not None:
        raise ValueError(f'{str(value)[:60]!r} is a share, and of what is not known here (such as "5 GiB")')
    return int(amount.bytes)


def _number(value: object, allowed: range, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"is {_kind(value)} ({what})")
    if value not in allowed:
        raise ValueError(f"is out of range ({what})")
    return value


def _count(value: object) -> int:
    return _number(value, range(100_000), "an integer, or 0 where any number will do")


def _list_of(read: Reader, what: str) -> Reader:
    """A list of such values, which may be empty: an overlay takes away with it what the site asks for."""

    def read_all(value: object) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise ValueError(f"is {_kind(value)} (a list of {what})")
        found = []
        for number, entry in enumerate(value):
            try:
                found.append(read(entry))
            except ValueError as error:
                raise ValueError(f"entry [{number}] {error}") from None
        return tuple(found)

    return read_all


def _port(value: object) -> int:
    return _number(value, range(1, 65536), "a TCP port, an integer from 1 to 65535")


def _path(value: object) -> str:
    allowed = 'an absolute path such as "/opt/sglang/run.sh"'
    path = _string(value, allowed)
    if not path.startswith("/") or "\0" in path or len(path) > 4000:
        raise ValueError(f"{path[:60]!r} is no absolute path ({allowed})")
    return path


def _file_name(value: object) -> str:
    allowed = 'the name of a file in each of require.models, such as "SHA256SUMS"'
    # Empty is the default: an overlay takes away with it what the site asks for.
    name = "" if value == "" else _string(value, allowed)
    if "/" in name or name in (".", "..") or not name.isprintable() or len(name) > 255:
        raise ValueError(f"{name[:60]!r} is no name of a file ({allowed})")
    return name


def _disk(value: object) -> Mapping[str, int]:
    if not isinstance(value, dict):
        raise ValueError(f'is {_kind(value)} (a table such as {{ "/var/log/sglang" = "5 GiB" }})')
    found = {}
    for path, amount in value.items():
        try:
            found[_path(path)] = _bytes(amount)
        except ValueError as error:
            raise ValueError(f"of {path[:60]!r} {error}") from None
    return found


_VERSION = re.compile(r"(>=|<=|==|!=|>|<) *([0-9]{1,9}(?:\.[0-9]{1,9}){0,3})")


def _versions(value: object) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Comparisons that a version has to meet, all of them."""
    allowed = 'such as ">=570" or ">=570.86, <580"'
    text = "" if value == "" else _string(value, allowed)
    found = []
    for part in text.split(",") if text else ():
        match = _VERSION.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{text[:60]!r} is no requirement of a version ({allowed})")
        found.append((match[1], tuple(int(number) for number in match[2].split("."))))
    return tuple(found)


def _glob(value: object) -> str:
    pattern = _word(value)
    if "/" in pattern or set(pattern) <= set("*?."):
        raise ValueError(f'{pattern!r} is no pattern of names in /dev/shm, or matches all of them (such as "nccl-*")')
    return pattern


def _program(value: object) -> tuple[str, ...]:
    allowed = 'a list such as ["/usr/local/bin/dump-stacks", "{pid}"]'
    if not isinstance(value, list):
        raise ValueError(f"is {_kind(value)} ({allowed})")
    if not value:
        return ()
    words = [_string(word, allowed) for word in value]
    if any("\0" in word for word in words) or len(words) > 100:
        raise ValueError(f"has too many words, or a NUL in one ({allowed})")
    return (_path(words[0]), *words[1:])


def _textfile(value: object) -> str:
    allowed = 'an absolute path such as "/var/lib/node_exporter/textfile/gpuprestart.prom"'
    # Empty is the default: an overlay takes away with it what the site asks for.
    path = "" if value == "" else _string(value, allowed)
    # node_exporter reads no other file there.
    if path and not (path.startswith("/") and path.endswith(".prom") and path.isprintable() and len(path) <= 4000):
        raise ValueError(f"{path[:60]!r} is no absolute path of a .prom file ({allowed})")
    return path


_LEFT = _one_of("off", "report", "remove")


TABLES: Mapping[str, Mapping[str, Reader]] = {
    "gpus": {"select": _select},
    "memory": {
        "max_used": _size,
        "spared_max": _size,
        "min_free": _size,
        "settle": _duration,
        "unified": _one_of("holders", "refuse"),
    },
    "deadline": {
        "total": _positive,
        "term": _duration,
        "protected": _duration,
        "nvml_init": _positive,
        "nvml": _positive,
        "checksums": _positive,
    },
    "owners": {"dedicated": _boolean},
    "nvml": {"missing": _one_of("refuse", "pass"), "pids": _one_of("auto", "ours", "foreign")},
    "require": {
        "ports": _list_of(_port, "TCP ports"),
        "processes": _list_of(_regex, "regular expressions"),
        "host_memory": _bytes,
        "disk": _disk,
        "executables": _list_of(_path, "absolute paths"),
        "models": _list_of(_path, "absolute paths"),
        "checksums": _file_name,
        "gpu_count": _count,
        "driver": _versions,
        "compute_mode": _one_of("any", "default", "exclusive-process", "prohibited"),
        "persistence": _one_of("any", "warn", "require"),
        "ecc": _one_of("any", "no-pending"),
        "mig": _one_of("any", "off"),
    },
    "residue": {
        "shm": _LEFT,
        "sysv": _LEFT,
        "mqueue": _LEFT,
        "shm_patterns": _list_of(_glob, "patterns of names"),
        "owner": _one_of("unit", "any"),
    },
    "reset": {
        "mode": _one_of("off", "last-resort"),
        "command": _path,
        "timeout": _positive,
        "mig": _boolean,
        "nvswitch": _boolean,
    },
    "hooks": {"before_kill": _program, "timeout": _positive},
    "metrics": {"textfile": _textfile},
}
_RULE: Mapping[str, Reader] = {
    "name": _word,
    "match": _as_it_is,
    "action": _one_of("kill", "spare", "refuse"),
    "infrastructure": _boolean,
}
_MATCH: Mapping[str, Reader] = {
    "unit": _word,
    "session": _word,
    "user": _user,
    "container": _word,
    "exe": _regex,
    "comm": _regex,
    "cmdline": _regex,
    "age": _positive,
}


class Document:
    """One file, read: ``tables`` and ``rules`` hold what was good; each rule has its ``origin`` as FILE:LINE."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.tables: dict[str, dict[str, Any]] = {}
        self.rules: list[dict[str, Any]] = []
        self._text = text
        self._places: Optional[Places] = None
        self._faults: list[tuple[int, str]] = []
        try:
            document = load(text)
        except Unparsable as fault:
            self._faults.append((fault.line, f"{path}:{fault.line}: {fault} (TOML)"))
            return
        for key, value in document.items():
            if key == "rule":
                self._read_rules(value)
            elif key in TABLES:
                self.tables[key] = self._table((key,), value, TABLES[key])
            else:
                self._fault((key,), _unknown(key, [*TABLES, "rule"]))

    def faults(self) -> list[str]:
        """All faults in the order of their lines."""
        return [text for _, text in sorted(self._faults, key=lambda fault: fault[0])]

    def origin(self, path: KeyPath) -> str:
        return f"{self.path}:{self._where.line(path)}"

    @property
    def _where(self) -> Places:
        if self._places is None:
            self._places = Places(self._text)
        return self._places

    def _fault(self, path: KeyPath, what: str) -> None:
        self._faults.append((self._where.line(path), f"{self.origin(path)}: {dotted(path)}: {what}"))

    def _table(self, path: KeyPath, value: object, readers: Mapping[str, Reader]) -> dict[str, Any]:
        if not isinstance(value, dict):
            self._fault(path, f"is {_kind(value)} (a table)")
            return {}
        good = {}
        for key, item in value.items():
            if key not in readers:
                self._fault((*path, key), _unknown(key, readers))
                continue
            try:
                good[key] = readers[key](item)
            except ValueError as error:
                self._fault((*path, key), str(error))
        return good

    def _read_rules(self, value: object) -> None:
        if not isinstance(value, list):
            self._fault(("rule",), f"is {_kind(value)} (a list of tables, each under [[rule]])")
            return
        for number, item in enumerate(value):
            path: KeyPath = ("rule", number)
            rule = self._table(path, item, _RULE)
            if not isinstance(item, dict):
                continue
            for key, allowed in (("match", ", ".join(_MATCH)), ("action", "kill, spare or refuse")):
                if key not in item:
                    self._fault(path, f"has no {key} ({allowed})")
            if item.get("match") == {}:
                self._fault((*path, "match"), f"is empty, it would match everybody (some of {', '.join(_MATCH)})")
            rule["match"] = self._table((*path, "match"), item.get("match", {}), _MATCH)
            rule["origin"] = self.origin(path)
            self.rules.append(rule)


def _unknown(key: str, known: Iterable[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(key[:60], known, n=1)
    return f"is no known key ({f'did you mean {close[0]}?' if close else 'known here: ' + ', '.join(known)})"
