"""Reads a session file. If its blocks are bit-identical to those that this server computes, gives them to the KV tiers.

If the file belongs to a model with other sizes, the import is refused. If only the values in the blocks differ, for
example because of other weights or another block size, the session is imported without its blocks. The server then
computes the blocks again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from llm_serving.block_moves.tier_moves import BlockKey
from llm_serving.config import Config
from llm_serving.errors import RequestError
from llm_serving.kvcache.block_hash import root_hash
from llm_serving.kvstore.identity import BlockIdentity
from llm_serving.kvstore.transfers import BlockTransfers
from llm_serving.lora.registry import adapted_salt
from llm_serving.sessions.book import new_nonce, session_salt
from llm_serving.sessions.exporting import PIECE_BYTES
from llm_serving.sessions.session_file import (
    Head,
    InvalidSessionError,
    Manifest,
    SessionReader,
    chain_of,
    content_of,
    file_chain,
    num_blocks_of,
)
from llm_serving.version import __version__

MAX_TOKENS = 1 << 20
"""A session file with up to this number of tokens is read, even if this model's sequences are shorter.

So the error can state a more useful reason than the length, for example that the file belongs to another model.
"""
_SHOWN_CHARS = 80
"""Maximum length of a wrong value in an error message."""
_FACTS_OF_THE_MODEL = ("shape", "model_type")


class SessionMismatchError(RequestError):
    """The session file is of another model. The message names the first difference."""

    status = 409
    code = "session_mismatch"


@dataclass(slots=True)
class ImportResult:
    """The result of an import."""

    num_tokens: int
    block_size: int
    num_blocks: int = 0
    """Number of imported blocks. The server need not compute the tokens of these blocks."""
    differences: list[str] = field(default_factory=list)
    """The reasons why blocks of the file were not used. Empty if all blocks were used."""

    @property
    def num_resumed_tokens(self) -> int:
        return self.num_blocks * self.block_size


def differences_of(theirs: dict[str, Any], ours: dict[str, Any], path: str = "") -> list[str]:
    """Compares the ``facts`` of a file (``theirs``) with those of this server. Returns a text for each difference.
    """
    found: list[str] = []
    for name in sorted(theirs.keys() | ours.keys()):
        left, right = theirs.get(name), ours.get(name)
        if isinstance(left, dict) and isinstance(right, dict):
            found += differences_of(left, right, f"{path}{name}.")
        elif left != right:
            found.append(f"{path}{name} is {_short(left)} in the file and {_short(right)} here")
    return found


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


class SessionImport:
    """Imports one session file. ``block_bytes`` is the size of a block of this server, in bytes.

    Call ``feed`` with the pieces of the file until it returns False, then ``finish``.
    """

    def __init__(
        self, config: Config, identity: BlockIdentity, transfers: BlockTransfers, block_bytes: int
    ) -> None:
        self.nonce = new_nonce()
        """Random value from which the salt of this session's requests is computed."""
        self.head: Head | None = None
        self.result: ImportResult | None = None
        self._namespace = config.cache_namespace
        self._identity = identity
        self._transfers = transfers
        self._max_tokens = config.max_model_len
        self._reader = SessionReader(max(config.max_model_len, MAX_TOKENS), block_bytes)
        self._keys: list[BlockKey] = []
        self._file_keys: list[BlockKey] = []
        self._records: list[bytes] = []
        self._num_read = 0
        self._room = 0

    @property
    def salt(self) -> bytes:
        """The salt of the session's requests. It is known after the head of the file has been read."""
        salt, adapter = session_salt(self.nonce), b"" if self.head is None else self.head.manifest.adapter
        return adapted_salt(adapter, salt) if adapter else salt

    async def feed(self, piece: bytes) -> bool:
        """Processes the next piece of the file. Returns False if the rest of the file is not needed.

        Raises InvalidSessionError for a damaged file, and SessionMismatchError for the file of another model.
        """
        for part in self._reader.feed(piece):
            if isinstance(part, Head):
                await self._begin(part)
                if self.result is not None and self.result.differences:
                    return False
            else:
                self._records.append(part)
        if sum(map(len, self._records)) >= PIECE_BYTES or self._reader.is_complete:
            await self._write()
        return True

    def finish(self) -> ImportResult:
        """Returns the result. Raises InvalidSessionError if the file is cut off."""
        result = self.result
        if result is None or not (self._reader.is_complete or result.differences):
            raise InvalidSessionError("The session file is cut off.")
        left = self._reader.num_blocks - result.num_blocks
        if left:
            result.differences.append(
                f"{left} of the {self._reader.num_blocks} blocks of the file were not taken: an import may take half "
                "of kv_tier_config.host_blocks while the agents are ready and have the server's weights"
            )
        return result

    async def _begin(self, head: Head) -> None:
        manifest = self._checked(head)
        self.head = head
        size = manifest.block_size
        self.result = ImportResult(manifest.num_tokens, size)
        ours = self._identity.facts
        # A wrong file may state one block size in ``facts``, and use another one for its blocks.
        self.result.differences = differences_of(manifest.facts, ours) or differences_of(
            {"block_size": size}, {"block_size": ours.get("block_size")}
        )
        if self.result.differences:
            if manifest.version != __version__:
                theirs = _short(manifest.version)
                self.result.differences.append(f"the version is {theirs} in the file and {__version__!r} here")
            return
        if manifest.namespace != self._identity.namespace:
            raise InvalidSessionError("The namespace of the session file does not match the facts of its model.")
        count = num_blocks_of(manifest.num_tokens, size)
        root = root_hash(self._namespace, self.salt)
        # Hashing the blocks of a long session takes too long for the event loop, so another thread does it.
        self._keys = await asyncio.to_thread(chain_of, head.tokens, size, root, count)
        self._file_keys = await asyncio.to_thread(file_chain, manifest, head.tokens, count)
        self._room = await self._transfers.max_guests()

    def _checked(self, head: Head) -> Manifest:
        """Returns the manifest. Raises SessionMismatchError if the file is of a model with other sizes."""
        manifest, ours = head.manifest, self._identity.facts
        names = _FACTS_OF_THE_MODEL
        found = differences_of(
            {name: manifest.facts.get(name) for name in names}, {name: ours.get(name) for name in names}
        )
        if found:
            raise SessionMismatchError(
                f"The session is of another model, {_short(manifest.model)}: {'; '.join(found[:4])}. Import it into a "
                "server of its model."
            )
        if manifest.num_tokens > self._max_tokens:
            raise SessionMismatchError(
                f"The session has {manifest.num_tokens} tokens; a sequence of this server has at most "
                f"{self._max_tokens} (model_config.seq_length)."
            )
        return manifest

    async def _write(self) -> None:
        """Checks the records that have arrived, and writes their blocks to the KV tiers until these accept no more."""
        records, self._records = self._records, []
        if not records:
            return
        assert self.head is not None
        assert self.result is not None
        first = self._num_read
        self._num_read += len(records)
        file_keys, keys = self._file_keys[first : self._num_read], self._keys[first : self._num_read]
        work = partial(_contents, self.head, file_keys, records)
        contents = await asyncio.get_running_loop().run_in_executor(None, work)
        room = self._room - first
        if self.result.num_blocks == first and room > 0:
            self.result.num_blocks += await self._transfers.write(keys[:room], contents[:room])


def _contents(head: Head, keys: list[BlockKey], records: list[bytes]) -> list[bytes]:
    return [content_of(head.manifest, key, record) for key, record in zip(keys, records, strict=True)]
