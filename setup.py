"""Builds the C++ kernels (agent/kernels/libllm_kernels.so) and puts configs, models and tools into the package.

``tools/kernel_build.py`` builds the kernels. It also describes the environment variable that chooses the instruction
sets.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
_spec = importlib.util.spec_from_file_location("kernel_build", ROOT / "tools/kernel_build.py")
assert _spec is not None
assert _spec.loader is not None
kernel_build = importlib.util.module_from_spec(_spec)  # pip does not search the folder of setup.py for modules
_spec.loader.exec_module(kernel_build)

DATA_FOLDERS = ("configs", "models", "tools", "performance")
DATA_FILES = ("start_server.py", "pyproject.toml")
"""Folders and files that a wheel has in ``llm_serving/_data``, with the same relative paths as in the repository."""
NOT_INSTALLED = ("__pycache__", "*.so", "*.cc", "*.h", "ceilings", "conftest.py")


class BuildKernels(build_ext):
    """Compiles and links the libraries: in place for a development install, else into the build folder."""

    def run(self) -> None:
        try:
            build = kernel_build.chosen_build(bool(self.inplace))
            if build != "none":
                quiet = not self.distribution.verbose
                kernels = kernel_build.KernelBuild(build, make_all=bool(self.force), quiet=quiet)
                kernels.run(self._root(), in_place=bool(self.inplace))
        except kernel_build.BuildError as reason:
            raise CompileError(str(reason)) from None

    def get_outputs(self) -> list[str]:
        return [str(self._root() / kernel_build.LIBRARY)]

    def _root(self) -> Path:
        return ROOT if self.inplace else Path(self.build_lib).resolve()


class BuildPython(build_py):
    """Copies configs, the embedded model and the tools into the package, where ``llm_serving`` searches for them."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        data = Path(self.build_lib) / "llm_serving" / "_data"
        shutil.rmtree(data, ignore_errors=True)
        for folder in DATA_FOLDERS:
            shutil.copytree(ROOT / folder, data / folder, ignore=shutil.ignore_patterns(*NOT_INSTALLED))
        for name in DATA_FILES:
            shutil.copy(ROOT / name, data)


class BuildWheel(bdist_wheel):
    """Names the wheel for every Python 3, because the library of the kernels does not use Python's C interface."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("agent.kernels.libllm_kernels", sources=[])],
    cmdclass={"build_ext": BuildKernels, "build_py": BuildPython, "bdist_wheel": BuildWheel},
)
