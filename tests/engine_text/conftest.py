from pathlib import Path

import pytest

from llm_serving.engine.tokenizer import Tokenizer
from support.small_configs import TINY_LLAMA
from support.small_tokenizers import (
    open_tokenizer,
    write_byte_level_folder,
    write_llama2_folder,
    write_sentencepiece_folder,
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(scope="session")
def tokenizers(folder: Path) -> dict[str, Tokenizer]:
    """Returns tokenizers by name.

    The Llama 2 model is in both file formats. One SentencePiece model puts no space before a text.
    """
    return {
        "llama2": open_tokenizer(write_llama2_folder(folder / "llama2")),
        "sentencepiece": open_tokenizer(write_sentencepiece_folder(folder / "sentencepiece")),
        "no_prefix": open_tokenizer(write_sentencepiece_folder(folder / "no_prefix", dummy_prefix=False)),
        "tiny_llama": open_tokenizer(TINY_LLAMA / "tokenizer.json"),
        "tiny_llama_sentencepiece": open_tokenizer(TINY_LLAMA / "tokenizer.model"),
        "byte_level": open_tokenizer(write_byte_level_folder(folder / "byte_level")),
    }
