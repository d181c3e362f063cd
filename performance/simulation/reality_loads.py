"""The loads of ``validate_simulator.py``: what is fitted, what probes the machine's speed, what is compared."""

from __future__ import annotations

from dataclasses import dataclass

from performance.load.options import LoadOptions
from performance.simulation.runs import NOWHERE

__all__ = ["CALIBRATION", "PROBE", "VALIDATION", "Load"]

VOCAB = 1000
WARM_UP = 4


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of random tokens, open loop."""

    name: str
    rate: float
    duration: float
    """Of a part, in seconds."""
    prompts: tuple[int, int]
    outputs: tuple[int, int]
    seed: int
    parts: int = 1
    """One after the other, each with requests of its own, from an idle server."""

    def options(self, scale: float, part: int = 0) -> LoadOptions:
        """To nowhere yet. Fewer requests a second come for longer: as many in all."""
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
"""Tell how fast the machine is: some rows that decode and some prompts, then many rows."""
VALIDATION = (
    Load("moderate", 4, 10, (16, 256), (16, 128), 1, parts=6),
    Load("many answers", 8, 10, (32, 64), (64, 192), 2, parts=12),
    Load("long prompts", 2, 10, (128, 1024), (32, 128), 3, parts=10),
)
"""Parts as short as a machine holds its speed for, and as many as chance needs."""
