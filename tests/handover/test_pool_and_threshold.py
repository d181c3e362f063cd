"""Tests the ledger of handed blocks, their headers, and the learned threshold."""

from __future__ import annotations

import pytest

from llm_serving.handover.header import HEADER_BYTES, block_hashes
from llm_serving.handover.pool import HandOverPool
from llm_serving.handover.threshold import FIRST_TOKENS, PROBE_INTERVAL, PromptThreshold
from llm_serving.kvcache.block_hash import hash_blocks, root_hash


def test_full_blocks_have_the_hashes_of_the_prefix_cache() -> None:
    tokens = list(range(10))
    hashes = block_hashes(tokens, 4, b"model", b"salt")
    assert hashes[:2] == hash_blocks(tokens, 4, root_hash(b"model", b"salt"))
    assert len(hashes) == len(set(hashes)) == 3
    assert block_hashes([*tokens[:9], 77], 4, b"model", b"salt")[2] != hashes[2]
    assert block_hashes(tokens, 4, b"model", b"other")[2] != hashes[2]


def test_a_header_differs_by_generation_namespace_and_content() -> None:
    pool, other = HandOverPool(3, b"model"), HandOverPool(3, b"other model")
    first = pool.lease([bytes(16), bytes(16)], 1.0)
    assert first is not None
    headers = {pool.header(block) for block in first.blocks}
    assert headers == {first.headers[0]}, "equal content has equal headers"
    assert {len(header) for header in headers} == {HEADER_BYTES}
    assert pool.lease([bytes(16)] * 2, 1.0) is None
    pool.free(first)
    again, elsewhere = pool.lease([bytes(16)], 1.0), other.lease([bytes(16)], 1.0)
    assert again is not None
    assert elsewhere is not None
    assert len({first.headers[0], again.headers[0], elsewhere.headers[0]}) == 3
    pool.check_integrity([again])
    with pytest.raises(AssertionError, match="host blocks"):
        pool.check_integrity([])
    with pytest.raises(KeyError):
        pool.free(first)


def test_the_threshold_is_where_a_hand_over_takes_as_long_as_the_prefill() -> None:
    threshold = PromptThreshold(block_size=16)
    assert threshold.tokens(None, None) == FIRST_TOKENS
    for num_blocks in (10, 100):
        threshold.note(0.050 + 2 * num_blocks * 0.0002, num_blocks)
    # Prefill costs 0.001 s per token. A transfer costs 2 * 0.0002 / 16 s per token, and 0.050 s for any length.
    learned = threshold.tokens(0.001, 0.0002)
    assert learned == int(0.050 / (0.001 - 0.0004 / 16)) + 1
    assert (threshold.pays(learned, 0.001, 0.0002), threshold.pays(learned - 1, 0.001, 0.0002)) == (True, False)


def test_a_transfer_that_is_slower_than_the_prefill_never_pays_but_is_measured_again() -> None:
    threshold = PromptThreshold(block_size=16)
    threshold.note(1.0, 10)
    assert threshold.tokens(0.0001, 0.01) is None
    assert not any(threshold.pays(FIRST_TOKENS - 1, 0.0001, 0.01) for _ in range(3 * PROBE_INTERVAL))
    assert sum(threshold.pays(4000, 0.0001, 0.01) for _ in range(3 * PROBE_INTERVAL)) == 3


def test_an_operator_sets_the_threshold() -> None:
    threshold = PromptThreshold(block_size=16, fixed=100)
    threshold.note(1.0, 10)
    assert threshold.tokens(0.0001, 0.01) == 100
    assert [threshold.pays(count, 0.0001, 0.01) for count in (99, 100)] == [False, True]
    assert not any(threshold.pays(99, None, None) for _ in range(2 * PROBE_INTERVAL))
