"""A Llama with static W8A8 layers: its folder in the format of msModelSlim, and the same model in NumPy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from performance.models.folders import write_safetensors
from support.llama_in_numpy import Floats, NumpyLlama

CLIPPING = 0.3
"""Fraction of the inputs' range that the calibration keeps.

Many inputs are clipped, so the model differs from floats.
"""


NORMS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "input_layernorm"),
    **dict.fromkeys(("gate_proj", "up_proj"), "post_attention_layernorm"),
}
"""The name of the norm before each linear layer."""


class StaticLlama(NumpyLlama):
    """A Llama whose linear layers, except the output layer, have static W8A8 quantisation.

    The weights come from a float folder. The ranges of the layers' inputs come from one calibration run over
    ``tokens``.
    """

    def __init__(self, folder: Path, tokens: list[int], *, norm_biases: bool = False) -> None:
        super().__init__(folder, "float", "float32")
        self.norm_biases: dict[str, np.ndarray] = {}
        """The bias of each norm that has one, by the norm's name."""
        norms = [name for name in self._weights if name.endswith("layernorm.weight")] if norm_biases else []
        for seed, name in enumerate(norms):
            bias = np.random.default_rng(seed).normal(0, 0.4, self._weights[name].shape)
            self.norm_biases[name.removesuffix(".weight")] = bias.astype(np.float32)
        self._ranges: dict[str, tuple[float, float]] = {}
        self.static: dict[str, dict[str, np.ndarray]] = {}
        self.logits(tokens)
        for name, (low, high) in self._ranges.items():
            self.static[name] = _static_tensors(self._weights[f"{name}.weight"], low * CLIPPING, high * CLIPPING)

    def _linear(self, x: Floats, name: str) -> Floats:
        if name == "lm_head":
            return super()._linear(x, name)
        layer_name, _, linear = name.rpartition(".")
        if linear in NORMS:
            x = x + self.norm_biases.get(f"{layer_name.rpartition('.')[0]}.{NORMS[linear]}", np.float32(0))
        if not self.static:
            self._ranges[name] = (float(x.min()), float(x.max()))
            return super()._linear(x, name)
        layer = self.static[name]
        q = x * (np.float32(1) / layer["input_scale"]) + layer["input_offset"]
        integers = np.clip(np.rint(q.astype(np.float32)), -128, 127).astype(np.int64)
        sums = integers @ layer["weight"].T.astype(np.int64) + layer["quant_bias"]
        return sums.astype(np.float32) * layer["deq_scale"]

    def write(self, folder: Path, source: Path) -> None:
        """Writes the quantised folder. ``source`` is the float folder, whose config and tokenizer are copied."""
        folder.mkdir()
        for name in ("config.json", "tokenizer.json"):
            (folder / name).write_bytes((source / name).read_bytes())
        tensors: dict[str, np.ndarray] = {}
        description: dict[str, object] = {"version": "1.0.0", "model_quant_type": "W8A8", "group_size": 0}
        for name, values in self._weights.items():
            stem = name.removesuffix(".weight")
            layer = {f"{stem}.{end}": array for end, array in self.static.get(stem, {}).items()}
            tensors |= layer or {name: values}
            description |= dict.fromkeys(layer, "W8A8") if layer else {name: "FLOAT"}
        for name, bias in self.norm_biases.items():
            tensors[f"{name}.bias"] = bias
            description[f"{name}.bias"] = "W8A8"
        write_safetensors(folder / "quant_model_weights.safetensors", tensors)
        (folder / "quant_model_description.json").write_text(json.dumps(description))


def _static_tensors(weight: Floats, low: float, high: float) -> dict[str, np.ndarray]:
    """Returns the tensors of scheme W8A8 for a weight.

    The calibrated range of its inputs is from ``low`` to ``high``.
    """
    scales = np.abs(weight).max(axis=1) / np.float32(127)
    integers = np.rint(weight / scales[:, None]).astype(np.int8)
    input_scale = np.float32((high - low) / 255)
    offset = np.float32(np.rint(-128 - low / input_scale))
    return {
        "weight": integers,
        "input_scale": np.array([input_scale], np.float32),
        "input_offset": np.array([offset], np.float32),
        "deq_scale": scales * input_scale,
        "quant_bias": (-integers.astype(np.int64).sum(axis=1) * int(offset)).astype(np.int32),
    }
