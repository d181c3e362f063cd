"""Runs shadow serving: selects a fraction of the main model's answers. Lets the main model and the candidate score
them, and compares the scores.

The models score an answer after its last byte was sent, and only while no user has requests (unless ``while_busy`` is
set). The runner starts no model. While the candidate is not in memory, answers are left out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from llm_serving.config.shadow_section import ShadowConfig
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import LLMServingError
from llm_serving.registry.registry import ModelRegistry
from llm_serving.registry.version import RunningVersion
from llm_serving.shadow.comparison import Comparison, ScoredAnswer, recommendation
from llm_serving.shadow.scoring import ServedAnswer, score
from llm_serving.telemetry.log import EventLog

T = TypeVar("T")

POLL_S = 0.02
"""Seconds between two checks whether the engines are idle, while an answer waits or is scored."""
MAX_ATTEMPTS = 8
"""Maximum number of attempts to score an answer. A request of a user interrupts an attempt. After the last attempt, the
answer is left out.
"""
_PROBE_TEXT = "The quick brown fox, 1234567 \u2013 \u00e9\u4e2d\u6587\n\tdef f(x): return x"

Score = Callable[[AsyncEngine, ServedAnswer], Coroutine[Any, Any, ScoredAnswer]]


class View(Protocol):
    """The part of a model version's ``ServerState`` that the runner uses."""

    @property
    def engine(self) -> AsyncEngine: ...


V = TypeVar("V", bound=View)


class _InterruptedError(Exception):
    """Raised when a request of a user arrives while an answer is scored."""


