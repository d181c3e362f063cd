"""A queue of the router: the requests that wait for the replicas of one pool, and their placement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llm_serving.request import Request
from llm_serving.routing.placement import Routing
from llm_serving.routing.placer import Placer, Ready
from llm_serving.routing.replica import Entry, RoutedReplica
from llm_serving.scheduler.output import RequestUpdate
from llm_serving.scheduler.sequence import Sequence as Waiting
from llm_serving.waiting.intake import Intake
from llm_serving.waiting.slo_order import make_order

if TYPE_CHECKING:
    from llm_serving.routing.prefill_split import PrefillSplit


class Queue:
    """The requests of one pool of replicas. Without pools, a router has one queue for all requests.

    ``intake`` has all requests of the queue that have not ended, also the placed ones.
    """

    def __init__(
        self,
        replicas: Sequence[RoutedReplica],
        entries: dict[str, Entry],
        routing: Routing,
        ready: Ready,
        placed: set[int],
        split: PrefillSplit | None,
    ) -> None:
        limits = replicas[0].scheduler.limits
        self.intake = Intake(limits, make_order(limits))
        self.placer = Placer(replicas, self.intake, entries, routing, ready, placed, split)
        self._ready = ready

    def add(self, request: Request, arrival_index: int) -> Waiting:
        """Admits a request. ``arrival_index`` is the number of requests that all queues have admitted before.

        A replica may have requests of several queues, so the arrival indices of all queues must differ.
        """
        self.intake.num_arrivals = arrival_index
        return self.intake.add(request, self.num_free_rows)

    def charge_outputs(self, updates: Sequence[RequestUpdate]) -> None:
        """Charges the new tokens of this queue's requests to their tenants."""
        if self.intake.has_tenants:
            known = (each.request for each in updates if each.token_id is not None)
            self.intake.order.charge_outputs(one for one in known if one.request_id in self.intake.sequences)

    @property
    def num_free_rows(self) -> int:
        """Number of free batch rows of ready replicas, minus the requests that wait at these replicas.

        May be negative.
        """
        return sum(replica.scheduler.num_spare_rows for replica in self._ready())
