from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_serving.admission.controls import OutputLengthPredictor


def predictor_of(lengths: list[int], max_tokens: int = 100, **changes: float) -> OutputLengthPredictor:
    predictor = OutputLengthPredictor(**{"min_samples": 1, **changes})  # type: ignore[arg-type]
    for length in lengths:
        predictor.observe(length, max_tokens)
    return predictor


def test_without_history_the_prediction_is_the_limit() -> None:
    assert OutputLengthPredictor().predict(0, 256) == 256


def test_the_prediction_is_a_quantile_of_recent_lengths() -> None:
    lengths = list(range(1, 11))
    assert predictor_of(lengths, quantile=0.5).predict(0, 100) == 5
    assert predictor_of(lengths, quantile=0.9).predict(0, 100) == 9
    assert predictor_of(lengths, quantile=1.0).predict(0, 100) == 10


def test_only_lengths_beyond_the_present_one_count() -> None:
    predictor = predictor_of(list(range(1, 11)), quantile=0.5)
    assert [predictor.predict(has, 100) for has in (0, 3, 6, 9)] == [5, 7, 8, 10]
    assert predictor.predict(10, 100) == 100


def test_with_too_few_longer_outputs_the_prediction_is_the_limit() -> None:
    predictor = predictor_of(list(range(1, 11)), quantile=0.5, min_samples=4)
    assert (predictor.predict(6, 100), predictor.predict(7, 100)) == (8, 100)


def test_a_prediction_never_exceeds_the_limit() -> None:
    assert predictor_of([90] * 3).predict(0, 70) == 70


def test_requests_with_different_limits_have_separate_histories() -> None:
    predictor = predictor_of([500] * 20, max_tokens=1024, min_samples=16)
    for _ in range(20):
        predictor.observe(16, 16)
    assert (predictor.predict(0, 1500), predictor.predict(0, 20), predictor.predict(0, 64)) == (500, 16, 64)


def test_the_window_drops_the_oldest_length() -> None:
    predictor = predictor_of([50, 50, 10, 20, 30], window=3, quantile=1.0)
    assert predictor.predict(0, 100) == 30
    assert predictor.predict(30, 100) == 100


@pytest.mark.parametrize("quantile", [0.0, 1.1])
def test_impossible_quantiles_are_refused(quantile: float) -> None:
    with pytest.raises(ValueError, match=f"quantile is {quantile}"):
        OutputLengthPredictor(quantile)


@given(
    st.lists(st.integers(1, 40), max_size=60),
    st.integers(0, 40),
    st.sampled_from([0.1, 0.25, 0.5, 0.75, 0.9, 1.0]),
    st.integers(1, 20),
)
def test_predictions_equal_the_definition(lengths: list[int], has: int, quantile: float, window: int) -> None:
    longer = sorted(length for length in lengths[-window:] if length > has)
    expected = longer[math.ceil(len(longer) * quantile) - 1] if len(longer) >= 3 else 60
    assert predictor_of(lengths, 60, window=window, min_samples=3, quantile=quantile).predict(has, 60) == expected
