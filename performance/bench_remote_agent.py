#!/usr/bin/env python3
"""Compares an agent behind a network link with a local agent: ``python performance/bench_remote_agent.py``."""

from entry import run

run("performance.bench.remote_agent_main")
