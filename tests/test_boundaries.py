"""Tests rules for the code.

The rules are about imports between packages, forbidden modules, lengths of lines, and the table of packages in
docs/architecture.md.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import PurePath

import pytest

from llm_serving.flight.setup import RECORDED_CODE
from support.small_configs import REPOSITORY
from support.time_limits import time_limit
from tools.reference.source_trees import syntax_tree

HTTP = ("starlette", "uvicorn", "uvloop", "httptools", "asyncio", "aiohttp", "httpx", "requests")
AGENT_MAY = ("llm_serving.config", "llm_serving.errors", "llm_serving.formats", "llm_serving.gguf", "llm_serving.ipc")
AGENT_MAY += ("llm_serving.model", "llm_serving.planning", "llm_serving.request", "llm_serving.sampling_params")
AGENT_MAY += ("llm_serving.telemetry.log", "llm_serving.telemetry.npu_smi")


CLOCKS_AND_IO = ("time", "datetime", "threading", "socket", "selectors", "os", "io", "pathlib", "random", "subprocess")


LAYERS = ("llm_serving", "agent", "performance", "tools", "tests")
"""Layers from the lowest to the highest. A file imports only files of its own layer and of lower layers."""


def python_files(package):
    return sorted((REPOSITORY / package).rglob("*.py"))


@cache
def import_statements(path):
    """Returns the imports of a file, also inside functions and type-checking blocks. Several tests read all files.

    Only statements are searched. A search of all expressions would take as long as the parsing.
    """
    found, waiting = [], [syntax_tree(path)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, part, ())
    return found


def imports_of(path):
    """Yields the full name of every module that a file imports, also inside functions and type-checking blocks."""
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def imported_files(path):
    """Returns the project's files that a file imports.

    ``from package import module`` counts as an import of the module's file.
    """
    names = set()
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            folder = path.relative_to(REPOSITORY).parts[: -node.level] if node.level else ()
            module = ".".join((*folder, *([node.module] if node.module else [])))
            for alias in node.names:
                member = f"{module}.{alias.name}"
                names.add(member if file_of_module(member) else module)
    return {file for name in names if (file := file_of_module(name)) is not None and file != path}


@cache
def file_of_module(name):
    """Returns the file of a module of this project, or None."""
    top = "tests/" if name.partition(".")[0] == "support" else ""
    place = REPOSITORY / (top + name.replace(".", "/"))
    candidates = (place.with_suffix(".py"), place / "__init__.py")
    return next((each for each in candidates if each.is_file()), None)


def cycles_of(graph):
    """Returns the groups of two or more nodes in which each node reaches every other node."""
    reached = {}
    for start in graph:
        seen, waiting = set(), [start]
        while waiting:
            new = graph.get(waiting.pop(), set()) - seen
            seen |= new
            waiting += new
        reached[start] = seen
    return {
        frozenset(other for other in graph if other in reached[node] and node in reached[other])
        for node in graph
        if node in reached[node]
    }


def inside(name, packages):
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def imports_inside(package, forbidden, allowed=()):
    """Returns the pairs (file, import) of a package whose import is inside ``forbidden`` but not inside ``allowed``."""
    paths = python_files(package)
    assert len(paths) > 100
    pairs = [(short_name(path), name) for path in paths for name in imports_of(path)]
    return [(path, name) for path, name in pairs if inside(name, forbidden) and not inside(name, allowed)]


def test_the_control_plane_imports_no_device_code():
    assert imports_inside("llm_serving", ("mindspore", "mindformers", "agent")) == []


def test_the_agent_imports_no_http_and_only_allowed_packages():
    assert imports_inside("agent", HTTP) == []
    assert imports_inside("agent", ("llm_serving",), AGENT_MAY) == []


def test_only_the_ray_driver_imports_ray():
    """The server starts the driver as a process, so that it never imports Ray itself."""
    driver = "llm_serving/ray_driver/"
    found = imports_inside("llm_serving", ("ray", "llm_serving.ray_driver")) + imports_inside("agent", ("ray",))
    assert {path for path, _ in found if not path.startswith(driver)} == set()
    assert (f"{driver}driver.py", "ray") in found


def test_only_the_publisher_of_events_imports_zeromq():
    """Other modules import the publisher only inside functions, so a server without events never imports ZeroMQ."""
    publisher = REPOSITORY / "llm_serving/kvevents/publisher.py"
    found = imports_inside("llm_serving", ("zmq",)) + imports_inside("agent", ("zmq",))
    assert {path for path, _ in found} == {"llm_serving/kvevents/publisher.py"}
    for path in python_files("llm_serving"):
        outside = [node for node in import_statements(path) if node.col_offset == 0]
        assert "llm_serving.kvevents.publisher" not in [getattr(node, "module", None) for node in outside], path
    assert publisher.is_file()


def test_only_the_process_of_mooncake_imports_mooncake():
    """The node starts this process only if Mooncake is the transport of handed blocks."""
    found = imports_inside("llm_serving", ("mooncake", "acl")) + imports_inside("agent", ("mooncake",))
    assert {path for path, _ in found} == {"llm_serving/handover/mooncake/engine.py"}
    importers = imports_inside("llm_serving", ("llm_serving.handover.mooncake.engine",))
    assert {path for path, _ in importers} == {"llm_serving/handover/mooncake/__main__.py"}
    for path in python_files("llm_serving"):
        outside = [getattr(node, "module", None) for node in import_statements(path) if node.col_offset == 0]
        inner = "handover/mooncake/" in str(path)
        assert inner or not [name for name in outside if inside(name or "", ("llm_serving.handover.mooncake",))], path


def test_a_forbidden_import_is_found():
    assert ("agent/server.py", "llm_serving.ipc") in [
        (path, name.rpartition(".")[0]) for path, name in imports_inside("agent", ("llm_serving",))
    ]


@pytest.mark.parametrize(
    "package",
    [
        *("admission", "block_moves", "block_supply", "kvcache", "policies", "routing", "scheduler", "step_costs"),
        "waiting",
    ],
)
def test_packages_that_decide_have_no_clock_and_no_io(package):
    """The packages that make decisions use no clock and no input or output.

    Only then can a run be simulated, and replayed bit for bit.
    """
    for path in python_files(f"llm_serving/{package}"):
        assert [name for name in imports_of(path) if inside(name, (*CLOCKS_AND_IO, *HTTP))] == [], path


DESCRIPTIONS = frozenset({"limits", "output", "sequence", "snapshot"})
"""Files of the scheduler that only describe requests, sequences and steps."""
STATE = DESCRIPTIONS | {"running", "state"}
"""Files with the state that the parts of the scheduler share."""
USED_FILES = {
    "waiting": DESCRIPTIONS,
    "step_costs": DESCRIPTIONS,
    "block_supply": STATE,
    "admission": STATE | {"step_builder"},
    "block_moves": STATE,
    "policies": STATE | {"composer", "mixed"},
}
"""For each part of the scheduler with a package of its own: the files of package ``scheduler`` that it may import."""


@pytest.mark.parametrize("package", USED_FILES)
def test_the_parts_of_the_scheduler_have_narrow_interfaces(package):
    """For example, the package ``waiting`` must not import running sequences, because the router also uses it."""
    allowed = {f"llm_serving.scheduler.{name}" for name in USED_FILES[package]}
    paths = python_files(f"llm_serving/{package}")
    assert len(paths) > 2
    for path in paths:
        assert {name for name in imports_of(path) if inside(name, ("llm_serving.scheduler",))} <= allowed, path


@pytest.mark.parametrize("package", ["llm_serving", "agent"])
def test_no_file_unpickles_or_evaluates(package):
    for path in python_files(package):
        assert not [name for name in imports_of(path) if inside(name, ("pickle", "marshal", "shelve"))], path
        text = path.read_text()
        if not any(name in text for name in ("eval", "exec", "__import__")):
            continue
        calls = [node for node in ast.walk(syntax_tree(path)) if isinstance(node, ast.Call)]
        named = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
        assert not named & {"eval", "exec", "__import__"}, path


def short_name(path):
    return str(path.relative_to(REPOSITORY))


@cache
def import_graph():
    """Returns the imports between the project's files, without the tests."""
    paths = [path for layer in LAYERS[:-1] for path in python_files(layer)]
    return {short_name(path): {short_name(file) for file in imported_files(path)} for path in paths}


