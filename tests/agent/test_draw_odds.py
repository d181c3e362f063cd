"""Tests when a device draws tokens of sequences without ``top_k``."""

from __future__ import annotations

from agent.run_ahead.odds import DrawOdds


def after(odds: DrawOdds, draws: int, wrong_every: int) -> DrawOdds:
    """Records ``draws`` draws, of which each one whose number is a multiple of ``wrong_every`` was wrong."""
    for number in range(1, draws + 1):
        odds.note(1, int(number % wrong_every == 0))
    return odds


def test_many_sequences_wait_earlier_than_few() -> None:
    odds = after(DrawOdds(), 1000, wrong_every=50)
    assert [odds.allow(num_seqs) for num_seqs in (1, 8, 64)] == [True, True, False]


def test_it_still_draws_now_and_then_and_so_notices_a_change() -> None:
    odds = after(DrawOdds(), 1000, wrong_every=2)
    allowed = [odds.allow(1) for _ in range(640)]
    assert sum(allowed) == 10
    after(odds, 1000, wrong_every=1001)
    assert odds.allow(8)


def test_a_step_without_draws_changes_nothing() -> None:
    odds = DrawOdds()
    odds.note(0, 0)
    assert odds.allow(1000)
