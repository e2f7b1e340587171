"""Who is stale, who is wanted, which GPU is clean: a row per line of the contract, and what holds for any machine."""

from __future__ import annotations

from typing import Any, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprestart import judge, table
from gpuprestart.judge import History
from gpuprestart.model import MIB, Action, Decision, Holder, Outcome, Owner, OwnerKind, Plan, Refusal, Survey
from gpuprestart.owners import CARRIERS
from gpuprestart.policy import Policy

from . import machines
from .machines import holder, owner, policy, rule, session, survey, unit, uuid

KILL, SPARE, REFUSE, WAIT, NONE = Action.KILL, Action.SPARE, Action.REFUSE, Action.WAIT, Action.NONE
KINDS = OwnerKind
DEDICATED = "[owners]\ndedicated = true\n"


def decide(of: Holder, text: str = "", **facts: Any) -> Decision:
    return table.decide(policy(text), survey(of, used=(1523,), **facts), of)


def plan(*holders: Holder, text: str = "", history: Optional[History] = None, **facts: Any) -> Plan:
    return judge.plan(policy(text), survey(*holders, **facts), history or History())


def pids(decisions: tuple[Decision, ...]) -> list[int]:
    return [each.holder.process.pid for each in decisions]


def actions(of: Plan) -> dict[int, Action]:
    return {each.holder.process.pid: each.action for each in of.decisions}


# The table of owners -------------------------------------------------------------------------------------------------


def of_unit(name: str, active: str, sub: str = "", **changes: Any) -> Owner:
    return owner(KINDS.UNIT, unit(name, active, sub, **changes))


CARRIER = unit("cron.service", "activating")

ROWS = [
    # The holder's owner, what becomes of it by default, what where the machine is dedicated, and words of the reason.
    (owner(KINDS.OWN_PREVIOUS, unit("sglang.service")), KILL, KILL, "earlier run of sglang.service"),
    (owner(KINDS.OWN_PREVIOUS, CARRIER), REFUSE, REFUSE, "left in cron.service, whose processes are other people's"),
    (owner(KINDS.OWN_CURRENT, unit("sglang.service")), REFUSE, REFUSE, "present start of sglang.service"),
    (of_unit("ollama.service", "active"), REFUSE, REFUSE, "ollama.service, which is active"),
    (of_unit("ollama.service", "activating"), REFUSE, REFUSE, "ollama.service, which is activating"),
    (of_unit("ollama.service", "reloading"), REFUSE, REFUSE, "ollama.service, which is reloading"),
    (of_unit("ollama.service", "refreshing"), REFUSE, REFUSE, "ollama.service, which is refreshing"),
    (of_unit("ollama.service", "maintenance"), REFUSE, REFUSE, "ollama.service, which is maintenance"),
    (
        of_unit("ollama.service", "imagined"),
        REFUSE,
        REFUSE,
        "which is in the state imagined, of which nothing is known here",
    ),
    (of_unit("ollama.service", ""), REFUSE, REFUSE, "of which nothing is known here"),
    (of_unit("ollama.service", "deactivating"), WAIT, WAIT, "deactivating (TimeoutStopSec=1min 30s)"),
    (of_unit("old.service", "failed"), KILL, KILL, "left behind by old.service, which"),
    (of_unit("old.service", "inactive"), KILL, KILL, "left behind by old.service, which"),
    (of_unit("setup.service", "inactive", type="oneshot"), REFUSE, KILL, "a oneshot unit may leave processes"),
    (of_unit("run-u7.scope", "inactive"), REFUSE, KILL, "a scope may hold anybody's processes"),
    (owner()._replace(as_unit_user=False), REFUSE, KILL, "does not run as that unit's User=model"),
    (owner(of=unit(user=""))._replace(as_unit_user=False), REFUSE, KILL, "does not run as that unit's User=root"),
    (session("active", "running"), REFUSE, REFUSE, "the login session 7 of alice"),
    (session("active", "abandoned"), REFUSE, KILL, "left by the login session 7 of alice, which is over"),
    (session("inactive", "dead"), REFUSE, KILL, "left by the login session 7 of alice, which is over"),
    (session("", "", "not-found"), REFUSE, KILL, "left by the login session 7 of alice, which is over"),
    (owner(KINDS.USER), REFUSE, REFUSE, "the user manager of alice"),
    (owner(KINDS.CONTAINER), REFUSE, REFUSE, "container"),
    (owner(KINDS.SLURM), REFUSE, REFUSE, "Slurm job 42"),
    (owner(KINDS.NONE), REFUSE, REFUSE, "belongs to no unit, session or container"),
    (owner(KINDS.NONE, orphan=True), REFUSE, KILL, "belongs to no unit, session or container"),
    (owner(KINDS.UNKNOWN), REFUSE, REFUSE, "could not be established: nobody answered"),
]


