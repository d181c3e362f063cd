#!/usr/bin/env python3
"""Sends ten times the load a server can serve: ``python performance/bench_overload.py --json FILE``."""

from entry import run

run("performance.load.overload")
