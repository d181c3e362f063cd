"""Writes logs for tests of the log analysis, with a clock that the test sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llm_serving.telemetry.log import EventLog

START = 1_700_000_000.0


class LogMaker:
    """Writes a log through EventLog, with its own clock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = START
        self.log = EventLog(path, mirror=False, clock=lambda: self.now)

    def event(self, at: float, name: str, **fields: Any) -> None:
        self.now = START + at
        self.log.event(name, **fields)

    def request(
        self, number: int, arrival: float, queue: float, prefill: float, decode: float, tokens: int, **fields: Any
    ) -> None:
        """Writes the events of a request. ``phases`` are in seconds, and the latencies are calculated from them."""
        name = fields.pop("request_id", f"r{number}")
        self.event(arrival, "request_arrival", request_id=name, api="completions", prompt_tokens=10, max_tokens=99)
        e2e = queue + prefill + decode
        end = {
            "request_id": name,
            "prompt_tokens": 10,
            "output_tokens": tokens,
            "total_tokens": 10 + tokens,
            "finish_reason": "stop",
            "queue_ms": queue * 1000,
            "prefill_ms": prefill * 1000,
            "decode_ms": decode * 1000,
            "delivery_ms": 0.0,
            "ttft_ms": (queue + prefill) * 1000,
            "tpot_ms": decode * 1000 / (tokens - 1) if tokens > 1 else None,
            "e2e_ms": e2e * 1000,
            "preemptions": 0,
        }
        self.event(arrival + e2e, "request_end", **(end | fields))

    def state(self, at: float, running: int, waiting: int, used: int = 0, **fields: Any) -> None:
        self.event(
            at,
            "engine_state",
            **{
                "running": running,
                "waiting": waiting,
                "blocks_used": used,
                "blocks_total": 100,
                "steps": 10,
                "prefill_steps": 2,
                "decode_steps": 8,
                "prefill_tokens": 20,
                "decode_tokens": 8 * running,
                "decode_batch_mean": float(running),
                "output_tokens_per_s": 50.0,
                "preemptions": 0,
                "mixed_steps": 3,
                "mixed_tokens": 30,
                "move_steps": 1,
                "kv_waste": 0.0625,
                "prefix_hit_tokens": 16,
                "prefix_query_tokens": 64,
            }
            | fields,
        )
