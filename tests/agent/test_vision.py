"""Tests that the vision encoder computes the rows of transformers, and that an agent refuses steps with invalid tiles.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from agent.kernels import num_threads, set_threads
from agent.models.names import ignorable_suffixes, weight_specs
from agent.step_inputs import StepInputs
from agent.vision.encoder import Encoder
from agent.vision.names import vision_specs
from agent.vision.rows import ImageRows
from agent.weights import Packing, load_weights, open_weights
from llm_serving.config import Config, load_config
from llm_serving.errors import CheckpointError, ProtocolError
from llm_serving.images.tiling import cut
from llm_serving.ipc.shm import SlotLayout, StepSlot
from llm_serving.ipc.tile_memory import TileLayout, TileMemory
from llm_serving.ipc.tiles import StepTile, digest_of, write_tiles
from performance.models.vision import IMAGE_TOKEN, sample_image, write_vision_model
from support.small_configs import REPOSITORY, small_overrides

GOLDEN = json.loads((REPOSITORY / "tests" / "golden" / "images.json").read_text())
TOLERANCE = {"float32": 2e-5, "float16": 0.02, "bfloat16": 0.1}
"""Largest difference to the oracle's float32 rows, whose largest value is 1.5."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("vision")
    write_vision_model(folder / "model")
    settings = [f"model_config.model_path={folder / 'model'}", "model_config.max_generate_length=1024",
                "pa_config.decode_seq_length=1024", "image_config.cached_tiles=2"]  # fmt: skip
    return load_config("llama_tiny_cpu.yaml", small_overrides(folder, settings))


def encoder_of(config: Config, dtype: str = "float32") -> Encoder:
    vision, processing, hidden = config.shape.vision, config.processing, config.shape.hidden_size
    assert vision is not None
    assert processing is not None
    specs = vision_specs(vision, hidden)
    source = open_weights(Path(str(config.model_config.model_path)), specs, seed=None, ignorable=("",))
    weights = load_weights(specs, source, dtype, lambda done, total: None, Packing(dtype))
    source.close()
    return Encoder(vision, processing, hidden, dtype, weights)


def tiles_of(config: Config, number: int) -> tuple[np.ndarray, ...]:
    assert config.processing is not None
    return cut(Image.fromarray(sample_image(number)), config.processing, 48).pixels


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows_equal_those_of_transformers(config: Config, dtype: str) -> None:
    encoder = encoder_of(config, dtype)
    [image] = [image for image in GOLDEN["images"] if "encoded" in image]
    pixels = tiles_of(config, image["number"])
    rows = np.concatenate([encoder.rows(tile) for tile in pixels])
    expected = np.array(image["encoded"])
    assert rows.shape == expected.shape
    assert np.abs(rows - expected).max() < TOLERANCE[dtype]


