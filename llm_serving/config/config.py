"""The loaded config: the checked and resolved sections, the model's sizes, and values that follow from both."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from llm_serving.config.convert import build_dataclass
from llm_serving.config.mindformers import MindSporeContext
from llm_serving.config.sections import (
    BasicInputsConfig,
    ExtraInputsConfig,
    LogConfig,
    ModelConfig,
    PagedAttentionConfig,
    ParallelConfig,
    SchedulerConfig,
    ServingConfig,
    TokenizerConfig,
    WarmupInputsConfig,
)
from llm_serving.errors import ConfigError
from llm_serving.model.number_formats import AUTO, KvFormat, WeightFormat, kv_format, weight_format
from llm_serving.model.parallel import Shard, place, shard_of
from llm_serving.model.shape import ModelShape

if TYPE_CHECKING:
    from llm_serving.ipc.shm import SlotLimits


@dataclass(frozen=True, slots=True)
class Config:
    """One deployment. ``load_config`` makes it. Paths are absolute, and ``auto`` values are resolved.

    The agent gets the same object through ``to_json`` and ``from_json``.
    """

    file: str
    """Path of the YAML."""
    model_config: ModelConfig
    serving_config: ServingConfig
    pa_config: PagedAttentionConfig
    tokenizer: TokenizerConfig
    basic_inputs: BasicInputsConfig
    extra_inputs: ExtraInputsConfig
    warmup_inputs: WarmupInputsConfig
    scheduler_config: SchedulerConfig
    log_config: LogConfig
    shape: ModelShape
    context: MindSporeContext
    """The ``context`` section of the MindFormers YAML, or defaults."""
    stored_weight_format: str | None = None
    """Name of the checkpoint's integers in the registry (``int8``, ``int4``); None for floats."""
    stored_weight_group: int = 1
    """Inputs that share a scale in the checkpoint; 1 for a scale for each output, and for floats."""
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    notes: tuple[str, ...] = ()
    """Decisions between contradicting values, for the log."""

    @property
    def model_name(self) -> str:
        return _resolved(self.model_config.model_name)

    @property
    def device(self) -> str:
        """``CPU`` or ``Ascend``."""
        return _resolved(self.model_config.device_target)

    @property
    def op_table(self) -> str:
        """``native`` or ``fused``."""
        return self.model_config.op_table

    @property
    def dtype_bytes(self) -> int:
        """Bytes of an activation, and of a weight and a cache element that are not quantised."""
        return weight_format(self.model_config.model_dtype).bits // 8

    @property
    def weight_format(self) -> str:
        """The name of the linear layers' weight format, with ``auto`` resolved.

        A checkpoint may leave single layers, often the output layer, in a float type.
        """
        wanted = self.model_config.weight_format
        if wanted != AUTO:
            return weight_format(wanted).name
        from_checkpoint = self.stored_weight_format if self.op_table == "fused" else None
        return weight_format(from_checkpoint or self.model_config.model_dtype).name

    @property
    def linear_format(self) -> WeightFormat:
        """The format that the linear layers compute; native operators replace some formats by others."""
        return weight_format(self.weight_format).on(self.op_table)

    @property
    def quantises_activations(self) -> bool:
        """Whether the inputs of linear layers become int8, with a scale for each token."""
        return self.linear_format.quantises_activations

    @property
    def kv_format(self) -> str:
        """The name of the KV cache's format, with ``auto`` resolved."""
        return self.cache_format.name

    @property
    def cache_format(self) -> KvFormat:
        """The registry's entry for ``kv_format``."""
        wanted = self.model_config.kv_format
        return kv_format(self.model_config.model_dtype if wanted == AUTO else wanted)

    @property
    def shard_group(self) -> int:
        """Inputs that must stay on one agent because they share a scale; 1 if all inputs of an output do."""
        if self.stored_weight_format is not None:
            return self.stored_weight_group
        return self.model_config.weight_group if weight_format(self.weight_format).has_groups else 1

    def shard(self, rank: int) -> Shard:
        """The part of the model that a rank holds."""
        parallel = self.parallel_config
        return shard_of(self.shape, place(rank, parallel), parallel, self.shard_group)

    @property
    def sum_shards(self) -> tuple[Shard, ...]:
        """The parts whose sums a single agent reproduces. Empty if ``sum_parts`` is 1."""
        if self.parallel_config.sum_parts == 1:
            return ()
        parallel = replace(self.parallel_config.as_summed, pipeline_parallel=1)
        return tuple(
            shard_of(self.shape, place(rank, parallel), parallel, self.shard_group)
            for rank in range(parallel.tensor_parallel)
        )

    def agent_threads(self, num_cores: int) -> int:
        """Return the threads of an agent's CPU operators: as configured, or the agent's part of ``num_cores``."""
        model, agents = self.model_config, self.parallel_config.world_size
        if model.cpu_threads:
            return model.cpu_threads
        if model.cpu_cores:
            cores = len(set(model.cpu_cores))
            return cores if cores < agents else -(-cores // agents)
        return max(1, num_cores // agents)

    @property
    def kv_bytes_per_token(self) -> int:
        """Cache bytes of a token: keys and values of all layers. ``int8`` has a float32 scale for each head."""
        return self.kv_bytes_of(self.shape)

    def kv_bytes_of(self, shape: ModelShape) -> int:
        """Return the cache bytes of a token for the layers and heads of ``shape``, a part of the model."""
        return 2 * shape.num_layers * shape.num_key_value_heads * self.cache_format.head_bytes(shape.head_dim)

    @property
    def tokenizer_file(self) -> str:
        """Absolute path of the tokenizer file. ``tokenizer.type`` is its kind."""
        return _resolved(self.tokenizer.vocab_file)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Token ids that end a sequence: ``end_token``, or the end tokens of the model folder."""
        end_token = self.model_config.end_token
        return self.shape.eos_token_ids if end_token is None else (end_token,)

    @property
    def max_model_len(self) -> int:
        """Maximum length of a sequence, prompt and output together."""
        return min(
            self.pa_config.decode_seq_length,
            self.model_config.max_generate_length,
            self.shape.max_positions,
        )

    @property
    def max_prompt_len(self) -> int:
        """Maximum length of a prompt."""
        return min(max(self.model_config.seq_length), self.max_model_len)

    @property
    def max_num_seqs(self) -> int:
        """Maximum number of running sequences, which have blocks and a batch row."""
        limit = self.scheduler_config.max_num_seqs
        return max(self.model_config.decode_batch_size) if limit is None else limit

    @property
    def max_prefill_seqs(self) -> int:
        """Maximum number of sequences of a prefill step."""
        return min(max(self.model_config.prefill_batch_size), self.max_num_seqs)

    @property
    def max_decode_seqs(self) -> int:
        """Maximum number of sequences of a decode step."""
        return min(max(self.model_config.decode_batch_size), self.max_num_seqs)

    @property
    def max_num_batched_tokens(self) -> int:
        """Maximum number of tokens of a step: as configured, limited by the sequences of a step."""
        limit = self.scheduler_config.max_num_batched_tokens or max(self.model_config.seq_length)
        return max(min(limit, self.max_prefill_seqs * self.max_model_len), self.max_decode_seqs)

    @property
    def cache_namespace(self) -> bytes:
        """The properties on which keys and values depend, apart from tokens: model, arithmetic and storage format."""
        model = self.model_config
        weights = (self.model_name, model.model_type, model.model_path, model.load_format, model.seed)
        arithmetic = (model.model_dtype, self.op_table, self.weight_format, self.parallel_config.sum_parts)
        return json.dumps([*weights, *arithmetic, self.kv_format]).encode()

    @property
    def captured_batch_sizes(self) -> tuple[int, ...]:
        """Batch sizes of the decode steps whose launches an Ascend captures, ascending. Empty if it captures none."""
        if not self.model_config.capture_launches:
            return ()
        smaller = {size for size in self.model_config.decode_batch_size if size < self.max_decode_seqs}
        return (*sorted(smaller), self.max_decode_seqs)

    @property
    def num_host_blocks(self) -> int:
        """Number of blocks of host memory for swapped sequences."""
        wanted = self.pa_config.num_host_blocks
        swaps = self.scheduler_config.preemption != "recompute"
        return wanted if wanted is not None else self.pa_config.num_blocks * swaps

    @property
    def max_blocks_per_seq(self) -> int:
        """Number of blocks of the longest sequence."""
        return -(-self.max_model_len // self.pa_config.block_size)

    def slot_limits(self) -> SlotLimits:
        """Return the size of the largest step, which a step slot must hold."""
        from llm_serving.ipc.shm import SlotLimits  # imports numpy, which checking a config does not need

        return SlotLimits(
            max_tokens=self.max_num_batched_tokens,
            max_seqs=self.max_num_seqs,
            max_blocks_per_seq=self.max_blocks_per_seq,
            max_context=self.max_model_len,
        )

    def to_json(self) -> str:
        """Return the whole config as JSON, for another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Config:
        """Return the config of a ``to_json`` text. Raises ConfigError for another text."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as reason:
            raise ConfigError(f"a config handed over is not valid JSON: {reason}") from reason
        return build_dataclass(values, cls, "config handed over", "config")


def _resolved(value: str | None) -> str:
    assert value is not None, "only load_config makes a Config, and it resolves this"
    return value
