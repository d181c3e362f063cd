"""From a configuration, a device and settings to what a run needs. Neither weights nor a device are looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from llm_serving.config import Config, load_config
from llm_serving.errors import CheckpointError, ConfigError
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
"""As many as there are agents: nothing listens here."""
OWN_SECTIONS = ("device", "host")
"""Sections of ``--set`` and ``--sweep`` that are the simulator's, beside the configuration's."""


Figures = TypeVar("Figures", DeviceRates, HostModel)


@dataclass(frozen=True, slots=True)
class Setup:
    """One deployment to simulate."""

    config: Config
    limits: SchedulerLimits
    device: CostModel
    host: HostModel
    spread: Spread | None
    """How single steps differ from the model; only a fit knows."""


def simulated_config(name: str, settings: Sequence[str], device: str) -> Config:
    """``load_config`` as the device would see it. Where weights or a tokenizer are not here, which a simulation does
    not need, the sizes alone are taken. Raises ConfigError or CheckpointError when those are not known either."""
    ascend = device != "cpu"
    settings = [ANY_PORTS, *settings]
    try:
        return load_config(name, settings, ascend=ascend)
    except (CheckpointError, ConfigError):
        target = f"model_config.device_target={'Ascend' if ascend else 'CPU'}"
        return load_config(name, [*WITHOUT_FILES, target, *settings], ascend=ascend)


def make_setup(name: str, settings: Sequence[str], device: str, fit: StepFit | None = None) -> Setup:
    """``settings`` are ``section.key=value``: the configuration's, or ``device.RATE`` and ``host.TIME``, fields of
    ``DeviceRates`` and ``HostModel``. Without a ``fit`` a CPU is the stored fit of this model, where there is one and
    no rate is given, else its preset. Raises UsageError for a figure that is not there."""
    theirs, own = split_settings(settings)
    config = simulated_config(name, theirs, device)
    if fit is None and device == "cpu" and not own["device"] and stored_fit(config).is_file():
        fit = read_fit(stored_fit(config))
    if fit is not None and own["device"]:
        raise UsageError(f"device.{next(iter(own['device']))}: the device is fitted from steps and has no rates")
    host = _replaced(HostModel() if fit is None else fit.host, own["host"], "host")
    spread = None
    cost: CostModel
    if fit is not None:
        check_belongs(fit, config)
        cost, spread = FittedDevice(fit), fit.spread
    else:
        cost = RooflineDevice(_replaced(PRESETS[device], own["device"], "device"), ModelWork.of(config))
    return Setup(config, SchedulerLimits.from_config(config), cost, host, spread)


def identity(config: Config) -> dict[str, str]:
    """What a fit belongs to: a model in its formats, on a table of operators."""
    return {
        "model": config.model_name,
        "weight_format": config.weight_format,
        "kv_format": config.kv_format,
        "op_table": config.op_table,
    }


def check_belongs(fit: StepFit, config: Config) -> None:
    """Raises UsageError when the fit is of another model, or of other formats."""
    for name, value in identity(config).items():
        if fit.provenance.get(name) != value:
            raise UsageError(
                f"the fit is of {name} {fit.provenance.get(name)!r}, the configuration has {value!r};"
                " fit a recording of it (--recording)"
            )


def stored_fit(config: Config) -> Path:
    """Where the fit of this model on the machine of ``docs/performance.md`` is, if there is one."""
    return STORED_FITS / ("_".join(identity(config).values()) + ".json")


def split_settings(settings: Sequence[str]) -> tuple[list[str], dict[str, dict[str, float]]]:
    """The configuration's settings, and the simulator's own by section."""
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
            raise UsageError(f"{section}.{name}: there is no such figure; there are {', '.join(known)}")
    changed: dict[str, Any] = dict(changes)
    return replace(model, **changed)
