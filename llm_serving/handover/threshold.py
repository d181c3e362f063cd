"""Learns the number of uncached tokens from which a prompt should go to a prefill replica."""

from __future__ import annotations

from collections import deque

FIRST_TOKENS = 256
"""The threshold in tokens while it is not known how long prefills and hand-overs take."""
PROBE_INTERVAL = 64
"""If hand-overs are slower than prefills, one in every ``PROBE_INTERVAL`` long prompts is still handed over, to measure
both times again.
"""
FAILURES = 3
"""After this number of consecutive failed transfers, ``tokens`` returns None: no prompt should be handed over.

Failures because of lost agents do not count.
"""
_KEEP = 1 - 1 / 16
"""The learned latency is an average. Each new hand-over multiplies the weights of earlier hand-overs by this factor."""


class PromptThreshold:
    """Decides whether a prompt should be handed over (the hand-over *pays*), from its number of uncached tokens.

    A hand-over delays the second token of a request by the latency of the hand-over. In return, the running sequences
    of the decode replica do not wait for the prefill. So a hand-over pays if its latency is below the time of the
    prefill. Both times are learned:

        tokens * prefill seconds per token > overhead + blocks * transfer seconds per block

    ``fixed`` is an operator's threshold in tokens, which replaces the learned one. If the last transfers between
    machines have failed, hand-overs do not pay for any number of tokens.
    """

    def __init__(self, block_size: int, fixed: int | None = None) -> None:
        self._block_size = block_size
        self._fixed = fixed
        self._seconds = 0.0
        self._blocks = 0.0
        self._count = 0.0
        self._num_refused = 0
        self._failed: deque[tuple[int, int]] = deque(maxlen=FAILURES)
        """(source replica, target replica) of the failed transfers since the last success, at most ``FAILURES``."""

    def note(self, latency_s: float, num_blocks: int) -> None:
        """Learns from a completed hand-over: seconds from the end of the prefill to the arrival of all blocks."""
        self._seconds = self._seconds * _KEEP + latency_s
        self._blocks = self._blocks * _KEEP + num_blocks
        self._count = self._count * _KEEP + 1.0

    def note_transfer(self, source: int, target: int, *, failed: bool) -> None:
        """Learns whether a transfer of blocks between the machines of two replicas has failed."""
        if failed:
            self._failed.append((source, target))
        else:
            self._failed.clear()

    def note_lost(self, index: int) -> None:
        """Forgets the failed transfers from and to a replica whose agents are lost. The loss may have caused them."""
        self._failed = deque((ends for ends in self._failed if index not in ends), FAILURES)

    def tokens(self, token_s: float | None, block_s: float | None, wire_s: float = 0.0) -> int | None:
        """Returns the smallest number of uncached tokens for which a hand-over pays, or None if hand-overs do not pay
        for any number.

        ``token_s`` is the prefill time per token, and ``block_s`` the copy time per block, both in seconds or None if
        unknown. A hand-over copies each block twice. ``wire_s`` is the time per block of transfers between machines.
        """
        if len(self._failed) >= FAILURES:
            return None
        if self._fixed is not None:
            return self._fixed
        if token_s is None or block_s is None or not self._count:
            return FIRST_TOKENS
        transfer_s = 2.0 * block_s + wire_s
        overhead_s = max(0.0, self._seconds - transfer_s * self._blocks) / self._count
        saved_s = token_s - transfer_s / self._block_size
        if saved_s <= 0.0:
            return None
        return max(self._block_size, int(overhead_s / saved_s) + 1)

    def pays(self, num_tokens: int, token_s: float | None, block_s: float | None, wire_s: float = 0.0) -> bool:
        """Returns True if a prompt with ``num_tokens`` uncached tokens should be handed over. See ``tokens``."""
        threshold = self.tokens(token_s, block_s, wire_s)
        if threshold is not None and num_tokens >= threshold:
            return True
        if num_tokens < (FIRST_TOKENS if self._fixed is None else self._fixed):
            return False
        self._num_refused += 1
        return self._num_refused % PROBE_INTERVAL == 0
