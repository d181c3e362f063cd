"""Measures the ceilings of this machine: read bandwidth and the peak rate of each kind of multiply-add.

    python -m performance.bench.ceilings [--threads N]        prints the ceilings as JSON

The program ``performance/ceilings`` measures the ceilings in its own process, without the threads of a benchmark. Its
source is ``performance/kernels/ceilings/main.cc``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = REPOSITORY / "performance" / "ceilings"
ATTEMPT_SECONDS = 0.1
"""Seconds of each attempt to reach a ceiling. A ceiling is the best of several attempts."""
READ_MB = 256
"""Megabytes of memory whose read bandwidth is measured. This is much more than fits into a cache."""
TIMEOUT_S = 60.0
"""Maximum seconds for the measurement of all ceilings."""
DRIFT = 1.15
"""Maximum ratio of the read bandwidths that are measured before and after a run. A larger ratio causes a warning."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Maximum rates of a machine for all threads together, in 10^9 bytes or 10^9 operations per second.

    A multiply-add counts as two operations. If the processor has no instruction for products of a number format, the
    kernels use other instructions, and the rate of these instructions is given.
    """

    read_gb_s: float
    paged_read_gb_s: float
    """Read rate of pieces of 12 KB in random order. Attention reads the blocks of a sequence like this."""
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
    """Measures the maximum rates of this machine with ``threads`` threads. 0 means one for every processor.

    Raises RuntimeError if the program fails.
    """
    command = [str(PROGRAM), str(ATTEMPT_SECONDS), str(threads), str(READ_MB)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise RuntimeError(f"{PROGRAM} is not built; run `python setup.py build_ext --inplace`") from None
    if result.returncode != 0:
        raise RuntimeError(f"measuring the ceilings failed with {result.returncode}:\n{result.stderr.strip()}")
    printed = json.loads(result.stdout)
    return Ceilings(**printed["ceilings"][0], isa=printed["isa"])


def drift_text(before: Ceilings, after: Ceilings) -> str | None:
    """Returns a warning if the read bandwidth changed by more than the factor ``DRIFT`` during a run, otherwise None.

    If the machine's speed changed this much, a comparison of the run with the ceilings is meaningless.
    """
    low, high = sorted((before.read_gb_s, after.read_gb_s))
    if high < DRIFT * low:
        return None
    return (
        f"WARNING: read bandwidth was {before.read_gb_s:.1f} GB/s before and {after.read_gb_s:.1f} GB/s after the run"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="0 (default): every processor")
    print(json.dumps(asdict(measure_ceilings(parser.parse_args().threads))))


if __name__ == "__main__":
    main()
