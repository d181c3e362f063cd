"""More requests than the simulated device can serve: how many of them ``slo`` still serves on time."""

from dataclasses import replace

from performance.simulation.pictures import CONFIG, DEVICE, PUBLISHED_LOAD
from performance.simulation.requests import generated
from performance.simulation.runs import simulate
from performance.simulation.setup import make_setup
from performance.simulation.workload import OpenLoop

SECONDS = 60.0
CAPACITY = 10.9
"""Requests a second of the published load that the preset serves when it is never idle."""


def good_per_s(rate: float) -> float:
    load = replace(PUBLISHED_LOAD, rate=rate, duration=SECONDS)
    setup = make_setup(CONFIG, ["scheduler_config.policy=slo"], DEVICE)
    arrivals = generated(load, setup.config)
    run = simulate("slo", setup, OpenLoop(arrivals.requests, arrivals.times), load)
    return run.figures.good_requests / SECONDS


def test_slo_serves_as_many_on_time_however_many_come() -> None:
    assert good_per_s(12.0) > 0.9 * CAPACITY
    assert good_per_s(100.0) > 0.9 * CAPACITY
