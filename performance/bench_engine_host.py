#!/usr/bin/env python3
"""Measures the host time of a step without a device: ``python performance/bench_engine_host.py --json host.json``."""

from entry import run

run("performance.bench.engine_host")
