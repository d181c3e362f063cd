"""Imports a large module when a test first uses it. Every test process collects all files, but runs only some."""

from __future__ import annotations

import importlib
from typing import Any


class LazyModule:
    """Stands for the module ``name``. The first access to a public attribute imports the module.

    pytest looks for attributes such as ``__test__`` while it collects tests. These must not import the module.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_") or attribute == "pytestmark":
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
