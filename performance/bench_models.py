#!/usr/bin/env python3
"""Measures starts, sleep, wake and reloads of one of several models: ``python performance/bench_models.py``."""

from entry import run

run("performance.bench.models_main")
