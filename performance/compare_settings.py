#!/usr/bin/env python3
"""Compares the values of a setting under one load: ``python performance/compare_settings.py -X 30 -T 10``."""

from entry import run

run("performance.load.variants")
