"""From the text of the policy files to one Policy: what is the default, and which file wins.

Knows the defaults and the layers: an overlay's keys win over the site's, its rules come first, save that it cannot undo
a refusal of the site. Refuses to know where the files are, who owns them, and what the machine looks like. All faults
of all files are told at once, each with file, line and key.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple, Optional, Union

from .model import Action, Outcome, Refusal
from .quantities import Size as Size
from .schema import TABLES, Document

#: More would bury the first ones, and somebody who mends twenty will run it again.
_FAULTS_TOLD = 20

#: What systemd allows in a unit's name; a slash is not among it.
_UNIT = re.compile(r"[A-Za-z0-9:_.\\-][A-Za-z0-9:_.\\@-]*\.[a-z]+", re.ASCII)


class Layer(NamedTuple):
    """One policy file: the site's, or an overlay of a unit over it."""

    path: str
    text: str
    overlay: bool = False


class Gpus(NamedTuple):
    """``"unit"``, ``"all"``, or the GPUs by name; ``origin`` is the FILE:LINE that says so, empty for the default."""

    select: Union[str, tuple[str, ...]] = "unit"
    origin: str = ""


class MemoryPolicy(NamedTuple):
    max_used: Size = Size(64 << 20)
    spared_max: Size = Size(2 << 30)
    min_free: Size = Size(0)
    settle: float = 0.5
    unified: str = "holders"


class Deadlines(NamedTuple):
    total: float = 120.0
    term: float = 10.0
    protected: float = 0.0
    nvml_init: float = 60.0
    nvml: float = 15.0
    #: For reading the models in full; not part of ``total``.
    checksums: float = 1800.0


class Nvml(NamedTuple):
    missing: str = "refuse"
    pids: str = "auto"


#: Comparisons of a version: an operator, and the numbers of the version.
Versions = tuple[tuple[str, tuple[int, ...]], ...]


class Require(NamedTuple):
    """What a start needs besides free memory on its GPUs; what is empty, 0 or ``any`` is not asked for.

    Sizes are in bytes. ``checksums`` is the name of a file in each of the models' folders.
    """

    ports: tuple[int, ...] = ()
    processes: tuple[re.Pattern[str], ...] = ()
    host_memory: int = 0
    disk: Mapping[str, int] = {}
    executables: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    checksums: str = ""
    gpu_count: int = 0
    driver: Versions = ()
    compute_mode: str = "any"
    persistence: str = "any"
    ecc: str = "any"
    mig: str = "any"


#: Names in /dev/shm that model servers and their libraries give to what they leave there.
SHM_PATTERNS = ("nccl-*", "cuda.shm.*", "torch_*", "psm_*", "sem.*", "sgl_shm_*")


class Residue(NamedTuple):
    """What becomes of what a dead server leaves in shared memory: ``off``, ``report`` or ``remove`` for each kind."""

    shm: str = "off"
    sysv: str = "off"
    mqueue: str = "off"
    shm_patterns: tuple[str, ...] = SHM_PATTERNS
    #: Whose may be removed: ``unit`` (the unit's user's and root's) or ``any``.
    owner: str = "unit"

    @property
    def asked(self) -> bool:
        return (self.shm, self.sysv, self.mqueue) != ("off", "off", "off")


class Reset(NamedTuple):
    """Whether a GPU whose memory nobody holds is reset before the start is given up, and by which command."""

    mode: str = "off"
    command: str = "/usr/bin/nvidia-smi"
    timeout: float = 60.0
    mig: bool = False
    nvswitch: bool = False


class Hooks(NamedTuple):
    """A program to run before the first signal to a holder, as its words; ``{pid}`` in them is the holder's."""

    before_kill: tuple[str, ...] = ()
    timeout: float = 10.0


class Metrics(NamedTuple):
    """The file that node_exporter's textfile collector reads; empty: none is written."""

    textfile: str = ""


class Match(NamedTuple):
    """What a rule asks of a holder; every key that is not None must fit.

    ``unit`` and ``session`` are globs, ``user`` a name or (as a number) a uid, ``container`` the beginning of an id or
    a runtime's name, the patterns are searched, ``age`` is in seconds, at least.
    """

    unit: Optional[str] = None
    session: Optional[str] = None
    user: Optional[Union[str, int]] = None
    container: Optional[str] = None
    exe: Optional[re.Pattern[str]] = None
    comm: Optional[re.Pattern[str]] = None
    cmdline: Optional[re.Pattern[str]] = None
    age: Optional[float] = None


class Rule(NamedTuple):
    """A rule of the site or of an overlay; ``origin`` is the FILE:LINE of its header."""

    name: str
    match: Match
    action: Action
    infrastructure: bool = False
    origin: str = ""
    overlay: bool = False


