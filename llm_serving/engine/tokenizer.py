"""Text to token ids and back, special tokens, chat templates: everything the server knows about text.

Nothing here runs code from a model folder or asks a hub.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_serving.engine.chat_template import ChatTemplate
from llm_serving.engine.token_table import TokenTable
from llm_serving.engine.tokenizer_backends import FastBackend, SentencePieceBackend, TokenizerBackend
from llm_serving.engine.tokenizer_files import TokenizerFiles, find_vocabulary, read_tokenizer_files
from llm_serving.errors import RequestError

if TYPE_CHECKING:
    from llm_serving.config import Config

__all__ = ["Tokenizer", "load_tokenizer"]


class Tokenizer:
    """One model's tokenizer. Immutable after construction; its methods may be called from any thread."""

    def __init__(self, files: TokenizerFiles, eos_token_ids: Sequence[int] = ()) -> None:
        """``eos_token_ids`` are the model's; without any, the tokenizer's ``eos_token`` ends a text."""
        backend: TokenizerBackend = SentencePieceBackend(files) if files.is_sentencepiece else FastBackend(files)
        self._backend = backend
        self._templates = {
            name: ChatTemplate(text, files.special_tokens, name=f"{files.settings.source}: chat template {name!r}")
            for name, text in files.templates.items()
        }
        self.table = TokenTable(backend.rule, backend.piece, backend.added, backend.special)
        self.vocab_size = backend.vocab_size
        self.bos_token_id = self._named(files, "bos_token")
        end = self._named(files, "eos_token")
        self.eos_token_ids = tuple(eos_token_ids) or (() if end is None else (end,))
        self.special_token_ids = backend.special

    def _named(self, files: TokenizerFiles, name: str) -> int | None:
        token = files.special_tokens.get(name)
        return None if token is None else self._backend.token_id(token)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    @cached_property
    def max_piece_chars(self) -> int:
        """Characters of the longest token: a text of more than ``n`` times this is more than ``n`` tokens."""
        pieces = (self._backend.piece(token_id) for token_id in range(self.vocab_size))
        return max(len(piece) for piece in pieces if piece)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. A special token spelled out in the text becomes that token."""
        return self._backend.encode(text, add_special_tokens)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ``token_ids``, taken as a whole text. Bytes that are no UTF-8 become U+FFFD.

        Equals transformers' ``decode(..., clean_up_tokenization_spaces=False)`` for ids whose bytes are UTF-8.
        """
        table = self.table
        kept = [i for i in token_ids if not (skip_special_tokens and i in table.special)]
        if not kept:
            return ""
        first = table.bytes_at_start(kept[0]) if table.rule.strip_first_token else table.bytes_of(kept[0])
        text = b"".join([first, *map(table.bytes_of, kept[1:])]).decode("utf-8", "replace")
        leading = len(text) - len(text.lstrip(" "))
        return text[min(leading, table.rule.strip_spaces) :]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to a text; may be part of a character."""
        return self.table.bytes_of(token_id)

    def id_to_piece(self, token_id: int) -> str:
        """The entry of the vocabulary; empty for an id outside it."""
        return self._backend.piece(token_id) or ""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        max_chars: int | None = None,
    ) -> str:
        """The prompt of a conversation, special tokens spelled out; encode it with ``add_special_tokens=False``.

        Raises RequestError when the model has no chat template or the template refuses the messages.
        """
        template = self._templates.get("default") or next(iter(self._templates.values()), None)
        if template is None:
            raise RequestError(
                "This model has no chat template, so it cannot answer messages; use /v1/completions with a prompt.",
                param="messages",
                code="no_chat_template",
            )
        return template.render(messages, add_generation_prompt=add_generation_prompt, max_chars=max_chars)


def load_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer a config names. Raises CheckpointError."""
    vocabulary = find_vocabulary(Path(config.tokenizer_file), config.tokenizer.type)
    return Tokenizer(read_tokenizer_files(vocabulary), config.end_token_ids)
