"""The packages that all of these tests are about, built once: those of this version, and those of an older one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.packages import building
from tests.packages.building import Packages

OLDER = "0.0.1"


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, in which the packages of this version have been built."""
    return building.copy_tree(tmp_path_factory.mktemp("this") / "gpuprestart")


@pytest.fixture(scope="session")
def packages(tree: Path) -> Packages:
    return building.packages(tree)


@pytest.fixture(scope="session")
def older(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    tree = building.copy_tree(tmp_path_factory.mktemp("older") / "gpuprestart")
    building.make_older(tree, OLDER)
    return building.packages(tree)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """rpm makes a database in the home of whoever asks it anything."""
    monkeypatch.setenv("HOME", str(tmp_path))
