"""Predicts how long the agents of a group may take for the steps in flight."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from llm_serving.ipc import messages
from llm_serving.ipc.messages import AgentMessage, ServerMessage, StepDone
from llm_serving.ipc.shm import StepSlot
from llm_serving.step_costs.cost_model import KEEP, StepCostModel, StepCounts

LEARNT_AT_FIRST = 64
"""Number of first steps whose times are all learnt."""
LEARN_EVERY = 16
"""The first ``LEARNT_AT_FIRST`` steps are learnt, then one in ``LEARN_EVERY``, because learning costs server time."""
FAMILIAR = 2.0
"""A step is familiar if each of its sizes is at most this multiple of the largest size among the learnt steps."""

_Sizes = tuple[float, ...]
"""The sizes of a step, four numbers: the decoding sequences, the context tokens of these sequences, the prompt tokens,
and the pairs. A pair consists of a prompt token and a token that its attention reads.
"""


class StepForecast:
    """Learns from completed steps how long steps take, and predicts the time of other steps.

    The sizes of a step come from its step slot. The time of a step comes from its result, in which the agents state it.
    Steps of unusual size are not predicted. Steps that also move blocks, encode images or want drafts are not predicted
    either: a draft model first computes all tokens that it has missed.

    The cost model gives each prompt token the same time. But a token late in a prompt attends to more earlier tokens,
    and takes longer. So the time of the prompt tokens is multiplied by a ratio, unless the ratio is below 1. For the
    ratio, the tokens to which a prompt token attends are averaged. The ratio is the mean of this step divided by the
    mean of the learnt steps. The result is an upper bound, because the time of a prompt token cannot grow faster than
    the number of tokens to which it attends.
    """

    def __init__(self) -> None:
        self._model = StepCostModel()
        self._num_results = 0
        self._largest: _Sizes = (0.0, 0.0, 0.0, 0.0)
        """For each of the four sizes, the largest value among the steps from which the cost model has computed its
        coefficients.
        """
        self._new_largest: _Sizes = self._largest
        """For each of the four sizes, the largest value among all learnt steps. The coefficients may not include all of
        these steps yet.
        """
        self._reach = _LearntReach()
        self.longest_s = 0.0
        """Longest time of a step so far."""

    def learn(self, slot: StepSlot, done: StepDone) -> None:
        """Learns from the result of the step in ``slot``, which must still hold the step's inputs."""
        seconds = (done.graph_us + done.sample_us) / 1e6
        self.longest_s = max(self.longest_s, seconds)
        self._num_results += 1
        if self._num_results > LEARNT_AT_FIRST and self._num_results % LEARN_EVERY:
            return
        if done.aborted or seconds <= 0.0 or _is_special(slot):
            return
        counts, sizes = _measured(slot)
        self._model.note(counts, seconds)
        self._reach.note(sizes[2], sizes[3], seconds)
        self._new_largest = tuple(map(max, self._new_largest, sizes))
        if self._model.knows_all_steps:
            self._largest = self._new_largest

    def seconds(self, slots: Iterable[StepSlot]) -> float | None:
        """Returns the predicted time in seconds of the longest step in ``slots``, or None if the time of one of the
        steps cannot be predicted.
        """
        longest = 0.0
        for slot in slots:
            if not self._model.is_known or _is_special(slot):
                return None
            counts, sizes = _measured(slot)
            if any(size > FAMILIAR * largest for size, largest in zip(sizes, self._largest, strict=True)):
                return None
            prompt_s = self._model.prompt_token_s * counts[3] * self._reach.ratio(sizes[2], sizes[3])
            longest = max(longest, self._model.seconds(int(counts[1]), int(counts[2]), 0) + prompt_s)
        return longest


class _LearntReach:
    """Learns to how many tokens a prompt token attends on average.

    The average is weighted: a step has the weight ``(prompt tokens / seconds) ** 2``. The least squares fit of the cost
    model uses the same weights. So the cost model's time of a prompt token is the time of a token that attends to this
    average number of tokens.
    """

    def __init__(self) -> None:
        self._weights = 0.0
        self._weighted_pairs = 0.0

    def note(self, prompt_tokens: float, pairs: float, seconds: float) -> None:
        weight = (prompt_tokens / seconds) ** 2
        self._weights = self._weights * KEEP + weight
        self._weighted_pairs *= KEEP
        if prompt_tokens:
            self._weighted_pairs += weight * pairs / prompt_tokens

    def ratio(self, prompt_tokens: float, pairs: float) -> float:
        """Returns the mean number of tokens that a prompt token of a step attends to, divided by the learnt mean.

        The ratio is at least 1. ``pairs`` are defined at ``_Sizes``.
        """
        if not prompt_tokens or not self._weighted_pairs:
            return 1.0
        return max(1.0, pairs / prompt_tokens * self._weights / self._weighted_pairs)


class OtherWork:
    """Tracks the work of agents other than steps: making profiles, loading adapters, and compiling a graph again.

    A step may then take much longer than predicted.
    """

    def __init__(self, num_agents: int) -> None:
        self._num_agents = num_agents
        self._num_open = 0
        """Number of replies that the agents must still send to commands other than steps."""
        self._is_profiling = False
        self._is_stopping = False
        self._is_compiling = False

    @property
    def is_possible(self) -> bool:
        """True if an agent may do other work than a step now."""
        return self._num_open > 0 or self._is_profiling or self._is_compiling

    def sent(self, message: ServerMessage) -> None:
        """Records a message to all agents, unless it announces a step."""
        if isinstance(message, messages.AdapterLoad | messages.ProfileStart | messages.ProfileStop):
            self._num_open += self._num_agents
        if isinstance(message, messages.ProfileStart):
            self._is_profiling, self._is_stopping = True, False
        elif isinstance(message, messages.ProfileStop):
            self._is_stopping = True

    def received(self, message: AgentMessage) -> None:
        """Records a message of an agent. An agent that sends ``Progress`` compiles a graph until its next result."""
        if isinstance(message, messages.Progress):
            self._is_compiling = True
        elif isinstance(message, messages.StepDone | messages.StepFailed):
            self._is_compiling = False
        elif isinstance(message, messages.AdapterLoaded | messages.ProfileReply):
            self._num_open = max(0, self._num_open - 1)
            if self._is_stopping and not self._num_open:
                self._is_profiling = self._is_stopping = False


def _is_special(slot: StepSlot) -> bool:
    return slot.num_seqs == 0 or slot.num_moves > 0 or slot.num_tiles > 0 or slot.num_wanted > 0


def _measured(slot: StepSlot) -> tuple[StepCounts, _Sizes]:
    """Returns the inputs of the cost model and the sizes of the step in a slot."""
    lens = slot.query_lens[: slot.num_seqs].astype(np.int64)
    ends = slot.context_lens[: slot.num_seqs].astype(np.int64)
    is_decoding = lens == 1
    num_decoding = float(np.count_nonzero(is_decoding))
    context = float((ends - lens)[is_decoding].sum())
    prompt_tokens = float(lens.sum()) - num_decoding
    pairs = float((lens * ends - lens * (lens - 1) // 2)[~is_decoding].sum())
    return (1.0, num_decoding, context, prompt_tokens), (num_decoding, context, prompt_tokens, pairs)
