"""Defines the loads of ``validate_simulator.py``: for the fit, for the probes, and for the comparison."""

from __future__ import annotations

from dataclasses import dataclass

from performance.load.options import LoadOptions
from performance.simulation.runs import NOWHERE

__all__ = ["CALIBRATION", "PROBE", "VALIDATION", "Load"]

VOCAB = 1000
"""Number of different tokens in prompts."""
WARM_UP = 4
"""Number of first requests that are not measured."""


@dataclass(frozen=True, slots=True)
class Load:
    """A load: its request rate, and the ranges of prompt and output lengths. The prompts are random tokens."""

    name: str
    rate: float
    duration: float
    """Number of seconds in which the requests of one part arrive."""
    prompts: tuple[int, int]
    outputs: tuple[int, int]
    seed: int
    parts: int = 1
    """Number of parts. Each part has its own requests and starts on an idle server."""

    def options(self, scale: float, part: int = 0) -> LoadOptions:
        """Returns the load test's options for a part. ``scale`` multiplies the rate, not the number of requests."""
        seed = self.seed + 100 * part
        return LoadOptions(
            NOWHERE, rate=self.rate * scale, duration=self.duration / scale, seed=seed, token_ids=True,
            vocab_size=VOCAB, prompt_len=self.prompts, output_len=self.outputs, ignore_eos=True, return_token_ids=True,
            warmup=WARM_UP, timeout_s=3600.0,
        )  # fmt: skip


CALIBRATION = (
    Load("alone", 1, 5, (16, 64), (16, 64), 11),
    Load("few", 4, 8, (16, 300), (16, 128), 12),
    Load("many", 9, 8, (32, 64), (64, 192), 13),
    Load("burst", 64, 1, (16, 512), (32, 96), 14),
    Load("long prompts", 3, 5, (256, 1500), (16, 64), 15),
    Load("single prompts", 4, 5, (16, 256), (4, 8), 16),
    Load("single long prompts", 2, 10, (16, 1100), (4, 8), 17),
)
PROBE = (
    Load("probe", 6, 3, (16, 256), (32, 96), 21),
    Load("probe of many rows", 64, 0.25, (16, 64), (48, 112), 22),
)
"""Loads that measure the machine's speed: first a few decode rows and some prompts, then many rows."""
VALIDATION = (
    Load("moderate", 4, 10, (16, 256), (16, 128), 1, parts=6),
    Load("many answers", 8, 10, (32, 64), (64, 192), 2, parts=12),
    Load("long prompts", 2, 10, (128, 1024), (32, 128), 3, parts=10),
)
"""Loads for the comparison. A part is short, so that the machine's speed hardly changes during it. Many parts reduce
the influence of chance.
"""
