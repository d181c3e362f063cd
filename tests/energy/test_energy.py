"""Tests of the energy counters, and of the figures per 1000 tokens in log and metrics."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llm_serving.energy.meter import EnergyMeter, Interval, Reading
from llm_serving.energy.processes import ProcessTimes
from llm_serving.energy.rapl import RaplZone, open_zones


def make_zone(folder: Path, name: str, number: str, value: int, largest: int = 1_000_000_000) -> Path:
    zone = folder / f"intel-rapl:{number}"
    zone.mkdir()
    (zone / "name").write_text(f"{name}\n")
    (zone / "energy_uj").write_text(f"{value}\n")
    (zone / "max_energy_range_uj").write_text(f"{largest}\n")
    return zone


def test_a_zone_counts_joules_since_its_start(tmp_path):
    path = make_zone(tmp_path, "package-0", "0", 5_000_000)
    zone = RaplZone(path)
    (path / "energy_uj").write_text("7500000\n")
    assert zone.joules() == pytest.approx(2.5)


def test_a_counter_that_wraps_loses_nothing(tmp_path):
    path = make_zone(tmp_path, "package-0", "0", 9_000_000, largest=9_999_999)
    zone = RaplZone(path)
    (path / "energy_uj").write_text("500000\n")
    assert zone.joules() == pytest.approx(1.5)


def test_packages_and_memory_count_and_cores_do_not(tmp_path):
    make_zone(tmp_path, "package-0", "0", 1)
    make_zone(tmp_path, "core", "0:0", 1)
    make_zone(tmp_path, "dram", "0:1", 1)
    assert len(open_zones(tmp_path)) == 2


def test_zones_that_cannot_be_read_are_left_out(tmp_path):
    (make_zone(tmp_path, "package-0", "0", 1) / "energy_uj").unlink()
    (make_zone(tmp_path, "package-1", "1", 1) / "max_energy_range_uj").write_text("unknown\n")
    assert open_zones(tmp_path) == []
    assert open_zones(tmp_path / "missing") == []


def test_the_time_of_a_child_counts_and_never_decreases():
    times = ProcessTimes()
    before = times.seconds()
    work = "import sys, time; t = time.process_time\nwhile t() < 0.3: pass\nprint('done', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"done\n"
        during = times.seconds()
        assert during - before >= 0.25
        child.communicate()
    assert times.seconds() >= during


def test_an_interval_without_tokens_is_added_to_the_next(tmp_path):
    path = make_zone(tmp_path, "package-0", "0", 0)
    tokens = [0.0]
    meter = EnergyMeter(lambda: tokens[0], [RaplZone(path)])
    (path / "energy_uj").write_text("1000000\n")
    assert meter.end_interval() is None
    (path / "energy_uj").write_text("3000000\n")
    tokens[0] = 500.0
    interval = meter.end_interval()
    assert interval is not None
    assert interval.fields()["joules_per_1000_tokens"] == pytest.approx(6.0)
    assert {each.name: each.samples[0].value for each in meter.collect()}[
        "llm_serving_energy_joules_per_1000_tokens"
    ] == pytest.approx(6.0)


def test_without_counters_the_log_has_processor_time_only():
    fields = Interval.between(Reading(0, 1.0, None), Reading(200, 3.0, None)).fields()
    assert fields["cpu_s_per_1000_tokens"] == 10.0
    assert fields["joules"] is fields["joules_per_1000_tokens"] is None


def test_the_report_logs_intervals_with_tokens_only():
    class Log:
        def __init__(self) -> None:
            self.events: list[tuple[str, dict[str, object]]] = []

        def event(self, name: str, **fields: object) -> None:
            self.events.append((name, fields))

    async def run() -> list[tuple[str, dict[str, object]]]:
        log, tokens = Log(), [0.0]
        task = asyncio.create_task(EnergyMeter(lambda: tokens[0], []).report(log, 0.01))  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        assert not log.events
        tokens[0] = 3.0
        until = time.monotonic() + 10
        while not log.events and time.monotonic() < until:
            await asyncio.sleep(0.01)
        task.cancel()
        return log.events

    [(name, fields)] = asyncio.run(run())
    assert name == "energy"
    assert fields["output_tokens"] == 3
