"""Implements the native op table: the operators that models call, with MindSpore's inference primitives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import AddRmsNorm, RmsNorm, Swiglu

from agent.backends.base import (
    AttentionForm,
    CacheLayout,
    LatentForm,
    LinearParameters,
    Operator,
    OpTable,
)
from agent.backends.device import DeviceHooks, DeviceTraits
from agent.backends.native import parallel
from agent.backends.native.adapters import AddAdapters, LatentWithoutAdapters, WithoutAdapters
from agent.backends.native.attention import Attention, ChunkMask, Rotary, RotaryAndMask, WindowMask, causal_mask
from agent.backends.native.experts import ExpertMLP
from agent.backends.native.gemma import AddThenNorm, GatedGelu, ResultNorm
from agent.backends.native.latent import LatentAttention
from agent.backends.native.linear import expert_bias_type, expert_parameters, linear_parameters, matrix_product
from agent.backends.native.sections import BySequence, SectionedRotary
from agent.backends.native.sinks import SinkAttention, WindowFlags
from agent.group.model_part import ModelPart
from agent.layers.parameter import bind, unbound_parameter
from agent.lora.stacked import A_NAME, B_NAME, HostMatrices, StackedMatrices, StackedSizes, StackedSlots
from agent.lora.store import AdapterSlots
from agent.weights.forms import LinearForm, LinearForms
from agent.weights.storage import Array, allocate
from llm_serving.model.families import Experts
from llm_serving.model.number_formats import scale_row_width


class NativeOps(OpTable):
    """The op table of MindSpore's primitives. It supports float16 and bfloat16, because the primitives' Python
    functions do not accept float32.
    """

    traits: ClassVar[DeviceTraits] = DeviceTraits("native")

    def __init__(
        self,
        dtype: str,
        max_positions: int,
        part: ModelPart | None = None,
        forms: LinearForms | None = None,
        hooks: DeviceHooks | None = None,
        *,
        int8_cache: bool = False,
        adapters: StackedSizes | None = None,
    ) -> None:
        """Stores the arguments. Raises ConfigError if the linear layers that ``forms`` describes do not support
        ``dtype``.

        ``max_positions`` is the number of positions that the widest block table covers. ``adapters`` has the sizes of
        the matrices of LoRA adapters.
        """
        super().__init__(dtype, part, hooks)
        self.takes_rows = part is not None and part.whole.vision is not None and self.is_first_stage
        self._sections = () if part is None else part.whole.rotary_sections
        self.reads_rotary_positions = bool(self._sections)
        self.forms = forms or LinearForms()
        self.forms.check_type(dtype)
        self._has_gelu = part is not None and part.whole.hidden_act == "gelu_tanh"
        self._has_float32_norms = part is not None and part.whole.norm_dtype == "float32"
        self._max_positions = max_positions
        self._int8_cache = int8_cache
        self._adapters = adapters
        self._masks: dict[bool, Tensor] = {}
        self._has_latent_attention = False
        self._has_sinks = part is not None and part.whole.sinks

    @property
    def has_whole_prompt_graph(self) -> bool:
        return not (self._has_latent_attention or self._has_sinks)

    @property
    def attends_by_token(self) -> bool:
        return self._has_sinks

    @property
    def holds_biases(self) -> bool:
        return self.forms.layers.holds_bias

    def linear_weight(self, in_features: int, out_features: int, *, output: bool = False) -> LinearParameters:
        form = self.forms.output if output else self.forms.layers
        return _unbound(linear_parameters(form, in_features, out_features, self.dtype))

    @property
    def num_adapter_groups(self) -> int:
        return 0 if self._adapters is None else self._adapters.num_groups

    def adapter_matrices(self, in_features: int, out_features: int, num_layers: int = 1) -> tuple[Any, Any] | None:
        if self._adapters is None:
            return None
        a, b = self._adapters.shapes(in_features, out_features, num_layers)
        return unbound_parameter(a, self.dtype), unbound_parameter(b, self.dtype)

    def adapter_slots(self, parameters: Mapping[str, Any], weights: Mapping[str, Array]) -> AdapterSlots | None:
        if self._adapters is None:
            return None
        return StackedSlots(self.adapter_memory(_of_adapters(parameters)), self.dtype)

    def adapter_memory(self, parameters: Mapping[str, Any]) -> StackedMatrices:
        """Allocates the memory of the adapters' ``parameters``, filled with zeros."""
        arrays = {name: allocate(parameter.shape, self.dtype) for name, parameter in parameters.items()}
        for name, array in arrays.items():
            array.fill(0)
            bind(parameters[name], array)
        return HostMatrices(arrays)

    def expert_weight(self, num_experts: int, in_features: int, out_features: int) -> LinearParameters:
        return _unbound(expert_parameters(self.forms.experts, num_experts, in_features, out_features, self.dtype))

    def head_weight(self, heads: int, in_features: int, out_features: int) -> LinearParameters:
        return _unbound(expert_parameters(LinearForm(), heads, in_features, out_features, self.dtype))

    def router_weight(self, in_features: int, num_experts: int) -> Any:
        return unbound_parameter((num_experts, in_features), "float32")

    def router_bias(self, num_experts: int) -> Any:
        return unbound_parameter((num_experts,), "float32")

    def expert_bias(self, num_experts: int, out_features: int) -> Any:
        return unbound_parameter((num_experts, out_features), expert_bias_type(self.dtype))

    def cache_layout(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> CacheLayout:
        return (num_blocks, block_size, num_kv_heads, head_dim), "int8" if self._int8_cache else self.dtype

    def scale_layout(self, num_blocks: int, block_size: int, num_kv_heads: int) -> CacheLayout | None:
        if not self._int8_cache:
            return None
        return (num_blocks, block_size, 1, scale_row_width(num_kv_heads)), self.dtype

    @property
    def gathers_blocks(self) -> bool:
        return self._int8_cache

    def latent_cache_layout(self, num_blocks: int, block_size: int, width: int) -> CacheLayout:
        return self.cache_layout(num_blocks, block_size, 1, width)

    def embedding(self, width: int) -> Operator:
        return _Embedding() if not self.is_split or self.part is None else parallel.Embedding(self.part, self.dtype)

    def all_reduce(self, width: int) -> Operator:
        return parallel.Sum()

    def hand_over(self, width: int) -> Operator:
        return parallel.HandOver()

    def tap(self, width: int) -> Operator:
        self.num_taps += 1
        return parallel.HandOver()

    def norm_linear(self, out_features: int, epsilon: float, *, first: bool) -> Operator:
        if first:
            return _NormLinear(epsilon, self.forms.layers, self.dtype, adapted=self._is_adapted)
        return self._add_norm_linear(epsilon, self.forms.layers, adapted=self._is_adapted)

    def _add_norm_linear(self, epsilon: float, form: LinearForm, *, adapted: bool) -> Operator:
        norm = AddThenNorm(epsilon) if self._has_float32_norms else _AddNorm(epsilon)
        return _AddNormLinear(norm, form, self.dtype, adapted=adapted)

    def result_norm(self, epsilon: float) -> Operator:
        return ResultNorm(epsilon)

    def join_norms(self, width: int, epsilon: float, *, keeps_second: bool) -> Operator:
        return _JoinNorms(epsilon, keeps_second=keeps_second)

    def linear(self, out_features: int) -> Operator:
        return _Linear(self.forms.layers, self.dtype, adapted=self._is_adapted)

    def gated_mlp(self, width: int, epsilon: float) -> Operator:
        gate_up = self._add_norm_linear(epsilon, self.forms.layers, adapted=self._is_adapted)
        activation = GatedGelu() if self._has_gelu else Swiglu()
        return _GatedMLP(gate_up, activation, self.forms.layers, self.dtype, adapted=self._is_adapted)

    def expert_mlp(self, width: int, experts: Experts, epsilon: float) -> Operator:
        return ExpertMLP(experts, epsilon, self.forms, self.dtype)

    def lm_head(self, vocab_size: int, epsilon: float) -> Operator:
        return _LMHead(self._add_norm_linear(epsilon, self.forms.output, adapted=False))

    def rotary(self, cos: Array, sin: Array, window: int) -> Operator:
        sections = self._sections
        rotary = SectionedRotary(cos, sin, sections, self.dtype) if sections else Rotary(cos, sin, self.dtype)
        if window == 0:
            return rotary
        if self._has_sinks:
            return RotaryAndMask(rotary, WindowFlags(self._max_positions, window))
        return RotaryAndMask(rotary, self._by_sequence(WindowMask(len(cos), self.dtype, window)))

    def chunk_mask(self) -> Operator:
        return self._by_sequence(ChunkMask(self._max_positions, self.dtype, of_latent=self._has_latent_attention))

    def _by_sequence(self, mask: Operator) -> Operator:
        """Adapts ``mask`` to the graph's input ``positions``. If that input is [4, tokens], returns an operator that
        passes only row 0 to ``mask``: the tokens' positions in their sequences. Otherwise returns ``mask`` itself."""
        return BySequence(mask) if self.reads_rotary_positions else mask

    def attention(self, form: AttentionForm) -> Operator:
        if form.sinks:
            sinks = SinkAttention(form, self.dtype)
            return WithoutAdapters(sinks) if self._is_adapted else sinks
        has_window = form.window > 0
        if has_window not in self._masks:
            self._masks[has_window] = causal_mask(form, self.dtype)
        attention = Attention(form, self.dtype, self._masks[has_window], int8_cache=self._int8_cache)
        return WithoutAdapters(attention) if self._is_adapted else attention

    def latent_attention(self, form: LatentForm) -> Operator:
        self._has_latent_attention = True
        attention = LatentAttention(form, self.forms.layers, self.dtype)
        return LatentWithoutAdapters(attention) if self._is_adapted else attention

    @property
    def _is_adapted(self) -> bool:
        return self._adapters is not None


def _of_adapters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of ``parameters`` that are matrices of LoRA adapters, by their names."""
    ends = (f".{A_NAME}", f".{B_NAME}")
    return {name: parameter for name, parameter in parameters.items() if name.endswith(ends)}


def _unbound(found: dict[str, tuple[tuple[int, ...], str]]) -> LinearParameters:
    return LinearParameters(**{name: unbound_parameter(*described) for name, described in found.items()})


class _Embedding(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.gather = ops.Gather()

    def construct(self, table: Tensor, token_ids: Tensor, step: tuple[Tensor, ...]) -> Tensor:
        return self.gather(table, token_ids, 0)


class _Linear(nn.Cell):
    """A linear layer. If ``adapted``, ``weight`` is a tuple: the weight, and the matrices A and B of the adapters."""

    def __init__(self, form: LinearForm, dtype: str, *, adapted: bool = False) -> None:
        super().__init__()
        self.product = matrix_product(form, dtype)
        self.add = ops.Add()
        self.adapters = AddAdapters() if adapted else None

    def construct(self, x: Tensor, weight: Any, bias: Tensor | None, step: tuple[Tensor, ...]) -> Tensor:
        out = self.product(x, weight if self.adapters is None else weight[0])
        if bias is not None:
            out = self.add(out, bias)
        return out if self.adapters is None else self.adapters(out, x, weight[1], weight[2], step)


class _NormLinear(nn.Cell):
    """Applies the norm and a linear layer in the first layer of a pipeline stage, where ``residual`` equals ``hidden``.
    """

    def __init__(self, epsilon: float, form: LinearForm, dtype: str, *, adapted: bool = False) -> None:
        super().__init__()
        self.norm = RmsNorm(epsilon)
        self.linear = _Linear(form, dtype, adapted=adapted)

    def construct(
        self,
        hidden: Tensor,
        residual: Tensor,
        gamma: Tensor,
        weight: Any,
        bias: Tensor | None,
        step: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor]:
        return self.linear(self.norm(hidden, gamma)[0], weight, bias, step), residual


class _AddNorm(nn.Cell):
    """Returns RMSNorm(hidden + residual) and hidden + residual, with weights ``gamma`` of the activations' type."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.add_norm = AddRmsNorm()
        self.epsilon = epsilon

    def construct(self, hidden: Tensor, residual: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        normed, _, total = self.add_norm(hidden, residual, gamma, self.epsilon)
        return normed, total


class _AddNormLinear(nn.Cell):
    def __init__(self, add_norm: Operator, form: LinearForm, dtype: str, *, adapted: bool) -> None:
        super().__init__()
        self.add_norm = add_norm
        self.linear = _Linear(form, dtype, adapted=adapted)

    def construct(
        self,
        hidden: Tensor,
        residual: Tensor,
        gamma: Tensor,
        weight: Any,
        bias: Tensor | None,
        step: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor]:
        normed, total = self.add_norm(hidden, residual, gamma)
        return self.linear(normed, weight, bias, step), total


class _JoinNorms(nn.Cell):
    def __init__(self, epsilon: float, *, keeps_second: bool) -> None:
        super().__init__()
        self.keeps_second = keeps_second
        self.first_norm, self.second_norm = RmsNorm(epsilon), RmsNorm(epsilon)
        self.join = ops.Concat(1)

    def construct(
        self, first: Tensor, second: Tensor, first_gamma: Tensor, second_gamma: Tensor, step: tuple[Tensor, ...]
    ) -> Tensor | tuple[Tensor, Tensor]:
        normed = self.second_norm(second, second_gamma)[0]
        joined = self.join((self.first_norm(first, first_gamma)[0], normed))
        return (joined, normed) if self.keeps_second else joined


class _GatedMLP(nn.Cell):
    def __init__(
        self, gate_up: Operator, activation: Operator, form: LinearForm, dtype: str, *, adapted: bool
    ) -> None:
        super().__init__()
        self.gate_up, self.activation = gate_up, activation
        self.down = _Linear(form, dtype, adapted=adapted)

    def construct(
        self,
        hidden: Tensor,
        residual: Tensor,
        gamma: Tensor,
        gate_up: Any,
        down: Any,
        step: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor]:
        both, total = self.gate_up(hidden, residual, gamma, gate_up, None, step)
        return self.down(self.activation(both), down, None, step), total


class _LMHead(nn.Cell):
    def __init__(self, norm_linear: Operator) -> None:
        super().__init__()
        self.gather = ops.Gather()
        self.norm_linear = norm_linear

    def construct(
        self,
        hidden: Tensor,
        residual: Tensor,
        gamma: Tensor,
        weight: Any,
        last_tokens: Tensor,
        step: tuple[Tensor, ...],
    ) -> Tensor:
        hidden, residual = self.gather(hidden, last_tokens, 0), self.gather(residual, last_tokens, 0)
        return self.norm_linear(hidden, residual, gamma, weight, None, step)[0]
