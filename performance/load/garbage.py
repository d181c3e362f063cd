"""Keeps garbage collection from slowing down a load program."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Excludes the objects that exist now from garbage collection, until the end of the context.

    ``gc.unfreeze`` includes all objects again, also those that other code has frozen before. If these objects exist,
    all objects stay frozen after the end, because their collections would be slow.
    """
    had_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not had_frozen:
            gc.unfreeze()
