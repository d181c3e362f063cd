"""Runs one layer of attention on a device, as a prompt, as a decode and as chunks, and compares it with NumPy.

    python tools/try_attention.py                        on the Ascend, head size 128
    python tools/try_attention.py --device CPU           the same graphs with the kernels of the CPU
    python tools/try_attention.py --head-dim 32          another head size
    python tools/try_attention.py --int8-cache           keys and values in int8

The program detects a wrong kernel, mask, layout or length within a minute, without a model. It prints a line for each
graph. The exit code is 1 if a graph's result differs too much.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from llm_serving.commands.own_python import use_own_python

if __name__ == "__main__":
    use_own_python()

import numpy as np
import numpy.typing as npt

from agent.backends.runtime import start_runtime
from agent.step_graph.step_blocks import StepBlocks
from llm_serving.config import load_config
from llm_serving.errors import LLMServingError
from llm_serving.model.number_formats import scale_row_width

HEADS, KV_HEADS, BLOCK_SIZE, NUM_BLOCKS, MAX_POSITIONS = 8, 2, 16, 64, 128
"""Sizes of the layer and of its KV cache: query heads, kv heads, block size, blocks, positions."""
LIMIT = 0.02
"""Maximum difference from NumPy. The values are about 1, and float16 has a precision of 11 bits."""
INT8_LIMIT = 0.04
"""Maximum difference from NumPy with an int8 cache. The cache rounds by at most 1 / 254 of a head's largest element."""

Floats = npt.NDArray[np.float32]
Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Step:
    """One step: the number of queries and of keys of each sequence."""

    kind: str
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]


STEPS = (
    Step("prefill", (5, 37), (5, 37)),
    Step("decode", (1, 1), (6, 38)),
    Step("chunked", (7, 1), (13, 39)),
)
"""The steps of two sequences, in order. A decode or a chunk reads keys and values that earlier steps have written."""


class Reference:
    """Computes rotary embedding and causal attention in float32, sequence by sequence."""

    def __init__(self, head_dim: int) -> None:
        angles = np.arange(MAX_POSITIONS)[:, None] * 10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
        self.cos, self.sin = (np.tile(values, 2).astype(np.float32) for values in (np.cos(angles), np.sin(angles)))
        self._dim = head_dim
        self._keys: dict[int, Floats] = {}
        self._values: dict[int, Floats] = {}

    def step(self, qkv: Floats, step: Step) -> Floats:
        """Returns the attention output of a step [tokens, heads * head size], and stores its keys and values.

        ``qkv`` has the queries, keys and values: [tokens, (heads + 2 * kv heads) * head size].
        """
        outputs, start = [], 0
        for seq, (queries, context) in enumerate(zip(step.query_lens, step.context_lens, strict=True)):
            rows, start = qkv[start : start + queries], start + queries
            outputs.append(self._sequence(seq, rows, context))
        return np.concatenate(outputs)

    def _sequence(self, seq: int, rows: Floats, context: int) -> Floats:
        first = context - len(rows)
        heads = rows.reshape(len(rows), HEADS + 2 * KV_HEADS, self._dim)
        rotated = self._rotate(heads[:, : HEADS + KV_HEADS], first)
        empty = np.zeros((0, KV_HEADS, self._dim), np.float32)
        keys = np.concatenate([self._keys.get(seq, empty)[:first], rotated[:, HEADS:]])
        values = np.concatenate([self._values.get(seq, empty)[:first], heads[:, HEADS + KV_HEADS :]])
        self._keys[seq], self._values[seq] = keys, values
        output = np.empty((len(rows), HEADS, self._dim), np.float32)
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            hidden = np.arange(context)[None] > first + np.arange(len(rows))[:, None]
            scores = np.where(hidden, -np.inf, rotated[:, head] @ keys[:, group].T * self._dim**-0.5)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            output[:, head] = weights / weights.sum(1, keepdims=True) @ values[:, group]
        return output.reshape(len(rows), -1)

    def _rotate(self, heads: Floats, first: int) -> Floats:
        cos, sin = (table[first : first + len(heads)][:, None] for table in (self.cos, self.sin))
        half = self._dim // 2
        turned = np.concatenate([-heads[..., half:], heads[..., :half]], -1)
        rotated: Floats = heads * cos + turned * sin
        return rotated


