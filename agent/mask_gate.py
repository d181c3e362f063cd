"""Lets the device thread wait for a step's token masks (structured output).

The server writes the masks into the step slot after it has sent the step.
"""

from __future__ import annotations

import threading

from llm_serving.errors import AgentError
from llm_serving.ipc.messages import Masks

MASK_TIMEOUT_S = 30.0
"""Maximum wait for the masks of a step. The server normally writes them while the step computes its logits."""


class MaskGate:
    """Remembers for which steps the token masks have arrived.

    The socket thread calls ``note``, and the device thread calls ``wait``.
    """

    def __init__(self, timeout_s: float = MASK_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._newest: dict[int, int] = {}
        self._changed = threading.Condition()

    def note(self, message: Masks) -> None:
        """Remembers that the token masks of a step are in its step slot."""
        with self._changed:
            self._newest[message.slot] = message.seq
            self._changed.notify_all()

    def wait(self, seq: int) -> None:
        """Waits until the token masks of step ``seq`` are in its step slot.

        Raises AgentError if the masks do not arrive in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: seq in self._newest.values(), self._timeout_s):
                raise AgentError(
                    f"the masks of step {seq} did not arrive within {self._timeout_s:g} s, so the step has no tokens"
                )
