"""The clients of a simulation: their requests, the tokens that they receive, and checks of these tokens."""

from __future__ import annotations

import struct
from collections import Counter
from typing import Any

from llm_serving.errors import AgentLostTwiceError
from llm_serving.request import FinishReason, Request
from llm_serving.scheduler.output import RequestUpdate, StepResult
from llm_serving.telemetry.receipt import microseconds
from support.fakes import expected_samples

__all__ = ["SimulatedClients"]


class SimulatedClients:
    """Sends requests to ``scheduler``, which is a Scheduler or a Router. The test sets the clock."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.now = 0.0
        self.requests: dict[str, Request] = {}
        self.streams: dict[str, list[int]] = {}
        self.log_probabilities: dict[str, list[bytes]] = {}
        """The bits of the logit and the logsumexp of each token that a request received."""
        self.ended: dict[str, FinishReason] = {}
        self.cut: set[str] = set()
        """Requests that ended before their last token, for example because their client aborted them."""
        self.expired: set[str] = set()
        """Requests that the scheduler ended because their deadline passed."""
        self.seen: Counter[str] = Counter()
        """Number of events by name, so that a test can check that every kind of event happened."""

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add_request(request)
            self.requests[request.request_id] = request
            self.streams[request.request_id] = []
            self.log_probabilities[request.request_id] = []

    def end(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a request on behalf of its client."""
        update = self.scheduler.finish_request(request_id, reason, self.now)
        assert (update is None) == (request_id in self.ended)
        if update is not None:
            self.cut.add(request_id)
            self.take([update])
            self.seen["ends from outside"] += 1
        self.check()

    def fail_all(self) -> None:
        """Fails all requests, as an engine does after a fatal error."""
        updates = self.scheduler.fail_all("the end", self.now)
        self.cut.update(update.request.request_id for update in updates)
        self.take(updates)
        self.check()

    def take_ended(self) -> None:
        """Takes the requests that the scheduler has ended: their deadline has passed, or they have lost their agent
        twice.
        """
        updates = self.scheduler.take_ended()
        for update in updates:
            assert update.error is not None
            if update.error == AgentLostTwiceError.TEXT:
                assert update.request.num_losses > 1
                self.cut.add(update.request.request_id)
                self.seen["agents lost twice"] += 1
                continue
            self.seen["deadlines"] += 1
            assert update.request.deadline is not None
            assert update.request.deadline <= self.now
            self.cut.add(update.request.request_id)
            self.expired.add(update.request.request_id)
        self.take(updates)

    def take(self, updates: list[RequestUpdate], result: StepResult | None = None) -> None:
        """Takes updates. If they have tokens, ``result`` is the result that has their log-probabilities."""
        for update in updates:
            request = update.request
            assert request.request_id not in self.ended, "an update after the last one"
            if update.token_id is not None:
                assert result is not None, "only results have tokens"
                self.streams[request.request_id].append(update.token_id)
                bits = _bits(result.logits[update.index], result.logsumexps[update.index])
                self.log_probabilities[request.request_id].append(bits)
            if request.is_finished and not update.num_later:
                assert request.finish_reason is not None
                self.ended[request.request_id] = request.finish_reason
                self._check_receipt(request)

    def _check_receipt(self, request: Request) -> None:
        receipt = request.receipt
        assert request.finish_time is not None
        assert sum(receipt.phase_us) == microseconds(request.finish_time) - receipt.start_us
        assert receipt.preemptions + receipt.swaps == request.num_preemptions
        self.seen["swaps"] += receipt.swaps
        self.seen["preemptions"] += request.num_preemptions

    def check(self) -> None:
        """Checks the invariants that hold at any time."""
        self.scheduler.check_integrity()

    def check_texts(self, max_model_len: int) -> None:
        """Checks that every request ended with the text and the log-probabilities that it has when it runs alone."""
        assert self.wrong_texts(max_model_len) == []

    def wrong_texts(self, max_model_len: int) -> list[str]:
        """Returns what differs from a run alone: names of requests, or ``log-probabilities of`` and a name.

        A request is listed at most once. All requests must have ended.
        """
        assert self.ended.keys() == self.requests.keys()
        wrong = []
        for name, request in self.requests.items():
            expected = expected_samples(request, max_model_len)
            if name in self.cut:
                expected = expected[: len(self.streams[name])]
            expected_bits = [_bits(sample.logit, sample.logsumexp) for sample in expected]
            is_right = self.streams[name] == [sample.token_id for sample in expected] == request.output_token_ids
            if not is_right:
                wrong.append(name)
            elif self.log_probabilities[name] != expected_bits:
                wrong.append(f"log-probabilities of {name}")
        return wrong


def _bits(logit: float, logsumexp: float) -> bytes:
    return struct.pack("<2d", logit, logsumexp)
