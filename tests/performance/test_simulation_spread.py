"""Tests the random spread of simulated step times. Slow periods are as frequent and as long as in the measurement."""

import math
import random

import numpy as np
import pytest

from performance.simulation.spread import Spread, lasting_part

QUANTILES = [0.9 + 0.002 * place for place in range(99)]
STEP_S = 0.015


def drawn(spread: Spread, count: int, seed: int = 3) -> list[float]:
    draws = spread.draws(random.Random(seed))
    return [draws.draw(STEP_S * number) for number in range(count)]


@pytest.mark.parametrize("spread", [Spread(QUANTILES), Spread(QUANTILES, 0.6, 0.3)])
def test_draws_have_the_measured_quantiles(spread: Spread) -> None:
    ratios = drawn(spread, 40_000)
    assert set(ratios) == set(QUANTILES)
    found = np.quantile(ratios, [0.05, 0.5, 0.95])
    assert found == pytest.approx(np.quantile(QUANTILES, [0.05, 0.5, 0.95]), abs=0.005)


def test_without_a_lasting_part_steps_are_independent() -> None:
    ratios = drawn(Spread(QUANTILES), 20_000)
    assert np.corrcoef(ratios[1:], ratios[:-1])[0, 1] == pytest.approx(0.0, abs=0.03)
    share, _ = lasting_part(ratios, [STEP_S * number for number in range(len(ratios))])
    assert share < 0.05


@pytest.mark.parametrize(("share", "seconds"), [(0.5, 0.3), (0.8, 0.1)])
def test_the_lasting_part_is_found(share: float, seconds: float) -> None:
    ratios = drawn(Spread(QUANTILES, share, seconds), 60_000)
    found = lasting_part(ratios, [STEP_S * number for number in range(len(ratios))])
    assert found[0] == pytest.approx(share, abs=0.06)
    assert found[1] == pytest.approx(seconds, rel=0.2)


def test_slow_steps_come_together() -> None:
    """Slow steps come in periods, so means over a second vary.

    Without periods, the noise of single steps averages out.
    """
    together, alone = drawn(Spread(QUANTILES, 0.6, 0.3), 60_000), drawn(Spread(QUANTILES), 60_000)
    per_second = round(1.0 / STEP_S)

    def deviation_of_means(ratios: list[float]) -> float:
        whole = len(ratios) // per_second * per_second
        return float(np.reshape(ratios[:whole], (-1, per_second)).mean(axis=1).std())

    assert deviation_of_means(alone) == pytest.approx(np.std(QUANTILES) / math.sqrt(per_second), rel=0.1)
    assert deviation_of_means(together) > 4 * deviation_of_means(alone)


def test_a_draw_for_an_earlier_time_keeps_the_state() -> None:
    """If two steps are sent together, the simulator may draw the random factor of the later step first.

    The draw for the earlier step must then return the same factor, because both steps lie in the same slow period.
    """
    spread = Spread(QUANTILES, 1.0, 10.0)
    draws = spread.draws(random.Random(1))
    first = draws.draw(5.0)
    assert draws.draw(4.0) == draws.draw(5.0) == first
    assert draws.draw(500.0) != first


def test_single_extremes_do_not_hide_the_lasting_part() -> None:
    ratios = drawn(Spread(QUANTILES, 0.5, 0.3), 20_000)
    begins = [STEP_S * number for number in range(len(ratios))]
    before = lasting_part(ratios, begins)
    for place in range(0, len(ratios), 500):
        ratios[place] = 100.0
    after = lasting_part(ratios, begins)
    assert after[0] == pytest.approx(before[0], abs=0.02)
    assert after[1] == pytest.approx(before[1], rel=0.1)


def test_steps_of_different_runs_are_not_compared() -> None:
    """A slow run of a server is followed by a fast run. The difference between the runs does not count as a slow
    period.
    """
    generator = random.Random(4)
    ratios = [generator.gauss(1.0, 0.02) for _ in range(4000)]
    begins = [STEP_S * number for number in range(2000)] + [9000.0 + STEP_S * number for number in range(2000)]
    assert lasting_part(ratios, begins)[0] < 0.05
    assert lasting_part(ratios, begins[::-1]) == (0.0, 0.0)


@pytest.mark.parametrize("count", [1, 60])
def test_too_few_steps_have_no_lasting_part(count: int) -> None:
    ratios = [1.0 + 0.01 * (number // 10) for number in range(count)]
    assert lasting_part(ratios, [0.5 * number for number in range(count)]) == (0.0, 0.0)
    assert lasting_part([1.0] * 500, [0.0] * 500) == (0.0, 0.0)
