"""The section ``parallel_config``: over how many agents a model, and the requests, are spread."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llm_serving.config.schema import own

MAX_RANKS = 256


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Agents that work together, see `docs/parallel.md`; as many as the product of the three, one a device."""

    tensor_parallel: int = own(
        1,
        "Agents that compute each layer together: heads, intermediate columns and vocabulary are split.",
        unit="agents",
        low=1,
        high=MAX_RANKS,
    )
    pipeline_parallel: int = own(
        1, "Stages that the layers are split into, one after the other.", unit="stages", low=1, high=MAX_RANKS
    )
    data_parallel: int = own(
        1, "Replicas of the whole model; a request is served by one of them.", unit="replicas", low=1, high=MAX_RANKS
    )
    sum_parts: int = own(
        1,
        "On a CPU, with `tensor_parallel` 1: attention's output and the MLP's down projection are added up in so many "
        "parts, as `tensor_parallel` of that number adds them, so that text is the same as with so many agents. "
        "Prefill takes up to a tenth longer.",
        unit="parts",
        low=1,
        high=64,
    )
    routing: str = own(
        "prefix",
        "Which replica a request goes to of those that can start it: `prefix` the one that has the most of its prompt "
        "in its prefix cache, as long as it has not much more to do than the least loaded one; `least_loaded` the one "
        "with the fewest tokens to compute; `round_robin` one after the other, for comparison.",
        choices=("prefix", "least_loaded", "round_robin"),
    )

    @property
    def as_summed(self) -> ParallelConfig:
        """That of the agents whose sums are made."""
        return replace(self, tensor_parallel=self.sum_parts, sum_parts=1)

    @property
    def group_size(self) -> int:
        """Agents of one replica."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def world_size(self) -> int:
        """Agents in all."""
        return self.group_size * self.data_parallel
