"""A file of metrics that many units share: read, merged with what one unit has to say, and written in one step.

Knows Prometheus' text format by prometheus_client alone, and nothing of what is measured. It writes into a folder that
may be another user's, as that of node_exporter often is: nothing that lies there is followed, trusted or overwritten.
The one that calls it holds a lock, and can be abandoned.
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

#: Units of which one file tells, and bytes that are read of it: more than these units can need.
MOST_UNITS = 256
LIMIT = 8 << 20

#: What the file is called before it is in its place.
NEW = "new.prom"

#: What the names of all metrics of this program begin with, also of those that only another version of it has.
OURS = "gpuprestart_"

#: One series of a unit: the name of its metric, and its further label as (name, value), or nothing.
Series = tuple[str, tuple[str, ...]]
Figures = dict[str, dict[Series, float]]

#: The name, the type, the name of the further label as a tuple of one or none, and the meaning of each metric.
Families = list[tuple[str, str, tuple[str, ...], str]]

_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


class Unusable(Exception):
    """It cannot be written there; the arguments are a word for why, and facts."""


def load() -> str:
    """Load what writes the format, which takes longer than anything else here; why that cannot be, or nothing."""
    try:
        import prometheus_client
        import prometheus_client.parser  # noqa: F401
    except ImportError as error:
        return str(error)
    return ""


def put(question: dict[str, Any]) -> tuple[Any, ...]:
    """``("written",)``, or a word for what is in the way, and facts.

    ``families`` are as above. Of ``set`` and ``add``, (name, further label, value) each, the first replace
    what the unit had, and the others are added to it; what else it had is dropped. ``dated`` names the metric that
    tells when a unit was last heard of.
    """
    path = question["path"]
    folder, name = os.path.split(path)
    try:
        within = _enter(folder)
        try:
            figures = _read(name, within)
            _merge(figures, question)
            _replace(name, within, figures, question["families"])
        finally:
            os.close(within)
    except Unusable as error:
        return error.args
    except OSError as error:
        return ("failed", error.errno or 0, path, os.strerror(error.errno or 0))
    return ("written",)


def _enter(folder: str) -> int:
    """The folder, if not just anybody can put something in its place or into it."""
    try:
        within = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise Unusable("no-folder", folder, folder) from None
    try:
        path = os.readlink(f"/proc/self/fd/{within}")
        while True:
            mode = os.stat(path).st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                raise Unusable("open", path, path)
            if path == "/":
                return within
            path = os.path.dirname(path)
    except BaseException:
        os.close(within)
        raise


# What is there -------------------------------------------------------------------------------------------------------


def _read(name: str, within: int) -> Figures:
    """What the file tells of each unit; nothing where there is none yet. A link is none: it is replaced."""
    try:
        if stat.S_ISLNK(os.stat(name, dir_fd=within, follow_symlinks=False).st_mode):
            return {}
        # A pipe would keep us waiting for its writer.
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _FLAGS, dir_fd=within)
    except FileNotFoundError:
        return {}
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise Unusable("foreign", "it is a folder" if stat.S_ISDIR(mode) else "it is no regular file")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(LIMIT + 1)
    finally:
        os.close(descriptor)
    if len(content) > LIMIT:
        raise Unusable("foreign", f"it is bigger than {LIMIT >> 20} MiB")
    return parse(content)


def parse(content: bytes) -> Figures:
    """Raises Unusable where this is not what we have written, as far as the parser can tell: it takes a lot."""
    from prometheus_client.parser import text_string_to_metric_families

    figures: Figures = {}
    try:
        for family in text_string_to_metric_families(content.decode()):
            for sample in family.samples:
                if not sample.name.startswith(OURS):
                    raise Unusable("foreign", f"it has {sample.name[:100]}, which is no metric of gpuprestart")
                labels = dict(sample.labels)
                unit = labels.pop("unit", None)
                if unit is None or len(labels) > 1:
                    raise Unusable("foreign", f"it has {sample.name[:100]} with other labels than gpuprestart writes")
                further = tuple(part for label in labels.items() for part in label)
                figures.setdefault(unit, {})[sample.name, further] = float(sample.value)
    except (ValueError, LookupError, TypeError, AttributeError):
        # Whatever a parser stumbles over.
        raise Unusable("foreign", "it cannot be read as metrics") from None
    return figures


# What it becomes -----------------------------------------------------------------------------------------------------


def _merge(figures: Figures, question: dict[str, Any]) -> None:
    unit, dated = question["unit"], question["dated"]
    before = figures.pop(unit, {})
    now: dict[Series, float] = {(name, tuple(further)): value for name, further, value in question["set"]}
    for name, further, value in question["add"]:
        series = (name, tuple(further))
        now[series] = _sound(before.get(series, 0.0)) + value
    known = {(name, label) for name, _, label, _ in question["families"]}
    for each, others in figures.items():
        # Another version may have had more of them.
        figures[each] = {(name, more): value for (name, more), value in others.items() if (name, more[:1]) in known}
    by_age = sorted(figures, key=lambda each: _sound(figures[each].get((dated, ()), 0.0)))
    for each in by_age[: max(0, len(by_age) + 1 - MOST_UNITS)]:
        del figures[each]
    figures[unit] = now


def _sound(value: float) -> float:
    """What no counter can be would stay in it for good."""
    return value if math.isfinite(value) and value > 0 else 0.0


def _replace(name: str, within: int, figures: Figures, families: Families) -> None:
    """Have the library write it where nobody else can reach, and put it in its place from there.

    The library opens a file of a name that can be guessed, and would follow a link that somebody has put there.
    """
    from prometheus_client import write_to_textfile

    with _aside(name, within) as aside:
        # By the descriptor, so that it stays the same folder, whatever is done to its name meanwhile.
        write_to_textfile(f"/proc/self/fd/{aside}/{NEW}", _Collected(figures, families))
        # node_exporter is another user, whatever UMask= is good for the server's files.
        os.chmod(NEW, 0o644, dir_fd=aside)
        os.rename(NEW, name, src_dir_fd=aside, dst_dir_fd=within)


@contextlib.contextmanager
def _aside(name: str, within: int) -> Iterator[int]:
    """A folder beside it that is ours alone, for as long as this lasts; whoever was killed here has left it there."""
    hidden = f".gpuprestart-{sha256(os.fsencode(name)).hexdigest()[:16]}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(hidden, 0o700, dir_fd=within)
    descriptor = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY | _FLAGS, dir_fd=within)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise Unusable("foreign", f"{hidden} beside it is not what gpuprestart has left there")
        _empty(descriptor)
        try:
            yield descriptor
        finally:
            # Of a write that failed, something may be left.
            _empty(descriptor)
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.rmdir(hidden, dir_fd=within)


def _empty(folder: int) -> None:
    for each in os.listdir(folder):
        os.unlink(each, dir_fd=folder)


class _Collected:
    """All figures by metric, as the library wants to collect them."""

    def __init__(self, figures: Figures, families: Families) -> None:
        self._figures = figures
        self._families = families

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import Metric

        for name, kind, _, text in self._families:
            # The library puts the end back to the names of counters.
            metric = Metric(name[: -len("_total")] if kind == "counter" else name, text, kind)
            for unit in sorted(self._figures):
                for (each, further), value in self._figures[unit].items():
                    if each == name:
                        labels = {"unit": unit, **dict(zip(further[::2], further[1::2]))}
                        metric.add_sample(name, labels, value)
            yield metric
