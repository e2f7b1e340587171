"""What files say of themselves: real models, each cut, hidden or bent in one way; a terabyte of them; nothing hangs."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from gpuprestart.host import checkpoint
from gpuprestart.host.checkpoint import Faulty

from .processes import PATIENCE

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + 64 * "0" + "\nsize 4976698672\n"


def whole(verb: str, argument: Any) -> Any:
    """The answer, in as many pieces as it takes."""
    while True:
        answer = checkpoint.slow((verb, argument))
        if isinstance(answer, str) or answer[0] == "done":
            return answer if isinstance(answer, str) else answer[1]


def faults(folder: Path) -> Any:
    return whole("file:model", str(folder))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small model in two shards, as the library itself writes them."""
    return make(tmp_path / "model")


def make(folder: Path) -> Path:
    folder.mkdir(parents=True)
    where = {}
    for number, shard in enumerate(SHARDS):
        tensors = {f"layers.{number}.{name}": numpy.ones((8, 16), numpy.float32) for name in ("q", "k", "v")}
        save_file(tensors, folder / shard, metadata={"format": "pt"})
        where.update(dict.fromkeys(tensors, shard))
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 3072}, "weight_map": where}))
    (folder / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    (folder / "tokenizer.json").write_text("{}")
    return folder


def index(folder: Path, **where: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))


# Models --------------------------------------------------------------------------------------------------------------


def test_a_model_that_is_whole(model: Path) -> None:
    assert faults(model) == []


def test_a_shard_that_is_cut_anywhere(model: Path) -> None:
    """Also in the middle of its header, and by one byte; and one that is too long."""
    shard = model / SHARDS[1]
    content = shard.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for size in range(len(content)):
        shard.write_bytes(content[:size])
        (fault,) = faults(model)
        if size == 0:
            assert fault == ("empty", SHARDS[1])
        elif size < 8:
            assert fault == ("no-header", SHARDS[1])
        elif size < header:
            assert fault == ("headless", SHARDS[1], size, header)
        else:
            assert fault == ("length", SHARDS[1], size, len(content))
    shard.write_bytes(content + b"\0")
    assert faults(model) == [("length", SHARDS[1], len(content) + 1, len(content))]


def test_what_an_index_names_has_to_be_there(model: Path) -> None:
    (model / SHARDS[0]).unlink()
    assert faults(model) == [("missing", SHARDS[0])]
    (model / SHARDS[0]).symlink_to("../blobs/0123")
    assert faults(model) == [("dangling", SHARDS[0], "../blobs/0123")]


def test_without_an_index_every_file_is_looked_at(model: Path) -> None:
    (model / INDEX).unlink()
    assert faults(model) == []
    os.truncate(model / SHARDS[0], 1000)
    assert [fault[:3] for fault in faults(model)] == [("length", SHARDS[0], 1000)]


def test_tensors_that_an_index_names_and_no_file_has(model: Path) -> None:
    where = json.loads((model / INDEX).read_text())["weight_map"]
    index(model, **where, **{"layers.9.q": SHARDS[0], "layers.9.k": SHARDS[1]})
    assert faults(model) == [("tensors", INDEX, 2, "layers.9.q")]
    # Of a file that cannot be read there is nothing to say but that.
    (model / SHARDS[0]).write_bytes(b"")
    assert [fault[0] for fault in faults(model)] == ["empty", "tensors"]


def test_several_faults_are_told_at_once(model: Path) -> None:
    (model / SHARDS[0]).unlink()
    os.truncate(model / SHARDS[1], 700)
    (model / "config.json").unlink()
    (model / "tokenizer.json").unlink()
    words = {fault[0] for fault in faults(model)}
    assert words == {"missing", "length", "tokenizer"} and len(faults(model)) == 4


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", "..", "", "a\0b", "\ud800"])
def test_an_index_leads_nowhere_else(model: Path, name: str) -> None:
    (model.parent / "secret").write_bytes(b"not safetensors")
    index(model, q=name)
    assert faults(model) == [("outside", INDEX, name)]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "empty"),
        ("{", "json"),
        ("[]", "json"),
        (100_000 * "[", "json"),
        ("\xff", "json"),
        ("{}", "index"),
        ('{"weight_map": {}}', "index"),
        ('{"weight_map": ["a"]}', "index"),
        ('{"weight_map": {"a": ["b"]}}', "index"),
        (POINTER, "pointer"),
    ],
)
def test_an_index_that_is_none(model: Path, text: str, word: str) -> None:
    (model / INDEX).write_text(text, encoding="latin-1")
    assert [fault[:2] for fault in faults(model)] == [(word, INDEX)]


