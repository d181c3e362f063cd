#!/usr/bin/env python3
"""Starts the server and its agents, for example: ``python start_server.py --config llama_tiny_cpu.yaml``."""

import sys

from llm_serving.commands.own_python import use_own_python

if __name__ == "__main__":
    use_own_python()

    from llm_serving.launcher import main

    sys.exit(main())
