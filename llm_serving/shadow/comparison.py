"""Compares the log-probabilities of two models for the same answers, and recommends whether to promote the candidate.

Both models score the tokens of an answer of the main model. Each predicts every token from the prompt and the preceding
tokens of the answer. So a difference at one token does not change the context of later tokens, and answers with random
sampling can also be compared.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llm_serving.config.shadow_section import ShadowConfig
from llm_serving.request import TokenLogits

MAX_RATIOS = 1024
"""Number of recent answers from which the median ratio of latencies is computed."""


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """The score that one model gives to an answer."""

    logits: Sequence[TokenLogits]
    """One entry for each token of the answer: its log-probability, and the most likely token at this position."""
    seconds: float
    """Seconds in which the engine scored the answer, without waiting time."""


@dataclass(slots=True)
class Comparison:
    """The sums over all compared answers. Each answer has at least one token."""

    answers: int = 0
    tokens: int = 0
    agreeing: int = 0
    """Number of tokens at which both models have the same most likely token."""
    main_loss: float = 0.0
    """Sum of the negative log-probabilities of all tokens, in nats."""
    candidate_loss: float = 0.0
    max_difference: float = 0.0
    """Largest absolute difference of the log-probabilities of a token, in nats."""
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_RATIOS))
    """For each of the latest answers: the candidate's time to score it, divided by the main model's time to score it.
    """

    def add(self, main: ScoredAnswer, candidate: ScoredAnswer) -> None:
        """Counts an answer that both models have scored."""
        for ours, theirs in zip(main.logits, candidate.logits, strict=True):
            self.agreeing += ours.top[0][0] == theirs.top[0][0]
            self.main_loss -= ours.logprob
            self.candidate_loss -= theirs.logprob
            self.max_difference = max(self.max_difference, abs(ours.logprob - theirs.logprob))
        self.answers += 1
        self.tokens += len(main.logits)
        if main.seconds > 0:
            self.ratios.append(candidate.seconds / main.seconds)

    @property
    def agreement(self) -> float | None:
        """Fraction of the tokens at which both models have the same most likely token. None without answers."""
        return self.agreeing / self.tokens if self.tokens else None

    @property
    def perplexity_change(self) -> float | None:
        """Relative change of the perplexity: (perplexity of the candidate / perplexity of the main model) - 1. None
        without answers.
        """
        return math.expm1((self.candidate_loss - self.main_loss) / self.tokens) if self.tokens else None

    @property
    def latency_ratio(self) -> float | None:
        """Median of ``ratios``: the candidate's time to score an answer, divided by the main model's. None without
        answers.
        """
        ordered = sorted(self.ratios)
        return ordered[len(ordered) // 2] if ordered else None

    def as_json(self) -> dict[str, Any]:
        """Returns all figures of the comparison."""
        tokens = max(1, self.tokens)
        return {
            "answers": self.answers,
            "tokens": self.tokens,
            "agreement": self.agreement,
            "perplexity": {
                "main": math.exp(self.main_loss / tokens) if self.tokens else None,
                "candidate": math.exp(self.candidate_loss / tokens) if self.tokens else None,
                "change": self.perplexity_change,
            },
            "max_logprob_difference": self.max_difference,
            "latency_ratio": self.latency_ratio,
        }


def recommendation(comparison: Comparison, config: ShadowConfig) -> tuple[str, list[str]]:
    """Returns ``wait``, ``promote`` or ``keep``, and the reasons. The list of reasons is empty for ``promote``."""
    if comparison.answers < config.min_answers:
        return "wait", [f"{comparison.answers} of {config.min_answers} answers were compared (min_answers)"]
    agreement, change, ratio = comparison.agreement, comparison.perplexity_change, comparison.latency_ratio
    reasons = []
    if agreement is not None and agreement < config.min_agreement:
        reasons.append(f"the agreement is {agreement:.4f}; the minimum is {config.min_agreement} (min_agreement)")
    if change is not None and change > config.max_perplexity_change:
        limit = config.max_perplexity_change
        reasons.append(f"the perplexity changes by {change:+.4f}; the maximum is {limit} (max_perplexity_change)")
    if ratio is not None and ratio > config.max_latency_ratio:
        limit = config.max_latency_ratio
        reasons.append(f"the candidate takes {ratio:.3f} times as long; the maximum is {limit} (max_latency_ratio)")
    return ("keep" if reasons else "promote"), reasons
