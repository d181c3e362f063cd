#!/usr/bin/env python3
"""Measures the cost of structured output: ``python performance/bench_structured.py [--json FILE]``."""

from entry import run

run("performance.bench.structured_main")