def _name(value: object) -> str:
    return f"{value.word} {value.unit.active_state if value.unit else ''}" if isinstance(value, Owner) else ""


@pytest.mark.parametrize(("of", "by_default", "dedicated", "words"), ROWS, ids=_name)
def test_a_holder_is_judged_by_its_owner(of: Owner, by_default: Action, dedicated: Action, words: str) -> None:
    found = decide(holder(of=of, listed={0: 1520}))
    assert (found.action, found.rule) == (by_default, None)
    assert words in found.reason
    assert bool(found.hint) == (by_default in (REFUSE, WAIT))
    assert decide(holder(of=of, listed={0: 1520}), DEDICATED).action is dedicated


def test_every_kind_of_owner_has_a_row() -> None:
    assert {of.kind for of, *_ in ROWS} == set(KINDS)


@pytest.mark.parametrize(("active", "sub"), [("activating", "start-chown"), ("deactivating", "stop-sigterm")])
def test_a_session_on_its_way_is_not_over(active: str, sub: str) -> None:
    found = decide(holder(of=session(active, sub), listed={0: 1520}), DEDICATED)
    assert found.action in (REFUSE, WAIT), found.reason


@pytest.mark.case("A4")
@pytest.mark.parametrize("of", [session("active", "abandoned"), owner(KINDS.NONE, orphan=True), owner()])
def test_what_dedicated_would_end_prints_the_key(of: Owner) -> None:
    found = decide(holder(of=of._replace(as_unit_user=False), listed={0: 1520}))
    assert "owners.dedicated = true" in found.hint


@pytest.mark.case("A5")
def test_a_living_session_is_told_by_user_and_session() -> None:
    found = decide(holder(of=session("active", "running"), listed={0: 1520}), DEDICATED)
    assert found.hint == "ask alice, or loginctl terminate-session 7"


@pytest.mark.case("A23")
@pytest.mark.parametrize("pattern", CARRIERS)
def test_what_an_inactive_carrier_left_is_other_people_s_work(pattern: str) -> None:
    name = pattern.replace("*", "x") + ".service"
    found = decide(holder(of=of_unit(name, "inactive"), listed={0: 1520}))
    assert found.action is REFUSE and "other people's work" in found.reason


def test_a_name_that_only_begins_like_a_carrier_s_is_none() -> None:
    assert decide(holder(of=of_unit("crontab-model.service", "failed"), listed={0: 1520})).action is KILL


# Infrastructure ------------------------------------------------------------------------------------------------------

PERSISTENCED: dict[str, Any] = {"exe": "/usr/bin/nvidia-persistenced", "comm": "nvidia-persiste"}
XORG: dict[str, Any] = {"exe": "/usr/lib/xorg/Xorg", "comm": "Xorg"}


