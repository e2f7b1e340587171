"""What each module may know, held against its source: imports, signals, the command line, the environment."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "gpuprestart"
SOURCES = {path.relative_to(PACKAGE).as_posix()[:-3]: path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}

PURE = (
    "bypass", "canvas", "checks", "claims", "columns", "documents", "dropin", "engines", "envfile", "events",
    "findings", "freed", "hookchecks", "infrastructure", "judge", "model", "owners", "past", "picture", "places",
    "policy", "quantities", "redaction", "remedies", "report", "rules", "schema", "selection", "service", "story",
    "table", "text", "ties", "unitchecks", "unitlines", "unitwords", "verdict",
)  # fmt: skip
IMPURE = ("os", "time", "signal", "logging", "subprocess", "socket")


def imported(name: str, *, types_too: bool = False) -> set[str]:
    """What a module imports at any depth, our own modules as ``.judge`` and ``.host.procfs``."""
    found: set[str] = set()
    folder = [""] if "/" not in name else ["", name.partition("/")[0]]
    for node in _statements(TREES[name], types_too):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(folder[: len(folder) - node.level + 1]) if node.level else ""
            if node.module:
                base = f"{base}.{node.module}" if node.level else node.module
            package = base in ("", ".host")
            found.update(f"{base}.{alias.name}" if package else base for alias in node.names)
    return found


def _statements(tree: ast.AST, types_too: bool) -> Iterator[ast.AST]:
    """All nodes, but for what is imported for the type checker alone."""
    for node in ast.iter_child_nodes(tree):
        if not types_too and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from _statements(node, types_too)


def attributes(name: str) -> set[str]:
    """``os.kill`` and the like, as they stand in the source."""
    return {ast.unparse(node) for node in ast.walk(TREES[name]) if isinstance(node, ast.Attribute)}


def where(*used: str) -> set[str]:
    """The modules in whose source one of these is used."""
    return {name for name in TREES if any(found in used for found in attributes(name))}


def test_imports_are_understood() -> None:
    """The test would otherwise hold vacuously."""
    assert ".host.pidfd" in imported("evict") and ".model" in imported("evict") and "signal" in imported("evict")
    assert ".faults" in imported("host/child") and "marshal" in imported("host/child")
    assert ".model" in imported("host/child", types_too=True) - imported("host/child")


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_know_no_machine(name: str) -> None:
    known = imported(name, types_too=True)
    roots = {module if module.startswith(".") else module.partition(".")[0] for module in known}
    assert roots.isdisjoint(IMPURE)
    assert not any(module.startswith(".host") for module in roots)
    assert "open" not in {node.id for node in ast.walk(TREES[name]) if isinstance(node, ast.Name)}


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_import_pure_modules_only(name: str) -> None:
    ours = {module[1:] for module in imported(name) if module.startswith(".")}
    assert ours <= {*PURE}


def test_no_modules_import_one_another_in_a_circle() -> None:
    ours = {f".{name.replace('/', '.')}": name for name in TREES}
    order = [
        *TopologicalSorter({name: {ours[each] for each in imported(name) & {*ours}} for name in TREES}).static_order()
    ]
    assert order.index("model") < order.index("judge") < order.index("cli")


@pytest.mark.parametrize("name", [name for name in TREES if name.startswith("host/")])
def test_host_modules_know_neither_the_stages_nor_one_another(name: str) -> None:
    ours = {module for module in imported(name, types_too=True) if module.startswith(".")}
    assert ours <= {".model", ".faults", ".host.libc"}


def test_only_evict_can_signal() -> None:
    assert {name for name in TREES if ".host.pidfd" in imported(name)} == {"evict"}
    assert where("signal.pidfd_send_signal") == {"host/pidfd"}
    # The other kills are of our own unreaped children, whose PIDs and groups cannot be another's.
    assert where("os.kill", "os.killpg", "signal.pthread_kill", "psutil.Process.kill") == {
        "host/child", "host/program", "host/ssh"
    }  # fmt: skip
    sends = {name for name in TREES if any(found.endswith(".send_signal") for found in attributes(name))}
    assert sends == set()


def test_only_cli_knows_the_command_line_the_environment_and_the_exit() -> None:
    assert where("sys.argv", "os.environ", "os.getenv", "os.putenv", "sys.exit") == {"cli"}
    assert where("os._exit") == {"cli", "host/child", "host/program"}
    assert where("os.abort") <= {"cli"}


def test_nobody_sleeps() -> None:
    """Waiting is poll(), which a signal ends; but in the driver's child, which SIGKILL ends, and nobody waits for."""
    assert where("time.sleep", "select.select", "signal.pause") == {"host/library"}


def test_nothing_is_initialised_or_loaded_before_it_is_needed() -> None:
    code = (
        "import sys; before = set(sys.modules); import gpuprestart.hook; heavy = "
        "('pynvml', 'psutil', 'systemd', 'subprocess', 'argparse', 'tomllib', 'tomli', 'json', 'logging');"
        "print([name for name in heavy if name in set(sys.modules) - before])"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    assert answer.stdout == "[]\n"


def test_the_child_that_talks_to_the_driver_is_forked_before_anything_is_loaded() -> None:
    """The driver's answer is what a clean start waits for, and it is asked by that child."""
    code = (
        f"import os, sys; sys.path.insert(0, {str(ROOT)!r}); before = set(sys.modules); import gpuprestart.cli;"
        "print(*sorted(set(sys.modules) - before))"
    )
    answer = subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    ours = {f"gpuprestart{name}" for name in ("", ".cli", ".faults", ".host", ".host.child", ".host.library")}
    assert ours <= set(answer.stdout.split()) <= {*ours, "__future__", "errno", "gc", "marshal", "time"}


@pytest.mark.parametrize("name", TREES)
def test_every_module_says_what_it_is(name: str) -> None:
    assert ast.get_docstring(TREES[name])


@pytest.mark.parametrize("name", TREES)
def test_no_module_is_named_after_nothing(name: str) -> None:
    stem = name.rpartition("/")[2]
    assert not any(word in stem for word in ("util", "helper", "common", "manager", "misc"))
