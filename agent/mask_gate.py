"""Lets the device thread wait for a step's token masks (structured output), and stores the logit biases of batch rows.

The server sends a step before its masks are ready, and writes the masks into the step slot later.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llm_serving.errors import AgentError, ProtocolError
from llm_serving.ipc.messages import MASK_TIMEOUT_S, Bias, Masks


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Numbers that are added to the logits of some tokens. Each token occurs at most once."""

    token_ids: npt.NDArray[np.int32]
    values: npt.NDArray[np.float32]


class MaskGate:
    """Records for which steps the token masks have arrived, and stores logit biases.

    The socket thread calls ``note`` and ``note_bias``, and the device thread calls ``wait``.
    """

    def __init__(self, timeout_s: float = MASK_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._newest: dict[int, Masks] = {}
        """The newest message about token masks of each step slot."""
        self._biases: dict[int, LogitBias] = {}
        """The newest bias of each batch row."""
        self._changed = threading.Condition()

    def note(self, message: Masks) -> None:
        """Records that the token masks of a step are in its step slot."""
        with self._changed:
            self._newest[message.slot] = message
            self._changed.notify_all()

    def note_bias(self, message: Bias) -> None:
        """Stores the logit bias of a batch row. Raises ProtocolError if its arrays do not fit together."""
        ids, values = len(message.token_ids), len(message.values)
        if ids != values or ids % 4:
            raise ProtocolError(f"the bias of row {message.row} has {ids} bytes of token ids and {values} of values")
        token_ids = np.frombuffer(message.token_ids, np.int32)
        bias = LogitBias(token_ids, np.frombuffer(message.values, np.float32))
        with self._changed:
            self._biases[message.row] = bias

    def wait(self, seq: int) -> Mapping[int, LogitBias]:
        """Waits until the token masks of step ``seq`` are in its step slot. Returns the logit biases by batch row.

        Raises AgentError if the masks do not arrive in time. Raises ProtocolError if the message about the masks names
        a batch row whose logit bias has not arrived.
        """

        def message_of_step() -> Masks | None:
            return next((each for each in self._newest.values() if each.seq == seq), None)

        with self._changed:
            message = self._changed.wait_for(message_of_step, self._timeout_s)
            if message is None:
                raise AgentError(
                    f"the masks of step {seq} did not arrive within {self._timeout_s:g} s, so the step has no tokens"
                )
            missing = [row for row in message.biased_rows if row not in self._biases]
            if missing:
                raise ProtocolError(
                    f"step {seq} has a logit bias for row {missing[0]}, which the agent did not receive"
                )
            return {row: self._biases[row] for row in message.biased_rows}
