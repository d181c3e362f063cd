"""Plants mistakes in the Ascend graphs, one at a time, and prints the errors that the checks find as JSON.

test_check_ascend_graph.py runs it in a separate process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["MS_DEV_PRECOMPILE_ONLY"] = "1"

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops import auto_generate

from agent.backends.ascend import context
from agent.backends.ascend import ops as ascend_ops
from agent.backends.native import adapters as native_adapters
from agent.backends.native import attention as native_attention
from agent.backends.native import experts as native_experts
from agent.backends.native import gemma as native_gemma
from agent.backends.native import integer_cache as native_integer
from agent.backends.native import latent as native_latent
from agent.backends.native import linear as native_linear
from agent.backends.native import ops as native
from agent.backends.native import sections as native_sections
from agent.backends.native import sinks as native_sinks
from agent.device_sampling import cells as sampling_cells
from agent.device_sampling import draws as device_draws
from agent.layers import attention as attention_layer
from agent.models import llama
from agent.step_graph import dynamic_cell
from agent.weights.forms import LinearForm, LinearForms
from agent.weights.quantized import Scheme
from llm_serving.config import ParallelConfig
from llm_serving.config.sections import LoraConfig
from llm_serving.model.deepseek import Routing
from llm_serving.model.families import Experts
from llm_serving.model.gemma import Gemma
from llm_serving.model.vision import VisionShape
from tools.ascend_graph.front_end import ascend_config, compile_graphs, forms_of, set_up
from tools.ascend_graph.fusions import predicted_fusions
from tools.ascend_graph.listing import list_graph
from tools.ascend_graph.rules import check_graph

TINY = ascend_config("llama_tiny_cpu.yaml", ["model_config.model_dtype=float16"])
GQA = replace(TINY.shape, num_layers=1, num_key_value_heads=2, tie_word_embeddings=False)
"""A model with one layer, because the compilation takes time in proportion to the layers."""
CONFIG = replace(TINY, shape=GQA)
HEADS, KV_HEADS = GQA.num_attention_heads, GQA.num_key_value_heads
SQUARE = replace(CONFIG, shape=replace(GQA, num_key_value_heads=HEADS))
"""A model with as many key-value heads as query heads. Many mistakes then fit all shapes."""
QWEN2 = replace(CONFIG, shape=replace(GQA, architecture="Qwen2ForCausalLM", attention_bias=True))
QWEN_VL = replace(
    QWEN2,
    shape=replace(
        QWEN2.shape,
        architecture="Qwen2_5_VLForConditionalGeneration",
        rotary_sections=(4, 7, 5),
        vision=VisionShape(64, 64, 1, 4, 0, 14, 1e-6, 2, 9),
    ),
)
"""A model whose positions have three dimensions. The agent embeds the tokens, so the graph has no embedding."""
MISTRAL = replace(CONFIG, shape=replace(GQA, architecture="MistralForCausalLM", sliding_window=CONFIG.max_model_len))
INT8, INT4, INT8_WEIGHTS = (
    replace(SQUARE, model_config=replace(CONFIG.model_config, weight_format=name))
    for name in ("int8", "int4", "int8_weight_only")
)
INT8_CACHE = replace(CONFIG, model_config=replace(CONFIG.model_config, kv_format="int8"))
"""A model with an int8 KV cache. Its rows of scales are repeated, because it has two key-value heads."""
INT8_CACHE_PAIR = replace(INT8_CACHE, parallel_config=ParallelConfig(tensor_parallel=2))
QWEN3 = replace(CONFIG, shape=replace(GQA, architecture="Qwen3ForCausalLM", query_key_norm=True))
GEMMA = replace(
    QWEN3,
    shape=replace(
        QWEN3.shape,
        architecture="Gemma3ForCausalLM",
        num_layers=2,
        hidden_act="gelu_tanh",
        sliding_window=CONFIG.max_model_len,
        full_attention_layers=(1,),
        gemma=Gemma(local_rope_theta=1e4, query_scalar=64.0),
    ),
)
"""A model with float32 norms, GeGLU, norms of results, and a rotary embedding for each kind of layer."""
PAIR = replace(CONFIG, parallel_config=ParallelConfig(tensor_parallel=2))
INT8_PAIR, INT4_PAIR = (replace(config, parallel_config=PAIR.parallel_config) for config in (INT8, INT4))
MOE = replace(
    QWEN3,
    shape=replace(
        QWEN3.shape,
        architecture="Qwen3MoeForCausalLM",
        num_layers=2,
        experts=Experts(8, 3, 128, normalised=True, dense_layers=(1,)),
    ),
)
INT8_MOE, INT4_MOE, INT8_WEIGHTS_MOE = (
    replace(MOE, model_config=replace(CONFIG.model_config, weight_format=name))
    for name in ("int8", "int4", "int8_weight_only")
)
BFLOAT16_MOE = replace(INT8_MOE, model_config=replace(INT8_MOE.model_config, model_dtype="bfloat16"))
INT8_MOE_PAIR, INT4_MOE_PAIR = (
    replace(config, parallel_config=PAIR.parallel_config) for config in (INT8_MOE, INT4_MOE)
)
STAGES = replace(CONFIG, shape=replace(GQA, num_layers=2), parallel_config=ParallelConfig(pipeline_parallel=2))
LORA = LoraConfig(max_adapters=3, max_rank=8)
ADAPTED = replace(SQUARE, lora_config=LORA)
ADAPTED_QWEN2 = replace(QWEN2, lora_config=LORA, parallel_config=PAIR.parallel_config)
ADAPTED_MOE = replace(INT8_MOE, lora_config=LORA)
ADAPTED_CACHE = replace(INT8_CACHE, lora_config=LORA)
BFLOAT16 = replace(CONFIG, model_config=replace(CONFIG.model_config, model_dtype="bfloat16"))


DEEPSEEK = ascend_config("deepseek_small_cpu.yaml")
DEEPSEEK = replace(DEEPSEEK, shape=replace(DEEPSEEK.shape, num_layers=2))
"""A model with latent attention and DeepSeek V3's router."""
INT8_DEEPSEEK = replace(DEEPSEEK, model_config=replace(DEEPSEEK.model_config, weight_format="int8"))
ADAPTED_DEEPSEEK = replace(DEEPSEEK, lora_config=LORA)
DEEPSEEK_PAIR = replace(DEEPSEEK, parallel_config=ParallelConfig(tensor_parallel=2, expert_parallel=True))
assert DEEPSEEK.shape.experts is not None
LIMITED = replace(
    DEEPSEEK,
    shape=replace(
        DEEPSEEK.shape,
        architecture="DeepseekV2ForCausalLM",
        experts=replace(DEEPSEEK.shape.experts, normalised=False, routing=Routing(False, 8, 3, False, 16.0)),
    ),
)
"""A model with DeepSeek V2's router, which limits the choice of experts to the best groups."""
LIMITED_PAIR = replace(LIMITED, parallel_config=DEEPSEEK_PAIR.parallel_config)
assert DEEPSEEK.shape.latent is not None
WIDE_DEEPSEEK = replace(DEEPSEEK, shape=replace(DEEPSEEK.shape, latent=replace(DEEPSEEK.shape.latent, rank=528)))

GPT_OSS = ascend_config("gpt_oss_20b_kbk_pa_dyn.yaml")
GPT_OSS = replace(GPT_OSS, shape=replace(GPT_OSS.shape, num_layers=2))
"""A model with sinks and clamped SwiGLU. Layer 0 has a window, and layer 1 has none."""
INT8_WEIGHTS_GPT_OSS = replace(
    GPT_OSS, model_config=replace(GPT_OSS.model_config, weight_format="int8_weight_only", model_dtype="float16")
)
GPT_OSS_PAIR = replace(GPT_OSS, parallel_config=ParallelConfig(tensor_parallel=2))
ADAPTED_GPT_OSS = replace(GPT_OSS, lora_config=LORA)


STATIC, STATIC_PAIR, STATIC_QWEN2 = (
    replace(config, model_config=replace(config.model_config, weight_format="int8", model_dtype="bfloat16"))
    for config in (SQUARE, PAIR, QWEN2)
)
"""Checkpoints whose layers have static inputs, and whose output layer consists of floats."""
STATIC_FORMS = LinearForms(
    LinearForm("int8", stored=Scheme("int8", 0, static=True, sums_hold_bias=True)), LinearForm("int8")
)


