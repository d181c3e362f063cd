"""Tests session files that are read in pieces of every size, damaged at every byte, cut, or have exchanged blocks."""

from __future__ import annotations

import pytest

from llm_serving.kvcache.block_hash import pack_tokens
from llm_serving.sessions.session_file import (
    Head,
    InvalidSessionError,
    Manifest,
    SessionReader,
    content_of,
    encode_block,
    encode_end,
    encode_head,
    file_chain,
    num_blocks_of,
)

TOKENS = pack_tokens(range(11))
CONTENTS = [bytes([number]) * 24 for number in range(2)]
MANIFEST = Manifest("m", "1", {"block_size": 4}, bytes(range(32)), b"", 4, 11)


def encoded(manifest: Manifest = MANIFEST, contents: list[bytes] = CONTENTS, order: tuple[int, ...] = (0, 1)) -> bytes:
    keys = file_chain(manifest, TOKENS, 2)
    blocks = b"".join(encode_block(manifest, keys[number], contents[number]) for number in order)
    return encode_head(manifest, TOKENS) + blocks + encode_end(manifest, len(order))


def read(file: bytes, size: int = 1 << 20) -> tuple[Head, list[bytes]]:
    reader, parts = SessionReader(100, 24), []
    for start in range(0, len(file), size):
        parts += reader.feed(file[start : start + size])
    if not reader.is_complete:
        raise InvalidSessionError("cut off")
    head, *records = parts
    keys = file_chain(head.manifest, head.tokens, len(records))
    return head, [content_of(head.manifest, key, record) for key, record in zip(keys, records, strict=True)]


@pytest.mark.parametrize("size", [1, 7, 64, 1 << 20])
def test_a_file_is_read_in_pieces_of_any_size(size):
    head, contents = read(encoded(), size)
    assert (head.manifest, head.tokens, contents) == (MANIFEST, TOKENS, CONTENTS)


def test_no_flipped_bit_and_no_cut_passes():
    file = encoded()
    for place in range(len(file)):
        damaged = bytearray(file)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(InvalidSessionError):
            read(bytes(damaged))
        with pytest.raises(InvalidSessionError):
            read(file[:place])
    with pytest.raises(InvalidSessionError, match="after its end"):
        read(file + b"x")


def test_a_block_at_another_place_is_refused():
    with pytest.raises(InvalidSessionError, match="not the block of its place"):
        read(encoded(order=(1, 0)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_tokens": 101}, "101 tokens"),
        ({"num_tokens": -1}, "wrong type or size"),
        ({"block_size": 0}, "wrong type or size"),
        ({"namespace": bytes(31)}, "wrong type or size"),
        ({"model": 1}, "wrong type or size"),
        ({"facts": []}, "wrong type or size"),
    ],
)
def test_a_manifest_with_wrong_values_is_refused(change, reason):
    values = {name: getattr(MANIFEST, name) for name in MANIFEST.__slots__}
    with pytest.raises(InvalidSessionError, match=reason):
        read(encode_head(Manifest(**{**values, **change}), TOKENS))


def test_a_larger_block_is_refused_before_it_is_stored():
    reader, large = SessionReader(100, 23), encoded()
    with pytest.raises(InvalidSessionError, match="at most 2 blocks of at most"):
        list(reader.feed(large))


def test_the_last_token_is_not_computed():
    assert [num_blocks_of(count, 4) for count in (0, 1, 4, 5, 9)] == [0, 0, 0, 1, 2]
