"""Whether what a run of the hook said and did is right, by what bookkeeper, /proc and systemd of the node say. Pure.

Nothing here asks the program, or shares code with it: who may be ended follows from who the scene started how, what a
start must find from the bookkeeper's allocations, and the rest from the contract.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional

from tests.node.soak_plan import Place, Plan

MIB = 1 << 20
MAX_USED = 64 * MIB
SPARED_MAX = 2048 * MIB

EXIT = {"clean": 0, "cleaned": 0, "none": 0, "config": 78, "denied": 77, "unknown": 69, "internal": 70}
REFUSED = 75

#: Who may be ended at all.
STALE = ("stale", "own")
#: Who is to be alive whatever comes. Who was told to stop is systemd's to end.
WANTED = ("live", "watcher", "session", "stranger", "hidden", "spared", "claimant", "lingering")
#: With memory on a selected GPU they are in the way at once.
IN_THE_WAY = ("live", "session", "stranger")


class Member(NamedTuple):
    """A process that the scene started: what it is there, its unit, and whether it is still alive at the end."""

    role: str
    unit: str
    alive: bool
    forks: bool = False


class Told(NamedTuple):
    """What one run said, and what systemd, or the shell, made of it."""

    unit: str
    places: tuple[Place, ...]
    #: None where it was ended before it could have a status.
    status: Optional[int]
    #: Whether the unit's server was started; None: there was no server to start.
    started: Optional[bool]
    verdict: Mapping[str, Any]
    #: Its native records, and how many lines it printed beside them.
    records: Sequence[Mapping[str, Any]] = ()
    lines: int = 0
    checking: bool = False

    @property
    def outcome(self) -> str:
        return str(self.verdict.get("outcome", ""))

    @property
    def signals(self) -> list[tuple[int, str]]:
        sent = [each for each in self.records if each["GPUPRESTART_EVENT"] == "holder-signalled"]
        return [(int(each["HOLDER_PID"]), str(each["GPUPRESTART_SIGNAL"])) for each in sent]


class Seen(NamedTuple):
    """One scene, from before the hook was started until it was over."""

    plan: Plan
    members: Mapping[int, Member]
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    told: Sequence[Told]
    #: Who has which place by a claim that holds, as its unit's name, before and after.
    claimed: Mapping[Place, str]
    claims: Mapping[Place, str]
    #: What was found that no run may leave, in words.
    left: Sequence[str]


def faults(seen: Seen) -> list[str]:
    """Everything that is wrong with it, in words."""
    found = list(seen.left)
    for told in seen.told:
        who = "check" if told.checking else told.unit or "shell"
        found += [f"{who}: {each}" for each in _of_run(seen, told)]
    found += _of_processes(seen)
    found += _of_two(seen)
    return found


# One run -------------------------------------------------------------------------------------------------------------


def _of_run(seen: Seen, told: Told) -> list[str]:
    if not told.verdict:
        # Told to stop before it could listen; that its server did not start is all that can be asked of it.
        early = seen.plan.event == "stop" and not told.started
        missing = [] if early else [f"no verdict, status {told.status}, started {told.started}"]
        return missing + _of_signals(seen, told)
    outcome = told.outcome
    found: list[str] = []
    if told.status is not None and told.status != told.verdict["exit"]:
        found.append(f"ended with status {told.status} and told {told.verdict['exit']}")
    if told.verdict["exit"] != EXIT.get(outcome, REFUSED):
        found.append(f"{outcome} with status {told.verdict['exit']}")
    judged = {_place_of(seen.before, gpu) for gpu in told.verdict["gpus"]}
    if judged and judged != set(told.places):
        found.append(f"judged {sorted(map(_name, judged))} instead of {sorted(map(_name, told.places))}")
    if told.started is not None and told.started is not (told.verdict["exit"] == 0):
        found.append(f"{outcome}, and started is {told.started}")
    allowed = _as_of_now(seen, told) if told.checking else permitted(seen, told)
    if outcome not in allowed:
        found.append(f"{outcome} instead of {' or '.join(sorted(allowed))}: {told.verdict['message']}")
    if told.verdict["exit"] == 0 and not told.checking:
        found += _of_pass(seen, told)
    elif told.verdict["exit"]:
        found += _of_refusal(seen, told)
    if told.checking and told.records:
        found.append(f"check wrote {len(told.records)} records")
    return found + _of_signals(seen, told) + _of_records(told)


def _of_pass(seen: Seen, told: Told) -> list[str]:
    """A 0 is a proof."""
    found = []
    for place in told.places:
        used, limit = used_on(seen.after, place), limit_on(seen, place)
        if used > limit:
            found.append(f"passed with {used // MIB} MiB in use on {_name(place)}, limit {limit // MIB} MiB")
        other = seen.claimed.get(place, told.unit)
        if other != told.unit:
            found.append(f"passed though {_name(place)} had been given to {other}")
        if told.started and seen.plan.event != "stop" and seen.claims.get(place) != told.unit:
            found.append(f"{_name(place)} is claimed by {seen.claims.get(place)}")
    for pid, member in seen.members.items():
        if member.role in STALE and member.alive and _must_go(seen, told, pid, member):
            found.append(f"passed beside {member.role} {pid}")
    return found


def _must_go(seen: Seen, told: Told, pid: int, member: Member) -> bool:
    if not told.places:
        return False
    return member.unit == told.unit or any(place in told.places for place in held(seen.before, pid))


def _of_refusal(seen: Seen, told: Told) -> list[str]:
    """A refusal names somebody or something, and what to do."""
    verdict, outcome = told.verdict, told.outcome
    message = str(verdict["message"])
    # Of a policy, what is allowed or expected stands in the sentence itself.
    found = [] if verdict["hints"] or (outcome == "config" and "policy.toml:" in message) else ["no hint"]
    if outcome == "protected":
        names = [member.unit for member in seen.members.values() if member.unit]
        pids = [f"[{pid}]" for pid, member in seen.members.items() if member.role not in STALE]
        others = [each.unit for each in seen.told if each is not told and each.unit]
        if not any(name in message for name in (*names, *pids, *others, "gpuprestart clean (PID")):
            found.append(f"names nobody: {message}")
    elif outcome in ("not-freed", "unattributed"):
        if not re.search(r"\bGPUs? \d|\d GPUs?\b", message):
            found.append(f"names no GPU: {message}")
    elif outcome == "unknown":
        if not re.search(r"\bGPU \d|NVML|driver|systemd", message):
            found.append(f"does not say what could not be measured: {message}")
    elif outcome == "config":
        if not re.search(r"policy\.toml:?\d*|CUDA_VISIBLE_DEVICES", message):
            found.append(f"does not say what is wrong: {message}")
    elif outcome == "interrupted" and "SIGTERM" not in message and told.unit not in message:
        found.append(f"does not say by what: {message}")
    return found


def _of_signals(seen: Seen, told: Told) -> list[str]:
    found = []
    order: dict[int, list[str]] = {}
    for pid, name in told.signals:
        member = seen.members.get(pid)
        if member is None:
            if not any(other.forks for other in seen.members.values()):
                found.append(f"{name} to {pid}, whom the scene did not start")
        elif member.role not in STALE:
            found.append(f"{name} to {pid}, which is {member.role}")
        elif not _must_go(seen, told, pid, member):
            found.append(f"{name} to {pid}, which has nothing on a selected GPU")
        if name == "SIGKILL" and "SIGTERM" not in order.get(pid, ()):
            found.append(f"SIGKILL to {pid} before SIGTERM")
        order.setdefault(pid, []).append(name)
    if told.signals and (told.checking or told.outcome in ("config", "none", "unknown") or _blocked(seen, told)):
        found.append(f"signals with {told.outcome}: {told.signals}")
    return found


def _of_records(told: Told) -> list[str]:
    """No more than so many for each holder and each GPU, and a few for the run."""
    holders = {each["HOLDER_PID"] for each in told.records if "HOLDER_PID" in each}
    most = 6 + 5 * len(holders) + 4 * max(1, len(told.places)) + told.lines
    events = [each["GPUPRESTART_EVENT"] for each in told.records]
    found = []
    if len(events) > most:
        found.append(f"{len(events)} records, where {most} are enough")
    if not told.checking and events.count("verdict") != 1:
        found.append(f"{events.count('verdict')} verdicts in the journal")
    return found


# Everybody -----------------------------------------------------------------------------------------------------------


def _of_processes(seen: Seen) -> list[str]:
    signalled = {pid for told in seen.told for pid, _ in told.signals}
    found = []
    for pid, member in seen.members.items():
        if member.alive:
            continue
        if member.role in WANTED:
            found.append(f"{member.role} {pid} of {member.unit} is dead")
        elif member.role in STALE and pid not in signalled and not _stopped(seen, member):
            found.append(f"{member.role} {pid} of {member.unit} is dead, and no record tells of a signal")
    return found


def _stopped(seen: Seen, member: Member) -> bool:
    """Whether systemd has ended it: with the unit that was told to stop."""
    return seen.plan.event == "stop" and member.unit == seen.told[0].unit


def _of_two(seen: Seen) -> list[str]:
    """Of two units on one GPU one may start, and one does where nothing stands against either."""
    runs = [told for told in seen.told if not told.checking]
    if len(runs) != 2 or not set(runs[0].places) & set(runs[1].places):
        return []
    passed = [told for told in runs if told.started]
    if len(passed) == 2:
        return ["both units were given the same GPU"]
    free = not _leaves_own(seen) and all(_alone(seen, told) <= {"clean", "cleaned"} for told in runs)
    return ["neither unit was given the GPU"] if free and not passed else []


def _leaves_own(seen: Seen) -> bool:
    return any(member.role == "own" for member in seen.members.values())


# What must come out --------------------------------------------------------------------------------------------------


def permitted(seen: Seen, told: Told) -> frozenset[str]:
    """The outcomes that are right for this run."""
    found = set(_alone(seen, told))
    if seen.plan.event == "stop":
        found.add("interrupted")
    others = [other for other in seen.told if other is not told and not other.checking]
    if any(set(other.places) & set(told.places) for other in others) and found & {
        *("clean", "cleaned", "not-freed", "unattributed"),
    }:
        # Whoever comes second finds what the first has left: a claim, a lock, clean GPUs, or memory of the unseen dead.
        found |= {"protected", "clean"} if "cleaned" in found else {"protected"}
        found |= {"unattributed"} if "not-freed" in found else set()
        # To the second, what the first has left of itself belongs to a unit that is starting. Where the driver does not
        # list it, the second waits for that memory, with the lock, until there is no time left for either.
        found |= {"unattributed", "not-freed"} if _leaves_own(seen) else set()
        # It may have got the lock when there was no time left.
        found |= {"not-freed"} if seen.plan.hopeless else set()
    return frozenset(found)


def _alone(seen: Seen, told: Told) -> frozenset[str]:
    plan = seen.plan
    if plan.fault in ("policy", "selection"):
        return frozenset({"config"})
    if plan.fault in ("hang", "stuck"):
        return frozenset({"unknown"})
    if not told.places:
        return frozenset({"none"})
    if plan.fault == "lost" and (int(plan.detail), None) in told.places:
        return frozenset({"unknown"})
    if _blocked(seen, told) or _has(seen, told, ("lingering",)):
        return frozenset({"protected"})
    remaining = _remaining(seen, told)
    if remaining:
        return remaining
    own = any(member.role == "own" and member.unit == told.unit for member in seen.members.values())
    return frozenset({"cleaned" if own or _has(seen, told, STALE) else "clean"})


def _blocked(seen: Seen, told: Told) -> bool:
    """Whether somebody alive has memory there, or was given the GPU: then nobody at all is to be signalled."""
    given = any(seen.claimed.get(place, told.unit) != told.unit for place in told.places)
    too_much = any(spared_on(seen, place) > SPARED_MAX for place in told.places)
    return given or too_much or _has(seen, told, IN_THE_WAY)


def _has(seen: Seen, told: Told, roles: Iterable[str]) -> bool:
    """Whether somebody of these roles has memory on a GPU of this run."""
    return any(
        place in told.places
        for pid, member in seen.members.items()
        if member.role in roles
        for place in held(seen.before, pid)
    )


def _remaining(seen: Seen, told: Told) -> frozenset[str]:
    """What is to be said of memory that never comes back; empty where all of it does."""
    certain, found = False, set()
    for place in told.places:
        stays = [each for each in _on(seen.before, place) if _stays(seen, each)]
        if sum(each["bytes"] for each in stays) + _baseline(seen.before, place) <= limit_on(seen, place):
            continue
        there = {member.role for each in _on(seen.before, place) for member in _charged(seen, each)}
        if there & set(STALE):
            certain = True
        elif "stopping" in there:
            found |= {"not-freed", "unattributed"}
        else:
            found.add("unattributed")
    return frozenset({"not-freed"} if certain else found)


def _stays(seen: Seen, allocation: Mapping[str, Any]) -> bool:
    """Whether an allocation is there for ever: nobody's, of somebody who is not to be ended, or never given back."""
    if allocation["release_delay"] is None:
        return not _spared(seen, allocation)
    return any(member.role == "hidden" for member in _charged(seen, allocation))


