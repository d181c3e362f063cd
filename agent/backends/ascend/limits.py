"""What the attention kernels of an Ascend take, checked before anything is loaded. Sources: docs/ascend.md."""

from __future__ import annotations

from llm_serving.config import Config
from llm_serving.errors import AgentStartError

HEAD_MULTIPLE = 16
"""FlashAttentionScore: the size of a head is a multiple of it."""
MAX_BLOCK_ELEMENTS = 128 * 128
"""PagedAttention: block_size x head size, at most."""


def check_limits(config: Config) -> None:
    """Raises AgentStartError naming value, limit and what to do."""
    head_dim, block_size = config.shape.head_dim, config.pa_config.block_size
    if head_dim % HEAD_MULTIPLE:
        raise AgentStartError(
            f"the model's heads have {head_dim} elements; FlashAttentionScore on an Ascend takes multiples of "
            f"{HEAD_MULTIPLE}. Serve this model on the CPU (model_config.device_target: CPU)"
        )
    if block_size * head_dim > MAX_BLOCK_ELEMENTS:
        raise AgentStartError(
            f"pa_config.block_size = {block_size} with heads of {head_dim} elements makes {block_size * head_dim}; "
            f"PagedAttention on an Ascend takes {MAX_BLOCK_ELEMENTS}: a block_size of {MAX_BLOCK_ELEMENTS // head_dim} "
            "at most"
        )
