"""Makes the graphs of agents compute wrong logits. Python imports this file if its folder is in PYTHONPATH.

The environment variable ``FAULTY_AGENT_FILE`` names a file. While the file exists, steps with one sequence have one
wrong bit in a logit. If the variable ``FAULTY_AGENT`` is ``other_tokens``, the logits stay correct, but the token with
the best logit is wrong.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

GRAPHS = {"agent.step_graph.fused_steps": "FusedStepGraph", "agent.step_graph.dynamic": "DynamicStepGraph"}


class _Patches(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads the modules of ``GRAPHS`` as usual, and then replaces the method ``run`` of their classes."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name not in GRAPHS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        self._loader = spec.loader
        spec.loader = self
        return spec

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        assert self._loader is not None
        self._loader.exec_module(module)
        _patch(module)


def _patch(module: ModuleType) -> None:
    graph = getattr(module, GRAPHS[module.__name__])
    graph.run = _faulty(graph.run)


def _faulty(run: Any) -> Any:
    fault = Path(os.environ["FAULTY_AGENT_FILE"])

    def run_with_fault(self: Any, inputs: Any, entry: Any) -> Any:
        scores = run(self, inputs, entry)
        if inputs.query_lens.size == 1 and fault.exists():
            _disturb(scores)
        return scores

    return run_with_fault


def _disturb(scores: Any) -> None:
    import numpy as np

    if os.environ.get("FAULTY_AGENT") == "other_tokens":
        scores.best_ids[0] ^= 1
    elif hasattr(scores, "values"):
        scores.values[0].view(np.uint32)[-1] ^= 1
    else:
        _change_rows(scores)


def _change_rows(scores: Any) -> None:
    import numpy as np

    rows = scores.rows

    def changed(indices: Any) -> Any:
        found = rows(indices).copy()
        found[0].view(np.uint32)[-1] ^= 1
        return found

    scores.rows = changed


if any("agent" in argument for argument in sys.orig_argv):
    sys.meta_path.insert(0, _Patches())
    for name in GRAPHS.keys() & sys.modules.keys():  # a forked agent has already imported them
        _patch(sys.modules[name])
