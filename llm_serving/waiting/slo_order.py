"""The order in which waiting requests start under policy ``slo``: by due time, and late requests last.

A request is due ``ttft_objective`` after its arrival. Its latest start is the due time minus its prefill time and a
margin. The prefill time is ``overhead + seconds per token * tokens``. The policy learns both coefficients from its
steps. The margin is a fraction of the objective, because the estimate is not exact.

On time
    A request is on time until its latest start has passed. The request with the earliest due time comes first. One
    level of priority shifts the due time by ``ageing`` seconds. With fairness, the tenant with the least virtual token
    counter comes first, and the due times order only this tenant's requests. (Jackson 1955: if any order of
    uninterrupted jobs meets all due times, the order by due time does. An order by least slack would start the longest
    prompts first, and short prompts behind them would be late.)

Late
    Late requests come after the requests on time, in the order of ``QueueOrder``. If late requests came first under
    overload, each request would start shortly after its latest start, and all would be late. After ``LATE_SHARE - 1``
    starts of requests on time, the next start is that of a late request. So late requests do not starve, and requests
    on time are delayed little.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from llm_serving.request import Request
from llm_serving.scheduler.limits import Policy, SchedulerLimits
from llm_serving.scheduler.sequence import Sequence
from llm_serving.waiting.queue_order import DEFAULT_AGEING_S, FairQueue, KeyedHeap, QueueOrder

LATE_SHARE = 128
"""While late requests wait, at least one in every ``LATE_SHARE`` starts is the start of a late request.

