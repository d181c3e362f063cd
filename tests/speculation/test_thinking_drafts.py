"""Tests drafts of requests with a thinking budget. Engine, scheduler, grammar and masks are real, and the model samples
an allowed token by a rule.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque

import numpy as np
import pytest

from llm_serving.config import load_config
from llm_serving.constraints.calls import Thinking, answer_grammar
from llm_serving.constraints.compiler import CompiledGrammar, GrammarCompiler
from llm_serving.constraints.grammar import schema_grammar
from llm_serving.constraints.thinking import ThinkingBudget
from llm_serving.engine.commands import Add
from llm_serving.engine.core import EngineCore
from llm_serving.engine.outputs import EngineOutput, merge_outputs
from llm_serving.engine.tokenizer import Tokenizer
from llm_serving.engine.tokenizer_backends import load_tokenizer
from llm_serving.executor.base import ExecutorEvent
from llm_serving.ipc.drafts import REJECTED, rejected_entries
from llm_serving.parsing.formats import REASONING_FORMATS
from llm_serving.parsing.thinking import ThinkingWatch
from llm_serving.request import Request, RequestOutput
from llm_serving.scheduler.output import ScheduledStep, StepResult
from llm_serving.scheduler.scheduler import Scheduler
from llm_serving.speculation.setup import MakeSpeculator
from llm_serving.speculation.speculator import Speculator
from support.fakes import FakeDetokenizer, FakeExecutor, RecordingLog, RecordingMetrics, make_limits, make_request

THINK = REASONING_FORMATS["think"]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Rio"]}, "days": {"enum": [1, 20]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
BUDGETS = (0, 1, 5, 18)
ENTRIES = 24


@functools.cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(load_config("llama_tiny_cpu.yaml"))


@functools.cache
def marker() -> list[int]:
    return tokenizer().encode(THINK.close, add_special_tokens=False)


@functools.cache
def grammar() -> CompiledGrammar:
    compiler = GrammarCompiler(tokenizer(), tokenizer().vocab_size, tokenizer().eos_token_ids)
    content = answer_grammar({}, thinking=Thinking(THINK, is_open=True), content=schema_grammar(SCHEMA))
    return asyncio.run(compiler.compile(content, "schema"))


class RuledModel(FakeExecutor):
    """Samples an allowed token by a rule. The text repeats itself, so that there are drafts."""

    def __init__(self) -> None:
        super().__init__(make_limits())
        self.drafted: list[int] = []
        """All drafts that steps verified."""
        self.num_accepted = 0
        self._sent: deque[ScheduledStep] = deque()
        self._order = np.random.default_rng(3).permuted(np.tile(np.arange(tokenizer().vocab_size), (4, 1)), axis=1)

    @property
    def num_free_slots(self) -> int:
        return 4 - len(self._sent)

    def submit(self, step: ScheduledStep) -> None:
        self._sent.append(step)

    def poll(self, timeout_s: float | None) -> list[ExecutorEvent]:
        if self._events:
            return [self._events.popleft()]
        if not self._sent:
            return []
        step = self._sent.popleft()
        result = StepResult(step.seq, [-1] * step.num_seqs, [0.0] * step.num_seqs, [0.0] * step.num_seqs, graph_us=1000)
        for index, mask in zip(step.constrained, self.masks[step.seq], strict=True):
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: tokenizer().vocab_size]
            order = self._order[step.sample_positions[index] % 4]
            result.sampled_ids[index] = int(order[np.flatnonzero(bits[order])[0]])
            result.logits[index] = float(hash((step.sample_positions[index], mask.tobytes())) & 0xFFFFFF)
        if step.num_drafts:
            for index in rejected_entries(step.rows, step.token_ids, result.sampled_ids):
                result.sampled_ids[index] = REJECTED
            is_draft = [index > 0 and step.rows[index] == step.rows[index - 1] for index in range(step.num_seqs)]
            self.drafted += [token for token, drafted in zip(step.token_ids, is_draft, strict=True) if drafted]
            self.num_accepted += sum(
                drafted and token != REJECTED for token, drafted in zip(result.sampled_ids, is_draft, strict=True)
            )
        return [result]


def make_requests(*, has_grammar: bool) -> list[Request]:
    requests = []
    for budget in BUDGETS:
        request = make_request(f"budget {budget}", 6, 60, logprobs=True, ignore_eos=not has_grammar)
        request.end_token_ids = frozenset(tokenizer().eos_token_ids)
        watch = ThinkingWatch(THINK, tokenizer().token_bytes, is_thinking=True)
        num_words = -(-tokenizer().vocab_size // 32)
        inner = grammar().start() if has_grammar else None
        request.constraint = ThinkingBudget(watch, budget, marker(), tokenizer().token_bytes, num_words, inner)
        requests.append(request)
    return requests


def serve(make_speculator: MakeSpeculator | None, *, has_grammar: bool) -> tuple[RuledModel, dict[str, RequestOutput]]:
    """Serves a request for each budget. Returns the model, and the output of each request."""
    model, now, outputs = RuledModel(), [0.0], list[EngineOutput]()
    scheduler = Scheduler(
        make_limits(num_blocks=100, max_model_len=80, decode_batch_size=ENTRIES, max_num_seqs=ENTRIES)
    )
    core = EngineCore(
        scheduler,
        [(scheduler, model)],
        FakeDetokenizer,
        RecordingLog(),
        RecordingMetrics(),
        outputs.extend,
        state_interval_s=1e9,
        clock=lambda: now[0],
        make_speculator=make_speculator,
    )
    requests = make_requests(has_grammar=has_grammar)
    for request in requests:
        core.submit(Add(request))
    while not all(request.is_finished for request in requests):
        now[0] += 0.001
        core.step()
    pieces = [output for output in outputs if isinstance(output, RequestOutput)]
    names = [request.request_id for request in requests]
    return model, {name: merge_outputs([one for one in pieces if one.request_id == name]) for name in names}


@pytest.mark.parametrize("has_grammar", [False, True])
def test_drafts_change_no_token_and_no_log_probability(has_grammar: bool) -> None:
    _, plain = serve(None, has_grammar=has_grammar)
    model, drafted = serve(
        lambda replica, prepare: Speculator(7, ENTRIES, prepare, always=True), has_grammar=has_grammar
    )
    assert model.num_accepted > 20
    assert set(marker()) <= set(model.drafted), "the marker is a draft"
    for name, expected in plain.items():
        assert drafted[name].error is expected.error is None
        assert drafted[name].token_ids == expected.token_ids
        assert [entry.logprob for entry in drafted[name].logits] == [entry.logprob for entry in expected.logits]
        assert [one for one in expected.token_ids if one in marker()], "the budget has ended the reasoning"


def test_the_tokens_of_the_marker_take_no_step_of_their_own() -> None:
    """With a budget of 0, the first token of the marker comes from the prefill, and one step gives all others."""
    model, _ = serve(lambda replica, prepare: Speculator(7, ENTRIES, prepare, always=True), has_grammar=False)
    assert len(marker()) > 2
    assert model.drafted[: len(marker()) - 1] == marker()[1:]
