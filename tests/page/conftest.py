"""Provides a browser, and a server with a scripted engine, for all tests of the web pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.chat_page import ChatPage
from support.fake_engine import FakeEngine
from support.http_server import HttpServer, running
from support.small_tokenizers import open_tokenizer, write_llama2_folder
from tools.browser import Browser, missing_programs


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if missing := missing_programs():
        pytest.skip(f"needs Debian's packages chromium and chromium-driver; missing: {', '.join(missing)}")
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> FakeEngine:
    engine = FakeEngine(open_tokenizer(write_llama2_folder(tmp_path_factory.mktemp("tokenizer"))))
    engine.max_model_len = 16384
    return engine


@pytest.fixture(scope="session")
def server(engine: FakeEngine) -> Iterator[HttpServer]:
    with running(engine, max_prompt_tokens=8192, max_body_bytes=1 << 20) as server:
        yield server


@pytest.fixture
def page(browser: Browser, server: HttpServer, engine: FakeEngine) -> Iterator[ChatPage]:
    """Provides the chat page of a new user. After the test, the browser console must have no errors except expected
    ones.
    """
    engine.reset()
    engine.tokens_per_piece = 16
    page = ChatPage(browser, server, engine)
    page.forget()
    page.open()
    yield page
    assert page.problems() == []
