"""Tests tiles of images: their pixels, their tokens and their places in the pool."""

from __future__ import annotations

import gc
import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from llm_serving.errors import RequestError
from llm_serving.images.pool import TilePool, TilesFullError
from llm_serving.images.prompt import PromptImages, expanded, image_text, placed_tiles, tile_positions
from llm_serving.images.resizing import resized
from llm_serving.images.tiling import Tiles, cut
from llm_serving.images.urls import ImageError
from llm_serving.ipc.tiles import StepTile, digest_of, read_tiles, tiles_between, write_shifts, write_tiles
from llm_serving.model.vision import ImageProcessing, VisionShape, Windows
from performance.models.vision import PREPROCESSOR, sample_image
from support.small_configs import REPOSITORY

GOLDEN = json.loads((REPOSITORY / "tests" / "golden" / "images.json").read_text())
PROCESSING = ImageProcessing(144, True, "lanczos", 1 / 255, (0.5,) * 3, (0.5,) * 3)


SQUARE = VisionShape(
    64, 128, 2, 4, image_size=2, patch_size=1, layer_norm_eps=1e-6, scale_factor=1, image_token_id=9
)
"""An encoder whose tiles have 2 x 2 pixels and 4 rows."""
ANY = replace(SQUARE, image_size=0, windows=Windows(4, (0,), 2))
"""An encoder whose tiles have any size, and a row for each pixel."""
SIZES = [(2, 2)] * 2


class Memory:
    def __init__(self, places: int) -> None:
        self.pixels = np.zeros((places, 4, 3), np.uint8)


def tile(value: int) -> np.ndarray:
    return np.full((2, 2, 3), value, np.uint8)


@pytest.mark.parametrize("image", GOLDEN["images"], ids=lambda image: str(image["number"]))
def test_the_pixels_of_tiles_equal_those_of_transformers(image: dict) -> None:
    assert PREPROCESSOR["size"] == {"longest_edge": PROCESSING.longest_edge}
    tiles = cut(Image.fromarray(sample_image(image["number"])), PROCESSING, 48)
    assert (tiles.num_rows, tiles.num_columns) == (image["rows"], image["columns"])
    assert [digest_of(pixels).hex() for pixels in tiles.pixels] == [each["digest"] for each in image["tiles"]]
    whole = cut(Image.fromarray(sample_image(image["number"])), PROCESSING, 48, splits=False)
    assert (whole.num_rows, len(whole.pixels)) == (0, 1)


@pytest.mark.parametrize("size", [(1, 1), (4000, 1), (1, 4000), (49, 48)])
def test_images_of_any_proportion_have_bounded_tiles(size: tuple[int, int]) -> None:
    tiles = cut(Image.new("RGB", size), PROCESSING, 48)
    assert len(tiles.pixels) <= PROCESSING.max_tiles(48)
    assert all(pixels.shape == (48, 48, 3) for pixels in tiles.pixels)


def test_each_image_of_a_prompt_becomes_its_tokens() -> None:
    whole, parts = Tiles(0, 0, (tile(0),)), Tiles(1, 2, (tile(0), tile(1), tile(2)))
    text = expanded("a<image>b<image>c", [whole, parts], SQUARE)
    assert text == f"a{image_text(whole, SQUARE)}b{image_text(parts, SQUARE)}c"
    assert image_text(parts, SQUARE).count("<image>") == 12
    assert expanded("a<|image_pad|>b", [whole], ANY) == f"a{'<|image_pad|>' * 4}b"
    for wrong in ("a<image>b", "<image><image><image>"):
        with pytest.raises(RequestError, match="must not contain <image>"):
            expanded(wrong, [whole, parts], SQUARE)


def test_the_positions_of_tiles_need_all_their_tokens() -> None:
    assert tile_positions([1, 9, 9, 2, 9, 9], 9, [2, 2]) == [1, 4]
    assert tile_positions([1, 9, 9, 9, 2, 9], 9, [3, 1]) == [1, 5]
    for ids, count in (([1, 9, 9, 2, 9], 2), ([9, 9, 9, 9], 1), ([9, 1, 9, 9, 9], 2)):
        with pytest.raises(RequestError, match="image tokens"):
            tile_positions(ids, 9, [2] * count)


def test_positions_after_an_image_of_any_size_are_shifted() -> None:
    """The token after an image has the largest row or column of the image plus one (arXiv:2409.12191)."""
    hold = TilePool(Memory(2)).put([np.zeros((1, 3, 3), np.uint8), np.zeros((2, 2, 3), np.uint8)])
    tiles = placed_tiles([2, 7], [(1, 3), (2, 2)], hold, ANY, 2.0)
    assert [(tile.rows, tile.shift, tile.cost) for tile in tiles] == [(3, 0, 2), (4, 2, 2)]
    tall = placed_tiles([2, 7], [(2, 2), (2, 2)], hold, ANY, 2.0)
    assert [tile.shift for tile in tall] == [2, 4]
    for start in range(12):
        column = np.full(14 - start, -1, np.int32)
        write_shifts(column, tall, start)
        assert column.tolist() == [*[0] * 6, *[2] * 5, *[4] * 3][start:], start
    write_shifts(column, (), 0)
    assert not column.any()
    squares = placed_tiles([2, 7], SIZES, hold, SQUARE, 2.0)
    assert [tile.shift for tile in squares] == [0, 0]


