"""The files that a server needs: programs that it can run, models that are whole.

What is in them is read by a child, for a mount whose server is gone hangs whoever reads; here that becomes sentences.
A long answer comes in pieces, so that one that is long can be told from one that never comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, NamedTuple, Union

from .host.program import PATH
from .model import Account, Unmet
from .neighbours import Ask
from .policy import Require
from .text import printable

#: Seconds for an answer about files, or for a piece of one; where all is read, a slow disk may stop for longer.
SLOW = 10.0
STALLED = 30.0
LEAST = 0.5

HUNG = "its file system does not answer: findmnt shows which it is, dmesg why; bring back the server that it is on"

#: What systemd has services look for programs in (systemd.exec(5)).
FOLDERS = tuple(PATH.split(":"))

#: So many of them, and so many faults of one model, are more than enough.
MOST_FOLDERS = 100
MOST = 5

GIB = 1 << 30

Clock = Callable[[], float]

_FAULTS = {
    "missing": "{} is not there",
    "dangling": "{} is a link to {}, which is not there",
    "folder": "{} is a folder",
    "irregular": "{} is no regular file",
    "unreadable": "{} cannot be read: {}",
    "empty": "{} is empty",
    # Of programs.
    "unknown": "{} cannot be executed: its unit's {}{} is not known on this machine",
    "noexec": "{} lies on a file system that is mounted with noexec",
    "rights": "{} has mode {}, by which {account} may not execute it",
    "closed": "{} cannot be reached by {account}, who may not search the folder {}",
    "nameless": "{} is a script that names no interpreter",
    "nested": "{} is a script whose interpreters are scripts themselves, too many of them",
    "unfound": "{} has env look for {}, which is in no folder of PATH",
    # Of models.
    "big": "{} has {} bytes, more than any such file needs",
    "pointer": "{} is what Git LFS has in place of a file, and not the file",
    "json": "{} is no JSON object",
    "index": "{} does not say which file has which tensor",
    "outside": "{} names {}, which is not in its folder",
    "crowded": "{} has more than {} files",
    "no-header": "{} does not begin as a safetensors file does",
    "headless": "{} has {} bytes, but its header alone takes {}",
    "header": "{} has a header that is no JSON object",
    "entry": "{} has a header whose entry {} cannot be one",
    "length": "{} has {} bytes, but by its header it has {}",
    "holes": "{} has a header by which its tensors overlap, or leave bytes to nobody",
    "tensors": "{} names {} tensors that are in no file, such as {}",
    "unfinished": "{} is left of a download that is not finished",
    "weights": "{} has no weights (*.safetensors)",
    "tokenizer": "{} has no tokenizer (tokenizer.json, tokenizer.model, or vocab.json with merges.txt)",
    # Of lists of checksums.
    "line": "{}:{} is no line of sha256sum's",
    "itself": "{} lists itself, which no list can",
    "twice": "{} has two checksums of {}",
    "nothing": "{} lists nothing",
    "uncovered": "{} is not listed in {}",
    "differs": "{} is not what {} says",
}

ANEW = "get these files again"
_HINTS = {
    "pointer": "fetch what it stands for: git lfs pull",
    "unreadable": "see who may read it, and dmesg for the disk: ls -l",
    "unfinished": "finish the download, or remove what is left of it once it is known to be over",
    "line": "make the list anew with sha256sum",
    "nothing": "make the list anew with sha256sum",
    "itself": "remove the list, then make it anew with sha256sum",
    "twice": "make the list anew with sha256sum",
    "uncovered": "make the list anew with sha256sum",
}


def _sentence(fault: Sequence[Any], account: str = "") -> str:
    word, *facts = fault
    shown = [printable(fact, 300) if isinstance(fact, str) else fact for fact in facts]
    return _FAULTS[word].format(*shown, account=account)


def _unmet(check: str, subject: str, what: str, hint: str) -> Unmet:
    return Unmet(check, subject, f"{what} (require.{check})", hint, file=True)


class Silent(Exception):
    """No answer came in so many seconds."""


class _Late(Exception):
    """Answers came, but not the last one in time."""


def _silent(check: str, path: str, silence: Silent) -> Unmet:
    return _unmet(check, path, f"{printable(path, 200)} gave no answer for {silence} s", HUNG)


def answer_of(request: Any, ask: Ask, clock: Clock, until: float, most: float = SLOW) -> Any:
    """The answer. A file system that is well has time for one even at the end. Raises Silent."""
    patience = max(LEAST, min(most, until - clock()))
    answer = ask(request, patience)
    if answer is None:
        raise Silent(f"{patience:.2g}")
    return answer


# Programs ------------------------------------------------------------------------------------------------------------


def executables(
    paths: Sequence[str], ask: Ask, account: Account, *, search: str, clock: Clock, until: float
) -> list[Unmet]:
    """Programs that are not there, or that the unit's user cannot execute. ``search`` is a PATH= in which env may find
    interpreters, beside systemd's own."""
    folders = list(dict.fromkeys([*(each for each in search.split(":") if each.startswith("/")), *FOLDERS]))
    found = []
    for path in paths:
        asked = (path, account.user, account.group, list(account.supplementary), folders[-MOST_FOLDERS:])
        try:
            answer = answer_of(("file:executable", asked), ask, clock, until)
        except Silent as silence:
            found.append(_silent("executables", path, silence))
            continue
        if answer:
            found.append(_not_executable(path, answer, printable(account.user, 64) or "root"))
    return found


