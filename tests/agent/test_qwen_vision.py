"""Tests the vision encoder of Qwen2.5-VL against transformers, and rotary positions in three dimensions."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from agent.kernels import num_threads, set_threads
from agent.layers.rotary import rotary_tables
from agent.models.names import ignorable_suffixes, weight_specs
from agent.step_entry import StepEntry
from agent.step_inputs import StepInputs
from agent.vision.names import vision_specs
from agent.vision.qwen_encoder import QwenEncoder, erf
from agent.vision.rotary_rows import GraphRotaryPositions, RotaryRows
from agent.weights import Packing, load_weights, open_weights
from llm_serving.config import Config, load_config
from llm_serving.errors import ProtocolError
from llm_serving.images.resizing import resized
from llm_serving.ipc.shm import SlotLayout, StepSlot
from llm_serving.ipc.tiles import StepTile, write_tiles
from performance.models.qwen_vision import write_qwen_vision_model
from performance.models.vision import sample_image
from support.small_configs import REPOSITORY, small_overrides

GOLDEN = json.loads((REPOSITORY / "tests" / "golden" / "qwen_images.json").read_text())
TOLERANCE = {"float32": 2e-5, "float16": 0.02, "bfloat16": 0.2}
"""Largest difference to the oracle's float32 rows, whose largest value is 1.7."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("vision")
    write_qwen_vision_model(folder / "model")
    settings = [f"model_config.model_path={folder / 'model'}", "model_config.max_generate_length=1024",
                "pa_config.decode_seq_length=1024"]  # fmt: skip
    return load_config("llama_tiny_cpu.yaml", small_overrides(folder, settings))


def encoder_of(config: Config, dtype: str = "float32") -> QwenEncoder:
    vision, processing, hidden = config.shape.vision, config.processing, config.shape.hidden_size
    assert vision is not None
    assert processing is not None
    specs = vision_specs(vision, hidden)
    source = open_weights(Path(str(config.model_config.model_path)), specs, seed=None, ignorable=("",))
    weights = load_weights(specs, source, dtype, lambda done, total: None, Packing(dtype))
    source.close()
    return QwenEncoder(vision, processing, hidden, dtype, weights)


def pixels_of(config: Config, number: int) -> np.ndarray:
    assert config.shape.vision is not None
    assert config.processing is not None
    image = Image.fromarray(sample_image(number))
    return resized(image, config.shape.vision, config.processing, "a", is_small=False).pixels[0]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows_equal_those_of_transformers(config: Config, dtype: str) -> None:
    [image] = [image for image in GOLDEN["images"] if "encoded" in image]
    rows = encoder_of(config, dtype).rows(pixels_of(config, image["number"]))
    expected = np.array(image["encoded"])
    assert rows.shape == expected.shape
    assert np.abs(rows - expected).max() < TOLERANCE[dtype]


def test_input_values_equal_those_of_transformers(config: Config) -> None:
    encoder = encoder_of(config)
    for image in GOLDEN["images"]:
        values = encoder.patches(pixels_of(config, image["number"]))
        np.testing.assert_allclose(values.reshape(-1)[::97], image["values"], atol=2e-6)


