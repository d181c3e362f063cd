"""Provides a tokenizer for the servers of the tests in this folder."""

import pytest

from llm_serving.engine.tokenizer import Tokenizer
from support.small_tokenizers import open_tokenizer, write_llama2_folder


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_tokenizer(write_llama2_folder(tmp_path_factory.mktemp("tokenizer")))
