"""Steps of a dynamic graph without MindSpore: what it launches, recorded once for steps of any size.

The graph launches the same kernels every time, over inputs, weights and caches that stay where they are; how long their
arguments are depends on the tokens and sequences of the step alone. So two steps that pad are recorded when the graph
has been compiled (``agent.kernels.launches``), as an Ascend captures a stream's launches: each length that is not the
same in both is a multiple of the tokens, or of the sequences. The first small steps after that run graph and replay,
which must give the same bits; those after them are replays, unless they did not, or something but our kernels computes.

Agents that share a model's layers launch sums and gathers together. All of them run the same steps in the same order,
and a graph is replayed by all or by none: whatever one of them finds, all are asked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
from mindspore import Tensor

from agent.kernels import RecordedLaunches, RecordingError, StepSizes, has_failed, record_any_size
from agent.kernels.launches import AllAgree
from agent.layers.parameter import as_storage, as_tensor
from agent.step_inputs import StepInputs
from agent.weights.storage import Array
from llm_serving.ipc.shm import PADDING_SLOT, SlotLimits
from llm_serving.planning.kernel_memory import most_replayed_tokens

logger = logging.getLogger("agent.step_graph.replay.dynamic_replays")

Run = Callable[[tuple[Tensor, ...]], Tensor]
CONFIRMATIONS = 2
"""Steps that are computed twice and must agree."""
MOST_TOKENS = 64
"""Of prompts that are computed twice; larger ones wait for those."""
_RECORDED_TOKENS = (2, 3)
"""Of the steps that are recorded, where a sequence may have more than one: another ratio than that of the sequences."""


class DynamicReplays:
    """Owns the inputs' memory. ``run`` of a graph that cannot be replayed runs the graph, now and ever after."""

    def __init__(
        self,
        name: str,
        run_graph: Run,
        tensors: Iterable[Tensor],
        limits: SlotLimits,
        all_agree: AllAgree = bool,
        *,
        max_prompts: int = 0,
    ) -> None:
        """``name`` is for the log. ``tensors`` are all parameters and constants of the graph; their memory stays where
        it is. ``all_agree`` is of the agents that share its layers. ``max_prompts``: of a graph whose query lengths are
        as many int64, 0 past the last sequence; 0: they are one for each sequence."""
        self._name, self._run_graph, self._tensors, self._all_agree = name, run_graph, tuple(tensors), all_agree
        self.most_tokens = most_replayed_tokens(limits.max_tokens, limits.max_seqs)
        """Of a step that ``run`` takes."""
        self._max_seqs = min(limits.max_seqs, max_prompts or limits.max_seqs)
        self._table_width = limits.max_blocks_per_seq
        self._entry: Array = np.zeros(0)
        self._positions, self._slots = (np.zeros(self.most_tokens, np.int32) for _ in range(2))
        self._last_tokens, self._contexts, self._queries = (np.zeros(limits.max_seqs, np.int32) for _ in range(3))
        self._padded_queries = np.zeros(max_prompts, np.int64)
        self._tables = np.zeros(limits.max_seqs * self._table_width, np.int32)
        self._launches: RecordedLaunches | None = None
        self._agreed = 0
        self._problem = ""

    @property
    def is_confirmed(self) -> bool:
        """Whether steps are replays by now."""
        return self._agreed >= CONFIRMATIONS

    @property
    def problem(self) -> str:
        """Why this graph's launches cannot be replayed; empty where they can."""
        return self._problem

    def record(self, entry: Array, *, is_decode: bool) -> None:
        """Runs the graph twice, with sequences that pad. ``entry``: what it begins with, of one token. Before any
        ``run``. Raises what the graph and ``all_agree`` do."""
        self._entry = np.zeros((self.most_tokens, *entry.shape[1:]), entry.dtype)
        all_seqs = (1, min(2, self._max_seqs))
        all_tokens = all_seqs if is_decode else _RECORDED_TOKENS
        first, second = (StepSizes(tokens, seqs) for tokens, seqs in zip(all_tokens, all_seqs, strict=True))
        if second.tokens > self.most_tokens:
            self._give_up(f"no step has {second.tokens} tokens, as one that is recorded must")
            return
        memory = [(tensor.data_ptr(), tensor.nbytes) for tensor in self._tensors]
        memory += [(array.ctypes.data, array.nbytes) for array in self._buffers()]
        runs = {sizes: lambda sizes=sizes: self._graph_result(self._padding(sizes)) for sizes in (first, second)}
        try:
            largest = StepSizes(self._max_seqs if is_decode else self.most_tokens, self._max_seqs)
            self._launches = record_any_size(runs, largest, memory, self._all_agree)
        except RecordingError as error:
            self._give_up(str(error))

    def run(self, inputs: StepInputs, entry: Array) -> Array:
        """What the graph gives for a step, bfloat16 as uint16, valid until the next call. ``entry``: token ids, or the
        stream of the stage before. Raises what ``all_agree`` does."""
        arrays = self._take(inputs, entry)
        tokens, seqs = len(entry), inputs.query_lens.size
        is_small = tokens <= max(MOST_TOKENS, seqs)
        if self._launches is None or not (self.is_confirmed or is_small):
            return self._graph_result(arrays)[0]
        self._launches.resize(StepSizes(tokens, seqs))
        return self._launches.run() if self.is_confirmed else self._confirm(self._launches, arrays)

    def _confirm(self, launches: RecordedLaunches, arrays: tuple[Array, ...]) -> Array:
        """What depends on the inputs or their sizes and was taken for a constant shows with others."""
        result, _ = self._graph_result(arrays)
        if has_failed():  # a primitive refused these inputs: the result means nothing
            return result
        result = result.copy()
        launches.spoil()
        if self._all_agree(launches.agrees(result)):
            self._agreed += 1
            return result
        launches.close()
        self._give_up("a replay gives another result")
        return self._graph_result(arrays)[0]

    def _give_up(self, problem: str) -> None:
        self._launches, self._problem = None, problem
        logger.info("the %s graph runs every time: %s", self._name, problem)

    def _buffers(self) -> tuple[Array, ...]:
        queries = self._padded_queries if self._padded_queries.size else self._queries
        vectors = (self._positions, self._last_tokens, self._slots, self._tables, self._contexts, queries)
        return (self._entry, *vectors)

    def _padding(self, sizes: StepSizes) -> tuple[Array, ...]:
        """The inputs of a step that reads the block that pads, and writes nothing; the first sequence has all tokens
        but one of each other."""
        query_lens = np.ones(sizes.seqs, np.int32)
        query_lens[0] += sizes.tokens - sizes.seqs
        zeros = np.zeros(sizes.tokens, np.int32)
        positions = np.concatenate([np.arange(query_len, dtype=np.int32) for query_len in query_lens.tolist()])
        inputs = StepInputs(
            token_ids=zeros,
            positions=positions,
            slot_mapping=zeros + PADDING_SLOT,
            block_tables=np.zeros((sizes.seqs, self._table_width), np.int32),
            context_lens=query_lens,
            query_lens=query_lens,
            rows=zeros,
            last_tokens=np.cumsum(query_lens, dtype=np.int32) - 1,
            sampled_tokens=zeros,
            whole_prompts=True,
        )
        return self._take(inputs, self._entry[: sizes.tokens])

    def _take(self, inputs: StepInputs, entry: Array) -> tuple[Array, ...]:
        """The inputs in memory that is theirs, the block tables as wide as any: their width then is no other shape."""
        tokens, (seqs, width) = len(entry), inputs.block_tables.shape
        self._entry[:tokens] = entry
        self._positions[:tokens] = inputs.positions
        self._slots[:tokens] = inputs.slot_mapping
        self._last_tokens[:seqs] = inputs.last_tokens
        self._contexts[:seqs] = inputs.context_lens
        tables = self._tables[: seqs * self._table_width].reshape(seqs, self._table_width)
        tables[:, :width] = inputs.block_tables
        tables[:, width:] = 0
        queries: npt.NDArray[np.int32 | np.int64] = self._queries[:seqs]
        if self._padded_queries.size:
            queries = self._padded_queries
            queries[seqs:] = 0
        queries[:seqs] = inputs.query_lens
        vectors = (self._positions[:tokens], self._last_tokens[:seqs], self._slots[:tokens])
        return (self._entry[:tokens], *vectors, tables, self._contexts[:seqs], queries)

    def _graph_result(self, arrays: tuple[Array, ...]) -> tuple[Array, int]:
        """The graph's result, and where MindSpore has it."""
        tensor = self._run_graph(tuple(map(as_tensor, arrays)))
        return as_storage(tensor), tensor.data_ptr()
