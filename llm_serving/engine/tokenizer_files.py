"""Reads the tokenizer files of a Hugging Face folder: vocabulary file, special tokens and chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llm_serving.errors import CheckpointError
from llm_serving.formats.small_files import read_small_text
from llm_serving.formats.typed_fields import TypedFields

MAX_SETTINGS_BYTES = 16 * 1024 * 1024
"""Maximum size of ``tokenizer_config.json`` and other settings of a tokenizer."""
MAX_TEMPLATE_BYTES = 256 * 1024
"""Maximum size of the file of a chat template."""
MAX_ADDED_TOKENS = 100_000
"""Maximum number of added tokens of a tokenizer."""
FAST_FILE, SENTENCEPIECE_FILE = "tokenizer.json", "tokenizer.model"
BPE_FILE, MERGES_FILE = "vocab.json", "merges.txt"
"""Files of a byte-level BPE without a ``tokenizer.json``."""
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that stands for its literal text, in addition to the learned vocabulary.

    If ``strip_left`` or ``strip_right`` is True, the token also removes the white space on that side.
    """

    token_id: int
    content: str
    special: bool
    strip_left: bool = False
    strip_right: bool = False


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Contents of the tokenizer's files.

    ``special_tokens`` maps names like ``bos_token`` to tokens. ``templates`` maps names to chat templates.
    """

    vocabulary: Path
    settings: TypedFields
    special_tokens: Mapping[str, str]
    added_tokens: tuple[AddedToken, ...]
    templates: Mapping[str, str]
    is_sentencepiece: bool
    """True if the vocabulary is a SentencePiece model, False if it is a vocabulary of the library ``tokenizers``."""
    content: bytes | None = None
    """The ``tokenizer.model`` or ``tokenizer.json`` that was made from ``vocabulary``. None if ``vocabulary`` itself
    has one of these formats."""


def find_vocabulary(place: Path, kind: str = "auto") -> Path:
    """Returns the vocabulary file: ``place`` itself, or the vocabulary file in the folder ``place``.

    ``kind`` is the config's ``tokenizer.type``. Raises CheckpointError if there is no vocabulary file.
    """
    names = {"LlamaTokenizer": (SENTENCEPIECE_FILE,), "LlamaTokenizerFast": (FAST_FILE, BPE_FILE)}.get(
        kind, (FAST_FILE, SENTENCEPIECE_FILE, BPE_FILE)
    )
    if place.is_dir():
        for name in names:
            if (place / name).is_file():
                return place / name
        raise CheckpointError(f"{place}: holds no {' and no '.join(names)}, so there is no tokenizer")
    if not place.is_file():
        raise CheckpointError(f"tokenizer.vocab_file: {place}: no such file")
    if place.suffix not in (".json", ".model", ".gguf"):
        raise CheckpointError(f"tokenizer.vocab_file: {place}: must be a tokenizer.json, a .model or a .gguf file")
    return place


def read_tokenizer_files(vocabulary: Path) -> TokenizerFiles:
    """Reads special tokens, added tokens and chat templates from the folder of ``vocabulary``.

    Raises CheckpointError, which names the file, the key and the value.
    """
    folder = vocabulary.parent
    settings = _read_object(folder / "tokenizer_config.json")
    names = _read_object(folder / "special_tokens_map.json")
    fields = TypedFields(str(folder / "tokenizer_config.json"), settings, CheckpointError)
    special = {}
    for name in SPECIAL_NAMES:
        token = _token_text(settings.get(name)) or _token_text(names.get(name))
        if token is not None:
            special[name] = token
    return TokenizerFiles(
        vocabulary=vocabulary,
        settings=fields,
        special_tokens=special,
        added_tokens=_added_tokens(folder, settings),
        templates=_templates(folder, fields, settings),
        is_sentencepiece=vocabulary.suffix == ".model",
    )


def _read_object(file: Path) -> dict[str, object]:
    """Returns the JSON object in ``file``. The result is empty if the file does not exist."""
    if not file.exists():
        return {}
    try:
        values = json.loads(read_small_text(file, MAX_SETTINGS_BYTES, CheckpointError))
    except (ValueError, RecursionError) as reason:
        raise CheckpointError(f"{file}: not valid JSON: {reason}") from reason
    if not isinstance(values, dict):
        raise CheckpointError(f"{file}: must hold a JSON object, not {type(values).__name__}")
    return values


def _token_text(value: object) -> str | None:
    """Returns the text of a token, which is stored as a text or as an object with the key ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _added_tokens(folder: Path, settings: Mapping[str, object]) -> tuple[AddedToken, ...]:
    """Reads ``added_tokens_decoder``, or the older file ``added_tokens.json`` ({text: id}).

    Returns the tokens in order of id.
    """
    source = f"{folder / 'tokenizer_config.json'}: added_tokens_decoder"
    entries = settings.get("added_tokens_decoder") or {}
    tokens = []
    if isinstance(entries, dict) and entries:
        for key, entry in entries.items():
            content = _token_text(entry)
            if content is None or not content or not isinstance(entry, dict) or not key.isdecimal():
                raise CheckpointError(
                    f"{source}[{key!r}] = {entry!r}: must be an object with content, under a token id"
                )
            flags = (entry.get(flag) is True for flag in ("special", "lstrip", "rstrip"))
            tokens.append(AddedToken(int(key), content, *flags))
    else:
        source = str(folder / "added_tokens.json")
        for content, token_id in _read_object(folder / "added_tokens.json").items():
            if not isinstance(token_id, int) or not content:
                raise CheckpointError(f"{source}: {content!r} = {token_id!r}: must map a text to a token id")
            tokens.append(AddedToken(token_id, content, special=False))
    if len(tokens) > MAX_ADDED_TOKENS:
        raise CheckpointError(f"{source}: {len(tokens)} added tokens; the maximum is {MAX_ADDED_TOKENS}")
    return tuple(sorted(tokens, key=lambda token: token.token_id))


def _templates(folder: Path, fields: TypedFields, settings: Mapping[str, object]) -> dict[str, str]:
    """Returns the chat templates by name. ``chat_template.jinja`` replaces the one in ``tokenizer_config.json``."""
    templates: dict[str, str] = {}
    value = settings.get("chat_template")
    if isinstance(value, str):
        templates["default"] = value
    elif isinstance(value, list):
        for entry in value:
            name = entry.get("name") if isinstance(entry, dict) else None
            template = entry.get("template") if isinstance(entry, dict) else None
            if not isinstance(name, str) or not isinstance(template, str):
                raise fields.fail("chat_template", "each entry of the list must hold name and template")
            templates[name] = template
    elif value is not None:
        raise fields.fail("chat_template", "must be text or a list of named templates")
    file = folder / "chat_template.jinja"
    if file.exists():
        templates["default"] = read_small_text(file, MAX_TEMPLATE_BYTES, CheckpointError)
    for name, template in templates.items():
        if len(template.encode()) > MAX_TEMPLATE_BYTES:
            raise CheckpointError(f"{fields.source}: chat template {name!r} is larger than {MAX_TEMPLATE_BYTES} bytes")
    return templates
