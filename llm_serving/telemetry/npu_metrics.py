"""Prometheus metrics of the NPUs, from ``npu-smi info``, which a thread runs repeatedly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llm_serving.telemetry.npu_smi import Chip, read_chips

INTERVAL_S = 15.0
"""Time between two runs of ``npu-smi``, which may take seconds."""
_MIB = 1024 * 1024


class NpuCollector(Collector):
    """Collects metrics of the ``count`` chips from number ``first`` on.

    Without a successful reading, there are no metrics.
    """

    def __init__(self, first: int, count: int, read: Callable[[], Sequence[Chip]] = read_chips) -> None:
        self._devices = range(first, first + count)
        self._read = read
        self._chips: Sequence[Chip] = ()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="npu-smi", daemon=True)

    def start(self) -> None:
        """Starts the thread that runs ``npu-smi info``."""
        self._thread.start()

    def close(self) -> None:
        """Stops reading. A run of ``npu-smi`` that has begun ends by itself."""
        self._stop.set()

    def update(self) -> None:
        """Reads the chips once."""
        self._chips = [chip for chip in self._read() if chip.number in self._devices]

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        yield from npu_families(self._chips)

    def _run(self) -> None:
        while not self._stop.is_set():
            self.update()
            self._stop.wait(INTERVAL_S)


def npu_families(chips: Sequence[Chip]) -> Iterable[Metric]:
    """Returns the metrics of the chips, with the label ``device``. Values that npu-smi does not show are absent."""
    families: list[tuple[GaugeMetricFamily, Sequence[float | None]]] = [
        (_gauge("memory_used_bytes", "Used memory of the NPU."), [chip.used_mib * _MIB for chip in chips]),
        (_gauge("memory_total_bytes", "Memory of the NPU."), [chip.total_mib * _MIB for chip in chips]),
        (
            _gauge("utilization_ratio", "Use of the NPU's cores in the last sampling interval."),
            [None if chip.ai_core_percent is None else chip.ai_core_percent / 100 for chip in chips],
        ),
        (_gauge("temperature_celsius", "Temperature of the NPU."), [chip.temperature_c for chip in chips]),
        (_gauge("power_watts", "Power of the NPU."), [chip.power_w for chip in chips]),
        (_gauge("healthy", "1 if the driver reports no fault of the NPU."), [float(chip.is_healthy) for chip in chips]),
    ]
    for family, values in families:
        for chip, value in zip(chips, values, strict=True):
            if value is not None:
                family.add_metric([str(chip.number)], value)
        if family.samples:
            yield family


def _gauge(name: str, meaning: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"llm_serving_npu_{name}", meaning, labels=["device"])
