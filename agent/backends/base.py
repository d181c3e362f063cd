"""The seam between models and devices: a table of operators. A model calls these and nothing else of a device.

Shapes: T tokens of the step over all its sequences, S sequences, H and K query and key-value heads of size D, W the
width of the block table. Activations and weights are of the table's ``dtype``; indices are int32.

Every operator adds up in an order that depends on the row alone (its depth, its context), so a token's result does not
depend on what else is in the step, nor on whether it came in a prompt, a chunk or a decode step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from agent.weights.storage import Array

Operator = Any
"""A primitive or Cell of MindSpore, to be an attribute of a Cell and called in its ``construct``."""


class OpTable(ABC):
    """Makes the operators of one device. Each call gives an operator for one place in a model."""

    name: str
    """As in ``model_config.op_table``."""
    has_whole_prompts: bool
    """Whether there is a second graph for steps whose sequences all start at position 0 (see ``attention``)."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        """``float16``, ``bfloat16`` or ``float32``."""

    @abstractmethod
    def gather_rows(self) -> Operator:
        """(table [N, width], index [M]) -> [M, width]."""

    @abstractmethod
    def linear(self) -> Operator:
        """(x [T, in], weight [out, in]) -> [T, out]."""

    @abstractmethod
    def logits(self) -> Operator:
        """(x [S, in], weight [vocabulary, in]) -> [S, vocabulary], float32 or ``dtype``; the caller converts."""

    @abstractmethod
    def rms_norm(self, epsilon: float) -> Operator:
        """(x [T, size], gamma [size]) -> [T, size]."""

    @abstractmethod
    def add_rms_norm(self, epsilon: float) -> Operator:
        """(x [T, size], residual [T, size], gamma [size]) -> norm of the sum, the sum."""

    @abstractmethod
    def swiglu(self) -> Operator:
        """(gate and up side by side [T, 2 x size]) -> silu(gate) * up [T, size]."""

    @abstractmethod
    def rotary(self, cos: Array, sin: Array) -> Operator:
        """(positions [T]) -> what ``attention`` takes as ``rotary``: a tuple of tensors, made once a step.

        ``cos`` and ``sin`` are float32 [positions, D], each row holding its angles twice.
        """

    @abstractmethod
    def attention(self, num_heads: int, num_kv_heads: int, head_dim: int) -> Operator:
        """(qkv [T, (H + 2K) D], rotary, key_cache, value_cache, step, whole_prompts) -> [T, H x D].

        Rotates queries and keys, writes keys and values to the cache (in place, where ``slot_mapping`` is not -1) and
        attends causally, scaled by 1 / sqrt(D). ``step`` is (slot_mapping [T], block_tables [S, W], context_lens [S],
        query_lens [S]); query i of a sequence with q queries and context c is at position c - q + i. ``whole_prompts``
        is a constant of the graph: True promises that every context is its queries, so that the cache need not be
        read; ``query_lens`` is then int64 and has a fixed length, past S zero.
        """
