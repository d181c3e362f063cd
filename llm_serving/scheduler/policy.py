"""Policies, kinds of preemption and of admission control by name; ``policies/`` has a file for each policy."""

from __future__ import annotations

import enum

__all__ = ["AdmissionKind", "Policy", "PreemptionKind"]


class Policy(enum.Enum):
    """``scheduler_config.policy``."""

    PREFILL_FIRST = "prefill_first"
    FCFS = "fcfs"
    DECODE_FIRST = "decode_first"
    CHUNKED = "chunked"
    SLO = "slo"


class PreemptionKind(enum.Enum):
    """``scheduler_config.preemption``: what becomes of a sequence whose blocks are needed by an older one."""

    RECOMPUTE = "recompute"
    """It waits, and all its known tokens are computed again."""
    SWAP = "swap"
    """Its blocks go to host memory, and come back; where the host has no room it is recomputed."""
    AUTO = "auto"
    """Whatever takes less time, by the rates measured so far."""


class AdmissionKind(enum.Enum):
    """``scheduler_config.admission``; see ``admission``."""

    NONE = "none"
    ROUTER = "router"
    AIMD = "aimd"
