"""What a step costs on a device: the roofline of its operators, and the price of starting them.

    step = overhead + max(kernels x launch, busy)
    busy = linear layers + output to the vocabulary + attention + activations + sampling

    linear       operations / peak, over weight bytes / bandwidth
    attention    pair operations / peak, over keys and values of the context / bandwidth
    activations  bytes between the operators / bandwidth
    sampling     reading the logits once / bandwidth, and a price a row

"Over": a device that reads while it computes takes the longer of the two (``overlap`` infinite). One that does so in
part takes ``(a ** overlap + b ** overlap) ** (1 / overlap)``, the sum at 1.

Kernels are started by the host one after the other while the device runs those started before; a step therefore takes
the longer of the two ("host bound" or "device bound"). Moves of blocks take the bytes over the way they go.

The rates are what is reached, not the peaks: a preset says which share of the published rate that is, and why.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from llm_serving.scheduler.output import MoveKind, ScheduledStep
from performance.simulation.work import ModelWork, StepWork, work_of

__all__ = ["CostModel", "DeviceRates", "RooflineDevice"]


class CostModel(Protocol):
    """Seconds of a step, from the moment the agent takes it out of its queue to the moment the next may begin."""

    name: str

    def seconds(self, step: ScheduledStep) -> float: ...


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """A device in figures that are reached, not peaks. Seconds, bytes and operations a second."""

    name: str
    operations_per_s: dict[str, float]
    """By what multiplies: ``float16``, ``bfloat16``, ``int8``, ``float32``."""
    attention_share: float
    """Of ``operations_per_s`` that attention over a prompt reaches."""
    memory_bytes_per_s: float
    attention_bytes_per_s: float
    """Of keys and values read through block tables."""
    host_bytes_per_s: float
    """Between device and host, one way: blocks swapped out and in."""
    copy_bytes_per_s: float
    """Blocks copied on the device."""
    step_overhead_s: float
    """Inputs to the device, the call of the graph, results back: paid by every step, overlapping nothing."""
    sample_row_s: float
    kernel_launch_s: float = 0.0
    kernels_per_layer: int = 0
    kernels_per_step: int = 0
    overlap: float = math.inf
    """How far reading and computing go on at a time."""
    move_overhead_s: float = 0.0
    """A step that only moves blocks ..."""
    block_overhead_s: float = 0.0
    """... and each block moved."""


class RooflineDevice:
    """A cost model from rates and the sizes of a model."""

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
        """A step of ``work`` without moves."""
        busy = self._linear(work) + self._attention(work) + self._rest(work)
        return self._rates.step_overhead_s + max(self._launch_s, busy)

    def move_seconds(self, step: ScheduledStep) -> float:
        """The block moves that come before the graph."""
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
