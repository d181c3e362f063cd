"""Imports MindSpore and the modules of an agent. The fork server of agents imports this module once."""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import pkgutil
from collections.abc import Iterable
from pathlib import Path
from types import FunctionType, ModuleType

import support.mindspore_preload  # noqa: F401 - it sets variables that MindSpore reads, so it comes first

# isort: split
from mindspore import nn

import agent
from agent.confinement import grants
from agent.stored_program import store
from agent.weights.cache import fingerprint
from llm_serving.config import Config, load_config
from support.mindspore_preload import parse_early

SKIPPED = ("agent.__main__", "agent.backends.ascend", "agent.kernels.libllm", "agent.mindformers")
"""The program itself, a library that is not a module, and packages that need an Ascend or another library."""
MINDSPORE_FUNCTIONS = {
    "graph._parse.standard_method": (
        *("bool_", "check_is_const_int", "check_len_", "enumerate_", "list_append", "ms_len", "ms_zip"),
    ),
    "ops._utils.arg_dtype_cast": (
        *("do_type_cast", "is_instance_of", "is_number", "is_tuple", "normalize_int_sequence", "scalar_to_tuple"),
        "tensor_to_tuple",
    ),
    "ops._utils.arg_handler": (
        *("_normalize_int_sequence", "_scalar_tensor_to_float", "_scalar_tensor_to_int", "_scalar_tensor_to_scalar"),
    ),
    "ops.composite.multitype_ops.add_impl": ("_add_tuple", "_scalar_add_scalar"),
    "ops.composite.multitype_ops.getitem_impl": ("_tuple_getitem_by_number", "_tuple_getitem_by_slice"),
    "ops.composite.multitype_ops.less_impl": ("_less_scala",),
    "ops.composite.multitype_ops.logical_not_impl": ("_logical_not_scala",),
    "ops.composite.multitype_ops.not_equal_impl": ("_not_equal_scalar",),
    "ops.function.array_func": ("fill",),
}
"""Functions of MindSpore that most graphs use, by module."""


def import_agent() -> list[ModuleType]:
    """Imports the modules of an agent and returns them."""
    found = pkgutil.walk_packages(agent.__path__, "agent.")
    return [importlib.import_module(each.name) for each in found if not each.name.startswith(SKIPPED)]


def methods_of_cells(modules: list[ModuleType]) -> list[FunctionType]:
    """Returns the methods of all Cells that these modules define. Graphs consist of these methods."""
    cells = {
        value
        for module in modules
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, nn.Cell) and value.__module__.startswith("agent.")
    }
    return [
        function
        for cell in cells
        for name, function in vars(cell).items()
        if isinstance(function, FunctionType) and not name.startswith("__")
    ]


def digest_early() -> None:
    """Fills the caches of the digests of this program and its packages, which do not change while the tests run."""
    fingerprint.arithmetic_digest()
    fingerprint.code_digest(store._CODE)
    store._version_of("mindspore")
    store._processor()
    Config.from_json(load_config("llama_tiny_cpu.yaml").to_json())


def search_early() -> None:
    """Searches the folders of Python's modules for links. The confinement of each agent then uses the result.

    Folders that only some agents have, as those of PYTHONPATH, are searched by these agents.
    """
    search = grants._package_targets
    found = {Path(path): list(search(Path(path))) for path in grants._python_paths(os.environ)}

    def targets(folder: Path) -> Iterable[Path]:
        return found[folder] if folder in found else search(folder)

    grants._package_targets = targets  # type: ignore[assignment]


for module, names in MINDSPORE_FUNCTIONS.items():
    functions = importlib.import_module(f"mindspore.{module}")
    parse_early([getattr(functions, name) for name in names])
parse_early([nn.Cell.construct, *methods_of_cells(import_agent())])
digest_early()
search_early()
gc.freeze()
