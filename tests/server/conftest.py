"""Provides one server for all tests of the HTTP server. Its engine is reset for each test."""

from collections.abc import Iterator

import pytest

from llm_serving.engine.tokenizer import Tokenizer
from support.fake_engine import FakeEngine
from support.http_server import HttpServer, running
from support.small_tokenizers import open_tokenizer, write_llama2_folder


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_tokenizer(write_llama2_folder(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="session")
def shared_server(tokenizer: Tokenizer) -> Iterator[HttpServer]:
    with running(FakeEngine(tokenizer)) as server:
        yield server


@pytest.fixture
def server(shared_server: HttpServer) -> HttpServer:
    shared_server.engine.reset()
    shared_server.log.events.clear()
    return shared_server


@pytest.fixture
def engine(server: HttpServer) -> FakeEngine:
    return server.engine
