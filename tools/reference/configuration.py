"""Generates docs/configuration.md from the declarations of the settings."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import fields
from typing import Any

from llm_serving.config.mindformers import KEYS_READ
from llm_serving.config.published_sections import PUBLISHED_SECTIONS
from llm_serving.config.schema import KeyInfo, key_info, section_keys
from llm_serving.config.sections import SECTIONS

INTRODUCTION = """\
# Configuration

For users and operators. Every setting with meaning, unit, default and range.

<!-- Written by tools/write_reference_docs.py from llm_serving/config. Edit there. -->

A deployment is one YAML file. The files of this repository are in `configs/`.

    python start_server.py --config llama_tiny_cpu.yaml --set pa_config.num_blocks=4096

- **Lookup.** `--config` takes a path, or a bare name that is searched under `configs/`. A relative path is
  searched in the working directory, then in the folder of the file, then in the repository (or the installed
  package).
- **Overrides.** `--set section.key=value` overrides the file, and a later one overrides an earlier one. The value is
  YAML: `--set 'serving_config.agent_ports=[0]'`, `--set model_config.end_token=null`.
- **Strict.** Unknown keys, duplicate keys with different values, wrong types, values out of range and impossible
  combinations are errors. The message names file, key, value and the nearest valid key. The exit code is 2, and
  nothing has been started. Scalars follow YAML 1.2: `true` and `false` are the booleans, and `yes` is text. Tags
  (`!!python/...`) are refused.
- **Show it.** `--check` prints the plan: model, limits, memory. `--print-config` prints every key as it takes effect.
- **Another model.** `--set model_config.model_path=FOLDER` serves any folder of a family in [models](models.md) with
  any of the files. Sizes, vocabulary and end tokens are then those of the folder. The log notes settings of the file
  that belong to another model. An end token or padding token from `--set` is kept. A vocabulary size from `--set`
  must agree.

Keys marked **P** are those of the published MindSpore serving configs and keep their meaning. The published files load
unchanged. Some of their keys have no effect here. The start log and `/server_info` list those that a file states, with
the reason. The other keys belong to this project. A default of "null" means that the value follows from something else,
as stated.
"""

MINDFORMERS = """\
## The MindFormers YAML (`model_config.model_cfg_path`)

A YAML in the format of MindFormers, for example `configs/llama/predict_llama2_7b.yaml`. These keys are read, and their
types are checked. The start log and `/server_info` list all other keys of the file, with the reason why they have no
effect. Files of newer MindFormers models, for example `configs/mindformers/predict_qwen3_0_6b.yaml`,
use the names of `config.json` for sizes (`architectures`, `num_hidden_layers` and others). If they have no sizes,
those of `model_path` count. Both forms are read.

| Key | Meaning |
|---|---|
"""


def configuration_page() -> str:
    """Returns the page docs/configuration.md."""
    every_section = SECTIONS | PUBLISHED_SECTIONS
    sections = "\n".join(section_page(name, cls) for name, cls in every_section.items())
    keys = "".join(f"| `{key}` | {meaning} |\n" for key, meaning in KEYS_READ.items())
    return f"{INTRODUCTION}\n{sections}\n{MINDFORMERS}{keys}"


def section_page(name: str, cls: type) -> str:
    """Returns heading and table of one section of the config."""
    hints = typing.get_type_hints(cls)
    defaults = {declared.name: declared.default for declared in fields(cls) if key_info(declared) is not None}
    rows = "".join(
        f"| `{key}`{' **P**' if info.published else ''} | {meaning(info)} "
        f"| {type_name(hints[key])}{' or `auto`' if info.auto else ''} | {info.unit} "
        f"| {default(defaults[key])} | {allowed(info)} |\n"
        for key, info in section_keys(cls).items()
    )
    header = "| Key | Meaning | Type | Unit | Default | Allowed |\n|---|---|---|---|---|---|\n"
    return f"## `{name}`\n\n{cls.__doc__}\n\n{header}{rows}"


def meaning(info: KeyInfo) -> str:
    text = f"{info.meaning} null: {info.null}." if info.null else info.meaning
    return f"{text} No effect: {info.no_effect}." if info.no_effect else text


def type_name(hint: Any) -> str:
    """Returns a type in the words of YAML, for example ``list of integers``."""
    arguments = typing.get_args(hint)
    if type(None) in arguments:
        return f"{type_name(arguments[0])} or null"
    if typing.get_origin(hint) is tuple:
        return f"list of {type_name(arguments[0])}s"
    if dataclasses.is_dataclass(hint):
        return "mapping"
    return {int: "integer", float: "number", str: "text", bool: "boolean"}[hint]


def default(value: object) -> str:
    """Returns a default value in the spelling of YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    return f"`{value}`"


def allowed(info: KeyInfo) -> str:
    if info.choices:
        refused = {value for value, _ in info.unavailable}
        return ", ".join(f"`{choice}`" for choice in info.choices if choice not in refused)
    if info.unavailable:
        return ", ".join(f"`{str(not value).lower()}`" for value, _ in info.unavailable)
    return f"{info.low:.15g} to {info.high:.15g}" if info.low is not None and info.high is not None else ""
