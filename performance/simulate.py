#!/usr/bin/env python3
"""Simulate a load: ``python performance/simulate.py --config C --device ascend-910b -X 10 -T 150``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_serving.own_python import use_own_python

use_own_python()

from performance.simulation.main import main

if __name__ == "__main__":
    sys.exit(main())
