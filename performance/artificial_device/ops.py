"""Provides a variant of the CPU's native op table: its graphs run on an artificial device (``queue.ArtificialDevice``).

MindSpore must be set up before this module is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from agent.backends.cpu import native
from agent.backends.cpu.native import NativeCpuHooks, NativeCpuOps
from agent.backends.device import DeviceHooks, DeviceTraits
from agent.backends.launch import Launch, OnDevice
from agent.device_sampling import SamplingGraphs
from agent.group.model_part import ModelPart
from agent.lora.stacked import StackedSizes
from agent.run_ahead.draws import DrawColumn
from agent.step_graph import dynamic
from agent.weights.forms import LinearForms
from performance.artificial_device.queue import ArtificialDevice


class ArtificialHooks(NativeCpuHooks):
    """Hooks that send every launch of a graph to the queue of an artificial device."""

    def __init__(self, dtype: str, forms: LinearForms, device: ArtificialDevice) -> None:
        super().__init__(dtype, forms)
        self.device = device

    def launch(self, run: Callable[[], tuple[OnDevice, ...]], fetched: slice) -> Launch:
        return self.device.launch(run, fetched)


class ArtificialSampling(SamplingGraphs):
    """Runs the graphs of sampling. The artificial device gets the name of each launched graph.

    If the graph that draws tokens must draw wrong ones (``ArtificialDevice.wrong_every``), it gets other random
    numbers.
    """

    def __init__(
        self, vocab_size: int, part: ModelPart | None, hooks: ArtificialHooks, *, draws: bool = False
    ) -> None:
        super().__init__(vocab_size, part, hooks, draws=draws)
        self._device = hooks.device

    def run_candidates(self, *arguments: Any) -> Launch:
        with self._device.sampling("candidates"):
            return super().run_candidates(*arguments)

    def run_draws(self, step: Launch, candidates: Launch, draws: Any) -> Launch:
        if self._device.is_wrong_draw():
            draws = draws.copy()
            draws[:, DrawColumn.NUMBER] = (draws[:, DrawColumn.NUMBER] + 0.5) % 1
        with self._device.sampling("draws"):
            return super().run_draws(step, candidates, draws)

    def run_rows(self, *arguments: Any) -> Launch:
        with self._device.sampling("rows"):
            return super().run_rows(*arguments)


def _sampling_graphs(vocab_size: int, part: ModelPart | None, hooks: DeviceHooks, *, draws: bool) -> SamplingGraphs:
    if isinstance(hooks, ArtificialHooks):
        return ArtificialSampling(vocab_size, part, hooks, draws=draws)
    return SamplingGraphs(vocab_size, part, hooks, draws=draws)


class ArtificialOps(NativeCpuOps):
    """The CPU's native op table, but its graphs run on the artificial device ``device``.

    With ``traits.runs_ahead``, the agent launches a step before the previous step has ended.
    """

    traits: ClassVar[DeviceTraits] = replace(NativeCpuOps.traits, runs_ahead=True)
    device: ClassVar[ArtificialDevice]

    def __init__(
        self,
        dtype: str,
        max_positions: int,
        part: ModelPart | None = None,
        forms: LinearForms | None = None,
        *,
        int8_cache: bool = False,
        adapters: StackedSizes | None = None,
    ) -> None:
        super().__init__(dtype, max_positions, part, forms, int8_cache=int8_cache, adapters=adapters)
        self.hooks = ArtificialHooks(dtype, forms or LinearForms(), self.device)


def use_artificial_device(device: ArtificialDevice, *, runs_ahead: bool = True) -> None:
    """Makes ``device`` the device of all native op tables that this process creates after this call.

    Without ``runs_ahead``, the agent waits for the results of each step before it launches the next.
    """

    class Ops(ArtificialOps):
        traits = replace(ArtificialOps.traits, runs_ahead=runs_ahead)

    Ops.device = device
    native.NativeCpuOps = Ops  # type: ignore[misc]
    dynamic.SamplingGraphs = _sampling_graphs  # type: ignore[assignment, misc]
