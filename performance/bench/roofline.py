"""Calculates the minimum time of a Llama's step on a machine with given ceilings (roofline: Williams et al. 2009).

A step runs its operators (linear layers and attention) one after the other. The minimum time of an operator is the
longer of two times: to read its data, and to do its arithmetic. The minimum time of a step is the sum over its
operators:

    linear      reads its weights once (values and scales), and does 2 x rows x columns x depth operations. Their rate
                is the peak rate of int8 dot products if the layer quantises its activations (formats int8 and int4).
                Otherwise it is the peak rate of the activations' type: bfloat16 dot products or float32 multiply-adds
    attention   reads the keys and values of each sequence's context once, and does 4 x pairs x heads x head size
                operations at the peak rate of the activations' type. A pair is a query and a position that it sees

The lm_head computes only the rows that sample. Some work is left out, because its data is small or stays in the
processor's caches. This is the work for activations, norms, rotary embedding, the write of new keys and values, and
sampling.

The blocks of a paged cache are in random places, which is slower to read than a stream. With ``by_blocks``, keys and
values are read at this lower rate (``Ceilings.paged_read_gb_s``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llm_serving.model.number_formats import kv_format, weight_format
from llm_serving.model.shape import ModelShape
from performance.bench.ceilings import Ceilings

SCALE_BYTES = 4
"""Bytes of a scale."""

Sequences = Sequence[tuple[int, int]]
"""For each sequence of a step: the number of query tokens, and the length of the context, which includes these tokens.
"""


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator of a step: the bytes that it must read, its arithmetic operations, and their peak rate."""

    name: str
    num_bytes: float
    operations: float
    unit: str
    """Field of ``Ceilings`` with the peak rate of the operations: bf16_gflops, int8_gops or fp32_gflops."""

    def seconds(self, ceilings: Ceilings) -> float:
        return max(self.read_seconds(ceilings), self.compute_seconds(ceilings))

    def read_seconds(self, ceilings: Ceilings) -> float:
        return self.num_bytes / ceilings.read_gb_s * 1e-9

    def compute_seconds(self, ceilings: Ceilings) -> float:
        rate: float = getattr(ceilings, self.unit)
        return self.operations / rate * 1e-9

    def bound(self, ceilings: Ceilings) -> str:
        """Returns ``read`` or ``compute``, whichever takes longer."""
        return "read" if self.read_seconds(ceilings) >= self.compute_seconds(ceilings) else "compute"


@dataclass(frozen=True, slots=True)
class Numbers:
    """The number formats of a model. ``group`` is the number of int4 weights that share a scale."""

    dtype: str = "bfloat16"
    weight_format: str = "bfloat16"
    kv_format: str = "bfloat16"
    group: int = 64


def float_unit(dtype: str) -> str:
    """Returns the field of ``Ceilings`` with the peak rate of a float type. Kernels compute float16 in float32."""
    return "bf16_gflops" if dtype == "bfloat16" else "fp32_gflops"


def weight_unit(name: str, dtype: str) -> str:
    """Returns the field of ``Ceilings`` with the peak rate for weights of format ``name``.

    Raises UnknownFormatError.
    """
    return "int8_gops" if weight_format(name).quantises_activations else float_unit(dtype)


def weight_bytes(name: str, columns: int, depth: int, group: int) -> float:
    """Returns the number of bytes of a linear layer's weights and scales. Raises UnknownFormatError."""
    wanted = weight_format(name)
    scales = 0.0 if wanted.is_float else depth / group if wanted.has_groups else 1
    return columns * (depth * wanted.bits / 8 + SCALE_BYTES * scales)


def linear(name: str, rows: int, columns: int, depth: int, numbers: Numbers) -> Operator:
    return Operator(
        name,
        weight_bytes(numbers.weight_format, columns, depth, numbers.group),
        2.0 * rows * columns * depth,
        weight_unit(numbers.weight_format, numbers.dtype),
    )


def kv_token_bytes(name: str, kv_heads: int, head_dim: int) -> int:
    """Returns the number of bytes of one token's keys and values in one layer. Raises UnknownFormatError."""
    return 2 * kv_heads * kv_format(name).head_bytes(head_dim)


def attention(name: str, sequences: Sequences, heads: int, kv_heads: int, head_dim: int,
              numbers: Numbers) -> Operator:  # fmt: skip
    """Returns the minimum work of causal attention, in which a query sees itself and all earlier positions."""
    context = sum(length for _, length in sequences)
    pairs = sum(queries * length - queries * (queries - 1) / 2 for queries, length in sequences)
    num_bytes = context * kv_token_bytes(numbers.kv_format, kv_heads, head_dim)
    return Operator(name, float(num_bytes), 4.0 * pairs * heads * head_dim, float_unit(numbers.dtype))


def layer_linears(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Returns (columns, depth) of each linear layer of a decoder layer, by name.

    The projections q, k and v count as one linear layer (``qkv``), and gate and up as another (``gate_up``).
    """
    query, key = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    return {
        "qkv": (query + 2 * key, shape.hidden_size),
        "o": (shape.hidden_size, query),
        "gate_up": (2 * shape.intermediate_size, shape.hidden_size),
        "down": (shape.hidden_size, shape.intermediate_size),
    }


def step_operators(shape: ModelShape, sequences: Sequences, numbers: Numbers) -> list[Operator]:
    """Returns the operators of one decoder layer, followed by the output layer (lm_head)."""
    rows = sum(queries for queries, _ in sequences)
    heads = (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim)
    return [
        *(linear(name, rows, *size, numbers) for name, size in layer_linears(shape).items()),
        attention("attention", sequences, *heads, numbers),
        linear("lm_head", len(sequences), shape.vocab_size, shape.hidden_size, numbers),
    ]


def step_seconds(
    shape: ModelShape, sequences: Sequences, numbers: Numbers, ceilings: Ceilings, *, by_blocks: bool = False
) -> float:
    """Returns the minimum time of a step in which every sequence samples one token."""
    *linears, cached, lm_head = step_operators(shape, sequences, numbers)
    reads = replace(ceilings, read_gb_s=ceilings.paged_read_gb_s) if by_blocks else ceilings
    layer = sum(each.seconds(ceilings) for each in linears) + cached.seconds(reads)
    return shape.num_layers * layer + lm_head.seconds(ceilings)


def decode_seconds(
    shape: ModelShape,
    batch: int,
    first: int,
    steps: int,
    numbers: Numbers,
    ceilings: Ceilings,
    *,
    by_blocks: bool = False,
) -> float:
    """Returns the minimum time of ``steps`` decode steps, the first with a context of ``first`` tokens.

    The time of a step grows linearly with its context. Therefore the result is ``steps`` times the time of a step with
    the mean context. The result is an approximation if an operator changes from memory bound to compute bound while the
    context grows.
    """
    middle = first + (steps - 1) // 2
    return steps * step_seconds(shape, [(1, middle)] * batch, numbers, ceilings, by_blocks=by_blocks)


def prefill_seconds(shape: ModelShape, prompts: Sequence[int], numbers: Numbers, ceilings: Ceilings) -> float:
    """Returns the minimum time of a prefill that computes all prompts in one step."""
    return step_seconds(shape, [(length, length) for length in prompts], numbers, ceilings)
