"""Measures the limits of this machine: read bandwidth and the peak rate of each kind of multiply-add.

    python -m performance.bench.ceilings [--threads N]        prints the ceilings as JSON

Loops of the kernels' library (``agent/kernels/ops/ceilings.h``) run in a separate process. The benchmark's thread pools
are therefore not involved.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LOOP_SECONDS = 0.1
ATTEMPTS = 5
TIMEOUT_S = 60.0
DRIFT = 1.15
"""If bandwidths differ by a larger factor, the program prints a warning."""
RATES = {
    "read_gb_s": "llmk_measure_read_bandwidth",
    "paged_read_gb_s": "llmk_measure_paged_read_bandwidth",
    "fp32_gflops": "llmk_measure_fma",
    "bf16_gflops": "llmk_measure_dot_bf16",
    "int8_gops": "llmk_measure_dot_int8",
}
"""Field -> entry of the library: billions of bytes read, or of operations, a second; a multiply-add is two."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates of all ``threads`` together. Without a unit for a format, the machine has the rate of the unit that it uses
    instead."""

    read_gb_s: float
    paged_read_gb_s: float
    """Rate of reading pieces of 12 KB in random order, like the blocks of a sequence."""
    bf16_gflops: float
    int8_gops: float
    fp32_gflops: float
    threads: int
    isa: str

    def text(self) -> str:
        return (
            f"ceilings ({self.isa}, {self.threads} threads): {self.read_gb_s:.1f} GB/s read "
            f"({self.paged_read_gb_s:.1f} block by block), "
            f"{self.bf16_gflops:.0f} GFLOP/s bfloat16, {self.int8_gops:.0f} GOP/s int8, "
            f"{self.fp32_gflops:.0f} GFLOP/s float32"
        )


def measure_ceilings(threads: int = 0) -> Ceilings:
    """Returns the ceilings. With 0 threads there is one per processor. Raises RuntimeError if the process fails."""
    command = [sys.executable, "-m", "performance.bench.ceilings", "--threads", str(threads)]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"measuring the ceilings failed with {result.returncode}:\n{result.stderr.strip()}")
    return Ceilings(**json.loads(result.stdout))


def drift_text(before: Ceilings, after: Ceilings) -> str | None:
    """Returns a warning if the bandwidth changed during a run. Fractions of the ceilings are then unreliable."""
    low, high = sorted((before.read_gb_s, after.read_gb_s))
    if high < DRIFT * low:
        return None
    return (
        f"WARNING: read bandwidth was {before.read_gb_s:.1f} GB/s before and {after.read_gb_s:.1f} GB/s after the run"
    )


def _measure_here(threads: int) -> Ceilings:
    from agent.kernels import kernel_isa, num_threads, set_threads
    from agent.kernels.library import load_library

    set_threads(threads)
    library = load_library()
    rates = {field: _best_rate(library, name) for field, name in RATES.items()}
    return Ceilings(**rates, threads=num_threads(), isa=kernel_isa())


def _best_rate(library: ctypes.CDLL, name: str) -> float:
    entry = getattr(library, name)
    entry.argtypes, entry.restype = [ctypes.c_double], ctypes.c_double
    return _best(lambda: float(entry(LOOP_SECONDS)))


def _best(call: Callable[[], float]) -> float:
    """Returns the best rate of several attempts, because other processes can only lower it."""
    return max(call() for _ in range(ATTEMPTS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="0 (default): one for each processor")
    print(json.dumps(asdict(_measure_here(parser.parse_args().threads))))


if __name__ == "__main__":
    main()
