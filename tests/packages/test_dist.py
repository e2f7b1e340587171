"""The wheel and the source distribution, for people who use pipx or pip."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata

from tests.packages import building
from tests.packages.building import ROOT

STEM = f"gpuprestart-{building.version()}"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = building.copy_tree(tmp_path_factory.mktemp("dist") / "gpuprestart")
    building.make(tree, "dist")
    return tree / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (wheel,) = dist.glob("*.whl")
    return wheel


def test_there_is_one_of_each(dist: Path) -> None:
    assert {path.name for path in dist.iterdir()} == {f"{STEM}.tar.gz", f"{STEM}-py3-none-any.whl"}


def test_the_wheel_has_the_whole_program_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == {str(path.relative_to(ROOT)) for path in (ROOT / "gpuprestart").rglob("*.py")}


def test_the_source_distribution_has_what_make_takes(dist: Path) -> None:
    with tarfile.open(dist / f"{STEM}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("docs", "gpuprestart", "packaging", "tests", "units"):
        here = [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        assert {str(path.relative_to(ROOT)) for path in here} <= names
    assert {"Makefile", "README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", ".ci/run"} <= names
    assert not any("__pycache__" in name for name in names)


def test_its_metadata_are_valid_and_complete(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = Metadata.from_email(archive.read(f"{STEM}.dist-info/METADATA"), validate=True)
        assert f"{STEM}.dist-info/licenses/LICENSE" in archive.namelist()
    assert (metadata.name, str(metadata.version)) == ("gpuprestart", building.version())
    assert metadata.license_expression == "Apache-2.0"
    assert str(metadata.requires_python) == ">=3.9"
    assert metadata.description == (ROOT / "README.md").read_text()
    assert metadata.description_content_type == "text/markdown"
    assert metadata.summary and metadata.keywords and metadata.classifiers
    assert {need.name for need in metadata.requires_dist or () if "extra" not in str(need.marker)} == {
        "nvidia-ml-py",
        "psutil",
        "systemd-python",
        "tomli",
    }


def test_the_wheel_runs_where_nothing_else_is(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    bin_ = tmp_path / "venv/bin"
    run(sys.executable, "-m", "venv", bin_.parent)
    run(bin_ / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
    assert run(bin_ / "gpuprestart", "--version") == f"gpuprestart {building.version()}\n"
    # All that it needs has come with it.
    run(bin_ / "python", "-I", "-c", "import psutil, pynvml, systemd.journal")


def run(*command: str | Path) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/")
    assert done.returncode == 0, done.stdout
    return done.stdout
