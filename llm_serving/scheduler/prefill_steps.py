"""Steps of prompts alone."""

from __future__ import annotations

from llm_serving.kvcache.kv_cache_manager import BlockCopy
from llm_serving.scheduler.chunk_plan import ChunkPlan
from llm_serving.scheduler.output import ScheduledStep, StepReason
from llm_serving.scheduler.sequence import Sequence
from llm_serving.scheduler.starting import Starter
from llm_serving.scheduler.state import SchedulerState
from llm_serving.scheduler.step_builder import build_prefill

__all__ = ["MAX_PREFILL_STEPS_IN_FLIGHT", "PrefillComposer"]

MAX_PREFILL_STEPS_IN_FLIGHT = 2
"""One runs, one is queued: the agent never idles and a decode never waits behind a long queue of prefills."""


class PrefillComposer:
    """Puts prefill steps together: first what did not fit the steps before, then whole prompts."""

    def __init__(self, state: SchedulerState, starter: Starter) -> None:
        self._state = state
        self._starter = starter

    def compose(self, now: float, reason: StepReason) -> ScheduledStep | None:
        """The next prefill step; None when no prompt can start or go on, or enough of these steps are in flight."""
        state = self._state
        if state.in_flight.num_prefill_steps >= MAX_PREFILL_STEPS_IN_FLIGHT:
            return None
        if not state.running.num_prefilling and not state.waiting:
            return None
        plan = ChunkPlan(state.limits, state.limits.max_num_batched_tokens)
        continue_prompts(plan, state)
        self._starter.fill(plan, now, whole=True)
        return self.send(plan, reason) if plan else None

    def send(self, plan: ChunkPlan, reason: StepReason) -> ScheduledStep:
        """The step of a plan."""
        in_flight = self._state.in_flight
        step = build_prefill(in_flight.next_seq, reason, plan.sequences, plan.query_lens)
        return in_flight.add(step, plan.sequences, copies=note_chunks(plan, self._state))


def continue_prompts(plan: ChunkPlan, state: SchedulerState, skip: frozenset[Sequence] = frozenset()) -> None:
    """Add the next chunks of prompts that have begun, in order of arrival."""
    for sequence in state.running.prefilling:
        if sequence in skip:
            continue
        if not plan.takes(sequence, sequence.num_uncomputed_tokens):
            return
        plan.add(sequence)


def note_chunks(plan: ChunkPlan, state: SchedulerState) -> list[BlockCopy]:
    """The chunks are on their way: those whose prompt they end decode from now on. The copies they begin with."""
    copies: list[BlockCopy] = []
    for sequence in plan.sequences:
        sequence.request.receipt.chunks += 1
        copies += sequence.copies
        sequence.copies = []
        if not sequence.num_uncomputed_tokens:
            state.running.end_prefill(sequence)
    return copies
