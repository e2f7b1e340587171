"""Who owns a process: cgroup paths of every layout, and what systemd says of the units that they name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Optional

import pytest

from gpuprestart.model import Owner, OwnerKind, Unit
from gpuprestart.owners import CARRIERS, Names, Own, candidates, carrier, cgroup_of, owner_of, slice_uid, unit_of

from .machines import process, unit

NAMESPACE = 4026531836
ID = "0123456789abcdef" * 4
SLICE = "/user.slice/user-1000.slice"
MANAGER = unit("user@1000.service", "active", user="1000", control_group=f"{SLICE}/user@1000.service")
SESSION = unit("session-7.scope", "active", user="", control_group=f"{SLICE}/session-7.scope")


def owned(
    cgroup: str,
    *units: Unit,
    own: Optional[Own] = None,
    uids: Optional[Mapping[str, int]] = None,
    uid: int = 990,
    ppid: int = 4000,
    namespace: int = NAMESPACE,
) -> Owner:
    return owner_of(
        process(cgroup=cgroup, uid=uid, ppid=ppid, pid_namespace=namespace),
        units={each.name: each for each in units},
        names=Names(users={1000: "alice"}, uids={"model": 990} if uids is None else uids),
        own=own,
        namespace=NAMESPACE,
    )


# Units ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cgroup", "name"),
    [
        ("/system.slice/old.service", "old.service"),
        ("/system.slice/old.service/payload/deep", "old.service"),
        ("/system.slice/system-sglang.slice/sglang@qwen.service", "sglang@qwen.service"),
        ("/system.slice/sglang\\x2dqwen.service", "sglang\\x2dqwen.service"),
        ("/old.service", "old.service"),
        ("/system.slice/run-u7.scope", "run-u7.scope"),
        # systemd puts a "_" before what the kernel could take for one of its own files (cg_escape).
        ("/system.slice/_cpu.service", "cpu.service"),
        ("/system.slice/__odd.service", "_odd.service"),
    ],
)
@pytest.mark.case("D8")
def test_a_unit_is_found_where_its_control_group_is(cgroup: str, name: str) -> None:
    group = cgroup.partition("/payload")[0]
    found = owned(cgroup, unit(name, control_group=group))
    assert (found.kind, found.word, found.as_unit_user) == (OwnerKind.UNIT, f"unit:{name}", True)
    assert found.unit is not None and found.unit.name == name


@pytest.mark.parametrize(
    ("user", "uid", "same"),
    [("model", 990, True), ("model", 991, False), ("stranger", 990, False), ("", 0, True), ("", 990, False)],
)
def test_whether_it_runs_as_the_user_of_its_unit(user: str, uid: int, same: bool) -> None:
    found = owned("/system.slice/old.service", unit(user=user), uid=uid)
    assert (found.kind, found.as_unit_user) == (OwnerKind.UNIT, same)


def test_the_outermost_unit_wins() -> None:
    cgroup = "/system.slice/outer.service/inner.service"
    outer, inner = unit("outer.service"), unit("inner.service", control_group=cgroup)
    assert owned(cgroup, outer, inner).word == "unit:outer.service"
    # Only systemd's word makes a unit of it.
    assert owned(cgroup, inner).word == "unit:inner.service"


@pytest.mark.parametrize(
    "units",
    [
        (),
        (unit(load_state="not-found", active="inactive", control_group=""),),
        (unit(control_group="/system.slice/elsewhere.slice/old.service"),),
        (unit(control_group="/system.slice/old.servic"),),
    ],
)
def test_a_path_that_names_a_unit_which_is_not_there_proves_nothing(units: tuple[Unit, ...]) -> None:
    found = owned("/system.slice/old.service", *units)
    assert found.kind is OwnerKind.UNKNOWN
    assert "names old.service, which systemd does not have there" in found.doubt


@pytest.mark.parametrize("cgroup", ["/../../system.slice/old.service", "/..", "?", "", "old.service", "/a/../b"])
@pytest.mark.case("D8")
def test_what_lies_outside_our_view_is_unknown(cgroup: str) -> None:
    assert owned(cgroup, unit(control_group=cgroup)).kind is OwnerKind.UNKNOWN


@pytest.mark.case("D8")
def test_a_deleted_cgroup_is_no_unit_s() -> None:
    assert owned("/system.slice/old.service (deleted)", unit()).kind is not OwnerKind.UNIT


@pytest.mark.parametrize(("ppid", "orphan"), [(1, True), (4000, False)])
@pytest.mark.parametrize("cgroup", ["/", "/system.slice", "/custom/group"])
def test_a_process_of_nobody(cgroup: str, ppid: int, orphan: bool) -> None:
    found = owned(cgroup, ppid=ppid)
    assert (found.kind, found.word, found.orphan) == (OwnerKind.NONE, "none", orphan)


def test_names_that_cannot_be_units_are_not_asked_for() -> None:
    assert candidates("/system.slice/a.service/b.scope/c.mount/d") == ("a.service", "b.scope")
    assert candidates("/system.slice/a b.service/*.service/-x.service/" + "y" * 300 + ".service") == ("-x.service",)
    # systemctl refuses the whole call for one name like these, and anybody can give them to a cgroup of their own.
    assert candidates("/user.slice/user-1000.slice/user@1000.service/x@.service/@y.service") == ("user@1000.service",)


@pytest.mark.parametrize(
    ("name", "carries"),
    [
        ("ssh.service", True),
        ("ssh@12-10.0.0.1:22-10.0.0.2:4000.service", True),
        ("cron.service", True),
        ("docker.service", True),
        ("slurmd.service", True),
        ("actions.runner.org-repo.box.service", True),
        ("sglang.service", False),
        ("sshfs-model.service", False),
    ],
)
@pytest.mark.case("A23")
def test_units_that_carry_other_people_s_work(name: str, carries: bool) -> None:
    assert carrier(name) is carries


def test_the_carriers_that_the_contract_names_are_listed() -> None:
    wanted = {"ssh", "sshd", "cron", "crond", "atd", "slurmd", "docker", "containerd", "kubelet", "jupyterhub*"}
    assert wanted <= set(CARRIERS)


# Sessions and user managers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cgroup", "units", "kind", "word", "has_unit"),
    [
        ("/user.slice/user-1000.slice/session-7.scope", (SESSION,), OwnerKind.SESSION, "session:7:alice", True),
        ("/user.slice/user-1000.slice/session-7.scope/x", (SESSION,), OwnerKind.SESSION, "session:7:alice", True),
        ("/user.slice/user-1000.slice/session-c1.scope", (), OwnerKind.SESSION, "session:c1:alice", False),
        ("/user.slice/user-4242.slice/session-7.scope", (), OwnerKind.SESSION, "session:7:4242", False),
        ("/user.slice/user-1000.slice/user@1000.service/init.scope", (MANAGER,), OwnerKind.USER, "user:alice", True),
        ("/user.slice/user-1000.slice/user@1000.service", (), OwnerKind.UNKNOWN, "unknown", False),
        ("/user.slice/user-1000.slice", (), OwnerKind.NONE, "none", False),
        # The name alone does not make a session.
        ("/system.slice/session-7.scope", (), OwnerKind.UNKNOWN, "unknown", False),
    ],
)
def test_sessions_and_user_managers(
    cgroup: str, units: tuple[Unit, ...], kind: OwnerKind, word: str, has_unit: bool
) -> None:
    found = owned(cgroup, *units)
    assert (found.kind, found.word, found.unit is not None) == (kind, word, has_unit)


@pytest.mark.parametrize(
    "system_unit",
    [unit("vllm.service", "inactive"), unit("vllm.service", "active"), unit("vllm.service", control_group="")],
)
@pytest.mark.case("A24")
def test_a_user_s_unit_is_not_the_system_s_of_the_same_name(system_unit: Unit) -> None:
    cgroup = "/user.slice/user-1000.slice/user@1000.service/app.slice/vllm.service"
    assert owned(cgroup, MANAGER, system_unit).kind is OwnerKind.USER
    # Nor where systemd does not speak of the manager.
    assert owned(cgroup, system_unit).kind is OwnerKind.UNKNOWN
    assert unit_of(cgroup, {system_unit.name: system_unit}) is None


@pytest.mark.parametrize(
    ("cgroup", "uid"),
    [
        ("/user.slice/user-1000.slice/session-7.scope", 1000),
        ("/user.slice/user-1000.slice", None),
        ("/x/user.slice/user-1000.slice/session-7.scope", None),
        ("/system.slice/user-1000.slice/x", None),
    ],
)
def test_the_user_of_a_slice(cgroup: str, uid: Optional[int]) -> None:
    assert slice_uid(cgroup) == uid


# Containers and jobs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cgroup", "word"),
    [
        (f"/system.slice/docker-{ID}.scope", f"container:docker:{ID}"),
        (f"/docker/{ID}", f"container:docker:{ID}"),
        (f"/machine.slice/libpod-{ID}.scope", f"container:podman:{ID}"),
        (f"/machine.slice/libpod-{ID}.scope/container", f"container:podman:{ID}"),
        (
            f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope/container",
            f"container:podman:{ID}",
        ),
        (
            f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod1.slice/cri-containerd-{ID}.scope",
            f"container:cri-containerd:{ID}",
        ),
        (f"/kubepods.slice/kubepods-burstable.slice/crio-{ID}.scope", f"container:crio:{ID}"),
        (f"/kubepods/burstable/pod6a5b/{ID}", f"container:kubernetes:{ID}"),
        ("/lxc.payload.guest/system.slice/ollama.service", "container:lxc:guest"),
        ("/lxc/guest/init.scope", "container:lxc:guest"),
        ("/machine.slice/machine-guest.scope/payload/system.slice/ollama.service", "container:nspawn:guest"),
        ("/machine.slice/systemd-nspawn@guest.service/payload", "container:nspawn:guest"),
        ("/system.slice/slurmstepd.scope/job_42/step_0/user/task_0", "slurm:42"),
        ("/slurm/uid_1000/job_42/step_batch", "slurm:42"),
        ("/system.slice/slurmd.service/../slurm/job_42", ""),
    ],
)
@pytest.mark.case("A24")
@pytest.mark.case("D8")
def test_a_container_or_job_is_known_by_its_path(cgroup: str, word: str) -> None:
    """Before any unit is: a scope, or a guest's service of the same name as one of ours, says nothing."""
    units = [unit(name, control_group=cgroup.partition(name)[0] + name) for name in candidates(cgroup)]
    found = owned(cgroup, *units)
    if word:
        assert (found.word, found.kind) == (word, OwnerKind.SLURM if "slurm" in word else OwnerKind.CONTAINER)
    else:
        assert found.kind is OwnerKind.UNKNOWN


