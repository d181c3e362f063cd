"""Calls the kernels of a model's step one by one, and measures the time that a step needs for its kernels alone.

A complete step takes longer because of graph, Python, messages and sampling. As in a step, weights and caches come from
memory: each kernel alternates between copies of its data that together exceed the last-level cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent.kernels.packing import Blob
from llm_serving.model.number_formats import weight_format
from llm_serving.model.shape import ModelShape
from performance.bench.kernel_cases import attention_call, copies_of, copy_of, linear_calls, ordinary
from performance.bench.kernel_main import median_call_seconds
from performance.bench.roofline import Numbers, attention, layer_linears
from performance.kernels.calls import rms_norm
from performance.kernels.linear_calls import packed

SECONDS_EACH = 0.05
"""Seconds for which each kernel is measured."""


class StepKernels:
    """Measures the kernels of one model in given number formats. The weights are packed once and used for all steps."""

    def __init__(self, shape: ModelShape, numbers: Numbers) -> None:
        self._shape = shape
        self._numbers = numbers
        sizes = layer_linears(shape) | {"lm_head": (shape.vocab_size, shape.hidden_size)}
        self._blobs = {name: self._packed_copies(*size) for name, size in sizes.items()}
        self._sizes = sizes

    def seconds(self, rows: int, sequences: int, queries: int, context: int) -> float:
        """Returns the seconds of all kernels in a step of ``sequences`` sequences with ``queries`` rows each.

        Each sequence sees ``context`` tokens and samples one row. Norms are separate kernels: two in each layer, and
        one before the output layer.
        """
        shape = self._shape
        layer = sum(self._linear_seconds(name, rows) for name in self._sizes if name != "lm_head")
        layer += self._attention_seconds(sequences, queries, context)
        norm = self._norm_seconds(rows)
        return shape.num_layers * (layer + 2 * norm) + norm + self._linear_seconds("lm_head", sequences)

    def _packed_copies(self, columns: int, depth: int) -> list[Blob]:
        numbers = self._numbers
        group = numbers.group if weight_format(numbers.weight_format).has_groups else 0
        blob = packed(numbers.weight_format, ordinary(columns, depth, dtype="float32"), group=group)
        return [blob, *(copy_of(blob) for _ in range(copies_of(blob.size) - 1))]

    def _linear_seconds(self, name: str, rows: int) -> float:
        columns, depth = self._sizes[name]
        return _median(linear_calls(self._blobs[name], rows, columns, depth, self._numbers.dtype))

    def _attention_seconds(self, sequences: int, queries: int, context: int) -> float:
        shape, numbers = self._shape, self._numbers
        sizes = (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim)
        num_bytes = attention("attention", [(queries, context)] * sequences, *sizes, numbers).num_bytes
        copies = copies_of(int(num_bytes)) if queries == 1 else 1
        return _median(
            [
                attention_call(sizes, sequences, queries, context, numbers.kv_format, numbers.dtype)
                for _ in range(copies)
            ]
        )

    def _norm_seconds(self, rows: int) -> float:
        dtype = self._numbers.dtype
        x, gamma = (ordinary(*size, self._shape.hidden_size, dtype=dtype) for size in ((rows,), ()))
        return _median([lambda: rms_norm(x, gamma, dtype, dtype, x)])


def add_kernel_shares(rows: Sequence[dict[str, Any]], shape: ModelShape, numbers: Numbers) -> None:
    """Adds two values to each row: the time of the step's kernels alone (``kernel_ms``), and this time as a fraction of
    the step's time (``kernel_share``).
    """
    kernels = StepKernels(shape, numbers)
    for row in rows:
        seconds = kernels.seconds(**step_of(row))
        row["kernel_ms"] = 1000.0 * seconds
        row["kernel_share"] = row["kernel_ms"] / row["step_ms"]


def step_of(row: Mapping[str, Any]) -> dict[str, int]:
    """Returns the sizes of the step that represents a row: the prefill of a prefill row, or the middle decode step of a
    decode row.
    """
    batch, prompt, new = row["batch"], row["prompt"], row["new"]
    if row["kind"] == "prefill":
        return {"rows": batch * prompt, "sequences": batch, "queries": prompt, "context": prompt}
    return {"rows": batch, "sequences": batch, "queries": 1, "context": prompt + new // 2}


def _median(calls: Sequence[Callable[[], object]]) -> float:
    return median_call_seconds(calls, SECONDS_EACH)
