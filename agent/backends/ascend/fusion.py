"""Turns on graph-kernel fusion on an Ascend together with the inference kernels, and reports the fusions.

MindSpore finds the inference kernels only at jit level O0 (``infer_boost``), but usually turns fusion on at level O1.
The fusion passes themselves do not depend on the jit level. They read ``opt_level`` in the environment variable
``MS_DEV_GRAPH_KERNEL_FLAGS``. With ``--opt_level=2``, the passes also run at level O0. docs/ascend.md has the sources.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from llm_serving.config.graph_kernel_flags import parse_flags

REQUIRED_FLAGS = {"opt_level": "2", "enable_dynamic_shape_fusion": "true", "dump_as_text": "true"}
"""Flags that are added unless the config sets them: fuse at O0, fuse dynamic shapes, and report the fusions."""
_DUMP = Path("graph_kernel_dump")
"""The folder that MindSpore writes its report to, in the working directory."""
_CLUSTER = re.compile(r"^Source nodes of \S*GraphKernel_", re.MULTILINE)
_NODE = re.compile(r"^ {2}\S*?([A-Za-z0-9]+)-op\d+ = ", re.MULTILINE)


def fusion_flags(given: str) -> str:
    """Returns the flags ``given`` by the user, extended by each flag of ``REQUIRED_FLAGS`` that ``given`` does not set.

    ``given`` and the result have the format of ``context.graph_kernel_flags``, for example ``--opt_level=2``.
    """
    flags = REQUIRED_FLAGS | parse_flags(given)
    return " ".join(f"--{name}={value}" for name, value in flags.items())


def read_fusions(text: str) -> list[str]:
    """Returns a name for each fusion in the ``text`` of MindSpore's fusion report.

    A name consists of the operators that the fused operator replaces, joined by ``+``, for example ``Add+Mul``.
    """
    parts = _CLUSTER.split(text)[1:]
    return ["+".join(match[1] for match in _NODE.finditer(part)) for part in parts]


def take_report(folder: Path = _DUMP, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns two entries for the log, ``graph_kernel_fusion`` and ``fusion_operators``: which fusions took effect in
    this process.

    The second entry is missing if MindSpore reports no fusion. Deletes MindSpore's report file from ``folder``.
    """
    report = folder / f"graph_kernel_cluster_{os.getpid()}.txt"
    text = report.read_text(encoding="utf-8", errors="replace") if report.is_file() else ""
    report.unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    flags = environment.get("MS_DEV_GRAPH_KERNEL_FLAGS", "")
    fusions = read_fusions(text)
    if not fusions:
        return {"graph_kernel_fusion": f"no effect: MindSpore reports no fusion; flags {flags}"}
    replaced = sum(name.count("+") + 1 for name in fusions)
    names = ", ".join(f"{count} x {name}" for name, count in Counter(fusions).items())
    state = f"on: {replaced} operators before, {len(fusions)} after in all graphs; flags {flags}"
    return {"graph_kernel_fusion": state, "fusion_operators": names}
