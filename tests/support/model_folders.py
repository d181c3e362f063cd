"""Writes model folders for tests: a small Llama's ``config.json``, and empty tokenizer and weight files."""

from __future__ import annotations

import json
from pathlib import Path

SMALL_LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_model_folder(
    folder: Path,
    *,
    files: tuple[str, ...] = ("model.safetensors", "tokenizer.json"),
    generation: dict[str, object] | None = None,
    remove: tuple[str, ...] = (),
    **changes: object,
) -> Path:
    """Writes a folder with ``config.json`` and empty ``files``. Returns the folder.

    ``changes`` and ``remove`` change or remove keys of ``config.json``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    values = {key: value for key, value in (SMALL_LLAMA | changes).items() if key not in remove}
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    for name in files:
        (folder / name).touch()
    return folder
