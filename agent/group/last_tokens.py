"""Where a step's LAST_TOKEN comes from, where several agents share a model and one of them samples."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from agent.group.exchange import Exchange
from agent.group.model_part import ModelPart
from agent.sampler import RowTable
from llm_serving.errors import ProtocolError
from llm_serving.ipc.shm import LAST_TOKEN, StepSlot

Int32Array = npt.NDArray[np.int32]


class SharedLastTokens:
    """Every agent knows which step sampled for which row; the token itself is in the exchange once that step is done.

    So a step may be queued before the last one has answered, and all agents refuse the same steps.
    """

    def __init__(self, exchange: Exchange, part: ModelPart, table: RowTable) -> None:
        """``table`` is this agent's own, which only the answering one fills."""
        self._exchange = exchange
        self._part = part
        self._table = table
        self._sampled_in = np.full(table.last_token.size, -1, np.int64)
        self._steps = 0

    def reset(self) -> None:
        """Forget every row."""
        self._sampled_in.fill(-1)

    def check(self, token_ids: Int32Array, rows: Int32Array, query_lens: Int32Array) -> None:
        """Raises ProtocolError when a row whose last token the step wants has none. Waits for nobody."""
        asked = self._asked(token_ids, rows, query_lens)
        if asked.size and int(self._sampled_in[asked].min()) < 0:
            row = int(asked[self._sampled_in[asked] < 0][0])
            raise ProtocolError(f"a step asks for the last token of row {row}, which has not sampled one")

    def resolve(self, token_ids: Int32Array, rows: Int32Array, query_lens: Int32Array) -> None:
        """Replace each LAST_TOKEN in ``token_ids`` [T], after ``check``. Raises GroupDownError."""
        asked = self._asked(token_ids, rows, query_lens)
        if not asked.size:
            return
        tokens = self._table.last_token
        if not self._part.answers:
            tokens = self._exchange.tokens_after(int(self._sampled_in[asked].max()))
        token_ids[token_ids == LAST_TOKEN] = tokens[asked]

    def step_done(self, slot: StepSlot) -> None:
        """Count a step that ran, and post its tokens where this agent has sampled them: 0 where that failed, which
        whoever asks for it may compute with and nobody gets to see."""
        seqs = slot.num_seqs
        rows = slot.rows[:seqs][slot.do_sample[:seqs] != 0]
        if self._part.answers:
            tokens = self._table.last_token[rows]
            self._exchange.post_tokens(rows, np.maximum(tokens, 0))
        self._sampled_in[rows] = self._steps
        self._steps += 1

    @staticmethod
    def _asked(token_ids: Int32Array, rows: Int32Array, query_lens: Int32Array) -> Int32Array:
        """The row of each LAST_TOKEN."""
        unknown = token_ids == LAST_TOKEN
        if not unknown.any():
            return np.empty(0, np.int32)
        row_of_token: Int32Array = rows if rows.size == token_ids.size else np.repeat(rows, query_lens)
        asked: Int32Array = row_of_token[unknown]
        return asked
