"""Run by test_check_ascend_graph.py in a process of its own: plants mistakes in the Ascend graphs, one at a time, and
prints as JSON what the gate says of each."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["MS_DEV_PRECOMPILE_ONLY"] = "1"

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops import auto_generate

from agent import step_graph
from agent.backends.native import ops as native
from tools.ascend_graph.front_end import ascend_config, compile_graphs, set_up
from tools.ascend_graph.listing import list_graph
from tools.ascend_graph.rules import check_graph

TINY = ascend_config("llama_tiny_cpu.yaml", ["model_config.model_dtype=float16"])
GQA = replace(TINY.shape, num_layers=2, num_key_value_heads=2, tie_word_embeddings=False)
CONFIG = replace(TINY, shape=GQA)
HEADS, KV_HEADS = GQA.num_attention_heads, GQA.num_key_value_heads
SQUARE = replace(CONFIG, shape=replace(GQA, num_key_value_heads=HEADS))
"""As many key-value heads as query heads: many mistakes then fit all shapes."""


class Attention(native._Attention):
    """The table's own, to be changed."""

    def construct(self, qkv: Any, rotary: Any, key_cache: Any, value_cache: Any, step: Any, whole_prompts: Any) -> Any:
        slot_mapping, tables, context_lens, query_lens = step[:4]
        mask = step[4] if len(step) > 4 else self.no_mask
        query, key, value = self.split(qkv, self.widths, -1)
        query, key = self.rotate(query, key, rotary[0], rotary[1], context_lens)
        written = self.write_cache(key, value, key_cache, value_cache, slot_mapping)
        if self.waits:
            query = ops.depend(query, written)
        if whole_prompts:
            return self.flash(query, key, value, None, None, None, self.causal_mask, None, query_lens, query_lens)[3]
        if self.swaps:
            return self.paged(query, value_cache, key_cache, tables, context_lens, None, None, mask, query_lens)
        if self.knows_queries:
            return self.paged(query, key_cache, value_cache, tables, context_lens, None, None, mask, query_lens)
        return self.paged(query, key_cache, value_cache, tables, context_lens, None, None, mask, None)


def attention(**flags: bool) -> Callable[..., nn.Cell]:
    """Makes the attention with some flags other than they should be."""

    def make(*arguments: Any) -> nn.Cell:
        cell = Attention(*arguments)
        for name, value in ({"waits": True, "swaps": False, "knows_queries": True} | flags).items():
            setattr(cell, name, value)
        return cell

    return make


class Forgetful(native._ChunkMask):
    def construct(self, positions: Any) -> Any:
        return self.multiply(self.cast(positions, self.dtype), self.masked)


class WithoutTranspose(native._Linear):
    def __init__(self) -> None:
        super().__init__()
        self.matmul = ops.MatMul(transpose_b=False)


class OldNames(step_graph._DynamicStep):
    def construct(self, token_ids, positions, last_tokens, slot_mapping, block_tables, context_lens, query_lens):  # type: ignore[no-untyped-def]
        step = (slot_mapping, block_tables, context_lens, query_lens)
        return self.model(token_ids, positions, last_tokens, step, self.whole_prompts)


class TwoOutputs(native._LMHead):
    def construct(self, hidden: Any, residual: Any, gamma: Any, weight: Any, last_tokens: Any, step: Any) -> Any:
        hidden, residual = self.gather(hidden, last_tokens, 0), self.gather(residual, last_tokens, 0)
        return self.norm_linear(hidden, residual, gamma, weight, step)


def patched(name: str, replacement: Any) -> Any:
    return mock.patch.object(native, name, replacement)


def inputs(position: int, tensor: Tensor) -> Any:
    """One of the graph's inputs is of another type or rank."""
    real = step_graph._DynamicStep.set_inputs

    def set_inputs(cell: nn.Cell, *given: Tensor) -> None:
        real(cell, *given[:position], tensor, *given[position + 1 :])

    return mock.patch.object(step_graph._DynamicStep, "set_inputs", set_inputs)


def wider_vocabulary() -> Any:
    real = native.NativeOps.linear_weight

    def linear_weight(table: Any, width: int, out: int) -> Parameter:
        return real(table, width, out + 16 if out == GQA.vocab_size else out)

    return mock.patch.object(native.NativeOps, "linear_weight", linear_weight)


