"""The policy of a name, wired to what it composes steps with."""

from __future__ import annotations

from collections.abc import Callable

from llm_serving.scheduler.decode_steps import DecodeComposer
from llm_serving.scheduler.mixed_steps import MixedComposer
from llm_serving.scheduler.policies.base import SchedulingPolicy, StepComposers
from llm_serving.scheduler.policies.chunked import Chunked
from llm_serving.scheduler.policies.decode_first import DecodeFirst
from llm_serving.scheduler.policies.fcfs import Fcfs
from llm_serving.scheduler.policies.prefill_first import PrefillFirst
from llm_serving.scheduler.policies.slo import Slo
from llm_serving.scheduler.policy import Policy
from llm_serving.scheduler.prefill_steps import PrefillComposer
from llm_serving.scheduler.sequence import Sequence
from llm_serving.scheduler.starting import Starter
from llm_serving.scheduler.state import SchedulerState

__all__ = ["make_policy"]

_POLICIES: dict[Policy, type[SchedulingPolicy]] = {
    Policy.PREFILL_FIRST: PrefillFirst,
    Policy.FCFS: Fcfs,
    Policy.DECODE_FIRST: DecodeFirst,
    Policy.CHUNKED: Chunked,
    Policy.SLO: Slo,
}


def make_policy(
    state: SchedulerState, starter: Starter, preempt: Callable[[Sequence, float], None]
) -> SchedulingPolicy:
    """The policy that ``state.limits.policy`` names."""
    policy = state.limits.policy
    prefills = PrefillComposer(state, starter)
    decodes = DecodeComposer(state, preempt, prefill_answered=policy is Policy.DECODE_FIRST)
    mixed = MixedComposer(state, decodes, prefills, starter)
    return _POLICIES[policy](state, StepComposers(prefills, decodes, mixed))