def _as_of_now(seen: Seen, told: Told) -> frozenset[str]:
    """What ``check`` beside a run may say, depending on how far that run is."""
    return permitted(seen, told) | {"clean", "not-freed", "protected", "unattributed", "interrupted"}


# The books -----------------------------------------------------------------------------------------------------------


def _on(state: Mapping[str, Any], place: Place) -> list[Mapping[str, Any]]:
    slot, part = place
    return [each for each in state["allocations"] if each["gpu"] == slot and (part is None or each["instance"] == part)]


def _owners(allocation: Mapping[str, Any]) -> set[int]:
    return {owner[0] for owner in allocation["owners"]}


def _charged(seen: Seen, allocation: Mapping[str, Any]) -> list[Member]:
    return [seen.members[pid] for pid in _owners(allocation) if pid in seen.members]


def held(state: Mapping[str, Any], pid: int) -> set[Place]:
    """Where a process is charged for memory."""
    return {(each["gpu"], each["instance"]) for each in state["allocations"] if pid in _owners(each)}


def _baseline(state: Mapping[str, Any], place: Place) -> int:
    slot, part = place
    gpu = next(gpu for gpu in state["gpus"] if gpu["slot"] == slot)
    return int(gpu["baseline"] if part is None else gpu["instances"][part]["baseline"])


