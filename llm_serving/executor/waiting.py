"""Waiting for several executors at once, in one thread."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Sequence

from llm_serving.executor.base import Executor, ExecutorEvent

__all__ = ["Poll", "poll_all"]

Poll = Callable[[float | None], list[tuple[int, ExecutorEvent]]]
"""``Executor.poll`` for several: each event with the index of the executor it comes from."""


def poll_all(executors: Sequence[Executor]) -> Poll:
    """Polls those that have something to give, and waits only while none has."""
    if len(executors) == 1:
        [only] = executors
        return lambda timeout_s: [(0, event) for event in only.poll(timeout_s)]
    return _Several(executors).poll


class _Several:
    def __init__(self, executors: Sequence[Executor]) -> None:
        self._executors = executors
        self._selector = selectors.DefaultSelector()
        for index, executor in enumerate(executors):
            self._selector.register(executor.fileno(), selectors.EVENT_READ, index)

    def poll(self, timeout_s: float | None) -> list[tuple[int, ExecutorEvent]]:
        due = [executor.next_due() for executor in self._executors]
        moments = [moment for moment in due if moment is not None]
        if moments:
            until = max(0.0, min(moments) - time.monotonic())
            timeout_s = until if timeout_s is None else min(until, timeout_s)
        active = {key.data for key, _ in self._selector.select(timeout_s)}
        if moments:
            now = time.monotonic()
            active.update(index for index, moment in enumerate(due) if moment is not None and moment <= now)
        return [(index, event) for index in sorted(active) for event in self._executors[index].poll(0.0)]
