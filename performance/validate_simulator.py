#!/usr/bin/env python3
"""Fit the simulator to this machine, and hold it against real runs: ``python performance/validate_simulator.py``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_serving.own_python import use_own_python

use_own_python()

from performance.simulation.reality import main

if __name__ == "__main__":
    sys.exit(main())
