"""The table of sub-commands. To add a sub-command, add an entry here. Its module is imported only when it runs.

The module may belong to a higher layer (``tools``, ``performance``) that is not installed. The error then names the
missing package.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llm_serving.config.lookup import DATA_ROOTS
from llm_serving.errors import LLMServingError

PROGRAM = "llm-serving"


class MissingPackageError(LLMServingError):
    """Raised if a sub-command needs a package that is not installed."""


@dataclass(frozen=True, slots=True)
class Command:
    """One sub-command: its summary, and the functions that parse its options and run it."""

    name: str
    summary: str
    main: str
    """Function that takes the arguments and returns the exit code, as ``module:function``."""
    parser: str
    """Function that returns the parser of the arguments, as ``module:function``."""
    is_filter: bool = False
    """True if the program only prints and ends. A closed pipe (``| head``) then ends it without an error."""

    def load_main(self) -> Callable[[Sequence[str]], int]:
        """Imports and returns the function that runs the program. Raises MissingPackageError."""
        main: Callable[[Sequence[str]], int] = self._load(self.main)
        return main

    def load_parser(self) -> argparse.ArgumentParser:
        """Imports the program and returns the parser of its arguments. Raises MissingPackageError."""
        parser: argparse.ArgumentParser = self._load(self.parser)()
        return parser

    def _load(self, place: str) -> Any:
        module, _, function = place.partition(":")
        _find_programs()
        try:
            return getattr(importlib.import_module(module), function)
        except ModuleNotFoundError as error:
            raise MissingPackageError(
                f"{PROGRAM} {self.name} needs the Python package {error.name}, which is not installed; "
                "install llm-serving[tools], or run: make setup"
            ) from error


def _find_programs() -> None:
    """Makes ``tools`` and ``performance`` importable, from the repository or from the data of an installed package.

    Their folders are appended to ``sys.path``, so they do not hide other packages.
    """
    sys.path.extend(str(root) for root in DATA_ROOTS if str(root) not in sys.path)


COMMANDS = (
    Command("serve", "serve a model over HTTP", "llm_serving.launcher:main", "llm_serving.cli:build_parser"),
    Command(
        "chat", "talk to a model in the terminal", "llm_serving.chat.main:main", "llm_serving.chat.main:build_parser"
    ),
    Command(
        "cluster",
        "agents on several machines: nodes, and servers that use them",
        "llm_serving.cluster.commands:main",
        "llm_serving.cluster.commands:build_parser",
    ),
    Command(
        "models",
        "list the models of this machine",
        "llm_serving.commands.models:main",
        "llm_serving.commands.models:build_parser",
        is_filter=True,
    ),
    Command(
        "plan",
        "show the memory that a model needs, without starting",
        "llm_serving.cli:print_plan",
        "llm_serving.cli:build_plan_parser",
        is_filter=True,
    ),
    Command(
        "load",
        "load test of a running server",
        "performance.load.main:main",
        "performance.load.options:build_parser",
    ),
    Command(
        "bench",
        "decode and prefill rates of a model, without HTTP",
        "performance.bench.engine_main:main",
        "performance.bench.engine_main:build_parser",
    ),
    Command(
        "simulate",
        "load test of a simulated server",
        "performance.simulation.main:main",
        "performance.simulation.options:build_parser",
    ),
    Command(
        "analyze",
        "latencies and errors from a server's log",
        "tools.log_analysis.main:main",
        "tools.log_analysis.main:build_parser",
        is_filter=True,
    ),
    Command(
        "replay",
        "run a flight recording again, and compare every decision",
        "tools.replaying.main:main",
        "tools.replaying.main:build_parser",
        is_filter=True,
    ),
    Command(
        "quantize",
        "convert a model to int8 or int4 weights",
        "tools.quantization.main:main",
        "tools.quantization.main:build_parser",
    ),
    Command(
        "import-chat",
        "make a config from the configuration.json of an older /chat server",
        "tools.chat_import.main:main",
        "tools.chat_import.main:build_parser",
        is_filter=True,
    ),
    Command(
        "doctor",
        "what this machine can run, and what prevents it",
        "tools.diagnosis.main:main",
        "tools.diagnosis.main:build_parser",
        is_filter=True,
    ),
    Command(
        "completion",
        "print the completion script of a shell",
        "llm_serving.commands.completion:main",
        "llm_serving.commands.completion:build_parser",
        is_filter=True,
    ),
)
"""All sub-commands, in the order of the help."""


def find_command(name: str) -> Command | None:
    """Returns the sub-command with this name, or None."""
    return next((command for command in COMMANDS if command.name == name), None)
