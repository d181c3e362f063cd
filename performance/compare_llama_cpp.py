#!/usr/bin/env python3
"""Compares this engine with llama.cpp on the same GGUF file: ``python performance/compare_llama_cpp.py --help``."""

from entry import run

run("performance.peers.same_file")
