"""Replays steps of the native op table: steps of any size, from two recordings of a dynamic graph's kernel launches.

The graph makes the same launches in every step, and inputs, weights and caches stay in the same memory. Only the sizes
of the launches' arguments change. Each size is constant, or a multiple of one of three counts of the step: tokens,
sequences or gathered blocks. Therefore two padding steps with different counts are recorded after compilation
(``agent.kernels.launches``). The two recordings show which sizes are multiples of which count. A replay computes the
sizes from the counts of its step.

The first small steps run the graph and the replay, and both must give the same bits. Then all later steps are replays.
A replay may fuse launches, but the graph does not. The comparison then also proves that fused and unfused operators
give the same bits. If the results differ, or if kernels of another library run in the graph, all later steps run the
graph.

If agents share layers, their launches add and gather arrays of all these agents. Therefore either all of these agents
replay a graph or none of them. Each agent votes on whether its replay gave the right bits. They replay only if all
votes are yes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from mindspore import Tensor

from agent.backends.launch import as_array
from agent.kernels import RecordedLaunches, RecordingError, StepSizes, has_failed, record_any_size
from agent.kernels.launches import AllAgree, Results, copies
from agent.layers.parameter import as_storage, as_tensor
from agent.run_ahead.inserted import InsertedIds
from agent.step_graph.adapter_order import AdapterOrder
from agent.step_graph.token_rows import by_token
from agent.step_inputs import NUM_ROTARY_DIMENSIONS, Int32Array, StepInputs
from agent.weights.storage import Array
from llm_serving.ipc.shm import NO_ADAPTER, PADDING_SLOT, SlotLimits
from llm_serving.planning.kernel_memory import most_replayed_tokens

logger = logging.getLogger("agent.step_graph.replay.native")

Run = Callable[[tuple[Tensor, ...]], Any]
"""Runs a graph. Returns its result, which is a tensor or a tuple of tensors."""
CONFIRMATIONS = 2
"""Number of steps that run both the graph and the replay and must give the same bits."""
MAX_COMPARED_TOKENS = 64
"""Maximum number of tokens of a step with prompts that runs both the graph and the replay. Until ``CONFIRMATIONS``
small steps have run, larger steps run only the graph.
"""
_RECORDED_SEQS = (1, 2)
"""Numbers of sequences of the two recorded steps. A size that doubles is a multiple of the sequences."""
_RECORDED_TOKENS = (2, 3)
"""Numbers of tokens of the two recorded steps, if sequences may have several tokens. A size that grows by the factor
3/2 is a multiple of the tokens.
"""
_RECORDED_BLOCKS = (4, 5)
"""Numbers of gathered blocks of the two recorded steps. A size that grows by the factor 5/4 is a multiple of the
blocks.
"""


class NativeReplays:
    """Runs the steps of one graph, either with MindSpore or by replaying its recorded launches. Owns the memory of the
    inputs.
    """

    def __init__(
        self,
        name: str,
        run_graph: Run,
        tensors: Iterable[Tensor],
        limits: SlotLimits,
        all_agree: AllAgree = bool,
        *,
        max_prompts: int = 0,
        inserts_ids: bool = False,
        fuses: bool = False,
        max_blocks: int = 0,
        adapter_order: AdapterOrder | None = None,
        reads_rotary_positions: bool = False,
        attends_by_token: bool = False,
    ) -> None:
        """Allocates the memory of the inputs. Call ``record`` next.

        - ``name``: the name of the graph in the log.
        - ``tensors``: all parameters and constants of the graph. Their addresses must not change.
        - ``all_agree``: takes this agent's vote. Returns whether all agents that share the layers voted True.
        - ``max_prompts``: if not 0, the graph takes this number of int64 query lengths, with zeros after the last
          sequence. If 0, the graph takes one int32 query length for each sequence.
        - ``inserts_ids``: whether the graph takes the inputs of ``InsertIds``.
        - ``fuses``: whether replays fuse launches (``Config.fuses_operators``). The graph never fuses.
        - ``max_blocks``: maximum number of blocks that a step gathers. If 0, the graph gathers no blocks.
        - ``adapter_order``: counts the rows of each adapter slot. If None, the graph has no adapters.
        - ``reads_rotary_positions``: whether ``positions`` is [4, tokens] (``StepInputs.graph_positions``).
        - ``attends_by_token``: whether block tables and lengths have a row for each token (``token_rows.by_token``).
        """
        self._name, self._run_graph, self._tensors, self._all_agree = name, run_graph, tuple(tensors), all_agree
        self.max_tokens = most_replayed_tokens(
            limits.max_tokens, limits.max_seqs, attends_by_token=attends_by_token
        )
        """Maximum number of tokens of a step that ``run`` accepts."""
        max_seqs = max(limits.max_seqs, _RECORDED_SEQS[1])  # also if all other steps have one sequence
        self._max_seqs = min(max_seqs, max_prompts or max_seqs)
        self._table_width = limits.max_blocks_per_seq
        self._entry: Array = np.zeros(0)
        self._rotary_dimensions = NUM_ROTARY_DIMENSIONS if reads_rotary_positions else 0
        self._positions = np.zeros((1 + self._rotary_dimensions) * self.max_tokens, np.int32)
        self._slots = np.zeros(self.max_tokens, np.int32)
        self._attends_by_token = attends_by_token
        table_rows = self.max_tokens if attends_by_token else max_seqs
        self._last_tokens = np.zeros(max_seqs, np.int32)
        self._contexts, self._queries = (np.zeros(table_rows, np.int32) for _ in range(2))
        self._padded_queries = np.zeros(max_prompts, np.int64)
        self._tables = np.zeros(table_rows * self._table_width, np.int32)
        self._blocks = np.zeros(max(max_blocks, *_RECORDED_BLOCKS) if max_blocks else 0, np.int32)
        self._adapter_order = adapter_order
        self._adapter_rows = None if adapter_order is None else adapter_order.rows(np.zeros(0, np.int32))
        self._inserts_ids = inserts_ids
        self._earlier_ids = np.zeros(max_seqs, np.int32)
        self._places, self._mask = (np.zeros(self.max_tokens, np.int32) for _ in range(2))
        self._launches: RecordedLaunches | None = None
        self._agreed = 0
        self._problem = ""
        self.is_paused = False
        """True while steps must run the graph, even if replays are confirmed."""
        self._fuses = fuses

    @property
    def is_confirmed(self) -> bool:
        """Whether ``CONFIRMATIONS`` replays have given the same bits as the graph. Then all further steps are replays.
        """
        return self._agreed >= CONFIRMATIONS

    @property
    def problem(self) -> str:
        """The reason why the graph's launches cannot be replayed. Empty if they can be replayed."""
        return self._problem

    @property
    def operators(self) -> tuple[int, list[str]]:
        """The number of operators of a step without fusion, and the names of the fusions.

        The value is (0, []) if the launches cannot be replayed.
        """
        return (0, []) if self._launches is None else (self._launches.num_launches, self._launches.fusions)

    def record(self, entry: Array, *, is_decode: bool) -> None:
        """Runs the graph with two steps of padding and records the launches. Call this before ``run``.

        ``entry`` is the first input of the graph for one token, as ``StepGraph.run`` describes it. Its values do not
        matter, only its type and its sizes. Exceptions of the graph and of ``all_agree`` are passed on.
        """
        self._entry = np.zeros((self.max_tokens, *entry.shape[1:]), entry.dtype)
        all_seqs = (_RECORDED_SEQS[0], min(_RECORDED_SEQS[1], self._max_seqs))
        all_tokens = all_seqs if is_decode else _RECORDED_TOKENS
        all_blocks = _RECORDED_BLOCKS if self._blocks.size else (0, 0)
        first, second = (StepSizes(*sizes) for sizes in zip(all_tokens, all_seqs, all_blocks, strict=True))
        if second.tokens > self.max_tokens:
            self._give_up(f"a recorded step needs {second.tokens} tokens; the largest step has {self.max_tokens}")
            return
        memory = [(tensor.data_ptr(), tensor.nbytes) for tensor in self._tensors]
        memory += [(array.ctypes.data, array.nbytes) for array in self._buffers()]
        runs = {sizes: lambda sizes=sizes: self._graph_result(self._padding(sizes)) for sizes in (first, second)}
        try:
            most_tokens = self._max_seqs if is_decode else self.max_tokens
            largest = StepSizes(most_tokens, self._max_seqs, self._blocks.size)
            self._launches = record_any_size(runs, largest, memory, self._all_agree, fuses=self._fuses)
        except RecordingError as error:
            self._give_up(str(error))

    def run(
        self,
        inputs: StepInputs,
        entry: Array,
        inserted: InsertedIds | None = None,
        blocks: Int32Array | None = None,
    ) -> Results:
        """Runs a step and returns the graph's results. They are valid until the next call. bfloat16 is returned as
        uint16.

        ``StepGraph.run`` describes ``entry`` and ``inserted``. ``blocks`` are the blocks that the graph gathers.
        Exceptions of ``all_agree`` are passed on.
        """
        arrays = self._copy_inputs(inputs, entry, inserted, blocks)
        tokens, seqs = len(entry), inputs.last_tokens.size
        is_small = tokens <= max(MAX_COMPARED_TOKENS, seqs)
        is_paused = self.is_confirmed and self.is_paused
        if self._launches is None or is_paused or not (self.is_confirmed or is_small):
            return self._graph_result(arrays)[0]
        self._launches.resize(StepSizes(tokens, seqs, 0 if blocks is None else blocks.size))
        return self._launches.run() if self.is_confirmed else self._confirm(self._launches, arrays)

    def _confirm(self, launches: RecordedLaunches, arrays: tuple[Array, ...]) -> Results:
        """Runs a step with the graph and with the replay, compares the results, and returns them.

        The step has other inputs and sizes than the recorded steps. So the results differ if the recording treats a
        value as constant although it depends on inputs or sizes.
        """
        results, _ = self._graph_result(arrays)
        if has_failed():  # a primitive refused these inputs, so the results are undefined
            return results
        results = copies(results)
        launches.spoil()
        if self._all_agree(launches.agrees(results)):
            self._agreed += 1
            return results
        launches.close()
        self._give_up("a replay gives another result")
        return self._graph_result(arrays)[0]

    def _give_up(self, problem: str) -> None:
        self._launches, self._problem = None, problem
        logger.info("the %s graph runs every time: %s", self._name, problem)

    def _buffers(self) -> tuple[Array, ...]:
        queries = self._padded_queries if self._padded_queries.size else self._queries
        vectors = (self._positions, self._last_tokens, self._slots, self._tables, self._contexts, queries)
        blocks = (self._blocks,) if self._blocks.size else ()
        adapter_rows = () if self._adapter_rows is None else (self._adapter_rows,)
        inserted = (self._earlier_ids, self._places, self._mask) if self._inserts_ids else ()
        return (self._entry, *vectors, *blocks, *adapter_rows, *inserted)

    def _padding(self, sizes: StepSizes) -> tuple[Array, ...]:
        """Returns the inputs of a padding step, which reads only the null block and writes no keys or values.

        Every sequence has one token, except that the first sequence has all remaining tokens.
        """
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
            adapters=zeros + NO_ADAPTER,
            whole_prompts=True,
            rotary_positions=np.repeat(positions[:, None], self._rotary_dimensions, axis=1),
        )
        if self._attends_by_token:
            inputs = by_token(inputs)
        blocks = np.zeros(sizes.blocks, np.int32) if sizes.blocks else None
        return self._copy_inputs(inputs, self._entry[: sizes.tokens], blocks=blocks)

    def _copy_inputs(
        self,
        inputs: StepInputs,
        entry: Array,
        inserted: InsertedIds | None = None,
        blocks: Int32Array | None = None,
    ) -> tuple[Array, ...]:
        """Copies the inputs into this object's memory and returns the copies.

        Block tables always get the maximum width, because MindSpore must compute all shapes again whenever the width
        changes.
        """
        tokens, seqs, (rows, width) = len(entry), inputs.last_tokens.size, inputs.block_tables.shape
        self._entry[:tokens] = entry
        positions = inputs.graph_positions
        position_rows = self._positions[: positions.size].reshape(positions.shape)
        position_rows[:] = positions
        self._slots[:tokens] = inputs.slot_mapping
        self._last_tokens[:seqs] = inputs.last_tokens
        self._contexts[:rows] = inputs.context_lens
        tables = self._tables[: rows * self._table_width].reshape(rows, self._table_width)
        tables[:, :width] = inputs.block_tables
        tables[:, width:] = 0
        queries: npt.NDArray[np.int32 | np.int64] = self._queries[:rows]
        if self._padded_queries.size:
            queries = self._padded_queries
            queries[rows:] = 0
        queries[:rows] = inputs.query_lens
        vectors = (position_rows, self._last_tokens[:seqs], self._slots[:tokens])
        listed: tuple[Array, ...] = ()
        if blocks is not None:
            listed = (self._blocks[: blocks.size],)
            listed[0][:] = blocks
        if self._adapter_rows is not None and self._adapter_order is not None:
            self._adapter_rows[:] = self._adapter_order.rows(inputs.adapters)
            listed = (*listed, self._adapter_rows)
        ids = self._copy_inserted(tokens, inserted) if self._inserts_ids else ()
        return (self._entry[:tokens], *vectors, tables, self._contexts[:rows], queries, *listed, *ids)

    def _copy_inserted(self, tokens: int, inserted: InsertedIds | None) -> tuple[Array, ...]:
        """Copies the inputs of ``InsertIds`` into this object's memory, and returns the copies.

        The array of earlier ids always has its maximum length, so that MindSpore need not compute shapes again.
        """
        places, mask = self._places[:tokens], self._mask[:tokens]
        if inserted is None:
            mask.fill(0)  # where the mask is 0, InsertIds ignores the places, so old places do not matter
        else:
            ids = as_array(inserted.earlier.chosen_ids())
            self._earlier_ids[: len(ids)] = ids
            places[:], mask[:] = inserted.places, inserted.mask
        return self._earlier_ids, places, mask

    def _graph_result(self, arrays: tuple[Array, ...]) -> tuple[Results, tuple[int, ...]]:
        """Runs the graph. Returns its results and their addresses in MindSpore's memory."""
        found = self._run_graph(tuple(map(as_tensor, arrays)))
        tensors = found if isinstance(found, tuple) else (found,)
        return tuple(map(as_storage, tensors)), tuple(tensor.data_ptr() for tensor in tensors)