def test_the_check_finds_both_cycles_of_a_graph():
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"d"}, "f": {"a"}, "g": set()}
    assert cycles_of(graph) == {frozenset("abc"), frozenset("de")}


def test_no_files_import_each_other_in_a_cycle():
    graph = import_graph()
    assert len(graph) > 300
    assert sum(map(len, graph.values())) > 1000
    assert cycles_of(graph) == set()


def test_no_file_imports_a_file_of_a_higher_layer():
    found = {
        (file, other)
        for file, others in import_graph().items()
        for other in others
        if LAYERS.index(other.partition("/")[0]) > LAYERS.index(file.partition("/")[0])
    }
    assert found == set()


def test_the_digest_of_a_recording_covers_the_whole_scheduler():
    """A replay compares this digest with that of the recording, to know whether the scheduler's code has changed."""
    graph, reached, waiting = import_graph(), set(), ["llm_serving/scheduler/scheduler.py"]
    while waiting:
        new = graph[waiting.pop()] - reached
        reached |= new
        waiting += new
    decides = {file for file in reached if any(name.startswith("llm_serving/scheduler/") for name in graph[file])}
    digested = {file for pattern in RECORDED_CODE for file in (REPOSITORY / "llm_serving").glob(pattern)}
    assert len(decides) > 30
    assert decides - set(map(short_name, digested)) == set()


