"""The fused op table of the CPU."""

from __future__ import annotations

from mindspore import Parameter, Tensor, nn, ops

from agent.backends.base import Operator
from agent.backends.native.ops import NativeOps
from agent.kernels import library_path
from agent.layers.parameter import as_tensor
from agent.weights.storage import Array


class FusedCpuOps(NativeOps):
    """Native but for attention, which is two custom operators in every type, float32 too, and one graph."""

    name = "fused"
    has_whole_prompts = False

    def rotary(self, cos: Array, sin: Array) -> Operator:
        return _RotaryTables(cos, sin)

    def attention(self, num_heads: int, num_kv_heads: int, head_dim: int) -> Operator:
        return _FusedAttention()


def custom_operator(name: str) -> ops.Custom:
    """An operator of the kernels' library (see ``agent.kernels.library``); it infers its own shapes and types."""
    operator = ops.Custom(f"{library_path()}:{name}", out_shape=None, out_dtype=None, func_type="aot")
    operator.add_prim_attr("reg_op_name", name)
    return operator


class _RotaryTables(nn.Cell):
    """The whole float32 tables and the positions: the operator looks the rows up itself."""

    def __init__(self, cos: Array, sin: Array) -> None:
        super().__init__()
        self.cos = Parameter(as_tensor(cos), name="cos", requires_grad=False)
        self.sin = Parameter(as_tensor(sin), name="sin", requires_grad=False)

    def construct(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return positions, self.cos, self.sin


class _FusedAttention(nn.Cell):
    """Both operators know heads and scale from the cache's shape. The attention reads the written cache after the
    write because it needs the rotated query, which the write returns."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary_cache = custom_operator("RotaryCache")
        self.paged_attention = custom_operator("PagedAttentionRagged")

    def construct(
        self,
        qkv: Tensor,
        rotary: tuple[Tensor, Tensor, Tensor],
        key_cache: Tensor,
        value_cache: Tensor,
        step: tuple[Tensor, ...],
        whole_prompts: bool,
    ) -> Tensor:
        slot_mapping, block_tables, context_lens, query_lens = step
        positions, cos, sin = rotary
        query = self.rotary_cache(qkv, positions, cos, sin, key_cache, value_cache, slot_mapping)
        return self.paged_attention(query, key_cache, value_cache, block_tables, context_lens, query_lens)
