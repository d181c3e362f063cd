"""Tests quantised experts of the native op table.

The tokens are compared with Hugging Face's, and the logits with those of the same weights dequantised in NumPy. The
bits must be equal for any chunks. test_native_quantised_groups.py tests several agents.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from agent.weights.storage import from_float32, to_float32
from performance.models.folders import write_model
from performance.models.variants import FAMILY_VARIANTS, Variant
from support.agent_group import Setup, run_group
from support.golden_files import golden_of
from support.position_bits import check_position_bits
from support.sweeps import with_sweeps

pytestmark = pytest.mark.timeout(600)

MODELS = ("qwen3_moe", "mixtral")
"""Models with a layer without experts, and with a window."""
SWEPT_MODEL = "mixtral"
"""Only ``make test-sweeps`` runs it: its experts have the same products, and other tests cover windows."""
MODEL_PARAMS = with_sweeps([(model,) for model in MODELS], lambda model: model == SWEPT_MODEL)
SETUPS = {
    fmt: Setup(1, 1, dtype, "native", fmt)
    for fmt, dtype in (("int8", "bfloat16"), ("int8_weight_only", "float16"), ("int4", "float16"))
}
SWEPT_FORMAT = pytest.param("int8_weight_only", marks=pytest.mark.sweep)
"""Only ``make test-sweeps`` runs it: int4 has the same products with scales of groups."""
FORMATS = ("int8", SWEPT_FORMAT, "int4")
LEAST_AGREEMENT = {"int8": 0.97, "int8_weight_only": 0.97, "int4": 0.55}
"""Minimum fraction of tokens among the oracle's best four."""
GROUP = 32
"""Number of inputs that share a scale of int4: ``weight_group`` of ``step_config``."""
_QUANTISED = re.compile(r"_proj\.weight$|\.experts\.\d+\.w[123]\.weight$|^lm_head\.weight$")

Results = dict[str, Any]


def same_values(variant: Variant) -> Variant:
    """Returns the model with its weights stored as float32, so that dequantised weights are stored without rounding."""
    return Variant(variant.config, variant.seed, "float32", 1, variant.logit_scale)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Returns a function that writes the folder of a model and returns its path.

    The function's argument is "plain" for unchanged weights, or the format to which the experts are rounded.
    """

    @cache
    def made(kind: str, model: str) -> Path:
        folder = tmp_path_factory.mktemp(kind) / model
        write_model(same_values(FAMILY_VARIANTS[model]), folder)
        if kind != "plain":
            multiply_out(folder, kind)
        return folder

    return made


@pytest.fixture(scope="module")
def runs(folder_of: Callable[[str, str], Path]) -> Callable[..., Results]:
    """Returns a function that gives the results of a model in a setup, with the given kind of weights."""

    @cache
    def known(setup: str, model: str, kind: str) -> Results:
        agents = run_group(by_name[setup], {model: folder_of(kind, model)}, ways=("forced", "invariance"))
        found: Results = agents[0][model]
        return found

    by_name: dict[str, Setup] = {}

    def run(setup: Setup, model: str, kind: str = "plain") -> Results:
        by_name[str(setup)] = setup
        return known(str(setup), model, kind)

    return run


def multiply_out(folder: Path, fmt: str) -> None:
    """Replaces every expert weight by its dequantised value in the format: the nearest integer times a float16 scale.
    """
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    for name, values in tensors.items():
        if not _QUANTISED.search(name) or (fmt == "int4" and len(values) % 2):
            continue
        largest, group = (7, GROUP) if fmt == "int4" else (127, values.shape[1])
        grouped = values.reshape(len(values), -1, group)
        scale = to_float32(
            from_float32(np.abs(grouped).max(-1, keepdims=True) / np.float32(largest), "float16"), "float16"
        )
        tensors[name] = (np.clip(np.rint(grouped / scale), -largest, largest) * scale).reshape(values.shape)
    save_file(tensors, file)


@pytest.mark.parametrize("model", MODEL_PARAMS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_position_gives_the_same_bits_however_it_is_computed(
    runs: Callable[..., Results], fmt: str, model: str
) -> None:
    check_position_bits(runs(SETUPS[fmt], model)["invariance"])


@pytest.mark.parametrize("model", MODEL_PARAMS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_tokens_are_among_the_oracles_best(runs: Callable[..., Results], fmt: str, model: str) -> None:
    near = [
        token in best
        for case, tokens in zip(golden_of(model)["cases"], runs(SETUPS[fmt], model)["forced"], strict=True)
        for token, best in zip(tokens, case["top_ids"], strict=True)
    ]
    assert sum(near) >= LEAST_AGREEMENT[fmt] * len(near)


@pytest.mark.parametrize("model", MODEL_PARAMS)
@pytest.mark.parametrize("fmt", [SWEPT_FORMAT, "int4"])
def test_products_use_the_integers_times_the_scales(runs: Callable[..., Results], fmt: str, model: str) -> None:
    """Quantised native experts give nearly the logits of float32 fused operators with dequantised weights.

    The logits differ more from those with the original weights.
    """
    found = runs(SETUPS[fmt], model)["best"]
    errors = {
        kind: differences(found, runs(Setup(1, 1, "float32", "fused"), model, kind)["best"], model)
        for kind in (fmt, "plain")
    }
    print(f"{model} {fmt}: median {np.median(errors[fmt]):.4f}, 98 % {np.quantile(errors[fmt], 0.98):.4f}, plain "
          f"{np.median(errors['plain']):.4f}")  # fmt: skip
    assert np.median(errors[fmt]) < 0.005
    assert np.median(errors["plain"]) > 2 * np.median(errors[fmt])


def differences(found: Any, wanted: Any, model: str) -> list[float]:
    """Returns how much the logits of two runs differ, for the tokens that are among the best ids of both runs.

    Each difference is divided by the standard deviation of the oracle's logits.
    """
    out = []
    for case, ours, theirs in zip(golden_of(model)["cases"], found, wanted, strict=True):
        for (our_ids, our_logits), (ids, logits) in zip(ours, theirs, strict=True):
            other = dict(zip(ids, logits, strict=True))
            out += [
                abs(a - other[i]) / case["logit_std"] for i, a in zip(our_ids, our_logits, strict=True) if i in other
            ]
    return out


@pytest.mark.parametrize("model", MODEL_PARAMS)
def test_int8_rounds_activations_like_the_fused_operators(runs: Callable[..., Results], model: str) -> None:
    """Native and fused int8 both multiply integers, so their results differ only by roundings to bfloat16."""
    found = runs(SETUPS["int8"], model)["best"]
    wanted = runs(Setup(1, 1, "bfloat16", "fused", "int8"), model)["best"]
    errors = differences(found, wanted, model)
    print(f"{model} int8: median {np.median(errors):.4f}, 98 % {np.quantile(errors, 0.98):.4f}")
    assert np.median(errors) < 0.05
