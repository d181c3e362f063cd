"""The section ``kv_events_config`` of the configuration: events of the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass

from llm_serving.config.schema import own


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """Events of the prefix cache over ZeroMQ, see `docs/kv_events.md`. They contain the token ids of prompts."""

    enabled: bool = own(
        False, "Publish which blocks are cached, with their token ids. Needs `pip install 'llm-serving[events]'`."
    )
    endpoint: str = own(
        "tcp://127.0.0.1:5557",
        "Address of the socket that publishes events (PUB): `tcp://ADDRESS:PORT` or `ipc:///PATH`.",
    )
    replay_endpoint: str | None = own(
        "tcp://127.0.0.1:5558",
        "Address of the socket that repeats batches of events that a subscriber has missed (ROUTER).",
        null="no batches are repeated",
    )
    allow_remote: bool = own(
        False,
        "Allow addresses that are not loopback. The events are neither encrypted nor protected by a key, so use a "
        "firewall or a network policy.",
    )
    topic: str | None = own(
        None, "Topic of all messages. Some routers expect `kv@SERVER@MODEL`.", null="the empty topic"
    )
    format: str = own(
        "array",
        "Form of an event. `array`: as vLLM published until June 2026; all routers read this form. `map`: as vLLM has "
        "published since then.",
        choices=("array", "map"),
    )
    buffer_batches: int = own(
        10_000, "Number of batches that can be repeated.", unit="batches", low=1, high=1_000_000
    )
    max_waiting_events: int = own(
        100_000,
        "Maximum number of changes that wait for the publishing thread. Further changes are dropped, counted and "
        "visible as a gap in the sequence numbers.",
        unit="events",
        low=1,
        high=10_000_000,
    )
