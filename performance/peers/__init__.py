"""Compares this engine with others. Each of the others (a peer) has its own virtual environment.

    compare         runs the drivers with the peers' Pythons, and compares the figures
    driver          the measurement, equal for all peers; it uses only the standard library
    *_driver        a program for one peer's Python
    model_folder    writes the benchmark's model as a Hugging Face folder with random weights
    gguf_folder     writes it for llama.cpp

The program is performance/compare_peers.py. docs/performance.md describes the setup of the peers.
"""
