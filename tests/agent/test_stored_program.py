"""Tests agents that read the launches of their graph from a file. They need no MindSpore and compute the same bits.

If the file is damaged or belongs to other settings, the agent ignores it and compiles the graph again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.stored_program import store
from performance.models.folders import write_model
from performance.models.variants import FAMILY_VARIANTS, VARIANTS
from support.agent_group import with_layers
from support.forked_programs import ForkedProgram
from support.json_program import printed_json, run_program

pytestmark = pytest.mark.timeout(400)

NUM_LAYERS = {"gqa_tied": 1, "qwen3_next": 3}
"""The models, and their numbers of layers. The second model has layers of several kinds."""
MODELS = tuple(NUM_LAYERS)
REFUSED = {
    "damaged program": "the stored program in",
    "damaged weights": "the converted weights in",
    "other bits": "its proof has other bits than MindSpore's graph had",
    "unknown memory": "its launches cannot be made again ('nothing')",
    "other type": "its launches cannot be made again",
    "no operator": "the kernels have no operator 'llmk_isa'",
}
"""A part of the log line for each fault that the worker plants."""


WORKER = Path(__file__).with_name("stored_program_worker.py")
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the results of two agents that start for the first time together, and of a later process.

    The later process starts agents several times. It is not forked, because it must not have imported MindSpore.
    """
    folder = tmp_path_factory.mktemp("stored")
    for model in MODELS:
        variant = {**VARIANTS, **FAMILY_VARIANTS}[model]
        write_model(with_layers(variant, NUM_LAYERS[model]), folder / model)
    for number, name in enumerate(("draft", "other draft"), 1):
        variant = with_layers(VARIANTS["gqa_tied"], NUM_LAYERS["gqa_tied"])
        write_model(replace(variant, seed=variant.seed + number), folder / name)
    with (
        ForkedProgram(WORKER, "first", str(folder), folder=folder) as one,
        ForkedProgram(WORKER, "other", str(folder), folder=folder) as two,
    ):
        first, other = (printed_json(agent.wait(300)) for agent in (one, two))
    later = printed_json(run_program(WORKER, "later", str(folder), folder=folder, timeout=300))
    return {"first": first, "at the same time": other, "later": later}


@pytest.mark.parametrize("model", MODELS)
def test_a_stored_start_has_the_bits_of_a_compiled_one(runs: dict[str, Any], model: str) -> None:
    first, other, later = (runs[name][model] for name in ("first", "at the same time", "later"))
    assert (first["start"], first["logged"]) == ("compiled", "")
    assert (later["start"], later["logged"]) == ("stored program", "")
    assert len(set(first["digests"])) > 30, "the digests must differ between steps"
    assert first["digests"] == other["digests"] == later["digests"]


def test_a_stored_start_needs_no_mindspore_before_a_profile(runs: dict[str, Any]) -> None:
    assert runs["later"]["mindspore"] == [False, True]


def test_a_stored_start_with_a_draft_model_makes_the_same_drafts(runs: dict[str, Any]) -> None:
    """``test_a_stored_start_needs_no_mindspore_before_a_profile`` includes this start."""
    first, later = (runs[name]["drafted"] for name in ("first", "later"))
    kinds = [(run["start"], run["draft_start"], run["logged"]) for run in (first, later)]
    assert kinds == [("compiled", "compiled", ""), ("stored program", "stored program", "")]
    assert first["digests"] == later["digests"] == runs["first"]["gqa_tied"]["digests"]
    assert (first["output"], first["drafts"]) == (later["output"], later["drafts"])
    following = [later["output"][count:][: len(draft)] for count, draft in later["drafts"]]
    own = [draft[: len(tokens)] for tokens, (_, draft) in zip(following, later["drafts"], strict=True)]
    assert own != following, "the draft model has other weights than the model"


def test_changed_weights_of_the_draft_model_are_used(runs: dict[str, Any]) -> None:
    """The start after the change converts the draft model again and compiles its graph. The model's files stay."""
    old, found = runs["later"]["drafted"], runs["later"]["changed drafts"]
    without_files, first, second = (found[name] for name in ("without files", "first", "second"))
    assert (without_files["start"], without_files["draft_start"]) == ("compiled", "compiled")
    assert (first["start"], first["draft_start"]) == ("stored program", "compiled")
    assert (second["start"], second["draft_start"], second["logged"]) == ("stored program", "stored program", "")
    assert first["drafts"] == second["drafts"] == without_files["drafts"] != old["drafts"]
    assert first["output"] == second["output"] == without_files["output"] == old["output"]


@pytest.mark.parametrize("fault", ["damaged program", "damaged weights", "other bits"])
def test_a_wrong_file_of_the_draft_model_is_not_used(runs: dict[str, Any], fault: str) -> None:
    first, found = runs["first"]["drafted"], runs["later"]["planted drafts"][fault]
    assert (found["start"], found["draft_start"]) == ("stored program", "compiled")
    assert REFUSED[fault] in found["logged"]
    assert (found["output"], found["drafts"]) == (first["output"], first["drafts"])


def test_the_next_start_with_a_draft_model_is_a_stored_one_again(runs: dict[str, Any]) -> None:
    found = runs["later"]["planted drafts"]["repaired"]
    assert (found["start"], found["draft_start"], found["logged"]) == ("stored program", "stored program", "")


@pytest.mark.parametrize("model", MODELS)
def test_a_profile_runs_the_graph_of_mindspore(runs: dict[str, Any], model: str) -> None:
    later = runs["later"][model]
    assert later["digests"] == later["by the graph"] == later["afterwards"]


@pytest.mark.parametrize("fault", REFUSED)
def test_a_wrong_file_is_not_used(runs: dict[str, Any], fault: str) -> None:
    found = runs["later"]["planted"][fault]
    assert found["start"] == "compiled"
    assert REFUSED[fault] in found["logged"]
    assert found["digests"] == runs["first"]["gqa_tied"]["digests"]


def test_the_next_start_is_a_stored_one_again(runs: dict[str, Any]) -> None:
    assert runs["later"]["planted"]["repaired"]["start"] == "stored program"


def test_the_number_of_blocks_may_change(runs: dict[str, Any]) -> None:
    found = runs["later"]["planted"]["more blocks"]
    assert found["start"] == "stored program"
    assert found["digests"] == runs["first"]["gqa_tied"]["digests"]


def test_other_limits_do_not_replace_the_program(runs: dict[str, Any]) -> None:
    assert runs["later"]["planted"]["first limits again"]["start"] == "stored program"


@pytest.mark.parametrize(("case", "logged"), [("off", ""), ("no folder", "cannot be written"), ("other limits", "")])
def test_other_starts_compile(runs: dict[str, Any], case: str, logged: str) -> None:
    found = runs["later"]["planted"][case]
    assert found["start"] == "compiled"
    assert logged in found["logged"]
    assert found["digests"] == runs["first"]["gqa_tied"]["digests"]


def test_a_program_depends_on_all_code_that_makes_a_graph() -> None:
    """These files choose the arguments of ``make_step_graph``, which change the launches."""
    files = [file.relative_to(REPOSITORY) for file in (REPOSITORY / "agent").rglob("*.py")]
    callers = [file for file in files if "make_step_graph(" in (REPOSITORY / file).read_text(encoding="utf-8")]
    assert len(callers) >= 3
    for file in callers:
        assert {str(file), *map(str, file.parents)} & set(store._CODE), f"{file} is missing"
