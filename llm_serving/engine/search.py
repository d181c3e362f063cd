"""A beam search as one request: its steps are requests of the engine, what is told of it is told once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llm_serving.engine.beam_search import Beam, BeamSearchParams, search_beams
from llm_serving.engine.outputs import request_timings
from llm_serving.engine.piece_stream import PieceStream
from llm_serving.errors import DeadlineExceededError, EngineFailedError, RequestError
from llm_serving.request import FinishReason, Request, RequestOutput, SamplingParams, SchedulingParams, TokenLogits
from llm_serving.telemetry.receipt import Phase

if TYPE_CHECKING:
    from llm_serving.engine.async_engine import AsyncEngine

__all__ = ["Search", "SearchResult"]


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search found, best first."""

    beams: list[Beam]
    num_cached_tokens: int
    """Prompt tokens that were in the prefix cache."""


class Search:
    """The state of one search. ``whole`` stands for it in log, metrics and receipts: queued until its first step is
    scheduled, prefilling until that has answered, decoding until its end."""

    def __init__(
        self,
        engine: AsyncEngine,
        whole: Request,
        params: BeamSearchParams,
        scheduling: SchedulingParams,
        clock: Callable[[], float],
    ) -> None:
        self.whole = whole
        self._engine = engine
        self._params = params
        self._scheduling = replace(scheduling, group=whole.request_id)
        self._clock = clock
        self._step = 0
        self._sampling = SamplingParams(
            max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=True, top_logits=params.num_candidates
        )

    async def run(self) -> SearchResult:
        """Raises what ends it early, the refusal of any of its steps among them; ``whole`` has ended then, too."""
        try:
            beams = await search_beams(self._expand, self._params)
        except RequestError:
            self._end(FinishReason.ABORT)
            raise
        except EngineFailedError:
            self._end(FinishReason.ERROR)
            raise
        except BaseException:  # cancelled: the client has left
            self._end(FinishReason.ABORT)
            raise
        best = beams[0]
        self.whole.output_token_ids += best.token_ids
        self._end(best.finish_reason or FinishReason.LENGTH)
        return SearchResult(beams, self.whole.num_cached_tokens)

    def output(self) -> RequestOutput:
        """The last piece of the whole, when it has ended."""
        whole = self.whole
        timings = request_timings(whole)
        return RequestOutput(
            whole.request_id, "", (), (), len(whole.prompt_token_ids), len(whole.output_token_ids),
            whole.finish_reason, timings=timings, num_cached_tokens=whole.num_cached_tokens,
        )  # fmt: skip

    async def _expand(self, outputs: Sequence[tuple[int, ...]]) -> list[TokenLogits]:
        """One token more for each output; all of them wait together, so that they share a step."""
        whole, scheduling = self.whole, self._scheduling
        arrival = whole.arrival_time if self._step == 0 else None
        if self._step > 0:  # it has begun, and owes a step now as a stream owes a token
            scheduling = replace(scheduling, deadline=None, ttft_objective=scheduling.tbt_objective)
        streams = [PieceStream() for _ in outputs]
        opened = []
        try:
            for index, (output, stream) in enumerate(zip(outputs, streams, strict=True)):
                name = f"{whole.request_id}.{self._step}.{index}"
                tokens = [*whole.prompt_token_ids, *output]
                one = self._engine.open(
                    name, tokens, self._sampling, stream, arrival, scheduling=scheduling, streamed=False, quiet=True
                )
                opened.append(one)
            entries = [_logits(await stream.next()) for stream in streams]
            self._note([one.request for one in opened])
        finally:
            for one in opened:
                one.close()
        self._step += 1
        return entries

    def _note(self, steps: Sequence[Request]) -> None:
        """What the requests of a step mean for the whole."""
        whole, receipt = self.whole, self.whole.receipt
        whole.replica = steps[0].replica
        whole.num_preemptions += sum(step.num_preemptions for step in steps)
        if self._step > 0:
            return
        [first] = steps
        now = self._clock()
        whole.num_cached_tokens = receipt.cached_tokens = first.num_cached_tokens
        whole.first_scheduled_time = now if first.first_scheduled_time is None else first.first_scheduled_time
        whole.first_token_time = now if first.first_token_time is None else first.first_token_time
        receipt.chunks = first.receipt.chunks
        receipt.enter(Phase.PREFILL, whole.first_scheduled_time)
        receipt.enter(Phase.DECODE, whole.first_token_time)

    def _end(self, reason: FinishReason) -> None:
        self.whole.finish_reason, self.whole.finish_time = reason, self._clock()
        self.whole.receipt.enter(Phase.DONE, self.whole.finish_time)


def _logits(piece: RequestOutput) -> TokenLogits:
    """What the model says of a step's token. Raises what the engine has to say instead."""
    if piece.finish_reason is FinishReason.ABORT:
        raise DeadlineExceededError(piece.error or "the request was aborted by the server", param="deadline_ms")
    if piece.finish_reason is FinishReason.ERROR or not piece.logits:
        raise EngineFailedError(piece.error or "a step of the search gave no token")
    return piece.logits[0]
