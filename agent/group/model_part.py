"""The part of the model that one agent has, and the agent's role in its group."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llm_serving.config import Config, ParallelConfig
from llm_serving.model.parallel import RankPlace, Shard, local_shape, place
from llm_serving.model.shape import ModelShape

STAGE_GROUP = "stage"
"""Name of the communication group of the agents of one stage, which have parts of the same layers."""


@dataclass(frozen=True, slots=True)
class ModelPart:
    """An agent's heads, columns, vocabulary and layers (``llm_serving.model.parallel``).

    An agent without a group has the whole model.
    """

    parallel: ParallelConfig
    place: RankPlace
    shard: Shard
    whole: ModelShape
    sum_shards: tuple[Shard, ...] = ()
    """With ``parallel_config.sum_parts``, one agent adds its products as a group with these shards would."""

    @classmethod
    def of(cls, config: Config, rank: int = 0) -> ModelPart:
        parallel = config.parallel_config
        return cls(parallel, place(rank, parallel), config.shard(rank), config.shape, config.sum_shards)

    @property
    def is_split(self) -> bool:
        """Whether other agents have parts of the same layers."""
        return self.parallel.tensor_parallel > 1

    @property
    def is_alone(self) -> bool:
        """Whether the group has no other agent."""
        return self.parallel.group_size == 1

    @property
    def member(self) -> int:
        """The number of this agent in its group."""
        return self.place.pp_index * self.parallel.tensor_parallel + self.place.tp_index

    @property
    def returns_results(self) -> bool:
        """Whether this agent samples and writes the results of a step."""
        return self.shard.is_last_stage and self.place.tp_index == 0

    @property
    def vocab_stride(self) -> int:
        """The number of vocabulary rows of each agent of the stage. The last agent may have fewer real rows."""
        return self.shard.vocab_stride if self.is_split else self.whole.vocab_size

    def narrow(self, config: Config) -> Config:
        """Returns ``config`` with the sizes of this part's layers. The vocabulary keeps its whole size."""
        return config if self.is_alone else replace(config, shape=local_shape(self.whole, self.shard))
