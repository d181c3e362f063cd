"""The scheduling policies by name; ``policies/`` has a file for each."""

from __future__ import annotations

import enum

__all__ = ["Policy"]


class Policy(enum.Enum):
    """``scheduler_config.policy``."""

    PREFILL_FIRST = "prefill_first"
    FCFS = "fcfs"
    DECODE_FIRST = "decode_first"
    CHUNKED = "chunked"
