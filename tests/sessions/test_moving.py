"""Tests sessions without an engine: which requests belong to a session, and which thread computes a chain of block
hashes.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from llm_serving.ipc.tiles import PromptTile
from llm_serving.kvcache.block_hash import pack_tokens
from llm_serving.request import Request
from llm_serving.sampling_params import SamplingParams
from llm_serving.server.generation.open_session import OpenSession
from llm_serving.sessions import exporting, importing
from llm_serving.sessions.book import Session, SessionBook
from llm_serving.sessions.session_file import Manifest, chain_of, encode_end, encode_head, file_chain

TOKENS = pack_tokens(range(11))
FACTS = {"block_size": 4}
MANIFEST = Manifest("m", "1", FACTS, bytes(range(32)), b"", 4, 11)
CONFIG: Any = SimpleNamespace(cache_namespace=b"here", max_model_len=100, pa_config=SimpleNamespace(block_size=4))
IDENTITY: Any = SimpleNamespace(facts=FACTS, namespace=MANIFEST.namespace)


class Transfers:
    """Replaces KV tiers. It has no blocks."""

    async def max_guests(self) -> int:
        return 8

    async def read(self, keys: list[Any]) -> Any:
        return SimpleNamespace(versions=(0,), contents=[])


@pytest.fixture
def threads(monkeypatch):
    """Records the threads that have computed chains of block hashes."""
    found: list[threading.Thread] = []

    def watched(compute: Any) -> Any:
        def noted(*arguments: Any) -> Any:
            found.append(threading.current_thread())
            return compute(*arguments)

        return noted

    for module in (exporting, importing):
        monkeypatch.setattr(module, "chain_of", watched(chain_of))
        monkeypatch.setattr(module, "file_chain", watched(file_chain))
    monkeypatch.setattr(exporting, "WAIT_S", 0.0)
    return found


def imported(manifest: Manifest) -> list[str]:
    transfers: Any = Transfers()
    work = importing.SessionImport(CONFIG, IDENTITY, transfers, 24)
    asyncio.run(work.feed(encode_head(manifest, TOKENS) + encode_end(manifest, 0)))
    return work.finish().differences


def exported(session: Session) -> bytes:
    async def read() -> bytes:
        transfers: Any = Transfers()
        export = exporting.SessionExport(CONFIG, IDENTITY, transfers, session)
        return b"".join([piece async for piece in export.pieces()])

    return asyncio.run(read())


def test_no_chain_is_computed_with_another_block_size(threads):
    differences = imported(replace(MANIFEST, block_size=1))
    assert differences[0] == "block_size is 1 in the file and 4 here"
    assert threads == []


def test_chains_are_computed_outside_the_event_loop(threads):
    assert imported(MANIFEST) == []
    assert exported(Session("s", "m", TOKENS, b"", b"", 0.0))
    assert len(threads) == 4
    assert threading.main_thread() not in threads


@pytest.mark.parametrize("number", [0, 1])
def test_a_request_with_images_is_no_session(number):
    tiles = (PromptTile(0, 1, 0, b""),) * number
    book = SessionBook(4, lambda: 0.0)
    OpenSession(book, "a", "s", "m", b"").note(Request("r", [1], SamplingParams(), 0.0, tiles=tiles), None)
    assert len(book) == 1 - number
