"""Starts agents with stored programs in a separate process, and prints the results as JSON.

python tests/agent/stored_program_worker.py first|other|later FOLDER
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from drafting_program import PROMPT, WIDTH, Drafting  # noqa: E402
from runner_worker import decodes  # noqa: E402
from step_driver import StepDriver  # noqa: E402

from agent.stored_program.program import StoredProgram  # noqa: E402
from agent.stored_program.store import ProgramStore  # noqa: E402
from llm_serving.config import Config  # noqa: E402
from llm_serving.config.draft_config import draft_config  # noqa: E402
from llm_serving.config.draft_model import Head  # noqa: E402
from support.golden_files import golden_of  # noqa: E402
from support.position_bits import FORCED_STEPS  # noqa: E402
from support.step_config import make_config  # noqa: E402

MODELS = {
    "gqa_tied": ("float32", "auto", "auto"),
    "qwen3_next": ("bfloat16", "int8", "int8"),
}
"""The type and the formats of weights and KV cache of each model."""
PLANTED = "gqa_tied"
"""The model whose files are damaged."""


def config_of(folder: Path, model: str, **extra: object) -> Config:
    dtype, weights, kv = MODELS[model]
    keys = {"model_config.weight_cache_path": folder / "cache" / model, **extra}
    return make_config(folder / model, dtype, "fused", weights, kv, extra=keys)


@contextmanager
def warnings() -> Iterator[list[str]]:
    """Yields a list, and adds the warnings to it that are logged before the ``with`` block ends."""
    logged: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        yield logged
    finally:
        logging.getLogger().removeHandler(handler)


def start(config: Config, model: str) -> tuple[StepDriver, dict[str, Any]]:
    """Starts an agent. Returns its driver, and the messages of its start with the digests of some steps."""
    with warnings() as logged:
        driver = StepDriver(config, keeps_files=True)
    found = {"start": driver.runner.summary()["start"], "logged": " | ".join(logged), "digests": digests(driver, model)}
    return driver, found


def digests(driver: StepDriver, model: str) -> list[str]:
    cases = golden_of(model)["cases"][:3]
    return decodes(driver, [case["prompt"] for case in cases], cases[0]["tokens"][:FORCED_STEPS])


def drafted_config(folder: Path, draft: str = "draft", **extra: object) -> Config:
    """Returns the config of an agent whose draft model is in the folder ``draft``.

    The draft model differs from the model only in the values of its weights.
    """
    settings = {"method": "draft", "model": folder / draft, "max_draft_tokens": WIDTH}
    own = {f"speculative_config.{key}": value for key, value in settings.items()}
    keys = {**own, "model_config.weight_cache_path": folder / "cache" / "drafted", **extra}
    return config_of(folder, PLANTED, **keys)


def start_with_drafts(folder: Path, draft: str = "draft", **extra: object) -> dict[str, Any]:
    driver, found = start(drafted_config(folder, draft, **extra), PLANTED)
    made = Drafting(driver).generate(0, list(range(1, 8)), PROMPT, 0, [WIDTH] * 12)
    return {**found, **made, "draft_start": driver.runner.summary()["draft_start"]}


def run_first(folder: Path) -> dict[str, Any]:
    results = run_models(folder, "first")
    return {**results, "drafted": start_with_drafts(folder)}


def run_models(folder: Path, name: str) -> dict[str, Any]:
    """Starts an agent of each model for the first time, at the same time as the process of the other name."""
    found = {}
    for model in MODELS:
        (folder / f"{model} {name}").touch()
        while not all((folder / f"{model} {each}").exists() for each in ("first", "other")):
            time.sleep(0.01)
        found[model] = start(config_of(folder, model), model)[1]
    return found


def run_later(folder: Path) -> dict[str, Any]:
    """Starts agents from stored programs, and runs the same steps in three ways.

    First, the stored program runs the steps. Then MindSpore's graphs run them, as during a profile. Finally, the stored
    program runs them again. After this, agents start with damaged files.
    """
    started = {model: start(config_of(folder, model), model) for model in MODELS}
    results: dict[str, Any] = {"drafted": start_with_drafts(folder)}
    needed_mindspore = "mindspore" in sys.modules
    for model, (driver, found) in started.items():
        driver.runner._set_replaying(False)
        found["by the graph"] = digests(driver, model)
        driver.runner._set_replaying(True)
        found["afterwards"] = digests(driver, model)
        results[model] = found
    return {
        **results,
        "mindspore": [needed_mindspore, "mindspore" in sys.modules],
        "planted": run_planted(folder),
        "planted drafts": run_planted_drafts(folder),
        "changed drafts": run_changed_drafts(folder),
    }


def flip(path: Path) -> None:
    """Changes a byte in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def rewrite(config: Config, head: Head | None = None, **changes: Any) -> None:
    """Stores the agent's program again with changed fields. The agent still accepts the file as its own.

    ``head`` is given if ``config`` is the config of a head.
    """
    store = ProgramStore(config, 0, head=head)
    found = store.find()
    assert found is not None
    store.keep(msgspec.structs.replace(found[0], **changes), found[1])