def forms_for(config: Any) -> LinearForms:
    return STATIC_FORMS if any(config is each for each in (STATIC, STATIC_PAIR, STATIC_QWEN2)) else forms_of(config)


def with_sizes(head_dim: int, block_size: int) -> Any:
    """Returns CONFIG with these sizes of heads and cache blocks."""
    shape, cache = replace(GQA, head_dim=head_dim), replace(CONFIG.pa_config, block_size=block_size)
    return replace(CONFIG, shape=shape, pa_config=cache)


class Attention(native_attention.Attention):
    """The attention of the native op table, with flags that plant mistakes. Each test sets some of the flags."""

    def construct(self, qkv: Any, of_heads: Any, rotary: Any, caches: Any, step: Any, whole_prompts: Any) -> Any:
        slot_mapping, tables, context_lens, query_lens = step[:4]
        mask = step[4] if len(step) > 4 else self.no_mask
        keys, values = caches
        query, key, value = self.split(qkv, self.widths, -1)
        query, key = self.rotate(query, key, rotary[0], rotary[1], context_lens)
        written = self.write_cache(key, value, keys, values, slot_mapping)
        if self.waits:
            query = ops.depend(query, written)
        if self.swaps:
            return self.paged(query, values, keys, tables, context_lens, None, None, mask, query_lens)
        if self.knows_queries:
            return self.paged(query, keys, values, tables, context_lens, None, None, mask, query_lens)
        return self.paged(query, keys, values, tables, context_lens, None, None, mask, None)


def attention(**flags: bool) -> Callable[..., nn.Cell]:
    """Returns a function that creates the attention with some flags set to wrong values."""

    def make(*arguments: Any, **settings: Any) -> nn.Cell:
        cell = Attention(*arguments, **settings)
        for name, value in ({"waits": True, "swaps": False, "knows_queries": True} | flags).items():
            setattr(cell, name, value)
        return cell

    return make


class Forgetful(native.ChunkMask):
    def construct(self, positions: Any) -> Any:
        return self.multiply(self.cast(positions, self.dtype), self.masked)


class TurnedSections(native_sections.SectionedRotary):
    """Plants a mistake: rows rotate the section of columns, and columns that of rows."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.rows = nn.CellList([self.rows[at] for at in (0, 2, 1)])


class ExactGelu(native_gemma.GatedGelu):
    """Plants a mistake: the gate uses the GELU with the error function instead of tanh."""

    def construct(self, both: Any) -> Any:
        width = self.shape(both)[1] // 2
        gate, up = self.split(both, (width, width), -1)
        return self.multiply(self.gelu(gate, "none"), up)


class TurnedGelu(native_gemma.GatedGelu):
    """Plants a mistake: the second half of a row is the gate."""

    def construct(self, both: Any) -> Any:
        width = self.shape(both)[1] // 2
        up, gate = self.split(both, (width, width), -1)
        return self.multiply(self.gelu(gate, "tanh"), up)


class GateForUp(native_gemma.GatedGelu):
    """Plants a mistake: multiplies the gate by itself."""

    def construct(self, both: Any) -> Any:
        width = self.shape(both)[1] // 2
        gate, _ = self.split(both, (width, width), -1)
        return self.multiply(self.gelu(gate, "tanh"), gate)


class LostSum(native_gemma.AddThenNorm):
    """Plants a mistake: the next sum adds to the stream without the latest result."""

    def construct(self, hidden: Any, residual: Any, gamma: Any) -> Any:
        return self.norm(self.add(hidden, residual), gamma)[0], residual


class TurnedNorms(llama.DecoderLayer):
    """Plants a mistake: exchanges the weights of the norms before attention and before the MLP."""

    def construct(self, hidden: Any, residual: Any, rotary: Any, step: Any, whole_prompts: Any) -> Any:
        hidden, residual = self.attention(
            hidden, residual, self.post_attention_norm.weight, rotary, step, whole_prompts
        )
        hidden = self.norm_attention(hidden, self.attention_result_norm.weight, step)
        hidden, residual = self.mlp(hidden, residual, self.input_norm.weight, step)
        return self.norm_mlp(hidden, self.mlp_result_norm.weight, step), residual


def one_rotary() -> Any:
    """Plants a mistake: all layers use the first rotary embedding."""
    real = llama.Llama.__init__

    def init(model: Any, *given: Any) -> None:
        real(model, *given)
        model.are_local = (False,) * len(model.are_local)

    return mock.patch.object(llama.Llama, "__init__", init)


class MaskByTime(native_sections.BySequence):
    """Plants a mistake: the mask compares the times of tokens, which are equal within an image."""

    def __init__(self, mask: nn.Cell) -> None:
        super().__init__(mask)
        self.row = native_sections._Row(1)


class WithoutTranspose(native._Linear):
    def __init__(self) -> None:
        super().__init__(LinearForm(), "float16")
        self.product = ops.MatMul(transpose_b=False)


class WithoutTokenScales(native_linear._DynamicProduct):
    def construct(self, x: Any, weight: Any) -> Any:
        integers, _ = self.quantise(x, None)
        return self.multiply(integers, weight[0], weight[1], None, None, None)


class ScaledTwice(native_linear._DynamicProduct):
    """Plants a mistake: takes the scales of the tokens from another quantisation than the integers.

    The other quantisation has different inputs.
    """

    def construct(self, x: Any, weight: Any) -> Any:
        integers, scales = self.quantise(x, None)
        _, others = self.quantise(x * 2, None)
        return self.multiply(integers, weight[0], weight[1], None, None, scales * 0 + others)


class WithoutSumOffsets(native_linear._StaticProduct):
    def construct(self, x: Any, weight: Any) -> Any:
        integers = self.quantise(x, weight[2], weight[3], False, "ROUND", ms.int8)
        return self.multiply(integers, weight[0], weight[1], None, None, None)


class OffsetsForScales(native_linear._StaticProduct):
    def construct(self, x: Any, weight: Any) -> Any:
        integers = self.quantise(x, weight[3], weight[2], False, "ROUND", ms.int8)
        return self.multiply(integers, weight[0], weight[1], None, weight[4], None)


class HalfProducts(native_linear._StaticProduct):
    """Plants a mistake: multiplies to float16 instead of the model's bfloat16, and then converts the result."""

    def __init__(self, dtype: str) -> None:
        super().__init__("float16")
        self.cast, self.dtype = ops.Cast(), ms.bfloat16

    def construct(self, x: Any, weight: Any) -> Any:
        integers = self.quantise(x, weight[2], weight[3], False, "ROUND", ms.int8)
        return self.cast(self.multiply(integers, weight[0], weight[1], None, weight[4], None), self.dtype)


class ScaleForOffset(native_linear._WeightOnlyProduct):
    def construct(self, x: Any, weight: Any) -> Any:
        return self.multiply(x, weight[0], weight[1], weight[1], None, None, None)


class RowsScaledTwice(native_experts._DynamicProducts):
    """Plants a mistake: takes the scales of the rows from another quantisation than the integers.

    The other quantisation has different inputs.
    """

    def construct(self, rows: Any, weight: Any, groups: Any, bias: Any = None) -> Any:
        integers, _ = self.quantise(rows, None)
        _, scales = self.quantise(rows * 2, None)
        return self.multiply(
            (integers,),
            (weight[0],),
            None,
            (weight[1],),
            None,
            None,
            None,
            (scales,),
            groups,
            None,
            None,
            None,
            3,
            0,
            1,
        )[0]


class EndsOfGroups(native_experts._FloatProducts):
    """Plants a mistake: gives the operator the wrong kind of group list.

    The list has the number of rows of each group. The operator's setting says that the list has the ends of the groups.
    """

    def construct(self, rows: Any, weight: Any, groups: Any, bias: Any = None) -> Any:
        return self.multiply((rows,), (weight,), None, None, None, None, None, None, groups, None, None, None, 3, 0, 0)[
            0
        ]


