"""Makes the ``Request`` of a sequence, with the defaults of the configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from llm_serving.config import Config
from llm_serving.constraints.token_rules import TokenRules
from llm_serving.engine.receipts import in_ms
from llm_serving.errors import DeadlineExceededError, RequestError
from llm_serving.request import Constraint, Request, SchedulingParams
from llm_serving.sampling_params import SamplingParams
from llm_serving.telemetry.receipt import Receipt


class RequestMaker:
    """Makes requests for one engine. ``note_traces`` is called for each request with a trace."""

    def __init__(self, config: Config, clock: Callable[[], float], note_traces: Callable[[], None]) -> None:
        self._config = config
        self._clock = clock
        self._note_traces = note_traces
        self._end_token_ids = frozenset(config.end_token_ids)
        has_processors = bool(config.model_config.logits_processors)
        self._free = TokenRules(config.shape.vocab_size) if has_processors else None
        """Rules that allow every token. None without logits processors.

        Agents run logits processors only for sequences with a mask. So requests without their own constraint get one
        with these rules.
        """

    def constraint(self) -> Constraint | None:
        """Returns the constraint for a request without its own. None if the model has no logits processors."""
        return None if self._free is None else self._free.start(None)

    def make(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        arrival_time: float | None,
        scheduling: SchedulingParams,
    ) -> Request:
        """Returns a new request. Its receipt begins in the phase ``queue``.

        Raises RequestError and DeadlineExceededError, see ``AsyncEngine.open``.
        """
        self._check_tokens(prompt_token_ids)
        if scheduling.pool:
            self._check_pool(scheduling.pool, len(prompt_token_ids))
        if self._free is not None:
            sampling = replace(sampling, keeps_history=True)
        now = self._clock()
        arrival = now if arrival_time is None else arrival_time
        deadline = None if scheduling.deadline is None else arrival + scheduling.deadline
        if deadline is not None and now >= deadline:
            raise DeadlineExceededError(
                f"the deadline was {in_ms(deadline - arrival)} ms after the request's arrival; reading the request took"
                f" {in_ms(now - arrival)} ms. Allow more time.",
                param="deadline_ms",
            )
        if scheduling.trace is not None:
            self._note_traces()
        defaults = self._config.scheduler_config
        ttft, tbt = scheduling.ttft_objective, scheduling.tbt_objective
        return Request(
            request_id,
            prompt_token_ids,
            sampling,
            arrival,
            self._end_token_ids,
            priority=scheduling.priority,
            tenant=scheduling.tenant,
            cache_salt=scheduling.cache_salt,
            pool=scheduling.pool,
            group=scheduling.group,
            ttft_objective=defaults.ttft_objective_ms / 1000.0 if ttft is None else ttft,
            tbt_objective=defaults.tbt_objective_ms / 1000.0 if tbt is None else tbt,
            deadline=deadline,
            receipt=Receipt(now),
            trace=None if scheduling.trace is None else scheduling.trace.sequence(),
        )

    def _check_pool(self, name: str, num_prompt_tokens: int) -> None:
        pools = {pool.name: pool.max_prompt_tokens for pool in self._config.parallel_config.pools or ()}
        if name not in pools:
            known = f"the pools are {', '.join(pools)}" if pools else "the model has no pools (parallel_config.pools)"
            raise RequestError(f"the pool {name!r} is unknown; {known}", param="pool")
        limit = pools[name]
        if limit is not None and num_prompt_tokens > limit:
            raise RequestError(
                f"the prompt has {num_prompt_tokens} tokens; the maximum of the pool {name!r} is {limit} tokens",
                param="pool",
            )

    def _check_tokens(self, token_ids: Sequence[int]) -> None:
        size = self._config.shape.vocab_size
        if len(token_ids) and not (min(token_ids) >= 0 and max(token_ids) < size):
            wrong = next(token for token in token_ids if not 0 <= token < size)
            raise RequestError(
                f"token id {wrong} in the prompt is not in the vocabulary (0 to {size - 1})", param="prompt"
            )
