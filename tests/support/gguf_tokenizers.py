"""Converts the small tokenizers to GGUF files, with the writer of the ``gguf`` library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import sentencepiece

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def write_sentencepiece_gguf(vocabulary: Path, path: Path, **entries: Any) -> Path:
    """Writes the pieces of a ``tokenizer.model`` and their scores to a GGUF file.

    ``entries`` replace entries of its metadata.
    """
    model = sentencepiece.SentencePieceProcessor(model_file=str(vocabulary))
    ids = range(model.get_piece_size())
    added = json.loads(vocabulary.with_name("tokenizer_config.json").read_text())["added_tokens_decoder"]

    def kind(token_id: int) -> int:
        if model.is_unknown(token_id):
            return UNKNOWN
        if model.is_byte(token_id):
            return BYTE
        special = str(token_id) in added and added[str(token_id)]["special"]
        return CONTROL if special or model.is_control(token_id) else NORMAL

    values = {
        "model": "llama",
        "tokens": [model.id_to_piece(i) for i in ids],
        "scores": [model.get_score(i) for i in ids],
        "token_type": [kind(i) for i in ids],
        "bos_token_id": model.bos_id(),
        "eos_token_id": model.eos_id(),
        "unknown_token_id": model.unk_id(),
    }
    return write_entries(path, {**values, **entries})


def write_byte_level_gguf(vocabulary: Path, path: Path, pre: str, **entries: Any) -> Path:
    """Writes the tokens and merges of a ``tokenizer.json`` to a GGUF file.

    ``entries`` replace entries of its metadata.
    """
    content = json.loads(vocabulary.read_text())
    added = {each["id"]: each for each in content["added_tokens"]}
    tokens = {number: token for token, number in content["model"]["vocab"].items()}
    tokens.update({number: each["content"] for number, each in added.items()})
    kinds = {number: CONTROL if each["special"] else USER_DEFINED for number, each in added.items()}
    ids = range(len(tokens))
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [tokens[i] for i in ids],
        "token_type": [kinds.get(i, NORMAL) for i in ids],
        "merges": [each if isinstance(each, str) else " ".join(each) for each in content["model"]["merges"]],
    }
    return write_entries(path, {**values, **entries})


def write_entries(path: Path, entries: dict[str, Any], template: str | None = None) -> Path:
    """Writes a GGUF file that has no tensors, only metadata of a tokenizer.

    Entries whose value is None are left out.
    """
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in entries.items():
        name = f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    if template is not None:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path
