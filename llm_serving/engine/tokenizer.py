"""The interface of a tokenizer: converts text to token ids and back, and has special tokens and the chat template.

Nothing here runs code from a model folder or contacts a model hub. ``tokenizer_backends`` has the two implementations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from llm_serving.engine.chat_template import ChatTemplate
from llm_serving.engine.token_table import DecodeRule, TokenTable
from llm_serving.engine.tokenizer_files import TokenizerFiles


class Tokenizer(ABC):
    """The tokenizer of one model. It does not change after construction. Any thread may call its methods."""

    def __init__(
        self,
        files: TokenizerFiles,
        eos_token_ids: Sequence[int],
        *,
        rule: DecodeRule,
        added: Mapping[int, str],
        special: frozenset[int],
        vocab_size: int,
    ) -> None:
        """``eos_token_ids`` are the model's end tokens. If there are none, the tokenizer's ``eos_token`` ends a text.

        ``added`` has the literal texts of added tokens, by id. ``vocab_size`` counts added tokens, too.
        """
        self.table = TokenTable(rule, self.piece, added, special)
        self.vocab_size = vocab_size
        self.special_token_ids = special
        self.bos_token_id = self._special_id(files, "bos_token")
        end = self._special_id(files, "eos_token")
        self.eos_token_ids = tuple(eos_token_ids) or (() if end is None else (end,))
        self.chat_template, self.tool_template = _chat_templates(files)

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of ``text``. A part of the text that spells a special token becomes that token."""

    @abstractmethod
    def piece(self, token_id: int) -> str | None:
        """Returns the vocabulary entry of a token. None for an id outside the vocabulary."""

    @abstractmethod
    def token_id(self, piece: str) -> int | None:
        """Returns the id of a vocabulary entry. None if there is no entry with this text."""

    @cached_property
    def max_piece_chars(self) -> int:
        """Number of characters of the longest token. A text of more than ``n`` times this length has more than ``n``
        tokens."""
        pieces = (self.piece(token_id) for token_id in range(self.vocab_size))
        return max(len(piece) for piece in pieces if piece)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of ``token_ids``, which must be a complete text. Bytes that are not UTF-8 become U+FFFD.

        If the bytes are UTF-8, the result equals transformers' ``decode(..., clean_up_tokenization_spaces=False)``.
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
        """Returns the bytes that a token adds to a text. These bytes may be an incomplete UTF-8 character."""
        return self.table.bytes_of(token_id)

    def _special_id(self, files: TokenizerFiles, name: str) -> int | None:
        token = files.special_tokens.get(name)
        return None if token is None else self.token_id(token)


def _chat_templates(files: TokenizerFiles) -> tuple[ChatTemplate, ChatTemplate | None]:
    """Returns the default chat template, and the template for conversations with tools.

    The template for tools has the name ``tool_use``. It is None if the model has no template of this name. If no
    template has the name ``default``, the first one is the default. Raises CheckpointError if any template is invalid.
    """
    templates = {
        name: ChatTemplate(text, files.special_tokens, name=f"{files.settings.source}: chat template {name!r}")
        for name, text in files.templates.items()
    }
    default = templates.get("default") or next(iter(templates.values()), ChatTemplate(None, {}))
    return default, templates.get("tool_use")
