"""Tests how an agent waits for launches on an Ascend. The test decides when the fake device has finished a launch."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np

from agent.backends.ascend.launches import AscendHooks
from support.time_limits import time_limit

WAIT_S = time_limit(20)


class Device:
    """A fake of the device that records MindSpore's calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.finished = threading.Event()
        self.breaks = False
        self.runtime = SimpleNamespace(Event=lambda: self)

    def record(self) -> None:
        self.calls.append("record")

    def query(self) -> bool:
        if self.finished.is_set() and self.breaks:
            raise RuntimeError("the device is lost")
        return self.finished.is_set()

    def result(self, number: int) -> Any:
        def move_to(to: str, *, blocking: bool) -> Any:
            self.calls.append(f"copy {number} to {to}, blocking {blocking}")
            return np.full(2, number)

        return SimpleNamespace(move_to=move_to)


def launched(device: Device) -> Any:
    results = tuple(device.result(number) for number in range(3))
    return AscendHooks(device).launch(lambda: results, slice(1, 3))


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


def test_a_lost_device_ends_the_wait() -> None:
    device, fetched = Device(), threading.Event()
    device.breaks = True
    launched(device).when_fetched(fetched.set)
    device.finished.set()
    assert fetched.wait(WAIT_S)
