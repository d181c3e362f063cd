#!/usr/bin/env python3
"""Open-loop load against any OpenAI-compatible server: ``python performance/bench_serving.py -T 30 --json FILE``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_serving.own_python import use_own_python

use_own_python()

from performance.bench.serving_main import main

if __name__ == "__main__":
    sys.exit(main())
