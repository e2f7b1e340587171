"""What all tests share: the one node of a session, the stage on it, and the list of cases."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.cases import CASES
from tests.node.machine import Node, can_boot
from tests.node.scene import Scene

# How much is generated for each property: the same in every run of the tests, anew in every `make soak`, and a little
# on the oldest Python, where only the language is in question. `--hypothesis-profile` chooses another than the first.
_ANY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
settings.register_profile("short", _ANY, max_examples=1_000, derandomize=True)
settings.register_profile("long", _ANY, max_examples=10_000, print_blob=True)
settings.register_profile("few", _ANY, max_examples=25, derandomize=True)
settings.load_profile("short")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", action="store_true", help="run what proves a case, and list id, test and result")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if {"scene", "node"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.node)
    config.stash[_MARKED] = {case for item in items for case in _cases(item)}
    if config.getoption("--cases"):
        items[:] = [item for item in items if item.get_closest_marker("case")]
    # What takes seconds comes before what boots a node.
    items.sort(key=lambda item: item.get_closest_marker("node") is not None)


def _cases(item: pytest.Item) -> list[str]:
    return [case for marker in item.iter_markers("case") for case in marker.args]


_MARKED = pytest.StashKey[set[str]]()
_RESULTS = pytest.StashKey[dict[str, list[tuple[str, str]]]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if report.when == "call" or report.outcome != "passed":
        results = item.config.stash.setdefault(_RESULTS, {})
        for case in _cases(item):
            results.setdefault(case, []).append((item.nodeid, report.outcome))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not config.getoption("--cases"):
        return
    results = config.stash.get(_RESULTS, {})
    terminalreporter.section("cases")
    for case, situation in CASES.items():
        terminalreporter.write_line(f"{case:4} {situation}")
        for test, outcome in results.get(case, [("no test", "missing")]):
            terminalreporter.write_line(f"     {outcome:8} {test}")


@pytest.fixture(scope="session")
def marked_cases(request: pytest.FixtureRequest) -> set[str]:
    return request.config.stash[_MARKED]


@pytest.fixture(scope="session")
def boots() -> None:
    """Where no node can boot, tests are skipped, but never in CI."""
    reason = can_boot()
    if reason is not None:
        if os.environ.get("CI"):
            pytest.fail(f"the simulated node cannot boot: {reason}")
        pytest.skip(f"the simulated node cannot boot: {reason}")


@pytest.fixture(scope="session")
def node(boots: None) -> Iterator[Node]:
    """The node that all tests of a session share."""
    with Node(gpus=8) as booted:
        yield booted


@pytest.fixture
def scene(node: Node) -> Iterator[Scene]:
    """Eight idle GPUs and the default policy; whatever the test starts is ended after it."""
    scene = Scene(node)
    scene.reset()
    try:
        yield scene
    finally:
        scene.strike()
