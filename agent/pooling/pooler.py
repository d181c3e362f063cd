"""Turns the hidden states of each step into pooled results, and writes the results into the step slot.

All arithmetic is float32 and processes one token after the other. So the results have the same bits for every batch and
for every division of a prompt into chunks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from agent.group.model_part import ModelPart
from agent.pooling.weights import Floats, PoolingWeights, read_pooling_weights
from agent.step_inputs import StepInputs
from agent.weights.storage import Array, to_float32
from llm_serving.config import Config
from llm_serving.errors import ProtocolError
from llm_serving.ipc.shm import NOT_FINITE, StepSlot
from llm_serving.model.pooling import LAST, WEIGHTED_MEAN, Pooling

POOLED = 0
"""Value in ``sampled_ids`` of a sequence with a pooled result."""
_NO_RESULT = -1


class Pooler:
    """Pools the hidden states of sequences. Keeps the sum of each batch row between the chunks of a prompt."""

    def __init__(self, pooling: Pooling, weights: PoolingWeights, num_rows: int, dtype: str) -> None:
        """``dtype`` is the type of the residual stream."""
        self._pooling = pooling
        self._weights = weights
        self._dtype = dtype
        self._sums: Floats = np.zeros((num_rows, weights.norm.size), np.float32)
        self._counts: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)
        """Number of tokens in the sum of each batch row."""
        self._hidden: Floats = np.zeros(weights.norm.size, np.float32)
        self._checks_order = False

    @classmethod
    def of_agent(cls, config: Config, part: ModelPart) -> Pooler | None:
        """Returns the object that pools hidden states in an agent, or None if this agent does not pool.

        ``config`` has the sizes of the whole model. Raises CheckpointError if a weight is missing or wrong.
        """
        if config.pooling is None or not (part.pools and part.returns_results):
            return None
        weights = read_pooling_weights(config, config.pooling)
        return cls(config.pooling, weights, config.max_num_seqs, config.model_config.model_dtype)

    def reset(self) -> None:
        """Clears the sums of all batch rows. After this call, the chunks of a prompt must arrive without gaps.

        Before the first call, gaps are allowed, because the steps of the warm-up begin at any position.
        """
        self._sums.fill(0)
        self._counts.fill(0)
        self._checks_order = True

    def take(self, stream: Array, inputs: StepInputs, slot: StepSlot) -> None:
        """Pools the hidden states of a step: ``stream`` [tokens, hidden_size] is the residual stream after all layers.

        If the method is the mean, adds the hidden states to the sums of their batch rows. For each sequence whose
        prompt is now complete, writes the result to ``slot.pooled``. Raises ProtocolError if a chunk of a prompt is
        missing in its sum.
        """
        seqs, width = inputs.query_lens.size, self._pooling.width
        results = slot.pooled[: seqs * width].reshape(seqs, width)
        slot.sampled_ids[:seqs] = _NO_RESULT
        slot.sampled_logit[:seqs] = 0
        slot.logsumexp[:seqs] = 0
        end = 0
        for index in range(seqs):
            begin, end = end, end + int(inputs.query_lens[index])
            is_last = bool(slot.do_sample[index])
            pooled = self._pooled(stream[begin:end], inputs, index, int(inputs.positions[begin]), is_last=is_last)
            if pooled is None:
                continue
            result = self._result(pooled)
            results[index] = result
            slot.sampled_ids[index] = POOLED if np.isfinite(result).all() else NOT_FINITE

    def _pooled(
        self, stream: Array, inputs: StepInputs, index: int, position: int, *, is_last: bool
    ) -> Floats | None:
        """Returns the pooled hidden state of sequence ``index`` if its prompt is complete (``is_last``), or None."""
        if self._pooling.method == LAST:
            return self._normed(stream[-1:])[0] if is_last else None
        row, is_weighted = int(inputs.rows[index]), self._pooling.method == WEIGHTED_MEAN
        total = self._sums[row]
        if position == 0:
            total.fill(0)
            self._counts[row] = 0
        if self._checks_order and self._counts[row] != position:
            raise ProtocolError(f"row {row} has the sum of {self._counts[row]} tokens, and position {position} follows")
        for offset, hidden in enumerate(self._normed(stream)):
            total += hidden * np.float32(position + offset + 1) if is_weighted else hidden
        self._counts[row] += len(stream)
        if not is_last:
            return None
        count = int(self._counts[row])
        mean: Floats = total / np.float32(count * (count + 1) / 2 if is_weighted else count)
        return mean

    def _normed(self, stream: Array) -> Floats:
        """Returns the hidden states after the last norm, float32 [tokens, hidden_size]."""
        x = np.ascontiguousarray(to_float32(stream, self._dtype))
        normed: Floats = np.empty_like(x)
        # Computes one token after the other. For an array with a single row, NumPy may add in another order than for
        # several rows.
        for row, out in zip(x, normed, strict=True):
            np.multiply(row, row, out=out)
            scale = np.float32(1) / np.sqrt(np.add.reduce(out) / np.float32(row.size) + self._weights.epsilon)
            np.multiply(row, scale, out=out)
            out *= self._weights.norm
        return normed

    def _result(self, pooled: Floats) -> Floats:
        """Returns the result for a pooled hidden state: a score [1], the logits of classes, or an embedding.

        All Dense layers have been applied to the embedding. The server truncates and normalises it later.
        """
        weights = self._weights
        # Uses the same memory every time, because the bits of a matrix product may depend on the alignment of its
        # input.
        self._hidden[:] = pooled
        if weights.score_rows is not None:
            no, yes = weights.score_rows @ self._hidden
            return np.array([yes - no], np.float32)
        if weights.class_rows is not None:
            logits: Floats = weights.class_rows @ self._hidden
            return logits
        x: Floats = self._hidden
        for layer in weights.dense:
            x = layer.weight @ np.array(x, np.float32)
            if layer.bias is not None:
                x = x + layer.bias
            if layer.activation == "tanh":
                x = np.tanh(x)
        return x
