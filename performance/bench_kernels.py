#!/usr/bin/env python3
"""Compares each kernel with the machine's limits: ``python performance/bench_kernels.py --json FILE``."""

from entry import run

run("performance.bench.kernel_main")