def used_on(state: Mapping[str, Any], place: Place) -> int:
    return _baseline(state, place) + sum(int(each["bytes"]) for each in _on(state, place))


def spared_on(seen: Seen, place: Place) -> int:
    return sum(int(each["bytes"]) for each in _on(seen.before, place) if _spared(seen, each))


def limit_on(seen: Seen, place: Place) -> int:
    return MAX_USED + min(spared_on(seen, place), SPARED_MAX)


def _spared(seen: Seen, allocation: Mapping[str, Any]) -> bool:
    return any(member.role == "spared" for member in _charged(seen, allocation))


def _place_of(state: Mapping[str, Any], told: Mapping[str, Any]) -> Place:
    """Of a GPU as a verdict tells it. One that is lost does not tell its UUID."""
    for gpu in state["gpus"]:
        for part in gpu["instances"]:
            if part["uuid"] == told["uuid"]:
                return gpu["slot"], part["number"]
        if told["uuid"] in (gpu["uuid"], "") and told["index"] == gpu["order"]:
            return gpu["slot"], None
    return -1, None


def _name(place: Place) -> str:
    slot, part = place
    return f"GPU {slot}" if part is None else f"instance {part} of GPU {slot}"


# A thousand of them --------------------------------------------------------------------------------------------------

#: How much more the last may have than the first, of what each scene leaves on the node.
SLACK = {"processes": 4, "units": 8, "descriptors": 16, "rss_kib": 1024}


#: Of fewer runs it cannot be told whether anything grows: scenes differ.
ENOUGH = 200


def not_flat(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """What grows from run to run, by the middle value of the first and of the last hundred."""
    found: list[str] = []
    if len(lines) < ENOUGH:
        return found
    for what, slack in SLACK.items():
        first, last = ends(lines, what)
        if last > first + slack:
            found.append(f"{what} grew from {first} to {last}")
    return found


def ends(lines: Sequence[Mapping[str, Any]], what: str, *, window: int = 100) -> tuple[int, int]:
    """The middle value of what was measured in the first and in the last runs."""
    values = [int(line[what]) for line in lines if line.get(what) is not None]
    window = min(window, max(1, len(values) // 3))
    first, last = sorted(values[:window]), sorted(values[-window:])
    return (first[len(first) // 2], last[len(last) // 2]) if values else (0, 0)
