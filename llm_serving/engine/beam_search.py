"""Beam search: finds the most likely outputs of a prompt. It keeps the ``width`` most likely beams at every length.

As in vLLM, each step of the search asks for the best next tokens of every live beam. The search sends one engine
request per beam: its prompt is the search's prompt plus the tokens of the beam. The prefix cache already has most
blocks of this prompt. The scheduler treats these requests like all others. The candidates are the ``2 * width`` most
likely next tokens of each live beam. A candidate with an end token becomes a finished beam. The ``width`` most likely
other candidates become the next live beams. Finished beams are compared by

    score = sum of log-probabilities / length ** length_penalty

(Wu et al. 2016, in the form of transformers). The length is the number of output tokens, including the end token. The
search ends at ``max_tokens``, or earlier if no live beam can reach the ``width`` best beams any more. Log-probabilities
are at most 0, so each live beam has an upper bound for its score. The early end therefore never changes the result.

The log-probabilities come from the model's logits without temperature or penalties. They do not depend on other
requests. Ties are broken by the rank of the beam, then by the smaller token id. The same prompt therefore always gives
the same beams.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from llm_serving.constraints.beams import BeamConstraint
from llm_serving.engine.beam_logits import BeamLogits
from llm_serving.engine.open_request import OpenRequest, PieceStream
from llm_serving.engine.receipts import request_timings
from llm_serving.errors import AgentLostTwiceError, DeadlineExceededError, EngineFailedError
from llm_serving.request import (
    Constraint,
    FinishReason,
    ForkableConstraint,
    Request,
    RequestOutput,
    SchedulingParams,
    TokenLogits,
)
from llm_serving.sampling_params import MAX_TOP_LOGITS, SamplingParams
from llm_serving.telemetry.receipt import Phase

MAX_BEAM_WIDTH = MAX_TOP_LOGITS // 2
"""Maximum number of beams of a beam search."""

Expand = Callable[[Sequence[tuple[int, ...]]], Awaitable[list[TokenLogits]]]
"""A function that takes the outputs of the live beams, and returns the ``num_candidates`` best next tokens of each."""


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Parameters of a beam search.

    ``width + len(end_token_ids)`` must not exceed ``MAX_TOP_LOGITS``, the number of candidates that a step can return.
    So at least ``width`` candidates are not end tokens, and the search can continue with ``width`` beams.
    """

    width: int
    max_tokens: int
    length_penalty: float = 1.0
    """A value above 0 favours longer outputs, a value below 0 shorter ones. With 0, the score is the sum of
    log-probabilities.
    """
    end_token_ids: frozenset[int] = frozenset()
    num_top: int = 0
    """Number of most likely tokens whose logits are kept for each token of a beam."""

    def __post_init__(self) -> None:
        if not 1 <= self.width <= MAX_BEAM_WIDTH:
            raise ValueError(f"width is {self.width}; it must be 1 to {MAX_BEAM_WIDTH}")
        if self.num_candidates > MAX_TOP_LOGITS:
            raise ValueError(
                f"{self.width} beams and {len(self.end_token_ids)} end tokens need {self.num_candidates} candidates a "
                f"step; the maximum is {MAX_TOP_LOGITS}"
            )

    @property
    def num_candidates(self) -> int:
        """Number of next tokens that the search considers for each beam."""
        return max(2 * self.width, self.width + len(self.end_token_ids))

    def score(self, logprob: float, length: int) -> float:
        """Returns the score by which finished beams are compared. A higher score is better.

        ``logprob`` is the sum of the tokens' log-probabilities, ``length`` the number of tokens.
        """
        score: float = logprob / length**self.length_penalty
        return score


