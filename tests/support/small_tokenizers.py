"""Trains small real tokenizers when a test needs them, of the kinds that Llama and Qwen models have."""

from __future__ import annotations

import functools
import io
import json
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from llm_serving.engine.tokenizer import Tokenizer
from llm_serving.engine.tokenizer_backends import make_tokenizer
from llm_serving.engine.tokenizer_files import read_tokenizer_files

TEXT = (
    "Once upon a time there was a little fox who lived by the river. The fox said hello to the bird, and the bird said "
    "hello to the fox. They walked together through the wood, over the hill and down to the sea. How are you today? "
    "I am fine, thank you. One two three four five six seven eight nine ten."
)
BOS, EOS, UNKNOWN = "<s>", "</s>", "<unk>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@functools.cache
def sentencepiece_model(*, dummy_prefix: bool = True) -> bytes:
    """Returns a BPE model with byte fallback.

    Its ids are <unk> 0, <s> 1, </s> 2, the roles 3 to 5, and the bytes 6 to 261.
    """
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.replace(". ", ".\n").split("\n") * 4),
        model_writer=model,
        model_type="bpe",
        vocab_size=360,
        byte_fallback=True,
        add_dummy_prefix=dummy_prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=list(ROLES),
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def tokenizer_config(**changes: Any) -> dict[str, Any]:
    """Returns ``tokenizer_config.json`` for the model of ``sentencepiece_model``, with some changes."""
    added = {str(i): {"content": text, "special": True} for i, text in enumerate((UNKNOWN, BOS, EOS, *ROLES))}
    values: dict[str, Any] = {
        "bos_token": BOS,
        "eos_token": EOS,
        "unk_token": UNKNOWN,
        "added_tokens_decoder": added,
        "chat_template": CHAT_TEMPLATE,
    }
    values.update(changes)
    return {key: value for key, value in values.items() if value is not None}


def write_sentencepiece_folder(folder: Path, *, dummy_prefix: bool = True, **changes: Any) -> Path:
    """Writes a folder with ``tokenizer.model``. ``changes`` replace entries of ``tokenizer_config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(dummy_prefix=dummy_prefix))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(**changes)), encoding="utf-8")
    return folder / "tokenizer.model"


def write_llama2_folder(folder: Path) -> Path:
    """Writes a ``tokenizer.json`` in the form of Llama 2, with the vocabulary of ``sentencepiece_model``.

    This form puts a word mark before the text, encodes unknown characters as bytes, and strips a space when it decodes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = sentencepiece.SentencePieceProcessor()
    model.LoadFromSerializedProto(sentencepiece_model())
    size = model.get_piece_size()
    vocabulary = {model.id_to_piece(i): i for i in range(size)}
    special = [UNKNOWN, BOS, EOS, *ROLES]
    ordinary = [p for p, i in vocabulary.items() if not model.is_byte(i) and p not in special]
    merges = []
    for piece in sorted(ordinary, key=lambda p: -model.get_score(vocabulary[p])):
        splits = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        merges += [split for split in splits if split[0] in vocabulary and split[1] in vocabulary]
    content = {
        "version": "1.0",
        "truncation": {"max_length": 8, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        "padding": None,
        "added_tokens": [{"id": vocabulary[t], **_added(t)} for t in special],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "\u2581"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": BOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {BOS: {"id": BOS, "ids": [1], "tokens": [BOS]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": UNKNOWN,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocabulary,
            "merges": [list(merge) for merge in merges],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config()), encoding="utf-8")
    return folder / "tokenizer.json"


def _added(content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    return {"content": content, "special": True, **flags}


def write_byte_level_folder(folder: Path) -> Path:
    """Writes a byte-level BPE ``tokenizer.json`` in the form of Llama 3."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|begin|>", "<|eot|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT, "größer 你好 🙂 naïve"] * 4, trainer)
    tokenizer.add_tokens(["<tool call>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|begin|>", "eos_token": {"content": "<|eot|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder / "tokenizer.json"


def open_tokenizer(vocabulary: Path) -> Tokenizer:
    return make_tokenizer(read_tokenizer_files(vocabulary))


QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write_qwen_folder(folder: Path, *, as_json: bool = True) -> Path:
    """Writes a byte-level BPE tokenizer like Qwen2's.

    It splits numbers into single digits, normalises to NFC, has the tokens of ChatML, and puts no token before a text.
    The files are ``tokenizer.json``, or else ``vocab.json`` and ``merges.txt``, with special tokens in
    ``tokenizer_config.json``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(tokenizers.Regex(QWEN_WORDS), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT, "größer 你好 🙂 naïve 123"] * 4, trainer)
    size = tokenizer.get_vocab_size()
    added = {str(size + i): _added(token) for i, token in enumerate(QWEN_SPECIAL)}
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "added_tokens_decoder": added,
        "chat_template": CHATML,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if not as_json:
        tokenizer.model.save(str(folder))
        return folder / "vocab.json"
    tokenizer.add_special_tokens(list(QWEN_SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"
