"""The linters, the type checker, and the oldest Python that the program runs on."""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Optional

import pytest

from tests.node.image import cache_directory

ROOT = Path(__file__).parents[2]
OLDEST = (3, 9)
#: What the unit tests need there. Without systemd-python, which needs a compiler, the journal's tests are skipped.
NEEDED = (
    "pytest>=8,<9",
    "hypothesis>=6.100,<7",
    "jsonschema>=4.17,<5",
    "numpy>=1.22",
    "nvidia-ml-py>=12.535.133",
    "prometheus-client>=0.9",
    "psutil>=5.8",
    "pyyaml>=6,<7",
    "rich>=9.11",
    "safetensors>=0.4,<1",
    "tomli>=2.0",
)


def run(*command: str) -> None:
    answer = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert answer.returncode == 0, answer.stdout


@pytest.mark.parametrize(
    ("module", "arguments"),
    [("ruff", ("check", ".")), ("ruff", ("format", "--check", ".")), ("mypy", ())],
    ids=["ruff check", "ruff format", "mypy"],
)
def test_linter(module: str, arguments: tuple[str, ...]) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    run(sys.executable, "-m", module, *arguments)


def oldest_python() -> Optional[str]:
    """The oldest Python that the program runs on, where this machine has one."""
    name = "python{}.{}".format(*OLDEST)
    pyenv = os.path.expanduser("~/.pyenv/versions/{}.{}.*/bin/python".format(*OLDEST))
    for path in (shutil.which(name), *sorted(glob.glob(pyenv))):
        code = f"import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != {OLDEST})"
        if path and subprocess.run([path, "-c", code], stderr=subprocess.DEVNULL).returncode == 0:
            return path
    return None


def environment(python: str) -> Path:
    """A virtual environment of that Python with what the tests need; built aside, once, and kept."""
    key = hashlib.sha256(repr((python, NEEDED)).encode()).hexdigest()[:16]
    final = cache_directory() / f"python-{OLDEST[0]}.{OLDEST[1]}-{key}"
    if not (final / "ready").exists():
        shutil.rmtree(final, ignore_errors=True)
        subprocess.run([python, "-m", "venv", str(final)], check=True)
        command = [str(final / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *NEEDED]
        answer = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if answer.returncode:
            shutil.rmtree(final)
            pytest.skip(f"the packages that the tests need cannot be installed: {answer.stdout.strip()[-300:]}")
        (final / "ready").touch()
    return final / "bin/python"


def test_the_unit_tests_on_the_oldest_python(tmp_path: Path) -> None:
    if sys.version_info[:2] == OLDEST:
        pytest.skip("this is it")
    python = oldest_python()
    if python is None:
        pytest.skip("there is no Python {}.{} here".format(*OLDEST))
    options = ("-q", "--hypothesis-profile=few", f"--basetemp={tmp_path}/unit", f"--ignore={Path(__file__)}")
    run(str(environment(python)), "-m", "pytest", *options, "tests/unit")
