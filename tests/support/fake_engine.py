"""An engine without a scheduler, for tests of the HTTP server. A script determines its output."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from llm_serving.engine.beam_logits import BeamLogits
from llm_serving.engine.beam_search import Beam, BeamSearchParams, SearchResult
from llm_serving.engine.detokenizer import IncrementalDetokenizer
from llm_serving.engine.open_request import PieceSink
from llm_serving.engine.receipts import RequestReceipt
from llm_serving.engine.tokenizer import Tokenizer
from llm_serving.errors import QueueFullError
from llm_serving.images.pool import TilePool
from llm_serving.images.prompt import PromptImages
from llm_serving.lora.registry import Adapter, AdapterRegistry
from llm_serving.request import (
    DEFAULT_SCHEDULING,
    Blocked,
    Constraint,
    FinishReason,
    ForkableConstraint,
    Request,
    RequestOutput,
    RequestTimings,
    SchedulingParams,
    TokenLogits,
)
from llm_serving.sampling_params import MAX_TOP_LOGITS, SamplingParams
from llm_serving.scheduler.figures import Figures
from llm_serving.telemetry.receipt import BlockReason
from llm_serving.telemetry.status import EngineStatus

MODEL_NAME = "fake-llama"
LOGSUMEXP = 2.5

Script = Callable[[Sequence[int], SamplingParams], Sequence[int]]
"""A function of a prompt and its parameters that returns the output tokens, including an end token if there is one."""


def make_status(**changes: Any) -> EngineStatus:
    """Returns the status of an engine that serves one replica. ``changes`` replace fields of the status."""
    values: dict[str, Any] = {
        "state": "ready",
        "steps": 7,
        "figures": Figures(total_blocks=100, free_blocks=90),
        "last_step_age_s": 0.1,
        "agents": [{"rank": 0, "state": "ready"}],
    }
    return EngineStatus(**{**values, **changes})


@dataclass
class Submitted:
    """A request that the engine received, and what the engine has done with it."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    scheduling: SchedulingParams = DEFAULT_SCHEDULING
    adapter: Adapter | None = None
    images: PromptImages | None = None
    num_pieces: int = 0
    streamed: bool = True
    arrival_time: float | None = None
    finished: bool = False
    aborted: bool = False
    delivered: list[float] = field(default_factory=list)
    closed_at: float | None = None
    num_tokens: int = 0
    finish_reason: str | None = None
    constraint: Constraint | None = None
    """The constraint on the next token. The tokens of the test's script must satisfy it. If it allows only one token,
    this token follows instead of the script's."""

    def receipt(self) -> RequestReceipt:
        """Returns a receipt whose times are always the same powers of two."""
        return RequestReceipt(
            request_id=self.request_id,
            tenant=self.scheduling.tenant,
            priority=self.scheduling.priority,
            state="done" if self.closed_at is not None else "delivery" if self.finished else "decode",
            finish_reason=self.finish_reason,
            num_prompt_tokens=len(self.prompt_token_ids),
            num_output_tokens=self.num_tokens,
            timings=FAKE_TIMINGS,
        )


FAKE_TIMINGS = RequestTimings(
    tokenise=0.001, queue=0.002, prefill=0.004, decode=0.008, preempted=0.016, swapped=0.032, delivery=0.064,
    e2e=0.127, ttft=0.007, tpot=0.002, num_preemptions=1, num_swaps=2, num_chunks=3, num_cached_tokens=2,
    blocked=(Blocked(BlockReason.BLOCKS, 5, 0.0015),), blocked_by=("cmpl-other",),
)  # fmt: skip


class FakeOpenRequest:
    """The result of ``FakeEngine.open``. It records all calls in the ``Submitted`` of its request."""

    def __init__(self, record: Submitted, task: asyncio.Task[None]) -> None:
        self._record = record
        self._task = task
        self.request = Request("r", record.prompt_token_ids, record.sampling, 0.0)
        self.is_closed = False

    @property
    def num_output_tokens(self) -> int:
        return self._record.num_tokens

    def receipt(self, now: float, /) -> RequestReceipt:
        return self._record.receipt()

    def delivered(self, now: float, /) -> None:
        self._record.delivered.append(now)

    def close(self, now: float | None = None, /) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._record.closed_at = now
        self._record.aborted = not self._record.finished
        self._task.cancel()


def beam_logits(entries: Sequence[TokenLogits], num_top: int = MAX_TOP_LOGITS) -> BeamLogits:
    """Returns the logits of a beam with these tokens. Each token keeps at most ``num_top`` alternatives."""
    logits = BeamLogits.begin(num_top)
    for entry in entries:
        logits = logits.extended(entry)
    return logits


