"""Imports the package MindFormers. Only an agent that serves a MindFormers model does this."""

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
    """Returns the environment variables that MindFormers reads when it is imported.

    The variables select inference, forbid network access, and put MindFormers' log files into a subfolder of
    ``log_folder``. MindFormers makes ``log_folder`` and the subfolder private to the user.
    """
    folder = str(log_folder / _LOG_FOLDER)
    return {
        "RUN_MODE": "predict",
        "LOCAL_DEFAULT_PATH": folder,
        "LOG_MF_PATH": folder,
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_OFFLINE": "1",
    }


def import_mindformers(log_folder: Path, variables: MutableMapping[str, str] = os.environ) -> None:
    """Imports MindFormers. MindSpore must have been set up before this call. MindFormers then logs only errors, to its
    own file.

    Raises AgentStartError if MindFormers, or a package that MindFormers needs, is not installed.
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
    """Hides what MindFormers prints: its settings, and warnings about packages that this project does not use.

    Errors are exceptions, which stay visible.
    """
    with redirect_stdout(io.StringIO()):
        yield


def attribute(path: str) -> Any:
    """Returns an object of a package by its full name, for example ``mindformers.models.qwen3.Qwen3Config``."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)
