"""No test may leave a child or a descriptor behind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            # The one that listdir() itself had.
            continue
    return found


def _children() -> set[int]:
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/children", encoding="ascii") as file:
            found.update(int(pid) for pid in file.read().split())
    return found


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    descriptors, children = _descriptors(), _children()
    yield
    left = _children() - children
    opened = {number: path for number, path in _descriptors().items() if descriptors.get(number) != path}
    assert not left, f"left these children behind: {left}"
    assert not opened, f"left these descriptors open: {opened}"


@pytest.fixture
def shallow() -> Iterator[Path]:
    """A folder for sockets: an address has room for 107 bytes, which the path of pytest's own folders may go beyond."""
    with tempfile.TemporaryDirectory(prefix="gpuprestart-", dir="/tmp") as path:
        yield Path(path)
