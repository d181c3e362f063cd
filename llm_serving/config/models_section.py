"""The section ``models_config`` of the configuration: further models."""

from __future__ import annotations

from dataclasses import dataclass

from llm_serving.config.schema import own


@dataclass(frozen=True, slots=True)
class FurtherModel:
    """One entry of ``models_config.models``: a model that the server serves next to the main model."""

    name: str = own("", "Name of the model in requests.")
    config: str | None = own(None, "YAML file of the model.", null="the default config")
    model: str | None = own(None, "Model folder, GGUF file or name of a model.", null="the model of `config`")
    set: tuple[str, ...] | None = own(None, "Settings of the model, each as `SECTION.KEY=VALUE`.", null="none")
    pinned: bool = own(False, "Whether the model is started with the server and never loses its memory.")


@dataclass(frozen=True, slots=True)
class ModelsConfig:
    """Further models of the server, see `docs/several_models.md`."""

    models: tuple[FurtherModel, ...] | None = own(
        None,
        "Models next to the main model. Each is a mapping with `name`, and with `config` (a YAML file), `model` (a "
        "folder, GGUF file or name) or both. `set` is a list of `SECTION.KEY=VALUE`. With `pinned: true`, the model "
        "starts with the server and never loses its memory.",
        null="only the main model",
    )
    memory_limit: int | None = own(
        None,
        "Memory that all models together may have by their memory plans, the main model included: of the host on a "
        "CPU, of each device on Ascends.",
        unit="bytes",
        low=1024,
        high=1 << 50,
        null="the free memory of the host at the start, or `max_device_memory` of the device",
    )
    idle_unload_s: float | None = own(
        None,
        "Time without requests after which a model is unloaded, unless it is pinned.",
        unit="seconds",
        low=0.1,
        high=31_536_000.0,
        null="models are unloaded only if another model needs the memory, or by a command",
    )
    max_wait_s: float = own(
        120.0,
        "Longest time that a request waits until its model is in memory. Then it gets a 503.",
        unit="seconds",
        low=0.0,
        high=86_400.0,
    )
