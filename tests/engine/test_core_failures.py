"""Tests the engine loop when agents, steps, detokenizers or the engine itself fail."""

from __future__ import annotations

import pytest

from llm_serving.engine.commands import Add, Stop
from llm_serving.engine.outputs import CanaryWanted, RequestRefused
from llm_serving.errors import AgentLostError, ProtocolError
from llm_serving.executor.base import AgentLost, AgentReady
from llm_serving.request import FinishReason
from llm_serving.scheduler.output import NOT_FINITE_ERROR, StepResult
from llm_serving.telemetry.status import EngineState
from support.engine_harness import Engine
from support.fake_device import BROKEN_SEED
from support.fakes import (
    FakeDetokenizer,
    expected_tokens,
    make_request,
)
from support.recorded import RecordProperty


def test_nothing_is_sent_before_the_agent_is_ready() -> None:
    engine = Engine(ready=False)
    engine.request("a", 5, 3)
    engine.step()
    assert engine.core.status().state == "starting"
    assert (engine.scheduler.figures.waiting, engine.executor.steps) == (1, [])
    engine.executor.push(AgentReady())
    engine.finish()
    assert engine.core.status().state == "ready"
    assert len(engine.whole("a").token_ids) == 3


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_lost_agent_does_not_change_the_text(ahead: int) -> None:
    engine = Engine(decode_steps_ahead=ahead)
    requests = [engine.request(name, 6, 40, ignore_eos=False) for name in "abcd"]
    for _ in range(2):
        engine.step()
        engine.step()
        while any(request.is_suspect for request in requests):
            engine.step()
        engine.executor.lose_agent(ready=False)
        engine.step()
        assert engine.core.status().state == "recovering"
        assert engine.core.status().figures.running == 0
        engine.executor.push(AgentReady())
    for request in requests:
        request_id = request.request_id
        while not (engine.outputs(request_id) and engine.outputs(request_id)[-1].finished):
            engine.step()
        assert engine.whole(request_id).token_ids == tuple(expected_tokens(request, 64))
    assert len(engine.log.named("agent_lost")) == 2
    assert len(engine.log.named("agent_ready")) == 3


def test_an_agent_lost_for_good_ends_its_requests_and_refuses_new_ones() -> None:
    engine = Engine()
    engine.request("a", 5, 30)
    for _ in range(4):
        engine.step()
    engine.executor.push(AgentLost("it died five times", final=True))
    engine.step()
    last = engine.outputs("a")[-1]
    assert last.finish_reason is FinishReason.ERROR
    assert last.error == "the agent was lost and is not restarted: it died five times"
    assert engine.core.status().state == "stopped"
    engine.request("b", 5, 3)
    engine.step()
    (refused,) = engine.deliveries[-1]
    assert isinstance(refused, RequestRefused)
    assert isinstance(refused.error, AgentLostError)
    assert "it died five times" in str(refused.error)


def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(record_property: RecordProperty) -> None:
    engine = Engine(prefill_batch_size=1)
    engine.request("a", 5, 3)
    engine.executor.step_error = "RuntimeError: no"
    engine.step()
    engine.step()
    assert engine.whole("a").finish_reason is FinishReason.ERROR
    assert engine.whole("a").error == "RuntimeError: no"
    assert engine.log.named("error") == [{"message": "a step failed", "step": 0, "reason": "RuntimeError: no"}]
    engine.log.lines.clear()
    engine.request("b", 5, 3)
    engine.finish()
    record_property("other_failures", f"{len(engine.whole('b').token_ids) != 3:d} of 1")
    assert len(engine.whole("b").token_ids) == 3


def test_a_step_that_cannot_be_sent_ends_its_requests_and_the_engine_goes_on() -> None:
    engine = Engine(prefill_batch_size=1)
    engine.executor.submit_error = ProtocolError("too large for a slot")
    engine.request("a", 5, 3)
    engine.request("b", 5, 3)
    engine.step()
    assert engine.whole("a").error == "the step could not be sent: too large for a slot"
    assert len(engine.log.named("error")) == 1 + 1
    engine.log.lines.clear()
    engine.finish()
    assert len(engine.whole("b").token_ids) == 3


def test_a_detokenizer_that_fails_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    append = FakeDetokenizer.append

    def failing(self: FakeDetokenizer, token_ids: tuple[int, ...]) -> tuple[str, str | None]:
        if self._stop:
            raise KeyError("no such piece")
        return append(self, token_ids)

    monkeypatch.setattr(FakeDetokenizer, "append", failing)
    engine.request("bad", 5, 9, stop=("x",))
    engine.request("good", 5, 9)
    for _ in range(20):
        engine.step()
        if engine.scheduler.is_idle:
            break
    assert engine.whole("bad").finish_reason is FinishReason.ERROR
    assert engine.whole("bad").error == "the text could not be decoded: 'no such piece'"
    assert len(engine.whole("good").token_ids) == 9


