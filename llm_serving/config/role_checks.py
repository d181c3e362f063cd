"""Checks of the roles of replicas (separate prefill and decode)."""

from __future__ import annotations

from llm_serving.config.config import Config
from llm_serving.config.parallel_section import BOTH, DECODE, MAX_SENT_BLOCKS, PREFILL
from llm_serving.config.source import RawConfig
from llm_serving.model.parallel import answering_rank, local_shape


def check_roles(raw: RawConfig, config: Config) -> None:
    """Raises ConfigError if the roles cannot serve every request, or if blocks of this model cannot be handed over."""
    parallel = config.parallel_config
    if parallel.roles is not None:
        problem = _problem_of(parallel.roles, parallel.data_parallel)
        if problem is not None:
            raise raw.error("parallel_config.roles", list(parallel.roles), problem)
    if not parallel.has_roles:
        for name in ("prefill_threshold", "hand_over_blocks"):
            if (value := getattr(parallel, name)) is not None:
                problem = "has no effect without roles; set parallel_config.roles"
                raise raw.error(f"parallel_config.{name}", value, problem)
        return
    obstacle = _obstacle(config)
    if obstacle is not None:
        raise raw.error("parallel_config.roles", list(parallel.replica_roles), obstacle)
    needed = config.max_blocks_per_seq
    if config.num_hand_over_blocks < needed:
        problem = f"the longest sequence has {needed} blocks; use at least {needed}"
        raise raw.error("parallel_config.hand_over_blocks", config.num_hand_over_blocks, problem)
    if parallel.is_remote and needed > MAX_SENT_BLOCKS:
        problem = (
            f"the longest sequence has {needed} blocks; nodes hand over at most {MAX_SENT_BLOCKS}. Use larger blocks "
            "(pa_config.block_size) or a smaller pa_config.decode_seq_length"
        )
        raise raw.error("parallel_config.roles", list(parallel.roles or ()), problem)


def _head_fits(config: Config) -> bool:
    """Returns True if there is no draft head, or if a block has the same size in the head's cache arrays as in the
    model's.

    A block of the hand-over pool has parts of one size, one for each array (``HandOverLayout``). A layer with latent
    attention has one array, and other layers have two. So layers of equal size may have arrays of different sizes. If
    agents share the model, each has a part of a layer's heads, but the head is whole.
    """
    if config.draft is None or config.draft.head is None:
        return True
    own = local_shape(config.shape, config.shard(answering_rank(0, config.parallel_config)))
    sizes = {config.kv_bytes_of(shape) // shape.num_cache_arrays for shape in (own, config.draft.shape)}
    return len(sizes) == 1


def _problem_of(roles: tuple[str, ...], num_replicas: int) -> str | None:
    """Returns the reason why these roles cannot serve every request, or None if they can."""
    unknown = set(roles) - {PREFILL, DECODE, BOTH}
    if unknown:
        return f"{', '.join(sorted(unknown))} is not a role; the roles are prefill, decode and both"
    if len(roles) != num_replicas:
        return f"has {len(roles)} roles for {num_replicas} replicas (data_parallel); state one for each"
    if set(roles) == {PREFILL}:
        return "no replica can decode; give one the role decode or both"
    if set(roles) == {DECODE}:
        return "no replica computes long prompts; give one the role prefill or both"
    return None


def _obstacle(config: Config) -> str | None:
    """Returns the reason why the blocks of this model cannot be handed over, or None if they can."""
    reasons = {
        "blocks in the memory of a device are not handed over yet; use a CPU, or no roles": config.device != "CPU",
        f"{config.shape.architecture} has states that blocks do not contain; use no roles": (
            config.shape.delta is not None
        ),
        "the server computes embeddings or scores, which have nothing to decode; use no roles": (
            config.pooling is not None
        ),
        "sequences need blocks on demand; set model_config.page_attention: true": (
            not config.model_config.page_attention
        ),
        "the head's KV cache has blocks of another size than the model's; set speculative_config.method to "
        "draft, suffix or off": not _head_fits(config),
        "native operators keep the scales of an int8 KV cache in blocks of another size; use kv_format auto": (
            config.op_table == "native" and config.kv_format == "int8"
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
