"""What a graph found: logits in float32, of all columns where several agents made parts of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agent.kernels import widen_bfloat16
from agent.step_inputs import Int32Array
from agent.weights.storage import Array, to_float32


@dataclass(frozen=True, slots=True)
class StepLogits:
    """What the graph found, valid until its next run."""

    values: npt.NDArray[np.float32]
    """[S, vocabulary] of each sequence's last token; rows that do not sample may hold anything."""
    best_ids: Int32Array | None
    """[S] the token of the largest logit where the graph tells, the smaller id on a tie."""


class LogitsInFloat32:
    """Owns the memory that bfloat16 is widened into."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.float32)

    def of(self, logits: Array) -> npt.NDArray[np.float32]:
        """Logits [rows, vocabulary], bfloat16 as uint16, in memory that the next call may write to again."""
        if logits.dtype != np.uint16:
            return to_float32(logits, str(logits.dtype))
        if self._memory.size < logits.size:
            self._memory = np.empty(logits.size, np.float32)
        widened = self._memory[: logits.size].reshape(logits.shape)
        widen_bfloat16(logits, widened)
        return widened


def beside(parts: npt.NDArray[np.float32], size: int, vocab_size: int) -> npt.NDArray[np.float32]:
    """[size * S, n], of each agent one after the other -> [S, vocab_size], its columns those of the agents in order;
    what pads the last one's is left out."""
    rows, columns = len(parts) // size, parts.shape[1]
    logits = np.empty((rows, vocab_size), np.float32)
    for index in range(size):
        place = logits[:, index * columns : (index + 1) * columns]
        place[:] = parts[index * rows : (index + 1) * rows, : place.shape[1]]
    return logits
