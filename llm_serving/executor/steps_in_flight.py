"""The steps that a group of agents has not answered, and the slots that they are in."""

from __future__ import annotations

import time
from collections.abc import Sequence

from llm_serving.config import Config
from llm_serving.errors import AgentLostError
from llm_serving.executor.slot_io import SlotWriter, announcement, read_result
from llm_serving.executor.step_join import StepJoin
from llm_serving.ipc import messages
from llm_serving.ipc.messages import StepDone, StepFailed
from llm_serving.ipc.shm import StepSlot
from llm_serving.scheduler.output import ScheduledStep, StepResult


class StepsInFlight:
    """Of one run of the agents with these ``ranks``. ``slots`` are those of their shared memory; there are none while
    no agents are ready. A slot is free, or a step's from ``write`` until the step's answer is taken."""

    def __init__(self, config: Config, ranks: range, slots: Sequence[StepSlot] = ()) -> None:
        limits = config.slot_limits()
        self.free_slots = list(range(len(slots)))
        self.slot_of: dict[int, int] = {}
        """The slot of each step in flight, by the step's number."""
        self.last_answer = 0.0
        """When a step was answered last, or written while there was none. By ``time.monotonic``."""
        self.join = StepJoin(len(ranks), ranks.start) if len(ranks) > 1 else None
        """None for an agent alone."""
        self._ranks = ranks
        self._slots = slots
        self._writer = SlotWriter(limits, config.pa_config.block_size, limits.max_seqs)

    def write(self, step: ScheduledStep) -> messages.Step:
        """Write a step into a free slot; the message that announces it. Raises ProtocolError when the step is larger
        than a slot; then nothing has changed."""
        slot = self.free_slots.pop()
        try:
            self._writer.write(step, self._slots[slot])
        except BaseException:
            self.free_slots.append(slot)
            raise
        if not self.slot_of:
            self.last_answer = time.monotonic()
        self.slot_of[step.seq] = slot
        return announcement(step, slot)

    def take(self, member: int, answer: StepDone | StepFailed) -> StepResult | None:
        """Take an agent's answer (``member``: from 0). The step's, once every agent's is there.

        Raises AgentLostError when the step is not in flight in that slot, or the answer does not go with the others'.
        """
        if self.slot_of.get(answer.seq) != answer.slot:
            raise AgentLostError(
                f"agent {self._ranks[member]} answered step {answer.seq} in slot {answer.slot}, which is not in flight"
                " there"
            )
        if self.join is not None:
            joined = self.join.add(member, answer)
            if joined is None:
                return None
            answer = joined
        if isinstance(answer, StepFailed):
            result = StepResult(answer.seq, error=answer.error)
        elif answer.aborted:
            result = StepResult(answer.seq, aborted=True)
        else:
            times = (answer.queue_us, answer.graph_us, answer.sample_us)
            result = read_result(self._slots[answer.slot], answer.seq, times)
        del self.slot_of[answer.seq]
        self.free_slots.append(answer.slot)
        self.last_answer = time.monotonic()
        return result
