"""The status of the engine and its replicas, which ``/server_info`` and the metrics show."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from llm_serving.kvstore.store import TierFigures
from llm_serving.scheduler.figures import Figures

if TYPE_CHECKING:
    from llm_serving.routing.pools import PoolStatus


class EngineState(enum.Enum):
    """State of the engine: whether it serves requests."""

    STARTING = "starting"
    """No agent has been ready yet. Requests wait."""
    READY = "ready"
    RECOVERING = "recovering"
    """All agents are being restarted. Requests wait and are computed again."""
    STOPPED = "stopped"
    """The engine has ended. Requests are refused."""


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """State and figures of one replica. Requests that wait in the router's own queue are not in the figures."""

    replica: int
    state: str
    figures: Figures
    steps: int
    outstanding_tokens: int = 0
    """Number of tokens that the replica must still compute if each of its requests gets its maximum output.

    The router updates the value when it places a request. With only one replica, there is no router, so the value is 0.
    ``placed`` is then empty, and ``recalled`` is 0.
    """
    placed: Mapping[str, int] = field(default_factory=dict)
    """Number of requests that the router placed at the replica, by the reason for choosing this replica."""
    recalled: int = 0
    """Number of requests that the router moved from the replica to another one."""
    tiers: TierFigures | None = None
    """Counts of the KV tiers. None without KV tiers."""

    def as_json(self) -> dict[str, Any]:
        """Returns the status as a JSON object with the member names of ``/server_info``."""
        return {
            "replica": self.replica,
            "state": self.state,
            "steps": self.steps,
            **self.figures.as_json(),
            "outstanding_tokens": self.outstanding_tokens,
            "placed": dict(self.placed),
            "recalled": self.recalled,
            **({} if self.tiers is None else {"kv_tiers": asdict(self.tiers)}),
        }


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """State and figures of the engine."""

    state: str
    """A value of ``EngineState``."""
    figures: Figures
    steps: int
    """Number of steps that completed since the engine started."""
    last_step_age_s: float | None
    """Seconds since the last step completed. None before the first."""
    agents: list[dict[str, object]]
    recorder_s: float = 0.0
    """Seconds of the engine thread that the flight recorders have taken."""
    replicas: list[ReplicaStatus] = field(default_factory=list)
    hand_overs: Mapping[str, float] | None = None
    """Counts of the hand-overs between prefill and decode replicas. None if replicas have no roles."""
    pools: Sequence[PoolStatus] = ()
    """The pools of replicas by prompt length. Empty if there are none."""
    awaits_retry: bool = False
    """Whether a request was refused because no node had ready agents, and its client may try again."""

    @property
    def waiting(self) -> int:
        """Number of requests in the queue, plus 1 if ``awaits_retry``, so that an autoscaler starts nodes."""
        return self.figures.waiting + self.awaits_retry

    def as_json(self) -> dict[str, Any]:
        """Returns the status as a JSON object with the member names of ``/server_info``."""
        return {
            "state": self.state,
            "steps": self.steps,
            "last_step_age_s": self.last_step_age_s,
            **self.figures.as_json(),
            "agents": self.agents,
            "replicas": [replica.as_json() for replica in self.replicas],
            **({} if self.hand_overs is None else {"hand_overs": dict(self.hand_overs)}),
            **({"pools": [pool.as_json() for pool in self.pools]} if self.pools else {}),
        }
