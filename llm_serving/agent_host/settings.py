"""The settings of a node, and the config with which the node starts agents for a server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from llm_serving.cluster.program import model_difference, model_files
from llm_serving.config import Config
from llm_serving.config.parallel_section import LOCAL, ParallelConfig
from llm_serving.errors import ConfigError, MemoryPlanError
from llm_serving.planning.machine import Machine
from llm_serving.planning.memory_plan import plan_memory


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """The settings of a node. The agents write their logs to ``log_folder``."""

    log_folder: Path
    adapter_folder: Path
    """Folder that keeps received LoRA adapters."""
    model_path: str | None = None
    """Path of the model on this machine. None: the same path as on the server."""
    first_device: int | None = None
    """Number of the first device of the agents. None: the number in the server's config."""
    agent_module: str = "agent"
    pool: str = ""
    """The pool by prompt length whose replicas the node serves. Empty: of the pools that no node names."""


def config_of_node(config: Config, settings: NodeSettings) -> Config:
    """Returns the config for the agents on this node, which runs all agents of one replica or some of them.

    It is the server's config, with the paths and devices of this machine.
    """
    own = ParallelConfig()
    parallel = replace(
        config.parallel_config,
        data_parallel=1,
        pools=None,
        executor=LOCAL,
        nodes=None,
        cluster_key_file=None,
        ray_address=own.ray_address,
        ray_cpus=own.ray_cpus,
        idle_s=None,
    )
    serving = replace(config.serving_config, agent_ip="127.0.0.1", agent_ports=(0,) * parallel.agents_per_machine)
    if settings.first_device is not None:
        serving = replace(serving, start_device_id=settings.first_device)
    log = replace(config.log_config, path=str(settings.log_folder / "agent_host.log"))
    model = config.model_config
    if settings.model_path is not None and model.load_format != "dummy":
        model = replace(model, model_path=settings.model_path)
    return replace(config, parallel_config=parallel, serving_config=serving, log_config=log, model_config=model)


def check_node(config: Config, files: dict[str, str]) -> str | None:
    """Returns the reason why this machine cannot serve ``config``, or None if it can. ``config`` must come
    from ``config_of_node``.

    ``files`` describes the model's files on the server. The check compares them with the beginning and the end of each
    file on this machine.
    """
    try:
        problem = model_difference(files, model_files(config))
    except OSError as error:
        return f"the model cannot be read on the node: {error}"
    if problem is not None:
        return problem
    try:
        plan_memory(config, Machine.detect())
    except (MemoryPlanError, ConfigError) as error:
        return f"the model does not fit the node: {error}"
    return None
