"""What a server's files say of themselves, read where it can be abandoned: headers and sizes, never the weights.

Knows the formats: safetensors and the index of its shards, what a download leaves that was not finished, lists of
checksums. Everything that is read is bounded. It tells facts: a fault is a word for it, what it is about, and figures;
the sentences are made of them elsewhere.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

#: Seconds after which a long answer is interrupted to tell how far it has come; asked again, it goes on from there.
PIECE = 0.25

#: Bytes: what the format itself allows a header, and what no index, configuration or list of checksums comes near to.
HEADER_LIMIT = 100_000_000
JSON_LIMIT = 64 << 20
LIST_LIMIT = 16 << 20

#: Files that are looked at in one folder, and shards of one index.
MOST_FILES = 100_000
MOST_SHARDS = 10_000

#: More faults of one list are not looked for: it is none, then.
MOST_FAULTS = 1000

#: Bytes hashed between two looks at the clock.
BLOCK = 1 << 20

#: Weights of other formats do not tell their length, so only their names and that they are not empty can be checked.
_UNCHECKED = re.compile(r"pytorch_model.*\.bin|consolidated.*\.pth|[^.].*\.gguf", re.DOTALL)

#: GNU's format, in which a backslash in front says that the name is escaped (sha256sum(1)).
_SUM = re.compile(r"(\\?)([0-9a-fA-F]{64}) [ *](.+)", re.DOTALL)
_ESCAPES = {r"\\": "\\", r"\n": "\n", r"\r": "\r"}

Fault = tuple[Any, ...]


class Faulty(Exception):
    """Something is wrong with a file; the arguments are a word for it, and facts."""


def slow(request: tuple[str, Any]) -> Any:
    """Answers for a child to give, or a text that says why there is none.

    ``("file:disk", path)`` is (free bytes, free inodes or None). The others may take long, and answer ("on", how much
    is done) until they answer ("done", ...): ``("file:model", path)`` with faults; ``("file:list", (folder, name))``
    with what a list of checksums has, (name, digest, size) each, and faults; ``("file:digest", (folder, name))`` with
    a SHA-256 or a fault.
    """
    verb, argument = request
    try:
        return _disk(argument) if verb == "file:disk" else _piece(request)
    except OSError as error:
        return os.strerror(error.errno or 0)


def _disk(path: str) -> tuple[int, int | None]:
    """What an ordinary user may still write there; some file systems do not count inodes (statvfs(3))."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize, status.f_favail if status.f_files else None


# What takes long -----------------------------------------------------------------------------------------------------

#: The one answer that is under way, by its request.
_under_way: dict[tuple[str, Any], Iterator[tuple[str, Any]]] = {}


def _piece(request: tuple[str, Any]) -> tuple[str, Any]:
    """As much of the answer as there is time for: who asks can tell a long answer from one that never comes."""
    steps = _under_way.pop(request, None) or _begin(request)
    _under_way.clear()
    until = time.monotonic() + PIECE
    for step in steps:
        if step[0] == "done" or time.monotonic() >= until:
            break
    if step[0] != "done":
        _under_way[request] = steps
    return step


def _begin(request: tuple[str, Any]) -> Iterator[tuple[str, Any]]:
    verb, argument = request
    if verb == "file:model":
        return _model(argument)
    return _digest(*argument) if verb == "file:digest" else _list(*argument)


# Files ---------------------------------------------------------------------------------------------------------------


@contextmanager
def _opened(path: str) -> Iterator[tuple[int, int]]:
    """Descriptor and size of a regular file. Anything else is not even opened: a pipe would have us wait, and a device
    may do something. Raises Faulty."""
    try:
        _regular(os.stat(path))
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise _missing(path) from None
    except OSError as error:
        raise _unreadable(error) from error
    try:
        status = os.fstat(descriptor)
        _regular(status)
        yield descriptor, status.st_size
    except OSError as error:
        raise _unreadable(error) from error
    finally:
        os.close(descriptor)


