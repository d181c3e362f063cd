"""Tests agents with a head that read the launches of all graphs from files. They need no MindSpore and draft the same.

If a file is damaged, or if the head, its settings or the kernels have changed, the agent compiles the graphs again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.stored_program.store import ProgramStore
from agent.weights.cache.folder import WeightCache
from llm_serving.config import load_config
from llm_serving.config.draft_model import EAGLE, Head
from performance.models.heads import eagle_variant, write_speculators_head
from support.forked_programs import run_forked
from support.head_models import write_heads
from support.json_program import printed_json, run_program

pytestmark = pytest.mark.timeout(400)

HEADS = ("mtp", "mtp_qwen3_next", "eagle", "speculators")
PLANTED = "speculators"
WORKER = Path(__file__).with_name("stored_heads_worker.py")
STORED, COMPILED = "stored program", "compiled"
OTHER_BITS = "its proof has other bits than MindSpore's graph had"
REFUSED = {
    "damaged program": (STORED, COMPILED, "the stored program in"),
    "damaged weights": (STORED, COMPILED, "the converted weights in"),
    "other inputs of a graph": (STORED, COMPILED, OTHER_BITS),
    "missing launch": (STORED, COMPILED, "the head's output is of step"),
    "unknown memory": (STORED, COMPILED, "its launches cannot be made again ('nothing')"),
    "other hidden states": (COMPILED, STORED, OTHER_BITS),
}
"""For each fault that the worker plants: the starts of the model and of the head, and a part of the log line."""
CHANGED = {
    "weights": (STORED, COMPILED),
    "residual stream": (STORED, COMPILED),
    "layers": (COMPILED, COMPILED),
    "kernels": (COMPILED, COMPILED),
}
"""For each change that the worker makes: the starts of the model and of the head."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the results of first starts, and of a later process.

    The later process is not forked, because it must not have imported MindSpore.
    """
    folder = tmp_path_factory.mktemp("heads")
    for kind in HEADS:
        write_heads(kind, folder / kind)
    write_speculators_head(folder / "other" / "head", replace(eagle_variant(), seed=eagle_variant().seed + 1))
    first = printed_json(run_forked(WORKER, "first", str(folder), folder=folder, timeout=300))
    later = printed_json(run_program(WORKER, "later", str(folder), folder=folder, timeout=300))
    return {"first": first, "later": later}


@pytest.mark.parametrize("kind", HEADS)
def test_a_stored_start_makes_the_same_drafts_and_accepts_the_same(runs: dict[str, Any], kind: str) -> None:
    first, later = runs["first"][kind], runs["later"][kind]
    assert (first["start"], first["draft_start"], first["logged"]) == (COMPILED, COMPILED, "")
    assert (later["start"], later["draft_start"], later["logged"]) == (STORED, STORED, "")
    assert drafts_of(first) == drafts_of(later)
    generated, verified = (first[name] for name in ("generated", "verified"))
    assert len({tuple(draft) for draft in generated["drafts"].values()}) > 10, "the drafts must differ between steps"
    assert len(verified["drafts"]) < len(verified["output"]), "some drafts must be accepted"


def test_a_stored_start_with_a_head_needs_no_mindspore(runs: dict[str, Any]) -> None:
    assert runs["later"]["mindspore"] == {"imported": False, "mapped": False}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_wrong_file_is_not_used(runs: dict[str, Any], fault: str) -> None:
    found = runs["later"]["planted"][fault]
    model, head, logged = REFUSED[fault]
    assert (found["start"], found["draft_start"]) == (model, head)
    assert logged in found["logged"]
    assert drafts_of(found) == drafts_of(runs["first"][PLANTED])


def test_the_next_start_is_a_stored_one_again(runs: dict[str, Any]) -> None:
    found = runs["later"]["repaired"]
    assert (found["start"], found["draft_start"], found["logged"]) == (STORED, STORED, "")


@pytest.mark.parametrize("change", CHANGED)
def test_a_change_compiles_the_graphs_again(runs: dict[str, Any], change: str) -> None:
    found = runs["later"]["changed"][change]
    without_files, first, second = (found[name] for name in ("without files", "first", "second"))
    assert (without_files["start"], without_files["draft_start"]) == (COMPILED, COMPILED)
    assert (first["start"], first["draft_start"]) == CHANGED[change]
    assert (second["start"], second["draft_start"], second["logged"]) == (STORED, STORED, "")
    assert drafts_of(without_files) == drafts_of(first) == drafts_of(second)


def test_each_change_of_a_head_changes_its_drafts(runs: dict[str, Any]) -> None:
    """So ``test_a_change_compiles_the_graphs_again`` fails if files of the state before are used."""
    changed = [runs["later"]["changed"][name]["without files"] for name in ("weights", "residual stream", "layers")]
    drafts = [str(drafts_of(each)) for each in (runs["first"][PLANTED], *changed)]
    assert len(set(drafts)) == len(drafts)


def drafts_of(start: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the tokens and drafts of an agent."""
    return start["generated"], start["verified"]


@pytest.mark.parametrize("store", [ProgramStore, WeightCache])
def test_the_files_of_a_head_with_random_weights_depend_on_its_settings(
    store: type[ProgramStore] | type[WeightCache],
) -> None:
    """Random weights have no files. So the contents of ``config.json`` are not compared."""
    settings = ("model_config.load_format=dummy", "model_config.seed=1")
    config = load_config("llama_tiny_cpu.yaml", settings)
    head = Head(EAGLE, (1, 2, 3), config.shape.hidden_size, config.shape.vocab_size)
    changes: list[dict[str, Any]] = [{}, {"layers": (2, 1, 3)}, {"norm_before_residual": True}, {"shares_output": True}]
    stores = [store(config, 0, head=replace(head, **each)) for each in changes]
    assert len({each._path for each in stores}) == len({each._fingerprint() for each in stores}) == len(changes)