def with_argument(program: StoredProgram, **changes: Any) -> tuple[Any, ...]:
    """Returns the graphs of a program, in which one argument of the first launch is changed."""
    (first, *others), *graphs = program.graphs
    argument = msgspec.structs.replace(first.arguments[0], **changes)
    return ((msgspec.structs.replace(first, arguments=(argument, *first.arguments[1:])), *others), *graphs)


def plant(folder: Path, config: Config, name: str) -> None:
    found = ProgramStore(config, 0).find()
    assert found is not None, "the start before has stored a valid program"
    program = found[0]
    [program_file] = (folder / "cache" / PLANTED).glob("*.program")
    [weights_file] = (folder / "cache" / PLANTED).glob("*.weights")
    if name == "damaged program":
        flip(program_file)
    elif name == "damaged weights":
        flip(weights_file)
    elif name == "other bits":
        rewrite(config, proof="0" * 64)
    elif name == "unknown memory":
        rewrite(config, graphs=with_argument(program, memory="nothing"))
    elif name == "other type":
        rewrite(config, graphs=with_argument(program, type="float32"))
    else:
        assert name == "no operator"
        rewrite(config, graphs=((msgspec.structs.replace(program.graphs[0][0], operator="llmk_isa"),),))


PLANTS = ("damaged program", "damaged weights", "other bits", "unknown memory", "other type", "no operator")


def run_planted(folder: Path) -> dict[str, Any]:
    """Starts an agent after each planted fault, and finally without a fault.

    Each start must replace the faulty file by a correct one.
    """
    # The starts that must not import MindSpore are done. This module makes the following compilations cheaper.
    importlib.import_module("support.mindspore_preload")
    config, results = config_of(folder, PLANTED), {}
    for name in PLANTS:
        plant(folder, config, name)
        results[name] = start(config, PLANTED)[1]
    results["repaired"] = start(config, PLANTED)[1]
    more_blocks = {"pa_config.num_blocks": 300}
    results["more blocks"] = start(config_of(folder, PLANTED, **more_blocks), PLANTED)[1]
    results["off"] = start(config_of(folder, PLANTED, **{"model_config.weight_cache_gib": 0}), PLANTED)[1]
    nowhere = {"model_config.weight_cache_path": "/proc/none"}
    results["no folder"] = start(config_of(folder, PLANTED, **nowhere), PLANTED)[1]
    longer = {"scheduler_config.max_num_batched_tokens": 192}
    results["other limits"] = start(config_of(folder, PLANTED, **longer), PLANTED)[1]
    results["first limits again"] = start(config, PLANTED)[1]
    return results


def run_planted_drafts(folder: Path) -> dict[str, Any]:
    """Starts an agent after each fault in a file of the draft model, and finally without a fault.

    Each start must replace the faulty file by a correct one.
    """
    config, results = drafted_config(folder), {}
    for name in ("damaged program", "damaged weights", "other bits"):
        kind = "weights" if name == "damaged weights" else "program"
        [file] = (folder / "cache" / "drafted").glob(f"*-draft-*.{kind}")
        if name == "other bits":
            rewrite(draft_config(config), proof="0" * 64)
        else:
            flip(file)
        results[name] = start_with_drafts(folder)
    results["repaired"] = start_with_drafts(folder)
    return results


def run_changed_drafts(folder: Path) -> dict[str, Any]:
    """Replaces the weights of the draft model by other values. Then starts agents with the files of the old weights.

    The start ``without files`` converts the new weights itself.
    """
    without_files = start_with_drafts(folder, "other draft", **{"model_config.weight_cache_gib": 0})
    weights = "model.safetensors"
    shutil.copyfile(folder / "other draft" / weights, folder / "draft" / weights)
    starts = {"first": start_with_drafts(folder), "second": start_with_drafts(folder)}
    return {"without files": without_files, **starts}


if __name__ == "__main__":
    runs = {"first": run_first, "other": lambda folder: run_models(folder, "other"), "later": run_later}
    print(json.dumps(runs[sys.argv[1]](Path(sys.argv[2]))), flush=True)
    os._exit(0)
