"""The journal as it is read back, by way of systemd-python, which is loaded when it is first asked for.

Knows how entries are found by their fields without reading all of it, and whether all of it may be read. Refuses to
know what an entry means, and who may be believed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

#: Where journald keeps what survives a boot, and what does not.
FOLDERS = ("/var/log/journal", "/run/log/journal")

#: Of all namespaces of this machine: a unit may have one to itself (LogNamespace=). SD_JOURNAL_ALL_NAMESPACES has no
#: name in the library.
_ALL_NAMESPACES = 1 << 5

#: Bytes of one field that are read at most.
_LONGEST = 4 << 20


class Unreadable(Exception):
    """The journal cannot be read; the text says why and what to do."""


class Entry(NamedTuple):
    """One entry. ``at`` is when journald took it, in seconds since the epoch; of a repeated field the first is here."""

    at: float
    cursor: str
    fields: Mapping[str, str]


#: Fields that all have to have these values.
Match = Mapping[str, str]


def newest_first(*matches: Match, since: float = 0.0) -> Iterator[Entry]:
    """Entries that one of these is true of, the newest first. Raises Unreadable."""
    with _opened(matches) as reader:
        try:
            reader.seek_tail()
            while True:
                found = reader.get_previous()
                if not found or found["__REALTIME_TIMESTAMP"] < since * 1_000_000:
                    return
                yield _entry(found)
        except OSError as error:
            raise Unreadable(f"the journal cannot be read: {error.strerror}; hint: journalctl --verify") from error


def values(field: str) -> list[str]:
    """Every value that this field has in any entry. Raises Unreadable."""
    with _opened(()) as reader:
        try:
            return [_decoded(each) for each in reader.query_unique(field)]
        except OSError as error:
            raise Unreadable(f"the journal cannot be read: {error.strerror}; hint: journalctl --verify") from error


def boot() -> str:
    """The id of the present boot, as the kernel writes it; empty where it does not."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except (OSError, ValueError):
        return ""


def is_whole() -> bool:
    """Whether we may read all of it: an account that may not sees its own entries, and no word that these are not all.

    It is asked of the files, which groups and access lists may let us read.
    """
    try:
        with open("/etc/machine-id", encoding="ascii") as file:
            machine = file.read().strip()
    except (OSError, ValueError):
        return os.geteuid() == 0
    for folder in (f"{root}/{machine}" for root in FOLDERS):
        file_of_all = f"{folder}/system.journal"
        if os.path.isdir(folder) and not os.access(folder, os.R_OK | os.X_OK):
            return False
        if os.path.exists(file_of_all) and not os.access(file_of_all, os.R_OK):
            return False
    return True


def _opened(matches: Sequence[Match]) -> Any:
    try:
        from systemd import journal
    except ImportError as error:
        hint = "install python3-systemd, or systemd-python from PyPI"
        raise Unreadable(f"the journal cannot be read, for there is no systemd.journal; hint: {hint}") from error
    try:
        reader = journal.Reader(flags=journal.LOCAL_ONLY | _ALL_NAMESPACES)
        # A verdict on many GPUs is more than the library shows of a field unless it is told so.
        reader.data_threshold = _LONGEST
        # What others have written is nothing to convert: a date in it may be one that no calendar has.
        times = ("__REALTIME_TIMESTAMP", "__MONOTONIC_TIMESTAMP", "__CURSOR")
        reader.converters = dict.fromkeys(times, _as_it_is)
        for number, match in enumerate(matches):
            if number:
                reader.add_disjunction()
            for name, value in match.items():
                reader.add_match(f"{name}={value}")
    except OSError as error:
        raise Unreadable(f"the journal cannot be opened: {error.strerror}") from error
    return reader


def _as_it_is(value: Any) -> Any:
    return value


def _entry(found: Mapping[str, Any]) -> Entry:
    fields = {name: _decoded(value) for name, value in found.items() if not name.startswith("__")}
    return Entry(found["__REALTIME_TIMESTAMP"] / 1_000_000, str(found["__CURSOR"]), fields)


def _decoded(value: Any) -> str:
    """What is not UTF-8 is left as bytes by the library, and escaped here."""
    first = value[0] if isinstance(value, list) else value
    return first.decode("utf-8", "backslashreplace") if isinstance(first, bytes) else str(first)
