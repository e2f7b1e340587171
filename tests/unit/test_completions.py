"""What the shells offer at the tabulator key, asked of the shells themselves, against what the program takes.

systemctl is one of our own in the PATH, since what is offered for a unit is what it lists.
"""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from .processes import PATIENCE
from .verbs import ALONE, EVERY, OPTIONS

REPOSITORY = Path(__file__).parents[2]
COMPLETIONS = REPOSITORY / "packaging" / "completions"
SHELLS = ("bash", "zsh", "fish")

SYSTEMCTL = r"""#!/bin/sh
case " $* " in *" --no-pager "*) ;; *) exit 1 ;; esac
case $1 in
list-unit-files)
    printf '%s\n' 'gone.service            masked   enabled' 'odd\x2done.service       static   -' \
        'sglang-qwen.service     enabled  enabled' 'sglang@.service         disabled enabled' ;;
list-units)
    printf '%s\n' 'ghost.service       not-found inactive dead    ghost.service' \
        'sglang-qwen.service loaded    active   running SGLang' 'sglang@llama.service loaded   active   running SGLang'
    ;;
esac
"""
#: What of these can be started, and the template.
STARTABLE = {r"odd\x2done.service", "sglang-qwen.service", "sglang@llama.service"}
TEMPLATE = "sglang@.service"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(SYSTEMCTL, encoding="utf-8")
    systemctl.chmod(0o755)
    (tmp_path / "home").mkdir()
    path = f"{tmp_path}:{os.environ['PATH']}"
    # A dumb terminal, of which no shell asks anything that we would have to answer.
    return {"PATH": path, "HOME": str(tmp_path / "home"), "LC_ALL": "C.UTF-8", "TERM": "dumb", "OUT": str(tmp_path)}


# Asking the shells ---------------------------------------------------------------------------------------------------


def in_a_terminal(command: list[str], keys: str, environ: Mapping[str, str]) -> str:
    """Type it into a shell at its prompt, and return what the shell has then written into the file "answer"."""
    answer = Path(environ["OUT"]) / "answer"
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(environ["OUT"])
        os.execve(command[0], command, environ)
    said = ""
    typed = False
    until = time.monotonic() + PATIENCE
    try:
        while not (answer.exists() and answer.read_text(encoding="utf-8").endswith("END\n")):
            assert time.monotonic() < until, said
            if not typed and PROMPT in said:
                os.write(terminal, keys.encode())
                typed = True
            if select.select([terminal], [], [], 0.05)[0]:
                said += os.read(terminal, 65536).decode("utf-8", "replace")
        return answer.read_text(encoding="utf-8")[: -len("END\n")]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)


PROMPT = "READY> "

#: Instead of the program there is a function that writes down what it was given.
SETUP = {
    "bash": r"""
PS1='READY> '
gpuprestart() { printf '%s\n' "$@" END > "$OUT/answer"; }
source @FILE@
""",
    "fish": r"""
function fish_prompt; echo -n 'READY> '; end
function gpuprestart; printf '%s\n' $argv END > $OUT/answer; end
source @FILE@
""",
    # compadd is what adds to the list that is offered.
    "zsh": r"""
PROMPT='READY> '
gpuprestart() { printf '%s\n' "$@" END > $OUT/answer; }
fpath=($OUT $fpath)
autoload -U compinit
compinit -u -D
compadd() {
    local -a found
    [[ ${@[1,(i)(-|--)]} == *-(O|A|D)\ * ]] || { builtin compadd -A found "$@"; print -rl -- $found >> $OUT/answer; }
    builtin compadd "$@"
}
offer() { zle list-choices; print END >> $OUT/answer; }
zle -N offer
bindkey '^O' offer
""",
}

#: What a shell would offer, asked without a terminal. zsh cannot be asked so.
ASK = {
    "bash": r"""
source @FILE@
COMP_LINE=$1
COMP_POINT=${#1}
read -ra COMP_WORDS <<< "$1"
_gpuprestart
printf '%s\n' "${COMPREPLY[@]}"
""",
    "fish": r"""
source @FILE@
complete -C $argv[1]
""",
}


def start(shell: str, environ: dict[str, str]) -> list[str]:
    """The command that starts the shell on a terminal, set up."""
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"no {shell} on this machine")
    file = COMPLETIONS / f"gpuprestart.{shell}"
    out = Path(environ["OUT"])
    setup = SETUP[shell].replace("@FILE@", str(file))
    if shell == "fish":
        return [path, "--no-config", "--interactive", "--init-command", setup]
    if shell == "bash":
        (out / "setup").write_text(setup, encoding="utf-8")
        return [path, "--noprofile", "--rcfile", str(out / "setup"), "-i"]
    shutil.copy(file, out / "_gpuprestart")
    (out / ".zshrc").write_text(setup, encoding="utf-8")
    environ["ZDOTDIR"] = str(out)
    return [path, "-d", "-i"]


def received(shell: str, keys: str, environ: dict[str, str]) -> list[str]:
    """What the program is given when this is typed, the tabulator key included."""
    return in_a_terminal(start(shell, environ), f"{keys}\n", environ).splitlines()


