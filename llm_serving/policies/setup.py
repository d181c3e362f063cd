"""Creates the scheduling policy that the limits of a scheduler name."""

from __future__ import annotations

from llm_serving.policies.base import SchedulingPolicy
from llm_serving.policies.chunked import Chunked
from llm_serving.policies.decode_first import DecodeFirst
from llm_serving.policies.fcfs import Fcfs
from llm_serving.policies.prefill_first import PrefillFirst
from llm_serving.policies.slo import Slo
from llm_serving.scheduler.limits import Policy
from llm_serving.scheduler.mixed import MixedComposer
from llm_serving.scheduler.state import SchedulerState

_POLICIES: dict[Policy, type[SchedulingPolicy]] = {
    Policy.PREFILL_FIRST: PrefillFirst,
    Policy.FCFS: Fcfs,
    Policy.DECODE_FIRST: DecodeFirst,
    Policy.CHUNKED: Chunked,
    Policy.SLO: Slo,
}


def make_policy(state: SchedulerState, composer: MixedComposer) -> SchedulingPolicy:
    """Creates the policy that ``state.limits.policy`` names."""
    return _POLICIES[state.limits.policy](state, composer)
