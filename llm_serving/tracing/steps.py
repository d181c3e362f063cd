"""The agent's steps of one sequence, for the spans of its trace: a bounded number of groups of consecutive steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_GROUPS = 32
"""Maximum number of groups of steps in one phase of a sequence. Each group becomes one span. Must be even."""


@dataclass(frozen=True, slots=True)
class StepGroup:
    """Consecutive steps of an agent with tokens of one sequence. Times are in seconds, on the engine's clock."""

    start: float
    """The time when the agent began the first step."""
    end: float
    """The time when the server had the result of the last step."""
    kinds: frozenset[str]
    """The kinds of the steps: ``prefill``, ``decode`` or ``mixed``."""
    steps: int
    request_tokens: int
    """Number of tokens of the traced sequence in all steps together."""
    sequences: int
    """Largest number of sequences in one step."""
    tokens: int
    """Largest number of tokens in one step."""
    slowest: float
    """Longest time of one step, from ``start`` to ``end``."""
    queue_us: int
    """Microseconds that the steps waited in the agent's queue, before the agent began them. ``graph_us`` and
    ``sample_us`` are the microseconds that they then spent in the graph and in the sampler."""
    graph_us: int
    sample_us: int

    def joined(self, later: StepGroup) -> StepGroup:
        """Returns one group with the steps of this group and of the group that follows it."""
        return StepGroup(
            self.start,
            max(self.end, later.end),
            self.kinds | later.kinds,
            self.steps + later.steps,
            self.request_tokens + later.request_tokens,
            max(self.sequences, later.sequences),
            max(self.tokens, later.tokens),
            max(self.slowest, later.slowest),
            self.queue_us + later.queue_us,
            self.graph_us + later.graph_us,
            self.sample_us + later.sample_us,
        )

    def attributes(self) -> Mapping[str, str | int | float]:
        """Returns the attributes of the group's span."""
        return {
            "llm_serving.step.kind": "+".join(sorted(self.kinds)),
            "llm_serving.step.count": self.steps,
            "llm_serving.step.request_tokens": self.request_tokens,
            "llm_serving.step.sequences": self.sequences,
            "llm_serving.step.tokens": self.tokens,
            "llm_serving.step.slowest_seconds": self.slowest,
            "llm_serving.step.agent_queue_seconds": self.queue_us / 1e6,
            "llm_serving.step.graph_seconds": self.graph_us / 1e6,
            "llm_serving.step.sample_seconds": self.sample_us / 1e6,
        }


class StepGroups:
    """The steps of one phase of a sequence, in at most ``MAX_GROUPS`` groups.

    At first, each group has one step. When all ``MAX_GROUPS`` groups are used, neighbouring groups are joined in pairs,
    and from then on new groups get twice as many steps. So all groups except the last have the same number of steps.
    """

    __slots__ = ("_groups", "_size")

    def __init__(self) -> None:
        self._groups: list[StepGroup] = []
        self._size = 1

    def add(self, step: StepGroup) -> None:
        """Adds the next step. ``step`` must be a group with one step."""
        groups = self._groups
        if groups and groups[-1].steps < self._size:
            groups[-1] = groups[-1].joined(step)
            return
        if len(groups) == MAX_GROUPS:
            pairs = zip(groups[::2], groups[1::2], strict=True)
            self._groups = groups = [first.joined(second) for first, second in pairs]
            self._size *= 2
        groups.append(step)

    def all(self) -> Sequence[StepGroup]:
        """Returns the present groups. The engine thread may add further steps meanwhile."""
        return tuple(self._groups)