def offered(shell: str, line: str, environ: dict[str, str]) -> set[str]:
    """What there is to choose behind this line."""
    command = start(shell, environ)
    if shell == "zsh":
        answer = in_a_terminal(command, f"{line}\x0f", environ)
    else:
        ask = ASK[shell].replace("@FILE@", str(COMPLETIONS / f"gpuprestart.{shell}"))
        run = [command[0], *(["--norc", "-c", ask, "bash"] if shell == "bash" else ["--no-config", "-c", ask]), line]
        done = subprocess.run(run, env=environ, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        answer = done.stdout
    # fish puts what it says of a word behind it.
    return {line.partition("\t")[0] for line in answer.splitlines() if line}


#: Letters that stand for a long option.
SHORT = {"-h", "-H", "-n"}


# What they offer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", SHELLS)
def test_every_verb_and_no_other(shell: str, environ: dict[str, str]) -> None:
    assert {word for word in offered(shell, "gpuprestart ", environ) if not word.startswith("-")} == set(OPTIONS)


@pytest.mark.parametrize("shell", SHELLS)
def test_the_options_without_a_verb(shell: str, environ: dict[str, str]) -> None:
    assert offered(shell, "gpuprestart --", environ) - {"-h"} == ALONE - {"-h"}


@pytest.mark.parametrize("verb", OPTIONS)
@pytest.mark.parametrize("shell", SHELLS)
def test_every_option_of_a_verb_and_no_other(shell: str, verb: str, environ: dict[str, str]) -> None:
    found = {word.rstrip("=") for word in offered(shell, f"gpuprestart {verb} --", environ)}
    # A letter that stands for a long option need not be offered.
    assert found - SHORT == OPTIONS[verb] - SHORT


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("before", ["enable", "enable x", "doctor", "bypass", "clean --unit", "check --json --unit"])
def test_units_that_systemd_knows(shell: str, before: str, environ: dict[str, str]) -> None:
    """Neither one that is masked nor one that was only heard of; a template where that makes sense."""
    templates = {TEMPLATE} if before.startswith(("enable", "doctor")) else set()
    found = {word.replace("\\\\", "\\") for word in offered(shell, f"gpuprestart {before} ", environ)}
    assert {word for word in found if not word.startswith("-")} == STARTABLE | templates


@pytest.mark.parametrize("shell", SHELLS)
def test_only_units_that_have_the_hook_are_offered_to_be_rid_of_it(shell: str, environ: dict[str, str]) -> None:
    folders = Path("/etc/systemd/system").glob("*.service.d/50-gpuprestart.conf")
    enabled = {folder.parent.name[: -len(".d")] for folder in folders}
    found = offered(shell, "gpuprestart disable ", environ)
    assert {word for word in found if not word.startswith("-")} == enabled


def test_units_that_have_the_hook(tmp_path: Path, environ: dict[str, str]) -> None:
    for name in ("one.service.d/50-gpuprestart.conf", "two@.service.d/50-gpuprestart.conf", "other.service.d/10.conf"):
        file = tmp_path / name
        file.parent.mkdir()
        file.touch()
    command = start("bash", environ)
    ask = f'source {COMPLETIONS}/gpuprestart.bash; _gpuprestart_enabled "$1"'
    told = subprocess.run([command[0], "-c", ask, "bash", tmp_path], check=True, stdout=subprocess.PIPE, text=True)
    assert told.stdout.split() == ["one.service", "two@.service"]


@pytest.mark.parametrize("keys", ["clean --policy ", "check --policy="])
@pytest.mark.parametrize("shell", SHELLS)
def test_files_for_a_policy(shell: str, keys: str, environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "strict one.toml").touch()
    typed = received(shell, f"gpuprestart {keys}stri\t", environ)
    assert "=".join(typed[1:]) == "--policy=strict one.toml"


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("keys", "arguments"),
    [
        ("by\todd\t", ["bypass", r"odd\x2done.service"]),
        ("enable sglang@l\t", ["enable", "sglang@llama.service"]),
        ("check --unit=sglang-\t", ["check", "--unit=sglang-qwen.service"]),
        ("check --unit=sglang@\t", ["check", "--unit=sglang@llama.service"]),
        ("clean --unit sglang-q\t --js\t", ["clean", "--unit", "sglang-qwen.service", "--json"]),
    ],
    ids=["backslash", "at sign", "after an equals sign", "both signs", "an option after a value"],
)
def test_what_is_completed_reaches_the_program(
    shell: str, keys: str, arguments: list[str], environ: dict[str, str]
) -> None:
    assert received(shell, f"gpuprestart {keys}", environ) == arguments


# Their texts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", SHELLS)
def test_no_option_is_written_that_is_not_there(shell: str) -> None:
    """Also where a machine has no such shell."""
    text = (COMPLETIONS / f"gpuprestart.{shell}").read_text(encoding="utf-8")
    text = re.sub(r"systemctl list-.*", "", text)
    written = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)) - {"--"}
    if shell == "fish":
        text = re.sub(r"(?s)^function.*?^end", "", text, flags=re.MULTILINE)
        written = {f"--{word}" for word in re.findall(r"^complete.* -l ([a-z-]+)", text, re.MULTILINE)}
    assert written == {option for option in EVERY if option.startswith("--")}


@pytest.mark.parametrize("shell", SHELLS)
def test_the_syntax(shell: str, environ: dict[str, str]) -> None:
    command = start(shell, environ)
    subprocess.run([command[0], "-n", COMPLETIONS / f"gpuprestart.{shell}"], check=True)
