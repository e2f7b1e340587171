"""A service from what systemd says of it."""

from __future__ import annotations

from typing import Any

import pytest

from gpuprestart import service

HOOK = ["/usr/bin/gpuprestart", ["/usr/bin/gpuprestart", "clean"], ["privileged"], 0, 0, 0, 0, 0, 0, 0]


def of(**said: Any) -> service.Service:
    return service.from_properties("sglang.service", said)


def test_what_systemd_says() -> None:
    found = of(
        LoadState="loaded",
        FragmentPath="/etc/systemd/system/sglang.service",
        DropInPaths=["/etc/systemd/system/sglang.service.d/50-gpuprestart.conf"],
        RestartUSec=100_000,
        TimeoutStartUSec=90_000_000,
        StartLimitIntervalUSec=0,
        SuccessExitStatus=[[75], [15, 34]],
        Environment=["A=b c", "D=", "odd"],
        EnvironmentFiles=[["/etc/default/x", True]],
        DeviceAllow=[["/dev/nvidia0", "rw"]],
        ExecStartPreEx=[HOOK],
    )
    assert found.files == (found.fragment, *found.drop_ins)
    assert (found.restart_sec, found.timeout_start, found.start_limit_interval) == (0.1, 90.0, 0.0)
    assert found.success_statuses == {"75", "TERM", "34"}
    assert found.environment == {"A": "b c", "D": ""}
    assert found.environment_files == (("/etc/default/x", True),) and found.device_rights == {"/dev/nvidia0": "rw"}
    (hook,) = found.start_pre
    assert hook.ours and hook.flags == {"privileged"} and str(hook) == "/usr/bin/gpuprestart clean"


def test_what_is_not_said_is_as_systemd_has_it_by_default() -> None:
    found = of(TimeoutStartUSec=2**64 - 1)
    assert found.timeout_start is None and found.files == ()
    assert (found.notify_access, found.restart, found.device_policy) == ("none", "no", "auto")


@pytest.mark.parametrize(
    ("argv", "ours"),
    [
        (("/usr/bin/gpuprestart", "clean"), True),
        (("/usr/bin/python3", "-m", "gpuprestart", "clean"), True),
        (("/bin/sh", "-c", "exec /usr/bin/gpuprestart clean --json"), True),
        (("/bin/sh", "-c", "exec gpuprestart clean"), True),
        (("/usr/bin/gpuprestart", "check", "--journal"), False),
        (("/usr/bin/mygpuprestart", "clean"), False),
        (("/usr/bin/true", "clean"), False),
    ],
)
def test_which_command_is_the_hook(argv: tuple[str, ...], ours: bool) -> None:
    assert service.Exec(path=argv[0], argv=argv, flags=frozenset()).ours is ours
