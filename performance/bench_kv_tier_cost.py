#!/usr/bin/env python3
"""Measures the cost of KV tiers without hits: ``python performance/bench_kv_tier_cost.py``."""

from entry import run

run("performance.bench.kv_tier_cost_main")
