#!/usr/bin/env python3
"""Start the server and its agents: ``python start_server.py --config llama_tiny_cpu.yaml``. See ``--help``."""

import sys

from llm_serving.launcher import main

if __name__ == "__main__":
    sys.exit(main())
