"""Tests the measured processor time of other programs. The times of all processes are planted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from performance.load import watches
from performance.load.watches import fraction_of_others, processor_seconds


class GoneError(Exception):
    pass


def machine(user: float, steal: float, idle: float, own: list[float | None]) -> Any:
    """Returns a fake ``psutil`` module for a machine with these processor seconds.

    ``own`` has the seconds of this process and of its children. None means that the child has ended.
    """

    def process(seconds: float | None) -> Any:
        def cpu_times() -> Any:
            if seconds is None:
                raise GoneError
            return SimpleNamespace(user=seconds, system=0.5)

        return SimpleNamespace(cpu_times=cpu_times)

    this = process(own[0])
    this.children = lambda recursive: [process(seconds) for seconds in own[1:]]
    zeros = dict.fromkeys(("nice", "system", "irq", "softirq", "iowait"), 0.0)
    return SimpleNamespace(
        cpu_times=lambda: SimpleNamespace(user=user, steal=steal, idle=idle, **zeros),
        Process=lambda: this,
        NoSuchProcess=GoneError,
    )


@pytest.mark.parametrize(
    ("user", "steal", "own", "share"),
    [
        (109.0, 1.0, [3.0, 8.0], 0.0),  # all 9 s were used by the processes that belong to the measurement
        (112.0, 1.0, [3.0, 8.0], 0.15),  # 3 s more than these 9 s: another program used them
        (109.0, 3.0, [3.0, 8.0], 0.1),  # 2 s of steal time count as time of other programs
        (109.0, 1.0, [2.0, 6.0, None], 0.15),
        # Processor times are rounded, so the time of other programs may be negative, which becomes 0.
        (100.0, 1.0, [3.0, 8.0], 0.0),
    ],
)
def test_the_fraction_of_other_processes(
    monkeypatch: pytest.MonkeyPatch, user: float, steal: float, own: list[float | None], share: float
) -> None:
    monkeypatch.setattr(watches, "psutil", machine(100.0, 1.0, 50.0, [1.0, 1.0]))
    before = processor_seconds()
    busy = user - 100.0 + steal - 1.0
    monkeypatch.setattr(watches, "psutil", machine(user, steal, 70.0 - busy, own))
    assert fraction_of_others(before, processor_seconds()) == pytest.approx(share)


def test_the_fraction_of_no_time_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "psutil", machine(100.0, 1.0, 50.0, [1.0]))
    assert fraction_of_others(processor_seconds(), processor_seconds()) == 0.0
