"""The priority task queue: what the agent runs next.

Control runs before block moves, moves before prefill and decode, and within a class the smaller sequence number
first. Of prefill and decode the policy says which comes first: ``prefill_first``, ``decode_first``, or neither, in
every other policy; they are then one class. Since every step has a slot of its own, the order changes who waits,
never what is computed.

Agents that share a model run every step together and must agree on the order: theirs is ``in_order``, the server's.
"""

from __future__ import annotations

import heapq
import threading
import time

from llm_serving.errors import ProtocolError
from llm_serving.ipc.messages import MessageClass, Reset, Shutdown, Step, message_class

QueuedMessage = Step | Reset | Shutdown
"""What waits in the queue. ``Abort`` and ``Status`` are about the queue itself and never wait in it."""

_POSTPONED = {"prefill_first": MessageClass.DECODE, "decode_first": MessageClass.PREFILL}
"""The class that runs last, by policy."""


class TaskQueue:
    """A bounded, thread-safe priority queue of messages. One thread puts, one takes."""

    def __init__(self, policy: str, max_steps: int, *, in_order: bool = False) -> None:
        self.in_order = in_order
        """Whether everything but the end waits for what the server sent before it."""
        self._postponed = _POSTPONED.get(policy)
        self._max_steps = max_steps
        self._heap: list[tuple[tuple[int, bool], int, QueuedMessage, int]] = []
        self._num_steps = 0
        self._last_step = -1
        self._changed = threading.Condition()
        self.steps_taken = 0
        """Steps taken out to be run since the start."""

    def put(self, message: QueuedMessage) -> None:
        """Add a message. Raises ProtocolError when a step's number is not new or more wait than there are slots."""
        with self._changed:
            if isinstance(message, Step):
                self._check_step(message)
                self._last_step = message.seq
                self._num_steps += 1
            heapq.heappush(self._heap, (self._priority(message), message.seq, message, time.monotonic_ns()))
            self._changed.notify()

    def get(self) -> tuple[QueuedMessage, int]:
        """Wait for a message and take the one to run next, with the microseconds it has waited."""
        with self._changed:
            while not self._heap:
                self._changed.wait()
            _, _, message, queued_at = heapq.heappop(self._heap)
            if isinstance(message, Step):
                self._num_steps -= 1
                self.steps_taken += 1
            return message, (time.monotonic_ns() - queued_at) // 1000

    def remove_step(self, seq: int) -> Step | None:
        """Take a waiting step out of its turn; None when it has begun, ended or never was."""
        with self._changed:
            for index, (_, _, message, _) in enumerate(self._heap):
                if isinstance(message, Step) and message.seq == seq:
                    del self._heap[index]
                    heapq.heapify(self._heap)
                    self._num_steps -= 1
                    return message
            return None

    def remove_all_steps(self) -> list[Step]:
        """Take every waiting step out, in order of sequence number."""
        with self._changed:
            steps = sorted((m for _, _, m, _ in self._heap if isinstance(m, Step)), key=lambda step: step.seq)
            self._heap = [entry for entry in self._heap if not isinstance(entry[2], Step)]
            heapq.heapify(self._heap)
            self._num_steps = 0
            return steps

    @property
    def num_steps(self) -> int:
        """Steps that wait."""
        return self._num_steps

    def _check_step(self, step: Step) -> None:
        if step.seq <= self._last_step:
            raise ProtocolError(f"step {step.seq} came after step {self._last_step}: numbers must increase")
        if self._num_steps >= self._max_steps:
            raise ProtocolError(f"{self._num_steps} steps are queued already; there are {self._max_steps} slots")

    def _priority(self, message: QueuedMessage) -> tuple[int, bool]:
        """Smaller is earlier: control, moves, the steps that compute, among those the postponed ones last."""
        if self.in_order:
            return int(not isinstance(message, Shutdown)), False
        kind = message_class(message)
        return min(kind, MessageClass.PREFILL), kind is self._postponed
