"""What happened -> Verdict: the outcome, the sentence that tells it, and the hints of what to do. Pure.

Every 0 is a proof. So success is reached only when nothing stands against it and the run itself says that it proved
every selected GPU clean; a story that tells neither is a fault of this program, and refuses.
"""

from __future__ import annotations

from . import findings
from .findings import Finding
from .model import EX_NOINPUT, EXIT_STATUS, Fate, Outcome, OwnerKind, Process, Verdict
from .story import Story

_ORDER = list(Outcome)


def conclude(story: Story) -> Verdict:
    """The verdict on a run."""
    found = findings.against(story) or [_for(story)]
    found.sort(key=lambda finding: _ORDER.index(finding.outcome))
    outcomes = tuple(dict.fromkeys(finding.outcome for finding in found))
    first = [finding for finding in found if finding.outcome is outcomes[0]]
    hints = [hint for finding in found for hint in finding.hints]
    if EXIT_STATUS[outcomes[0]] or story.checking:
        hints += story.advice
    about_files = outcomes[0] is Outcome.PRECONDITION and all(each.file for each in story.unmet)
    return Verdict(
        outcomes=outcomes,
        exit=EX_NOINPUT if about_files else EXIT_STATUS[outcomes[0]],
        unit=story.unit,
        message="; ".join(finding.message for finding in first),
        hints=tuple(dict.fromkeys(hint for hint in hints if hint)),
        time=story.time,
        run=story.run,
        boot_id=story.boot_id,
        driver=story.driver,
        nvml_path=story.nvml_path,
        policy_files=story.policy_files,
        duration=story.duration,
        phases=story.phases,
        gpus=story.gpus,
        decisions=story.seen,
        fates=story.fates,
        unmet=story.unmet,
        residue=story.residue,
        timeline=story.timeline,
        textfile=story.textfile,
    )


def survivors(verdict: Verdict) -> list[Process]:
    """Processes of our unit's earlier runs that nothing ended."""
    own = [each.holder for each in verdict.decisions if each.holder.owner.kind is OwnerKind.OWN_PREVIOUS]
    return [holder.process for holder in own if verdict.fates.get(holder.process.identity) is Fate.SURVIVED]


def _for(story: Story) -> Finding:
    """What speaks for the start."""
    if story.proved and story.plan is not None and story.plan.clean and story.gpus:
        return findings.proof(story)
    message = "this run ended without a proof that the GPUs are clean, and without a reason"
    return Finding(Outcome.INTERNAL, message, (f"report it, with journalctl GPUPRESTART_RUN={story.run}",))
