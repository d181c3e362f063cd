"""Starts the model of an agent: with MindSpore, or with the files that an earlier start has stored.

An earlier start may have stored the converted weights (``agent.weights.cache``) and the launches of the graph
(``agent.stored_program``). With both, an agent does not import MindSpore. A draft model or a head has files of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from agent.backends.cpu.ops import FusedCpuOps
from agent.backends.runtime import start_runtime, start_without_mindspore
from agent.group.model_part import ModelPart
from agent.kernels import RecordedLaunches, StepBuffers
from agent.model_loading import LoadedModel, load_model, load_without_network, with_network
from agent.step_graph.fused_steps import FusedStepGraph
from agent.step_graph.head_steps import HeadGraph
from agent.step_graph.interface import StepGraph
from agent.stored_program.graph import StoredStepGraph
from agent.stored_program.proof import ProofRun
from agent.stored_program.start import StoredStart
from agent.stored_program.store import ProgramStore
from agent.weights.cache.folder import WeightCache
from agent.weights.storage import Array
from llm_serving.config import Config
from llm_serving.config.draft_model import Head
from llm_serving.errors import AgentError
from llm_serving.ipc.host_pool import HostPoolMemory

if TYPE_CHECKING:
    from agent.models.registry import ModelDefinition


class ModelStart:
    """Loads the model, and finds or stores the launches of its graph. Imports mindspore if the files do not suffice."""

    def __init__(self, config: Config, rank: int, *, keeps_files: bool) -> None:
        """Opens the files of an earlier start. ``config`` has the sizes of the whole model.

        Without ``keeps_files``, reads and stores no files.
        """
        self._keeps_files = keeps_files
        self._used: set[Path] = set()
        """The files that this start has read or written. The files of the draft model do not replace them."""
        self._start_runtime = cache(partial(start_runtime, config, rank))  # one call sets up the whole process
        self._open_files(config, rank)
        if self.is_stored:
            start_without_mindspore(config, rank)
        else:
            self._start_runtime()

    def of_draft_model(self, config: Config, head: Head | None = None) -> ModelStart:
        """Opens the files of an earlier start of the draft model or the head. Imports mindspore if they do not suffice.

        ``config`` is its config, as ``draft_config`` returns it. ``head`` is None for a draft model. Call this after
        ``load``, so that the files of the two models are not read at the same time.
        """
        start = copy(self)  # both models share the set-up of MindSpore and the set of used files
        start._open_files(config, 0, head)
        if not start.is_stored:
            self._start_runtime()
        return start

    def _open_files(self, config: Config, rank: int, head: Head | None = None) -> None:
        self._weights: WeightCache | None = None
        self._program: StoredStart | None = None
        self._definition: ModelDefinition | None = None
        self.is_stored = False
        """True if the launches of the graph were read, or will be read, from a file that an earlier start has stored.
        """
        if not self._keeps_files:
            return
        self._weights = WeightCache(config, rank, self._used, head)
        self._weights.begin_load()
        if self._weights.is_on and ProgramStore.fits(config):
            self._program = StoredStart(config, rank, self._used, head)
            self.is_stored = self._weights.has_entry and self._program.find()

    def load(
        self,
        config: Config,
        part: ModelPart,
        report: Callable[[int, int], None],
        pool: HostPoolMemory | None = None,
        definition: ModelDefinition | None = None,
    ) -> LoadedModel:
        """Loads this agent's part of the model. ``config`` has the sizes of the part.

        See ``load_model`` for the other arguments and the errors.
        """
        self._definition = definition
        if self.is_stored:
            assert self._weights is not None
            report(0, 1)
            model = load_without_network(config, part, self._weights, pool)
            if model is not None:
                return model
            self.is_stored = False
            self._start_runtime()
        return load_model(config, part, report, self._weights, pool, definition)

    def with_network(self, config: Config, part: ModelPart, model: LoadedModel) -> LoadedModel:
        """Returns ``model`` with its network, from which MindSpore compiles a graph. Imports mindspore if needed."""
        if model.network is not None:
            return model
        self._start_runtime()
        return with_network(config, part, model, self._definition)

    def stored_graph(
        self, model: LoadedModel, buffers: StepBuffers, compile_graph: Callable[[], StepGraph]
    ) -> StepGraph | None:
        """Returns a graph that runs the stored launches. Returns None if there are none, or if they do not fit the
        model.

        ``compile_graph`` compiles the same graph with MindSpore. The returned graph calls it only for a profile, which
        must show MindSpore's launches.
        """
        launches = self.stored_launches(model, buffers)
        if launches is None:
            return None
        assert isinstance(model.ops, FusedCpuOps), "only fused operators are stored"

        def compiled() -> FusedStepGraph:
            graph = compile_graph()
            assert isinstance(graph, FusedStepGraph), "only fused operators are stored"
            return graph

        return StoredStepGraph(model.ops, buffers, launches[0], compiled)

    def stored_launches(
        self, model: LoadedModel, buffers: StepBuffers, inputs: Mapping[str, Array] | None = None
    ) -> tuple[RecordedLaunches, ...] | None:
        """Returns the stored launches of each graph, ready for replays. Returns None if there are none, or if they do
        not fit the model.

        ``inputs`` are arrays with further inputs of the graphs (``StoredStart.restore``).
        """
        if not self.is_stored:
            return None
        assert self._program is not None
        launches = self._program.restore(model, buffers, inputs or {})
        self.is_stored = launches is not None
        return launches

    def is_proved(self, model: LoadedModel, *runs: ProofRun) -> bool:
        """Runs test steps with the stored launches. Returns True if they give the bits that MindSpore's graphs gave in
        an earlier start.

        Otherwise deletes the stored launches. The caller must then compile the graphs. ``runs`` has one function for
        each graph.
        """
        assert self._program is not None
        try:
            self.is_stored = self._program.is_proved(model, runs)
        except (AgentError, RuntimeError) as problem:  # a graph raises RuntimeError if an operator refuses its inputs
            self._program.drop(str(problem))
            self.is_stored = False
        return self.is_stored

    def keep(
        self,
        model: LoadedModel,
        buffers: StepBuffers,
        graph: StepGraph | HeadGraph,
        *runs: ProofRun,
        inputs: Mapping[str, Array] | None = None,
    ) -> None:
        """Stores the operator calls (launches) of MindSpore's graphs for the next start.

        Does nothing if this agent stores no programs. ``runs`` has one function for each graph. ``stored_launches``
        describes ``inputs``.
        """
        if self._program is None:
            return
        from agent.step_graph.head_graph import StaticHeadGraph  # imports mindspore
        from agent.step_graph.static import StaticStepGraph

        if isinstance(graph, StaticStepGraph | StaticHeadGraph):
            self._program.keep(model, buffers, inputs or {}, graph.replayed_graphs, runs)
