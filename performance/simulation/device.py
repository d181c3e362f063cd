"""Calculates the time of a step from a device's rates: the roofline of its operators, and the kernel launches.

    step = overhead + max(kernels x launch, busy)
    busy = linear layers + output layer + attention + activations + sampling

    linear layers  max(operations / rate, weight bytes / bandwidth)
    attention      max(operations of the query-key pairs / rate, bytes of the context's keys and values / bandwidth)
    activations    bytes between the operators / bandwidth
    sampling       reading the logits once / bandwidth, plus a fixed time per row

For linear layers and attention, max() assumes that the device reads and computes at the same time (``overlap`` is
infinite). With a partial overlap, the time is ``(compute ** overlap + read ** overlap) ** (1 / overlap)``, where
``compute`` and ``read`` are the two times. ``overlap`` 1 gives their sum.

The host launches kernels one after the other while the device runs earlier kernels. A step is therefore host bound
(kernels x launch) or device bound (busy), whichever takes longer. The time to move blocks is their bytes divided by the
bandwidth of the transfer.

All rates are those that a device achieves in practice. A preset states which fraction of the published rate it assumes,
and why.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from llm_serving.scheduler.output import MoveKind, ScheduledStep
from performance.simulation.work import ModelWork, StepWork, work_of

__all__ = ["CostModel", "DeviceRates", "RooflineDevice"]


class CostModel(Protocol):
    """Returns the seconds of a step, from its start on the device until the next step can start."""

    name: str

    def seconds(self, step: ScheduledStep) -> float: ...


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Achieved rates of a device, in seconds, bytes per second and operations per second."""

    name: str
    operations_per_s: dict[str, float]
    """Rate of matrix products by the type of their operands: ``float16``, ``bfloat16``, ``int8``, ``float32``."""
    attention_share: float
    """Fraction of ``operations_per_s`` that attention over a prompt achieves."""
    memory_bytes_per_s: float
    attention_bytes_per_s: float
    """Rate at which attention reads keys and values through block tables."""
    host_bytes_per_s: float
    """Rate between device and host in one direction, for blocks that are swapped."""
    copy_bytes_per_s: float
    """Rate of copying blocks on the device."""
    step_overhead_s: float
    """Time of every step before and after its kernels: inputs to the device, graph call, results to the host."""
    sample_row_s: float
    kernel_launch_s: float = 0.0
    kernels_per_layer: int = 0
    kernels_per_step: int = 0
    overlap: float = math.inf
    """Exponent with which read time and compute time are combined: 1 gives their sum, infinity the longer time."""
    move_overhead_s: float = 0.0
    """Time of a step that only moves blocks."""
    block_overhead_s: float = 0.0
    """Time of each moved block."""


class RooflineDevice:
    """Calculates the time of a step from a device's rates and a model's sizes."""

    def __init__(self, rates: DeviceRates, model: ModelWork) -> None:
        self.name = rates.name
        self._rates = rates
        self._model = model
        self._linear_rate = rates.operations_per_s[model.weight_unit]
        self._attention_rate = rates.operations_per_s[model.float_unit] * rates.attention_share
        launches = model.num_layers * rates.kernels_per_layer + rates.kernels_per_step
        self._launch_s = launches * rates.kernel_launch_s

    def seconds(self, step: ScheduledStep) -> float:
        moves = self.move_seconds(step)
        if not step.rows:
            return self._rates.move_overhead_s + moves
        return moves + self.work_seconds(work_of(step))

    def work_seconds(self, work: StepWork) -> float:
        """Returns the seconds of a step without its block moves."""
        busy = self._linear(work) + self._attention(work) + self._rest(work)
        return self._rates.step_overhead_s + max(self._launch_s, busy)

    def move_seconds(self, step: ScheduledStep) -> float:
        """Returns the seconds of a step's block moves, which precede its computation."""
        seconds, rates, size = 0.0, self._rates, self._model.block_bytes
        for move in step.moves:
            rate = rates.copy_bytes_per_s if move.kind is MoveKind.COPY else rates.host_bytes_per_s
            seconds += rates.block_overhead_s + size / rate
        return seconds

    def _linear(self, work: StepWork) -> float:
        model, rate, bandwidth = self._model, self._linear_rate, self._rates.memory_bytes_per_s
        layers = self._over(work.tokens * model.layer_operations / rate, model.layer_bytes / bandwidth)
        if not work.samples:
            return layers
        return layers + self._over(work.samples * model.head_operations / rate, model.head_bytes / bandwidth)

    def _attention(self, work: StepWork) -> float:
        model = self._model
        return self._over(
            work.pairs * model.pair_operations / self._attention_rate,
            work.context * model.kv_token_bytes / self._rates.attention_bytes_per_s,
        )

    def _over(self, compute_s: float, read_s: float) -> float:
        exponent = self._rates.overlap
        if exponent == math.inf:
            return max(compute_s, read_s)
        longer, shorter = max(compute_s, read_s), min(compute_s, read_s)
        share: float = (1.0 + (shorter / longer) ** exponent) ** (1.0 / exponent) if longer > 0 else 0.0
        return longer * share

    def _rest(self, work: StepWork) -> float:
        num_bytes = work.tokens * self._model.activation_bytes + work.samples * self._model.logit_bytes
        return num_bytes / self._rates.memory_bytes_per_s + work.samples * self._rates.sample_row_s
