"""Follows the steps of the model, and makes drafts with the draft model after the steps that want drafts.

A draft is a guess of a sequence's next token: the best token of the draft model. The next decode step verifies the
drafts (``llm_serving.ipc.drafts``), so they never change a text.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from agent.cache_pages import CachePages
from agent.drafting.network import DraftNetwork
from agent.drafting.rows import DraftRows
from agent.model_loading import LoadedModel
from agent.step_inputs import StepInputs
from agent.weights.storage import Array
from llm_serving.config import Config
from llm_serving.ipc.drafts import REJECTED
from llm_serving.ipc.shm import NO_DRAFT, StepSlot

logger = logging.getLogger("agent.drafting")

Int32Array = npt.NDArray[np.int32]

_MAX_PLAIN = 64
"""Maximum number of plain decode steps (without drafts) whose tokens are buffered. When the buffer is full, all its
tokens are stored in ``DraftRows`` together.
"""


@dataclass(slots=True)
class Line:
    """A sequence that the draft model continues after a step."""

    index: int
    """Index of the sequence, or of its last accepted draft, in the step's arrays. A step that verifies drafts lists the
    last known token of a sequence and each of its drafts like a sequence of one token.
    """
    row: int
    start: int
    """The first position that the next pass of the draft model computes."""
    end: int
    """The number of known tokens of the sequence, including the token that the step has sampled."""
    num_own: int
    """The number of positions in the blocks of the sequence. The drafts at later positions have their keys and values
    in scratch blocks, which belong to the batch row."""
    samples: bool
    table: Int32Array
    drafts: list[int] = field(default_factory=list)
    state: Array = field(default_factory=lambda: np.empty(0))
    """A head's hidden state [1, width] after its latest draft. Empty with a draft model."""


