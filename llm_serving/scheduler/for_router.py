"""The methods of a scheduler for a router in front of several schedulers, and for separate prefill and decode."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from llm_serving.request import Request
from llm_serving.scheduler.lifecycle import Lifecycle
from llm_serving.scheduler.preemption import Preemption

if TYPE_CHECKING:
    from llm_serving.block_moves.hand_overs import HandOverChange, HandOvers
    from llm_serving.block_moves.tier_moves import TierMoves
    from llm_serving.block_supply.base import BlockSupply


class RoutedScheduler:
    """Adds and removes requests that a router places, and exchanges messages about hand-overs with the router.

    ``block_moves.hand_overs`` describes hand-overs. There are none if replicas have no roles.
    """

    _lifecycle: Lifecycle
    _preemption: Preemption
    _hand_overs: HandOvers | None
    _supply: BlockSupply
    _tiers: TierMoves | None
    _may_have_suspects: bool

    def place_request(
        self,
        request: Request,
        arrival_index: int,
        now: float,
        *,
        hands_over: bool = False,
        handed: list[int] | None = None,
    ) -> None:
        """Adds a request that a router has placed at this scheduler. If the request has run before, it continues after
        its known tokens.

        ``arrival_index`` is the number of the request in the order of arrival at the router. The router has checked the
        id and the admission limits. With ``hands_over``, the request leaves for a decode replica after its prompt.
        ``handed`` lists the blocks of the hand-over pool that hold the keys and values of the request's known tokens,
        except the last token. It is None if the request comes without blocks.
        """
        self._lifecycle.place(request, arrival_index, now, hands_over=hands_over, handed=handed)
        self._may_have_suspects = self._may_have_suspects or request.is_suspect

    def release_requests(self, request_ids: Iterable[str]) -> None:
        """Removes waiting requests that the router moves to another scheduler."""
        for request_id in request_ids:
            self._lifecycle.release(request_id)

    def take_hand_overs(self) -> list[HandOverChange]:
        """Returns the reports about hand-overs since the last call. The router must act on each of them."""
        return [] if self._hand_overs is None else self._hand_overs.take_changes()

    def grant_hand_over(self, request_id: str, blocks: Iterable[int]) -> None:
        """Gives a request its blocks of the hand-over pool. If ``blocks`` is empty, the request stays at this replica.
        """
        assert self._hand_overs is not None, "only replicas that hand over ask for blocks"
        refused = self._hand_overs.grant(request_id, list(blocks))
        if refused is not None:
            self._preemption.settle(refused)

    def distrust_blocks(self, now: float, *, recompute: bool) -> None:
        """Empties the prefix cache, because some blocks may have wrong values. Blocks that sequences hold now will not
        be cached. The caller must also forget the blocks of the KV tiers.

        With ``recompute``, all sequences whose blocks may come from other replicas are computed again. Otherwise, only
        sequences that still wait for blocks of another replica are computed again.
        """
        self._supply.lose_all()
        if self._tiers is not None:
            self._tiers.distrust_loads()
        self._lifecycle.distrust(now, recompute=recompute)

    @property
    def hand_over_costs(self) -> tuple[float | None, float | None]:
        """Measured costs: (seconds per prefilled token, seconds per moved block). Each is None before a measurement."""
        return (None, None) if self._hand_overs is None else self._hand_overs.costs
