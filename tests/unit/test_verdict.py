"""What happened -> the outcome, the sentence and the hints; and that no 0 is reached without a proof."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import pytest

from gpuprestart import judge
from gpuprestart.judge import History
from gpuprestart.model import EXIT_STATUS, Fate, Holder, Outcome, Owner, OwnerKind, Refusal, Verdict
from gpuprestart.story import Story
from gpuprestart.verdict import conclude

from .machines import decision, holder, memory, owner, policy, reading, rule, session, survey, unit, uuid

ACTIVE = owner(of=unit("ollama.service", "active"))
GOING = owner(of=unit("ollama.service", "deactivating"))
OURS = owner(OwnerKind.OWN_PREVIOUS, unit("sglang.service"))
STALE = holder(listed={0: 1520})


def story(
    *holders: Holder,
    used: Sequence[Optional[int]] = (3,),
    facts: Optional[dict[str, Any]] = None,
    rules: str = "",
    **changes: Any,
) -> Story:
    """A run that ended with this machine; ``facts`` change the last survey, ``changes`` the story."""
    machine = survey(*holders, used=used)._replace(**(facts or {}))
    plan = judge.plan(policy(rules), machine, History())
    told = Story(run="0123", time=0.0, unit="sglang.service", duration=30.4, plan=plan, survey=machine)
    return told._replace(seen=plan.decisions)._replace(**changes)


def seen(*holders: Holder, fate: Fate) -> dict[str, Any]:
    """Holders that this run saw and that are no longer there."""
    return {
        "seen": tuple(decision(each) for each in holders),
        "fates": {each.process.identity: fate for each in holders},
    }


def verdict(*holders: Holder, **facts: Any) -> Verdict:
    return conclude(story(*holders, **facts))


# Every outcome -------------------------------------------------------------------------------------------------------


def test_clean() -> None:
    found = verdict(used=(3, 9, 3), proved=True)
    assert (found.outcomes, found.exit) == ((Outcome.CLEAN,), 0)
    assert found.message == "GPUs 0-2 proved clean (at most 9 MiB used, limit 64 MiB)"
    assert verdict(proved=True).message == "GPU 0 proved clean (3 MiB used, limit 64 MiB)"


@pytest.mark.parametrize(("fate", "cleaned"), [(Fate.TERMINATED, True), (Fate.KILLED, True), (Fate.EXITED, False)])
def test_cleaned_is_when_this_run_ended_somebody(fate: Fate, cleaned: bool) -> None:
    found = verdict(proved=True, **seen(STALE, fate=fate))
    assert (found.outcome, found.exit) == (Outcome.CLEANED if cleaned else Outcome.CLEAN, 0)
    assert found.message.startswith("1 stale holder ended (python3[4711]), GPU 0 proved clean") is cleaned


@pytest.mark.parametrize("outcome", [Outcome.CONFIG, Outcome.UNKNOWN, Outcome.PROTECTED, Outcome.DENIED, Outcome.NONE])
def test_a_refusal_is_told_in_its_own_words(outcome: Outcome) -> None:
    refusal = Refusal(outcome, "so it is", ["do this", "", "or that", "do this"])
    found = conclude(Story(run="0123", time=0.0, refusal=refusal))
    assert (found.outcomes, found.exit) == ((outcome,), EXIT_STATUS[outcome])
    assert (found.message, found.hints) == ("so it is", ("do this", "or that"))


def test_interrupted_names_the_gpus_that_were_waited_for() -> None:
    found = verdict(interrupted="SIGTERM", used=(3, 1523, 3))
    assert found.message.startswith("SIGTERM came before GPU 1 (1523 MiB used, limit 64 MiB) was proved clean; ")
    found = verdict(interrupted="SIGTERM", used=(3, 3, 3))
    assert found.message.startswith(
        "SIGTERM came before GPUs 0-2 (at most 3 MiB used, limit 64 MiB) were proved clean; "
    )


@pytest.mark.case("D3")
@pytest.mark.parametrize(
    ("done", "words"),
    [
        ({}, "nobody had been ended"),
        (seen(STALE, fate=Fate.KILLED), "1 stale holder had been ended (python3[4711])"),
    ],
)
def test_interrupted(done: dict[str, Any], words: str) -> None:
    found = verdict(interrupted="SIGTERM", **done)
    assert (found.outcome, found.exit) == (Outcome.INTERRUPTED, 75)
    assert found.message == f"SIGTERM came before GPU 0 (3 MiB used, limit 64 MiB) was proved clean; {words} by then"
    assert found.hints[0].startswith("systemctl start sglang.service")
    before = conclude(Story(run="0123", time=0.0, interrupted="SIGINT"))
    assert before.outcomes == (Outcome.INTERRUPTED,) and "SIGINT" in before.message


@pytest.mark.case("D9")
def test_denied_to_signal() -> None:
    found = verdict(STALE, used=(1523,), denied=(decision(STALE),))
    assert (found.outcome, found.exit) == (Outcome.DENIED, 77)
    assert "python3[4711]" in found.message and "ExecStartPre=+" in found.hints[0]


@pytest.mark.case("D1")
def test_denied_to_look() -> None:
    found = verdict(used=(1523,), facts={"unreadable": (10, 11, 12, 13)})
    assert (found.outcome, found.exit) == (Outcome.DENIED, 77)
    assert "4 processes may not be looked into (PID 10, 11, 12 and 1 more)" in found.message
    # It is no reason to refuse where nothing has to be explained.
    assert verdict(facts={"unreadable": (10,)}, proved=True).outcome is Outcome.CLEAN


@pytest.mark.case("D1")
@pytest.mark.parametrize("of", [owner(), owner(OwnerKind.UNKNOWN, hidden=True)])
def test_denied_to_look_into_one_that_is_listed(of: Owner) -> None:
    """It may be as stale as can be: whether it has a node open, or whose it is, cannot be told."""
    found = verdict(holder(of=of, listed={0: 1520}, opened=()), used=(1523,), facts={"unreadable": (4711,)})
    assert (found.outcomes, found.exit) == ((Outcome.DENIED,), 77)
    assert "python3[4711]" in found.message
    assert "ExecStartPre=+" in found.hints[0] and "CAP_SYS_PTRACE" in found.hints[0]
    # Who is known to be alive is in the way, whatever may be seen of the rest.
    alive = holder(of=ACTIVE, listed={0: 1520}, opened=())
    assert verdict(alive, used=(1523,), facts={"unreadable": (4711,)}).outcome is Outcome.PROTECTED


@pytest.mark.case("C5")
def test_unknown_names_the_gpu() -> None:
    found = verdict(used=(3, 3, None))
    assert (found.outcome, found.exit) == (Outcome.UNKNOWN, 69)
    assert found.message == "GPU 2 (GPU-00000002) cannot be measured: GPU is lost"
    assert "Xid" in found.hints[0]


@pytest.mark.case("A8")
def test_protected_names_gpu_process_owner_and_figures() -> None:
    found = verdict(
        holder(of=ACTIVE, listed={0: 1520}), STALE._replace(process=STALE.process._replace(pid=5)), used=(3043,)
    )
    assert (found.outcomes, found.exit) == ((Outcome.PROTECTED,), 75)
    for words in (
        "GPU 0 (3043 MiB used, limit 64 MiB)",
        "python3[4711]",
        "1520 MiB",
        "ollama.service, which is active",
    ):
        assert words in found.message
    assert found.hints[0] == "systemctl stop ollama.service"


@pytest.mark.case("A5")
def test_the_server_that_was_asked_about_is_no_reason_to_stop_it() -> None:
    """Somebody else on its GPUs is: that one is named first."""
    server = holder(pid=10, of=owner(of=unit("sglang.service", "active")), listed={0: 70_000})
    found = verdict(server, used=(70_003,), unit="sglang.service")
    assert found.outcome is Outcome.PROTECTED and "sglang.service, which is active" in found.message
    assert found.hints[0].startswith("nothing is wrong with that: sglang.service is up")
    assert not any("systemctl stop" in hint for hint in found.hints)
    other = holder(pid=11, of=ACTIVE, listed={0: 1520})
    found = verdict(server, other, used=(71_523,), unit="sglang.service")
    assert "is held by python3[11]" in found.message and found.hints[0] == "systemctl stop ollama.service"


def test_what_is_in_the_way_without_a_gpu_is_not_said_to_hold_one() -> None:
    served = {uuid(1): frozenset({"mps"})}
    alive = holder(pid=10, of=ACTIVE, opened=())._replace(kinds=served)
    previous = holder(pid=11, of=owner(OwnerKind.OWN_PREVIOUS), opened=())._replace(kinds=served)
    found = verdict(alive, previous, used=(3,))
    assert found.outcome is Outcome.PROTECTED and found.message.startswith("python3[11] (user model) is in the way: it")


def test_protected_counts_the_others() -> None:
    many = [holder(pid=pid, of=session("active", "running"), listed={0: 100}) for pid in range(10, 16)]
    found = verdict(*many, used=(603,))
    assert "the login session 7 of alice" in found.message
    assert "and by 5 others: python3[11], python3[12], python3[13] and 2 more" in found.message


@pytest.mark.case("A9")
def test_protected_by_somebody_on_the_way_names_the_time_that_may_take() -> None:
    found = verdict(holder(of=GOING, listed={0: 1520}), used=(1523,))
    assert found.outcome is Outcome.PROTECTED and "TimeoutStopSec=1min 30s" in found.message


@pytest.mark.case("A17")
def test_respawning_names_who_starts_them() -> None:
    found = verdict(holder(listed={0: 1520}, ppid=812), used=(1523,), rounds=10)
    assert (found.outcomes, found.exit) == ((Outcome.RESPAWNING,), 75)
    assert "came back 10 times" in found.message and "PID 812" in found.message
    assert found.hints == ("systemctl status 812 shows what starts it: stop that",)


@pytest.mark.case("B5")
def test_unkillable_names_state_and_place() -> None:
    stuck = holder(listed={0: 1520}, state="D")
    identity = stuck.process.identity
    found = verdict(
        stuck, used=(1523,), rounds=1, fates={identity: Fate.SURVIVED}, survivors={identity: "uvm_spin_loop"}
    )
    assert (found.outcomes, found.exit) == ((Outcome.UNKILLABLE,), 75)
    assert "survived SIGKILL (state D, in uvm_spin_loop)" in found.message


@pytest.mark.case("B1")
def test_not_freed_after_holders_are_gone() -> None:
    found = verdict(used=(1523,), **seen(STALE, fate=Fate.KILLED))
    assert (found.outcomes, found.exit) == ((Outcome.NOT_FREED,), 75)
    assert found.message == (
        "GPU 0 (GPU-00000000): 1523 MiB used, limit 64 MiB, 30 s into this run, though python3[4711] is gone"
    )
    assert found.hints[0].startswith("allow more time (deadline.total)")


@pytest.mark.case("B1")
def test_a_monitor_that_came_and_went_is_not_blamed() -> None:
    monitor = holder(of=ACTIVE)
    assert verdict(used=(1523,), **seen(monitor, fate=Fate.EXITED)).outcome is Outcome.UNATTRIBUTED
    listed = holder(of=ACTIVE, listed={0: 1520})
    assert verdict(used=(1523,), **seen(listed, fate=Fate.EXITED)).outcome is Outcome.NOT_FREED
    elsewhere = holder(listed={1: 1520}, opened=(0, 1))
    assert verdict(used=(1523, 3), **seen(elsewhere, fate=Fate.KILLED)).outcome is Outcome.UNATTRIBUTED


def test_not_freed_for_want_of_free_memory() -> None:
    needy = policy('[memory]\nmin_free = "81918 MiB"\n')
    machine = survey(used=(3,))
    found = conclude(story(plan=judge.plan(needy, machine, History()), survey=machine))
    assert found.outcome is Outcome.NOT_FREED and "memory.min_free" in found.message


def test_not_freed_because_it_had_not_settled() -> None:
    found = verdict(used=(3, 3))
    assert (found.outcome, found.exit) == (Outcome.NOT_FREED, 75)
    assert "before GPUs 0-1 (at most 3 MiB used, limit 64 MiB) had stayed clean" in found.message


def test_not_freed_for_a_check_says_what_clean_would_do() -> None:
    found = verdict(STALE, used=(1523,), checking=True)
    assert (found.outcomes, found.exit) == ((Outcome.NOT_FREED,), 75)
    assert "clean would end 1 stale holder: python3[4711]" in found.message
    start = "systemctl start sglang.service does it first"
    assert found.hints == (f"{start}, and gpuprestart clean --unit sglang.service does it now",)
    nobodys = verdict(STALE, used=(1523,), checking=True, unit=None)
    assert nobodys.hints == ("gpuprestart clean does it now",)
    # That ends nothing of that unit's own last run.
    ours = verdict(holder(of=OURS, opened=()), checking=True)
    assert ours.outcome is Outcome.NOT_FREED and ours.message.startswith("gpuprestart clean would end")
    assert ours.hints == (start,)


@pytest.mark.parametrize("rounds", [0, 1])
@pytest.mark.parametrize("used", [3, 1523])
def test_a_deadline_before_a_stale_holder_was_ended_is_no_fault_of_this_program(rounds: int, used: int) -> None:
    """Such as one of our own unit's last run, without a GPU, that ignores SIGTERM for longer than there is time."""
    found = verdict(holder(of=OURS, opened=()), used=(used,), rounds=rounds)
    assert (found.outcomes, found.exit) == ((Outcome.NOT_FREED,), 75), found.message
    assert "python3[4711]" in found.message


