#!/usr/bin/env python3
"""What the flight recorder costs in a server at work: ``python performance/bench_recorder.py --clients 1,16``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_serving.own_python import use_own_python

use_own_python()

from performance.load.recorder import main

if __name__ == "__main__":
    sys.exit(main())
