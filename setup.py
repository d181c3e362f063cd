"""Builds the kernels (agent/kernels/libllm_kernels.so; in place also performance/ceilings) and packs the data folders.

Everything else is in pyproject.toml.

The kernels are compiled once per instruction set and chosen at run time, so the library runs on any machine of its
architecture. An instruction set the compiler does not know is left out. Object files stay in build/kernels; a file is
compiled again only when something it depends on has changed (``Compiler``).
"""

from __future__ import annotations

import filecmp
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
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
OBJECTS = Path("build/kernels")
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


class Compiler:
    """A C++ compiler that makes only what has changed.

    Beside each file it makes lies a ``.recipe``, from the moment it began: the command line, and where and which the
    compiler is. The file is made again when its recipe is another, or when something it was made of is newer than that
    moment or gone; of an object, the source and all headers that are not the system's, as the compiler lists them.
    """

    def __init__(self, name: str, make_all: bool) -> None:
        """``make_all``: whatever has changed. Raises CompileError without a compiler of this name on the PATH."""
        path = shutil.which(name)
        if path is None:
            raise CompileError(f"building the kernels needs a C++17 compiler; {name!r} is not on the PATH")
        self._path, self._make_all = path, make_all
        self._version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout

    def knows(self, flags: Sequence[str]) -> bool:
        """True when the compiler takes the flags: it refuses those of other processors."""
        with tempfile.TemporaryDirectory() as folder:
            probe = Path(folder) / "probe.cc"
            probe.write_text("int main() { return 0; }\n")
            command = [self._path, *flags, "-c", str(probe), "-o", str(probe.with_suffix(".o"))]
            return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def compile(self, source: Path, flags: Sequence[str], output: Path) -> None:
        """Make an object file of ``source``."""
        listing = output.with_suffix(".d")
        inputs = [source, *_listed_files(listing)] if listing.is_file() else None
        self._make(output, [*flags, "-MMD", "-MF", str(listing), "-c", str(source)], inputs)

    def link(self, objects: Sequence[Path], flags: Sequence[str], output: Path) -> None:
        """Make a library or a program of all ``objects``."""
        self._make(output, [*flags, *map(str, objects)], objects)

    def _make(self, output: Path, arguments: list[str], inputs: Sequence[Path] | None) -> None:
        """``inputs``: None where they are not known."""
        command = [self._path, *arguments, "-o", str(output)]
        recipe, text = output.with_name(output.name + ".recipe"), "\n".join([*command, self._version])
        if not self._make_all and inputs is not None and output.is_file() and _is_current(recipe, text, inputs):
            return
        output.parent.mkdir(parents=True, exist_ok=True)
        begun = recipe.with_name(recipe.name + ".begun")
        begun.write_text(text)
        recipe.unlink(missing_ok=True)
        print(" ".join(command) + "\n", end="", flush=True)  # in one piece, beside those of other threads
        if subprocess.run(command, check=False).returncode != 0:
            raise CompileError(f"command failed: {' '.join(command)}")
        os.replace(begun, recipe)


def _is_current(recipe: Path, text: str, inputs: Sequence[Path]) -> bool:
    """Whether what ``recipe`` lies beside was made as ``text`` says, of the files as they are."""
    if not recipe.is_file() or recipe.read_text() != text:
        return False
    begun = recipe.stat().st_mtime_ns
    return all(path.is_file() and path.stat().st_mtime_ns <= begun for path in inputs)


def _listed_files(listing: Path) -> list[Path]:
    """The files of a Makefile rule as GCC and Clang write it: ``object: source header ...``."""
    _, _, files = listing.read_text().partition(": ")
    names = re.findall(r"(?:\\[ #]|[^\s\\])+", files)
    return [Path(re.sub(r"\\([ #])", r"\1", name).replace("$$", "$")) for name in names]


class BuildKernels(build_ext):
    """Compiles and links the libraries, in place for a development install, else into the build folder."""

    def run(self) -> None:
        compiler = Compiler(os.environ.get("CXX", "g++"), bool(self.force))
        folder = ROOT / OBJECTS / platform.machine()
        self._build_kernels(compiler, folder)

    def _build_kernels(self, compiler: Compiler, folder: Path) -> None:
        units = [(*unit, folder / unit[0].relative_to(ROOT).with_suffix(".o")) for unit in self._units(compiler)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda unit: compiler.compile(*unit), units))
        objects = [output for _, _, output in units]
        library = [path for path in objects if path.stem != Path(PROGRAM_MAIN).stem]
        compiler.link(library, LINK_FLAGS, folder / LIBRARY)
        self._put(folder / LIBRARY, self._target())
        if self.inplace:
            compiler.link(objects, ["-pthread"], folder / PROGRAM.name)
            self._put(folder / PROGRAM.name, ROOT / PROGRAM)

    @staticmethod
    def _put(made: Path, target: Path) -> None:
        """Copy a file to where it is used, under another name first: a process may have the old one mapped."""
        if target.is_file() and filecmp.cmp(made, target, shallow=False):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".partial")
        shutil.copy(made, partial)
        os.replace(partial, target)

    def get_outputs(self) -> list[str]:
        return [str(self._target())]

    def _target(self) -> Path:
        return (ROOT if self.inplace else Path(self.build_lib).resolve()) / SOURCES / LIBRARY

    def _units(self, compiler: Compiler) -> list[tuple[Path, list[str]]]:
        """Source file and flags of each object file."""
        known = {name: flags for name, flags in INSTRUCTION_SETS.items() if compiler.knows(flags)}
        have = [f"-DLLMK_HAVE_{name.upper()}" for name in known]
        include = mindspore_include()
        headers = [f"-I{include / 'mindspore/ops'}", f"-I{include}", f"-I{include / 'mindspore'}"]
        units = []
        for source in sorted((ROOT / SOURCES).rglob("*.cc")):
            if source.stem in INSTRUCTION_SETS:
                if source.stem in known:
                    units.append((source, [*COMPILE_FLAGS, *known[source.stem]]))
            else:
                units.append((source, [*COMPILE_FLAGS, *have, *headers]))
        return units


class BuildPython(build_py):
    """Puts the configs and the embedded model inside the installed package, where ``config/lookup.py`` finds them."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for folder in DATA_FOLDERS:
                target = Path(self.build_lib) / "llm_serving" / "_data" / folder
                shutil.copytree(ROOT / folder, target, dirs_exist_ok=True)


setup(
    ext_modules=[Extension("agent.kernels.libllm_kernels", sources=[])],
    cmdclass={"build_ext": BuildKernels, "build_py": BuildPython},
)
