"""The class ``Config``: the checked sections of a YAML, the model's sizes, and values that are computed from both."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from llm_serving.config.batch_section import BatchConfig
from llm_serving.config.convert import build_dataclass
from llm_serving.config.draft_model import DraftModel
from llm_serving.config.events_section import KvEventsConfig
from llm_serving.config.image_section import CACHED_ROWS_OF_ANY_SIZE, ImageConfig
from llm_serving.config.kv_tier_section import KvTierConfig
from llm_serving.config.mindformers import MindSporeContext
from llm_serving.config.model_section import ModelConfig
from llm_serving.config.models_section import ModelsConfig
from llm_serving.config.parallel_section import ParallelConfig
from llm_serving.config.sampling_defaults import SamplingDefaults
from llm_serving.config.scheduler_section import SNAPSHOTS_PER_SEQUENCE, SchedulerConfig
from llm_serving.config.sections import (
    BasicInputsConfig,
    ExtraInputsConfig,
    LogConfig,
    LoraConfig,
    PagedAttentionConfig,
    PowerConfig,
    SpeculativeConfig,
    TelemetryConfig,
    TokenizerConfig,
    WarmupInputsConfig,
)
from llm_serving.config.serving_section import DEFAULT_ROW_CHECK_INTERVAL, ServingConfig
from llm_serving.config.shadow_section import ShadowConfig
from llm_serving.config.source import UnusedSetting
from llm_serving.errors import ConfigError
from llm_serving.model.number_formats import AUTO, KvFormat, WeightFormat, kv_format, weight_format
from llm_serving.model.parallel import Shard, place, shard_of
from llm_serving.model.pooling import Pooling
from llm_serving.model.shape import ModelShape
from llm_serving.model.vision import ImageProcessing

if TYPE_CHECKING:
    from llm_serving.ipc.shm import SlotLimits


@dataclass(frozen=True, slots=True)
class Config:
    """The configuration of one deployment, as ``load_config`` returns it.

    Paths are absolute, and every ``auto`` has been replaced by a value. The server sends the object to its agents as
    JSON.
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
    """Section ``context`` of the MindFormers YAML (``model_config.model_cfg_path``), or its defaults."""
    stored_weight_format: str | None = None
    """Format of the checkpoint's quantized weights, ``int8`` or ``int4``. None if all weights are floats."""
    stored_weight_group: int = 1
    """Number of inputs of a linear layer that share a scale in the checkpoint. 1 means that the weight has no groups:
    all inputs of an output share a scale, or there are no scales."""
    stored_experts_only: bool = False
    """If True, only the checkpoint's experts are quantised. ``weight_format: auto`` then keeps all other weights as
    floats."""
    telemetry_config: TelemetryConfig = field(default_factory=TelemetryConfig)
    batch_config: BatchConfig = field(default_factory=BatchConfig)
    models_config: ModelsConfig = field(default_factory=ModelsConfig)
    kv_tier_config: KvTierConfig = field(default_factory=KvTierConfig)
    kv_events_config: KvEventsConfig = field(default_factory=KvEventsConfig)
    shadow_config: ShadowConfig = field(default_factory=ShadowConfig)
    power: PowerConfig = field(default_factory=PowerConfig)
    speculative_config: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    lora_config: LoraConfig = field(default_factory=LoraConfig)
    image_config: ImageConfig = field(default_factory=ImageConfig)
    draft: DraftModel | None = None
    """The draft model of speculative decoding. None if the method is not ``draft``."""
    notes: tuple[str, ...] = ()
    """Messages for the log about settings that contradict each other. Each message names the value that is used."""
    auto_blocks: bool = False
    """Whether the file has ``pa_config.num_blocks: auto``. ``load_config`` then sets the smallest number that works.
    Later, ``llm_serving.planning.auto_blocks`` sets the largest number that fits the machine."""
    auto_length: bool = False
    """Whether the file has ``pa_config.decode_seq_length: auto``. ``load_config`` then sets the largest length that the
    model and the number of blocks permit. Later, ``llm_serving.planning.auto_blocks`` reduces the length if the memory
    of the machine is too small."""
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    """Sampling parameters for requests that state none. They come from the model folder, or from the file in
    ``serving_config.generation_config``. All are None if the config ignores them."""
    pooling: Pooling | None = None
    """How embeddings or scores are computed. None if the server generates text."""
    processing: ImageProcessing | None = None
    """How images become tiles. None if the model reads no images."""
    unused: tuple[UnusedSetting, ...] = ()
    """Settings of the YAML files that were read but have no effect, with the reasons."""
    files_fingerprint: str = ""
    """Fingerprint of the model's files when this version of the model was started. Empty before the start."""

    @property
    def model_name(self) -> str:
        return _resolved(self.model_config.model_name)

    @property
    def device(self) -> str:
        """The device: ``CPU`` or ``Ascend``."""
        return _resolved(self.model_config.device_target)

    @property
    def op_table(self) -> str:
        """The op table: ``native`` or ``fused``."""
        return self.model_config.op_table

    @property
    def fuses_operators(self) -> bool:
        """Whether operators are fused: ``context.enable_graph_kernel``. By default, native operators on a CPU are."""
        wanted = self.context.enable_graph_kernel
        return self.device == "CPU" and self.op_table == "native" if wanted is None else wanted

    @property
    def dtype_bytes(self) -> int:
        """Number of bytes of a value of ``model_config.model_dtype``, the type of activations and of float weights."""
        return weight_format(self.model_config.model_dtype).bits // 8

    @property
    def weight_format(self) -> str:
        """Name of the weight format of linear layers. With native operators, ``auto`` means ``model_dtype``.

        With fused operators, ``auto`` means the format of the checkpoint's integers, or ``model_dtype`` if the
        checkpoint is not quantized. A quantized checkpoint may still have a few float layers, often the output layer.
        """
        wanted = self.model_config.weight_format
        if wanted != AUTO:
            return weight_format(wanted).name
        from_checkpoint = self.stored_weight_format if self.op_table == "fused" else None
        return weight_format(from_checkpoint or self.model_config.model_dtype).name

    @property
    def linear_format(self) -> WeightFormat:
        """The weight format that the operators use for the linear layers.

        If native operators do not support the configured format, they compute in another format. This property then
        returns that other format.
        """
        return weight_format(self.weight_format).on(self.op_table)

    @property
    def quantises_activations(self) -> bool:
        """True if the inputs of linear layers are rounded to int8, with a scale for each token."""
        return self.linear_format.quantises_activations

    @property
    def kv_format(self) -> str:
        """Name of the KV cache's format. ``auto`` is replaced by the dtype of the model."""
        return self.cache_format.name

    @property
    def cache_format(self) -> KvFormat:
        """Format of the KV cache, with the bytes of its elements and scales."""
        wanted = self.model_config.kv_format
        return kv_format(self.model_config.model_dtype if wanted == AUTO else wanted)

    @property
    def shard_group(self) -> int:
        """Number of inputs of a linear layer that share a scale. Inputs that share a scale must be in the same agent.

        1 means that the inputs may be split among agents at any position.
        """
        if self.stored_weight_format is not None:
            return self.stored_weight_group
        return self.model_config.weight_group if weight_format(self.weight_format).has_groups else 1

    def shard(self, rank: int) -> Shard:
        """Returns the part of the model that the agent with this rank holds."""
        parallel = self.parallel_config
        return shard_of(self.shape, place(rank, parallel), parallel, self.shard_group)

    @property
    def sum_shards(self) -> tuple[Shard, ...]:
        """The ``parallel_config.sum_parts`` parts of the model that a single agent computes one after another.

        The agent adds the results of these parts in order. So the sums have the same bits as the sums of ``sum_parts``
        agents that share the model. Empty if ``sum_parts`` is 1.
        """
        if self.parallel_config.sum_parts == 1:
            return ()
        parallel = replace(self.parallel_config.as_summed, pipeline_parallel=1)
        return tuple(
            shard_of(self.shape, place(rank, parallel), parallel, self.shard_group)
            for rank in range(parallel.tensor_parallel)
        )

    def agent_threads(self, num_cores: int) -> int:
        """Returns the number of threads of an agent's CPU operators on a machine with ``num_cores`` cores."""
        model, agents = self.model_config, self.parallel_config.agents_per_machine
        if model.cpu_threads:
            return model.cpu_threads
        if model.cpu_cores:
            cores = len(set(model.cpu_cores))
            return cores if cores < agents else -(-cores // agents)
        return max(1, num_cores // agents)

    @property
    def kv_bytes_per_token(self) -> int:
        """Number of bytes of a token in the KV cache: keys and values of all layers, and the scales of an int8 cache.

        With latent attention, a layer has a latent vector and a rotated key instead.
        """
        return self.kv_bytes_of(self.shape)

    @property
    def gathers_blocks(self) -> bool:
        """True if native operators must gather the blocks of a step as floats, because attention cannot read an int8
        cache."""
        return self.op_table == "native" and self.cache_format.scale_bytes > 0

    @property
    def reads_rotary_positions(self) -> bool:
        """True if native operators take rotary positions with three dimensions (time, height, width), as in Qwen2.5-VL.

        The agent computes these positions for each step.
        """
        return self.op_table == "native" and bool(self.shape.rotary_sections)

    def kv_bytes_of(self, shape: ModelShape) -> int:
        """Returns the number of bytes of a token in the KV cache of a model, or a part of a model, with ``shape``."""
        if shape.latent is not None:
            return shape.num_cache_layers * self.cache_format.head_bytes(shape.latent.cache_dim)
        heads, size = shape.num_key_value_heads, shape.head_dim
        return shape.num_cache_layers * self.cache_format.token_bytes(heads, size, self.op_table)

    @property
    def tokenizer_file(self) -> str:
        """Absolute path of the tokenizer file: ``tokenizer.vocab_file`` of the YAML, or a file of the model folder."""
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
    def wanted_drafts(self) -> int:
        """Maximum number of drafts of a sequence in a decode step that has space for them. 0 without speculative
        decoding.

        With pipeline parallelism, there are no drafts: to keep all stages busy, a step is sent before the result of the
        previous step is known. But drafts depend on that result. Embedding models generate no tokens.
        """
        section, stages = self.speculative_config, self.parallel_config.pipeline_parallel
        if section.method == "off" or self.pooling is not None or stages > 1:
            return 0
        return min(section.max_draft_tokens, self.max_model_len - 1)

    @property
    def max_drafts(self) -> int:
        """Maximum number of drafts of a sequence in a decode step: ``wanted_drafts``, limited by the tokens of a step.
        """
        return min(self.wanted_drafts, self.max_num_batched_tokens - 1)

    @property
    def max_decode_entries(self) -> int:
        """Maximum number of input tokens of a decode step: its sequences and their drafts.

        Even if a decode step has only one sequence (``decode_batch_size: [1]``), all drafts of a sequence fit into it.
        """
        return max(self.max_decode_seqs, 1 + self.max_drafts)

    @property
    def max_step_seqs(self) -> int:
        """Maximum number of sequences of any step. In a decode step, each draft counts as one more sequence."""
        return max(self.max_num_seqs, self.max_decode_entries)

    @property
    def max_num_batched_tokens(self) -> int:
        """Maximum number of tokens in a step.

        It is the smaller of two numbers: the configured limit, and the maximum number of tokens of all sequences in a
        prefill step. But it is at least the maximum number of sequences of a decode step.
        """
        limit = self.scheduler_config.max_num_batched_tokens or max(self.model_config.seq_length)
        return max(min(limit, self.max_prefill_seqs * self.max_model_len), self.max_decode_seqs)

    @property
    def cache_namespace(self) -> bytes:
        """JSON text of all settings on which keys and values depend: model, arithmetic and storage format.

        Block hashes begin with this text, so a prefix is never shared between different models.
        """
        model = self.model_config
        digest = (self.files_fingerprint,) if self.files_fingerprint else ()
        weights = (self.model_name, model.model_type, model.model_path, model.load_format, model.seed, *digest)
        if self.kv_tier_config.shared_folder is not None:
            # Paths and file times are left out, because they differ between the machines that share the folder. Blocks
            # of different weights still cannot be mixed. The names of shared files contain the digest of the weights,
            # and a prefix cache has the blocks of only one version of a model.
            weights = (model.model_type, model.load_format, model.seed)
        arithmetic = (model.model_dtype, self.op_table, self.weight_format, self.parallel_config.sum_parts)
        return json.dumps([*weights, *arithmetic, self.kv_format]).encode()

    @property
    def captured_batch_sizes(self) -> tuple[int, ...]:
        """Batch sizes of the decode steps that an Ascend records and replays, ascending. Empty if it records none."""
        if not self.model_config.capture_launches:
            return ()
        sizes = {min(size, self.max_decode_seqs) for size in self.model_config.decode_batch_size}
        return tuple(sorted(sizes | {self.max_decode_entries}))

    @property
    def row_check_interval(self) -> int:
        """Number of decode steps between two row checks, in which the agents compute a sequence again. 0: no checks."""
        wanted = self.serving_config.row_check_interval
        return wanted if wanted is not None else DEFAULT_ROW_CHECK_INTERVAL * (self.device == "CPU")

    @property
    def num_host_blocks(self) -> int:
        """Number of blocks of host memory for swapped sequences."""
        wanted = self.pa_config.num_host_blocks
        swaps = self.scheduler_config.preemption != "recompute"
        return wanted if wanted is not None else self.pa_config.num_blocks * swaps

    @property
    def num_pool_blocks(self) -> int:
        """Number of host blocks of an agent: those for swapped sequences and those of the KV tiers."""
        return self.num_host_blocks + self.kv_tier_config.host_blocks

    @property
    def num_hand_over_blocks(self) -> int:
        """Number of blocks of the hand-over pool: by default for three of the longest sequences. 0 without roles."""
        parallel = self.parallel_config
        if not parallel.has_roles:
            return 0
        wanted = parallel.hand_over_blocks
        return 3 * self.max_blocks_per_seq if wanted is None else wanted

    @property
    def uses_prefix_cache(self) -> bool:
        """True if requests may share blocks. False for pooling by mean, which needs hidden states that blocks lack."""
        wanted = self.scheduler_config.prefix_cache
        enabled = wanted if wanted is not None else self.model_config.page_attention
        return enabled and (self.pooling is None or self.pooling.reads_prefixes)

    @property
    def num_state_snapshots(self) -> int:
        """Number of snapshots of the states of linear attention. 0 without linear attention or prefix cache."""
        if self.shape.delta is None or not self.uses_prefix_cache:
            return 0
        wanted = self.scheduler_config.state_snapshots
        return SNAPSHOTS_PER_SEQUENCE * self.max_num_seqs if wanted is None else wanted

    @property
    def max_logged_drafts(self) -> int:
        """Maximum number of drafts of a sequence whose changes to a linear-attention state the agent logs.

        With the log, the agent undoes the changes of rejected drafts. 0 without linear attention or drafts.
        """
        return 0 if self.shape.delta is None else self.max_drafts

    @property
    def max_blocks_per_seq(self) -> int:
        """Number of blocks of a sequence with the maximum length."""
        return -(-self.max_model_len // self.pa_config.block_size)

    def slot_limits(self) -> SlotLimits:
        """Returns the maximum sizes of a step, which determine the size of a step slot."""
        from llm_serving.ipc.shm import SlotLimits  # imported here, because it imports numpy, which takes long

        vision, processing = self.shape.vision, self.processing
        return SlotLimits(
            max_tokens=self.max_num_batched_tokens,
            max_seqs=self.max_step_seqs,
            max_blocks_per_seq=self.max_blocks_per_seq,
            max_context=self.max_model_len,
            mask_words=self._mask_words,
            pooled_width=0 if self.pooling is None else self.pooling.width,
            max_adapters=self.lora_config.max_adapters,
            max_draft_ids=self.max_draft_ids,
            hands_over=self.num_hand_over_blocks > 0,
            tile_rows=0 if vision is None or processing is None else processing.fewest_rows(vision),
            shifts_positions=bool(self.shape.rotary_sections),
            has_states=self.shape.delta is not None,
            num_snapshots=self.num_state_snapshots,
            max_logged=self.max_logged_drafts,
        )

    @property
    def tile_pixels(self) -> int:
        """Number of pixels of the largest tile of an image. 0 if the model reads no images."""
        vision, processing = self.shape.vision, self.processing
        return 0 if vision is None or processing is None else processing.tile_pixels(vision)

    @property
    def cached_rows(self) -> int:
        """Maximum number of rows of encoded tiles that an agent keeps. 0 if the model reads no images."""
        vision = self.shape.vision
        if vision is None:
            return 0
        rows = vision.rows_of(vision.image_size**2) if vision.image_size else CACHED_ROWS_OF_ANY_SIZE
        return self.image_config.cached_tiles * rows

    @property
    def tile_cost(self) -> int:
        """Number of tokens for which encoding the largest tile of an image counts in the token limit of a step.

        Computing this number of tokens takes as many multiplications as encoding the tile.
        """
        vision = self.shape.vision
        if vision is None:
            return 0
        work = vision.operations(self.shape.hidden_size, self.tile_pixels)
        return max(1, work // self.shape.num_linear_parameters)

    @property
    def max_draft_ids(self) -> int:
        """Maximum number of drafts that the draft model makes for a sequence in a step. 0 without a draft model."""
        return 0 if self.draft is None else self.speculative_config.max_draft_tokens

    @property
    def tapped_layers(self) -> tuple[int, ...]:
        """Numbers of the layers, ascending, after which the agent keeps the residual stream of every step.

        Drafts are made from these hidden states. Empty if the method of speculative decoding does not need them.
        """
        return () if self.draft is None else self.draft.tapped_layers

    @property
    def scratch_blocks_per_seq(self) -> int:
        """Number of scratch blocks of a batch row, in the draft model's KV cache.

        Drafts that do not fit the last block of their sequence use these blocks until they are verified.
        """
        return -(-self.max_draft_ids // self.pa_config.block_size)

    @property
    def _mask_words(self) -> int:
        has_masks = self.serving_config.structured_outputs and self.pooling is None
        return -(-self.shape.vocab_size // 32) if has_masks else 0

    def to_json(self) -> str:
        """Returns the whole config as JSON, for another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Config:
        """Returns the config from JSON that ``to_json`` has written. Raises ConfigError for any other text."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as reason:
            raise ConfigError(f"a config handed over is not valid JSON: {reason}") from reason
        return build_dataclass(values, cls, "config handed over", "config")


def _resolved(value: str | None) -> str:
    assert value is not None, "only load_config makes a Config, and it resolves this"
    return value
