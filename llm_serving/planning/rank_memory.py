"""Calculates the items of one agent in the memory plan, with the formulas that ``memory_plan.py`` lists."""

from __future__ import annotations

from dataclasses import dataclass

from llm_serving.config import Config
from llm_serving.config.image_section import DECODED_PIXEL_BYTES, DECODING_THREADS
from llm_serving.config.mindformers_models import rotary_positions
from llm_serving.lora.targets import largest_adapter, stacked_values
from llm_serving.model.deepseek import LatentAttention
from llm_serving.model.gpt_oss import ACTIVATION as CLAMPED_SILU
from llm_serving.model.number_formats import AUTO, SCALE_ELEMENT_BYTES, scale_row_width
from llm_serving.model.parallel import Shard, answers, local_shape
from llm_serving.model.quantization import MAX_WEIGHT_ONLY_SIZE
from llm_serving.model.shape import ModelShape

EXPERT_PIECE_ROWS = 256
"""Rows that the fused operator of experts computes at a time (``kPieceRows`` of ``agent/kernels``)."""
FLOAT32_BYTES = 4
"""Size of a float32 in bytes."""
INT32_BYTES = 4
"""Size of an int32 in bytes."""
CANDIDATE_MATRICES = 4
"""Number of float32 matrices that exist at the same time while a device finds candidate tokens
(``agent/device_sampling``). Each has the size of the logits.
"""
JOINED_BYTES = 64 * 64 * (1 + 2 * FLOAT32_BYTES)
"""Bytes for each agent and sequence while an Ascend joins the candidates of several agents
(``agent/device_sampling/draws.py``). The Ascend compares 64 chosen places with 64 candidates of each agent. Each pair
needs a flag, the flag as float32, and the flag times a token id.
"""
STATES_PER_SEQUENCE = 2
"""Number of linear attention states for each batch row and layer: a step reads one and writes the other
(``agent/sequence_states.py``).
"""
_HUGE_PAGE = 2 << 20
"""Bytes of a huge page. Adapters of fused operators use huge pages if they have at least a quarter of this size
(``weight_blob`` in ``agent/kernels/packing.py``).
"""
KV_CACHE = "KV cache"
HOST_BLOCKS = "host blocks"
WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One line of the memory plan."""

    name: str
    num_bytes: int
    basis: str
    """Explanation of the number of bytes, for the printed plan."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of the model that one rank holds. ``answers`` is True for the rank that samples and returns results."""

    shape: ModelShape
    shard: Shard
    answers: bool

    @classmethod
    def of(cls, config: Config, rank: int) -> _Part:
        shard = config.shard(rank)
        return cls(local_shape(config.shape, shard), shard, answers(rank, config.parallel_config))


def rank_kv_bytes_per_token(config: Config, rank: int) -> int:
    """Returns the bytes of one token in a rank's KV cache. The cache has the keys and values of the rank's layers and
    heads.

    If the rank has a draft model, this includes the token in the draft model's cache.
    """
    own = config.kv_bytes_of(local_shape(config.shape, config.shard(rank)))
    return own + _draft_bytes_per_token(config, rank)


def _draft_bytes_per_token(config: Config, rank: int) -> int:
    if config.draft is None or not answers(rank, config.parallel_config):
        return 0
    return config.kv_bytes_of(config.draft.shape)


def device_items(config: Config, rank: int) -> tuple[MemoryItem, ...]:
    """Returns the plan's items in the memory of a rank's device.

    The sizes are those of the rank's part of the model. The explanation in ``basis`` describes the whole model.
    """
    part, shape, cache = _Part.of(config, rank), config.shape, config.pa_config
    tokens, seqs, longest = config.max_num_batched_tokens, config.max_step_seqs, config.max_model_len
    rotary = rotary_positions(config)
    kv_bytes = config.kv_bytes_of(part.shape) * cache.block_size * cache.num_blocks
    per_token = format_bytes(config.kv_bytes_per_token)
    return (
        MemoryItem(
            WEIGHTS, _weight_bytes(config, part), f"{format_count(shape.num_parameters)} in {_weight_formats(config)}"
        ),
        MemoryItem(
            KV_CACHE,
            kv_bytes,
            f"{cache.num_blocks} blocks of {cache.block_size} tokens, {per_token} a token in {config.kv_format}",
        ),
        *_state_items(config, part.shape),
        MemoryItem("activations", activation_bytes(config, part.shape), f"a step of {tokens} tokens"),
        MemoryItem("logits", _logit_bytes(config, part), f"{seqs} sequences, vocabulary of {shape.vocab_size}"),
        MemoryItem("rotary tables", _rotary_bytes(shape, rotary), f"{rotary} positions"),
        MemoryItem(
            "token history", seqs * longest * INT32_BYTES * part.answers, f"{seqs} sequences of {longest} tokens"
        ),
        *_gathered_items(config, part.shape),
        *_adapter_items(config, part.shape, rank),
        *_image_items(config, rank),
    )


