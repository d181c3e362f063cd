#!/usr/bin/env python3
"""Sums between two agents, and the machine's ceiling: ``python performance/bench_collectives.py [--json FILE]``.

Two processes, each on a core of its own where there are two. The ceiling is a ball that they throw to each other
through two words of shared memory: nobody can hand over anything faster. Median and 99th percentile of each size.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_serving.own_python import use_own_python

use_own_python()

from performance.bench.collectives_main import main

if __name__ == "__main__":
    sys.exit(main())
