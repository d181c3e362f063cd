"""Predicts which kernel an Ascend runs for a node, and checks that this kernel accepts the node's operands.

MindSpore's library for inference has two kernels for some primitives. Environment variables and operands decide which
one runs. The front end does not know this selection. A graph with correct types and shapes can therefore still run a
kernel that interprets the dimensions of an operand differently. The rules apply to the Ascend 910B and 910_93.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tools.ascend_graph.listing import Wiring
from tools.ascend_graph.mind_ir import Node, Operand, TensorType

DISABLED_LIST = "MS_INTERNAL_DISABLE_CUSTOM_KERNEL_LIST"
ENABLED_LIST = "MS_INTERNAL_ENABLE_CUSTOM_KERNEL_LIST"
NZ_LIST = "MS_INTERNAL_ENABLE_NZ_OPS"
_WHEEL = "libms_kernels_internal.so of the aarch64 wheel of mindspore 2.9.0"
DEFAULT_LIST = frozenset(
    {
        "MatMul", "RmsNorm", "Add", "Sub", "FlashAttentionScore", "PagedAttention", "PagedAttentionMask", "AddRmsNorm",
        "AddLayerNorm", "MatMulAllReduce", "InferenceMatmulSplit", "AddRmsNormQuantV2", "InferenceSwiGLU",
        "QbmmAllReduceAdd", "QbmmAdd",
    }
)  # fmt: skip
"""Primitives whose custom kernel runs unless a variable of the environment disables it.

Source: ``IsOpEnabled`` in MindSpore's library (``_WHEEL``).
"""
_LAYOUTS = {0: "BSH", 1: "BNSD", 2: "SBH", 3: "BSND", 4: "TND", 5: "TH", 6: "NSD", 7: "SH"}
"""``input_layout`` of FlashAttentionScore. Source: ``InputLayoutMode`` in the wheel's ``op_param.h``."""
_RAGGED = ("TND", "TH")
_BLOCK_SIZES = (16, 32, 64, 128)
_MAX_LATENT = 576
"""Maximum size of a head with MLA. Source: CANN 8.1, Ascend Transformer Boost, PagedAttentionOperation, page 0200 of
"ascendtbapi" (head_size within (0, 576], block_size at most 128, mlaVHeadSize at most the head's size).
"""
_MAX_HEAD, _HEAD_MULTIPLE, _MAX_BLOCK_ELEMENTS, _MAX_GROUP = 256, 16, 128 * 128, 128
"""Rules of the attention kernels: the maximum head size, and a number that must divide the head size. Then the maximum
product of head size and block size, and the maximum number of query heads for each kv head.
"""
_PRODUCT_TYPES = (
    (("i64", "u64"), ("none", "i32"), ("none",), ("f16",)),
    (("f32", "bf16"), ("none", "i32", "bf16", "f32"), ("none", "f32"), ("bf16",)),
    (("f32",), ("none", "i32", "f16", "f32"), ("f32",), ("f16",)),
)
"""Allowed types of a QuantBatchMatmul that multiplies int8 and returns floats. Each row has the allowed types of scale,
bias, pertoken_scale and result. Source: hicann/ops-nn, matmul/quant_batch_matmul_v3/docs/aclnnQuantMatmulV4.md, the
table for Atlas A2.
"""
_CACHE_TYPES = {"f16": 2, "bf16": 2, "i8": 1}
"""Types that ReshapeAndCache accepts, and the bytes of an element. Source: CANN 8.0, Ascend Transformer Boost,
ReshapeAndCacheOperation, page 0073 of "ascendtbapi".
"""
_ROW_BYTES = 32
"""The bytes of a cache row must be a multiple of this. Source: CANN 9.0, ReshapeAndCacheOperation, page 0230, which
states it for the layout NZ.
"""
_MAX_FUSED_BLOCK, _MAX_FUSED_ROW, _MAX_FUSED_GROUP, _MAX_FUSED_CACHE = 512, 65535, 64, 2**31 - 1
"""Limits of FusedInferAttentionScore with a block table, if each row of the table has one query. The limits are, in
this order: tokens of a block, elements of a cache row, query heads of a key-value head, elements of a cache.
"""
_DEFAULT_MASK, _TRAPEZOIDAL_MASK = 0, 1
"""``mask_mode`` of PagedAttention. Source: ``MaskMode`` in the wheel's ``op_param.h``."""


