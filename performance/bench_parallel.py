#!/usr/bin/env python3
"""Measures steps of one agent and of several that share a model: ``python performance/bench_parallel.py --help``."""

from entry import run

run("performance.bench.parallel_main")
