"""Tests that a load program leaves garbage collection as it found it."""

from __future__ import annotations

import gc

import pytest

from performance.load.garbage import frozen_objects


@pytest.mark.parametrize(("frozen_before", "calls"), [(0, ["freeze", "unfreeze"]), (5, ["freeze"])])
def test_objects_that_were_frozen_before_stay_frozen(
    monkeypatch: pytest.MonkeyPatch, frozen_before: int, calls: list[str]
) -> None:
    found: list[str] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen_before)
    monkeypatch.setattr(gc, "freeze", lambda: found.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: found.append("unfreeze"))
    with frozen_objects():
        assert found == ["freeze"]
    assert found == calls
