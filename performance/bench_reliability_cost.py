#!/usr/bin/env python3
"""Measures the cost of self-checks, API keys and the audit log: ``python performance/bench_reliability_cost.py``."""

from entry import run

run("performance.load.reliability_cost")
