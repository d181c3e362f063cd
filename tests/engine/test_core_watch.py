"""Tests the log events, metrics and status of the engine loop, and how long the loop waits."""

from __future__ import annotations

import pytest

from llm_serving.engine.commands import Probe
from llm_serving.engine.outputs import ProbeAnswer
from llm_serving.request import FinishReason
from support.engine_harness import Engine


def test_steps_in_flight_never_exceed_the_slots() -> None:
    engine = Engine(decode_steps_ahead=3)
    engine.executor._num_slots = 2
    engine.executor.hold(True)
    engine.request("a", 5, 9)
    engine.step()
    assert engine.executor.num_free_slots == 0
    engine.executor.hold(False)
    engine.finish()


def test_a_request_is_logged() -> None:
    engine = Engine(max_num_seqs=1)
    engine.request("a", 5, 4)
    engine.request("b", 7, 1)
    engine.finish()
    assert engine.log.named("agent_ready") == [{"summary": {"device": "fake"}}]
    first, second = engine.log.named("request_end")
    assert {key: first[key] for key in ("request_id", "prompt_tokens", "output_tokens", "total_tokens")} == {
        "request_id": "a",
        "prompt_tokens": 5,
        "output_tokens": 4,
        "total_tokens": 9,
    }
    assert (first["finish_reason"], first["preemptions"]) == ("length", 0)
    assert first["tpot_ms"] == pytest.approx(1.0)
    assert first["queue_ms"] + first["prefill_ms"] + first["decode_ms"] == pytest.approx(first["e2e_ms"])  # type: ignore[operator]
    assert second["tpot_ms"] is None
    assert engine.metrics.ends == [("a", FinishReason.LENGTH), ("b", FinishReason.LENGTH)]
    assert engine.metrics.steps[0] == ("prefill", 1, 5)


def test_preemptions_reach_log_and_metrics() -> None:
    engine = Engine(num_blocks=9, max_model_len=40)
    engine.request("old", 9, 22)
    engine.request("young", 9, 22)
    engine.finish()
    num_preemptions = engine.scheduler.figures.preemptions
    assert engine.metrics.num_preemptions == num_preemptions > 0
    assert [line["preemptions"] for line in engine.log.named("request_end")] == [0, num_preemptions]
    timings = engine.whole("young").timings
    assert timings is not None
    assert timings.num_preemptions == num_preemptions


def test_the_state_line_comes_while_there_is_work_and_once_after() -> None:
    engine = Engine(state_interval_s=0.01)
    engine.request("a", 5, 35)
    engine.finish()
    lines = engine.log.named("engine_state")
    assert len(lines) == 3
    assert lines[0]["running"] == 1
    assert engine.core._poll_timeout() == pytest.approx(0.01, abs=0.01)
    engine.now += 0.02
    engine.executor.wake()
    engine.step()
    lines = engine.log.named("engine_state")
    assert len(lines) == 4
    assert sum(line["steps"] for line in lines) == 35  # type: ignore[misc]
    assert sum(line["decode_tokens"] for line in lines) == 34  # type: ignore[misc]
    assert (lines[-1]["running"], lines[-1]["blocks_used"], lines[-1]["blocks_total"]) == (0, 0, 32)
    assert engine.core._poll_timeout() is None


def test_an_idle_engine_sleeps_without_end() -> None:
    engine = Engine()
    engine.request("a", 5, 3)
    engine.finish()
    engine.now += 2000.0
    engine.executor.wake()
    engine.step()
    assert engine.core._poll_timeout() is None


def test_a_held_batch_wakes_the_engine_in_time() -> None:
    engine = Engine(batch_waiting_time=0.25)
    engine.request("a", 5, 1)
    engine.step()
    assert engine.executor.steps == []
    assert engine.core._poll_timeout() == pytest.approx(0.249)
    engine.now += 0.25
    engine.executor.wake()
    engine.step()
    assert len(engine.executor.steps) == 1


def test_a_probe_is_answered() -> None:
    engine = Engine()
    engine.core.submit(Probe())
    engine.step()
    engine.step()
    assert engine.deliveries == [[ProbeAnswer()]]


def test_status() -> None:
    engine = Engine(max_num_seqs=1)
    engine.request("a", 5, 30)
    engine.request("b", 5, 30)
    for _ in range(3):
        engine.step()
    status = engine.core.status()
    figures = status.figures
    assert (status.state, figures.running, figures.waiting, status.steps) == ("ready", 1, 1, 2)
    assert (figures.free_blocks, figures.total_blocks, figures.preemptions) == (30, 32, 0)
    assert status.agents == [{"rank": 0, "state": "ready"}]
    assert status.last_step_age_s == pytest.approx(0.0)


def test_host_time_counts_only_while_the_device_waits() -> None:
    """Each reading of the fake clock advances it by 1 ms.

    The loop reads the clock once before and once after it sends a step.
    """
    engine = Engine(decode_steps_ahead=0)
    engine.request("a", 5, 4)
    ticking(engine)
    engine.finish()
    assert len(engine.metrics.overheads) == 3, "one for each step that another followed"
    assert min(engine.metrics.overheads) > 0
    ahead = Engine(decode_steps_ahead=1)
    ahead.request("a", 5, 6)
    ticking(ahead)
    ahead.finish()
    assert 0.0 in ahead.metrics.overheads
    assert ahead.metrics.overheads.count(0.0) >= 3, "with a step ahead the device goes on"


def ticking(engine: Engine) -> None:
    def clock() -> float:
        engine.now += 0.001
        return engine.now

    engine.core._clock = clock
