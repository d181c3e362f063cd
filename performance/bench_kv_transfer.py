#!/usr/bin/env python3
"""Measures hand-overs of computed prompts: ``python performance/bench_kv_transfer.py``."""

from entry import run

run("performance.bench.kv_transfer_main")
