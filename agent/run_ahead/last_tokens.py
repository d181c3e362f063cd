"""Samples the steps that were launched ahead, and provides the tokens that the host has chosen.

``OwnTokens`` is for an agent that has the whole model. ``GroupTokens`` is for an agent of a group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import ClassVar

from agent.group.last_tokens import SharedLastTokens
from agent.group.model_part import ModelPart
from agent.run_ahead.draws import DrawnLater, DrawnTokens
from agent.sampler import Sampler
from agent.scores import DeviceScores
from agent.step_inputs import Int32Array, no_last_token
from llm_serving.ipc.shm import StepSlot


class LastTokens(ABC):
    """The last tokens of all batch rows, and the sampler that chooses them."""

    uses_draws_later: ClassVar[bool]
    """Whether the next step must use the tokens that the device has drawn in a step, even if the host has sampled this
    step before the next step is launched.
    """

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
    def sample(self, scores: DeviceScores, slot: StepSlot, *, has_draws: bool) -> DrawnLater | None:
        """Samples the oldest launched step, which the device has computed. Raises the errors of ``Sampler.sample``.

        With ``has_draws``, the device has drawn tokens in this step. Then returns a function that returns these tokens
        and those of the sampler. Otherwise returns None.

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

    def sample(self, scores: DeviceScores, slot: StepSlot, *, has_draws: bool) -> DrawnLater | None:
        self._sampler.sample(scores, slot)
        if not has_draws:
            return None
        tokens = DrawnTokens(slot.sampled_ids[: slot.num_seqs].copy(), scores.chosen())
        return lambda: tokens


class GroupTokens(LastTokens):
    """The last tokens of a group. One agent samples and publishes the tokens. The other agents wait for them if
    necessary.

    The agents must decide alike whether a step is launched again. But the host of one agent may sample a step before
    the next step is launched, and the host of another agent after it. So ``uses_draws_later`` is True.
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

    def sample(self, scores: DeviceScores, slot: StepSlot, *, has_draws: bool) -> DrawnLater | None:
        number = self._launched.popleft()
        if self._samples:
            self._sample_and_publish(scores, slot, has_draws=has_draws)
        if not has_draws:
            return None
        rows = slot.rows[: slot.num_seqs].copy()
        return lambda: DrawnTokens(*self._shared.of_step(number, rows))

    def _sample_and_publish(self, scores: DeviceScores, slot: StepSlot, *, has_draws: bool) -> None:
        drawn = None
        try:
            drawn = scores.chosen() if has_draws else None
            self._sampler.sample(scores, slot)
        finally:
            self._shared.publish(slot, drawn)