def test_an_index_of_too_many_files(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "MOST_SHARDS", 1)
    assert faults(model) == [("crowded", INDEX, 1)]


@pytest.mark.parametrize("name", [INDEX, "config.json"])
def test_what_is_too_big_is_not_read(model: Path, name: str) -> None:
    size = checkpoint.JSON_LIMIT + 1
    os.truncate(model / name, size)
    assert faults(model) == [("big", name, size)]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\xff", POINTER])
def test_a_configuration_that_is_none(model: Path, text: str) -> None:
    (model / "config.json").write_text(text, encoding="latin-1")
    word = {"": "empty", POINTER: "pointer"}.get(text, "json")
    assert faults(model) == [(word, "config.json")]
    (model / "config.json").unlink()
    assert faults(model) == [("missing", "config.json")]


@pytest.mark.parametrize(
    ("names", "enough"),
    [
        (["tokenizer.json"], True),
        (["tokenizer.model"], True),
        (["vocab.json", "merges.txt"], True),
        (["vocab.json"], False),
        (["merges.txt", "tokenizer_config.json"], False),
        ([], False),
    ],
)
def test_a_tokenizer(model: Path, names: list[str], enough: bool) -> None:
    (model / "tokenizer.json").unlink()
    for name in names:
        (model / name).write_text("{}")
    assert faults(model) == ([] if enough else [("tokenizer", str(model))])


@pytest.mark.parametrize(("text", "word"), [("", "empty"), (POINTER, "pointer")])
def test_a_tokenizer_with_nothing_in_it(model: Path, text: str, word: str) -> None:
    (model / "tokenizer.json").write_text(text)
    assert faults(model) == [(word, "tokenizer.json")]
    (model / "tokenizer.model").write_text("sentencepiece")
    assert faults(model) == []


@pytest.mark.parametrize("name", ["pytorch_model-00001-of-00002.bin", "consolidated.00.pth", "qwen-q4.gguf"])
def test_weights_that_do_not_tell_their_length(model: Path, name: str) -> None:
    for left in (*SHARDS, INDEX):
        (model / left).unlink()
    assert faults(model) == [("weights", str(model))]
    (model / name).write_bytes(b"PK")
    assert faults(model) == []
    (model / name).write_bytes(b"")
    assert faults(model) == [("empty", name)]


def test_a_pointer_of_git_lfs_in_place_of_a_shard(model: Path) -> None:
    (model / SHARDS[0]).write_text(POINTER)
    assert faults(model) == [("pointer", SHARDS[0])]


@pytest.mark.parametrize("name", [SHARDS[0], INDEX, "config.json", "tokenizer.json"])
@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_no_file_is_not_waited_for(model: Path, name: str, kind: str) -> None:
    (model / name).unlink()
    if kind == "pipe":
        os.mkfifo(model / name)
    else:
        (model / name).mkdir()
    assert faults(model) == [("irregular" if kind == "pipe" else "folder", name)]


def test_a_folder_that_is_none(model: Path) -> None:
    assert faults(model / "nothing") == "No such file or directory"
    assert faults(model / "config.json") == "Not a directory"


def test_a_folder_with_too_many_files(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "MOST_FILES", 4)
    assert faults(model) == [("crowded", str(model), 4)]


# Downloads -----------------------------------------------------------------------------------------------------------


def snapshot(tmp_path: Path) -> Path:
    """A model in huggingface_hub's cache: links to blobs that have no names of their own."""
    repository = tmp_path / "models--org--name"
    (repository / "blobs").mkdir(parents=True)
    folder = make(repository / "snapshots" / (40 * "a"))
    for path in list(folder.iterdir()):
        blob = repository / "blobs" / hashlib.sha256(path.name.encode()).hexdigest()
        path.rename(blob)
        path.symlink_to(os.path.relpath(blob, folder))
    return folder


def test_the_links_of_a_snapshot_are_followed(tmp_path: Path) -> None:
    folder = snapshot(tmp_path)
    assert faults(folder) == []
    blob = (folder / SHARDS[0]).resolve()
    os.truncate(blob, 800)
    assert [fault[:3] for fault in faults(folder)] == [("length", SHARDS[0], 800)]
    blob.unlink()
    assert [fault[:2] for fault in faults(folder)] == [("dangling", SHARDS[0])]


