"""Runs the fused custom operators in a static graph and prints JSON. test_fused_ops.py starts it in its own process."""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from agent.backends.cpu.ops import custom_operator
from agent.kernels.library import load_library
from agent.kernels.packing import pack_weight, packed_weight_bytes, weight_blob
from agent.layers.parameter import bind, unbound_parameter

ms.set_context(mode=ms.GRAPH_MODE, jit_config={"jit_level": "O0"})
ms.set_device("CPU")

TOKENS, SEQS, WIDTH, INNER, VOCAB, EPSILON = 12, 5, 64, 96, 130, 1e-5
NAMES = {ms.float32: "float32", ms.float16: "float16", ms.bfloat16: "bfloat16"}
RANDOM = np.random.default_rng(0)
TABLE, GATE_UP, DOWN, FIRST, SECOND, HEAD = (
    RANDOM.standard_normal(shape).astype(np.float32) / 8
    for shape in ((VOCAB, WIDTH), (2 * INNER, WIDTH), (WIDTH, INNER), (WIDTH, WIDTH), (WIDTH, WIDTH), (VOCAB, WIDTH))
)
GAMMA = 1 + RANDOM.standard_normal(WIDTH).astype(np.float32) / 8


def packed(weight: np.ndarray, weight_format: str, *, gated: bool = False) -> np.ndarray:
    group = 32 if weight_format == "int4" else 0
    blob = weight_blob(packed_weight_bytes(weight_format, *weight.shape, group))
    source = weight
    if weight_format in ("float16", "bfloat16"):
        source = Tensor(weight).astype(getattr(ms, weight_format)).view(ms.int16).asnumpy().view(np.uint16)
        source = source.view(np.float16) if weight_format == "float16" else source
    source_dtype = weight_format if weight_format in ("float16", "bfloat16") else "float32"
    pack_weight(weight_format, source, blob, group=group, gated=gated, source_dtype=source_dtype)
    return blob


def parameter(blob: np.ndarray) -> ms.Parameter:
    """Makes a parameter that shares the memory of the packed weight, which is aligned as the operators require."""
    result = unbound_parameter(blob.shape, "uint8")
    bind(result, blob)
    return result


class Layers(nn.Cell):
    """A model of one layer without attention: embedding, two linear layers with a norm, MLP and output layer."""

    def __init__(self, dtype: Any, weight_format: str) -> None:
        super().__init__()
        name = NAMES[dtype]
        rows = [TOKENS, WIDTH]
        self.embed = custom_operator("EmbedTokens", [rows], [name])
        self.norm_linear = custom_operator("NormLinear", [rows], [name])
        self.add_norm_linear = custom_operator("AddNormLinear", [rows, rows], [name, name])
        self.linear = custom_operator("PackedLinear", [rows], [name])
        self.mlp = custom_operator("GatedMlp", [rows, rows], [name, name])
        self.head = custom_operator("LmHead", [[1]], ["int32"])
        self.table = ms.Parameter(Tensor(TABLE).astype(dtype), name="table")
        self.gamma = ms.Parameter(Tensor(GAMMA).astype(dtype), name="gamma")
        self.epsilon = ms.Parameter(Tensor(np.full(1, EPSILON, np.float32)), name="epsilon")
        self.logits = ms.Parameter(Tensor(np.zeros((SEQS, VOCAB), np.float32)), name="logits")
        self.best_ids = ms.Parameter(Tensor(np.zeros(SEQS + 1, np.int32)), name="best_ids")
        weights = {"first": FIRST, "second": SECOND, "down": DOWN}
        for key, weight in weights.items():
            setattr(self, f"{key}_weight", parameter(packed(weight, weight_format)))
        self.gate_up_weight = parameter(packed(GATE_UP, weight_format, gated=True))
        self.head_weight = parameter(packed(HEAD, weight_format))

    def construct(self, ids: Tensor, last: Tensor, counts: Tensor) -> Tensor:
        residual = self.embed(ids, self.table, counts)
        hidden = self.norm_linear(residual, self.gamma, self.epsilon, self.first_weight, counts)
        hidden, residual = self.add_norm_linear(hidden, residual, self.gamma, self.epsilon, self.second_weight, counts)
        hidden = self.linear(hidden, self.first_weight, counts)
        hidden, residual = self.mlp(
            hidden, residual, self.gamma, self.epsilon, self.gate_up_weight, self.down_weight, counts
        )
        head = (self.gamma, self.epsilon, self.head_weight, last, self.logits, self.best_ids, counts)
        return self.head(hidden, residual, *head)


