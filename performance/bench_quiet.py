#!/usr/bin/env python3
"""Compares the quiet mode with the normal mode: ``python performance/bench_quiet.py [--json FILE]``."""

from entry import run

run("performance.bench.quiet_main")
