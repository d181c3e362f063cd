#!/usr/bin/env python3
"""Simulates a load: ``python performance/simulate.py --config C --device ascend-910b -X 10 -T 150``."""

from entry import run

run("performance.simulation.main")