@pytest.mark.case("B12")
@pytest.mark.parametrize(
    "exe",
    ["nvidia-persistenced", "nv-hostengine", "nvidia-cuda-mps-server", "nvidia-cuda-mps-control", "nv-fabricmanager"],
)
def test_infrastructure_is_spared_whatever_a_rule_says_of_everybody(exe: str) -> None:
    one = holder(of=owner(KINDS.NONE, orphan=True), listed={0: 30}, exe=f"/usr/bin/{exe}")
    found = decide(one, DEDICATED + rule("kill", exe=".*"))
    assert (found.action, found.rule) == (SPARE, None)
    assert "infrastructure" in found.reason
    assert decide(one, DEDICATED + rule("refuse", exe=".*")).action is SPARE
    assert decide(one, rule("kill", exe=".*", infrastructure=True)).action is KILL
    assert decide(one, rule("refuse", exe=".*", infrastructure=True)).action is REFUSE


def test_a_rule_for_infrastructure_does_not_reach_the_living_either() -> None:
    one = holder(of=of_unit("nvidia-persistenced.service", "active"), **PERSISTENCED)
    assert decide(one, rule("kill", exe=".*", infrastructure=True)).action is SPARE
    assert decide(one, rule("kill", unit="nvidia-persistenced", infrastructure=True)).action is KILL


@pytest.mark.case("B13")
@pytest.mark.parametrize(
    "looks",
    [
        {"comm": "Xorg"},
        {"comm": "Xorg", "exe": None, "exe_trusted": False},
        {**XORG, "exe_trusted": False},
        {**XORG, "exe": "/usr/lib/xorg/Xorg (deleted)"},
        {"exe": "/home/alice/Xorg-but-not-quite"},
        {"exe": "/tmp/nvidia-persistenced", "exe_trusted": False},
    ],
)
def test_who_only_looks_like_infrastructure_is_judged_as_what_it_is(looks: dict[str, Any]) -> None:
    assert decide(holder(listed={0: 61_440}, **looks)).action is KILL


@pytest.mark.case("B13")
def test_spared_holders_may_not_have_more_than_the_policy_allows() -> None:
    found = plan(holder(listed={0: 30_720}, **XORG), holder(pid=5000, listed={0: 1520}), used=(32_300,))
    assert pids(found.blocking) == [4711] and not found.evict and not found.clean
    assert "more than memory.spared_max of 2048 MiB" in found.blocking[0].reason
    assert found.gpus[0].limit == (64 + 2048) * MIB


@pytest.mark.case("B11")
def test_memory_of_the_spared_is_not_counted() -> None:
    spared = [holder(pid=10, listed={0: 207}, **XORG), holder(pid=11, listed={0: 164}, exe="/usr/bin/gnome-shell")]
    dirty = plan(*spared, holder(listed={0: 20_480}), used=(20_900,))
    assert pids(dirty.evict) == [4711] and not dirty.clean
    assert actions(dirty) == {10: SPARE, 11: SPARE, 4711: KILL}
    assert plan(*spared, used=(435,)).clean
    assert not plan(*spared, used=(436,)).clean


def test_what_all_spared_holders_of_one_gpu_have_counts_together() -> None:
    spared = [holder(pid=pid, listed={0: 1100}, **XORG) for pid in (10, 11)]
    assert pids(plan(*spared, used=(2201, 3)).blocking) == [10, 11]
    apart = [holder(pid=10, listed={0: 1100}, **XORG), holder(pid=11, listed={1: 1100}, opened=(1,), **XORG)]
    assert plan(*apart, used=(1101, 1101)).clean


# Rules ---------------------------------------------------------------------------------------------------------------

ACTIVE = of_unit("ollama.service", "active")
STALE = owner()