def test_equal_tiles_share_a_place_until_the_last_hold_ends() -> None:
    memory = Memory(3)
    pool = TilePool(memory)
    first, second = pool.put([tile(1), tile(2)]), pool.put([tile(2)])
    assert pool.num_free == 1
    assert second.places[0] == first.places[1]
    assert (memory.pixels[first.places[0]] == 1).all()
    again = first.again()
    first.end()
    first.end()
    assert pool.num_free == 1
    again.end()
    assert pool.num_free == 2
    with pytest.raises(TilesFullError, match="4 tiles of images do not fit the 2 free places of 3"):
        pool.put([tile(value) for value in (3, 4, 5, 2)])
    assert pool.num_free == 2
    del second
    gc.collect()
    assert pool.num_free == 3


def test_other_images_have_another_salt() -> None:
    pool = TilePool(Memory(4))
    salts = set()
    for values in ((1, 2), (2, 1), (1, 3)):
        hold = pool.put([tile(value) for value in values])
        images = PromptImages(placed_tiles([0, 5], SIZES, hold, SQUARE, 1.0), hold)
        salts |= {images.salt(b""), images.salt(b"tenant")}
        assert images.salt(b"") == PromptImages(placed_tiles([1, 7], SIZES, hold, SQUARE, 1.0), hold).salt(b"")
    assert len(salts) == 6
    hold = TilePool(Memory(2)).put([np.zeros((1, 4, 3), np.uint8)])
    wide, square = (PromptImages(placed_tiles([0], [size], hold, ANY, 1.0), hold) for size in ((1, 4), (2, 2)))
    assert wide.salt(b"") != square.salt(b""), "the same bytes in another size are another image"


def test_a_step_has_the_parts_of_tiles_in_its_range() -> None:
    hold = TilePool(Memory(2)).put([tile(1), tile(2)])
    tiles = placed_tiles([2, 6], SIZES, hold, SQUARE, 1.0)
    one, two = hold.places
    found = tiles_between(tiles, 4, 8, 10)
    assert found == [StepTile(one, 10, 2, 2, 2, 2, hold.digests[0]), StepTile(two, 12, 0, 2, 2, 2, hold.digests[1])]
    assert tiles_between(tiles, 0, 2, 0) == tiles_between(tiles, 10, 20, 0) == []
    column = np.zeros(24, np.int32)
    write_tiles(column, found)
    assert read_tiles(column, 2) == found


QWEN_GOLDEN = json.loads((REPOSITORY / "tests" / "golden" / "qwen_images.json").read_text())
QWEN = replace(ANY, patch_size=4, scale_factor=2)
LIMITS = replace(PROCESSING, longest_edge=0, resample="bicubic", min_pixels=256, max_pixels=12_800)


@pytest.mark.parametrize("image", QWEN_GOLDEN["images"], ids=lambda image: str(image["number"]))
def test_the_pixels_of_images_of_any_size_equal_those_of_transformers(image: dict) -> None:
    [pixels] = resized(Image.fromarray(sample_image(image["number"])), QWEN, LIMITS, "a", is_small=False).pixels
    assert pixels.shape == (image["height"], image["width"], 3)
    assert digest_of(pixels).hex() == image["digest"]


@pytest.mark.parametrize("size", [(1, 1), (3, 600), (2000, 10), (9, 8), (4000, 4000)])
def test_images_of_any_size_have_bounded_pixels(size: tuple[int, int]) -> None:
    for limits in (LIMITS, replace(LIMITS, min_pixels=3200)):
        [pixels] = resized(Image.new("RGB", size), QWEN, limits, "a", is_small=False).pixels
        height, width, _ = pixels.shape
        assert QWEN.is_tile(height, width)
        assert limits.min_pixels <= height * width <= limits.max_pixels
    large = replace(LIMITS, max_pixels=64 * 1280)
    [small] = resized(Image.new("RGB", (4000, 4000)), QWEN, large, "a", is_small=True).pixels
    assert QWEN.rows_of(small.shape[0] * small.shape[1]) == 256


def test_an_image_that_is_too_long_is_refused() -> None:
    with pytest.raises(ImageError, match="201 x 1 pixels; the longer edge must be at most 200 times"):
        resized(Image.new("RGB", (201, 1)), QWEN, LIMITS, "a", is_small=False)
