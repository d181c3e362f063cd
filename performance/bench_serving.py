#!/usr/bin/env python3
"""Loads any OpenAI-compatible server, open loop: ``python performance/bench_serving.py -T 30 --json FILE``."""

from entry import run

run("performance.bench.serving_main")
