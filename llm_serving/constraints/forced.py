"""Forces a sequence to generate given tokens. The agents then return the log-probabilities of these tokens, as for any
output.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llm_serving.request import ConstraintError


class ForcedTokens:
    """A constraint that allows only the given token at each position. After the last given token, every token is
    allowed.
    """

    def __init__(self, token_ids: Sequence[int], vocab_size: int) -> None:
        self.num_words = -(-vocab_size // 32)
        self._token_ids = token_ids
        self._position = 0

    def advance(self, token_id: int) -> None:
        if self._position < len(self._token_ids) and token_id != self._token_ids[self._position]:
            raise ConstraintError(f"token {token_id} was sampled in place of {self._token_ids[self._position]}")
        self._position += 1

    @property
    def has_failed(self) -> bool:
        return False

    def fork(self) -> ForcedTokens:
        fork = ForcedTokens(self._token_ids, 32 * self.num_words)
        fork._position = self._position
        return fork

    def forced_tokens(self) -> list[int]:
        return list(self._token_ids[self._position :])

    def mask(self) -> npt.NDArray[np.uint32]:
        if self._position >= len(self._token_ids):
            return np.full(self.num_words, 0xFFFFFFFF, np.uint32)
        mask = np.zeros(self.num_words, np.uint32)
        token_id = self._token_ids[self._position]
        mask[token_id // 32] = np.uint32(1 << token_id % 32)
        return mask
