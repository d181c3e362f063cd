#!/usr/bin/env python3
"""Ten times the load a server can serve: ``python performance/bench_overload.py --config C --duration 300``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_serving.own_python import use_own_python

use_own_python()

from performance.load.overload import main

if __name__ == "__main__":
    sys.exit(main())
