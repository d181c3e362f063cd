"""Tests of the processor time and the energy in the report of a load test."""

from __future__ import annotations

import pytest

from performance.load.report import _cost_lines
from performance.load.server_cost import CPU_METRIC, ENERGY_METRIC, ServerCost


def test_the_cost_is_the_difference_for_1000_tokens():
    before, after = {CPU_METRIC: 1.0, ENERGY_METRIC: 100.0}, {CPU_METRIC: 4.0, ENERGY_METRIC: 130.0}
    cost = ServerCost.between(before, after).as_dict(2000)
    assert cost["cpu_s_per_1000_tokens"] == pytest.approx(1.5)
    assert cost["joules_per_1000_tokens"] == pytest.approx(15.0)
    [line] = _cost_lines(cost)
    assert "1.50 CPU seconds" in line
    assert "15.0 J" in line


def test_a_machine_without_energy_counter_has_processor_time_only():
    cost = ServerCost.between({CPU_METRIC: 1.0}, {CPU_METRIC: 2.0}).as_dict(1000)
    assert cost["joules"] is cost["joules_per_1000_tokens"] is None
    [line] = _cost_lines(cost)
    assert " J" not in line


def test_another_server_has_no_line():
    assert _cost_lines(ServerCost.between({}, {}).as_dict(1000)) == []


def test_a_load_without_tokens_has_no_ratio():
    assert ServerCost.between({CPU_METRIC: 1.0}, {CPU_METRIC: 2.0}).as_dict(0)["cpu_s_per_1000_tokens"] is None
