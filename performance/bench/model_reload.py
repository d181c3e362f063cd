"""Measures the reload of a model under load: failed requests, the time of a reload, and the time between tokens."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

from llm_serving.telemetry.statistics import Summary, summarize
from performance.load.closed_loop import run_closed_loop
from performance.load.endpoint import Endpoint
from performance.load.options import LoadOptions
from performance.load.stream import RequestRecord
from performance.program import LoadTestError, client_threads

BEFORE_S = 10.0
"""Seconds before each reload whose times between tokens count as ``before``."""
PAUSE_S = 5.0
"""Seconds from the start of the load, or from a reload, until the next ``before`` begins. Meanwhile, the requests of
the old version complete.
"""
PROMPT_WORDS, OUTPUT_TOKENS = (8, 48), (128, 128)
NUM_PROMPTS, MAX_REQUESTS = 64, 1 << 20
"""Number of different prompts, and the maximum number of requests of a run. The run ends after the last reload."""

Window = tuple[float, float]
"""Begin and end on the clock of ``perf_counter``."""


@dataclass(frozen=True, slots=True)
class ReloadFigures:
    """The figures of several reloads with ``clients`` clients. Each client always has one request."""

    clients: int
    requests: int
    failures: dict[str, int]
    """Number of failed requests of the whole run, by kind of failure."""
    in_flight: list[int]
    """For each reload: number of requests that had begun before it and ended after its begin."""
    reload_s: list[float]
    tbt_before_ms: Summary
    """Times between two streamed pieces of a request, in the seconds before the reloads."""
    tbt_during_ms: Summary

    @classmethod
    def of(
        cls, clients: int, records: Sequence[RequestRecord], before: Sequence[Window], during: Sequence[Window]
    ) -> ReloadFigures:
        """Returns the figures of a run. ``before`` has the seconds before each reload, and ``during`` the reloads.

        Raises LoadTestError if no reload happened while requests ran.
        """
        flights = [sum(_is_running(record, begin) for record in records) for begin, _ in during]
        if not flights or not all(flights):
            raise LoadTestError(f"the numbers of requests that ran at the begin of the reloads are {flights}")
        return cls(
            clients=clients,
            requests=len(records),
            failures=dict(Counter(record.failure for record in records if record.failure is not None)),
            in_flight=flights,
            reload_s=[end - begin for begin, end in during],
            tbt_before_ms=summarize(gaps_ms(records, before, are_whole=True)),
            tbt_during_ms=summarize(gaps_ms(records, during, are_whole=False)),
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "clients": self.clients,
            "requests": self.requests,
            "failures": self.failures,
            "in_flight": self.in_flight,
            "reload_s": self.reload_s,
            "tbt_before_ms": self.tbt_before_ms.as_dict(),
            "tbt_during_ms": self.tbt_during_ms.as_dict(),
        }


def gaps_ms(records: Sequence[RequestRecord], windows: Sequence[Window], *, are_whole: bool) -> list[float]:
    """Returns the times between pieces in the windows. With ``are_whole``, a gap must begin and end in its window.

    Otherwise, a gap must overlap a window. A request that stalls during a reload gets its next piece after the reload,
    so this gap must count.
    """

    def counts(earlier: float, later: float) -> bool:
        if are_whole:
            return any(begin <= earlier and later <= end for begin, end in windows)
        return any(earlier < end and later > begin for begin, end in windows)

    gaps = (gap for record in records for gap in pairwise(record.piece_times))
    return [1000.0 * (later - earlier) for earlier, later in gaps if counts(earlier, later)]


def _is_running(record: RequestRecord, now: float) -> bool:
    return record.sent <= now and (record.end is None or record.end > now)


def measure_reloads(
    server: Endpoint, model: str, clients: int, rounds: int, reload: Callable[[], object]
) -> ReloadFigures:
    """Reloads a model ``rounds`` times while ``clients`` clients stream answers of it. ``reload`` sends the command.

    Raises LoadTestError if the load cannot start, or if the server refuses a reload.
    """
    options = LoadOptions(server, model=model, ignore_eos=True, prompt_len=PROMPT_WORDS, output_len=OUTPUT_TOKENS)
    prompts = options.requests(NUM_PROMPTS, options.seed)
    before, during = list[Window](), list[Window]()
    enough = threading.Event()
    with client_threads(1) as thread:
        requests = prompts * (MAX_REQUESTS // NUM_PROMPTS)
        load = thread.submit(run_closed_loop, options, requests, clients, enough=enough)
        try:
            for _ in range(rounds):
                time.sleep(PAUSE_S)
                begin = perf_counter()
                time.sleep(BEFORE_S)
                middle = perf_counter()
                reload()
                before.append((begin, middle))
                during.append((middle, perf_counter()))
            time.sleep(PAUSE_S)
        finally:
            enough.set()
        records = load.result().records
    return ReloadFigures.of(clients, records, before, during)