@pytest.mark.parametrize(
    ("of", "text", "expected"),
    [
        (STALE, rule("refuse", comm="python"), REFUSE),
        (STALE, rule("spare", comm="python"), SPARE),
        (ACTIVE, rule("spare", comm="python"), SPARE),
        (owner(KINDS.NONE), rule("kill", comm="python"), KILL),
        # The first match wins, and what does not match says nothing.
        (STALE, rule("spare", comm="python") + rule("refuse", comm="python"), SPARE),
        (STALE, rule("spare", comm="ruby") + rule("refuse", comm="python"), REFUSE),
        (STALE, rule("spare", comm="ruby"), KILL),
        # Every key must match.
        (STALE, rule("spare", comm="python", user="model", exe="python3", cmdline=r"sglang\.launch"), SPARE),
        (STALE, rule("spare", comm="python", user="alice"), KILL),
        (STALE, rule("spare", user=990), SPARE),
        (STALE, rule("spare", user=991), KILL),
        (STALE, rule("spare", age="100 s"), SPARE),
        (STALE, rule("spare", age="101 s"), KILL),
        (STALE, rule("spare", unit="old"), SPARE),
        (STALE, rule("spare", unit="ol"), KILL),
        (STALE, rule("spare", unit="o*"), SPARE),
        (STALE, rule("spare", session="*"), KILL),
        (session("active", "running"), rule("spare", session="7"), SPARE),
        (session("active", "running"), rule("spare", session="8"), REFUSE),
        (owner(KINDS.CONTAINER), rule("spare", container="docker"), SPARE),
        (owner(KINDS.CONTAINER), rule("spare", container="0123"), SPARE),
        (owner(KINDS.CONTAINER), rule("spare", container="123"), REFUSE),
        # "kill" reaches somebody alive only where the rule names the unit, the session or the container.
        (ACTIVE, rule("kill", comm="python"), REFUSE),
        (ACTIVE, rule("kill", unit="ollama"), KILL),
        (ACTIVE, rule("kill", unit="*"), KILL),
        (of_unit("ollama.service", "deactivating"), rule("kill", comm="python"), WAIT),
        (session("active", "running"), rule("kill", user="model"), REFUSE),
        (session("active", "running"), rule("kill", session="7"), KILL),
        (session("active", "abandoned"), rule("kill", user="model"), KILL),
        (session("", "", "not-found"), rule("kill", user="model"), KILL),
        (owner(KINDS.CONTAINER), rule("kill", comm="python"), REFUSE),
        (owner(KINDS.CONTAINER), rule("kill", container="docker"), KILL),
        (owner(KINDS.SLURM), rule("kill", comm="python"), REFUSE),
        (owner(KINDS.USER), rule("kill", comm="python"), REFUSE),
        (owner(KINDS.UNKNOWN), rule("kill", comm="python"), REFUSE),
        (owner(KINDS.OWN_CURRENT), rule("kill", comm="python"), REFUSE),
        (of_unit("cron.service", "inactive"), rule("kill", comm="python"), KILL),
    ],
)
def test_rules_come_before_owners(of: Owner, text: str, expected: Action) -> None:
    assert decide(holder(of=of, listed={0: 1520}), text).action is expected


@pytest.mark.parametrize("unread", ["exe", "cmdline"])
@pytest.mark.parametrize("action", ["kill", "spare", "refuse"])
def test_a_key_that_cannot_be_read_refuses(unread: str, action: str) -> None:
    changes: dict[str, Any] = {unread: None, "exe_trusted": False}
    one = holder(listed={0: 1520}, **changes)
    found = decide(one, rule(action, **{unread: "x"}))
    assert (found.action, found.rule) == (REFUSE, f"{action} it")
    assert "no readable" in found.reason
    # What can be read, and differs, still tells them apart.
    assert decide(one, rule(action, user="alice", **{unread: "x"})).action is KILL


def test_a_decision_by_a_rule_names_it() -> None:
    found = decide(holder(listed={0: 1520}), rule("refuse", comm="python"))
    assert (found.rule, found.reason) == ("refuse it", "matches the rule 'refuse it'")
    assert found.hint == f"see {machines.POLICY}:1, which has the rule"


def test_an_overlay_may_decide_what_the_site_does_not_refuse() -> None:
    one = holder(listed={0: 1520})
    allowed = policy(rule("kill", comm="python"), rule("spare", comm="python"))
    assert table.decide(allowed, survey(one), one).action is SPARE
    forbidden = policy(rule("refuse", comm="python"), rule("spare", comm="python"))
    assert table.decide(forbidden, survey(one), one).action is REFUSE


