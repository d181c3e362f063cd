"""Chooses the threads that compute a step."""

from __future__ import annotations

from agent.kernels import set_alone
from llm_serving.config.sections import PowerConfig

MAX_ALONE_TOKENS = 8
"""Maximum number of tokens of a step that one thread computes alone in the quiet mode. A step of one sequence with the
default number of drafts has at most 8 tokens.
"""


class StepThreads:
    """Lets one thread compute small steps in the quiet mode. In the normal mode, all threads compute every step.

    A small step reads all weights and computes little. Its operators are so short that several threads would spend a
    part of the time on waiting for each other.
    """

    def __init__(self, power: PowerConfig) -> None:
        self._is_quiet = power.is_quiet

    def begin_step(self, num_tokens: int) -> None:
        """Chooses the threads for a step of ``num_tokens`` tokens, until the next step begins."""
        if self._is_quiet:
            set_alone(num_tokens <= MAX_ALONE_TOKENS)
