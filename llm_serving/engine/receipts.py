"""Why was this request slow? The answer for one that is being served, or was a while ago."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from llm_serving.engine.outputs import request_timings
from llm_serving.request import Request, RequestTimings
from llm_serving.telemetry.receipt import Phase

__all__ = ["RECENT_RECEIPTS", "ReceiptBook", "RequestReceipt", "receipt_of"]

RECENT_RECEIPTS = 4096
"""Receipts of ended requests that are kept: some megabytes at most."""

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
    """Where the time of one sequence went, up to a moment."""

    request_id: str
    tenant: str
    """Whose it is; nobody else is to see it."""
    priority: int
    state: str
    """What it is doing: a part of its time, or ``done``."""
    finish_reason: str | None
    num_prompt_tokens: int
    num_output_tokens: int
    timings: RequestTimings
    replica: int | None = 0
    """Of the model, which serves it or did last; None for one that has had none yet."""

    def to_json(self) -> dict[str, Any]:
        """As clients get it: times in milliseconds. ``parts_ms`` add up to ``e2e_ms``."""
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
            "e2e_ms": _ms(timings.e2e),
            "ttft_ms": None if timings.ttft is None else _ms(timings.ttft),
            "tpot_ms": None if timings.tpot is None else _ms(timings.tpot),
            "parts_ms": {name: _ms(seconds) for name, seconds in timings.parts.items()},
            "prefill_chunks": timings.num_chunks,
            "preemptions": timings.num_preemptions,
            "swaps": timings.num_swaps,
            "blocked": [
                {"reason": one.reason.value, "times": one.times, "ms": _ms(one.seconds)} for one in timings.blocked
            ],
            "blocked_by": list(timings.blocked_by),
        }


def receipt_of(request: Request, now: float, timings: RequestTimings | None = None) -> RequestReceipt:
    """The receipt at ``now``, on the engine's clock. ``timings`` are those of a request that was delivered: it is done.

    Any thread may call it.
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


class ReceiptBook:
    """The receipts of the requests that ended last, by id; the oldest makes room."""

    def __init__(self, size: int = RECENT_RECEIPTS) -> None:
        self._size = size
        self._receipts: OrderedDict[str, RequestReceipt] = OrderedDict()

    def __len__(self) -> int:
        return len(self._receipts)

    def add(self, receipt: RequestReceipt) -> None:
        """Keep it; one of the same id is replaced."""
        self._receipts.pop(receipt.request_id, None)
        self._receipts[receipt.request_id] = receipt
        if len(self._receipts) > self._size:
            self._receipts.popitem(last=False)

    def get(self, request_id: str) -> RequestReceipt | None:
        return self._receipts.get(request_id)


def _ms(seconds: float) -> float:
    return round(seconds * 1000.0, 3)