def rendering(ids: np.ndarray) -> np.ndarray:
    """Returns the logits of every token, computed in float64 in plain NumPy."""

    def norm(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * GAMMA

    residual = TABLE[ids].astype(np.float64)
    hidden = norm(residual) @ FIRST.T
    residual = residual + hidden
    hidden = norm(residual) @ SECOND.T @ FIRST.T
    residual = residual + hidden
    gate, up = np.split(norm(residual) @ GATE_UP.T, 2, -1)
    residual = residual + (gate / (1 + np.exp(-gate)) * up) @ DOWN.T
    return norm(residual) @ HEAD.T


def run(net: Layers, ids: list[int], last: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Runs a step with fewer tokens and sequences than fit into the inputs of the graph.

    Returns the logits and the best ids of the step's sequences. The other inputs of the graph are invalid, and the
    operators must not read them.
    """
    all_ids, all_last = np.full(TOKENS, VOCAB + 7, np.int32), np.full(SEQS, TOKENS + 7, np.int32)
    all_ids[: len(ids)], all_last[: len(last)] = ids, last
    counts = np.array([len(ids), len(last), 1, RANDOM.integers(1, 99)], np.int32)
    done = net(Tensor(all_ids), Tensor(all_last), Tensor(counts)).asnumpy()
    best = net.best_ids.asnumpy().copy()
    assert done[0] == best[-1] == counts[3], "the step's number is where it is done"
    return net.logits.asnumpy()[: len(last)].copy(), best[: len(last)]


def check(dtype: Any, weight_format: str, limit: float) -> dict[str, bool]:
    net = Layers(dtype, weight_format)
    ids = [int(i) for i in RANDOM.integers(0, VOCAB, TOKENS)]
    net.logits.set_data(Tensor(np.full((SEQS, VOCAB), 5, np.float32)))
    logits, best = run(net, ids, [2, -1, TOKENS - 1])
    exact = rendering(np.array(ids))
    alone = [run(net, [ids[i]], [0])[0][0] for i in (2, TOKENS - 1)]
    tops = [logits[i].argmax() for i in (0, 2)]
    results = {
        "equals float64": bool((logits[[0, 2]] - exact[[2, TOKENS - 1]]).std() < limit * exact.std()),
        "alone as in the batch": np.array_equal(alone[0], logits[0]) and np.array_equal(alone[1], logits[2]),
        "best ids": best.tolist() == [tops[0], -1, tops[1]],
        "a sequence that does not sample": bool((logits[1] == 5).all()),
        "no tokens at all": run(net, [], [])[1].size == 0,
    }
    return {f"{NAMES[dtype]} {weight_format}: {label}": passed for label, passed in results.items()}


def graph_refuses(*arguments: Any) -> bool:
    """Returns True if a new graph fails with these arguments.

    Each call makes a new graph, because a failed graph repeats its error in all later runs. MindSpore waits 3 seconds
    before it reports an error.
    """
    try:
        run(Layers(ms.float32, "float32"), *arguments)
    except RuntimeError:
        return True
    return False


def head_refuses(head: np.ndarray, last: int = 0, dtype: str = "float32") -> bool:
    """Returns True if the C++ entry of the output layer reports an error for a step of one token.

    The entry gets its arguments as MindSpore passes them.
    """
    storage = np.dtype(dtype)
    hidden, gamma = np.ones((TOKENS, WIDTH), storage), GAMMA.astype(storage)
    arrays = [
        (hidden, dtype), (hidden.copy(), dtype), (gamma, dtype), (np.full(1, EPSILON, np.float32), "float32"),
        (head, "uint8"), (np.full(SEQS, last, np.int32), "int32"), (np.zeros((SEQS, VOCAB), np.float32), "float32"),
        (np.zeros(SEQS + 1, np.int32), "int32"), (np.array([1, 1, 1, 0], np.int32), "int32"),
        (np.zeros(1, np.int32), "int32"),
    ]  # fmt: skip
    count = len(arrays)
    sizes = ctypes.POINTER(ctypes.c_int64)
    shapes = [ctypes.cast((ctypes.c_int64 * array.ndim)(*array.shape), sizes) for array, _ in arrays]
    failed: int = load_library().LmHead(
        count,
        (ctypes.c_void_p * count)(*(array.ctypes.data for array, _ in arrays)),
        (ctypes.c_int * count)(*(array.ndim for array, _ in arrays)),
        (sizes * count)(*shapes),
        (ctypes.c_char_p * count)(*(name.encode() for _, name in arrays)),
        None,
        None,
    )
    return failed != 0


def check_refusals() -> dict[str, bool]:
    right, torn = packed(HEAD, "float32"), packed(HEAD, "float32")
    torn[:4] = 0
    return {
        "refuses a token id": graph_refuses([VOCAB], [0]),
        "takes what is right": not head_refuses(right),
        "refuses a last token": head_refuses(right, last=1),
        "refuses a weight of another shape": head_refuses(packed(FIRST, "float32")),
        "refuses a blob without header": head_refuses(torn),
        "refuses a weight of another type": head_refuses(right, dtype="float16"),
    }


def main() -> None:
    results = check(ms.float32, "float32", 1e-6) | check(ms.float16, "float16", 0.003)
    results |= check(ms.bfloat16, "bfloat16", 0.03) | check(ms.bfloat16, "int8", 0.05) | check(ms.float32, "int4", 0.4)
    results |= check_refusals()
    sys.stdout.write("\n" + json.dumps({name: bool(passed) for name, passed in results.items()}) + "\n")


if __name__ == "__main__":
    main()
