"""Provides input tokens that the previous step has sampled to all agents of a group.

The server may send a step before it has received the tokens of the previous step. It then sends LAST_TOKEN instead of a
token. Only one agent of a group samples. The other agents read the sampled tokens from the exchange.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from agent.group.exchange import Exchange
from agent.group.model_part import ModelPart
from agent.sampler import RowTable
from agent.step_inputs import no_last_token, rows_of_last_tokens
from llm_serving.ipc.shm import LAST_TOKEN, StepSlot

Int32Array = npt.NDArray[np.int32]


class SharedLastTokens:
    """Replaces LAST_TOKEN by the batch row's last sampled token.

    For each batch row, records the number of the step that sampled last. When that step has sampled, its token is in
    the exchange. All agents of a group record the same steps, so all of them refuse the same wrong inputs.
    """

    def __init__(self, exchange: Exchange, part: ModelPart, table: RowTable) -> None:
        """``table`` is the row table of this agent's sampler. Only the agent that samples has tokens in its table."""
        self._exchange = exchange
        self._part = part
        self._table = table
        self._sampled_in = np.full(table.last_token.size, -1, np.int64)
        self._steps = 0

    def reset(self) -> None:
        """Forgets the last tokens of all batch rows."""
        self._sampled_in.fill(-1)

    def check(self, token_ids: Int32Array, rows: Int32Array, query_lens: Int32Array) -> None:
        """Raises ProtocolError if the step needs the last token of a batch row for which no token was sampled.

        Does not wait for other agents.
        """
        needed = rows_of_last_tokens(token_ids, rows, query_lens)
        if needed.size and int(self._sampled_in[needed].min()) < 0:
            raise no_last_token(int(needed[self._sampled_in[needed] < 0][0]))

    def resolve(self, token_ids: Int32Array, rows: Int32Array, query_lens: Int32Array) -> None:
        """Replaces each LAST_TOKEN in ``token_ids`` [tokens] by the last token of its batch row. Call ``check`` first.

        Waits until the token is sampled. Raises GroupDownError if the group failed.
        """
        needed = rows_of_last_tokens(token_ids, rows, query_lens)
        if not needed.size:
            return
        tokens = self._table.last_token
        if not self._part.returns_results:
            tokens = self._exchange.tokens_after(int(self._sampled_in[needed].max()))
        token_ids[token_ids == LAST_TOKEN] = tokens[needed]

    def step_done(self, slot: StepSlot) -> None:
        """Records that a step has run. In the agent that samples, also publishes the step's tokens.

        If sampling failed, the published token is 0. A later step may compute with it, but no client sees the result.
        """
        seqs = slot.num_seqs
        rows = slot.rows[:seqs][slot.do_sample[:seqs] != 0]
        if self._part.returns_results:
            tokens = self._table.last_token[rows]
            self._exchange.post_tokens(rows, np.maximum(tokens, 0))
        self._sampled_in[rows] = self._steps
        self._steps += 1