def _state_items(config: Config, shape: ModelShape) -> tuple[MemoryItem, ...]:
    """Returns the item of the states of linear attention.

    Each layer with linear attention has two states for each sequence. A step reads one of them and writes the other.
    The snapshots of the prefix cache are further states.
    """
    if shape.delta is None:
        return ()
    state_bytes = shape.state_bytes(config.max_logged_drafts)
    seqs, each = config.max_num_seqs, STATES_PER_SEQUENCE * state_bytes
    items = [MemoryItem("states", seqs * each, f"{seqs} sequences, {format_bytes(each)} each in float32")]
    if snapshots := config.num_state_snapshots:
        basis = f"{snapshots} states of the prefix cache, {format_bytes(state_bytes)} each in float32"
        items.append(MemoryItem("state snapshots", snapshots * state_bytes, basis))
    return tuple(items)


def _gathered_items(config: Config, shape: ModelShape) -> tuple[MemoryItem, ...]:
    """Returns the item of the blocks that native operators gather from an int8 cache, one layer at a time."""
    if not config.gathers_blocks:
        return ()
    blocks = _most_gathered_blocks(config)
    return (MemoryItem("gathered blocks", gathered_bytes(config, shape), f"{blocks} blocks of one layer, as floats"),)


def gathered_bytes(config: Config, shape: ModelShape) -> int:
    """Returns the bytes of the blocks that the largest step gathers. Each block exists in four forms: int8, float32
    before scaling, float32 after scaling, and rounded to ``model_dtype``.

    ``shape`` is the rank's part of the model. The dequantised keys stay in memory while the values are dequantised.
    """
    heads, rounded = shape.num_key_value_heads, config.dtype_bytes
    elements = heads * shape.head_dim * (2 + 2 * FLOAT32_BYTES + 2 * rounded)
    scales = scale_row_width(heads) * (SCALE_ELEMENT_BYTES + 2 * FLOAT32_BYTES) + 4 * heads * FLOAT32_BYTES
    return _most_gathered_blocks(config) * config.pa_config.block_size * (elements + scales)


def _most_gathered_blocks(config: Config) -> int:
    return min(config.pa_config.num_blocks, config.max_num_seqs * config.max_blocks_per_seq)


