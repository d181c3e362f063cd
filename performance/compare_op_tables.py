#!/usr/bin/env python3
"""Native against fused operators on a CPU: ``python performance/compare_op_tables.py --json FILE``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_serving.own_python import use_own_python

use_own_python()

from performance.bench.op_tables_main import main

if __name__ == "__main__":
    sys.exit(main())
