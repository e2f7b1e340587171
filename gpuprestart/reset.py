"""[reset]: the one GPU reset that is tried before a start is given up for memory that nobody holds.

It is the last resort in time as well: memory can come back minutes after its holder, so the reset begins when hardly
more time is left than it needs. A reset takes the GPU from whoever has it, so nobody may have it, ourselves included;
and one that did not help is not repeated in the same boot.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Optional

from .host import files, nvidia, procfs
from .host.locks import Denied, Notes
from .host.nvml import DriverError
from .ledger import Ledger
from .model import Gpu, GpuState, Inventory, Plan, Survey
from .neighbours import Neighbours, clock
from .policy import Policy
from .survey import Surveyor
from .text import numbered, printable

#: Seconds after a reset for the driver's first answer and a last look, beside what memory has to settle.
AFTER = 5.0

#: With less time than this none is begun: a reset that is killed half-way leaves nobody better off.
LEAST = 10.0

#: Seconds until it is looked again whether those who have the GPU have let go of it.
AGAIN = 2.0

#: So much of what the command said is told.
TOLD = 200


class LastResort:
    """Decides when it is time, makes sure that nobody has the GPU, resets it and brings the driver's child back."""

    def __init__(
        self,
        policy: Policy,
        host: Neighbours,
        ledger: Ledger,
        surveyor: Surveyor,
        inventory: Inventory,
        *,
        deadline: float,
        boot: str,
        trusted_owner: int,
        notes: Optional[Notes] = None,
    ) -> None:
        self._policy = policy
        self._reset = policy.reset
        self._host = host
        self._ledger = ledger
        self._surveyor = surveyor
        self._inventory = inventory
        self._boot = boot
        self._trusted_owner = trusted_owner
        self._notes = notes or Notes("resets")
        #: Until when the last reset has to be over.
        self._until = deadline - policy.memory.settle - AFTER
        self._next = self._until - self._reset.timeout
        self._fits = self._next > clock()
        #: UUIDs of GPUs that have been reset, or never will be, in this run.
        self._settled: set[str] = set()

    # When ------------------------------------------------------------------------------------------------------------

    def moment(self, plan: Plan) -> float:
        """When a reset falls due, if nothing changes; infinite where none does."""
        return self._next if self._wanted(plan) else float("inf")

    def due(self, plan: Plan) -> bool:
        return clock() >= self.moment(plan)

    def _wanted(self, plan: Plan) -> list[GpuState]:
        """GPUs with memory that nobody holds; none where the start would be refused whatever became of them."""
        if plan.refused or plan.occupants or any(state.unknown for state in plan.gpus):
            return []
        return [
            state
            for state in plan.gpus
            if state.gpu.uuid in plan.unexplained and not state.clean and self._device(state.gpu) not in self._settled
        ]

    # Whether ---------------------------------------------------------------------------------------------------------

    def __call__(self, survey: Survey, plan: Plan) -> None:
        """Reset what may be reset. Raises DriverError where the driver gives no answer afterwards."""
        self._next = clock() + AGAIN
        wanted = self._wanted(plan)
        for state in wanted:
            never = self._never(state.gpu)
            if never:
                self._give_up(state.gpu, never)
                # The start is refused for this one already, and another would be reset in vain.
                for other in wanted:
                    self._settled.add(self._device(other.gpu))
                return
        for state in wanted:
            device = self._device(state.gpu)
            if device in self._settled:
                continue
            held = self._held(survey, state.gpu)
            timeout = min(self._reset.timeout, self._until - clock())
            least = min(LEAST, self._reset.timeout / 2)
            if held:
                # Somebody who only looks, such as nvidia-smi, may be gone in a moment.
                if timeout - AGAIN < least:
                    self._give_up(state.gpu, held)
                continue
            if timeout < least:
                self._give_up(state.gpu, "no time is left for it (deadline.total)")
                continue
            self._settled.add(device)
            self._perform(state.gpu, device, timeout)

    def _give_up(self, gpu: Gpu, why: str) -> None:
        self._settled.add(self._device(gpu))
        self._ledger.warned(f"{gpu} was not reset: {why}", [gpu])

    def _device(self, gpu: Gpu) -> str:
        """What would be reset: an instance of MIG has no reset of its own."""
        return gpu.parent or gpu.uuid

    def _never(self, gpu: Gpu) -> str:
        """Why this GPU may not be reset now or later in this run; empty if it may."""
        device = self._device(gpu)
        if not self._fits:
            needed = self._reset.timeout + self._policy.memory.settle + AFTER
            return f"a reset needs {needed:.3g} s and this run has less (reset.timeout, deadline.total)"
        partitioned = any(each.parent == device for each in self._inventory.gpus)
        if partitioned and not self._reset.mig:
            return "it is divided by MIG, and a reset takes it from all its instances (reset.mig)"
        if nvidia.switched() and not self._reset.nvswitch:
            return "this machine has an NVSwitch, whose fabric a reset may break (reset.nvswitch)"
        return self._used_up(device)

    def _used_up(self, device: str) -> str:
        try:
            note = self._notes.read().get(device)
        except Denied as error:
            return f"it cannot be told whether it was reset before ({error})"
        if note is None or (self._boot and note.split(" ", 1)[0] not in (self._boot, "")):
            return ""
        return "a reset was tried already since the machine was booted, and only a reboot is left"

    def _held(self, survey: Survey, gpu: Gpu) -> str:
        """Who has the device, or may have it, as a clause; empty where nobody does. Who only watches counts here."""
        device = self._device(gpu)
        reading = survey.readings[device]
        doubt = reading.distrust or reading.unlisted
        if doubt:
            return f"it cannot be told who is on it: {doubt}"
        listed = {entry.pid for entry in reading.listed}
        if listed and not survey.pids_ours:
            return "NVML lists processes of another PID namespace on it (nvml.pids)"
        alive = sorted(listed - {pid for pids in survey.dead.values() for pid in pids})
        minors = [each.minor for each in self._inventory.gpus if each.uuid == device]
        having, blind = self._surveyor.having(minors[0] if minors else gpu.minor)
        holders = sorted({*alive, *having} - {*self._host.children()})
        if holders:
            more = f" and {len(holders) - 3} more" if len(holders) > 3 else ""
            return f"it is in use by {', '.join(_named(pid) for pid in holders[:3])}{more}"
        if blind:
            return f"it may be in use by {numbered(blind, 3)}, which may not be looked into"
        return ""

    # How -------------------------------------------------------------------------------------------------------------

    def _perform(self, gpu: Gpu, device: str, timeout: float) -> None:
        target = next((each for each in self._inventory.gpus if each.uuid == device), gpu)
        patience = self._policy.deadline.nvml
        before = self._host.driver.facts([target], ["persistence"], patience)[target]["persistence"].values
        context = self._ledger.context
        try:
            self._notes.write(device, f"{self._boot} {clock():.0f} {context.unit or 'gpuprestart clean'}\n")
        except Denied as error:
            self._ledger.warned(f"{gpu} was not reset: that cannot be written down ({error})", [gpu])
            return
        self._host.say_status(f"Resetting {gpu}, whose memory nobody holds")
        # Our own child has the device as well, and a reset is refused while anybody has.
        if not self._host.driver.let_go():
            self._ledger.warned(f"{gpu} was not reset: our own process that asks the driver hangs", [gpu])
            self._come_back()
            return
        command = [self._reset.command, "--gpu-reset", "-i", device]
        try:
            ended = self._host.run_program(
                command,
                environ={},
                timeout=timeout,
                check=partial(files.trust_program, trusted_owner=self._trusted_owner),
                keep=True,
            )
            fault, said = ended.fault, _first_line(ended.said)
        except OSError as error:
            fault, said = f"was not run: {error.strerror}", ""
        told = f" ({said})" if said else ""
        if fault:
            self._ledger.warned(f"a reset of {gpu} was tried and failed: {self._reset.command} {fault}{told}", [gpu])
        else:
            self._ledger.was_reset(gpu)
        self._come_back()
        if before:
            self._put_back(target, before, patience)

    def _come_back(self) -> None:
        left = self._until + AFTER - clock()
        self._host.driver.come_back(max(1.0, min(self._policy.deadline.nvml_init, left)))

    def _put_back(self, gpu: Gpu, before: Sequence[int], patience: float) -> None:
        """A reset leaves persistence mode off, and then the driver lets go of the GPU with its last user."""
        try:
            now = self._host.driver.facts([gpu], ["persistence"], patience)[gpu]["persistence"].values
            if now != before:
                self._host.driver.set_persistence(gpu, before[0], patience)
        except DriverError as error:
            self._ledger.warned(f"persistence mode of {gpu} could not be put back: {error}", [gpu])


def _named(pid: int) -> str:
    process = procfs.read(pid)
    return f"PID {pid}" if process is None else str(process)


def _first_line(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return printable(lines[0], TOLD) if lines else ""