@pytest.mark.case("A7")
def test_another_pid_namespace_is_a_container() -> None:
    found = owned("/system.slice/sglang.service", unit("sglang.service"), namespace=4026532000)
    assert (found.kind, found.word) == (OwnerKind.CONTAINER, "container:pidns:4026532000")
    # One that may not be read could be another one.
    assert owned("/system.slice/old.service", unit(), namespace=0).kind is OwnerKind.UNKNOWN


# Our own unit --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("started", "ticks", "ahead_usec", "condition_usec", "older"),
    [
        # 100 ticks a second: tick 100 begins at 1 s and may have lasted until 1.01 s.
        (100, 100, 0, 1_010_000, True),
        (100, 100, 0, 1_009_999, False),
        (100, 100, 0, 1_000_000, False),
        (101, 100, 0, 1_010_000, False),
        (100, 1000, 0, 101_000, True),
        (100, 1000, 0, 100_999, False),
        # Two hours of suspend are in /proc's clock and not in systemd's.
        (720_100, 100, 7_200_000_000, 1_010_000, True),
        (720_100, 100, 7_200_000_000, 1_009_999, False),
        # A clock that cannot be, and a unit that never started: in doubt it is not older.
        (100, 100, 7_200_000_000, 1_010_000, False),
        (100, 100, 0, 0, False),
    ],
)
@pytest.mark.case("A2")
@pytest.mark.case("A22")
def test_what_began_before_this_start(
    started: int, ticks: int, ahead_usec: int, condition_usec: int, older: bool
) -> None:
    own = Own(unit("sglang.service", condition_usec=condition_usec), ahead_usec, ticks)
    assert own.predates(process(started=started)) is older


