"""The state of the engine and its replicas, as status pages and metrics show it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["EngineState", "EngineStatus", "ReplicaStatus"]


class EngineState(enum.Enum):
    """Whether requests are being served."""

    STARTING = "starting"
    """No agent has been ready yet. Requests wait."""
    READY = "ready"
    RECOVERING = "recovering"
    """All agents are being restarted. Requests wait and are computed again."""
    STOPPED = "stopped"
    """The engine has ended. Requests are refused."""


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """State and figures of one replica. ``waiting`` counts the requests that were placed there."""

    replica: int
    state: str
    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    steps: int
    preemptions: int
    swapped: int
    prefix_hit_tokens: int
    prefix_query_tokens: int
    outstanding_tokens: int = 0
    """Tokens that the replica must still compute if each of its requests gets its maximum output. The value is from the
    last placement. This field and the following ones are 0 if there is only one replica."""
    placed: Mapping[str, int] = field(default_factory=dict)
    """Requests that were placed there, by reason."""
    recalled: int = 0
    """Requests that were moved from there to another replica."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """State and figures of the engine. ``waiting`` also counts preempted requests."""

    state: str
    """A value of ``EngineState``."""
    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    steps: int
    """Steps that completed since the start."""
    last_step_age_s: float | None
    """Seconds since the last step completed. None before the first."""
    agents: list[dict[str, object]]
    preemptions: int
    swapped: int = 0
    """Requests whose keys and values are in host memory."""
    swaps: int = 0
    """Number of moves of a request to host memory."""
    kv_waste: float = 0.0
    """Fraction of the token positions of running requests' blocks that hold no token, 0 to 1."""
    prefix_hit_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""
    prefix_query_tokens: int = 0
    """Prompt tokens that were looked up in the prefix cache."""
    recorder_s: float = 0.0
    """Seconds of the engine thread that the flight recorders have taken."""
    replicas: list[ReplicaStatus] = field(default_factory=list)