def make_cells(head_dim: int, reference: Reference, *, int8_cache: bool = False) -> dict[str, Any]:
    """Makes one Cell for each kind of step. All Cells use the same caches of keys and values.

    With ``int8_cache``, the Cells of decodes and chunks take the blocks to gather as their last input.
    """
    import mindspore as ms
    from mindspore import Parameter, Tensor, nn

    from agent.backends.base import AttentionForm
    from agent.backends.native.attention import Attention, ChunkMask, Rotary, causal_mask

    form = AttentionForm(HEADS, KV_HEADS, head_dim)
    attention = Attention(form, "float16", causal_mask(form, "float16"), int8_cache=int8_cache)
    rotary = Rotary(reference.cos, reference.sin, "float16")
    zeros = np.zeros((NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, head_dim), np.int8 if int8_cache else np.float16)
    arrays = {"key_cache": zeros, "value_cache": zeros}
    if int8_cache:
        arrays["scale_cache"] = np.zeros((NUM_BLOCKS, BLOCK_SIZE, 1, scale_row_width(KV_HEADS)), np.float16)
    caches = [Parameter(Tensor(array), name=name, requires_grad=False) for name, array in arrays.items()]

    class Layer(nn.Cell):
        """One layer of attention. The names of its inputs matter: kernels on an Ascend find the lengths by name."""

        def __init__(self, kind: str) -> None:
            super().__init__(auto_prefix=False)
            self.attention, self.rotary, self.whole = attention, rotary, kind == "prefill"
            self.keys, self.values, self.scales = (*caches, None)[:3]
            self.mask = ChunkMask(MAX_POSITIONS, "float16", of_latent=False) if kind == "chunked" else None
            self.phase = "prefill" if kind == "prefill" else "increment"
            self.set_train(False)

        def construct(
            self, qkv: Tensor, positions: Tensor, slot_mapping: Tensor, block_tables: Tensor,
            batch_valid_length: Tensor, q_seq_lens: Tensor, step_blocks: Tensor | None = None,
        ) -> Tensor:  # fmt: skip
            step: tuple[Tensor, ...] = (slot_mapping, block_tables, batch_valid_length, q_seq_lens)
            if self.mask is not None:
                step = (*step, self.mask(positions))
            caches: tuple[Tensor, ...] = (self.keys, self.values)
            if self.scales is not None:
                caches = (*caches, self.scales)
            if step_blocks is not None:
                step = (*step, step_blocks)
            return self.attention(qkv, (), self.rotary(positions), caches, step, self.whole)

    cells = {step.kind: Layer(step.kind) for step in STEPS}
    width = (HEADS + 2 * KV_HEADS) * head_dim
    lens = Tensor(shape=(None,), dtype=ms.int32)
    for kind, cell in cells.items():
        query_lens = lens
        if kind == "prefill" and ms.get_context("device_target") == "CPU":
            query_lens = Tensor(shape=(len(STEPS[0].query_lens),), dtype=ms.int64)
        cell.set_inputs(
            Tensor(shape=(None, width), dtype=ms.float16), lens, lens, Tensor(shape=(None, None), dtype=ms.int32), lens,
            query_lens, *((lens,) if int8_cache and kind != "prefill" else ()),
        )  # fmt: skip
    return cells


def run_step(cell: Any, step: Step, qkv: Floats, *, int8_cache: bool = False) -> Floats:
    """Runs a step and returns the output of attention in float32."""
    import mindspore as ms
    from mindspore import Tensor

    width = MAX_POSITIONS // BLOCK_SIZE
    tables = np.arange(1, 1 + len(step.query_lens) * width, dtype=np.int32).reshape(-1, width)
    spans = [
        np.arange(context - queries, context)
        for queries, context in zip(step.query_lens, step.context_lens, strict=True)
    ]
    positions: Int32s = np.concatenate(spans).astype(np.int32)
    slots = [
        table[span // BLOCK_SIZE] * BLOCK_SIZE + span % BLOCK_SIZE for table, span in zip(tables, spans, strict=True)
    ]
    context_lens = np.array(step.context_lens, np.int32)
    blocks: tuple[Int32s, ...] = ()
    if int8_cache and step.kind != "prefill":
        listed, tables = StepBlocks(NUM_BLOCKS, BLOCK_SIZE).of(tables, context_lens)
        blocks = (listed,)
    is_padded = step.kind == "prefill" and ms.get_context("device_target") == "CPU"
    query_lens = np.array(step.query_lens, np.int64 if is_padded else np.int32)
    arrays = (
        qkv.astype(np.float16), positions, np.concatenate(slots).astype(np.int32), tables,
        context_lens, query_lens, *blocks,
    )  # fmt: skip
    output: Floats = cell(*map(Tensor, arrays)).asnumpy().astype(np.float32)
    return output


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all steps and prints their differences. Returns the exit code."""
    options = _parse(arguments)
    overrides = ["model_config.load_format=dummy", "tokenizer.vocab_file=models/tiny_llama"]
    try:
        if options.device == "CPU":
            given = [f"model_config.{each}" for each in ("op_table=native", "model_dtype=float16", "device_target=CPU")]
            start_runtime(load_config("llama_tiny_cpu.yaml", given))
        else:
            start_runtime(load_config("llama_7b_kbk_pa_dyn.yaml", overrides, ascend=True))
    except LLMServingError as error:
        print(f"FAIL {error}")
        return 1
    reference = Reference(options.head_dim)
    limit, int8_cache = INT8_LIMIT if options.int8_cache else LIMIT, options.int8_cache
    cells, failures = make_cells(options.head_dim, reference, int8_cache=int8_cache), 0
    random = np.random.default_rng(0)
    for step in STEPS:
        shape = (sum(step.query_lens), (HEADS + 2 * KV_HEADS) * options.head_dim)
        qkv = random.standard_normal(shape).astype(np.float16).astype(np.float32)
        wanted = reference.step(qkv, step)
        try:
            actual = run_step(cells[step.kind], step, qkv, int8_cache=int8_cache)
        except (RuntimeError, TypeError, ValueError) as error:
            print(f"FAIL {step.kind}: {str(error).strip().splitlines()[0]}")
            failures += 1
            continue
        difference = float(np.max(np.abs(actual - wanted)))
        is_right = bool(difference <= limit)  # False for NaN
        failures += not is_right
        print(
            f"{'ok  ' if is_right else 'FAIL'} {step.kind}: head size {options.head_dim}, difference {difference:.4f}"
        )
    return 1 if failures else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compares one layer of attention on a device with NumPy.")
    parser.add_argument("--device", choices=("Ascend", "CPU"), default="Ascend", help="device to run on")
    parser.add_argument("--head-dim", type=int, default=128, metavar="N", help="size of a head, a multiple of 16")
    parser.add_argument("--int8-cache", action="store_true", help="keys and values in int8, as with kv_format int8")
    options = parser.parse_args(arguments)
    if not 16 <= options.head_dim <= 256 or options.head_dim % 16:
        parser.error(f"--head-dim {options.head_dim}: must be a multiple of 16 from 16 to 256")
    return options


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # does not wait for MindSpore's threads
