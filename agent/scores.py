"""The scores (logits) of a step's sequences, from which the sampler chooses tokens: on the host, or still on a device.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from agent.kernels import Candidates
from agent.step_cost import StepCost

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepLogits:
    """All logits of a step, in the memory of the host. The logits are valid until the graph runs again."""

    values: Float32Array
    """[sequences, vocabulary]: the logits of each sequence's last token. If a sequence does not sample, its row is
    undefined."""
    best_ids: Int32Array | None
    """[sequences]: the token with the largest logit, the smaller id on a tie. None if the graph does not compute it."""


class DeviceScores(ABC):
    """The logits of a step on a device. Each method copies to the host only the values that it returns.

    The logits on the device are valid until the graph runs again. If the graph keeps logits
    (``StepGraph.keeps_logits``), they are valid until the step is sampled. If the device fails, every method may raise
    RuntimeError.
    """

    vocab_size: int
    num_ids: int
    """The length of ``chosen_ids``: the number of sequences of the step, including padding sequences."""
    num_drawable: int
    """The number of best tokens of a sequence among which the device can draw. If 0, the device draws no tokens."""
    fetched_bytes: int
    """The number of bytes that were copied to the host so far."""

    @abstractmethod
    def best(self) -> tuple[Int32Array, Float32Array]:
        """Fetches the token with the largest logit of each sequence, and this logit. Both arrays are [seqs].

        If two logits are equal, the token with the smaller id is returned.
        """

    @abstractmethod
    def find_candidates(self, temperatures: Float32Array) -> None:
        """Computes the candidates on the device: the best tokens of each sequence. A second call does nothing.

        ``temperatures`` [seqs] are above 0. If agents share the vocabulary, all of them must call this for the same
        steps.
        """

    @abstractmethod
    def candidates(self) -> Candidates:
        """Fetches the candidates that ``find_candidates`` has computed."""

    @abstractmethod
    def rows(self, indices: Int32Array) -> Float32Array:
        """Fetches all logits of the sequences ``indices``, float32 [len(indices), vocabulary].

        Agents that share a vocabulary must call ``find_candidates`` first.
        """

    @abstractmethod
    def draw(self, draws: Float32Array) -> None:
        """Draws tokens on the device, for the sequences that ``draws`` selects. ``find_candidates`` must come first.

        ``draws`` is float32 [seqs, columns], with the columns of ``agent.run_ahead.draws.DrawColumn``. Call this at
        most once, and only if ``num_drawable`` is above 0. If agents share the vocabulary, all of them must call this
        for the same steps.
        """

    @abstractmethod
    def chosen(self) -> Int32Array:
        """Fetches the tokens of ``chosen_ids`` for the sequences of the step: int32 [seqs]. Only the agent that samples
        may call this.
        """

    @abstractmethod
    def chosen_ids(self) -> Any:
        """Returns the token that the device has chosen for each sequence, int32 [num_ids], as a tensor on the device.

        If ``draw`` selected the sequence, this is the drawn token, else the best token. A later launch can take this
        tensor as an input. If the step failed, the result is an array of zeros.
        """

    @abstractmethod
    def when_computed(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` once, in any thread, when the host has the values that the sampler needs first.

        These values are the candidates if ``find_candidates`` was called, else the best tokens. If ``draw`` was called,
        they include the drawn tokens. If the device fails, ``callback`` is also called.
        """

    @abstractmethod
    def wait(self) -> None:
        """Waits until the device has computed the step, with the candidates and draws that were started.

        If the device has failed, raises its first error as RuntimeError. Copies no additional values to the host. In
        an agent that does not sample, nothing is copied.
        """


def score_bits(scores: StepLogits | DeviceScores, index: int, *, whole: bool) -> bytes:
    """Returns bytes for comparing the logits of sequence ``index`` with its logits in another run.

    If the logits are on the host, the result has the bytes of all logits of the sequence. If the logits are on a
    device, the result has the bytes of the best token and its logit. With ``whole``, the bytes of all logits are added.
    """
    if isinstance(scores, StepLogits):
        return bytes(scores.values[index].data)
    ids, values = scores.best()
    row = bytes(scores.rows(np.array([index], np.int32)).data) if whole else b""
    return bytes(ids[index : index + 1].data) + bytes(values[index : index + 1].data) + row


def whole_logits(scores: StepLogits | DeviceScores, num_seqs: int) -> Float32Array:
    """Returns a copy of all logits of a sampled step on the host, float32 [num_seqs, vocabulary].

    This function is for tools and tests: if the logits are on a device, the copy takes long.
    """
    if isinstance(scores, StepLogits):
        return scores.values[:num_seqs].copy()
    return scores.rows(np.arange(num_seqs, dtype=np.int32)).copy()


def cost_of_step(start: int, computed: int, scores: StepLogits | DeviceScores | None) -> StepCost:
    """Returns the cost of a step whose sampling ends now. The step began at time ``start``, and its graph ended at time
    ``computed``.

    Both times are nanoseconds of ``time.perf_counter_ns``.
    """
    fetched = scores.fetched_bytes if isinstance(scores, DeviceScores) else 0
    return StepCost((computed - start) // 1000, (time.perf_counter_ns() - computed) // 1000, fetched)
