"""What a unit's command line asks of a container engine: docker, podman or nerdctl. Pure.

A container outlives the client that a unit has started, so what the unit does about an earlier one decides what its
next start finds. Command lines are read as far as their words go, also inside ``sh -c``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple, Optional

from .service import Exec

NAMES = ("docker", "podman", "nerdctl")

_ENGINE = re.compile(rf"(?:.*/)?(?:{'|'.join(NAMES)})")
_SHELL = re.compile(r"(?:.*/)?(?:ba|da|k|z)?sh")
_VERBS = (
    "run",
    "rm",
    "stop",
    "kill",
    "start",
    "exec",
    "pull",
    "create",
    "compose",
    "network",
    "volume",
    "wait",
    "logs",
)

#: Where the processes of a container are put that does not get a cgroup of its own (podman-run(1), --cgroups).
_WITHIN = ("split", "disabled", "no-conmon")


class Call(NamedTuple):
    """One call of an engine: which, its verb, and the words behind that."""

    engine: str
    verb: str
    words: tuple[str, ...]

    def value(self, option: str) -> Optional[str]:
        """What an option is set to, as one word or as two."""
        for number, word in enumerate(self.words):
            if word.startswith(f"{option}="):
                return word.partition("=")[2]
            if word == option and number + 1 < len(self.words):
                return self.words[number + 1]
        return None

    @property
    def handles(self) -> frozenset[str]:
        """By what the container can be named in another call."""
        return frozenset(filter(None, (self.value("--name"), self.value("--cidfile"))))

    @property
    def within(self) -> bool:
        """The container's processes lie in the unit's own cgroup, where systemd ends them with the unit."""
        return self.value("--cgroups") in _WITHIN

    def ends(self, other: Call) -> bool:
        """No process of the other's container is left after it."""
        forced = any(word == "--force" or re.fullmatch(r"-[a-z]*f[a-z]*", word) for word in self.words)
        ended = (self.verb == "rm" and forced) or self.verb in ("stop", "kill")
        named = {*self.words, self.value("--cidfile")}
        return ended and self.engine == other.engine and not named.isdisjoint(other.handles)


def calls(command: Exec) -> list[Call]:
    """Every call of an engine in a command."""
    found = []
    for words in _simple(command.argv):
        number = next((number for number, word in enumerate(words) if _ENGINE.fullmatch(word)), len(words))
        rest = words[number + 1 :]
        verb = next((word for word in rest if word in _VERBS), None)
        if verb is not None:
            found.append(Call(words[number].rpartition("/")[2], verb, tuple(rest[rest.index(verb) + 1 :])))
    return found


def run(command: Exec) -> Optional[Call]:
    """The call that starts a container, if there is one."""
    return next((each for each in calls(command) if each.verb == "run"), None)


def _simple(argv: Sequence[str]) -> list[list[str]]:
    """The words of each simple command, of which a shell may be given several."""
    if len(argv) < 3 or not _SHELL.fullmatch(argv[0]) or not re.fullmatch(r"-[a-z]*c", argv[1]):
        return [list(argv)]
    lexer = shlex.shlex(argv[2], posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    found: list[list[str]] = [[]]
    try:
        for word in lexer:
            if set(word) <= set(";&|()"):
                found.append([])
            else:
                found[-1].append(word)
    except ValueError:
        # A quotation mark that nobody closes: the shell will say so.
        return [argv[2].split()]
    return found
