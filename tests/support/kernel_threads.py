"""Helpers that change the number of kernel threads and restore it. The number applies to the whole process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from agent.kernels.library import num_threads
from performance.kernels.calls import Array
from performance.kernels.library import set_threads


@contextmanager
def threads_as_before() -> Iterator[None]:
    """A context in which a test may set any number of kernel threads.

    At its end, the earlier number of kernel threads is restored.
    """
    before = num_threads()
    try:
        yield
    finally:
        set_threads(before)


def check_threads_change_no_bit(run: Callable[[], Sequence[Array]], counts: Sequence[int]) -> None:
    """Checks that ``run`` returns the same arrays with each number of threads in ``counts``, in this order."""
    results = []
    with threads_as_before():
        for count in counts:
            set_threads(count)
            assert num_threads() == count
            results.append(run())
    for count, result in zip(counts[1:], results[1:], strict=True):
        for out, wanted in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(out, wanted, err_msg=f"{count} threads")
