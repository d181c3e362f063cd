"""Compares the server's log with the JSON of a load test, for the requests that are in both.

The request ids of the load test are also in the log, so requests of other clients can be left out. The latency that the
client measures is longer than the latency in the log. The difference is the time of HTTP, tokenizer, and the event
loops of client and server.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from llm_serving.telemetry.statistics import Distribution
from performance.terminal import format_number, format_summaries, format_table
from tools.log_analysis.analysis import LogAnalysis, analyze
from tools.log_analysis.reader import LineSource, LogEvent, LogReader
from tools.log_analysis.results import to_json

LATENCIES = ("ttft_ms", "tpot_ms", "e2e_s", "normalized_latency_ms")
FIGURES = ("mean", "p50", "p90", "p99")
TOTALS = ("requests", "prompt_tokens", "output_tokens", "total_time_s", "output_tokens_per_s")

Number = int | float


class ComparisonError(Exception):
    """Raised if a file is not a load test's JSON, or if the log has none of its requests."""


class ClientRequest(msgspec.Struct):
    """A request as the load test measured it."""

    request_id: str | None = None
    lateness_ms: float = 0.0
    ttft_ms: float | None = None
    e2e_s: float | None = None


class ClientResults(msgspec.Struct):
    per_request: list[ClientRequest]


@dataclass(slots=True)
class TransferTime:
    """Latencies that the client measured (since it sent a request) minus latencies in the log, in milliseconds."""

    ttft: Distribution = field(default_factory=Distribution)
    e2e: Distribution = field(default_factory=Distribution)
    lateness: Distribution = field(default_factory=Distribution)

    def add(self, client: ClientRequest, end: dict[str, Any]) -> None:
        self.lateness.add(client.lateness_ms)
        ttft_ms, e2e_ms = end.get("ttft_ms"), end.get("e2e_ms")
        if client.ttft_ms is not None and isinstance(ttft_ms, int | float):
            self.ttft.add(client.ttft_ms - ttft_ms)
        if client.e2e_s is not None and isinstance(e2e_ms, int | float):
            self.e2e.add(client.e2e_s * 1000.0 - e2e_ms)


def comparison(log: LineSource, client_json: Path) -> str:
    """Compares a log with a load test's JSON and returns tables as text. Raises ``ComparisonError``."""
    content, requests = _read_client(client_json)
    transfer = TransferTime()
    reader = LogReader(log)
    analysis = analyze(_events_of(reader, requests, transfer), reader)
    if not analysis.requests:
        raise ComparisonError(f"the log has none of the requests of {client_json}")
    return "\n\n".join(
        (
            f"  the {analysis.requests} requests of {client_json}, in the log and at the client",
            format_table(["figure", "server log", "client", "difference"], _rows(analysis, reader, content)),
            format_summaries(
                "client - server (ms)",
                [
                    ("time to first token", transfer.ttft.summary()),
                    ("end to end", transfer.e2e.summary()),
                    ("sent late (not included above)", transfer.lateness.summary()),
                ],
            ),
        )
    )


def _read_client(path: Path) -> tuple[dict[str, Any], dict[str, ClientRequest]]:
    """Reads a load test's JSON. Returns its content, and its requests by id."""
    try:
        data = path.read_bytes()
        results = msgspec.json.decode(data, type=ClientResults)
        content = msgspec.json.decode(data, type=dict[str, Any])
    except OSError as error:
        raise ComparisonError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ComparisonError(f"{path} is not the JSON of a load test: {error}") from error
    return content, {one.request_id: one for one in results.per_request if one.request_id is not None}


def _events_of(reader: LogReader, requests: dict[str, ClientRequest], transfer: TransferTime) -> Iterator[LogEvent]:
    for event in reader:
        request_id = event.fields.get("request_id")
        client = requests.get(request_id) if isinstance(request_id, str) else None
        if client is not None:
            yield event
            if event.name == "request_end":
                transfer.add(client, event.fields)


def _rows(analysis: LogAnalysis, reader: LogReader, client: dict[str, Any]) -> list[list[str]]:
    server = to_json(analysis, reader)
    pairs = [(name, server.get(name), client.get(name)) for name in TOTALS]
    for latency in LATENCIES:
        for figure in FIGURES:
            pairs.append((f"{latency} {figure}", _figure(server, latency, figure), _figure(client, latency, figure)))
    rows = []
    for name, ours, theirs in pairs:
        if isinstance(ours, Number) and isinstance(theirs, Number):
            difference = f"{100 * (theirs - ours) / ours:+.1f} %" if ours else "-"
            rows.append([name, _shown(ours), _shown(theirs), difference])
    return rows


def _shown(value: Number) -> str:
    return str(value) if isinstance(value, int) else format_number(value)


def _figure(results: dict[str, Any], latency: str, figure: str) -> Any:
    summary = results.get(latency)
    return summary.get(figure) if isinstance(summary, dict) else None
