"""Checks a compiled graph against the public documentation (sources: docs/ascend.md).

A golden listing only shows that a graph has changed. A graph that breaks one of these rules cannot be correct.
``tools.ascend_graph.kernels`` has further rules, which depend on the kernels that a device selects.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from agent.backends.ascend import context
from agent.group.model_part import ModelPart
from agent.lora.stacked import StackedSizes
from agent.weights.forms import LinearForms
from llm_serving.config import Config
from tools.ascend_graph.adapters import ADAPTER_PRIMITIVES, AdapterRules
from tools.ascend_graph.experts import EXPERT_PRIMITIVES, ExpertRules
from tools.ascend_graph.fusions import flag_problems
from tools.ascend_graph.gemma import GEMMA_PRIMITIVES, GemmaRules
from tools.ascend_graph.integer_cache import (
    INTEGER_CACHE_INPUTS,
    INTEGER_CACHE_PRIMITIVES,
    IntegerCacheRules,
)
from tools.ascend_graph.kernels import DeviceSettings, KernelRules
from tools.ascend_graph.latent import LATENT_PRIMITIVES, LatentRules
from tools.ascend_graph.listing import Wiring
from tools.ascend_graph.mind_ir import Graph, Node, Operand, TensorType
from tools.ascend_graph.products import PRODUCTS, TYPES, ProductRules
from tools.ascend_graph.sampling import KINDS as SAMPLING_KINDS
from tools.ascend_graph.sampling import sampling_problems
from tools.ascend_graph.sections import POSITIONS, SECTION_PRIMITIVES, SectionRules
from tools.ascend_graph.sinks import SINK_PRIMITIVES, SinkRules

PRIMITIVES = frozenset(
    {
        "Add",
        "AddRmsNorm",
        "ApplyRotaryPosEmb",
        "ArgMaxWithValue",
        "Cast",
        "Depend",
        "DynamicQuantExt",
        "FlashAttentionScore",
        "Gather",
        "Greater",
        "MatMul",
        "Mul",
        "PagedAttention",
        "QuantBatchMatmul",
        "QuantV2",
        "Reshape",
        "ReshapeAndCache",
        "RmsNorm",
        "SplitWithSize",
        "Swiglu",
        "TensorToTuple",
        "WeightQuantBatchMatmul",
    }
)
"""All allowed primitives. docs/ascend.md has a table of them."""
SHARING_PRIMITIVES = frozenset(
    {"AllGather", "AllReduce", "Equal", "Maximum", "Minimum", "ReduceSum", "Sub", "Transpose"}
)
"""Primitives that the graphs use only if several agents share the model (docs/parallel.md).

These primitives add and gather results, look up embeddings that are divided among agents, and choose among all agents'
best tokens.
"""

_INPUTS = {
    "token_ids": 1,
    "positions": 1,
    "last_tokens": 1,
    "slot_mapping": 1,
    "block_tables": 2,
    "batch_valid_length": 1,
    "q_seq_lens": 1,
}
_INSERTED_INPUTS = {"earlier_ids": 1, "places": 1, "inserted": 1}
"""Further inputs, which ``agent.run_ahead.cells`` adds. Graphs of pipeline stages do not have them."""
_TH = 5
"""The value of FlashAttentionScore's setting ``input_layout`` that stands for the layout TH (MindSpore 2.9)."""
_MASKED = -10000.0
"""Value of a masked position in float16. In bfloat16, this value is 1."""


def check_graph(kind: str, graph: Graph, config: Config, forms: LinearForms) -> list[str]:
    """Returns the errors of a graph, one line each.

    If several agents share the model, ``graph`` is a graph of the first agent. ``forms`` are the layouts of the linear
    layers' weights.
    """
    if kind in SAMPLING_KINDS:
        return list(sampling_problems(kind, graph, config))
    return list(_Rules(kind, graph, config, forms).problems())