class Kernel(enum.Enum):
    """The kernels that MindSpore's library for inference has for an attention primitive."""

    CUSTOM = "the custom kernel"
    """The kernel that the library names ``Internal...Op``."""
    ATB = "the kernel of the Ascend Transformer Boost library"
    """The kernel that the library names ``Asd...Op``."""


@dataclass(frozen=True, slots=True)
class DeviceSettings:
    """The settings of an agent's process that select kernels."""

    environment: Mapping[str, str]
    jit_config: Mapping[str, str]

    def uses_custom_kernel(self, primitive: str) -> bool:
        """Returns whether the custom kernel of a primitive is enabled.

        Source: ``IsOpEnabled`` in MindSpore's library (``_WHEEL``). The function starts with the default list, or with
        an empty list if ``MS_ENABLE_INTERNAL_BOOST`` is ``off``. It then adds the enabled names and removes the
        disabled names.
        """
        is_default = self.environment.get("MS_ENABLE_INTERNAL_BOOST") != "off"
        enabled = (DEFAULT_LIST if is_default else frozenset()) | self.names(ENABLED_LIST)
        return primitive in enabled - self.names(DISABLED_LIST)

    def names(self, variable: str) -> frozenset[str]:
        """Returns the comma-separated names in an environment variable."""
        return frozenset(filter(None, self.environment.get(variable, "").split(",")))


TypeOf = Callable[[Operand], TensorType | None]