class ShadowRunner:
    """Runs the shadow serving of a server. Only the event loop's thread may use this object.

    ``registry`` has the main model and the candidate. ``scorer`` lets a model score an answer; tests replace it.
    """

    def __init__(self, registry: ModelRegistry[V], config: ShadowConfig, log: EventLog, scorer: Score = score) -> None:
        self.config = config
        self.comparison = Comparison()
        self.counts: Counter[str] = Counter()
        """Number of answers by outcome: ``compared``, or the reason why they were left out."""
        self._registry: ModelRegistry[Any] = registry
        self._log = log
        self._score = scorer
        self._waiting: deque[tuple[ServedAnswer, int]] = deque()
        self._offered = 0.0
        self._arrived = asyncio.Event()
        self._versions: tuple[int, int] | None = None
        self._checked: tuple[int, int] | None = None
        self._task: asyncio.Task[None] | None = None
        self._recommended = "wait"

    def start(self) -> None:
        """Begins to compare. Call this method on the event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Ends the comparison."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def offer(self, engine: AsyncEngine, answer: ServedAnswer) -> None:
        """Adds an answer of ``engine`` to the waiting answers if it belongs to the configured fraction. Returns
        immediately.
        """
        if engine is not self._registry.main.engine or not answer.output or not answer.prompt:
            return
        self._offered += self.config.share
        if self._offered < 1.0:
            return
        self._offered -= 1.0
        if len(self._waiting) >= self.config.max_waiting:
            self.counts["queue_full"] += 1
            return
        self._waiting.append((answer, 1))
        self._arrived.set()

    def reset(self) -> None:
        """Forgets all comparisons."""
        self.comparison, self.counts, self._recommended = Comparison(), Counter(), "wait"

    def as_json(self) -> dict[str, Any]:
        """Returns the figures and the recommendation."""
        verdict, reasons = recommendation(self.comparison, self.config)
        return {
            "object": "shadow",
            "main": self._registry.models[0].name,
            "candidate": self.config.model,
            "share": self.config.share,
            "waiting": len(self._waiting),
            "answers": dict(self.counts),
            "comparison": self.comparison.as_json(),
            "recommendation": verdict,
            "reasons": reasons,
        }

    async def _run(self) -> None:
        while True:
            await self._arrived.wait()
            if not self._waiting:
                self._arrived.clear()
                continue
            answer, attempt = self._waiting.popleft()
            try:
                outcome = await self._compare(answer)
            except _InterruptedError:
                outcome = "interrupted"
                if attempt < MAX_ATTEMPTS:
                    self._waiting.appendleft((answer, attempt + 1))
                    continue
            except LLMServingError:
                outcome = "failed"  # for example, the prompt is too long for the candidate
            self.counts[outcome] += 1
            self._note()

    async def _compare(self, answer: ServedAnswer) -> str:
        """Lets both models score an answer, and adds the scores to the comparison. Returns the outcome, a key of
        ``counts``. Raises _InterruptedError or LLMServingError.
        """
        versions = await self._idle_versions()
        if versions is None:
            return "candidate_not_ready"
        with contextlib.ExitStack() as leases:
            for version in versions:
                leases.callback(version.lease().release)
            engines = versions[0].engine, versions[1].engine
            self._begin_with((versions[0].number, versions[1].number))
            if not await self._are_comparable(engines):
                return "other_tokenizer"
            if self._are_busy(engines):
                raise _InterruptedError
            scores = [await self._undisturbed(self._score(engine, answer), engines) for engine in engines]
            self.comparison.add(*scores)
            return "compared"

    async def _idle_versions(self) -> tuple[RunningVersion[Any], RunningVersion[Any]] | None:
        """Waits until users have no requests, and returns the versions of both models. Returns None if a model is not
        in memory.

        This method holds no leases, so a reload or an unload may replace the versions during the wait. The returned
        versions are the present ones: no other task runs between the last check and the return.
        """
        main, candidate = self._registry.models[0], self._registry.find(self.config.model)
        assert candidate is not None, "checked at the start"
        while main.version is not None and candidate.version is not None and candidate.status().is_serving:
            versions = main.version, candidate.version
            if not self._are_busy((versions[0].engine, versions[1].engine)):
                return versions
            await asyncio.sleep(POLL_S)
        return None

    def _begin_with(self, numbers: tuple[int, int]) -> None:
        """Resets the comparison if a reload has replaced a model. ``numbers`` are the version numbers of both models.
        """
        if self._versions not in (None, numbers):
            self.reset()
        self._versions = numbers

    async def _are_comparable(self, engines: tuple[AsyncEngine, AsyncEngine]) -> bool:
        """Returns True if both models seem to have the same tokenizer.

        The vocabularies must have the same size, and a test text must give the same tokens.
        """
        if self._checked == self._versions:
            return True
        sizes = {engine.config.shape.vocab_size for engine in engines}
        texts = [await asyncio.to_thread(engine.tokenizer.encode, _PROBE_TEXT) for engine in engines]
        if len(sizes) > 1 or texts[0] != texts[1]:
            return False
        self._checked = self._versions
        return True

    def _are_busy(self, engines: tuple[AsyncEngine, AsyncEngine]) -> bool:
        """Returns True if scoring must wait because users have requests."""
        return not self.config.while_busy and any(map(_num_requests, engines))

    async def _undisturbed(self, work: Coroutine[Any, Any, T], engines: tuple[AsyncEngine, AsyncEngine]) -> T:
        """Runs ``work``, which sends one request, and returns its result. If users send requests, cancels ``work`` and
        raises _InterruptedError.
        """
        task = asyncio.ensure_future(work)
        try:
            while True:
                await asyncio.wait((task,), timeout=None if self.config.while_busy else POLL_S)
                if task.done():
                    return task.result()
                if sum(map(_num_requests, engines)) > 1:
                    raise _InterruptedError
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _note(self) -> None:
        """Logs the recommendation if it has changed."""
        verdict, reasons = recommendation(self.comparison, self.config)
        if verdict != self._recommended:
            self._recommended = verdict
            self._log.event(
                "shadow_recommendation",
                candidate=self.config.model,
                recommendation=verdict,
                reasons=reasons,
                answers=self.comparison.answers,
            )


def _num_requests(engine: AsyncEngine) -> int:
    figures = engine.status().figures
    return figures.running + figures.waiting + figures.swapped