@pytest.mark.parametrize("image", GOLDEN["images"], ids=lambda image: str(image["number"]))
def test_input_values_equal_those_of_transformers(config: Config, image: dict[str, Any]) -> None:
    encoder = encoder_of(config)
    for pixels, tile in zip(tiles_of(config, image["number"]), image["tiles"], strict=True):
        np.testing.assert_allclose(encoder.normalised(pixels).reshape(-1)[::97], tile["values"], atol=2e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bits_do_not_depend_on_threads_or_other_tiles(config: Config, dtype: str) -> None:
    encoder, tiles = encoder_of(config, dtype), tiles_of(config, 0)
    expected = [encoder.rows(tile).tobytes() for tile in tiles]
    before = num_threads()
    try:
        for threads in (1, 3):
            set_threads(threads)
            assert [encoder.rows(tile).tobytes() for tile in reversed(tiles)] == expected[::-1]
    finally:
        set_threads(before)


def test_every_tensor_of_the_checkpoint_has_an_owner(config: Config, tmp_path: Path) -> None:
    shape = config.shape
    assert shape.vision is not None
    folder = Path(str(config.model_config.model_path))
    open_weights(folder, weight_specs(shape), seed=None, ignorable=ignorable_suffixes(shape)).close()
    fewer = replace(shape, vision=replace(shape.vision, num_layers=1))
    with pytest.raises(CheckpointError, match=r"vision_model\.encoder\.layers\.1"):
        open_weights(folder, weight_specs(fewer), seed=None, ignorable=ignorable_suffixes(fewer))
    more = vision_specs(replace(shape.vision, num_layers=3), shape.hidden_size)
    with pytest.raises(CheckpointError, match="missing"):
        open_weights(folder, more, seed=None, ignorable=("",))


@pytest.fixture
def rows(config: Config) -> ImageRows:
    layout = TileLayout.of(config)
    assert layout is not None
    memory = TileMemory.create(replace(layout, num_places=3))
    memory.close()  # only the name is removed
    for place, tile in enumerate(tiles_of(config, 0)[:3]):
        memory.pixels[place] = tile.reshape(-1, 3)
    table = np.random.default_rng(1).normal(size=(320, 96)).astype(np.float32)
    return ImageRows(config, encoder_of(config), table, np.zeros((64, 96), np.float32), memory)


def step_of(config: Config, token_ids: list[int], tiles: list[StepTile]) -> tuple[StepSlot, StepInputs]:
    layout = SlotLayout.of(config.slot_limits())
    slot = StepSlot(layout, bytearray(layout.slot_bytes))
    count = len(token_ids)
    slot.write_header(7, num_tokens=count, num_seqs=1, table_width=1, history_len=0, num_tiles=len(tiles))
    write_tiles(slot.tiles, tiles)
    one, many = np.zeros(1, np.int32), np.array(token_ids, np.int32)
    return slot, StepInputs(many, many, many, one[None], one, one, one, one, one, one[:0], True)


def test_rows_replace_the_embeddings_of_their_tokens_and_are_kept(config: Config, rows: ImageRows) -> None:
    tiles = tiles_of(config, 0)[:3]
    expected = [rows._encoder.rows(tile) for tile in tiles]
    digests = [digest_of(tile) for tile in tiles]
    ids = [5, *[IMAGE_TOKEN] * 4, 6, *[IMAGE_TOKEN] * 9]
    parts = [StepTile(1, 1, 5, 4, 48, 48, digests[1]), StepTile(0, 6, 0, 9, 48, 48, digests[0])]
    out = rows.entry(*step_of(config, ids, parts))
    np.testing.assert_array_equal(out[[0, 5]], rows._table[[5, 6]])
    np.testing.assert_array_equal(out[1:5], expected[1][5:])
    np.testing.assert_array_equal(out[6:], expected[0])
    assert rows.num_encoded == 2
    rows.entry(*step_of(config, ids, parts))
    assert rows.num_encoded == 2
    rows.entry(*step_of(config, [IMAGE_TOKEN], [StepTile(2, 0, 0, 1, 48, 48, digests[2])]))
    assert [key[0] for key in rows._cached] == [digests[0], digests[2]], "the least recently used tile leaves"


@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        ({"place": 3}, "tile places holds 3; it must be at least 0 and below 3"),
        ({"place": -1}, "tile places holds -1"),
        ({"token": 4}, "tokens of tiles holds 4; it must be at least 0 and below 4"),
        ({"first": 9}, "first rows of tiles holds 9"),
        ({"rows": 4}, "numbers of rows holds 4; it must be at least 1 and below 4"),
        ({"first": 8, "rows": 2}, "numbers of rows holds 2; it must be at least 1 and below 2"),
        ({"rows": 0}, "numbers of rows holds 0"),
        ({"width": 96}, "a tile of 96 x 48 pixels; the largest has 2304 pixels"),
        ({"token": 0}, "replaces a token that is not an image token"),
        ({"digest": bytes(16)}, "place 0 of the tiles has other pixels than the step expects"),
    ],
)
def test_a_tile_that_is_not_valid_is_refused(
    config: Config, rows: ImageRows, changes: dict[str, Any], phrase: str
) -> None:
    good = StepTile(0, 1, 0, 3, 48, 48, digest_of(tiles_of(config, 0)[0]))
    rows.entry(*step_of(config, [5, IMAGE_TOKEN, IMAGE_TOKEN, IMAGE_TOKEN], [good]))
    rows._cached = OrderedDict()
    with pytest.raises(ProtocolError) as refused:
        rows.entry(*step_of(config, [5, IMAGE_TOKEN, IMAGE_TOKEN, IMAGE_TOKEN], [replace(good, **changes)]))
    assert phrase in str(refused.value)


def test_a_slot_has_a_limit_of_tiles(config: Config) -> None:
    most = config.slot_limits().max_tiles
    step_of(config, [5], [StepTile(0, 0, 0, 1, 48, 48, bytes(16))] * most)
    slot, _ = step_of(config, [5], [])
    with pytest.raises(ProtocolError, match=f"num_tiles is {most + 1}"):
        slot.write_header(7, num_tokens=1, num_seqs=1, table_width=1, history_len=0, num_tiles=most + 1)
