"""The queue of messages that the agent's device thread runs, in order of priority.

``Shutdown`` runs first, then block moves, then prefill and decode steps. Steps of one kind run in the order of their
numbers. The policy decides between prefill and decode. With ``prefill_first`` or ``decode_first``, the named kind runs
first. With every other policy, prefill and decode steps run together in the order of their numbers, but a prefill step
with ``overtakes`` runs first. Every step has its own step slot, so the order changes waiting times but never results.

Agents that share a model run every step together and must agree on the order. Their queue is ``in_order``: it keeps the
server's order.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time

from llm_serving.errors import ProtocolError
from llm_serving.ipc.messages import (
    AdapterLoad,
    MessageClass,
    Prefill,
    ProfileStart,
    ProfileStop,
    Shutdown,
    Step,
    message_class,
)

QueuedMessage = Step | ProfileStart | ProfileStop | AdapterLoad | Shutdown
"""The messages that can wait in the queue. ``Abort`` and ``Status`` never wait: the socket thread handles them."""


class StepComputed:
    """``TaskQueue.get`` returns this object instead of a message when the device has computed a step."""


class Idle:
    """``TaskQueue.get`` returns this object if no message has arrived in time."""


_LAST_CLASS = {"prefill_first": MessageClass.DECODE, "decode_first": MessageClass.PREFILL}
"""The kind of step that runs last, by policy. Under a policy that is not in this table, prefill and decode steps run in
the order of their numbers.
"""


class TaskQueue:
    """A bounded, thread-safe priority queue. The socket thread puts messages, the device thread takes them.

    With ``in_order``, messages keep the server's order. Only ``Shutdown`` overtakes earlier messages.
    """

    def __init__(self, policy: str, max_steps: int, *, in_order: bool = False) -> None:
        self._in_order = in_order
        self._last_class = _LAST_CLASS.get(policy)
        self._max_steps = max_steps
        self._heap: list[tuple[tuple[int, bool, bool], int, int, QueuedMessage, int]] = []
        # Each heap entry has an arrival number before its message. So the heap compares numbers and never two messages,
        # which have no order.
        self._arrivals = itertools.count()
        self._num_steps = 0
        self._last_step = -1
        self._changed = threading.Condition()
        self._num_computed = 0
        self.steps_taken = 0
        """Number of steps that the device thread has taken since the start."""

    def put(self, message: QueuedMessage) -> None:
        """Adds a message. Raises ProtocolError if a step's number is not new, or if as many steps wait as there are
        step slots.
        """
        with self._changed:
            if isinstance(message, Step):
                self._check_step(message)
                self._last_step = message.seq
                self._num_steps += 1
            arrival = next(self._arrivals)
            heapq.heappush(self._heap, (self._priority(message), message.seq, arrival, message, time.monotonic_ns()))
            self._changed.notify()

    def step_computed(self) -> None:
        """Wakes the device thread, because the device has computed a step that was launched ahead."""
        with self._changed:
            self._num_computed += 1
            self._changed.notify()

    def get(self, wait_s: float | None = None) -> tuple[QueuedMessage | StepComputed | Idle, int]:
        """Waits for a message. Returns the message to run next, and the microseconds for which it has waited.

        If no message waits but the device has computed a step, returns StepComputed and 0. A waiting message comes
        first, because the device would be idle until its step is launched. If nothing happens for ``wait_s`` seconds,
        returns Idle and 0. If ``wait_s`` is None, waits without limit.
        """
        with self._changed:
            while not self._heap:
                if self._num_computed:
                    self._num_computed -= 1
                    return StepComputed(), 0
                if not self._changed.wait(wait_s) and not (self._heap or self._num_computed):
                    return Idle(), 0
            _, _, _, message, queued_at = heapq.heappop(self._heap)
            if isinstance(message, Step):
                self._num_steps -= 1
                self.steps_taken += 1
            return message, (time.monotonic_ns() - queued_at) // 1000

    def remove_step(self, seq: int) -> Step | None:
        """Removes step ``seq`` from the queue and returns it. Returns None if the step is not in the queue.

        A step that has started is no longer in the queue.
        """
        with self._changed:
            for index, (_, _, _, message, _) in enumerate(self._heap):
                if isinstance(message, Step) and message.seq == seq:
                    del self._heap[index]
                    heapq.heapify(self._heap)
                    self._num_steps -= 1
                    return message
            return None

    @property
    def num_steps(self) -> int:
        """The number of waiting steps."""
        return self._num_steps

    def _check_step(self, step: Step) -> None:
        if step.seq <= self._last_step:
            raise ProtocolError(f"step {step.seq} came after step {self._last_step}: numbers must increase")
        if self._num_steps >= self._max_steps:
            raise ProtocolError(f"{self._num_steps} steps are queued already; there are {self._max_steps} slots")

    def _priority(self, message: QueuedMessage) -> tuple[int, bool, bool]:
        """Returns the sort key of a message. The message with the smallest key runs first."""
        if self._in_order:
            return int(isinstance(message, Step)), False, False
        kind = message_class(message)
        overtakes = isinstance(message, Prefill) and message.overtakes
        return min(kind, MessageClass.PREFILL), kind is self._last_class, not overtakes