#: Whether a pattern is found in a text; None where that cannot be told.
Search = Callable[[re.Pattern[str], str], Optional[bool]]


def search(pattern: re.Pattern[str], text: str) -> Optional[bool]:
    return pattern.search(text) is not None


class Policy(NamedTuple):
    """The whole policy. Without any file it is this, which is safe on a shared node."""

    gpus: Gpus = Gpus()
    memory: MemoryPolicy = MemoryPolicy()
    deadline: Deadlines = Deadlines()
    dedicated: bool = False
    nvml: Nvml = Nvml()
    require: Require = Require()
    residue: Residue = Residue()
    reset: Reset = Reset()
    hooks: Hooks = Hooks()
    metrics: Metrics = Metrics()
    #: Instance overlay, template overlay, site. ``rule_for`` also heeds what no overlay may override.
    rules: tuple[Rule, ...] = ()
    files: tuple[str, ...] = ()
    #: How the rules' patterns are looked for. A process may call itself what one of them takes centuries on, so that a
    #: run looks for them where that can be abandoned.
    search: Search = search

    @property
    def asks_more(self) -> bool:
        """More than clean GPUs: what one sample of their memory cannot tell."""
        return self.require != Require() or self.residue.asked

    def rule_for(self, matches: Callable[[Rule], bool]) -> Optional[Rule]:
        """The rule that decides: the first that matches, unless the site by itself would have refused.

        An order of the rules alone cannot say that: with the site's refusals in front, a site that spares one program
        and refuses the rest would refuse that program too.
        """
        site = next((rule for rule in self.rules if not rule.overlay and matches(rule)), None)
        if site is not None and site.action is Action.REFUSE:
            return site
        return next((rule for rule in self.rules if rule.overlay and matches(rule)), site)


def parse(layers: Sequence[Layer]) -> Policy:
    """The policy that these files make together: the site's first, then the template's overlay, then the instance's."""
    documents = [Document(layer.path, layer.text) for layer in layers]
    faults = [fault for document in documents for fault in document.faults()]
    if faults:
        more = faults[1:_FAULTS_TOLD]
        if len(faults) > _FAULTS_TOLD:
            more.append(f"and {len(faults) - _FAULTS_TOLD} more faults")
        raise Refusal(Outcome.CONFIG, faults[0], more)
    tables: dict[str, dict[str, Any]] = {name: {} for name in TABLES}
    site: list[Rule] = []
    overlays: list[Rule] = []
    for layer, document in zip(layers, documents):
        for name, values in document.tables.items():
            for key, value in values.items():
                # A table in a table is merged key by key as well.
                tables[name][key] = {**tables[name].get(key, {}), **value} if isinstance(value, dict) else value
        if "select" in document.tables.get("gpus", {}):
            tables["gpus"]["origin"] = document.origin(("gpus", "select"))
        rules = [_rule(values, layer) for values in document.rules]
        # The later overlay is the narrower one, so its rules come before the earlier one's.
        site, overlays = (site, rules + overlays) if layer.overlay else (site + rules, overlays)
    return Policy(
        gpus=Gpus(**tables["gpus"]),
        memory=MemoryPolicy(**tables["memory"]),
        deadline=Deadlines(**tables["deadline"]),
        dedicated=tables["owners"].get("dedicated", False),
        nvml=Nvml(**tables["nvml"]),
        require=Require(**tables["require"]),
        residue=Residue(**tables["residue"]),
        reset=Reset(**tables["reset"]),
        hooks=Hooks(**tables["hooks"]),
        metrics=Metrics(**tables["metrics"]),
        rules=(*overlays, *site),
        files=tuple(layer.path for layer in layers),
    )


def _rule(values: dict[str, Any], layer: Layer) -> Rule:
    return Rule(
        name=values.get("name", values["origin"]),
        match=Match(**values["match"]),
        action=Action(values["action"]),
        infrastructure=values.get("infrastructure", False),
        origin=values["origin"],
        overlay=layer.overlay,
    )


def overlay_names(unit: str) -> tuple[str, ...]:
    """The names of the unit's overlays: the template's, where the unit is an instance, then its own.

    Escapes such as ``\\x2d`` stay as systemd writes them.
    """
    if _UNIT.fullmatch(unit) is None or ".." in unit or len(unit) > 255:
        raise Refusal(
            Outcome.CONFIG,
            f"{unit[:60]!r} is no name of a unit (such as sglang@qwen.service)",
            ["systemctl list-units shows the names; a path becomes a name with systemd-escape"],
        )
    prefix, at, instance = unit.partition("@")
    suffix = unit[unit.rindex(".") :]
    if at and instance != suffix:
        return (f"{prefix}@{suffix}.toml", f"{unit}.toml")
    return (f"{unit}.toml",)