class WithoutOffsets(native_experts._WeightOnlyProducts):
    def construct(self, rows: Any, weight: Any, groups: Any, bias: Any = None) -> Any:
        return self.multiply(
            (rows,), (weight[0],), None, None, None, (weight[1],), None, None, groups, None, None, None, 3, 0, 1
        )[0]


class DividedShares(native_experts._LimitedRouter):
    """Plants a mistake: divides the weights of a token's experts by their sum."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.divide, self.total = ops.RealDiv(), ops.ReduceSum(keep_dims=True)

    def construct(self, logits: Any, correction: Any) -> Any:
        fractions, chosen = super().construct(logits, correction)
        return self.divide(fractions, self.total(fractions, -1)), chosen


class UnscaledShares(native_experts._LimitedRouter):
    """Plants a mistake: leaves out the factor of the experts' weights."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.factor = None


class EarlyFactor(nn.Cell):
    """Plants a mistake: scales all scores, before the choice. A score then exceeds the bounds."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.softmax, self.factor = auto_generate.Softmax(axis), Tensor(16.0, ms.float32)
        self.multiply = ops.Mul()

    def construct(self, logits: Any) -> Any:
        return self.multiply(self.softmax(logits), self.factor)


class LateSoftmax(native_experts._LimitedRouter):
    """Plants a mistake: the softmax covers the experts of the chosen groups only."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.bounded = self.minimum
        self.minimum = self.late

    def late(self, scores: Any, bounds: Any) -> Any:
        return self.score(self.bounded(scores, bounds))


class SummedGroups(native_experts._LimitedRouter):
    """Plants a mistake: ranks a group by the sum of its scores."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.total = ops.ReduceSum()
        self.largest = self.summed

    def summed(self, scores: Any) -> Any:
        return scores, self.total(scores, -1)


def scattered_groups() -> Any:
    """Plants a mistake: neighbouring experts belong to different groups."""
    real = native_experts.group_bounds

    def bounds(count: int, routing: Any) -> Any:
        blocks = real(count, routing).reshape(routing.groups, routing.groups, -1)
        return np.ascontiguousarray(blocks.swapaxes(1, 2).reshape(routing.groups, count))

    return in_experts("group_bounds", bounds)


def in_experts(name: str, replacement: Any) -> Any:
    return mock.patch.object(native_experts, name, replacement)


def other_expert_parameters(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    real = native_linear.expert_parameters
    return patched("expert_parameters", lambda *given: change(real(*given)))


def turned_scales(found: dict[str, Any]) -> dict[str, Any]:
    """Changes the scales of experts to the wrong shape [experts, outputs, groups]."""
    (experts, groups, columns), dtype = found["scale"]
    return found | {"scale": ((experts, columns, groups), dtype)}


def weight_only(**settings: Any) -> Any:
    """Returns a patch with which linear layers use WeightQuantBatchMatmul with settings that do not match the weights.
    """

    def make(**given: Any) -> Any:
        return auto_generate.WeightQuantBatchMatmul(**(given | settings))

    return mock.patch.object(native_linear, "WeightQuantBatchMatmul", make)


def in_linear(name: str, replacement: Any) -> Any:
    return mock.patch.object(native_linear, name, replacement)


def other_type(name: str, dtype: str) -> Any:
    """Gives the parameter ``name`` of linear layers another type."""
    return other_parameters(lambda found: found | {name: (found[name][0], dtype)} if name in found else found)


def other_parameters(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Returns a patch with which linear layers create wrong parameters, in an otherwise correct graph.

    ``change`` gets the shapes and types of weights, scales and offsets, and makes some of them wrong.
    """
    real = native_linear.linear_parameters
    return patched("linear_parameters", lambda *given: change(real(*given)))


def short_scales(found: dict[str, Any]) -> dict[str, Any]:
    (groups, columns), dtype = found["scale"][0], found["scale"][1]
    return found | {"scale": ((columns, groups), dtype)}


def scales_of_all(found: dict[str, Any]) -> dict[str, Any]:
    """Creates scales for the inputs of both agents, although an agent has only half of the inputs."""
    (groups, columns), dtype = found["scale"][0], found["scale"][1]
    return found | {"scale": ((2 * groups, columns), dtype)}


class OldNames(dynamic_cell._DynamicStep):
    def construct(  # type: ignore[no-untyped-def]
        self, token_ids, positions, last_tokens, slot_mapping, block_tables, context_lens, query_lens, ids, places, mask
    ):
        token_ids = self.insert(token_ids, ids, places, mask)
        step = (slot_mapping, block_tables, context_lens, query_lens)
        return self.model(token_ids, positions, last_tokens, step, self.whole_prompts)


class OnlyLogits(dynamic_cell._DynamicStep):
    def construct(  # type: ignore[no-untyped-def]
        self, token_ids, positions, last_tokens, slot_mapping, block_tables, batch_valid_length, q_seq_lens,
        earlier_ids, places, inserted,
    ):  # fmt: skip
        token_ids = self.insert(token_ids, earlier_ids, places, inserted)
        step = (slot_mapping, block_tables, batch_valid_length, q_seq_lens)
        return self.model(token_ids, positions, last_tokens, step, self.whole_prompts)


class WideBest(sampling_cells.BestTokens):
    """Plants a mistake: returns the tokens in the integer type of ArgMaxWithValue, without converting them."""

    def construct(self, logits: Any) -> Any:
        return self.pick(logits)


class OtherBest(sampling_cells.BestTokens):
    def __init__(self, vocab_size: int, part: Any) -> None:
        super().__init__(vocab_size, part)
        self.largest, self.reduce = ops.Argmax(output_type=ms.int32), ops.ReduceMax()

    def construct(self, logits: Any) -> Any:
        return self.largest(logits), self.reduce(logits, -1)


class OwnIds(sampling_cells._BestOfAgents):
    """Plants a mistake: token ids are counted from the first token of the agent that found them."""

    def construct(self, index: Any, value: Any) -> Any:
        agent, best = self.pick(self.gathered(value))
        chosen = self.equal(self.shape(self.cast(agent, ms.int32), (-1, 1)), self.numbers)
        terms = self.multiply(self.cast(self.gathered(index), ms.float32), self.cast(chosen, ms.float32))
        return self.cast(self.sum(terms, -1), ms.int32), best


class OwnBest(sampling_cells.BestTokens):
    """Plants a mistake: each agent takes its own best token."""

    def __init__(self, vocab_size: int, part: Any) -> None:
        super().__init__(vocab_size, part)
        self.choose = None


class SmallestCandidates(sampling_cells._Candidates):
    def construct(self, logits: Any, temperatures: Any) -> Any:
        values = self.cast(logits, ms.float32)
        best, ids = self.top_k(values, self.count, -1, False, True)
        top = self.pick_first(best, self.first, 1)
        scaled = self.mass(self.divide(values, temperatures), self.divide(top, temperatures))
        return best, ids, self.mass(values, top), scaled


class RoundedCandidates(sampling_cells._Candidates):
    def construct(self, logits: Any, temperatures: Any) -> Any:
        values = self.cast(logits, ms.float32)
        rounded, ids = self.top_k(logits, self.count, -1, True, True)
        best = self.cast(rounded, ms.float32)
        top = self.pick_first(best, self.first, 1)
        scaled = self.mass(self.divide(values, temperatures), self.divide(top, temperatures))
        return best, ids, self.mass(values, top), scaled


class CandidatesWithoutTemperature(sampling_cells._Candidates):
    def construct(self, logits: Any, temperatures: Any) -> Any:
        values = self.cast(logits, ms.float32)
        best, ids = self.top_k(values, self.count, -1, True, True)
        top = self.pick_first(best, self.first, 1)
        return best, ids, self.mass(values, top), self.mass(values, top)


class DrawsInAnyOrder(device_draws._Draws):
    """Plants a mistake: candidates with equal logits have equal ranks."""

    def ranked_before(self, scaled: Any, ids: Any) -> Any:
        return self.flags(self.shape(scaled, self.as_row), self.shape(scaled, self.as_column))


class DrawsWithoutTemperature(device_draws._Draws):
    """Plants a mistake: the draw uses the logits as if the temperature were 1."""

    def __init__(self, num_candidates: int, part: Any) -> None:
        super().__init__(num_candidates, part)
        self.divide = ops.Mul()


