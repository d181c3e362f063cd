"""Calculates the host memory that a deployment on devices with their own memory needs while its agents load.

Every agent converts the weights of its part of the model in host memory, and then copies them to its device. All agents
load at the same time. The host blocks for swapped sequences are allocated after loading. So the need is the larger of
two amounts, not their sum: the weights during the conversion, or the host blocks.
"""

from __future__ import annotations

from llm_serving.config import Config
from llm_serving.model.parallel import local_shape
from llm_serving.planning.machine import Machine
from llm_serving.planning.rank_memory import (
    FLOAT32_BYTES,
    WEIGHTS,
    MemoryItem,
    device_items,
    format_bytes,
    host_block_items,
    shared_adapter_bytes,
)

LOAD_THREADS = 4
"""Maximum number of threads of an agent that convert weights (``MAX_THREADS`` of ``agent/weights/loader.py``)."""


def host_items(config: Config, processes: tuple[MemoryItem, ...], world: range) -> tuple[MemoryItem, ...]:
    """Returns the items that are in host memory when the need is highest.

    These are ``processes``, LoRA adapters, and the larger of two: the weights during loading, or the host blocks for
    swapped sequences. ``world`` are the ranks of the machine's agents.
    """
    weights = sum(item.num_bytes for rank in world for item in device_items(config, rank) if item.name == WEIGHTS)
    conversion = sum(_conversion_bytes(config, rank) for rank in world)
    blocks = tuple(item for rank in world for item in host_block_items(config, rank))
    swapped = sum(item.num_bytes for item in blocks)
    if adapters := shared_adapter_bytes(config):
        processes = (MemoryItem("LoRA adapters", adapters, "in /dev/shm"), *processes)
    if swapped > weights + conversion:
        return (MemoryItem("host blocks", swapped, blocks[0].basis), *processes)
    return (
        MemoryItem("loaded weights", weights, "before they are on the devices"),
        MemoryItem("conversion", conversion, "the largest parameter in float32, for each thread"),
        *processes,
    )


def too_little_host_memory(items: tuple[MemoryItem, ...], machine: Machine) -> str | None:
    """Returns an error text if the items do not fit the machine, otherwise None."""
    needed = sum(item.num_bytes for item in items)
    if needed <= machine.available_bytes:
        return None
    listed = ", ".join(f"{item.name} {format_bytes(item.num_bytes)}" for item in items)
    return (
        f"the agents need {format_bytes(needed)} of host memory ({listed}), of "
        f"{format_bytes(machine.available_bytes)} ({machine.available_from}): use a machine with more memory, a lower "
        "parallel_config.data_parallel, or a model_config.weight_format with fewer bits"
    )


def _conversion_bytes(config: Config, rank: int) -> int:
    """Returns the bytes of memory in which one agent's threads convert weights. Each thread needs the size of the
    largest parameter in float32.
    """
    shard = config.shard(rank)
    shape = local_shape(config.shape, shard)
    inner = shape.intermediate_size if shape.experts is None else shape.experts.intermediate_size
    heads = shape.num_attention_heads + 2 * shape.num_key_value_heads
    rows = max(len(shard.vocab), 2 * inner, heads * shape.head_dim)
    return LOAD_THREADS * rows * shape.hidden_size * FLOAT32_BYTES
