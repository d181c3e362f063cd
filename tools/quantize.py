#!/usr/bin/env python3
"""Converts a model to int8 or int4 weights: ``python tools/quantize.py FOLDER OUT --format int8``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_serving.commands.own_python import TOOLS, prefer_own_python

prefer_own_python(TOOLS)

from tools.quantization.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
