"""Receipts: the time that a request spent in each phase.

A receipt exists while a request is served and for some time after its end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from llm_serving.request import Blocked, Request, RequestTimings
from llm_serving.telemetry.receipt import BlockReason, Phase, Receipt, microseconds
from llm_serving.telemetry.statistics import time_per_output_token

RECENT_RECEIPTS = 4096
"""Number of receipts of ended requests that are kept. These receipts take a few megabytes."""

_STATES = {
    Phase.QUEUED: "queued",
    Phase.PREFILL: "prefill",
    Phase.DECODE: "decode",
    Phase.PREEMPTED: "preempted",
    Phase.SWAPPED: "swapped",
    Phase.RESTARTED: "restarted",
    Phase.DONE: "delivery",
}


@dataclass(frozen=True, slots=True)
class RequestReceipt:
    """The time that one request has spent in each phase, up to a given time."""

    request_id: str
    tenant: str
    """Owner of the request. Other tenants may not read the receipt."""
    priority: int
    state: str
    """Present phase of the sequence, for example ``queued`` or ``decode``, or ``done`` after its end."""
    finish_reason: str | None
    num_prompt_tokens: int
    num_output_tokens: int
    timings: RequestTimings
    replica: int | None = 0
    """The replica that serves the sequence, or served it last. None if it has not been placed yet."""

    def to_json(self) -> dict[str, Any]:
        """Returns the receipt as the JSON object for clients.

        Times are milliseconds. The sum of ``parts_ms`` is ``e2e_ms``.
        """
        timings = self.timings
        return {
            "request_id": self.request_id,
            "state": self.state,
            "finish_reason": self.finish_reason,
            "priority": self.priority,
            "replica": self.replica,
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": timings.num_cached_tokens,
            "output_tokens": self.num_output_tokens,
            "e2e_ms": in_ms(timings.e2e),
            "ttft_ms": None if timings.ttft is None else in_ms(timings.ttft),
            "tpot_ms": None if timings.tpot is None else in_ms(timings.tpot),
            "parts_ms": {name: in_ms(seconds) for name, seconds in timings.parts.items()},
            "prefill_chunks": timings.num_chunks,
            "preemptions": timings.num_preemptions,
            "swaps": timings.num_swaps,
            "blocked": [
                {"reason": one.reason.value, "times": one.times, "ms": in_ms(one.seconds)} for one in timings.blocked
            ],
            "blocked_by": list(timings.blocked_by),
        }


class ReceiptBook:
    """The receipts of requests that ended recently, by request id.

    If the book is full, a new receipt replaces the oldest one.
    """

    def __init__(self, size: int = RECENT_RECEIPTS) -> None:
        self._size = size
        self._receipts: OrderedDict[str, RequestReceipt] = OrderedDict()

    def add(self, receipt: RequestReceipt) -> None:
        """Keeps the receipt of a request that has ended. An earlier receipt with the same request id is replaced."""
        self._receipts.pop(receipt.request_id, None)
        self._receipts[receipt.request_id] = receipt
        if len(self._receipts) > self._size:
            self._receipts.popitem(last=False)

    def get(self, request_id: str) -> RequestReceipt | None:
        return self._receipts.get(request_id)

    def latest(self, count: int) -> list[RequestReceipt]:
        """Returns the ``count`` latest receipts or all if there are fewer, the newest first."""
        return list(islice(reversed(self._receipts.values()), count))


def receipt_of(request: Request, now: float, timings: RequestTimings | None = None) -> RequestReceipt:
    """Returns the receipt of a request at ``now``, on the engine's clock. Any thread may call this function.

    ``timings``: the final times of a request whose response has been delivered. The state of the receipt is then
    ``done``.
    """
    reason = request.finish_reason
    return RequestReceipt(
        request_id=request.request_id,
        tenant=request.tenant,
        priority=request.priority,
        state="done" if timings is not None else _STATES[request.receipt.phase],
        finish_reason=None if reason is None else reason.value,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_output_tokens=len(request.output_token_ids),
        timings=request_timings(request, now) if timings is None else timings,
        replica=request.replica,
    )


def request_timings(request: Request, now: float | None = None) -> RequestTimings:
    """Returns the timings of a request until ``now``: how long it was in each phase.

    If the request has ended, ``now`` may be None. The timings then end with its last step. With ``now``, the time after
    the last step counts as ``delivery``.
    """
    receipt = request.receipt
    has_ended = receipt.phase is Phase.DONE
    if now is None and not has_ended:
        raise AssertionError(f"{request.request_id} has not ended")
    phase_us = receipt.phase_us if now is None else receipt.phases_until(now)
    delivery_us = max(0, microseconds(now) - receipt.end_us) if has_ended and now is not None else 0
    tokenise_us = max(0, receipt.start_us - microseconds(request.arrival_time))
    first_token, end = request.first_token_time, request.finish_time
    tpot = None
    if first_token is not None and end is not None:
        tpot = time_per_output_token(first_token, end, len(request.output_token_ids))
    return RequestTimings(
        tokenise=tokenise_us / 1e6,
        queue=phase_us[Phase.QUEUED] / 1e6,
        prefill=phase_us[Phase.PREFILL] / 1e6,
        decode=phase_us[Phase.DECODE] / 1e6,
        preempted=phase_us[Phase.PREEMPTED] / 1e6,
        swapped=phase_us[Phase.SWAPPED] / 1e6,
        restarted=phase_us[Phase.RESTARTED] / 1e6,
        delivery=delivery_us / 1e6,
        e2e=(tokenise_us + sum(phase_us) + delivery_us) / 1e6,
        ttft=None if first_token is None else first_token - request.arrival_time,
        tpot=tpot,
        num_preemptions=request.num_preemptions,
        num_swaps=receipt.swaps,
        num_chunks=receipt.chunks,
        num_cached_tokens=request.num_cached_tokens,
        blocked=_blocked(receipt, receipt.blocked_us if now is None else receipt.blocked_until(now)),
        blocked_by=tuple(receipt.blockers),
    )


def _blocked(receipt: Receipt, blocked_us: Mapping[BlockReason, int]) -> tuple[Blocked, ...]:
    times = receipt.num_blocked.copy()
    blocked = [
        Blocked(reason, times.get(reason, 0), blocked_us.get(reason, 0) / 1e6)
        for reason in BlockReason
        if reason in times or reason in blocked_us
    ]
    return tuple(sorted(blocked, key=lambda one: (-one.seconds, -one.times, one.reason.value)))


def in_ms(seconds: float) -> float:
    """Returns seconds as milliseconds, rounded to a microsecond, for the log and the receipts."""
    return round(seconds * 1000.0, 3)