@pytest.mark.case("B3")
@pytest.mark.case("B4")
def test_unattributed_names_dead_pids_and_live_suspects() -> None:
    monitor = holder(of=ACTIVE)
    found = verdict(monitor, used=(540,), facts={"dead": {uuid(0): (812_345,)}})
    assert (found.outcomes, found.exit) == ((Outcome.UNATTRIBUTED,), 75)
    assert "540 MiB used, limit 64 MiB, and nobody was seen to hold it" in found.message
    assert "NVML still lists PID 812345, which is in no /proc" in found.message
    assert f"nvidia-smi --gpu-reset -i {uuid(0)}" in found.hints[0] and "reboot" in found.hints[0]
    assert any("python3[4711]" in hint and "has the node of GPU 0 open" in hint for hint in found.hints)


def test_unattributed_names_whom_a_reset_would_be_refused_for() -> None:
    """A monitor that is spared, with memory on another GPU, has every node open."""
    monitor = holder(of=ACTIVE, listed={1: 300}, opened=(0, 1))
    found = verdict(monitor, used=(540, 303), rules=rule("spare", unit="ollama"))
    assert found.outcome is Outcome.UNATTRIBUTED
    assert [hint for hint in found.hints if "has the node of GPU 0 open" in hint] == [
        "python3[4711] of ollama.service (user model, 300 MiB) has the node of GPU 0 open; "
        "it matches the rule 'spare it'"
    ]


