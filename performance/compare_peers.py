#!/usr/bin/env python3
"""Compares this engine with others on the same machine: ``python performance/compare_peers.py --help``."""

from entry import run

run("performance.peers.compare")
