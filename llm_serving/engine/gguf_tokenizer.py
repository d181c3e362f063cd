"""Reads the tokenizer and the chat templates from a GGUF file, in the same form as from a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from llm_serving.engine.tokenizer_files import MAX_TEMPLATE_BYTES, AddedToken, TokenizerFiles
from llm_serving.errors import CheckpointError
from llm_serving.formats.typed_fields import TypedFields
from llm_serving.gguf.header import Header, read_header
from llm_serving.gguf.vocabulary import Vocabulary, read_vocabulary, sentencepiece_model, tokenizer_json

_TEMPLATE = "tokenizer.chat_template"
_SPECIAL_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def read_gguf_tokenizer(path: Path) -> TokenizerFiles:
    """Returns the contents of the tokenizer in a GGUF file.

    Raises CheckpointError, which names the file, the key and the value.
    """
    header = read_header(path)
    vocabulary = read_vocabulary(header)
    special = {name: vocabulary.special(key) for name, key in _SPECIAL_NAMES.items()}
    return TokenizerFiles(
        vocabulary=path,
        settings=_settings(vocabulary),
        special_tokens={name: token for name, token in special.items() if token is not None},
        added_tokens=tuple(AddedToken(*each) for each in vocabulary.added()) if vocabulary.is_sentencepiece else (),
        templates=_templates(header),
        is_sentencepiece=vocabulary.is_sentencepiece,
        content=sentencepiece_model(vocabulary) if vocabulary.is_sentencepiece else tokenizer_json(vocabulary),
    )


def _settings(vocabulary: Vocabulary) -> TypedFields:
    """Returns the settings for encoding text, with the keys of ``tokenizer_config.json`` in a Hugging Face folder.

    ``legacy`` is True, because llama.cpp also adds a space before text that follows a special token.
    """
    values = {
        "legacy": True,
        "add_prefix_space": vocabulary.flag("add_space_prefix", True),
        "add_bos_token": vocabulary.begins_text,
        "add_eos_token": vocabulary.flag("add_eos_token", False),
    }
    return TypedFields(str(vocabulary.header.path), values, CheckpointError)


def _templates(header: Header) -> dict[str, str]:
    """Returns the chat templates of a GGUF file by name.

    The key of each additional template is ``tokenizer.chat_template.NAME``.
    """
    templates = {}
    for key, text in header.metadata.items():
        if key != _TEMPLATE and not key.startswith(f"{_TEMPLATE}."):
            continue
        if not isinstance(text, str) or len(text.encode()) > MAX_TEMPLATE_BYTES:
            raise CheckpointError(f"{header.path}: {key} must be text of at most {MAX_TEMPLATE_BYTES} bytes")
        templates[key[len(_TEMPLATE) + 1 :] or "default"] = text
    return templates
