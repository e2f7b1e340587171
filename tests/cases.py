"""The situations that must come out right, by the ids that tests are marked with.

``make cases`` lists them with their tests and results; a test fails if one that is promised has no test.
"""

from __future__ import annotations

CASES = {
    # The old server is still there.
    "A0": "1523 MiB with no process listed, the holder an orphan in a failed unit's cgroup; all eight GPUs proved",
    "A1": "the front process was killed, renamed engine and worker children live on",
    "A2": "a holder left beside us in our own unit's cgroup, also with Delegate=yes",
    "A3": "a scheduler with ppid 1 in the cgroup of its failed unit",
    "A4": "left by a login session that is over",
    "A5": "held from a login session that is alive",
    "A6": "a removed container's workers, no runtime above them",
    "A7": "a container that still runs",
    "A8": "another service is active on our GPU, a stale holder beside it",
    "A9": "another service is deactivating, and goes, or does not",
    "A10": "children of our unit's last run that hold no GPU",
    "A11": "NVML lists one dead PID, live forked children hold what they inherited",
    "A12": "a holder that has the node mapped and no descriptor",
    "A13": "a holder through another node of the same device number",
    "A14": "a holder that forks a fresh holder in its SIGTERM handler",
    "A15": "a holder that ignores SIGTERM; one that is stopped",
    "A16": "a holder that takes its time after SIGTERM",
    "A17": "a supervisor starts the holder again, for ever",
    "A18": "several GPUs free, one stays dirty",
    "A19": "a stale PID file names an innocent process",
    "A20": "two units start on one GPU at the same moment",
    "A21": "clean from a shell, cron, a user unit, for a running unit, in ExecReload=",
    "A22": "what an earlier ExecStartPre= of this start has started",
    "A23": "left-overs of units that carry other people's work",
    "A24": "units of a user manager or a container that bear the name of one here",
    "A25": "memory that grows while it is watched, a child that comes late",
    # Memory and processes disagree.
    "B1": "memory that comes back long after the processes are gone",
    "B2": "memory that drops and comes back, taken by a sibling",
    "B3": "NVML lists a PID that exists nowhere",
    "B4": "memory with no process at all, over and under the limit",
    "B5": "a holder that survives SIGKILL",
    "B6": "a zombie leader whose live thread holds the device",
    "B7": "a true zombie",
    "B8": "full utilisation, no memory",
    "B9": "memory charged to a living sidecar once its peer is killed",
    "B10": "a descriptor in flight in a socket",
    "B11": "a desktop's display servers beside one stale orphan",
    "B12": "infrastructure, and a rule that would kill everything",
    "B13": "an orphan that calls itself Xorg; an Xorg above what may be spared",
    "B14": "a stale holder and a live suspect on one GPU",
    "B15": "a stale suspect beside a draining holder",
    # NVML and devices.
    "C1": "memory that the driver reserves",
    "C2": "a driver without the newest process lists, or any",
    "C3": "no driver, no library, versions that do not match",
    "C4": "a driver that hangs",
    "C5": "one GPU lost, selected or not",
    "C6": "fewer GPUs than the policy names, unknown and ambiguous UUIDs",
    "C7": "device minors in another order than NVML's indices",
    "C8": "a neighbour that has our nodes open and its memory elsewhere",
    "C9": "every form of CUDA_VISIBLE_DEVICES",
    "C10": "MIG instances beside other tenants'",
    "C11": "one PID in two lists",
    "C12": "per-process figures missing, or not adding up",
    "C13": "GPUs that cannot say how much memory is used",
    "C14": "scrambled process records",
    "C15": "a listed PID of another namespace that is an innocent local process",
    "C16": "libraries that answer in NVML's place",
    "C17": "inside a guest whose driver lists the host's PIDs",
    # Around it.
    "D1": "a hook that is not root",
    "D2": "a start timeout shorter than the deadline",
    "D3": "SIGTERM from systemd in the middle of the wait",
    "D4": "a PID that is reused between SIGTERM and SIGKILL",
    "D5": "secrets and control characters in a holder's command line",
    "D6": "journald absent or limiting",
    "D7": "policies that are wrong in every way",
    "D8": "every form of cgroup path",
    "D9": "signals refused although we are root",
    "D10": "very many processes, descriptors, holders and GPUs",
    "D11": "a unit whose SuccessExitStatus= lists the refusal",
    "D12": "a unit that is started in the middle of our judging",
    "D13": "check from a shell for a unit whose GPUs come from an EnvironmentFile=",
}

#: What is promised so far.
PROMISED = tuple(
    case for case in CASES if case not in ("A17", "B5", "B9", "B10", "C4", "C16", "D4", "D6", "D9", "D10", "D12")
)
