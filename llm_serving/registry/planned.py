"""Describes a model that the configuration names: its config, its planned memory, and a function that reads its config
again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llm_serving.config import Config
from llm_serving.errors import ConfigError, ModelMemoryError
from llm_serving.planning.machine import Machine
from llm_serving.planning.memory_plan import SERVER_PROCESS_BYTES, estimate_memory
from llm_serving.registry.arbiter import HOST, NODES, Arbiter, Claim, Need

LoadConfig = Callable[[str | None, Config], tuple[Config, Need]]
"""Type of a function that reads a model's config again and plans its memory. The first argument is a model folder, or
None for the same folder. The second is the present config: the new config keeps its number of blocks and its maximum
lengths. Raises ConfigError, CheckpointError or MemoryPlanError.
"""


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model that the server may start. ``load`` is None if its config cannot be read again."""

    config: Config
    need: Need
    pinned: bool = False
    load: LoadConfig | None = None

    @property
    def name(self) -> str:
        return self.config.model_name

    @property
    def adapter_names(self) -> frozenset[str]:
        """Names of the LoRA adapters that the config lists. The model has them after each start."""
        entries = self.config.lora_config.adapters or ()
        return frozenset(entry.partition("=")[0].strip() for entry in entries)


def need_of(config: Config, machine: Machine) -> dict[str, int]:
    """Returns the bytes that a model needs in each pool, from its memory plan. The memory of the server process is not
    included.

    Agents on other machines need no memory of this machine. Each of these machines checks the plan itself.
    """
    plan = estimate_memory(config, machine)
    if config.parallel_config.is_remote:
        num_nodes = config.parallel_config.data_parallel * config.parallel_config.nodes_per_replica
        return {HOST: 0, NODES: num_nodes * (plan.total_bytes - SERVER_PROCESS_BYTES)}
    if config.device == "CPU":
        return {HOST: plan.total_bytes - SERVER_PROCESS_BYTES}
    ranks = plan.ranks or (plan.items,)
    first = config.serving_config.start_device_id or config.context.device_id
    devices = {f"device {first + rank}": sum(item.num_bytes for item in items) for rank, items in enumerate(ranks)}
    return {HOST: sum(item.num_bytes for item in plan.host_items) - SERVER_PROCESS_BYTES, **devices}


def limits_of(models: Sequence[PlannedModel], machine: Machine, memory_limit: int | None) -> dict[str, int]:
    """Returns the bytes that all models together may have in each pool.

    ``memory_limit`` is the limit of host memory if the device is a CPU, and the limit of each Ascend device otherwise.
    Without it, the limit of host memory is the free memory at the start of the server. The limit of an Ascend device is
    then ``max_device_memory`` of the first model on the device.
    """
    free = machine.available_bytes - SERVER_PROCESS_BYTES
    is_cpu = models[0].config.device == "CPU"
    limits = {HOST: memory_limit if is_cpu and memory_limit is not None else free}
    for model in models:
        stated = model.config.context.max_device_memory_bytes
        size = stated if memory_limit is None else memory_limit
        for pool in model.need:
            if pool not in (HOST, NODES) and size is not None:
                limits.setdefault(pool, size)
    return limits


def check_models(models: Sequence[PlannedModel], arbiter: Arbiter) -> None:
    """Raises ConfigError if a model does not fit into memory together with all pinned models, or if two names are
    equal.
    """
    names: set[str] = set()
    for model in models:
        for name in (model.name, *model.adapter_names):
            if name in names:
                raise ConfigError(f"models_config.models: the name {name!r} of a model or an adapter appears twice")
            names.add(name)
    pinned = [Claim(model.name, model.need, 0.0, may_sleep=False) for model in models if model.pinned]
    for model in models:
        others = [claim for claim in pinned if claim.name != model.name]
        try:
            arbiter.make_room(model.name, model.need, others)
        except ModelMemoryError as error:
            raise ConfigError(f"models_config.models: {error}") from None


def with_log_folder(config: Config, number: int) -> Config:
    """Returns the config of version ``number`` of a model. It names the folder for the logs of the version's agents.

    The folder differs from that of the version before, because both run at the same time during a reload. Version 0 has
    the folder that the config states.
    """
    if number == 0:
        return config
    path = Path(config.log_config.path)
    folder = path.parent / f"{config.model_name}.{number % 2}"
    log = replace(config.log_config, path=str(folder / path.name), flight_recorder=None)
    return replace(config, log_config=log)


def size_overrides(config: Config) -> list[str]:
    """Returns overrides ``section.key=value`` that give another config the number of blocks and the maximum lengths of
    ``config``.
    """
    sizes: Mapping[str, object] = {
        "pa_config.num_blocks": config.pa_config.num_blocks,
        "pa_config.decode_seq_length": config.pa_config.decode_seq_length,
        "model_config.max_generate_length": config.model_config.max_generate_length,
        "model_config.seq_length": list(config.model_config.seq_length),
    }
    return [f"{key}={value}" for key, value in sizes.items()]
