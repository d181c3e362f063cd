"""Tests the metrics of NPUs. The input is recorded tables of ``npu-smi info``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from llm_serving.telemetry.npu_metrics import NpuCollector
from llm_serving.telemetry.npu_smi import parse_npu_smi, read_chips

TABLE = """\
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B1               | OK            | 94.6        49                0    / 0             |
| 0                         | 0000:C1:00.0  | 87          0    / 0          3373 / 65536         |
+===========================+===============+====================================================+
| 1     910B1               | Alarm         | -           48                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          60000/ 65536         |
+===========================+===============+====================================================+
| 2     910B1               | OK            | 97.8        NA                0    / 0             |
| 0                         | 0000:02:00.0  | 5           0    / 0          3367 / 65536         |
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 1       0                 | 106           | python                   | 57000                   |
+===========================+===============+====================================================+
"""
TABLE_310P = """\
| NPU     Name              | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device            | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
| 1       310P3             | OK              | NA           43                0     / 0              |
| 0       0                 | 0000:01:00.0    | 12           1601 / 21527                             |
"""


def shown(collector: NpuCollector) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(collector)
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.split(" ") for line in lines)}


def test_every_value_of_the_configs_devices_is_shown() -> None:
    collector = NpuCollector(0, 2, lambda: parse_npu_smi(TABLE)[0])
    assert shown(collector) == {}
    collector.update()
    npu = "llm_serving_npu_"
    assert shown(collector) == {
        f'{npu}memory_used_bytes{{device="0"}}': 3373 * 2.0**20,
        f'{npu}memory_used_bytes{{device="1"}}': 60000 * 2.0**20,
        f'{npu}memory_total_bytes{{device="0"}}': 65536 * 2.0**20,
        f'{npu}memory_total_bytes{{device="1"}}': 65536 * 2.0**20,
        f'{npu}utilization_ratio{{device="0"}}': 0.87,
        f'{npu}utilization_ratio{{device="1"}}': 0.0,
        f'{npu}temperature_celsius{{device="0"}}': 49.0,
        f'{npu}temperature_celsius{{device="1"}}': 48.0,
        f'{npu}power_watts{{device="0"}}': 94.6,
        f'{npu}healthy{{device="0"}}': 1.0,
        f'{npu}healthy{{device="1"}}': 0.0,
    }


def test_a_value_that_is_not_there_is_absent() -> None:
    [_, _, chip] = parse_npu_smi(TABLE)[0]
    assert (chip.temperature_c, chip.power_w, chip.ai_core_percent) == (None, 97.8, 5)
    [chip] = parse_npu_smi(TABLE_310P)[0]
    assert (chip.name, chip.temperature_c, chip.power_w, chip.ai_core_percent) == ("310P3", 43.0, None, 12)
    assert (chip.used_mib, chip.total_mib) == (1601, 21527)


@pytest.mark.parametrize(
    ("script", "count"),
    [(f"cat <<'E'\n{TABLE}E\n", 3), ("echo broken; exit 1\n", 0), (f"cat <<'E'\n{TABLE}E\nexit 3\n", 0), ("", 0)],
    ids=["table", "failure", "failure after a table", "nothing"],
)
def test_npu_smi_is_run_as_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, count: int) -> None:
    program = tmp_path / "npu-smi"
    program.write_text(f"#!/bin/sh\n{script}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert len(read_chips()) == count


def test_without_npu_smi_there_are_no_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    collector = NpuCollector(0, 8)
    collector.update()
    assert shown(collector) == {}
