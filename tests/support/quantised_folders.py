"""Writes small model folders in every quantised format. The encoders follow the format descriptions, value by value."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from agent.weights import WeightPart, WeightSpec

DEPTH = 128
FLOATS = {"embed.weight": (10, DEPTH), "norm.weight": (DEPTH,)}
LINEARS = {
    "q_proj.weight": (16, DEPTH),
    "k_proj.weight": (8, DEPTH),
    "v_proj.weight": (8, DEPTH),
    "gate_proj.weight": (24, DEPTH),
    "up_proj.weight": (24, DEPTH),
}
SPECS = (
    WeightSpec("embed", (WeightPart("embed.weight", FLOATS["embed.weight"]),)),
    WeightSpec("qkv", tuple(WeightPart(name, LINEARS[name]) for name in list(LINEARS)[:3]), "linear"),
    WeightSpec("gate_up", tuple(WeightPart(name, LINEARS[name]) for name in list(LINEARS)[3:]), "gated_linear"),
    WeightSpec("norm", (WeightPart("norm.weight", FLOATS["norm.weight"]),)),
)

Tensors = dict[str, np.ndarray]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Plain:
    """A quantised weight.

    It has integers q from 0 to 2^bits - 1, zero points and scales. A value is (q - zero point) * scale.
    """

    q: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    group: int

    def value(self) -> np.ndarray:
        """Returns the weight in float32, computed one element at a time."""
        rows, depth = self.q.shape
        out = np.empty((rows, depth), np.float32)
        for row in range(rows):
            for column in range(depth):
                g = column // self.group
                out[row, column] = np.float32(int(self.q[row, column]) - int(self.zeros[row, g])) * self.scales[row, g]
        return out


def make_plain(name: str, *, bits: int, group: int, asymmetric: bool) -> Plain:
    rows, depth = LINEARS[name]
    rng = np.random.default_rng(sum(name.encode()))
    group = group or depth
    zeros = np.full((rows, depth // group), 1 << (bits - 1))
    if asymmetric:
        zeros = rng.integers(0, 1 << bits, zeros.shape)
        zeros[0, 0], zeros[1, 0] = 0, (1 << bits) - 1
    scales = rng.uniform(0.001, 0.1, zeros.shape).astype(np.float16).astype(np.float32)
    return Plain(rng.integers(0, 1 << bits, (rows, depth)), zeros, scales, group)


def float_tensors() -> Tensors:
    rng = np.random.default_rng(5)
    return {name: rng.standard_normal(shape).astype(np.float16) for name, shape in FLOATS.items()}


def as_int32(words: Any) -> np.ndarray:
    return np.array(words, np.uint64).astype(np.uint32).view(np.int32)


def gptq(name: str, plain: Plain, *, bits: int, minus_one: bool) -> Tensors:
    stem, per_word = name.removesuffix(".weight"), 32 // bits
    rows, depth = plain.q.shape
    qweight = [
        [sum(int(plain.q[o, w * per_word + i]) << (bits * i) for i in range(per_word)) for o in range(rows)]
        for w in range(depth // per_word)
    ]
    stored = (plain.zeros - (1 if minus_one else 0)) % (1 << bits)
    qzeros = [
        [sum(int(stored[w * per_word + i, g]) << (bits * i) for i in range(per_word)) for w in range(rows // per_word)]
        for g in range(stored.shape[1])
    ]
    return {
        f"{stem}.qweight": as_int32(qweight),
        f"{stem}.qzeros": as_int32(qzeros),
        f"{stem}.scales": plain.scales.T.astype(np.float16),
        f"{stem}.g_idx": np.array([i // plain.group for i in range(depth)], np.int32),
        f"{stem}.bias": np.zeros(rows, np.float16),
    }


def awq(name: str, plain: Plain) -> Tensors:
    stem, (rows, depth) = name.removesuffix(".weight"), plain.q.shape

    def word(source: np.ndarray, w: int, i: int) -> int:
        return sum(int(source[w * 8 + output, i]) << (4 * place) for place, output in enumerate(AWQ_ORDER))

    groups = plain.zeros.shape[1]
    return {
        f"{stem}.qweight": as_int32([[word(plain.q, w, i) for w in range(rows // 8)] for i in range(depth)]),
        f"{stem}.qzeros": as_int32([[word(plain.zeros, w, g) for w in range(rows // 8)] for g in range(groups)]),
        f"{stem}.scales": plain.scales.T.astype(np.float16),
    }


def int_quantized(name: str, plain: Plain) -> Tensors:
    stem = name.removesuffix(".weight")
    return {f"{stem}.weight": (plain.q - 128).astype(np.int8), f"{stem}.weight_scale": plain.scales.astype(np.float16)}


def pack_quantized(name: str, plain: Plain, *, bits: int, asymmetric: bool) -> Tensors:
    stem, per_word, (rows, depth) = name.removesuffix(".weight"), 32 // bits, plain.q.shape
    packed = [
        [
            sum(int(plain.q[o, w * per_word + i]) << (bits * i) for i in range(per_word))
            for w in range(depth // per_word)
        ]
        for o in range(rows)
    ]
    tensors = {
        f"{stem}.weight_packed": as_int32(packed),
        f"{stem}.weight_scale": plain.scales.astype(np.float16),
        f"{stem}.weight_shape": np.array([rows, depth], np.int64),
    }
    if asymmetric:
        zeros = [
            [sum(int(plain.zeros[w * 8 + i, g]) << (4 * i) for i in range(8)) for g in range(plain.zeros.shape[1])]
            for w in range(rows // 8)
        ]
        tensors[f"{stem}.weight_zero_point"] = as_int32(zeros)
    return tensors


def compressed_config(layout: str, *, bits: int, group: int, asymmetric: bool, activations: bool) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": not asymmetric,
        "strategy": "group" if group else "channel",
        "group_size": group or None,
        "dynamic": False,
    }
    token = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": token if activations else None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def model_slim(name: str, plain: Plain, *, bits: int, packed: str) -> Tensors:
    """Returns the tensors of a weight as msModelSlim stores them."""
    stem, zero, (rows, depth) = name.removesuffix(".weight"), 1 << (bits - 1), plain.q.shape
    signed = plain.q - zero
    if packed == "out":
        stored = [[pair_byte(signed[2 * o, i], signed[2 * o + 1, i]) for i in range(depth)] for o in range(rows // 2)]
    elif packed == "in":
        stored = [[pair_byte(signed[o, 2 * i], signed[o, 2 * i + 1]) for i in range(depth // 2)] for o in range(rows)]
    else:
        stored = signed
    return {
        f"{stem}.weight": np.array(stored, np.int8),
        f"{stem}.weight_scale": plain.scales,
        f"{stem}.weight_offset": (plain.zeros - zero).astype(np.float32),
    }


def model_slim_static(name: str, plain: Plain) -> Tensors:
    """Returns the tensors of a weight with scheme W8A8. Its inputs have one scale and one offset."""
    stem, weight = name.removesuffix(".weight"), (plain.q - 128).astype(np.int8)
    sums = weight.astype(np.int64).sum(axis=1)
    return {
        f"{stem}.weight": weight,
        f"{stem}.deq_scale": (plain.scales[:, 0] * np.float32(INPUT_SCALE)).astype(np.float32),
        f"{stem}.quant_bias": (-sums * INPUT_OFFSET).astype(np.int32),
        f"{stem}.input_scale": np.array([INPUT_SCALE], np.float32),
        f"{stem}.input_offset": np.array([INPUT_OFFSET], np.float32),
    }


INPUT_SCALE, INPUT_OFFSET = 0.03125, -17
"""The scale is a power of two, so that a product with the scale and its inverse has the same bits."""


def pair_byte(low: int, high: int) -> int:
    """Returns an int8 with two int4 values: ``low`` in its low bits and ``high`` in its high bits."""
    byte = (int(high) & 15) << 4 | (int(low) & 15)
    return byte - 256 if byte > 127 else byte


def slim_description(scheme: str, tensors: Tensors, group: int) -> dict[str, Any]:
    """Returns a description file. The tensors of LINEARS have ``scheme``, and all other tensors are floats."""
    stems = [name.removesuffix(".weight") for name in LINEARS]
    return {
        "version": "1.0.0",
        "model_quant_type": scheme,
        "group_size": group,
        "metadata": {},
        "optional": {},
        **{name: scheme if name.rpartition(".")[0] in stems else "FLOAT" for name in tensors},
    }


@dataclass(frozen=True)
class Case:
    """A quantised format of a model folder, with its settings."""

    layout: str
    bits: int
    group: int
    asymmetric: bool = False
    minus_one: bool = True
    scheme: str = ""
    packed: str = ""

    def config(self) -> dict[str, Any]:
        group = self.group or -1
        if self.layout == "gptq":
            version = "gptq" if self.minus_one else "gptq_v2"
            return {
                "quant_method": "gptq",
                "bits": self.bits,
                "group_size": group,
                "desc_act": False,
                "sym": not self.asymmetric,
                "checkpoint_format": version,
            }
        if self.layout == "awq":
            return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
        return compressed_config(
            self.layout,
            bits=self.bits,
            group=self.group,
            asymmetric=self.asymmetric,
            activations=self.layout == "int-quantized",
        )

    def plain(self, name: str) -> Plain:
        return make_plain(name, bits=self.bits, group=self.group, asymmetric=self.asymmetric)

    def encode(self, name: str) -> Tensors:
        plain = self.plain(name)
        if self.layout == "gptq":
            return gptq(name, plain, bits=self.bits, minus_one=self.minus_one)
        if self.layout == "awq":
            return awq(name, plain)
        if self.layout == "int-quantized":
            return int_quantized(name, plain)
        if self.scheme == "W8A8":
            return model_slim_static(name, plain)
        if self.layout == "model-slim":
            return model_slim(name, plain, bits=self.bits, packed=self.packed)
        return pack_quantized(name, plain, bits=self.bits, asymmetric=self.asymmetric)


CASES = {
    "gptq4": Case("gptq", 4, 32),
    "gptq4 asymmetric": Case("gptq", 4, 64, asymmetric=True),
    "gptq4 v2": Case("gptq", 4, 128, asymmetric=True, minus_one=False),
    "gptq4 whole rows": Case("gptq", 4, 0),
    "gptq8": Case("gptq", 8, 32),
    "gptq8 whole rows v2": Case("gptq", 8, 0, minus_one=False),
    "awq": Case("awq", 4, 64, asymmetric=True),
    "w8a8": Case("int-quantized", 8, 0),
    "w8a8 groups": Case("int-quantized", 8, 32),
    "w4a16": Case("pack-quantized", 4, 64),
    "w4a16 asymmetric": Case("pack-quantized", 4, 32, asymmetric=True),
    "w8a16": Case("pack-quantized", 8, 0),
    "slim w8a8 dynamic": Case("model-slim", 8, 0, scheme="W8A8_DYNAMIC"),
    "slim w8a8 static": Case("model-slim", 8, 0, scheme="W8A8"),
    "slim w8a16": Case("model-slim", 8, 0, scheme="W8A16"),
    "slim w4a16": Case("model-slim", 4, 64, scheme="W4A16", packed="out"),
    "slim w4a16 asymmetric": Case("model-slim", 4, 32, asymmetric=True, scheme="W4A16", packed="out"),
    "slim w4a16 whole rows": Case("model-slim", 4, 0, scheme="W4A16", packed="in"),
    "slim w4a16 unpacked": Case("model-slim", 4, 64, scheme="W4A16"),
}


def write_case(
    folder: Path,
    case: Case,
    change: Callable[[Tensors, dict[str, Any]], object] = lambda tensors, config: None,
) -> Path:
    """Writes the folder of a case and returns it.

    ``change`` may alter two dictionaries before they are written: the tensors, and the ``quantization_config`` or the
    description file.
    """
    folder.mkdir(exist_ok=True)
    tensors = float_tensors()
    for name in LINEARS:
        tensors |= case.encode(name)
    slim = case.layout == "model-slim"
    config = slim_description(case.scheme, tensors, case.group) if slim else case.config()
    change(tensors, config)
    if slim:
        arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        save_file(arrays, folder / "quant_model_weights.safetensors")
        (folder / "quant_model_description.json").write_text(json.dumps(config))
        (folder / "config.json").write_text("{}")
        return folder
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config} if config else {}))
    return folder
