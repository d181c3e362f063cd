"""Samples the steps that were launched ahead, and provides the tokens that the host has chosen.

``OwnTokens`` is for an agent that has the whole model. ``GroupTokens`` is for an agent of a group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from agent.group.last_tokens import SharedLastTokens
from agent.group.model_part import ModelPart
from agent.sampler import Sampler
from agent.scores import DeviceScores
from agent.step_inputs import Int32Array, no_last_token
from llm_serving.ipc.shm import StepSlot


class LastTokens(ABC):
    """The last tokens of all batch rows, and the sampler that chooses them."""

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
    def sample(self, scores: DeviceScores, slot: StepSlot) -> None:
        """Samples the oldest launched step, which the device has computed. Raises the errors of ``Sampler.sample``."""


class OwnTokens(LastTokens):
    """The last tokens of an agent that has the whole model."""

    def of_rows(self, rows: Int32Array) -> Int32Array:
        last: Int32Array = self._sampler.rows.last_token[rows]
        for row in rows[last < 0].tolist():
            raise no_last_token(row)
        return last

    def sample(self, scores: DeviceScores, slot: StepSlot) -> None:
        self._sampler.sample(scores, slot)


class GroupTokens(LastTokens):
    """The last tokens of a group. One agent samples and publishes the tokens. The other agents wait for them if
    necessary.
    """

    def __init__(self, sampler: Sampler, shared: SharedLastTokens, part: ModelPart) -> None:
        super().__init__(sampler)
        self._shared, self._samples = shared, part.returns_results

    def of_rows(self, rows: Int32Array) -> Int32Array:
        """Returns the last token of each batch row in ``rows``, after the agent that samples has chosen it. Raises
        GroupDownError if the group failed.
        """
        self._shared.check_rows(rows)
        return self._shared.of_rows(rows) if rows.size else rows

    def record(self, slot: StepSlot) -> None:
        self._shared.record(slot)

    def sample(self, scores: DeviceScores, slot: StepSlot) -> None:
        if not self._samples:
            return
        try:
            self._sampler.sample(scores, slot)
        finally:
            self._shared.publish(slot)
