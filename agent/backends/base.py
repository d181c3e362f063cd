"""The seam between models and devices: a table of operators. A model calls these and nothing else of a device.

Shapes: T tokens of the step over all its sequences, S sequences, H and K query and key-value heads of size D, W the
width of the block table. Activations are of the table's ``dtype``; indices are int32. Where ``static_shapes`` is set,
every tensor has the size of the largest step, and only its first T or S rows mean anything.

``step`` is what all operators may read of the step at hand: (slot_mapping [T], block_tables, context_lens [S],
query_lens [S]), and with static shapes counts [4] = (T, S, W, 0) besides. ``block_tables`` is [S, W], with static
shapes flat. Query i of a sequence with q queries and context c is at position c - q + i. In the graph of steps with
parts of prompts ``step`` has a fifth entry, what ``chunk_mask`` makes.

Every operator adds up in an order that depends on the row alone (its depth, its context), so a token's result does not
depend on what else is in the step, nor on whether it came in a prompt, a chunk or a decode step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from agent.weights.storage import Array

CacheLayout = tuple[tuple[int, ...], str]
"""Shape, and type as ``agent.weights.storage`` names it."""

Operator = Any
"""A primitive or Cell of MindSpore, to be an attribute of a Cell and called in its ``construct``."""


class OpTable(ABC):
    """Makes the operators of one device. Each call gives an operator for one place in a model."""

    name: str
    """As in ``model_config.op_table``."""
    static_shapes: bool
    """Whether the graph is compiled for the largest step, or for shapes that change from step to step."""
    has_whole_prompts: bool
    """Whether there is a graph of its own for steps whose sequences all start at position 0 (see ``attention``)."""
    dynamic_prompts: bool = False
    """Whether that graph takes any number of prompts, or a fixed one, the lengths past the last being 0."""
    packs_weights: bool
    """Whether linear weights are packed blobs (``agent.kernels.packing``), the output weight apart from the embedding,
    or [out, in] as checkpoints have them."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        """``float16``, ``bfloat16`` or ``float32``."""

    @abstractmethod
    def linear_weight(self, in_features: int, out_features: int) -> Any:
        """The Parameter of a linear layer, without memory yet."""

    @abstractmethod
    def cache_layout(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> CacheLayout:
        """Shape and type of a layer's key cache, and of its value cache. The first axis is the block."""

    @abstractmethod
    def embedding(self, width: int) -> Operator:
        """(table [vocabulary, width], token_ids [T], step) -> [T, width]."""

    @abstractmethod
    def norm_linear(self, out_features: int, epsilon: float, *, first: bool) -> Operator:
        """(hidden [T, in], residual [T, in], gamma [in], weight, step) -> RMSNorm(sum) @ weight.T [T, out_features],
        and the sum of hidden and residual. The ``first`` of a model has no residual yet: the sum is hidden."""

    @abstractmethod
    def linear(self, out_features: int) -> Operator:
        """(x [T, in], weight, step) -> x @ weight.T [T, out_features]."""

    @abstractmethod
    def gated_mlp(self, width: int, epsilon: float) -> Operator:
        """(hidden [T, width], residual [T, width], gamma [width], gate_up weight, down weight, step) ->
        down(silu(gate(x)) * up(x)) of x = RMSNorm(sum), and the sum of hidden and residual."""

    def decoder_layer(self, width: int, epsilon: float, *, first: bool) -> Operator | None:
        """A whole layer of norm, attention, norm and gated MLP as one operator, where the device has one; None: the
        layer is made of the operators above.

        (hidden [T, width], residual [T, width], norms, weights, rotary, caches, step) -> hidden, residual. ``norms``
        are the gammas before attention and MLP, ``weights`` those of qkv, output, gate_up and down, ``caches`` of
        keys and values.
        """
        return None

    @abstractmethod
    def lm_head(self, vocab_size: int, epsilon: float) -> Operator:
        """(hidden [T, in], residual [T, in], gamma [in], weight, last_tokens [S], step) -> what ``StepGraph`` makes
        the logits [S, vocab_size] of RMSNorm(sum) at ``last_tokens`` from."""

    @abstractmethod
    def rotary(self, cos: Array, sin: Array) -> Operator:
        """(positions [T]) -> what ``attention`` takes as ``rotary``: a tuple of tensors, made once a step.

        ``cos`` and ``sin`` are float32 [positions, D], each row holding its angles twice.
        """

    def chunk_mask(self) -> Operator:
        """(positions [T]) -> what ``attention`` takes as the mask of a step with parts of prompts, made once a step.
        Tables of static shapes have none."""
        raise NotImplementedError(f"the op table {self.name} has no masks")

    @abstractmethod
    def attention(self, num_heads: int, num_kv_heads: int, head_dim: int) -> Operator:
        """(qkv [T, (H + 2K) D], rotary, key_cache, value_cache, step, whole_prompts) -> [T, H x D].

        Rotates queries and keys, writes keys and values to the cache (in place, where ``slot_mapping`` is not -1) and
        attends causally, scaled by 1 / sqrt(D). ``whole_prompts`` is a constant of the graph: True promises that every
        context is its queries, so that the cache need not be read; ``query_lens`` then has a fixed length, past
        S zero, and is int64 unless ``dynamic_prompts``.
        """
