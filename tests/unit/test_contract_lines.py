"""Lines of the contract (docs/contract.md) that nothing else proves and that need no node."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpuprestart import infrastructure, settings, table
from gpuprestart.model import Action, Survey

from .machines import holder, policy, process, rule, survey
from .processes import PATIENCE

ROOT = Path(__file__).parents[2]

#: A fault of the program itself, before and after there is anything that could give a verdict on it.
FAULTS = {
    "no child": "import os; os.fork = lambda: 1 / 0",
    "in the run": "from gpuprestart import hook; hook._Run = lambda *_, **__: 1 / 0",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_program_has_its_own_status(fault: str) -> None:
    code = f"import sys; from gpuprestart import cli; {FAULTS[fault]}; sys.argv[1:] = ['check']; cli.run()"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert answer.returncode == 70
    assert "ZeroDivisionError" in answer.stderr
    if fault == "in the run":
        assert "internal, exit status 70" in answer.stdout


def test_what_we_are_not_given_is_no_fault_of_the_program() -> None:
    """A limit of the unit, or a machine that has nothing left."""
    lack = "import errno, os\ndef _lack(*_, **__): raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))\n"
    for where, told in (("hook._Run", "stdout"), ("os.fork", "stderr")):
        code = (
            f"{lack}import sys; from gpuprestart import cli, hook; {where} = _lack; sys.argv[1:] = ['check']; cli.run()"
        )
        answer = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
        )
        assert answer.returncode == 69
        assert "no more processes, memory or open files" in getattr(answer, told)
        assert "Traceback" not in answer.stderr


def test_a_policy_that_is_named_stands_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read instead of the search path, and the unit's overlay lies on the search path."""
    (tmp_path / "x.service.toml").write_text("[deadline]\nterm = '9 s'\n")
    named = tmp_path / "mine.toml"
    named.write_text("[deadline]\nterm = '7 s'\n")
    monkeypatch.setattr(settings, "FOLDERS", (str(tmp_path),))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    loaded = settings.load("x.service", file=str(named), deadline=None)
    assert (loaded.deadline.term, loaded.files) == (7, (str(named),))


@pytest.mark.parametrize(
    "program",
    [
        "nvidia-persistenced", "nv-fabricmanager", "nv-hostengine", "dcgm-exporter", "nvidia-cuda-mps-control",
        "nvidia-cuda-mps-server", "nvidia-powerd", "Xorg", "Xwayland", "gnome-shell", "nvtop",
    ],
)  # fmt: skip
def test_infrastructure_is_known_by_an_executable_of_roots(program: str) -> None:
    exe = f"/usr/bin/{program}"
    assert infrastructure.recognise(process(exe=exe))
    assert infrastructure.recognise(process(exe=exe, exe_trusted=False)) is None
    assert infrastructure.recognise(process(comm=program[:15])) is None


@pytest.mark.parametrize("action", ["spare", "kill", "refuse"])
def test_no_rule_is_about_us_or_our_ancestors(action: str) -> None:
    """Their owner's row decides, which is that of a failed unit here; and nobody of them is ever ended."""
    found = table.decide(policy(rule(action, user="model")), _ours(), _ours().holders[0])
    assert (found.action, found.rule) == (Action.REFUSE, None)


def _ours() -> Survey:
    of = holder(50, listed={0: 900})
    return survey(of, used=(903,), kin=frozenset({50}))