def test_an_empty_match_is_a_fault_of_the_policy() -> None:
    with pytest.raises(Refusal) as caught:
        policy(rule("kill"))
    assert caught.value.outcome is Outcome.CONFIG


# Who is never ended --------------------------------------------------------------------------------------------------


def test_kin_is_never_ended() -> None:
    one = holder(of=owner(KINDS.NONE, orphan=True), listed={0: 1520})
    for text in (DEDICATED, rule("kill", comm="python")):
        assert decide(one, text).action is KILL
        assert decide(one, text, kin=frozenset({1, 4711})).action is REFUSE


def test_nobody_is_ended_on_nvml_s_word_alone() -> None:
    one = holder(listed={0: 1520}, opened=())
    for text in ("", DEDICATED, rule("kill", comm="python"), rule("kill", unit="old")):
        found = decide(one, text)
        assert found.action is REFUSE and "named by NVML alone" in found.reason
    assert decide(holder(listed={0: 1520}, opened=(), mapped=(0,))).action is KILL


def test_two_generations_of_our_own_unit_never_coexist() -> None:
    """With or without a GPU, and whether NVML alone names it or not: the cgroup is proof enough."""
    of = owner(KINDS.OWN_PREVIOUS, unit("sglang.service"))
    for one in (holder(of=of, opened=()), holder(of=of, listed={0: 1520}, opened=()), holder(of=of)):
        assert pids(plan(one, used=(3,)).evict) == [4711]


def test_of_our_present_start_only_what_has_memory_is_in_the_way() -> None:
    of = owner(KINDS.OWN_CURRENT, unit("sglang.service"))
    assert plan(holder(of=of), used=(3,)).clean
    assert pids(plan(holder(of=of, listed={0: 10}), used=(13,)).blocking) == [4711]


# Evidence ------------------------------------------------------------------------------------------------------------


@pytest.mark.case("A0")
def test_a_stale_suspect_is_ended_while_memory_is_unexplained() -> None:
    found = plan(holder(), used=(1523, 3))
    assert pids(found.evict) == [4711] and found.unexplained == {uuid(0)} and not found.clean
    assert found.gpus[0].unattributed == 1523 * MIB


@pytest.mark.parametrize(
    ("others", "used", "evicted"),
    [
        # Nothing is unexplained where all is under the limit, and the limit itself is allowed.
        ([], 64, False),
        ([], 65, True),
        # What living listed holders have explains memory; so does one whose bytes NVML does not tell.
        ([holder(pid=10, listed={0: 1460})], 1523, False),
        ([holder(pid=10, listed={0: 1458})], 1523, True),
        ([holder(pid=10, listed={0: None})], 61_440, False),
        ([holder(pid=10, listed={1: 1000}, opened=(0, 1))], 1523, True),
    ],
)
@pytest.mark.case("C12")
def test_a_suspect_counts_only_while_memory_is_unexplained(others: list[Holder], used: int, evicted: bool) -> None:
    spared = policy(rule("spare", comm="^other$"))
    others = [each._replace(process=each.process._replace(comm="other")) for each in others]
    found = judge.plan(spared, survey(holder(), *others, used=(used, 3)), History())
    assert pids(found.evict) == ([4711] if evicted else [])


def test_a_suspect_counts_only_for_the_gpus_whose_nodes_it_has() -> None:
    assert plan(holder(opened=(1,)), used=(1523, 3)).evict == ()
    assert pids(plan(holder(opened=(), mapped=(0,)), used=(1523, 3)).evict) == [4711]


@pytest.mark.case("C8")
def test_whose_memory_nvml_puts_elsewhere_is_no_suspect() -> None:
    """Here the other GPU is not selected, so the survey has no reading that names it."""
    elsewhere = holder()._replace(listed={"GPU-other": 1000 * MIB})
    found = plan(elsewhere, used=(1523,))
    assert (found.evict, found.suspects, actions(found)) == ((), (), {4711: NONE})


