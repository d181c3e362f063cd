"""Tests that a draft model with other tokens than the model is refused. The error names the first difference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llm_serving.config import load_config
from llm_serving.engine.tokenizer_backends import load_tokenizer
from llm_serving.errors import CheckpointError
from support.draft_models import write_shorter_model


def load_with_draft(folder: Path) -> None:
    settings = ["speculative_config.method=draft", f"speculative_config.model={folder}"]
    load_tokenizer(load_config("llama_tiny_cpu.yaml", settings))


def test_a_draft_model_with_the_same_tokens_is_accepted(tmp_path: Path) -> None:
    load_with_draft(write_shorter_model(tmp_path, 1))


def test_the_first_other_token_is_named(tmp_path: Path) -> None:
    file = write_shorter_model(tmp_path, 1) / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    by_id = {token_id: piece for piece, token_id in vocab.items()}
    vocab[by_id[100]], vocab[by_id[101]] = 101, 100
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError) as caught:
        load_with_draft(tmp_path)
    assert f"{tmp_path}: token 100 of its tokenizer is {by_id[101]!r}, and {by_id[100]!r} in" in str(caught.value)


def test_another_number_of_tokens_is_named(tmp_path: Path) -> None:
    file = write_shorter_model(tmp_path, 1) / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    added = {"id": 2048, "content": "<more>", "special": True, "normalized": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    tokenizer["added_tokens"].append(added | flags)
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="its tokenizer has 2049 tokens, and the model's has 2048"):
        load_with_draft(tmp_path)