def _regular(status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise Faulty("folder")
    if not stat.S_ISREG(status.st_mode):
        raise Faulty("irregular")


def _missing(path: str) -> Faulty:
    return Faulty("dangling", os.readlink(path)) if os.path.islink(path) else Faulty("missing")


def _unreadable(error: OSError) -> Faulty:
    return Faulty("unreadable", os.strerror(error.errno or 0))


def _read(descriptor: int, length: int, offset: int = 0) -> bytes:
    parts = []
    while length and (part := os.pread(descriptor, min(length, 1 << 24), offset)):
        parts.append(part)
        length -= len(part)
        offset += len(part)
    return b"".join(parts)


def _content(path: str, limit: int) -> bytes:
    with _opened(path) as (descriptor, size):
        if size > limit:
            raise Faulty("big", size)
        if not size:
            raise Faulty("empty")
        content = _read(descriptor, size)
    if content.startswith(b"version https://git-lfs."):
        raise Faulty("pointer")
    return content


def _object(text: bytes, fault: str) -> dict[str, Any]:
    try:
        value = json.loads(text.decode())
    except (ValueError, RecursionError, MemoryError):
        value = None
    if not isinstance(value, dict):
        raise Faulty(fault)
    return value


def _names(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in itertools.islice(entries, MOST_FILES + 1))
    if len(names) > MOST_FILES:
        raise Faulty("crowded", MOST_FILES)
    return names


def _is_below(name: str) -> bool:
    """Whether such a name leads to nowhere but into the folder that it is in. Links are followed: a snapshot of a
    download consists of them."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return bool(name) and "\0" not in name and not name.startswith("/") and ".." not in name.split("/")


# Models --------------------------------------------------------------------------------------------------------------


def _model(folder: str) -> Iterator[tuple[str, Any]]:
    """What is wrong with a folder as Hugging Face lays it out, without reading its weights.

    Weights are ``*.safetensors``, all of them and those that an index names; or ``pytorch_model*.bin``,
    ``consolidated*.pth`` and ``*.gguf``, of which it is only seen that they are there and not empty.
    """
    faults: list[Fault] = []
    try:
        names = _names(folder)
    except Faulty as fault:
        yield "done", [(fault.args[0], folder, *fault.args[1:])]
        return
    faults += [("unfinished", name) for name in _unfinished(folder, names)]
    faults += _amiss(folder, "config.json")
    indexes: dict[str, dict[str, str]] = {}
    for name in _indexes(names):
        try:
            indexes[name] = _weight_map(f"{folder}/{name}")
        except Faulty as fault:
            faults.append((fault.args[0], name, *fault.args[1:]))
        yield "on", 0
    shards = {name for name in names if _is_shard(name)}.union(*(map.values() for map in indexes.values()))
    held: dict[str, frozenset[str]] = {}
    for number, shard in enumerate(sorted(shards)):
        try:
            with _opened(f"{folder}/{shard}") as (descriptor, size):
                held[shard] = tensors(descriptor, size)
        except Faulty as fault:
            faults.append((fault.args[0], shard, *fault.args[1:]))
        yield "on", number + 1
    faults += [fault for name, where in indexes.items() for fault in _homeless(name, where, held)]
    others = [name for name in names if _UNCHECKED.fullmatch(name)]
    faults += [fault for name in others for fault in _absent(folder, name)]
    if not shards and not others:
        faults.append(("weights", folder))
    faults += _no_tokenizer(folder, names)
    yield "done", faults


def _is_shard(name: str) -> bool:
    """Servers take ``*.safetensors``, which no hidden file fits, such as those that macOS leaves (``._*``)."""
    return name.endswith(".safetensors") and not name.startswith(".")


def _indexes(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.endswith(".safetensors.index.json") and not name.startswith(".")]


def _weight_map(path: str) -> dict[str, str]:
    """Which file has which tensor, as an index says. Raises Faulty."""
    where = _object(_content(path, JSON_LIMIT), "json").get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(shard, str) for shard in where.values()):
        raise Faulty("index")
    shards = set(where.values())
    if len(shards) > MOST_SHARDS:
        raise Faulty("crowded", MOST_SHARDS)
    for shard in sorted(shards):
        if not _is_below(shard):
            raise Faulty("outside", shard)
    return where


def tensors(descriptor: int, size: int) -> frozenset[str]:
    """The names of the tensors in a safetensors file that is whole, by its header alone. Raises Faulty."""
    if not size:
        raise Faulty("empty")
    head = _read(descriptor, 8)
    if head == b"version ":
        raise Faulty("pointer")
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > HEADER_LIMIT:
        raise Faulty("no-header")
    if size < 8 + length:
        raise Faulty("headless", size, 8 + length)
    header = _object(_read(descriptor, length, 8), "header")
    header.pop("__metadata__", None)
    spans = sorted(_span(name, entry) for name, entry in header.items())
    end = max((end for _, end in spans), default=0)
    if size != 8 + length + end:
        raise Faulty("length", size, 8 + length + end)
    # The format knows no bytes of nobody's, and none of two tensors.
    if [start for start, _ in spans] != [0, *(end for _, end in spans)][: len(spans)]:
        raise Faulty("holes")
    return frozenset(header)


#: Bits of a number of each kind that is known; of another kind, the length is not checked.
_BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
    **{"U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64},
}


def _span(name: str, entry: Any) -> tuple[int, int]:
    """Where a tensor's bytes begin and end, counted from the header's end."""
    if isinstance(entry, dict) and isinstance(entry.get("dtype"), str):
        shape: Any = entry.get("shape")
        offsets: Any = entry.get("data_offsets")
        if _are_numbers(shape) and _are_numbers(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1]:
            bits = _BITS.get(entry["dtype"])
            if bits is None or 8 * (offsets[1] - offsets[0]) == bits * math.prod(shape):
                return offsets[0], offsets[1]
    raise Faulty("entry", name)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and 0 <= number < 1 << 63 for number in value)


def _homeless(index: str, where: dict[str, str], held: dict[str, frozenset[str]]) -> list[Fault]:
    """Tensors of an index that are in no file. Of a file that is at fault itself, nothing more is said."""
    there = frozenset().union(*held.values())
    lost = [tensor for tensor, shard in where.items() if tensor not in there and shard in held]
    return [("tensors", index, len(lost), lost[0])] if lost else []


def _amiss(folder: str, name: str) -> list[Fault]:
    try:
        _object(_content(f"{folder}/{name}", JSON_LIMIT), "json")
    except Faulty as fault:
        return [(fault.args[0], name, *fault.args[1:])]
    return []


def _absent(folder: str, name: str) -> list[Fault]:
    """Why this is no file with anything in it."""
    try:
        with _opened(f"{folder}/{name}") as (descriptor, size):
            if not size:
                return [("empty", name)]
            if _read(descriptor, 24) == b"version https://git-lfs.":
                return [("pointer", name)]
    except Faulty as fault:
        return [(fault.args[0], name, *fault.args[1:])]
    return []


def _no_tokenizer(folder: str, names: list[str]) -> list[Fault]:
    """One that is whole will do; else what is wrong with those that are there."""
    kinds = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
    there = [kind for kind in kinds if all(name in names for name in kind)]
    wrong = [[fault for name in kind for fault in _absent(folder, name)] for kind in there]
    if not all(wrong):
        return []
    return [fault for faults in wrong for fault in faults] or [("tokenizer", folder)]


def _unfinished(folder: str, names: list[str]) -> list[str]:
    """What downloads have not finished: huggingface_hub writes into ``*.incomplete`` below the folder's own .cache, or
    among the blobs to which the links of a snapshot lead."""
    places = [(folder, names)]
    download = os.walk(f"{folder}/.cache/huggingface/download")
    places += [(place, files) for place, _, files in itertools.islice(download, MOST_SHARDS)]
    snapshots, _ = os.path.split(os.path.realpath(folder))
    if os.path.basename(snapshots) == "snapshots":
        blobs = f"{os.path.dirname(snapshots)}/blobs"
        places.append((blobs, _names(blobs) if os.path.isdir(blobs) else []))
    found = [f"{place}/{name}" for place, files in places for name in files if name.endswith(".incomplete")]
    return [path[len(folder) + 1 :] if path.startswith(f"{folder}/") else path for path in found]


# Checksums -----------------------------------------------------------------------------------------------------------


def _list(folder: str, name: str) -> Iterator[tuple[str, Any]]:
    """What a list of checksums has, and what is wrong with it: lines, and weights that it does not have."""
    entries: dict[str, tuple[str, int]] = {}
    faults: list[Fault] = []
    try:
        lines = _content(f"{folder}/{name}", LIST_LIMIT).decode("utf-8", "surrogateescape").split("\n")
        names = _names(folder)
    except Faulty as fault:
        yield "done", ([], [(fault.args[0], name, *fault.args[1:])])
        return
    for number, line in enumerate(lines, 1):
        # Lists that were made on other systems end their lines with a carriage return; a name that does is escaped.
        line = line[:-1] if line.endswith("\r") else line
        if not line.strip() or line.startswith("#"):
            continue
        match = _SUM.fullmatch(line)
        yield "on", len(entries)
        if len(faults) >= MOST_FAULTS:
            break
        if match is None:
            faults.append(("line", name, number))
            continue
        file = re.sub(r"\\[\\nr]", lambda found: _ESCAPES[found[0]], match[3]) if match[1] else match[3]
        if not _is_below(file):
            faults.append(("outside", name, file))
            continue
        file, digest = os.path.normpath(file), match[2].lower()
        if file == name:
            faults.append(("itself", name))
            continue
        if entries.get(file, (digest,))[0] != digest:
            faults.append(("twice", name, file))
        try:
            with _opened(f"{folder}/{file}") as (_, size):
                entries[file] = (digest, size)
        except Faulty as fault:
            faults.append((fault.args[0], file, *fault.args[1:]))
    if not entries and not faults:
        faults.append(("nothing", name))
    faults += [("uncovered", shard, name) for shard in _weights(folder, names) if shard not in entries]
    yield "done", ([(file, *entry) for file, entry in entries.items()], faults)


def _weights(folder: str, names: list[str]) -> list[str]:
    """All files of weights, also those that an index names; an index that is at fault is a matter of the model."""
    found = {name for name in names if _is_shard(name) or _UNCHECKED.fullmatch(name)}
    for name in _indexes(names):
        try:
            found.update(map(os.path.normpath, _weight_map(f"{folder}/{name}").values()))
        except Faulty:
            continue
    return sorted(found)


def _digest(folder: str, name: str) -> Iterator[tuple[str, Any]]:
    digest, done = hashlib.sha256(), 0
    try:
        with _opened(f"{folder}/{name}") as (descriptor, _):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while block := os.read(descriptor, BLOCK):
                digest.update(block)
                done += len(block)
                yield "on", done
    except Faulty as fault:
        yield "done", (fault.args[0], name, *fault.args[1:])
        return
    yield "done", digest.hexdigest()
