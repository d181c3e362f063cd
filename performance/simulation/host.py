"""What the server process adds to a step, in seconds: the engine thread, the way to the agent and back, the edge.

``performance/bench_engine_host.py`` measures the engine thread: 57 us a step and 1.7 us a sequence on two cores of an
AMD EPYC (Zen 4), of which taking an answer in (reading, updating, text) is 32 us and 1.25 us, composing and writing
the next step 25 us and 0.45 us. While a step waits in the agent's queue the device does not feel them.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HostModel"]


@dataclass(frozen=True, slots=True)
class HostModel:
    """Times of the control plane."""

    answer_s: float = 32e-6
    """Engine thread: one answered step ..."""
    answer_seq_s: float = 1.25e-6
    """... and each of its sequences."""
    send_s: float = 25e-6
    """Engine thread: one step put together and written ..."""
    send_seq_s: float = 0.45e-6
    request_s: float = 20e-6
    """Engine thread: one request taken in."""
    to_agent_s: float = 60e-6
    """From the written slot to the agent's queue: a frame over a socket, a thread woken."""
    from_agent_s: float = 60e-6
    """From the agent's answer to the engine thread."""
    interrupt_s: float = 0.0
    """What a request that comes takes from the step that runs: the edge and the client, where they share the device's
    processor cores. Nothing from a device with cores of its own."""
    accept_s: float = 600e-6
    """Edge: from a request's first byte to the engine's queue: HTTP, JSON, checks, tokenizer."""
    deliver_s: float = 150e-6
    """From the engine thread's hand-over to the client's socket: a wake-up of the event loop and of the client ..."""
    deliver_piece_s: float = 15e-6
    """... and each piece of the same step before it."""
