"""Rules about the tokens of a sequence: allowed tokens, forbidden sequences of tokens and a minimum length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from llm_serving.request import Constraint, ConstraintError, ForkableConstraint, forked

Mask = npt.NDArray[np.uint32]


class TokenRules:
    """The token rules of one request. All sequences of the request share this object and its masks."""

    def __init__(
        self,
        vocab_size: int,
        *,
        allowed: Iterable[int] = (),
        forbidden: Iterable[Sequence[int]] = (),
        min_tokens: int = 0,
        end_token_ids: Iterable[int] = (),
    ) -> None:
        """``allowed`` are the ids of the allowed tokens. None allows every token.

        ``forbidden`` are sequences of one or more tokens that the output must not contain. The first ``min_tokens``
        tokens of the output must not be in ``end_token_ids``.
        """
        self.num_words = -(-vocab_size // 32)
        self.min_tokens = min_tokens
        is_allowed = np.zeros(32 * self.num_words, np.bool_)
        wanted = list(allowed)
        is_allowed[wanted or slice(0, vocab_size)] = True
        self._after: defaultdict[int, list[tuple[tuple[int, ...], int]]] = defaultdict(list)
        longest = 1
        for *prefix, last in forbidden:
            longest = max(longest, len(prefix) + 1)
            if prefix:
                self._after[prefix[-1]].append((tuple(prefix), last))
            else:
                is_allowed[last] = False
        self.num_remembered = longest - 1
        """Number of preceding tokens that must be known to find the forbidden next tokens."""
        self._mask = _packed(is_allowed)
        is_allowed[[one for one in end_token_ids if 0 <= one < vocab_size]] = False
        self._early_mask = _packed(is_allowed)

    @property
    def allows_no_token(self) -> bool:
        """True if the rules forbid every token at the start of the output."""
        return not self.mask(0, ()).any()

    @property
    def allows_no_token_later(self) -> bool:
        """True if the rules forbid every token even after ``min_tokens`` tokens, when the output may end."""
        return not self._mask.any()

    def mask(self, num_tokens: int, tokens: Sequence[int]) -> Mask:
        """Returns the mask of the tokens that may come next. The output has ``num_tokens`` tokens so far, of which
        ``tokens`` are the last.

        The caller must not change the mask.
        """
        mask = self._early_mask if num_tokens < self.min_tokens else self._mask
        begun = self._after.get(tokens[-1], ()) if tokens else ()
        ended = [last for prefix, last in begun if tuple(tokens[-len(prefix) :]) == prefix]
        if ended:
            mask = mask.copy()
            for last in ended:
                mask[last // 32] &= ~np.uint32(1 << last % 32)
        return mask

    def start(self, inner: Constraint | None) -> RuledTokens:
        """Returns the constraint of a sequence without output tokens. ``inner`` is another constraint that also
        applies, for example a grammar.
        """
        return RuledTokens(self, inner)


class RuledTokens:
    """The constraint of one sequence: the rules, and an inner constraint if there is one."""

    def __init__(self, rules: TokenRules, inner: Constraint | None) -> None:
        self.num_words = rules.num_words
        self._rules = rules
        self._inner = inner
        self._num_tokens = 0
        self._tokens: list[int] = []
        self._has_failed = False

    def advance(self, token_id: int) -> None:
        if self._inner is not None:
            self._inner.advance(token_id)
        if self._has_failed:
            raise ConstraintError(
                "no token may follow: 'allowed_token_ids', 'bad_words', 'min_tokens' and the structured output "
                "contradict each other here"
            )
        self._num_tokens += 1
        if self._rules.num_remembered:
            self._tokens = [*self._tokens, token_id][-self._rules.num_remembered :]

    @property
    def has_failed(self) -> bool:
        return self._has_failed or (isinstance(self._inner, ForkableConstraint) and self._inner.has_failed)

    def fork(self) -> RuledTokens | None:
        inner = forked(self._inner)
        if inner is None and self._inner is not None:
            return None
        fork = RuledTokens(self._rules, inner)
        fork._num_tokens, fork._tokens, fork._has_failed = self._num_tokens, self._tokens, self._has_failed
        return fork

    def forced_tokens(self) -> list[int]:
        return self._inner.forced_tokens() if isinstance(self._inner, ForkableConstraint) else []

    def mask(self) -> Mask:
        mask = self._rules.mask(self._num_tokens, self._tokens)
        if self._inner is not None:
            mask = mask & self._inner.mask()
        if not mask.any():
            self._has_failed = True
            mask = np.full(self.num_words, 0xFFFFFFFF, np.uint32)
        return mask


def _packed(is_allowed: npt.NDArray[np.bool_]) -> Mask:
    """Packs one boolean for each token id into 32-bit words: bit ``id % 32`` of word ``id // 32``."""
    words: Mask = np.packbits(is_allowed, bitorder="little").view(np.uint32)
    return words
