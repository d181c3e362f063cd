"""Tests the warning about a device that often draws other tokens than the host's sampler."""

from __future__ import annotations

from llm_serving.engine.draw_watch import MAX_SHARE, WINDOW, DrawWatch
from llm_serving.scheduler.output import StepResult
from support.engine_harness import Engine


def warnings(watch: DrawWatch, num_wrong: int) -> list[int]:
    """Returns the results of a window in which ``num_wrong`` steps were launched again, without zeros."""
    results = [StepResult(seq, device_draws=8, wrong_draws=3 * (seq < num_wrong)) for seq in range(watch.window)]
    return [found for found in map(watch.note, results) if found]


def test_a_window_with_too_many_second_launches_is_reported_once() -> None:
    watch, limit = DrawWatch(), int(MAX_SHARE * WINDOW)
    found = [warnings(watch, number) for number in (limit, limit + 1, WINDOW, limit, limit + 2)]
    assert found == [[], [limit + 1], [], [], [limit + 2]]


def test_the_engine_warns_and_counts_the_second_launches() -> None:
    engine = Engine()
    replica, polled = engine.core._replicas[0], engine.core._poll
    replica._draw_watch = DrawWatch(window=4)

    def with_draws(timeout_s: float | None) -> object:
        events = polled(timeout_s)
        for _, event in events:
            if isinstance(event, StepResult) and event.seq > 0:
                event.device_draws, event.wrong_draws, event.second_launches = 1, event.seq % 2, event.seq % 2
        return events

    engine.core._poll = with_draws  # type: ignore[assignment]
    engine.request("a", 5, 12)
    engine.finish()
    [warning] = engine.log.named("device_draws_differ")
    assert (warning["second_launches"], warning["steps"]) == (2, 4)
    state, steps = engine.core._state_line.take(engine.now), len(engine.executor.steps) - 1
    assert (state["device_draws"], state["second_launches"]) == (steps, (steps + 1) // 2)
