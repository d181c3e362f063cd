#!/usr/bin/env python3
"""Measures all-reduces between two agents: ``python performance/bench_collectives.py [--json FILE]``."""

from entry import run

run("performance.bench.collectives_main")