def test_an_unknown_answer_is_logged_and_ignored() -> None:
    engine = Engine()
    engine.executor.push(StepResult(99, [1], [0.0], [0.0]))
    engine.step()
    assert engine.log.named("error") == [{"message": "step 99 has a result but is not in flight", "step": 99}]


def test_a_leak_is_reported_when_the_engine_goes_idle() -> None:
    engine = Engine()
    engine.request("a", 5, 2)
    engine.step()
    engine.scheduler._kv_cache._pool.allocate(1)
    while not engine.scheduler.is_idle:
        engine.step()
    (line,) = engine.log.named("error")
    assert line["message"] == "the scheduler leaks"


def test_stop_ends_requests_and_the_loop() -> None:
    engine = Engine()
    engine.request("a", 5, 30)
    engine.step()
    engine.core.submit(Stop())
    engine.core.run()
    last = engine.outputs("a")[-1]
    assert (last.finish_reason, last.error) == (FinishReason.ERROR, "the server is shutting down")
    assert engine.core.state is EngineState.STOPPED


def test_an_internal_error_ends_every_request_and_refuses_those_to_come() -> None:
    engine = Engine()
    engine.request("a", 5, 30)
    engine.step()

    def broken(timeout_s: float | None) -> list[object]:
        engine.core.submit(Add(make_request("b")))
        raise OSError("the selector broke")

    engine.executor.poll = broken  # type: ignore[method-assign, assignment]
    engine.core.run()
    last = engine.outputs("a")[-1]
    assert last.finish_reason is FinishReason.ERROR
    assert "OSError('the selector broke')" in str(last.error)
    refused = engine.deliveries[-1][-1]
    assert isinstance(refused, RequestRefused)
    assert refused.request_id == "b"
    assert engine.core.state is EngineState.STOPPED


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_logits_that_are_not_finite_end_their_request_only(ahead: int) -> None:
    engine = Engine(decode_steps_ahead=ahead, prefix_cache=True)
    good = engine.request("good", 6, 12)
    engine.request("bad", 6, 12, seed=BROKEN_SEED)
    engine.finish()
    assert engine.whole("good").token_ids == tuple(expected_tokens(good, 64))
    bad = engine.whole("bad")
    assert (bad.finish_reason, bad.error, len(bad.token_ids)) == (FinishReason.ERROR, NOT_FINITE_ERROR, 2)
    assert engine.metrics.num_not_finite == 1
    assert [line["requests"] for line in engine.log.named("logits_not_finite")] == [["bad"]]
    assert engine.log.named("agent_lost") == []


def test_a_broken_request_leaves_nothing_in_the_prefix_cache() -> None:
    """If a request fails, its cached blocks are removed, because they may be the cause.

    The next request with the same prompt computes all of its blocks again.
    """
    engine = Engine(prefix_cache=True)
    prompt = list(range(2, 40))
    for name, seed, cached in (("first", 1, False), ("hit", 1, True), ("bad", BROKEN_SEED, True), ("after", 1, False)):
        engine.request(name, prompt, 4, seed=seed)
        engine.finish()
        assert (engine.whole(name).num_cached_tokens > 0) is cached, name


def test_a_step_without_finite_logits_restarts_the_agents() -> None:
    engine = Engine(max_num_seqs=2)
    engine.request("a", 6, 12, seed=BROKEN_SEED)
    engine.request("b", 6, 12, seed=BROKEN_SEED)
    waiting = engine.request("c", 6, 12)
    engine.finish()
    assert {engine.whole(name).error for name in "ab"} == {NOT_FINITE_ERROR}
    assert engine.whole("c").token_ids == tuple(expected_tokens(waiting, 64))
    assert engine.metrics.checks == [("logits", "failed")]
    (failed,) = engine.log.named("self_check_failed")
    assert (failed["check"], isinstance(failed["step"], int)) == ("logits", True)


def test_one_request_without_finite_logits_asks_for_the_canary() -> None:
    """The agents are not restarted, because the request itself may be the cause. Instead, the engine runs the canary.

    After a restart, the next request without finite logits makes the engine run the canary again.
    """
    engine = Engine()
    engine.request("a", 6, 12, seed=BROKEN_SEED)
    engine.finish()
    assert engine.log.named("agent_lost") == []
    assert sum(outputs.count(CanaryWanted()) for outputs in engine.deliveries) == 1
    engine.executor.lose_agent()
    engine.step()
    assert sum(outputs.count(CanaryWanted()) for outputs in engine.deliveries) == 2