@pytest.mark.case("C1")
def test_unattributed_by_v1_says_that_v1_counts_reserved_memory() -> None:
    readings = {uuid(0): reading()._replace(memory=memory(912, reserved=None, call="v1"))}
    machine = survey()._replace(readings=readings)
    found = conclude(story(plan=judge.plan(policy(), machine, History()), survey=machine))
    assert found.outcome is Outcome.UNATTRIBUTED
    assert "v1" in found.hints[0] and "reserves" in found.hints[0] and "memory.max_used" in found.hints[0]


@pytest.mark.parametrize("key", ["distrust", "unlisted"])
@pytest.mark.case("C14")
def test_unattributed_says_what_is_wrong_with_the_list(key: str) -> None:
    scrambled = reading(used=1523)._replace(**{key: "NVML lists PID 0, which cannot be"})  # type: ignore[arg-type]
    found = verdict(used=(1523,), facts={"readings": {uuid(0): scrambled}})
    assert found.outcome is Outcome.UNATTRIBUTED
    assert any("PID 0" in hint and "process list" in hint for hint in found.hints)


@pytest.mark.case("A18")
def test_every_dirty_gpu_has_a_reason() -> None:
    found = verdict(used=(3, 540, 3, 700))
    assert "GPU 1 " in found.message and "GPU 3 " in found.message and "GPU 0 " not in found.message


