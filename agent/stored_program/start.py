"""Decides at the start of an agent whether it uses a stored program: the launches of its graph, from a file.

After a start without a stored program, writes this file for the next start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from agent.backends.cpu.ops import FusedCpuOps
from agent.kernels import StepBuffers
from agent.model_loading import LoadedModel
from agent.step_graph.fused_steps import FusedStepGraph
from agent.step_graph.interface import StepGraph
from agent.stored_program.graph import StoredStepGraph
from agent.stored_program.program import ProgramError, StoredProgram, make_launches
from agent.stored_program.proof import proof_digest, proof_steps
from agent.stored_program.store import ProgramStore, constant_name
from agent.weights.storage import Array
from llm_serving.config import Config
from llm_serving.ipc.shm import StepSlot

logger = logging.getLogger("agent.stored_program")


class StoredStart:
    """Reads, proves and writes the stored program of one agent: the launches of its graph.

    If there is no usable program, MindSpore compiles the graph.
    """

    def __init__(self, config: Config, rank: int, used: set[Path]) -> None:
        """``rank`` is the agent's number among all agents. ``ArrayCache`` describes ``used``."""
        self._config = config
        self._store = ProgramStore(config, rank, used)
        self._found: tuple[StoredProgram, dict[str, Array]] | None = None

    def find(self) -> bool:
        """Reads the program that an earlier start has stored. Returns False if there is none, or if it is not valid."""
        self._found = self._store.find()
        return self._found is not None

    def make_graph(
        self, model: LoadedModel, buffers: StepBuffers, compile_graph: Callable[[], StepGraph]
    ) -> StepGraph | None:
        """Returns a graph that runs the stored program. Returns None if the program does not fit the arrays of
        ``model``.

        ``find`` must have returned True. ``compile_graph`` compiles the same graph with MindSpore. The returned graph
        calls it only for a profile, which must show MindSpore's launches.
        """
        assert self._found is not None, "find() has found a program"
        assert isinstance(model.ops, FusedCpuOps), "only fused operators are stored"
        program, constants = self._found
        buffers.counts[:] = 0
        try:
            launches = make_launches(program.launches, _memory(model, model.ops, buffers) | constants)
        except ProgramError as problem:
            self.drop(str(problem))
            return None
        self._constants = constants  # keeps these arrays alive, because the launches read their memory

        def compiled() -> FusedStepGraph:
            graph = compile_graph()
            assert isinstance(graph, FusedStepGraph), "only fused operators are stored"
            return graph

        return StoredStepGraph(model.ops, buffers, launches, compiled)

    def is_proved(self, model: LoadedModel, run_step: Callable[[StepSlot], object]) -> bool:
        """Runs the test steps of ``proof_digest`` with the stored program.

        Returns True if the results have the bits that MindSpore's graph gave in an earlier start. Otherwise deletes the
        stored program.
        """
        assert self._found is not None, "find() has found a program"
        assert isinstance(model.ops, FusedCpuOps), "only fused operators are stored"
        if proof_digest(self._config, model.ops, run_step) == self._found[0].proof:
            return True
        self.drop("its proof has other bits than MindSpore's graph had")
        return False

    def keep(
        self, model: LoadedModel, buffers: StepBuffers, graph: StepGraph, run_step: Callable[[StepSlot], object]
    ) -> None:
        """Stores the launches of MindSpore's graph, if their replay gives the same bits as the graph in test steps.

        ``proof_digest`` runs the test steps. If the bits differ, logs the reason and stores nothing.
        """
        from agent.step_graph.static import StaticStepGraph  # imports mindspore
        from agent.stored_program.trace import stored_launches, trace_launches

        ops = model.ops
        if not isinstance(graph, StaticStepGraph) or not isinstance(ops, FusedCpuOps) or not proof_steps(self._config):
            return
        # Runs the two test steps of proof_digest() three times. In the first run, the first step records the launches,
        # and the second step compares a replay with the graph. So the second run consists of replays. The third run
        # uses the graph.
        proof_digest(self._config, ops, run_step)
        replayed = proof_digest(self._config, ops, run_step)
        graph.set_replaying(False)
        proof = proof_digest(self._config, ops, run_step)
        graph.set_replaying(True)
        if not graph.replays.is_confirmed or replayed != proof:
            logger.warning("no program is stored: %s", graph.replays.problem or "a replay gives another result")
            return
        buffers.counts[:] = 0
        memory, constants = _memory(model, ops, buffers), {}
        known = {array.ctypes.data for array in memory.values()}
        for name, address, values in graph.parameters():
            if address not in known:
                constants[constant_name(name)] = values
        try:
            launches = stored_launches(trace_launches(*graph.traceable()), memory | constants)
            make_launches(launches, memory | constants).close()
            self._store.keep(StoredProgram(launches, proof), constants)
        except ProgramError as problem:
            logger.warning("no program is stored: %s", problem)

    def drop(self, reason: str) -> None:
        """Deletes the stored program, because it cannot be used. ``reason`` is for the log."""
        logger.warning("the stored program is not used: %s; MindSpore compiles the graph", reason)
        self._store.delete()


def _memory(model: LoadedModel, ops: FusedCpuOps, buffers: StepBuffers) -> dict[str, Array]:
    """Returns the arrays that the launches of a graph read or write, except constants. The keys are the names that
    stand for the arrays in a stored program."""
    steps = ("token_ids", "positions", "slot_mapping", "query_lens", "context_lens", "block_tables", "sampled_tokens")
    return {
        **{f"step/{name}": getattr(buffers, name) for name in (*steps, "counts")},
        **{f"weight/{name}": array for name, array in model.weights.items()},
        **{f"cache/{name}": array for name, array in model.kv_cache.arrays.items()},
        **({} if ops.states is None else {"step/runs": ops.states.runs}),
        **({} if ops.rows is None else {"step/rows": ops.rows}),
        "result/logits": ops.logits,
        "result/best_ids": ops.best_ids,
    }
