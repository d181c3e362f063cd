#!/usr/bin/env python3
"""Compare batching modes: ``python performance/compare_batching.py --config C --clients 50 --requests 1000``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_serving.own_python import use_own_python

use_own_python()

from performance.simulation.batching import main

if __name__ == "__main__":
    sys.exit(main())
