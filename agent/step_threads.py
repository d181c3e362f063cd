"""Chooses the threads that compute a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from agent.kernels import set_alone
from llm_serving.config.sections import PowerConfig

MAX_ALONE_TOKENS = 8
"""Maximum number of tokens of a step that one thread computes alone in the quiet mode. A step of one sequence with the
default number of drafts has at most 8 tokens.
"""
MAX_ALONE_WEIGHT_BYTES = 320 * 1024**2
"""Maximum bytes of weights of a model whose small steps one thread computes alone in the quiet mode.

A small step reads all weights. One core reads about 10 to 15 GB/s, so it reads these weights in about 30 ms. With
larger weights, reading takes most of the step, and several cores read faster. The default model has 252 MiB.
"""


class StepThreads:
    """Lets one thread compute small steps of a small model in the quiet mode. Otherwise, all threads compute.

    A small step reads all weights and computes little. With a small model, its operators are so short that several
    threads would spend a part of the time on waiting for each other.
    """

    def __init__(self, power: PowerConfig) -> None:
        self._is_quiet = power.is_quiet
        self.weight_bytes = 0
        """Bytes of the weights that a step reads in this agent. Set it when the model is loaded."""

    @contextmanager
    def of_step(self, num_tokens: int) -> Iterator[None]:
        """Chooses the threads for a step of ``num_tokens`` tokens, which the ``with`` block computes. All threads
        compute what follows the block.
        """
        is_small = num_tokens <= MAX_ALONE_TOKENS and self.weight_bytes <= MAX_ALONE_WEIGHT_BYTES
        if not (self._is_quiet and is_small):
            yield
            return
        set_alone(True)
        try:
            yield
        finally:
            set_alone(False)
