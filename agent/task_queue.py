"""The queue of messages that the agent's device thread runs, in order of priority.

Control messages run first, then block moves, then prefill and decode steps. Within a class, the smaller sequence number
runs first. The policy decides between prefill and decode: with ``prefill_first`` or ``decode_first`` one of them runs
first; with every other policy both are one class. Every step has its own slot, so the order changes waiting times but
never results.

Agents that share a model run every step together and must agree on the order. Their queue is ``in_order``: it keeps the
server's order.
"""

from __future__ import annotations

import heapq
import threading
import time

from llm_serving.errors import ProtocolError
from llm_serving.ipc.messages import MessageClass, Reset, Shutdown, Step, message_class

QueuedMessage = Step | Reset | Shutdown
"""The messages that wait in the queue. ``Abort`` and ``Status`` are about the queue and never wait in it."""

_LAST_CLASS = {"prefill_first": MessageClass.DECODE, "decode_first": MessageClass.PREFILL}
"""The class that runs last, by policy."""


class TaskQueue:
    """A bounded, thread-safe priority queue. One thread puts messages, another thread takes them."""

    def __init__(self, policy: str, max_steps: int, *, in_order: bool = False) -> None:
        self.in_order = in_order
        """Whether every message but Shutdown waits for all earlier messages."""
        self._last_class = _LAST_CLASS.get(policy)
        self._max_steps = max_steps
        self._heap: list[tuple[tuple[int, bool], int, QueuedMessage, int]] = []
        self._num_steps = 0
        self._last_step = -1
        self._changed = threading.Condition()
        self.steps_taken = 0
        """Number of steps that the device thread has taken since the start."""

    def put(self, message: QueuedMessage) -> None:
        """Adds a message. Raises ProtocolError if a step's number is not new or all slots are already queued."""
        with self._changed:
            if isinstance(message, Step):
                self._check_step(message)
                self._last_step = message.seq
                self._num_steps += 1
            heapq.heappush(self._heap, (self._priority(message), message.seq, message, time.monotonic_ns()))
            self._changed.notify()

    def get(self) -> tuple[QueuedMessage, int]:
        """Waits for a message. Returns the message to run next and the microseconds that it waited."""
        with self._changed:
            while not self._heap:
                self._changed.wait()
            _, _, message, queued_at = heapq.heappop(self._heap)
            if isinstance(message, Step):
                self._num_steps -= 1
                self.steps_taken += 1
            return message, (time.monotonic_ns() - queued_at) // 1000

    def remove_step(self, seq: int) -> Step | None:
        """Removes a waiting step. Returns None if the step has started or ended, or never was in the queue."""
        with self._changed:
            for index, (_, _, message, _) in enumerate(self._heap):
                if isinstance(message, Step) and message.seq == seq:
                    del self._heap[index]
                    heapq.heapify(self._heap)
                    self._num_steps -= 1
                    return message
            return None

    def remove_all_steps(self) -> list[Step]:
        """Removes all waiting steps and returns them in the order of their sequence numbers."""
        with self._changed:
            steps = sorted((m for _, _, m, _ in self._heap if isinstance(m, Step)), key=lambda step: step.seq)
            self._heap = [entry for entry in self._heap if not isinstance(entry[2], Step)]
            heapq.heapify(self._heap)
            self._num_steps = 0
            return steps

    @property
    def num_steps(self) -> int:
        """The number of waiting steps."""
        return self._num_steps

    def _check_step(self, step: Step) -> None:
        if step.seq <= self._last_step:
            raise ProtocolError(f"step {step.seq} came after step {self._last_step}: numbers must increase")
        if self._num_steps >= self._max_steps:
            raise ProtocolError(f"{self._num_steps} steps are queued already; there are {self._max_steps} slots")

    def _priority(self, message: QueuedMessage) -> tuple[int, bool]:
        """Returns the sort key: control first, then moves, then the other steps; the smaller key runs first."""
        if self.in_order:
            return int(not isinstance(message, Shutdown)), False
        kind = message_class(message)
        return min(kind, MessageClass.PREFILL), kind is self._last_class
