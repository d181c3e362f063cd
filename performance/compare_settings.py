#!/usr/bin/env python3
"""Compare the values of a setting under one load: ``python performance/compare_settings.py -X 30 -T 10``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_serving.own_python import use_own_python

use_own_python()

from performance.load.variants import main

if __name__ == "__main__":
    sys.exit(main())
