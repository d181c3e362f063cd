"""Who may import whom: the server never device code, the agent never HTTP, nobody pickle; and how long lines are."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
from small_configs import REPOSITORY

HTTP = ("starlette", "uvicorn", "uvloop", "httptools", "asyncio", "aiohttp", "httpx", "requests")
AGENT_MAY = ("llm_serving.config", "llm_serving.ipc", "llm_serving.log", "llm_serving.errors", "llm_serving.request")
SHAPES = ("llm_serving.model_shape", "llm_serving.parallel", "llm_serving.model_families", "llm_serving.rope_scaling")
AGENT_MAY_TOO = (*SHAPES, "llm_serving.quantization", "llm_serving.formats")
AGENT_MAY_TOO += ("llm_serving.machine", "llm_serving.memory_plan")


CLOCKS_AND_IO = ("time", "datetime", "threading", "socket", "selectors", "os", "io", "pathlib", "random", "subprocess")


def python_files(package):
    return sorted((REPOSITORY / package).rglob("*.py"))


def imports_of(path):
    """Full names of all that a file imports, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def inside(name, packages):
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("path", python_files("llm_serving"), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_the_control_plane_imports_no_device_code(path):
    assert [name for name in imports_of(path) if inside(name, ("mindspore", "mindformers", "agent"))] == []


@pytest.mark.parametrize("path", python_files("agent"), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_the_agent_imports_no_http_and_little_of_the_control_plane(path):
    names = list(imports_of(path))
    assert [name for name in names if inside(name, HTTP)] == []
    ours = [name for name in names if inside(name, ("llm_serving",))]
    assert [name for name in ours if not inside(name, AGENT_MAY + AGENT_MAY_TOO)] == []


@pytest.mark.parametrize("package", ["scheduler", "kvcache", "routing"])
def test_who_decides_has_no_clock_and_no_io(package):
    """So that a run can be simulated, and replayed bit for bit."""
    for path in python_files(f"llm_serving/{package}"):
        assert [name for name in imports_of(path) if inside(name, (*CLOCKS_AND_IO, *HTTP))] == [], path


@pytest.mark.parametrize("package", ["llm_serving", "agent"])
def test_nobody_unpickles_or_evaluates(package):
    for path in python_files(package):
        assert not [name for name in imports_of(path) if inside(name, ("pickle", "marshal", "shelve"))], path
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        named = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
        assert not named & {"eval", "exec", "__import__"}, path


def test_a_server_with_everything_imported_has_no_mindspore():
    program = (
        "import pkgutil, importlib, sys, llm_serving\n"
        "for module in pkgutil.walk_packages(llm_serving.__path__, 'llm_serving.'):\n"
        "    importlib.import_module(module.name)\n"
        "assert not {'mindspore', 'mindformers', 'agent'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=True, timeout=60)


def test_lines_of_the_kernels_are_as_short_as_those_of_python():
    sources = [
        path for suffix in ("h", "cc") for path in sorted((REPOSITORY / "agent" / "kernels").rglob(f"*.{suffix}"))
    ]
    assert len(sources) > 50
    long = [
        f"{path.relative_to(REPOSITORY)}:{number}"
        for path in sources
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 120
    ]
    assert long == []
