"""Plans all models of a configuration: the main model, and the models in ``models_config.models``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from llm_serving.config import Config
from llm_serving.config.models_section import FurtherModel
from llm_serving.errors import CheckpointError, ConfigError, MemoryPlanError
from llm_serving.planning.machine import Machine
from llm_serving.registry.arbiter import Arbiter, Need
from llm_serving.registry.planned import PlannedModel, check_models, limits_of, need_of, size_overrides

ReadConfig = Callable[[str | None, str | None, Sequence[str]], Config]
"""Type of a function that reads a config. Arguments: the YAML file and the model, each None for the default, and
overrides ``section.key=value``.
"""


@dataclass(frozen=True, slots=True)
class PlannedModels:
    """All models of a server, the main model first, and the arbiter of their memory."""

    models: tuple[PlannedModel, ...]
    arbiter: Arbiter


def plan_models(
    config: Config, read: ReadConfig, read_main: Callable[[Sequence[str]], Config], machine: Machine
) -> PlannedModels:
    """Reads the configs of all models and checks that each model fits into memory together with the pinned models.

    ``read_main`` reads the config of the main model again, with further overrides. Raises ConfigError, CheckpointError
    or MemoryPlanError.
    """
    load_main = partial(_read_again, read_main, machine)
    models = [PlannedModel(config, need_of(config, machine), pinned=True, load=load_main)]
    for entry in config.models_config.models or ():
        models.append(_planned(entry, config, read, machine))
    arbiter = Arbiter(limits_of(models, machine, config.models_config.memory_limit))
    if len(models) > 1:
        check_models(models, arbiter)
    return PlannedModels(tuple(models), arbiter)


def _planned(entry: FurtherModel, main: Config, read: ReadConfig, machine: Machine) -> PlannedModel:
    """Plans a model of ``models_config.models``. Raises ConfigError with the model's name if its config is wrong."""
    if not entry.name:
        raise ConfigError("models_config.models: a model has no name; add `name: NAME`")
    if entry.config is None and entry.model is None:
        raise ConfigError(f"models_config.models: the model {entry.name!r} needs `config`, `model` or both")
    log = Path(main.log_config.path)
    # HTTP port and log belong to the server. A further model opens no agent ports, has no flight recorder, and its
    # agents log into another folder.
    forced = [
        f"model_config.model_name={json.dumps(entry.name)}",
        "serving_config.agent_ports=[0]",
        f"log_config.path={json.dumps(str(log.parent / entry.name / log.name))}",
        "log_config.flight_recorder=null",
    ]
    read_entry = partial(_read_entry, entry, read, forced)
    config = read_entry(())
    if config.models_config.models:
        raise ConfigError(f"models_config.models: the config of {entry.name!r} must not have models_config.models")
    if config.device != main.device:
        raise ConfigError(
            f"models_config.models: {entry.name!r} is for the device {config.device}; all models must be for the "
            f"device of the main model, {main.device}"
        )
    return PlannedModel(config, need_of(config, machine), entry.pinned, partial(_read_again, read_entry, machine))


def _read_entry(entry: FurtherModel, read: ReadConfig, forced: Sequence[str], more: Sequence[str]) -> Config:
    try:
        return read(entry.config, entry.model, [*(entry.set or ()), *forced, *more])
    except (ConfigError, CheckpointError, MemoryPlanError) as error:
        raise ConfigError(f"models_config.models, model {entry.name!r}: {error}") from None


def _read_again(
    read: Callable[[Sequence[str]], Config], machine: Machine, path: str | None, present: Config
) -> tuple[Config, Need]:
    """Reads a config again, with the sizes of ``present`` and the model folder ``path`` (None: unchanged).

    Returns the config and its planned memory.
    """
    place = [] if path is None else [f"model_config.model_path={json.dumps(path)}"]
    config = read([*size_overrides(present), *place])
    return config, need_of(config, machine)
