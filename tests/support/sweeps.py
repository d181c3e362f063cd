"""Cases of which ``make test`` runs some, and ``make test-sweeps`` the others."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def with_sweeps(
    setups: Iterable[tuple[str, ...]], swept: Container[tuple[str, ...]], *, apart: bool = False
) -> list[Any]:
    """One parameter for each setup, or its parts as parameters of their own (``apart``); those in ``swept`` are for
    ``make test-sweeps`` alone."""
    return [
        pytest.param(
            *(setup if apart else (setup,)), id="-".join(setup), marks=[pytest.mark.sweep] if setup in swept else []
        )
        for setup in setups
    ]
