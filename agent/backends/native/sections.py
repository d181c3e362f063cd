"""Implements rotary embedding by positions with three dimensions (M-RoPE, arXiv:2409.12191, section 2.1).

Each pair of elements of a head belongs to one dimension of the position: time, row or column. Pairs of one dimension
are adjacent and form a section. The agent computes the positions (``agent.vision.rotary_rows``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from mindspore import Tensor, nn, ops

from agent.backends.native.attention import Rotary
from agent.weights.storage import Array


class BySequence(nn.Cell):
    """Calls ``mask`` with the tokens' positions in their sequences, which are row 0 of ``positions`` [4, tokens]."""

    def __init__(self, mask: nn.Cell) -> None:
        super().__init__()
        self.mask, self.row = mask, _Row(0)

    def construct(self, positions: Tensor) -> Tensor:
        return self.mask(self.row(positions))


class SectionedRotary(nn.Cell):
    """Returns cos and sin of each token, both [tokens, head_size] in the model's type, for ``positions`` [4, tokens].

    Row 1 + i of ``positions`` has dimension i of the rotary positions. Section i of both halves of a head is rotated by
    dimension i.
    """

    def __init__(self, cos: Array, sin: Array, sections: Sequence[int], dtype: str) -> None:
        """``cos`` and ``sin`` are float32 [positions, head_size]. ``sections`` has the number of pairs of each section.
        """
        super().__init__()
        columns = [slice(first, end) for first, end in pairwise(accumulate(sections, initial=0))]
        self.rows = nn.CellList([_Row(1 + dimension) for dimension in range(len(columns))])
        self.tables = nn.CellList([Rotary(cos[:, part], sin[:, part], dtype) for part in columns])
        self.join = ops.Concat(1)

    def construct(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        all_cos: tuple[Tensor, ...] = ()
        all_sin: tuple[Tensor, ...] = ()
        for row, table in zip(self.rows, self.tables):  # noqa: B905
            cos, sin = table(row(positions))
            all_cos, all_sin = (*all_cos, cos), (*all_sin, sin)
        return self.join((*all_cos, *all_cos)), self.join((*all_sin, *all_sin))


class _Row(nn.Cell):
    """Returns row ``number`` of a matrix as a vector."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = Tensor(np.array([number], np.int32))
        self.gather, self.reshape = ops.Gather(), ops.Reshape()

    def construct(self, matrix: Tensor) -> Tensor:
        return self.reshape(self.gather(matrix, self.number, 0), (-1,))
