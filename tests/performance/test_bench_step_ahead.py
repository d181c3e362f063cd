"""Tests the benchmark of steps that are launched ahead. The tests compare the order of events, and no times."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from performance.artificial_device.queue import STEP, Busy
from performance.bench.step_ahead_main import Measured, report
from support.forked_programs import run_forked
from support.json_program import printed_json

PROGRAM = Path(__file__).with_name("step_ahead_program.py")
STEPS, HELD = 12, 8


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("step_ahead")
    found: dict[str, Any] = printed_json(run_forked(PROGRAM, folder=folder, timeout=300))
    return found


def spans(run: dict[str, Any], what: str) -> list[tuple[float, float]]:
    """Returns the start and the end of each event with this name, in their order."""
    return [(start, end) for start, end, name in run["events"] if name == what]


def test_a_step_with_a_temperature_is_launched_while_the_device_computes_the_step_before(runs: dict[str, Any]) -> None:
    """The device computes a step only after the host has launched the next one. So a host that waits would hang."""
    run = runs["right"]
    assert not run["waited_in_vain"]
    launches, computed = spans(run, "host launches a step"), spans(run, "device computes a step")
    drawn, answered = spans(run, "device draws tokens"), spans(run, "host answers a step")
    assert [len(each) for each in (launches, computed, drawn, answered)] == [STEPS] * 4
    for step in range(HELD):
        order = [launches[step + 1][1], computed[step][1], drawn[step][1], answered[step][0]]
        assert order == sorted(order), f"step {step}"
    assert run["second_launches"] == 0


def test_a_second_launch_does_not_wait_for_the_device_either(runs: dict[str, Any]) -> None:
    run = runs["wrong"]
    assert not run["waited_in_vain"]
    assert run["second_launches"] >= 2
    assert len(spans(run, "device computes a step")) == STEPS + run["second_launches"]
    assert len(spans(run, "host answers a step")) == STEPS


def busy(start: float, step: float, sampling: float) -> list[Busy]:
    return [Busy(start, start + step, STEP), Busy(start + step, start + step + sampling, "draws")]


@pytest.mark.parametrize(("period", "code"), [(8.2, 0), (8.5, 1)])
def test_the_report_has_period_ratio_and_second_launches(
    capsys: pytest.CaptureFixture[str], period: float, code: int
) -> None:
    parsed = Namespace(steps=3, trace=False, json=None, device_ms=8.0, host_ms=3.0, temperature=0.8, limit=1.04)
    periods = [each for step in range(4) for each in busy(step * period / 1000, 0.007, 0.001)]
    waiting = [each for step in range(3) for each in busy(step * 0.011, 0.007, 0.001)]
    measured = [Measured([], periods, 1, 3 * period / 1000), Measured([], waiting, 0, 0.022)]
    assert report(parsed, measured) == code
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    ahead = ["yes", "8.000", f"{period:.3f}", f"{period / 8:.3f}", f"{1.5 * period:.3f}", "1"]
    assert ahead in lines
    assert ["no", "8.000", "11.000", "1.375", "11.000", "0"] in lines