class TurnedSplit(nn.Cell):
    """Exchanges the columns of the temperature and of ``top_k``."""

    def __init__(self) -> None:
        super().__init__()
        self.split = auto_generate.SplitWithSize()

    def construct(self, draws: Any, sizes: Any, axis: Any) -> Any:
        temperature, top_k, *others = self.split(draws, sizes, axis)
        return (top_k, temperature, *others)


class DrawsWithTurnedColumns(device_draws._Draws):
    """Plants a mistake: the draw divides the logits by ``top_k``."""

    def __init__(self, num_candidates: int, part: Any) -> None:
        super().__init__(num_candidates, part)
        self.split = TurnedSplit()


class DrawsOfEachAgent(device_draws._Draws):
    """Plants a mistake in tensor parallelism: each agent uses the tokens that its own device has drawn."""

    def __init__(self, num_candidates: int, part: Any) -> None:
        super().__init__(num_candidates, part)
        self.agree = None


class DrawsOfOwnIds(device_draws._JoinedCandidates):
    """Plants a mistake in tensor parallelism: ids are counted from the first token of each agent."""

    def whole_ids(self, ids: Any) -> Any:
        return self.by_sequence(ids, self.count)


class DrawsOfOneMass(device_draws._JoinedCandidates):
    """Plants a mistake in tensor parallelism: adds sums of exponentials that have different largest logits."""

    def construct(self, best: Any, ids: Any, masses: Any, temperature: Any) -> Any:
        best, places = self.top_k(self.by_sequence(best, self.count), self.count, -1, True, True)
        return best, self.ids_at(places, self.whole_ids(ids)), self.sum(self.by_sequence(masses, 1), -1)


class DrawsForAll(device_draws._Draws):
    """Plants a mistake: greedy sequences get drawn tokens."""

    def where_drawn(self, drawn: Any, best_ids: Any, is_drawn: Any) -> Any:
        return drawn


class OwnPart(nn.Cell):
    """Plants a mistake in tensor parallelism: returns the agent's own part instead of the sum over all agents."""

    def construct(self, x: Any, step: Any) -> Any:
        return x


class Adapters(native_adapters.AddAdapters):
    """Adds adapters. The class attribute ``mistake`` names a mistake to plant."""

    mistake = ""

    def construct(self, out: Any, x: Any, a: Any, b: Any, step: Any) -> Any:
        rows = step[-1]
        if self.mistake == "other input":
            x = self.add(x, x)
        products = self.expand(self.shrink(x, a, rows), b, rows)
        if self.mistake == "no sum":
            return products
        total = self.add(out, products)
        return self.add(total, out) if self.mistake == "output twice" else total


def adapters(mistake: str) -> Any:
    return patched("AddAdapters", type("Mistaken", (Adapters,), {"mistake": mistake}))


def ends_of_adapters() -> Any:
    """Plants a mistake: the list of groups has the ends of the groups, not their sizes."""
    return mock.patch.object(native_experts, "_SIZES", 0)


def scaled_groups() -> Any:
    """Plants a mistake: the products read another list of groups than the graph's input."""

    class Doubled(native_adapters.AddAdapters):
        def construct(self, out: Any, x: Any, a: Any, b: Any, step: Any) -> Any:
            rows = self.add(step[-1], step[-1])
            return self.add(out, self.expand(self.shrink(x, a, rows), b, rows))

    return patched("AddAdapters", Doubled)


def other_ranks() -> Any:
    """Plants a mistake: the joined layers q, k and v have the ranks of one layer."""
    real = native.NativeOps.adapter_matrices

    def matrices(table: Any, width: int, out: int, num_layers: int = 1) -> Any:
        return real(table, width, out, 1 if num_layers == 3 else num_layers)

    return mock.patch.object(native.NativeOps, "adapter_matrices", matrices)


def adapter_rows_int32() -> Any:
    """Plants a mistake: the input with the rows of each group is int32."""
    return mock.patch.object(
        dynamic_cell._AdaptedStep, "set_inputs",
        lambda cell, *given: nn.Cell.set_inputs(cell, *given[:7], Tensor(shape=(4,), dtype=ms.int32), *given[8:]),
    )  # fmt: skip


def patched(name: str, replacement: Any) -> Any:
    return mock.patch.object(native, name, replacement)


def in_attention(name: str, replacement: Any) -> Any:
    return mock.patch.object(native_attention, name, replacement)


def in_latent(name: str, replacement: Any) -> Any:
    return mock.patch.object(native_latent, name, replacement)


def latent_paged(**changes: Any) -> Any:
    """Makes PagedAttention of latent vectors with other settings."""

    def make(heads: int, scale: float, kv_heads: int, mla_v_dim: int) -> Any:
        given = {"head_num": heads, "scale_value": scale, "kv_head_num": kv_heads, "mla_v_dim": mla_v_dim}
        return auto_generate.PagedAttention(**(given | changes))

    return in_latent("PagedAttention", make)


def in_sampling(name: str, replacement: Any) -> Any:
    return mock.patch.object(sampling_cells, name, replacement)


def in_draws(replacement: Any, name: str = "_Draws") -> Any:
    return mock.patch.object(device_draws, name, replacement)


def plain_linear() -> Any:
    return mock.patch.object(native.NativeOps, "linear", side_effect=lambda width: WithoutTranspose())


def inputs(position: int, tensor: Tensor) -> Any:
    """Returns a patch that replaces the graph's input at ``position`` by a tensor of another type or rank."""
    real = dynamic_cell._DynamicStep.set_inputs

    def set_inputs(cell: nn.Cell, *given: Tensor) -> None:
        real(cell, *given[:position], tensor, *given[position + 1 :])

    return mock.patch.object(dynamic_cell._DynamicStep, "set_inputs", set_inputs)


def wider_vocabulary() -> Any:
    real = native.NativeOps.linear_weight

    def linear_weight(table: Any, width: int, out: int, *, output: bool = False) -> Any:
        return real(table, width, out + 16 if output else out, output=output)

    return mock.patch.object(native.NativeOps, "linear_weight", linear_weight)


def other_cache(shape: tuple[int, ...] | None, dtype: str) -> Any:
    real = native.NativeOps.cache_layout
    return mock.patch.object(
        native.NativeOps,
        "cache_layout",
        lambda *a: (real(*a)[0] if shape is None else tuple(real(*a)[0][i] for i in shape), dtype),
    )


def ones_mask() -> Any:
    mask = np.triu(np.ones((128, 128)), 1)
    return patched("causal_mask", lambda form, dtype: Tensor(mask, ms.float16))


def variables(**changes: str | None) -> Any:
    """Starts the agent with other environment variables. None removes a variable."""
    real = context.environment

    def environment(config: Any) -> dict[str, str]:
        return {name: value for name, value in (real(config) | changes).items() if value is not None}

    return mock.patch.object(context, "environment", environment)


def jit(level: str, infer_boost: str) -> Any:
    return mock.patch.object(context, "jit_config", return_value={"jit_level": level, "infer_boost": infer_boost})


def paged(**settings: Any) -> Any:
    return in_attention("PagedAttention", lambda *given: auto_generate.PagedAttention(*given, **settings))


def unlimited() -> Any:
    """Returns a patch of the agent's start that leaves out the check of the device's limits."""
    return mock.patch.object(ascend_ops, "check_limits")


class HalfMask(native.ChunkMask):
    """Plants a mistake: makes the mask in float16, also if the model has another type."""

    def __init__(self, max_positions: int, dtype: str, *, of_latent: bool) -> None:
        super().__init__(max_positions, "float16", of_latent=of_latent)


class UsualMask(native.ChunkMask):
    """Plants a mistake: in latent attention, hides keys with the mask value of attention over keys and values."""

    def __init__(self, max_positions: int, dtype: str, *, of_latent: bool) -> None:
        super().__init__(max_positions, dtype, of_latent=False)


