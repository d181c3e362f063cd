#!/usr/bin/env python3
"""Measures the time to first token with KV tiers: ``python performance/bench_kv_tiers.py``."""

from entry import run

run("performance.bench.kv_tiers_main")
