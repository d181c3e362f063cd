"""Learns the number of uncached tokens from which a prompt should go to a prefill replica."""

from __future__ import annotations

FIRST_TOKENS = 256
"""The threshold in tokens while the times of prefills and hand-overs are unknown."""
PROBE_INTERVAL = 64
"""While hand-overs do not pay, one of every ``PROBE_INTERVAL`` long prompts is handed over, to measure the times again.
"""
_KEEP = 1 - 1 / 16
"""The learned latency is an average. Each new hand-over multiplies the weights of earlier hand-overs by this factor."""


class PromptThreshold:
    """Decides whether a hand-over pays for a prompt, from its number of uncached tokens.

    A hand-over delays the second token of a request by the latency of the hand-over. In return, the running sequences
    of the decode replica do not wait for the prefill. So a hand-over pays if its latency is below the time of the
    prefill. Both times are learned:

        tokens * prefill seconds per token > overhead + blocks * transfer seconds per block

    ``fixed`` is an operator's threshold in tokens, which replaces the learned one.
    """

    def __init__(self, block_size: int, fixed: int | None = None) -> None:
        self._block_size = block_size
        self._fixed = fixed
        self._seconds = 0.0
        self._blocks = 0.0
        self._count = 0.0
        self._num_refused = 0

    def note(self, latency_s: float, num_blocks: int) -> None:
        """Learns from a completed hand-over: seconds from the end of the prefill to the arrival of all blocks."""
        self._seconds = self._seconds * _KEEP + latency_s
        self._blocks = self._blocks * _KEEP + num_blocks
        self._count = self._count * _KEEP + 1.0

    def tokens(self, token_s: float | None, block_s: float | None) -> int | None:
        """Returns the smallest number of uncached tokens for which a hand-over pays, or None if hand-overs do not pay
        for any number.

        ``token_s`` is the prefill time per token, and ``block_s`` the copy time per block, both in seconds or None if
        unknown. A hand-over copies each block twice.
        """
        if self._fixed is not None:
            return self._fixed
        if token_s is None or block_s is None or not self._count:
            return FIRST_TOKENS
        transfer_s = 2.0 * block_s
        overhead_s = max(0.0, self._seconds - transfer_s * self._blocks) / self._count
        saved_s = token_s - transfer_s / self._block_size
        if saved_s <= 0.0:
            return None
        return max(self._block_size, int(overhead_s / saved_s) + 1)

    def pays(self, num_tokens: int, token_s: float | None, block_s: float | None) -> bool:
        """Returns True if a prompt with ``num_tokens`` uncached tokens should be handed over."""
        threshold = self.tokens(token_s, block_s)
        if threshold is not None and num_tokens >= threshold:
            return True
        if self._fixed is not None or num_tokens < FIRST_TOKENS:
            return False
        self._num_refused += 1
        return self._num_refused % PROBE_INTERVAL == 0
