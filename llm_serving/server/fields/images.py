"""Converts images of other APIs to parts of chat messages, and renames the fields in errors about these images."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from llm_serving.errors import RequestError
from llm_serving.server.fields.renamed import renamed
from llm_serving.server.fields.shared import Message, is_image

_PART = re.compile(r"messages\[(\d+)\]\.content\[(\d+)\]\.image_url(\.url)?")


@dataclass(frozen=True, slots=True)
class ImageField:
    """The names of an image's fields in a request that was converted to a chat."""

    image: str
    url: str
    """The field with the image's URL or its data."""


def image_part(url: str, detail: str | None = None) -> dict[str, Any]:
    """Returns an image as a part of a chat's message."""
    return {"type": "image_url", "image_url": {"url": url} | ({} if detail is None else {"detail": detail})}


def joined(parts: Iterable[dict[str, Any]], between: str) -> str | list[dict[str, Any]]:
    """Joins parts to the content of a chat message: one text, or a list of parts if there are images.

    ``between`` separates neighbouring texts.
    """
    found: list[dict[str, Any]] = []
    for part in parts:
        if found and not is_image(part) and not is_image(found[-1]):
            found[-1] = text_part(found[-1]["text"] + between + part["text"])
        else:
            found.append(part)
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
    """Returns ``error`` with the image's field name in the client's API, if the error is about an image of the chat.

    ``fields`` has the names of all images in ``messages``, in order. Other errors are returned unchanged.
    """
    found = _PART.match(error.param or "")
    if found is None:
        return error
    message, part = int(found[1]), int(found[2])
    earlier = chain.from_iterable(each.parts for each in messages[:message])
    number = sum(map(is_image, chain(earlier, messages[message].parts[:part])))
    name = fields[number].image if found[3] is None else fields[number].url
    return renamed(error, ((re.escape(found[0]), name.replace("\\", r"\\")),))
