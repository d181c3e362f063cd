"""The client side of a comparison with other engines. Each peer lives in a virtual environment of its own.

    compare         runs the drivers with the peers' Pythons, and puts their figures beside ours
    driver          the measurement, the same for all peers; standard library only
    *_driver        one peer each: a program for that peer's Python
    model_folder    the benchmark's shape as a Hugging Face folder with random weights, for the peers to convert
    gguf_folder     the same for llama.cpp

The program is performance/compare_peers.py; docs/performance.md has the setup of the peers.
"""
