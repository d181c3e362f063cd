"""Checks that the Ascend's kernels support a config, before anything is loaded. Sources: docs/ascend.md."""

from __future__ import annotations

from llm_serving.config import Config
from llm_serving.errors import AgentStartError
from llm_serving.model.deepseek import LatentAttention

HEAD_MULTIPLE = 16
"""Head sizes must be multiples of this number."""
MAX_HEAD_DIM = 256
"""Maximum head size of both attention kernels."""
BLOCK_SIZES = (16, 32, 64, 128)
"""Numbers of tokens that a block of the KV cache may have."""
MAX_BLOCK_ELEMENTS = 128 * 128
"""Maximum of the product of block size and head size in PagedAttention."""
MAX_HEAD_GROUP = 128
"""Maximum number of query heads that share a key-value head in PagedAttention."""
MAX_LATENT_DIM = 576
"""Maximum number of elements of one token in the cache of latent attention (PagedAttention with latent vectors)."""
MAX_SINK_GROUP = 64
"""Maximum number of query heads that share a key-value head in FusedInferAttentionScore (attention with sinks)."""
MAX_SINK_CACHE = 2**31 - 1
"""Maximum number of elements of a layer's key cache in FusedInferAttentionScore."""
MAX_EXPERTS = 1024
"""Maximum number of weight matrices, one for each expert, in one call of GroupedMatmulV4."""


def check_limits(config: Config) -> None:
    """Raises AgentStartError, with value, limit and remedy, if the kernels do not support the config."""
    shape, block_size = config.shape, config.pa_config.block_size
    head_dim, group = shape.head_dim, shape.num_attention_heads // shape.num_key_value_heads
    other_device = "serve this model on the CPU (model_config.device_target: CPU)"
    if shape.latent is not None:
        _check_latent(shape.latent, shape.num_attention_heads, block_size, other_device)
    elif head_dim % HEAD_MULTIPLE or head_dim > MAX_HEAD_DIM:
        raise AgentStartError(
            f"the model's heads have {head_dim} elements; the Ascend's attention kernels take multiples of "
            f"{HEAD_MULTIPLE} up to {MAX_HEAD_DIM}: {other_device}"
        )
    if shape.latent is None and group > MAX_HEAD_GROUP:
        raise AgentStartError(
            f"{group} query heads of the model share a key-value head; PagedAttention on an Ascend takes "
            f"at most {MAX_HEAD_GROUP}: {other_device}"
        )
    if shape.experts is not None and shape.experts.count > MAX_EXPERTS:
        raise AgentStartError(
            f"the model has {shape.experts.count} experts in a layer; GroupedMatmulV4 on an Ascend takes "
            f"at most {MAX_EXPERTS}: {other_device}"
        )
    window = shape.sliding_window
    if shape.sinks:
        _check_sinks(config, other_device)
    elif 0 < window < config.max_model_len:
        raise AgentStartError(
            f"the model's attention window is {window} tokens, and sequences may have {config.max_model_len}; "
            "PagedAttention on an Ascend supports no window: set pa_config.decode_seq_length to at most "
            f"{window}, or {other_device}"
        )
    if shape.latent is not None:
        return
    sizes = [size for size in BLOCK_SIZES if size * head_dim <= MAX_BLOCK_ELEMENTS]
    if block_size not in sizes:
        raise AgentStartError(
            f"pa_config.block_size = {block_size}; for heads of {head_dim} elements the Ascend's PagedAttention takes "
            f"{', '.join(map(str, sizes))}"
        )


def _check_sinks(config: Config, other_device: str) -> None:
    """Raises AgentStartError if FusedInferAttentionScore does not support the heads or the cache of the config.

    ``other_device`` is the remedy in the error: to serve the model on another device.
    """
    shape, cache = config.shape, config.pa_config
    group = shape.num_attention_heads // shape.num_key_value_heads
    if group > MAX_SINK_GROUP:
        raise AgentStartError(
            f"{group} query heads of the model share a key-value head; FusedInferAttentionScore on an Ascend takes at "
            f"most {MAX_SINK_GROUP}: {other_device}"
        )
    row = shape.num_key_value_heads * shape.head_dim * cache.block_size
    if cache.num_blocks * row > MAX_SINK_CACHE:
        raise AgentStartError(
            f"pa_config.num_blocks = {cache.num_blocks}; with attention sinks, a layer's key cache on an Ascend has at "
            f"most {MAX_SINK_CACHE} elements: set num_blocks to at most {MAX_SINK_CACHE // row}"
        )


def _check_latent(latent: LatentAttention, heads: int, block_size: int, other_device: str) -> None:
    """Raises AgentStartError if PagedAttention does not support this latent attention with ``heads`` query heads.

    ``block_size`` is the number of tokens of a block. ``other_device`` is the remedy, as in ``_check_sinks``.
    """
    parts = {"latent vector": latent.rank, "rotated key": latent.rope_dim}
    for name, size in parts.items():
        if size % HEAD_MULTIPLE:
            raise AgentStartError(
                f"the model's {name} has {size} elements; PagedAttention on an Ascend takes multiples of "
                f"{HEAD_MULTIPLE}: {other_device}"
            )
    if latent.cache_dim > MAX_LATENT_DIM:
        raise AgentStartError(
            f"the model caches {latent.cache_dim} elements of a token (latent vector and rotated key); PagedAttention "
            f"on an Ascend takes at most {MAX_LATENT_DIM}: {other_device}"
        )
    if heads > MAX_HEAD_GROUP:
        raise AgentStartError(
            f"the model has {heads} query heads for one latent vector; PagedAttention on an Ascend takes at most "
            f"{MAX_HEAD_GROUP}: {other_device}"
        )
    if block_size not in BLOCK_SIZES:
        raise AgentStartError(
            f"pa_config.block_size = {block_size}; for latent attention the Ascend's PagedAttention takes "
            f"{', '.join(map(str, BLOCK_SIZES))}"
        )
