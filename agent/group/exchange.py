"""Passes activations and sampled tokens between the agents of a group, through shared memory (the exchange).

All agents of a group run the same steps in the same order, and each agent counts its steps. In the exchange, each agent
has a counter of its completed steps. ``llm_serving/ipc/exchange.py`` has the layout of the memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from agent.group.model_part import ModelPart
from agent.kernels import collectives
from agent.weights.storage import Array
from llm_serving.ipc.exchange import (
    COLLECTIVE_BYTES,
    DOWN_WORD,
    DRAWN,
    RING_STEPS,
    SAMPLED,
    TOKEN_PLACES,
    ExchangeMemory,
)

Int32Array = npt.NDArray[np.int32]


class Exchange:
    """An agent's access to the exchange of its group. Only the agent's device thread may use it."""

    def __init__(self, memory: ExchangeMemory, part: ModelPart, timeout_s: float) -> None:
        """``timeout_s`` is the maximum wait for another agent. After this time, the group counts as failed."""
        self._memory = memory
        self._layout = layout = memory.layout
        self._part = part
        self._timeout_s = timeout_s
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(memory.mapping, np.uint8)
        self._base = int(self._bytes.ctypes.data)
        self._down = self._base + 4 * DOWN_WORD
        spans_nodes = part.parallel.nodes_per_replica > 1
        self._bell = self._base + layout.bell_line if spans_nodes else 0
        tokens = self._bytes[layout.tokens :][: TOKEN_PLACES * layout.token_place_bytes].view(np.int32)
        self._tokens = tokens.reshape(TOKEN_PLACES, 2, layout.max_rows)
        self._steps_sent = self._steps_received = self._steps_sampled = 0
        if part.is_split:
            size = part.parallel.tensor_parallel
            first = part.place.pp_index * size
            collectives.open_exchange(
                self._base,
                down=4 * DOWN_WORD,
                lines=layout.collective_line(first),
                buffers=layout.collective_buffers + first * layout.collective_member_bytes,
                piece_bytes=COLLECTIVE_BYTES,
                timeout_s=timeout_s,
                size=size,
                index=part.place.tp_index,
                bell=layout.bell_line if spans_nodes else 0,
            )

    def meet(self, timeout_s: float) -> None:
        """Waits until every agent of the group has called this method. Raises GroupDownError if the group failed."""
        layout, own = self._layout, self._base + self._layout.arrival_line(self._part.member)
        arrivals = int(self._bytes[own - self._base :][:4].view(np.uint32)[0]) + 1
        collectives.publish(own, arrivals, 0, self._bell)
        for member in range(layout.group_size):
            self._wait("start of the group", layout.arrival_line(member), arrivals, timeout_s)

    @property
    def is_down(self) -> bool:
        """True if an agent of the group has ended, or made another agent wait longer than the timeout."""
        return self._memory.is_down

    def give_up(self) -> None:
        """Marks the group as failed. An agent calls this when it ends, so that the other agents stop waiting."""
        self._memory.mark_down()

    def send(self, stream: Array) -> None:
        """Sends ``stream``, the residual stream [tokens, hidden_size] of a step, to the agents of the next stage.

        All agents of a stage call this, and the first one writes the data. Waits if the next stage is ``RING_STEPS``
        steps behind. Raises GroupDownError if the group failed.
        """
        border, size = self._part.place.pp_index, self._part.parallel.tensor_parallel
        if self._part.place.tp_index == 0:
            number = self._steps_sent
            for member in range((border + 1) * size, (border + 2) * size):
                line = self._layout.ring_read_line(member)
                self._wait("activations for the next stage", line, number - RING_STEPS + 1)
            self._ring(border, number, stream.dtype, stream.size)[:] = stream.reshape(-1)
            line = self._base + self._layout.ring_written_line(border)
            collectives.publish(line, number + 1, stream.nbytes, self._bell)
        self._steps_sent += 1

    def receive(self, out: Array) -> None:
        """Waits for the residual stream of the previous stage and copies it to ``out``.

        ``out`` is a contiguous array [tokens, hidden_size]. Raises GroupDownError if the group failed.
        """
        border, number = self._part.place.pp_index - 1, self._steps_received
        self._wait("activations of the stage before", self._layout.ring_written_line(border), number + 1)
        out.reshape(-1)[:] = self._ring(border, number, out.dtype, out.size)
        self._steps_received += 1
        collectives.publish(self._base + self._layout.ring_read_line(self._part.member), number + 1, 0, self._bell)

    def post_tokens(self, sampled: Int32Array, drawn: Int32Array) -> None:
        """Publishes two arrays of tokens after a step, each int32 [max_rows].

        ``sampled`` has the last token of every batch row, or a negative number if the row has none. ``drawn`` has the
        tokens that the device has drawn in this step, and any number for all other batch rows. The agent that samples
        calls this once in each step, in the order of the steps.

        No agent misses a token, although this method waits for no agent:

        - An agent reads the last token of a batch row before it launches its part of a step with this batch row. The
          next token of the row is sampled only after all parts have been computed. Until then, each call of this
          method publishes the same last token for this row, whichever place in the exchange it overwrites.
        - If the device has drawn tokens in a step, each agent reads the step's tokens before it launches the second
          step after it. So only the tokens of the next step can be published before this read. They go to another place
          in the exchange.
        """
        place = self._tokens[self._steps_sampled % TOKEN_PLACES]
        place[SAMPLED], place[DRAWN] = sampled, drawn
        self._steps_sampled += 1
        line = self._base + self._layout.token_line
        collectives.publish(line, self._steps_sampled, place.nbytes, self._bell)

    def tokens_after(self, step: int) -> Int32Array:
        """Waits until step number ``step`` (counted from 0) has been sampled. Returns the arrays ``SAMPLED`` and
        ``DRAWN`` that ``post_tokens`` has published, int32 [2, max_rows].

        Raises GroupDownError if the group failed.
        """
        self._wait("tokens of the last stage", self._layout.token_line, step + 1)
        tokens: Int32Array = self._tokens[step % TOKEN_PLACES]
        return tokens

    def _wait(self, reason: str, line: int, target: int, timeout_s: float | None = None) -> None:
        collectives.wait_for(reason, self._base + line, target, self._down, timeout_s or self._timeout_s)

    def _ring(self, border: int, number: int, dtype: Any, size: int) -> Array:
        offset = self._layout.ring(border) + number % RING_STEPS * self._layout.ring_step_bytes
        ring: Array = self._bytes[offset : offset + self._layout.ring_step_bytes].view(dtype)[:size]
        return ring


def all_agree(part: ModelPart | None, vote: bool) -> bool:
    """Returns True if all agents of the stage called this with ``vote=True``.

    Every agent of the stage must call this at the same place of a step. Raises GroupDownError if the group failed.
    """
    if part is None or not part.is_split:
        return vote
    return bool(collectives.all_gather(np.array([vote]), part.parallel.tensor_parallel).all())
