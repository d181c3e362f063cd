"""Tests how an agent waits for launches on an Ascend. The test decides when the fake device has finished a launch."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agent.backends.ascend.launches import AscendHooks
from agent.run_ahead.last_tokens import GroupTokens
from support.time_limits import time_limit

WAIT_S = time_limit(20)


class Device:
    """A fake of the device that records MindSpore's calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.finished = threading.Event()
        self.error: Exception | None = None
        self.num_errors = 1000
        """The number of calls of ``query`` that report the error."""
        self.runtime = SimpleNamespace(Event=lambda: self)

    def record(self) -> None:
        self.calls.append("record")

    def query(self) -> bool:
        if self.finished.is_set() and self.error is not None and self.num_errors:
            self.num_errors -= 1
            raise self.error
        return self.finished.is_set()

    def result(self, number: int) -> Any:
        def move_to(to: str, *, blocking: bool) -> Any:
            self.calls.append(f"copy {number} to {to}, blocking {blocking}")
            return np.full(2, number)

        return SimpleNamespace(move_to=move_to)


def launched(device: Device, fetched: slice = slice(1, 3), hooks: AscendHooks | None = None) -> Any:
    results = tuple(device.result(number) for number in range(3))
    return (hooks or AscendHooks(device)).launch(lambda: results, fetched)


def test_results_are_copied_at_once_and_fetched_when_the_device_has_finished() -> None:
    device, fetched = Device(), threading.Event()
    launch = launched(device)
    launch.when_fetched(fetched.set)
    assert device.calls == ["copy 1 to CPU, blocking False", "copy 2 to CPU, blocking False", "record"]
    assert len(launch.results()) == 3, "a later launch may take them before the device has finished"
    assert not fetched.is_set()
    device.finished.set()
    assert [array.tolist() for array in launch.fetch()] == [[1, 1], [2, 2]]
    assert fetched.wait(WAIT_S)
    late: list[bool] = []
    launch.when_fetched(lambda: late.append(True))
    assert late == [True]


@pytest.mark.parametrize("fetched", [slice(1, 3), slice(0, 0)])
@pytest.mark.parametrize("error", [RuntimeError("the device is lost"), ValueError("the device is lost")])
def test_a_lost_device_ends_the_wait_and_fetch_raises_its_error(error: Exception, fetched: slice) -> None:
    """An agent that does not sample fetches nothing, so no copy would show it that its device has failed."""
    device, ended = Device(), [threading.Event(), threading.Event()]
    device.error, hooks = error, AscendHooks(device)
    launches = [launched(device, fetched, hooks) for _ in ended]
    for launch, event in zip(launches, ended, strict=True):
        launch.when_fetched(event.set)
    device.finished.set()
    for launch, event in zip(launches, ended, strict=True):
        assert event.wait(WAIT_S), "a later launch ends, too"
        with pytest.raises(RuntimeError, match="the device is lost"):
            launch.fetch()


def test_an_agent_that_does_not_sample_reports_the_first_error_of_its_device() -> None:
    """The device reports its failure only once, for the step. The launch of the candidates seems to succeed."""
    from agent.device_sampling.graphs import _Scores  # here, because every test process would import MindSpore

    device = Device()
    device.error, device.num_errors = RuntimeError("the device is lost"), 1
    hooks, nothing = AscendHooks(device), slice(0, 0)
    graphs: Any = SimpleNamespace(
        vocab_size=8, num_drawable=0, run_candidates=lambda step, temperatures: launched(device, nothing, hooks)
    )
    scores = _Scores(graphs, launched(device, nothing, hooks), 1, 1)
    scores.find_candidates(np.ones(1, np.float32))
    sampler: Any = SimpleNamespace(rows=SimpleNamespace(last_token=np.zeros(1, np.int32)))
    shared: Any = SimpleNamespace(record=lambda slot: 0)
    part: Any = SimpleNamespace(returns_results=False)
    tokens, slot = GroupTokens(sampler, shared, part), SimpleNamespace(rows=np.zeros(1, np.int32), num_seqs=1)
    tokens.record(slot)  # type: ignore[arg-type]
    device.finished.set()
    with pytest.raises(RuntimeError, match="the device is lost"):
        tokens.sample(scores, slot, has_draws=False)  # type: ignore[arg-type]
