#!/usr/bin/env python3
"""Compares this engine with other engines: ``python performance/compare_peers.py --help``."""

from entry import run

run("performance.peers.compare")
