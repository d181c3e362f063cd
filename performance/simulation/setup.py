"""Builds the parts of a simulated run from a config, a device name and settings. Reads no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from llm_serving.config import Config, load_config
from llm_serving.engine.scheduler_limits import scheduler_limits
from llm_serving.errors import CheckpointError, ConfigError
from llm_serving.hub.fetching import cached_draft
from llm_serving.scheduler.limits import SchedulerLimits
from performance.program import UsageError
from performance.simulation.device import CostModel, DeviceRates, RooflineDevice
from performance.simulation.fit import FittedDevice, StepFit, read_fit
from performance.simulation.host import HostModel
from performance.simulation.presets import PRESETS
from performance.simulation.spread import Spread
from performance.simulation.work import ModelWork

__all__ = [
    "Setup",
    "check_belongs",
    "identity",
    "make_setup",
    "simulated_config",
    "split_settings",
    "stored_fit",
]

REPOSITORY = Path(__file__).resolve().parents[2]
STORED_FITS = Path(__file__).resolve().parent / "fits"
STAND_IN_TOKENIZER = REPOSITORY / "models" / "shapes" / "tokenizer"
WITHOUT_FILES = (
    "model_config.load_format=dummy",
    f"tokenizer.vocab_file={STAND_IN_TOKENIZER}",
    "tokenizer.type=auto",
)
ANY_PORTS = "serving_config.agent_ports=[0]"
"""Setting for agent ports. 0 fits any number of agents, and a simulation opens no port."""
OWN_SECTIONS = ("device", "host")
"""Sections of ``--set`` and ``--sweep`` that belong to the simulator and not to the config."""


Figures = TypeVar("Figures", DeviceRates, HostModel)


@dataclass(frozen=True, slots=True)
class Setup:
    """A deployment to simulate: config, scheduler limits, and models of device and host."""

    config: Config
    limits: SchedulerLimits
    device: CostModel
    host: HostModel
    spread: Spread | None
    """Random deviations of single steps from the fitted time. None without a fit."""


def simulated_config(name: str, settings: Sequence[str], device: str) -> Config:
    """Loads a config as a server on ``device`` would.

    A simulation needs only the sizes of the model. If weights or tokenizer are missing, the config is loaded with
    random weights and the tokenizer of ``models/shapes``. Raises ConfigError or CheckpointError if the sizes are also
    missing.
    """
    ascend = device != "cpu"
    settings = [ANY_PORTS, *settings]
    try:
        return load_config(name, settings, ascend=ascend, fetch=cached_draft)
    except (CheckpointError, ConfigError):
        target = f"model_config.device_target={'Ascend' if ascend else 'CPU'}"
        return load_config(name, [*WITHOUT_FILES, target, *settings], ascend=ascend, fetch=cached_draft)


def make_setup(name: str, settings: Sequence[str], device: str, fit: StepFit | None = None) -> Setup:
    """Builds the deployment to simulate. ``settings`` have the form ``section.key=value``.

    The section ``device`` changes fields of ``DeviceRates``, and ``host`` changes fields of ``HostModel``. All other
    sections are those of the config. Without ``fit`` and without changed rates, a CPU uses the stored fit of the model,
    or the preset if there is no stored fit. Raises UsageError for an unknown field.
    """
    theirs, own = split_settings(settings)
    config = simulated_config(name, theirs, device)
    if fit is None and device == "cpu" and not own["device"] and stored_fit(config).is_file():
        fit = read_fit(stored_fit(config))
    if fit is not None and own["device"]:
        raise UsageError(f"device.{next(iter(own['device']))}: the device is fitted to measured steps and has no rates")
    host = _replaced(HostModel() if fit is None else fit.host, own["host"], "host")
    spread = None
    cost: CostModel
    if fit is not None:
        check_belongs(fit, config)
        cost, spread = FittedDevice(fit), fit.spread
    else:
        cost = RooflineDevice(_replaced(PRESETS[device], own["device"], "device"), ModelWork.of(config))
    return Setup(config, scheduler_limits(config), cost, host, spread)


def identity(config: Config) -> dict[str, str]:
    """Returns the settings that decide step times: model, number formats and op table.

    Measured step times are only valid for a config in which all these settings are equal.
    """
    return {
        "model": config.model_name,
        "weight_format": config.weight_format,
        "kv_format": config.kv_format,
        "op_table": config.op_table,
    }


def check_belongs(fit: StepFit, config: Config) -> None:
    """Raises UsageError if the fit belongs to another model, to other number formats or to another op table."""
    for name, value in identity(config).items():
        if fit.provenance.get(name) != value:
            raise UsageError(
                f"the fit is for {name} {fit.provenance.get(name)!r}, the configuration has {value!r};"
                " fit a recording of this deployment (--recording)"
            )


def stored_fit(config: Config) -> Path:
    """Returns the path of a model's fit on the machine of ``docs/performance.md``. The file may not exist."""
    return STORED_FITS / ("_".join(identity(config).values()) + ".json")


def split_settings(settings: Sequence[str]) -> tuple[list[str], dict[str, dict[str, float]]]:
    """Returns the settings of the config, and the values of the simulator's own settings by section and name."""
    theirs: list[str] = []
    own: dict[str, dict[str, float]] = {section: {} for section in OWN_SECTIONS}
    for setting in settings:
        key, _, value = setting.partition("=")
        section, _, field = key.partition(".")
        if section not in own:
            theirs.append(setting)
            continue
        try:
            own[section][field] = float(value)
        except ValueError:
            raise UsageError(f"{key}: {value!r} is not a number") from None
    return theirs, own


def _replaced(model: Figures, changes: Mapping[str, float], section: str) -> Figures:
    known = [field.name for field in fields(model) if isinstance(getattr(model, field.name), float | int)]
    for name in changes:
        if name not in known:
            raise UsageError(f"{section}.{name}: there is no such field; the fields are {', '.join(known)}")
    changed: dict[str, Any] = dict(changes)
    return replace(model, **changed)
