"""What the contract says of a simulated machine, told from what is true there and not from what the program read.

It is written from the text of the contract, and takes nothing from the modules that judge. Where something happens
while the program looks, it is right whether it saw that or not: wrong is what was wrong at every moment since the last
look began, or, of what a verdict tells, what was so at none.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Optional

from gpuprestart.model import MIB, Unit, Verdict

from .generated import BEGAN, CARRIER, OURS, US, USERS, UVM, Actor, Card, Machine, Rule
from .machines import TOTAL
from .simulated import State, World

#: The outcomes in the contract's order, each with its exit status.
STATUSES = {
    "config": 78,
    "interrupted": 75,
    "denied": 77,
    "unknown": 69,
    "protected": 75,
    "respawning": 75,
    "unkillable": 75,
    "not-freed": 75,
    "unattributed": 75,
    "cleaned": 0,
    "clean": 0,
}
#: A unit in maintenance may be up again at any moment.
UP = ("active", "activating", "reloading", "maintenance")
ENDED = ("inactive", "failed")
#: Of these there are some on the machines.
INFRASTRUCTURE = ("nvidia-persistenced", "nv-hostengine", "nvidia-cuda-mps-server", "Xorg")
CARRIERS = ("cron.service", CARRIER)
RUNTIMES = ("containerd-shim", "conmon", "slurmstepd")
SECONDS = {"10 s": 10.0, "100 s": 100.0, "2 h": 7200.0}
TICKS = 100
#: The clock is made of sums of fractions.
ABOUT = 1e-6


class Owner(NamedTuple):
    """Who a process belongs to, and whether somebody alive may want it for that."""

    kind: str
    alive: bool
    unit: Optional[Unit] = None


class Oracle:
    """Watches one run: it is told of every look, every signal and the verdict, and keeps what was wrong with them."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._terms = machine.terms
        self._own = machine.own if machine.mode in ("certain", "start") else None
        for_unit = machine.mode in ("certain", "start", "named")
        self._overlay = [rule for rule in machine.terms.rules if rule.overlay and for_unit]
        self._site = [rule for rule in machine.terms.rules if not rule.overlay]
        self._most, self._spared_max = machine.terms.max_used * MIB, machine.terms.spared_max * MIB
        self._unexplained_since: dict[str, float] = {}
        #: Every look: the world with what the driver had said by then, and with all moments until the next look.
        self._looks: list[World] = []
        #: Whom NVML had on a selected GPU when we signalled them; and when that was, of everybody.
        self._attributed: set[tuple[int, int]] = set()
        self._told: dict[tuple[int, int], float] = {}
        self.violations: list[str] = []

    # Who is wanted ---------------------------------------------------------------------------------------------------

    def word(self, world: World, state: State, actor: Actor) -> str:
        """What the contract's table says of a process: kill, spare, refuse or wait."""
        owner = self.owner(state, actor)
        program = actor.look.trusted and (actor.look.exe or "").rpartition("/")[2] in INFRASTRUCTURE
        if actor.pid in self.kin(state):
            # Rules are not about these, and nobody of them is ever ended.
            word = "spare" if program else self._row(world, owner, actor)
            return word if word != "kill" else "refuse"
        rule = self._rule(world, owner, actor, program)
        if rule is not None:
            if any(self._fits(world, owner, actor, key, value) is None for key, value in rule.match):
                return "refuse"
            named = {key for key, _ in rule.match} & {"unit", "session", "container"}
            if rule.action != "kill" or named or not owner.alive:
                return rule.action
        return "spare" if program else self._row(world, owner, actor)

    def _said(self, world: World, state: State, pid: int) -> str:
        """The same of one that NVML lists on a selected GPU: nobody is ended on its word alone."""
        actor = state.processes[pid]
        word = self.word(world, state, actor)
        held = self.owner(state, actor).kind == "previous" or any(self._seen(actor, card) for card in world.selected)
        return word if held or word != "kill" else "refuse"

    def kin(self, state: State) -> set[int]:
        """PID 1, ourselves, our ancestors and children, and what our control process started in our unit."""
        found = {1, *_line(state, US), *(actor.pid for actor in state.processes.values() if actor.ppid == US)}
        if self._own is not None:
            beside = [actor.pid for actor in state.processes.values() if actor.place.kind == "own"]
            found |= {pid for pid in beside if self._own.control_pid in _line(state, pid)}
        return found

    def owner(self, state: State, actor: Actor) -> Owner:
        place = actor.place
        if place.kind == "outside":
            return Owner("unknown", alive=True)
        if self._own is not None and place.kind == "own":
            previous = self._predates(actor)
            return Owner("previous" if previous else "current", alive=not previous, unit=self._own)
        if state.silent or actor.namespace == 0:
            return Owner("unknown", alive=True)
        if place.root or actor.namespace != OURS:
            kind = "job" if place.kind == "job" else "container"
            return Owner(kind, alive=actor.namespace != OURS or _is_run(state, place.root))
        if _has_runtime(state, _line(state, actor.pid)[1:]):
            return Owner("container", alive=True)
        known = (state.units.get(name) for name in place.names)
        unit = next((unit for unit in known if unit is not None and _below(place.path, unit.control_group)), None)
        if place.kind == "session":
            return Owner(
                "session", alive=unit is not None and unit.sub_state != "abandoned" and _is_up(unit), unit=unit
            )
        if not place.names:
            return Owner("nobody", alive=False)
        if unit is None:
            return Owner("unknown", alive=True)
        if place.kind == "manager":
            return Owner("manager" if _is_up(unit) else "dead manager", alive=True)
        return Owner("unit", alive=_is_up(unit), unit=unit)

    def _predates(self, actor: Actor) -> bool:
        """Older only if its start and one tick more are before that of the unit, on systemd's clock."""
        assert self._own is not None
        began = (actor.started + 1) * (1_000_000 // TICKS) - int(self._machine.ahead * 1_000_000)
        return began <= self._own.condition_usec

    def _row(self, world: World, owner: Owner, actor: Actor) -> str:
        dedicated, unit = self._terms.dedicated, owner.unit
        if owner.kind == "previous":
            return "refuse" if unit and unit.name in CARRIERS else "kill"
        if owner.kind == "unit" and unit is not None:
            if owner.alive:
                return "wait" if unit.active_state == "deactivating" else "refuse"
            plain = unit.name.endswith(".service") and unit.type != "oneshot" and unit.name not in CARRIERS
            return "kill" if dedicated or (plain and self._as_its_user(world, unit, actor)) else "refuse"
        if owner.kind in ("session", "manager") and owner.alive:
            return "spare" if self._only_draws(world, actor) else "refuse"
        if owner.kind == "session":
            return "kill" if dedicated or self._doomed() else "refuse"
        if owner.kind in ("container", "job"):
            return "refuse" if owner.alive else "kill"
        return "kill" if owner.kind == "nobody" and dedicated and actor.ppid == 1 else "refuse"

    def _as_its_user(self, world: World, unit: Unit, actor: Actor) -> bool:
        if not unit.user or unit.user.isdigit():
            return actor.uid == int(unit.user or 0)
        return unit.user in world.uids_told and USERS.get(actor.uid) == unit.user

    def _doomed(self) -> bool:
        """Whether logind ends what sessions of alice leave; there are no others."""
        if self._machine.logind is None or not self._machine.named:
            return self._machine.logind == (True, (), ())
        kill, only, exclude = self._machine.logind
        return kill and "alice" not in exclude and (not only or "alice" in only)

    # Rules -----------------------------------------------------------------------------------------------------------

    def _rule(self, world: World, owner: Owner, actor: Actor, program: bool) -> Optional[Rule]:
        """The first that matches, or may match for all that can be read; an overlay undoes no refusal of the site."""

        def first(rules: Sequence[Rule]) -> Optional[Rule]:
            fit = [rule for rule in rules if rule.infrastructure or not program]
            return next((rule for rule in fit if self._may_fit(world, owner, actor, rule)), None)

        site = first(self._site)
        return site if site is not None and site.action == "refuse" else first(self._overlay) or site

    def _may_fit(self, world: World, owner: Owner, actor: Actor, rule: Rule) -> bool:
        return all(self._fits(world, owner, actor, key, value) is not False for key, value in rule.match)

    def _fits(self, world: World, owner: Owner, actor: Actor, key: str, value: Any) -> Optional[bool]:
        """Whether a key of a rule fits; None where what it asks for could not be read."""
        place = actor.place
        if key in ("unit", "session", "container") and owner.kind == "unknown":
            return None
        if key == "unit":
            return owner.kind in ("unit", "previous", "current") and _is_called(owner.unit, value)
        if key == "session":
            return owner.kind == "session" and fnmatchcase(place.name, value)
        if key == "container":
            return owner.kind == "container" and (place.engine == value or place.name.startswith(value))
        if key == "user" and not str(value).isdigit():
            return USERS.get(actor.uid) == value if actor.uid in world.names_told else None
        if key == "user":
            return actor.uid == int(value)
        if key == "age":
            return world.judged_at - actor.started / TICKS >= SECONDS[value]
        if key == "cmdline" and not world.cmdlines.get(actor.pid):
            return None
        text = {"comm": actor.look.comm, "exe": actor.look.exe, "cmdline": actor.cmdline}[key]
        return None if text is None else re.search(value, text) is not None

    # Evidence --------------------------------------------------------------------------------------------------------

    def _listing(self, world: World, card: Card) -> dict[int, tuple[Optional[int], set[str]]]:
        """Bytes and kinds by PID, as the driver last listed them; empty where that is not to be believed."""
        found: dict[int, tuple[Optional[int], set[str]]] = {}
        given = world.given.get(card.uuid)
        if self._terms.pids != "ours" or given is None or given["strange"] in ("scrambled", "insane"):
            return found
        for pid, share, kind in given["listed"]:
            before, kinds = found.get(pid, (None, set()))
            known = [each for each in (before, share) if each is not None]
            found[pid] = (max(known, default=None), kinds | {kind})
        return found

    def _listed(self, world: World, pid: int, cards: Sequence[Card]) -> bool:
        return any(pid in self._listing(world, card) for card in cards)

    def _only_draws(self, world: World, actor: Actor) -> bool:
        """Everywhere that NVML lists it, it is in the list of graphics alone."""
        everywhere = [self._listing(world, card).get(actor.pid) for card in world.cards.values()]
        return {kind for found in everywhere if found is not None for kind in found[1]} == {"graphics"}

    def _unexplained(self, world: World, card: Card) -> int:
        """Bytes used less those of listed processes that were there all the time: the most that it can have been."""
        memory = world.given[card.uuid]["memory"]
        shares = [share for pid, (share, _) in self._listing(world, card).items() if _all_along(world.window, pid)]
        if memory is None or None in shares:
            return 0
        return int(memory[0]) - sum(share or 0 for share in shares)

    def _seen(self, actor: Actor, card: Card, *, as_cuda: bool = False) -> bool:
        """Whether a process can be seen to have what it takes to use a GPU."""
        fds = frozenset() if actor.hides == "fds" else actor.fds
        maps = frozenset() if actor.hides in ("maps", "wedged") else actor.maps
        uvm = {UVM} if as_cuda and self._machine.has_uvm else set()
        return not actor.corpse and card.needed | uvm <= fds | maps

    # Looks and signals -----------------------------------------------------------------------------------------------

    def looked(self, world: World) -> None:
        self._unexplained_since = {
            card.uuid: self._unexplained_since.get(card.uuid, world.now)
            for card in world.selected
            if self._unexplained(world, card) > self._most
        }
        self._over(world)
        self._looks.append(copy.copy(world))
        self._looks[-1].given = dict(world.given)

    def _over(self, world: World) -> None:
        """The last look is."""
        if self._looks:
            self._looks[-1].judged_at = world.judged_at

    def signalled(self, world: World, actor: Actor, name: str) -> None:
        for wrong in self._wrong(world, actor, name):
            self.violations.append(f"{name} to {actor.look.comm}[{actor.pid}] at {world.now - BEGAN:.3f} s: {wrong}")
        if name == "SIGTERM":
            self._told.setdefault(actor.identity, world.now)
        if self._listed(world, actor.pid, world.selected):
            self._attributed.add(actor.identity)

    def _wrong(self, world: World, actor: Actor, name: str) -> list[str]:
        now = world.window[-1]
        found = []
        if self.word(world, now, actor) != "kill":
            found.append(f"the contract says {self.word(world, now, actor)}, it is of {self.owner(now, actor)}")
        before = [then for then in _moments(world.window, actor) if then.place.path == actor.place.path]
        if not before:
            found.append("it was in another cgroup, or was another process, whenever it could be judged")
        if name != "SIGTERM" and actor.identity not in self._told:
            found.append("it was not sent SIGTERM before")
        if name == "SIGKILL" and world.now < self._told.get(actor.identity, 0.0) + self._terms.term - ABOUT:
            found.append("it has not had the time that it is given")
        if world.interrupted:
            found.append("the run had been interrupted")
        if self.owner(now, actor).kind != "previous":
            found += self._without_evidence(world, actor, name)
        # The start is refused then, and nobody is to be ended for it.
        return found + self.in_the_way(world) + self.claimed(world) + self._shared(world, actor)

    def _without_evidence(self, world: World, actor: Actor, name: str) -> list[str]:
        """What NVML says is not enough, and of those whom it does not list only CUDA's own are suspects, and only
        where there is memory that nobody explains."""
        moments = _moments(world.window, actor)
        if not any(self._seen(then, card) for then in moments for card in world.selected):
            return ["it has no node of a selected GPU"]
        if self._listed(world, actor.pid, world.selected):
            return []
        cards = [card for card in world.selected if any(self._seen(then, card, as_cuda=True) for then in moments)]
        cards = [card for card in cards if self._unexplained(world, card) > self._most]
        if not cards or self._listed(world, actor.pid, [*world.cards.values()]):
            return ["it is no holder, and no suspect of anything"]
        gone = [each for each in self._attributed if not world.lives(each)]
        waited = world.looked_at - min(self._unexplained_since.get(card.uuid, world.looked_at) for card in cards)
        still = all(change.on == "time" for change in self._machine.changes)
        if name == "SIGTERM" and gone and still and waited < self._terms.term - ABOUT:
            return ["it is a suspect, and the memory of one that was ended may still be on its way back"]
        return []

    def in_the_way(
        self, world: World, words: Sequence[str] = ("refuse",), states: Optional[Sequence[State]] = None
    ) -> list[str]:
        """Who was on a selected GPU at all these moments, and one of these each time; or that too much is spared."""
        states = states or world.window
        found = []
        for actor in states[0].processes.values():
            if self._listed(world, actor.pid, world.selected) and _all_along(states, actor.pid):
                said = {self._said(world, state, actor.pid) for state in states}
                found += [f"{actor.look.comm}[{actor.pid}] is on a selected GPU: {said}"] if said <= set(words) else []
        least = [min(self._spared(world, card, state) for state in states) for card in world.selected]
        return found + [f"{bytes // MIB} MiB are spared" for bytes in least if bytes > self._spared_max]

    def claimed(self, world: World, states: Optional[Sequence[State]] = None) -> list[str]:
        """Claims of others that held at all these moments. One that cannot be read is somebody's, as is one of a unit
        of which systemd does not tell; a rule that is about units alone may spare a unit, and so its claims."""
        found = []
        for uuid, text in world.claims.items():
            said = dict(word.partition("=")[::2] for word in text.split())
            name = said.get("unit", "")
            moments = states or world.window if name else ()
            holds = all(each.silent or _is_the_same(each.units[name], said["invocation"]) for each in moments)
            site, overlay = (
                next((rule for rule in rules if _is_about(rule, name)), None) for rules in (self._site, self._overlay)
            )
            rule = site if site is not None and site.action == "refuse" else overlay or site
            spared = rule is not None and rule.action == "spare"
            if holds and not spared and name != self._machine.own.name:
                found.append(f"{uuid} is claimed by {name or 'nobody knows whom'}")
        return found

    def _shared(self, world: World, actor: Actor, words: Sequence[str] = ("refuse", "wait")) -> list[str]:
        """Of the clients of one MPS server none is ended while somebody alive is another."""
        found = []
        for card in world.cards.values():
            clients = {pid for pid, (_, kinds) in self._listing(world, card).items() if "mps" in kinds}
            for pid in clients - {actor.pid} if actor.pid in clients else ():
                if _all_along(world.window, pid):
                    said = {self.word(world, state, state.processes[pid]) for state in world.window}
                    found += [f"PID {pid} uses the same MPS server: {said}"] if said <= set(words) else []
        return found

    def _spared(self, world: World, card: Card, state: State) -> int:
        """Bytes that the spared have on a GPU. One whose bytes are not told may have all that is used."""
        listing = self._listing(world, card)
        there = [state.processes[pid] for pid in listing if pid in state.processes]
        shares = [
            listing[each.pid][0] for each in there if not each.corpse and self.word(world, state, each) == "spare"
        ]
        memory = world.given[card.uuid]["memory"] if card.uuid in world.given else None
        return int(memory[0] if memory else 0) if None in shares else sum(share or 0 for share in shares)

    # The verdict -----------------------------------------------------------------------------------------------------

    def concluded(self, world: World, verdict: Verdict) -> None:
        self._over(world)
        outcomes = [outcome.value for outcome in verdict.outcomes]
        found = self._status(world, verdict, outcomes) + self._late(world) + self._fates(world, verdict)
        found += self._untrue(world, outcomes)
        if verdict.exit == 0:
            found += self._unproved(world) + self._unsettled(world)
        elif self._is_plain(world):
            found.append(f"nothing stands against it, but {verdict.message}")
        if verdict.exit and not (verdict.message and verdict.hints):
            found.append(f"it names nothing: {verdict.message!r}, {verdict.hints}")
        sent = len([signal for signal in world.signals if signal.delivered])
        if len([record for record in world.records if "GPUPRESTART_SIGNAL" in record.fields]) != sent:
            found.append(f"not all of {sent} signals were recorded, or more")
        mine = {uuid for uuid, text in world.claims.items() if f"unit={self._machine.own.name} " in text}
        due = {card.uuid for card in world.selected} if verdict.exit == 0 and self._own is not None else set()
        found += [f"it leaves claims on {mine}, due are {due}"] if mine != due else []
        self.violations += [f"{'/'.join(outcomes)} ({verdict.exit}): {each}" for each in found]

    def checked(self, world: World, verdict: Verdict) -> None:
        """A check touches nothing, and its 0 is proved as any other, by one sample."""
        outcomes = [outcome.value for outcome in verdict.outcomes]
        found = [f"{signal.name} was sent" for signal in world.signals]
        found += ["something was recorded"] if world.records else []
        found += ["claims were touched"] if world.claims != self._machine.claims else []
        if [*outcomes] != sorted(set(outcomes), key=[*STATUSES].index) or verdict.exit != STATUSES[outcomes[0]]:
            found.append("the status is not that of the first outcome in the contract's order")
        found += self._unproved(world) if verdict.exit == 0 else []
        self.violations += [f"check, {'/'.join(outcomes)} ({verdict.exit}): {each}" for each in found]

    def _status(self, world: World, verdict: Verdict, outcomes: Sequence[str]) -> list[str]:
        """That of the first outcome in the contract's order, unless systemd takes that for a success."""
        if not {*outcomes} <= {*STATUSES} or [*outcomes] != sorted(set(outcomes), key=[*STATUSES].index):
            return [f"these are no outcomes, or not in their order: {verdict.message}"]
        around = self._machine.mode in ("certain", "start", "reload") and not world.silent
        listed = self._machine.own.success_statuses if around else frozenset()
        status = STATUSES[outcomes[0]]
        if outcomes[0] == "config":
            status = next((each for each in (78, 75, 70) if str(each) not in listed), 134)
        elif status and ("TERM" in listed or str(status) in listed):
            return ["systemd takes this refusal for a success"]
        return [f"the status is {status}"] if verdict.exit != status else []

    def _late(self, world: World) -> list[str]:
        limit, unit = BEGAN + self._terms.total, self._machine.own
        if self._own is not None and unit.timeout_start is not None and not self._machine.extends:
            limit = min(limit, BEGAN + unit.timeout_start)
        late = world.now - world.hung - limit
        return [f"it comes {late:.3f} s late"] if late > 0.1 else []

    def _fates(self, world: World, verdict: Verdict) -> list[str]:
        """What is told of everybody's end is so."""
        sent = {(signal.identity, signal.name) for signal in world.signals if signal.delivered}
        survivors = {identity for identity, name in sent if name == "SIGKILL" and world.lives(identity)}
        told = {identity for identity, fate in verdict.fates.items() if fate.value == "survived"}
        found = [f"{survivors} survived, and {told} are told"] if survivors != told else []
        for identity, fate in verdict.fates.items():
            by = {"killed": "SIGKILL", "terminated": "SIGTERM"}.get(fate.value)
            if world.lives(identity) != (fate.value == "survived") or (by is not None and (identity, by) not in sent):
                found.append(f"{identity} is told to be {fate.value}")
        return found

    def _untrue(self, world: World, outcomes: Sequence[str]) -> list[str]:
        """Outcomes that were so at no moment since the last look began, and those that are missing."""
        sent = [signal for signal in world.signals if signal.delivered]
        ended = {signal.identity for signal in sent if not world.lives(signal.identity)}
        killed = {signal.identity for signal in sent if signal.name == "SIGKILL"}
        strange = {world.cards[card.uuid].strange for card in world.selected}
        hidden = any(actor.namespace == 0 for actor in world.first.values())
        blind = hidden or {actor.hides for actor in world.first.values()} - {"", "cmdline"} or self._machine.changes
        stays = ("refuse", "wait", "spare")
        once = [self.claimed(world, [each]) for each in world.window]
        for seen in (*self._looks[-1:], world):
            for each in world.window:
                then = copy.copy(seen)
                then.window = [each]
                once.append(self.in_the_way(then, ("refuse", "wait")))
                once += [self._shared(then, actor, stays) for actor in each.processes.values()]
        # Whose PID became another's may be seen with neither's nodes, and so by NVML alone.
        reused = len({each.identity for state in world.window for each in state.processes.values()}) > len(
            {pid for state in world.window for pid in state.processes}
        )
        # It may answer again by the time that the verdict comes.
        silent = any(change.what == "silent" for change in self._machine.changes)
        possible = {
            "interrupted": world.interrupted,
            "denied": len(sent) < len(world.signals) or blind,
            "unknown": self._machine.driver_dies or silent or strange & {"lost", "insane", "unified"},
            # Where nobody can be asked any more, mappings are not seen, and what NVML alone names is in the way.
            "protected": any(once) or reused or world.hung or self._machine.locked_until > self._terms.total,
            "respawning": any(actor.started >= BEGAN * TICKS for actor in world.seen.values()),
            "unkillable": any(world.lives(identity) for identity in killed),
            "cleaned": ended,
            "clean": not ended,
        }
        found = [f"it cannot be {outcome}" for outcome in outcomes if not possible.get(outcome, True)]
        must = [outcome for outcome in ("interrupted", "unkillable") if possible[outcome] and outcome not in outcomes]
        return found + [f"it is {outcome} as well" for outcome in must]

    def _unproved(self, world: World) -> list[str]:
        """Why there should have been no 0."""
        found = self.in_the_way(world, ("refuse", "wait", "kill")) + self.claimed(world)
        found += [f"{card.uuid} {self._dirt(world, card)}" for card in world.selected if self._dirt(world, card)]
        # Where nobody answers any more, what a pattern says cannot be told, and who that leaves in doubt is not ended.
        patterns = {key for rule in self._terms.rules for key, _ in rule.match} & {"comm", "exe", "cmdline"}
        untold = world.unanswered and patterns
        for pid in world.window[0].processes:
            if self._own is not None and not untold and _all_along(world.window, pid):
                then = [(state, state.processes[pid]) for state in world.window]
                previous = all(self.owner(state, actor).kind == "previous" for state, actor in then)
                if previous and {self.word(world, state, actor) for state, actor in then} == {"kill"}:
                    found.append(f"PID {pid}, of the last run, is still there")
        return found

    def _limit(self, world: World, card: Card) -> int:
        return self._most + max(min(self._spared(world, card, state), self._spared_max) for state in world.window)

    def _dirt(self, world: World, card: Card) -> str:
        given = world.given.get(card.uuid)
        if given is None or given["fault"]:
            return "was not read"
        if given["memory"] is None:
            strange = given["unlisted"] or self._terms.pids != "ours"
            proved = self._terms.unified == "holders" and not self._terms.min_free and not strange
            return "" if proved else "is judged by its holders, who cannot be told"
        used, free = given["memory"][:2]
        if used > self._limit(world, card):
            return f"has {used // MIB} MiB used"
        return f"has {free // MIB} MiB free" if not self._terms.min_free * MIB <= free <= TOTAL * MIB else ""

    def _unsettled(self, world: World) -> list[str]:
        """Once anything was dirty, memory has to stay low for a while, over two samples at least."""
        low_since, count, dirty = 0.0, 0, bool(world.signals)
        limits = [
            (look.looked_at, {card.uuid: self._limit(look, card) for card in world.selected}) for look in self._looks
        ]
        limits.append((world.now, {card.uuid: self._limit(world, card) for card in world.selected}))
        for at, answers in world.samples:
            # What is spared was last told by the look before, or is by the one that this sample is of.
            last = max((index for index, (then, _) in enumerate(limits) if then <= at), default=0)
            memories = [(card.uuid, answers[card.uuid]["memory"]) for card in world.selected if card.uuid in answers]
            most = {uuid: max(limit[uuid] for _, limit in limits[last : last + 2]) for uuid, _ in memories}
            if any(memory is not None and memory[0] > most[uuid] for uuid, memory in memories):
                count, dirty = 0, True
            else:
                low_since, count = (low_since if count else at), count + 1
        since = max([low_since, *(signal.at for signal in world.signals)])
        settled = count > 1 and world.now - since >= self._terms.settle - ABOUT
        return [f"it was not seen clean for {self._terms.settle} s"] if dirty and not settled else []

    # Nothing to refuse for -------------------------------------------------------------------------------------------

    def _is_plain(self, world: World) -> bool:
        """Nothing happens on the machine, its driver is well, and whoever has memory on a selected GPU is provably
        stale, can be seen, and goes in time."""
        machine, terms = self._machine, self._terms
        base = max(sum(card.base for card in machine.layout.cards), 3)
        odd: list[object] = [
            machine.changes,
            machine.claims,
            machine.interrupted,
            machine.locked_until,
            machine.driver_dies,
        ]
        odd += [not machine.named, terms.pids != "ours", terms.min_free, base > terms.max_used]
        odd += [card.strange or card.ghosts for card in machine.layout.cards]
        odd += [terms.total < 5.0, machine.own.timeout_start and not machine.extends]
        # Somebody comes of this age while the program runs.
        odd += [("age", "100 s") in rule.match for rule in terms.rules]
        state = State(world.first, world.units, silent=False)
        return not any(odd) and all(self._goes(world, state, actor) for actor in machine.actors)

    def _goes(self, world: World, state: State, actor: Actor) -> bool:
        """Whether this one is no reason to refuse, and would be gone within seconds."""
        manners, shares = actor.manners, actor.shares
        if actor.hides or manners.denied or manners.forks or manners.heir or manners.kill is None:
            return False
        if manners.back is None or manners.back > 0.4 or any(share.kinds != ("compute",) for share in shares.values()):
            return False
        mine = [card for card in world.selected if card.uuid in shares]
        if not mine or actor.corpse:
            return True
        if not all(share.told for share in shares.values()) or self.word(world, state, actor) != "kill":
            return False
        listed = any(share.listed for share in shares.values())
        return any(self._seen(actor, card, as_cuda=not listed) for card in mine)


# Their parts ---------------------------------------------------------------------------------------------------------


def _is_up(unit: Unit) -> bool:
    return unit.active_state not in ENDED


def _is_the_same(unit: Unit, invocation: str) -> bool:
    return unit.active_state in UP and unit.invocation == invocation


def _is_named(unit: str, said: str) -> bool:
    """A glob of units' names, in which ``x`` means ``x.service``."""
    return fnmatchcase(unit, said if said.endswith((".service", ".scope", "*")) else f"{said}.service")


def _is_about(rule: Rule, unit: str) -> bool:
    """Whether a rule is about units alone, and about this one."""
    return [key for key, _ in rule.match] == ["unit"] and _is_named(unit, str(rule.match[0][1]))


def _is_called(unit: Optional[Unit], said: str) -> bool:
    return unit is not None and _is_named(unit.name, said)


def _line(state: State, pid: int) -> list[int]:
    """A process and its ancestors."""
    line: list[int] = []
    while pid in state.processes:
        line.append(pid)
        pid = state.processes[pid].ppid
    return line


def _has_runtime(state: State, pids: Sequence[int]) -> bool:
    return any(state.processes[pid].look.comm in RUNTIMES for pid in pids)


def _is_run(state: State, root: str) -> bool:
    """Whether a container's or job's runtime is above, or among, what is left in its cgroup."""
    inside = [actor for actor in state.processes.values() if _below(actor.place.path, root) and not actor.corpse]
    return any(_has_runtime(state, _line(state, actor.pid)) for actor in inside)


def _below(path: str, root: str) -> bool:
    return bool(root) and (path == root or path.startswith(root + "/"))


def _moments(states: Sequence[State], actor: Actor) -> list[Actor]:
    """The same process at each of these moments at which it was there."""
    found = [state.processes.get(actor.pid) for state in states]
    return [each for each in found if each is not None and each.identity == actor.identity]


def _all_along(states: Sequence[State], pid: int) -> bool:
    """Whether one and the same living process had this PID at all these moments."""
    first = states[0].processes.get(pid)
    return first is not None and not first.corpse and len(_moments(states, first)) == len(states)
