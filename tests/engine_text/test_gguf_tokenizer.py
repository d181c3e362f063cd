"""Compares tokenizers that are read from GGUF files with those of the original files. Damaged files are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers as fast_library
from hypothesis import given
from hypothesis import strategies as st

from llm_serving.engine.gguf_tokenizer import read_gguf_tokenizer
from llm_serving.engine.tokenizer import Tokenizer
from llm_serving.engine.tokenizer_backends import make_tokenizer
from llm_serving.errors import CheckpointError
from support.gguf_tokenizers import write_byte_level_gguf, write_entries, write_sentencepiece_gguf
from support.small_tokenizers import (
    BOS,
    CHAT_TEMPLATE,
    QWEN_SPECIAL,
    ROLES,
    open_tokenizer,
    write_byte_level_folder,
    write_qwen_folder,
    write_sentencepiece_folder,
)


def open_gguf(path: Path) -> Tokenizer:
    return make_tokenizer(read_gguf_tokenizer(path))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Tokenizer]]:
    """Returns for each kind of tokenizer two tokenizers, one from a Hugging Face folder and one from a GGUF file."""
    folder = tmp_path_factory.mktemp("gguf")
    piece = write_sentencepiece_folder(folder / "sentencepiece")
    bare = write_sentencepiece_folder(folder / "bare", dummy_prefix=False, add_bos_token=False)
    words = write_byte_level_folder(folder / "gpt2")
    qwen = write_qwen_folder(folder / "qwen")
    return {
        "sentencepiece": (
            open_tokenizer(piece),
            open_gguf(write_sentencepiece_gguf(piece, folder / "sentencepiece.gguf")),
        ),
        "no prefix": (
            open_tokenizer(bare),
            open_gguf(
                write_sentencepiece_gguf(bare, folder / "bare.gguf", add_space_prefix=False, add_bos_token=False)
            ),
        ),
        "gpt2": (open_tokenizer(words), open_gguf(write_byte_level_gguf(words, folder / "gpt2.gguf", "gpt-2"))),
        "qwen2": (
            open_tokenizer(qwen),
            open_gguf(write_byte_level_gguf(qwen, folder / "qwen.gguf", "qwen2", eos_token_id=332)),
        ),
    }


texts = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=("Cs",)), max_size=8),
        st.sampled_from([*ROLES, *QWEN_SPECIAL, "</s>", " fox", "12345", "we'll", "e\u0301", "\r\n\n ", "<tool call>"]),
    ),
    max_size=6,
).map("".join)


@given(text=texts)
def test_texts_have_the_tokens_of_the_original_files(pairs: dict[str, tuple[Tokenizer, Tokenizer]], text: str) -> None:
    for kind, (original, ours) in pairs.items():
        ids = original.encode(text)
        assert ours.encode(text) == ids, kind
        for skip in (True, False):
            assert ours.decode(ids, skip) == original.decode(ids, skip), kind


def test_special_tokens_are_those_of_the_original_files(pairs: dict[str, tuple[Tokenizer, Tokenizer]]) -> None:
    for kind in ("sentencepiece", "no prefix", "qwen2"):
        original, ours = pairs[kind]
        assert (ours.special_token_ids, ours.vocab_size) == (original.special_token_ids, original.vocab_size), kind
        assert ours.eos_token_ids == original.eos_token_ids, kind


WORDS = {
    "gpt-2": ("It's 1234  ok\n\n x", ["It", "'s", " 1234", " ", " ok", "\n\n", " x"]),
    "smollm": ("a 1234 ok", ["a", " ", "1", "2", "3", "4", " ok"]),
    "llama-bpe": ("It'S 12345", ["It", "'S", " ", "123", "45"]),
    "qwen2": ("ab 12", ["ab", " ", "1", "2"]),
    "dbrx": ("It'S 12345HelloWorld", ["It", "'S", " ", "123", "45", "HelloWorld"]),
    "gpt-4o": (
        "It's HelloWORLD'LL 12345é$a?\n/b\n\n  x",
        ["It's", " Hello", "WORLD'LL", " ", "123", "45", "é", "$a", "?\n/", "b", "\n\n", " ", " x"],
    ),
    "tekken": ("HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
    "qwen35": ("we'Ll ne\u0301e 12\n", ["we", "'Ll", " ne\u0301e", " ", "1", "2", "\n"]),
    "deepseek-llm": ("Hi 42 !你好的 x\u05d0\n ", ["Hi", " ", "4", "2", " !", "你好的", " x", "\u05d0", "\n", " "]),
    "deepseek-coder": ("Hi 42 !你好 x\u05d0\n", ["Hi", " ", "4", "2", " !", "你好", " x\u05d0", "\n"]),
    "deepseek-v3": ("ab 1234你好 !x", ["ab", " ", "123", "4", "你好", " !", "x"]),
}
"""Texts with their words, by llama.cpp's name of the pre-tokenizer. The words follow the publishers' tokenizer.json."""


@pytest.mark.parametrize("pre", WORDS)
def test_each_pre_tokenizer_splits_words_as_its_publisher_does(tmp_path: Path, pre: str) -> None:
    source = write_byte_level_folder(tmp_path / "source")
    files = read_gguf_tokenizer(write_byte_level_gguf(source, tmp_path / "a.gguf", pre, bos_token_id=0))
    assert files.content is not None
    text, words = WORDS[pre]
    found = fast_library.Tokenizer.from_buffer(files.content).pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in found] == words


def test_a_text_begins_with_bos_if_the_file_or_the_pre_tokenizer_says_so(tmp_path: Path) -> None:
    source = write_byte_level_folder(tmp_path / "source")
    cases = (("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("dbrx", None, False))
    for pre, entry, begins in cases:
        path = write_byte_level_gguf(source, tmp_path / "a.gguf", pre, bos_token_id=0, add_bos_token=entry)
        ids = open_gguf(path).encode("fox")
        assert (ids[0] == 0) == begins, (pre, entry)


def test_the_chat_template_comes_from_the_file(tmp_path: Path) -> None:
    source = write_sentencepiece_folder(tmp_path / "source")
    path = write_sentencepiece_gguf(source, tmp_path / "a.gguf")
    assert open_gguf(path).chat_template.is_missing
    entries = {"model": "llama", "tokens": ["<unk>", BOS, "</s>"], "scores": [0.0] * 3, "token_type": [2, 3, 3]}
    path = write_entries(tmp_path / "b.gguf", {**entries, "bos_token_id": 1, "eos_token_id": 2}, CHAT_TEMPLATE)
    template = open_gguf(path).chat_template
    messages = [{"role": "user", "content": "hello"}]
    assert template.render(messages, add_generation_prompt=True) == f"{BOS}<|user|>hello</s><|assistant|>"


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"tokens": None}, "tokenizer.ggml.tokens = 'NoneType': must be a list of text"),
    "other kind": ({"model": "bert"}, "tokenizer.ggml.model = 'bert': is not supported; only gpt2, llama, t5"),
    "other words": ({"pre": "viking"}, "tokenizer.ggml.pre = 'viking': is not supported; only dbrx, deepseek-coder"),
    "no merges": ({"merges": None}, "tokenizer.ggml.merges = 'NoneType': must be a list of text"),
    "few types": ({"token_type": [1, 1]}, "tokenizer.ggml.token_type = 'list': must be a list of 341 numbers"),
    "far token": ({"eos_token_id": 4000}, "tokenizer.ggml.eos_token_id = 4000: must be below 341"),
    "flag": ({"add_bos_token": "yes"}, "tokenizer.ggml.add_bos_token = 'yes': must be true or false"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_tokenizer_is_refused(tmp_path: Path, case: str) -> None:
    entries, expected = BROKEN[case]
    source = write_byte_level_folder(tmp_path / "source")
    path = write_byte_level_gguf(source, tmp_path / "a.gguf", **{"pre": "gpt-2", **entries})
    with pytest.raises(CheckpointError) as caught:
        open_gguf(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)
