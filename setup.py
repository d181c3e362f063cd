"""Builds the kernels (agent/kernels/libllm_kernels.so; in place also performance/ceilings) and the flight recorder's
log of turns (llm_serving/flight/_turn_log), and packs the data folders.

Everything else is in pyproject.toml.

The kernels are compiled once per instruction set and chosen at run time, so the library runs on any machine of its
architecture. An instruction set the compiler does not know is left out. So is the log of turns where Python has no
headers (Debian's ``python3-dev``): the server then does in Python what it does.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
SOURCES = Path("agent/kernels")
LIBRARY = "libllm_kernels.so"
PROGRAM = Path("performance/ceilings")
PROGRAM_MAIN = "ceilings_main.cc"
TURN_LOG = Path("llm_serving/flight/_turn_log.c")
TURN_LOG_FLAGS = ["-x", "c", "-std=c11", "-O2", "-g1", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra"]
# Python's tables of methods and slots are written with fewer members than they have, and with casts of functions.
TURN_LOG_FLAGS += ["-Wno-missing-field-initializers", "-Wno-cast-function-type", "-Wno-unused-parameter"]
DATA_FOLDERS = ("configs", "models")

COMPILE_FLAGS = [
    *("-std=c++17", "-O3", "-g1", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden"),
    *("-fno-math-errno", "-ffp-contract=off", "-D_GLIBCXX_USE_CXX11_ABI=0"),
    *("-Wall", "-Wextra", "-Wno-psabi", "-Wno-unused-function"),
    # GCC 12 warns of its own intrinsics (GCC bug 105593).
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),
]
# nodelete: the threads of the library outlive a dlclose.
LINK_FLAGS = ["-shared", "-pthread", "-Wl,-z,nodelete", "-Wl,--no-undefined"]

_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
_VNNI = [*_AVX512, "-mavx512vnni"]
INSTRUCTION_SETS = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_vnni": _VNNI,
    "avx512_bf16": [*_VNNI, "-mavx512bf16"],
    "avx512_amx": [*_VNNI, "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"],
    "neon_dot": ["-march=armv8.2-a+dotprod"],
    "neon_i8mm": ["-march=armv8.2-a+dotprod+i8mm"],
}
"""File stem in arch/ -> flags it is compiled with. The portable file takes none."""


def mindspore_include() -> Path:
    """The include folder of the installed wheel, found without importing it."""
    spec = importlib.util.find_spec("mindspore")
    if spec is None or not spec.submodule_search_locations:
        raise CompileError("building the kernels needs the headers of mindspore: pip install mindspore==2.9.0")
    include = Path(next(iter(spec.submodule_search_locations))) / "include"
    header = include / "mindspore/ops/kernel/cpu/op_plugin/custom_kernel_input_info.h"
    if not header.is_file():
        raise CompileError(f"this mindspore has no op-plugin headers: {header} is missing; install mindspore==2.9.0")
    return include


def compiler_knows(compiler: str, flags: list[str]) -> bool:
    """True when the compiler takes the flags: it refuses those of other processors."""
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "probe.cc"
        probe.write_text("int main() { return 0; }\n")
        command = [compiler, *flags, "-c", str(probe), "-o", str(probe.with_suffix(".o"))]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


class BuildKernels(build_ext):
    """Compiles and links the libraries, in place for a development install, else into the build folder."""

    def run(self) -> None:
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            raise CompileError(f"building the kernels needs a C++17 compiler; {compiler!r} is not on the PATH")
        self._build_kernels(compiler)
        self._build_turn_log(compiler)

    def _build_kernels(self, compiler: str) -> None:
        target = self._target()
        targets = [target, ROOT / PROGRAM] if self.inplace else [target]
        if not self.force and all(self._is_current(path) for path in targets):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda unit: self._compile(compiler, *unit), self._units(compiler)))
        library = [str(path) for path in objects if path.stem != Path(PROGRAM_MAIN).stem]
        self._link([compiler, *LINK_FLAGS, *library], target)
        if self.inplace:
            self._link([compiler, "-pthread", *map(str, objects)], ROOT / PROGRAM)

    def _build_turn_log(self, compiler: str) -> None:
        target, include = self._turn_log_target(), sysconfig.get_path("include")
        if not (Path(include) / "Python.h").is_file():
            sys.stderr.write(f"{TURN_LOG} is left out: {include} has no Python.h; install the headers of Python\n")
            return
        newest = max(path.stat().st_mtime for path in (ROOT / TURN_LOG, Path(__file__)))
        if self.force or not target.is_file() or target.stat().st_mtime < newest:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._link([compiler, *TURN_LOG_FLAGS, f"-I{include}", str(ROOT / TURN_LOG)], target)

    def _link(self, command: list[str], target: Path) -> None:
        partial = target.with_name(target.name + ".partial")
        self._execute([*command, "-o", str(partial)])
        os.replace(partial, target)

    def get_outputs(self) -> list[str]:
        return [str(path) for path in (self._target(), self._turn_log_target()) if path.is_file()]

    def _target(self) -> Path:
        return (ROOT if self.inplace else Path(self.build_lib).resolve()) / SOURCES / LIBRARY

    def _turn_log_target(self) -> Path:
        name = TURN_LOG.stem + sysconfig.get_config_var("EXT_SUFFIX")
        return (ROOT if self.inplace else Path(self.build_lib).resolve()) / TURN_LOG.with_name(name)

    @staticmethod
    def _is_current(target: Path) -> bool:
        inputs = [*(ROOT / SOURCES).rglob("*.cc"), *(ROOT / SOURCES).rglob("*.h")]
        newest = max(path.stat().st_mtime for path in [*inputs, Path(__file__)])
        return target.is_file() and target.stat().st_mtime >= newest

    def _units(self, compiler: str) -> list[tuple[Path, list[str]]]:
        """Source file and extra flags of each object file."""
        known = {name: flags for name, flags in INSTRUCTION_SETS.items() if compiler_knows(compiler, flags)}
        have = [f"-DLLMK_HAVE_{name.upper()}" for name in known]
        include = mindspore_include()
        headers = [f"-I{include / 'mindspore/ops'}", f"-I{include}", f"-I{include / 'mindspore'}"]
        units = []
        for source in sorted((ROOT / SOURCES).rglob("*.cc")):
            if source.stem in INSTRUCTION_SETS:
                if source.stem in known:
                    units.append((source, known[source.stem]))
            else:
                units.append((source, [*have, *headers]))
        return units

    def _compile(self, compiler: str, source: Path, flags: list[str]) -> Path:
        relative = source.relative_to(ROOT)
        output = Path(self.build_temp).resolve() / platform.machine() / relative.with_suffix(".o")
        output.parent.mkdir(parents=True, exist_ok=True)
        self._execute([compiler, *COMPILE_FLAGS, *flags, "-c", str(source), "-o", str(output)])
        return output

    @staticmethod
    def _execute(command: list[str]) -> None:
        print(" ".join(command), flush=True)
        if subprocess.run(command, check=False).returncode != 0:
            raise CompileError(f"command failed: {' '.join(command)}")


class BuildPython(build_py):
    """Puts the configs and the embedded model inside the installed package, where ``config/lookup.py`` finds them."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for folder in DATA_FOLDERS:
                target = Path(self.build_lib) / "llm_serving" / "_data" / folder
                shutil.copytree(ROOT / folder, target, dirs_exist_ok=True)


setup(
    ext_modules=[
        Extension("agent.kernels.libllm_kernels", sources=[]),
        Extension("llm_serving.flight._turn_log", sources=[]),
    ],
    cmdclass={"build_ext": BuildKernels, "build_py": BuildPython},
)
