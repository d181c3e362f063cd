"""Tests the copies between a KV cache and the hand-over pool: content, headers and checksums."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from agent.kernels import BlockHandOvers, KernelError, block_checksum
from llm_serving.handover.header import HEADER_BYTES, pack_header
from llm_serving.ipc.shm import MoveKind
from support.sweeps import with_sweeps

BLOCKS, POOL = 6, 5


class Rig:
    """Two caches, and a hand-over pool through which a test copies blocks from one cache to the other."""

    def __init__(self, num_arrays: int, part_bytes: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.source = [rng.integers(0, 256, (BLOCKS, part_bytes), np.uint8) for _ in range(num_arrays)]
        self.target = [np.zeros((BLOCKS, part_bytes), np.uint8) for _ in range(num_arrays)]
        self.pool = np.zeros((POOL, num_arrays * part_bytes), np.uint8)
        self.headers = np.zeros((POOL, 64), np.uint8)
        self.out = BlockHandOvers(self.source, self.pool, self.headers)
        self.back = BlockHandOvers(self.target, self.pool, self.headers)

    def copy_out(self, *pairs: tuple[int, int]) -> list[int]:
        return _run(self.out, MoveKind.HAND_OUT, pairs, [_header(host) for _, host in pairs])

    def copy_in(self, *pairs: tuple[int, int], headers: list[bytes] | None = None) -> list[int]:
        return _run(self.back, MoveKind.HAND_IN, pairs, headers or [_header(host) for host, _ in pairs])


def _header(block: int, generation: int = 7) -> bytes:
    return pack_header(b"12345678", bytes([block]) * 16, generation)


def _run(copies: BlockHandOvers, kind: MoveKind, pairs: tuple[tuple[int, int], ...], headers: list[bytes]) -> list[int]:
    faults = np.zeros(len(pairs), np.int32)
    moves = np.array([(kind, *pair) for pair in pairs], np.int32)
    copies.run(moves, np.frombuffer(b"".join(headers), np.uint8), faults)
    return faults.tolist()


def reference_checksum(parts: list[bytes]) -> bytes:
    """Returns the checksum of a block, computed with Python's integers."""
    bits = (1 << 64) - 1
    keys, state = [], 0
    for _ in range(24):
        state = state + 0x9E3779B97F4A7C15 & bits
        key = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & bits
        key = (key ^ key >> 27) * 0x94D049BB133111EB & bits
        keys.append(key ^ key >> 31)
    lanes, stripe = [0] * 8, 0
    for part in parts:
        padded = part + bytes(-len(part) % 64)
        for words in struct.iter_unpack("<8Q", padded):
            for lane, word in enumerate(words):
                keyed = word ^ keys[stripe + lane]
                lanes[lane] = lanes[lane] + (keyed & 0xFFFFFFFF) * (keyed >> 32) + words[lane ^ 1] & bits
            stripe += 1
            if stripe == 16:
                lanes = [((lane ^ lane >> 47) ^ keys[16 + at]) * 0x9E3779B1 & bits for at, lane in enumerate(lanes)]
                stripe = 0
    halves = []
    for half in range(2):
        value = keys[half]
        for at in range(8):
            value = (value ^ lanes[(at + 4 * half) % 8]) * 0x9E3779B185EBCA87 & bits
            value ^= value >> 29
        halves.append(value)
    return struct.pack("<2Q", *halves)


@pytest.mark.parametrize(
    ("num_arrays", "part_bytes"),
    with_sweeps([(1, 8), (4, 96), (3, 77), (2, 40_000), (2, 1), (1, 16_384)], lambda _, size: size > 10_000),
)
def test_blocks_arrive_with_the_same_bytes(num_arrays: int, part_bytes: int) -> None:
    rig = Rig(num_arrays, part_bytes)
    assert rig.copy_out((1, 4), (5, 0), (3, 2)) == [0, 0, 0]
    assert rig.copy_in((4, 2), (0, 1), (2, 5)) == [0, 0, 0]
    for source, target in zip(rig.source, rig.target, strict=True):
        for of, at in ((1, 2), (5, 1), (3, 5)):
            np.testing.assert_array_equal(source[of], target[at])
        assert not target[[0, 3, 4]].any()
    assert rig.headers[4, :HEADER_BYTES].tobytes() == _header(4)
    assert rig.headers[4, HEADER_BYTES : HEADER_BYTES + 16].tobytes() == block_checksum(rig.pool[4], num_arrays)


@pytest.mark.parametrize("place", [0, 100, 191])
def test_each_flipped_bit_is_found(place: int) -> None:
    rig = Rig(2, 96)
    rig.copy_out((1, 4), (2, 3))
    rig.pool[4, place] ^= 16
    assert rig.copy_in((4, 1), (3, 2)) == [1, 0]
    np.testing.assert_array_equal(rig.source[0][2], rig.target[0][2])


def test_other_headers_are_refused() -> None:
    rig = Rig(2, 96)
    rig.copy_out((1, 4))
    for wrong in (_header(4, generation=6), _header(3), pack_header(b"another!", bytes([4]) * 16, 7), bytes(32)):
        assert rig.copy_in((4, 1), headers=[wrong]) == [1]
    assert not any(target.any() for target in rig.target), "nothing is copied"
    assert rig.copy_in((4, 1)) == [0]


@pytest.mark.parametrize("part_bytes", [1, 64, 101, 1024, 1030, 8192, 20_000])
def test_the_checksum_equals_a_simple_computation(part_bytes: int) -> None:
    data = np.random.default_rng(3).integers(0, 256, (3, part_bytes), np.uint8)
    # The kernel adds parts of more than 8 KiB in pieces. Each piece is a whole number of stripes, so the checksum is
    # the same.
    assert block_checksum(data.ravel(), 3) == reference_checksum([part.tobytes() for part in data])


def test_the_checksum_depends_on_the_order_of_stripes() -> None:
    data = np.random.default_rng(3).integers(0, 256, (40, 64), np.uint8)
    checksums = {block_checksum(data.ravel(), 1)}
    for at in range(39):
        swapped = data.copy()
        swapped[[at, at + 1]] = data[[at + 1, at]]
        checksums.add(block_checksum(swapped.ravel(), 1))
    for at in range(24):
        swapped = data.copy()
        swapped[[at, at + 16]] = data[[at + 16, at]]
        checksums.add(block_checksum(swapped.ravel(), 1))
    assert len(checksums) == 1 + 39 + 24


@pytest.mark.parametrize("move", [(3, 1, POOL), (3, BLOCKS, 0), (4, POOL, 1), (4, 0, -1), (1, 0, 0), (5, 0, 0)])
def test_moves_out_of_range_copy_nothing(move: tuple[int, int, int]) -> None:
    rig = Rig(1, 16)
    moves = np.array([(3, 1, 0), move], np.int32)
    with pytest.raises(KernelError):
        rig.out.run(moves, np.zeros(64, np.uint8), np.zeros(2, np.int32))
    assert not rig.pool.any()


def test_a_pool_of_other_sizes_is_refused() -> None:
    cache = [np.zeros((2, 16), np.uint8)] * 2
    with pytest.raises(ValueError, match="hand-over pool"):
        BlockHandOvers(cache, np.zeros((3, 16), np.uint8), np.zeros((3, 64), np.uint8))
    with pytest.raises(ValueError, match="equal blocks"):
        BlockHandOvers([*cache, np.zeros((2, 8), np.uint8)], np.zeros((3, 32), np.uint8), np.zeros((3, 64), np.uint8))