class Drafter:
    """Makes the drafts of an agent. Only the device thread may call it."""

    def __init__(self, config: Config, network: DraftNetwork) -> None:
        """``config`` is the config of the deployment, which must have a draft model. ``network`` is not loaded yet."""
        self._config = config
        self._network = network
        cache, num_rows = config.pa_config, config.max_num_seqs
        longest = config.max_model_len
        self._rows = DraftRows(num_rows, longest, cache.block_size, cache.num_blocks, config.num_pool_blocks)
        scratch = config.scratch_blocks_per_seq
        self._scratch: Int32Array = np.arange(num_rows * scratch, dtype=np.int32).reshape(num_rows, scratch)
        self._scratch += cache.num_blocks
        self._longest = network.config.max_model_len
        """Number of positions for which the draft model can make drafts. It may have shorter contexts than the model.
        """
        self._plain: list[tuple[Int32Array, ...]] = []
        """Copies of plain decode steps (without drafts). The tokens of these steps are not in ``self._rows`` yet."""
        self._is_off = False

    def load(self, report: Callable[[int, int], None], model: LoadedModel) -> None:
        """Loads and compiles the draft model for ``model``. ``report`` is called with the number of loaded tensors and
        the number of all tensors.

        Raises CheckpointError or AgentStartError.
        """
        del model
        self._network.load(report)
        self._network.compile()

    def warm_up(self) -> None:
        """Runs the largest steps of the draft model."""
        self._network.warm_up()

    @property
    def pages(self) -> CachePages:
        """The memory pages of the draft model's KV cache."""
        return self._network.model.kv_cache.pages

    def reset(self) -> None:
        """Forgets all sequences."""
        self._plain.clear()
        self._rows.reset()

    def summary(self) -> dict[str, str | int | float]:
        """Returns a description of the draft model for the log and the status page."""
        return self._network.summary()

    def move_blocks(self, moves: Int32Array) -> None:
        """Copies blocks of the draft model's KV cache in the same way as the model's blocks. ``moves`` is [copies, 3].
        """
        self._network.model.moves.run(moves)
        self._take_plain()
        self._rows.move(moves)

    @property
    def handed_arrays(self) -> list[Array]:
        """The arrays of the KV cache whose blocks are handed over to other replicas. Empty for a draft model, which
        itself computes the prompts that other replicas hand over.
        """
        return []

    def settle(self) -> None:
        """Stores the buffered tokens of earlier steps. Must be called before blocks move to the hand-over pool or from
        it.
        """
        self._take_plain()

    def take_handed(self, blocks: Int32Array) -> None:
        """Records that ``blocks`` have arrived from another replica. The draft model has computed none of their
        positions.
        """
        self._rows.arrive(blocks, 0)

    def after_step(self, slot: StepSlot, inputs: StepInputs, tapped: Sequence[Array]) -> int:
        """Stores the tokens of a step that was sampled. If the step wants drafts, writes them into the slot.

        ``tapped`` are the residual streams of the step after ``Config.tapped_layers`` (``StepGraph.tapped``). Returns
        the microseconds that this method took. If the draft model fails, logs the error and makes no more drafts. The
        model's own results stay valid.
        """
        del tapped
        start = time.perf_counter_ns()
        if self._keep_plain(slot, inputs):
            return (time.perf_counter_ns() - start) // 1000
        counts = slot.sampled_ids[: slot.num_seqs] != REJECTED
        self._follow(slot, inputs, counts)
        if slot.num_wanted:
            self._draft(slot, inputs, counts)
        return (time.perf_counter_ns() - start) // 1000

    def _draft(self, slot: StepSlot, inputs: StepInputs, counts: npt.NDArray[np.bool_]) -> None:
        """Makes drafts after a step and writes them into its slot.

        ``counts`` has a flag for each index of the step's arrays. The flag is False for a rejected draft, else True.
        """
        slot.draft_ids[: slot.num_seqs * slot.layout.limits.max_draft_ids] = NO_DRAFT
        if not self._is_off:
            self._try_to_draft(slot, self._lines(slot, inputs, counts))

    def _follow(self, slot: StepSlot, inputs: StepInputs, counts: npt.NDArray[np.bool_]) -> None:
        """Stores the step's input tokens except rejected drafts, and the tokens that the step has sampled.

        ``counts`` has a flag for each index of the step's arrays. The flag is False for a rejected draft, else True.
        """
        seqs = slot.num_seqs
        self._take_plain()
        contexts, query_lens = inputs.context_lens, inputs.query_lens
        ends = np.cumsum(slot.history_lens[:seqs])
        for index in np.flatnonzero(slot.restarts[:seqs]).tolist():
            start, length = int(contexts[index] - query_lens[index]), int(slot.history_lens[index])
            known = slot.history[ends[index] - length : ends[index]] if length > start else None
            self._rows.begin(int(inputs.rows[index]), start, inputs.block_tables[index], known)
        used = np.repeat(counts, query_lens)
        rows, positions = np.repeat(inputs.rows, query_lens)[used], inputs.positions[used]
        self._rows.put(rows, positions, inputs.token_ids[used])
        self._take_sampled(inputs.rows, contexts, slot.sampled_ids[:seqs])
        self._rows.note_blocks(rows, positions, inputs.slot_mapping[used] // self._config.pa_config.block_size)

    def _take_sampled(self, rows: Int32Array, contexts: Int32Array, sampled: Int32Array) -> None:
        has_token = sampled >= 0
        self._rows.put(rows[has_token], contexts[has_token], sampled[has_token])

    def _keep_plain(self, slot: StepSlot, inputs: StepInputs) -> bool:
        """Handles a plain decode step, which has no drafts and wants none: copies its tokens to a buffer and returns
        True.

        Returns False for any other step. The copy takes less time than ``_follow``. Later, the tokens of many steps are
        stored together.
        """
        seqs = slot.num_seqs
        if not is_plain(slot, inputs):
            return False
        arrays = (inputs.rows, inputs.context_lens, inputs.token_ids, slot.sampled_ids[:seqs], inputs.slot_mapping)
        self._plain.append(tuple(array.copy() for array in arrays))
        if len(self._plain) >= _MAX_PLAIN:
            self._take_plain()
        return True

    def _take_plain(self) -> None:
        """Stores the tokens that ``_keep_plain`` has copied from decode steps."""
        if not self._plain:
            return
        rows, contexts, token_ids, sampled, places = map(np.concatenate, zip(*self._plain, strict=True))
        self._plain.clear()
        self._rows.put(rows, contexts - 1, token_ids)
        self._take_sampled(rows, contexts, sampled)
        self._rows.note_blocks(rows, contexts - 1, places // self._config.pa_config.block_size)

    def _lines(self, slot: StepSlot, inputs: StepInputs, counts: npt.NDArray[np.bool_]) -> list[Line]:
        """Returns a ``Line`` for each sequence of the step for which the draft model can compute tokens.

        A sequence that is longer than the contexts of the draft model gets none.
        """
        lines: dict[int, Line] = {}
        for index in np.flatnonzero(counts).tolist():
            row, context = int(inputs.rows[index]), int(inputs.context_lens[index])
            computed, samples = int(self._rows.num_computed[row]), slot.sampled_ids[index] >= 0
            end = context + bool(samples)
            if computed < 0 or context >= self._longest or (computed >= end and not samples):
                lines.pop(row, None)
                continue
            table, num_own = self._table(row, context, inputs.block_tables[index])
            lines[row] = Line(index, row, min(computed, end - 1), end, num_own, bool(samples), table)
        return list(lines.values())

    def _table(self, row: int, context: int, own: Int32Array) -> tuple[Int32Array, int]:
        """Returns a block table for a sequence and its drafts, and the number of positions in the sequence's own
        blocks.

        ``own`` is the step's block table for batch row ``row``, with the blocks of ``context`` tokens. The result has
        these blocks, then the scratch blocks of the batch row.
        """
        size, width = self._config.pa_config.block_size, self._config.max_blocks_per_seq
        num_own = -(-context // size)
        table = np.zeros(width, np.int32)
        table[:num_own] = own[:num_own]
        scratch = self._scratch[row, : width - num_own]
        table[num_own : num_own + scratch.size] = scratch
        return table, num_own * size

    def _try_to_draft(self, slot: StepSlot, lines: list[Line]) -> None:
        if not self._guarded(lambda: self._catch_up(lines)):
            return
        if not self._guarded(lambda: self._continue([line for line in lines if line.drafts], slot.num_wanted)):
            return
        width = slot.layout.limits.max_draft_ids
        for line in lines:
            drafts = [token_id for token_id in line.drafts if token_id < self._config.shape.vocab_size]
            if len(drafts) == len(line.drafts):
                slot.draft_ids[line.index * width : line.index * width + len(drafts)] = drafts

    def _guarded(self, run: Callable[[], None]) -> bool:
        """Calls ``run``, which runs passes of the draft model. If ``run`` fails, turns drafting off and returns False.
        """
        try:
            run()
        except RuntimeError:
            logger.exception("the draft model failed; this agent makes no more drafts")
            self._is_off = True
        return not self._is_off

    def _catch_up(self, lines: list[Line]) -> None:
        """Runs the draft model on the known tokens that its KV cache lacks.

        The same passes give the first draft of each sequence that samples.
        """
        waiting = list(lines)
        while waiting:
            left, chunks = self._network.config.max_num_batched_tokens, []
            for line in waiting:
                if left == 0:
                    break
                chunks.append((line, min(line.end - line.start, left)))
                left -= chunks[-1][1]
            best_ids = self._run([(line, line.start, count) for line, count in chunks])
            for (line, count), best_id in zip(chunks, best_ids, strict=True):
                begin, line.start = line.start, line.start + count
                self._rows.computed(line.row, begin, min(line.start, line.num_own), line.table)
                if line.start == line.end and line.samples:
                    line.drafts.append(best_id)
            waiting = [line for line in waiting if line.start < line.end]

    def _continue(self, lines: list[Line], num_wanted: int) -> None:
        """Extends the drafts of each sequence in ``lines`` from one draft to ``num_wanted``. Each further draft takes
        one pass of the draft model."""
        for number in range(1, num_wanted):
            lines = [line for line in lines if line.end + number - 1 < self._longest]
            if not lines:
                return
            for line in lines:
                self._rows.tokens[line.row, line.end + number - 1] = line.drafts[-1]
            best_ids = self._run([(line, line.end + number - 1, 1) for line in lines])
            for line, best_id in zip(lines, best_ids, strict=True):
                begin, line.start = line.start, line.end + number
                if line.start <= line.num_own:
                    self._rows.computed(line.row, begin, line.start, line.table)
                line.drafts.append(best_id)

    def _run(self, chunks: list[tuple[Line, int, int]]) -> list[int]:
        """Runs one pass of the draft model. Returns the best next token for each chunk.

        A chunk is (line, first position, number of tokens): tokens of one sequence that the pass computes.
        """
        tokens = [self._rows.tokens[line.row, start : start + count] for line, start, count in chunks]
        counts = np.array([count for _, _, count in chunks], np.int32)
        starts = np.array([start for _, start, _ in chunks], np.int32)
        tables = np.stack([line.table for line, _, _ in chunks])
        best_ids: list[int] = self._network.run(np.concatenate(tokens), counts, starts, tables).tolist()
        return best_ids


def is_plain(slot: StepSlot, inputs: StepInputs) -> bool:
    """Returns whether a step is a plain decode step: no sequence is new, no drafts are verified and none are wanted."""
    seqs = slot.num_seqs
    return not (slot.num_wanted or slot.num_drafts or inputs.token_ids.size != seqs or slot.restarts[:seqs].any())
