"""Converts a folder of float weights to integers, layer by layer, in the layouts of compressed-tensors."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.weights.storage import to_float32
from agent.weights.tensor_files import TensorFiles
from llm_serving.errors import CheckpointError
from llm_serving.model.quantization import checkpoint_quantization
from llm_serving.model.shape import ModelShape
from tools.quantization.folder_writer import FolderWriter
from tools.quantization.gptq import Hessian, gptq
from tools.quantization.numpy_llama import NumpyLlama
from tools.quantization.rounding import (
    Float32Array,
    Quantised,
    Settings,
    round_to_nearest,
    stored_arrays,
)

Report = Callable[[int, int], None]
"""Reports progress: the number of tensors written so far, and the number of all tensors."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
_LINEAR = re.compile(
    r"(self_attn\.[qkvo]|mlp\.(experts\.\d+\.)?(gate|up|down))_proj|block_sparse_moe\.experts\.\d+\.w[123]"
)
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth", "*.gguf")


def quantise_folder(
    folder: Path, out: Path, settings: Settings, report: Report, *, calibration: NDArray[np.int32] | None = None
) -> None:
    """Writes a quantised copy of the model ``folder`` to the new folder ``out``.

    The weights of linear layers become integers. With ``calibration`` tokens [sequences, length] they are rounded by
    GPTQ, otherwise each element is rounded to the nearest integer. Embedding, norms and output layer keep their type.
    The copy is written under another name, and renamed when it is complete. Raises CheckpointError if ``out`` exists or
    if the model cannot be quantised.
    """
    shape = ModelShape.from_hf_folder(folder)
    if checkpoint_quantization(folder) is not None:
        raise CheckpointError(f"{folder}: is quantised already; start from the model's floats")
    if calibration is not None and not _is_plain_llama(shape):
        raise CheckpointError(
            f"{folder}: GPTQ supports only plain Llamas, this is {shape.architecture}; use --method rtn"
        )
    if out.exists():
        raise CheckpointError(f"{out}: already exists; remove it or name another folder")
    partial = out.with_name(f"{out.name}.partial")
    files = TensorFiles(folder)
    try:
        partial.mkdir(parents=True)
        _Conversion(files, shape, partial, settings, report).run(calibration)
        _copy_other_files(folder, partial, settings)
        partial.rename(out)
    except FileExistsError as reason:
        raise CheckpointError(f"{partial}: remains from an incomplete conversion; remove it") from reason
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        files.close()


def _is_plain_llama(shape: ModelShape) -> bool:
    """Returns True if ``NumpyLlama`` implements the complete model."""
    biased = shape.attention_bias or shape.output_bias
    return not (biased or shape.query_key_norm or shape.sliding_window or shape.experts)


class _Conversion:
    """Converts the weights of one model folder, in the order of the layers."""

    def __init__(self, files: TensorFiles, shape: ModelShape, out: Path, settings: Settings, report: Report) -> None:
        self._files = files
        self._shape = shape
        self._report = report
        self._names = sorted(files.names(), key=_place)
        linears = [name for name in self._names if _is_linear(name)]
        if not linears:
            raise CheckpointError(f"{files.folder}: there are no linear layers of a Llama in its weights")
        self._settings = replace(settings, scale_dtype=files.float_dtype(linears[0]))
        self._check(linears)
        self._writer = FolderWriter(out)

    def run(self, calibration: NDArray[np.int32] | None) -> None:
        """Writes all tensors of the new folder. Uses GPTQ if there are ``calibration`` tokens [sequences, length]."""
        forward = None if calibration is None else _Forward(self, self._shape, calibration)
        layer, quantised = -1, dict[str, Quantised]()
        for done, name in enumerate(self._names):
            self._report(done, len(self._names))
            match = _LAYER.fullmatch(name)
            if forward is not None and match and int(match[1]) != layer:
                layer = int(match[1])
                quantised = forward.next_layer(layer, self._settings)
            if not _is_linear(name):
                self._writer.write(name, self._files.read(name)[0])
            else:
                weight = quantised.get(name) or round_to_nearest(self.floats(name), self._settings)
                for each, array in stored_arrays(name.removesuffix(".weight"), weight, self._settings).items():
                    self._writer.write(each, array)
            self._files.release(name)
        self._writer.close()
        self._report(len(self._names), len(self._names))

    def floats(self, name: str) -> Float32Array:
        """Reads a tensor of the original folder as float32."""
        array, dtype = self._files.read(name)
        return np.array(to_float32(array, dtype))

    def _check(self, linears: list[str]) -> None:
        for name in linears:
            shape = self._files.info(name).shape
            if len(shape) != 2 or shape[1] % self._settings.group_of(shape[1]):
                raise CheckpointError(
                    f"{self._files.where(name)}: tensor {name} has shape {list(shape)}, whose inputs are not whole "
                    f"groups of {self._settings.group}; choose another --group"
                )


