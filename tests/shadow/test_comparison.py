"""Tests the comparison of two models: agreement, perplexity, latency and the recommendation."""

from __future__ import annotations

import math

import pytest

from llm_serving.config.shadow_section import ShadowConfig
from llm_serving.request import TokenLogits
from llm_serving.shadow.comparison import Comparison, ScoredAnswer, recommendation


def scored(pairs: list[tuple[int, float]], seconds: float = 1.0) -> ScoredAnswer:
    """Returns a score. Each pair is the best token and the log-probability of the answer's token."""
    return ScoredAnswer([TokenLogits(7, logprob, 1.0, ((best, 0.5),)) for best, logprob in pairs], seconds)


def compared(main: list[tuple[int, float]], candidate: list[tuple[int, float]], ratio: float = 1.0) -> Comparison:
    comparison = Comparison()
    comparison.add(scored(main), scored(candidate, ratio))
    return comparison


def test_the_figures_of_two_answers():
    comparison = compared([(1, -1.0), (2, -2.0)], [(1, -1.5), (3, -2.0)], 0.5)
    comparison.add(scored([(4, -3.0)], 2.0), scored([(4, -3.5)], 3.0))
    assert (comparison.answers, comparison.tokens, comparison.agreement) == (2, 3, pytest.approx(2 / 3))
    assert comparison.perplexity_change == pytest.approx(math.exp(7.0 / 3 - 6.0 / 3) - 1)
    assert comparison.max_difference == pytest.approx(0.5)
    assert comparison.latency_ratio == 1.5
    shown = comparison.as_json()["perplexity"]
    assert (shown["main"], shown["candidate"]) == (pytest.approx(math.exp(2.0)), pytest.approx(math.exp(7.0 / 3)))


def test_without_answers_there_are_no_figures():
    shown = Comparison().as_json()
    assert (shown["agreement"], shown["perplexity"]["change"], shown["latency_ratio"]) == (None, None, None)
    assert recommendation(Comparison(), ShadowConfig())[0] == "wait"


CONFIG = ShadowConfig(min_answers=1, min_agreement=0.5, max_perplexity_change=0.1, max_latency_ratio=1.2)


@pytest.mark.parametrize(
    ("comparison", "expected", "reason"),
    [
        (compared([(1, -1.0)] * 4, [(1, -1.0)] * 3 + [(2, -1.1)]), "promote", ""),
        (compared([(1, -1.0)] * 4, [(2, -1.0)] * 4), "keep", "the agreement is 0.0000"),
        (compared([(1, -1.0)] * 4, [(1, -1.2)] * 4), "keep", "the perplexity changes by +0.2214"),
        (compared([(1, -1.0)] * 4, [(1, -1.0)] * 4, 1.5), "keep", "1.500 times as long"),
        (Comparison(), "wait", "0 of 1 answers"),
    ],
)
def test_the_recommendation_names_each_limit(comparison, expected, reason):
    verdict, reasons = recommendation(comparison, CONFIG)
    assert (verdict, reason in "; ".join(reasons)) == (expected, True)
