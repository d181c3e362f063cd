"""Turns ``allowed_token_ids``, ``bad_words`` and ``min_tokens`` into rules about the tokens of a request's choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from llm_serving.constraints.token_rules import TokenRules
from llm_serving.engine.tokenizer import Tokenizer
from llm_serving.errors import RequestError
from llm_serving.request import Constraint
from llm_serving.sampling_params import SamplingParams
from llm_serving.server.generation.prompts import check_vocabulary
from llm_serving.server.generation.sampling import ConstraintSource
from llm_serving.server.generation.structured import check_available
from llm_serving.server.generation.work import off_loop
from llm_serving.server.state import ServerState

MASK_FIELDS = ("allowed_token_ids", "bad_words", "min_tokens", "logit_bias")
"""The fields for which a sequence needs a mask of allowed tokens in each step.

``logit_bias`` forbids no token, but a bias can change which token is the best. So the agents must read all logits of
the sequence. They do this only for sequences with a mask. The mask for ``logit_bias`` alone allows every token.
"""


@dataclass(frozen=True, slots=True)
class RuledSource:
    """Makes the constraint of each choice: the rules, and a grammar if there is one."""

    rules: TokenRules
    inner: ConstraintSource | None

    def start(self) -> Constraint:
        return self.rules.start(None if self.inner is None else self.inner.start())


async def with_token_rules(
    state: ServerState, sampling: SamplingParams, max_tokens: int, grammar: ConstraintSource | None
) -> ConstraintSource | None:
    """Returns an object that makes the constraint of each choice from ``grammar`` and the rules of ``sampling``.

    Returns None if any token may follow. ``max_tokens`` is the smallest ``max_tokens`` of all choices. Raises
    RequestError if the rules are wrong or forbid every token.
    """
    if sampling.min_tokens > max_tokens:
        raise RequestError(
            f"'min_tokens' is {sampling.min_tokens} and the output has at most {max_tokens} tokens; lower 'min_tokens' "
            "or raise the maximum.",
            param="min_tokens",
            code="invalid_value",
        )
    ends = sampling.stop_token_ids if sampling.ignore_eos else sampling.stop_token_ids | state.engine.end_token_ids
    has_minimum = sampling.min_tokens > 0 and bool(ends)
    given = (bool(sampling.allowed_token_ids), bool(sampling.bad_words), has_minimum, bool(sampling.logit_bias))
    used = [name for name, is_given in zip(MASK_FIELDS, given, strict=True) if is_given]
    if not used:
        return grammar
    check_available(state, used[0])
    vocab_size = state.settings.vocab_size
    check_vocabulary(sorted(sampling.allowed_token_ids), vocab_size, "allowed_token_ids")
    if sampling.logit_bias and (last := sampling.logit_bias[-1][0]) >= vocab_size:
        raise RequestError(
            f"'logit_bias' has a value for token id {last}; the model's vocabulary has ids 0 to {vocab_size - 1}.",
            param="logit_bias",
            code="invalid_value",
        )
    num_chars = sum(map(len, sampling.bad_words))
    forbidden = await off_loop(num_chars, partial(_forbidden, state.engine.tokenizer, sampling.bad_words))
    check_vocabulary([one for ids in forbidden for one in ids], vocab_size, "bad_words")
    rules = TokenRules(
        vocab_size, allowed=sampling.allowed_token_ids, forbidden=forbidden, min_tokens=sampling.min_tokens,
        end_token_ids=ends,
    )  # fmt: skip
    if rules.allows_no_token:
        wrong = "bad_words" if rules.allows_no_token_later else "min_tokens"
        raise RequestError(
            f"'{wrong}' and 'allowed_token_ids' together leave no token that may be generated; change one of them.",
            param=wrong,
            code="invalid_value",
        )
    return RuledSource(rules, grammar)


def _forbidden(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """Returns the token sequences that spell the words: one or two for each word.

    The first sequence spells the word, and the second spells a space and the word. As in vLLM, the second is returned
    only if it has as many tokens as the first and begins with another token.
    """
    sequences = []
    for word in words:
        plain = tokenizer.encode(word, False)
        spaced = tokenizer.encode(" " + word.lstrip(), False)
        if plain:
            sequences.append(plain)
        if spaced and (not plain or (spaced[0] != plain[0] and len(spaced) == len(plain))):
            sequences.append(spaced)
    return sequences