def _adapter_items(config: Config, shape: ModelShape, rank: int) -> tuple[MemoryItem, ...]:
    """Returns the item of the LoRA adapters in an agent's memory.

    ``shape`` is the rank's part. On a CPU, the item of the first agent includes the adapters in shared memory.
    """
    lora = config.lora_config
    if lora.max_adapters == 0:
        return ()
    if config.op_table == "native":
        own = (lora.max_adapters + 1) * stacked_values(shape, lora.max_rank) * config.dtype_bytes
    else:
        largest = largest_adapter(shape, lora.max_rank) * config.dtype_bytes
        own = lora.max_adapters * (largest + (_HUGE_PAGE if largest >= _HUGE_PAGE // 4 else 0))
    shared = shared_adapter_bytes(config)
    each = format_bytes(shared // lora.max_adapters)
    basis = f"{lora.max_adapters} adapters of rank {lora.max_rank}, {each} each, and as much in /dev/shm"
    is_on_host = config.device == "CPU" and rank == 0
    return (MemoryItem("LoRA adapters", own + (shared if is_on_host else 0), basis),)


def shared_adapter_bytes(config: Config) -> int:
    """Returns the bytes of the adapters in shared memory, which all agents read."""
    lora = config.lora_config
    return lora.max_adapters * largest_adapter(config.shape, lora.max_rank) * config.dtype_bytes


def _image_items(config: Config, rank: int) -> tuple[MemoryItem, ...]:
    """Returns the items of a model that reads images: the encoder with its activations, the tiles, and decoding.

    Each agent of the first pipeline stage has an encoder. If these agents divide the vocabulary, each one also has the
    whole embedding. Pixels and decoding memory exist only once, and the plan counts them for rank 0.
    """
    vision, settings = config.shape.vision, config.image_config
    if vision is None:
        return ()
    is_first_stage, is_counted = config.shard(rank).is_first_stage, rank == 0
    hidden = config.shape.hidden_size
    weights = vision.num_parameters(hidden) * config.dtype_bytes
    # The activations are the scores of a head with their exponentials, and the largest activations of a layer with
    # rounded copies.
    activations = vision.activation_floats(config.tile_pixels) * FLOAT32_BYTES
    cached = config.cached_rows * hidden * config.dtype_bytes
    pixels = settings.max_tiles * config.tile_pixels * 3
    if config.parallel_config.tensor_parallel > 1:
        weights += config.shape.vocab_size * hidden * config.dtype_bytes
    return (
        MemoryItem(
            "image encoder",
            (weights + activations) * is_first_stage,
            f"{format_count(vision.num_parameters(hidden))}, one tile",
        ),
        MemoryItem(
            "image tiles",
            cached * is_first_stage + pixels * is_counted,
            f"{settings.cached_tiles} encoded tiles, and pixels of {settings.max_tiles} tiles in /dev/shm",
        ),
        MemoryItem(
            "image decoding",
            DECODING_THREADS * settings.max_pixels * DECODED_PIXEL_BYTES * is_counted,
            f"{DECODING_THREADS} images of {settings.max_pixels} pixels, {DECODED_PIXEL_BYTES} bytes each",
        ),
    )


def _rotary_bytes(shape: ModelShape, positions: int) -> int:
    """Returns the bytes of the tables of cosines and sines. Gemma has two rotary embeddings, so it has four tables."""
    tables = 2 if shape.gemma is None else 4
    return tables * positions * shape.rotary_width * FLOAT32_BYTES


def host_block_items(config: Config, rank: int) -> tuple[MemoryItem, ...]:
    """Returns the item of a rank's host memory for swapped sequences and KV tiers. Empty if both are off."""
    if config.num_pool_blocks == 0:
        return ()
    num_bytes = rank_kv_bytes_per_token(config, rank) * config.pa_config.block_size * config.num_pool_blocks
    basis = f"{config.num_host_blocks} blocks for sequences that are swapped out"
    if config.kv_tier_config.host_blocks:
        basis += f", {config.kv_tier_config.host_blocks} of KV tiers"
    return (MemoryItem(HOST_BLOCKS, num_bytes, basis),)


def hand_over_items(config: Config, rank: int) -> tuple[MemoryItem, ...]:
    """Returns the item of a rank's part of the hand-over pool, which all replicas of a machine share. Empty if replicas
    have no roles."""
    if not config.num_hand_over_blocks:
        return ()
    parallel, draft = config.parallel_config, config.draft
    token_bytes = rank_kv_bytes_per_token(config, rank)
    if draft is not None and draft.head is None:
        token_bytes -= _draft_bytes_per_token(config, rank)  # the pool has no blocks of a draft model
    block_bytes = token_bytes * config.pa_config.block_size
    num_replicas = max(1, parallel.agents_per_machine // parallel.group_size)
    num_bytes = block_bytes * config.num_hand_over_blocks // num_replicas
    basis = f"{config.num_hand_over_blocks} blocks that move between {parallel.data_parallel} replicas"
    return (MemoryItem("hand-over pool", num_bytes, basis),)


def _weight_bytes(config: Config, part: _Part) -> int:
    """Returns the bytes of a rank's weights: linear layers in the weight format, other weights in ``model_dtype``."""
    shape, linear_format = part.shape, config.linear_format
    rows = len(part.shard.vocab) * shape.hidden_size
    whole_vocab = shape.vocab_size * shape.hidden_size
    layers = shape.num_linear_parameters - whole_vocab
    others = shape.num_text_parameters - shape.num_linear_parameters - (0 if shape.tie_word_embeddings else whole_vocab)
    others -= 0 if part.shard.is_last_stage else shape.hidden_size
    output = rows if part.shard.is_last_stage else 0
    # CPU kernels pack weights, so the output weight is separate from the embedding.
    is_shared = shape.shares_output and config.device != "CPU" and part.shard.is_last_stage
    embedding = rows if part.shard.is_first_stage and not is_shared else 0
    if linear_format.is_float:
        return (layers + output + embedding + others) * config.dtype_bytes
    quantised = layers if _output_stays_float(config, part) else layers + output
    quantised -= shape.num_head_parameters
    bits = linear_format.bits_with_scales(config.model_config.weight_group, config.device)
    if config.stored_experts_only and config.model_config.weight_format == AUTO:
        quantised = shape.num_expert_parameters
        bits += 8 * FLOAT32_BYTES / config.stored_weight_group
    floats = layers + output - quantised + embedding + others
    return floats * config.dtype_bytes + int(quantised * bits / 8)


def linear_bytes(config: Config, count: int) -> int:
    """Returns the bytes of ``count`` parameters of linear layers in the weight format."""
    linear_format = config.linear_format
    if linear_format.is_float:
        return count * config.dtype_bytes
    return int(count * linear_format.bits_with_scales(config.model_config.weight_group, config.device) / 8)


def _output_stays_float(config: Config, part: _Part) -> bool:
    """Returns True if the output layer stays float although the linear layers are integers.

    This happens only with native operators, in three cases. The output layer shares its weight with the embedding. The
    vocabulary is too large for the weight-only primitive. The last byte of packed integers would not be full.
    """
    if config.op_table != "native":
        return False
    vocabulary, linear_format = part.shard.vocab_stride, config.linear_format
    too_wide = not linear_format.quantises_activations and vocabulary > MAX_WEIGHT_ONLY_SIZE
    return config.shape.shares_output or too_wide or vocabulary % linear_format.values_per_byte != 0


def _weight_formats(config: Config) -> str:
    weights, dtype = config.weight_format, config.model_config.model_dtype
    if config.stored_experts_only and config.model_config.weight_format == AUTO:
        return f"{weights}, all but the experts in {dtype}"
    return dtype if weights == dtype else f"{weights}, embedding and norms in {dtype}"


def activation_bytes(config: Config, shape: ModelShape) -> int:
    """Returns the bytes of one layer's activations in the largest step. ``shape`` is the rank's part."""
    query, key_value = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    attention = (query + 2 * key_value) + 2 * query
    if shape.latent is not None:
        attention = _latent_elements(shape, shape.latent)
    if shape.gated_attention:
        attention += 2 * query
    if shape.delta is not None:
        attention = max(attention, shape.delta.projected + shape.delta.values)
    per_token = 2 * shape.hidden_size + attention + 3 * shape.intermediate_size
    if config.op_table == "native" and shape.sliding_window:
        # A sliding window needs a mask. With sinks, the mask has one byte for each position. Without sinks, it has one
        # element for each position, and is computed from a matrix of the same size.
        per_token += config.max_model_len // config.dtype_bytes if shape.sinks else 2 * config.max_model_len
    if config.op_table == "native" and shape.sinks:
        # Each token has its own block table of int32: two elements of a 16-bit type for each block. The output of
        # attention also exists in float32, because each head's output is scaled by a factor from its sink.
        per_token += 2 * config.max_blocks_per_seq + 4 * query
    step = config.max_num_batched_tokens * per_token * config.dtype_bytes + _expert_bytes(config, shape)
    return step + copied_cache_bytes(config, shape)


def copied_cache_bytes(config: Config, shape: ModelShape) -> int:
    """Returns the bytes of the copies of one layer's KV cache that MindSpore's graph makes for attention with sinks.

    Replays make no copies.
    """
    if config.op_table != "native" or not shape.sinks:
        return 0
    row = 2 * shape.num_key_value_heads * shape.head_dim * config.dtype_bytes
    return config.pa_config.num_blocks * config.pa_config.block_size * row


def _latent_elements(shape: ModelShape, latent: LatentAttention) -> int:
    """Returns the number of elements of one token's activations in latent attention.

    Three vectors exist once for all heads: the result of the first linear layer, the latent vector of the queries, and
    the queries. In addition, each head has a query, a weighted sum of cache rows, and a result. The query and the sum
    are as wide as a row of the KV cache.
    """
    heads, queries = shape.num_attention_heads, shape.num_attention_heads * latent.head_dim
    first = (latent.query_rank or queries) + latent.cache_dim
    own_queries = latent.query_rank + queries if latent.query_rank else 0
    return first + own_queries + heads * (2 * latent.cache_dim + latent.value_dim)


def _expert_bytes(config: Config, shape: ModelShape) -> int:
    """Returns the bytes of the experts' activations; 0 without experts. Each row of a matrix belongs to one expert.

    Fused operators compute ``EXPERT_PIECE_ROWS`` rows at a time. They store the inputs, the product of gate and up, and
    float32 outputs. Native operators compute all rows at the same time. They also store gate and up, and in int8 the
    rounded inputs of both linear layers.
    """
    if shape.experts is None:
        return 0
    rows, hidden, inner = config.max_num_batched_tokens, shape.hidden_size, shape.experts.intermediate_size
    if config.op_table == "fused":
        per_row = (hidden + inner) * config.dtype_bytes + hidden * FLOAT32_BYTES
        shared = shape.experts.shared_size * config.dtype_bytes + (hidden + 1) * FLOAT32_BYTES
        per_token = shape.experts.per_token * per_row + (shared if shape.experts.shared_size else 0)
        return min(rows, EXPERT_PIECE_ROWS) * per_token
    per_row = (2 * hidden + 3 * inner) * config.dtype_bytes
    if shape.experts.activation == CLAMPED_SILU:
        per_row += 6 * inner * FLOAT32_BYTES  # gate and up as floats, before and after they are clamped
    if config.quantises_activations:
        per_row += hidden + inner + 2 * FLOAT32_BYTES
    return rows * shape.experts.per_token * per_row


def _logit_bytes(config: Config, part: _Part) -> int:
    """Returns the bytes of a rank's logits.

    Fused operators: the rank that samples has logits of the whole vocabulary, and other ranks have logits of their
    part. Native operators: each rank has its part of the logits in ``model_dtype``, and the gathered logits of all
    ranks. The operators that find candidate tokens also need float32 matrices of the same size. If several Ascends
    share the vocabulary, they then join their candidates, which may need more.
    """
    if not part.shard.is_last_stage:
        return 0
    if config.op_table == "native":
        agents, columns = config.parallel_config.tensor_parallel, len(part.shard.vocab)
        sampling = columns * CANDIDATE_MATRICES * FLOAT32_BYTES
        if agents > 1 and config.device == "Ascend":
            sampling = max(sampling, agents * JOINED_BYTES)
        gathered = config.shape.vocab_size * config.dtype_bytes if agents > 1 else 0
        return config.max_step_seqs * (columns * config.dtype_bytes + sampling + gathered)
    copies = 0 if config.dtype_bytes == FLOAT32_BYTES else config.dtype_bytes
    width = config.shape.vocab_size if part.answers else len(part.shard.vocab)
    return config.max_step_seqs * width * (FLOAT32_BYTES + copies)


def format_bytes(num_bytes: int) -> str:
    """Returns a size with a unit that leaves one to four digits: ``512 B``, ``1.5 MiB``, ``12.6 GiB``."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    size, unit = num_bytes / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f} {unit}"


def format_count(count: int) -> str:
    """Returns a number of parameters as text: ``6.74 B``, ``3.7 M``."""
    for size, unit, digits in ((10**9, "B", 2), (10**6, "M", 1), (10**3, "K", 1)):
        if count >= size:
            return f"{count / size:.{digits}f} {unit} parameters"
    return f"{count} parameters"
