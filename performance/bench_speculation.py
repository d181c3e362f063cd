#!/usr/bin/env python3
"""Measures what speculative decoding gains: ``python performance/bench_speculation.py [--json FILE]``."""

from entry import run

run("performance.bench.speculation_main")
