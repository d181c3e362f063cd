"""An agent's side of its group's exchange (``llm_serving.ipc.exchange``): meeting, activations, sampled tokens.

All agents of a group run the same steps in the same order, so each counts them for itself, and a counter in the
exchange says how far its owner has come. Sums within a stage are the kernels' business (``agent/kernels/exchange``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from agent.group.model_part import ModelPart
from agent.kernels import collectives
from agent.weights.storage import Array
from llm_serving.ipc.exchange import COLLECTIVE_BYTES, DOWN_WORD, RING_STEPS, ExchangeMemory

Int32Array = npt.NDArray[np.int32]


class Exchange:
    """Used by the agent's device thread only. One a process."""

    def __init__(self, memory: ExchangeMemory, part: ModelPart, timeout_s: float) -> None:
        """``timeout_s``: how long to wait for another agent before this group is given up."""
        self._memory = memory
        self._layout = layout = memory.layout
        self._part = part
        self._timeout_s = timeout_s
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(memory.mapping, np.uint8)
        self._base = int(self._bytes.ctypes.data)
        self._down = self._base + 4 * DOWN_WORD
        self._tokens = self._bytes[layout.tokens :].view(np.int32)[: layout.max_rows]
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
            )

    def meet(self, timeout_s: float) -> None:
        """Wait until every agent of the group has come here. Raises GroupDownError."""
        layout, own = self._layout, self._base + self._layout.arrival_line(self._part.member)
        arrivals = int(self._bytes[own - self._base :][:4].view(np.uint32)[0]) + 1
        collectives.publish(own, arrivals)
        for member in range(layout.group_size):
            self._wait("start of the group", layout.arrival_line(member), arrivals, timeout_s)

    @property
    def is_down(self) -> bool:
        """Whether an agent of the group is gone, or was waited for in vain."""
        return self._memory.is_down

    def give_up(self) -> None:
        """Tell the others that this agent ends: nobody need wait for it."""
        self._memory.mark_down()

    def send(self, stream: Array) -> None:
        """Hand the residual stream [T, hidden_size] to the next stage; the first agent of a stage does. Returns before
        it is taken, unless the next stage is ``RING_STEPS`` behind. Raises GroupDownError."""
        border, size = self._part.place.pp_index, self._part.parallel.tensor_parallel
        if self._part.place.tp_index == 0:
            number = self._steps_sent
            for member in range((border + 1) * size, (border + 2) * size):
                line = self._layout.ring_read_line(member)
                self._wait("activations for the next stage", line, number - RING_STEPS + 1)
            self._ring(border, number, stream.dtype, stream.size)[:] = stream.reshape(-1)
            collectives.publish(self._base + self._layout.ring_written_line(border), number + 1)
        self._steps_sent += 1

    def receive(self, out: Array) -> None:
        """Wait for the residual stream of the stage before and copy it to ``out`` [T, hidden_size], contiguous. Raises
        GroupDownError."""
        border, number = self._part.place.pp_index - 1, self._steps_received
        self._wait("activations of the stage before", self._layout.ring_written_line(border), number + 1)
        out.reshape(-1)[:] = self._ring(border, number, out.dtype, out.size)
        self._steps_received += 1
        collectives.publish(self._base + self._layout.ring_read_line(self._part.member), number + 1)

    def post_tokens(self, rows: Int32Array, token_ids: Int32Array) -> None:
        """The tokens that the step at hand sampled for ``rows``; the answering agent does it once a step.

        Nobody still needs what is overwritten: a row's token is read by the row's next step, which this agent has
        finished before it samples the row again, and no agent of the first stage can be behind: without their part of
        that step there is nothing to sample from.
        """
        self._tokens[rows] = token_ids
        self._steps_sampled += 1
        collectives.publish(self._base + self._layout.token_line, self._steps_sampled)

    def tokens_after(self, step: int) -> Int32Array:
        """Each row's last token, [rows], once ``step`` (from 0) has sampled. Raises GroupDownError."""
        self._wait("tokens of the last stage", self._layout.token_line, step + 1)
        return self._tokens

    def _wait(self, what: str, line: int, target: int, timeout_s: float | None = None) -> None:
        collectives.wait_for(what, self._base + line, target, self._down, timeout_s or self._timeout_s)

    def _ring(self, border: int, number: int, dtype: Any, size: int) -> Array:
        offset = self._layout.ring(border) + number % RING_STEPS * self._layout.ring_step_bytes
        ring: Array = self._bytes[offset : offset + self._layout.ring_step_bytes].view(dtype)[:size]
        return ring