@pytest.mark.case("B1")
@pytest.mark.case("B14")
def test_a_live_suspect_is_named_and_does_not_stand_in_the_way() -> None:
    monitor = holder(pid=10, of=of_unit("monitor.service", "active"))
    found = plan(monitor, holder(listed={0: 1520}), used=(1523,))
    assert (pids(found.blocking), pids(found.evict), actions(found)[10]) == ([], [4711], NONE)
    alone = plan(monitor, used=(1523,))
    assert (pids(alone.blocking), pids(alone.suspects), alone.clean) == ([], [10], False)
    assert plan(monitor, used=(3,)).clean


@pytest.mark.case("B15")
def test_after_an_attributed_holder_a_suspect_has_a_term() -> None:
    text = '[deadline]\nterm = "10 s"\n'
    first = survey(holder(), used=(1523,), at=1000.0)
    history = judge.ended(judge.remember(History(), policy(text), first), attributed=True)
    for at, evicted in ((1000.0, []), (1009.9, []), (1010.0, [4711])):
        now = first._replace(at=at)
        history = judge.remember(history, policy(text), now)
        found = judge.plan(policy(text), now, history)
        assert (pids(found.evict), pids(found.later)) == (evicted, [] if evicted else [4711])
    at_once = judge.ended(history, attributed=False)._replace(unexplained_since={})
    assert pids(judge.plan(policy(text), first, at_once).evict) == [4711]


@pytest.mark.case("B15")
def test_memory_that_was_explained_in_between_starts_the_term_anew() -> None:
    history = judge.remember(History(), policy(), survey(used=(1523, 1523), at=1000.0))
    history = judge.remember(history, policy(), survey(used=(1523, 3), at=1005.0))
    history = judge.remember(history, policy(), survey(used=(1523, 1523), at=1008.0))
    assert history.unexplained_since == {uuid(0): 1000.0, uuid(1): 1008.0}


# Refuse or kill first ------------------------------------------------------------------------------------------------


@pytest.mark.case("A8")
def test_where_somebody_alive_has_memory_nobody_is_ended() -> None:
    alive = holder(pid=10, of=ACTIVE, listed={0: 500})
    stale = [holder(pid=11, listed={0: 1520}), holder(pid=12), holder(pid=13, of=owner(KINDS.OWN_PREVIOUS), opened=())]
    found = plan(alive, *stale, used=(2523, 1000))
    assert (pids(found.blocking), found.evict, found.later) == ([10], (), ())
    assert actions(found) == {10: REFUSE, 11: NONE, 12: NONE, 13: NONE}
    assert "the start is refused" in found.decisions[1].reason
    assert not plan(alive, used=(503,)).clean
    # Even where its memory is below the limit: the server would share the GPU.
    assert pids(plan(holder(of=ACTIVE, listed={0: 10}), used=(13,)).blocking) == [4711]


def test_no_client_of_a_server_that_somebody_alive_uses_is_ended() -> None:
    served = {uuid(1): frozenset({"mps"})}
    alive = holder(pid=10, of=ACTIVE, opened=())._replace(kinds=served)
    stale = holder(pid=11, listed={0: 1520})._replace(kinds=served)
    previous = holder(pid=12, of=owner(KINDS.OWN_PREVIOUS), opened=())._replace(kinds=served)
    found = plan(alive, stale, used=(1523,))
    assert (pids(found.blocking), found.evict) == ([11], ())
    found = plan(alive, previous, used=(3,))
    assert (pids(found.blocking), found.evict, found.clean) == ([12], (), False)
    assert "a client of an MPS server that somebody else uses too" in found.blocking[0].reason
    found = plan(stale, previous, used=(1523,))
    assert (found.blocking, pids(found.evict)) == ((), [11, 12])
    # One that uses the server on other GPUs only is nobody's to end, and stale all the same.
    elsewhere = holder(pid=13, opened=())._replace(kinds=served)
    found = plan(elsewhere, previous, used=(3,))
    assert (found.blocking, pids(found.evict)) == ((), [12])


