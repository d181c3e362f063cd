"""From what the HTTP edge knows to a ``Request``: what is wrong with it is said here, at the door."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from llm_serving.errors import DeadlineExceededError, RequestError
from llm_serving.request import Request, SamplingParams, SchedulingParams
from llm_serving.telemetry.receipt import Receipt

if TYPE_CHECKING:
    from llm_serving.config import Config

__all__ = ["RequestFactory"]


class RequestFactory:
    """Makes requests of one deployment. ``clock`` is the engine's."""

    def __init__(self, config: Config, clock: Callable[[], float]) -> None:
        self.end_token_ids = frozenset(config.end_token_ids)
        self._vocab_size = config.shape.vocab_size
        self._clock = clock
        self._ttft_objective = config.scheduler_config.ttft_objective_ms / 1000.0
        self._tbt_objective = config.scheduler_config.tbt_objective_ms / 1000.0

    def make(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        arrival_time: float | None,
        scheduling: SchedulingParams,
    ) -> Request:
        """A request that enters the queue now. ``arrival_time``: when it came, by default now.

        Raises RequestError for token ids outside the vocabulary, DeadlineExceededError when its deadline has passed.
        """
        self._check_tokens(prompt_token_ids)
        now = self._clock()
        arrival = now if arrival_time is None else arrival_time
        if scheduling.deadline is not None and now >= arrival + scheduling.deadline:
            raise DeadlineExceededError(
                f"the deadline was {_ms(scheduling.deadline)} ms after the request's arrival; reading it took"
                f" {_ms(now - arrival)} ms. Allow more time.",
                param="deadline_ms",
            )
        ttft, tbt = scheduling.ttft_objective, scheduling.tbt_objective
        return Request(
            request_id,
            prompt_token_ids,
            sampling,
            arrival,
            self.end_token_ids,
            priority=scheduling.priority,
            tenant=scheduling.tenant,
            cache_salt=scheduling.cache_salt,
            group=scheduling.group,
            ttft_objective=self._ttft_objective if ttft is None else ttft,
            tbt_objective=self._tbt_objective if tbt is None else tbt,
            deadline=None if scheduling.deadline is None else arrival + scheduling.deadline,
            receipt=Receipt(now),
        )

    def _check_tokens(self, token_ids: Sequence[int]) -> None:
        if len(token_ids) and not (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
            wrong = next(token for token in token_ids if not 0 <= token < self._vocab_size)
            raise RequestError(
                f"token id {wrong} in the prompt is not in the vocabulary (0 to {self._vocab_size - 1})",
                param="prompt",
            )


def _ms(seconds: float) -> float:
    return round(seconds * 1000.0, 3)
