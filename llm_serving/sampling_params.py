"""The table of sampling parameters. Each parameter is a field of ``SamplingParams``, with its range and its type in the
step slot.

HTTP fields, columns of step slots, the sampler's arguments and the reference page are derived from this table. To add
a parameter, add a field here and follow "Add a sampling parameter" in CONTRIBUTING.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

MAX_LOGIT_BIAS = 100.0
"""Maximum of the absolute values in ``SamplingParams.logit_bias``."""
MAX_TOP_LOGITS = 32
"""Maximum number of (token id, logit) pairs that a step returns for each sampled token."""


@dataclass(frozen=True, slots=True)
class SamplingParameter:
    """One sampling parameter, with its default and its range from ``low`` to ``high``, both included."""

    name: str
    """Name of the parameter in the API, in ``SamplingParams``, in the step slot and in ``llmk::SampleArgs``."""
    default: Any
    """Value if the client sets none. With the defaults, the sampler does not change the probabilities of tokens."""
    meaning: str
    column: str
    """NumPy type of the parameter's column in the step slot; empty if only the server uses the parameter."""
    low: float | None
    above: float | None
    """The value must be above this number, which is itself not permitted (unlike ``low``). None: no limit."""
    high: float | None
    max_items: int | None
    """Maximum length, if the value is a list. Otherwise None."""
    max_chars: int | None
    """Maximum length of each string, if the value is a list of strings. Otherwise None."""
    needs_history: bool
    """True if the sampler needs the history of the sequence (its known tokens) for this parameter."""


def _parameter(
    default: Any, meaning: str, *, column: str = "", low: float | None = None, above: float | None = None,
    high: float | None = None, max_items: int | None = None, max_chars: int | None = None, needs_history: bool = False,
) -> Any:  # fmt: skip
    """Declares a field of ``SamplingParams``. The details of the sampling parameter become the field's metadata."""
    details = {
        "meaning": meaning, "column": column, "low": low, "above": above, "high": high, "max_items": max_items,
        "max_chars": max_chars, "needs_history": needs_history,
    }  # fmt: skip
    return field(default=default, metadata=details)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of a request: how to choose tokens and when to stop. The HTTP server checks their ranges
    before the engine gets the request.

    The text depends only on the prompt and these parameters. Parameters with a ``column`` must have the same order as
    in ``llmk::SampleArgs`` (agent/kernels/ops/sampler.h).
    """

    max_tokens: int = _parameter(16, "Maximum number of tokens to generate.", low=1)
    temperature: float = _parameter(1.0, "Randomness; 0 is greedy.", column="float32", low=0, high=2)
    top_k: int = _parameter(
        0, "Keeps this number of the most probable tokens; 0 and -1 keep all.", column="int32", low=-1, high=1 << 30
    )
    top_p: float = _parameter(
        1.0, "Keeps the most probable tokens up to this sum of probabilities.", column="float32", low=0, high=1
    )
    min_p: float = _parameter(
        0.0, "Minimum probability, relative to the most probable token.", column="float32", low=0, high=1
    )
    repetition_penalty: float = _parameter(
        1.0, "Penalty of tokens in prompt and output (CTRL); 1 is off.", column="float32", above=0, high=100,
        needs_history=True,
    )  # fmt: skip
    presence_penalty: float = _parameter(
        0.0, "Penalty of tokens in the output.", column="float32", low=-2, high=2, needs_history=True
    )
    frequency_penalty: float = _parameter(
        0.0, "Penalty of tokens in the output for each occurrence.", column="float32", low=-2, high=2,
        needs_history=True,
    )  # fmt: skip
    seed: int = _parameter(
        0, "The same seed gives the same text; random if not set.", column="uint64", low=-(2**63), high=2**64 - 1
    )
    stop: tuple[str, ...] = _parameter((), "Strings that end the text.", max_items=16, max_chars=256)
    stop_token_ids: frozenset[int] = _parameter(frozenset(), "Token ids that end the text.", max_items=64)
    logit_bias: tuple[tuple[int, float], ...] = _parameter(
        (), f"Added to the logits of these tokens, before the penalties: -{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}.",
        max_items=1024,
    )  # fmt: skip
    min_tokens: int = _parameter(
        0, "Minimum number of tokens before an end token or a stop string ends the text.", low=0, high=1 << 30
    )
    allowed_token_ids: frozenset[int] = _parameter(
        frozenset(), "Only these tokens are generated; all if not set.", max_items=16384
    )
    bad_words: tuple[str, ...] = _parameter(
        (), "Words whose tokens are not generated.", max_items=256, max_chars=256
    )
    ignore_eos: bool = _parameter(False, "Continues after the model's end token.")
    include_stop_str_in_output: bool = _parameter(False, "Keeps the stop string in the text.")
    skip_special_tokens: bool = _parameter(True, "Leaves special tokens out of the text.")
    shown_token_ids: frozenset[int] = _parameter(
        frozenset(), "Special tokens that stay in the text, because they begin or end parts of an answer."
    )
    keeps_history: bool = _parameter(False, "The agent needs all tokens, for logits processors or the draft model.")
    logprobs: bool = _parameter(False, "Returns the log-probability of each token.")
    top_logits: int = _parameter(0, "Most probable tokens to return with each token.", low=0, high=MAX_TOP_LOGITS)

    top_allowed: bool = _parameter(False, "The most probable tokens are those that the grammar allows, for beams.")

    @property
    def wants_logits(self) -> bool:
        """True if pieces of the output have ``logits``."""
        return self.logprobs or self.top_logits > 0

    @property
    def has_penalties(self) -> bool:
        """True if the sampler needs the history of the sequence (its known tokens)."""
        penalties = self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return penalties or self.keeps_history


def _table() -> dict[str, SamplingParameter]:
    return {each.name: SamplingParameter(each.name, each.default, **each.metadata) for each in fields(SamplingParams)}


PARAMETERS = _table()
SAMPLER_PARAMETERS = tuple(each for each in PARAMETERS.values() if each.column)
"""The parameters that the agent's sampler reads."""
