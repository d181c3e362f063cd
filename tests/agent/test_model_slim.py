"""Folders of msModelSlim: damaged tensors are refused by name, and every way to pack integers of 4 bits is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.weights import WeightPart, open_weights
from llm_serving.errors import CheckpointError
from support.quantised_folders import CASES, LINEARS, SPECS, Tensors, write_case

Change = Callable[[Tensors, dict[str, Any]], object]
Q = WeightPart("q_proj.weight", LINEARS["q_proj.weight"])


def put(name: str, place: tuple[int, int], value: float) -> Change:
    """Makes a change of one element of the tensor ``name``."""

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[name] = tensors[name].copy()
        tensors[name][place] = value

    return change


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        (
            "slim w8a8 dynamic",
            put("q_proj.weight_offset", (3, 0), 1),
            r"q_proj\.weight_offset is not zero; 8-bit weights",
        ),
        ("slim w8a8 dynamic", put("q_proj.weight_scale", (3, 0), np.nan), r"q_proj\.weight_scale holds a value that"),
        ("slim w4a16 unpacked", put("q_proj.weight", (0, 0), 8), r"q_proj\.weight has integers outside of -8 to 7"),
        ("slim w4a16 unpacked", put("q_proj.weight", (0, 0), -9), r"q_proj\.weight has integers outside of -8 to 7"),
        ("slim w4a16", put("q_proj.weight_offset", (0, 1), 0.5), r"q_proj\.weight_offset must have whole numbers from"),
        ("slim w4a16", put("q_proj.weight_offset", (0, 1), -9), r"q_proj\.weight_offset must have whole numbers from"),
    ],
)
def test_damaged_values_are_refused(tmp_path: Path, case: str, change: Change, message: str) -> None:
    source = open_weights(write_case(tmp_path, CASES[case], change), SPECS, seed=None)
    with pytest.raises(CheckpointError, match=message):
        source.read_quantised(Q)
    source.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, c: t.update({"q_proj.weight": t["q_proj.weight"][:, :8]}), r"q_proj\.weight has shape \[16, 8\]"),
        (lambda t, c: t.update({"q_proj.weight": t["q_proj.weight"].astype(np.int32)}), r"q_proj\.weight has type I32"),
        (lambda t, c: t.pop("q_proj.weight_scale"), r"q_proj\.weight_scale missing from the weights"),
        (
            lambda t, c: t.update({"q_proj.clip_ratio": np.ones(1, np.float32)}),
            r"q_proj\.clip_ratio in the weights but",
        ),
        (lambda t, c: c.update({"q_proj.weight": "FLOAT"}), r"q_proj\.weight"),
    ],
)
def test_tensors_that_do_not_fit_the_description_are_refused(tmp_path: Path, change: Change, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_weights(write_case(tmp_path, CASES["slim w8a8 dynamic"], change), SPECS, seed=None)


@pytest.mark.parametrize("name", ["quant_model_weight_w8a8_dynamic", "quant-model-00001-00001"])
def test_names_of_other_versions_are_found(tmp_path: Path, name: str) -> None:
    folder = write_case(tmp_path, CASES["slim w8a8 dynamic"])
    (folder / "quant_model_weights.safetensors").rename(folder / f"{name}.safetensors")
    source = open_weights(folder, SPECS, seed=None)
    assert source.read_quantised(Q).values.shape == Q.shape
    source.close()
