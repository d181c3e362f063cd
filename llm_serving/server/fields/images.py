"""Converts the images in requests of other APIs to parts of chat messages.

An error about an image names a field of the converted chat. ``named_images`` replaces this name by the name of the
field in the client's request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

from llm_serving.errors import RequestError
from llm_serving.server.fields.renamed import renamed
from llm_serving.server.fields.shared import Message, is_image

_PART = re.compile(r"messages\[(\d+)\]\.content\[(\d+)\]\.image_url(\.url)?")


@dataclass(frozen=True, slots=True)
class ImageField:
    """The field names by which an error refers to one image. They are fields of the client's original request.

    If the image belongs to an earlier response, ``image`` and ``url`` both name the field that has the id of this
    response.
    """

    image: str
    """Name of the field with the whole image, for example ``messages[0].content[1]``."""
    url: str
    """Name of the field with the image's URL or its data."""


def image_part(url: str, detail: str | None = None) -> dict[str, Any]:
    """Returns an image as a part of a chat's message."""
    return {"type": "image_url", "image_url": {"url": url} | ({} if detail is None else {"detail": detail})}


def joined(parts: Iterable[dict[str, Any]], between: str) -> str | list[dict[str, Any]]:
    """Returns the content of a chat message that consists of ``parts``: one text, or a list if there are images.

    Neighbouring texts are joined, with ``between`` as the separator.
    """
    found: list[dict[str, Any]] = []
    for are_images, run in groupby(parts, key=is_image):
        group = list(run)
        found += group if are_images else [text_part(between.join(part["text"] for part in group))]
    if any(map(is_image, found)):
        return found
    return found[0]["text"] if found else ""


def as_parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the content of a message as a list of parts. An empty text has no parts."""
    if isinstance(content, list):
        return content
    return [text_part(content)] if content else []


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def named_images(error: RequestError, messages: Sequence[Message], fields: Sequence[ImageField]) -> RequestError:
    """Returns an error about an image of the chat with the name of the field in the client's request.

    If ``error`` is not about an image, returns it unchanged. ``fields`` has the names of each image in ``messages``, in
    the order of the images.
    """
    found = _PART.match(error.param or "")
    if found is None:
        return error
    message, part = int(found[1]), int(found[2])
    earlier = chain.from_iterable(each.parts for each in messages[:message])
    number = sum(map(is_image, chain(earlier, messages[message].parts[:part])))
    name = fields[number].image if found[3] is None else fields[number].url
    return renamed(error, ((re.escape(found[0]), name.replace("\\", r"\\")),))
