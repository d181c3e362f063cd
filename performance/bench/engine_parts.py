"""Provides parts of an engine without a device, for benchmarks of the engine thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llm_serving.executor.base import AgentReady, ExecutorEvent
from llm_serving.executor.step_slots import StepSlots
from llm_serving.ipc import messages
from llm_serving.ipc.channel import FrameBuffer, frame
from llm_serving.ipc.shm import NUM_SLOTS, SlotLayout, SlotLimits, StepSlot
from llm_serving.request import Request
from llm_serving.sampling_params import SamplingParams
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.output import ScheduledStep, StepKind

PROMPT_TOKENS = 64
"""Number of tokens of each prompt."""
BLOCK_SIZE = 16
"""Tokens of a KV block."""
WARM_UP_STEPS = 20
"""Number of decode steps of each engine before the measurement."""
FIRST_TOKEN_ID = 300
"""Smallest token id in prompts and outputs. From this id on, the embedded model's vocabulary has only plain text."""


class Stopwatch:
    """Measures calls of wrapped functions, and adds up their seconds by name. The calls must not be nested."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.seconds: dict[str, float] = {}

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = self.clock()
            try:
                return function(*arguments)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + self.clock() - start

        return timed


class InstantExecutor:
    """An executor without agents. It writes step slots and encodes messages as the server does, but in private memory.

    ``poll`` completes the oldest step in flight. ``device_seconds`` is the time that the simulated device has used.
    """

    def __init__(self, limits: SlotLimits, stopwatch: Stopwatch, evict_mib: int) -> None:
        layout = SlotLayout.of(limits)
        self._slots = [StepSlot(layout, bytearray(layout.slot_bytes)) for _ in range(NUM_SLOTS)]
        self._queue: list[tuple[ScheduledStep, int]] = []
        self._step_slots = StepSlots(limits, BLOCK_SIZE, range(1), self._slots)
        self._frames = FrameBuffer()
        self._write = stopwatch.wrap("write", self._write_step)
        self._read = stopwatch.wrap("read", self._read_answer)
        self._is_new = True
        self._clock = stopwatch.clock
        self._others = np.ones(evict_mib << 17)
        """Array of 8-byte elements. Reading it evicts all other data from the processor's caches."""
        self.device_seconds = 0.0
        self.last_kind: StepKind | None = None

    @property
    def num_free_slots(self) -> int:
        return len(self._step_slots.free_slots)

    def submit(self, step: ScheduledStep) -> None:
        self._queue.append((step, self._write(step)))

    def poll(self, timeout_s: float | None) -> list[ExecutorEvent]:
        if self._is_new:
            self._is_new = False
            return [AgentReady()]
        if not self._queue:
            return []
        start = self._clock()
        step, index = self._queue.pop(0)
        self.last_kind = step.kind
        self._run(self._slots[index])
        self._others.sum()
        answer = frame(messages.encode(messages.StepDone(seq=step.seq, slot=index)))
        self.device_seconds += self._clock() - start
        event: ExecutorEvent = self._read(answer)
        return [event]

    def wake(self) -> None: ...

    def fileno(self) -> int:
        raise AssertionError("a single executor is polled without a descriptor")

    def next_due(self) -> float | None:
        return None

    def abort(self, seq: int) -> None: ...

    def distrust(self, check: str, reason: str, step: int | None = None) -> None: ...

    def publish_masks(self, seq: int, masks: Sequence[npt.NDArray[np.uint32]]) -> None: ...

    def request_status(self) -> None: ...

    def profile(self, folder: str | None) -> bool:
        return False

    def release(self) -> None: ...

    def host_pools(self) -> Sequence[Any]:
        return ()

    def load_adapter(self, slot: int, memory: object) -> None: ...

    def drop_adapter(self, slot: int) -> None: ...

    def agents(self) -> list[dict[str, object]]:
        return []

    def _write_step(self, step: ScheduledStep) -> int:
        message = self._step_slots.write(step)
        frame(messages.encode(message))
        return message.slot

    def _read_answer(self, data: bytes) -> ExecutorEvent:
        [payload] = self._frames.feed(data)
        message = messages.decode_agent_message(payload)
        assert isinstance(message, messages.StepDone)
        result = self._step_slots.take(0, message)
        assert result is not None
        return result

    @staticmethod
    def _run(slot: StepSlot) -> None:
        count = slot.num_seqs
        tokens = FIRST_TOKEN_ID + (slot.context_lens[:count] * 31 + slot.rows[:count] * 7) % 1500
        slot.sampled_ids[:count] = np.where(slot.do_sample[:count], tokens, -1)


def limits_for(sequences: int, max_tokens: int) -> tuple[SchedulerLimits, SlotLimits]:
    """Returns limits of a scheduler and of its step slots, with capacity for all sequences to run at the same time."""
    max_model_len = PROMPT_TOKENS + max_tokens + BLOCK_SIZE
    blocks = -(-max_model_len // BLOCK_SIZE)
    limits = SchedulerLimits(
        num_blocks=2 * sequences * blocks + 64,
        block_size=BLOCK_SIZE,
        max_model_len=max_model_len,
        max_prompt_len=PROMPT_TOKENS,
        max_num_seqs=sequences,
        max_num_batched_tokens=max(sequences, sequences * PROMPT_TOKENS),
        prefill_batch_size=sequences,
        decode_batch_size=sequences,
    )
    return limits, SlotLimits(limits.max_num_batched_tokens, sequences, blocks, limits.max_model_len)


def request_of(index: int, max_tokens: int) -> Request:
    """Returns a request that ends after ``max_tokens`` tokens."""
    prompt = [FIRST_TOKEN_ID + (index + place) % 1000 for place in range(PROMPT_TOKENS)]
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Request(f"cmpl-{index}", prompt, sampling, 0.0)


def fail(message: str) -> None:
    """Raises RuntimeError. A flight recorder calls this function if it cannot record."""
    raise RuntimeError(message)
