#!/usr/bin/env python3
"""Compares an agent behind a link with one on this machine: ``python performance/bench_remote_agent.py``."""

from entry import run

run("performance.bench.remote_agent_main")
