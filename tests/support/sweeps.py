"""Marks the cases that only ``make test-sweeps`` runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def with_sweeps(cases: Iterable[tuple[Any, ...]], is_swept: Callable[..., bool]) -> list[Any]:
    """Returns the parameters of each case. ``make test`` omits a case if ``is_swept(*case)`` is true."""
    return [
        pytest.param(*case, id=case_id(case), marks=[pytest.mark.sweep] if is_swept(*case) else []) for case in cases
    ]


def case_id(case: object) -> str:
    """Returns a name for a case: its parts, and those of nested tuples, joined by hyphens."""
    return "-".join(map(case_id, case)) if isinstance(case, tuple) else str(case)
