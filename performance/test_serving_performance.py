#!/usr/bin/env python3
"""Load test of a running server: ``python performance/test_serving_performance.py -X 10 -P 8835 -O ./ -T 150``.

A program, in spite of its name: its modules are in performance/load/, its tests in tests/performance/.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_serving.own_python import use_own_python

use_own_python()

from performance.load.main import main

if __name__ == "__main__":
    sys.exit(main())