@pytest.mark.case("A9")
def test_who_is_going_is_awaited_and_does_not_stop_the_eviction_of_others() -> None:
    going = holder(pid=10, of=of_unit("ollama.service", "deactivating"), listed={0: 500})
    found = plan(going, holder(pid=11, listed={0: 1520}), used=(2023,))
    assert (pids(found.awaited), pids(found.evict), found.blocking, found.clean) == ([10], [11], (), False)


# One GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("used", "text", "clean", "words"),
    [
        (64, "", True, ""),
        (65, "", False, "65 MiB used, limit 64 MiB"),
        (1523, '[memory]\nmax_used = "2 %"\n', True, ""),
        (3, '[memory]\nmin_free = "81417 MiB"\n', True, ""),
        (3, '[memory]\nmin_free = "81418 MiB"\n', False, "81417 MiB free, 81418 MiB needed (memory.min_free)"),
        (None, "", False, "cannot be measured: GPU is lost"),
    ],
)
@pytest.mark.case("B4")
def test_a_gpu_is_clean_by_its_figures(used: Optional[int], text: str, clean: bool, words: str) -> None:
    found = plan(text=text, used=(3, used))
    assert (found.gpus[0].clean or "min_free" in text, found.gpus[1].clean, found.gpus[1].fault) == (True, clean, words)
    assert found.clean == clean


@pytest.mark.case("B8")
def test_an_idle_gpu_is_clean_and_nothing_is_to_be_done() -> None:
    found = plan(used=(0, 3))
    assert found.clean and found.decisions == () and found.unexplained == frozenset()


@pytest.mark.case("A18")
def test_one_dirty_gpu_of_four() -> None:
    found = plan(used=(3, 3, 1523, 3))
    assert [state.clean for state in found.gpus] == [True, True, False, True] and not found.clean


def test_a_later_reading_is_held_against_the_same_limit() -> None:
    state = plan(holder(listed={0: 207}, **XORG), used=(210,)).gpus[0]
    for used, low in ((271, True), (272, False), (None, False)):
        assert judge.is_low(policy(), state, machines.reading(used=used)) is low
    needy = policy('[memory]\nmin_free = "81417 MiB"\n')
    assert judge.is_low(needy, state, machines.reading(used=3))
    assert not judge.is_low(needy, state, machines.reading(used=4))


# Whatever the machine ------------------------------------------------------------------------------------------------

LIVE = [
    ACTIVE,
    of_unit("ollama.service", "activating"),
    of_unit("ollama.service", "deactivating"),
    of_unit("ollama.service", "imagined"),
    session("active", "running"),
    owner(KINDS.USER),
    owner(KINDS.CONTAINER),
    owner(KINDS.SLURM),
    owner(KINDS.UNKNOWN),
    owner(KINDS.OWN_CURRENT),
]
OTHERS = [
    STALE,
    owner()._replace(as_unit_user=False),
    of_unit("cron.service", "inactive"),
    of_unit("setup.service", "inactive", type="oneshot"),
    session("active", "abandoned"),
    owner(KINDS.NONE),
    owner(KINDS.NONE, orphan=True),
    owner(KINDS.OWN_PREVIOUS),
]
GPUS = st.integers(min_value=0, max_value=2)
AMOUNTS = st.sampled_from([None, 0, 1, 63, 64, 65, 1520, 2048, 2112, 61_440])


@st.composite
def holders(draw: st.DrawFn, pid: int) -> Holder:
    looks: dict[str, Any] = draw(st.sampled_from([{}, PERSISTENCED, {"comm": "Xorg"}, {"exe": None}]))
    return holder(
        pid,
        draw(st.sampled_from(LIVE + OTHERS)),
        listed=draw(st.dictionaries(GPUS, AMOUNTS, max_size=2)),
        opened=draw(st.frozensets(GPUS)),
        mapped=draw(st.frozensets(GPUS, max_size=1)),
        **looks,
    )


