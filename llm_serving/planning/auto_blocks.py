"""Chooses the sizes that are ``auto`` in the config, so that the memory plan fits the machine.

These are the KV cache blocks (``num_blocks: auto``) and the maximum length of sequences (``decode_seq_length: auto``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from llm_serving.config import Config
from llm_serving.config.resolve import fewest_blocks
from llm_serving.config.sections import MAX_BLOCKS
from llm_serving.config.validation import MAX_CACHE_SLOTS
from llm_serving.errors import MemoryPlanError
from llm_serving.planning.machine import Machine
from llm_serving.planning.memory_plan import estimate_memory
from llm_serving.telemetry.npu_smi import Chip, read_chips

SPARE_FRACTION = {"CPU": 0.10, "Ascend": 0.05}
"""Fraction of the available memory that stays free, as a reserve for low estimates and for other programs."""


SHORTEST = 256
"""``fit_length`` never chooses a maximum sequence length below this number of tokens. If this length does not fit,
``plan_memory`` later raises MemoryPlanError.
"""


def fit_sizes(config: Config, machine: Machine, read_npus: Callable[[], Sequence[Chip]] = read_chips) -> Config:
    """Replaces all sizes that are ``auto`` in the config by numbers: first the length, then the number of blocks."""
    return fit_blocks(fit_length(config, machine, read_npus), machine, read_npus)


def fit_length(config: Config, machine: Machine, read_npus: Callable[[], Sequence[Chip]] = read_chips) -> Config:
    """Replaces ``auto`` as the maximum length of sequences by the greatest length that fits.

    If the number of blocks is also ``auto``, the blocks of one sequence must fit. A config with a length is returned
    unchanged. Raises MemoryPlanError if the memory of an Ascend is not known.
    """
    if not config.auto_length:
        return config
    budget = _budget(config, machine, read_npus)
    size, longest = config.pa_config.block_size, config.max_model_len
    fewest, most = -(-min(SHORTEST, longest) // size), -(-longest // size)
    while fewest < most:  # binary search for the largest length, in whole blocks
        middle = (fewest + most + 1) // 2
        if _needed_bytes(_with_length(config, min(middle * size, longest)), machine) <= budget:
            fewest = middle
        else:
            most = middle - 1
    return _with_length(config, min(fewest * size, longest))


def _with_length(config: Config, length: int) -> Config:
    """Returns the config with another maximum length. If the number of blocks is ``auto``, the config gets the number
    of blocks that one sequence of this length needs.
    """
    cache = replace(config.pa_config, decode_seq_length=length)
    if config.auto_blocks:
        cache = replace(cache, num_blocks=fewest_blocks(length, cache.block_size))
    return replace(config, pa_config=cache)


def fit_blocks(config: Config, machine: Machine, read_npus: Callable[[], Sequence[Chip]] = read_chips) -> Config:
    """Replaces ``auto`` as the number of blocks by the greatest number that fits.

    Without the prefix cache, the result has at most as many blocks as all running sequences can use. If not even one
    sequence of the maximum length fits, the result has blocks for one sequence, and ``plan_memory`` later raises an
    error. A config with a number of blocks is returned unchanged. Raises MemoryPlanError if the memory of an Ascend is
    not known.
    """
    if not config.auto_blocks:
        return config
    budget = _budget(config, machine, read_npus)
    fewest, most = config.pa_config.num_blocks, _most_useful(config)
    # Binary search for the largest number that fits. A division is not enough, because the number of host blocks also
    # depends on the number of blocks.
    while fewest < most:
        middle = (fewest + most + 1) // 2
        if _needed_bytes(with_blocks(config, middle), machine) <= budget:
            fewest = middle
        else:
            most = middle - 1
    return with_blocks(config, fewest)


def with_blocks(config: Config, num_blocks: int) -> Config:
    """Returns the config with another number of blocks."""
    return replace(config, pa_config=replace(config.pa_config, num_blocks=num_blocks))


def _budget(config: Config, machine: Machine, read_npus: Callable[[], Sequence[Chip]]) -> int:
    """Returns the number of bytes that the plan may use: the available memory minus the reserve."""
    return int(_available_bytes(config, machine, read_npus) * (1 - SPARE_FRACTION[config.device]))


def _needed_bytes(config: Config, machine: Machine) -> int:
    return estimate_memory(config, machine).total_bytes


def _most_useful(config: Config) -> int:
    """Returns the maximum number of blocks that the server can use."""
    limit = min(MAX_BLOCKS, MAX_CACHE_SLOTS // config.pa_config.block_size)
    if config.uses_prefix_cache:
        return limit
    return min(limit, max(config.pa_config.num_blocks, config.max_num_seqs * config.max_blocks_per_seq + 1))


def _available_bytes(config: Config, machine: Machine, read_npus: Callable[[], Sequence[Chip]]) -> int:
    """Returns the free memory of the machine, or of the Ascend with the least free memory among the agents' devices."""
    if config.device == "CPU":
        return machine.available_bytes
    limit = config.context.max_device_memory_bytes
    first = config.serving_config.start_device_id or config.context.device_id
    devices = range(first, first + config.parallel_config.agents_per_machine)
    free = [chip.free_bytes for chip in read_npus() if chip.number in devices]
    if len(free) == len(devices):
        return min(free) if limit is None else min(limit, *free)
    if limit is not None:
        return limit
    raise MemoryPlanError(
        "a size of pa_config is auto, and the free memory of the Ascend is not known, because npu-smi info lists "
        f"{len(free)} of the {len(devices)} devices from {first} on; state context.max_device_memory in "
        "model_config.model_cfg_path, or numbers in pa_config"
    )
