"""Packages built as `make` builds them, each from a copy of the tree of its own.

It knows the tree and the targets of the Makefile; what has to be in a package is the tests'.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

#: What is in the working tree and not in the source.
_IGNORED = (".git", ".venv", "build", "dist", "__pycache__", "*.egg-info", ".*_cache", ".hypothesis")


class Packages(NamedTuple):
    deb: Path
    rpm: Path


def copy_tree(target: Path) -> Path:
    """The tree as a clone would have it: the times of its files are those of the copy."""
    ignore = shutil.ignore_patterns(*_IGNORED)
    shutil.copytree(ROOT, target, ignore=ignore, copy_function=shutil.copyfile)
    # copyfile() leaves out the modes, of which git keeps one bit.
    for path in ROOT.rglob("*"):
        copy = target / path.relative_to(ROOT)
        if copy.is_file() and path.stat().st_mode & 0o100:
            copy.chmod(copy.stat().st_mode | 0o111)
    return target


def make(tree: Path, *targets: str, environment: Mapping[str, str] | None = None, umask: int = 0o022) -> None:
    """Run make there. It finds the environment that these tests run in ready for it, and sets nothing up."""
    ready = f"{sys.prefix}/ready"
    command = ["make", "--no-print-directory", f"VENV={sys.prefix}", f"--assume-old={ready}", *targets]
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(
        command,
        cwd=tree,
        env={**ours, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        umask=umask,
    )
    assert done.returncode == 0, done.stdout[-4000:]


def packages(tree: Path, *, environment: Mapping[str, str] | None = None, umask: int = 0o022) -> Packages:
    make(tree, "deb", "rpm", environment=environment, umask=umask)
    (deb,) = (tree / "dist").glob("*.deb")
    (rpm,) = (tree / "dist").glob("*.rpm")
    return Packages(deb=deb, rpm=rpm)


def version() -> str:
    return _found(r'^__version__ = "(.+)"$', ROOT / "gpuprestart/__init__.py")


def debian_version() -> str:
    return _found(r"^gpuprestart \((.+)\)", ROOT / "packaging/debian/changelog")


def make_older(tree: Path, older: str) -> None:
    """Turn a copy of the tree into an older version, with another default policy and a module that is gone since."""
    _replace(tree / "gpuprestart/__init__.py", f'"{version()}"', f'"{older}"')
    _replace(tree / "packaging/debian/changelog", f"({debian_version()})", f"({older}-1)")
    _replace(tree / "units/policy.toml", '#max_used = "64 MiB"', '#max_used = "32 MiB"')
    (tree / "gpuprestart/vanished.py").write_text('"""A module of an older version."""\n')


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{old} in {path}"
    path.write_text(text.replace(old, new))


def _found(pattern: str, path: Path) -> str:
    found = re.search(pattern, path.read_text(), re.MULTILINE)
    assert found, f"no {pattern} in {path}"
    return found[1]