class TurnedRow(native_latent.LatentAttention):
    """Plants a mistake: the rotated key precedes the latent vector in a row of the cache."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        join = self.join_row
        self.join_row = lambda parts: join((parts[1], parts[0]))


def in_integer_cache(name: str, replacement: Any) -> Any:
    return mock.patch.object(native_integer, name, replacement)


class EarlyBlocks(native_integer.GatheredBlocks):
    """Plants a mistake: gathers the blocks without waiting for the write of the scales."""

    def construct(self, caches: Any, step_blocks: Any, written: Any) -> Any:
        blocks = ops.depend(step_blocks, written[0])
        keys, values, scales = (
            self.gather(caches[0], blocks, 0),
            self.gather(caches[1], blocks, 0),
            self.gather(caches[2], blocks, 0),
        )
        return self.multiplied_out(keys, values, scales, (-1, self.shape(caches[0])[1], *self.sizes))


class ExactPrompts(native_attention.Attention):
    """Plants a mistake: whole prompts attend to keys and values that are not rounded, unlike chunks."""

    def construct(self, qkv: Any, of_heads: Any, rotary: Any, caches: Any, step: Any, whole_prompts: Any) -> Any:
        slot_mapping, _, context_lens, query_lens = step[:4]
        query, key, value = self.split(qkv, self.widths, -1)
        query, key = self.rotate(query, key, rotary[0], rotary[1], context_lens)
        _, _, _, written = self.integer_cache(key, value, caches, slot_mapping)
        query = ops.depend(ops.depend(query, written[0]), written[1])
        return self.flash(query, key, value, None, None, None, self.causal_mask, None, query_lens, query_lens)[3]


class TokenScales(native_integer.IntegerCache):
    """Plants a mistake: all heads of a token have one scale."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.heads = (-1, 1)
        self.head = self.all_heads
        self.copies *= KV_HEADS


class TurnedScales(native_integer.MultipliedOut):
    """Plants a mistake: multiplies keys by the scales of values, and values by those of keys."""

    def construct(self, keys: Any, values: Any, scales: Any, shape: Any) -> Any:
        parts = self.split(self.cast(self.reshape(scales, self.row), ms.float32), self.parts, -1)
        key_scales, value_scales = self.split(self.add(parts[0], parts[1]), self.each, -1)
        return self._product(keys, value_scales, shape), self._product(values, key_scales, shape)


class HalfFloats:
    """Plants a mistake: replaces the type float32 of the products by float16."""

    float32 = ms.float16


def other_scales(dtype: str) -> Any:
    """Plants a mistake: the cache of scales has another type."""

    class Other(native_integer.IntegerCache):
        def __init__(self, form: Any, _: str) -> None:
            super().__init__(form, dtype)

    original = native.NativeOps.scale_layout
    patches = ExitStack()
    patches.enter_context(in_attention("IntegerCache", Other))
    patches.enter_context(
        mock.patch.object(native.NativeOps, "scale_layout", lambda *given: (original(*given)[0], dtype))
    )
    return patches


def short_rows() -> Any:
    """Plants a mistake: rows of scales are not repeated, so that they have 16 bytes."""
    patches = ExitStack()
    for module in (native, native_integer):
        patches.enter_context(mock.patch.object(module, "scale_row_width", lambda heads: 4 * heads))
    patches.enter_context(in_integer_cache("scale_row_copies", lambda heads: 1))
    return patches


class WithoutSinks(native_sinks.SinkAttention):
    """Plants a mistake: the softmax has no sinks."""

    def _with_sinks(self, attended: Any, sums: Any, sinks: Any) -> Any:
        return self.reshape(attended, self.all_heads)


