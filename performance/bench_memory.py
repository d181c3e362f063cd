#!/usr/bin/env python3
"""Compares the peak memory of a server under load with its memory plan: ``python performance/bench_memory.py``."""

from entry import run

run("performance.bench.memory_main")
