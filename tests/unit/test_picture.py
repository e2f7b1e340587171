"""The picture of a run: what is in it, that it is bounded, and that nothing in it is anything but a picture."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as some

from gpuprestart import canvas, picture
from gpuprestart.model import MIB

from .test_past import document, gpu, holder, hostile

SVG = "{http://www.w3.org/2000/svg}"

#: All that a picture is made of. None of it runs, loads, links or animates.
TAGS = {"svg", "title", "desc", "rect", "line", "path", "text"}
ATTRIBUTES = {
    "xmlns", "role", "font-family", "fill", "width", "height", "viewBox", "aria-labelledby", "id", "x", "y", "rx",
    "font-size", "font-weight", "font-style", "text-anchor", "x1", "y1", "x2", "y2", "stroke", "stroke-width",
    "stroke-dasharray", "d", "opacity",
}  # fmt: skip


def drawn(**changes: Any) -> ElementTree.Element:
    return ElementTree.fromstring(picture.svg(document(**changes)))


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def charts(root: ElementTree.Element) -> list[str]:
    """The lines of used memory."""
    return [e.get("d", "") for e in root.iter(f"{SVG}path") if e.get("fill") == "none"]


def test_it_says_what_there_is_to_file() -> None:
    root = drawn()
    said = "\n".join(texts(root))
    for word in (
        "cleaned", "sglang-qwen.service", "1 stale holder ended", "3f2a" * 8, "0b3c" * 8, "570.86", "3.900 s",
        "/etc/gpuprestart/policy.toml", "2026-12-01 06:30:00 UTC", "GPU-00000000-aaaa", "NVIDIA H200", "64 MiB",
        "SIGTERM python3[4711]", "terminated", "was left behind by old.service", "1523 MiB → 3 MiB", "1520 MiB",
    ):  # fmt: skip
        assert word in said, word
    assert root.find(f"{SVG}title").text == "sglang-qwen.service: cleaned, 2026-12-01 06:30:00 UTC"  # type: ignore[union-attr]
    description = root.find(f"{SVG}desc").text or ""  # type: ignore[union-attr]
    assert "1 of 1 GPUs proved clean" in description and "python3" in description and "1520 MiB freed" in description
    assert root.get("role") == "img" and root.get("aria-labelledby") == "title desc"


def test_memory_is_drawn_in_steps_on_the_time_of_the_phases() -> None:
    """A figure holds until the next: the line falls where memory was seen to be back, and not on the way there."""
    (line,) = charts(drawn())
    x = [canvas.LEFT + (canvas.RIGHT - canvas.LEFT) * at / 3.9 for at in (0.3, 3.0, 3.1, 3.9)]
    words = line.split()
    assert float(words[1]) == pytest.approx(x[0], abs=0.01)
    turns = [float(words[at + 1]) for at, word in enumerate(words) if word == "H"]
    assert turns == pytest.approx([*x[1:], canvas.RIGHT], abs=0.01)
    heights = [float(words[2]), *(float(words[at + 1]) for at, word in enumerate(words) if word == "V")]
    assert heights[0] == heights[1] < heights[2] == heights[3]
    bars = [e for e in drawn().iter(f"{SVG}rect") if e.get("fill") == picture.PHASES["drain"]]
    assert [float(e.get("x", "")) for e in bars] == pytest.approx(
        [canvas.LEFT + (canvas.RIGHT - canvas.LEFT) * 1.3 / 3.9], abs=0.01
    )


def test_the_limit_is_a_dashed_line_for_each_gpu_that_is_drawn() -> None:
    used = [[0.1, [900 * MIB, 700 * MIB]], [1.0, [3 * MIB, 3 * MIB]]]
    dashed = [
        e
        for e in drawn(gpus=[gpu(0), gpu(1)], timeline={"used_bytes": used}).iter(f"{SVG}line")
        if e.get("stroke-dasharray") and e.get("x2") == str(canvas.RIGHT)
    ]
    assert len(dashed) == 2


def test_where_memory_could_not_be_read_there_is_a_gap() -> None:
    used = [[0.1, [900 * MIB]], [0.5, [None]], [0.9, [None]], [1.0, [3 * MIB]]]
    assert len(charts(drawn(timeline={"used_bytes": used}))) == 2


def test_a_single_sample_is_a_dot_that_is_seen() -> None:
    root = drawn(timeline={"used_bytes": [[3.9, [3 * MIB]]]})
    (dot,) = [e for e in root.iter(f"{SVG}rect") if e.get("width") == str(picture.DOT)]
    assert canvas.LEFT < float(dot.get("x", "")) <= canvas.RIGHT - picture.DOT


@pytest.mark.parametrize(
    ("count", "moving", "lines", "said"),
    [
        (8, 2, 2, "6 GPUs more whose memory did not move"),
        (8, 0, 4, "4 GPUs more whose memory did not move either"),
        (1, 0, 1, ""),
        (112, 20, 16, "4 GPUs more moved, less than these, 92 GPUs more whose memory did not move"),
        (112, 112, 16, "96 GPUs more moved, less than these"),
    ],
)
def test_those_are_drawn_that_moved_and_the_rest_is_counted(count: int, moving: int, lines: int, said: str) -> None:
    used = [[0.1, [(900 + at if at < moving else 3) * MIB for at in range(count)]], [1.0, [3 * MIB] * count]]
    root = drawn(gpus=[gpu(at) for at in range(count)], timeline={"used_bytes": used})
    assert len(charts(root)) == lines
    assert [each for each in texts(root) if each.startswith("not drawn")] == ([f"not drawn: {said}"] if said else [])
    assert sum(each.startswith("GPU-") and len(each) > 12 for each in texts(root)) == min(count, picture.MOST_LISTED)


@pytest.mark.parametrize(
    ("count", "moving", "lines", "said"),
    [
        (8, 0, 1, "7 GPUs more whose memory did not move either"),
        (8, 2, 3, "5 GPUs more whose memory did not move"),
        (112, 20, 16, "5 GPUs more moved, less than these, 91 GPUs more whose memory did not move"),
    ],
)
def test_a_gpu_that_is_not_clean_is_drawn_though_nothing_moved_there(
    count: int, moving: int, lines: int, said: str
) -> None:
    """It is what the start was refused for."""
    last = count - 1
    used = [
        [at, [(40963 if gpu == last else 900 if at < 1 and gpu < moving else 3) * MIB for gpu in range(count)]]
        for at in (0.1, 1.0)
    ]
    many = [gpu(at, clean=at != last) for at in range(count)]
    root = drawn(gpus=many, timeline={"used_bytes": used})
    assert len(charts(root)) == lines
    assert f"GPU {last}" in texts(root) and f"not drawn: {said}" in texts(root)


def test_a_gpu_that_is_not_clean_is_listed_however_many_there_are() -> None:
    many = [gpu(at, clean=at != 100) for at in range(112)]
    said = texts(drawn(gpus=many, timeline={}))
    assert "GPU-00000064-aaaa" in said and "and 88 GPUs more, all of them clean" in said
    many = [gpu(at, clean=False) for at in range(112)]
    assert "and 88 GPUs more, not all of them clean" in texts(drawn(gpus=many, timeline={}))


def test_signals_at_one_moment_share_a_label_and_labels_do_not_lie_on_one_another() -> None:
    signals = [[0.3 + at / 1000, 100 + at, "SIGTERM"] for at in range(40)]
    signals += [[1.3, 100, "SIGKILL"], [1.4, 101, "SIGTERM"], [1.5, 102, "SIGKILL"], [3.8, 103, "SIGTERM"]]
    held = [holder(pid=100 + at, comm=f"worker{at}") for at in range(8)]
    root = drawn(holders=held, timeline={"signals": signals})
    labels = [e for e in root.iter(f"{SVG}text") if (e.text or "").startswith("SIG")]
    assert "SIGTERM worker0[100], worker1[101] and 38 more" in texts(root)
    spans: list[tuple[str, float, float]] = []
    for each in labels:
        width, x = 11 * canvas.LETTER * len(each.text or ""), float(each.get("x", ""))
        begin = x if each.get("text-anchor") == "start" else x - width
        assert begin >= 0 and begin + width <= canvas.WIDTH
        assert all(y != each.get("y") or begin > end or begin + width < start for y, start, end in spans)
        spans.append((each.get("y", ""), begin, begin + width))
    assert len(spans) == 5


def test_many_signals_are_marked_and_some_are_labelled() -> None:
    signals = [[at / 15, 100 + at, "SIGTERM"] for at in range(60)]
    root = drawn(timeline={"signals": signals})
    assert sum((each or "").startswith("SIGTERM") for each in texts(root)) == picture.MOST_LABELS
    assert "and 48 more marks without a label" in texts(root)


def test_a_run_without_a_course_says_so() -> None:
    root = drawn(timeline={}, phases={}, gpus=[], holders=[], duration_s=None, time=None)
    assert picture.NO_TIMELINE in texts(root) and charts(root) == []


def test_a_refusal_names_who_was_in_its_way() -> None:
    root = drawn(outcome="protected", exit=75, holders=[holder(action="refuse", fate=None, reason="belongs to x")])
    assert {"protected", "refuse", "belongs to x"} <= set(texts(root))
    (chip,) = [e for e in root.iter(f"{SVG}rect") if e.get("rx") == "4"]
    assert chip.get("fill") == picture.BAD


def _is_only_a_picture(text: str) -> None:
    root = ElementTree.fromstring(text)
    assert "<!DOCTYPE" not in text and "<!ENTITY" not in text and "<?xml-stylesheet" not in text
    for element in root.iter():
        assert element.tag.replace(SVG, "") in TAGS
        assert set(element.attrib) <= ATTRIBUTES, set(element.attrib) - ATTRIBUTES
        assert not any("url(" in value or "script" in value.lower() for value in element.attrib.values())
        # Whatever somebody wrote is text, and text stands only where text is shown.
        assert element.tag.replace(SVG, "") in ("text", "title", "desc") or not (element.text or "").strip()
        assert (element.text or "").strip() == "" or (element.text or "").isprintable()
        for name in ("x", "y", "x1", "x2", "y1", "y2", "width", "height"):
            value = element.get(name, "0").removesuffix("%")
            assert -1 <= float(value) < 20_000, (name, value)
    width, height = (float(word) for word in root.get("viewBox", "").split()[2:])
    assert width == canvas.WIDTH and 100 < height < 5000


@pytest.mark.parametrize(
    "text",
    [
        "</text><script>alert(1)</script>",
        '"/><a href="javascript:alert(1)">',
        "<![CDATA[ ]]> --> <!-- &#x0; &amp; &entity;",
        "\x00\x1b[31m\u202e\ufffe\ud800\u2028",
        "x" * 10_000,
        "https://example.net/x.svg#url(data:)",
    ],
)
def test_texts_are_text_alone(text: str) -> None:
    hostile = picture.svg(
        document(
            unit=text,
            message=text,
            outcome=text,
            run=text,
            driver=text,
            policy_files=[text] * 9,
            phases={text: 1.0},
            gpus=[gpu(uuid=text, name=text)],
            holders=[holder(comm=text, user=text, reason=text, fate=text)],
            timeline={
                "phases": [[text, 0.0, 1.0]],
                "signals": [[0.5, 4711, text]],
                "used_bytes": [[0.0, [9 * MIB]], [1.0, [3 * MIB]]],
            },
        )
    )
    _is_only_a_picture(hostile)


def test_a_page_escapes_what_no_document_was_read_of() -> None:
    page = canvas.Canvas()
    page.text(1, "\x00\x1b<b>\ufffe")
    (text,) = texts(ElementTree.fromstring(page.finish()))
    assert text == "\\x00\\x1b<b>\\ufffe"


@given(hostile)
def test_whatever_a_document_says_it_is_a_picture(of: Any) -> None:
    _is_only_a_picture(picture.svg(of if isinstance(of, dict) else {}))


@given(
    some.lists(some.floats(0, 1e9), max_size=5),
    some.lists(some.integers(0, 1 << 62), min_size=1, max_size=5),
    some.floats(0, 1e9),
)
def test_whatever_the_figures_it_stays_on_the_page(times: list[float], amounts: list[int], duration: float) -> None:
    timeline = {
        "phases": [["drain", at, at / 2] for at in times],
        "signals": [[at, 1, "SIGTERM"] for at in times],
        "used_bytes": [[at, [amount]] for at, amount in zip(times, amounts)],
    }
    _is_only_a_picture(picture.svg(document(timeline=timeline, duration_s=duration)))
