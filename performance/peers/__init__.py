"""Compares this engine with other engines (peers). Each peer has its own virtual environment.

    compare         runs the driver programs of the peers, and compares their figures with this engine's
    auto            installs the peers, and compares all engines, which run the default model in alternation
    same_file       compares this engine with llama.cpp on one GGUF file, in alternating runs
    driver          the measurement, which is the same for all peers; it uses only the standard library
    *_driver        the driver program of one peer, which runs in the peer's virtual environment
    model_folder    writes the benchmark's model as a Hugging Face folder with random weights
    gguf_folder     converts the folder that model_folder wrote to a GGUF file for llama.cpp

The programs are performance/compare_peers.py and performance/compare_llama_cpp.py. docs/lab/performance.md describes
the setup of the peers.
"""
