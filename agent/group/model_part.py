"""Which part of the model this agent has, and what it does beside the others of its group."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llm_serving.config import Config, ParallelConfig
from llm_serving.model.parallel import RankPlace, Shard, local_shape, place
from llm_serving.model.shape import ModelShape


@dataclass(frozen=True, slots=True)
class ModelPart:
    """An agent's heads, columns, vocabulary and layers (``llm_serving.model.parallel``). One alone has the whole
    model."""

    parallel: ParallelConfig
    place: RankPlace
    shard: Shard
    whole: ModelShape
    sum_shards: tuple[Shard, ...] = ()
    """Of the agents in whose parts this one, alone in its layers, makes its sums (``parallel_config.sum_parts``)."""

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
        """Number of this agent in its group."""
        return self.place.pp_index * self.parallel.tensor_parallel + self.place.tp_index

    @property
    def answers(self) -> bool:
        """Whether this agent samples and writes a step's outputs."""
        return self.shard.is_last_stage and self.place.tp_index == 0

    @property
    def vocab_stride(self) -> int:
        """Tokens of each agent of the stage, the last one's being fewer."""
        return self.shard.vocab_stride if self.is_split else self.whole.vocab_size

    def narrow(self, config: Config) -> Config:
        """``config`` with the sizes of this part's layers. The vocabulary stays whole."""
        return config if self.is_alone else replace(config, shape=local_shape(self.whole, self.shard))
