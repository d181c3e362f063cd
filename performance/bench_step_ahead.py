#!/usr/bin/env python3
"""Measures the overlap of host and device: ``python performance/bench_step_ahead.py [--trace]``."""

from entry import run

run("performance.bench.step_ahead_main")