def _not_executable(path: str, answer: Any, account: str) -> Unmet:
    shown = printable(path, 200)
    if isinstance(answer, str):
        what = f"whether {account} may execute {shown} cannot be told: {answer}"
        return _unmet("executables", path, what, "root can tell: sudo gpuprestart check")
    word, subject, *facts = answer
    if subject != path:
        subject = f"{shown} is run by {subject}, which"
    there = "install it, or correct require.executables"
    hint = {
        "missing": there,
        "dangling": there,
        "folder": there,
        "irregular": there,
        "unknown": "correct User= and Group= of the unit",
        "nameless": f"give it a first line that names its interpreter, after #!: head -n 1 {shown}",
        "nested": f"head -n 1 {shown} shows its interpreter, which has to be a program in the end",
        "unfound": "install that, or have PATH= in Environment= of the unit name its folder",
        "noexec": f"findmnt -T {shown} shows which: mount it with exec, or put the program elsewhere",
    }.get(word, f"namei -l {shown} shows who may do what")
    return _unmet("executables", path, _sentence((word, subject, *facts), account), hint)


# Models --------------------------------------------------------------------------------------------------------------


def models(paths: Sequence[str], ask: Ask, *, clock: Clock, until: float) -> list[Unmet]:
    """Models that are not whole, as far as that can be told without reading their weights."""
    found = []
    for path in paths:
        try:
            faults = _whole(("file:model", path), ask, clock, until)
        except Silent as silence:
            found.append(_silent("models", path, silence))
        except _Late:
            what = f"the model {printable(path, 200)} could not be looked through before the deadline"
            found.append(_unmet("models", path, what, "raise deadline.total"))
        else:
            found += [_not_whole("models", path, faults)] if faults else []
    return found


def _whole(
    request: Any,
    ask: Ask,
    clock: Clock,
    until: float,
    most: float = SLOW,
    heard: Callable[[int], object] = lambda done: None,
) -> Any:
    """An answer that comes in pieces; ``heard`` is told of each how much is done. Raises Silent, _Late."""
    while True:
        answer = answer_of(request, ask, clock, until, most)
        if isinstance(answer, str):
            return answer
        word, value = answer
        if word == "done":
            return value
        heard(value)
        if clock() >= until:
            raise _Late