class FakeEngine:
    """Streams the tokens that the script determines, in pieces of ``tokens_per_piece`` tokens, one piece every
    ``delay_s``.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.model_name = MODEL_NAME
        self.max_model_len = 128
        self.adapters = AdapterRegistry(0)
        self.tiers = self.transfers = self.nodes = self.standby = None
        self.tiles: TilePool | None = None
        self.reset()

    def reset(self) -> None:
        """Restores the initial settings. The script then returns the same sentence for every prompt."""
        reply = [*self.tokenizer.encode(" hello to the bird", add_special_tokens=False), *self.tokenizer.eos_token_ids]
        self.script: Script = lambda prompt, sampling: reply
        self.delay_s = 0.0
        self.tokens_per_piece = 1
        self.refuse: Exception | None = None
        self.refuse_after: int | None = None
        """Number of requests before ``refuse`` is raised."""
        self.fail_after: int | None = None
        """Number of tokens before the engine fails."""
        self.crash: Exception | None = None
        """An exception that is raised after the first piece."""
        self.current = make_status()
        self.probe_answer = True
        self.num_probes = 0
        self.full: QueueFullError | None = None
        """The result of ``queue_full``."""
        self.num_cached_tokens = 0
        logits = beam_logits([fake_logits(token, 2) for token in reply])
        self.beams = [Beam(tuple(reply), logits, -2.0, FinishReason.STOP)]
        """The result of every beam search."""
        self.searches: list[BeamSearchParams] = []
        self.drop: str | None = None
        """If set, every request ends with this error before its first token, like a request whose deadline passes."""
        self.submitted: list[Submitted] = []
        self.opened: list[FakeOpenRequest] = []
        self.asked_for: list[str] = []
        """The tenant in each call of ``queue_full``."""

    @property
    def num_open(self) -> int:
        """The number of requests that are not closed yet."""
        return sum(not opened.is_closed for opened in self.opened)

    def say(self, text: str) -> None:
        """Lets every later request return ``text``, followed by the end token."""
        tokens = [*self.tokenizer.encode(text, add_special_tokens=False), *self.tokenizer.eos_token_ids]
        self.script = lambda prompt, sampling: tokens

    def queue_full(self, tenant: str = "", num_expected: int = 0) -> QueueFullError | None:
        self.asked_for.append(tenant)
        return self.full

    def receipt(self, request_id: str, /) -> RequestReceipt | None:
        return next((record.receipt() for record in self.submitted if record.request_id == request_id), None)

    def receipts(self, count: int, /) -> list[RequestReceipt]:
        return [record.receipt() for record in self.submitted[:count]]

    def status(self) -> EngineStatus:
        return self.current

    @property
    def state(self) -> str:
        return self.current.state

    @property
    def end_token_ids(self) -> frozenset[int]:
        return frozenset(self.tokenizer.eos_token_ids)

    async def search(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: BeamSearchParams,
        arrival_time: float | None = None,
        *,
        scheduling: SchedulingParams = DEFAULT_SCHEDULING,
        adapter: Adapter | None = None,
        constraint: ForkableConstraint | None = None,
    ) -> SearchResult:
        """Returns ``beams`` after ``delay_s``, as the result of a beam search."""
        record = Submitted(request_id, list(prompt_token_ids), SamplingParams(), scheduling)
        self.submitted.append(record)
        self.searches.append(params)
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            record.aborted = True
            raise
        if self.refuse is not None:
            raise self.refuse
        record.finished = True
        beams = [replace(beam, logits=beam_logits(beam.logits, params.num_top)) for beam in self.beams[: params.width]]
        return SearchResult(beams, self.num_cached_tokens)

    async def profile(self, folder: str | None, timeout: float) -> list[dict[str, object]]:
        return [{"rank": 0, "error": "", "folder": folder or ""}]

    async def probe(self, timeout_s: float, /) -> bool:
        self.num_probes += 1
        return self.probe_answer

    def open(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        sink: PieceSink,
        arrival_time: float | None = None,
        *,
        index: int = 0,
        scheduling: SchedulingParams = DEFAULT_SCHEDULING,
        streamed: bool = True,
        constraint: Constraint | None = None,
        adapter: Adapter | None = None,
        images: PromptImages | None = None,
    ) -> FakeOpenRequest:
        record = Submitted(
            request_id, list(prompt_token_ids), sampling, scheduling, streamed=streamed, arrival_time=arrival_time,
            constraint=constraint, adapter=adapter, images=images,
        )  # fmt: skip
        refuse = self.refuse if len(self.submitted) >= (self.refuse_after or 0) else None
        if refuse is None:
            self.submitted.append(record)
        opened = FakeOpenRequest(record, asyncio.ensure_future(self._serve(record, sink, index, refuse)))
        self.opened.append(opened)
        return opened

    async def _serve(self, record: Submitted, sink: PieceSink, index: int, refuse: Exception | None) -> None:
        if refuse is not None:
            sink.fail(refuse)  # type: ignore[arg-type]
            return
        try:
            await self._push_pieces(record, sink, index)
        except AssertionError as error:  # the script does not fit the constraint
            sink.fail(error)  # type: ignore[arg-type]
            raise

    async def _push_pieces(self, record: Submitted, sink: PieceSink, index: int) -> None:
        async for piece in self._pieces(record):
            record.num_pieces += 1
            record.num_tokens += len(piece.token_ids)
            if piece.finished:
                record.finished = True
                record.finish_reason = piece.finish_reason and piece.finish_reason.value
                piece.num_cached_tokens = self.num_cached_tokens
            sink.push(index, piece)
            if self.crash is not None:
                sink.fail(self.crash)  # type: ignore[arg-type]
                return

    async def _pieces(self, record: Submitted) -> AsyncGenerator[RequestOutput, None]:
        sampling = record.sampling
        detokenizer = IncrementalDetokenizer.for_request(self.tokenizer, record.prompt_token_ids, sampling)
        tokens = list(self.script(record.prompt_token_ids, sampling))
        said: list[int] = []
        if self.drop is not None:
            yield self._piece(record, "", (), said, FinishReason.ABORT, error=self.drop)
            return
        pending: list[RequestOutput] = []
        for position, (token, is_last) in enumerate(_constrained(record.constraint, tokens)):
            if position % self.tokens_per_piece == 0:
                await asyncio.sleep(self.delay_s)
            if self.fail_after is not None and position >= self.fail_after:
                yield self._piece(record, "", (), said, FinishReason.ERROR, error="agent 0 was lost")
                return
            said.append(token)
            pending.append(self._step(record, detokenizer, token, said, is_last))
            if pending[-1].finished or len(pending) == self.tokens_per_piece:
                yield _merge(pending)
                if pending[-1].finished:
                    return
                pending = []

    def _step(
        self, record: Submitted, detokenizer: IncrementalDetokenizer, token: int, said: list[int], is_last: bool
    ) -> RequestOutput:
        sampling = record.sampling
        ends = token in self.tokenizer.eos_token_ids and not sampling.ignore_eos
        reason, stop_reason, text, stop = None, None, "", None
        if ends or token in sampling.stop_token_ids:
            reason, stop_reason = FinishReason.STOP, None if ends else token
        else:
            text, stop = detokenizer.append((token,))
        if stop is not None:
            reason, stop_reason = FinishReason.STOP, stop
        elif reason is None and (len(said) >= sampling.max_tokens or is_last):
            reason = FinishReason.LENGTH
        if reason is not None and stop is None:
            text += detokenizer.flush()
        return self._piece(record, text, (token,), said, reason, stop_reason=stop_reason)

    def _piece(
        self,
        record: Submitted,
        text: str,
        tokens: tuple[int, ...],
        said: list[int],
        reason: FinishReason | None,
        **more: Any,
    ) -> RequestOutput:
        wanted = tokens if record.sampling.wants_logits else ()
        logits = tuple(fake_logits(token, record.sampling.top_logits) for token in wanted)
        return RequestOutput(
            record.request_id, text, tokens, logits, len(record.prompt_token_ids), len(said), reason, **more
        )


def fake_logits(token: int, count: int) -> TokenLogits:
    """Returns made-up logits: the chosen token has logit 2, the next token ids have 1, 0, -1 and so on."""
    top = tuple((token + i, 2.0 - i) for i in range(count))
    return TokenLogits(token, 2.0 - LOGSUMEXP, LOGSUMEXP, top)


def _constrained(constraint: Constraint | None, tokens: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """Yields the script's tokens, each with True for the last one and False for all others.

    A constraint may forbid the script's next token. If it allows only one other token, that token is yielded first.
    Raises AssertionError if several other tokens are allowed.
    """
    for position, token in enumerate(tokens):
        while constraint is not None:
            allowed = np.unpackbits(constraint.mask().view(np.uint8), bitorder="little").nonzero()[0]
            if token in allowed:
                constraint.advance(token)
                break
            assert len(allowed) == 1, f"token {token} is not allowed"
            forced = int(allowed[0])
            constraint.advance(forced)
            yield forced, False
        yield token, position == len(tokens) - 1


def _merge(pieces: list[RequestOutput]) -> RequestOutput:
    last = pieces[-1]
    return RequestOutput(
        last.request_id,
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.token_ids),
        tuple(entry for piece in pieces for entry in piece.logits),
        last.num_prompt_tokens,
        last.num_output_tokens,
        last.finish_reason,
        last.stop_reason,
        last.error,
    )


assert math.isclose(fake_logits(5, 0).logprob, -0.5)
