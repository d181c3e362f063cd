#!/usr/bin/env python3
"""Fits the simulator to this machine and compares it with real runs: ``python performance/validate_simulator.py``."""

from entry import run

run("performance.simulation.reality")
