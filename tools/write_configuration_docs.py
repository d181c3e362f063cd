#!/usr/bin/env python3
"""Write docs/configuration.md from the declarations in the code; with --check, exit 1 when it is out of date."""

from __future__ import annotations

import argparse
import sys
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from llm_serving.config.mindformers import KEYS_READ  # noqa: E402
from llm_serving.config.schema import KeyInfo, key_info, section_keys  # noqa: E402
from llm_serving.config.sections import SECTIONS  # noqa: E402

PAGE = ROOT / "docs" / "configuration.md"

INTRODUCTION = """\
# Configuration

<!-- Written by tools/write_configuration_docs.py from llm_serving/config. Edit there. -->

A deployment is one YAML file; those of this repository are in `configs/llama/`.

    python start_server.py --config llama_tiny_cpu.yaml --set pa_config.num_blocks=4096

- **Lookup.** `--config` takes a path, or a bare name to find anywhere under `configs/`. A relative path in a file
  is looked up from the working directory, then the folder of the file, then the repository (or the installed package).
- **Overrides.** `--set section.key=value` wins over the file, a later one over an earlier one. The value is YAML:
  `--set 'serving_config.agent_ports=[0]'`, `--set model_config.end_token=null`.
- **Strict.** An unknown or duplicate key, a wrong type, a value out of range or a combination that cannot work is an
  error that names file, key and value, and the nearest valid key; the exit code is 2 and nothing has been started.
  Scalars follow YAML 1.2: `true` and `false` are the booleans, `yes` is text. Tags (`!!python/...`) are refused.
- **See it.** `--check` prints what would be started and the memory plan; `--print-config` prints every key as it takes
  effect.
- **Another model.** `--set model_config.model_path=FOLDER` serves any folder of a family in [models.md](models.md)
  with any of the files: sizes, vocabulary and end tokens are then the folder's, and what the file says about another
  model is noted in the log. An end token or padding token given by `--set` as well is kept; a vocabulary given so must
  agree.

Keys marked **P** are those of the published MindSpore serving configs and keep their meaning; the others are this
project's own. "null" in the column *Default* means that the value follows from something else, as stated.
"""

MINDFORMERS = """\
## The MindFormers YAML (`model_config.model_cfg_path`)

A YAML in the format of MindFormers, such as `configs/llama/predict_llama2_7b.yaml`. Only these keys are read, and their
types checked; the rest is MindFormers' business. Files of MindFormers 1.9's other models, such as
`configs/mindformers/predict_qwen3_0_6b.yaml`, have their sizes in the names of `config.json` (`architectures`,
`num_hidden_layers`, ...), or none, which are then those of `model_path`; both are read.

| Key | Meaning |
|---|---|
"""


def configuration_page() -> str:
    """The whole page."""
    sections = "\n".join(section_page(name, cls) for name, cls in SECTIONS.items())
    keys = "".join(f"| `{key}` | {meaning} |\n" for key, meaning in KEYS_READ.items())
    return f"{INTRODUCTION}\n{sections}\n{MINDFORMERS}{keys}"


def section_page(name: str, cls: type) -> str:
    """Heading and table of one section."""
    hints = typing.get_type_hints(cls)
    defaults = {declared.name: declared.default for declared in fields(cls) if key_info(declared) is not None}
    rows = "".join(
        f"| `{key}`{' **P**' if info.published else ''} | {meaning(info)} | {type_name(hints[key])} | {info.unit} "
        f"| {default(defaults[key])} | {allowed(info)} |\n"
        for key, info in section_keys(cls).items()
    )
    header = "| Key | Meaning | Type | Unit | Default | Allowed |\n|---|---|---|---|---|---|\n"
    return f"## `{name}`\n\n{cls.__doc__}\n\n{header}{rows}"


def meaning(info: KeyInfo) -> str:
    return f"{info.meaning} null: {info.null}." if info.null else info.meaning


def type_name(hint: Any) -> str:
    """In the words of YAML."""
    arguments = typing.get_args(hint)
    if type(None) in arguments:
        return f"{type_name(arguments[0])} or null"
    if typing.get_origin(hint) is tuple:
        return f"list of {type_name(arguments[0])}s"
    return {int: "integer", float: "number", str: "text", bool: "boolean"}[hint]


def default(value: object) -> str:
    """In the spelling of YAML."""
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page is out of date")
    page, current = configuration_page(), PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    if not parser.parse_args().check:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if page != current:
        print(f"{PAGE.relative_to(ROOT)} is out of date: run python tools/write_configuration_docs.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