class AddedSinks(native_sinks.SinkAttention):
    """Plants a mistake: adds the sinks to the logarithms of the sums."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.subtract = ops.Add()


class SharedSinks(native_sinks.SinkAttention):
    """Plants a mistake: all query heads of a key-value head have the sink of the first one."""

    def __init__(self, form: Any, dtype: str) -> None:
        super().__init__(form, dtype)
        group = form.num_heads // form.num_kv_heads
        self.first = Tensor(np.repeat(np.arange(form.num_kv_heads) * group, group).astype(np.int32))
        self.gather = ops.Gather()

    def _with_sinks(self, attended: Any, sums: Any, sinks: Any) -> Any:
        return super()._with_sinks(attended, sums, self.gather(sinks, self.first, 0))


class EarlyRead(native_sinks.SinkAttention):
    """Plants a mistake: attention does not wait until the new keys are in the cache."""

    def construct(self, qkv: Any, of_heads: Any, rotary: Any, caches: Any, step: Any, whole_prompts: Any) -> Any:
        query, key, value = self.split(qkv, self.widths, -1)
        query, key = self.rotate(query, key, rotary[0], rotary[1], step[2])
        keys, values = self.reshape(caches[0], self.blocks), self.reshape(caches[1], self.blocks)
        attended, sums = self.attend(
            self.reshape(query, self.one_query), (keys,), (values,), None, rotary[2] if self.has_window else None,
            None, step[2], None, None, None, None, None, None, None, step[1],
        )  # fmt: skip
        written = self.write_cache(key, value, caches[0], caches[1], step[0])
        return ops.depend(self._with_sinks(attended, sums, of_heads[0]), written)


def early_blocks(self: Any, cache: Any, written: Any) -> Any:
    """Plants a mistake: the Reshape of a cache does not wait until the new keys and values are in the cache."""
    return self.reshape(cache, self.blocks)


def sink_attention(**changes: Any) -> Any:
    """Returns a patch that changes attributes of the attention with sinks."""

    def make(form: Any, dtype: str) -> nn.Cell:
        cell = native_sinks.SinkAttention(form, dtype)
        for name, value in changes.items():
            setattr(cell, name, value)
        return cell

    return patched("SinkAttention", make)


def fused_attention(**settings: Any) -> Any:
    """Returns a patch that makes FusedInferAttentionScore with other settings."""
    real = native_sinks.FusedInferAttentionScore
    return mock.patch.object(native_sinks, "FusedInferAttentionScore", lambda **given: real(**(given | settings)))


def rounded_sinks() -> Any:
    """Plants a mistake: the sinks have the type of the activations."""
    real = attention_layer.unbound_parameter

    def parameter(shape: Any, dtype: str) -> Any:
        return real(shape, "bfloat16" if dtype == "float32" else dtype)

    return mock.patch.object(attention_layer, "unbound_parameter", parameter)


class WideWindow(native_sinks.WindowFlags):
    """Plants a mistake: a token also sees the token just before its window."""

    def __init__(self, max_positions: int, window: int) -> None:
        super().__init__(max_positions, window + 1)


class Unclamped(native_sinks.ClampedSwiglu):
    """Plants a mistake: gate and up have no upper limit."""

    def construct(self, both: Any) -> Any:
        width = self.shape(both)[1] // 2
        gate, up = self.split(self.cast(both, ms.float32), (width, width), -1)
        up = self.add(self.maximum(up, self.lowest), self.one)
        gate = self.multiply(gate, self.sigmoid(self.multiply(gate, self.slope)))
        return self.cast(self.multiply(gate, up), self.dtype)


class WithoutOne(native_sinks.ClampedSwiglu):
    """Plants a mistake: adds 0 to up instead of 1."""

    def __init__(self, dtype: str) -> None:
        super().__init__(dtype)
        self.one = Tensor(0.0, ms.float32)


def clamped(replacement: Any) -> Any:
    return mock.patch.object(native_experts, "ClampedSwiglu", replacement)


def fused(flags: str) -> Any:
    """Returns ``CONFIG`` with graph-kernel fusion and these flags."""
    return replace(CONFIG, context=replace(CONFIG.context, enable_graph_kernel=True, graph_kernel_flags=flags))


def flash(**settings: Any) -> Any:
    return in_attention("FlashAttentionScore", lambda **given: auto_generate.FlashAttentionScore(**(given | settings)))


MISTAKES: dict[str, tuple[str, Any, Callable[[], Any]]] = {
    "layout of prefill": ("prefill", CONFIG, lambda: flash(input_layout="BSH")),
    "layout of prefill that fits": ("prefill", CONFIG, lambda: flash(sparse_mode=2)),
    "mask of ones in float16": ("prefill", CONFIG, ones_mask),
    "query heads": ("prefill", SQUARE, lambda: flash(head_num=HEADS // 2)),
    "key-value heads": (
        "decode",
        CONFIG,
        lambda: in_attention("PagedAttention", lambda h, scale, kv: auto_generate.PagedAttention(h, scale, h)),
    ),
    "scale": (
        "decode",
        CONFIG,
        lambda: in_attention("PagedAttention", lambda h, scale, kv: auto_generate.PagedAttention(h, scale * scale, kv)),
    ),
    "cache type": ("decode", CONFIG, lambda: other_cache(None, "bfloat16")),
    "cache layout": ("decode", CONFIG, lambda: other_cache((0, 2, 1, 3), "float16")),
    "slot mapping type": ("decode", CONFIG, lambda: inputs(3, Tensor(shape=(None,), dtype=ms.int64))),
    "block table rank": ("decode", CONFIG, lambda: inputs(4, Tensor(shape=(None,), dtype=ms.int32))),
    "no wait for the cache": ("decode", CONFIG, lambda: patched("Attention", attention(waits=False))),
    "keys for values": ("decode", SQUARE, lambda: patched("Attention", attention(swaps=True))),
    "no query lengths": ("chunked", CONFIG, lambda: patched("Attention", attention(knows_queries=False))),
    "chunk mask": ("chunked", CONFIG, lambda: patched("ChunkMask", Forgetful)),
    "gemma, float32 weights in one kernel": ("decode", GEMMA, lambda: patched("AddThenNorm", native._AddNorm)),
    "gemma, GELU of the error function": ("decode", GEMMA, lambda: patched("GatedGelu", ExactGelu)),
    "gemma, halves exchanged": ("decode", GEMMA, lambda: patched("GatedGelu", TurnedGelu)),
    "gemma, one rotary embedding": ("decode", GEMMA, one_rotary),
    "gemma, gate for up": ("decode", GEMMA, lambda: patched("GatedGelu", GateForUp)),
    "gemma, sum without attention": ("decode", GEMMA, lambda: patched("AddThenNorm", LostSum)),
    "gemma, norms exchanged": ("decode", GEMMA, lambda: mock.patch.object(llama, "DecoderLayer", TurnedNorms)),
    "gemma, epsilon": (
        "decode",
        GEMMA,
        lambda: patched("ResultNorm", lambda epsilon: native_gemma.ResultNorm(10 * epsilon)),
    ),
    "gemma, no norms of results": (
        "decode",
        GEMMA,
        lambda: mock.patch.object(native.NativeOps, "result_norm", return_value=None),
    ),
    "sections, rows for columns": ("chunked", QWEN_VL, lambda: patched("SectionedRotary", TurnedSections)),
    "sections, mask of times": ("chunked", QWEN_VL, lambda: patched("BySequence", MaskByTime)),
    "transposed weight that fits": ("decode", SQUARE, plain_linear),
    "pairs for halves": ("decode", CONFIG, lambda: in_attention("_ROTATE_HALVES", 3)),
    "adapters, no sum": ("decode", ADAPTED, lambda: adapters("no sum")),
    "adapters, output twice": ("decode", ADAPTED, lambda: adapters("output twice")),
    "adapters, other input": ("decode", ADAPTED, lambda: adapters("other input")),
    "adapters, ends of groups": ("decode", ADAPTED, ends_of_adapters),
    "adapters, other groups": ("decode", ADAPTED, scaled_groups),
    "adapters, ranks of one layer": ("decode", ADAPTED, other_ranks),
    "adapters, type of the rows": ("decode", ADAPTED, adapter_rows_int32),
    "names of inputs": ("decode", CONFIG, lambda: mock.patch.dict(dynamic_cell._STEPS, {(False, False): OldNames})),
    "vocabulary": ("decode", CONFIG, wider_vocabulary),
    "int8, no scales of tokens": ("decode", INT8, lambda: in_linear("_DynamicProduct", WithoutTokenScales)),
    "int8, scales of other tokens": ("decode", INT8, lambda: in_linear("_DynamicProduct", ScaledTwice)),
    "int8, type of scales": (
        "decode",
        INT8,
        lambda: other_parameters(lambda found: found | {"scale": (found["scale"][0], "bfloat16")}),
    ),
    "int4, transposed weight": ("decode", INT4, lambda: weight_only(transpose_weight=True)),
    "int4, group size": ("decode", INT4, lambda: weight_only(antiquant_group_size=32)),
    "int4, scales turned round": ("decode", INT4, lambda: other_parameters(short_scales)),
    "int4, bytes for pairs": (
        "decode",
        INT4,
        lambda: other_parameters(lambda found: found | {"weight": (found["weight"][0], "int8")}),
    ),
    "int8 weights, scales for offsets": (
        "decode",
        INT8_WEIGHTS,
        lambda: in_linear("_WeightOnlyProduct", ScaleForOffset),
    ),
    "int8 weights, no transpose": ("decode", INT8_WEIGHTS, lambda: weight_only(transpose_weight=False)),
    "static, offsets of integers": ("decode", STATIC, lambda: other_type("input_offset", "int8")),
    "static, type of input scales": ("decode", STATIC, lambda: other_type("input_scale", "float32")),
    "static, type of sum offsets": ("decode", STATIC, lambda: other_type("sum_offset", "float32")),
    "static, results in float16": ("decode", STATIC, lambda: in_linear("_StaticProduct", HalfProducts)),
    "static, no sum offsets": ("decode", STATIC, lambda: in_linear("_StaticProduct", WithoutSumOffsets)),
    "static, offsets for scales": ("decode", STATIC, lambda: in_linear("_StaticProduct", OffsetsForScales)),
    "outputs": ("decode", CONFIG, lambda: mock.patch.dict(dynamic_cell._STEPS, {(False, False): OnlyLogits})),
    "best tokens of other type": ("decode", CONFIG, lambda: mock.patch.object(dynamic_cell, "BestTokens", WideBest)),
    "best tokens by another primitive": (
        "decode",
        CONFIG,
        lambda: mock.patch.object(dynamic_cell, "BestTokens", OtherBest),
    ),
    "best tokens of one agent": ("decode", PAIR, lambda: mock.patch.object(dynamic_cell, "BestTokens", OwnBest)),
    "best tokens, ids of an agent's part": ("decode", PAIR, lambda: in_sampling("_BestOfAgents", OwnIds)),
    "candidates, too few": ("candidates", CONFIG, lambda: in_sampling("num_candidates", lambda *_: 32)),
    "candidates, smallest": ("candidates", CONFIG, lambda: in_sampling("_Candidates", SmallestCandidates)),
    "candidates, rounded logits": ("candidates", CONFIG, lambda: in_sampling("_Candidates", RoundedCandidates)),
    "candidates, no mass at the temperature": (
        "candidates",
        CONFIG,
        lambda: in_sampling("_Candidates", CandidatesWithoutTemperature),
    ),
    "candidates, parts not gathered": ("candidates", PAIR, lambda: in_sampling("_gather", lambda part: None)),
    "draws, equal logits in any order": ("draws", CONFIG, lambda: in_draws(DrawsInAnyOrder)),
    "draws, no temperature": ("draws", CONFIG, lambda: in_draws(DrawsWithoutTemperature)),
    "draws, columns exchanged": ("draws", CONFIG, lambda: in_draws(DrawsWithTurnedColumns)),
    "draws, greedy sequences too": ("draws", CONFIG, lambda: in_draws(DrawsForAll)),
    "draws, tokens of each agent": ("draws", PAIR, lambda: in_draws(DrawsOfEachAgent)),
    "draws, ids of an agent's part": ("draws", PAIR, lambda: in_draws(DrawsOfOwnIds, "_JoinedCandidates")),
    "draws, sums of different scales": ("draws", PAIR, lambda: in_draws(DrawsOfOneMass, "_JoinedCandidates")),
    "int8, sums of an agent's part": ("decode", INT8_PAIR, lambda: mock.patch.object(native.parallel, "Sum", OwnPart)),
    "int4, scales of the whole": ("decode", INT4_PAIR, lambda: other_parameters(scales_of_all)),
    "experts, scales of other rows": ("decode", INT8_MOE, lambda: in_experts("_DynamicProducts", RowsScaledTwice)),
    "experts, type of scales": (
        "decode",
        BFLOAT16_MOE,
        lambda: other_expert_parameters(lambda found: found | {"scale": (found["scale"][0], "float32")}),
    ),
    "experts, weights the other way round": (
        "decode",
        INT8_MOE,
        lambda: other_expert_parameters(
            lambda found: found | {"weight": (tuple(found["weight"][0][i] for i in (0, 2, 1)), "int8")}
        ),
    ),
    "experts, scales turned round": ("decode", INT4_MOE, lambda: other_expert_parameters(turned_scales)),
    "experts, bytes for pairs": (
        "decode",
        INT4_MOE,
        lambda: other_expert_parameters(lambda found: found | {"weight": (found["weight"][0], "int8")}),
    ),
    "experts, no offsets": ("decode", INT8_WEIGHTS_MOE, lambda: in_experts("_WeightOnlyProducts", WithoutOffsets)),
    "experts, ends of groups": ("prefill", MOE, lambda: in_experts("_FloatProducts", EndsOfGroups)),
    "experts, running sums": ("chunked", INT4_MOE, lambda: in_experts("_COUNTS", 1)),
    "experts, sums of an agent's part": (
        "decode",
        INT8_MOE_PAIR,
        lambda: mock.patch.object(native.parallel, "Sum", OwnPart),
    ),
    "sums of an agent's part": ("decode", PAIR, lambda: mock.patch.object(native.parallel, "Sum", OwnPart)),
    "kernels, no list of disabled ones": (
        "decode",
        CONFIG,
        lambda: variables(MS_INTERNAL_DISABLE_CUSTOM_KERNEL_LIST=None),
    ),
    "kernels, another one disabled": (
        "chunked",
        CONFIG,
        lambda: variables(MS_INTERNAL_DISABLE_CUSTOM_KERNEL_LIST="FlashAttentionScore"),
    ),
    "kernels, trapezoidal mask": ("decode", CONFIG, lambda: paged(mask_mode="TRAPEZOIDAL")),
    "kernels, latent cache": ("decode", CONFIG, lambda: paged(mla_v_dim=16)),
    "kernels, sparse mode of a band": ("prefill", CONFIG, lambda: flash(sparse_mode=4)),
    "kernels, running sums": ("prefill", CONFIG, lambda: flash(input_layout="TND")),
    "kernels, ND experts": ("decode", INT8_MOE, lambda: variables(MS_INTERNAL_ENABLE_NZ_OPS=None)),
    "kernels, heads of 24": ("decode", with_sizes(24, 16), unlimited),
    "kernels, heads of 288": ("decode", with_sizes(288, 16), unlimited),
    "kernels, blocks of 48": ("decode", with_sizes(32, 48), unlimited),
    "kernels, large blocks": ("decode", with_sizes(256, 128), unlimited),
    "kernels, type of the chunk mask": ("chunked", BFLOAT16, lambda: patched("ChunkMask", HalfMask)),
    "fusion, attention in a cluster": ("decode", fused("--enable_cluster_ops=Add,PagedAttention"), nullcontext),
    "fusion, unknown flag": ("decode", fused("--enable_paralel_fusion=true"), nullcontext),
    "fusion, level 0": ("decode", fused("--opt_level=0"), nullcontext),
    "latent, usual mask": ("chunked", DEEPSEEK, lambda: patched("ChunkMask", UsualMask)),
    "latent, halves for pairs": ("decode", DEEPSEEK, lambda: in_latent("_ROTATE_PAIRS", 2)),
    "latent, turned row": ("decode", DEEPSEEK, lambda: patched("LatentAttention", TurnedRow)),
    "latent, scale of the cached rows": ("decode", DEEPSEEK, lambda: latent_paged(scale_value=576**-0.5)),
    "latent, whole rows as values": ("decode", DEEPSEEK, lambda: latent_paged(mla_v_dim=0)),
    "latent, more key-value heads": ("decode", DEEPSEEK, lambda: latent_paged(kv_head_num=16)),
    "latent, groups by their best expert": (
        "decode",
        DEEPSEEK,
        lambda: mock.patch.object(native_experts, "_SUMMED_OF_GROUP", 1),
    ),
    "latent, undefined rows": (
        "decode",
        DEEPSEEK_PAIR,
        lambda: mock.patch.object(native_experts, "NanToNum", return_value=nn.Identity()),
    ),
    "latent, rows of 592": ("decode", WIDE_DEEPSEEK, unlimited),
    "groups, divided weights": ("decode", LIMITED, lambda: in_experts("_LimitedRouter", DividedShares)),
    "groups, no factor": ("decode", LIMITED, lambda: in_experts("_LimitedRouter", UnscaledShares)),
    "groups, early factor": ("decode", LIMITED, lambda: in_experts("Softmax", EarlyFactor)),
    "groups, softmax of the chosen ones": ("decode", LIMITED, lambda: in_experts("_LimitedRouter", LateSoftmax)),
    "groups, ranked by sums": ("decode", LIMITED, lambda: in_experts("_LimitedRouter", SummedGroups)),
    "groups, scattered": ("decode", LIMITED, scattered_groups),
    "int8 cache, blocks before the write": (
        "decode",
        INT8_CACHE,
        lambda: in_attention("GatheredBlocks", EarlyBlocks),
    ),
    "int8 cache, exact keys of prompts": ("prefill", INT8_CACHE, lambda: patched("Attention", ExactPrompts)),
    "int8 cache, one scale for a token": ("decode", INT8_CACHE, lambda: in_attention("IntegerCache", TokenScales)),
    "int8 cache, scales of values for keys": (
        "decode",
        INT8_CACHE,
        lambda: in_integer_cache("MultipliedOut", TurnedScales),
    ),
    "int8 cache, products in float16": ("chunked", INT8_CACHE, lambda: in_integer_cache("ms", HalfFloats)),
    "int8 cache, float32 scales": ("decode", INT8_CACHE, lambda: other_scales("float32")),
    "int8 cache, short rows of scales": ("decode", INT8_CACHE, short_rows),
    "sinks, left out": ("chunked", GPT_OSS, lambda: patched("SinkAttention", WithoutSinks)),
    "sinks, added": ("chunked", GPT_OSS, lambda: patched("SinkAttention", AddedSinks)),
    "sinks, of key-value heads": ("chunked", GPT_OSS, lambda: patched("SinkAttention", SharedSinks)),
    "sinks, rounded": ("chunked", GPT_OSS, rounded_sinks),
    "sinks, no wait for the cache": ("chunked", GPT_OSS, lambda: patched("SinkAttention", EarlyRead)),
    "sinks, no wait of the caches": (
        "chunked",
        GPT_OSS,
        lambda: mock.patch.object(native_sinks.SinkAttention, "_written_blocks", early_blocks),
    ),
    "sinks, window of one more token": ("chunked", GPT_OSS, lambda: patched("WindowFlags", WideWindow)),
    "sinks, window in every layer": ("chunked", GPT_OSS, lambda: sink_attention(has_window=True)),
    "sinks, no window": ("chunked", GPT_OSS, lambda: sink_attention(has_window=False)),
    "sinks, cache with heads": ("chunked", GPT_OSS, lambda: sink_attention(blocks=(-1, 128, 8, 64))),
    "sinks, key-value heads": ("chunked", GPT_OSS, lambda: fused_attention(num_key_value_heads=64)),
    "sinks, no sums": ("chunked", GPT_OSS, lambda: fused_attention(softmax_lse_flag=False)),
    "sinks, gate without a limit": ("chunked", GPT_OSS, lambda: clamped(Unclamped)),
    "sinks, up without 1": ("chunked", GPT_OSS, lambda: clamped(WithoutOne)),
    "sinks, no biases of experts": (
        "chunked",
        GPT_OSS,
        lambda: mock.patch.object(native.NativeOps, "expert_bias", return_value=None),
    ),
    "sinks, rounded biases": ("chunked", GPT_OSS, lambda: patched("expert_bias_type", lambda dtype: dtype)),
    "kernels, graph kernel level": ("decode", CONFIG, lambda: jit("O1", "off")),
}


def findings(kind: str, config: Any) -> list[str]:
    """Returns the errors that the rules find in a graph, or the error of MindSpore if the graph does not compile."""
    try:
        graph = dict(compile_graphs(config, [kind], forms_for(config)))[kind]
    except (RuntimeError, TypeError, ValueError) as error:
        return [f"refused: {str(error).strip().splitlines()[0]}"]
    return check_graph(kind, graph, config, forms_for(config))


@cache
def plain_graph(kind: str) -> Any:
    """Returns the graph of ``CONFIG`` without a mistake. Several checks share it."""
    return dict(compile_graphs(CONFIG, [kind]))[kind]


TOGETHER = (
    ("key-value heads", "pairs for halves", "best tokens by another primitive", "kernels, no list of disabled ones"),
    ("scale", "slot mapping type", "no wait for the cache", "outputs", "kernels, graph kernel level"),
    ("keys for values", "transposed weight that fits"),
    ("sections, rows for columns", "sections, mask of times"),
    ("gemma, float32 weights in one kernel", "gemma, halves exchanged", "gemma, one rotary embedding"),
    ("gemma, gate for up", "gemma, sum without attention", "gemma, norms exchanged", "gemma, epsilon"),
    ("sums of an agent's part", "best tokens of one agent"),
    ("adapters, other input", "adapters, ranks of one layer"),
    ("mask of ones in float16", "kernels, sparse mode of a band"),
    ("candidates, too few", "candidates, rounded logits"),
    ("static, offsets of integers", "static, no sum offsets"),
    ("latent, turned row", "latent, groups by their best expert"),
    ("groups, divided weights", "groups, early factor", "groups, scattered"),
    ("int8 cache, blocks before the write", "int8 cache, scales of values for keys"),
    ("sinks, left out", "sinks, window of one more token", "sinks, gate without a limit", "sinks, rounded biases"),
    ("sinks, of key-value heads", "sinks, up without 1", "sinks, no biases of experts", "sinks, no wait of the caches"),
)
"""Mistakes in different parts of the same graph. ``make test`` plants the mistakes of a group in one graph, because the
compilation takes long. Each mistake has its own error. ``make test-sweeps`` plants them one at a time."""


def planted(*names: str) -> list[str]:
    """Returns the errors found in a graph with these mistakes. All of them are mistakes in the same graph."""
    kind, config, _ = MISTAKES[names[0]]
    with ExitStack() as patches:
        for name in names:
            assert MISTAKES[name][0] == kind, name
            assert MISTAKES[name][1] is config, name
            patches.enter_context(MISTAKES[name][2]())
        return findings(kind, config)


@cache
def planted_together(names: tuple[str, ...]) -> list[str]:
    return planted(*names)


class Turned(nn.Cell):
    """Exchanges keys and values. No rule finds this mistake, because all shapes match."""

    def __init__(self) -> None:
        super().__init__()
        self.split = auto_generate.SplitWithSize()

    def construct(self, qkv: Any, widths: Any, axis: Any) -> Any:
        query, key, value = self.split(qkv, widths, axis)
        return query, value, key


def only_on_one_device(kind: str) -> list[str]:
    """Compares the graph for an Ascend with the graph for a CPU that has native operators.

    Returns the lines that are in the text of only one of the two graphs.
    """
    on_cpu = replace(CONFIG, model_config=replace(CONFIG.model_config, device_target="CPU"))
    ascend, cpu = list_graph(plain_graph(kind)), list_graph(dict(compile_graphs(on_cpu, [kind]))[kind])
    return [
        *(f"Ascend: {line}" for line in ascend if line not in cpu),
        *(f"CPU: {line}" for line in cpu if line not in ascend),
    ]


def fusions() -> list[str]:
    """Compiles the graph for prompts in chunks, with the fusion of operators (graph kernels) switched on.

    Returns the errors that the rules find, and the predicted fusions of MindSpore.
    """
    config = fused("--enable_parallel_fusion=true")
    graphs = [plain_graph("chunked"), dict(compile_graphs(config, ["chunked"]))["chunked"]]
    assert list_graph(graphs[0]) == list_graph(graphs[1]), "MindSpore fuses after its front end"
    return [
        *check_graph("chunked", graphs[1], config, forms_of(config)),
        *predicted_fusions(graphs[1], "--opt_level=2"),
    ]


def listing() -> list[str]:
    return list_graph(dict(compile_graphs(SQUARE, ["decode"]))["decode"])


def turned_listing() -> list[str]:
    with in_attention("SplitWithSize", Turned):
        return listing()


KINDS = ("prefill", "chunked", "decode")
ALONE = (CONFIG, STATIC_QWEN2)
SHARED = (PAIR, STAGES)
EXPERTS = (INT4_MOE, LIMITED_PAIR)
SEPARATE = (MISTRAL, INT8, INT4, SQUARE, QWEN2, QWEN3, STATIC, MOE, INT8_MOE, DEEPSEEK, LIMITED, INT8_WEIGHTS)
"""Configs with single settings, which a config above combines. Only ``make test-sweeps`` compiles them without a
mistake.
"""
COMBINED = (
    *(INT8_CACHE_PAIR, INT8_PAIR, INT4_PAIR, STATIC_PAIR, BFLOAT16_MOE),
    *(INT8_MOE_PAIR, INT4_MOE_PAIR, INT8_WEIGHTS_MOE, INT8_DEEPSEEK, DEEPSEEK_PAIR),
)
"""Combinations of the settings of the configs above. Only ``make test-sweeps`` compiles them without a mistake."""


def right(kinds: Sequence[str], configs: Sequence[Any]) -> list[str]:
    """Returns the errors found in graphs without a mistake."""
    pairs = [(kind, config) for config in configs for kind in kinds]
    plain = [check_graph(kind, plain_graph(kind), CONFIG, forms_of(CONFIG)) for kind, each in pairs if each is CONFIG]
    others = [findings(kind, each) for kind, each in pairs if each is not CONFIG]
    return [line for lines in (*plain, *others) for line in lines]


def main() -> None:
    """Prints the findings as JSON. Each argument names a planted mistake or a group of checks.

    If the first argument is ``--alone``, each mistake is planted alone.
    """
    set_up()
    checks: dict[str, Callable[[], list[str]]] = {
        "right": lambda: (
            right(("decode",), (*ALONE, PAIR, *EXPERTS, ADAPTED_MOE))
            + right(("candidates", "rows", "draws"), (PAIR,))
            + right(KINDS[:2], (CONFIG,))
            + right(("chunked",), (INT8_CACHE, DEEPSEEK, QWEN_VL, GEMMA, GPT_OSS))
        ),
        "right, more": lambda: (
            right(("decode",), (STAGES, ADAPTED))
            + right(("prefill", "decode"), (INT8_CACHE,))
            + right(("candidates", "rows", "draws"), (CONFIG,))
            + right(("chunked",), (INT8_MOE,))
            + right(KINDS[:2], (*ALONE[1:], *SHARED, MISTRAL, INT8, INT4, SQUARE, QWEN2, QWEN3, STATIC, INT8_WEIGHTS))
            + right(KINDS[:2], (INT8_PAIR, INT4_PAIR, STATIC_PAIR))
            + right(("decode",), (*SEPARATE, *COMBINED, ADAPTED_QWEN2))
            + right(("chunked",), (INT8_DEEPSEEK, INT8_WEIGHTS_GPT_OSS, GPT_OSS_PAIR, ADAPTED_GPT_OSS))
            + right(("prefill", "decode"), (QWEN_VL, GEMMA))
            + right(("prefill",), (INT8_MOE,))
            + right(KINDS[1:], (ADAPTED_DEEPSEEK, ADAPTED_CACHE))
        ),
        "names": lambda: list(MISTAKES),
        "fusions": fusions,
        "listing": listing,
        "turned listing": turned_listing,
        **{f"devices, {kind}": lambda kind=kind: only_on_one_device(kind) for kind in KINDS},  # type: ignore[misc]
    }
    names = [name for name in sys.argv[1:] if name != "--alone"]
    together = {name: group for group in TOGETHER for name in group if "--alone" not in sys.argv}
    results = {
        name: planted_together(together.get(name, (name,))) if name in MISTAKES else checks[name]() for name in names
    }
    sys.stdout.write("\n" + json.dumps(results) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
    os._exit(0)  # ends the process without waiting for MindSpore's threads
