#!/usr/bin/env python3
"""Measures the flight recorder's cost in a busy server: ``python performance/bench_recorder.py --clients 1,16``."""

from entry import run

run("performance.load.recorder")
