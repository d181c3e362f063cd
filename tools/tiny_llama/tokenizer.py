"""Trains the tokenizer: a sentencepiece BPE model, and the same model as a ``tokenizer.json``.

There is no prefix space and no normalisation, and unknown characters become bytes: every text decodes to itself. The
special tokens are user-defined pieces, so that sentencepiece finds them in a rendered chat template as ``tokenizers``
does.
"""

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import sentencepiece as spm

from .corpus import Document

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
ROLE_TOKENS = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIAL_TOKENS = (BOS, EOS, PAD, *ROLE_TOKENS.values())
UNK_ID, BOS_ID, EOS_ID, PAD_ID = 0, 1, 2, 3

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('The role must be system, user or assistant, not ' + message['role'] + '.') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> bytes:
    """Returns the serialised sentencepiece model of ``texts``. Ids 0-6 are ``<unk>`` and special, 7-262 are bytes."""
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=True,
        character_coverage=1.0,
        split_digits=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=list(SPECIAL_TOKENS),
        unk_id=UNK_ID,
        bos_id=BOS_ID,
        eos_id=EOS_ID,
        pad_id=PAD_ID,
        pad_piece=PAD,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def load_tokenizer(model: bytes) -> spm.SentencePieceProcessor:
    """Returns a processor for a serialised model."""
    processor = spm.SentencePieceProcessor()
    processor.LoadFromSerializedProto(model)
    return processor


def encode_document(tokenizer: spm.SentencePieceProcessor, document: Document) -> list[int]:
    """Returns the ids of a document as the chat template renders it. EOS ends every message and every plain text."""
    ids = [BOS_ID]
    for role, text in document:
        if role in ROLE_TOKENS:
            ids.append(tokenizer.PieceToId(ROLE_TOKENS[role]))
        ids += [*tokenizer.Encode(text), EOS_ID]
    return ids


def render(document: Document) -> str:
    """Returns the document as text with its special tokens, as the chat template renders it."""
    turns = (f"{ROLE_TOKENS.get(role, '')}{text}{EOS}" for role, text in document)
    return BOS + "".join(turns)


def merge_rules(tokenizer: spm.SentencePieceProcessor) -> list[tuple[str, str]]:
    """Returns the merges of the model: all divisions of a piece into two pieces, in the order in which they were
    learned.

    sentencepiece gives the n-th learned piece the score -n, and applies the merge with the best score first.
    ``tokenizers`` does the same with the rank of a merge.
    """
    size = tokenizer.GetPieceSize()
    ordinary = [
        i for i in range(size) if not (tokenizer.IsByte(i) or tokenizer.IsUnknown(i) or is_special(tokenizer, i))
    ]
    ids = {tokenizer.IdToPiece(i): i for i in ordinary}
    rules = []
    for piece in sorted(ids, key=lambda p: -tokenizer.GetScore(ids[p])):
        splits = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        rules += sorted((s for s in splits if s[0] in ids and s[1] in ids), key=lambda s: (ids[s[0]], ids[s[1]]))
    return rules


def is_special(tokenizer: spm.SentencePieceProcessor, token_id: int) -> bool:
    """Returns True for a special token."""
    return tokenizer.IdToPiece(token_id) in SPECIAL_TOKENS


def added_token(content: str) -> dict[str, Any]:
    """The flags of a special token."""
    return {
        "content": content,
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }


def tokenizer_json(tokenizer: spm.SentencePieceProcessor) -> dict[str, Any]:
    """The ``tokenizer.json`` that gives the ids of the sentencepiece model."""
    size = tokenizer.GetPieceSize()
    sequence = [{"SpecialToken": {"id": BOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    second = [{"SpecialToken": {"id": BOS, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": tokenizer.PieceToId(token), **added_token(token)} for token in SPECIAL_TOKENS],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": sequence,
            "pair": [*sequence, *second],
            "special_tokens": {BOS: {"id": BOS, "ids": [BOS_ID], "tokens": [BOS]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {tokenizer.IdToPiece(i): i for i in range(size)},
            "merges": [list(rule) for rule in merge_rules(tokenizer)],
        },
    }


def tokenizer_config(max_length: int) -> dict[str, Any]:
    """The ``tokenizer_config.json``, with the chat template."""
    return {
        "add_bos_token": True,
        "add_eos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {str(i): added_token(token) for i, token in enumerate(("<unk>", *SPECIAL_TOKENS))},
        "bos_token": BOS,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "legacy": False,
        "model_max_length": max_length,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
    }


def save_tokenizer(model: bytes, folder: Path, max_length: int) -> None:
    """Write ``tokenizer.model``, ``tokenizer.json``, ``tokenizer_config.json`` and ``special_tokens_map.json``."""
    (folder / "tokenizer.model").write_bytes(model)
    contents = {
        "tokenizer.json": tokenizer_json(load_tokenizer(model)),
        "tokenizer_config.json": tokenizer_config(max_length),
        "special_tokens_map.json": {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "unk_token": "<unk>"},
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
