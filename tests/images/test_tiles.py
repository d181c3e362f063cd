"""Tiles of images: their pixels, their tokens and their places."""

from __future__ import annotations

import gc
import json

import numpy as np
import pytest
from PIL import Image

from llm_serving.errors import RequestError
from llm_serving.images.pool import TilePool, TilesFullError
from llm_serving.images.prompt import PromptImages, expanded, image_text, placed_tiles, tile_positions
from llm_serving.images.tiling import Tiles, cut
from llm_serving.ipc.tiles import StepTile, digest_of, read_tiles, tiles_between, write_tiles
from llm_serving.model.vision import ImageProcessing
from performance.models.vision import PREPROCESSOR, sample_image
from support.small_configs import REPOSITORY

GOLDEN = json.loads((REPOSITORY / "tests" / "golden" / "images.json").read_text())
PROCESSING = ImageProcessing(144, True, "lanczos", 1 / 255, (0.5,) * 3, (0.5,) * 3)


class Memory:
    def __init__(self, places: int) -> None:
        self.pixels = np.zeros((places, 2, 2, 3), np.uint8)


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
    text = expanded("a<image>b<image>c", [whole, parts], 2)
    assert text == f"a{image_text(whole, 2)}b{image_text(parts, 2)}c"
    assert image_text(parts, 2).count("<image>") == 6
    for wrong in ("a<image>b", "<image><image><image>"):
        with pytest.raises(RequestError, match="must not contain <image>"):
            expanded(wrong, [whole, parts], 2)


def test_the_positions_of_tiles_need_all_their_tokens() -> None:
    assert tile_positions([1, 9, 9, 2, 9, 9], 9, 2, 2) == [1, 4]
    for ids, count in (([1, 9, 9, 2, 9], 2), ([9, 9, 9, 9], 1), ([9, 1, 9, 9, 9], 2)):
        with pytest.raises(RequestError, match="image tokens"):
            tile_positions(ids, 9, count, 2)


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
        images = PromptImages(placed_tiles([0, 5], 3, hold), hold)
        salts |= {images.salt(b""), images.salt(b"tenant")}
        assert images.salt(b"") == PromptImages(placed_tiles([1, 7], 3, hold), hold).salt(b"")
    assert len(salts) == 6


def test_a_step_has_the_parts_of_tiles_in_its_range() -> None:
    hold = TilePool(Memory(2)).put([tile(1), tile(2)])
    tiles = placed_tiles([2, 6], 3, hold)
    one, two = hold.places
    found = tiles_between(tiles, 4, 8, 10)
    assert found == [StepTile(one, 10, 2, 1, hold.digests[0]), StepTile(two, 12, 0, 2, hold.digests[1])]
    assert tiles_between(tiles, 0, 2, 0) == tiles_between(tiles, 9, 20, 0) == []
    column = np.zeros(24, np.int32)
    write_tiles(column, found)
    assert read_tiles(column, 2) == found
