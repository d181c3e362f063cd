#!/usr/bin/env python3
"""Speed of each kernel against the hardware's ceilings: ``python performance/bench_kernels.py --json FILE``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_serving.own_python import use_own_python

use_own_python()

from performance.bench.kernel_main import main

if __name__ == "__main__":
    sys.exit(main())