class _Forward:
    """Runs the calibration text through the model layer by layer, and quantises each layer.

    The inputs of a layer come from earlier layers that are already quantised.
    """

    def __init__(self, weights: _Conversion, shape: ModelShape, tokens: NDArray[np.int32]) -> None:
        if int(tokens.max()) >= shape.vocab_size:
            raise CheckpointError(f"the tokenizer gives the id {tokens.max()}; the vocabulary has {shape.vocab_size}")
        self._weights = weights
        self._model = NumpyLlama(shape, tokens.shape[1])
        self._hidden = weights.floats("model.embed_tokens.weight")[tokens]

    def next_layer(self, index: int, settings: Settings) -> dict[str, Quantised]:
        """Quantises the linear layers of a decoder layer by GPTQ. Returns them by name.

        The inputs of a linear layer are calculated with the weights that are already quantised.
        """
        prefix, quantised = f"model.layers.{index}.", dict[str, Quantised]()
        norms = {
            name: self._weights.floats(f"{prefix}{name}.weight")
            for name in ("input_layernorm", "post_attention_layernorm")
        }

        def observe(names: tuple[str, ...], inputs: Float32Array) -> None:
            hessian = Hessian(inputs.shape[1])
            hessian.add(inputs)
            for name in names:
                full = f"{prefix}{name}.weight"
                quantised[full] = gptq(self._weights.floats(full), hessian.matrix, settings)

        def apply(name: str, x: Float32Array) -> Float32Array:
            return x @ quantised[f"{prefix}{name}.weight"].values().T

        self._hidden = self._model.layer(self._hidden, norms, apply, observe)
        return quantised


def _place(name: str) -> tuple[int, str]:
    """Returns the sort key of a tensor: the embedding first, then layer by layer, then all other tensors."""
    match = _LAYER.fullmatch(name)
    return (int(match[1]), name) if match else (-1 if "embed" in name else 1 << 30, name)


def _is_linear(name: str) -> bool:
    match = _LAYER.fullmatch(name)
    return match is not None and _LINEAR.fullmatch(match[2]) is not None


def _copy_other_files(folder: Path, out: Path, settings: Settings) -> None:
    """Copies all files except weights, and adds the quantisation to ``config.json``."""
    weights = {path for pattern in _WEIGHT_FILES for path in folder.glob(pattern)}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path not in weights:
            shutil.copyfile(path, out / path.name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = quantization_config(settings)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def quantization_config(settings: Settings) -> Mapping[str, Any]:
    """Returns the entry ``quantization_config`` of ``config.json``, in the format of compressed-tensors."""
    token = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    weights = {
        "num_bits": settings.bits,
        "type": "int",
        "symmetric": not settings.asymmetric,
        "strategy": "group" if settings.group else "channel",
        "group_size": settings.group or None,
        "dynamic": False,
    }
    activations = token if settings.layout == "int-quantized" else None
    return {
        "quant_method": "compressed-tensors",
        "format": settings.layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}},
        "ignore": ["lm_head"],
    }