# The order of outcomes, and what is no success ----------------------------------------------------------------------


def test_all_outcomes_are_listed_and_the_first_of_the_contract_decides() -> None:
    blocked = holder(of=ACTIVE, listed={0: 1520})
    found = verdict(blocked, used=(1523, None), interrupted="SIGTERM", denied=(decision(STALE),))
    order = (Outcome.INTERRUPTED, Outcome.DENIED, Outcome.UNKNOWN, Outcome.PROTECTED)
    assert (found.outcomes, found.exit) == (order, EXIT_STATUS[Outcome.INTERRUPTED])
    assert found.message.startswith("SIGTERM") and any("ollama" in hint for hint in found.hints)


def test_the_order_is_not_that_in_which_things_were_found() -> None:
    found = verdict(used=(3,), interrupted="SIGTERM", refusal=Refusal(Outcome.UNKNOWN, "no answer", ["do this"]))
    assert (found.outcomes, found.exit) == ((Outcome.INTERRUPTED, Outcome.UNKNOWN), 75)
    stuck = STALE.process.identity
    both = verdict(STALE, used=(1523,), rounds=3, fates={stuck: Fate.SURVIVED}, survivors={stuck: ""})
    assert both.outcomes == (Outcome.RESPAWNING, Outcome.UNKILLABLE)


