"""Defines the time that the server process adds to a step: engine thread, transfer to the agent and back, and HTTP.

The defaults for the engine thread come from ``performance/bench_engine_host.py``. On two cores of an AMD EPYC (Zen 4)
it measured 57 us per step and 1.7 us per sequence of the step. This time has two parts. The result of a step (reading,
updating, text) takes 32 us + 1.25 us per sequence. Scheduling and writing the next step takes 25 us + 0.45 us per
sequence. These times delay the device only if no other step waits in the agent's queue.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HostModel"]


@dataclass(frozen=True, slots=True)
class HostModel:
    """Times that the server process needs for steps and requests, in seconds."""

    result_s: float = 32e-6
    """Time of the engine thread for the result of a step."""
    result_seq_s: float = 1.25e-6
    """Additional time of the engine thread for the result of each sequence of a step."""
    send_s: float = 25e-6
    """Time of the engine thread to schedule and write a step. ``send_seq_s`` is added for each sequence."""
    send_seq_s: float = 0.45e-6
    request_s: float = 20e-6
    """Time of the engine thread to accept a request."""
    to_agent_s: float = 60e-6
    """Time from the written step slot to the agent's queue: a frame over a socket, and a thread that wakes up."""
    from_agent_s: float = 60e-6
    """Time from the agent's result to the engine thread."""
    interrupt_s: float = 0.0
    """Delay of the running step by an arriving request, because HTTP and client share the device's processor cores.

    The delay is 0 if HTTP and client do not use the cores of the device, for example with an NPU.
    """
    accept_s: float = 600e-6
    """Time from a request's first byte to the engine's queue: HTTP, JSON, checks and tokenizer."""
    deliver_s: float = 150e-6
    """Time from the engine thread to the client's socket, for a step's first piece of output. Two threads wake up."""
    deliver_piece_s: float = 15e-6
    """Additional delivery time of a piece of output, for each piece of the same step that is delivered earlier."""
