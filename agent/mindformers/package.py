"""The package MindFormers: imported by an agent that serves one of its models, and by nobody else."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

from llm_serving.errors import AgentStartError

_LOG_FOLDER = "mindformers"


def environment(log_folder: Path) -> dict[str, str]:
    """Variables MindFormers reads when it is imported: inference, its log files in a folder of their own in
    ``log_folder`` (it makes the folder, and the one above it, private to the user), nothing from the network."""
    folder = str(log_folder / _LOG_FOLDER)
    return {
        "RUN_MODE": "predict",
        "LOCAL_DEFAULT_PATH": folder,
        "LOG_MF_PATH": folder,
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_OFFLINE": "1",
    }


def import_mindformers(log_folder: Path, variables: MutableMapping[str, str] = os.environ) -> None:
    """Import the package, MindSpore being set up. From then on it logs errors only, and to its own file.

    Raises AgentStartError when it is not installed, or misses a package it needs itself.
    """
    variables.update(environment(log_folder))
    try:
        with without_prints():
            tools = import_module("mindformers.tools.logger")
            import_module("mindformers.models")
    except ImportError as error:
        raise AgentStartError(
            f"model_type mindformers: the package MindFormers cannot be imported: {error}; install it with "
            "`make setup-mindformers` or `pip install 'llm-serving[mindformers]'` (docs/mindformers.md)"
        ) from error
    log: logging.Logger = tools.get_logger()
    log.setLevel(logging.ERROR)
    for handler in list(log.handlers):
        if not isinstance(handler, logging.FileHandler):
            log.removeHandler(handler)


@contextmanager
def without_prints() -> Iterator[None]:
    """MindFormers prints a table of its settings when a model is made, and warns of what it could import and we do not
    use. Errors are exceptions."""
    with redirect_stdout(io.StringIO()):
        yield


def attribute(path: str) -> Any:
    """An object of the package by its full name, ``mindformers.models.qwen3.Qwen3Config``."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)