class _Rules:
    def __init__(self, kind: str, graph: Graph, config: Config, forms: LinearForms) -> None:
        self._kind, self._graph, self._config = kind, graph, config
        self._part = ModelPart.of(config)
        self._shape = self._part.narrow(config).shape
        self._wiring = Wiring(graph)
        self._calls = list(self._wiring.calls())
        self._dtype = TYPES[config.model_config.model_dtype]
        self._products = ProductRules(self._wiring, forms, config.model_config.model_dtype)
        self._experts = ExpertRules(self._wiring, forms.experts, self._shape, config.model_config.model_dtype)
        self._settings = DeviceSettings(context.environment(config), context.jit_config(config))
        self._kernels = KernelRules(self._wiring, self._type, self._settings)
        self._floats = forms.layers.format == "float"
        latent = self._shape.latent
        self._latent = (
            None if latent is None else LatentRules(self._wiring, self._type, self._shape, latent, self._dtype)
        )
        heads, kv_heads, dim = self._shape.num_attention_heads, self._shape.num_key_value_heads, self._shape.head_dim
        self._query, self._key = heads * dim, kv_heads * dim
        self._sections = SectionRules(self._wiring, self._shape) if self._shape.rotary_sections else None
        self._takes_rows = self._shape.vision is not None
        self._gemma = GemmaRules(self._wiring, self._shape, self._dtype) if self._shape.gemma is not None else None
        sizes = StackedSizes.of_config(config)
        self._sinks = None
        if self._shape.sinks:
            self._sinks = SinkRules(self._wiring, self._type, self._shape, config, self._dtype)
        self._adapters = None if sizes is None else AdapterRules(self._wiring, sizes, self._shape, self._dtype)
        self._integer_cache = None
        if config.gathers_blocks:
            self._integer_cache = IntegerCacheRules(
                self._wiring, self._type, self._shape, config.pa_config, self._dtype
            )

    def problems(self) -> Iterator[str]:
        yield from self._check_inputs()
        yield from self._check_primitives()
        yield from self._check_parameters()
        yield from flag_problems(self._settings.environment.get("MS_DEV_GRAPH_KERNEL_FLAGS", ""))
        checks = {
            "ReshapeAndCache": self._check_cache_write,
            "PagedAttention": self._check_paged_attention,
            "FlashAttentionScore": self._check_flash_attention,
            "ApplyRotaryPosEmb": self._check_rotary,
            "AddRmsNorm": self._check_norm,
            "RmsNorm": self._check_norm,
        } | dict.fromkeys(PRODUCTS, self._products.problems)
        checks |= self._experts.checks
        if self._latent is not None:
            checks |= self._latent.checks | {"PagedAttention": self._check_latent_attention}
        if self._sections is not None:
            checks["Greater"] = self._sections.mask_problems
        checks |= {} if self._gemma is None else self._gemma.checks
        checks |= {} if self._sinks is None else self._sinks.checks
        for node in self._calls:
            check = self._experts.router_problems if self._experts.is_router(node) else checks.get(node.primitive)
            if self._adapters is not None and self._adapters.is_adapter(node):
                check = self._adapters.problems
            for problem in (*(check(node) if check is not None else ()), *self._kernels.problems(node)):
                yield f"{node.primitive} of {_where(node)}: {problem}"

    def _check_inputs(self) -> Iterator[str]:
        gathers = self._integer_cache is not None and self._kind != "prefill"
        ranks = _INPUTS | (INTEGER_CACHE_INPUTS if gathers else {})
        ranks |= _INSERTED_INPUTS if self._part.may_run_ahead else {}
        wanted = {name: TensorType("i32", (-1,) * rank) for name, rank in ranks.items()}
        if self._takes_rows:
            wanted["token_ids"] = TensorType(self._dtype, (-1, self._shape.hidden_size))
        wanted |= {} if self._sections is None else {"positions": POSITIONS}
        wanted |= {} if self._adapters is None else self._adapters.inputs
        if self._graph.inputs != wanted:
            yield f"the graph's inputs are {_types(self._graph.inputs)}; an Ascend's are {_types(wanted)}"
        is_last = self._part.shard.is_last_stage
        width = self._part.vocab_stride if is_last else self._shape.hidden_size
        wanted_outputs: tuple[TensorType, ...] = (TensorType(self._dtype, (-1, width)),)
        if is_last:
            wanted_outputs += (TensorType("i32", (-1,)), TensorType(self._dtype, (-1,)))
        if self._graph.outputs != wanted_outputs:
            what = "logits, best tokens and their logits" if is_last else "the stream"
            yield (
                f"the graph gives {list(map(str, self._graph.outputs))}; it must give {what}: "
                f"{list(map(str, wanted_outputs))}"
            )

    def _check_primitives(self) -> Iterator[str]:
        names = [node.primitive for node in self._calls]
        known = PRIMITIVES | (SHARING_PRIMITIVES if self._part.is_split else frozenset())
        known |= frozenset() if self._shape.experts is None else EXPERT_PRIMITIVES
        known |= frozenset() if self._latent is None else LATENT_PRIMITIVES
        known |= frozenset() if self._adapters is None else ADAPTER_PRIMITIVES
        known |= frozenset() if self._sections is None else SECTION_PRIMITIVES
        known |= frozenset() if self._gemma is None else GEMMA_PRIMITIVES
        known |= frozenset() if self._integer_cache is None else INTEGER_CACHE_PRIMITIVES
        known |= frozenset() if self._sinks is None else SINK_PRIMITIVES
        for name in sorted(set(names) - known):
            yield f"the primitive {name} is not one whose kernels are known to be right on an Ascend"
        layers, routers, shared = self._shape.num_layers, self._experts.num_routers, self._experts.num_shared
        attention = "FlashAttentionScore" if self._kind == "prefill" else "PagedAttention"
        counts = {attention: layers, "ReshapeAndCache": layers, "ApplyRotaryPosEmb": layers}
        counts["Swiglu"] = layers + shared
        norms = 1 + (2 * layers if self._shape.query_key_norm else 0)
        is_last, is_split = self._part.shard.is_last_stage, self._part.is_split
        biases = 0 if self._products.hold_biases else self._shape.attention_bias + self._shape.output_bias
        shares_best = is_last and is_split  # the agents choose among their best tokens (``agent.device_sampling``)
        adds = layers * biases + (not is_last) + self._part.may_run_ahead + shared + shares_best
        counts |= {"RmsNorm": norms, "AddRmsNorm": 2 * layers - (not is_last), "Add": adds}
        counts |= {"AllReduce": (2 * layers + 1) * is_split, "AllGather": 2 * shares_best}
        counts |= {"ArgMaxWithValue": is_last + shares_best + self._experts.num_group_choices}
        of_attention = 2 if self._latent is None else self._latent.num_products
        products = of_attention * layers + 2 * (layers - routers + shared)
        counts |= self._products.counts(products, with_output=is_last) | self._experts.counts()
        counts |= {} if self._latent is None else self._latent.counts()
        for name, each in (("ReduceSum", 1), ("Transpose", 2)):
            counts[name] = counts.get(name, 0) + each * shares_best
        others = self._experts.num_quantised_inputs
        counts |= {"MatMul": counts["MatMul"] + routers, "DynamicQuantExt": counts["DynamicQuantExt"] + others}
        if self._gemma is not None:
            counts |= self._gemma.counts(is_last=is_last)
            counts["Add"] += self._gemma.num_sums(is_last=is_last)
        if self._sinks is not None:
            counts |= self._sinks.counts(is_split=is_split)
            counts["Add"] += self._sinks.num_sums
        for rules in (self._integer_cache, self._adapters):
            for name, more in (rules.counts() if rules is not None else {}).items():
                counts[name] += more
        for name, count in counts.items():
            if names.count(name) != count:
                yield f"{names.count(name)} x {name} for {layers} layers; there should be {count}"

    def _check_parameters(self) -> Iterator[str]:
        shape = self._shape
        weights: dict[str, tuple[int, ...]] = {
            "attention.qkv.weight": (self._query + 2 * self._key, shape.hidden_size),
            "attention.output.weight": (shape.hidden_size, self._query),
        }
        always: dict[str, tuple[int, ...]] = {}
        if self._latent is not None:
            weights, always = self._latent.float_weights(), self._latent.weights()
        mlp = {
            "mlp.gate_up.weight": (2 * shape.intermediate_size, shape.hidden_size),
            "mlp.down.weight": (shape.hidden_size, shape.intermediate_size),
        }
        names = ["input_norm", "post_attention_norm"]
        names += [] if self._gemma is None else ["attention_result_norm", "mlp_result_norm"]
        norm_type = TensorType(TYPES[shape.norm_dtype or self._config.model_config.model_dtype], (shape.hidden_size,))
        for layer in range(shape.num_layers):
            # The weights of experts and integer weights are checked with their matrix products.
            linears = (weights if shape.has_experts(layer) else weights | mlp) if self._floats else {}
            for name in names:
                full = f"layers.{layer}.{name}.weight"
                yield from _differs(full, self._graph.parameters.get(full), norm_type)
            for name, sizes in (linears | always).items():
                full = f"layers.{layer}.{name}"
                yield from _differs(full, self._graph.parameters.get(full), TensorType(self._dtype, sizes))
        table = TensorType(self._dtype, (self._part.vocab_stride, shape.hidden_size))
        if self._takes_rows and not shape.tie_word_embeddings:
            return  # the agent embeds the tokens
        yield from _differs("embedding.weight", self._graph.parameters.get("embedding.weight"), table)

    def _check_cache_write(self, node: Node) -> Iterator[str]:
        if self._integer_cache is not None:
            yield from self._integer_cache.write_problems(node)
            return
        key, value, key_cache, value_cache, slots = self._wiring.operands(node)
        for name, operand in (("key", key), ("value", value)):
            yield from _differs(name, self._type(operand), TensorType(self._dtype, (-1, self._key)))
        for name, operand in (("key_cache", key_cache), ("value_cache", value_cache)):
            yield from self._cache_problems(node, name, operand)
        if self._input(slots) != "slot_mapping":
            yield f"slot_mapping is {slots.name or slots.kind}, not the graph's input of that name"

    def _check_paged_attention(self, node: Node) -> Iterator[str]:
        operands = self._wiring.operands(node)
        if self._integer_cache is not None:
            yield from self._integer_cache.read_problems(node)
        else:
            for name, operand in (("key_cache", operands[1]), ("value_cache", operands[2])):
                yield from self._cache_problems(node, name, operand)
        yield from _differs("query", self._type(operands[0]), TensorType(self._dtype, (-1, self._query)))
        yield from self._step_problems(operands)
        heads = (self._shape.num_attention_heads, self._shape.num_key_value_heads)
        if (operands[10].value, operands[12].value) != heads:
            yield f"head_num and kv_head_num are {operands[10].value} and {operands[12].value}; the model has {heads}"
        yield from self._scale_problems(operands[11])
        yield from self._order_problems(node, operands[0])

    def _check_latent_attention(self, node: Node) -> Iterator[str]:
        assert self._latent is not None, "only latent attention is checked here"
        operands = self._wiring.operands(node)
        yield from self._step_problems(operands)
        yield from self._latent.checks["PagedAttention"](node)
        yield from self._order_problems(node, operands[0])

    def _step_problems(self, operands: list[Operand]) -> Iterator[str]:
        """Yields the errors in PagedAttention's operands that describe the step: tables, lengths and the mask."""
        for index, name in ((3, "block_tables"), (4, "batch_valid_length"), (8, "q_seq_lens")):
            if self._input(operands[index]) != name:
                yield f"argument {index} must be the graph's input {name}"
        positions = self._config.max_blocks_per_seq * self._config.pa_config.block_size
        wanted_mask = (-1, positions) if self._kind == "chunked" else (1, 1)
        yield from _differs("attn_mask", self._type(operands[7]), TensorType(self._dtype, wanted_mask))

    def _check_flash_attention(self, node: Node) -> Iterator[str]:
        operands = self._wiring.operands(node)
        for index, width in ((0, self._query), (1, self._key), (2, self._key)):
            wanted = TensorType(self._dtype, (-1, width))
            yield from _differs(("query", "key", "value")[index], self._type(operands[index]), wanted)
        if self._integer_cache is not None:
            yield from self._integer_cache.prompt_problems(node)
        yield from self._compressed_mask_problems(operands[6])
        for index, name in ((8, "q_seq_lens"), (9, "batch_valid_length")):
            if self._lengths(operands[index]) not in ("q_seq_lens", "batch_valid_length"):
                yield f"argument {index} must come from the graph's input {name}"
        if operands[10].value != self._shape.num_attention_heads:
            yield f"head_num is {operands[10].value}; the model has {self._shape.num_attention_heads}"
        yield from self._scale_problems(operands[12])
        if operands[16].value != _TH:
            yield f"input_layout is {operands[16].value}; it must be {_TH}: TH, which joins the tokens without padding"
        if operands[17].value != 0:
            yield f"sparse_mode is {operands[17].value}; it must be 0 with the compressed causal mask of layout TH"
        yield from self._order_problems(node, operands[0])

    def _check_rotary(self, node: Node) -> Iterator[str]:
        query, key, cos, sin, _, cos_format = self._wiring.operands(node)
        widths = (self._query, self._key, self._shape.head_dim, self._shape.head_dim)
        given = {"query": query, "key": key, "cos": cos, "sin": sin}
        for (name, operand), width in zip(given.items(), widths, strict=True):
            yield from _differs(name, self._type(operand), TensorType(self._dtype, (-1, width)))
        if cos_format.value != 2:
            yield f"cos_format is {cos_format.value}; it must be 2 (halves of a head, one row of cosines per token)"
        if self._sections is not None:
            yield from self._sections.rotary_problems(node)
        if self._gemma is not None:
            yield from self._gemma.rotary_problems(node)

    def _check_norm(self, node: Node) -> Iterator[str]:
        epsilon = self._wiring.operands(node)[-1].value
        if not np.isclose(epsilon, self._shape.rms_norm_eps, rtol=1e-5):
            yield f"epsilon is {epsilon:g}; the model's is {self._shape.rms_norm_eps:g}"
        if self._gemma is not None and node.primitive == "RmsNorm":
            yield from self._gemma.norm_problems(node)

    def _compressed_mask_problems(self, mask: Operand) -> Iterator[str]:
        masked = 1.0 if self._dtype == "bf16" else _MASKED
        wanted = np.triu(np.full((128, 128), masked), 1)
        if mask.type is None or mask.type.dtype != self._dtype or not np.array_equal(mask.value, wanted):
            kind = "not a constant" if mask.type is None else f"{mask.type}"
            yield f"attn_mask is {kind}; it must be {self._dtype}[128,128], {masked:g} above the diagonal, 0 elsewhere"

    def _cache_problems(self, node: Node, name: str, operand: Operand) -> Iterator[str]:
        cache = self._config.pa_config
        sizes = (cache.num_blocks, cache.block_size, self._shape.num_key_value_heads, self._shape.head_dim)
        source, _ = self._wiring.source(operand)
        if source.name != f"layers.{node.layer}.attention.{name}":
            yield f"{name} is {source.name or source.kind}, not the {name} of layer {node.layer}"
        yield from _differs(name, source.type, TensorType(self._dtype, sizes))

    def _scale_problems(self, scale: Operand) -> Iterator[str]:
        wanted = self._shape.head_dim**-0.5
        if not np.isclose(scale.value, wanted, rtol=1e-6):
            yield f"scale_value is {scale.value:.7g}; 1 / sqrt(head size) is {wanted:.7g}"

    def _order_problems(self, node: Node, query: Operand) -> Iterator[str]:
        """Yields an error unless the query depends on the layer's write of the cache.

        Without this dependency, attention may run before the new keys and values are in the cache.
        """
        if self._integer_cache is not None and self._kind != "prefill":
            return  # ``IntegerCacheRules`` checks that the gathered blocks wait for the writes
        depend = self._wiring.node_of(query)
        write = (
            self._wiring.node_of(depend.operands[1]) if depend is not None and depend.primitive == "Depend" else None
        )
        if write is None or write.primitive != "ReshapeAndCache" or write.layer != node.layer:
            yield "the query does not wait for the layer's ReshapeAndCache (ops.depend)"

    def _type(self, operand: Operand) -> TensorType | None:
        source, index = self._wiring.source(operand)
        if source.kind == "input":
            return self._graph.inputs[source.name]
        if source.kind != "node":
            return source.type
        node = self._wiring.node_of(source)
        assert node is not None
        return node.results[index or 0]

    def _input(self, operand: Operand) -> str | None:
        source, _ = self._wiring.source(operand)
        return source.name if source.kind == "input" else None

    def _lengths(self, operand: Operand) -> str | None:
        """Returns the name of the graph's input that an operand comes from, or None if it does not come from an input.

        Conversions to tuples and other integer types are skipped.
        """
        node = self._wiring.node_of(operand)
        while node is not None and node.primitive in ("TensorToTuple", "Cast"):
            operand = node.operands[0]
            node = self._wiring.node_of(operand)
        return self._input(operand)


def _differs(name: str, actual: TensorType | None, wanted: TensorType) -> Iterator[str]:
    if actual != wanted:
        yield f"{name} is {actual}; it must be {wanted}"


def _types(inputs: dict[str, TensorType]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in inputs.items())


def _where(node: Node) -> str:
    return "the step" if node.layer is None else f"layer {node.layer}"