def test_a_server_with_everything_imported_has_no_mindspore():
    """The Ray driver is not imported, because it runs in a separate process and needs an optional package."""
    program = (
        "import pkgutil, importlib, sys, llm_serving\n"
        "for module in pkgutil.walk_packages(llm_serving.__path__, 'llm_serving.'):\n"
        "    if not module.name.startswith('llm_serving.ray_driver'):\n"
        "        importlib.import_module(module.name)\n"
        "assert not {'mindspore', 'mindformers', 'agent', 'ray'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=True, timeout=time_limit(60))


def named_in_the_architecture():
    """Returns the folders and files in the first column of the table of packages in docs/architecture.md."""
    rows = (REPOSITORY / "docs/architecture.md").read_text().partition("## Packages")[2].splitlines()
    names = [name for row in rows if row.startswith("| `") for name in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert len(names) > 60
    return names


def test_every_package_has_a_line_in_the_architecture():
    folders = {path.parent for top in ("llm_serving", "agent", "performance", "tools") for path in python_files(top)}
    folders |= {path.parent for path in (REPOSITORY / "agent/kernels").rglob("*.cc")}
    named = {name.rstrip("/") for name in named_in_the_architecture() if name.endswith("/")}
    packages = {folder.relative_to(REPOSITORY) for folder in folders} - {PurePath("llm_serving"), PurePath("agent")}
    assert len(packages) > 30
    assert {str(path) for path in packages if not any(path.match(name) for name in named)} == set()


def test_every_file_in_the_architecture_exists():
    tops = ("llm_serving", "agent", "configs", "helm", "performance", "tools", "tests")
    paths = [path for top in tops for path in (REPOSITORY / top).rglob("*")] + list(REPOSITORY.glob("*"))
    missing = [name for name in named_in_the_architecture() if not any(path.match(name) for path in paths)]
    assert missing == []


def test_places_for_changes_exist():
    """Each row of the page has the form "to change X, open file Y, look for Z". Both Y and Z must exist."""
    page = (REPOSITORY / "docs/where_to_change.md").read_text()
    rows = [row.split("|")[2:4] for row in page.splitlines() if "`" in row and row[0] == "|"]
    places = [(file, look.strip(" `")) for files, look in rows for file in re.findall(r"`([^`]+)`", files)]
    assert len(places) > 40
    assert [place for place in places if place[1] not in (REPOSITORY / place[0]).read_text()] == []


def test_lines_of_the_kernels_have_at_most_120_columns():
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
