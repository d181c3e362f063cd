"""Runs the engine in its thread over the fake device, for tests that use asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from llm_serving.cluster.standby import Standby
from llm_serving.engine import schedulers
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.engine.outputs import merge_outputs
from llm_serving.errors import LLMServingError
from llm_serving.request import Request, RequestOutput
from support.fakes import (
    END_TOKEN,
    VOCABULARY,
    FakeDetokenizer,
    FakeExecutor,
    RecordingLog,
    RecordingMetrics,
    make_limits,
)


class Sink:
    """Collects the pieces and errors of a request."""

    def __init__(self) -> None:
        self.pieces: list[RequestOutput] = []
        self.errors: list[LLMServingError] = []

    def push(self, index: int, piece: RequestOutput) -> None:
        self.pieces.append(piece)

    def fail(self, error: LLMServingError) -> None:
        self.errors.append(error)


class Served:
    def __init__(self, engine: AsyncEngine, executor: FakeExecutor, log: RecordingLog) -> None:
        self.engine, self.executor, self.log = engine, executor, log

    async def whole(self, request: Request) -> RequestOutput:
        """Runs a request and joins all its pieces to one."""
        return merge_outputs([piece async for piece in self.pieces(request)])

    def pieces(self, request: Request) -> Any:
        return self.engine.generate(request.request_id, request.prompt_token_ids, request.sampling)

    async def until(self, condition: Any) -> None:
        for _ in range(2000):
            if condition():
                return
            await asyncio.sleep(0.001)
        raise AssertionError("it never came true")

    def is_idle(self) -> bool:
        return self.engine._core._front.is_idle


@asynccontextmanager
async def served(*, standby: Standby | None = None, **limits: object) -> AsyncIterator[Served]:
    """Provides a running engine. Afterwards checks that it is idle and that its thread has ended.

    If ``standby`` is given, no agent is ready at the start.
    """
    sizes = make_limits(**limits)
    config: Any = SimpleNamespace(
        model_name="fake",
        max_model_len=sizes.max_model_len,
        shape=SimpleNamespace(vocab_size=VOCABULARY),
        end_token_ids=(END_TOKEN,),
        parallel_config=SimpleNamespace(routing="prefix"),
        speculative_config=SimpleNamespace(method="off"),
        max_drafts=0,
        max_decode_entries=sizes.max_num_seqs,
        model_config=SimpleNamespace(logits_processors=()),
        log_config=SimpleNamespace(state_interval_s=60.0),
        lora_config=SimpleNamespace(max_adapters=0),
        scheduler_config=SimpleNamespace(ttft_objective_ms=500.0, tbt_objective_ms=50.0),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedulers, "scheduler_limits", lambda config: sizes)
        executor, log = FakeExecutor(sizes, ready=standby is None), RecordingLog()
        tokenizer: Any = object()
        engine = AsyncEngine(config, tokenizer, [executor], FakeDetokenizer, log, RecordingMetrics(), standby=standby)
    engine.start()
    running = Served(engine, executor, log)
    try:
        yield running
        executor.hold(False)
        if engine.status().state == "ready":
            await running.until(running.is_idle)
            assert engine.status().figures.free_blocks == engine.status().figures.total_blocks
    finally:
        await engine.stop()
    assert not any(thread.name == "engine" for thread in threading.enumerate())
    assert engine._open == {}
    engine._core._front.check_integrity()