def other_cache(shape: tuple[int, ...] | None, dtype: str) -> Any:
    real = native.NativeOps.cache_layout
    return mock.patch.object(
        native.NativeOps,
        "cache_layout",
        lambda *a: (real(*a)[0] if shape is None else tuple(real(*a)[0][i] for i in shape), dtype),
    )


def ones_mask() -> Any:
    real = native._Attention.__init__

    def init(cell: Any, *arguments: Any) -> None:
        real(cell, *arguments)
        cell.causal_mask = Tensor(np.triu(np.ones((128, 128)), 1), ms.float16)

    return mock.patch.object(native._Attention, "__init__", init)


def flash(**settings: Any) -> Any:
    return patched("FlashAttentionScore", lambda **given: auto_generate.FlashAttentionScore(**(given | settings)))


MISTAKES: dict[str, tuple[str, Any, Callable[[], Any]]] = {
    "layout of prefill": ("prefill", CONFIG, lambda: flash(input_layout="BSH")),
    "layout of prefill that fits": ("prefill", CONFIG, lambda: flash(sparse_mode=2)),
    "mask of ones in float16": ("prefill", CONFIG, ones_mask),
    "query heads": ("prefill", SQUARE, lambda: flash(head_num=HEADS // 2)),
    "key-value heads": (
        "decode",
        CONFIG,
        lambda: patched("PagedAttention", lambda h, scale, kv: auto_generate.PagedAttention(h, scale, h)),
    ),
    "scale": (
        "decode",
        CONFIG,
        lambda: patched("PagedAttention", lambda h, scale, kv: auto_generate.PagedAttention(h, scale * scale, kv)),
    ),
    "cache type": ("decode", CONFIG, lambda: other_cache(None, "bfloat16")),
    "cache layout": ("decode", CONFIG, lambda: other_cache((0, 2, 1, 3), "float16")),
    "slot mapping type": ("decode", CONFIG, lambda: inputs(3, Tensor(shape=(None,), dtype=ms.int64))),
    "block table rank": ("decode", CONFIG, lambda: inputs(4, Tensor(shape=(None,), dtype=ms.int32))),
    "no wait for the cache": ("decode", CONFIG, lambda: patched("_Attention", attention(waits=False))),
    "keys for values": ("decode", SQUARE, lambda: patched("_Attention", attention(swaps=True))),
    "no query lengths": ("chunked", CONFIG, lambda: patched("_Attention", attention(knows_queries=False))),
    "chunk mask": ("chunked", CONFIG, lambda: patched("_ChunkMask", Forgetful)),
    "transposed weight that fits": ("decode", SQUARE, lambda: patched("_Linear", WithoutTranspose)),
    "pairs for halves": ("decode", CONFIG, lambda: patched("_ROTATE_HALVES", 3)),
    "names of inputs": ("decode", CONFIG, lambda: mock.patch.object(step_graph, "_DynamicStep", OldNames)),
    "vocabulary": ("decode", CONFIG, wider_vocabulary),
    "outputs": ("decode", CONFIG, lambda: patched("_LMHead", TwoOutputs)),
}


def findings(kind: str, config: Any) -> list[str]:
    """What the rules, or the front end, say of one graph."""
    try:
        graph = dict(compile_graphs(config, [kind]))[kind]
    except (RuntimeError, TypeError, ValueError) as error:
        return [f"refused: {str(error).strip().splitlines()[0]}"]
    return check_graph(kind, graph, config)


def planted(name: str) -> list[str]:
    kind, config, make = MISTAKES[name]
    with make():
        return findings(kind, config)


class Turned(nn.Cell):
    """Keys where values should be: every shape fits and no rule sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.split = auto_generate.SplitWithSize()

    def construct(self, qkv: Any, widths: Any, axis: Any) -> Any:
        query, key, value = self.split(qkv, widths, axis)
        return query, value, key


def listing() -> list[str]:
    return list_graph(dict(compile_graphs(SQUARE, ["decode"]))["decode"])


def main() -> None:
    set_up()
    kinds = ("prefill", "chunked", "decode")
    right = [line for config in (CONFIG, SQUARE) for kind in kinds for line in findings(kind, config)]
    results = {"right": right} | {name: planted(name) for name in MISTAKES}
    plain = listing()
    with patched("SplitWithSize", Turned):
        turned = listing()
    results["listing"], results["turned listing"] = plain, turned
    sys.stdout.write("\n" + json.dumps(results) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
    os._exit(0)  # MindSpore's own threads need not be waited for
