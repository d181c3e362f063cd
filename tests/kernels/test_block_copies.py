"""Compares copies of cache blocks with NumPy, for every type that a cache may have."""

from __future__ import annotations

import numpy as np
import pytest

from agent.kernels import BlockCopies
from agent.kernels.library import KernelError
from support.cache_blocks import COPY, IN, OUT, after_moves, bits, make_caches, random_moves


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint16", "int8"])
@pytest.mark.parametrize(("num_arrays", "tail"), [(1, (1,)), (2, (3, 5, 7)), (13, (2, 16, 36))])
def test_random_moves_in_order(dtype: str, num_arrays: int, tail: tuple[int, ...]) -> None:
    device, host = make_caches(num_arrays, dtype, tail)
    moves = random_moves(60)
    wanted = after_moves(device, host, moves)
    BlockCopies(device, host).run(moves)
    assert (bits(device), bits(host)) == (bits(wanted[0]), bits(wanted[1]))


def test_two_blocks_change_places_through_the_host() -> None:
    device, host = make_caches(3, "float16", (4, 8))
    before = [array.copy() for array in device]
    BlockCopies(device, host).run(np.array([(OUT, 1, 0), (COPY, 2, 1), (IN, 0, 2), (COPY, 3, 3)], np.int32))
    for array, old in zip(device, before, strict=True):
        old[[1, 2]] = old[[2, 1]]
        assert array.tobytes() == old.tobytes()


def test_no_moves_and_no_pool() -> None:
    device, _ = make_caches(2, "int8", (3,))
    copies = BlockCopies(device, [array[:0] for array in device])
    copies.run(np.zeros((0, 3), np.int32))
    copies.run(np.array([(COPY, 1, 2)], np.int32))
    assert all(array[2].tobytes() == array[1].tobytes() for array in device)


@pytest.mark.parametrize(
    ("move", "reason"),
    [
        ((3, 1, 1), "kind"),
        ((-1, 1, 1), "kind"),
        ((COPY, 9, 1), "source"),
        ((COPY, -1, 1), "source"),
        ((COPY, 1, 9), "destination"),
        ((OUT, 1, 4), "destination"),
        ((IN, 4, 1), "source"),
        ((IN, 1, 9), "destination"),
    ],
)
def test_a_wrong_move_moves_nothing(move: tuple[int, int, int], reason: str, capfd: pytest.CaptureFixture[str]) -> None:
    device, host = make_caches(2, "float32", (5,))
    before = bits(device), bits(host)
    with pytest.raises(KernelError, match="block copies were refused"):
        BlockCopies(device, host).run(np.array([(COPY, 1, 2), move], np.int32))
    assert (bits(device), bits(host)) == before
    assert reason in capfd.readouterr().err


@pytest.mark.parametrize(
    "moves",
    [np.zeros((1, 3), np.int64), np.zeros(3, np.int32), np.zeros((1, 2), np.int32), np.zeros((3, 2), np.int32).T],
    ids=["type", "flat", "narrow", "strided"],
)
def test_moves_of_another_layout_are_refused(moves: np.ndarray) -> None:
    device, host = make_caches(1, "int8", (3,))
    with pytest.raises(ValueError, match=r"they must be contiguous int32 \[moves, 3\]"):
        BlockCopies(device, host).run(moves)


def test_arrays_that_are_not_alike_are_refused() -> None:
    device, host = make_caches(2, "int8", (3,))
    with pytest.raises(ValueError, match="have equal blocks"):
        BlockCopies(device, [array.view(np.uint8) for array in host])
    with pytest.raises(ValueError, match="contiguous"):
        BlockCopies([array[::2] for array in device], host)
    with pytest.raises(ValueError, match="need 2 host arrays"):
        BlockCopies(device, host[:1])
    with pytest.raises(ValueError, match="of equal length"):
        BlockCopies([device[0], device[1][:5]], host)
