"""Decides which prompts a prefill replica computes (``parallel_config.roles``).

A prompt goes to a prefill replica if a hand-over pays (``handover.threshold``). Short prompts, samples of one prompt
and beams go to the replicas that decode. While no decode replica is ready, prefill replicas also decode. While no
prefill replica is ready, decode replicas also compute long prompts. So no request waits for a certain role.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from llm_serving.handover.pool import HandOverPool
from llm_serving.handover.threshold import PromptThreshold
from llm_serving.handover.transport import BlockPools, SharedPools
from llm_serving.routing.placement import Role
from llm_serving.routing.replica import Entry, RoutedReplica, Trip
from llm_serving.step_costs.rates import Rate


@dataclass(slots=True)
class HandOverFigures:
    """Counts of hand-overs since the start. Each field is a number of hand-overs unless its description says otherwise.
    """

    completed: int = 0
    blocks: int = 0
    """Blocks of completed hand-overs."""
    misses: int = 0
    """Hand-overs in which a block was wrong or damaged. Their requests were computed again."""
    reloads: int = 0
    """Handed requests that went to another decode replica because the first one was lost."""
    refused: int = 0
    """Hand-overs that were given up because no replica was ready to decode."""
    seconds: float = 0.0
    """Sum of the latencies of completed hand-overs, from the end of the prefill to the arrival of all blocks."""
    transfer_seconds: float = 0.0
    """Total seconds that transfers between pools took."""
    failed_transfers: int = 0
    """Transfers between pools that failed. Their requests were computed again."""


class PrefillSplit:
    """The roles of a router's replicas, the hand-over pool, and the prompt length from which a hand-over pays."""

    def __init__(
        self,
        roles: Sequence[Role],
        pool: HandOverPool,
        threshold: PromptThreshold,
        block_size: int,
        pools: BlockPools | None = None,
        *,
        sends_tokens: bool = False,
    ) -> None:
        """``pool`` allocates blocks for hand-overs. ``pools`` has their memory; None: all replicas share one pool."""
        self.roles = list(roles)
        self.sends_tokens = sends_tokens
        """True if the decode agents need the tokens of a handed prompt, because their draft model computes it again."""
        self.pools: BlockPools = SharedPools() if pools is None else pools
        self._wire = Rate()
        self._block_size = block_size
        self.pool = pool
        self.threshold = threshold
        self.figures = HandOverFigures()
        self.threshold_tokens: int | None = threshold.tokens(None, None)
        """The present threshold in uncached prompt tokens, for status pages. None if hand-overs do not pay."""

    def as_json(self) -> dict[str, float]:
        """Returns the figures for the status pages and the metrics. A threshold of -1 means that hand-overs do not pay.
        """
        threshold = self.threshold_tokens
        return {
            **asdict(self.figures),
            "pool_blocks": self.pool.num_blocks,
            "pool_free_blocks": self.pool.num_free,
            "threshold_tokens": -1 if threshold is None else threshold,
        }

    def note_transfer(self, trip: Trip, now: float, *, failed: bool) -> None:
        """Learns from the end of a transfer between pools."""
        self.threshold.note_transfer(trip.source, trip.target.index, failed=failed)
        if failed:
            self.figures.failed_transfers += 1
        else:
            seconds = now - trip.began
            self.figures.transfer_seconds += seconds
            self._wire.note(seconds, len(trip.lease.blocks))

    def decoders(self, live: list[RoutedReplica]) -> list[RoutedReplica]:
        """Returns the ready replicas that decode. If there is none, returns all ready replicas."""
        return [replica for replica in live if replica.role is not Role.PREFILL] or live

    def least_loaded(self, live: list[RoutedReplica]) -> RoutedReplica:
        """Returns the replica with the least load of those that decode, to decode a request with handed blocks.

        If no ready replica decodes, the choice is among all ready replicas.
        """
        return min(self.decoders(live), key=lambda replica: (replica.survey().load, replica.index))

    def for_prompt(
        self, entry: Entry, num_uncached: int, live: list[RoutedReplica], *, may_probe: bool
    ) -> list[RoutedReplica]:
        """Returns the replicas that should compute a prompt. [] means any replica that decodes.

        The result is [] unless a hand-over of the prompt pays, which depends on ``num_uncached``: the number of tokens
        that no prefix cache has. With ``may_probe``, some prompts are handed over only to measure hand-overs.
        """
        decoders = self.decoders(live)
        if len(decoders) == len(live) or not self._may_move(entry):
            # No prefill replica can take this prompt. If the prompt is long, it goes to the replicas with the role
            # ``both``.
            both = [replica for replica in decoders if replica.role is Role.BOTH]
            return both if len(both) < len(decoders) and self._pays(num_uncached, live, may_probe) else []
        if not self._pays(num_uncached, live, may_probe):
            return []
        return [replica for replica in live if replica.role is Role.PREFILL]

    def _may_move(self, entry: Entry) -> bool:
        request = entry.request
        fits = -(-request.num_tokens // self._block_size) <= self.pool.num_blocks
        return fits and not (request.group or request.is_suspect or entry.must_stay)

    def _pays(self, num_tokens: int, live: list[RoutedReplica], may_probe: bool) -> bool:
        costs = [replica.scheduler.hand_over_costs for replica in live]
        token_s = [token for token, _ in costs if token is not None]
        block_s = [block for _, block in costs if block is not None]
        known = (min(token_s, default=None), max(block_s, default=None), self._wire.seconds_per_unit or 0.0)
        threshold = self.threshold_tokens = self.threshold.tokens(*known)
        if not may_probe:
            return threshold is not None and num_tokens >= threshold
        return self.threshold.pays(num_tokens, *known)
