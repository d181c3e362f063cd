"""Creates the requests of a load test: generated from a seed, or read from a JSONL file."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from performance.program import Range, UsageError

FIRST_PLAIN_TOKEN = 10
"""Random token ids start here, above the control tokens of the usual vocabularies."""

WORDS = {
    "adjective": "small old brave quiet happy clever red green tired kind lost young gentle hungry proud shy",
    "animal": "fox bear cat dog bird rabbit mouse horse frog owl duck goat sheep turtle lion bee",
    "verb": "found saw liked carried wanted lost kept opened painted shared watched washed",
    "thing": "ball boat apple book hat stone box flower lamp key kite cup shell drum basket letter",
    "place": "river garden house forest hill park school beach bridge village barn tree",
}
OPENINGS = (
    "Tell me a short story about a {adjective} {animal} and a {thing}.",
    "What did the {animal} do with the {thing} near the {place}?",
    "Once upon a time there was a {adjective} {animal}.",
    "Why was the {animal} so {adjective}?",
    "Please write a few words about the {place} and the {thing}.",
)
SENTENCE = "The {adjective} {animal} {verb} a {thing} near the {place}."


class LoadRequest(msgspec.Struct, frozen=True):
    """A request to send. Exactly one of ``text``, ``token_ids`` and ``messages`` is set."""

    max_tokens: int
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None


class DatasetLine(msgspec.Struct):
    """A line of a JSONL data set: ``prompt`` (text or token ids) or chat ``messages``, and perhaps ``max_tokens``."""

    prompt: str | tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    max_tokens: int | None = None


def text_workload(count: int, seed: int, prompt_len: Range, output_len: Range) -> list[LoadRequest]:
    """Returns requests with English prompts. ``prompt_len`` is a range of words, and ``output_len`` a range of tokens.
    """

    def prompt(generator: random.Random) -> dict[str, Any]:
        return {"text": _prompt(generator, generator.randint(*prompt_len))}

    return _workload(count, seed, output_len, prompt)


def token_workload(count: int, seed: int, prompt_len: Range, output_len: Range, vocab_size: int) -> list[LoadRequest]:
    """Returns requests with prompts of random token ids, for models with random weights.

    ``prompt_len`` and ``output_len`` are ranges of tokens.
    """

    def prompt(generator: random.Random) -> dict[str, Any]:
        length = generator.randint(*prompt_len)
        return {"token_ids": tuple(generator.randrange(FIRST_PLAIN_TOKEN, vocab_size) for _ in range(length))}

    return _workload(count, seed, output_len, prompt)


def with_beginnings(
    requests: Sequence[LoadRequest], number: int, length: int, seed: int, vocab_size: int
) -> list[LoadRequest]:
    """Puts one of ``number`` shared prefixes before each prompt. The prefixes have the role of system prompts.

    A prefix has ``length`` words or tokens. The prefixes depend only on the seed and not on the prompts.
    """
    generator = random.Random(f"beginnings/{seed}")
    is_text = any(request.text is not None for request in requests)
    words = [_prompt(generator, length) for _ in range(number)] if is_text else []
    tokens = [] if is_text else [_tokens(generator, length, vocab_size) for _ in range(number)]
    return [
        replace(request, text=f"{generator.choice(words)} {request.text}")
        if is_text
        else replace(request, token_ids=(*generator.choice(tokens), *(request.token_ids or ())))
        for request in requests
    ]


def study_workload(count: int, seed: int, prompt_len: Range, outputs: Sequence[int], vocab: int) -> list[LoadRequest]:
    """Returns requests with prompts of random token ids. Each request has one of the output lengths ``outputs``."""
    generator = random.Random(f"workload/{seed}")
    requests = []
    for _ in range(count):
        length, max_tokens = generator.randint(*prompt_len), generator.choice(outputs)
        tokens = tuple(generator.randrange(FIRST_PLAIN_TOKEN, vocab) for _ in range(length))
        requests.append(LoadRequest(max_tokens, token_ids=tokens))
    return requests


def dataset_workload(path: Path, count: int, seed: int, output_len: Range) -> list[LoadRequest]:
    """Returns ``count`` requests from the lines of a data set, in order. After the last line, the first one follows.

    A line without ``max_tokens`` gets a length drawn from ``output_len``. Raises ``UsageError`` if a line is wrong.
    """
    lines = _read_dataset(path)
    generator = random.Random(f"workload/{seed}")
    requests = []
    for index in range(count):
        line = lines[index % len(lines)]
        max_tokens = generator.randint(*output_len) if line.max_tokens is None else line.max_tokens
        text = line.prompt if isinstance(line.prompt, str) else None
        token_ids = line.prompt if isinstance(line.prompt, tuple) else None
        requests.append(LoadRequest(max_tokens, text, token_ids, line.messages))
    return requests


def _workload(
    count: int, seed: int, output_len: Range, prompt: Callable[[random.Random], dict[str, Any]]
) -> list[LoadRequest]:
    generator = random.Random(f"workload/{seed}")
    return [LoadRequest(max_tokens=generator.randint(*output_len), **prompt(generator)) for _ in range(count)]


def _tokens(generator: random.Random, length: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(generator.choices(range(FIRST_PLAIN_TOKEN, vocab_size), k=length))


def _prompt(generator: random.Random, words: int) -> str:
    """Returns ``words`` words: a question or an instruction, followed by sentences."""
    text = _fill(generator, generator.choice(OPENINGS)).split()
    while len(text) < words:
        text += _fill(generator, SENTENCE).split()
    return " ".join(text[:words])


def _fill(generator: random.Random, template: str) -> str:
    return template.format(**{kind: generator.choice(words.split()) for kind, words in WORDS.items()})


def _read_dataset(path: Path) -> list[DatasetLine]:
    decoder = msgspec.json.Decoder(DatasetLine)
    lines = []
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    lines.append(_parse_line(decoder, raw, f"{path}:{number}"))
    except OSError as error:
        raise UsageError(f"--dataset: cannot read {path}: {error.strerror}") from error
    if not lines:
        raise UsageError(f"--dataset: {path} is empty")
    return lines


def _parse_line(decoder: msgspec.json.Decoder[DatasetLine], raw: bytes, where: str) -> DatasetLine:
    try:
        line = decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{where}: {error}") from error
    if (line.prompt is None) == (line.messages is None):
        raise UsageError(f"{where}: give either 'prompt' (text or token ids) or 'messages'")
    if line.max_tokens is not None and line.max_tokens < 1:
        raise UsageError(f"{where}: max_tokens is {line.max_tokens}, the minimum is 1")
    return line
