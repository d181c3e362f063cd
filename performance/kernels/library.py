"""Loads the testing library of the kernels. The build puts it next to this file; packages do not contain it."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from pathlib import Path

from agent.kernels import KernelsNotBuiltError, library


def path_of_testing_library() -> Path:
    """Returns the path of the testing library. Raises KernelsNotBuiltError if it is not built."""
    path = Path(__file__).resolve().parent / "libllm_kernels_testing.so"
    if not path.is_file():
        raise KernelsNotBuiltError(f"{path} is not built; run `python setup.py build_ext --inplace` (or `make setup`)")
    return path


@cache
def load_testing_library() -> ctypes.CDLL:
    """Returns the testing library, loaded once. Its threads and buffers are separate from the product library's."""
    return ctypes.CDLL(str(path_of_testing_library()))


def replace_product_library() -> None:
    """Makes agent code in this process use the testing library instead of the product library.

    Call this before a model is loaded. The product library may already be loaded.
    """
    product = library.library_path
    for name, module in list(sys.modules.items()):
        if name.startswith("agent") and getattr(module, "library_path", None) is product:
            vars(module)["library_path"] = path_of_testing_library
    library.load_library.cache_clear()
    os.environ["MS_OP_PLUGIN_PATH"] = str(path_of_testing_library())


def set_threads(num_threads: int) -> None:
    """Sets the number of threads of both libraries; 0 means every processor that this process may use."""
    library.set_threads(num_threads)
    load_testing_library().llmk_set_threads(num_threads)
