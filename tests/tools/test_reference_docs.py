"""Tests that the reference pages agree with the code: settings, metrics, log events and the command line."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import MISSING, fields

import pytest

from llm_serving.config.schema import key_info, section_keys
from llm_serving.config.sections import SECTIONS
from llm_serving.server import limits as server_limits
from llm_serving.telemetry.events import EVENTS
from support.forked_programs import run_forked
from support.small_configs import REPOSITORY
from tools import draw_pictures
from tools.reference.command_line import PROGRAMS
from tools.reference.source_trees import syntax_tree

DOCS = REPOSITORY / "docs"
DEVELOPMENT = {
    "count_schema_tests.py",
    "make_call_golden.py", "make_golden.py", "make_head_golden.py", "make_image_golden.py", "make_lora_golden.py",
    "make_qwen_image_golden.py", "make_smollm2_golden.py",
    "check_aarch64.py",
    "shape_tokenizer.py",
    "try_chat_page.py", "vendor_page_libraries.py", "show_progress.py", "kernel_build.py",
}  # fmt: skip
"""Programs that only the developers of one part of the project need. The page of commands does not list them."""


def test_the_pages_are_up_to_date() -> None:
    done = run_forked(REPOSITORY / "tools" / "write_reference_docs.py", "--check", folder=REPOSITORY)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["peers", "batching_modes"])
def test_the_pictures_are_up_to_date(name: str) -> None:
    picture = {"peers": draw_pictures.peers_picture, "batching_modes": draw_pictures.batching_picture}[name]()
    assert (DOCS / "pictures" / f"{name}.svg").read_text("utf-8") == picture


def test_the_page_of_files_has_every_limit_and_time() -> None:
    page = (DOCS / "files.md").read_text("utf-8")
    limits = [name for name in vars(server_limits) if name.startswith("MAX_") or name.endswith("_S")]
    assert len(limits) > 20
    assert [name for name in [*limits, "MIN_MATCH", "MAX_MATCH", "kSpinTime"] if f"`{name}`" not in page] == []


def test_the_page_of_files_has_no_marks_of_comments() -> None:
    rows = (DOCS / "files.md").read_text().splitlines()
    assert not [row for row in rows if row.startswith("| `") and ("*/}" in row or "{{" in row)]


def test_every_setting_has_a_row() -> None:
    page = (DOCS / "configuration.md").read_text("utf-8")
    names = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    expected = [key for cls in SECTIONS.values() for key in section_keys(cls)]
    assert names[: len(expected)] == expected


def test_every_field_of_a_section_is_a_declared_key_with_meaning_and_default() -> None:
    for cls in SECTIONS.values():
        for declared in fields(cls):
            info = key_info(declared)
            assert info is not None, declared.name
            assert info.meaning.endswith("."), declared.name
            assert declared.default is not MISSING, declared.name
            assert bool(info.null) == ("None" in str(declared.type)), declared.name


def test_every_program_is_on_the_page_of_commands() -> None:
    listed = {program.split()[0] for programs in PROGRAMS.values() for program in programs}
    found = {"start_server.py", "llm_serving/__main__.py", "llm_serving/access/__main__.py"}
    for folder in ("tools", "performance"):
        for path in (REPOSITORY / folder).glob("*.py"):
            text = path.read_text("utf-8")
            if (text.startswith("#!") or "__main__" in text) and path.name not in DEVELOPMENT:
                found.add(f"{folder}/{path.name}")
    assert listed == found


def logged_events() -> Iterator[tuple[str, frozenset[str]]]:
    """Yields the name and the fields of every event that the server logs. Only fields with literal names are found."""
    for path in sorted((REPOSITORY / "llm_serving").rglob("*.py")):
        for node in ast.walk(syntax_tree(path)):
            if isinstance(node, ast.Call):
                yield from _events_of_call(node)
            elif isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == "event" and isinstance(value, ast.Constant):
                        yield str(value.value), frozenset()


def _events_of_call(node: ast.Call) -> Iterator[tuple[str, frozenset[str]]]:
    method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    named = {word.arg: word.value for word in node.keywords if word.arg is not None}
    literal = frozenset(named) - {"event", "level"}
    if "event" in named and isinstance(named["event"], ast.Constant):
        yield str(named["event"].value), literal | {"message"}
    elif method == "event" and node.args and isinstance(node.args[0], ast.Constant):
        yield str(node.args[0].value), literal
    elif method in ("error", "warning") and owner.endswith("log"):
        yield method, literal | {"message"}


def test_every_logged_event_and_its_fields_are_declared() -> None:
    logged = list(logged_events())
    assert {name for name, _ in logged} == set(EVENTS)
    for name, names in logged:
        assert names <= set(EVENTS[name].fields), name


def test_the_fields_that_are_built_as_dictionaries_are_declared() -> None:
    for module, function, event in (
        ("llm_serving/engine/request_log.py", "request_end", "request_end"),
        ("llm_serving/cluster/nodes.py", "_event_fields", "node_down"),
        ("llm_serving/engine/state_line.py", "take", "engine_state"),
        ("llm_serving/server/generation/sequences.py", "_log_arrival", "request_arrival"),
    ):
        tree = syntax_tree(REPOSITORY / module)
        body = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == function)
        keys = {
            key.value
            for node in ast.walk(body)
            if isinstance(node, ast.Dict)
            for key in node.keys
            if isinstance(key, ast.Constant)
        } - {"level"}
        assert keys
        assert keys <= set(EVENTS[event].fields), (module, keys - set(EVENTS[event].fields))
