"""Tests LoRA adapters with native operators: rounding errors, equal bits in any batch, and loads while graphs run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.forked_programs import run_forked
from support.json_program import printed_json

WORKER = Path(__file__).with_name("native_program.py")
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("native-adapters")
    found: dict[str, Any] = printed_json(run_forked(WORKER, folder=folder, timeout=240))
    return found


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_adapted_layer_differs_from_numpy_by_its_roundings(results: dict[str, Any], dtype: str) -> None:
    """Three results are rounded: the products with A and B, and the sum. Each error is at most half a distance between
    numbers.

    The measured error is in units of this distance, relative to the sum of the absolute terms.
    """
    found = results[f"cell {dtype}"]
    assert 0 < found["error"] <= 1.5
    assert found["alone"], "a row has the same bits alone as among rows with other adapters"
    assert found["unchanged"], "rows without an adapter keep their bits"


@pytest.mark.parametrize("name", ["first", "second", "without"])
def test_native_float16_predicts_the_tokens_of_fused_float32(results: dict[str, Any], name: str) -> None:
    native, fused = results["model"][f"native {name}"], results["model"][f"fused {name}"]
    assert native["tokens"] == fused["tokens"]
    np.testing.assert_allclose(native["logits"], fused["logits"], atol=0.06)


def test_a_load_replaces_the_adapter_of_a_slot_completely(results: dict[str, Any]) -> None:
    found = results["model"]
    assert found["native again"] == found["native first"]
    texts = {tuple(found[f"native {name}"]["tokens"]) for name in ("first", "second", "without")}
    assert len(texts) == 3


def test_calls_of_an_ascend_write_one_slot_and_notice_lost_copies(results: dict[str, Any]) -> None:
    found = results["device"]
    assert (found["right"], found["other slots"], found["gone"]) == (True, False, True)
    assert "that was copied to" in found["lost"]
    assert "has changed: MindSpore's swap_cache does not work" in found["lost"]


def test_padding_sequences_of_a_decode_have_no_adapter(results: dict[str, Any]) -> None:
    found = results["padding"]
    assert found["rows"] == [1, 1, 6]
    assert found["entry"] == [2, 1, 0, 0, 0, 0, 0, 0]
    assert found["last"] == [2, 1, 0, 3, 4, 5, 6, 7]
