"""Writes a session file: the tokens of a session, and the KV blocks of these tokens, as far as the KV tiers have them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial

from llm_serving.block_moves.tier_moves import BlockKey
from llm_serving.config import Config
from llm_serving.errors import LLMServingError
from llm_serving.kvcache.block_hash import root_hash
from llm_serving.kvstore.identity import BlockIdentity
from llm_serving.kvstore.transfers import BlockTransfers
from llm_serving.sessions.book import Session
from llm_serving.sessions.session_file import (
    Manifest,
    chain_of,
    encode_block,
    encode_end,
    encode_head,
    file_chain,
    num_blocks_of,
)
from llm_serving.version import __version__

PIECE_BYTES = 4 << 20
"""Approximate size in bytes of the pieces in which blocks are read and sent. A piece has at least one block."""
WAIT_S = 2.0
"""Maximum seconds to wait for the blocks of a request that has just ended. These blocks reach host memory with a later
step.
"""
_POLL_S = 0.02
"""Seconds between two looks for the blocks of a session in host memory."""


class SessionChangedError(LLMServingError):
    """The agents were lost, or failed a self-check, while a session was exported. The file is not complete."""


class SessionExport:
    """Exports one session. ``config`` is the config of the session's model.

    ``identity`` has the model, weights and kernels that determine the bits of blocks. ``transfers`` reads the blocks.
    """

    def __init__(
        self, config: Config, identity: BlockIdentity, transfers: BlockTransfers, session: Session
    ) -> None:
        self._transfers = transfers
        self._tokens = session.tokens
        self._manifest = Manifest(
            model=session.model,
            version=__version__,
            facts=identity.facts,
            namespace=identity.namespace,
            adapter=session.adapter,
            block_size=config.pa_config.block_size,
            num_tokens=session.num_tokens,
        )
        self._root = root_hash(config.cache_namespace, session.salt)
        self._keys: list[BlockKey] = []
        self._file_keys: list[BlockKey] = []
        self._waits_until = time.monotonic() + WAIT_S
        self._versions: tuple[int, ...] | None = None

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yields the file in pieces. Raises SessionChangedError if the blocks in the file may be wrong. Some pieces may
        have been yielded by then.
        """
        loop, manifest = asyncio.get_running_loop(), self._manifest
        yield encode_head(manifest, self._tokens)
        count = num_blocks_of(manifest.num_tokens, manifest.block_size)
        # Hashing the blocks of a long session takes too long for the event loop, so another thread does it.
        chain = partial(chain_of, self._tokens, manifest.block_size, self._root, count)
        self._keys = await loop.run_in_executor(None, chain)
        self._file_keys = await loop.run_in_executor(None, partial(file_chain, manifest, self._tokens, count))
        done, batch = 0, 1
        while done < len(self._keys):
            contents = await self._read(self._keys[done : done + batch])
            if not contents:
                break
            keys = self._file_keys[done : done + len(contents)]
            yield await loop.run_in_executor(None, partial(_encoded, manifest, keys, contents))
            done += len(contents)
            batch = max(1, PIECE_BYTES // len(contents[0]))
        # This call reads no block. It raises an error if agents were lost meanwhile, because the last blocks may then
        # be wrong.
        await self._read([])
        yield encode_end(manifest, done)

    async def _read(self, keys: list[BlockKey]) -> list[bytes]:
        """Returns the contents of the blocks in order, up to the first block that no tier has.

        If the first block is missing, waits up to ``WAIT_S`` seconds, because a step may still copy it.
        """
        while True:
            found = await self._transfers.read(keys)
            if self._versions is None:
                self._versions = found.versions
            elif self._versions != found.versions:
                raise SessionChangedError("the agents were lost or failed a self-check during the export")
            if found.contents or not keys or time.monotonic() >= self._waits_until:
                return found.contents
            await asyncio.sleep(_POLL_S)


def _encoded(manifest: Manifest, keys: list[BlockKey], contents: list[bytes]) -> bytes:
    pairs = zip(keys, contents, strict=True)
    return b"".join(encode_block(manifest, key, content) for key, content in pairs)
