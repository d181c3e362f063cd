#!/usr/bin/env python3
"""Measures the engine without HTTP: ``python performance/bench_engine.py --config llama_160m_cpu.yaml --json FILE``."""

from entry import run

run("performance.bench.engine_main")
