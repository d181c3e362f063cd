"""Tests the byte-level BPE of Qwen folders, stored as ``tokenizer.json`` or as ``vocab.json`` and ``merges.txt``."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer

from llm_serving.engine.tokenizer import Tokenizer
from llm_serving.engine.tokenizer_files import find_vocabulary
from llm_serving.errors import CheckpointError
from support.small_tokenizers import QWEN_SPECIAL, open_tokenizer, write_qwen_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("qwen")


@pytest.fixture(scope="module")
def as_json(folder: Path) -> Tokenizer:
    return open_tokenizer(write_qwen_folder(folder / "json"))


@pytest.fixture(scope="module")
def as_files(folder: Path) -> Tokenizer:
    return open_tokenizer(write_qwen_folder(folder / "files", as_json=False))


texts = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=("Cs",)), max_size=8),
        st.sampled_from([*QWEN_SPECIAL, " fox", "12345", "we'll", "e\u0301", "\r\n\n ", "你好"]),
    ),
    max_size=6,
).map("".join)


@given(text=texts)
def test_both_files_give_the_same_tokens(as_json: Tokenizer, as_files: Tokenizer, text: str) -> None:
    assert as_files.encode(text) == as_json.encode(text)


@given(text=texts)
def test_a_text_comes_back_composed(as_json: Tokenizer, text: str) -> None:
    """Decoding an encoded text gives its NFC form.

    A special token splits the text before it is normalised, so the test compares the parts between special tokens.
    """
    parts = [text]
    for token in QWEN_SPECIAL:
        parts = [piece for part in parts for piece in part.split(token)]
    for part in parts:
        assert as_json.decode(as_json.encode(part)) == unicodedata.normalize("NFC", part)


def test_decoding_agrees_with_the_library(folder: Path, as_json: Tokenizer) -> None:
    library = FastTokenizer.from_file(str(folder / "json" / "tokenizer.json"))
    ids = as_json.encode("<|im_start|>user\nThe fox, 42 years old<|im_end|>")
    for skip in (True, False):
        assert as_json.decode(ids, skip) == library.decode(ids, skip_special_tokens=skip)


def test_special_tokens(as_json: Tokenizer, as_files: Tokenizer) -> None:
    for tokenizer in (as_json, as_files):
        assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (333, None, (332,))
        assert tokenizer.special_token_ids == frozenset((330, 331, 332))
        assert tokenizer.encode("") == []
        assert tokenizer.encode("<|im_start|><|im_end|>") == [331, 332]
        assert tokenizer.decode([331, *tokenizer.encode("hello"), 332]) == "hello"


def test_digits_stand_alone(as_files: Tokenizer) -> None:
    assert [as_files.piece(token) for token in as_files.encode("1234")] == ["1", "2", "3", "4"]


def test_a_conversation_is_encoded(as_json: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    text = as_json.chat_template.render(messages)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = as_json.encode(text, add_special_tokens=False)
    assert [i for i in ids if i >= 330] == [331, 332, 331, 332, 331]


def test_tokenizer_json_goes_first(folder: Path, tmp_path: Path) -> None:
    write_qwen_folder(tmp_path, as_json=False)
    assert find_vocabulary(tmp_path).name == "vocab.json"
    assert find_vocabulary(tmp_path, "LlamaTokenizerFast").name == "vocab.json"
    write_qwen_folder(tmp_path)
    assert find_vocabulary(tmp_path).name == "tokenizer.json"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "merges.txt").unlink(), "vocab.json: there is no merges.txt in the same folder"),
        (lambda folder: (folder / "vocab.json").write_text("{"), "vocab.json: not a valid vocab.json"),
        (
            lambda folder: (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "X"})),
            "tokenizer_class = 'X': must be Qwen2Tokenizer or GPT2Tokenizer if there is no tokenizer.json",
        ),
    ],
)
def test_bad_files_are_named(tmp_path: Path, change, message: str) -> None:
    file = write_qwen_folder(tmp_path, as_json=False)
    change(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        open_tokenizer(file)


def test_gpt2s_own_words(tmp_path: Path) -> None:
    file = write_qwen_folder(tmp_path, as_json=False)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "GPT2TokenizerFast"}))
    tokenizer = open_tokenizer(file)
    assert tokenizer.decode(tokenizer.encode("e\u0301 fox 12")) == "e\u0301 fox 12", "not normalised"
