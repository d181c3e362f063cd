"""What a step slot says, checked: nothing that a graph or the sampler would index with is taken on trust."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llm_serving.config import Config
from llm_serving.errors import ProtocolError
from llm_serving.ipc.shm import LAST_TOKEN, MOVE_WIDTH, NO_LOGSUMEXP, PADDING_SLOT, MoveKind, StepSlot
from llm_serving.request import MAX_TOP_LOGITS

Int32Array = npt.NDArray[np.int32]

_FEW = 64
"""Elements up to which Python's own minimum is faster than a reduction of NumPy's."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Views over a slot (T tokens, S sequences, table width W), valid while the step runs."""

    token_ids: Int32Array
    """[T], some LAST_TOKEN."""
    positions: Int32Array
    """[T]"""
    slot_mapping: Int32Array
    """[T]"""
    block_tables: Int32Array
    """[S, W]"""
    context_lens: Int32Array
    """[S]"""
    query_lens: Int32Array
    """[S]"""
    rows: Int32Array
    """[S]"""
    last_tokens: Int32Array
    """[S] index in T of each sequence's last token."""
    sampled_tokens: Int32Array
    """[S] the same where the sequence samples, else -1."""
    whole_prompts: bool
    """Every sequence starts at position 0."""


class StepReader:
    """Knows the limits of the model, the cache and the row table."""

    def __init__(self, config: Config, num_rows: int) -> None:
        self._vocab_size = config.shape.vocab_size
        self._max_model_len = config.max_model_len
        self._block_size = config.pa_config.block_size
        self._num_blocks = config.pa_config.num_blocks
        self._num_host_blocks = config.num_host_blocks
        self._num_rows = num_rows

    def read(self, slot: StepSlot, *, decode: bool) -> StepInputs:
        """Raises ProtocolError, naming field, value and limit, when the slot is not a step this agent can run."""
        tokens, seqs, width = slot.num_tokens, slot.num_seqs, slot.table_width
        if tokens == 0:
            raise ProtocolError("a prefill or decode step has no tokens; only a step of moves has none")
        query_lens, context_lens = slot.query_lens[:seqs], slot.context_lens[:seqs]
        self._check_lengths(query_lens, context_lens, tokens, width)
        if decode and tokens != seqs:
            raise ProtocolError(f"a decode step has {tokens} tokens for {seqs} sequences; it must have one each")
        last_tokens = np.cumsum(query_lens, dtype=np.int32) - np.int32(1)
        inputs = StepInputs(
            token_ids=slot.token_ids[:tokens],
            positions=slot.positions[:tokens],
            slot_mapping=slot.slot_mapping[:tokens],
            block_tables=slot.block_tables[: seqs * width].reshape(seqs, width),
            context_lens=context_lens,
            query_lens=query_lens,
            rows=slot.rows[:seqs],
            last_tokens=last_tokens,
            sampled_tokens=np.where(slot.do_sample[:seqs] != 0, last_tokens, np.int32(-1)),
            whole_prompts=not decode and bool((query_lens == context_lens).all()),
        )
        self._check_tokens(inputs)
        check_range("num_top_logits", slot.num_top_logits[:seqs], NO_LOGSUMEXP, MAX_TOP_LOGITS + 1)
        return inputs

    def read_moves(self, slot: StepSlot) -> Int32Array:
        """The block moves [M, 3] of any step: ``MoveKind``, source, destination. Raises ProtocolError as ``read``."""
        moves = slot.moves[: slot.num_moves * MOVE_WIDTH].reshape(-1, MOVE_WIDTH)
        if moves.size:
            kinds = moves[:, 0]
            check_range("move kinds", kinds, 0, len(MoveKind))
            self._check_blocks("move sources", moves[:, 1], kinds == MoveKind.SWAP_IN)
            self._check_blocks("move destinations", moves[:, 2], kinds == MoveKind.SWAP_OUT)
        return moves

    def _check_blocks(self, name: str, blocks: Int32Array, on_host: npt.NDArray[np.bool_]) -> None:
        """Of the cache any block but the one that pads, of the host's pool any."""
        check_range(f"{name} in the cache", blocks[~on_host], 1, self._num_blocks)
        check_range(f"{name} on the host", blocks[on_host], 0, self._num_host_blocks)

    def _check_lengths(self, query_lens: Int32Array, context_lens: Int32Array, tokens: int, width: int) -> None:
        check_range("query_lens", query_lens, 1, tokens + 1)
        check_range("context_lens", context_lens, 1, min(self._max_model_len, width * self._block_size) + 1)
        if int(query_lens.sum()) != tokens:
            raise ProtocolError(f"query_lens sum to {int(query_lens.sum())}, the step has {tokens} tokens")
        if (context_lens < query_lens).any():
            raise ProtocolError("a sequence's context is shorter than its tokens in this step")

    def _check_tokens(self, inputs: StepInputs) -> None:
        check_range("token_ids", inputs.token_ids, LAST_TOKEN, self._vocab_size)
        check_range("positions", inputs.positions, 0, self._max_model_len)
        check_range("slot_mapping", inputs.slot_mapping, PADDING_SLOT, self._num_blocks * self._block_size)
        check_range("block_tables", inputs.block_tables, 0, self._num_blocks)
        check_range("rows", inputs.rows, 0, self._num_rows)
        if (inputs.positions[inputs.last_tokens] + 1 != inputs.context_lens).any():
            raise ProtocolError("a sequence's last position is not the last of its context")


def check_range(name: str, values: npt.NDArray[np.int32], low: int, high: int) -> None:
    """Raise ProtocolError unless low <= values < high."""
    if values.size == 0:
        return
    if values.size <= _FEW:
        numbers = values.reshape(-1).tolist()
        least, most = min(numbers), max(numbers)
    else:
        least, most = int(values.min()), int(values.max())
    if least < low or most >= high:
        raise ProtocolError(
            f"a step's {name} holds {least if least < low else most}; it must be at least {low} and below {high}"
        )