class KernelRules:
    """Finds nodes whose operands the selected kernel does not accept."""

    def __init__(self, wiring: Wiring, type_of: TypeOf, settings: DeviceSettings) -> None:
        """``type_of`` returns the type of an operand."""
        self._wiring, self._type_of, self._settings = wiring, type_of, settings
        self._checks: dict[str, Callable[[Node], Iterator[str]]] = {
            "PagedAttention": self._paged_attention,
            "FlashAttentionScore": self._flash_attention,
            "FusedInferAttentionScore": self._fused_attention,
            "ReshapeAndCache": self._cache_write,
            "MatMul": self._matrix_product,
            "GroupedMatmulV4": self._grouped_product,
            "QuantV2": self._static_quantisation,
            "RmsNorm": self._norm,
            "AddRmsNorm": self._norm,
            "QuantBatchMatmul": self._integer_product,
        }

    def problems(self, node: Node) -> Iterator[str]:
        """Yields the reasons why the kernel that the device selects for ``node`` does not accept its operands."""
        check = self._checks.get(node.primitive)
        if check is not None:
            yield from check(node)

    def paged_attention_kernel(self, node: Node) -> Kernel:
        """Returns the kernel of an unquantised PagedAttention.

        Source: ``PagedAttentionOp::Router`` in MindSpore's library (``_WHEEL``). The trapezoidal mask selects the
        custom kernel, and MLA selects the ATB kernel. Otherwise the lists of enabled and disabled kernels decide. The
        rank of the query does not influence the selection.
        """
        operands = self._wiring.operands(node)
        if operands[14].value == _TRAPEZOIDAL_MASK:
            return Kernel.CUSTOM
        if operands[15].value:
            return Kernel.ATB
        return Kernel.CUSTOM if self._settings.uses_custom_kernel("PagedAttention") else Kernel.ATB

    def flash_attention_kernel(self, node: Node) -> Kernel:
        """Returns the kernel of a FlashAttentionScore.

        Source: ``FlashAttentionScoreOp`` and its ``Router`` in MindSpore's library ``_WHEEL`` ("Use AsdOp when input
        layout is TH or TND.", "Use AsdOp when attn_mask is Bfloat16.").
        """
        operands = self._wiring.operands(node)
        mask = self._type_of(operands[6])
        if _LAYOUTS.get(operands[16].value) in _RAGGED or (mask is not None and mask.dtype == "bf16"):
            return Kernel.ATB
        return Kernel.CUSTOM if self._settings.uses_custom_kernel("FlashAttentionScore") else Kernel.ATB

    def _paged_attention(self, node: Node) -> Iterator[str]:
        yield from self._inference_mode()
        operands = self._wiring.operands(node)
        query, cache, mask = (self._type_of(operands[at]) for at in (0, 1, 7))
        kernel = self.paged_attention_kernel(node)
        rank = 0 if query is None else len(query.shape)
        # The kernel reads the second and third size of the query, for any rank of the query. If the rank is not 3, the
        # kernel interprets the sizes as batch, heads, queries, head size. Source: InternalPagedAttentionTilingImpl.
        if kernel is Kernel.CUSTOM and rank not in (3, 4):
            yield (
                f"{kernel.value} is selected, which reads three sizes of the query, but the query has rank {rank}; "
                f"add PagedAttention to {DISABLED_LIST} and use the default mask_mode"
            )
        if operands[14].value != _DEFAULT_MASK and mask is not None:
            yield f"mask_mode is {operands[14].value}; with attn_mask it must be {_DEFAULT_MASK}"
        if operands[15].value:
            yield from self._latent_cache(operands)
        if mask is not None and query is not None and mask.dtype != query.dtype:
            yield f"attn_mask is {mask.dtype} and query is {query.dtype}; the kernel needs one type for both"
        if cache is not None:
            yield from self._cache_sizes(cache, _MAX_LATENT if operands[15].value else _MAX_HEAD)
        heads, kv_heads = operands[10].value, operands[12].value
        if kv_heads and heads // kv_heads > _MAX_GROUP:
            yield f"{heads // kv_heads} query heads share a key-value head; the kernel takes at most {_MAX_GROUP}"

    def _latent_cache(self, operands: list[Operand]) -> Iterator[str]:
        """Yields an error unless the operands fit MLA: keys and values are the same cache, and it has one head.

        Sources: MindFormers (transformer/flash_attention.py) and vllm-mindspore (models/deepseekv3.py) pass the key
        cache twice. The page that ``_MAX_LATENT`` cites says "MQA".
        """
        key, value = (self._wiring.source(operand)[0].name for operand in operands[1:3])
        if key != value or operands[12].value != 1:
            yield (
                f"mla_v_dim is {operands[15].value} with the caches {key} and {value} and {operands[12].value} "
                "key-value heads; MLA needs one cache for keys and values, with one head"
            )

    def _cache_sizes(self, cache: TensorType, max_head: int) -> Iterator[str]:
        """Yields the errors in the sizes of a KV cache.

        Source: the error messages of ``InternalPagedAttentionTilingImpl`` in MindSpore's library ``_WHEEL``
        ("'head_dim' must be less than or equal to 256 when is not MLA mode").
        """
        if len(cache.shape) != 4:
            yield f"key_cache is {cache}; it must be [blocks, block size, heads, head size]"
            return
        block, head = cache.shape[1], cache.shape[3]
        if block not in _BLOCK_SIZES:
            yield f"blocks have {block} tokens; the kernel takes {', '.join(map(str, _BLOCK_SIZES))}"
        if head % _HEAD_MULTIPLE or head > max_head:
            yield f"heads have {head} elements; the kernel takes multiples of {_HEAD_MULTIPLE} up to {max_head}"
        if max_head == _MAX_HEAD and head * block > _MAX_BLOCK_ELEMENTS:
            yield f"head size x block size is {head * block}; the kernel takes at most {_MAX_BLOCK_ELEMENTS}"

    def _flash_attention(self, node: Node) -> Iterator[str]:
        operands = self._wiring.operands(node)
        query, mask = self._type_of(operands[0]), self._type_of(operands[6])
        kernel, layout = self.flash_attention_kernel(node), _LAYOUTS.get(operands[16].value, "unknown")
        # Source: the error message "Only support sparse mode in {0}" in MindSpore's library (``_WHEEL``).
        if operands[17].value != 0:
            yield f"sparse_mode is {operands[17].value}; {kernel.value} takes 0 only"
        ranks = {"TH": 2, "TND": 3, "SH": 2, "BSH": 3, "SBH": 3, "NSD": 3, "BNSD": 4, "BSND": 4}
        if query is not None and layout in ranks and len(query.shape) != ranks[layout]:
            yield f"query has rank {len(query.shape)}; layout {layout} has {ranks[layout]}"
        # The mask must have the type of the query. Source: vllm-mindspore, model_executor/models/attention_mask.py.
        if mask is not None and query is not None and mask.dtype != query.dtype:
            yield f"attn_mask is {mask.dtype} and query is {query.dtype}; the kernel needs one type for both"

    def _fused_attention(self, node: Node) -> Iterator[str]:
        """Yields an error unless the kernel of decode steps accepts the operands.

        MindSpore calls aclnnFusedInferAttentionScoreV2. Sources: hicann/ops-transformer,
        attention/fused_infer_attention_score/docs/aclnnFusedInferAttentionScoreV2.md (Q_S is 1, page attention), and
        attention/incre_flash_attention/op_host/incre_flash_attention_tiling_check.cpp; docstring of the primitive.
        """
        operands = self._wiring.operands(node)
        query, cache, mask = (self._type_of(operands[at]) for at in (0, 1, 4))
        heads, kv_heads, block_size = (operands[at].value for at in (24, 29, 32))
        if query is None or len(query.shape) != 3 or query.shape[1] != 1:
            yield f"query is {query}; with a block table and layout BSH it must be [rows of the table, 1, width]"
        if mask is not None and (mask.dtype not in ("bool", "i8", "u8") or len(mask.shape) != 2):
            yield f"attn_mask is {mask}; for single queries it must be bool [rows of the table, positions]"
        if kv_heads == 0 or heads // kv_heads > _MAX_FUSED_GROUP:
            yield f"{heads} query heads share {kv_heads} key-value heads; a group has at most {_MAX_FUSED_GROUP}"
        if cache is None or len(cache.shape) != 3:
            yield f"key is {cache}; with layout BSH a cache must be [blocks, block size, heads x head size]"
            return
        blocks, block, row = cache.shape
        if block != block_size or block % 16 or block > _MAX_FUSED_BLOCK:
            yield f"blocks have {block} tokens, and block_size is {block_size}; they must be equal multiples of 16"
        if row > _MAX_FUSED_ROW or blocks * block * row > _MAX_FUSED_CACHE:
            yield f"key is {cache}; rows have at most {_MAX_FUSED_ROW} elements, and caches {_MAX_FUSED_CACHE}"

    def _cache_write(self, node: Node) -> Iterator[str]:
        yield from self._inference_mode()
        key = self._type_of(self._wiring.operands(node)[0])
        # Source: the error message "The rank of key and value should be 2 (TH) or 3 (BSH)" in ``_WHEEL``.
        if key is not None and len(key.shape) not in (2, 3):
            yield f"key has rank {len(key.shape)}; the kernel takes 2 or 3"
        if key is None or key.dtype not in _CACHE_TYPES:
            yield f"key is {key}; the kernel takes {', '.join(_CACHE_TYPES)}"
        elif key.shape[-1] * _CACHE_TYPES[key.dtype] % _ROW_BYTES:
            yield f"a row of {key} is not a multiple of {_ROW_BYTES} bytes"

    def _matrix_product(self, node: Node) -> Iterator[str]:
        weight = self._type_of(self._wiring.operands(node)[1])
        # Source: the error message "MatMul weight shape rank must be 2" in MindSpore's library (``_WHEEL``).
        if weight is not None and len(weight.shape) != 2:
            yield f"the weight has rank {len(weight.shape)}; the kernel takes 2"

    def _norm(self, node: Node) -> Iterator[str]:
        """Yields an error unless the kernel accepts the type of a norm's weights (gamma).

        The kernel RmsNorm accepts the type of the activations. It also accepts float32 weights with 16-bit activations.
        Source: hicann/ops-nn, norm/rms_norm/docs/aclnnRmsNorm.md, table of types for Atlas A2. The kernel AddRmsNorm
        accepts only the type of the activations. Source: CANN 8.5, aclnnAddRmsNorm.
        """
        at = 2 if node.primitive == "AddRmsNorm" else 1
        x, gamma = (self._type_of(self._wiring.operands(node)[index]) for index in (0, at))
        if x is None or gamma is None or gamma.dtype == x.dtype:
            return
        if at == 2 or gamma.dtype != "f32":
            yield f"x is {x.dtype} and gamma {gamma.dtype}; the kernel does not take these types together"

    def _static_quantisation(self, node: Node) -> Iterator[str]:
        x, scale, offset, sqrt_mode = self._wiring.operands(node)[:4]
        of_x, of_scale, of_offset = (self._type_of(operand) for operand in (x, scale, offset))
        if of_x is None or of_scale is None or of_offset is None:
            yield "scale and offset must be tensors"
            return
        # QuantV2 has two kernels. The internal kernel QuantPerChannel accepts only an int8 offset and divides by the
        # scale. The kernel aclnnAscendQuant takes a float offset and multiplies by the inverse of the scale. Sources:
        # IsInternalKernelDtypesSupported in the x86-64 wheel, and MindFormers 1.9, golden_stick/a8w8.py.
        if of_offset.dtype == "i8":
            yield "the offset is i8, which selects the kernel that divides by the scale, but the scale is an inverse"
        # Source of the following rules: hicann/ops-nn, quant/ascend_quant_v2/docs/aclnnAscendQuant.md, for Atlas A2.
        elif of_offset != of_scale:
            yield f"scale is {of_scale} and offset is {of_offset}; the kernel needs one type and one shape for both"
        if of_x.dtype != "f32" and of_scale.dtype != of_x.dtype:
            yield f"scale is {of_scale.dtype} and x is {of_x.dtype}; the kernel needs one type for both"
        if len(of_scale.shape) != 1 or of_scale.shape[0] not in (1, of_x.shape[-1]):
            yield f"scale is {of_scale} and x is {of_x}; the kernel takes one scale, or one for each column of x"
        if sqrt_mode.value is not False:
            yield f"sqrt_mode is {sqrt_mode.value}; it must be False, or the kernel multiplies by the scale twice"
        if node.results[0].dtype != "i8":
            yield f"the result is {node.results[0].dtype}; it must be i8, the type that QuantBatchMatmul takes"

    def _integer_product(self, node: Node) -> Iterator[str]:
        """Yields an error unless a row of ``_PRODUCT_TYPES`` allows the types of the operands and the result.

        Scale and bias must also have one element per column of the weight.
        """
        operands = self._wiring.operands(node)
        scale, bias, per_token = (self._type_of(operands[at]) for at in (2, 4, 5))
        found = tuple("none" if each is None else each.dtype for each in (scale, bias, per_token, node.results[0]))
        for row in _PRODUCT_TYPES:
            if all(kind in kinds for kind, kinds in zip(found, row, strict=True)):
                break
        else:
            yield (
                "scale, bias, pertoken_scale and the result are {}, {}, {} and {}; the kernel does not take these "
                "types together".format(*found)
            )
        columns = node.results[0].shape[-1]
        for name, kind in (("scale", scale), ("bias", bias)):
            if kind is not None and kind.shape != (columns,):
                yield f"{name} is {kind}; it must have the {columns} columns of the weight"

    def _grouped_product(self, node: Node) -> Iterator[str]:
        operands = self._wiring.operands(node)
        x, weight = self._type_of(operands[0]), self._type_of(operands[1])
        if x is None or weight is None or (x.dtype, weight.dtype) != ("i8", "i8"):
            return
        # These weights should have the layout NZ. MindSpore converts them if the variable NZ_LIST names the primitive.
        # Sources: UpdateFormat in MindSpore's ops/kernel/ascend/internal/internal_kernel_plugin.cc, and MindFormers
        # 1.9, golden_stick/a8dynw8.py, which casts the weights itself.
        if "GroupedMatmulV4" not in self._settings.names(NZ_LIST):
            yield f"int8 weights of experts stay in layout ND; add GroupedMatmulV4 to {NZ_LIST}"

    def _inference_mode(self) -> Iterator[str]:
        # Only with these settings does MindSpore use its inference kernels. Sources: MsContext::IsEnableInferBoost in
        # libmindspore_core.so of the same wheel, and context.py of mindspore 2.9.0 ("Only jit_level set O0 can set
        # infer_boost to on.").
        given = dict(self._settings.jit_config)
        if (given.get("jit_level"), given.get("infer_boost")) != ("O0", "on"):
            yield f"jit_config is {given}; this primitive's kernel needs jit_level O0 and infer_boost on"
