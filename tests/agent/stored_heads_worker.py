"""Starts agents with heads from stored programs in a separate process, and prints the results as JSON.

python tests/agent/stored_heads_worker.py first|later FOLDER
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from heads_program import WIDTH, Heads  # noqa: E402
from step_driver import StepDriver  # noqa: E402
from stored_program_worker import flip, rewrite, warnings  # noqa: E402

from agent.stored_program.program import StoredLaunch  # noqa: E402
from agent.stored_program.store import ProgramStore  # noqa: E402
from agent.weights.cache import fingerprint  # noqa: E402
from llm_serving.config import Config  # noqa: E402
from llm_serving.config.draft_config import draft_config  # noqa: E402
from support.golden_files import golden_of  # noqa: E402
from support.head_models import MTP  # noqa: E402
from support.step_config import make_config  # noqa: E402

HEADS = ("mtp", "mtp_qwen3_next", "eagle", "speculators")
"""The kinds of heads. Those of the model with linear attention have states. EAGLE-3 heads have two graphs."""
PLANTED = "speculators"
"""The head whose files are damaged and changed."""
NO_FILES = {"model_config.weight_cache_gib": 0}


def config_of(folder: Path, kind: str, **extra: object) -> Config:
    settings: dict[str, object] = {
        "speculative_config.method": "mtp" if kind in MTP else "eagle",
        "speculative_config.max_draft_tokens": WIDTH,
        "model_config.weight_cache_path": folder / "cache" / kind,
        **extra,
    }
    if kind not in MTP:
        settings["speculative_config.model"] = folder / kind / "head"
    return make_config(folder / kind / "model", "float32", "fused", extra=settings)


def start(folder: Path, kind: str, **extra: object) -> dict[str, Any]:
    """Starts an agent. Returns the messages of its start, and its tokens and drafts.

    The drafts of ``verified`` are listed by the number of tokens before them, which depends on the number of accepted
    drafts.
    """
    with warnings() as logged:
        driver = StepDriver(config_of(folder, kind, **extra), keeps_files=True)
    summary, runs = driver.runner.summary(), Heads(driver, golden_of(f"heads/{kind}"))
    made = {"generated": runs.generate(0, list(range(1, 7)), 0, 0), "verified": runs.verify(1, list(range(20, 26)))}
    return {"start": summary["start"], "draft_start": summary["draft_start"], "logged": " | ".join(logged), **made}


def run_first(folder: Path) -> dict[str, Any]:
    return {kind: start(folder, kind) for kind in HEADS}


def run_later(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {kind: start(folder, kind) for kind in HEADS}
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8")
    results["mindspore"] = {"imported": "mindspore" in sys.modules, "mapped": "/mindspore/" in mapped}
    # The starts that must not import MindSpore are done. This module makes the following compilations cheaper.
    importlib.import_module("support.mindspore_preload")
    results["planted"] = run_planted(folder)
    results["repaired"] = start(folder, PLANTED)
    results["changed"] = run_changed(folder)
    return results


def plant(folder: Path, fault: str) -> None:
    config = config_of(folder, PLANTED)
    assert config.draft is not None
    own, head = draft_config(config), config.draft.head
    found = ProgramStore(own, 0, head=head).find()
    assert found is not None, "the start before has stored a valid program"
    first, second = found[0].graphs
    if fault == "damaged program":
        [file] = (folder / "cache" / PLANTED).glob("*-draft-*.program")
        flip(file)
    elif fault == "damaged weights":
        [file] = (folder / "cache" / PLANTED).glob("*-draft-*.weights")
        flip(file)
    elif fault == "other inputs of a graph":
        renamed = {"step/positions": "step/sampled_tokens"}
        rewrite(own, head, graphs=(first, with_memory(second, renamed)))
    elif fault == "missing launch":
        rewrite(own, head, graphs=(first, second[:-1]))
    elif fault == "unknown memory":
        rewrite(own, head, graphs=(first, with_memory(second, {"step/own_states": "nothing"})))
    else:
        assert fault == "other hidden states"
        model = ProgramStore(config, 0).find()
        assert model is not None
        swapped = {"result/taps/0": "result/taps/1", "result/taps/1": "result/taps/0"}
        rewrite(config, graphs=(with_memory(model[0].graphs[0], swapped),))


def with_memory(launches: tuple[StoredLaunch, ...], names: dict[str, str]) -> tuple[StoredLaunch, ...]:
    """Returns launches that use other memory. ``names`` maps names of memory to new ones."""
    changed, replace = [], msgspec.structs.replace
    for launch in launches:
        arguments = tuple(replace(each, memory=names.get(each.memory, each.memory)) for each in launch.arguments)
        changed.append(replace(launch, arguments=arguments))
    assert tuple(changed) != launches
    return tuple(changed)


FAULTS = (
    *("damaged program", "damaged weights", "other inputs of a graph", "missing launch", "unknown memory"),
    "other hidden states",
)


def run_planted(folder: Path) -> dict[str, Any]:
    """Starts an agent after each planted fault. Each start must replace the faulty file by a correct one."""
    results = {}
    for fault in FAULTS:
        plant(folder, fault)
        results[fault] = start(folder, PLANTED)
    return results


def run_changed(folder: Path) -> dict[str, Any]:
    """Changes what the drafts depend on, and starts agents with the files of the state before.

    The start ``without files`` converts weights and compiles all graphs itself.
    """
    results = {}
    head = folder / PLANTED / "head"
    config: dict[str, Any] = json.loads((head / "config.json").read_text(encoding="utf-8"))
    changes = {
        "weights": lambda: shutil.copyfile(folder / "other" / "head" / "model.safetensors", head / "model.safetensors"),
        "residual stream": lambda: write_config(head, config, norm_before_residual=False),
        "layers": lambda: write_config(head, config, eagle_aux_hidden_state_layer_ids=[1, 2, 4]),
    }
    for name, change in changes.items():
        change()
        without_files = start(folder, PLANTED, **NO_FILES)
        results[name] = {"without files": without_files, "first": start(folder, PLANTED)}
        results[name]["second"] = start(folder, PLANTED)
    program = fingerprint._program
    fingerprint._program = lambda: "other kernels"  # type: ignore[assignment]
    results["kernels"] = {"without files": without_files, "first": start(folder, PLANTED)}
    results["kernels"]["second"] = start(folder, PLANTED)
    fingerprint._program = program
    return results


def write_config(head: Path, config: dict[str, Any], **changes: object) -> None:
    (head / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")


if __name__ == "__main__":
    run = {"first": run_first, "later": run_later}[sys.argv[1]]
    print(json.dumps(run(Path(sys.argv[2]))), flush=True)
    os._exit(0)
