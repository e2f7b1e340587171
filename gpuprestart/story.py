"""All that a run can tell when it ends, wherever it ends."""

from collections.abc import Mapping
from typing import NamedTuple, Optional

from .model import Decision, Fate, Gpu, GpuState, Leftover, Plan, Refusal, Survey, Timeline, Unmet


class Story(NamedTuple):
    run: str
    time: float
    boot_id: str = ""
    unit: Optional[str] = None
    checking: bool = False
    driver: str = ""
    nvml_path: str = ""
    policy_files: tuple[str, ...] = ()
    #: When the run began, on the clock of ``Process.began``, and how long it took.
    began: float = 0.0
    duration: float = 0.0
    phases: Mapping[str, float] = {}
    #: The last look and what was decided on it.
    plan: Optional[Plan] = None
    survey: Optional[Survey] = None
    #: Every holder that was seen, in PID order, as it was last judged.
    seen: tuple[Decision, ...] = ()
    fates: Mapping[tuple[int, int], Fate] = {}
    #: Holders to which a signal was refused.
    denied: tuple[Decision, ...] = ()
    #: Holders that survived SIGKILL, with the kernel function in which each is stuck.
    survivors: Mapping[tuple[int, int], str] = {}
    #: How many times stale holders were ended.
    rounds: int = 0
    #: The GPUs were seen clean for as long as the policy asks.
    proved: bool = False
    #: Requirements of the policy that are not met, and what was found in shared memory.
    unmet: tuple[Unmet, ...] = ()
    residue: tuple[Leftover, ...] = ()
    #: GPUs that were reset, their memory being nobody's.
    was_reset: tuple[Gpu, ...] = ()
    #: What would help besides what the findings say.
    advice: tuple[str, ...] = ()
    timeline: Timeline = Timeline()
    #: The file of metrics that the policy asks for.
    textfile: str = ""
    refusal: Optional[Refusal] = None
    interrupted: str = ""

    @property
    def gpus(self) -> tuple[GpuState, ...]:
        return self.plan.gpus if self.plan else ()
