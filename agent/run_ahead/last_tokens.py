"""Samples the steps that were launched ahead, and provides the tokens that the host has chosen.

``OwnTokens`` is for an agent that has the whole model. ``GroupTokens`` is for an agent of a group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import ClassVar, NamedTuple

from agent.group.last_tokens import SharedLastTokens
from agent.group.model_part import ModelPart
from agent.run_ahead.draws import DrawnLater, DrawnTokens
from agent.sampler import Sampler, sampling_in_group
from agent.scores import DeviceScores
from agent.step_inputs import Int32Array, no_last_token
from llm_serving.errors import SamplingFailedError
from llm_serving.ipc.shm import StepSlot


class SampledStep(NamedTuple):
    """The result of ``LastTokens.sample``."""

    tokens: DrawnLater | None
    """Returns the tokens that the sampler and the device have chosen. None if the device has drawn no token."""
    error: SamplingFailedError | None = None
    """The error with which this step fails, if its sampling failed. All later steps can run."""


class LastTokens(ABC):
    """The last tokens of all batch rows, and the sampler that chooses them."""

    uses_draws_later: ClassVar[bool]
    """True if a step must start with the tokens that the device has drawn, also if the host's tokens are known."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.num_rows = int(sampler.rows.last_token.size)

    def start_rows(self, slot: StepSlot) -> None:
        """Clears the state of the batch rows that a step starts."""
        self._sampler.rows.start_rows(slot)

    @abstractmethod
    def of_rows(self, rows: Int32Array) -> Int32Array:
        """Returns the last token of each batch row in ``rows``. The host must have these tokens, not only the device.

        Raises ProtocolError if a batch row has no token.
        """

    def record(self, slot: StepSlot) -> None:
        """Records that a step was launched."""
        del slot

    @abstractmethod
    def sample(self, scores: DeviceScores, slot: StepSlot, *, has_draws: bool) -> SampledStep:
        """Samples the oldest launched step, which the device has computed.

        With ``has_draws``, the device has drawn tokens in this step. Then ``SampledStep.tokens`` is a function.

        Raises RuntimeError if the device failed. If sampling fails for another reason, an agent of a group returns the
        error, because it needs the tokens nevertheless. An agent that has the whole model raises the error.

        Call the function after the launch of the next step, and before the launch of the step after it. In an agent
        that does not sample, the function waits for the agent that samples. This agent may need the next step first,
        because it may fetch logits, and its device computes the next step before. The function raises GroupDownError if
        the group failed.
        """


class OwnTokens(LastTokens):
    """The last tokens of an agent that has the whole model."""

    uses_draws_later = False

    def of_rows(self, rows: Int32Array) -> Int32Array:
        last: Int32Array = self._sampler.rows.last_token[rows]
        for row in rows[last < 0].tolist():
            raise no_last_token(row)
        return last

    def sample(self, scores: DeviceScores, slot: StepSlot, *, has_draws: bool) -> SampledStep:
        self._sampler.sample(scores, slot)
        if not has_draws:
            return SampledStep(None)
        tokens = DrawnTokens(slot.sampled_ids[: slot.num_seqs].copy(), scores.chosen())
        return SampledStep(lambda: tokens)


class GroupTokens(LastTokens):
    """The last tokens of a group. One agent samples and publishes the tokens. The other agents wait for them if
    necessary.

    The agents must decide alike whether a step is launched again. But the host of one agent may sample a step before
    the next step is launched, and the host of another agent after it. So ``uses_draws_later`` is True.

    If sampling fails, the tokens of the device count as sampled. So no agent launches the next step again.
    """

    uses_draws_later = True

    def __init__(self, sampler: Sampler, shared: SharedLastTokens, part: ModelPart) -> None:
        super().__init__(sampler)
        self._shared, self._samples = shared, part.returns_results
        self._launched: deque[int] = deque()
        """The numbers of the launched steps that are not sampled, oldest first."""

    def of_rows(self, rows: Int32Array) -> Int32Array:
        """Returns the last token of each batch row in ``rows``, after the agent that samples has chosen it. Raises
        GroupDownError if the group failed.
        """
        self._shared.check_rows(rows)
        return self._shared.of_rows(rows) if rows.size else rows

    def record(self, slot: StepSlot) -> None:
        self._launched.append(self._shared.record(slot))

    def sample(self, scores: DeviceScores, slot: StepSlot, *, has_draws: bool) -> SampledStep:
        number, error = self._launched.popleft(), None
        if self._samples:
            error = self._sample_and_publish(scores, slot, has_draws=has_draws)
        else:
            scores.wait()  # raises RuntimeError if this agent's device failed, because nothing is fetched here
        if not has_draws:
            return SampledStep(None, error)
        rows = slot.rows[: slot.num_seqs].copy()
        return SampledStep(lambda: DrawnTokens(*self._shared.of_step(number, rows)), error)

    def _sample_and_publish(
        self, scores: DeviceScores, slot: StepSlot, *, has_draws: bool
    ) -> SamplingFailedError | None:
        """Samples a step and publishes its tokens. Returns the error if sampling failed.

        If the device or the group failed, raises the error and publishes nothing, because all agents end.
        """
        drawn, failure = scores.chosen() if has_draws else None, None
        try:
            with sampling_in_group():
                self._sampler.sample(scores, slot)
        except SamplingFailedError as error:
            failure = error
            self._shared.replace_tokens(slot, scores.chosen())
        self._shared.publish(slot, drawn)
        return failure
