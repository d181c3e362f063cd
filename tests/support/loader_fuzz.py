"""Fuzz cases for the readers of model folders: damaged files of every format that a folder may have.

A case damages one file of a small folder and opens the folder as a server or an agent does. The reader must accept the
folder or raise an error of the project.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image
from safetensors import TensorSpec, serialize_file

from agent.models.names import ignorable_suffixes, weight_specs
from agent.pooling.weights import read_pooling_weights
from agent.weights import WeightSpec, load_weights, open_weights
from llm_serving.engine.gguf_tokenizer import read_gguf_tokenizer
from llm_serving.engine.tokenizer_backends import make_tokenizer
from llm_serving.errors import LLMServingError
from llm_serving.images.resizing import resized
from llm_serving.images.tiling import cut
from llm_serving.lora.peft import read_adapter
from llm_serving.model.pooling import Pooling, read_classifier, read_pooling
from llm_serving.model.quantization import checkpoint_quantization
from llm_serving.model.shape import ModelShape
from llm_serving.model.vision import read_processing
from performance.models.folders import write_model
from performance.models.qwen_vision import write_qwen_vision_model
from performance.models.variants import FAMILY_VARIANTS
from performance.models.vision import write_vision_model
from support import gguf_files, quantised_folders
from support.embedding_folders import write_classifier_folder, write_embedding_folder
from support.fuzzing import Findings, peak_mib
from support.gguf_models import GGUF_FAMILIES, write_gguf_model
from support.gguf_tokenizers import write_byte_level_gguf, write_sentencepiece_gguf
from support.lora_folders import random_adapter
from support.model_folders import write_model_folder
from support.mutations import mutate_bytes, mutate_value
from support.quantised_folders import CASES, LINEARS, float_tensors, write_case
from support.small_tokenizers import (
    open_tokenizer,
    write_byte_level_folder,
    write_llama2_folder,
    write_qwen_folder,
    write_sentencepiece_folder,
)

_HEADER_BYTES = 700
"""Bytes at the start of a GGUF file that hold most of its header. Half of the changes are there."""


@dataclass(frozen=True)
class Format:
    """A kind of model folder.

    ``write`` creates the folder, ``files`` are the files that a case may damage, and ``open`` reads the folder.
    """

    write: Callable[[Path], object]
    files: tuple[str, ...]
    open: Callable[[Path], object]


def _load(folder: Path, specs: Sequence[WeightSpec]) -> None:
    source = open_weights(folder, specs, seed=None, ignorable=("lm_head.weight",))
    try:
        load_weights(specs, source, "float32", lambda done, of: None)
    finally:
        source.close()


def _quantised(case: str) -> Format:
    slim = case.startswith("slim")
    files = ("quant_model_weights.safetensors", "quant_model_description.json") if slim else ()
    return Format(
        lambda folder: write_case(folder, CASES[case]),
        files or ("model.safetensors", "config.json"),
        lambda folder: _load(folder, quantised_folders.SPECS),
    )


def _write_float8(folder: Path) -> None:
    """Writes linear layers of 8-bit floats with a scale for each block of 6 rows and 48 columns."""
    rng = np.random.default_rng(0)
    arrays = {name: ("float16", array) for name, array in float_tensors().items()}
    for name, (rows, columns) in LINEARS.items():
        arrays[name] = ("float8_e4m3fn", rng.integers(0, 127, (rows, columns), np.uint8))
        blocks = (-(-rows // 6), -(-columns // 48))
        arrays[f"{name}_scale_inv"] = ("float32", rng.uniform(1e-5, 1e-2, blocks).astype(np.float32))
    specs = {
        name: TensorSpec(dtype=dtype, shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes)
        for name, (dtype, array) in arrays.items()
    }
    serialize_file(specs, folder / "model.safetensors")
    scheme = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [6, 48]}
    (folder / "config.json").write_bytes(_json_bytes({"quantization_config": scheme}))


def _load_model(folder: Path) -> None:
    """Reads ``config.json`` and all weights that it names."""
    shape = ModelShape.from_hf_folder(folder)
    checkpoint_quantization(folder)
    specs = [spec for spec in weight_specs(shape) if not spec.packed_only]
    source = open_weights(folder, specs, seed=None, ignorable=ignorable_suffixes(shape))
    try:
        load_weights(specs, source, "float32", lambda done, of: None)
    finally:
        source.close()


def _adapter() -> Format:
    def write(folder: Path) -> None:
        write_model_folder(folder / "model")
        random_adapter(folder, ModelShape.from_hf_folder(folder / "model"))

    def use(folder: Path) -> None:
        read_adapter(folder, ModelShape.from_hf_folder(folder / "model"), max_rank=16, dtype="float32")

    return Format(write, ("adapter_config.json", "adapter_model.safetensors"), use)


def _pooling(
    write: Callable[[Path], object], files: tuple[str, ...], read: Callable[[Path, int], Pooling]
) -> Format:
    def use(folder: Path) -> None:
        shape = ModelShape.from_hf_folder(folder)
        pooling = read(folder, shape.hidden_size)
        model = SimpleNamespace(model_path=str(folder), load_format="safetensors", seed=0)
        config: Any = SimpleNamespace(shape=shape, model_config=model)
        read_pooling_weights(config, pooling)

    return Format(write, files, use)


def _images(write: Callable[[Path], object]) -> Format:
    """Returns the format of a model that reads images. A case also prepares an image."""

    def use(folder: Path) -> None:
        shape = ModelShape.from_hf_folder(folder)
        if shape.vision is None:
            return
        processing = read_processing(folder, shape.vision, max_tile_pixels=1 << 16)
        image = Image.new("RGB", (60, 40))
        if shape.vision.image_size:
            cut(image, processing, shape.vision.image_size)
        else:
            resized(image, shape.vision, processing, "image", is_small=False)

    return Format(write, ("preprocessor_config.json", "config.json"), use)


def _gguf(kind: int) -> Format:
    def write(folder: Path) -> None:
        gguf_files.write_gguf(folder / "model.gguf", gguf_files.make(kind)[0], gguf_files.METADATA)

    return Format(write, ("model.gguf",), lambda folder: _load(folder, gguf_files.SPECS))


def _gguf_tokenizer(write: Callable[[Path], Path], convert: Callable[[Path, Path], Path]) -> Format:
    def write_file(folder: Path) -> None:
        convert(write(folder / "source"), folder / "model.gguf")

    def use(folder: Path) -> None:
        tokenizer = make_tokenizer(read_gguf_tokenizer(folder / "model.gguf"))
        tokenizer.decode(tokenizer.encode("Once upon a time, größer 你好", add_special_tokens=True))

    return Format(write_file, ("model.gguf",), use)


def _gguf_config(family: str) -> Format:
    def write_file(folder: Path) -> None:
        write_model(GGUF_FAMILIES[family], folder / "source")
        write_gguf_model(folder / "source", folder / "model.gguf")

    return Format(write_file, ("model.gguf",), lambda folder: ModelShape.from_path(folder / "model.gguf"))


def _gguf_model(family: str) -> Format:
    """Returns the format of a GGUF file with converted tensors. A case also reads the weights of this file."""

    def use(folder: Path) -> None:
        shape = ModelShape.from_path(folder / "model.gguf")
        _load(folder / "model.gguf", [spec for spec in weight_specs(shape) if not spec.packed_only])

    return Format(_gguf_config(family).write, ("model.gguf",), use)


def _config(**changes: object) -> Format:
    def open_config(folder: Path) -> None:
        ModelShape.from_hf_folder(folder)
        checkpoint_quantization(folder)

    return Format(
        lambda folder: write_model_folder(folder, generation={"eos_token_id": [2, 3]}, **changes),  # type: ignore[arg-type]
        ("config.json", "generation_config.json"),
        open_config,
    )


def _tokenizer(write: Callable[[Path], Path], *files: str) -> Format:
    def use(folder: Path) -> None:
        suffixes = ("tokenizer.json", "tokenizer.model", "vocab.json")
        tokenizer = open_tokenizer(next(folder / name for name in suffixes if (folder / name).exists()))
        tokenizer.decode(tokenizer.encode("Once upon a time, größer 你好", add_special_tokens=True))

    return Format(write, (*files, "tokenizer_config.json"), use)


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
FORMATS: dict[str, Format] = {
    "safetensors": Format(
        lambda folder: write_case(folder, CASES["w8a8"]),
        ("model.safetensors",),
        lambda folder: _load(folder, quantised_folders.SPECS),
    ),
    "gptq": _quantised("gptq4 asymmetric"),
    "awq": _quantised("awq"),
    "compressed-tensors": _quantised("w4a16 asymmetric"),
    "fp8": Format(
        _write_float8, ("model.safetensors", "config.json"), lambda folder: _load(folder, quantised_folders.SPECS)
    ),
    "mxfp4": Format(
        lambda folder: write_model(FAMILY_VARIANTS["gpt_oss_mxfp4"], folder),
        ("model.safetensors", "config.json"),
        _load_model,
    ),
    "lora": _adapter(),
    "embeddings": _pooling(
        lambda folder: write_embedding_folder(folder, "mean_tokens", dense=True, dimensions=(16, 48), prompts=True),
        (
            *("modules.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"),
            *("config_sentence_transformers.json", "config.json", "model.safetensors"),
        ),
        lambda folder, hidden: read_pooling(folder, hidden, None),
    ),
    "classifier": _pooling(
        lambda folder: write_classifier_folder(folder, ("good", "bad", "ugly")),
        ("config.json", "model.safetensors"),
        lambda folder, hidden: read_classifier(folder),
    ),
    "images smolvlm": _images(write_vision_model),
    "images qwen": _images(write_qwen_vision_model),
    "model-slim static": _quantised("slim w8a8 static"),
    "model-slim int4": _quantised("slim w4a16"),
    "gguf q4_0": _gguf(gguf_files.Q4_0),
    "gguf q8_0": _gguf(gguf_files.Q8_0),
    "gguf f16": _gguf(gguf_files.F16),
    "gguf config llama": _gguf_config("llama"),
    "gguf config qwen3moe": _gguf_config("qwen3moe"),
    "gguf model deepseek2": _gguf_model("deepseek2"),
    "gguf model qwen35": _gguf_model("qwen35"),
    "gguf tokenizer bpe": _gguf_tokenizer(
        write_byte_level_folder, lambda source, path: write_byte_level_gguf(source, path, "gpt-2")
    ),
    "gguf tokenizer sentencepiece": _gguf_tokenizer(write_sentencepiece_folder, write_sentencepiece_gguf),
    "config llama": _config(rope_scaling=_LLAMA3_ROPE),
    "config qwen3_moe": _config(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
    ),
    "tokenizer.json": _tokenizer(write_llama2_folder, "tokenizer.json"),
    "tokenizer.model": _tokenizer(write_sentencepiece_folder, "tokenizer.model"),
    "vocab.json": _tokenizer(lambda folder: write_qwen_folder(folder, as_json=False), "vocab.json", "merges.txt"),
}


class LoaderFuzz:
    """Damages and opens folders of one format. ``folder`` must be empty, and no other object may use it."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name, self._format, self._folder = name, FORMATS[name], folder
        self._format.write(folder)
        self._format.open(folder)
        self._originals = {file: (folder / file).read_bytes() for file in self._format.files}

    def run(self, seeds: range, findings: Findings) -> None:
        """Runs the case of each seed and adds its outcome to ``findings``."""
        before = peak_mib()
        for seed in seeds:
            rng = random.Random(f"{self._name} {seed}")
            file = rng.choice(self._format.files)
            self._replace(file, damaged(rng, file, self._originals[file]))
            name = f"{self._name} {seed} ({file})"
            findings.run(name, lambda: self._format.open(self._folder), (LLMServingError,))
            self._replace(file, self._originals[file])
        findings.growth_mib += peak_mib() - before

    def keep_case(self, seed: int, place: Path) -> None:
        """Writes the damaged folder of one seed to ``place``, so that it can be inspected."""
        rng = random.Random(f"{self._name} {seed}")
        file = rng.choice(self._format.files)
        shutil.copytree(self._folder, place, dirs_exist_ok=True)
        (place / file).write_bytes(damaged(rng, file, self._originals[file]))

    def _replace(self, file: str, content: bytes) -> None:
        (self._folder / file).unlink()  # write a new file, because an earlier case may still map the old one
        (self._folder / file).write_bytes(content)


def damaged(rng: random.Random, file: str, content: bytes) -> bytes:
    """Returns the damaged content of a file.

    The damage is a change that fits the format of the file, or random changes of bytes.
    """
    suffix = Path(file).suffix
    if rng.random() < 0.6:
        if suffix == ".json":
            return _json_bytes(mutate_value(rng, json.loads(content)))
        if suffix == ".safetensors":
            size = int.from_bytes(content[:8], "little")
            header = _json_bytes(mutate_value(rng, json.loads(content[8 : 8 + size])))
            return len(header).to_bytes(8, "little") + header + content[8 + size :]
        if suffix == ".gguf":
            return mutate_bytes(rng, content, until=_HEADER_BYTES)
    return mutate_bytes(rng, content)


def _json_bytes(value: Any) -> bytes:
    return json.dumps(value).encode()