@dataclass(frozen=True, slots=True)
class Beam:
    """One output of a beam search: its tokens and their likelihood."""

    token_ids: tuple[int, ...]
    """The tokens of the output, with the end token if there is one."""
    logits: BeamLogits
    """The logits of each token of the output."""
    logprob: float = 0.0
    """Sum of the log-probabilities of the tokens."""
    finish_reason: FinishReason | None = None

    def extended(self, entry: TokenLogits, finish_reason: FinishReason | None) -> Beam:
        """Returns this beam with one more token."""
        return Beam(
            (*self.token_ids, entry.token_id),
            self.logits.extended(entry),
            self.logprob + entry.logprob,
            finish_reason,
        )


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The beams that a search found, best first."""

    beams: list[Beam]
    num_cached_tokens: int
    """Number of prompt tokens that were in the prefix cache."""


class OpenStep(Protocol):
    """The type of a function that opens the engine request for one step of a search: ``AsyncEngine.open``."""

    def __call__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        sink: PieceStream,
        arrival_time: float | None,
        *,
        scheduling: SchedulingParams,
        streamed: bool,
        quiet: bool,
        constraint: Constraint | None,
    ) -> OpenRequest: ...


class BeamSearch:
    """Runs one beam search with requests of the engine.

    ``whole`` is a request that represents the search in logs, metrics and receipts. Its phase is queue until the first
    step of the search is scheduled, and prefill until that step has completed. Its phase is then decode until the end
    of the search.
    """

    def __init__(
        self,
        open_step: OpenStep,
        whole: Request,
        params: BeamSearchParams,
        scheduling: SchedulingParams,
        clock: Callable[[], float],
        constraint: ForkableConstraint | None = None,
    ) -> None:
        """``constraint`` says which tokens may follow in the output. It must be the constraint of an empty output."""
        self.whole = whole
        first = None if constraint is None else BeamConstraint(constraint)
        self._constraints: dict[tuple[int, ...], BeamConstraint | None] = {(): first}
        """Maps each output of the last step to the constraint of its next token. None means that every token may
        follow.
        """
        self._open_step = open_step
        self._params = params
        # The prompts of later steps may exceed the limit of the request's pool, so their lengths decide the pool.
        self._scheduling = replace(scheduling, group=whole.request_id, pool="")
        self._clock = clock
        self._step = 0
        self._sampling = SamplingParams(
            max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=True, top_logits=params.num_candidates,
            top_allowed=constraint is not None,
        )  # fmt: skip

    async def run(self) -> SearchResult:
        """Runs the search. If an error stops the search, raises this error, for example if one of its requests is
        refused.

        When this method returns or raises, ``whole`` has ended.
        """
        try:
            beams = await search_beams(self._expand, self._params)
        except EngineFailedError:
            self._end(FinishReason.ERROR)
            raise
        except BaseException:  # a request of the search was refused, or the client closed the connection
            self._end(FinishReason.ABORT)
            raise
        best = beams[0]
        self.whole.output_token_ids += best.token_ids
        self._end(best.finish_reason or FinishReason.LENGTH)
        return SearchResult(beams, self.whole.num_cached_tokens)

    def output(self) -> RequestOutput:
        """Returns the last piece of ``whole``, the request that represents the search. The search must have ended."""
        whole = self.whole
        timings = request_timings(whole)
        return RequestOutput(
            whole.request_id, "", (), (), len(whole.prompt_token_ids), len(whole.output_token_ids),
            whole.finish_reason, timings=timings, num_cached_tokens=whole.num_cached_tokens,
        )  # fmt: skip

    async def _expand(self, outputs: Sequence[tuple[int, ...]]) -> list[TokenLogits]:
        """Returns the logits of the next token of each output.

        All requests are opened before the first result is awaited, so that one engine step can serve them together.
        """
        whole, scheduling = self.whole, self._scheduling
        arrival = whole.arrival_time if self._step == 0 else None
        # Only the request of the first step has the search's objective for the TTFT. A request of a later step must
        # return its token within the objective for the time between tokens.
        if self._step > 0:
            scheduling = replace(scheduling, deadline=None, ttft_objective=scheduling.tbt_objective)
        streams = [PieceStream() for _ in outputs]
        constraints = [self._constraint_of(output) for output in outputs]
        opened: list[OpenRequest] = []
        try:
            for index, (output, stream, constraint) in enumerate(zip(outputs, streams, constraints, strict=True)):
                name = f"{whole.request_id}.{self._step}.{index}"
                tokens = [*whole.prompt_token_ids, *output]
                opened.append(
                    self._open_step(
                        name, tokens, self._sampling, stream, arrival, scheduling=scheduling, streamed=False,
                        quiet=True, constraint=constraint,
                    )
                )  # fmt: skip
            entries = [_logits(await stream.next()) for stream in streams]
            self._note([one.request for one in opened])
        finally:
            for one in opened:
                one.close()
        self._step += 1
        for constraint in constraints:
            if constraint is not None and constraint.error:
                raise EngineFailedError(f"a beam cannot follow the grammar any further: {constraint.error}")
        self._constraints = dict(zip(outputs, constraints, strict=True))
        return entries

    def _constraint_of(self, output: tuple[int, ...]) -> BeamConstraint | None:
        if not output:
            return self._constraints[output]
        before = self._constraints[output[:-1]]
        return None if before is None else before.extended(output[-1])

    def _note(self, steps: Sequence[Request]) -> None:
        """Adds the times and counts of one search step's requests to ``whole``, the request that represents the search.
        """
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


async def search_beams(expand: Expand, params: BeamSearchParams) -> list[Beam]:
    """Returns the ``width`` best finished beams, best first.

    The list is shorter if the search found fewer candidates.
    """
    live, finished = [Beam((), BeamLogits.begin(params.num_top))], _Finished(params)
    while live:
        is_last = len(live[0].token_ids) + 1 >= params.max_tokens
        beams: list[Beam] = []
        entries = await expand([beam.token_ids for beam in live])
        for parent, candidate in _ranked(live, entries, params):
            if candidate.token_id in params.end_token_ids:
                finished.add(parent.extended(candidate, FinishReason.STOP))
            elif len(beams) < params.width:
                beams.append(parent.extended(candidate, FinishReason.LENGTH if is_last else None))
        if is_last:
            for beam in beams:
                finished.add(beam)
            break
        live = [] if finished.beats(beams) else beams
    return finished.best


def _ranked(
    live: Sequence[Beam], entries: Sequence[TokenLogits], params: BeamSearchParams
) -> list[tuple[Beam, TokenLogits]]:
    """Returns all candidates, the most likely first.

    If candidates are equally likely, the candidate of the better beam comes first, then the smaller token id.
    """
    ranked = []
    for beam, entry in zip(live, entries, strict=True):
        for token_id, logit in entry.top[: params.num_candidates]:
            if token_id < 0:  # a grammar allows fewer tokens than candidates
                break
            candidate = TokenLogits(token_id, logit - entry.logsumexp, entry.logsumexp, entry.top)
            ranked.append((beam, candidate))
    ranked.sort(key=lambda pair: -(pair[0].logprob + pair[1].logprob))
    return ranked


class _Finished:
    """Keeps the ``width`` best finished beams, best first.

    If two beams have equal scores, the one that was found first comes first.
    """

    def __init__(self, params: BeamSearchParams) -> None:
        self._params = params
        self._scored: list[tuple[float, Beam]] = []

    @property
    def best(self) -> list[Beam]:
        return [beam for _, beam in self._scored]

    def add(self, beam: Beam) -> None:
        self._scored.append((self._params.score(beam.logprob, len(beam.token_ids)), beam))
        self._scored.sort(key=lambda entry: -entry[0])
        del self._scored[self._params.width :]

    def beats(self, live: Sequence[Beam]) -> bool:
        """Returns True if the search can end: no live beam can still get a better score than the finished beams."""
        if len(self._scored) < self._params.width:
            return False
        worst = self._scored[-1][0]
        return all(self._reachable(beam) <= worst for beam in live)

    def _reachable(self, beam: Beam) -> float:
        """Returns an upper bound for the final score of a beam.

        The bound assumes that all further tokens have probability 1.
        """
        params = self._params
        length = len(beam.token_ids) + 1 if params.length_penalty < 0 else params.max_tokens
        return params.score(beam.logprob, length)


def _logits(piece: RequestOutput) -> TokenLogits:
    """Returns the logits of the token in ``piece``. If the engine ended the request with an error, raises this error.
    """
    if piece.finish_reason is FinishReason.ABORT:
        raise DeadlineExceededError(piece.error or "the request was aborted by the server", param="deadline_ms")
    if piece.finish_reason is FinishReason.ERROR or not piece.logits:
        raise AgentLostTwiceError.or_failure(piece.error or "a step of the search gave no token")
    return piece.logits[0]
