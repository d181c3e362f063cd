"""Records, for each batch row and each block, which keys and values the draft model has computed.

The KV cache of the draft model has the same blocks as the KV cache of the model. But fewer of its positions may be
computed, because the draft model computes only in steps that want drafts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from llm_serving.ipc.shm import MoveKind

Int32Array = npt.NDArray[np.int32]

_BEHIND = -1


class DraftRows:
    """The tokens of each batch row, and the length of the prefix whose keys and values the draft model has computed.

    A sequence may start after a cached prefix that the draft model has not computed. If the server has sent the tokens
    of the prefix, the draft model can compute them later. Otherwise, the sequence gets no drafts.
    """

    def __init__(self, num_rows: int, max_tokens: int, block_size: int, num_blocks: int, num_host_blocks: int) -> None:
        """``max_tokens`` is the maximum length of a sequence. ``num_blocks`` is the number of blocks of the model's
        cache.
        """
        self._block_size = block_size
        self.tokens: Int32Array = np.zeros((num_rows, max_tokens + 1), np.int32)
        """[rows, positions]: the known tokens of each batch row, followed by its latest drafts."""
        self.num_computed: Int32Array = np.full(num_rows, _BEHIND, np.int32)
        """[rows]: the number of tokens, from the start of the sequence, whose keys and values are computed. If it is
        negative, the sequence gets no drafts.
        """
        self._filled: Int32Array = np.zeros(num_blocks, np.int32)
        self._filled_on_host: Int32Array = np.zeros(max(num_host_blocks, 1), np.int32)

    def reset(self) -> None:
        """Forgets all sequences and blocks."""
        self.num_computed.fill(_BEHIND)
        self._filled.fill(0)
        self._filled_on_host.fill(0)

    def begin(self, row: int, start: int, table: Int32Array, known: Int32Array | None = None) -> None:
        """Begins a new sequence on a batch row. Its first ``start`` tokens are a cached prefix, in the blocks
        of ``table``.

        ``known`` has the tokens of the sequence, at least those of the prefix. None if the server has not sent them.
        """
        size = self._block_size
        blocks = table[: -(-start // size)]
        needed = np.minimum(start - size * np.arange(blocks.size), size)
        missing = np.flatnonzero(self._filled[blocks] < needed)
        self.num_computed[row] = start
        if missing.size:
            self.num_computed[row] = _BEHIND if known is None else missing[0] * size
        if known is not None:
            self.tokens[row, :start] = known[:start]

    def put(self, rows: Int32Array, positions: Int32Array, token_ids: Int32Array) -> None:
        """Stores known tokens. The arguments have one element for each token.

        If a token differs from the token that was stored at its position, the keys and values from this position on
        count as not computed.
        """
        differs = self.tokens[rows, positions] != token_ids
        np.minimum.at(self.num_computed, rows[differs], positions[differs])
        self.tokens[rows, positions] = token_ids

    def note_blocks(self, rows: Int32Array, positions: Int32Array, blocks: Int32Array) -> None:
        """Records how many positions of each block are computed. ``blocks`` has the block of each position in
        ``positions``.
        """
        first = positions // self._block_size * self._block_size
        self._filled[blocks] = np.clip(self.num_computed[rows] - first, 0, self._block_size)

    def computed(self, row: int, start: int, end: int, table: Int32Array) -> None:
        """Records that the keys and values of the positions ``start .. end - 1`` of a batch row are computed."""
        self.num_computed[row] = end
        size = self._block_size
        positions = np.arange(start // size * size, end, size, dtype=np.int32)
        self.note_blocks(np.full(positions.size, row, np.int32), positions, table[positions // size])

    def arrive(self, blocks: Int32Array, num_filled: int) -> None:
        """Records that ``blocks`` have arrived from another replica, each with ``num_filled`` computed positions."""
        self._filled[blocks] = num_filled

    def move(self, moves: Int32Array) -> None:
        """Records that blocks were copied. ``moves`` is [copies, 3]: ``MoveKind``, source block and destination block.
        """
        for kind, source, destination in moves.tolist():
            origin = self._filled_on_host if kind == MoveKind.SWAP_IN else self._filled
            target = self._filled_on_host if kind == MoveKind.SWAP_OUT else self._filled
            target[destination] = origin[source]
