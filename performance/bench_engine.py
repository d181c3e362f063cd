#!/usr/bin/env python3
"""Speed of the engine without HTTP: ``python performance/bench_engine.py --config llama_160m_cpu.yaml --json FILE``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_serving.own_python import use_own_python

use_own_python()

from performance.bench.engine_main import main

if __name__ == "__main__":
    sys.exit(main())
