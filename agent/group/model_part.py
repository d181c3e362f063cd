"""The part of the model that one agent has, and the agent's role in its group."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llm_serving.config import Config, ParallelConfig
from llm_serving.model.parallel import RankPlace, Shard, local_shape, place
from llm_serving.model.shape import ModelShape

STAGE_GROUP = "stage"
"""Name of the MindSpore communication group of a stage. Its agents have parts of the same layers."""


@dataclass(frozen=True, slots=True)
class ModelPart:
    """The part of the model that one agent has: heads, columns, vocabulary and layers.

    If an agent is alone in its group, its part is the whole model.
    """

    parallel: ParallelConfig
    place: RankPlace
    shard: Shard
    whole: ModelShape
    sum_shards: tuple[Shard, ...] = ()
    """Usually empty. With ``parallel_config.sum_parts``, a single agent computes the same bits as a group of that
    number of agents. Then this tuple has the parts of these agents. The agent adds the terms of each sum in the order
    of these parts.
    """

    pools: bool = False
    """True if this agent pools the residual stream after the last layer. Then ``shard.is_last_stage`` is False, so that
    the graph returns the residual stream instead of logits.
    """

    @classmethod
    def of(cls, config: Config, rank: int = 0) -> ModelPart:
        parallel, shard = config.parallel_config, config.shard(rank)
        pools = config.pooling is not None and shard.is_last_stage
        if pools:
            shard = replace(shard, is_last_stage=False)
        return cls(parallel, place(rank, parallel), shard, config.shape, config.sum_shards, pools)

    @property
    def is_split(self) -> bool:
        """True if other agents have parts of the same layers."""
        return self.parallel.tensor_parallel > 1

    @property
    def is_alone(self) -> bool:
        """True if the group has only this agent."""
        return self.parallel.group_size == 1

    @property
    def may_run_ahead(self) -> bool:
        """True if a step of this agent may be launched before the host has the tokens of the previous step."""
        return not self.why_not_ahead

    @property
    def why_not_ahead(self) -> str:
        """The reason why each step of this agent waits for the tokens of the previous step. Empty if it need not wait.
        """
        if self.parallel.pipeline_parallel > 1:
            return "the activations of a pipeline's stages pass through host memory"
        if self.pools:
            return "a model that pools samples no tokens"
        if self.whole.vision is not None:
            return "the host embeds the tokens of a model that reads images"
        if self.whole.delta is not None:
            return "a second launch would update the recurrent states of linear attention twice"
        return ""

    @property
    def member(self) -> int:
        """The number of this agent in its group."""
        return self.place.pp_index * self.parallel.tensor_parallel + self.place.tp_index

    @property
    def returns_results(self) -> bool:
        """True for the agent of the group that samples or pools, and writes the results of a step."""
        return (self.shard.is_last_stage or self.pools) and self.place.tp_index == 0

    @property
    def vocab_stride(self) -> int:
        """Number of vocabulary rows of each agent of the stage. The number includes padding rows."""
        return self.shard.vocab_stride if self.is_split else self.whole.vocab_size

    def narrow(self, config: Config) -> Config:
        """Returns ``config`` with the numbers of layers, heads and columns of this part. The vocabulary stays whole."""
        return config if self.is_alone else replace(config, shape=local_shape(self.whole, self.shard))