def test_the_exit_statuses_of_the_contract() -> None:
    wanted = {
        "config": 78, "interrupted": 75, "denied": 77, "unknown": 69, "protected": 75, "respawning": 75,
        "unkillable": 75, "not-freed": 75, "unattributed": 75, "precondition": 75, "internal": 70,
        "cleaned": 0, "clean": 0, "bypassed": 0, "none": 0,
    }  # fmt: skip
    assert {outcome.value: status for outcome, status in EXIT_STATUS.items()} == wanted
    assert [outcome.value for outcome in Outcome] == list(wanted)


@pytest.mark.parametrize(
    "told",
    [
        story(),
        story(used=(3, 3), proved=False),
        story(proved=True, plan=None),
        story(proved=True, plan=None, survey=None),
        story(used=(), proved=True),
        story(used=(3, 65), proved=True),
        story(used=(None,), proved=True),
        story(holder(of=ACTIVE, listed={0: 3}), used=(3,), proved=True),
        story(holder(of=GOING, listed={0: 3}), used=(3,), proved=True),
        story(holder(of=OURS, opened=()), used=(3,), proved=True),
        story(proved=True, interrupted="SIGTERM"),
        story(proved=True, denied=(decision(STALE),)),
        story(proved=True, refusal=Refusal(Outcome.UNKNOWN, "no answer", ["do this"])),
        story(proved=True, fates={STALE.process.identity: Fate.SURVIVED}, seen=(decision(STALE),)),
        Story(run="", time=0.0),
        Story(run="", time=0.0, proved=True),
    ],
)
def test_no_0_without_a_proof(told: Story) -> None:
    found = conclude(told)
    assert found.exit == EXIT_STATUS[found.outcome] != 0
    assert found.message and found.hints


def test_a_run_that_tells_nothing_is_a_fault_of_this_program() -> None:
    found = conclude(Story(run="", time=0.0))
    assert (found.outcomes, found.exit) == ((Outcome.INTERNAL,), 70)


def test_the_verdict_carries_the_story() -> None:
    told = story(used=(3,), proved=True, driver="570.1", nvml_path="/x", policy_files=("/y",), boot_id="b")
    found = conclude(told._replace(phases={"measure": 0.1}))
    assert (found.unit, found.run, found.driver, found.nvml_path) == ("sglang.service", "0123", "570.1", "/x")
    assert (found.policy_files, found.boot_id, found.duration) == (("/y",), "b", 30.4)
    assert found.gpus == told.gpus and found.phases == {"measure": 0.1}
