#!/usr/bin/env python3
"""This engine beside others on the same machine: ``python performance/compare_peers.py --help``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_serving.own_python import use_own_python

use_own_python()

from performance.peers.compare import main

if __name__ == "__main__":
    sys.exit(main())
