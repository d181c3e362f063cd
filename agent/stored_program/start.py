"""Decides at the start of an agent whether it uses a stored program: the launches of its graphs, from a file.

After a start without a stored program, writes this file for the next start.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agent.backends.cpu.ops import FusedCpuOps
from agent.kernels import RecordedLaunches, StepBuffers
from agent.model_loading import LoadedModel
from agent.stored_program.program import ProgramError, StoredProgram, make_launches
from agent.stored_program.proof import ProofRun, proof_digest, proof_steps
from agent.stored_program.store import ProgramStore, constant_name
from agent.weights.storage import Array
from llm_serving.config import Config
from llm_serving.config.draft_model import Head

if TYPE_CHECKING:
    from agent.step_graph.replayed_graph import ReplayedGraph

logger = logging.getLogger("agent.stored_program")


class StoredStart:
    """Reads, proves and writes a stored program of one agent: the launches of its graphs.

    If there is no usable program, MindSpore compiles the graphs.
    """

    def __init__(self, config: Config, rank: int, used: set[Path], head: Head | None = None) -> None:
        """``ProgramStore`` describes the arguments."""
        self._config = config
        self._store = ProgramStore(config, rank, used, head)
        self._found: tuple[StoredProgram, dict[str, Array]] | None = None

    def find(self) -> bool:
        """Reads the program that an earlier start has stored. Returns False if there is none, or if it is not valid."""
        self._found = self._store.find()
        return self._found is not None

    def restore(
        self, model: LoadedModel, buffers: StepBuffers, inputs: Mapping[str, Array]
    ) -> tuple[RecordedLaunches, ...] | None:
        """Returns the launches of each graph of the stored program, ready for replays. Returns None if they do not fit
        the arrays of ``model``.

        ``find`` must have returned True. ``inputs`` are the arrays from which the graphs read inputs that are not in
        ``buffers``, by the names that stand for them in a stored program.
        """
        assert self._found is not None, "find() has found a program"
        assert isinstance(model.ops, FusedCpuOps), "only fused operators are stored"
        program, constants = self._found
        buffers.counts[:] = 0
        memory = {**_memory(model, model.ops, buffers), **inputs, **constants}
        try:
            launches = tuple(make_launches(graph, memory) for graph in program.graphs)
        except ProgramError as problem:
            self.drop(str(problem))
            return None
        self._constants = constants  # keeps these arrays alive, because the launches read their memory
        return launches

    def is_proved(self, model: LoadedModel, runs: Sequence[ProofRun]) -> bool:
        """Runs the test steps of ``proof_digest`` with the stored program. ``runs`` has one function for each graph.

        Returns True if the results have the bits that MindSpore's graphs gave in an earlier start. Otherwise deletes
        the stored program.
        """
        assert self._found is not None, "find() has found a program"
        assert isinstance(model.ops, FusedCpuOps), "only fused operators are stored"
        if proof_digest(self._config, model.ops, runs) == self._found[0].proof:
            return True
        self.drop("its proof has other bits than MindSpore's graph had")
        return False

    def keep(
        self,
        model: LoadedModel,
        buffers: StepBuffers,
        inputs: Mapping[str, Array],
        graphs: Sequence[ReplayedGraph],
        runs: Sequence[ProofRun],
    ) -> None:
        """Stores the launches of MindSpore's graphs, if their replays give the same bits as the graphs in test steps.

        ``proof_digest`` runs the test steps. If the bits differ, logs the reason and stores nothing. ``restore``
        describes ``inputs``, and ``is_proved`` describes ``runs``.
        """
        from agent.stored_program.trace import stored_launches, trace_launches  # imports mindspore

        ops = model.ops
        if not isinstance(ops, FusedCpuOps) or not proof_steps(self._config):
            return
        proof = self._proof_of_graphs(ops, graphs, runs)
        if proof is None:
            return
        buffers.counts[:] = 0
        memory, constants = {**_memory(model, ops, buffers), **inputs}, {}
        known = {array.ctypes.data for array in memory.values()}
        for name, address, values in (parameter for graph in graphs for parameter in graph.parameters()):
            if address not in known:
                constants[constant_name(name)] = values
        memory |= constants
        try:
            launches = tuple(stored_launches(trace_launches(graph.cell, graph.tensors), memory) for graph in graphs)
            for each in launches:
                make_launches(each, memory).close()
            self._store.keep(StoredProgram(launches, proof), constants)
        except ProgramError as problem:
            logger.warning("no program is stored: %s", problem)

    def _proof_of_graphs(
        self, ops: FusedCpuOps, graphs: Sequence[ReplayedGraph], runs: Sequence[ProofRun]
    ) -> str | None:
        """Returns the digest of the proof, computed by MindSpore's graphs. Returns None if replays give other bits.

        Runs the test steps of ``proof_digest`` three times. In the first run, the first step of each graph records its
        launches, and the second step compares a replay with the graph. So the second run consists of replays. The
        third run uses the graphs.
        """
        proof_digest(self._config, ops, runs)
        replayed = proof_digest(self._config, ops, runs)
        for graph in graphs:
            graph.replays.is_paused = True
        proof = proof_digest(self._config, ops, runs)
        for graph in graphs:
            graph.replays.is_paused = False
        if all(graph.replays.is_confirmed for graph in graphs) and replayed == proof:
            return proof
        problems = [graph.replays.problem for graph in graphs if graph.replays.problem]
        logger.warning("no program is stored: %s", problems[0] if problems else "a replay gives another result")
        return None

    def drop(self, reason: str) -> None:
        """Deletes the stored program, because it cannot be used. ``reason`` is for the log."""
        logger.warning("the stored program is not used: %s; MindSpore compiles the graph", reason)
        self._store.delete()


def _memory(model: LoadedModel, ops: FusedCpuOps, buffers: StepBuffers) -> dict[str, Array]:
    """Returns the arrays that the launches of a model's graph read or write, except constants.

    The keys are the names that stand for the arrays in a stored program.
    """
    steps = ("token_ids", "positions", "slot_mapping", "query_lens", "context_lens", "block_tables", "sampled_tokens")
    return {
        **{f"step/{name}": getattr(buffers, name) for name in (*steps, "counts")},
        **{f"weight/{name}": array for name, array in model.weights.items()},
        **{f"cache/{name}": array for name, array in model.kv_cache.arrays.items()},
        **({} if ops.states is None else {"step/runs": ops.states.runs}),
        **({} if ops.rows is None else {"step/rows": ops.rows}),
        "result/logits": ops.logits,
        "result/best_ids": ops.best_ids,
        **{f"result/taps/{number}": tap for number, tap in enumerate(ops.taps)},
    }