This start takes the place of a request that would be on time. So under a lasting overload, the goodput is lower by
``1 / LATE_SHARE``.
"""

DEFAULT_MARGIN = 0.3
"""Fraction of the objective that is reserved for errors of the estimated prefill time."""

_RELEARN = 0.125
"""If the learnt prefill time changes by more than this fraction, the waiting requests are sorted again."""


class SloOrder(QueueOrder):
    """Orders requests that are on time by due time. Late requests come after them, in the order of the base class.

    A late request stays late unless the estimate of prefill times changes.

    ``ttft_objective_s`` is the objective, in seconds, for requests without an objective of their own.
    """

    STATE = (
        *QueueOrder.STATE,
        *("_overhead_s", "_seconds_per_token", "_on_time", "_latest_starts", "_starts_before_late", "_next_expected"),
    )

    def __init__(
        self,
        ttft_objective_s: float,
        ageing_s: float = DEFAULT_AGEING_S,
        *,
        fairness: bool = True,
        margin: float = DEFAULT_MARGIN,
    ) -> None:
        super().__init__(ageing_s, fairness=fairness)
        self._ttft_objective_s = ttft_objective_s
        self._margin = margin
        self._overhead_s = 0.0
        self._seconds_per_token = 0.0
        self._on_time = FairQueue(fairness)
        self._latest_starts: KeyedHeap[Sequence] = KeyedHeap()
        self._starts_before_late = 0
        self._next_expected = 0.0

    def __len__(self) -> int:
        return len(self._latest_starts) + self.num_late

    @property
    def num_late(self) -> int:
        """Number of waiting requests that are recorded as late. Only ``first`` and ``first_of`` move requests from on
        time to late.
        """
        return super().__len__()

    @property
    def estimate(self) -> tuple[float, float]:
        return self._overhead_s, self._seconds_per_token

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._latest_starts
        yield from super().__iter__()

    def is_late(self, sequence: Sequence) -> bool:
        return sequence not in self._latest_starts

    def is_spare(self, sequence: Sequence) -> bool:
        """Returns True if ``sequence``, the first of the queue, is late and its start delays no request on time.

        A late request is first in two cases. If no request on time waits, the start delays none, and the result is
        True. Every ``LATE_SHARE``-th start is reserved for late requests. This start may delay a request on time, so
        the result is False.
        """
        return sequence not in self._latest_starts and self._starts_before_late < LATE_SHARE - 1

    def expects_more(self, now: float) -> bool:
        """Returns True if a request arrived less than ``ttft_objective`` seconds ago.

        More requests are then likely to arrive soon.
        """
        return now < self._next_expected

    def learn(self, overhead_s: float, seconds_per_token: float) -> None:
        """Updates the estimate of prefill times.

        Costs O(1) if the estimate changes little, otherwise sorts the queue again.
        """
        if _has_changed(self._overhead_s, overhead_s) or _has_changed(self._seconds_per_token, seconds_per_token):
            self._overhead_s = overhead_s
            self._seconds_per_token = seconds_per_token
            self._sort_again()

    def latest_start(self, sequence: Sequence) -> float:
        """Returns the latest time at which the prefill can start so that the first token is on time."""
        request = sequence.request
        prefill_s = self._overhead_s + self._seconds_per_token * request.num_tokens
        return request.arrival_time + self._objective_s(request) * (1.0 - self._margin) - prefill_s

    def add(self, sequence: Sequence) -> None:
        request = sequence.request
        self._latest_starts.set(sequence, self.latest_start(sequence))
        due = request.arrival_time + self._objective_s(request)
        self._next_expected = max(self._next_expected, due)
        due += self._ageing_s * request.priority
        self._on_time.add(sequence, (due, sequence.arrival_index))

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._latest_starts:
            self._latest_starts.remove(sequence)
            self._on_time.remove(sequence)
        else:
            super().remove(sequence)

    def first(self, now: float) -> Sequence:
        self._move_late(now)
        if not self._latest_starts or (self.num_late and self._starts_before_late >= LATE_SHARE - 1):
            return super().first(now)
        return self._on_time.first()

    def first_of(self, tenants: Iterable[str], now: float) -> Sequence | None:
        """Returns the next sequence of the light keys ``tenants`` among the requests on time, or None. Leaves out keys
        whose counter exceeds the least counter by more than ``LIGHT_CREDIT``.

        Also returns None if late requests wait and none of them was among the last ``2 * LATE_SHARE - 1`` starts. Then
        a late request must start next.
        """
        self._move_late(now)
        if self.num_late and self._starts_before_late >= 2 * LATE_SHARE - 1:
            return None
        return self._on_time.first_of(tenants)

    def start(self, sequence: Sequence) -> None:
        if sequence not in self._latest_starts or not self.num_late:
            self._starts_before_late = 0
        else:
            self._starts_before_late += 1
        super().start(sequence)

    def _charge(self, priority: int, tenant: str, service: int) -> None:
        self._on_time.charge(tenant, service)
        super()._charge(priority, tenant, service)

    def _objective_s(self, request: Request) -> float:
        return self._ttft_objective_s if request.ttft_objective is None else request.ttft_objective

    def _move_late(self, now: float) -> None:
        """Moves requests whose latest start has passed from the requests on time to the late requests."""
        latest_starts = self._latest_starts
        while latest_starts and latest_starts.key(latest_starts.first()) < now:
            sequence = latest_starts.first()
            self.remove(sequence)
            super().add(sequence)

    def _sort_again(self) -> None:
        """Computes all latest starts again with the new estimate, and counts all requests as on time.

        The next call of ``first`` finds the late requests again.
        """
        for sequence in self._latest_starts:
            self._latest_starts.set(sequence, self.latest_start(sequence))
        for sequence in list(super().__iter__()):
            super().remove(sequence)
            self.add(sequence)


def _has_changed(known: float, learnt: float) -> bool:
    return abs(learnt - known) > _RELEARN * known


def make_order(limits: SchedulerLimits) -> QueueOrder:
    """Creates the object that orders the waiting requests, as the policy in ``limits`` demands."""
    if limits.policy is Policy.SLO:
        return SloOrder(limits.ttft_objective, fairness=limits.fairness)
    return QueueOrder(fairness=limits.fairness)
