"""How the engine is doing: for the status pages, and as a periodic line of the log."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llm_serving.routing.replica import ReplicaScheduler
from llm_serving.scheduler.output import ScheduledStep, StepKind
from llm_serving.scheduler.protocols import Figures, RequestFront

if TYPE_CHECKING:
    from llm_serving.engine.replica import Replica

__all__ = ["EngineState", "EngineStatus", "ReplicaStatus", "StateLine"]


class EngineState(enum.Enum):
    """Whether requests are being served."""

    STARTING = "starting"
    """No agent has been ready yet; requests wait."""
    READY = "ready"
    RECOVERING = "recovering"
    """An agent was lost and is being restarted; requests wait and will be recomputed."""
    STOPPED = "stopped"
    """For good; requests are refused."""


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica of the model. ``waiting`` are requests that have been placed there."""

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
    """Tokens to be computed for its requests if each gets all the output it may, when a request was last placed;
    only where there are several replicas, as what follows."""
    placed: Mapping[str, int] = field(default_factory=dict)
    """Requests that were placed there, by why."""
    recalled: int = 0
    """Those that went elsewhere again."""

    @classmethod
    def of(cls, replica: Replica) -> ReplicaStatus:
        """Read off, by any thread."""
        scheduler, figures = replica.scheduler, replica.scheduler.figures
        status = cls(
            replica=replica.index,
            state=replica.state,
            running=figures.num_running,
            waiting=max(0, figures.num_waiting),
            free_blocks=figures.num_free_blocks,
            total_blocks=figures.num_blocks,
            steps=replica.num_steps,
            preemptions=figures.num_preemptions,
            swapped=figures.num_swapped,
            prefix_hit_tokens=figures.prefix_hit_tokens,
            prefix_query_tokens=figures.prefix_query_tokens,
        )
        if not isinstance(scheduler, ReplicaScheduler):
            return status
        placed = {why.value: number for why, number in scheduler.num_placed.items()}
        return dataclasses.replace(
            status, outstanding_tokens=scheduler.load, placed=placed, recalled=scheduler.num_recalled
        )


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A picture of the engine at a moment. ``waiting`` counts preempted requests, too."""

    state: str
    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    steps: int
    """Steps answered since the start."""
    last_step_age_s: float | None
    """Seconds since a step was answered; None before the first."""
    agents: list[dict[str, object]]
    preemptions: int
    swapped: int = 0
    """Requests whose keys and values are in host memory now."""
    swaps: int = 0
    """Times a request left for host memory."""
    kv_waste: float = 0.0
    """Share of the running requests' token slots that hold nothing, 0 to 1."""
    prefix_hit_tokens: int = 0
    """Prompt tokens found in the prefix cache, of those looked up."""
    prefix_query_tokens: int = 0
    recorder_s: float = 0.0
    """Seconds of the engine's thread that the flight recorders have taken."""
    replicas: list[ReplicaStatus] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        state: EngineState,
        figures: Figures,
        replicas: Sequence[Replica],
        last_step_age_s: float | None,
    ) -> EngineStatus:
        """Read off, by any thread."""
        return cls(
            state=state.value,
            running=figures.num_running,
            waiting=max(0, figures.num_waiting),
            free_blocks=figures.num_free_blocks,
            total_blocks=figures.num_blocks,
            steps=sum(replica.num_steps for replica in replicas),
            last_step_age_s=last_step_age_s,
            agents=[agent for replica in replicas for agent in replica.executor.agents()],
            preemptions=figures.num_preemptions,
            swapped=figures.num_swapped,
            swaps=figures.num_swaps,
            kv_waste=figures.kv_waste,
            prefix_hit_tokens=figures.prefix_hit_tokens,
            prefix_query_tokens=figures.prefix_query_tokens,
            replicas=[ReplicaStatus.of(replica) for replica in replicas],
        )


class StateLine:
    """Counts since the last ``engine_state`` line, and when the next is due: only if something has changed."""

    def __init__(self, front: RequestFront, interval_s: float) -> None:
        self._front = front
        self._interval_s = interval_s
        self._preemptions = 0
        self._swaps = 0
        self._hits = 0
        self._queries = 0
        self._since: float | None = None
        self._clear()

    def _clear(self) -> None:
        self._steps = dict.fromkeys(StepKind, 0)
        self._tokens = dict.fromkeys(StepKind, 0)
        self._output_tokens = 0

    def changed(self, now: float) -> None:
        """A request came or went, or a step was answered."""
        if self._since is None:
            self._since = now

    def step(self, step: ScheduledStep, num_output_tokens: int, now: float) -> None:
        """A step was answered."""
        self.changed(now)
        self._steps[step.kind] += 1
        self._tokens[step.kind] += step.num_tokens
        self._output_tokens += num_output_tokens

    @property
    def due(self) -> float | None:
        """When the next line is to be written; None while nothing has changed."""
        return None if self._since is None else self._since + self._interval_s

    def take(self, now: float) -> dict[str, Any]:
        """The line's fields; counting begins again."""
        figures, steps, tokens = self._front.figures, self._steps, self._tokens
        seconds = now - (self._since if self._since is not None else now)
        fields: dict[str, Any] = {
            "running": figures.num_running,
            "waiting": figures.num_waiting,
            "blocks_used": figures.num_blocks - figures.num_free_blocks,
            "blocks_total": figures.num_blocks,
            "steps": sum(steps.values()),
            "prefill_steps": steps[StepKind.PREFILL],
            "decode_steps": steps[StepKind.DECODE],
            "mixed_steps": steps[StepKind.MIXED],
            "move_steps": steps[StepKind.MOVE],
            "prefill_tokens": tokens[StepKind.PREFILL],
            "decode_tokens": tokens[StepKind.DECODE],
            "mixed_tokens": tokens[StepKind.MIXED],
            "decode_batch_mean": round(tokens[StepKind.DECODE] / max(steps[StepKind.DECODE], 1), 3),
            "output_tokens_per_s": round(self._output_tokens / seconds, 3) if seconds > 0 else 0.0,
            "preemptions": figures.num_preemptions - self._preemptions,
            "swaps": figures.num_swaps - self._swaps,
            "swapped": figures.num_swapped,
            "kv_waste": round(figures.kv_waste, 4),
            "prefix_hit_tokens": figures.prefix_hit_tokens - self._hits,
            "prefix_query_tokens": figures.prefix_query_tokens - self._queries,
        }
        self._preemptions, self._swaps = figures.num_preemptions, figures.num_swaps
        self._hits, self._queries = figures.prefix_hit_tokens, figures.prefix_query_tokens
        self._since = None if self._front.is_idle else now
        self._clear()
        return fields