@st.composite
def surveys(draw: st.DrawFn) -> Survey:
    used = draw(st.lists(AMOUNTS, min_size=1, max_size=3))
    found = [draw(holders(pid)) for pid in range(10, 10 + draw(st.integers(0, 4)))]
    kin = frozenset(draw(st.sets(st.integers(10, 13), max_size=1)))
    return survey(*found, used=used, kin=kin)


@st.composite
def histories(draw: st.DrawFn) -> History:
    since = draw(st.dictionaries(GPUS.map(uuid), st.sampled_from([900.0, 995.0, 1000.0])))
    return History(ended_attributed=draw(st.booleans()), unexplained_since=since)


RULES = st.sampled_from(
    [
        rule("kill", comm="."),
        rule("kill", exe="."),
        rule("kill", comm=".", infrastructure=True),
        rule("spare", user="model"),
        rule("refuse", comm="Xorg"),
    ]
)
POLICIES = st.tuples(st.sampled_from(["", DEDICATED]), st.lists(RULES, max_size=2)).map(
    lambda parts: parts[0] + "".join(parts[1])
)


def limit(of: Plan, gpu: str) -> int:
    """Reckoned anew, from the contract: max_used beside what spared holders have, up to spared_max."""
    spared = sum(each.holder.listed.get(gpu) or 0 for each in of.decisions if each.action is SPARE)
    return 64 * MIB + min(spared, 2048 * MIB)


@given(surveys(), histories(), POLICIES)
def test_nobody_is_ended_whom_nothing_proves_stale(of: Survey, history: History, text: str) -> None:
    found = judge.plan(policy(text), of, history)
    for each in (*found.evict, *found.later):
        assert each.action is KILL
        assert each.holder.process.pid not in of.kin
        assert each.holder.owner not in LIVE
        assert each.holder.opened or each.holder.mapped or each.holder.owner.kind is KINDS.OWN_PREVIOUS
    assert not (found.blocking and (found.evict or found.later))


@given(surveys(), histories(), POLICIES)
def test_nothing_is_clean_that_its_figures_do_not_show_clean(of: Survey, history: History, text: str) -> None:
    found = judge.plan(policy(text), of, history)
    for state in found.gpus:
        memory = of.readings[state.gpu.uuid].memory
        proved = memory is not None and memory.used <= limit(found, state.gpu.uuid)
        assert state.clean <= proved
        assert found.clean <= proved
    if found.clean:
        assert not (found.evict or found.blocking or found.awaited or found.later)
        listed = [each for each in found.decisions if any(state.gpu.uuid in each.holder.listed for state in found.gpus)]
        assert all(each.action is SPARE for each in listed)


@given(surveys(), histories(), POLICIES)
def test_the_same_machine_gives_the_same_plan(of: Survey, history: History, text: str) -> None:
    first = judge.plan(policy(text), of, history)
    assert judge.plan(policy(text), of, history) == first
    assert pids(first.decisions) == [each.process.pid for each in of.holders]


@given(surveys(), histories(), POLICIES, st.sampled_from(["python3", "Xorg", "."]), st.booleans())
def test_a_rule_that_refuses_or_spares_never_adds_a_kill(
    of: Survey, history: History, text: str, comm: str, refuses: bool
) -> None:
    """Sparing somebody may let a run go on that had ended nobody; whom it then ends was stale without the rule."""
    before = policy(text)
    after = policy(rule("refuse" if refuses else "spare", comm=comm) + text)
    stale = {pid for pid, each in _by_table(before, of).items() if each.action is KILL}
    assert {pid for pid, each in _by_table(after, of).items() if each.action is KILL} <= stale
    evicted = set(pids(judge.plan(after, of, history).evict))
    assert evicted <= (set(pids(judge.plan(before, of, history).evict)) if refuses else stale)


def _by_table(of: Policy, machine: Survey) -> dict[int, Decision]:
    return {each.process.pid: table.decide(of, machine, each) for each in machine.holders}