def test_the_bits_do_not_depend_on_threads_or_on_the_rows_of_scores(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, pixels = encoder_of(config, "bfloat16"), pixels_of(config, 0)
    expected, before = encoder.rows(pixels).tobytes(), num_threads()
    monkeypatch.setattr("agent.vision.qwen_encoder.QUERY_ROWS", 7)
    try:
        for threads in (1, 3):
            set_threads(threads)
            assert encoder.rows(pixels).tobytes() == expected
    finally:
        set_threads(before)


def test_every_tensor_of_the_checkpoint_has_an_owner(config: Config) -> None:
    folder = Path(str(config.model_config.model_path))
    open_weights(folder, weight_specs(config.shape), seed=None, ignorable=ignorable_suffixes(config.shape)).close()


def test_the_error_function() -> None:
    values = np.linspace(-6, 6, 10_001).astype(np.float32)
    expected = [math.erf(value) for value in values.tolist()]
    np.testing.assert_allclose(erf(values), expected, atol=5e-7)


def inputs_of(positions: list[int]) -> StepInputs:
    one, many = np.zeros(1, np.int32), np.array(positions, np.int32)
    rotary = np.zeros((many.size, 3), np.int32)
    arrays = (many, many, many, one[None], one, one, one, one, one, one[:0])
    return StepInputs(*arrays, whole_prompts=False, rotary_positions=rotary)


def slot_of(config: Config, shifts: list[int], *tiles: StepTile) -> StepSlot:
    """Returns the slot of a step with one token for each of ``shifts``."""
    layout = SlotLayout.of(config.slot_limits())
    slot = StepSlot(layout, bytearray(layout.slot_bytes))
    slot.write_header(7, num_tokens=len(shifts), num_seqs=1, table_width=1, history_len=0, num_tiles=len(tiles))
    write_tiles(slot.tiles, tiles)
    slot.position_shifts[: len(shifts)] = shifts
    return slot


def rotary_of(config: Config) -> tuple[RotaryRows, tuple[np.ndarray, np.ndarray]]:
    out = np.zeros((16, 24), np.float32), np.zeros((16, 24), np.float32)
    return RotaryRows(config, out), out


def test_rotary_rows_follow_three_dimensions(config: Config) -> None:
    rotary, (cos, sin) = rotary_of(config)
    tables = rotary_tables(config.shape, config.max_model_len)
    inputs = inputs_of(positions=[3, 4, 5, 9])
    rotary.fill(slot_of(config, [0, 0, 0, 2]), inputs)
    assert inputs.positions.tolist() == [3, 4, 5, 7]
    for table, out in zip(tables, (cos, sin), strict=True):
        np.testing.assert_array_equal(out[:4], table[[3, 4, 5, 7]])
    rotary.fill(slot_of(config, [0, 0, 0, 2], part_of_tile(config)), inputs_of(positions=[3, 5, 6, 9]))
    # The sections are 4 frequencies of time, 5 of the row and 3 of the column, in both halves of a head.
    for table, out in zip(tables, (cos, sin), strict=True):
        for half in (0, 12):
            time, row, column = slice(half, half + 4), slice(half + 4, half + 9), slice(half + 9, half + 12)
            np.testing.assert_array_equal(out[1:3, time], table[[4, 4], time])
            np.testing.assert_array_equal(out[1:3, row], table[[4, 5], row])
            np.testing.assert_array_equal(out[1:3, column], table[[5, 4], column])


def part_of_tile(config: Config) -> StepTile:
    """Returns rows 1 and 2 of a tile with two rows in each line, for the tokens 1 and 2 of a step."""
    assert config.shape.vision is not None
    edge = 2 * config.shape.vision.row_edge
    return StepTile(0, token=1, first=1, rows=2, height=edge, width=edge, digest=bytes(16))


def test_native_graphs_get_three_dimensions_beside_the_positions(config: Config) -> None:
    inputs = inputs_of(positions=[3, 5, 6, 9])
    GraphRotaryPositions(config).fill(slot_of(config, [0, 0, 0, 2], part_of_tile(config)), inputs)
    # Position in the sequence, time, row and column. The image has the time 4.
    assert inputs.graph_positions.tolist() == [[3, 5, 6, 9], [3, 4, 4, 7], [3, 4, 5, 7], [3, 5, 4, 7]]


@pytest.mark.parametrize(("shift", "phrase"), [(-1, "position_shifts holds -1"), (6, "above the position of its")])
def test_shifts_that_are_not_valid_are_refused(config: Config, shift: int, phrase: str) -> None:
    slot, inputs = slot_of(config, [shift]), inputs_of(positions=[5])
    rotary, _ = rotary_of(config)
    with pytest.raises(ProtocolError, match=phrase):
        rotary.fill(slot, inputs)
    # In a later stage of a pipeline, the other agents have already accepted the step. So the error must end this agent.
    later: Any = StepEntry.__new__(StepEntry)
    later._is_first_stage, later._exchange, later._last_tokens, later._rotary = False, object(), object(), rotary
    with pytest.raises(RuntimeError, match=phrase):
        later.of_step(inputs, slot)
