"""Analyses the events of a log in one pass: counts, distributions, slowest requests, values over time."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tools.log_analysis.reader import LogEvent, LogReader
from tools.log_analysis.records import EngineState, RequestEnd
from tools.log_analysis.timeline import Timeline
from tools.log_analysis.totals import EngineTotals, Phases
from tools.log_analysis.why_slow import WhySlow

SLOWEST = 10
"""Number of slowest requests that are listed."""
KEPT_MESSAGES = 20
"""Number of last errors and warnings that are kept."""
MAX_NAMES = 200
"""Maximum number of event names, APIs and finish reasons that are counted separately."""
MAX_REPLICAS = 256
"""Maximum number of replicas that are counted."""
MAX_OPEN_REQUESTS = 200_000
"""Maximum number of requests without an end that are kept."""


@dataclass(frozen=True, slots=True)
class Message:
    """A warning or error from the log."""

    time: float
    level: str
    event: str
    text: str


@dataclass(slots=True)
class RequestTotals:
    """Sums over ended requests. ``cached_tokens`` counts prompt tokens found in the prefix cache."""

    requests: int = 0
    completed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0

    def add_request(self, end: RequestEnd) -> None:
        self.requests += 1
        self.completed += end.is_completed
        self.prompt_tokens += end.prompt_tokens
        self.cached_tokens += end.cached_tokens
        self.output_tokens += end.output_tokens
        self.preemptions += end.preemptions


@dataclass(slots=True)
class LogAnalysis(RequestTotals):
    """The analysis of the events that ``add`` has received."""

    first_time: float | None = None
    last_time: float | None = None
    starts: list[float] = field(default_factory=list)
    """Times at which the server started. Only the latest 100 are kept."""
    runs: int = 0
    earlier_runs: int = 0
    """Number of server runs in the log that were left out because of ``--last-run``."""
    config: dict[str, Any] = field(default_factory=dict)
    """The config of the last server start."""
    events: Counter[str] = field(default_factory=Counter)
    apis: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    objectives: Counter[str] = field(default_factory=Counter)
    """Requests with objectives: ``met`` if they met all of them (goodput), otherwise ``missed``."""
    max_token_len: int = 0
    max_token_request: str | None = None
    preempted_requests: int = 0
    swaps: int = 0
    replicas: dict[int, RequestTotals] = field(default_factory=dict)
    """The ended requests of each replica; empty if the log does not name replicas."""
    active_seconds: float = 0.0
    unfinished: int = 0
    refused: int = 0
    """Requests that were rejected after their arrival, for example because the queue was full."""
    agents_back: int = 0
    """Number of agents that became ready after an agent was lost."""
    phases: Phases = field(default_factory=Phases)
    why_slow: WhySlow = field(default_factory=WhySlow)
    engine: EngineTotals = field(default_factory=EngineTotals)
    timeline: Timeline = field(default_factory=Timeline)
    messages: deque[Message] = field(default_factory=lambda: deque(maxlen=KEPT_MESSAGES))
    warnings: int = 0
    errors: int = 0
    _slowest: list[tuple[float, int, RequestEnd]] = field(default_factory=list)
    _open: set[str] = field(default_factory=set)
    _agents_away: int = 0
    _span: tuple[float, float] | None = None

    @property
    def slowest(self) -> list[RequestEnd]:
        """The slowest completed requests, slowest first."""
        return [end for _, _, end in sorted(self._slowest, key=lambda entry: (-entry[0], -entry[1]))]

    @property
    def unfinished_requests(self) -> int:
        """Number of requests that arrived but have no end in the log."""
        return self.unfinished + len(self._open)

    @property
    def agent_restarts(self) -> int:
        """Number of agent restarts: the larger of the ``agent_restart`` events and the agents that became ready again.
        """
        return max(self.events.get("agent_restart", 0), self.agents_back)

    @property
    def total_time_s(self) -> float:
        """Seconds from the first arrival to the last end of a request, summed over the server's runs."""
        return self.active_seconds + (self._span[1] - self._span[0] if self._span else 0.0)

    def add(self, event: LogEvent) -> None:
        """Adds an event. Raises ``msgspec.ValidationError`` if a known event has fields of wrong types."""
        handler = _HANDLERS.get(event.name)
        if handler is not None:
            handler(self, event)
        if not self.events and event.name != "server_start":
            self.runs += 1  # the log begins in the middle of a run
        _count(self.events, event.name)
        self.first_time = event.time if self.first_time is None else min(self.first_time, event.time)
        self.last_time = event.time if self.last_time is None else max(self.last_time, event.time)
        if event.level in ("warning", "error"):
            self._add_message(event)

    def _server_start(self, event: LogEvent) -> None:
        self.runs += 1
        self.starts = [*self.starts[-99:], event.time]
        config = event.fields.get("config")
        self.config = config if isinstance(config, dict) else {}
        self.active_seconds, self._span = self.total_time_s, None
        self.unfinished += len(self._open)
        self._open.clear()
        self._agents_away = 0

    def _request_arrival(self, event: LogEvent) -> None:
        _count(self.apis, str(event.fields.get("api", "?")))
        request_id = event.fields.get("request_id")
        if isinstance(request_id, str) and len(self._open) < MAX_OPEN_REQUESTS:
            self._open.add(request_id)
        self._extend_span(event.time)
        self.timeline.add(event.time, "arrivals", 1.0)

    def _request_end(self, event: LogEvent) -> None:
        end = msgspec.convert(event.fields, RequestEnd)
        self.add_request(end)
        _count(self.finish_reasons, end.finish_reason)
        self._open.discard(end.request_id)
        started = event.time - (end.e2e_ms or 0.0) / 1000.0
        self._extend_span(started)
        self._extend_span(event.time)
        self.preempted_requests += end.preemptions > 0
        self.swaps += end.swaps
        if end.replica is not None and (end.replica in self.replicas or len(self.replicas) < MAX_REPLICAS):
            self.replicas.setdefault(end.replica, RequestTotals()).add_request(end)
        if end.objectives_met:
            _count(self.objectives, "met" if end.objectives_met.get("both") else "missed")
        if end.total_tokens > self.max_token_len:
            self.max_token_len, self.max_token_request = end.total_tokens, end.request_id
        self.timeline.add(event.time, "ends", 1.0)
        if not end.is_completed:
            return
        self.phases.add(end)
        self.why_slow.add(end)
        if end.ttft_ms is not None:
            self.timeline.add(started, "ttft_ms", end.ttft_ms)
        entry = (end.e2e_ms or 0.0, -self.requests, end)
        if len(self._slowest) < SLOWEST:
            heapq.heappush(self._slowest, entry)
        else:
            heapq.heappushpop(self._slowest, entry)

    def _lines_suppressed(self, event: LogEvent) -> None:
        """Counts refusals that the server did not log one by one, because there were too many in a second."""
        number = event.fields.get("lines")
        if event.fields.get("of") == "request_refused" and isinstance(number, int):
            self.refused += max(0, number)

    def _request_refused(self, event: LogEvent) -> None:
        """Counts a rejected HTTP request, and removes its sequences from the open requests.

        The id of a sequence is the id of the request, followed by a number.
        """
        self.refused += 1
        request_id = str(event.fields.get("request_id"))
        self._open.discard(request_id)
        number = 0
        while f"{request_id}-{number}" in self._open:
            self._open.discard(f"{request_id}-{number}")
            number += 1

    def _agent_lost(self, event: LogEvent) -> None:
        self._agents_away += 1

    def _agent_ready(self, event: LogEvent) -> None:
        if self._agents_away:
            self._agents_away -= 1
            self.agents_back += 1

    def _engine_state(self, event: LogEvent) -> None:
        state = msgspec.convert(event.fields, EngineState)
        self.engine.add(state)
        for name, value in (
            ("running", state.running),
            ("waiting", state.waiting),
            ("swapped", state.swapped),
            ("kv_use", state.kv_use),
            ("kv_waste", state.kv_waste if state.running else None),
            ("kv_use_while_waiting", state.kv_use if state.waiting else None),
            ("decode_batch", state.decode_batch_mean if state.decode_steps else None),
            ("output_tokens_per_s", state.output_tokens_per_s),
        ):
            if value is not None:
                self.timeline.add(event.time, name, float(value))

    def _extend_span(self, time: float) -> None:
        first, last = self._span or (time, time)
        self._span = (min(first, time), max(last, time))

    def _add_message(self, event: LogEvent) -> None:
        if event.level == "error":
            self.errors += 1
        else:
            self.warnings += 1
        text = str(event.fields.get("message", ""))
        others = {key: value for key, value in event.fields.items() if key not in ("time", "level", "event", "message")}
        if others:
            text += f" {others}"
        self.messages.append(Message(event.time, event.level, event.name, text[:500]))


_HANDLERS = {
    "server_start": LogAnalysis._server_start,
    "request_arrival": LogAnalysis._request_arrival,
    "request_end": LogAnalysis._request_end,
    "request_refused": LogAnalysis._request_refused,
    "log_lines_suppressed": LogAnalysis._lines_suppressed,
    "engine_state": LogAnalysis._engine_state,
    "agent_lost": LogAnalysis._agent_lost,
    "agent_ready": LogAnalysis._agent_ready,
}


def _count(counter: Counter[str], name: str) -> None:
    counter[name if name in counter or len(counter) < MAX_NAMES else "(others)"] += 1


def analyze(events: Iterable[LogEvent], reader: LogReader, *, last_run: bool = False) -> LogAnalysis:
    """Analyses all events, or with ``last_run`` the events since the last server start.

    ``reader`` counts events with wrong fields as unreadable lines.
    """
    analysis = LogAnalysis()
    for event in events:
        if last_run and event.name == "server_start":
            analysis = LogAnalysis(earlier_runs=analysis.earlier_runs + analysis.runs)
        try:
            analysis.add(event)
        except msgspec.ValidationError as error:
            reader.reject(f"{event.name}: {error}")
    return analysis
