"""Tests how many requests policy ``slo`` serves on time under a load above the simulated device's capacity."""

from dataclasses import replace

import pytest

from performance.load.options import LoadOptions
from performance.simulation.light_keys import CASES, Case, simulate_flood
from performance.simulation.pictures import CONFIG, DEVICE, PUBLISHED_LOAD
from performance.simulation.requests import generated
from performance.simulation.runs import NOWHERE, simulate
from performance.simulation.setup import make_setup
from performance.simulation.workload import OpenLoop

SECONDS = 15.0
CAPACITY = 10.9
"""Requests per second of the published load that the simulated device can serve if it is never idle."""


def good_per_s(rate: float) -> float:
    load = replace(PUBLISHED_LOAD, rate=rate, duration=SECONDS)
    setup = make_setup(CONFIG, ["scheduler_config.policy=slo"], DEVICE)
    arrivals = generated(load, setup.config)
    run = simulate("slo", setup, OpenLoop(arrivals.requests, arrivals.times), load)
    return run.figures.good_requests / SECONDS


def test_slo_keeps_its_goodput_under_overload() -> None:
    assert good_per_s(12.0) > 0.9 * CAPACITY
    assert good_per_s(100.0) > 0.9 * CAPACITY


def test_slo_keeps_its_goodput_when_objectives_limit_the_rows() -> None:
    """About a hundred of the 256 batch rows can get a token every 50 ms, which is the objective.

    With one more running request, that request and another one would miss the objective.
    """
    settings = [
        "model_config.weight_format=int8",
        "model_config.kv_format=int8",
        "scheduler_config.policy=slo",
        "scheduler_config.ttft_objective_ms=1000",
        "scheduler_config.tbt_objective_ms=50",
        "scheduler_config.max_waiting_requests=64",
    ]
    setup = make_setup("llama_160m_cpu.yaml", settings, "cpu")
    load = LoadOptions(
        NOWHERE, duration=2 * SECONDS, token_ids=True, vocab_size=32_000, prompt_len=(32, 64), output_len=(64, 192),
        ignore_eos=True, slo_ttft_ms=1000.0, slo_tpot_ms=50.0,
    )  # fmt: skip
    runs = []
    for rate in (12.0, 110.0):
        arrivals = generated(replace(load, rate=rate), setup.config)
        runs.append(simulate("slo", setup, OpenLoop(arrivals.requests, arrivals.times), replace(load, rate=rate)))
    peak, overload = (run.figures.good_requests / run.figures.total_time_s for run in runs)
    assert peak > 11.0
    assert overload > 0.95 * peak


@pytest.mark.parametrize(
    "case", [pytest.param(CASES[0], id="tiny"), pytest.param(CASES[2], id="7b", marks=pytest.mark.sweep)]
)
def test_a_flood_from_four_keys_leaves_light_keys_their_time_to_first_token(case: Case) -> None:
    before = simulate_flood(case, (0,), SECONDS / 4, light_keys_first=False)
    after = simulate_flood(case, (0,), SECONDS, light_keys_first=True)
    assert before.ratio > 2.5
    assert after.ratio < 1.6
    assert after.goodput > 0.95 * after.peak_goodput
