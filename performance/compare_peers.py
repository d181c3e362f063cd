#!/usr/bin/env python3
"""Compares this engine with other engines: ``python performance/compare_peers.py --help``."""

import sys

from entry import run

run("performance.peers.auto.main" if "--auto" in sys.argv else "performance.peers.compare")
