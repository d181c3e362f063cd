"""What a step makes a device do: counts taken from the step's columns, and the sizes of the model behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llm_serving.config import Config
from llm_serving.scheduler.output import ScheduledStep, StepKind
from performance.bench.roofline import layer_linears, weight_bytes

__all__ = ["ModelWork", "StepWork", "count_work", "work_of"]

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class StepWork:
    """The counts a step's time depends on."""

    kind: StepKind
    tokens: int = 0
    """Rows of the linear layers."""
    sequences: int = 0
    samples: int = 0
    """Rows of the output to the vocabulary: sequences that sample."""
    context: int = 0
    """Keys read: the sum over the sequences of their context after the step, in tokens."""
    pairs: int = 0
    """Queries times the positions each sees, summed. A decode step has as many pairs as context."""


def work_of(step: ScheduledStep) -> StepWork:
    """The counts of ``step``."""
    return count_work(step.kind, step.starts, step.query_lens, step.do_sample)


def count_work(kind: StepKind, starts: Sequence[int], query_lens: Sequence[int], do_sample: Sequence[bool]) -> StepWork:
    """The counts of a step with these columns."""
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
    """The bytes and operations of a model in its formats, over all layers."""

    num_layers: int
    weight_unit: str
    """What multiplies: ``int8``, ``bfloat16``, ``float16`` or ``float32``."""
    float_unit: str
    """What attention computes in: one of the float types."""
    layer_bytes: float
    """Weights and scales of the linear layers without the output to the vocabulary."""
    layer_operations: float
    """Of those, a token."""
    head_bytes: float
    head_operations: float
    """A sampled row."""
    kv_token_bytes: float
    pair_operations: float
    """Attention's, a query and a position it sees."""
    activation_bytes: float
    """Read and written between the operators, a token: residual, norms, rotary embedding, gate and up."""
    logit_bytes: float
    """A sampled row, float32."""
    block_bytes: float
    """A block of the KV cache."""

    @classmethod
    def of(cls, config: Config) -> ModelWork:
        """The model a deployment's configuration serves."""
        shape, numbers = config.shape, config.weight_format
        group, dtype = config.model_config.weight_group, config.model_config.model_dtype
        linears = layer_linears(shape).values()
        layer_bytes = sum(weight_bytes(numbers, columns, depth, group) for columns, depth in linears)
        layer_operations = sum(2.0 * columns * depth for columns, depth in linears)
        query, key = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        # Once each: residual and norm before attention and before the MLP (read, add, write, normalise: 4 x h), the
        # rotary embedding (read and write q and k), attention's q and output, gate, up and their product.
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
