#!/usr/bin/env python3
"""Compare the scheduling policies under one load: ``python performance/compare_policies.py -X 30 -T 10``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_serving.own_python import use_own_python

use_own_python()

from performance.load.policies import main

if __name__ == "__main__":
    sys.exit(main())