@pytest.mark.parametrize("cgroup", ["/system.slice/sglang.service", "/system.slice/sglang.service/.control"])
def test_processes_of_our_own_unit_are_of_this_start_or_an_earlier_one(cgroup: str) -> None:
    ours = unit("sglang.service", "activating", condition_usec=900_020_000)
    own = Own(unit=ours, boottime_ahead=0, ticks_per_second=100)
    found = owned(cgroup, ours, own=own)
    assert (found.kind, found.word) == (OwnerKind.OWN_PREVIOUS, "unit:sglang.service")
    now = Own(unit=ours._replace(condition_usec=900_000_000), boottime_ahead=0, ticks_per_second=100)
    assert owned(cgroup, ours, own=now).kind is OwnerKind.OWN_CURRENT


def test_without_an_own_unit_nobody_is_ours() -> None:
    found = owned("/system.slice/sglang.service", unit("sglang.service", "activating"))
    assert found.kind is OwnerKind.UNIT
    own = Own(unit=unit("sglang.service", condition_usec=10**12), boottime_ahead=0, ticks_per_second=100)
    assert owned("/system.slice/sglang.service.d/x", own=own).kind is OwnerKind.NONE


@pytest.mark.case("A2")
@pytest.mark.parametrize(
    ("unit_name", "cgroup", "found"),
    [
        ("x.service", "/system.slice/x.service", "/system.slice/x.service"),
        ("x.service", "/system.slice/x.service/.control", "/system.slice/x.service"),
        # systemd escapes what could be taken for a file of the cgroup itself, as memory.service could.
        ("memory.service", "/system.slice/_memory.service", "/system.slice/_memory.service"),
    ],
)
def test_the_cgroup_of_a_unit_on_a_path(unit_name: str, cgroup: str, found: str) -> None:
    assert cgroup_of(unit_name, cgroup) == found