def _not_whole(check: str, path: str, faults: Union[str, Sequence[Sequence[Any]]]) -> Unmet:
    shown = printable(path, 200)
    if isinstance(faults, str):
        return _unmet(
            check, path, f"the model {shown} cannot be read: {faults}", f"correct require.models, or ls {shown}"
        )
    told = [_sentence(fault) for fault in faults[:MOST]]
    more = [f"{len(faults) - MOST} more"] if len(faults) > MOST else []
    # Who makes a list anew of files that are not whole will never hear of it again.
    hint = _HINTS.get(faults[0][0], ANEW) if all(fault[0] in _HINTS for fault in faults) else ANEW
    return _unmet(check, path, f"the model {shown} is not whole: {'; '.join([*told, *more])}", f"{hint}, in {shown}")


# Checksums -----------------------------------------------------------------------------------------------------------


class _Listed(NamedTuple):
    model: str
    name: str
    digest: str
    size: int


class _Progress:
    """How much of the files has been read, said once a second."""

    def __init__(self, listed: Sequence[_Listed], say: Callable[[str], object], clock: Clock) -> None:
        self._files, self._bytes = len(listed), sum(each.size for each in listed)
        self._say, self._clock = say, clock
        self._said = float("-inf")
        self._files_done = self._bytes_done = 0

    def told(self, more: int = 0) -> str:
        """``more`` bytes are those of the file that is being read."""
        files = f"{self._files_done} of {self._files} files"
        return f"{files}, {_gib(self._bytes_done + more)} of {_gib(self._bytes)} GiB"

    def reading(self, more: int) -> None:
        if self._clock() >= self._said + 1:
            self._said = self._clock()
            self._say(f"Verifying checksums: {self.told(more)}")

    def through(self, listed: _Listed) -> None:
        self._files_done += 1
        self._bytes_done += listed.size


def _short(path: str) -> str:
    return printable(path, 200)


def _gib(amount: int) -> str:
    """Rounded down, so that it is all only when it is."""
    return f"{amount // GIB}" if amount >= 10 * GIB else f"{10 * amount // GIB / 10}"


def checksums(require: Require, ask: Ask, *, say: Callable[[str], object], clock: Clock, until: float) -> list[Unmet]:
    """Files of the models whose content is not what the list of checksums says. All of it is read."""
    faults: dict[str, Any] = {path: [] for path in require.models}
    listed: list[_Listed] = []
    silent: dict[str, Unmet] = {}
    late = False
    for path in faults:
        try:
            answer = _whole(("file:list", (path, require.checksums)), ask, clock, until)
        except Silent as silence:
            silent[path] = _silent("checksums", path, silence)
        except _Late:
            late = True
        else:
            faults[path] = answer if isinstance(answer, str) else answer[1]
            listed += [] if isinstance(answer, str) else [_Listed(path, *entry) for entry in answer[0]]
    progress = _Progress(listed, say, clock)
    for each in listed:
        if each.model in silent:
            continue
        late = late or clock() >= until
        if late:
            continue
        progress.reading(0)
        asked = ("file:digest", (each.model, each.name))
        try:
            answer = _whole(asked, ask, clock, until, STALLED, progress.reading)
        except Silent as silence:
            silent[each.model] = _silent("checksums", f"{each.model}/{each.name}", silence)
            continue
        except _Late:
            late = True
            continue
        progress.through(each)
        if isinstance(answer, tuple):
            faults[each.model].append(answer)
        elif answer != each.digest:
            faults[each.model].append(("differs", each.name, require.checksums))
    found = [_not_whole("checksums", path, known) for path, known in faults.items() if known]
    found += silent.values()
    if late:
        told = f"only {progress.told()} could be verified in time"
        what = f"of {', '.join(map(_short, require.models))} {told} (require.checksums, deadline.checksums)"
        hint = "raise deadline.checksums, and TimeoutStartSec= of the unit where that is shorter"
        found.append(Unmet("checksums", require.checksums, what, hint, file=True))
    return found
