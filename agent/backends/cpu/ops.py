"""The fused op table of the CPU: custom operators over packed weights in a graph of static shapes.

MindSpore takes 6.5 us for each operator of a dynamic graph, and 1.3 us for each operator of a static graph. (These
times are from one machine.) Therefore the graph is static: all tensors have the size of the largest step, and the
operators read the number of valid rows from ``counts``. No step needs padding or a new compilation. The Cells around
the operators are in ``cells``.

This module imports MindSpore only when the first operator is made. An agent with stored launches
(``agent.stored_program``) makes no operator, so it does not need MindSpore.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from agent.backends.base import (
    AttentionForm,
    CacheLayout,
    LatentForm,
    LinearParameters,
    Operator,
    OpTable,
)
from agent.backends.cpu.blocks import HostBlockMoves
from agent.backends.device import BlockMoves, DeviceTraits
from agent.group.model_part import ModelPart
from agent.kernels import library_path
from agent.lora.packed import PackedSlots
from agent.lora.store import AdapterSlots
from agent.sequence_states import SequenceStates
from agent.weights.storage import Array, allocate
from llm_serving.config import Config
from llm_serving.model.families import Experts
from llm_serving.model.gated_delta import GatedDelta


class FusedCpuOps(OpTable):
    """Implements every operator with a custom operator. Owns the memory of the graph's results.

    In the last stage, a run of the graph fills ``logits`` [sequences, vocabulary] and ``best_ids`` [sequences + 1].
    ``best_ids`` has the id of each sequence's best token, then the step's number (``counts[3]``). In the other stages,
    a run fills ``stream`` [tokens, hidden_size], the input of the next stage.

    If the model reads images, the graph's first input is ``rows`` [tokens, hidden_size]. If positions have three
    dimensions, the graph also reads ``rotary_rows``.
    """

    traits: ClassVar[DeviceTraits] = DeviceTraits("fused", packs_weights=True)

    def __init__(self, config: Config, part: ModelPart | None = None) -> None:
        super().__init__(config.model_config.model_dtype, part)
        self.takes_rows = config.shape.vision is not None and self.is_first_stage
        self._max_tokens = config.max_num_batched_tokens
        self._hidden_size = config.shape.hidden_size
        self._cache_format = config.cache_format
        self._num_adapters = config.lora_config.max_adapters
        vocab_size = config.shape.vocab_size if self.is_first else self.vocab_rows(config.shape.vocab_size)
        seqs, tokens = (config.max_step_seqs, 0) if self.is_last_stage else (0, self._max_tokens)
        self.logits: npt.NDArray[np.float32] = allocate((seqs, vocab_size), "float32")
        self.best_ids: npt.NDArray[np.int32] = np.zeros(seqs + 1, np.int32)
        self.states = None
        if config.shape.delta is not None:
            self.states = SequenceStates(config.max_num_seqs, config.num_state_snapshots, config.max_logged_drafts)
        self.stream: Array = allocate((tokens, self._hidden_size), self.dtype)
        self.rows = allocate((self._max_tokens, self._hidden_size), self.dtype) if self.takes_rows else None
        is_gathered, width = bool(config.shape.rotary_sections), config.shape.rotary_width
        if is_gathered:
            shape = (self._max_tokens, width)
            self.rotary_rows = allocate(shape, "float32"), allocate(shape, "float32")
        self.taps: list[Array] = []
        """One array [tokens, hidden_size] for each operator of ``tap``. A run of the graph fills it."""
        self.reserve_taps(len(config.tapped_layers))

    def linear_weight(self, in_features: int, out_features: int, *, output: bool = False) -> LinearParameters:
        return LinearParameters(self.router_weight(in_features, out_features))

    def expert_weight(self, num_experts: int, in_features: int, out_features: int) -> LinearParameters:
        return LinearParameters(self.router_weight(in_features, out_features))

    def router_weight(self, in_features: int, num_experts: int) -> Any:
        from agent.layers.parameter import unbound_parameter

        # The size of a packed weight depends on its format, which is unknown before the weight is loaded. ``bind`` sets
        # the size.
        return unbound_parameter((1,), "uint8")

    def adapter_slots(self, parameters: Mapping[str, Any], weights: Mapping[str, Array]) -> AdapterSlots | None:
        return PackedSlots(self._num_adapters, self.dtype, weights) if self._num_adapters else None

    def cache_layout(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> CacheLayout:
        cache = self._cache_format
        return (num_blocks, num_kv_heads, block_size, cache.head_width(head_dim)), cache.name

    def block_moves(
        self,
        arrays: Sequence[Array],
        parameters: Sequence[Any],
        host: CacheLayout,
        pool: Sequence[Array] | None = None,
    ) -> BlockMoves:
        return HostBlockMoves(arrays, host, pool)

    def embedding(self, width: int) -> Operator:
        if self.is_split:
            vocabulary = self._vocabulary()[:2]
            return _cells().ShardedEmbedding(self._rows("ShardedEmbedTokens", width), vocabulary)
        return _cells().Embedding(self._rows("EmbedTokens", width))

    def all_reduce(self, width: int) -> Operator:
        return _cells().Sum(self._rows("AllReduceRows", width))

    def hand_over(self, width: int) -> Operator:
        return _cells().HandOver(custom_operator("HandOver", [[1]], ["int32"]), self.stream, self.dtype)

    def tap(self, width: int) -> Operator:
        assert width == self._hidden_size, "a tap gives a residual stream"
        self.num_taps += 1
        self.reserve_taps(self.num_taps)
        stream = self.taps[self.num_taps - 1]
        return _cells().HandOver(custom_operator("HandOver", [[1]], ["int32"]), stream, self.dtype)

    def reserve_taps(self, count: int) -> None:
        """Allocates the arrays of the first ``count`` operators of ``tap``, unless they are allocated already.

        Stored launches need these arrays before there is a network.
        """
        while len(self.taps) < count:
            self.taps.append(allocate((self._max_tokens, self._hidden_size), self.dtype))

    def norm_linear(self, out_features: int, epsilon: float, *, first: bool) -> Operator:
        if first:
            return _cells().NormLinear(self._rows("NormLinear", out_features), epsilon)
        return _cells().AddNormLinear(self._rows("AddNormLinear", out_features, self._hidden_size), epsilon)

    def join_norms(self, width: int, epsilon: float, *, keeps_second: bool) -> Operator:
        if keeps_second:
            return _cells().JoinNorms(self._rows("JoinNormsKeepSecond", 2 * width, width), epsilon)
        return _cells().JoinNorms(self._rows("JoinNorms", 2 * width), epsilon)

    def linear(self, out_features: int) -> Operator:
        return _cells().Linear(self._rows("PackedLinear", out_features))

    def gated_mlp(self, width: int, epsilon: float) -> Operator:
        return _cells().GatedMLP(self._rows("GatedMlp", width, width), epsilon)

    def expert_mlp(self, width: int, experts: Experts, epsilon: float) -> Operator:
        is_plain = experts.routing is None and experts.shared_size == 0 and experts.num_held is None
        cell = _cells().ExpertMLP if is_plain else _cells().RoutedExpertMLP
        return cell(self._rows("ExpertMlp", width, width), experts, epsilon)

    def decoder_layers(
        self, width: int, epsilon: float, form: AttentionForm, count: int, *, first: bool, result_norms: bool = False
    ) -> Operator | None:
        name = ("First" if first else "") + ("Sharded" if self.is_split else "") + "DecoderLayers"
        return _cells().DecoderLayers(self._rows(name, width, width), epsilon, form, count, result_norms=result_norms)

    def lm_head(self, vocab_size: int, epsilon: float) -> Operator:
        if self.is_split:
            head, vocabulary = custom_operator("ShardedLmHead", [[1]], ["int32"]), self._vocabulary()
            return _cells().LMHead(head, epsilon, self.logits, self.best_ids, vocabulary)
        return _cells().LMHead(custom_operator("LmHead", [[1]], ["int32"]), epsilon, self.logits, self.best_ids, None)

    def rotary(self, cos: Array, sin: Array, window: int) -> Operator:
        if self.rotary_rows is not None:
            return _cells().RotaryRows(*self.rotary_rows)
        return _cells().RotaryTables(cos, sin)

    def attention(self, form: AttentionForm) -> Operator:
        return _cells().Attention(self._rows("RotaryAttention", form.num_heads * form.head_dim), form)

    def latent_attention(self, form: LatentForm) -> Operator:
        return _cells().LatentAttention(self._rows("LatentAttention", form.num_heads * form.latent.value_dim), form)

    def sigmoid_gate(self, width: int) -> Operator:
        return _cells().SigmoidGate(self._rows("SigmoidGate", width))

    def state_layout(self, delta: GatedDelta) -> CacheLayout:
        assert self.states is not None, "a model with linear attention has states"
        return (self.states.num_states, delta.state_floats(self.states.max_logged)), "float32"

    def gated_delta(self, delta: GatedDelta, epsilon: float) -> Operator:
        assert self.states is not None, "a model with linear attention has states"
        return _cells().GatedDeltaNet(self._rows("GatedDeltaNet", delta.values), delta, epsilon, self.states)

    def _vocabulary(self) -> tuple[int, int, int]:
        """Returns three numbers: the agent's first token id, the size of the whole vocabulary, and the size of each
        agent's part.
        """
        assert self.part is not None, "only an agent of a split stage has a part of the vocabulary"
        return self.part.shard.vocab.start, self.part.whole.vocab_size, self.part.vocab_stride

    def _rows(self, name: str, *widths: int) -> Operator:
        """Makes the custom operator ``name``, whose outputs are matrices [tokens, width], one for each width."""
        return custom_operator(name, [[self._max_tokens, width] for width in widths], [self.dtype] * len(widths))


def _cells() -> Any:
    """Returns the module with the Cells. Imports mindspore."""
    from agent.backends.cpu import cells

    return cells


def custom_operator(name: str, shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> Operator:
    """Makes the MindSpore operator for the function ``name`` of the kernels' library. Imports mindspore.

    ``shapes`` and ``dtypes`` are the shapes and types of its outputs.
    """
    from mindspore import ops

    from agent.layers.parameter import MINDSPORE_DTYPES

    types = [MINDSPORE_DTYPES[dtype] for dtype in dtypes]
    outputs = (shapes[0], types[0]) if len(shapes) == 1 else (tuple(map(tuple, shapes)), tuple(types))
    shape, dtype = outputs
    return ops.Custom(
        f"{library_path()}:{name}", out_shape=lambda *_: shape, out_dtype=lambda *_: dtype, func_type="aot"
    )
