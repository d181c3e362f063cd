"""The scores of a step's sequences, from which the sampler chooses tokens: on the host, or still on a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from agent.kernels import Candidates

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepLogits:
    """The whole logits of a step in the memory of the host. Valid until the graph runs again."""

    values: Float32Array
    """[S, vocabulary]: the logits of each sequence's last token. A row that does not sample may hold anything."""
    best_ids: Int32Array | None
    """[S]: the token with the largest logit, the smaller id on a tie. None if the graph does not compute it."""


class DeviceScores(ABC):
    """The logits of a step on a device. Each method copies only the values that it returns to the host.

    Valid until the graph runs again, or longer if the device runs ahead (``agent.run_ahead``). Every method may raise
    RuntimeError if the device fails.
    """

    vocab_size: int
    num_ids: int
    """The number of ``best_ids``: the sequences of the step and its padding."""
    fetched_bytes: int
    """The number of bytes that were copied to the host so far."""

    @abstractmethod
    def best(self) -> tuple[Int32Array, Float32Array]:
        """Fetches, for each sequence, the token with the largest logit [S] (the smaller id on a tie) and this logit
        [S].
        """

    @abstractmethod
    def find_candidates(self, temperatures: Float32Array) -> None:
        """Computes the candidates on the device. ``temperatures`` [S] are above 0. A second call does nothing.

        The agents that share a vocabulary must all call this for the same steps.
        """

    @abstractmethod
    def candidates(self) -> Candidates:
        """Fetches the candidates that ``find_candidates`` computed."""

    @abstractmethod
    def rows(self, indices: Int32Array) -> Float32Array:
        """Fetches the logits of some rows, [len(indices), vocabulary].

        Agents that share a vocabulary must call ``find_candidates`` first.
        """

    @abstractmethod
    def best_ids(self) -> Any:
        """Returns the tokens with the largest logits [num_ids] on the device, int32, for a later launch.

        Zeros on the host if the step failed.
        """

    @abstractmethod
    def when_computed(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` once, in any thread, when best tokens and candidates are on the host, or have failed."""


def score_bits(scores: StepLogits | DeviceScores, index: int, *, whole: bool) -> bytes:
    """Returns the bits of the logits of sequence ``index``, to compare them with another run.

    Without ``whole``, of scores on a device only the best token and its logit count. Otherwise the row is fetched.
    """
    if isinstance(scores, StepLogits):
        return bytes(scores.values[index].data)
    ids, values = scores.best()
    row = bytes(scores.rows(np.array([index], np.int32)).data) if whole else b""
    return bytes(ids[index : index + 1].data) + bytes(values[index : index + 1].data) + row


def whole_logits(scores: StepLogits | DeviceScores, num_seqs: int) -> Float32Array:
    """Returns a copy of all logits of a sampled step, [num_seqs, vocabulary], whether they are on the host or on the
    device.

    For tools and tests. If the logits are on a device, this copies all of them to the host, which takes long.
    """
    if isinstance(scores, StepLogits):
        return scores.values[:num_seqs].copy()
    return scores.rows(np.arange(num_seqs, dtype=np.int32)).copy()
