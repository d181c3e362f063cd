"""Reads the images of a conversation: checks their fields, and decodes and cuts the images in separate threads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from llm_serving.config.image_section import DECODING_THREADS
from llm_serving.errors import ContextLengthError, RequestError
from llm_serving.server.errors import UnavailableError
from llm_serving.server.fields.validation import short

if TYPE_CHECKING:
    from llm_serving.images.pool import TilePool
    from llm_serving.images.prompt import PromptImages
    from llm_serving.images.tiling import Tiles
    from llm_serving.model.vision import VisionShape
    from llm_serving.server.fields.shared import Message
    from llm_serving.server.state import ServerSettings, ServerState

_FETCHING_THREADS = 8
"""Number of images that are read from other hosts at the same time. Separate threads read these images, so a slow host
occupies none of the threads that decode images.
"""
_threads = ThreadPoolExecutor(DECODING_THREADS, thread_name_prefix="images")
_fetching_threads = ThreadPoolExecutor(_FETCHING_THREADS, thread_name_prefix="image-hosts")
_DETAILS = ("auto", "low", "high")
_ROLES = ("user", "tool")


@dataclass(frozen=True, slots=True)
class ImageURL:
    """An image of a request: its URL, the name of the URL's field, and whether the image may be split into tiles."""

    url: str
    param: str
    splits: bool


@dataclass(frozen=True, slots=True)
class ReadImages:
    """The decoded images of a conversation, in order."""

    images: Sequence[Tiles]
    vision: VisionShape
    pixels_per_token: float
    """Number of pixels whose encoding takes as long as the prefill of one token."""
    pool: TilePool

    def in_text(self, text: str) -> str:
        """Replaces each image placeholder in ``text`` by the tokens of the next image.

        Raises RequestError if the number of placeholders is not the number of images.
        """
        from llm_serving.images.prompt import expanded

        return expanded(text, self.images, self.vision)

    async def placed(self, token_ids: Sequence[int]) -> PromptImages:
        """Copies the tiles to shared memory for the agents. Returns them with their positions in the prompt.

        Raises RequestError if the image tokens in ``token_ids`` do not match the tiles. Raises UnavailableError if the
        tiles do not fit the free part of the shared memory.
        """
        from llm_serving.images.pool import TilesFullError
        from llm_serving.images.prompt import PromptImages, placed_tiles, tile_positions

        tiles = [pixels for image in self.images for pixels in image.pixels]
        sizes = [(pixels.shape[0], pixels.shape[1]) for pixels in tiles]
        rows = [self.vision.rows_of(height * width) for height, width in sizes]
        begins = tile_positions(token_ids, self.vision.image_token_id, rows)
        try:
            hold = await asyncio.get_running_loop().run_in_executor(_threads, self.pool.put, tiles)
        except TilesFullError as problem:
            raise UnavailableError(f"The {problem}; try again when other requests have ended.", "overloaded") from None
        return PromptImages(placed_tiles(begins, sizes, hold, self.vision, self.pixels_per_token), hold)


async def read_images(state: ServerState, messages: Sequence[Message]) -> ReadImages | None:
    """Returns the decoded images of a conversation, or None if it has no images.

    The number of images is checked first. Then other threads read the images one after the other, decode them and cut
    them into tiles. Raises RequestError if there are too many images, or if an image cannot be used.
    """
    urls = list(_image_urls(messages, state.settings))
    if not urls:
        return None
    vision, processing, pool = state.settings.vision, state.settings.processing, state.engine.tiles
    assert vision is not None, "images are refused if the model reads none"
    assert processing is not None, "images are refused if the model reads none"
    assert pool is not None, "an engine of a model that reads images has a pool"
    images = await _read_all(urls, state.settings, pool.num_places)
    return ReadImages(images, vision, processing.tile_pixels(vision) / state.settings.tile_cost, pool)


def _image_urls(messages: Sequence[Message], settings: ServerSettings) -> Iterator[ImageURL]:
    """Yields the images of a conversation. Raises RequestError for a wrong field, a wrong role or too many images."""
    from llm_serving.server.fields.shared import is_image

    number = 0
    for i, message in enumerate(messages):
        for j, part in enumerate(message.parts):
            if not is_image(part):
                continue
            param = f"messages[{i}].content[{j}].image_url"
            if settings.vision is None:
                raise RequestError(
                    f"'{param}' is an image, and this model reads only text; leave the image out, or use a model that "
                    "reads images.",
                    param=param,
                    code="images_not_supported",
                )
            if message.role not in _ROLES:
                raise _wrong(param, f"is in a message of role '{message.role}'; only messages of the user and results "
                             "of tools have images")  # fmt: skip
            number += 1
            if number > settings.images.max_images:
                raise _wrong(param, f"is image {number}; the maximum is {settings.images.max_images} images of a "
                             "request (image_config.max_images)")  # fmt: skip
            yield _image_url(part, param)


