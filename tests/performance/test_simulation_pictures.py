"""Tests that the pictures of docs/scheduling.md can be drawn. The tests simulate shorter runs."""

from dataclasses import replace
from pathlib import Path

from performance.simulation.pictures import (
    PUBLISHED_LOAD,
    batching_picture,
    batching_runs,
    gaps_of,
    long_prompt_picture,
    long_prompt_runs,
    policies_picture,
    policy_runs,
)

PNG = b"\x89PNG"


def test_policies(tmp_path: Path) -> None:
    runs = policy_runs(("fcfs", "chunked"), replace(PUBLISHED_LOAD, duration=3.0))
    policies_picture(tmp_path / "a.png", runs)
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


def test_a_long_prompt_interrupts_streams_unless_it_is_chunked(tmp_path: Path) -> None:
    whole, chunked, slo = runs = long_prompt_runs(("fcfs", "chunked", "slo"))
    longest = {
        run.name: max(gap.seconds for record in run.run.records[:-1] for gap in gaps_of(record) if gap.at > 4.0)
        for run in runs
    }
    usual = whole.figures.tbt_ms.p50 or 0.0
    assert longest[whole.name] > 0.2
    assert longest[chunked.name] < 2e-3 * usual
    assert longest[slo.name] < 2e-3 * usual
    assert slo.figures.goodput_fraction == 1.0
    long_prompt_picture(tmp_path / "b.png", runs)
    assert (tmp_path / "b.png").read_bytes().startswith(PNG)


def test_batching_modes_have_the_expected_order(tmp_path: Path) -> None:
    dynamic, continuous, paged = batching_runs(("dynamic", "continuous", "paged"), requests=200)
    assert 2 * dynamic.figures.qps < continuous.figures.qps < paged.figures.qps
    assert paged.outcome.kv_waste < 0.04 < continuous.outcome.kv_waste
    batching_picture(tmp_path / "c.png", [dynamic, continuous, paged])
    assert (tmp_path / "c.png").read_bytes().startswith(PNG)
