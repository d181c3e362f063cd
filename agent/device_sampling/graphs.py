"""Compiles and runs the graphs that find candidates, draw tokens among them, and gather rows of logits.

Keeps the logits of a step on the device until the sampler needs them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from mindspore import Tensor

from agent.backends.device import DeviceHooks
from agent.backends.launch import Launch, OnDevice
from agent.compiled_graph import CompiledGraph
from agent.device_sampling.cells import candidates_cell, num_drawable, rows_cell
from agent.device_sampling.draws import draws_cell
from agent.group.model_part import ModelPart
from agent.kernels import Candidates, widen_bfloat16
from agent.layers.parameter import as_tensor
from agent.run_ahead.draws import DrawColumn
from agent.scores import DeviceScores, Float32Array, Int32Array
from agent.weights.storage import Array, to_float32

STEP_FETCHED = slice(1, 3)
"""Selects the results of a step that the host may fetch: the best tokens and their logits."""
_CANDIDATES_FETCHED = slice(0, 4)
_DRAWS_FETCHED = slice(0, 1)
_NOTHING = slice(0, 0)
"""Selects no results, for agents that do not sample. These agents only wait until the device has computed."""


class SamplingGraphs:
    """Owns the graphs that find candidates, draw tokens and gather rows of logits. Only the device thread may use this
    object.
    """

    def __init__(self, vocab_size: int, part: ModelPart | None, hooks: DeviceHooks, *, draws: bool = False) -> None:
        """With ``draws``, the device can draw tokens."""
        self.vocab_size = vocab_size
        self.num_drawable = num_drawable(vocab_size, part) if draws else 0
        self.num_parts = 1 if part is None or not part.is_split else part.parallel.tensor_parallel
        self.part_size = vocab_size if part is None else part.vocab_stride
        self._part, self._hooks = part, hooks
        self._samples = part is None or part.returns_results
        self._candidates: CompiledGraph | None = None
        self._rows: CompiledGraph | None = None
        self._draws: CompiledGraph | None = None

    def compile(self, logits: OnDevice) -> None:
        """Compiles the graphs and runs each of them once with ``logits`` [seqs, columns].

        Later logits must have the same type and number of columns.
        """
        given = as_device(logits)
        seqs, columns = given.shape
        self._candidates = CompiledGraph(candidates_cell(self.vocab_size, columns, given.dtype, self._part))
        self._rows = CompiledGraph(rows_cell(columns, given.dtype))
        with self._hooks.graph_run(compiles=True):
            self._candidates.compile((given, as_tensor(np.ones((seqs, 1), np.float32))))
            self._rows.compile((given, as_tensor(np.zeros(1, np.int32))))
        if self.num_drawable:
            self._draws = CompiledGraph(draws_cell(self.num_drawable, self._part))
            shape, draws = (self.num_parts * seqs, self.num_drawable), np.ones((seqs, len(DrawColumn)), np.float32)
            rows = np.zeros(seqs, np.int32), np.zeros(self.num_parts * seqs, np.float32)
            arrays = (np.zeros(shape, np.float32), np.zeros(shape, np.int64), *rows, draws)
            with self._hooks.graph_run(compiles=True):
                self._draws.compile(tuple(as_tensor(array) for array in arrays))

    @property
    def step_fetched(self) -> slice:
        """Selects the results of a step that this agent fetches. If it samples, these are the best tokens and their
        logits.
        """
        return STEP_FETCHED if self._samples else _NOTHING

    def scores(self, step: Launch, num_rows: int, num_ids: int) -> DeviceScores:
        """Returns an object through which the sampler fetches the scores of a step.

        The results of the launch ``step`` must be logits, best tokens and the logits of the best tokens. Each result
        has ``num_ids`` rows. The first ``num_rows`` rows belong to sequences, and all later rows are padding.
        """
        return _Scores(self, step, num_rows, num_ids)

    def run_candidates(self, step: Launch, temperatures: Float32Array) -> Launch:
        """Runs the graph of ``candidates_cell`` on the logits of a step. ``temperatures`` is float32 [seqs, 1]."""

        def run() -> tuple[Tensor, ...]:
            assert self._candidates is not None, "compile() must come first"
            logits = as_device(step.results()[0])
            with self._hooks.graph_run():
                results: tuple[Tensor, ...] = self._candidates.run((logits, as_tensor(temperatures)))
            return results

        return self._hooks.launch(run, _CANDIDATES_FETCHED if self._samples else _NOTHING)

    def run_draws(self, step: Launch, candidates: Launch, draws: Float32Array) -> Launch:
        """Runs the graph of ``draws_cell`` on the best tokens of a step and the candidates of the same step.

        If agents share the vocabulary, all of them must call this for the same steps.
        """

        def run() -> tuple[Tensor, ...]:
            assert self._draws is not None, "compile() must come first, and num_drawable must be above 0"
            best, ids, _, masses = map(as_device, candidates.results()[:4])
            with self._hooks.graph_run():
                return (self._draws.run((best, ids, as_device(step.results()[1]), masses, as_tensor(draws))),)

        return self._hooks.launch(run, _DRAWS_FETCHED if self._samples else _NOTHING)

    def run_rows(self, launch: Launch, result: int, indices: Int32Array) -> Launch:
        """Gathers rows of logits with the graph of ``rows_cell``.

        ``result`` is the index of the logits among the results of ``launch``. ``indices`` selects the rows.
        """

        def run() -> tuple[Tensor, ...]:
            assert self._rows is not None, "compile() must come first"
            logits = as_device(launch.results()[result])
            with self._hooks.graph_run():
                return (self._rows.run((logits, as_tensor(indices))),)

        return self._hooks.launch(run, slice(None))


class _Scores(DeviceScores):
    def __init__(self, graphs: SamplingGraphs, step: Launch, num_rows: int, num_ids: int) -> None:
        self.vocab_size, self.num_ids, self.num_drawable = graphs.vocab_size, num_ids, graphs.num_drawable
        self.fetched_bytes = 0
        self._graphs, self._num_rows, self._step = graphs, num_rows, step
        self._found: Launch | None = None
        self._drawn: Launch | None = None

    def best(self) -> tuple[Int32Array, Float32Array]:
        ids, values = self._fetch(self._step)
        return ids[: self._num_rows], in_float32(values[: self._num_rows])

    def find_candidates(self, temperatures: Float32Array) -> None:
        if self._found is None:
            padded = np.ones((self.num_ids, 1), np.float32)
            padded[: self._num_rows, 0] = temperatures
            self._found = self._graphs.run_candidates(self._step, padded)

    def candidates(self) -> Candidates:
        assert self._found is not None, "find_candidates() must come first"
        parts = self._graphs.num_parts
        best, ids, *masses = self._fetch(self._found)
        best, ids = (each.reshape(parts, -1, each.shape[1]) for each in (best, ids))
        sums, scaled_sums = (each.reshape(parts, -1) for each in masses)
        return Candidates(best, ids, sums, scaled_sums, self._graphs.part_size)

    def rows(self, indices: Int32Array) -> Float32Array:
        parts = self._graphs.num_parts
        if parts == 1:
            return in_float32(self._fetch(self._graphs.run_rows(self._step, 0, indices))[0])
        assert self._found is not None, "find_candidates() must come first"
        starts = np.arange(parts, dtype=np.int32)[:, None] * np.int32(self.num_ids)
        gathered = self._graphs.run_rows(self._found, 4, (starts + indices).astype(np.int32).reshape(-1))
        return side_by_side(in_float32(self._fetch(gathered)[0]), parts, self.vocab_size)

    def draw(self, draws: Float32Array) -> None:
        assert self._found is not None, "find_candidates() must come first"
        padded = np.ones((self.num_ids, len(DrawColumn)), np.float32)
        padded[:, [DrawColumn.IS_DRAWN, DrawColumn.IS_WHOLE]] = 0
        padded[: self._num_rows] = draws
        self._drawn = self._graphs.run_draws(self._step, self._found, padded)

    def chosen(self) -> Int32Array:
        (ids,) = self.best()[:1] if self._drawn is None else self._fetch(self._drawn)
        return ids[: self._num_rows]

    def chosen_ids(self) -> OnDevice:
        try:
            return self._step.results()[1] if self._drawn is None else self._drawn.results()[0]
        except RuntimeError:  # the step failed; the sampler reports this error when it fetches the step's results
            return np.zeros(self.num_ids, np.int32)

    def when_computed(self, callback: Callable[[], None]) -> None:
        self._newest.when_fetched(callback)

    def wait(self) -> None:
        # In an agent that does not sample, the launches copy nothing to the host. Then ``fetch`` only waits. The device
        # may report a failure only once, so the newest launch may not have the error of an earlier one.
        for launch in (self._step, self._found, self._drawn):
            if launch is not None:
                launch.fetch()

    @property
    def _newest(self) -> Launch:
        return self._drawn or self._found or self._step

    def _fetch(self, launch: Launch) -> tuple[Array, ...]:
        arrays = launch.fetch()
        self.fetched_bytes += sum(array.nbytes for array in arrays)
        return arrays


def as_device(value: OnDevice) -> Tensor:
    """Returns ``value`` as an input of a graph. If it is an array, the tensor uses the array's memory."""
    return as_tensor(value) if isinstance(value, np.ndarray) else value


def in_float32(values: Array) -> Float32Array:
    """Converts values that were fetched from the device to float32. An array of uint16 has the bits of bfloat16."""
    if values.dtype != np.uint16:
        return to_float32(values, str(values.dtype))
    wide = np.empty(values.shape, np.float32)
    widen_bfloat16(np.ascontiguousarray(values), wide)
    return wide


def side_by_side(parts: npt.NDArray[np.float32], num_agents: int, vocab_size: int) -> Float32Array:
    """Joins the agents' logits along the vocabulary: [agents * seqs, columns] -> [seqs, vocab_size].

    Drops the padding columns of the last agent.
    """
    rows, columns = len(parts) // num_agents, parts.shape[1]
    logits = np.empty((rows, vocab_size), np.float32)
    for index in range(num_agents):
        place = logits[:, index * columns : (index + 1) * columns]
        place[:] = parts[index * rows : (index + 1) * rows, : place.shape[1]]
    return logits
