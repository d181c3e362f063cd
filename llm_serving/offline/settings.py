"""Turns the keyword arguments of ``LLM`` into a config and a checked memory plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from llm_serving.cli import DEFAULT_CONFIG, load_for_model, short_overrides
from llm_serving.config import Config
from llm_serving.config.sections import SECTIONS
from llm_serving.errors import ConfigError
from llm_serving.planning.machine import Machine
from llm_serving.planning.memory_plan import plan_memory


def config_of(
    model: str | None,
    config: str | None,
    options: Mapping[str, object],
    settings: Mapping[str, object],
    log_folder: Path,
    *,
    offline: bool,
) -> Config:
    """Returns the config of an ``LLM``. ``settings`` override ``options``, and ``options`` override the config file.

    ``options`` are the values of the options ``--dtype`` and ``--quantize``. The logs are in ``log_folder``
    unless ``settings`` state another place. Raises ConfigError, CheckpointError or MemoryPlanError.
    """
    own = [
        "serving_config.agent_ports=[0]",
        "serving_config.canary_interval_s=0",
        f"log_config.path={json.dumps(str(log_folder / 'llm.log'))}",
        "log_config.flight_recorder_mib=0",
    ]
    overrides = [*own, *short_overrides(options), *overrides_of(settings)]
    machine = Machine.detect()
    loaded = load_for_model(config or DEFAULT_CONFIG, model, overrides, machine, offline=offline)
    if loaded.kv_events_config.enabled:
        raise ConfigError("LLM: kv_events_config.enabled = true: only a server publishes events; remove the setting")
    plan_memory(loaded, machine)
    return loaded


def overrides_of(settings: Mapping[str, object]) -> list[str]:
    """Converts settings to overrides ``section.key=value``. The name of a setting is ``section.key``, or a section
    whose value is a mapping of keys to values.

    Raises ConfigError for other names, and for values that are not JSON.
    """
    overrides = []
    for name, value in settings.items():
        if "." in name:
            overrides.append(_override(name, value))
        elif name in SECTIONS and isinstance(value, Mapping):
            overrides += [_override(f"{name}.{key}", each) for key, each in value.items()]
        else:
            raise ConfigError(
                f"LLM({name}={value!r}): a setting is a section with a dict of its keys, for example "
                f"pa_config={{'num_blocks': 512}}; the sections are {', '.join(SECTIONS)}"
            )
    return overrides


def _override(name: str, value: object) -> str:
    try:
        return f"{name}={json.dumps(value)}"
    except (TypeError, ValueError):
        raise ConfigError(f"LLM: {name} = {value!r}: must be a JSON value") from None
