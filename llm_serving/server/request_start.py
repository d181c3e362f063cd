"""``X-Request-Start``: when a request left its client, or the proxy in front, as that says itself.

Reverse proxies set the header so that a server can tell how long requests took to reach it (nginx:
``proxy_set_header X-Request-Start "t=${msec}"``). There is no standard; the time is Unix time with or without ``t=``
in front, in seconds (with a fraction), milliseconds or microseconds, told apart by their size.
"""

from __future__ import annotations

import math
import re

__all__ = ["HEADER", "MAX_AGE_S", "age_of"]

HEADER = b"x-request-start"
"""The header's name, as ASGI has it."""
MAX_AGE_S = 60.0
"""An older stamp is of another clock, or of no use."""

_STAMP = re.compile(rb"(?:t=)?([0-9]{9,17}(?:\.[0-9]{1,9})?)")
_UNITS = ((1e11, 1.0), (1e14, 1e3), (math.inf, 1e6))
"""Stamps below the first are counts of a second's so-manieth part."""


def age_of(value: bytes, now: float) -> float:
    """Seconds from the stamp to ``now``, a Unix time; 0 for one that is not a time, is not past, or is older than
    ``MAX_AGE_S``: such a request came when its first byte did."""
    match = _STAMP.fullmatch(value)
    if match is None:
        return 0.0
    stamp = float(match[1])
    age = now - stamp / next(unit for limit, unit in _UNITS if stamp < limit)
    return age if 0.0 < age <= MAX_AGE_S else 0.0
