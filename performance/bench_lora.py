#!/usr/bin/env python3
"""Measures how much LoRA adapters slow down the steps of an agent: ``python performance/bench_lora.py``."""

from entry import run

run("performance.bench.lora_main")