def _image_url(part: dict[str, object], param: str) -> ImageURL:
    value = part.get("image_url")
    if isinstance(value, str):
        value = {"url": value}
    if not isinstance(value, dict) or not isinstance(value.get("url"), str):
        raise _wrong(f"{param}.url", "is missing; give the URL of an image")
    unknown = sorted((part.keys() - {"type", "image_url"}) | (value.keys() - {"url", "detail"}))
    if unknown:
        raise _wrong(param, f"has the unknown field {short(unknown[0])}; it has url and detail")
    detail = value.get("detail", "auto")
    if detail not in _DETAILS:
        raise _wrong(f"{param}.detail", f"is {short(detail)}; it must be {', '.join(_DETAILS)}")
    return ImageURL(value["url"], f"{param}.url", splits=detail != "low")


async def _read_all(urls: Sequence[ImageURL], settings: ServerSettings, num_places: int) -> list[Tiles]:
    """Returns the tiles of each image. ``num_places`` is the maximum number of tiles of a request.

    Raises RequestError if an image cannot be read. Also raises it as soon as the tiles of the images read so far exceed
    ``num_places``, or have too many tokens for a prompt.
    """
    from llm_serving.images.urls import FetchTime, is_remote, read_url

    loop, left = asyncio.get_running_loop(), FetchTime()
    found: list[Tiles] = []
    num_tiles = num_rows = 0
    for each in urls:
        if is_remote(each.url):
            fetch = partial(read_url, each.url, settings.images, each.param, left)
            data = await loop.run_in_executor(_fetching_threads, fetch)
            read = partial(_cut, each, settings, data)
        else:
            read = partial(_cut, each, settings)
        found.append(await loop.run_in_executor(_threads, read))
        num_tiles += len(found[-1].pixels)
        assert settings.vision is not None, "only a model that reads images has images"
        num_rows += sum(settings.vision.rows_of(pixels.size // 3) for pixels in found[-1].pixels)
        _check_tiles(each, num_tiles, num_rows, settings, num_places)
    return found


def _cut(each: ImageURL, settings: ServerSettings, data: bytes | None = None) -> Tiles:
    """Returns the tiles of an image. ``data`` is a file from another host, or None if the URL itself has the image."""
    from llm_serving.images.decoding import decode
    from llm_serving.images.resizing import resized
    from llm_serving.images.tiling import cut
    from llm_serving.images.urls import read_url

    vision, processing = settings.vision, settings.processing
    assert vision is not None, "only a model that reads images has images"
    assert processing is not None, "only a model that reads images has images"
    if data is None:
        data = read_url(each.url, settings.images, each.param)
    if vision.windows is not None:
        image = decode(data, settings.images, each.param)
        return resized(image, vision, processing, each.param, is_small=not each.splits)
    # Do not keep the decoded image in a variable. Then only ``cut`` refers to it, and frees it after resizing.
    return cut(decode(data, settings.images, each.param), processing, vision.image_size, splits=each.splits)


def _check_tiles(each: ImageURL, num_tiles: int, num_rows: int, settings: ServerSettings, num_places: int) -> None:
    """Raises RequestError if the tiles of the images up to ``each`` cannot fit a prompt or the memory."""
    if num_rows > settings.max_prompt_tokens:
        raise ContextLengthError(
            f"The images up to '{each.param}' have {num_tiles} tiles with {num_rows} tokens; the maximum of a prompt "
            f"is {settings.max_prompt_tokens}. Send fewer images, or 'detail': 'low'.",
            param=each.param,
        )
    if num_tiles > num_places:
        raise _wrong(each.param, f"makes {num_tiles} tiles with the images before; the maximum of a request is "
                     f"{num_places} (image_config.max_tiles)")  # fmt: skip


def _wrong(param: str, problem: str) -> RequestError:
    return RequestError(f"'{param}' {problem}.", param=param, code="invalid_value")
