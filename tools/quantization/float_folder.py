"""Writes the model of a GGUF file as a Hugging Face folder with floats, for tools that read only folders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from agent.models.names import ignorable_suffixes, weight_specs
from agent.weights.gguf.file import GGUFFile
from agent.weights.joined import stored_parts
from agent.weights.storage import STORAGE_DTYPES
from llm_serving.gguf.model_config import model_fields
from llm_serving.model.shape import ModelShape
from tools.quantization.folder_writer import FolderWriter


def write_float_folder(file: Path, folder: Path, dtype: str) -> None:
    """Writes ``config.json`` and the dequantised weights of a GGUF file to the new folder ``folder``.

    ``dtype`` is the type of the weights, for example ``float32``. The folder has no tokenizer. The new folder has
    separate tensors for each expert, even if published folders of the family have one tensor with all experts. Raises
    CheckpointError for a damaged file.
    """
    shape = ModelShape.from_path(file)
    parts = stored_parts(part for spec in weight_specs(shape) if not spec.packed_only for part in spec.tensors)
    source = GGUFFile(file)
    try:
        source.check(parts, ignorable_suffixes(shape))
        folder.mkdir()
        writer = FolderWriter(folder)
        for part in parts:
            values = np.empty(part.shape, STORAGE_DTYPES[dtype])
            source.read_into(part.name, values, dtype)
            writer.write(part.name, values)
        writer.close()
    finally:
        source.close()
    fields = model_fields(file)
    config = {key: fields.value(key) for key in fields.keys()} | {"torch_dtype": dtype}  # noqa: SIM118
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
