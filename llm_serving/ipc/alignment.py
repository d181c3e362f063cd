"""Sizes and offsets of arrays in memory that several parts of the program share."""

from __future__ import annotations

CACHE_LINE_BYTES = 64
"""Alignment of arrays. Kernels expect packed weights and adapters at a multiple of this number."""


def aligned(num_bytes: int, alignment: int = CACHE_LINE_BYTES) -> int:
    """Returns the smallest multiple of ``alignment`` that is at least ``num_bytes``."""
    return -(-num_bytes // alignment) * alignment
