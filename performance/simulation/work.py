"""Counts the work in a step, from the token counts of its sequences and the sizes of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llm_serving.config import Config
from llm_serving.scheduler.output import ScheduledStep, StepKind
from performance.bench.roofline import layer_linears, weight_bytes

__all__ = ["ModelWork", "StepWork", "count_work", "work_of"]

FLOAT32_BYTES = 4
"""Size of a float32."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """The amount of work in a step, which determines its time."""

    kind: StepKind
    tokens: int = 0
    """Number of tokens that the step computes: the rows of the linear layers' inputs."""
    sequences: int = 0
    samples: int = 0
    """Number of sequences that sample a token: the rows of the output layer's input."""
    context: int = 0
    """Number of keys that attention reads: the sum of the sequences' context lengths after the step."""
    pairs: int = 0
    """Query-key pairs: the sum, over all queries, of the number of keys that the query sees. In a decode step, this is
    ``context``.
    """


def work_of(step: ScheduledStep) -> StepWork:
    """Returns the amount of work in ``step``."""
    return count_work(step.kind, step.starts, step.query_lens, step.do_sample)


def count_work(kind: StepKind, starts: Sequence[int], query_lens: Sequence[int], do_sample: Sequence[bool]) -> StepWork:
    """Returns the amount of work in a step.

    Each list has one element for each sequence of the step. ``starts`` has the first position that the step computes,
    and ``query_lens`` the number of tokens. ``do_sample`` is True if the sequence samples a token.
    """
    sequences, tokens = len(starts), sum(query_lens)
    context = sum(starts) + tokens
    if tokens == sequences:
        return StepWork(kind, tokens, sequences, sum(do_sample), context, context)
    pairs = 0
    for start, length in zip(starts, query_lens, strict=True):
        pairs += length * start + length * (length + 1) // 2
    return StepWork(kind, tokens, sequences, sum(do_sample), context, pairs)


@dataclass(frozen=True, slots=True)
class ModelWork:
    """Bytes and operations of a model in its number formats, summed over all layers."""

    num_layers: int
    weight_unit: str
    """Type of the operands of linear layers: ``int8``, ``bfloat16``, ``float16`` or ``float32``."""
    float_unit: str
    """Type in which attention computes."""
    layer_bytes: float
    """Bytes of the weights and scales of all linear layers except the output layer."""
    layer_operations: float
    """Operations of all linear layers except the output layer, per token."""
    head_bytes: float
    head_operations: float
    """Operations of the output layer per sampled row."""
    kv_token_bytes: float
    pair_operations: float
    """Operations of attention per query-key pair."""
    activation_bytes: float
    """Bytes read and written between operators per token: residual, norms, rotary embedding, gate and up."""
    logit_bytes: float
    """Bytes of the float32 logits of one sampled row."""
    block_bytes: float
    """Bytes of one block of the KV cache."""

    @classmethod
    def of(cls, config: Config) -> ModelWork:
        """Returns the sizes of the model that a config serves."""
        shape, numbers = config.shape, config.weight_format
        group, dtype = config.model_config.weight_group, config.model_config.model_dtype
        linears = layer_linears(shape).values()
        layer_bytes = sum(weight_bytes(numbers, columns, depth, group) for columns, depth in linears)
        layer_operations = sum(2.0 * columns * depth for columns, depth in linears)
        query, key = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        # Number of elements that one layer reads or writes for a token, apart from the linear layers. Before attention
        # and before the MLP, residual addition and norm take 4 x hidden size each. The rotary embedding reads and
        # writes q and k. Attention reads q and writes its output. The MLP takes gate, up and their product.
        elements = 8 * shape.hidden_size + 4 * query + 2 * key + 3 * shape.intermediate_size
        return cls(
            num_layers=shape.num_layers,
            weight_unit="int8" if config.quantises_activations else dtype,
            float_unit=dtype,
            layer_bytes=shape.num_layers * layer_bytes,
            layer_operations=shape.num_layers * layer_operations,
            head_bytes=weight_bytes(numbers, shape.vocab_size, shape.hidden_size, group),
            head_operations=2.0 * shape.vocab_size * shape.hidden_size,
            kv_token_bytes=config.kv_bytes_per_token,
            pair_operations=4.0 * shape.num_layers * query,
            activation_bytes=float(shape.num_layers * elements * config.dtype_bytes),
            logit_bytes=float(shape.vocab_size * FLOAT32_BYTES),
            block_bytes=float(config.kv_bytes_per_token * config.pa_config.block_size),
        )
