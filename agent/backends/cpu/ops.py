"""The fused op table of the CPU: custom operators over packed weights in a graph of static shapes.

A graph with shapes that change costs 6.5 us an operator on the machine this was measured on, a static one 1.3 us. So
tensors have the size of the largest step, and the operators read from ``counts`` how many rows there are: nothing is
padded and nothing compiled again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from mindspore import Parameter, Tensor, nn, ops

from agent.backends.base import AttentionForm, BlockMoves, CacheLayout, Operator, OpTable
from agent.backends.cpu.blocks import HostBlockMoves
from agent.kernels import library_path
from agent.layers.parameter import MINDSPORE_DTYPES, as_tensor, bind, unbound_parameter
from agent.model_part import ModelPart
from agent.weights.storage import Array, allocate
from llm_serving.config import Config
from llm_serving.model_families import Experts

KV_SCALE_BYTES = 4
"""Of a token's keys, or values, of one head in an int8 cache."""


class FusedCpuOps(OpTable):
    """Every operator is a custom one. ``logits``, of the last stage, is filled by the graph's run, [sequences,
    vocabulary]; of the others ``stream`` is, [tokens, hidden_size]."""

    name = "fused"
    static_shapes = True
    has_whole_prompts = False
    packs_weights = True

    def __init__(self, config: Config, part: ModelPart | None = None) -> None:
        super().__init__(config.model_config.model_dtype, part)
        self._max_tokens = config.max_num_batched_tokens
        self._max_seqs = config.max_num_seqs
        self._hidden_size = config.shape.hidden_size
        self._kv_format = config.kv_format
        vocab_size = config.shape.vocab_size if self.is_first else self.vocab_rows(config.shape.vocab_size)
        seqs, tokens = (self._max_seqs, 0) if self.is_last_stage else (0, self._max_tokens)
        self.logits: npt.NDArray[np.float32] = allocate((seqs, vocab_size), "float32")
        self.stream: Array = allocate((tokens, self._hidden_size), self.dtype)

    def linear_weight(self, in_features: int, out_features: int, *, output: bool = False) -> Any:
        return unbound_parameter((1,), "uint8")  # its size comes with the packed weight: a checkpoint may mix formats

    def router_weight(self, in_features: int, num_experts: int) -> Any:
        return self.linear_weight(in_features, num_experts)

    def expert_weight(self, num_experts: int, in_features: int, out_features: int) -> Any:
        return self.linear_weight(in_features, out_features)

    def cache_layout(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> CacheLayout:
        if self._kv_format == "int8":
            return (num_blocks, num_kv_heads, block_size, head_dim + KV_SCALE_BYTES), "int8"
        return (num_blocks, num_kv_heads, block_size, head_dim), self.dtype

    def block_moves(self, arrays: Sequence[Array], parameters: Sequence[Any], host: CacheLayout) -> BlockMoves:
        return HostBlockMoves(arrays, host)

    def embedding(self, width: int) -> Operator:
        if self.is_split:
            vocabulary = self._vocabulary()[:2]
            return _ShardedEmbedding(self._rows("ShardedEmbedTokens", width), vocabulary)
        return _Embedding(self._rows("EmbedTokens", width))

    def all_reduce(self, width: int) -> Operator:
        return _Sum(self._rows("AllReduceRows", width))

    def hand_over(self, width: int) -> Operator:
        return _HandOver(custom_operator("HandOver", [[1]], ["int32"]), self.stream, self.dtype)

    def norm_linear(self, out_features: int, epsilon: float, *, first: bool) -> Operator:
        if first:
            return _NormLinear(self._rows("NormLinear", out_features), epsilon)
        return _AddNormLinear(self._rows("AddNormLinear", out_features, self._hidden_size), epsilon)

    def linear(self, out_features: int) -> Operator:
        return _Linear(self._rows("PackedLinear", out_features))

    def gated_mlp(self, width: int, epsilon: float) -> Operator:
        return _GatedMLP(self._rows("GatedMlp", width, width), epsilon)

    def expert_mlp(self, width: int, experts: Experts, epsilon: float) -> Operator:
        return _ExpertMLP(self._rows("ExpertMlp", width, width), experts, epsilon)

    def decoder_layers(
        self, width: int, epsilon: float, form: AttentionForm, count: int, *, first: bool
    ) -> Operator | None:
        name = ("First" if first else "") + ("Sharded" if self.is_split else "") + "DecoderLayers"
        return _DecoderLayers(self._rows(name, width, width), epsilon, form, count)

    def lm_head(self, vocab_size: int, epsilon: float) -> Operator:
        if self.is_split:
            best_ids = custom_operator("ShardedLmHead", [[self._max_seqs]], ["int32"])
            return _LMHead(best_ids, epsilon, self.logits, self._vocabulary())
        best_ids = custom_operator("LmHead", [[self._max_seqs]], ["int32"])
        return _LMHead(best_ids, epsilon, self.logits, None)

    def rotary(self, cos: Array, sin: Array, window: int) -> Operator:
        return _RotaryTables(cos, sin)

    def attention(self, form: AttentionForm) -> Operator:
        return _Attention(self._rows("RotaryAttention", form.num_heads * form.head_dim), form)

    def _vocabulary(self) -> tuple[int, int, int]:
        """First token of this agent's part, tokens in all, tokens of an agent's part."""
        assert self.part is not None, "an agent alone has the whole vocabulary"
        return self.part.shard.vocab.start, self.part.whole.vocab_size, self.part.vocab_stride

    def _rows(self, name: str, *widths: int) -> Operator:
        """An operator that gives a matrix of ``dtype`` for each width, a row for each token."""
        return custom_operator(name, [[self._max_tokens, width] for width in widths], [self.dtype] * len(widths))


def custom_operator(name: str, shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> ops.Custom:
    """An operator of the kernels' library with these outputs."""
    types = [MINDSPORE_DTYPES[dtype] for dtype in dtypes]
    outputs = (shapes[0], types[0]) if len(shapes) == 1 else (tuple(map(tuple, shapes)), tuple(types))
    shape, dtype = outputs
    return ops.Custom(
        f"{library_path()}:{name}", out_shape=lambda *_: shape, out_dtype=lambda *_: dtype, func_type="aot"
    )


class _Embedding(nn.Cell):
    def __init__(self, embed: Operator) -> None:
        super().__init__()
        self.embed = embed

    def construct(self, table: Tensor, token_ids: Tensor, step: tuple[Tensor, ...]) -> Tensor:
        return self.embed(token_ids, table, step[4])


class _ShardedEmbedding(nn.Cell):
    """The sum over the agents is in the operator."""

    def __init__(self, embed: Operator, vocabulary: tuple[int, ...]) -> None:
        super().__init__()
        self.embed = embed
        self.vocabulary = _integers("vocabulary", vocabulary)

    def construct(self, table: Tensor, token_ids: Tensor, step: tuple[Tensor, ...]) -> Tensor:
        return self.embed(token_ids, table, self.vocabulary, step[4])


class _Sum(nn.Cell):
    def __init__(self, all_reduce: Operator) -> None:
        super().__init__()
        self.all_reduce = all_reduce

    def construct(self, x: Tensor, step: tuple[Tensor, ...]) -> Tensor:
        return self.all_reduce(x, step[4])


class _HandOver(nn.Cell):
    """Writes the stream to ``stream``; what it gives means nothing."""

    def __init__(self, hand_over: Operator, stream: Array, dtype: str) -> None:
        super().__init__()
        self.hand_over = hand_over
        self.stream = unbound_parameter(stream.shape, dtype)
        bind(self.stream, stream)

    def construct(self, hidden: Tensor, residual: Tensor, step: tuple[Tensor, ...]) -> Tensor:
        return self.hand_over(hidden, residual, self.stream, step[4])


class _Linear(nn.Cell):
    def __init__(self, linear: Operator) -> None:
        super().__init__()
        self.linear = linear

    def construct(self, x: Tensor, weight: Tensor, bias: None, step: tuple[Tensor, ...]) -> Tensor:
        return self.linear(x, weight, step[4])


class _NormLinear(nn.Cell):
    """The first of a model: ``residual`` is ``hidden``."""

    def __init__(self, norm_linear: Operator, epsilon: float) -> None:
        super().__init__()
        self.norm_linear = norm_linear
        self.epsilon = _epsilon(epsilon)

    def construct(
        self, hidden: Tensor, residual: Tensor, gamma: Tensor, weight: Tensor, bias: None, step: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        return self.norm_linear(hidden, gamma, self.epsilon, weight, step[4]), residual


class _AddNormLinear(nn.Cell):
    def __init__(self, norm_linear: Operator, epsilon: float) -> None:
        super().__init__()
        self.norm_linear = norm_linear
        self.epsilon = _epsilon(epsilon)

    def construct(
        self, hidden: Tensor, residual: Tensor, gamma: Tensor, weight: Tensor, bias: None, step: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        out, total = self.norm_linear(hidden, residual, gamma, self.epsilon, weight, step[4])
        return out, total


class _GatedMLP(nn.Cell):
    def __init__(self, mlp: Operator, epsilon: float) -> None:
        super().__init__()
        self.mlp = mlp
        self.epsilon = _epsilon(epsilon)

    def construct(
        self,
        hidden: Tensor,
        residual: Tensor,
        gamma: Tensor,
        gate_up: Tensor,
        down: Tensor,
        step: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor]:
        out, total = self.mlp(hidden, residual, gamma, self.epsilon, gate_up, down, step[4])
        return out, total


class _DecoderLayers(nn.Cell):
    """Norms of query and key heads take the layers' epsilon."""

    def __init__(self, layers: Operator, epsilon: float, form: AttentionForm, count: int) -> None:
        super().__init__()
        assert form.norm_epsilon in (None, epsilon), "one epsilon for all norms of a layer"
        self.layers = layers
        self.epsilon = _epsilon(epsilon)
        self.form = _integers("form", (count, form.window, int(form.norm_epsilon is not None)))

    def construct(
        self,
        hidden: Tensor,
        residual: Tensor,
        layers: tuple[tuple[Tensor, ...], ...],
        rotary: tuple[Tensor, Tensor, Tensor],
        step: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor]:
        arguments: tuple[Any, ...] = (self.form, self.epsilon, *rotary, *step)
        for layer in layers:
            arguments = (*arguments, *layer)
        hidden, residual = self.layers(hidden, residual, *arguments)
        return hidden, residual


class _ExpertMLP(nn.Cell):
    def __init__(self, mlp: Operator, experts: Experts, epsilon: float) -> None:
        super().__init__()
        self.mlp = mlp
        self.epsilon = _epsilon(epsilon)
        choice = np.array([experts.count, experts.per_token, experts.normalised], np.int32)
        self.choice = Parameter(as_tensor(choice), name="choice", requires_grad=False)

    def construct(
        self,
        hidden: Tensor,
        residual: Tensor,
        gamma: Tensor,
        weights: tuple[Tensor, Tensor, Tensor],
        step: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor]:
        router, gate_up, down = weights
        out, total = self.mlp(hidden, residual, gamma, self.epsilon, router, gate_up, down, self.choice, step[4])
        return out, total


class _LMHead(nn.Cell):
    """Writes the logits to ``logits`` and gives the best token of each sequence. ``vocabulary``: of a part of it, whose
    first agent's ``logits`` are of all."""

    def __init__(self, head: Operator, epsilon: float, logits: Array, vocabulary: tuple[int, ...] | None) -> None:
        super().__init__()
        self.head = head
        self.epsilon = _epsilon(epsilon)
        self.vocabulary = None if vocabulary is None else _integers("vocabulary", vocabulary)
        self.logits = unbound_parameter(logits.shape, "float32")
        bind(self.logits, logits)

    def construct(
        self,
        hidden: Tensor,
        residual: Tensor,
        gamma: Tensor,
        weight: Tensor,
        last_tokens: Tensor,
        step: tuple[Tensor, ...],
    ) -> Tensor:
        arguments: tuple[Any, ...] = (gamma, self.epsilon, weight, last_tokens, self.logits)
        if self.vocabulary is not None:
            arguments = (*arguments, self.vocabulary)
        return self.head(hidden, residual, *arguments, step[4])


class _RotaryTables(nn.Cell):
    """The whole float32 tables and the positions: the operator looks the rows up itself."""

    def __init__(self, cos: Array, sin: Array) -> None:
        super().__init__()
        self.cos = Parameter(as_tensor(cos), name="cos", requires_grad=False)
        self.sin = Parameter(as_tensor(sin), name="sin", requires_grad=False)

    def construct(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return positions, self.cos, self.sin


class _Attention(nn.Cell):
    """One operator: norms of heads, rotary, cache write and attention. It knows heads and scale from the cache's shape;
    a window, and the norms' gammas and epsilon, come last."""

    def __init__(self, attention: Operator, form: AttentionForm) -> None:
        super().__init__()
        self.attention = attention
        self.window = _window(form)
        self.epsilon = None if form.norm_epsilon is None else _epsilon(form.norm_epsilon)

    def construct(
        self,
        qkv: Tensor,
        head_norms: tuple[Tensor, ...],
        rotary: tuple[Tensor, Tensor, Tensor],
        caches: tuple[Tensor, Tensor],
        step: tuple[Tensor, ...],
        whole_prompts: bool,
    ) -> Tensor:
        arguments = (*rotary, *caches, *step)
        if self.window is not None:
            arguments = (*arguments, self.window)
        if self.epsilon is not None:
            arguments = (*arguments, *head_norms, self.epsilon)
        return self.attention(qkv, *arguments)


def _window(form: AttentionForm) -> Parameter | None:
    """None where the operator is called without: there is no window, and no norms that would come behind it."""
    if form.window == 0 and form.norm_epsilon is None:
        return None
    return Parameter(as_tensor(np.full(1, form.window, np.int32)), name="window", requires_grad=False)


def _integers(name: str, values: tuple[int, ...]) -> Parameter:
    return Parameter(as_tensor(np.array(values, np.int32)), name=name, requires_grad=False)


def _epsilon(value: float) -> Parameter:
    return Parameter(as_tensor(np.full(1, value, np.float32)), name="epsilon", requires_grad=False)
