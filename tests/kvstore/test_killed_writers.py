"""Tests that each hit has the right bits after writers of tier files were killed. The whole run is in ``tests/long``.
"""

from __future__ import annotations

import random

import pytest

from support.tier_kills import KINDS, run_round


@pytest.mark.parametrize("kind", KINDS)
def test_every_hit_after_a_kill_has_the_right_bits(kind, tmp_path):
    rng = random.Random(7)
    counts = [run_round(kind, tmp_path, rng) for _ in range(2)]
    assert sum(count["hits"] for count in counts) > 20
