"""What the endurance run plays: scene number i of a seed, derived from the two alone.

A plan says which GPUs there are, who holds memory on them and how, what goes wrong, and what happens in the middle. It
knows nothing of a node, and nothing of what the hook should make of it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import NamedTuple, Optional, TypeVar

T = TypeVar("T")

#: A GPU by its slot, and the MIG instance on it, if any.
Place = tuple[int, Optional[int]]

#: Who is there, with how often.
ROLES = {
    "stale": 50,  # left in the cgroup of a unit that has failed
    "own": 9,  # left in the cgroup of the very unit that starts
    "live": 9,  # an active service
    "watcher": 6,  # an active service with every node open and no memory
    "stopping": 5,  # a service that was told to stop and is about to
    "lingering": 2,  # one that was told to stop and does not
    "session": 3,  # left by a login session that is over
    "stranger": 4,  # left in the cgroup of a failed unit, by somebody else than that unit's user
    "hidden": 2,  # an active service whose memory the driver attributes to nobody
    "spared": 4,  # an active service that a rule spares
    "claimant": 4,  # a unit that was given the GPU by an earlier run, and does not use it yet
    "gone": 6,  # dead before the run; its memory is not back yet
    "leak": 5,  # memory that is nobody's
    "ghost": 3,  # memory of a listed PID that is nowhere
}

#: How a stale process holds on.
FORMS = {
    "obeys": 10,
    "ignores": 4,
    "slow": 3,
    "stopped": 3,
    "forks": 3,
    "mapped": 3,
    "zombie": 3,
    "unlisted": 4,
    "draws": 2,
    "crowd": 4,
    "several": 3,
}

#: What is wrong with the whole start.
FAULTS: Mapping[str, float] = {"": 79, "lost": 5, "hang": 1.5, "stuck": 1, "policy": 3, "selection": 3, "mig": 7.5}

#: What happens while the hook runs.
EVENTS = {"": 60, "stop": 10, "second": 10, "check": 8, "reload": 6, "journald": 6}

#: Seconds from a process's end to its memory's return; None: never.
RELEASES: Mapping[Optional[float], float] = {0.05: 60, 0.2: 20, 0.8: 13, None: 7}

#: What a policy or a selection can be that is refused.
POLICIES = ("[nonsense]\nx = 1\n", "[rule", '[owners]\ndedicated = "yes"\n', "[gpus]\nselect = [3.5]\n")
SELECTIONS = ("8", "GPU-dead", "0,,1", "0,0", "all")


class Actor(NamedTuple):
    role: str
    places: tuple[Place, ...] = ()
    form: str = "obeys"
    many: int = 1
    mib: int = 900


class Plan(NamedTuple):
    number: int
    gpus: int
    selected: tuple[Place, ...]
    #: How the unit names them: index, uuid, all, none.
    by: str
    actors: tuple[Actor, ...] = ()
    release: Optional[float] = 0.05
    fault: str = ""
    #: Which policy or selection is wrong, which slot is lost, which call hangs.
    detail: str = ""
    event: str = ""
    #: Seconds from the start to the event.
    delay: float = 0.0
    #: What the second unit selects.
    second: tuple[Place, ...] = ()
    #: Typed in a shell for that unit, instead of in front of its server.
    shell: bool = False
    #: Run by something that takes down how much memory it needed at most.
    measured: bool = False

    @property
    def hopeless(self) -> bool:
        """Whether something on the selected GPUs never changes, so that the run would last to its deadline."""
        for actor in self.actors:
            stays = actor.role in ("leak", "ghost", "hidden", "lingering") or self.release is None
            if stays and set(actor.places) & {*self.selected, *self.second}:
                return True
        return False


def plan(seed: int, number: int) -> Plan:
    pick = random.Random(f"{seed} {number}")
    fault = _one(pick, FAULTS)
    event = _one(pick, EVENTS) if fault in ("", "mig") else ""
    shell = event in ("", "reload", "journald") and pick.random() < 0.15
    made = _on_instances(pick) if fault == "mig" else _on_gpus(pick, fault, event)
    crowd = 0 if fault in ("hang", "stuck") else pick.choices((0, 1, 2, 3), (2, 8, 5, 2))[0]
    actors = tuple(_actor(pick, made) for _ in range(crowd))
    return made._replace(
        number=number,
        actors=_reconciled(actors),
        release=_one(pick, RELEASES),
        event="" if event == "second" and not made.second else event,
        delay=round(pick.uniform(0, 0.6), 3),
        shell=shell,
        measured=shell or pick.random() < 0.4,
    )


def _on_gpus(pick: random.Random, fault: str, event: str) -> Plan:
    gpus = pick.randint(1, 8)
    by = _one(pick, {"index": 60, "uuid": 25, "all": 12, "none": 3 if not fault else 0})
    if fault in ("lost", "selection", "hang", "stuck"):
        by = "index"
    slots = sorted(pick.sample(range(gpus), pick.randint(1, gpus)))
    slots = {"all": list(range(gpus)), "none": []}.get(by, slots)
    made = Plan(0, gpus, tuple((slot, None) for slot in slots), by, fault=fault)
    if fault == "lost":
        return made._replace(detail=str(pick.randrange(gpus)))
    if fault in ("hang", "stuck"):
        return made._replace(detail=pick.choice(("nvmlInit*", "nvmlDeviceGetMemoryInfo*")))
    if fault == "policy":
        return made._replace(detail=pick.choice(POLICIES))
    if fault == "selection":
        return made._replace(detail=pick.choice(SELECTIONS))
    if event == "second" and slots:
        shared = pick.choice(slots)
        others = pick.sample(range(gpus), pick.randint(0, gpus - 1))
        return made._replace(second=tuple((slot, None) for slot in sorted({shared, *others})))
    return made


def _on_instances(pick: random.Random) -> Plan:
    """GPU 0 in three instances, of which the unit has one or two."""
    selected = tuple((0, part) for part in sorted(pick.sample(range(3), pick.randint(1, 2))))
    return Plan(0, 1, selected, "uuid", fault="mig")


def _actor(pick: random.Random, made: Plan) -> Actor:
    role = _one(pick, ROLES)
    if made.fault == "mig":
        places: tuple[Place, ...] = ((0, pick.randrange(3)),)
    else:
        # More often than not on a GPU that is selected.
        near = [place for place in made.selected if pick.random() < 0.3]
        places = (*near[:2], (pick.randrange(made.gpus), None))
        places = tuple(sorted(set(places), key=lambda place: place[0]))
    form = _one(pick, FORMS) if role == "stale" else "obeys"
    if form == "mapped":
        # One node is exchanged for this, the first.
        places = ((0, None),)
        form = "obeys" if made.fault == "mig" else form
    if made.fault == "mig" and role == "claimant":
        role = "live"
    if role == "own" and pick.random() < 0.3:
        places = ()
    many = {"crowd": pick.randint(2, 20), "several": pick.randint(2, 4)}.get(form, 1)
    return Actor(role, places, form, many, mib=pick.choice((100, 900, 3000)))


def _reconciled(actors: tuple[Actor, ...]) -> tuple[Actor, ...]:
    """The same without those who cannot be there together: two who were left in one unit, or a unit that was given a
    GPU which is in use."""
    found: list[Actor] = []
    for actor in actors:
        single = ("own", "claimant", "session")
        if actor.role in single and any(other.role == actor.role for other in found):
            continue
        if actor.form == "mapped" and any(other.form == "mapped" for other in found):
            continue
        found.append(actor)
    return tuple(found)


def _one(pick: random.Random, weights: Mapping[T, float]) -> T:
    return pick.choices(list(weights), list(weights.values()))[0]