@pytest.mark.parametrize("linked", [False, True])
def test_a_blob_that_is_not_finished(tmp_path: Path, linked: bool) -> None:
    folder = snapshot(tmp_path)
    left = folder.parents[1] / "blobs" / f"{64 * 'b'}.incomplete"
    left.write_bytes(b"half")
    if linked:
        folder, real = tmp_path / "link", folder
        folder.symlink_to(real)
    assert faults(folder) == [("unfinished", str(left))]


@pytest.mark.parametrize(
    "path",
    [
        "x.incomplete",
        f".cache/huggingface/download/{SHARDS[0]}.0123.incomplete",
        ".cache/huggingface/download/original/Zm9v.0123.incomplete",
    ],
)
def test_a_download_into_the_folder_that_is_not_finished(model: Path, path: str) -> None:
    (model / path).parent.mkdir(parents=True, exist_ok=True)
    (model / path).write_bytes(b"half")
    (model / path).with_suffix(".lock").write_bytes(b"")
    assert faults(model) == [("unfinished", path)]


# Size ----------------------------------------------------------------------------------------------------------------


def test_a_terabyte_takes_no_time(model: Path) -> None:
    """Of each shard only the header is read."""
    (model / INDEX).unlink()
    data = 5 * 10**9
    header = json.dumps({"q": {"dtype": "F16", "shape": [data // 2], "data_offsets": [0, data]}}).encode()
    for number in range(200):
        with open(model / f"big-{number:03}.safetensors", "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + data)
    before, began = bytes_read(), time.process_time()
    assert faults(model) == []
    assert time.process_time() - began < 1
    assert bytes_read() - before < 1 << 20
    os.truncate(model / "big-117.safetensors", data)
    assert faults(model) == [("length", "big-117.safetensors", data, 8 + len(header) + data)]


def bytes_read() -> int:
    with open("/proc/self/io", encoding="ascii") as file:
        return int(file.readline().split()[1])


def test_a_long_answer_comes_in_pieces(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for something else, what is under way is given up."""
    monkeypatch.setattr(checkpoint, "PIECE", 0.0)
    asked = ("file:model", str(model))
    assert [checkpoint.slow(asked) for _ in range(4)] == [("on", 0), ("on", 1), ("on", 2), ("done", [])]
    (model / "big").write_bytes(bytes(3 * checkpoint.BLOCK))
    digest = ("file:digest", (str(model), "big"))
    assert [checkpoint.slow(digest) for _ in range(2)] == [("on", checkpoint.BLOCK), ("on", 2 * checkpoint.BLOCK)]
    assert checkpoint.slow(asked) == ("on", 0)
    assert checkpoint.slow(digest) == ("on", checkpoint.BLOCK)
    assert whole(*digest) == hashlib.sha256(bytes(3 * checkpoint.BLOCK)).hexdigest()


# Headers -------------------------------------------------------------------------------------------------------------


def tensors(content: bytes) -> Any:
    """What they are, or the fault."""
    descriptor = os.memfd_create("shard")
    try:
        os.write(descriptor, content)
        return checkpoint.tensors(descriptor, len(content))
    except Faulty as fault:
        return fault.args
    finally:
        os.close(descriptor)


def framed(header: bytes, data: int = 0) -> bytes:
    return len(header).to_bytes(8, "little") + header + bytes(data)


@pytest.mark.parametrize(
    ("header", "fault"),
    [
        (b"", ("header",)),
        (b"[]", ("header",)),
        (b"\xff\xfe{\0}\0", ("header",)),
        (100_000 * b'{"a":', ("header",)),
        (b'{"q": null}', ("entry", "q")),
        (b'{"q": {"shape": [1], "data_offsets": [0, 4]}}', ("entry", "q")),
        (b'{"q": {"dtype": "F32", "data_offsets": [0, 4]}}', ("entry", "q")),
        (b'{"q": {"dtype": "F32", "shape": [1]}}', ("entry", "q")),
        (b'{"q": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', ("entry", "q")),
        (b'{"q": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}', ("entry", "q")),
        (b'{"q": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 4]}}', ("entry", "q")),
        (b'{"q": {"dtype": "F32", "shape": [1], "data_offsets": [false, 4]}}', ("entry", "q")),
        (b'{"q": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1e99]}}', ("entry", "q")),
        (b'{"q": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}', ("entry", "q")),
        (b'{"q": {"dtype": "F32", "shape": [1], "data_offsets": [0, %s]}}' % (4000 * b"9"), ("entry", "q")),
        (b'{"q": {"dtype": "F32", "shape": [1], "data_offsets": [0, %s]}}' % (5000 * b"9"), ("header",)),
        (b'{"q": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', ("entry", "q")),
        (b'{"q": {"dtype": "BOOL", "shape": [1], "data_offsets": [3, 4]}}', ("holes",)),
        (
            b'{"q": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},'
            b' "k": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}}',
            ("holes",),
        ),
    ],
)
def test_a_header_that_is_none(header: bytes, fault: Any) -> None:
    assert tensors(framed(header, 4)) == fault


def test_tensors_of_no_length_and_kinds_that_are_not_known() -> None:
    header = (
        b'{"a": {"dtype": "F32", "shape": [0, 7], "data_offsets": [0, 0]},'
        b' "b": {"dtype": "NEW", "shape": [9], "data_offsets": [0, 4]},'
        b' "c": {"dtype": "F64", "shape": [0], "data_offsets": [4, 4]}}'
    )
    assert tensors(framed(header, 4)) == {"a", "b", "c"}


def test_the_longest_header() -> None:
    assert tensors((checkpoint.HEADER_LIMIT + 1).to_bytes(8, "little") + b"{}") == ("no-header",)
    assert tensors(checkpoint.HEADER_LIMIT.to_bytes(8, "little")) == ("headless", 8, 8 + checkpoint.HEADER_LIMIT)


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16"]) | json_values,
        "shape": st.lists(st.integers(-1, 9), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(-1, 99), min_size=2, max_size=2) | json_values,
    },
)
headers = st.dictionaries(st.sampled_from(["q", "k", "__metadata__"]) | st.text(max_size=5), entries | json_values)
shards = st.one_of(
    st.binary(max_size=64),
    st.builds(framed, st.binary(max_size=64), st.integers(0, 99)),
    st.builds(framed, headers.map(lambda header: json.dumps(header).encode()), st.integers(0, 99)),
)


@given(shards)
def test_whatever_is_in_a_file_the_answer_is_its_tensors_or_a_fault(content: bytes) -> None:
    found = tensors(content)
    assert isinstance(found, (frozenset, tuple))
    if is_safetensors(content):
        assert isinstance(found, frozenset)


@given(
    st.dictionaries(st.text(max_size=8).filter(lambda name: name != "__metadata__"), st.integers(0, 20), max_size=4),
    st.data(),
)
def test_what_the_library_writes_is_whole_until_it_is_cut(sizes: dict[str, int], data: st.DataObject) -> None:
    content = save({name: numpy.zeros(size, numpy.uint8) for name, size in sizes.items()})
    assert tensors(content) == frozenset(sizes)
    cut = data.draw(st.integers(0, len(content) - 1))
    assert isinstance(tensors(content[:cut]), tuple)


def is_safetensors(content: bytes) -> bool:
    try:
        safetensors.deserialize(content)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError:
        return False
    return True


# Checksums -----------------------------------------------------------------------------------------------------------


def listed(folder: Path) -> Any:
    return whole("file:list", (str(folder), "SHA256SUMS"))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sums(folder: Path, *options: str) -> None:
    """What the tool itself writes for all files of a folder."""
    names = sorted(path.name for path in folder.iterdir())
    made = subprocess.run(["sha256sum", *options, "--", *names], cwd=folder, stdout=subprocess.PIPE, check=True)
    (folder / "SHA256SUMS").write_bytes(made.stdout)


@pytest.mark.parametrize("options", [[], ["--binary"]])
def test_a_list_as_the_tool_writes_it(model: Path, options: list[str]) -> None:
    for name in ("with space", " leading", "*star", "back\\slash", "line\nend", "both\\n\n", os.fsdecode(b"\xff")):
        (model / name).write_text(name, errors="surrogateescape")
    names = sorted(path.name for path in model.iterdir())
    sums(model, *options)
    entries, wrong = listed(model)
    assert wrong == []
    assert sorted(entries) == [(name, sha256(model / name), (model / name).stat().st_size) for name in names]
    for name, digest, _ in entries:
        assert whole("file:digest", (str(model), name)) == digest


def test_lines_of_a_list_that_say_nothing(model: Path) -> None:
    digest = 64 * "A"
    lines = ["# made by hand", "", f"{digest}  ./{SHARDS[0]}", "   ", f"{digest} *{SHARDS[1]}\r"]
    (model / "SHA256SUMS").write_bytes("\r\n".join(lines).encode())
    entries, wrong = listed(model)
    assert [(name, digest) for name, digest, _ in entries] == [(shard, 64 * "a") for shard in SHARDS] and not wrong


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("junk", ("line", "SHA256SUMS", 1)),
        (f"{63 * '0'}  config.json", ("line", "SHA256SUMS", 1)),
        (f"{128 * '0'}  config.json", ("line", "SHA256SUMS", 1)),
        (f"{64 * '0'} config.json", ("line", "SHA256SUMS", 1)),
        (f"{64 * '0'}  ../secret", ("outside", "SHA256SUMS", "../secret")),
        (f"{64 * '0'}  /etc/passwd", ("outside", "SHA256SUMS", "/etc/passwd")),
        (f"{64 * '0'}  gone", ("missing", "gone")),
        (f"{64 * '0'}  ./SHA256SUMS", ("itself", "SHA256SUMS")),
        (f"{64 * '0'}  config.json\n{64 * '1'}  config.json", ("twice", "SHA256SUMS", "config.json")),
    ],
)
def test_a_list_with_a_fault(model: Path, line: str, fault: Any) -> None:
    sums(model)
    (model / "SHA256SUMS").write_text(f"{line}\n" + (model / "SHA256SUMS").read_text().replace("config", "tokenizer"))
    assert listed(model)[1][0] == fault


def test_a_list_that_leaves_weights_out(model: Path) -> None:
    """Also such as only the index names."""
    sums(model)
    text = (model / "SHA256SUMS").read_text()
    (model / "SHA256SUMS").write_text("".join(line for line in text.splitlines(True) if SHARDS[1] not in line))
    (model / SHARDS[1]).unlink()
    assert listed(model)[1] == [("uncovered", SHARDS[1], "SHA256SUMS")]
    (model / INDEX).unlink()
    (model / "more.gguf").write_bytes(b"GGUF")
    assert [fault[:2] for fault in listed(model)[1]] == [("missing", INDEX), ("uncovered", "more.gguf")]


def test_a_list_that_is_something_else_altogether(model: Path) -> None:
    (model / "SHA256SUMS").write_text("x\n" * 1_000_000)
    assert 1000 <= len(listed(model)[1]) < 1010


def test_hidden_files_are_no_weights(model: Path) -> None:
    """As macOS leaves them beside the real ones; no server takes them."""
    sums(model)
    for name in (f"._{SHARDS[0]}", f"._{INDEX}", "._model.gguf"):
        (model / name).write_bytes(b"\0\5\x16\7")
    assert faults(model) == [] and listed(model)[1] == []


def test_an_index_and_a_list_may_name_a_file_each_in_its_way(model: Path) -> None:
    sums(model)
    index(model, q=f"./{SHARDS[0]}")
    assert listed(model)[1] == []


def test_a_list_of_nothing(model: Path) -> None:
    assert listed(model) == ([], [("missing", "SHA256SUMS")])
    (model / "SHA256SUMS").write_text("")
    assert listed(model) == ([], [("empty", "SHA256SUMS")])
    (model / "SHA256SUMS").write_text("# nothing\n")
    assert listed(model)[1][0] == ("nothing", "SHA256SUMS")
    size = checkpoint.LIST_LIMIT + 1
    os.truncate(model / "SHA256SUMS", size)
    assert listed(model) == ([], [("big", "SHA256SUMS", size)])


def test_what_is_read_of_a_list_is_a_file_and_in_its_folder(model: Path) -> None:
    os.mkfifo(model / "pipe")
    assert whole("file:digest", (str(model), "pipe")) == ("irregular", "pipe")
    assert whole("file:digest", (str(model), "gone")) == ("missing", "gone")


@pytest.fixture(autouse=True)
def nothing_under_way() -> Iterator[None]:
    began = time.monotonic()
    yield
    checkpoint._under_way.clear()
    assert time.monotonic() - began < 3 * PATIENCE
