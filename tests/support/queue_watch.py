"""Checks that the order in which requests start obeys the queue's bounds, so that no request starves.

The watch uses only events that a client could see: arrivals, starts and tokens. It shares no data structure with the
queue, so its result is independent of the queue.
"""

from __future__ import annotations

from collections import Counter

from llm_serving.request import Request
from llm_serving.scheduler.limits import Policy, SchedulerLimits
from llm_serving.scheduler.output import ScheduledStep
from llm_serving.waiting.queue_order import DEFAULT_AGEING_S, INPUT_WEIGHT, OUTPUT_WEIGHT
from llm_serving.waiting.slo_order import LATE_SHARE


class QueueWatch:
    """Checks each start of a request against the bounds of the queue. Raises AssertionError for a violation."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._waiting: dict[str, Request] = {}
        """The waiting requests by id, in order of arrival."""
        self._started: set[str] = set()
        self._service: dict[int, Counter[str]] = {}
        """The service that each priority and tenant has received."""
        self._service_before: dict[int, dict[str, dict[str, Counter[str]]]] = {}
        """For each waiting request, by priority, tenant and id: the service that the tenants of its priority had
        received when the request arrived.
        """
        self._starts_left: dict[str, int] = {}
        """For each waiting request that is late for its objective: how many other requests may still start before it.
        """
        most_held = limits.max_num_seqs * limits.max_model_len
        self._fair_bound = 4 * max(INPUT_WEIGHT * limits.max_prompt_len, OUTPUT_WEIGHT * most_held)

    def arrived(self, request: Request, now: float) -> None:
        self._waiting[request.request_id] = request
        self._before(request)[request.request_id] = self._services(request.priority).copy()

    def ended(self, request: Request) -> None:
        self._forget(request.request_id)

    def scheduled(self, step: ScheduledStep, now: float) -> None:
        """Checks the start of each request that is in a step for the first time, in the order of the step."""
        self._drop_finished()
        for request in step.requests:
            if request.request_id in self._started:
                continue
            self._started.add(request.request_id)
            if self._limits.policy is Policy.SLO:
                self._check_late_share(request, now)
            else:
                self._check_order(request)
            self._forget(request.request_id)
            self._charge(request, INPUT_WEIGHT * len(request.prompt_token_ids))

    def got_token(self, request: Request) -> None:
        self._charge(request, OUTPUT_WEIGHT)

    def _forget(self, name: str) -> None:
        if (request := self._waiting.pop(name, None)) is not None:
            del self._before(request)[name]
        self._starts_left.pop(name, None)

    def _drop_finished(self) -> None:
        """Forgets requests that the scheduler has ended because of their deadline."""
        for name in [name for name, request in self._waiting.items() if request.is_finished]:
            self._forget(name)

    def _before(self, request: Request) -> dict[str, Counter[str]]:
        """Returns ``_service_before`` of the waiting requests with the priority and the tenant of ``request``."""
        return self._service_before.setdefault(request.priority, {}).setdefault(self._tenant(request), {})

    def _services(self, priority: int) -> Counter[str]:
        return self._service.setdefault(priority, Counter())

    def _tenant(self, request: Request) -> str:
        return request.tenant if self._limits.fairness else ""

    def _check_order(self, started: Request) -> None:
        """Checks that ``started`` belongs to the priority whose oldest request should come first.

        For this order, each level of priority counts as ``DEFAULT_AGEING_S`` seconds. Within a priority, the requests
        of a tenant start in order of arrival.
        """
        oldest: dict[int, Request] = {}
        for request in self._waiting.values():
            oldest.setdefault(request.priority, request)
        ages = {p: (request.arrival_time + DEFAULT_AGEING_S * p, p) for p, request in oldest.items()}
        best = min(ages, key=ages.__getitem__)
        assert started.priority == best, f"{started.request_id} starts before {oldest[best].request_id}"
        before = next(
            r
            for r in self._waiting.values()
            if r.priority == started.priority and self._tenant(r) == self._tenant(started)
        )
        assert before is started, f"{started.request_id} starts before {before.request_id}, which came earlier"

    def _check_late_share(self, started: Request, now: float) -> None:
        """Checks that no late request waits for too many starts of other requests.

        The n-th waiting request may wait for at most n * ``LATE_SHARE`` starts of other requests. The check applies
        while all waiting requests have one priority and tenant.
        """
        if len({(r.priority, self._tenant(r)) for r in self._waiting.values()}) > 1:
            self._starts_left.clear()
            return
        for place, (name, request) in enumerate(self._waiting.items()):
            objective = self._limits.ttft_objective if request.ttft_objective is None else request.ttft_objective
            if request is started or now <= request.arrival_time + objective:
                continue
            left = self._starts_left.setdefault(name, LATE_SHARE * (place + 1))
            assert left > 0, f"{name} is late and has been passed over too often"
            self._starts_left[name] = left - 1

    def _charge(self, request: Request, service: int) -> None:
        """Adds ``service`` to the service of the request's tenant, and checks the fairness bound.

        No tenant may get more service than a waiting tenant of the same priority plus the bound.
        """
        services, tenant = self._services(request.priority), self._tenant(request)
        services[tenant] += service
        if self._limits.policy is Policy.SLO:
            # Policy ``slo`` has no fairness bound, because late requests follow all others; see _check_late_share.
            return
        for own, waiting in self._service_before.get(request.priority, {}).items():
            for name, before in waiting.items() if own != tenant else ():
                ahead = services[tenant] - before[tenant] - (services[own] - before[own])
                assert ahead <= self._fair_bound, f"{tenant!r} got {ahead} more than {own!r} while {name} waits"
