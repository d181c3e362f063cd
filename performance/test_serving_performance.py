#!/usr/bin/env python3
"""Load test of a running server: ``python performance/test_serving_performance.py -X 10 -O ./ -T 150``.

This is a program and not a test. Its modules are in performance/load/ and its tests in tests/performance/.
"""

from entry import run

run("performance.load.main")
