"""Converts the packaged model to the format of each program."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from performance.models.gguf_copy import copy_model
from performance.peers.auto.programs import FLOATS
from performance.program import LoadTestError

HERE = Path(__file__).resolve().parent
QUANTISE = """
import sys, llama_cpp
options = llama_cpp.llama_model_quantize_default_params()
options.ftype, options.nthread, options.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, 2, True
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), options))
"""
"""Source of a Python program that quantises a GGUF file to Q8_0 with llama.cpp."""


def model_path(folder: Path, name: str, file: Path, python_of: Callable[[str], Path]) -> Path:
    """Converts a model for a program if necessary, and returns the path of the model. ``name`` is ``Program.model``.

    ``python_of`` returns the Python of a peer's environment. Raises LoadTestError if a conversion fails.
    """
    if not name:
        return file
    target, models = folder / name, folder / "models"
    if target.exists():
        return target
    models.mkdir(parents=True, exist_ok=True)
    if name == FLOATS:
        _write_floats(file, target)
        return target
    if target.suffix == ".gguf":
        _run([str(python_of("llama_cpp")), "-c", QUANTISE, str(file), str(target)], target)
        return target
    openvino = python_of("openvino")
    if not (models / "w8a8" / "config.json").exists():
        _run([str(openvino), str(HERE / "from_gguf.py"), str(file), str(models)], models / "w8a8")
    if target.name.startswith("openvino"):
        source = str(models / "bfloat16")
        export = ["export", "openvino", "--model", source, "--task", "text-generation-with-past"]
        _run([str(openvino.with_name("optimum-cli")), *export, "--weight-format", "int8", str(target)], target)
    return target


def _write_floats(file: Path, target: Path) -> None:
    """Writes a copy of a GGUF file with float32 weights. An interrupted copy does not have the name ``target``."""
    print(f"writing {target}", file=sys.stderr, flush=True)
    unfinished = target.with_suffix(".part")
    copy_model(file, unfinished, num_layers=None, floats=True)
    unfinished.rename(target)


def _run(command: Sequence[str], target: Path) -> None:
    """Runs a conversion. Raises LoadTestError with the end of its output if it fails or writes nothing."""
    print(f"writing {target}", file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0 or not target.exists():
        raise LoadTestError(
            f"{target} could not be written; the conversion ended with {done.returncode}:\n{done.stdout[-2000:]}"
        )
