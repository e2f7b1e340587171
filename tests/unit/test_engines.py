"""What a command line asks of a container engine."""

from __future__ import annotations

from typing import Optional

import pytest

from gpuprestart import engines
from gpuprestart.service import Exec


def command(*argv: str) -> Exec:
    return Exec(path=argv[0], argv=argv, flags=frozenset())


@pytest.mark.parametrize(
    ("argv", "engine", "handles"),
    [
        (("/usr/bin/docker", "run", "--rm", "--name", "llm", "image"), "docker", {"llm"}),
        (("/usr/bin/docker", "--context", "default", "container", "run", "--name=llm", "image"), "docker", {"llm"}),
        (
            ("/usr/bin/podman", "run", "--cidfile=/run/llm.cid", "--name=llm", "image"),
            "podman",
            {"llm", "/run/llm.cid"},
        ),
        (("/usr/bin/env", "A=1", "nerdctl", "run", "image"), "nerdctl", set()),
        (("/bin/sh", "-c", "docker rm -f llm; exec docker run --name 'llm' image"), "docker", {"llm"}),
        (("/bin/bash", "-ec", "docker pull image&&docker run --name=llm image"), "docker", {"llm"}),
        (("/usr/bin/docker", "start", "-a", "llm"), None, None),
        (("/usr/bin/python3", "run", "--name", "llm"), None, None),
        (("/bin/sh", "-c", "docker run 'open"), "docker", set()),
        (("/bin/sh", "/opt/docker", "run.sh"), None, None),
        (("/usr/bin/docker",), None, None),
    ],
)
def test_which_command_starts_a_container(
    argv: tuple[str, ...], engine: Optional[str], handles: Optional[set[str]]
) -> None:
    run = engines.run(command(*argv))
    assert (run.engine if run else None, set(run.handles) if run else None) == (engine, handles)


@pytest.mark.parametrize(
    ("line", "ends"),
    [
        ("docker rm -f llm", True),
        ("docker rm --force llm other", True),
        ("docker rm -vf llm", True),
        ("docker container rm -f llm", True),
        ("docker stop -t 10 llm", True),
        ("docker kill llm", True),
        ("docker rm llm", False),
        ("docker rm -f other", False),
        ("docker pull llm", False),
        ("podman rm -f llm", False),
    ],
)
def test_what_ends_a_container(line: str, ends: bool) -> None:
    run = engines.run(command("/usr/bin/docker", "run", "--name", "llm", "image"))
    assert run is not None
    assert any(call.ends(run) for call in engines.calls(command(*line.split()))) is ends
    assert any(call.ends(run) for call in engines.calls(command("/bin/sh", "-c", f"{line} || true"))) is ends


def test_what_ends_one_that_is_known_by_a_file() -> None:
    run = engines.run(command("/usr/bin/podman", "run", "--cidfile", "/run/llm.cid", "image"))
    assert run is not None
    (removal,) = engines.calls(command("/usr/bin/podman", "rm", "-v", "-f", "-i", "--cidfile=/run/llm.cid"))
    assert removal.ends(run)


@pytest.mark.parametrize(
    ("cgroups", "within"), [("split", True), ("disabled", True), ("enabled", False), (None, False)]
)
def test_whose_cgroup_a_container_is_in(cgroups: Optional[str], within: bool) -> None:
    run = engines.run(command("/usr/bin/podman", "run", *([f"--cgroups={cgroups}"] if cgroups else []), "image"))
    assert run is not None and run.within is within
