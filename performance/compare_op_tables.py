#!/usr/bin/env python3
"""Compares native with fused operators on a CPU: ``python performance/compare_op_tables.py --json FILE``."""

from entry import run

run("performance.bench.op_tables_main")
