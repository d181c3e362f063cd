#!/usr/bin/env python3
"""Compares batching modes: ``python performance/compare_batching.py --config C --clients 50 --requests 1000``."""

from entry import run

run("performance.simulation.batching")
