"""Provides the tokens that the previous step has sampled to all agents of a group, as inputs of the next step.

The server may send a step before it has received the tokens of the previous step. Then the step contains the special id
LAST_TOKEN, and each agent replaces it by the sampled token. Only one agent of a group samples, so all other agents read
the sampled tokens from the exchange.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from agent.group.exchange import Exchange
from agent.group.model_part import ModelPart
from agent.sampler import RowTable
from agent.step_inputs import no_last_token, rows_of_last_tokens
from llm_serving.ipc.exchange import DRAWN, SAMPLED
from llm_serving.ipc.shm import LAST_TOKEN, StepSlot

Int32Array = npt.NDArray[np.int32]


class SharedLastTokens:
    """Replaces LAST_TOKEN by the batch row's last sampled token.

    Records, for each batch row, the number of the latest step that samples this row. The exchange has the token as soon
    as this step has been sampled. All agents of a group record the same steps, so all of them refuse the same wrong
    inputs.
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
        """Raises ProtocolError if the step has a LAST_TOKEN for a batch row that has not sampled a token.

        ``token_ids`` is [tokens]. ``rows`` and ``query_lens`` are [seqs]. Does not wait for other agents.
        """
        self.check_rows(rows_of_last_tokens(token_ids, rows, query_lens))

    def check_rows(self, needed: Int32Array) -> None:
        """Raises ProtocolError if one of the batch rows ``needed`` has not sampled a token."""
        if needed.size and int(self._sampled_in[needed].min()) < 0:
            raise no_last_token(int(needed[self._sampled_in[needed] < 0][0]))

    def of_rows(self, needed: Int32Array) -> Int32Array:
        """Returns the last token of each batch row in ``needed`` [rows], as [rows]. Call ``check_rows`` first.

        Waits until the tokens are sampled. Raises GroupDownError if the group failed.
        """
        tokens = self._table.last_token
        if not self._part.returns_results:
            tokens = self._exchange.tokens_after(int(self._sampled_in[needed].max()))[SAMPLED]
        # If the logits of a sequence were not finite, its token is a negative number. Every agent then uses token 0.
        last: Int32Array = np.maximum(tokens[needed], 0)
        return last

    def resolve(self, token_ids: Int32Array, rows: Int32Array, query_lens: Int32Array) -> None:
        """Replaces each LAST_TOKEN in ``token_ids`` [tokens] by the last token of its batch row. Call ``check`` first.

        Waits until the token is sampled. Raises GroupDownError if the group failed.
        """
        needed = rows_of_last_tokens(token_ids, rows, query_lens)
        if not needed.size:
            return
        token_ids[token_ids == LAST_TOKEN] = self.of_rows(needed)

    def step_done(self, slot: StepSlot) -> None:
        """Records a step that has run. In the agent that samples, also publishes the step's tokens."""
        self.publish(slot)
        self.record(slot)

    def record(self, slot: StepSlot) -> int:
        """Records, for the batch rows that the step in ``slot`` samples, the number of this step.

        Increases the count of steps. Returns the number of the step.
        """
        number = self._steps
        self._sampled_in[_sampled_rows(slot)] = number
        self._steps += 1
        return number

    def publish(self, slot: StepSlot, drawn: Int32Array | None = None) -> None:
        """Publishes the tokens of the oldest step that was not published. Does nothing in agents that do not sample.

        ``drawn`` [seqs] are the tokens that the device has chosen, or None if it has drawn none. If the logits of a
        sequence are not finite, its published token is a negative number. If sampling failed, the published tokens are
        those of ``replace_tokens``, or earlier ones. A later step may compute with these tokens, but no client sees
        the result.
        """
        if self._part.returns_results:
            of_rows = np.zeros_like(self._table.last_token)
            of_rows[slot.rows[: slot.num_seqs]] = 0 if drawn is None else drawn
            self._exchange.post_tokens(self._table.last_token, of_rows)

    def replace_tokens(self, slot: StepSlot, chosen: Int32Array) -> None:
        """Makes ``chosen`` [seqs], the tokens of the device, the last tokens of a step whose sampling failed.

        Call this in the agent that samples, before ``publish``.
        """
        samples = slot.do_sample[: slot.num_seqs] != 0
        self._table.last_token[slot.rows[: slot.num_seqs][samples]] = chosen[samples]

    def of_step(self, number: int, rows: Int32Array) -> tuple[Int32Array, Int32Array]:
        """Returns copies of the tokens that the host and the device have chosen in a step for the batch rows ``rows``.

        Waits until the step with this number is sampled. The device must have drawn tokens in it. This agent must not
        have launched the second step after it (``Exchange.post_tokens``). Raises GroupDownError if the group failed.
        """
        tokens = self._exchange.tokens_after(number)
        return tokens[SAMPLED][rows], tokens[DRAWN][rows]


def _sampled_rows(slot: StepSlot) -> Int32Array:
    seqs = slot.num_seqs
    rows: Int32Array = slot.rows[:seqs][slot.do_sample[:seqs] != 0]
    return rows
