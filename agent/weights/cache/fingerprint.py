"""Computes a digest of everything on which converted weights depend: checkpoint, settings, the agent's part of the
model, and the program's code.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from agent.kernels import kernel_isa, library_path
from llm_serving.config import Config
from llm_serving.config.draft_model import Head
from llm_serving.model.source_files import describe_files

_REPOSITORY = Path(__file__).resolve().parents[3]
_PROGRAM = (
    *("agent/weights", "agent/kernels", "agent/models", "agent/backends", "agent/group"),
    *("llm_serving/gguf", "llm_serving/model"),
)
"""Packages whose code influences the bytes of converted weights."""
_ARITHMETIC = ("agent/layers", "agent/step_graph", "agent/mindformers", "agent/lora", "agent/kv_cache.py")
"""Further packages and files whose code influences the bits and the order of stored keys and values."""


def slot_name(config: Config, rank: int, head: Head | None = None) -> str:
    """Returns the file name of an agent's cached weights.

    The name depends on the model and the settings, but not on the contents of the checkpoint. If the checkpoint
    changes, the new file has the same name and replaces the old file. ``head`` is given if ``config`` is the config of
    a head.
    """
    return f"{config.model_name[:64]}-{digest_of(_settings(config, rank, head))[:20]}.weights"


def fingerprint(config: Config, rank: int, head: Head | None = None) -> str:
    """Returns a digest of everything on which an agent's converted weights depend.

    Does not read the whole checkpoint, only the beginning and the end of each file. ``head`` is given if ``config`` is
    the config of a head.
    """
    return digest_of({"settings": _settings(config, rank, head), "source": _source(config), "program": _program()})


def _settings(config: Config, rank: int, head: Head | None) -> dict[str, object]:
    model, parallel = config.model_config, config.parallel_config
    return {
        "model_path": model.model_path,
        "load_format": model.load_format,
        "seed": model.seed if model.load_format == "dummy" else None,
        "model_type": model.model_type,
        "dtype": model.model_dtype,
        "weight_format": model.weight_format,
        "weight_group": model.weight_group,
        "weight_layout": model.weight_layout,
        "op_table": config.op_table,
        "device": config.device,
        "isa": kernel_isa(),
        "shape": asdict(config.shape),
        "head": None if head is None else asdict(head),
        "pools": config.pooling is not None,
        "parallel": {**asdict(parallel), "data_parallel": 1, "routing": "", "pools": None},
        "rank": rank % parallel.group_size,  # replicas have the same weights
    }


def _source(config: Config) -> list[object]:
    """Returns the name, size, modification time and a digest of each file of the model."""
    path = config.model_config.model_path
    return [] if config.model_config.load_format == "dummy" or path is None else describe_files(Path(path))


@cache
def arithmetic_digest() -> str:
    """Returns a digest of those parts of the program that decide the bits of computed keys and values.

    These parts are the code of kernels and operators, the instruction set of the kernels, and the version of MindSpore.
    """
    try:
        mindspore = version("mindspore")
    except PackageNotFoundError:
        mindspore = ""
    return digest_of([_program(), code_digest(_ARITHMETIC), kernel_isa(), mindspore])[:32]


@cache
def _program() -> str:
    return hashlib.sha256(library_path().read_bytes()).hexdigest() + code_digest(_PROGRAM)


@cache
def code_digest(packages: tuple[str, ...]) -> str:
    """Returns a digest of the Python code of some packages or files of this program, such as ``agent/weights``."""
    digest = hashlib.sha256()
    for file in (file for package in packages for file in _python_files(_REPOSITORY / package)):
        digest.update(f"{file.relative_to(_REPOSITORY)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def _python_files(place: Path) -> list[Path]:
    return [place] if place.is_file() else sorted(place.rglob("*.py"))


def digest_of(value: object) -> str:
    """Returns a digest of a value that can be written as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
